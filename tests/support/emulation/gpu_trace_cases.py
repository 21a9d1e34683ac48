"""Checks of traces of ops on the emulated device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from flux.trace import Event, Kind, Trace
from flux.trace.chrome import flows
from reference import Problem
from trace_cases import of

BF16 = torch.bfloat16
M, N, K, CALLS = 21, 13, 10, 2
TILE_M, TILE_N = 4, 8  # of the emulated kernels


def problem(op: str, max_m: int = M, n: tuple[int, ...] = (N,)) -> Problem:
    return Problem(op, max_m, n, K, BF16)


def tiles(rows: int, columns: int) -> Counter[tuple[int, int]]:
    return Counter(
        (row, column)
        for row in range(-(-rows // TILE_M))
        for column in range(-(-columns // TILE_N))
    )


def seen(events: list[Event]) -> Counter[tuple[Any, Any]]:
    return Counter((e.details["tile_row"], e.details["tile_column"]) for e in events)


def width(p: Problem, world: int, rank: int) -> int:
    if not p.gathers:
        return p.n[0]
    part = -(-p.n[0] // world)
    return max(0, min(p.n[0], (rank + 1) * part) - rank * part)


def check_awaited(events: list[Event]) -> int:
    """Every wait is for something that somebody raised in the same call; how many there are."""
    raised = {
        (e.details["call"], what)
        for e in events
        for what in str(e.details.get("raises", "")).split()
    }
    waits = [e for e in events if "awaits" in e.details]
    for e in waits:
        assert (e.details["call"], e.details["awaits"]) in raised, e
    assert len(list(flows(events))) == len(waits)
    return len(waits)


def check_tiles(p: Problem, trace: Trace, world: int, ranks: range) -> None:
    for rank in ranks:
        for call in range(CALLS):
            gemms = of(trace.events, rank, call, Kind.gemm)
            cells = Counter(
                (row, column)
                for d in (e.details for e in gemms)
                for row in range(int(d["row_begin"]), int(d["row_end"]))
                for column in range(int(d["col_begin"]), int(d["col_end"]))
            )
            assert set(cells.values()) == {1} and len(cells) == p.max_m * width(p, world, rank)
            sums = of(trace.events, rank, call, Kind.reduce)
            rows = Counter(
                (row, e.details["tile_column"])
                for e in sums
                for row in range(int(e.details["row_begin"]), int(e.details["row_end"]))
            )
            assert set(rows.values()) <= {1}
            part = -(-p.max_m // world)
            own = max(0, min(p.max_m, (rank + 1) * part) - rank * part)
            assert len(rows) == (0 if p.gathers else own * -(-p.n[0] // TILE_N))


def clock_slack_us(trace: Trace) -> float:
    """Return by how much times may be off: readings of clocks are apart, more on a busy machine."""
    kernels = [c["kernels_to_streams"] for c in trace.metadata["gpu_clock_us"].values()]
    return float(max(trace.metadata["clock_uncertainty_us"]) + max(kernels)) + 5


def check_spans(trace: Trace, world: int) -> None:
    """On the GPU's clock, an hour from the host's, events would be in no call."""
    slack = clock_slack_us(trace)
    for rank in map(int, trace.metadata["calls"]):
        spans = trace.metadata["calls"][str(rank)]
        assert len(spans) == CALLS
        for call, (begin, end) in enumerate(spans):
            assert begin <= end
            for e in trace.events:
                if (e.rank, e.details["call"]) == (rank, call):
                    assert begin - slack <= e.start_us and e.end_us <= end + slack, e
    assert min(spans[0][0] for spans in trace.metadata["calls"].values()) == 0.0


def check_copies(trace: Trace, world: int) -> None:
    """All rows of all other ranks come to each rank once, in each call."""
    for call in range(CALLS):
        for rank in range(world):
            copies = of(trace.events, rank, call, Kind.copy)
            assert all(e.details["bytes"] for e in copies)
        got = Counter(
            (
                e.details["peer"]
                if f"{e.details['peer']}:" in str(e.details["raises"])
                else e.rank,
                row,
            )
            for rank in range(world)
            for e in of(trace.events, rank, call, Kind.copy)
            if "peer" in e.details
            for row in range(int(e.details["row_begin"]), int(e.details["row_end"]))
        )
        assert set(got.values()) == {1} and len(got) == M * (world - 1)
