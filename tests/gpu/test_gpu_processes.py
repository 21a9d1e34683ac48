"""Ranks in processes of their own, over torch's symmetric memory: on as many GPUs as there are, or
all on one (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES). `pytest -m gpu`, after `make kernels`."""

from __future__ import annotations

import os
import random

import pytest
import torch

from flux import Knobs
from flux.transport.virtual import VirtualWorld
from gpu_cases import OnDevice, cuda_device
from harness import fresh_ranks
from matrix import OPS
from reference import Problem
from virtual_cases import call_on_and_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CALLS = int(os.environ.get("FLUX_TEST_CALLS", "60"))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_device()
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def sizes() -> list[int]:
    rng = random.Random(7)
    return [rng.randint(1, 700) for _ in range(CALLS)]


def problem(op: str) -> Problem:
    return Problem(op, 700, (512,), 256, torch.bfloat16)


def _calls(rank: int, world: int, op: str, direction: str) -> list[torch.Tensor]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    p = problem(op)
    knobs = Knobs(direction=direction)
    everything = [OnDevice(p, m, world, seed=i) for i, m in enumerate(sizes())]
    with p.build(tuning=knobs, backend="cuda", transport="symm_mem", timeout_s=60.0) as made:
        outs = [inputs.call(made, rank) for inputs in everything]
        made.wait()
        for inputs, got in zip(everything, outs, strict=True):
            inputs.check(got, rank)
    return [got[0].cpu() for got in outs]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_processes_give_the_bits_of_virtual_ranks(world: int, op: str, direction: str) -> None:
    if op != "ag_gemm" and direction == "pull":
        pytest.skip("partials are always pushed")
    with fresh_ranks(world) as ranks:
        processes = ranks.run(_calls, op, direction, timeout=400.0)
    device = cuda_device()
    p = problem(op)
    everything = [OnDevice(p, m, world, seed=i) for i, m in enumerate(sizes())]
    with VirtualWorld(world, device) as virtual:
        knobs = Knobs(direction=direction)
        ops = [p.build(virtual.rank(r), tuning=knobs) for r in range(world)]
        by_call = call_on_and_on(virtual, ops, everything)
        for made in ops:
            made.wait()
            made.close()
    for rank, of_process in enumerate(processes):
        for a, of_virtual in zip(of_process, by_call, strict=True):
            assert torch.equal(a, of_virtual[rank][0].cpu())
