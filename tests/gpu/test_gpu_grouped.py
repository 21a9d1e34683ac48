"""Ops of experts with all ranks on one GPU: `pytest -m gpu`, after `make kernels`. The same kernels
run on the PTX machine in tests/ptx/test_grouped_kernels.py. FLUX_TEST_CASES random cases per op (12
if unset)."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from flux import Knobs
from flux.kernels.config import GROUPED
from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld
from gpu_cases import CASES, cuda_device
from moe_cases import MOE_OPS, MoeCase, MoeInputs
from moe_seeds import case_of
from op_cases import same_bits
from reference import FP8

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("poisoned")]

LARGE = MoeCase("gather", 2000, 1536, 512, 16, 4, dtype=torch.bfloat16, knobs=Knobs())


@pytest.fixture
def device() -> CudaDevice:
    device = cuda_device()
    if all(built.config.op not in GROUPED for built in device.registry.kernels.values()):
        pytest.skip("no kernel of experts is built: make kernels")
    return device


class OnCuda(MoeInputs):
    """Inputs on the GPU, what a router has chosen among them."""

    def arguments(self, rank: int) -> tuple[Any, Any, Any, dict[str, Any]]:
        x, weights, experts, options = super().arguments(rank)
        if isinstance(weights, list):
            weights = [weight.cuda() for weight in weights]
        else:
            weights = weights.cuda()
        options = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in options.items()}
        return x.cuda(), weights, experts.cuda(), options

    def compare(self, y: torch.Tensor, rank: int) -> float:
        return super().compare(y.cpu(), rank)


def calls(device: CudaDevice, case: MoeCase, everything: list[OnCuda]) -> list[list[torch.Tensor]]:
    """Results by call and rank, compared with float64."""
    world = everything[0].world
    with VirtualWorld(world, device) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [[inputs.arguments(r) for r in range(world)] for inputs in everything]
        outs = [
            ranks.run(lambda r, of_rank=of_rank: ops[r](*of_rank[r][:3], **of_rank[r][3]))
            for of_rank in given
        ]
        for op in ops:
            op.wait()
    for inputs, results in zip(everything, outs, strict=True):
        for r, y in enumerate(results):
            inputs.compare(y, r)
    return outs


@pytest.mark.parametrize("seed", range(3 * CASES))
def test_random_routings(device: CudaDevice, seed: int) -> None:
    kernels = [built.config for built in device.registry.kernels.values()]
    _, case, world, kind = case_of(seed, [config for config in kernels if config.op in GROUPED])
    rng = random.Random(seed)
    sizes = [(case.max_m, kind), (rng.randint(1, case.max_m), "random"), (case.max_m, kind)]
    calls(device, case, [OnCuda(case, m, world, k, i + 7) for i, (m, k) in enumerate(sizes)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("op", MOE_OPS)
def test_large_mixtures_repeat_bitwise(
    device: CudaDevice, op: str, ep: int, dtype: torch.dtype
) -> None:
    case = replace(LARGE, op=op, ep=ep)
    if dtype == FP8:
        configs = [built.config for built in device.registry.kernels.values()]
        if not any(config.op in GROUPED and config.dtype == "e4m3" for config in configs):
            pytest.skip("no float8 kernels of experts are built: make kernels SET=default")
        case = replace(case, dtype=FP8, scaling="row")
    inputs = OnCuda(case, case.max_m, 4, "random", 3)
    first, *others = calls(device, case, 5 * [inputs])
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))
