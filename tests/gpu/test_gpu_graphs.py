"""Calls in graphs: captured and replayed with other inputs, among eager calls. All ranks are on one
GPU, or in processes of their own. `pytest -m gpu`, after `make kernels`, captures by torch; without
a GPU, on the PTX machine (ptx_machine/). What graphs of one op may do: test_graphs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flux import Knobs
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld
from gpu_cases import RankGpus, captured, gpu_of_one_arch, inputs_on, of
from harness import run_ranks
from matrix import OPS, ROUTES
from reference import Inputs, Problem
from virtual_cases import built, finish, run_ready

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("poisoned")]

gpu = gpu_of_one_arch()


@pytest.fixture
def device(gpu: Device) -> Device:
    return gpu


def rows(device: Device) -> tuple[int, ...]:
    """M of the captured calls. The kernels of the PTX machine have tiles of 128 rows, too."""
    return of(device, (700, 33, 512), (150, 33, 1))


def replays(device: Device) -> int:
    return of(device, 20, 2)


def problem(device: Device, op: str) -> Problem:
    n, k = of(device, (512, 256), (64, 48))
    return Problem(op, max(rows(device)), (n,), k, torch.bfloat16)


def put(inputs: Inputs, rank: int, tensors: tuple[Any, ...]) -> None:
    """Copy the inputs of another call into the tensors of a captured call."""
    for old, new in zip(tensors, inputs.local(rank), strict=True):
        if old is not None:
            old.copy_(new)


def call(op: Any, tensors: tuple[Any, ...], m: int) -> torch.Tensor:
    x, weight, bias = tensors
    return op(x, weight, bias, m=m) if op.kind.name == "ag_gemm" else op(x, weight, bias)


@pytest.mark.parametrize(("op", "direction"), ROUTES)
def test_graphs_of_virtual_ranks_replay_with_new_inputs(
    device: Device, op: str, direction: str
) -> None:
    p, world, make = problem(device, op), 2, inputs_on(device)
    sizes = rows(device)
    knobs = Knobs(direction=direction)
    with VirtualWorld(world, device) as ranks, built(ranks, p, tuning=knobs) as ops:
        tensors = [[make(p, m, world, seed=m).local(r) for r in range(world)] for m in sizes]

        def calls() -> list[list[torch.Tensor]]:
            return [
                ranks.run(lambda r, i=i, m=m: call(ops[r], tensors[i][r], m))
                for i, m in enumerate(sizes)
            ]

        with captured(device, calls) as (replay, outs):
            for number in range(replays(device)):
                fresh = [make(p, m, world, seed=number * 10 + i) for i, m in enumerate(sizes)]
                for i, inputs in enumerate(fresh):
                    for r in range(world):
                        put(inputs, r, tensors[i][r])
                ready = [fresh[0].ready(r) for r in range(world)]
                replay()
                eager = run_ready(ranks, ops, ready)
                for r in range(world):
                    ops[r].wait()
                    fresh[0].check(eager[r], r)
                finish(device)
                for i, inputs in enumerate(fresh):
                    for r in range(world):
                        inputs.check([outs[i][r]], r)


def _replays(rank: int, world: int, gpus: RankGpus, op: str) -> None:
    with gpus.open(rank) as device:
        p, make, sizes = problem(device, op), inputs_on(device), rows(device)
        with p.build(backend="cuda", transport="symm_mem", timeout_s=60.0) as made:
            tensors = [make(p, m, world, seed=m).local(rank) for m in sizes]

            def calls() -> list[torch.Tensor]:
                return [call(made, mine, m) for mine, m in zip(tensors, sizes, strict=True)]

            with captured(device, calls) as (replay, outs):
                for number in range(replays(device)):
                    fresh = [make(p, m, world, seed=number * 10 + i) for i, m in enumerate(sizes)]
                    for inputs, mine in zip(fresh, tensors, strict=True):
                        put(inputs, rank, mine)
                    ready = [fresh[1].ready(rank) for _ in range(2)]
                    eager = []
                    for again in ready:  # each rank at its own pace
                        replay()
                        eager.append(again(made))
                    finish(device)
                    made.wait()
                    # Eager calls of few rows take the library's collective, which rounds sums.
                    path = made.schedule(sizes[1]).knobs.path
                    for got in eager:
                        fresh[1].check(got, rank, "unfused" if path == "unfused" else "fused")
                    for inputs, out in zip(fresh, outs, strict=True):
                        inputs.check([out], rank)


@pytest.mark.parametrize("op", OPS)
def test_graphs_of_processes_replay_with_new_inputs(rank_gpus: RankGpus, op: str) -> None:
    run_ranks(2, _replays, rank_gpus, op, timeout=300.0, fresh=True)
