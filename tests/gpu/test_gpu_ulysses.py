"""All-to-alls of heads with all ranks on one GPU: `pytest -m gpu`, after `make kernels`. The same
kernels run on the PTX machine in tests/ptx/test_ulysses_kernels.py. FLUX_TEST_CASES random cases
per op (12 if unset)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from flux.transport.device import CudaDevice
from flux.transport.virtual import VirtualWorld
from flux.ulysses import AllToAllGemm, GemmAllToAll
from gpu_cases import CASES, cuda_device
from op_cases import same_bits
from ulysses_cases import UlyssesCase, UlyssesInputs
from ulysses_seeds import OPS, case_of, suits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("poisoned")]


@pytest.fixture
def device() -> CudaDevice:
    device = cuda_device()
    if not all(any(b.config.op == op for b in device.registry.kernels.values()) for op in OPS):
        pytest.skip("no kernels are built: make kernels")
    return device


class OnCuda(UlyssesInputs):
    """Inputs on the GPU, where they are compared with float64."""

    def __init__(self, case: UlyssesCase, seed: int) -> None:
        super().__init__(case, seed)
        self.x, self.heads = self.x.cuda(), self.heads.cuda()
        self.weights = self.weights[0].cuda(), self.weights[1].cuda()
        if case.bias:
            self.biases = tuple(bias.cuda() for bias in self.biases)


def calls(device: CudaDevice, kind: Any, everything: list[OnCuda]) -> list[list[torch.Tensor]]:
    """Results of all ranks, call by call, compared."""
    case, results = everything[0].case, []
    world = len(case.lengths)
    with VirtualWorld(world, device) as ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(kind, group=ranks.rank(r))) for r in range(world)]
        for inputs in everything:
            of_rank = inputs.projected if kind is GemmAllToAll else inputs.given
            check = inputs.check_projected if kind is GemmAllToAll else inputs.check_output
            outs = ranks.run(lambda r, of_rank=of_rank: ops[r](*of_rank(r)))
            for op in ops:
                op.wait()
            results += [check(out, rank) for rank, out in enumerate(outs)]
    return results


@pytest.mark.parametrize("seed", range(2 * CASES))
def test_random_sequences(device: CudaDevice, seed: int) -> None:
    kernels = [b.config for b in device.registry.kernels.values() if suits(b.config)]
    config, case = case_of(seed, kernels)
    calls(device, OPS[config.op], [OnCuda(case, seed + i) for i in range(3)])


@pytest.mark.parametrize("kind", [GemmAllToAll, AllToAllGemm])
def test_long_sequences_repeat_bitwise(device: CudaDevice, kind: Any) -> None:
    case = UlyssesCase((1500, 1000, 1500, 700), (32, 8, 8), 128, 4096, dtype=torch.bfloat16)
    first, *others = (calls(device, kind, 3 * [OnCuda(case, 3)]) for _ in range(2))
    for other in others:
        for one, again in zip(first, other, strict=True):
            assert all(same_bits(a, b) for a, b in zip(one, again, strict=True))
