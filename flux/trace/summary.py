"""Summarise a trace: how each rank spent its time, and the longest wait."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flux.core.events import Event, Kind
from flux.core.recorder import GEMM_LANE

MOVING = (Kind.copy, Kind.send, Kind.receive, Kind.reduce)


@dataclass(frozen=True)
class RankTime:
    """Times of one rank in one method, in ms, over all calls.

    ``waiting`` is that of the computing thread. ``moving`` adds up lanes, so concurrent transfers
    count several times. Of multiprocessors, times are means.
    """

    method: str
    rank: int
    calls: float
    gemm: float
    waiting: float
    moving: float


def rank_times(events: Iterable[Event], metadata: Mapping[str, Any]) -> list[RankTime]:
    """Return times by method and rank; ``metadata`` is that of ``flux trace op``."""
    events = list(events)
    out = []
    for method, about in metadata["methods"].items():
        for rank in map(int, about["calls"]):
            mine = [e for e in events if e.rank == rank and e.details.get("method") == method]
            calls = sum(end - begin for begin, end in about["calls"][str(rank)]) * 1e-3
            computing = [e for e in mine if e.lane == GEMM_LANE or _multiprocessor(e)]
            waiting = _ms(computing, (Kind.wait, Kind.barrier))
            gemm, moving = _ms(mine, (Kind.gemm,)), _ms(mine, MOVING)
            out.append(RankTime(method, rank, calls, gemm, waiting, moving))
    return out


def _multiprocessor(event: Event) -> str | None:
    """Return the multiprocessor of the event: "SM 12"."""
    match = re.match(r"SM \d+", event.lane)
    return match and match.group()


def _ms(events: Sequence[Event], kinds: Iterable[Kind]) -> float:
    wanted = [event for event in events if event.kind in kinds]
    many = len({_multiprocessor(event) for event in events} - {None})
    each = (e.duration_us / (many if _multiprocessor(e) else 1) for e in wanted)
    return float(sum(each)) * 1e-3


def longest_wait(events: Iterable[Event]) -> Event | None:
    """Return the longest wait for a tile."""
    waits = [e for e in events if e.kind is Kind.wait and "awaits" in e.details]
    return max(waits, key=lambda event: event.duration_us, default=None)


def show(events: list[Event], metadata: Mapping[str, Any], console: Console) -> None:
    """Print the summary."""
    table = Table(box=None, pad_edge=False)
    for name in ("method", "rank", "in the op", "GEMM", "waiting", "moving"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for time in rank_times(events, metadata):
        figures = (time.calls, time.gemm, time.waiting, time.moving)
        table.add_row(time.method, str(time.rank), *(f"{figure:.3f} ms" for figure in figures))
    console.print(table)
    longest = longest_wait(events)
    if longest is not None:
        console.print(
            escape(
                f"longest wait: rank {longest.rank}, {longest.lane}, {longest.details['method']}: "
                f"{longest.duration_us * 1e-3:.3f} ms, {longest.name}"
            ),
            soft_wrap=True,
            highlight=False,
        )
    for method, about in metadata["methods"].items():
        lost = sum(sum(lanes.values()) for lanes in about["dropped"].values())
        if lost:
            console.print(f"[bold red]{method}: {lost} events were dropped; raise --capacity[/]")
        uncertain = max(about["clock_uncertainty_us"])
        if uncertain > 0:
            console.print(f"{method}: clocks of ranks aligned to +-{uncertain:.1f} us")
        for clock in about.get("gpu_clock_us", {}).values():
            apart, steps = clock["kernels_to_streams"], clock["resolution"]
            console.print(f"{method}: kernels to streams +-{apart:.1f} us, in steps of {steps} us")
            break
