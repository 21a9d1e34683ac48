"""Builds one library of kernels: with which tools, under which key, and how it gets into place."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from flux import env, toolchain
from flux.kernels import manifest, ptxas, sources, trust
from flux.kernels.children import Cancelled, Children
from flux.kernels.config import GemmConfig
from flux.kernels.generator import library_name, symbol, translation_unit
from flux.kernels.manifest import DamagedLibraryError, Library
from flux.wholefile import write_whole

SOURCE = "kernels.cu"
_OBJECT = "kernels.o"
_EXCERPT_LINES = 12

T = TypeVar("T")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",
)
_CODE = {
    # The fallback on newer GPUs: code for Hopper as well, where it is used beside sm_90a (both from
    # one front-end run), and PTX for what comes after.
    "80": "arch=compute_80,code=[sm_80,sm_90,compute_80]",
    "90a": "arch=compute_90a,code=sm_90a",
}
LINK_FLAGS = (
    "-shared",
    # Static: no libcudart of a particular version has to be found at run time.
    "-cudart=static",
    "-Xlinker=--exclude-libs=ALL",
    # What is missing shows here, rather than when the library is loaded.
    "-Xlinker=--no-undefined",
)
# Variables that nvcc reads by itself.
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


def inherited_flags() -> list[str]:
    """What nvcc takes from the environment."""
    return [f"{name}={os.environ[name]}" for name in _NVCC_VARIABLES if name in os.environ]


class MissingToolError(RuntimeError):
    """Something without which no kernel can be built; the message says how to get it."""


class CompileError(RuntimeError):
    """A library did not compile; the message names its configs and has nvcc's first errors."""


@dataclass(frozen=True)
class Tools:
    """What builds kernels: programs, headers, versions."""

    nvcc: toolchain.Tool
    cutlass: toolchain.Tool
    csrc: Path
    ccache: str | None = None

    def flags(self, arch: str) -> tuple[str, ...]:
        """Of the compiler, but for where things lie; with what nvcc takes from the environment."""
        return (*FLAGS, f"-gencode={_CODE[arch]}", *inherited_flags())

    def compile_command(self, arch: str) -> list[str]:
        """To be run in the directory that has the source."""
        prefix = [self.ccache] if self.ccache else []
        # CUDA's own headers and libraries are found by nvcc, its package's too.
        headers = [str(self.csrc), *toolchain.cutlass_includes(self.cutlass)]
        flags = [*FLAGS, f"-gencode={_CODE[arch]}", *(f"-I{directory}" for directory in headers)]
        return [*prefix, self.nvcc.path, *flags, "-c", SOURCE, "-o", _OBJECT]

    def link_command(self, output: str) -> list[str]:
        """To be run in the same directory."""
        return [self.nvcc.path, *LINK_FLAGS, _OBJECT, "-o", output]


def find_tools() -> Tools:
    """nvcc, CUTLASS and our headers.

    Raises:
        MissingToolError: one of them is not there, or does not work.
    """
    nvcc, cutlass, csrc = toolchain.nvcc(), toolchain.cutlass(), sources.csrc()
    if nvcc is None:
        raise MissingToolError(
            "nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or the nvidia-cuda-nvcc package: "
            "install the CUDA toolkit, or pip install nvidia-cuda-nvcc"
        )
    if nvcc.problem:
        raise MissingToolError(f"nvcc cannot be used: {nvcc.describe()}")
    if cutlass is None:
        raise MissingToolError("CUTLASS was not found: pip install nvidia-cutlass==4.2.0.0")
    if csrc is None:
        raise MissingToolError(
            "flux's CUDA headers were not found, neither beside the package nor in it: "
            "install flux-overlap again"
        )
    ccache = shutil.which("ccache") if env.CCACHE.get() else None
    return Tools(nvcc, cutlass, csrc, ccache)


@dataclass(frozen=True)
class Unit:
    """One library to be built: its configs and what identifies it."""

    configs: tuple[GemmConfig, ...]
    sources: str
    key: str
    traced: bool = False

    @property
    def name(self) -> str:
        """Of the library."""
        return library_name(self.configs, self.key, self.traced)

    @property
    def arch(self) -> str:
        return self.configs[0].arch

    @property
    def what(self) -> str:
        """For people: what it has, in a few words."""
        first = self.configs[0]
        build = " traced" if self.traced else ""
        return f"{first.op} sm_{first.arch} {first.dtype}{build} x{len(self.configs)}"


def make_unit(configs: Sequence[GemmConfig], tools: Tools, traced: bool = False) -> Unit:
    """Compute the key of a library of these configs, as these tools would build it."""
    hashed = sources.sources_hash(configs, tools.csrc, traced)
    key = sources.library_key(
        hashed,
        cutlass=tools.cutlass.version or "unknown",
        nvcc=tools.nvcc.version or "unknown",
        flags=(*tools.flags(configs[0].arch), *LINK_FLAGS),
    )
    return Unit(tuple(configs), hashed, key, traced)


def build(
    unit: Unit,
    root: Path,
    tools: Tools,
    children: Children,
    started: Callable[[], None] = lambda: None,
) -> tuple[Library, bool]:
    """Build ``unit`` in ``root`` unless it is there; returns it, and whether it was built now.

    One of several processes that want the same library builds it, while the others wait. It is
    made in a directory of its own and renamed into place, so that nobody sees half of it.

    Args:
        started: called when compiling starts.

    Raises:
        CompileError: it does not compile or link.
        Cancelled: ``children`` were killed meanwhile.
        OSError: ``root`` cannot be written.
    """
    make = partial(_build_in, unit=unit, root=root, tools=tools, children=children)
    return in_place(root, unit.name, manifest.read, make, children, started)


def in_place(
    root: Path,
    name: str,
    read: Callable[[Path], T],
    make: Callable[[Path], None],
    children: Children,
    started: Callable[[], None] = lambda: None,
) -> tuple[T, bool]:
    """See to it that ``root`` has the directory ``name``; what ``read`` finds in it, and whether it
    was made now: by ``make``, in an empty directory that is renamed afterwards.

    Raises:
        UntrustedError: another user can write or replace ``root``, or what is there.
        Cancelled: ``children`` were killed meanwhile.
        OSError: ``root`` cannot be written.
    """
    trust.check(root)
    guard = manifest.lock(root, name)
    _acquire(guard, children.cancelled)
    try:
        directory = root / name
        if directory.exists():
            try:
                return read(directory), False
            except DamagedLibraryError as error:
                manifest.set_aside(directory, str(error))
        started()
        # A name that does not change, so that ccache sees the same paths; whoever left such a
        # directory behind is dead, or it would have the lock.
        staging = root / f".building-{name}"
        if staging.is_symlink():  # which rmtree does not remove, and mkdir does not follow
            staging.unlink()
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            make(staging)
            trust.keep_others_out(staging)
            os.rename(staging, directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return read(directory), True
    finally:
        guard.release()


def _acquire(guard: FileLock, cancelled: threading.Event) -> None:
    while True:
        if cancelled.is_set():
            raise Cancelled
        try:
            guard.acquire(timeout=0.2)
        except Timeout:
            continue
        return


def _build_in(staging: Path, unit: Unit, root: Path, tools: Tools, children: Children) -> None:
    begin = time.monotonic()
    library = f"{unit.name}.so"
    text = translation_unit(unit.configs, unit.traced)
    (staging / SOURCE).write_text(text, encoding="utf-8")
    commands = (tools.compile_command(unit.arch), tools.link_command(library))
    report = run_all(commands, staging, children, _names(unit), failure_log(root, unit.name))
    seconds = time.monotonic() - begin
    # The headers may have been edited since the key was computed.
    if sources.sources_hash(unit.configs, tools.csrc, unit.traced) != unit.sources:
        raise CompileError(f"{_names(unit)}: headers changed while this was compiled; try again")
    (staging / f"{unit.name}.ptxas.txt").write_text(report, encoding="utf-8")
    path = staging / library
    usage = ptxas.usage(report, unit.configs)
    manifest.write(
        Library(
            name=unit.name,
            size=path.stat().st_size,
            sha256=manifest.file_hash(path),
            abi_version=sources.abi_version(tools.csrc),
            arch=unit.arch,
            nvcc=tools.nvcc.version or "unknown",
            cutlass=tools.cutlass.version or "unknown",
            flags=tools.flags(unit.arch),
            sources=unit.sources,
            key=unit.key,
            traced=unit.traced,
            kernels={symbol(config, unit.traced): config for config in unit.configs},
            usage={symbol(config, unit.traced): usage[config.name] for config in unit.configs},
            warnings=tuple(ptxas.warnings(report)),
            seconds=seconds,
        ),
        staging,
    )
    (staging / _OBJECT).unlink()


def run_all(
    commands: Sequence[Sequence[str]], staging: Path, children: Children, what: str, log: Path
) -> str:
    """Run compiler and linker in ``staging``; what they said.

    Raises:
        CompileError: one of them failed at ``what``; ``log`` has all that it said.
        Cancelled, OSError: see ``Children.run``.
    """
    temporary = staging / "tmp"
    temporary.mkdir()
    # nvcc's temporary files go where they are removed even if it is killed.
    variables = {**os.environ, "TMPDIR": str(temporary), "CCACHE_NOHASHDIR": "1"}
    report = ""
    for command in commands:
        status, output = children.run(command, staging, variables)
        if status != 0:
            raise _failure(what, log, command, status, output)
        report += output
    shutil.rmtree(temporary)
    log.unlink(missing_ok=True)
    return report


def failure_log(root: Path, name: str) -> Path:
    """Where all that nvcc said is kept when a library does not compile."""
    return root / f"{name}.failed.txt"


def _failure(
    what: str, log: Path, command: Sequence[str], status: int, output: str
) -> CompileError:
    write_whole(log, f"{' '.join(command)}\n{output}")
    how = f"exit status {status}" if status > 0 else f"signal {-status}"
    if re.search(r"\bKilled\b|out of memory", output) or status == -9:
        how += ", probably for want of memory: try --jobs 1"
    excerpt = "\n".join(f"  {line}" for line in first_errors(output))
    return CompileError(f"{what}: nvcc failed ({how}):\n{excerpt}\n  all of it: {log}")


def _names(unit: Unit) -> str:
    return ", ".join(config.name for config in unit.configs)


def first_errors(output: str) -> list[str]:
    """The lines of a compiler's output that matter most: from the first error on."""
    lines = [line for line in output.splitlines() if line.strip()]
    error = re.compile(r"\b(error|fatal|undefined reference|No such file)\b", re.IGNORECASE)
    first = next((index for index, line in enumerate(lines) if error.search(line)), None)
    if first is None:
        return lines[-_EXCERPT_LINES:]
    return lines[first : first + _EXCERPT_LINES]
