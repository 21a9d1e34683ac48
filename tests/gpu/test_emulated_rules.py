"""Rules of real GPUs that the emulated one enforces: each violation is found, legal work passes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from emulated_cases import BF16, GUARD, Launches, OnEmulated, eventually, never
from flux import Knobs
from flux.transport import virtual
from flux.transport.virtual import VirtualWorld
from reference import Problem
from virtual_cases import built, call_all, check_all


@pytest.fixture
def gpu(emulator: Path) -> Iterator[EmulatedDevice]:
    """An emulated device with no rules enabled, for one test."""
    with emulated_device(emulator) as device:
        for rule in (device.limit_room, device.load_lazily):
            rule(False)
        yield device


@pytest.fixture
def launches(gpu: EmulatedDevice) -> Iterator[Launches]:
    made = Launches(gpu)
    yield made
    gpu.finish()


@pytest.fixture
def stream(gpu: EmulatedDevice) -> Iterator[int]:
    made = gpu.driver.create_stream()
    yield made
    gpu.driver.destroy_stream(made)


def test_stream_0_is_the_default_stream(gpu: EmulatedDevice) -> None:
    assert gpu.current_stream() == 0 and gpu.streams() == 0
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    gpu.driver.copy(0, target.data_ptr(), source.data_ptr(), 32)
    gpu.driver.synchronize(0)
    assert torch.equal(source, target) and gpu.driver.ready(0) and gpu.streams() == 0


class _MemOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


def batch(gpu: EmulatedDevice, operation: int, word: torch.Tensor, count: int) -> int:
    """Give the default stream so many waits (1) or writes (2) of 1."""
    ops = (_MemOp * count)(*(_MemOp(operation, word.data_ptr(), 1) for _ in range(count)))
    return int(gpu.library.cuStreamBatchMemOp_v2(None, count, ops, 0))


@pytest.mark.parametrize(("count", "fine"), [(1, True), (255, True), (256, False)])
def test_batches_have_less_than_256_operations(gpu: EmulatedDevice, count: int, fine: bool) -> None:
    word = torch.zeros(1, dtype=torch.int32)
    assert (batch(gpu, 2, word, count) == 0) == fine
    gpu.finish()
    assert int(word) == int(fine)


# -- bulk stores -----------------------------------------------------------------------------------


def test_rows_of_a_box_before_its_slot_land_in_the_guard(
    gpu: EmulatedDevice, launches: Launches
) -> None:
    slots = launches.scatter(6, 12, world=2, guard=3)  # rows 0-2 and 3-5, tiles of 4
    gpu.finish()
    for slot in slots:
        assert torch.equal(slot[GUARD:], torch.ones(3, 12, dtype=BF16))
    assert not slots[0][:GUARD].any()
    assert not slots[1][: GUARD - 3].any()
    assert slots[1][GUARD - 3 : GUARD].all()  # rows of owner 0


def test_a_straddling_tile_needs_a_guard(gpu: EmulatedDevice, launches: Launches) -> None:
    for guard in (0, 2):
        with pytest.raises(ValueError, match="launch refused: illegal arguments"):
            launches.scatter(6, 12, world=2, guard=guard)
    launches.scatter(8, 12, world=2, guard=0)  # owners begin with tiles


@pytest.mark.parametrize(("row", "column"), [(-1, 0), (0, -1)])
def test_a_box_that_begins_in_front_of_its_map_is_an_error_that_stays(
    gpu: EmulatedDevice, launches: Launches, row: int, column: int
) -> None:
    memory = torch.zeros(8, 8, dtype=BF16)
    place = (ctypes.c_size_t(memory.data_ptr()), 8, 8)
    gpu.library.emulator_store_box(None, *place, 6, 6)
    gpu.finish()
    assert memory.sum() == memory[6:, 6:].sum() == 4  # clipped at the end
    gpu.library.emulator_store_box(None, *place, row, column)
    message = "bulk store begins at row .* of its tensor map: neither may be negative"
    with pytest.raises(RuntimeError, match=f"^a {message}"):
        gpu.finish()
    with pytest.raises(RuntimeError, match=f"cuStreamQuery failed: a {message}"):
        gpu.driver.ready(0)
    with pytest.raises(RuntimeError, match="launch failed with CUDA error 719"):
        launches.kernel("ag_gemm_nk").launch(launches.gemm(4, 8), 0)
    assert gpu.error() and memory.sum() == 4
    gpu.clear_error()
    launches.kernel("ag_gemm_nk").launch(launches.gemm(4, 8), 0)


def test_ranks_of_one_thread_make_few_copies(gpu: EmulatedDevice) -> None:
    """Each piece of rank 0's work waits for rank 1's call."""
    p = Problem("ag_gemm", 640, (64,), 8, BF16)
    with VirtualWorld(8, gpu) as ranks:
        with pytest.raises(ValueError, match=r"need comm_tile_rows >= 5 for M = 640"):
            p.build(ranks.rank(0), tuning=Knobs(comm_tile_rows=4))
        p.build(ranks.rank(0), tuning=Knobs(comm_tile_rows=5)).close()


@pytest.mark.parametrize(("most", "hangs"), [(3, False), (10, True)])
def test_more_copies_than_places_hang_ranks_of_one_thread(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, most: int, hangs: bool
) -> None:
    """Copies of rank 0 wait for the entry of rank 1, whose call the same thread makes later."""
    monkeypatch.setattr(virtual, "MOST_COPIES", most)
    gpu.set_places(16)
    gpu.give_up_after(0.1)
    p = Problem("ag_gemm", 20, (8,), 8, BF16)
    knobs = Knobs(comm_tile_rows=virtual.least_tile_rows(2, 20))
    with VirtualWorld(2, gpu) as ranks, built(ranks, p, tuning=knobs) as ops:
        inputs = OnEmulated(gpu, p, 20, 2, seed=1)
        with pytest.raises(RuntimeError) if hangs else nullcontext():
            outs = call_all(ranks, ops, inputs)
            gpu.finish()
            check_all([inputs], [outs])
        assert gpu.error().startswith("a stream is full: the host waits") == hangs
        gpu.clear_error()


# -- multiprocessors -------------------------------------------------------------------------------


def test_a_block_that_finds_no_room_starves(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.limit_room()
    gpu.starving_after(0.05)
    gate = launches.spin(0, blocks=8)
    assert eventually(gpu.resident)
    other = launches.spin(stream, blocks=1)
    assert eventually(lambda: gpu.starved() != "")
    assert gpu.starved() == (
        "flux_emulated_ag_gemm_nk finds no room for a block; "
        "flux_emulated_ag_gemm_nk on 8 places waits for signal 0"
    )
    other.fill_(1)
    assert not gpu.driver.ready(stream)
    gate.fill_(1)
    gpu.driver.synchronize(stream)
    gpu.clear_error()


def test_blocks_that_have_room_run_together(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.limit_room()
    gpu.starving_after(0.02)
    gate = launches.spin(0, blocks=7)
    launches.spin(stream, blocks=1).fill_(1)
    gpu.driver.synchronize(stream)
    assert not gpu.driver.ready(0) and not gpu.starved()
    gate.fill_(1)


@pytest.mark.parametrize(("blocks", "fits"), [(8, False), (1, True)])
def test_blocks_are_placed_breadth_first(
    gpu: EmulatedDevice, launches: Launches, stream: int, blocks: int, fits: bool
) -> None:
    """Eight blocks would fit on four multiprocessors, but are placed on eight."""
    gpu.limit_room()
    flags = launches.words(1000)
    args, _ = launches.reduction(64, flags=flags, blocks=blocks)
    launches.kernel("gemm_rs_nk").reduce(args, 0)
    assert eventually(gpu.resident)
    launches.spin(stream, blocks=1).fill_(1)
    assert eventually(lambda: gpu.driver.ready(stream), 5.0 if fits else 0.05) == fits
    flags.fill_(1)
    gpu.driver.synchronize(stream)


def test_blocks_of_the_kernel_launched_first_are_placed_first(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.limit_room()
    gpu.starving_after(0.01)
    third = gpu.driver.create_stream()
    gate = launches.spin(0, blocks=4)
    assert eventually(gpu.resident)
    wide = launches.spin(stream, blocks=6)  # of which four find room
    assert eventually(lambda: gpu.starved() != "")
    args, out = launches.reduction(4)
    launches.kernel("gemm_rs_nk").reduce(args, third)
    assert never(lambda: bool(out.any()))
    gate.fill_(1)
    wide.fill_(1)
    gpu.driver.synchronize(third)
    gpu.driver.destroy_stream(third)
    assert out.all()
    gpu.clear_error()


@pytest.mark.parametrize("early", [False, True])
def test_an_early_reduction_starts_when_its_gemm_is_placed(
    gpu: EmulatedDevice, launches: Launches, early: bool
) -> None:
    gpu.limit_room()
    gate = launches.spin(0, blocks=1)
    args, out = launches.reduction(4, early=early)
    launches.kernel("gemm_rs_nk").reduce(args, 0)
    assert eventually(lambda: bool(out.all()), 5.0 if early else 0.05) == early
    assert not gpu.driver.ready(0)  # it ends behind the GEMM
    gate.fill_(1)
    gpu.finish()
    assert out.all()


def test_an_early_reduction_behind_a_copy_is_an_error(
    gpu: EmulatedDevice, launches: Launches
) -> None:
    launches.spin(0, blocks=1).fill_(1)
    word = launches.words(2)
    gpu.driver.copy(0, word.data_ptr(), word.data_ptr() + 4, 4)
    args, _ = launches.reduction(4, early=True)
    with pytest.raises(RuntimeError, match="reduction failed with CUDA error 719"):
        launches.kernel("gemm_rs_nk").reduce(args, 0)
    assert "launched early behind what is no kernel" in gpu.error()
    gpu.clear_error()


@pytest.mark.parametrize("inside", [True, False])
def test_copies_inside_the_device_may_need_room(
    gpu: EmulatedDevice, launches: Launches, stream: int, inside: bool
) -> None:
    gpu.limit_room()
    gpu.copies_need_room()
    words = (launches.words if inside else gpu.pinned)(2, torch.int32)
    words[0] = 1
    gate = launches.spin(0, blocks=8)
    assert eventually(gpu.resident)
    gpu.driver.copy(stream, words.data_ptr() + 4, words.data_ptr(), 4)
    assert eventually(lambda: int(words[1]) == 1, 0.05 if inside else 5.0) != inside
    gate.fill_(1)
    gpu.driver.synchronize(stream)
    assert int(words[1]) == 1


# -- modules and transfers -------------------------------------------------------------------------


def test_loading_a_module_waits_for_kernels(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.load_lazily()
    gpu.give_up_after(0.05)
    first = launches.kernel("ag_gemm_kn")
    gate = launches.spin(0, blocks=1)
    assert eventually(gpu.resident)
    first.launch(launches.gemm(4, 8), stream)  # was prepared
    for load in (
        lambda kernel: kernel.prepare(0),
        lambda kernel: kernel.launch(launches.gemm(4, 8), stream),
    ):
        with pytest.raises(RuntimeError, match="failed with CUDA error 719"):
            load(launches.kernel("ag_gemm_kn_silu", prepared=False))
        assert gpu.error() == (
            "loading a module (flux_emulated_ag_gemm_kn_silu) while "
            "flux_emulated_ag_gemm_nk on 1 places waits for signal 0"
        )
        gate.fill_(1)
        assert eventually(lambda: not gpu.resident())
        gpu.clear_error()
        gate = launches.spin(0, blocks=1)
        assert eventually(gpu.resident)
    gate.fill_(1)
    gpu.finish()
    launches.kernel("ag_gemm_kn_silu", prepared=False).launch(launches.gemm(4, 8), stream)
    gpu.driver.synchronize(stream)


def test_functions_of_torch_are_loaded_by_their_first_use(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.load_lazily()
    gpu.give_up_after(0.05)
    seen: list[int] = []

    def known(number: int) -> None:
        seen.append(number)

    def new() -> None:
        seen.append(0)

    gpu.enqueue(partial(known, 1))
    gpu.finish()
    gate = launches.spin(0, blocks=1)
    assert eventually(gpu.resident)
    with gpu.on_stream(stream):
        gpu.enqueue(partial(known, 2))
        gpu.driver.synchronize(stream)
        with pytest.raises(RuntimeError, match=r"loading a module \(.*new\) while flux_emulated"):
            gpu.enqueue(new)
    gate.fill_(1)
    assert eventually(lambda: not gpu.resident())
    gpu.clear_error()
    gpu.finish()
    assert seen == [1, 2]


def test_pageable_copies_wait_for_the_current_stream(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.give_up_after(0.05)
    gate = launches.spin(stream, blocks=1)
    inputs = OnEmulated(gpu, Problem("gemm_rs", 4, (8,), 8, BF16), 4, 2, seed=1)
    ready = inputs.ready(0)
    with gpu.on_stream(stream):
        with pytest.raises(RuntimeError, match=f"a pageable copy waits for stream {stream}"):
            inputs.ready(0)
        gate.fill_(1)
        gpu.driver.synchronize(stream)
        again = inputs.ready(0)
    for call in (ready, again):
        (got,) = call(lambda x, weight, bias: x)
        assert torch.equal(got, inputs.x[:, :4]) and got.data_ptr() != inputs.x.data_ptr()
    with pytest.raises(IndexError):
        again(lambda *_: None)  # the inputs are gone


# -- queues ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("places", "waits"), [(4, True), (5, False)])
def test_the_host_waits_for_a_stream_that_is_full(
    gpu: EmulatedDevice, launches: Launches, stream: int, places: int, waits: bool
) -> None:
    """A wait and three copies are there."""
    gpu.set_places(places)
    word = launches.words(2)
    address = word.data_ptr()
    gpu.driver.await_signal(stream, address, 1)
    for _ in range(3):
        gpu.driver.copy(stream, address + 4, address + 4, 4)
    write = gpu.library.cuStreamWriteValue32_v2  # without the GIL
    arguments = (ctypes.c_void_p(stream), ctypes.c_size_t(address + 4), 7, 0)
    host = Thread(target=write, args=arguments)
    host.start()
    assert eventually(lambda: not host.is_alive(), 0.05 if waits else 5.0) != waits
    word[0] = 1
    host.join()
    gpu.driver.synchronize(stream)
    assert int(word[1]) == 7


def test_a_host_that_waits_for_itself_is_noticed(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.set_places(2)
    gpu.give_up_after(0.05)
    word = launches.words(1)
    gpu.driver.await_signal(stream, word.data_ptr(), 1)
    for _ in range(2):
        gpu.driver.signal(stream, word.data_ptr(), 2)
    assert gpu.error() == (
        "a stream is full: the host waits for one of its 2 places, "
        "and the first operation (wait) does not end"
    )
    gpu.clear_error()
    word.fill_(1)
    gpu.driver.synchronize(stream)


def test_a_replay_takes_one_place(gpu: EmulatedDevice, launches: Launches, stream: int) -> None:
    gpu.set_places(3)
    words = launches.words(9)
    with gpu.on_stream(stream), gpu.capture() as graph:
        for i in range(8):
            gpu.driver.copy(stream, words.data_ptr() + 4 * i, words.data_ptr() + 32, 4)
    words[8] = 7
    with gpu.on_stream(stream):
        graph.replay()
        gpu.finish()
    assert (words == 7).all()
    graph.close()


@pytest.mark.parametrize(("queues", "stuck"), [(0, False), (1, True)])
def test_a_stream_that_waits_holds_up_its_queue(
    gpu: EmulatedDevice, launches: Launches, stream: int, queues: int, stuck: bool
) -> None:
    gpu.set_queues(queues)
    word = launches.words(1)
    gpu.driver.await_signal(0, word.data_ptr(), 1)
    gpu.driver.signal(stream, word.data_ptr(), 1)
    assert eventually(lambda: gpu.driver.ready(0), 0.05 if stuck else 5.0) != stuck
    word.fill_(1)
    gpu.driver.synchronize(stream)


def test_a_kernel_leaves_its_queue_when_its_blocks_are_placed(
    gpu: EmulatedDevice, launches: Launches, stream: int
) -> None:
    gpu.limit_room()
    gpu.set_queues(1)
    gate, word = launches.spin(0, blocks=8), launches.words(1)
    gpu.driver.signal(stream, word.data_ptr(), 1)
    assert eventually(lambda: int(word) == 1)
    second = launches.spin(stream, blocks=1)  # has no room, and holds up what is behind it
    third = gpu.driver.create_stream()
    gpu.driver.signal(third, word.data_ptr(), 2)
    assert never(lambda: int(word) == 2)
    gate.fill_(1)
    second.fill_(1)
    for each in (0, stream, third):
        gpu.driver.synchronize(each)
    assert int(word) == 2
    gpu.driver.destroy_stream(third)


# -- graphs, peers, the log, reports ---------------------------------------------------------------


@pytest.mark.parametrize("order", ["concurrent", "kernels first"])
@pytest.mark.parametrize("joined", [False, True])
def test_graphs_are_ordered_by_their_edges_only(
    gpu: EmulatedDevice, launches: Launches, stream: int, order: str, joined: bool
) -> None:
    """A kernel and a copy that it waits for: fine if there is an edge, or if they run together."""
    driver, one, signal = gpu.driver, launches.words(1), launches.words(1)
    one.fill_(1)
    home = driver.create_stream()
    with gpu.on_stream(home), gpu.capture() as graph:
        args = launches.gemm(4, 8, timeout_s=0.1)
        args.signals = signal.data_ptr()
        driver.order_after(stream, home)
        driver.copy(stream, signal.data_ptr(), one.data_ptr(), 4)
        if joined:
            driver.order_after(home, stream)
        launches.kernel("ag_gemm_nk").launch(args, home)
        if not joined:
            driver.order_after(home, stream)
    gpu.set_graph_order(order)
    with gpu.on_stream(home):
        graph.replay()
        gpu.finish()
    assert bool(launches.status[0]) == (order == "kernels first" and not joined)
    graph.close()
    driver.destroy_stream(home)


def test_words_of_other_devices_are_not_awaited(gpu: EmulatedDevice, launches: Launches) -> None:
    words = launches.words(3)
    gpu.forbid_waits(words.data_ptr() + 4, 4)
    with pytest.raises(RuntimeError, match="a stream waits for a word of another device"):
        gpu.driver.await_signal(0, words.data_ptr() + 4, 1)
    assert batch(gpu, 1, words[1:], 2) != 0
    for word in (0, 1, 2):
        gpu.driver.signal(0, words.data_ptr() + 4 * word, 1)
    gpu.driver.await_signal(0, words.data_ptr(), 1)
    assert batch(gpu, 1, words[2:], 2) == 0


def test_the_log_has_calls_and_times(gpu: EmulatedDevice, launches: Launches, stream: int) -> None:
    words, kernel = launches.words(2), launches.kernel("ag_gemm_nk")
    gpu.set_copy_delay(2000)
    with gpu.record_calls():
        gpu.driver.copy(stream, words.data_ptr(), words.data_ptr() + 4, 4)
        batch(gpu, 2, words, 3)
        kernel.launch(launches.gemm(8, 8), 0)
        gpu.finish()
        gpu.driver.synchronize(stream)
    calls = gpu.calls()
    names = [(c.name, c.stream) for c in calls[:3]]
    assert names == [("copy", stream), ("batch", 0), ("launch", 0)]
    assert calls[0].details["bytes"] == "4" and calls[1].details["writes"] == "3"
    assert calls[2].details["kernel"] == "flux_emulated_ag_gemm_nk"
    times = {(e.what, e.kind): e for e in gpu.timeline()}
    copy, tile = times["copy", ""], times["flux_emulated_ag_gemm_nk", "tile"]
    whole = times["flux_emulated_ag_gemm_nk", "kernel"]
    assert copy.end_ns - copy.start_ns >= 2_000_000 and copy.stream == stream
    assert whole.start_ns <= tile.start_ns <= tile.end_ns <= whole.end_ns
    gpu.driver.copy(0, words.data_ptr(), words.data_ptr() + 4, 4)
    assert gpu.calls() == calls  # not recorded


def test_kernels_report_failures_to_the_host(gpu: EmulatedDevice, launches: Launches) -> None:
    launches.kernel("ag_gemm_nk").launch(launches.gemm(4, 8), 0)
    gpu.finish()
    assert not launches.report.any()
    launches.spin(0, blocks=1, timeout_s=0.01)
    gpu.finish()
    assert launches.report[:5].tolist() == launches.status[:5].tolist() == [1, 0, 0, 1, 0]
    launches.report.zero_()
    launches.status[:] = torch.tensor([4, 0, 3, 7, 0, 0, 0, 0])  # rank 3 gave up in call 7
    args, _ = launches.reduction(4)
    launches.kernel("gemm_rs_nk").reduce(args, 0)
    gpu.finish()
    assert torch.equal(launches.report, launches.status)
