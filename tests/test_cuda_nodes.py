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

from emulated import EmulatedDevice, emulated_device
from flux import _C, Knobs, PeerTimeoutError, Topology
from flux.transport.device import Memory
from flux.transport.virtual import VirtualWorld
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


pytestmark = pytest.mark.usefixtures("poisoned")


def problem(op: str, max_m: int, n: int = 13, k: int = 10, **options: object) -> Problem:
    return Problem(op, max_m, (n,), k, BF16, **options)  # type: ignore[arg-type]


def cases(seed: int, op: str, nodes: int, lanes: int, count: int) -> list[Case]:
    """Random ones on these nodes, some of them with NUMA domains."""
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
    given = cases(50 + OPS.index(op), op, nodes, lanes, 8 if world <= 4 else 24 // world)
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
@pytest.mark.parametrize(("op", "direction"), [*((op, "push") for op in OPS), ("ag_gemm", "pull")])
def test_buffers_are_free_before_they_are_reused(
    device: EmulatedDevice,
    op: str,
    direction: str,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tile per rank and call, so that a delay lets a rank run a whole call ahead of a copy."""
    monkeypatch.setenv("FLUX_POISON", poison)
    world, nodes = 4, 2
    p = problem(op, 8, n=16 if op == "ag_gemm" else 8, k=4)
    everything = [Inputs(p, 8, world, seed=i) for i in range(40)]
    device.set_delay(3000)
    with VirtualWorld(world, device, nodes) as ranks:
        ops = [p.build(ranks.rank(r), tuning=Knobs(direction=direction)) for r in range(world)]
        outs = call_on_and_on(ranks, ops, everything)
        device.finish()
        for o in ops:
            o.close()
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for r in range(world):
            inputs.check(of_ranks[r], r, "two_levels")


# -- one-sided puts --------------------------------------------------------------------------------


class HeapWorld(VirtualWorld):
    """Its remotes are NVSHMEM's: each rank has pad, mail and data in a symmetric heap."""

    MAIL = 8 * 4096  # bytes

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        op = self._ops[number]
        if op.memory is None:
            self.mail_at = -(-words * 4 // 256) * 256
            begin = self.mail_at + self.MAIL
            heaps = [self.device.zeros(begin + data_bytes, torch.uint8) for _ in range(self.world)]
            begins = (ctypes.c_size_t * self.world)(*(heap.data_ptr() for heap in heaps))
            size = ctypes.c_size_t(begin + data_bytes)
            self.device.library.emulator_add_heaps(self.world, begins, size)  # type: ignore
            op.memory = Memory(
                [heap[: words * 4].view(torch.int32) for heap in heaps],
                [heap[begin:] for heap in heaps],
            )
        return op.memory

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote:
        assert 8 * _C.mail_words(self.world, boxes) <= self.MAIL
        pad = memory.pads[rank].data_ptr()

        def address(name: str) -> int:
            function = getattr(self.device.library, name)  # type: ignore[attr-defined]
            return ctypes.cast(function, ctypes.c_void_p).value or 0

        return _C.NvshmemRemote(
            driver=self.device.driver,
            put=address("emulator_put_signal"),
            raise_=address("emulator_signal"),
            rank=rank,
            world=self.world,
            others=[r for r in range(self.world) if memory.data[r].numel() == 0],
            data=memory.data[rank].data_ptr(),
            mail=pad + self.mail_at,
            status=pad + 2 * self.world * 4,
            boxes=boxes,
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "lanes"), [(2, 2), (3, 1)])
def test_one_sided_puts(device: EmulatedDevice, op: str, nodes: int, lanes: int) -> None:
    world, p = nodes * lanes, problem(op, 33)
    rng = random.Random(4)
    everything = [Inputs(p, rng.randint(1, 33), world, seed=s) for s in range(15)]
    device.set_delay(1000)
    with HeapWorld(world, device, nodes) as ranks:
        ops = [p.build(ranks.rank(r), tuning=Knobs(comm_tile_rows=3)) for r in range(world)]
        outs = call_on_and_on(ranks, ops, everything)
        device.finish()
        for o in ops:
            o.close()
    for inputs, of_ranks in zip(everything, outs, strict=True):
        for r in range(world):
            inputs.check(of_ranks[r], r, "two_levels")


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "how", "kind"),
    [
        *((op, how, VirtualWorld) for op in OPS for how in ("wait", "close")),
        ("gemm_rs", "wait", HeapWorld),
    ],
)
def test_a_node_that_does_not_call_is_noticed(
    device: EmulatedDevice, op: str, how: str, kind: type[VirtualWorld]
) -> None:
    """Ranks 0 and 1 call, those of the other node do not."""
    device.set_delay(0)
    p = problem(op, 16)
    before = device.streams()
    with kind(4, device, 2) as ranks:
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


def test_words_are_renewed(device: EmulatedDevice) -> None:
    """Boxes that no call of late has raised must not look new after 2**31 calls."""
    device.set_delay(0)
    for kind, name in itertools.product((VirtualWorld, HeapWorld), OPS):
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


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": Topology(1, 2, 2)}, "share memory in 2 nodes of 2, and the topology has 1"),
        ({"topology": Topology(2, 1, 2, (0, 1, 0, 1))}, "share memory in 2 nodes of 2"),
        ({"tuning": Knobs(reduce="in_flight")}, "needs memory that all ranks can address"),
    ],
)
def test_what_nodes_cannot_do(
    device: EmulatedDevice, options: dict[str, object], message: str
) -> None:
    with VirtualWorld(4, device, 2) as ranks, pytest.raises(ValueError, match=message):
        problem("gemm_rs", 8).build(ranks.rank(0), **options)


def test_the_world_is_checked(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
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
