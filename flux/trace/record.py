"""Tracing calls of an op on the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flux import _C
from flux.backends.cpu import CpuBackend
from flux.ops._base import TensorParallelOp
from flux.transport.exchange import Exchange, resolve_group

from .clocks import Clock, align_clocks
from .convert import Span, events_of
from .events import Event
from .recorder import CAPACITY, LaneRecords, Recorder


@dataclass(frozen=True)
class Trace:
    """What all ranks did in some calls.

    Attributes:
        events: of all ranks; time begins when the first of them begins the first call.
        metadata: what was traced, JSON-able. ``calls`` holds the [begin, end] of every call by
            rank in us, ``dropped`` how many events had no room, by rank and lane,
            ``clock_uncertainty_us`` by how much the times of each rank may be shifted against those
            of rank 0.
    """

    events: list[Event]
    metadata: dict[str, Any]

    @property
    def dropped(self) -> int:
        """Events that had no room."""
        return sum(sum(lanes.values()) for lanes in self.metadata.get("dropped", {}).values())


@dataclass(frozen=True)
class _OfRank:
    """What one rank has to tell."""

    lanes: list[LaneRecords]
    spans: list[Span]
    events: list[Event]


def record_op(
    op: TensorParallelOp,
    call: Callable[[], object],
    *,
    calls: int = 1,
    warmup: int = 3,
    capacity: int = CAPACITY,
) -> Trace | None:
    """Trace calls of an op. Collective.

    Calls that are not traced come first. Then all ranks meet, and make ``calls`` calls one right
    after the other. Results are those of calls that nobody traces, bit by bit.

    Args:
        op: on the CPU backend.
        call: makes one call of it: ``lambda: op(x, weight)``.
        calls: to trace.
        warmup: calls before those.
        capacity: events that a lane of a rank has room for, in all calls together; what exceeds it
            is counted.

    Returns:
        On rank 0 the events of all ranks, on the others None.

    Raises:
        ValueError, TypeError: refused arguments, on all ranks alike.
        Whatever ``call`` raises.
    """
    exchange = _check(op, calls, warmup, capacity)
    for _ in range(warmup):
        call()
    recorder = Recorder(capacity, _remote_ranks(op))
    clocks = align_clocks(exchange)
    _attach(op, recorder)
    spans = []
    try:
        exchange.all_gather(None)  # so that nobody's first wait is for a rank that starts later
        for _ in range(calls):
            begin = _C.Lane.now()
            call()
            spans.append(Span(begin, _C.Lane.now()))
    finally:
        if not op.closed:
            _attach(op, None)
    return _gathered(op, exchange, recorder, spans, clocks, warmup)


def _check(op: TensorParallelOp, calls: int, warmup: int, capacity: int) -> Exchange:
    """Where the op's ranks meet; whatever one of them is refused, all are."""
    if not isinstance(op, TensorParallelOp):
        raise TypeError(f"op must be a flux op, got {type(op).__name__}")
    if op.world > 1 and not isinstance(op._backend, CpuBackend):
        raise ValueError(f"{op.spec.label}: only ops of backend cpu can be traced, got {op!r}")
    exchange = Exchange(resolve_group(op._unfused.group), "flux.trace")
    problem = None
    given = {"calls": calls, "warmup": warmup, "capacity": capacity}
    for name, least in (("calls", 1), ("warmup", 0), ("capacity", 1)):
        if type(given[name]) is not int or given[name] < least:
            problem = ValueError(f"{name} must be an integer >= {least}, got {given[name]!r}")
    if op.closed:
        problem = ValueError(f"{op!r} cannot be traced: it is closed")
    exchange.agree("flux.trace", problem, {"op": op.spec.label, **given})
    return exchange


def _remote_ranks(op: TensorParallelOp) -> Sequence[int]:
    network = op._backend.network if isinstance(op._backend, CpuBackend) else None
    return [] if network is None else list(network.bytes_sent)


def _attach(op: TensorParallelOp, recorder: Recorder | None) -> None:
    if isinstance(op._backend, CpuBackend):
        op._backend.trace(recorder)
    op._unfused.trace(recorder)


def _gathered(
    op: TensorParallelOp,
    exchange: Exchange,
    recorder: Recorder,
    spans: list[Span],
    clocks: list[Clock],
    warmup: int,
) -> Trace | None:
    offset = clocks[op.rank].offset_ns
    origin = min(exchange.all_gather(spans[0].begin_ns + offset))
    lanes = recorder.read()
    events = events_of(op.kind.name, op.rank, lanes, recorder.schedules, spans, offset, origin)
    everybody = exchange.all_gather(
        _OfRank([lane._replace(records=[]) for lane in lanes], spans, events)
    )
    if op.rank != 0:
        return None

    def times(rank: int) -> list[list[float]]:
        shift = clocks[rank].offset_ns - origin
        return [
            [(at + shift) / 1000 for at in (span.begin_ns, span.end_ns)]
            for span in everybody[rank].spans
        ]

    schedule = recorder.schedules[0] if recorder.schedules else None
    dropped = {
        str(rank): lost
        for rank, told in enumerate(everybody)
        if (lost := {lane.name: lane.dropped for lane in told.lanes if lane.dropped})
    }
    metadata: dict[str, Any] = {
        "op": op.kind.name,
        "shape": list(schedule.shape) if schedule else [op.spec.max_m, sum(op.spec.n), op.spec.k],
        "dtype": str(op.spec.dtype).removeprefix("torch."),
        "world": op.world,
        "knobs": str(schedule.knobs) if schedule else "",
        "topology": str(op.topology),
        "warmup": warmup,
        "calls": {str(rank): times(rank) for rank in range(op.world)},
        "clock_uncertainty_us": [clock.uncertainty_ns / 1000 for clock in clocks],
        "dropped": dropped,
    }
    return Trace([event for told in everybody for event in told.events], metadata)
