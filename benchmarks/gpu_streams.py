"""One GPU: what copies and stream memory operations take, alone and while a kernel fills the GPU.

    python benchmarks/gpu_streams.py benchmarks/results/h100/streams.json

Communication of the CUDA backend is made of these: copies by copy engines, words that a stream
writes, and waits of a stream for a word (csrc/cuda_host). Device times are between events around
COUNT operations in a row, enqueued behind a sleep kernel; host times are those of the calls.
Figures are medians of ROUNDS. ``beside`` is the time beside a matrix product on another stream
that lasts longer than what is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import keep, markdown

from flux.machine import host
from flux.transport.device import CudaDevice

MIB = 1 << 20
SIZES = [MIB // 4, 2 * MIB, 8 * MIB, 32 * MIB]
COUNT = 16
ROUNDS = 9
SLEEP_CYCLES = 20_000_000  # some 10 ms, in which everything is enqueued


def measure(
    device: CudaDevice, operation: Callable[[int], None], busy: Callable[[], None] | None
) -> tuple[float, float]:
    """Return device and host time of one operation, in us."""
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    on_device, on_host = [], []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if busy is not None:
            with torch.cuda.stream(other):
                torch.cuda._sleep(SLEEP_CYCLES)
                busy()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES + (SLEEP_CYCLES // 10 if busy else 0))
            begin.record()
            start = time.perf_counter()
            for _ in range(COUNT):
                operation(stream.cuda_stream)
            on_host.append(time.perf_counter() - start)
            end.record()
        torch.cuda.synchronize()
        on_device.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(on_device) / COUNT, 1e6 * statistics.median(on_host) / COUNT


def operations(device: CudaDevice) -> dict[str, tuple[int, Callable[[int], None]]]:
    """Return bytes moved and the call of each operation, by name."""
    driver = device.driver
    word = device.zeros(4, torch.int32)
    far = device.pinned(4, torch.int32)
    made: dict[str, tuple[int, Callable[[int], None]]] = {
        "signal": (0, lambda s: driver.signal(s, word.data_ptr(), 1)),
        "signal host": (0, lambda s: driver.signal(s, far.data_ptr(), 1)),
        "await": (0, lambda s: driver.await_signal(s, word.data_ptr(), 0)),
        "fill 64 words": (0, lambda s: driver.fill(s, words.data_ptr(), 1, 64)),
    }
    words = device.zeros(64, torch.int32)
    here = [torch.empty(max(SIZES), dtype=torch.uint8, device="cuda") for _ in range(2)]
    there = torch.empty(max(SIZES), dtype=torch.uint8, pin_memory=True)
    places = {
        "local": (here[0], here[1]),
        "to host": (there, here[0]),
        "from host": (here[0], there),
    }
    for name, (to, from_) in places.items():
        for size in SIZES:
            pointers = to.data_ptr(), from_.data_ptr(), size

            def copy(stream: int, pointers: tuple[int, int, int] = pointers) -> None:
                driver.copy(stream, *pointers)

            made[f"copy {name} {size}"] = (size, copy)
    return made


def table(document: dict[str, Any]) -> str:
    header = ["operation", "alone us", "beside a GEMM us", "host us", "GB/s"]
    rows = []
    for name, figures in document["operations"].items():
        times = [f"{figures[key]:.1f}" for key in ("device_us", "beside_us", "host_us")]
        rate = f"{figures['gb_per_s']:.0f}" if "gb_per_s" in figures else ""
        *words, size = name.split() if rate else (name, "")
        label = f"{' '.join(words)}, {int(size) / MIB:g} MiB" if rate else name
        rows.append([label, *times, rate])
    return markdown(header, rows)


def main() -> None:
    path = Path(sys.argv[1])
    device = CudaDevice()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def busy() -> None:
        for _ in range(40):  # some 60 ms
            torch.mm(a, b, out=out)

    figures: dict[str, Any] = {}
    for name, (size, operation) in operations(device).items():
        alone, on_host = measure(device, operation, None)
        beside, _ = measure(device, operation, busy)
        figures[name] = {"device_us": alone, "beside_us": beside, "host_us": on_host}
        if size:
            figures[name]["gb_per_s"] = 1e-3 * size / alone
        print(name, {key: round(value, 2) for key, value in figures[name].items()}, flush=True)
    keep(
        {
            "command": "python benchmarks/gpu_streams.py",
            "device": torch.cuda.get_device_name(0),
            "versions": host.versions(),
            "operations": figures,
        },
        path,
    )


if __name__ == "__main__":
    main()
