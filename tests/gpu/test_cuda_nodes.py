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
from virtual_cases import (
    built,
    call_all,
    call_on_and_on,
    check_all,
    check_cases,
    check_missing_node,
)

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
    drawn = cases(50 + OPS.index(op), op, nodes, lanes, (6 if world <= 4 else 16 // world) * STRESS)
    calls = 0
    for case in drawn:
        device.set_delay(int(case.delay_s * 1e7))
        calls += check_cases(device, world, [case], nodes=nodes)
    assert calls == sum(len(case.calls) for case in drawn)


@pytest.mark.parametrize("op", ["gemm_rs", *more("ag_gemm", "gemm_ar")])
def test_many_calls_may_take_longer_than_a_timeout(device: EmulatedDevice, op: str) -> None:
    """Each wait has the timeout, not all calls that are on the streams."""
    p = problem(op, 8)
    everything = [Inputs(p, 8, 2, seed=s) for s in range(12)]
    with VirtualWorld(2, device, 2) as ranks, built(ranks, p, timeout_s=0.5) as ops:
        device.set_copy_delay(100_000)
        outs = call_on_and_on(ranks, ops, everything)
        for o in ops:
            o.wait()
        device.set_copy_delay(0)
        device.finish()
    check_all(everything, outs, "two_levels")


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
    check_missing_node(VirtualWorld(4, device, 2), problem(op, 16), how, timeout_s=0.5)
    assert device.streams() == before


def test_unused_signal_words_are_refreshed_before_epochs_wrap(device: EmulatedDevice) -> None:
    """A word that no recent call has raised must not look new after 2**31 calls."""
    device.set_delay(0)
    for name in OPS:
        p = problem(name, 40)
        knobs = Knobs(comm_tile_rows=2)
        with VirtualWorld(2, device, 2) as ranks, built(ranks, p, tuning=knobs) as ops:
            for epoch, m in ((0, 40), (2**30 - 1, 2), (2**31 - 1, 2), (2**31 + 1, 40)):
                for o in ops:
                    o._backend.native.epoch = epoch
                inputs = Inputs(p, m, 2, seed=m)
                device.set_delay(3000 if m == 40 else 0)
                outs = call_all(ranks, ops, inputs)
                device.finish()
                check_all([inputs], [outs], "two_levels")


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
