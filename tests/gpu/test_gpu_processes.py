"""Ranks in processes of their own, over torch's symmetric memory: on as many GPUs as there are, or
all on one (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES). `pytest -m gpu`, after `make kernels`.

Without a GPU, each process has a PTX machine (ptx_machine/), and they share memory of the host.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from flux import Knobs
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld
from gpu_cases import RankGpus, gpu_and_world, gpu_of_one_arch, inputs_on, of, room_for
from harness import more, run_ranks
from matrix import ROUTES
from reference import Problem
from virtual_cases import Transferred, checked_calls

pytestmark = pytest.mark.timeout(600)

gpu = gpu_of_one_arch()

CALLS = int(os.environ.get("FLUX_TEST_CALLS", "60"))
EMULATED_CALLS = 4


def problem(device: Device, op: str) -> Problem:
    m, n, k = of(device, (700, 512, 256), (150, 64, 64))
    return Problem(op, m, (n,), k, torch.bfloat16)


def inputs_of(device: Device, p: Problem, world: int) -> list[Transferred]:
    """Of all calls."""
    rng = random.Random(7)
    sizes = [rng.randint(1, p.max_m) for _ in range(of(device, CALLS, EMULATED_CALLS))]
    return [inputs_on(device)(p, m, world, seed=i) for i, m in enumerate(sizes)]


def _calls(rank: int, world: int, gpus: RankGpus, op: str, direction: str) -> list[torch.Tensor]:
    knobs = Knobs(direction=direction)
    with gpus.open(rank) as device:
        p = problem(device, op)
        everything = inputs_of(device, p, world)
        ready = [inputs.ready(rank) for inputs in everything]
        with p.build(tuning=knobs, backend="cuda", transport="symm_mem", timeout_s=60.0) as made:
            outs = [call(made) for call in ready]
            made.wait()
            for inputs, got in zip(everything, outs, strict=True):
                inputs.check(got, rank)
    return [got[0].cpu() for got in outs]


@pytest.mark.parametrize(("op", "direction"), ROUTES)
@pytest.mark.parametrize(
    ("gpu", "world"), gpu_and_world([2, 4, 8], [2, *more(4, 8)]), indirect=["gpu"]
)
def test_processes_give_the_bits_of_virtual_ranks(
    gpu: Device, rank_gpus: RankGpus, world: int, op: str, direction: str
) -> None:
    processes = run_ranks(world, _calls, rank_gpus, op, direction, timeout=400.0, fresh=True)
    p = problem(gpu, op)
    everything = inputs_of(gpu, p, world)
    with room_for(gpu, world):
        by_call = checked_calls(
            VirtualWorld(world, gpu), p, everything, tuning=Knobs(direction=direction)
        )
    for rank, of_process in enumerate(processes):
        for a, of_virtual in zip(of_process, by_call, strict=True):
            assert torch.equal(a, of_virtual[rank][0].cpu())
