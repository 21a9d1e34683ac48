"""Calls in CUDA graphs: captured by torch and replayed with other inputs, among eager calls. All
ranks are on one GPU, or in processes of their own. `pytest -m gpu`, after `make kernels`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flux import Knobs
from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld
from gpu_cases import OnDevice, cuda_device
from harness import fresh_ranks
from matrix import OPS
from reference import Problem
from virtual_cases import call_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROWS = (700, 33, 512)
REPLAYS = 20


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return cuda_device()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_POISON", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def problem(op: str) -> Problem:
    return Problem(op, max(ROWS), (512,), 256, torch.bfloat16)


def put(inputs: OnDevice, rank: int, given: tuple[Any, ...]) -> None:
    """Copy the inputs of another call into the tensors of a captured call."""
    for old, new in zip(given, inputs.local(rank), strict=True):
        if old is not None:
            old.copy_(new)


def call(op: Any, given: tuple[Any, ...], m: int) -> torch.Tensor:
    x, weight, bias = given
    return op(x, weight, bias, m=m) if op.kind.name == "ag_gemm" else op(x, weight, bias)


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("op", OPS)
def test_graphs_of_virtual_ranks_replay_with_new_inputs(
    device: CudaDevice, op: str, direction: str
) -> None:
    p, world = problem(op), 2
    with VirtualWorld(world, device) as ranks:
        knobs = Knobs(direction=direction)
        ops = [p.build(ranks.rank(r), tuning=knobs) for r in range(world)]
        given = [[OnDevice(p, m, world, seed=m).local(r) for r in range(world)] for m in ROWS]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [
                ranks.run(lambda r, i=i, m=m: call(ops[r], given[i][r], m))
                for i, m in enumerate(ROWS)
            ]
        for replay in range(REPLAYS):
            fresh = [OnDevice(p, m, world, seed=replay * 10 + i) for i, m in enumerate(ROWS)]
            for i, inputs in enumerate(fresh):
                for r in range(world):
                    put(inputs, r, given[i][r])
            graph.replay()
            eager = call_all(ranks, ops, fresh[0])
            for r in range(world):
                ops[r].wait()
                fresh[0].check(eager[r], r)
            torch.cuda.synchronize()
            for i, inputs in enumerate(fresh):
                for r in range(world):
                    inputs.check([outs[i][r]], r)
        for made in ops:
            made.close()


def _replays(rank: int, world: int, op: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    p = problem(op)
    with p.build(backend="cuda", transport="symm_mem", timeout_s=60.0) as made:
        given = [OnDevice(p, m, world, seed=m).local(rank) for m in ROWS]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call(made, mine, m) for mine, m in zip(given, ROWS, strict=True)]
        for replay in range(REPLAYS):
            fresh = [OnDevice(p, m, world, seed=replay * 10 + i) for i, m in enumerate(ROWS)]
            for inputs, mine in zip(fresh, given, strict=True):
                put(inputs, rank, mine)
            graph.replay()
            eager = fresh[1].call(made, rank)
            torch.cuda.synchronize()
            made.wait()
            fresh[1].check(eager, rank)
            for inputs, out in zip(fresh, outs, strict=True):
                inputs.check([out], rank)
        torch.cuda.synchronize()


@pytest.mark.parametrize("op", OPS)
def test_graphs_of_processes_replay_with_new_inputs(op: str) -> None:
    cuda_device()
    with fresh_ranks(2) as ranks:
        ranks.run(_replays, op, timeout=300.0)
