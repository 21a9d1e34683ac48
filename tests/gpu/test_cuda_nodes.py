"""The CUDA backend on several nodes, played by ranks on one emulated device: those of different
nodes have no address of each other's memory, and a remote moves rows between them on streams. What
NVSHMEM's puts move: test_virtual_puts.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from flux import Knobs, Topology
from flux.transport.virtual import VirtualWorld
from harness import STRESS, more
from matrix import OPS
from op_cases import Case, random_cases
from reference import Inputs, Problem
from virtual_cases import call_on_and_on, check_cases, check_missing_node

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


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "how"),
    [
        *((op, "wait") for op in ("gemm_ar", *more("ag_gemm", "gemm_rs"))),
        *((op, "close") for op in ("ag_gemm", *more("gemm_rs", "gemm_ar"))),
    ],
)
def test_a_node_that_does_not_call_is_noticed(device: EmulatedDevice, op: str, how: str) -> None:
    device.set_delay(0)
    before = device.streams()
    check_missing_node(VirtualWorld(4, device, 2), problem(op, 16), how, timeout_s=1.0)
    assert device.streams() == before


def test_unused_signal_words_are_refreshed_before_epochs_wrap(device: EmulatedDevice) -> None:
    """A word that no recent call has raised must not look new after 2**31 calls."""
    device.set_delay(0)
    for name in OPS:
        p = problem(name, 40)
        with VirtualWorld(2, device, 2) as ranks:
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
