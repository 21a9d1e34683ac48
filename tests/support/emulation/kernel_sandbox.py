"""A checkout of its own for tests that build kernels: copied sources, a fake nvcc, a fake CUTLASS.

The fake nvcc takes a unit apart like the real one would: it prints a ptxas report for each config,
writes what it was told to, and can be told to take its time or to fail.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from flux.cli.app import app
from flux.kernels import sources
from flux.kernels.build import GPU, Target, Tools
from flux.kernels.config import GROUPED, OPS
from flux.machine import toolchain
from scripts import start_interruptible

ROOT = Path(__file__).resolve().parents[3]

_FAKE_NVCC = r"""
import json, os, re, sys, time

folder = os.environ["FAKE_NVCC"]
settings = json.load(open(f"{folder}/settings.json"))
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print(f"Cuda compilation tools, release 13.0, V{settings['version']}")
    sys.exit()
compiling = "-c" in arguments
with open(f"{folder}/calls.jsonl", "a") as log:
    call = {"arguments": arguments, "pid": os.getpid(), "compiling": compiling, "at": time.time()}
    call["TMPDIR"] = os.environ.get("TMPDIR")
    log.write(json.dumps(call) + "\n")
output = arguments[arguments.index("-o") + 1]
if not compiling:
    objects = [argument for argument in arguments if argument.endswith(".o")]
    open(output, "w").write("".join(open(name).read() for name in objects))
    sys.exit()
with open(output, "w") as file:  # half a file, for as long as it takes
    file.write("half")
time.sleep(settings["seconds"])
source = open(arguments[arguments.index("-c") + 1]).read()
structs = re.findall(r"struct (\w+) \{", source)
if settings["fail"] and settings["fail"] in source:
    print("In file included from kernels.cu:3:", file=sys.stderr)
    print('cute/layout.hpp(42): error: static assertion failed with "Shapes do not match"',
          file=sys.stderr)
    print("1 error detected in the compilation of kernels.cu.", file=sys.stderr)
    sys.exit(2)
for struct in structs:
    name = f"_ZN7cutlass13device_kernelI{len(struct)}{struct}EEvv"
    print(f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'", file=sys.stderr)
    print(f"ptxas info    : Function properties for {name}", file=sys.stderr)
    spill = settings["spill"]
    print(f"    {spill} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads",
          file=sys.stderr)
    print("ptxas info    : Used 168 registers, used 1 barriers", file=sys.stderr)
open(output, "w").write(source)
"""


@dataclass
class Sandbox:
    """``root`` is a checkout; ``cache`` is where its kernels go unless told otherwise."""

    root: Path
    settings: dict[str, Any] = field(
        default_factory=lambda: {"version": "13.0.88", "seconds": 0, "fail": "", "spill": 0}
    )

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def csrc(self) -> Path:
        return self.root / "csrc"

    @property
    def environment(self) -> dict[str, str]:
        """For processes: no toolchain but the fakes."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "FAKE_NVCC": str(self.root / "fake"),
            "CUDA_HOME": str(self.root / "cuda"),
            "PYTHONPATH": str(self.root / "packages"),
            "FLUX_KERNEL_CACHE": str(self.cache),
            "FLUX_CCACHE": "0",  # the machine's ccache does not understand the fake
        }

    def set(self, **settings: Any) -> None:
        """Configure the fake nvcc: ``version``, ``seconds`` per call, the source to ``fail`` on."""
        self.settings.update(settings)
        path = self.root / "fake" / "settings.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.settings))

    def calls(self, compiling: bool = True) -> list[dict[str, Any]]:
        """How nvcc was called, to compile or to link."""
        path = self.root / "fake" / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in map(json.loads, lines) if call["compiling"] is compiling]

    def tools(self, target: Target = GPU) -> Tools:
        """What ``build.find_tools`` finds here, for use in this process."""
        nvcc = toolchain.Tool(
            self.settings["version"], str(self.root / "cuda/bin/nvcc"), "CUDA_HOME"
        )
        include = self.root / "packages/cutlass_library/source/include"
        cutlass = toolchain.Tool("4.2.0.0", str(include), "package nvidia-cutlass")
        return Tools(nvcc, cutlass, self.csrc, target=target)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """`flux compile`, as builds run it: without torch."""
        return start_interruptible(
            [sys.executable, str(self.root / "tools/compile_kernels.py"), *arguments],
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def compile(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`flux compile` in this process, or as ``start`` if that is to build for the machine."""
        if "--emulated" in arguments:
            return self.run_script(*arguments)
        importlib.invalidate_caches()
        environment = mock.patch.dict(os.environ, {**self.environment, **variables}, clear=True)
        path = mock.patch.object(sys, "path", [str(self.root / "packages"), *sys.path])
        with environment, path:
            result = CliRunner().invoke(app, ["compile", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return subprocess.CompletedProcess(
            arguments, result.exit_code, result.stdout, result.stderr
        )

    def run_script(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start it, and wait for its end."""
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def built(self, root: Path | None = None) -> list[Path]:
        """Shared objects in their places."""
        return sorted((root or self.cache).glob("libflux_*/*.so"))

    def leftovers(self) -> list[str]:
        """Return files in the cache other than libraries and locks."""
        return [
            path.name
            for path in self.cache.iterdir()
            if path.name != ".locks" and not (path / f"{path.name}.so").is_file()
        ]


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox(tmp_path / "checkout")
    package = made.root / "flux"
    package.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("cli", "core", "kernels", "machine"):
        shutil.copytree(ROOT / "flux" / part, package / part)  # with compiled modules
    shutil.copytree(ROOT / "csrc/core", made.csrc / "core", ignore=ignored)
    (made.csrc / "cuda").mkdir()
    shutil.copy(ROOT / "csrc/cuda/abi.h", made.csrc / "cuda")
    for arch in ("sm80", "sm90"):
        for op in OPS:
            moe, own = f"cuda_moe/{arch}.cuh", f"cuda/gemm/{arch}/{op}.cuh"
            header = made.csrc / (moe if op in GROUPED else own)
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text('#include "cuda/gemm/common.cuh"\n#include "cutlass/cutlass.h"\n')
    (made.csrc / "cuda/gemm/common.cuh").write_text('#include "cuda/abi.h"\n')
    (made.root / "tools").mkdir()
    for name in ("compile_kernels.py", "ptx_target.py"):
        shutil.copy(ROOT / "tools" / name, made.root / "tools")
    shutil.copytree(ROOT / "ptx_machine/cudart", made.root / "ptx_machine/cudart")
    fake = made.root / "fake/nvcc.py"
    _program(fake, _FAKE_NVCC)
    interpreter = f'#!/bin/sh\nexec {sys.executable} -S -E {fake} "$@"\n'
    _program(made.root / "cuda/bin/nvcc", interpreter)
    packages = made.root / "packages"
    headers = packages / "cutlass_library/source/include/cutlass"
    headers.mkdir(parents=True)
    (packages / "cutlass_library/__init__.py").write_text("")
    (headers / "cutlass.h").write_text("")
    (packages / "cutlass_library/source/tools/util/include").mkdir(parents=True)
    info = packages / "nvidia_cutlass-4.2.0.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n"
    (info / "METADATA").write_text(metadata)
    made.set()
    for name in ("FAKE_NVCC", "CUDA_HOME", "FLUX_KERNEL_CACHE", "FLUX_CCACHE"):
        monkeypatch.setenv(name, made.environment[name])
    monkeypatch.setattr(sources, "_PACKAGE", package)
    return made
