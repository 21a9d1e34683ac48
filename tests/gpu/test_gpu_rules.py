"""What the CUDA backend has to do, and not to do, on real GPUs; the emulated one (emulated.py)
enforces the rule. With processes: test_gpu_rules_processes.py."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from emulated_cases import BF16, eventually
from emulated_worlds import GpuEach
from flux import _C, Knobs, PeerTimeoutError
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from loopback_cases import call as call_real
from model.recording import ApartWorld
from reference import Inputs, Problem
from virtual_cases import built, call_all, call_on_and_on, check_all


@pytest.fixture
def device(emulator: Path) -> Iterator[EmulatedDevice]:
    """An emulated device with no rules enabled, for one test."""
    with emulated_device(emulator) as device:
        for rule in (device.limit_room, device.load_lazily):
            rule(False)
        yield device
        device.clear_error()  # the test has looked at it


def check(ops: list[Any], everything: Sequence[Inputs], outs: list[Any]) -> None:
    for op in ops:
        op.wait()
    check_all(everything, outs)


def test_straddling_tiles_have_guard_rows(device: EmulatedDevice) -> None:
    """No bulk store begins in front of its tensor map, wherever rows of an owner begin."""
    for op, reduce in (("gemm_rs", "local"), ("gemm_ar", "local"), ("gemm_rs", "in_flight")):
        p = Problem(op, 23, (12,), 10, BF16)
        everything = [Inputs(p, m, 3, seed=m) for m in (23, 1, 7, 20)]
        with (
            VirtualWorld(3, device) as ranks,
            built(ranks, p, tuning=Knobs(reduce=reduce), timeout_s=1.0) as ops,
        ):
            outs = call_on_and_on(ranks, ops, everything)
            for made in ops:
                made.wait()
            if reduce == "local":
                check(ops, everything, outs)
    assert not device.error()


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_a_reduction_leaves_room_for_the_gemms_of_other_ranks(
    device: EmulatedDevice, op: str
) -> None:
    """The launch comes late behind the entry: by then, others have ended their GEMMs."""
    device.limit_room()
    device.starving_after(0.3)
    device.set_launch_delay(20_000)
    p = Problem(op, 64, (16,), 8, BF16)
    inputs = Inputs(p, 64, 4, seed=1)
    with VirtualWorld(4, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        outs = call_all(ranks, ops, inputs)
        try:
            check(ops, [inputs], [outs])
        finally:
            assert device.starved() == ""


PULLED = Problem("ag_gemm", 700, (8,), 4, BF16)


def test_batches_of_loopback_peers_are_small(device: EmulatedDevice) -> None:
    knobs = Knobs(direction="pull", comm_tile_rows=1)
    inputs = Inputs(PULLED, 700, 8, seed=1)
    with (
        LoopbackWorld(8, device) as ranks,
        PULLED.build(ranks.rank(), tuning=knobs, timeout_s=5.0) as op,
    ):
        out = call_real(ranks, op, inputs)
        op.wait()
        inputs.check(out, 0)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_batches_of_virtual_ranks_are_small(
    device: EmulatedDevice, direction: str, gathered: bool
) -> None:
    """Without columns of their own, ranks await all rows on a stream."""
    knobs = Knobs(direction=direction, comm_tile_rows=1)
    p = Problem("ag_gemm", 700, (1,) if gathered else (8,), 4, BF16)
    inputs = Inputs(p, 700, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, tuning=knobs, timeout_s=2.0) as ops:
        outs = call_all(ranks, ops, inputs, gather=gathered)
        check(ops, [inputs], [outs])


def test_a_call_on_the_default_stream_comes_before_the_next_on_another(
    device: EmulatedDevice,
) -> None:
    driver, p = device.driver, Problem("gemm_rs", 8, (8,), 8, BF16)
    everything = [Inputs(p, 8, 2, seed=seed) for seed in range(2)]
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        aside = ranks.new_stream()
        calls = [[inputs.ready(r) for inputs in everything] for r in range(2)]
        with device.record_calls():
            first = calls[0][0](ops[0])
            with device.on_stream(aside):
                second = calls[0][1](ops[0])
        with device.on_stream(ranks.streams[1]):
            others = [call(ops[1]) for call in calls[1]]
        for stream in (0, aside, ranks.streams[1]):
            driver.synchronize(stream)
        log = device.calls()
        ended = [c.details["event"] for c in log if (c.name, c.stream) == ("event_record", 0)]
        begins = next(c for c in log if c.stream == aside)
        assert begins.name == "event_wait", "the calls are not ordered"
        assert begins.details["event"] == ended[-1]
        check(ops, everything, [[first, others[0]], [second, others[1]]])


def test_no_module_is_loaded_while_kernels_wait(device: EmulatedDevice) -> None:
    """An activation behind the kernel is torch's: its first use must not be behind rank 0's."""
    device.load_lazily()
    device.give_up_after(0.3)
    p = Problem("ag_gemm", 16, (16,), 8, BF16, activation="gelu")
    inputs = Inputs(p, 16, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        outs = call_all(ranks, ops, inputs)
        check(ops, [inputs], [outs])
    assert not device.error()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_graph_replays_without_concurrent_branches(device: EmulatedDevice, direction: str) -> None:
    """The graph's scheduler knows edges, not which words a kernel waits for."""
    p, world = Problem("ag_gemm", 13, (12,), 8, BF16), 2
    inputs = Inputs(p, 13, world, seed=1)
    knobs = Knobs(direction=direction)
    with VirtualWorld(world, device) as ranks, built(ranks, p, tuning=knobs, timeout_s=1.0) as ops:
        graphs, outs = [], []
        for r in range(world):
            call = inputs.ready(r)
            with device.on_stream(ranks.streams[r]), device.capture() as graph:
                outs.append(call(ops[r]))
            graphs.append(graph)
        device.set_graph_order("kernels first")
        try:
            for _ in range(2):
                for r in range(world):
                    with device.on_stream(ranks.streams[r]):
                        graphs[r].replay()
            for stream in ranks.streams:
                device.driver.synchronize(stream)
            check(ops, [inputs], [outs])
        finally:
            for graph in graphs:
                graph.close()


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_waiting_and_failing_create_no_stream(device: EmulatedDevice, op: str) -> None:
    """A new stream may share the hardware queue of one that waits for ever."""
    p = Problem(op, 16, (16,), 8, BF16)
    inputs = Inputs(p, 16, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=0.2) as ops:
        with device.record_calls():
            outs = call_all(ranks, ops, inputs)
            check(ops, [inputs], [outs])
            alone = inputs.ready(0)
            ranks.run(lambda r: alone(ops[0]) if r == 0 else None)
            with pytest.raises(PeerTimeoutError):
                ops[0].wait()
            with pytest.raises(PeerTimeoutError):
                ops[1].wait()
        created = [call for call in device.calls() if call.name == "stream_create"]
        assert len(created) == 0, "streams were created by look() or let_go()"
        device.finish()


def waiting_for_more_than_a_peer(
    device: EmulatedDevice, knobs: Knobs, circle: Callable[..., None]
) -> str:
    """Two ranks with a GPU each, and two ops on two streams of each; return what starved.

    ``circle`` makes the calls. A kernel of neither op (`ordinary`) is part of the circle.
    """
    device.limit_room()
    device.starving_after(1.0)
    p = Problem("ag_gemm", 64, (16,), 8, BF16)
    inputs = [Inputs(p, 64, 2, seed=seed) for seed in range(2)]
    word = torch.zeros(1, dtype=torch.int32)
    box = torch.zeros(8, 8, dtype=BF16)

    def ordinary(stream: int) -> None:
        place = (ctypes.c_size_t(box.data_ptr()), 8, 8)
        device.library.emulator_store_box(ctypes.c_void_p(stream), *place, 0, 0)

    with GpuEach(2, device) as ranks, ExitStack() as stack:
        ops = [stack.enter_context(built(ranks, p, tuning=knobs, timeout_s=5.0)) for _ in inputs]
        aside = [ranks.new_stream_of(r) for r in range(2)]
        calls = [[each.ready(r) for r in range(2)] for each in inputs]
        outs: dict[tuple[int, int], Any] = {}

        def call(op: int, rank: int, stream: int) -> None:
            with device.on_stream(stream):
                outs[op, rank] = calls[op][rank](ops[op][rank])

        circle(ranks.streams, aside, call, ordinary, word)
        ended = eventually(lambda: all(map(device.driver.ready, (*ranks.streams, *aside))), 2.0)
        starved = device.starved()
        assert ended == (starved == "")
        word.fill_(1)
        for each in (*ranks.streams, *aside):
            device.driver.synchronize(each)
        for (op, rank), got in outs.items():
            inputs[op].check(got, rank)
    device.clear_error()
    return starved


@pytest.mark.parametrize(("margin", "room"), [(0, False), (None, True)])
def test_kernels_that_wait_leave_room_for_others(
    device: EmulatedDevice, margin: int | None, room: bool
) -> None:
    """Rank 1 makes its call after a kernel of rank 0, as of a pipeline, which comes behind one that
    waits for rank 1."""

    def circle(streams: Any, aside: Any, call: Any, ordinary: Any, word: torch.Tensor) -> None:
        call(0, 0, streams[0])
        assert eventually(device.resident)
        ordinary(aside[0])
        device.driver.signal(aside[0], word.data_ptr(), 1)
        device.driver.await_signal(streams[1], word.data_ptr(), 1)
        call(0, 1, streams[1])

    starved = waiting_for_more_than_a_peer(device, Knobs(sm_margin=margin), circle)
    assert (starved == "") == room


def test_ops_of_two_streams_do_not_wait_at_the_same_time(device: EmulatedDevice) -> None:
    """Both ranks call op 0, then op 1. On rank 1 the stream of op 0 is late, and in front of its
    call is a kernel; on rank 0 that is so for op 1. Without a margin the order has to do."""

    def circle(streams: Any, aside: Any, call: Any, ordinary: Any, word: torch.Tensor) -> None:
        call(0, 0, streams[0])
        assert eventually(device.resident)
        ordinary(aside[0])
        call(1, 0, aside[0])
        device.driver.await_signal(streams[1], word.data_ptr(), 1)
        ordinary(streams[1])
        call(0, 1, streams[1])
        call(1, 1, aside[1])
        time.sleep(0.05)  # op 1 of rank 1 may take all multiprocessors
        word.fill_(1)

    assert waiting_for_more_than_a_peer(device, Knobs(sm_margin=0), circle) == ""


def test_kernels_that_wait_to_forward_need_a_margin(device: EmulatedDevice) -> None:
    pushed = Knobs(sm_margin=0, order="ring1d", direction="push")
    with GpuEach(2, device) as ranks:
        with pytest.raises(ValueError, match="sm_margin must be 1 or more where rows are pushed"):
            Problem("ag_gemm", 8, (8,), 8, BF16).build(ranks.rank(0), tuning=pushed)
        with pytest.raises(ValueError, match=r"sm_margin must be an integer >= 0, got -1"):
            Knobs(sm_margin=-1)


@pytest.mark.parametrize(
    ("op", "knobs"),
    [
        ("gemm_ar", Knobs()),
        ("ag_gemm", Knobs(order="ring1d", direction="push")),
        ("ag_gemm", Knobs(order="ring1d", direction="pull")),
    ],
)
def test_kernels_wait_for_rows_that_streams_copy_on(
    device: EmulatedDevice, op: str, knobs: Knobs
) -> None:
    """Rows of peers land later than words that come after them, unless a kernel acquires these."""
    device.write_late(20_000)
    p = Problem(op, 24, (8,), 8, BF16)
    everything = [Inputs(p, m, 4, seed=m) for m in (24, 23, 24)]
    with GpuEach(4, device) as ranks, built(ranks, p, tuning=knobs, timeout_s=5.0) as ops:
        outs = call_on_and_on(ranks, ops, everything)
        check(ops, everything, outs)


def test_results_are_right_under_all_rules(device: EmulatedDevice) -> None:
    """One case of each op with every rule at once."""
    for rule in (device.limit_room, device.load_lazily):
        rule()
    device.starving_after(0.5)
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        p = Problem(op, 23, (12,), 10, BF16)
        everything = [Inputs(p, m, 3, seed=m) for m in (23, 7, 20)]
        with VirtualWorld(3, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
            outs = call_on_and_on(ranks, ops, everything)
            check(ops, everything, outs)
    assert not device.error() and not device.starved()


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize(("apart", "margin"), [(False, None), (True, None), (True, 0)])
def test_reductions_begin_early_where_a_rank_has_the_device(
    device: EmulatedDevice, op: str, apart: bool, margin: int | None
) -> None:
    """Elsewhere it would occupy multiprocessors that are left to a peer's GEMM or to streams."""
    p = Problem(op, 23, (12,), 10, BF16)
    everything = [Inputs(p, m, 2, seed=m) for m in (23, 1, 7)]
    world = ApartWorld if apart else VirtualWorld
    options: dict[str, Any] = {"tuning": Knobs(sm_margin=margin), "timeout_s": 1.0}
    with world(2, device) as ranks, built(ranks, p, **options) as ops, device.record_calls():
        outs = call_on_and_on(ranks, ops, everything)
        check(ops, everything, outs)
    launched = [call.details["early"] for call in device.calls() if call.name == "launch"]
    assert ("1" in launched) is (apart and margin == 0) and "0" in launched


@pytest.mark.parametrize(
    ("m", "in_slot", "copied"),
    [(32, False, 0), (32, True, 0), (20, False, 2), (20, True, 0)],
    ids=["in place", "slot", "straddling tiles", "slot, straddling tiles"],
)
def test_own_rows_are_copied_only_where_a_tile_reads_rows_of_a_peer_too(
    device: EmulatedDevice, m: int, in_slot: bool, copied: int
) -> None:
    p = Problem("ag_gemm", 32, (16,), 8, BF16)
    everything = [Inputs(p, m, 2, seed=seed) for seed in range(3)]
    outs: list[list[Any]] = [[None, None] for _ in everything]
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        for inputs, results in zip(everything, outs, strict=True):
            local = [inputs.local(rank) for rank in range(2)]

            def call(r: int, local: Any = local, results: Any = results) -> None:
                x, *others = local[r]
                rows = ops[r].input_slot(m).copy_(x) if in_slot else x
                results[r] = [ops[r](rows, *others, m=m)]

            if in_slot:
                device.finish()
            with device.record_calls():
                ranks.run(call)
            copies = [c for c in device.calls() if c.name == "copy"]
            assert len(copies) == 2 + copied, "2 ranks send their rows"
        check(ops, everything, outs)


@pytest.mark.parametrize(
    ("op", "gather"),
    [("ag_gemm", False), ("ag_gemm", True), ("gemm_rs", False), ("gemm_ar", False)],
)
def test_the_next_call_raises_after_a_timeout_of_a_peer(
    device: EmulatedDevice, op: str, gather: bool
) -> None:
    """Its copies may have spoilt what a call has read, whose own waits were all in time."""
    p = Problem(op, 23, (12,), 10, BF16)
    inputs = Inputs(p, 23, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        native = ops[0]._backend.native
        with device.record_calls():
            call_all(ranks, ops, inputs, gather)
        # A kernel that ends a call has looked at the status by itself; a copy is behind one.
        status = str(_C.STATUS_WORDS * 8)
        copied = [c for c in device.calls() if c.name == "copy" and c.details["bytes"] == status]
        assert len(copied) == (2 if gather or op == "gemm_ar" else 0)
        device.finish()
        assert not native.failed
        ops[1]._backend.native.let_go()
        call_all(ranks, ops, inputs, gather)
        device.finish()
        assert native.failed
        with pytest.raises(PeerTimeoutError, match="rank 1 gave up in call 1"):
            inputs.call(ops[0], 0)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_close_ends_waits_for_calls(device: EmulatedDevice, op: str) -> None:
    """Another thread closes the op: the wait ends, and so do the streams."""
    p = Problem(op, 23, (12,), 10, BF16)
    inputs = Inputs(p, 23, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=10.0) as ops:
        alone = inputs.ready(0)
        ranks.run(lambda r: alone(ops[0]) if r == 0 else None)
        closer = threading.Timer(0.2, ops[0].close)
        closer.start()
        with pytest.raises(RuntimeError, match="closed while waiting for call 1"):
            ops[0].wait()
        closer.join()
        assert ops[0].closed


def test_streams_and_events_are_released_after_a_fault(device: EmulatedDevice) -> None:
    """Every call of the driver fails from then on. An exception in a destructor would end the
    process."""
    before = device.streams(), device.timed_events()
    stream, events = device.driver.create_stream(), _C.StreamTrace(device.driver, 1)
    device.library.emulator_fail(b"an illegal address")
    with pytest.raises(RuntimeError, match="an illegal address"):
        device.driver.ready(stream)
    device.driver.destroy_stream(stream)
    events.close()
    assert (device.streams(), device.timed_events()) == before


def test_work_in_front_of_a_call_may_take_longer_than_a_timeout(device: EmulatedDevice) -> None:
    """A call goes on from its entry: before, its stream does what is of no concern to the op."""
    p = Problem("ag_gemm", 16, (16,), 8, BF16)
    inputs = Inputs(p, 16, 2, seed=1)
    with VirtualWorld(2, device) as ranks, built(ranks, p, timeout_s=0.1) as ops:
        for stream in ranks.streams:
            with device.on_stream(stream):
                device.enqueue(lambda: time.sleep(1.5))
        check(ops, [inputs], [call_all(ranks, ops, inputs)])


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_call_that_another_op_is_behind_ends(device: EmulatedDevice, direction: str) -> None:
    """Rank 1 makes no calls. Rank 0 waits for its second op alone."""
    p = Problem("ag_gemm", 16, (16,), 8, BF16)
    inputs, knobs = Inputs(p, 16, 2, seed=1), Knobs(direction=direction)
    with (
        VirtualWorld(2, device) as ranks,
        built(ranks, p, tuning=knobs, timeout_s=0.2) as first,
        built(ranks, p, tuning=knobs, timeout_s=0.2) as second,
    ):
        ready = [inputs.ready(0) for _ in range(2)]
        ranks.run(lambda r: [ready[0](first[0]), ready[1](second[0])] if r == 0 else None)
        for op in (second[0], first[0]):
            with pytest.raises(PeerTimeoutError, match="rank 0"):
                op.wait()
        for op in (second[1], first[1]):
            with pytest.raises(PeerTimeoutError, match="rank 0 gave up"):
                op.wait()
