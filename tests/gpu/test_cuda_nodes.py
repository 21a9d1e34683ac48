"""The CUDA backend on several nodes, played by ranks on one emulated device: those of different
nodes have no address of each other's memory, and a remote moves rows between them."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emulated import EmulatedDevice, HeapWorld, Puts, emulated_device
from fake_nvshmem import puts_of
from flux import _C, Knobs, PeerTimeoutError, Topology
from flux.transport.base import Memory
from flux.transport.virtual import VirtualWorld
from harness import STRESS, more
from matrix import OPS
from op_cases import Case, random_cases
from reference import Inputs, Problem
from virtual_cases import call_on_and_on, check_cases

BF16 = torch.bfloat16
MESHES = [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 4)]


@pytest.fixture(scope="module")
def device(emulator: Path) -> Iterator[EmulatedDevice]:
    with emulated_device(emulator) as device:
        device.queues = 64  # for 16 ranks
        yield device


class ByPuts:
    """Factory of worlds whose nodes use only puts; arguments as of VirtualWorld."""

    def __init__(self, puts: Puts) -> None:
        self.puts = puts

    def __call__(self, world: int, device: EmulatedDevice, nodes: int) -> HeapWorld:
        return HeapWorld(world, device, nodes, self.puts)


@pytest.fixture(scope="module")
def by_puts(device: EmulatedDevice, fake_nvshmem_library: Path) -> ByPuts:
    return ByPuts(puts_of(device, fake_nvshmem_library))


pytestmark = pytest.mark.usefixtures("poisoned")


def problem(op: str, max_m: int, n: int = 13, k: int = 10, **options: object) -> Problem:
    return Problem(op, max_m, (n,), k, BF16, **options)  # type: ignore[arg-type]


def cases(seed: int, op: str, nodes: int, lanes: int, count: int) -> list[Case]:
    """Return random cases on these nodes, some of them with NUMA domains."""
    rng = random.Random(seed)
    topologies = [None, *(Topology(nodes, d, lanes // d) for d in (1, 2) if lanes % d == 0)]
    return [
        replace(
            case,
            topology=rng.choice(topologies),
            knobs=replace(case.knobs, reduce=None),
            delay_s=rng.choice([0.0, 1e-4]),
        )
        for case in random_cases(seed, op, nodes * lanes, count)
    ]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "lanes"), MESHES)
def test_random_cases(device: EmulatedDevice, op: str, nodes: int, lanes: int) -> None:
    world = nodes * lanes
    given = cases(50 + OPS.index(op), op, nodes, lanes, (6 if world <= 4 else 16 // world) * STRESS)
    calls = 0
    for case in given:
        device.set_delay(int(case.delay_s * 1e7))
        calls += check_cases(device, world, [case], device.finish, nodes=nodes)
    assert calls == sum(len(case.calls) for case in given)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("direction", "nodes", "lanes"), [("push", 2, 2), ("pull", 2, 2), ("push", 3, 1)]
)
def test_back_to_back_calls_repeat_bitwise(
    device: EmulatedDevice, op: str, direction: str, nodes: int, lanes: int
) -> None:
    """Nothing waits between calls; M changes, so buffers and boxes are reused at once."""
    world, p = nodes * lanes, problem(op, 33)
    rng = random.Random(3)
    sizes = [rng.randint(1, 33) for _ in range(15)]
    everything = [Inputs(p, m, world, seed=i) for i, m in enumerate(sizes)]
    found = []
    for delay in (0, 1000):
        device.set_delay(delay)
        with VirtualWorld(world, device, nodes) as ranks:
            knobs = Knobs(direction=direction, comm_tile_rows=3)
            ops = [p.build(ranks.rank(r), tuning=knobs) for r in range(world)]
            outs = call_on_and_on(ranks, ops, everything)
            device.finish()
            for o in ops:
                o.close()
        for inputs, of_ranks in zip(everything, outs, strict=True):
            for r in range(world):
                inputs.check(of_ranks[r], r, "two_levels")
        found.append(outs)
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize(
    ("op", "direction", "puts"),
    [
        *((op, "push", puts) for op in OPS for puts in (False, True)),
        ("ag_gemm", "pull", False),
    ],
)
def test_buffers_are_free_before_they_are_reused(
    device: EmulatedDevice,
    by_puts: ByPuts,
    op: str,
    direction: str,
    puts: bool,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tile per rank and call, so that a delay lets a rank run a whole call ahead of a copy."""
    monkeypatch.setenv("FLUX_POISON", poison)
    world, nodes = 4, 2
    p = problem(op, 8, n=16 if op == "ag_gemm" else 8, k=4)
    everything = [Inputs(p, 8, world, seed=i) for i in range(40)]
    device.set_delay(3000)
    with by_puts(world, device, nodes) if puts else VirtualWorld(world, device, nodes) as ranks:
        ops = [p.build(ranks.rank(r), tuning=Knobs(direction=direction)) for r in range(world)]
        outs = call_on_and_on(ranks, ops, everything)
        device.finish()
        for o in ops:
            o.close()
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for r in range(world):
            inputs.check(of_ranks[r], r, "two_levels")


# -- one-sided puts --------------------------------------------------------------------------------


def bits_of(
    world: VirtualWorld, p: Problem, knobs: Knobs, everything: list[Inputs]
) -> list[list[list[torch.Tensor]]]:
    """Make back-to-back calls, check them, and return results by call and rank."""
    with world as ranks:
        ops = [p.build(ranks.rank(r), tuning=knobs) for r in range(ranks.world)]
        outs = call_on_and_on(ranks, ops, everything)
        ranks.device.finish()  # type: ignore[attr-defined]
        for o in ops:
            o.close()
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for r in range(world.world):
            inputs.check(of_ranks[r], r, "two_levels")
    return outs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "lanes"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_one_sided_puts_give_the_bits_of_exchanges(
    device: EmulatedDevice, by_puts: ByPuts, op: str, nodes: int, lanes: int
) -> None:
    """Back to back, late, with an M that changes; the bits of exchanges on streams, where only who
    moves the sums is different."""
    world, p = nodes * lanes, problem(op, 33)
    rng = random.Random(4)
    everything = [Inputs(p, rng.randint(1, 33), world, seed=s) for s in range(12)]
    knobs = Knobs(comm_tile_rows=3)
    device.set_delay(1000)
    found = bits_of(by_puts(world, device, nodes), p, knobs, everything)
    device.set_delay(0)
    expected = bits_of(VirtualWorld(world, device, nodes), p, knobs, everything)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("op", OPS)
def test_one_sided_puts_work_on_several_streams(
    device: EmulatedDevice, by_puts: ByPuts, op: str
) -> None:
    """A rank's calls go round three streams, which nothing else orders."""
    world, p = 4, problem(op, 21)
    everything = [Inputs(p, 21 - s, world, seed=s) for s in range(9)]
    device.set_delay(1000)
    with by_puts(world, device, 2) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(world)]
        streams = [[ranks.new_stream() for _ in range(3)] for _ in range(world)]
        outs: list[list[list[torch.Tensor]]] = []
        for number, inputs in enumerate(everything):
            outs.append([])
            for r in range(world):
                with device.on_stream(streams[r][number % 3]):
                    outs[-1].append(inputs.call(ops[r], r))
        for o in ops:
            o.wait()
            o.close()
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for r in range(world):
            inputs.check(of_ranks[r], r, "two_levels")


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "how", "puts"),
    [
        *((op, "wait", False) for op in ("gemm_ar", *more("ag_gemm", "gemm_rs"))),
        *((op, "close", False) for op in ("ag_gemm", *more("gemm_rs", "gemm_ar"))),
        *((op, how, True) for op in ("gemm_rs", *more("gemm_ar")) for how in ("wait", "close")),
    ],
)
def test_a_node_that_does_not_call_is_noticed(
    device: EmulatedDevice, by_puts: ByPuts, op: str, how: str, puts: bool
) -> None:
    """Ranks 0 and 1 call, those of the other node do not."""
    device.set_delay(0)
    p = problem(op, 16)
    before = device.streams()
    with by_puts(4, device, 2) if puts else VirtualWorld(4, device, 2) as ranks:
        ops = [p.build(ranks.rank(r), timeout_s=1.0) for r in range(4)]
        inputs = Inputs(p, 16, 4, seed=1)
        good = ranks.run(lambda r: inputs.call(ops[r], r))
        device.finish()
        inputs.check(good[0], 0, "two_levels")
        ranks.run(lambda r: inputs.call(ops[r], r) if r < 2 else None)
        for rank in (0, 1):
            if how == "wait":
                with pytest.raises(PeerTimeoutError, match=rf"rank {rank}"):
                    ops[rank].wait()
            ops[rank].close()
        with pytest.raises(PeerTimeoutError, match=r"rank 2: rank [01] gave up in call 2"):
            ops[2].wait()
        for o in ops:
            o.close()
        device.finish()
    assert device.streams() == before


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


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_a_timeout_names_the_node_whose_sum_is_missing(
    device: EmulatedDevice, by_puts: ByPuts, op: str
) -> None:
    device.set_delay(0)
    p = problem(op, 16)
    with SilentNode(3, device, 3, by_puts.puts) as ranks:
        ops = [p.build(ranks.rank(r), timeout_s=0.5) for r in range(3)]
        inputs = Inputs(p, 16, 3, seed=1)
        outs = ranks.run(lambda r: inputs.call(ops[r], r))
        device.finish()
        for rank in (0, 2):  # the check of one, which then gives up, is heard by the other
            named = rf"rank {rank} waited more than 0.5 s for the sum of node 1, tile"
            with pytest.raises(PeerTimeoutError, match=named):
                ops[rank]._backend.check(wait=False)
        if op == "gemm_rs":
            assert bool(outs[0][0].isnan().all()) and bool(outs[2][0].isnan().all())
            inputs.check(outs[1], 1, "two_levels")
        for made in ops:
            made.close()


def test_unused_signal_words_are_refreshed_before_epochs_wrap(
    device: EmulatedDevice, by_puts: ByPuts
) -> None:
    """A word that no recent call has raised must not look new after 2**31 calls."""
    device.set_delay(0)
    for kind, name in itertools.product((VirtualWorld, by_puts), OPS):
        p = problem(name, 40)
        with kind(2, device, 2) as ranks:
            ops = [p.build(ranks.rank(r), tuning=Knobs(comm_tile_rows=2)) for r in range(2)]
            for epoch, m in ((0, 40), (2**30 - 1, 2), (2**31 - 1, 2), (2**31 + 1, 40)):
                for o in ops:
                    o._backend.native.epoch = epoch
                inputs = Inputs(p, m, 2, seed=m)
                device.set_delay(3000 if m == 40 else 0)
                outs = ranks.run(lambda r, inputs=inputs, ops=ops: inputs.call(ops[r], r))
                device.finish()
                for r in range(2):
                    inputs.check(outs[r], r, "two_levels")
            for o in ops:
                o.close()


# -- invalid arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": Topology(1, 2, 2)}, "share memory in 2 nodes of 2, and the topology has 1"),
        ({"topology": Topology(2, 1, 2, (0, 1, 0, 1))}, "share memory in 2 nodes of 2"),
        ({"tuning": Knobs(reduce="in_flight")}, "needs memory that all ranks can address"),
    ],
)
def test_options_unsupported_on_nodes_raise(
    device: EmulatedDevice, options: dict[str, object], message: str
) -> None:
    with VirtualWorld(4, device, 2) as ranks, pytest.raises(ValueError, match=message):
        problem("gemm_rs", 8).build(ranks.rank(0), **options)


def test_invalid_node_layout_raises(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nodes must divide the 4 ranks of the world, got 3"):
        VirtualWorld(4, device, nodes=3)
    monkeypatch.setattr(device, "queues", 32)
    with pytest.raises(ValueError, match="1 to 10 ranks, got 12"):
        VirtualWorld(12, device, nodes=2)
    monkeypatch.setattr(device, "queues", 256)
    with VirtualWorld(34, device, 2) as ranks:
        for op in OPS:
            with pytest.raises(ValueError, match="serves up to 32 ranks, the group has 34"):
                problem(op, 8).build(ranks.rank(0))
