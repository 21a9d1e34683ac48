"""What the host does for a call on GPUs, on a device that does nothing: no GPU is needed.

    python benchmarks/cuda_host_time.py [--json benchmarks/results/cpu/cuda_host_time.json]

Eight ranks, one communication tile each. `native` is the one native call that puts everything on
streams, without the driver's own time; `Python` is all else of op(x, weight): checks, outputs, and
the way there. Medians over batches of calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import ROOT, markdown

import flux
from flux import _C, host
from flux.kernels.config import GemmConfig
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry
from flux.transport.virtual import VirtualWorld

WORLD, M, N, K = 8, 64, 1024, 512
BATCH, BATCHES = 200, 41


class NullRegistry(Registry):
    """Kernels that do anything."""

    def candidates(self, op: str, *_: object, **__: object) -> list[BuiltKernel]:
        return [self.kernels[op]]


class NullDevice:
    """A flux.backends.device.Device on which everything is done at once."""

    torch_device = torch.device("cpu")
    index = 0
    sm_count = 132
    queues = 32
    capability = (9, 0)
    identity = "null"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.driver = _C.Driver(str(library))
        config = GemmConfig("ag_gemm", "90a", "bf16", (128, 128, 64), "pingpong")
        kernels = {
            op: BuiltKernel(config, library, f"flux_null_{op}", Usage())
            for op in ("ag_gemm", "gemm_rs")
        }
        self.registry = NullRegistry((), kernels, (), (), ())

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def current_stream(self) -> int:
        return 1

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        yield

    def enqueue(self, body: Callable[[], None]) -> None:
        body()

    def is_current(self) -> bool:
        return True

    def made_current(self) -> nullcontext[None]:
        return nullcontext()

    def capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Done."""

    def keep(self, *tensors: torch.Tensor) -> None:
        """Nobody reads them."""


def build(folder: Path) -> Path:
    """The library, built with the host's C++ compiler."""
    target = folder / "libnull_gpu.so"
    source = Path(__file__).with_name("null_gpu.cpp")
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    command = [os.environ.get("CXX", "c++"), *options, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def microseconds(call: Callable[[], object]) -> list[float]:
    """Time per call, of each batch."""
    times = []
    for _ in range(BATCHES):
        begin = time.perf_counter_ns()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter_ns() - begin) / BATCH / 1e3)
    return times


class Recorded:
    """Stands in for the native op, and keeps the arguments of the last call."""

    def __init__(self, native: _C.CudaOp) -> None:
        self._native = native
        self.last: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if name not in ("ag_gemm", "gemm_rs"):
            return found

        def call(*arguments: Any) -> Any:
            self.last = lambda: found(*arguments)
            return found(*arguments)

        return call


def measure(device: NullDevice, op: str) -> dict[str, Any]:
    gathers = op == "ag_gemm"
    make = {"ag_gemm": flux.AGGemm, "gemm_rs": flux.GemmRS, "gemm_ar": flux.GemmAR}[op]
    with VirtualWorld(WORLD, device) as world:
        made = make(world.rank(3), max_m=M, n=N, k=K, dtype=torch.bfloat16)
        knobs = made.schedule(M).knobs
        rows, depth = (M // WORLD, K) if gathers else (M, K // WORLD)
        x = torch.zeros(rows, depth, dtype=torch.bfloat16)
        weight = torch.zeros(N // WORLD if gathers else N, depth, dtype=torch.bfloat16)
        backend = made._backend
        recorded = backend.native = Recorded(backend.native)
        made(x, weight)
        backend.native = recorded._native
        with torch.no_grad():
            whole = microseconds(lambda: made(x, weight))
            native = microseconds(recorded.last)
        made.close()
    return {
        "op": op,
        "comm_tile_rows": knobs.comm_tile_rows,
        "whole_us": whole,
        "native_us": native,
    }


def table(content: dict[str, Any]) -> str:
    """Markdown of one run."""
    rows = []
    for entry in content["ops"]:
        whole, native = (statistics.median(entry[f"{key}_us"]) for key in ("whole", "native"))
        rows.append([entry["op"], f"{native:.1f}", f"{whole - native:.1f}", f"{whole:.1f}"])
    header = [f"op, {content['world']} ranks", "native us", "Python us", "in all us"]
    return f"{markdown(header, rows)}\n\n{content['device']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        device = NullDevice(build(Path(folder)))
        found = [measure(device, op) for op in ("ag_gemm", "gemm_rs", "gemm_ar")]
    content = {
        "command": "python benchmarks/cuda_host_time.py",
        "world": WORLD, "m": M, "n": N, "k": K,
        "device": host.device(),
        "versions": host.versions(),
        "ops": found,
    }  # fmt: skip
    print(table(content))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
