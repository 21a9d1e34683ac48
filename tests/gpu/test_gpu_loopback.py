"""The kernels on a GPU, with the peers' memory in the host behind PCIe: `pytest -m gpu`, after
`make kernels`. Without a GPU, on the PTX machine (ptx_machine/). FLUX_TEST_CASES random cases
per op and world (12 if unset)."""

from __future__ import annotations

import random

import pytest
import torch

from flux import Knobs, PeerTimeoutError
from flux.transport.device import Device
from flux.transport.loopback import LoopbackPeers, LoopbackWorld
from gpu_cases import (
    cases_on,
    gpu_and_world,
    gpu_of_one_arch,
    inputs_on,
    of,
    random_problem,
)
from harness import BUSY, more
from loopback_cases import call, check_call
from matrix import OPS, ROUTES
from reference import Problem
from virtual_cases import check_same_bits, finish, knobs_of, topology_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("poisoned")]

gpu = gpu_of_one_arch()


def run_case(gpu: Device, rng: random.Random, op: str, world: int, most: int) -> None:
    topology, knobs = topology_of(rng, world), knobs_of(rng, world)
    p = random_problem(gpu, rng, op, world, most)
    with (
        LoopbackWorld(world, gpu) as ranks,
        p.build(
            ranks.rank(), tuning=knobs, topology=topology, timeout_s=of(gpu, 10.0, 60.0)
        ) as built,
    ):
        for seed in range(3):
            m, bias = rng.randint(1, p.max_m), rng.random() < 0.5
            inputs = inputs_on(gpu)(p, m, world, seed, bias=bias)
            check_call(ranks, built, inputs, p.gathers and rng.random() < 0.5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("gpu", "world"), gpu_and_world([2, 4, 8], [2, 4, *more(8)]), indirect=["gpu"]
)
def test_random_cases(gpu: Device, op: str, world: int) -> None:
    rng = random.Random(f"gpu loopback {op} {world}")
    for _ in range(cases_on(gpu)):
        run_case(gpu, rng, op, world, of(gpu, 700, 300))


@pytest.mark.parametrize(("op", "direction"), ROUTES)
def test_large_kernels_do_not_block_the_copies_they_await(
    gpu: Device, op: str, direction: str
) -> None:
    """Kernels that fill the GPU and wait for copies: nothing that they wait for may need a
    multiprocessor."""
    # On the PTX machine, too, there is a tile for each of its eight multiprocessors.
    small = (1024, 1024, 64) if op == "ag_gemm" else (1024, 256, 256)
    m, n, k = of(gpu, (4096, 4096, 2048), small)
    world, p = 4, Problem(op, m, (n,), k, torch.bfloat16)
    with LoopbackWorld(world, gpu) as ranks:
        knobs = Knobs(direction=direction)
        with p.build(ranks.rank(), tuning=knobs, timeout_s=of(gpu, 10.0, 60.0)) as built:
            for seed in range(of(gpu, 3, 1)):
                inputs = inputs_on(gpu)(p, m, world, seed)
                check_call(ranks, built, inputs)


@pytest.mark.parametrize(("op", "direction"), ROUTES)
def test_back_to_back_calls_repeat_bitwise(gpu: Device, op: str, direction: str) -> None:
    m, n, k = of(gpu, (1100, 512, 256), (300, 128, 64))
    world, p = 4, Problem(op, m, (n,), k, torch.bfloat16)
    rng = random.Random(3)
    calls = of(gpu, 12, 3)
    everything = [inputs_on(gpu)(p, rng.randint(1, m), world, seed=i) for i in range(calls)]
    results = []
    for _ in range(2):
        knobs = Knobs(direction=direction)
        with (
            LoopbackWorld(world, gpu) as ranks,
            p.build(ranks.rank(), tuning=knobs, timeout_s=of(gpu, 10.0, 60.0)) as built,
        ):
            outs = [call(ranks, built, inputs) for inputs in everything]
            built.wait()
        for inputs, out in zip(everything, outs, strict=True):
            inputs.check(out, 0)
        results.append(outs)
    check_same_bits([results[0]], [results[1]])


@pytest.mark.parametrize(
    ("op", "idle", "waiting"),
    [
        ("ag_gemm", "gather", r"rank 0 waited .* rows of x \(AllGather signal \d+\)"),
        ("gemm_rs", "scatter", r"rank 0 waited .* (the entry of rank 1|partials of a peer)"),
        ("gemm_ar", "send_results", "rank 0 waited .* rank 1 to reach the same place in the call"),
    ],
)
def test_a_peer_that_stalls_is_noticed(
    gpu: Device, op: str, idle: str, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = of(gpu, (512, 512, 512), (128, 128, 64))
    timeout_s = of(gpu, 0.5, BUSY)  # the first call must not take as long
    p = Problem(op, m, (n,), k, torch.bfloat16)
    with LoopbackWorld(2, gpu) as ranks:
        built = p.build(ranks.rank(), timeout_s=timeout_s)
        inputs = inputs_on(gpu)(p, m, 2, seed=1)
        good = call(ranks, built, inputs)
        built.wait()
        inputs.check(good, 0)
        monkeypatch.setattr(LoopbackPeers, idle, lambda self, *arguments: arguments[-1])
        call(ranks, built, inputs)
        with pytest.raises(PeerTimeoutError, match=waiting):
            built.wait()
        with pytest.raises(RuntimeError, match="is closed"):
            inputs.call(built, 0)
        finish(gpu)
        monkeypatch.undo()
        with p.build(ranks.rank(), timeout_s=of(gpu, 10.0, 60.0)) as again:
            out = call(ranks, again, inputs)
            again.wait()
            inputs.check(out, 0)
