"""Trace calls of an op on the ranks of a process group, or on ranks that share a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from flux import _C
from flux.core.events import Event, Trace
from flux.core.recorder import CAPACITY, GEMM_LANE, HostStamps, Recorder
from flux.ops.base import TensorParallelOp
from flux.trace.clocks import Clock, align_clocks
from flux.trace.convert import Span, events_of
from flux.trace.gpu import GpuRecorder
from flux.trace.gpu_events import gpu_events, gpu_spans
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.one_gpu import OneGpuExchange

if TYPE_CHECKING:
    from flux.backends.cpu.backend import CpuBackend
    from flux.backends.cuda.backend import CudaBackend
    from flux.core.schedule import TileSchedule


@dataclass(frozen=True)
class _LocalRecords:
    """Records of a rank of this process; they become events once time zero is known."""

    rank: int
    schedule: TileSchedule | None  # of the first call; None if the library makes it
    spans: list[Span]
    events: Callable[[int, int], list[Event]]
    dropped: dict[str, int]
    uncertainty_ns: int = 0
    gpu_clock_us: dict[str, float] | None = None


@dataclass(frozen=True)
class _RankEvents:
    """The events and times of one rank, on rank 0's clock."""

    rank: int
    calls: list[list[float]]
    events: list[Event]
    dropped: dict[str, int]
    uncertainty_us: float
    gpu_clock_us: dict[str, float] | None


def record_op(
    op: TensorParallelOp | Sequence[TensorParallelOp],
    call: Callable[[], object],
    *,
    calls: int = 1,
    warmup: int = 3,
    capacity: int = CAPACITY,
) -> Trace | None:
    """Trace calls of an op. Collective.

    First come calls that are not traced. Then all ranks meet, and make ``calls`` calls one right
    after the other. Results are bit-identical to those of untraced calls.

    On GPUs the op must have kernels of a trace build: ``flux compile --trace`` builds them, and an
    op that is built with FLUX_TRACE=1 uses them.

    Args:
        op: of this rank; of a VirtualWorld the ops of all ranks, in order.
        call: makes one call of it, ``lambda: op(x, weight)``; of a VirtualWorld the call of all
            ranks, by its ``run``.
        calls: number of calls to trace.
        warmup: number of calls before those.
        capacity: events per lane of a rank, for all calls together; further events are only
            counted. On a GPU: per multiprocessor, and for all streams of a rank.

    Returns:
        On rank 0 the events of all ranks, on the others None.

    Raises:
        ValueError: an illegal argument, on all ranks alike.
        TypeError: the same.
        Exception: any error of ``call``.
    """
    ops = [op] if isinstance(op, TensorParallelOp) else list(op)
    exchange = _check(ops, calls, warmup, capacity)
    for _ in range(warmup):
        call()
    clocks = None
    if ops[0]._backend is not None and ops[0]._backend.asynchronous:
        _finish(ops)
        clocks = align_clocks(exchange) if exchange is not None else None
        records = _on_gpus(ops, call, exchange, calls, capacity)
    else:
        assert exchange is not None
        clocks = align_clocks(exchange)
        records = [_on_cpu(ops[0], call, exchange, calls, capacity)]
    everybody = _gathered(records, exchange, clocks)
    return _trace(ops[0], records[0].schedule, everybody, warmup) if ops[0].rank == 0 else None


def _check(
    ops: Sequence[TensorParallelOp], calls: int, warmup: int, capacity: int
) -> Exchange | None:
    """Check the arguments on all ranks; an error on one is raised on all.

    Returns:
        The exchange of the op's ranks; None if all of them are in this process.
    """
    for op in ops:
        if not isinstance(op, TensorParallelOp):
            raise TypeError(f"op must be a flux op, got {type(op).__name__}")
    problem = next(
        (why for op in ops if (why := _reason_untraceable(op))), None
    ) or _reason_not_one_place(ops)
    counts = {"calls": calls, "warmup": warmup, "capacity": capacity}
    for name, least in (("calls", 1), ("warmup", 0), ("capacity", 1)):
        if type(counts[name]) is not int or counts[name] < least:
            problem = f"{name} must be an integer >= {least}, got {counts[name]!r}"
    error = None if problem is None else ValueError(problem)
    if not ops or _world_on_one_gpu(ops[0]) is not None:
        if error is not None:
            raise error
        return None
    exchange = Exchange(resolve_group(ops[0]._unfused.group), "flux.trace")
    exchange.agree(error, {"op": ops[0].spec.label, **counts})
    return exchange


def _world_on_one_gpu(op: TensorParallelOp) -> OneGpuExchange | None:
    transport = None if op._backend is None else op._backend.transport
    return transport if isinstance(transport, OneGpuExchange) else None


def _reason_not_one_place(ops: Sequence[TensorParallelOp]) -> str | None:
    places = [_world_on_one_gpu(op) for op in ops]
    first = places[0] if places else None
    ranks = [op.rank for op in ops]
    expected = ranks[:1] if first is None else list(first.of.real)
    worlds = {None if place is None else (place.of, place.op) for place in places}
    if ops and ranks == expected and len(worlds) == 1:
        return None
    return (
        f"op must be that of this rank, or those of all ranks of a VirtualWorld, got ranks {ranks}"
    )


def _reason_untraceable(op: TensorParallelOp) -> str | None:
    backend, label = op._backend, op.spec.label
    if op.closed:
        return f"{op!r} cannot be traced: it is closed"
    if backend is None and op._checker.device.type != "cpu":
        return f"{label}: a single rank on a GPU does not communicate; use a profiler"
    if backend is None:
        return None
    fused = any(knobs.path != "unfused" for knobs in op._choice.variants)
    return backend.reason_untraceable(fused)


def _finish(ops: Sequence[TensorParallelOp]) -> None:
    """Wait until all calls are done."""
    for op in ops:
        op.wait()
        cast("CudaBackend", op._backend).peers.wait()


def _on_cpu(
    op: TensorParallelOp,
    call: Callable[[], object],
    exchange: Exchange,
    calls: int,
    capacity: int,
) -> _LocalRecords:
    backend = cast("CpuBackend | None", op._backend)
    recorder = Recorder(capacity, [] if backend is None else backend.remote_peers)

    def attach(attached: Recorder | None) -> None:
        if backend is not None:
            backend.trace(attached)
        op._unfused.trace(None if attached is None else HostStamps(attached.lane(GEMM_LANE)))

    attach(recorder)
    try:
        exchange.all_gather(None)  # so that no rank's first wait is for a rank that starts later
        spans = _timed_calls(call, calls)
    finally:
        if not op.closed:
            attach(None)
    lanes = recorder.read()

    def events(offset_ns: int, origin_ns: int) -> list[Event]:
        schedules = recorder.schedules
        return events_of(op.kind.name, op.rank, lanes, schedules, spans, offset_ns, origin_ns)

    dropped = {lane.name: lane.dropped for lane in lanes if lane.dropped}
    first = recorder.schedules[0] if recorder.schedules else None
    return _LocalRecords(op.rank, first, spans, events, dropped)


def _timed_calls(call: Callable[[], object], calls: int) -> list[Span]:
    spans = []
    for _ in range(calls):
        begin = _C.Lane.now()
        call()
        spans.append(Span(begin, _C.Lane.now()))
    return spans


def _on_gpus(
    ops: Sequence[TensorParallelOp],
    call: Callable[[], object],
    exchange: Exchange | None,
    calls: int,
    capacity: int,
) -> list[_LocalRecords]:
    recorder = GpuRecorder(ops, capacity)
    try:
        recorder.start()
        if exchange is not None:
            exchange.all_gather(None)
        spans = []
        for recorder.number in range(calls):
            spans += _timed_calls(call, 1)
        recorder.wait()
        tie, everything = recorder.tie, recorder.read()
    finally:
        recorder.stop()
    clock = {"kernels_to_streams": tie.between / 1000, "resolution": tie.resolution / 1000}
    return [
        _LocalRecords(
            of.rank,
            of.schedules[0] if of.schedules else None,
            gpu_spans(of, spans),
            partial(gpu_events, of),
            of.dropped,
            tie.uncertainty,
            clock,
        )
        for of in everything
    ]


def _gathered(
    records: Sequence[_LocalRecords], exchange: Exchange | None, clocks: Sequence[Clock] | None
) -> list[_RankEvents]:
    """Return the records of all ranks on rank 0's clock, from its first event on. Collective."""

    def clock_of(local: _LocalRecords) -> Clock:
        return Clock(0, 0) if clocks is None else clocks[local.rank]

    first = min(local.spans[0].begin_ns + clock_of(local).offset_ns for local in records)
    origin = first if exchange is None else min(exchange.all_gather(first))

    def on_common_clock(local: _LocalRecords) -> _RankEvents:
        clock = clock_of(local)
        shift = clock.offset_ns - origin
        return _RankEvents(
            local.rank,
            [[(at + shift) / 1000 for at in (s.begin_ns, s.end_ns)] for s in local.spans],
            local.events(clock.offset_ns, origin),
            local.dropped,
            (clock.uncertainty_ns + local.uncertainty_ns) / 1000,
            local.gpu_clock_us,
        )

    mine = [on_common_clock(local) for local in records]
    if exchange is None:
        return mine
    return [events for rank in exchange.all_gather(mine) for events in rank]


def _trace(
    op: TensorParallelOp,
    schedule: TileSchedule | None,
    everybody: Sequence[_RankEvents],
    warmup: int,
) -> Trace:
    metadata: dict[str, Any] = {
        "op": op.kind.name,
        "shape": list(schedule.shape) if schedule else [op.spec.max_m, sum(op.spec.n), op.spec.k],
        "dtype": str(op.spec.dtype).removeprefix("torch."),
        "world": op.world,
        "knobs": str(schedule.knobs) if schedule else "",
        "topology": str(op.topology),
        "warmup": warmup,
        "calls": {str(of.rank): of.calls for of in everybody},
        "clock_uncertainty_us": [of.uncertainty_us for of in everybody],
        "dropped": {str(of.rank): of.dropped for of in everybody if of.dropped},
    }
    if any(of.gpu_clock_us for of in everybody):
        metadata["gpu_clock_us"] = {str(of.rank): of.gpu_clock_us for of in everybody}
    return Trace([event for of in everybody for event in of.events], metadata)
