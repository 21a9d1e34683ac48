"""Multiprocessors of the PTX machine: what blocks take, where they run, what waits for room."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from ptx_machine import Device, Module, Occupancy, PtxError
from ptx_text import LANES, kernel

KIB = 1024
WHOLE = 200 * KIB  # dynamic shared memory of a block that needs a multiprocessor for itself

# p0: 32-bit words. Thread 0 counts in word 0, then waits until word 1 is set.
WAITS = """
    ld.param.u64 %rd1, [p0];
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    red.global.add.u32 [%rd1], 1;
WAIT:
    ld.volatile.global.u32 %r1, [%rd1+4];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra WAIT;
END:
"""

# Sets word 1.
TELLS = """
    ld.param.u64 %rd1, [p0];
    st.volatile.global.u32 [%rd1+4], 1;
"""

# Stores %smid, %nsmid, %warpid and %nwarpid at word 4 * (number of the block).
PLACE = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r2, %smid;
    mov.u32 %r3, %nsmid;
    mov.u32 %r4, %warpid;
    mov.u32 %r5, %nwarpid;
    st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
"""


def words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def occupancy(
    body: str = "", attributes: str = "", model: str = "H200", block: int = LANES, shared: int = 0
) -> Occupancy:
    module = Module(kernel(body, 1, attributes=attributes))
    return Device(model=model).occupancy(module, "k", block=block, dynamic_shared=shared)


class Streams:
    """Kernels that run at the same time, on one device."""

    def __init__(self, **options: Any) -> None:
        self.device = Device(**options)
        self.threads: list[threading.Thread] = []
        self.errors: list[str] = []

    def launch(self, body: str, cells: torch.Tensor, **options: Any) -> None:
        module = Module(kernel(body, 1, attributes=options.pop("attributes", "")))
        settings: dict[str, Any] = {"grid": 1, "block": LANES, **options}

        def run() -> None:
            try:
                self.device.launch(module, "k", args=[cells], **settings)
            except PtxError as error:
                self.errors.append(str(error))

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def finish(self) -> list[str]:
        for thread in self.threads:
            thread.join()
        return self.errors


def counted(cells: torch.Tensor, number: int) -> None:
    """Wait until so many blocks have counted themselves."""
    end = time.monotonic() + 10
    while int(cells[0]) < number:
        assert time.monotonic() < end
        time.sleep(0.002)


# -- what a block takes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, shared, blocks",
    [
        ("H200", 227 * KIB, 1),
        ("H200", 113 * KIB, 2),
        ("H200", 113 * KIB + 1, 1),
        ("A100", 163 * KIB, 1),
        ("A100", 81 * KIB, 2),
        ("A100", 81 * KIB + 1, 1),
    ],
)
def test_shared_memory_of_blocks(model: str, shared: int, blocks: int) -> None:
    """A block takes one KiB beside its own, of 228 or 164."""
    assert occupancy(model=model, shared=shared).blocks == blocks


def test_threads_and_blocks_of_a_multiprocessor() -> None:
    assert occupancy(block=1024).blocks == 2
    assert occupancy(block=1000).threads == 1024  # whole warps
    assert occupancy(block=LANES).blocks == 32  # not 64


def test_registers_of_blocks() -> None:
    """A kernel with setmaxnreg has what its launch bounds leave: 168 for 384 threads."""
    hands = "setmaxnreg.dec.sync.aligned.u32 24;"
    result = occupancy(hands, ".maxntid 384", block=384)
    assert (result.registers_per_thread, result.registers, result.blocks) == (168, 64512, 1)
    assert occupancy(hands, ".maxnreg 64", block=384).blocks == 2
    assert occupancy(hands, ".maxntid 128\n.minnctapersm 4", block=128).blocks == 4


def test_registers_are_estimated_by_what_is_alive() -> None:
    """40 floats of a loop, and the registers around them; no more than the kernel may have."""
    many = range(10, 50)
    body = f"""
        ld.param.u64 %rd1, [p0];
        {" ".join(f"mov.f32 %f{i}, 0f00000000;" for i in many)}
    AGAIN:
        ld.volatile.global.f32 %f1, [%rd1];
        {" ".join(f"fma.rn.f32 %f{i}, %f1, %f1, %f{i};" for i in many)}
        setp.eq.f32 %p1, %f1, 0f00000000;
        @%p1 bra AGAIN;
        {" ".join(f"st.global.f32 [%rd1], %f{i};" for i in many)}
    """
    assert 43 <= occupancy(body).registers_per_thread <= 56
    assert occupancy(body, ".maxnreg 32").registers_per_thread == 32
    assert occupancy("").registers_per_thread == 16


def test_blocks_that_never_fit_are_refused() -> None:
    with pytest.raises(PtxError, match=r"needs 32 threads(.|\n)*has 65536 registers and 233472"):
        Device().launch(
            Module(kernel("", 0)), "k", grid=1, block=32, args=[], dynamic_shared=228 * KIB
        )
    with pytest.raises(PtxError, match="no group of multiprocessors has room for 16 blocks"):
        Device().launch(
            Module(kernel("", 0)),
            "k",
            grid=16,
            block=32,
            cluster=16,
            args=[],
            dynamic_shared=WHOLE,
        )


def test_devices_have_a_name() -> None:
    with pytest.raises(PtxError, match="no device is called B1; there are A100 and H200"):
        Device(model="B1")


# -- where blocks run ------------------------------------------------------------------------------


def test_blocks_are_placed_breadth_first() -> None:
    cells = words(4 * 10)
    module = Module(kernel(PLACE, 1))
    Device(multiprocessors=4).launch(module, "k", grid=10, block=LANES, args=[cells])
    result = cells.view(10, 4).tolist()
    assert [row[0] for row in result] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert all(row[1:] == [4, 0, 64] for row in result)


def test_all_multiprocessors_of_an_h200() -> None:
    cells = words(4 * 132)
    module = Module(kernel(PLACE, 1))
    settings: dict[str, Any] = {"block": LANES, "args": [cells], "seed": 3}
    Device(multiprocessors=None).launch(module, "k", grid=132, **settings)
    assert sorted(cells.view(132, 4)[:, 0].tolist()) == list(range(132))


def test_a_cluster_runs_in_one_group() -> None:
    """Groups of an H200 have 18, 18, 16, ... multiprocessors."""
    cells = words(4 * 32)
    module = Module(kernel(PLACE, 1))
    device = Device(multiprocessors=None)
    device.launch(module, "k", grid=32, cluster=16, block=LANES, args=[cells], dynamic_shared=WHOLE)
    first, second = (set(part) for part in cells.view(2, 16, 4)[:, :, 0].tolist())
    assert len(first) == len(second) == 16
    assert first <= set(range(18)) and second <= set(range(18, 36))


# -- waiting for room ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_of_a_grid_that_wait_for_one_without_room(seed: int) -> None:
    """The last block tells the others, but finds no multiprocessor."""
    body = (
        """
        mov.u32 %r20, %ctaid.x;
        setp.eq.u32 %p5, %r20, 2;
        @%p5 bra TELL;
    """
        + WAITS
        + "bra.uni OVER; TELL:"
        + TELLS
        + "OVER:"
    )
    module = Module(kernel(body, 1))

    def launch(multiprocessors: int) -> None:
        device = Device(multiprocessors=multiprocessors, patience=0.2)
        settings: dict[str, Any] = {"dynamic_shared": WHOLE, "seed": seed, "args": [words(2)]}
        device.launch(module, "k", grid=3, block=LANES, **settings)

    launch(3)
    with pytest.raises(PtxError) as raised:
        launch(2)
    text = str(raised.value)
    assert "deadlock: blocks wait for room on 2 multiprocessors of H200" in text
    assert "k waits for room for 1 blocks, each of 32 threads" in text
    assert "k has room for 2 blocks" in text and "warp 0, lanes 00000001" in text
    assert "PTX line" in text


def test_a_kernel_that_holds_what_its_peer_needs() -> None:
    """Both are named, with what the one that runs is doing."""
    cells = words(2)
    streams = Streams(multiprocessors=2, patience=0.3)
    streams.launch(WAITS, cells, grid=2, dynamic_shared=WHOLE)
    counted(cells, 2)
    streams.launch(TELLS, cells, dynamic_shared=WHOLE)
    first, second = streams.finish()
    assert first == second
    assert "k waits for room for 1 blocks" in first and "k has room for 2 blocks" in first
    assert "lanes 00000001: k, PTX line" in first


def test_a_peer_that_has_room_ends_the_wait() -> None:
    cells = words(2)
    streams = Streams(multiprocessors=3, patience=5)
    streams.launch(WAITS, cells, grid=2, dynamic_shared=WHOLE)
    counted(cells, 2)
    streams.launch(TELLS, cells, dynamic_shared=WHOLE)
    assert streams.finish() == []


def test_room_is_given_in_the_order_of_launches() -> None:
    """A small kernel waits behind one that has no room, though it would have some."""
    cells, others = words(2), words(2)
    streams = Streams(multiprocessors=2, patience=0.3)
    streams.launch(WAITS, cells, grid=1, dynamic_shared=WHOLE)
    counted(cells, 1)
    streams.launch(WAITS, others, grid=2, dynamic_shared=WHOLE)
    counted(others, 1)  # the other block has no room
    streams.launch(TELLS, cells)
    errors = streams.finish()
    assert len(errors) == 3
    assert errors[0].count("waits for room") == 2


def test_a_kernel_that_fails_gives_its_room_back() -> None:
    device = Device(multiprocessors=2, patience=0.2)
    settings: dict[str, Any] = {"grid": 2, "block": LANES, "dynamic_shared": WHOLE}
    with pytest.raises(PtxError, match="trap"):
        device.launch(Module(kernel("trap;", 0)), "k", args=[], **settings)
    assert device.launch(Module(kernel("", 0)), "k", args=[], **settings).blocks == 2


def test_kernels_that_get_on_are_waited_for() -> None:
    """A kernel that stores now and then is no deadlock, however long another waits for room."""
    busy = """
        ld.param.u64 %rd1, [p0];
        mov.u32 %r1, 0;
    AGAIN:
        st.volatile.global.u32 [%rd1+8], %r1;
        red.global.add.u32 [%rd1], 1;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, 30000;
        @%p1 bra AGAIN;
    """
    cells = words(3)
    streams = Streams(multiprocessors=1, patience=0.05)
    streams.launch(busy, cells, dynamic_shared=WHOLE)
    counted(cells, 1)
    streams.launch(TELLS, cells, dynamic_shared=WHOLE)
    assert streams.finish() == []
    assert cells[1] == 1


# A GEMM of sm_90 needs a multiprocessor for itself: 384 threads with 168 registers.
GEMM = {"block": 384, "attributes": ".maxntid 384"}
HANDS = "setmaxnreg.dec.sync.aligned.u32 24;"


@pytest.mark.parametrize("blocks, starves", [(16, True), (2, False)])
def test_a_reduction_leaves_room_for_the_gemm_that_it_waits_for(blocks: int, starves: bool) -> None:
    """Two ranks share a GPU of eight multiprocessors, and may use two each.

    The reduction of one waits for the GEMM of the other. With as many blocks as fit on two
    multiprocessors, instead of two, it has one or two on each of the eight.
    """
    cells = words(2)
    streams = Streams(multiprocessors=8, patience=0.3)
    streams.launch(WAITS, cells, grid=blocks, block=256)
    counted(cells, blocks)
    streams.launch(HANDS + TELLS, cells, grid=2, **GEMM)
    errors = streams.finish()
    if starves:
        assert "k waits for room for 2 blocks, each of 384 threads, 64512 registers" in errors[0]
        assert f"k has room for {blocks} blocks, each of 256 threads" in errors[0]
    else:
        assert not errors
