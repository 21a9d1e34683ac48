"""Where kernels come from: PTX, CUDA source, or a library that holds PTX."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptx_machine._machine import Module, PtxError

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
# kind, version, bytes of this header, bytes behind it, bytes when compressed, ...
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_PTX = 1
_COMPRESSED = 0x2000 | 0x4000 | 0x8000


class UsageError(Exception):
    """What the command cannot do with its options."""


@dataclass(frozen=True)
class Program:
    """A kernel of a module."""

    module: Module
    kernel: str


def load(path: Path, wanted: str | None, arch: str, options: Sequence[str]) -> Program:
    """Return the kernel of a file whose name contains ``wanted``, or its only one.

    Args:
        path: PTX, CUDA source, or a library.
        wanted: part of a kernel's name.
        arch: that nvcc compiles CUDA source for, as in ``90a``.
        options: further ones for nvcc.

    Raises:
        UsageError: there is no such file or kernel, or several; nvcc is missing, or fails.
        PtxError: the PTX cannot be read.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    modules = [Module(text) for text in _texts(path, arch, options)]
    programs = [
        Program(module, kernel)
        for module in modules
        for kernel in module.kernels
        if wanted is None or wanted in kernel
    ]
    if len(programs) == 1:
        return programs[0]
    exact = [program for program in programs if program.kernel == wanted]
    if len(exact) == 1:
        return exact[0]
    if programs:
        names = "".join(f"\n  {program.kernel}" for program in programs)
        raise UsageError(f"{path.name} has several such kernels; choose one by --kernel:{names}")
    names = "".join(f"\n  {kernel}" for module in modules for kernel in module.kernels)
    raise UsageError(f"{path.name} has no kernel with {wanted!r} in its name:{names or ' none'}")


def _texts(path: Path, arch: str, options: Sequence[str]) -> Iterator[str]:
    if path.suffix == ".ptx":
        yield path.read_text(encoding="utf-8")
    elif path.suffix == ".cu":
        yield _compiled(path, arch, options)
    elif path.suffix == ".so":
        yield from ptx_of_library(path.read_bytes(), path.name)
    else:
        raise UsageError(f"{path.name} is neither .ptx nor .cu, .so or .py")


def ptx_of_library(data: bytes, name: str) -> Iterator[str]:
    """Yield the PTX of each fatbinary in a library.

    Raises:
        UsageError: there is none, or it is compressed.
    """
    any_found = False
    begin = data.find(_MAGIC)
    while begin >= 0:
        _, _, header, size = _HEADER.unpack_from(data, begin)
        at, end = begin + header, begin + header + size
        if header != _HEADER.size or end > len(data):  # the number stands in code
            begin = data.find(_MAGIC, begin + 1)
            continue
        while at < end:
            kind, _, bytes_before, bytes_behind, *_, flags = _ENTRY.unpack_from(data, at)
            if kind == _PTX:
                if flags & _COMPRESSED:
                    raise UsageError(f"the PTX in {name} is compressed: nvcc --compress-mode=none")
                text = data[at + bytes_before : at + bytes_before + bytes_behind]
                yield text.split(b"\0", 1)[0].decode()
                any_found = True
            at += bytes_before + bytes_behind
        begin = data.find(_MAGIC, end)
    if not any_found:
        raise UsageError(f"{name} holds no PTX: build it with nvcc -gencode=...,code=compute_...")


def find_nvcc() -> str | None:
    """Return nvcc of CUDA_HOME, PATH or NVIDIA's Python packages."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and os.access(Path(home) / "bin/nvcc", os.X_OK):
        return str(Path(home) / "bin/nvcc")
    if on_path := shutil.which("nvcc"):
        return on_path
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package else []:
        for candidate in sorted(Path(folder).glob("*/bin/nvcc")):
            return str(candidate)
    return None


def _compiled(source: Path, arch: str, options: Sequence[str]) -> str:
    nvcc = find_nvcc()
    if nvcc is None:
        raise UsageError("there is no nvcc: set CUDA_HOME, or pass PTX")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.ptx"
        command = [nvcc, "-std=c++17", "-O3", "-lineinfo", "-ptx", f"-arch=sm_{arch}", *options]
        done = subprocess.run(
            [*command, str(source), "-o", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UsageError(f"nvcc fails:\n{done.stdout}{done.stderr}".rstrip())
        return target.read_text(encoding="utf-8")


__all__ = ["Program", "PtxError", "UsageError", "find_nvcc", "load", "ptx_of_library"]
