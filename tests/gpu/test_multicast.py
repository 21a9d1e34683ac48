"""Reductions and results by the NVLink switch, emulated: a multicast address is the same memory of
all ranks, which adds up what is loaded and gives everybody what is stored. Kernels are flux's for
sm_90a, on the PTX machine: older GPUs have no such instructions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from emulated import EmulatedDevice, SwitchedWorld
from flux import Knobs
from flux.transport.base import Memory
from flux.transport.virtual import VirtualWorld
from reference import Inputs, Problem
from virtual_cases import built, call_all, call_on_and_on, check_all, check_same_bits

REDUCING = ("gemm_rs", "gemm_ar")
IN_KERNEL = Knobs(path="in_kernel")


pytestmark = pytest.mark.usefixtures("poisoned")


def problem(op: str, n: int = 96, **options: object) -> Problem:
    return Problem(op, 150, (n,), 96, torch.bfloat16, **options)  # type: ignore[arg-type]


def small(p: Problem, m: int, world: int, seed: int) -> Inputs:
    """Inputs are small integers, whose sums are exact in any order."""
    inputs = Inputs(p, m, world, seed)
    inputs.x.round_()
    inputs.weights[0].clamp_(-2, 2).round_()
    return inputs


def results(
    device: EmulatedDevice,
    world: type[VirtualWorld],
    size: int,
    p: Problem,
    knobs: Knobs,
    by_switch: tuple[bool, bool],
    calls: int = 3,
) -> list[list[list[torch.Tensor]]]:
    """Of calls in a row, each checked; ``by_switch``: whether sums are, and whether anything is."""
    rng = random.Random(size)
    with world(size, device) as ranks, built(ranks, p, tuning=knobs) as ops:
        for op in ops:
            assert (op._backend.sums_by_switch, op._backend.multicast != 0) == by_switch
        make = small if knobs.reduce == "in_flight" else Inputs
        everything = [make(p, rng.randint(1, p.max_m), size, i) for i in range(calls)]
        outs = call_on_and_on(ranks, ops, everything)
        device.finish()
    check_all(everything, outs)
    return outs


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("reduce", ["sum", "avg"])
def test_switch_reduces_in_flight(h200: EmulatedDevice, op: str, world: int, reduce: str) -> None:
    h200.set_delay(1000)
    knobs = Knobs(reduce="in_flight")
    results(h200, SwitchedWorld, world, problem(op, reduce=reduce), knobs, (True, True))


@pytest.mark.parametrize("world", [2, 3])
def test_results_that_the_switch_distributes_have_the_same_bits(
    h200: EmulatedDevice, world: int
) -> None:
    h200.set_delay(300)
    p = problem("gemm_ar")
    switched = results(h200, SwitchedWorld, world, p, Knobs(), (False, True))
    plain = results(h200, VirtualWorld, world, p, Knobs(), (False, False))
    check_same_bits(switched, plain)


@pytest.mark.parametrize("op", REDUCING)
def test_unaligned_rows_bypass_the_switch(device: EmulatedDevice, op: str) -> None:
    """13 columns of two bytes are no multiple of 16: memory adds up, results go to each rank.

    With stand-ins, which refuse to access the switch: the minimal set has no kernel for 13 columns.
    """
    device.set_delay(0)
    results(device, SwitchedWorld, 3, problem(op, 13), Knobs(reduce="in_flight"), (False, True))


def test_ordered_sums_do_not_use_the_switch(h200: EmulatedDevice) -> None:
    h200.set_delay(0)
    results(h200, SwitchedWorld, 3, problem("gemm_rs"), Knobs(), (False, True))


@pytest.mark.parametrize("op", REDUCING)
def test_captured_reductions_by_the_switch_can_be_replayed(h200: EmulatedDevice, op: str) -> None:
    h200.set_delay(500)
    p = problem(op)
    knobs = Knobs(reduce="in_flight")
    with SwitchedWorld(3, h200) as ranks, built(ranks, p, tuning=knobs) as ops:
        everything = [small(p, m, 3, m) for m in (150, 2, 9)]
        with h200.capture() as graph:
            outs = call_on_and_on(ranks, ops, everything)
        for _ in range(3):
            graph.replay()
            eager = call_all(ranks, ops, everything[0])
            h200.finish()
            check_all([everything[0], *everything], [eager, *outs])
        graph.close()


class MisledWorld(SwitchedWorld):
    """The switch reads and stores somewhere else, where nobody looks."""

    elsewhere: tuple[torch.Tensor, ...] = ()

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        memory = super().memory(number, words, data_bytes)
        if not self.elsewhere:
            assert isinstance(self.device, EmulatedDevice)
            self.elsewhere = tuple(self.device.zeros(data_bytes, torch.uint8) for _ in memory.data)
            places = [data.data_ptr() for data in self.elsewhere]
            memory.multicast = self.device.multicast(places, data_bytes)
        return memory


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar"])
def test_what_kernels_send_goes_through_the_switch(h200: EmulatedDevice, op: str) -> None:
    """Path in_kernel: one store for all ranks, with the bits of one store for each."""
    p = problem(op, 96 * (3 if op == "ag_gemm" else 1))
    switched = results(h200, SwitchedWorld, 3, p, IN_KERNEL, (False, True))
    plain = results(h200, VirtualWorld, 3, p, IN_KERNEL, (False, False))
    check_same_bits(switched, plain)
    with pytest.raises(AssertionError, match="elements are wrong"):
        results(h200, MisledWorld, 3, p, IN_KERNEL, (False, True), calls=1)


@pytest.mark.parametrize("world", [2, 3])
def test_kernels_sum_by_the_switch(h200: EmulatedDevice, world: int) -> None:
    """Path in_kernel with reduce = in_flight, which nothing but a switch does."""
    knobs = replace(IN_KERNEL, reduce="in_flight")
    results(h200, SwitchedWorld, world, problem("gemm_ar"), knobs, (True, True))
    for kind, n in ((VirtualWorld, 96), (SwitchedWorld, 13)):
        with pytest.raises(ValueError, match="needs an NVLink switch and rows of a multiple of 16"):
            results(h200, kind, world, problem("gemm_ar", n), knobs, (True, True))


def test_older_kernels_do_not_use_the_switch(a100: EmulatedDevice) -> None:
    """They also run on devices behind one, and have no such instructions."""
    p = problem("gemm_ar")
    for knobs in (Knobs(), IN_KERNEL):
        results(a100, SwitchedWorld, 2, p, knobs, (False, False))
    with pytest.raises(ValueError, match="needs a kernel of sm_90a"):
        results(a100, SwitchedWorld, 2, p, Knobs(reduce="in_flight"), (True, True))
