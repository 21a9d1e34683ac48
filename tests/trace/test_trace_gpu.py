"""Traces of ops on GPUs, on the emulated device: what its kernels and streams put down becomes the
events that there must be. On a real GPU: benchmarks/gpu_check.sh."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice
from flux import Knobs, PeerTimeoutError
from flux.trace import Kind, Trace, gpu, record_op
from flux.trace.chrome import flows
from flux.trace.gpu import KernelRecord
from flux.trace.gpu_events import KernelEvent, in_lanes
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from gpu_trace_cases import (
    BF16,
    CALLS,
    TILE_N,
    K,
    M,
    N,
    check_awaited,
    check_copies,
    check_spans,
    check_tiles,
    clock_slack_us,
    problem,
    seen,
    tiles,
    width,
)
from loopback_cases import provide
from matrix import OPS
from reference import Inputs, Problem
from trace_cases import check_sound, of

KNOBS = {
    "push": Knobs(comm_tile_rows=3, direction="push"),
    "pull": Knobs(comm_tile_rows=4, direction="pull"),
    "ring": Knobs(comm_tile_rows=3, direction="push", order="ring1d"),
    "medium": Knobs(path="medium"),
}


@pytest.fixture(autouse=True)
def _trace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_TRACE", "1")


@pytest.fixture(autouse=True)
def _all_is_given_back(device: EmulatedDevice) -> Any:
    device.set_delay(300)
    device.set_copy_delay(2000)  # so that kernels have something to await on a busy machine, too
    events, streams = device.timed_events(), device.streams()
    yield
    assert device.timed_events() == events
    assert device.streams() == streams


def virtual(
    device: EmulatedDevice,
    p: Problem,
    world: int,
    knobs: Knobs,
    nodes: int = 1,
    **options: Any,
) -> Trace:
    """Return the trace of calls; check that results equal those of untraced calls."""
    inputs = Inputs(p, p.max_m, world, seed=7)
    with VirtualWorld(world, device, nodes) as ranks:
        ops = [p.build(ranks.rank(r), tuning=knobs) for r in range(world)]
        results: list[Any] = []

        def call() -> None:
            results.append(ranks.run(lambda r: inputs.call(ops[r], r)))

        call()
        trace = record_op(ops, call, calls=CALLS, warmup=1, **options)
        call()
        device.finish()
        first, *others = results
        for r in range(world):
            inputs.check(first[r], r, "fused" if nodes == 1 else "two_levels")
            for other in others:
                assert all(map(torch.equal, other[r], first[r])), "tracing changed a result"
        assert len(results) == CALLS + 3
        for op in ops:
            op.close()
    assert trace is not None
    return trace


def refused(device: EmulatedDevice, p: Problem, world: int, knobs: Any) -> None:
    """Partials that copy engines send have no record of their tiles."""
    inputs = Inputs(p, M, world, seed=1)
    with VirtualWorld(world, device) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(p.build(ranks.rank(r), tuning=knobs)) for r in range(world)]
        with pytest.raises(ValueError, match="copy engines send cannot be traced"):
            record_op(ops, lambda: inputs.call(ops[0], 0), warmup=0)
        outs = ranks.run(lambda r: inputs.call(ops[r], r))  # all is as it was
        device.finish()
        for r in range(world):
            inputs.check(outs[r], r)


@pytest.mark.parametrize("way", KNOBS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3])
def test_every_tile_is_seen_once(device: EmulatedDevice, op: str, world: int, way: str) -> None:
    p = problem(op)
    if way == "medium" and op != "ag_gemm":
        return refused(device, p, world, KNOBS[way])
    trace = virtual(device, p, world, KNOBS[way])
    assert not trace.dropped
    check_sound(trace.events, clock_slack_us(trace))
    check_tiles(p, trace, world, range(world))
    check_spans(trace, world)
    assert check_awaited(trace.events) > 0
    assert trace.metadata["world"] == world and trace.metadata["shape"] == [M, N, K]
    assert trace.metadata["gpu_clock_us"]["0"]["resolution"] > 0
    lanes = {e.lane for e in trace.events}
    assert any(lane.startswith("SM ") for lane in lanes) and "stream" in lanes
    if op == "ag_gemm":
        check_copies(trace, world)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_kernels_move_is_seen(device: EmulatedDevice, op: str, world: int) -> None:
    """Path in_kernel: rows that are pushed, or summed and copied out, and the waits for both."""
    p = problem(op)
    trace = virtual(device, p, world, Knobs(path="in_kernel"))
    assert not trace.dropped
    check_sound(trace.events, clock_slack_us(trace))
    check_tiles(p, trace, world, range(world))
    check_spans(trace, world)
    awaited = check_awaited(trace.events)
    assert awaited > 0 or not p.gathers  # partials may all have come when they are asked for
    for rank in range(world):
        for call in range(CALLS):
            copies = [e for e in of(trace.events, rank, call, Kind.copy) if "piece" in e.details]
            assert len(copies) == (1 if p.gathers else 0)
            copied = Counter(
                (row, e.details["tile_column"])
                for e in of(trace.events, rank, call, Kind.copy)
                if e.name.startswith("copies")
                for row in range(int(e.details["row_begin"]), int(e.details["row_end"]))
            )
            assert set(copied.values()) <= {1}
            assert len(copied) == (0 if p.gathers else M * -(-N // TILE_N))


@pytest.mark.parametrize("op", OPS)
def test_trace_pairs_sends_and_receives_between_nodes(device: EmulatedDevice, op: str) -> None:
    p = problem(op)
    trace = virtual(device, p, 4, Knobs(comm_tile_rows=3), nodes=2)
    check_sound(trace.events, clock_slack_us(trace))
    check_awaited(trace.events)
    for rank in range(4):
        gemms = of(trace.events, rank, 1, Kind.gemm)
        assert seen(gemms) == tiles(p.max_m, width(p, 4, rank))
    sends = [e for e in trace.events if e.kind is Kind.send]
    receives = [e for e in trace.events if e.kind is Kind.receive]
    assert sends and len(sends) == len(receives)
    assert all((e.rank < 2) != (int(e.details["peer"]) < 2) for e in sends)
    crossing = [(a, b) for a, b in flows(trace.events) if b.kind is Kind.receive]
    assert len(crossing) == len(receives)


def test_trace_covers_every_tile_of_several_weights(device: EmulatedDevice) -> None:
    p = Problem("ag_gemm", M, (8, 16), K, BF16)
    trace = virtual(device, p, 2, Knobs(comm_tile_rows=5))
    for rank in range(2):
        for weight, n in enumerate(p.n):
            gemms = of(trace.events, rank, 0, Kind.gemm)
            assert seen([e for e in gemms if e.details["weight"] == weight]) == tiles(M, n // 2)


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("op", OPS)
def test_trace_covers_one_rank_with_simulated_peers(
    device: EmulatedDevice, op: str, way: str
) -> None:
    world, p = 3, problem(op)
    inputs = Inputs(p, M, world, seed=3)
    with LoopbackWorld(world, device) as ranks, p.build(ranks.rank(), tuning=KNOBS[way]) as made:
        provide(ranks, made, inputs)
        plain = inputs.call(made, 0)
        results: list[Any] = []
        call = lambda: results.append(inputs.call(made, 0))  # noqa: E731
        trace = record_op(made, call, calls=CALLS, warmup=1)
        made.wait()
        inputs.check(plain, 0)
        for result in results:
            assert all(map(torch.equal, result, plain)), "tracing changed a result"
    assert trace is not None and not trace.dropped
    check_sound(trace.events, clock_slack_us(trace))
    check_tiles(p, trace, world, range(1))
    check_awaited(trace.events)
    assert set(trace.metadata["calls"]) == {"0"}
    played = [e for e in trace.events if e.rank > 0]
    assert {e.lane for e in played} == {"played"} and {e.rank for e in played} == {1, 2}
    if p.gathers and way == "push":  # each peer has sent to another one before
        for call in range(CALLS):
            copies = sorted(
                (e.start_us, e.rank)
                for e in played
                if e.kind is Kind.copy and e.details["call"] == call
            )
            ranks_in_turn = [rank for _, rank in copies]
            assert ranks_in_turn == sorted(ranks_in_turn, reverse=True)
            assert len(copies) > world - 1
    if p.gathers:  # partials may have come before anybody looks
        waited = [cause for cause, effect in flows(trace.events) if effect.rank == 0]
        assert {cause.rank for cause in waited} - {0}, "rank 0 waits for what its peers bring"


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_events_beyond_the_capacity_are_counted(device: EmulatedDevice, op: str) -> None:
    trace = virtual(device, problem(op), 2, KNOBS["push"], capacity=3)
    kept = [e for e in trace.events if e.lane.startswith("SM ") and e.rank == 0]
    assert len(kept) == 3 * ((8 - 4) // 2)  # for each of the multiprocessors of a rank
    every = virtual(device, problem(op), 2, KNOBS["push"])
    more = [e for e in every.events if e.lane.startswith("SM ") and "awaits" not in e.details]
    for rank in ("0", "1"):
        mine = [e for e in more if e.rank == int(rank)]
        assert trace.metadata["dropped"][rank]["kernels"] >= len(mine) - len(kept)
    assert trace.metadata["dropped"]["0"]["streams"] > 0
    assert trace.dropped > 0 and every.dropped == 0
    assert len(trace.metadata["calls"]["1"]) == CALLS


# -- faults and the end ----------------------------------------------------------------------------


def test_kernels_of_other_builds_are_refused(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLUX_TRACE")
    p = problem("ag_gemm")
    with VirtualWorld(2, device) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(2)]
        with pytest.raises(ValueError, match="not from a trace build: run `flux compile --t"):
            record_op(ops, lambda: pytest.fail("must not be called"))
        for op in ops:
            op.close()


def test_missing_trace_build_raises(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device.registry.__dict__, "traced", {})
    with VirtualWorld(2, device) as ranks, pytest.raises(ValueError, match=r"compile --trace`"):
        problem("ag_gemm").build(ranks.rank(0))


def test_refusals_come_before_any_call(device: EmulatedDevice) -> None:
    p = problem("gemm_rs")
    with VirtualWorld(2, device) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(2)]
        for given in (ops[0], ops[:1], ops[::-1], [ops[0], ops[0]], []):
            with pytest.raises(ValueError, match="those of all ranks of a VirtualWorld, got ranks"):
                record_op(given, lambda: pytest.fail("must not be called"))
        with pytest.raises(TypeError, match="op must be a flux op, got int"):
            record_op([ops[0], 1], lambda: None)  # type: ignore[list-item]
        for options in ({"calls": 0}, {"warmup": -1}, {"capacity": 0}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} must be an integer >="):
                record_op(ops, lambda: None, **options)
        with device.capture() as graph, pytest.raises(ValueError, match="cannot be captured"):
            record_op(ops, lambda: None)
        graph.close()
        for op in ops:
            op.close()
        with pytest.raises(ValueError, match="it is closed"):
            record_op(ops, lambda: None)


def test_captured_calls_are_refused(device: EmulatedDevice) -> None:
    p = problem("ag_gemm")
    inputs = Inputs(p, M, 2, seed=1)
    with VirtualWorld(2, device) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(2)]

        def captured() -> None:
            with device.capture() as graph:
                try:
                    inputs.call(ops[0], 0)
                finally:
                    graphs.append(graph)

        graphs: list[Any] = []
        with pytest.raises(ValueError, match="that are traced cannot be captured"):
            record_op(ops, captured, warmup=0)
        for graph in graphs:
            graph.close()
        outs = ranks.run(lambda r: inputs.call(ops[r], r))  # all is as it was
        device.finish()
        for r in range(2):
            inputs.check(outs[r], r)
            ops[r].close()


def test_memory_is_given_back(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    init = gpu.KernelTrace.__init__

    def watched(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(weakref.ref(self.memory))

    monkeypatch.setattr(gpu.KernelTrace, "__init__", watched)
    virtual(device, problem("gemm_rs"), 2, KNOBS["push"])
    gc.collect()
    assert len(made) == 2 and all(memory() is None for memory in made)


def test_a_rank_that_does_not_call_is_noticed(device: EmulatedDevice) -> None:
    device.set_delay(0)
    p = problem("ag_gemm")
    inputs = Inputs(p, M, 2, seed=1)
    with VirtualWorld(2, device) as ranks:
        ops = [p.build(ranks.rank(r), timeout_s=0.3) for r in range(2)]

        def call() -> None:
            ranks.run(lambda r: inputs.call(ops[0], 0) if r == 0 else None)

        with pytest.raises(PeerTimeoutError, match="rank 0"):
            record_op(ops, call, warmup=0)
        for op in ops:
            op.close()
        device.finish()


# -- lanes -----------------------------------------------------------------------------------------


def told(kind: int, begin: int, end: int, sm: int = 1, unit: int = 4, **more: int) -> KernelRecord:
    fields = {"row": 0, "column": 1, "signal": 0, "epoch": 1, "launch": 0, **more}
    return KernelRecord(begin, end, kind, sm=sm, unit=unit, **fields)


def test_concurrent_events_have_separate_lanes() -> None:
    first = [
        told(KernelEvent.tile, 0, 10),
        told(KernelEvent.tile, 10, 20),
        told(KernelEvent.tile, 30, 40),
    ]
    other = [told(KernelEvent.tile, 5, 15, unit=5), told(KernelEvent.tile, 18, 32, unit=5)]
    later = [told(KernelEvent.tile, 40, 50, unit=8)]
    waits = [told(KernelEvent.wait, 0, 4), told(KernelEvent.wait, 1, 9, signal=1)]
    elsewhere = [told(KernelEvent.tile, 0, 10, sm=12)]
    lanes = in_lanes([*waits, *later, *other, *first[::-1], *elsewhere])
    assert lanes["SM 1.0"] == first + later and lanes["SM 1.1"] == other
    assert lanes["SM 12.0"] == elsewhere
    assert [(r.begin_ns, r.end_ns) for r in lanes["SM 1.0 loads"]] == [(0, 4), (4, 9)]
    assert set(lanes) == {"SM 1.0", "SM 1.1", "SM 1.0 loads", "SM 12.0"}
