"""Ops of experts on GPUs of several nodes, with flux's kernels on the PTX machine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated import HeapWorld
from emulated_nvshmem import puts_of
from emulated_processes import Emulated, run
from flux import Knobs
from flux.backends.cuda.backend import CudaBackend
from flux.layers import UlyssesAttention, close_pools
from flux.ops import executor
from flux.transport.virtual import VirtualWorld
from moe_cases import MoeCase, MoeInputs, routing_of
from op_cases import same_bits
from ptx_machine.gpu import LIBRARY
from reference import share

BF16 = torch.bfloat16

CASE = MoeCase("gather", 90, 64, 32, 5, 3, dtype=torch.bfloat16, knobs=Knobs(comm_tile_rows=8))
FUSED = ["gather", "scatter", "reduce", "dispatch", "combine"]

pytestmark = pytest.mark.usefixtures("poisoned")


def calls(ranks: VirtualWorld, case: MoeCase, everything: list[MoeInputs]) -> list[list[Any]]:
    """Results by call and rank, compared with float64; calls come back to back."""
    world = ranks.world
    with ranks, ExitStack() as closing:
        ops = [closing.enter_context(case.build(group=ranks.rank(r))) for r in range(world)]
        given = [[inputs.arguments(r) for inputs in everything] for r in range(world)]
        by_rank = ranks.run(lambda r: [ops[r](*of[:3], **of[3]) for of in given[r]])
        for op in ops:
            op.wait()
        ranks.device.finish()
    outs = [list(of_call) for of_call in zip(*by_rank, strict=True)]
    for inputs, results in zip(everything, outs, strict=True):
        for r, y in enumerate(results):
            inputs.compare(y, r)
    return outs


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("ep", [1, 2])
def test_one(ptx: Any, op: str, ep: int) -> None:
    case = replace(CASE, op=op, ep=ep, room=5)
    kinds = ["random", "none", "one", "dropped", "few", "random"]
    everything = [MoeInputs(case, m, 4, kind, 3 + i) for i, (m, kind) in enumerate(zip((90, 33, 90, 7, 3, 80), kinds))]
    ptx.set_delay(1000)
    calls(VirtualWorld(4, ptx, nodes=2), case, everything)
    ptx.set_delay(0)


def _experts_trained(rank: int, world: int, first: str, second: str, path: str | None) -> list[torch.Tensor]:
    """Results and gradients of a layer of experts."""
    m, experts, topk, n, k, ep = 45, 5, 2, 64, 32, 2
    knobs = "cache" if path is None else Knobs(path=path)
    seen = []
    with ExitStack() as closing:
        built = []
        for name, sizes in ((first, (n, k)), (second, (k, n))):
            case = MoeCase(name, m, *sizes, experts, topk, ep, BF16, knobs)
            built.append(closing.enter_context(case.build()))
        up, down = built
        here, part = MoeInputs(MoeCase(first, m, n, k, experts, topk, ep, BF16), m, world, "none", 1).part(rank)
        for seed, kind in enumerate(("random", "one", "none")):
            torch.manual_seed(seed)
            choices = routing_of(CASE_OF_LAYER, m, kind, seed)
            whole = [torch.randn(s).bfloat16() for s in ((m, k), (experts, n, k), (experts, k, n), (experts, n))]
            x, w1, w2, b1 = whole
            probs = torch.rand(m, topk)
            e = slice(here.start, here.stop)
            local = [x[share(m, world, rank)], w1[e, part], w2[e, :, part], b1[e, part], probs]
            mine = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in local]
            xs, one, two, bias, p = mine
            z = down(torch.tanh(up(xs, one, choices, bias)), two, choices, p)
            z.backward(torch.linspace(-1, 1, z.numel()).view_as(z).bfloat16())
            seen += [z.detach().clone(), *(t.grad.clone() for t in mine)]
    close_pools()
    return seen


def _attended(rank: int, world: int, path: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"kv_heads": 2, "head_dim": 8, "max_tokens": 2 * 24, "bias": True}
    attention = UlyssesAttention(32, world, **sizes, dtype=BF16)
    seen = []
    for parts in ([24 // world] * world, [24 // world - 1, *[1] * (world - 1)]):
        own = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
        x = torch.randn(2, sum(parts), 32).bfloat16()[:, own].requires_grad_()
        y = attention(x, parts)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16())
        seen += [t.clone() for t in (y.detach(), x.grad, *(p.grad for p in attention.parameters()))]
        attention.zero_grad()
    attention.close()
    close_pools()
    return seen


def _as_on_cpus(rank: int, world: int, kernels: Path, train: Any, options: tuple) -> list[float]:
    right = train(rank, world, *options)
    here, call = Emulated(rank, LIBRARY, rank // 2, kernels), CudaBackend.run

    def run_to_end(self: Any, *args: Any, hooks: Any = None) -> Any:
        outs = call(self, *args)
        here.device.finish()
        if hooks is not None:
            hooks.both()
        return outs

    CudaBackend.run = run_to_end
    executor.default_backend = lambda exchange: "cuda"
    got = train(rank, world, *options)
    here.close()
    apart = []
    for a, b in zip(got, right, strict=True):
        away, norm = float((a - b).float().norm()), float(b.float().norm())
        apart.append(away / norm if norm else away)
    return apart


CASE_OF_LAYER = MoeCase("gather", 45, 64, 32, 5, 2, 2)


@pytest.mark.parametrize("path", [None, "unfused"])
@pytest.mark.parametrize(("first", "second"), [("gather", "scatter"), ("gather", "reduce"), ("dispatch", "combine")])
def test_layers_of_experts_train_as_on_cpus(backward_kernels: Path, first: str, second: str, path: str | None) -> None:
    for of_rank in run(4, _as_on_cpus, backward_kernels, _experts_trained, (first, second, path)):
        print(of_rank)
        assert max(of_rank) < 0.02, of_rank


@pytest.mark.parametrize("path", [None])
def test_attention(ptx_kernels: Path, path: str | None) -> None:
    for of_rank in run(4, _as_on_cpus, ptx_kernels, _attended, (path,)):
        assert max(of_rank) < 0.02, of_rank
