"""The kernels on a GPU, with the peers' memory in the host behind PCIe: `pytest -m gpu`, after
`make kernels`. FLUX_TEST_CASES random cases per op and world (12 if unset)."""

from __future__ import annotations

import random

import pytest
import torch

from flux import Knobs, PeerTimeoutError
from flux.transport.device import CudaDevice
from flux.transport.loopback import LoopbackPeers, LoopbackWorld
from gpu_cases import CASES, OnDevice, cuda_device, random_problem
from loopback_cases import call, check_peers
from reference import Problem
from virtual_cases import knobs_of, topology_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("poisoned"),
]

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return cuda_device()


def run_case(device: CudaDevice, rng: random.Random, op: str, world: int, most: int) -> None:
    topology, knobs = topology_of(rng, world), knobs_of(rng, world)
    p = random_problem(device, rng, op, world, most)
    with (
        LoopbackWorld(world, device) as ranks,
        p.build(ranks.rank(), tuning=knobs, topology=topology, timeout_s=10.0) as built,
    ):
        for seed in range(3):
            m, bias = rng.randint(1, p.max_m), rng.random() < 0.5
            inputs = OnDevice(p, m, world, seed, bias=bias)
            out = call(ranks, built, inputs, p.gathers and rng.random() < 0.5)
            built.wait()
            inputs.check(out, 0)
            ranks.finish(ranks.agents.values())
            check_peers(built, inputs, out)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_random_cases(device: CudaDevice, op: str, world: int) -> None:
    rng = random.Random(f"gpu loopback {op} {world}")
    for _ in range(CASES):
        run_case(device, rng, op, world, 700)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_large_kernels_do_not_block_the_copies_they_await(
    device: CudaDevice, op: str, direction: str
) -> None:
    """Kernels that fill the GPU and wait for copies: nothing that they wait for may need a
    multiprocessor."""
    world, p = 4, Problem(op, 4096, (4096,), 2048, torch.bfloat16)
    with LoopbackWorld(world, device) as ranks:
        knobs = Knobs(direction=direction)
        with p.build(ranks.rank(), tuning=knobs, timeout_s=10.0) as built:
            for seed in range(3):
                inputs = OnDevice(p, 4096, world, seed)
                out = call(ranks, built, inputs)
                built.wait()
                inputs.check(out, 0)
                ranks.finish(ranks.agents.values())
                check_peers(built, inputs, out)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_back_to_back_calls_repeat_bitwise(device: CudaDevice, op: str, direction: str) -> None:
    world, p = 4, Problem(op, 1100, (512,), 256, torch.bfloat16)
    rng = random.Random(3)
    everything = [OnDevice(p, rng.randint(1, 1100), world, seed=i) for i in range(12)]
    found = []
    for _ in range(2):
        knobs = Knobs(direction=direction)
        with (
            LoopbackWorld(world, device) as ranks,
            p.build(ranks.rank(), tuning=knobs, timeout_s=10.0) as built,
        ):
            outs = [call(ranks, built, inputs) for inputs in everything]
            built.wait()
        for inputs, out in zip(everything, outs, strict=True):
            inputs.check(out, 0)
        found.append(outs)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize(("op", "idle"), [("ag_gemm", "gather"), ("gemm_rs", "scatter")])
def test_a_peer_that_stalls_is_noticed(
    device: CudaDevice, op: str, idle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Problem(op, 512, (512,), 512, torch.bfloat16)
    with LoopbackWorld(2, device) as ranks:
        built = p.build(ranks.rank(), timeout_s=0.5)
        inputs = OnDevice(p, 512, 2, seed=1)
        good = call(ranks, built, inputs)
        built.wait()
        inputs.check(good, 0)
        monkeypatch.setattr(LoopbackPeers, idle, lambda self, *given: given[-1])
        call(ranks, built, inputs)
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited more than 0\.5 s for"):
            built.wait()
