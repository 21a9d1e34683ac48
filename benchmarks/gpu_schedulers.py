"""One GPU: time kernels by tile scheduler, alone and beside a kernel that holds multiprocessors.

    python benchmarks/gpu_schedulers.py benchmarks/results/h100/tile_scheduler.json

The other kernel is a plain GEMM on TAKEN multiprocessors of another stream, as NCCL's kernels would
hold them. It begins before and ends after the kernel that is timed. Of each op and tile scheduler
the kernel that costs least takes part, and the static one also with a margin of TAKEN. All signals
are raised, so no kernel waits for rows. A round has all ways, alone and beside, in an order that
rotates; figures are medians, and ratios are formed within a round. Results are checked first.
Simulated: tile_scheduler.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import keep, markdown
from gpu_kernels import (
    COPIES,
    SHAPES,
    SLEEP_CYCLES,
    WORLD,
    Shape,
    checked,
    complaints_of,
    ratio,
    usable,
)

from flux.core.knobs import TILE_SCHEDULERS
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel
from flux.machine import host
from flux.select.cycles import cost
from flux.transport.device import CudaDevice

ROWS = (8192, 2048)
TAKEN = 24
ROUNDS = 21
WARM_UP = 3
WHERE = ("alone", "beside")
LEAD_CYCLES = SLEEP_CYCLES // 20
"""Some 0.25 ms, in which the other kernel takes its multiprocessors."""


def cheapest(device: CudaDevice, op: str, problem: GemmProblem, scheduler: str) -> BuiltKernel:
    """Return the built kernel of an op with this tile scheduler that costs least.

    Raises:
        SystemExit: there is none.
    """
    kernels = [
        built
        for built in usable(device, op, "bf16", problem)
        if built.config.tile_scheduler == scheduler and built.config.schedule != "stream_k"
    ]
    if not kernels:
        raise SystemExit(f"no {scheduler} kernel of {op} is built: flux compile --set default")
    return min(kernels, key=lambda built: cost(built.config, problem, device.sm_count))


def one_time(run: Callable[[int], None], other: Callable[[int], None] | None, index: int) -> float:
    """Return the ms of a kernel, behind the begin of the other one on another stream.

    Raises:
        RuntimeError: the other one ended first, or the host was late.
    """
    begin, end, awake, ended = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    aside = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake.record()
    if other is not None:
        with torch.cuda.stream(aside):
            aside.wait_event(awake)
            other(index)
            ended.record()
        torch.cuda._sleep(LEAD_CYCLES)
    begin.record()
    run(index)
    end.record()
    late = awake.query()
    torch.cuda.synchronize()
    if late:
        raise RuntimeError("the host is too slow: launches are in the times")
    if other is not None and end.elapsed_time(ended) <= 0:
        raise RuntimeError("the other kernel ended first")
    return begin.elapsed_time(end)


def ways_of(
    device: CudaDevice, shape: Shape, op: str, problem: GemmProblem
) -> tuple[dict[str, Callable[[int], None]], list[str]]:
    """Return the calls of each way by name, and what is wrong with their results."""
    kernels = {scheduler: cheapest(device, op, problem, scheduler) for scheduler in TILE_SCHEDULERS}
    _, errors = checked(shape, kernels.values())
    ways = {name: shape.method(built) for name, built in kernels.items()}
    ways[f"static, a margin of {TAKEN}"] = shape.method(
        kernels["static"], sm_count=device.sm_count - TAKEN
    )
    return ways, complaints_of(errors, "bf16")


def run_shape(device: CudaDevice, op: str, m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Check and time all ways at one shape."""
    shape = Shape(device, m, n, k, "bf16")
    ways, complaints = ways_of(device, shape, op, GemmProblem(m, n, k, WORLD))
    plain = usable(device, "gemm", "bf16", GemmProblem(m, n, k))[0]
    other = Shape(device, m, n, k, "bf16").method(plain, sm_count=TAKEN)
    entries = [(f"{name}, {where}", run, where) for name, run in ways.items() for where in WHERE]
    times: dict[str, list[float]] = {name: [] for name, _, _ in entries}
    for round_ in range(rounds + WARM_UP):
        turn = round_ % len(entries)
        for name, run, where in entries[turn:] + entries[:turn]:
            elapsed = one_time(run, other if where == "beside" else None, round_ % COPIES)
            if round_ >= WARM_UP:
                times[name].append(elapsed)
    base = times["static, alone"]
    return {
        "op": op,
        "m": m,
        "n": n,
        "k": k,
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
        "vs_static_alone": {name: ratio(values, base) for name, values in times.items()},
        "rounds_ms": times,
        "complaints": complaints,
    }


def table(document: dict[str, Any]) -> str:
    """Return the times over the static kernel's alone."""
    names = list(document["shapes"][0]["vs_static_alone"])
    rows = [
        [f"{s['op']} {s['m']}", *(f"{s['vs_static_alone'][name]['median']:.2f}" for name in names)]
        for s in document["shapes"]
    ]
    return markdown(["op, M", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds of timing")
    options = parser.parse_args()
    device = CudaDevice()
    shapes: list[dict[str, Any]] = []
    content: dict[str, Any] = {
        "command": "python benchmarks/gpu_schedulers.py",
        "device": torch.cuda.get_device_name(device.index),
        "versions": host.versions(),
        "taken": TAKEN,
        "shapes": shapes,
    }
    for m in ROWS:
        for op, n, k in SHAPES:
            shapes.append(run_shape(device, op, m, n, k, options.rounds))
            keep(content, options.target)
    print(table(content))
    raise SystemExit(1 if any(shape["complaints"] for shape in shapes) else 0)


if __name__ == "__main__":
    main()
