"""What the host does for a call on GPUs, on a device that does nothing: no GPU is needed.

    python benchmarks/cuda_host_time.py [--json benchmarks/results/cpu/cuda_host_time.json]

Eight ranks, with one communication tile each as in decoding, and with M = 8192 of the Flux paper.
`native` is the one native call that puts everything on streams, without the driver's own time;
`Python` is all else of op(x, weight): checks and the way there, without the memory of the result,
which a GPU's allocator keeps and the CPU's maps anew when it is large; `80 layers` is the same in a
loop over 80 weights that share the op. Medians over batches of calls. `driver calls` are those of
one call: launches, copies, events, batches of memory operations.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
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
from common import ROOT, keep, markdown, sizes

import flux
from flux import _C
from flux.kernels.config import GemmConfig
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry
from flux.machine import host
from flux.transport.virtual import VirtualWorld

WORLD = 8
SHAPES = {"decode": (64, 1024, 512), "paper": (8192, 49152, 12288)}  # M, N, K; swapped for GemmRS
LAYERS = 80  # that share an op
BATCH, BATCHES = 2 * LAYERS, 41


class NullRegistry(Registry):
    """Kernels that do anything."""

    def candidates(self, op: str, *_: object, **__: object) -> list[BuiltKernel]:
        return [self.kernels[op]]


class NullDevice:
    """A flux.transport.device.Device on which everything is done at once."""

    torch_device = torch.device("cpu")
    index = 0
    sm_count = 132
    queues = 32
    capability = (9, 0)
    identity = "null"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.null_listed.restype = ctypes.c_char_p
        self.driver = _C.Driver(str(library))
        config = GemmConfig("ag_gemm", "90a", "bf16", (128, 128, 64), "pingpong")
        kernels = {
            op: BuiltKernel(config, library, f"flux_null_{op}", Usage())
            for op in ("ag_gemm", "gemm_rs")
        }
        self.registry = NullRegistry((), kernels, (), (), ())

    def calls_of(self, call: Callable[[], object]) -> list[str]:
        """Names of the driver calls that ``call`` makes."""
        self._library.null_list()
        call()
        return str(self._library.null_listed().decode()).splitlines()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def current_stream(self) -> int:
        return 1

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        yield

    def peer_atomics(self, identity: str) -> bool:
        return True

    def enqueue(self, body: Callable[[], None]) -> None:
        body()

    def is_current(self) -> bool:
        return True

    def made_current(self) -> nullcontext[None]:
        return nullcontext()

    def synchronize(self) -> None:
        """Done."""

    def keep(self, *tensors: torch.Tensor) -> None:
        """Do nothing: the device does not read them."""


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
        member = getattr(self._native, name)
        if name not in ("ag_gemm", "gemm_rs"):
            return member

        def call(*arguments: Any) -> Any:
            self.last = lambda: member(*arguments)
            return member(*arguments)

        return call


def in_short(calls: list[str]) -> str:
    """Names one after the other, what is repeated once: "copy, 7 x (wait, copy), kernel"."""
    parts, at = [], 0
    while at < len(calls):
        best = (1, 1)  # calls of a group, times
        for size in (1, 2, 3):
            group, times = calls[at : at + size], 1
            while calls[at + times * size : at + (times + 1) * size] == group:
                times += 1
            if times > 1 and times * size > best[0] * best[1]:
                best = (size, times)
        size, times = best
        text = ", ".join(calls[at : at + size])
        parts.append(text if times == 1 else f"{times} x ({text})")
        at += size * times
    return ", ".join(parts)


def rows_of_nothing(rows: int, columns: int) -> torch.Tensor:
    """A tensor of that shape without gaps, whose memory is not touched."""
    return torch.empty(rows, columns, dtype=torch.bfloat16)


def measure(device: NullDevice, op: str, size: str) -> dict[str, Any]:
    gathers = op == "ag_gemm"
    m, n, k = SHAPES[size]
    if not gathers:
        n, k = k, n
    make = {"ag_gemm": flux.AGGemm, "gemm_rs": flux.GemmRS, "gemm_ar": flux.GemmAR}[op]
    with VirtualWorld(WORLD, device) as world:
        made = make(world.rank(3), max_m=m, n=n, k=k, dtype=torch.bfloat16)
        knobs = made.schedule(m).knobs
        rows, depth = (m // WORLD, k) if gathers else (m, k // WORLD)
        x = rows_of_nothing(rows, depth)
        weight = rows_of_nothing(n // WORLD if gathers else n, depth)
        layers = itertools.cycle([weight.view_as(weight) for _ in range(LAYERS)])
        backend = made._backend
        recorded = backend.native = Recorded(backend.native)
        made(x, weight)
        backend.native = recorded._native
        with torch.no_grad():
            calls = device.calls_of(lambda: made(x, weight))
            whole = microseconds(lambda: made(x, weight))
            native = microseconds(recorded.last)
            in_turns = microseconds(lambda: made(x, next(layers)))
            shape = made(x, weight).shape
            result = microseconds(lambda: x.new_empty(shape))
        made.close()
    return {
        "op": op,
        "size": size,
        "m": m,
        "n": n,
        "k": k,
        "driver_calls": len(calls),
        "order": in_short(calls),
        "comm_tile_rows": knobs.comm_tile_rows,
        "whole_us": whole,
        "layers_us": in_turns,
        "native_us": native,
        "result_us": result,
    }


def medians(entry: dict[str, Any]) -> list[float]:
    """us of a call, without the result's memory: native, Python, Python in a loop over layers."""
    native, result = (statistics.median(entry[f"{key}_us"]) for key in ("native", "result"))
    python = [entry[key] for key in ("whole_us", "layers_us") if key in entry]
    return [native, *(statistics.median(times) - native - result for times in python)]


def table(content: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """Markdown of one run; with ``before``, of an earlier version, its figures in brackets."""
    rows = []
    for number, entry in enumerate(content["ops"]):
        figures = [str(entry["driver_calls"]), *(f"{us:.1f}" for us in medians(entry))]
        if before is not None:
            old = before["ops"][number]
            were = [str(old["driver_calls"]), *(f"{us:.1f}" for us in medians(old))]
            pairs = itertools.zip_longest(figures, were)
            figures = [now if was is None else f"{now} ({was})" for now, was in pairs]
        rows.append([f"{entry['op']} {sizes(entry)}", *figures])
    columns = ["driver calls", "native us", "Python us", "80 layers us"]
    header = [f"{content['world']} ranks, M x N x K", *columns]
    return f"{markdown(header, rows)}\n\n{content['device']}"


def orders(content: dict[str, Any]) -> str:
    """What each call asks of the driver, in order."""
    return "\n".join(f"{e['op']}, M = {e['m']}: {e['order']}" for e in content["ops"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        device = NullDevice(build(Path(folder)))
        ops = ("ag_gemm", "gemm_rs", "gemm_ar")
        measurements = [measure(device, op, size) for size in SHAPES for op in ops]
    content = {
        "command": "python benchmarks/cuda_host_time.py",
        "world": WORLD,
        "device": host.device(),
        "versions": host.versions(),
        "ops": measurements,
    }  # fmt: skip
    print(table(content), orders(content), sep="\n\n")
    if options.json:
        keep(content, options.json)


if __name__ == "__main__":
    main()
