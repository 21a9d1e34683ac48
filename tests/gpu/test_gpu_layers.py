"""Layers on GPUs, trained: rank processes on as many GPUs as there are, or all on one. `pytest -m
gpu`, after `make kernels`. Gradients are compared with those of the whole model in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools
from gpu_cases import cuda_device
from harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROWS, WIDTH, HIDDEN, STEPS = 768, 512, 2048, 3
TOLERANCE = 2e-2  # of a norm: bfloat16 has 8 bits, and a gradient has passed three GEMMs


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


def split(whole: MLP, **options: Any) -> MLP:
    parts = MLP()
    parts.up = ColumnParallelLinear.from_linear(whole.up, **options)
    parts.down = RowParallelLinear.from_linear(whole.down, **options)
    return parts


def forward_of(model: nn.Module, how: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if how == "checkpointed":
        return lambda x: checkpoint(model, x, use_reentrant=False)
    if how == "compiled":
        return torch.compile(model)
    return model


def away(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.float() - right).norm() / right.norm())


def _train(rank: int, world: int, how: str, sequence: bool) -> float:
    """The largest deviation of results and gradients over some steps."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    whole = MLP().cuda().bfloat16()
    parts = split(whole, sequence_parallel=sequence)
    right = MLP().cuda()
    right.load_state_dict({name: t.float() for name, t in whole.state_dict().items()})
    if how == "autocast":
        parts = parts.float()
    call = forward_of(parts, how)
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world) if sequence else slice(None)
    cut = partial(torch.chunk, chunks=world)
    worst = 0.0
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
        towards = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
        for model in (parts, right):
            model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
            y = call(x[mine])
        y.backward(towards[mine])
        z = right(x.float())
        z.backward(towards.float())
        worst = max(
            worst,
            away(y, z[mine]),
            away(parts.up.weight.grad, cut(right.up.weight.grad)[rank]),
            away(parts.down.weight.grad, cut(right.down.weight.grad, dim=1)[rank]),
            away(parts.up.bias.grad, cut(right.up.bias.grad)[rank]),
            away(parts.down.bias.grad, right.down.bias.grad),
        )
    torch.cuda.synchronize()
    dist.barrier()
    close_pools()
    return worst


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("how", ["eager", "autocast", "checkpointed", "compiled"])
def test_gradients_equal_those_of_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, how: str, sequence: bool
) -> None:
    cuda_device()
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    for worst in run_ranks(2, _train, how, sequence, timeout=120.0, fresh=True):
        assert worst < TOLERANCE
