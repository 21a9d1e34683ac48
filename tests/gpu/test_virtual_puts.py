"""One-sided puts between virtual nodes, with flux's GEMMs and libflux_nvshmem on the PTX machine.

All ranks are in one process, so the machine finds accesses of different ranks that no word orders.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emulated import HeapWorld, Puts
from emulated_nvshmem import puts_of
from flux import _C, Knobs, PeerTimeoutError
from flux.transport.base import Memory
from flux.transport.virtual import VirtualWorld
from harness import STRESS, more
from matrix import OPS
from ptx_device import PtxDevice
from reference import Inputs, Problem
from virtual_cases import (
    built,
    call_all,
    check_all,
    check_missing_node,
    check_same_bits,
    checked_calls,
)

BF16 = torch.bfloat16
ADDS = ("gemm_rs", "gemm_ar")  # ops with a relay

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def puts(ptx: PtxDevice, nvshmem_library: Path) -> Puts:
    ptx.cuda.seed = 1
    return puts_of(ptx, nvshmem_library)


def assert_ran(ptx: PtxDevice, *kernels: str) -> None:
    """Check that the machine has executed these kernels of libflux_nvshmem."""
    executed = ptx.cuda.counters()
    for name in kernels:
        assert any(name in kernel for kernel in executed), f"{name} did not run"


def problem(op: str, max_m: int, world: int) -> Problem:
    """As small as kernels take it."""
    return Problem(op, max_m, (8 * world,), 8 * world, BF16)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "lanes"), [(2, 2), (3, 1), *more((2, 1), (4, 2))])
def test_puts_give_the_bits_of_exchanges(
    ptx: PtxDevice, puts: Puts, op: str, nodes: int, lanes: int
) -> None:
    """Back to back, late, with an M that changes; the bits of exchanges on streams, where only who
    moves the sums is different."""
    world = nodes * lanes
    p = problem(op, 33, world)
    rng = random.Random(4)
    everything = [Inputs(p, rng.randint(1, 33), world, seed=s) for s in range(4 * STRESS)]
    knobs = Knobs(comm_tile_rows=3)
    with ptx.room_for(world):
        ptx.set_delay(1000)
        by_puts = checked_calls(
            HeapWorld(world, ptx, nodes, puts), p, everything, "two_levels", tuning=knobs
        )
        ptx.set_delay(0)
        expected = checked_calls(
            VirtualWorld(world, ptx, nodes), p, everything, "two_levels", tuning=knobs
        )
    check_same_bits(by_puts, expected)


@pytest.mark.parametrize("op", OPS)
def test_tiles_in_several_rows_and_columns(ptx: PtxDevice, puts: Puts, op: str) -> None:
    """Strips wait for flags of several tiles; two ranks share a node."""
    p = Problem(op, 300, (512,), 64, BF16)
    everything = [Inputs(p, m, 4, seed=m) for m in (300, 131)]
    checked_calls(HeapWorld(4, ptx, 2, puts), p, everything, "two_levels")
    if op in ADDS:
        assert_ran(ptx, "relay_kernel", "node_sum_kernel")


@pytest.mark.parametrize("poison", ["1", *more("0")])
@pytest.mark.parametrize("op", OPS)
def test_buffers_are_free_before_they_are_reused(
    ptx: PtxDevice, puts: Puts, op: str, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile per rank and call, so that a delay lets a rank run a whole call ahead of a put."""
    monkeypatch.setenv("FLUX_POISON", poison)
    p = problem(op, 4, 2)
    ptx.set_delay(20_000)
    everything = [Inputs(p, 4, 2, seed=i) for i in range(12 * STRESS)]
    checked_calls(HeapWorld(2, ptx, 2, puts), p, everything, "two_levels")
    ptx.set_delay(0)


@pytest.mark.parametrize("op", OPS)
def test_puts_work_on_several_streams(ptx: PtxDevice, puts: Puts, op: str) -> None:
    """A rank's calls go round three streams, which nothing else orders."""
    world, nodes = 2, 2
    p = problem(op, 21, world)
    everything = [Inputs(p, 21 - s, world, seed=s) for s in range(6)]
    ptx.set_delay(1000)
    with HeapWorld(world, ptx, nodes, puts) as ranks, built(ranks, p) as ops:
        streams = [[ranks.new_stream() for _ in range(3)] for _ in range(world)]
        ready = [[inputs.ready(r) for inputs in everything] for r in range(world)]
        outs: list[list[list[torch.Tensor]]] = []
        for number in range(len(everything)):
            outs.append([])
            for r in range(world):
                with ptx.on_stream(streams[r][number % 3]):
                    outs[-1].append(ready[r][number](ops[r]))
        for o in ops:
            o.wait()
    ptx.set_delay(0)
    ptx.check()
    check_all(everything, outs, "two_levels")


@pytest.mark.parametrize("how", ["wait", *more("close")])
@pytest.mark.parametrize("op", ["gemm_rs", *more("gemm_ar")])
def test_a_node_that_does_not_call_is_noticed(
    ptx: PtxDevice, puts: Puts, op: str, how: str
) -> None:
    before = ptx.streams()
    check_missing_node(HeapWorld(4, ptx, 2, puts), problem(op, 16, 4), how, timeout_s=1.0)
    assert ptx.streams() == before


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _sends_nothing(args: int, stream: int) -> int:
    """In place of the relay."""
    return 0


class SilentNode(HeapWorld):
    """Its rank 1, alone on node 1, makes its calls but puts no sums."""

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote:
        before, address = self.puts, ctypes.cast(_sends_nothing, ctypes.c_void_p).value
        assert address
        self.puts = replace(before, relay=address) if rank == 1 else before
        try:
            return super().remote(number, rank, memory, boxes)
        finally:
            self.puts = before


@pytest.mark.parametrize("op", ADDS)
def test_a_timeout_names_the_node_whose_sum_is_missing(ptx: PtxDevice, puts: Puts, op: str) -> None:
    p = problem(op, 16, 3)
    with SilentNode(3, ptx, 3, puts) as ranks, built(ranks, p, timeout_s=1.0) as ops:
        inputs = Inputs(p, 16, 3, seed=1)
        outs = call_all(ranks, ops, inputs)
        ptx.finish()
        for rank in (0, 2):  # the check of one, which then gives up, is heard by the other
            named = rf"rank {rank} waited more than 1 s for the sum of node 1, tile"
            with pytest.raises(PeerTimeoutError, match=named):
                ops[rank]._backend.check(wait=False)
        if op == "gemm_rs":
            assert bool(outs[0][0].isnan().all()) and bool(outs[2][0].isnan().all())
            inputs.check(outs[1], 1, "two_levels")


@pytest.mark.parametrize("op", OPS)
def test_unused_signal_words_are_refreshed_before_epochs_wrap(
    ptx: PtxDevice, puts: Puts, op: str
) -> None:
    """A word that no recent call has raised must not look new after 2**31 calls."""
    p = problem(op, 40, 2)
    knobs = Knobs(comm_tile_rows=2)
    with HeapWorld(2, ptx, 2, puts) as ranks, built(ranks, p, tuning=knobs) as ops:
        for epoch, m in ((0, 40), (2**30 - 1, 2), (2**31 - 1, 2), (2**31 + 1, 40)):
            for o in ops:
                o._backend.native.epoch = epoch
            inputs = Inputs(p, m, 2, seed=m)
            ptx.set_delay(3000 if m == 40 else 0)
            outs = call_all(ranks, ops, inputs)
            ptx.finish()
            check_all([inputs], [outs], "two_levels")
    ptx.set_delay(0)
