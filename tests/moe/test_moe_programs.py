"""Ops of mixtures of experts in programs: autocast, torch.compile, frozen experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flux.moe import (
    AGGroupedGemm,
    DispatchGroupedGemm,
    GroupedGemmAR,
    GroupedGemmCombine,
    GroupedGemmRS,
    expand_tokens,
)
from harness import run_ranks
from op_cases import same_bits

M, HIDDEN, FFN, EXPERTS, TOPK = 20, 12, 16, 5, 2
SIZES: dict[str, Any] = {"max_m": M, "experts": EXPERTS, "topk": TOPK, "timeout_s": 60.0}


def sharded(first: AGGroupedGemm, second: GroupedGemmRS) -> Callable[..., torch.Tensor]:
    """Return a layer whose ranks have a part of the tokens each."""

    def layer(x: Any, w1: Any, w2: Any, b1: Any, b2: Any, experts: Any, probs: Any) -> Any:
        return second(first(x, w1, experts, b1).tanh(), w2, experts, probs, b2)

    return layer


def replicated(op: GroupedGemmAR) -> Callable[..., torch.Tensor]:
    """Return a layer whose ranks have all tokens."""

    def layer(x: Any, w1: Any, w2: Any, b1: Any, b2: Any, experts: Any, probs: Any) -> Any:
        hidden = expand_tokens(op, x, list(w1.unbind()), experts, b1).tanh()
        return op(hidden, w2, experts, probs, b2)

    return layer


def operands(rows: int, world: int) -> list[torch.Tensor]:
    """Return float32 operands of one rank, equal on all, with their probabilities."""
    generator = torch.Generator().manual_seed(rows)
    part = FFN // world
    shapes = ((rows, HIDDEN), (EXPERTS, part, HIDDEN), (EXPERTS, HIDDEN, part), (EXPERTS, part))
    drawn = [torch.randn(s, generator=generator) for s in (*shapes, (EXPERTS, HIDDEN))]
    experts = torch.rand(M, EXPERTS, generator=generator).topk(TOPK).indices
    return [*drawn, experts, torch.rand(M, TOPK, generator=generator)]


def _autocast(rank: int, world: int, kind: str, dtype: torch.dtype) -> None:
    """Under autocast float32 operands are those of casts by hand, forward and backward."""
    rows = M // world if kind == "sharded" else M
    *floats, experts, probs = operands(rows, world)
    if kind == "sharded":
        first = AGGroupedGemm(n=FFN, k=HIDDEN, dtype=dtype, **SIZES)
        second: GroupedGemmRS = GroupedGemmRS(n=HIDDEN, k=FFN, dtype=dtype, **SIZES)
        layer = sharded(first, second)
    else:
        second = GroupedGemmAR(n=HIDDEN, k=FFN, dtype=dtype, **SIZES)
        layer = replicated(second)
    results = []
    for casts in (False, True):
        leaves = [t.clone().requires_grad_() for t in (*floats, probs)]
        *given, weights = leaves
        if casts:
            given = [t.to(dtype) for t in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=not casts):
            z = layer(*given, experts, weights)
            z.square().sum().backward()  # inside of the region, as some programs do
        results.append([z.detach(), *(leaf.grad for leaf in leaves)])
        assert z.dtype == dtype and all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    for number, (mine, by_hand) in enumerate(zip(*results, strict=True)):
        assert same_bits(mine, by_hand), (number, mine, by_hand)


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_casts_as_linear_does(kind: str, dtype: torch.dtype) -> None:
    run_ranks(2, _autocast, kind, dtype)


def _shared(rank: int, world: int) -> int:
    """Return the graphs of 24 layers of one shape that share their ops, forward and backward."""
    rows = M // world
    x, w1, w2, _, _, experts, probs = operands(rows, world)
    first, second = AGGroupedGemm(n=FFN, k=HIDDEN, **SIZES), GroupedGemmRS(n=HIDDEN, k=FFN, **SIZES)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = (torch.nn.Parameter(w.clone()) for w in (w1, w2))
            self.up, self.down = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x, self.w1, experts).tanh(), self.w2, experts, probs)

    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(inputs)
        return graph.forward

    x.requires_grad_()
    layers = [Layer() for _ in range(24)]
    for layer in layers:
        x = torch.compile(layer, backend=backend, fullgraph=True)(x)
    x.square().mean().backward()
    assert all(layer.w1.grad is not None for layer in layers)
    first.close()
    second.close()
    return len(graphs)


def test_layers_that_share_ops_compile_once() -> None:
    assert run_ranks(2, _shared) == [1, 1]


def _token_counts(rank: int, world: int) -> int:
    """Return the graphs of a layer with its router that is called with six numbers of tokens."""
    from torch._dynamo.backends.debugging import aot_eager

    _, w1, w2, *_ = operands(M // world, world)
    first, second = AGGroupedGemm(n=FFN, k=HIDDEN, **SIZES), GroupedGemmRS(n=HIDDEN, k=FFN, **SIZES)
    leaves = [torch.randn(EXPERTS, HIDDEN), w1, w2]
    graphs: list[object] = []

    def layer(x: torch.Tensor, router: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        probs, experts = (x @ router.t()).softmax(-1).topk(TOPK)
        experts, probs = first.gather_choices(experts, probs)
        return x + second(first(x, weights[0], experts).tanh(), weights[1], experts, probs)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(inputs)
        return aot_eager(graph, inputs)

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for rows in (4, 10, 6, 3, 9, 5):
        x, results = torch.randn(rows, HIDDEN), []
        for run in (layer, compiled):
            given = [t.clone().requires_grad_() for t in (x, *leaves)]
            run(*given).square().sum().backward()
            results.append([t.grad for t in given])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(eager, graph, rtol=1e-4, atol=1e-4)
    first.close()
    second.close()
    return len(graphs)


def test_other_token_counts_need_no_other_graph() -> None:
    assert run_ranks(2, _token_counts) == [2, 2]  # the second one, for any number


def _frozen(rank: int, world: int, dispatches: bool) -> None:
    """Gradients do not depend on what is frozen on this rank, or on another one."""
    up, down = AGGroupedGemm, GroupedGemmRS
    if dispatches:
        up, down = DispatchGroupedGemm, GroupedGemmCombine
    sizes: dict[str, Any] = {**SIZES, "experts": 4, "ep": world, "timeout_s": 5.0}
    first, second = up(n=FFN, k=HIDDEN, **sizes), down(n=HIDDEN, k=FFN, **sizes)
    own = len(first.local_experts)
    shapes = ((M // world, HIDDEN), (own, FFN, HIDDEN), (own, HIDDEN, FFN), (M, TOPK))
    torch.manual_seed(1)  # equal probabilities
    drawn, experts = [torch.randn(s) for s in shapes], torch.rand(M, 4).topk(TOPK).indices
    wanted: list[torch.Tensor | None] = []
    for frozen in ((), ("w1 0",), ("w2 1",), ("w1 0", "w2 0"), ("w1 1", "w2 0", "p 0", "p 1")):
        names = [f"{name} {rank}" for name in ("x", "w1", "w2", "p")]
        x, w1, w2, p = leaves = [
            t.clone().requires_grad_(name not in frozen)
            for t, name in zip(drawn, names, strict=True)
        ]
        second(first(x, w1, experts).tanh(), w2, experts, p).square().sum().backward()
        wanted = wanted or [leaf.grad for leaf in leaves]
        for name, leaf, grad in zip(names, leaves, wanted, strict=True):
            assert (leaf.grad is None) == (name in frozen)
            assert leaf.grad is None or (grad is not None and same_bits(leaf.grad, grad)), name
    first.close()
    second.close()


@pytest.mark.parametrize("dispatches", [False, True])
def test_experts_of_some_ranks_are_frozen(dispatches: bool) -> None:
    run_ranks(2, _frozen, dispatches)


def _earlier_calls(rank: int, world: int, kind: str) -> None:
    """A pool closes an op when a later call needs a larger one; earlier graphs go on."""
    results = []
    for replaced in (False, True):
        *floats, experts, probs = operands(M // world if kind == "sharded" else M, world)
        leaves = [t.clone().requires_grad_() for t in (*floats, probs)]
        first = AGGroupedGemm(n=FFN, k=HIDDEN, **SIZES)
        kinds = GroupedGemmRS if kind == "sharded" else GroupedGemmAR
        second: GroupedGemmRS = kinds(n=HIDDEN, k=FFN, **SIZES)
        layer = sharded(first, second) if kind == "sharded" else replicated(second)  # type: ignore[arg-type]
        z = layer(*leaves[:5], experts, leaves[5])
        if kind == "sharded":
            full = first(leaves[0], leaves[1], experts, return_gathered=True)[1]
            full.sum().backward(retain_graph=True)  # waits for a collective in a thread
            z = z.sum() + full.square().sum()
        if replaced:
            first.close()
            second.close()
            del first, second, layer
        z.sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, wanted in zip(*results, strict=True):
        assert mine is not None and same_bits(mine, wanted)


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_a_backward_outlives_its_op(kind: str) -> None:
    run_ranks(2, _earlier_calls, kind)


def _slabs(rank: int, world: int) -> None:
    sizes = {"max_m": 4096, "n": 8, "k": 128, "topk": 2}
    for experts, wanted in ((8, [1024, 2048]), (64, [2048, 2048])):
        with GroupedGemmRS(experts=experts, **sizes) as op:
            assert [op.schedule(m).knobs.tile[0] for m in (2048, 4096)] == wanted


def test_few_rows_of_many_experts_are_multiplied_at_once() -> None:
    """Each slab would pack all weights again."""
    run_ranks(2, _slabs)
