"""What the machinery itself costs on the CPU backend: per call, per large GEMM, and in memory.

    python benchmarks/cpu_overhead.py [--calls 2000] [--repeats 21] [--flat-calls 10000]

Three tables go to stdout, all figures to benchmarks/results/cpu/overhead.json.

1. Host cost of a repeated call at M = 1 with a GEMM too small to matter, 2 ranks in lockstep, by
   part.
2. One large GEMM when everything is local already, against a plain torch.mm: with a group of one
   rank, and with 2 ranks whose signals are all there (the native engine is replaced by one that
   never waits and never copies; what remains is dispatch, checks and the walk over the tiles).
3. Resident memory over many calls of changing M.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, keep, markdown, milliseconds

import flux
from flux.bench.metrics import median, slowest_rank
from flux.bench.timing import StartLine, timed
from flux.core.collector import paused_collector
from flux.core.knobs import Op
from flux.core.problem import Problem, ceil_div
from flux.launch.spawn import run_ranks
from flux.machine import host

WORLD = 2
LARGE = (2048, 4096, 2048)
TINY = 64
OPS: dict[str, Any] = {"ag_gemm": flux.AGGemm, "gemm_rs": flux.GemmRS, "gemm_ar": flux.GemmAR}


def inputs(op: str, m: int, n: int, k: int, rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """This rank's x and weight."""
    problem = Problem(Op[op], m, n, k, "float32", world)
    return torch.randn(problem.x_shape(rank)), torch.randn(problem.weight_shape(rank))


COST_ROWS = {
    "call": "whole call",
    "argument checks": "first call with a weight: argument checks",
    "schedule lookup": "first call with a weight: schedule lookup",
    "group of one": "for comparison: the call in a group of one",
}


class TimedEngine:
    """The native engine, with the time that the methods take in each call of an op."""

    def __init__(self, engine: Any) -> None:
        self.inner = engine
        self.calls: list[dict[str, float]] = []  # us by method

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter_ns()
            result = member(*args, **kwargs)
            spent = (perf_counter_ns() - began) * 1e-3
            of_call = self.calls[-1]
            of_call[name] = of_call.get(name, 0.0) + spent
            return result

        setattr(self, name, call)  # found at once from now on: a look-up here costs a microsecond
        return call


class PresetEngine:
    """An engine for which every signal is there and every transfer done."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name in ("begin", "visit_done"):
            return lambda *args, **kwargs: None
        if name in ("wait_entries", "wait_visit", "finish"):
            return lambda *args, **kwargs: True
        return getattr(self._engine, name)


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Median time of one call."""
    call()
    with paused_collector(collect=True):
        return median([timed(call)[1] * 1e3 for _ in range(calls)])


def call_cost(name: str, calls: int, rank: int, alone: dist.ProcessGroup) -> dict[str, float]:
    """us of a repeated call at M = 1 by part; the parts add up to `call`.

    Behind them: what only the first call with a weight does, and the same call without peers.
    """
    x, weight = inputs(name, 1, TINY, TINY, rank, WORLD)
    full_x, full_weight = inputs(name, 1, TINY, TINY, 0, 1)
    m = 1 if name == "ag_gemm" else None
    options = {} if m is None else {"m": m}
    with (
        OPS[name](max_m=1, n=TINY, k=TINY) as op,
        OPS[name](alone, max_m=1, n=TINY, k=TINY) as single,
    ):
        product = microseconds(lambda: torch.mm(full_x, full_weight.t()), calls)
        apart = {
            "argument checks": microseconds(
                lambda: op._checker.check(x, [weight], [None], m), calls
            ),
            "schedule lookup": microseconds(lambda: op.schedule(1), calls),
            "group of one": microseconds(lambda: single(full_x, full_weight, **options), calls),
        }
        engine = TimedEngine(op._backend.engine)
        op._backend.engine = engine
        dist.barrier()
        whole: list[float] = []
        with paused_collector(collect=True):
            for _ in range(calls):
                engine.calls.append({})
                whole.append(timed(lambda: op(x, weight, **options))[1] * 1e3)
        op._backend.engine = engine.inner
    # What waits for a peer varies from call to call. The parts of the calls in the middle half are
    # averaged, because averages of parts add up to the average of the whole; medians do not.
    middle = sorted(range(calls), key=whole.__getitem__)[calls // 4 : calls - calls // 4]
    total = mean(whole[i] for i in middle)
    inside = mean(sum(engine.calls[i].values()) for i in middle)
    begin = mean(engine.calls[i]["begin"] for i in middle)
    parts = {
        "torch.mm": product,
        "engine: begin": begin,
        "engine: peers, copies, reduction": inside - begin,
        "Python": total - inside - product,
    }
    return {**parts, "call": total, **apart}


def large_gemm(
    name: str, repeats: int, rank: int, alone: dist.ProcessGroup
) -> dict[str, list[float]]:
    """ms of a GEMM with everything local, by repeat."""
    m, n, k = LARGE
    x, weight = inputs(name, m, n, k, rank, WORLD)
    x_full = torch.randn(m, k) if name == "ag_gemm" else x
    columns, depth = weight.shape
    line = StartLine(WORLD, threads=1)
    with (
        OPS[name](max_m=m, n=n, k=k) as op,
        OPS[name](alone, max_m=m, n=columns, k=depth) as single,
    ):
        op(x, weight)
        dist.barrier()
        engine = op._backend.engine
        op._backend.engine = PresetEngine(engine)
        calls: dict[str, Callable[[], object]] = {
            "torch.mm": lambda: torch.mm(x_full, weight.t()),
            "world 1": lambda: single(x_full, weight),
            "signals preset": lambda: op(x, weight),
        }
        times: dict[str, list[float]] = {label: [] for label in calls}
        labels = list(calls)
        with torch.no_grad(), paused_collector(collect=True):
            for repeat in range(-2, repeats):
                shift = repeat % len(labels)
                for label in labels[shift:] + labels[:shift]:
                    line.wait()
                    _, elapsed = timed(calls[label])
                    if repeat >= 0:
                        times[label].append(elapsed)
        dist.barrier()  # preset calls write into peers' buffers without asking
        op._backend.engine = engine
    return times


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def memory(name: str, calls: int, rank: int) -> list[int]:
    """Resident KiB after each tenth of the calls; first, after as many to warm up."""
    draw = random.Random(1)
    marks = []
    batch = max(1, calls // 10)
    with OPS[name](max_m=TINY, n=256, k=256) as op:
        for index in range(-batch, calls):
            if index % batch == 0:
                marks.append(resident_kib())
            m = draw.randint(1, TINY)
            options = {"m": m} if name == "ag_gemm" else {}
            op(*inputs(name, m, 256, 256, rank, WORLD), **options)
        marks.append(resident_kib())
    return marks[1:]


def measure(options: dict[str, int], rank: int, progress: Callable[..., None]) -> dict[str, Any]:
    """All of it, for each op; the result counts on rank 0."""
    alone = [dist.new_group([peer]) for peer in range(WORLD)][rank]
    costs, large, resident, workspaces = {}, {}, {}, {}
    for name in OPS:
        progress(name, 0, 0)  # a sign of life: the parent ends ranks that are silent for long
        costs[name] = call_cost(name, options["calls"], rank, alone)
        progress(name, 0, 0)
        everybody: list[Any] = [None] * WORLD
        dist.all_gather_object(everybody, large_gemm(name, options["repeats"], rank, alone))
        large[name] = {
            label: median(slowest_rank([times[label] for times in everybody]))
            for label in everybody[0]
        }
        progress(name, 0, 0)
        resident[name] = memory(name, options["flat_calls"], rank)
        workspaces[name] = workspace(name)
    return {
        "call_cost_us": costs,
        "large_gemm_ms": large,
        "resident_kib": resident,
        "workspace_bytes": workspaces,
    }


def workspace(name: str) -> dict[str, int]:
    """Symmetric memory of one rank, and what the algorithm needs of it."""
    m, n, k = LARGE
    with OPS[name](max_m=m, n=n, k=k) as op:
        item = op.spec.itemsize
        chunk = ceil_div(m, WORLD)
        needed = {
            "ag_gemm": m * k,  # the gathered input
            "gemm_rs": (WORLD - 1) * chunk * n,  # a block of partials from every peer
            "gemm_ar": WORLD * chunk * n,  # and the own block of the result
        }[name]
        return {"allocated": op.workspace_bytes, "needed": needed * item}


def tables(document: dict[str, Any]) -> str:
    """Return all tables."""
    options = document["options"]
    costs = document["call_cost_us"]
    cost_rows = []
    for part in next(iter(costs.values())):
        name, cells = COST_ROWS.get(part, part), [f"{costs[op][part]:.1f}" for op in costs]
        bold = "**" if part == "call" else ""
        cost_rows.append([f"{bold}{cell}{bold}" for cell in (name, *cells)])
    large_rows = []
    for op, times in document["large_gemm_ms"].items():
        base = times["torch.mm"]
        cells = [
            f"{milliseconds(times[label])} ({times[label] / base:.3f}x)"
            for label in ("world 1", "signals preset")
        ]
        large_rows.append([op, milliseconds(base), *cells])
    memory_rows = [
        [op, f"{marks[0] / 1024:.1f}", f"{marks[-1] / 1024:.1f}", f"{marks[-1] - marks[0]:+d}"]
        for op, marks in document["resident_kib"].items()
    ]
    workspace_rows = [
        [op, str(w["allocated"]), str(w["needed"]), f"{w['allocated'] / w['needed']:.4f}"]
        for op, w in document["workspace_bytes"].items()
    ]
    calls, flat = options["calls"], options["flat_calls"]
    m, n, k = LARGE
    return "\n\n".join(
        [
            f"us per call at M = 1, N = K = {TINY}, 2 ranks, over {calls} calls:",
            markdown(["part", *costs], cost_rows),
            f"ms at M, N, K = {m}, {n}, {k} (2 ranks at once), everything local already:",
            markdown(["op", "torch.mm", "world 1", "signals preset"], large_rows),
            f"Resident memory of rank 0 over {flat} calls with M drawn from 1 to {TINY}:",
            markdown(["op", "MiB before", "MiB after", "KiB grown"], memory_rows),
            f"Symmetric workspace of a rank, max_m, N, K = {m}, {n}, {k} (`op.workspace_bytes`):",
            markdown(["op", "bytes", "the algorithm needs", "ratio"], workspace_rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls per repeat")
    parser.add_argument("--repeats", type=int, default=21, help="timed repeats")
    parser.add_argument("--flat-calls", type=int, default=10_000, help="calls of the memory check")
    options = vars(parser.parse_args())
    figures = run_ranks(measure, options, WORLD)
    content = {
        "device": host.device(),
        "versions": host.versions(),
        "command": "python benchmarks/cpu_overhead.py",
        "options": options,
        **figures,
    }
    keep(content, RESULTS / "overhead.json")
    print(tables(content))


if __name__ == "__main__":
    main()
