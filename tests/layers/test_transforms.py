"""Ops and layers under transforms of PyTorch: operations counted, torch.func, traces, shapes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import flux
from flux.layers import RowParallelLinear
from flux.moe import AGGroupedGemm, GroupedGemmAR, GroupedGemmRS, expand_tokens
from flux.ops import gradients
from flux.runtime.domino import layers as domino_layers
from flux.ulysses import AllToAllGemm, GemmAllToAll
from harness import run_ranks

M, N, K = 8, 16, 12
FLOPS = 2 * M * N * K
Case = tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]


def _ops(world: int) -> Iterator[Case]:
    """Ops as functions of x and weight, with leaves for both."""
    for kind in (flux.AGGemm, flux.GemmRS, flux.GemmAR):
        for turned in (False, True):
            shapes = ((M, K // world), (N, K // world))
            if kind is flux.AGGemm:
                shapes = ((M // world, K), (N // world, K))
            x, weight = (torch.randn(*shape) for shape in shapes)
            weight = weight.t().contiguous() if turned else weight
            with kind(max_m=M, n=N, k=K, transpose_weight=turned, timeout_s=20.0) as op:
                yield kind.__name__, op, x.requires_grad_(), weight.requires_grad_()


def _layers(world: int, *families: Any) -> Iterator[Case]:
    """Layers as functions of x and weight."""
    for family in families:
        for sp in (True, False):
            column = family.ColumnParallelLinear(K, N, sequence_parallel=sp)
            row = family.RowParallelLinear(N, K, sequence_parallel=sp)
            for layer, rows, width in (
                (column, M // world if sp else M, K),
                (row, M, N // world),
            ):

                def call(x: torch.Tensor, weight: torch.Tensor, of: nn.Module = layer) -> Any:
                    return torch.func.functional_call(of, {"weight": weight}, (x,))

                name = f"{type(layer).__module__}.{type(layer).__name__}, sp {sp}"
                yield name, call, torch.randn(rows, width).requires_grad_(), layer.weight


def _for_each(world: int, check: Callable[..., None], *families: Any, ops: bool = True) -> None:
    for case in itertools.chain(_ops(world) if ops else (), _layers(world, *families)):
        check(*case)


def _count(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _counted(rank: int, world: int) -> None:
    one = FLOPS // world  # one product of this rank

    def check(name: str, call: Any, x: torch.Tensor, weight: torch.Tensor, one: int = one) -> None:
        for _ in range(2):  # the second is recognised as a repeated one
            assert _count(lambda: call(x.detach(), weight.detach())) == one, name
        assert _count(lambda: call(x, weight).sum().backward()) == 3 * one, name
        assert _count(lambda: call(x, weight.detach()).sum().backward()) == 2 * one, name
        assert _count(lambda: call(x.detach(), weight).sum().backward()) == 2 * one, name

    _for_each(world, check, flux.layers, domino_layers)
    group = dist.group.WORLD.group_name
    gather, scatter = flux.ops.fused_all_gather_matmul, flux.ops.fused_matmul_reduce_scatter
    b = torch.randn(K, N // world)
    assert _count(lambda: gather(torch.randn(M // world, K), [b, b], 0, group)) == 2 * one
    a, c = torch.randn(M, K // world), torch.randn(K // world, N)
    assert _count(lambda: scatter(a, c, "sum", 0, group)) == one
    graph = torch.ops.flux
    assert _count(lambda: graph.graph_matmul_all_reduce(a, c, "sum", group)) == one
    assert _count(lambda: graph.graph_matmul_reduce_scatter(a, c, "sum", 0, group)) == one
    args = ([c], [], [False], 0, group, True)
    assert _count(lambda: graph.graph_all_gather_matmul(a, *args)) == FLOPS
    flux.layers.close_pools()  # ops of graphs stay for as long as the ranks do
    for name, call, x, weight in _sparse(world):
        forward = _count(lambda call=call, x=x, weight=weight: call(x, weight))  # type: ignore[misc]
        assert forward > 0, name
        check(name, call, x, weight, forward)


def _sparse(world: int) -> Iterator[Case]:
    """Ops of experts and heads, with leaves for both operands."""
    choices = torch.arange(2 * M).view(M, 2) % 4
    of = {"max_m": M, "experts": 4, "topk": 2, "timeout_s": 20.0}
    with (
        AGGroupedGemm(n=N, k=K, **of) as gather,
        GroupedGemmRS(n=N, k=K, **of) as scatter,
        GroupedGemmAR(n=K, k=N, **of) as reduce,
        GemmAllToAll(max_m=M, k=K, heads=4, head_dim=4, timeout_s=20.0) as project,
        AllToAllGemm(max_m=M, n=N, heads=4, head_dim=4, timeout_s=20.0) as collect,
    ):
        rows = scatter.routing(choices).rows
        yield (
            "AGGroupedGemm",
            lambda x, w: gather(x, w, choices),
            torch.randn(M // world, K).requires_grad_(),
            torch.randn(4, N // world, K).requires_grad_(),
        )
        yield (
            "GroupedGemmRS",
            lambda x, w: scatter(x, w, choices),
            torch.randn(rows, K // world).requires_grad_(),
            torch.randn(4, N, K // world).requires_grad_(),
        )
        yield (
            "expand_tokens",
            lambda x, w: expand_tokens(reduce, x, w, choices),
            torch.randn(M, K).requires_grad_(),
            torch.randn(4, N // world, K).requires_grad_(),
        )
        yield (
            "GemmAllToAll",
            project,
            torch.randn(1, M // world, K).requires_grad_(),
            torch.randn(16, K).requires_grad_(),
        )
        yield (
            "AllToAllGemm",
            collect,
            torch.randn(1, 4 // world, M, 4).requires_grad_(),
            torch.randn(N, 16).requires_grad_(),
        )


@pytest.mark.parametrize("world", [1, 2])
def test_operations_are_counted_once(world: int) -> None:
    run_ranks(world, _counted)


def _accumulated(rank: int, world: int) -> None:
    """Megatron's fusion adds a weight gradient to a buffer, between hosts in two parts."""
    dy, x = torch.randn(M, N), torch.randn(M, K)
    assert _count(lambda: gradients.accumulate(torch.zeros(N, K), dy, x)) == FLOPS
    with mock.patch.dict("os.environ", FLUX_HOST=f"host{rank}"):
        layer = RowParallelLinear(N, K, sequence_parallel=True)
        rows = torch.randn(M, N // world)
        assert _count(lambda: layer(rows).sum().backward()) == 2 * FLOPS // world
    flux.layers.close_pools()  # a pool knows its hosts


def test_parts_of_a_weight_gradient_are_counted() -> None:
    run_ranks(2, _accumulated)


def _shapes(rank: int, world: int) -> None:
    """Fake tensors have shapes, gradients and operations, in and outside their mode."""
    for family, sp in itertools.product((flux.layers, domino_layers), (True, False)):
        mode = FakeTensorMode()
        with mode:
            up = family.ColumnParallelLinear(K, N, sequence_parallel=sp)
            down = family.RowParallelLinear(N, K, sequence_parallel=sp)
            x = torch.randn(M // world if sp else M, K, requires_grad=True)
        for inside in (mode, contextlib.nullcontext()):
            with inside, FlopCounterMode(display=False) as counter:
                y = down(up(x))
                y.sum().backward()
            assert y.shape == x.shape == x.grad.shape
            assert up.weight.grad.shape == up.weight.shape
            assert counter.get_total_flops() == 6 * FLOPS // world


def test_fake_tensors_go_through_layers() -> None:
    run_ranks(2, _shapes)


def _functional(rank: int, world: int) -> None:
    def check(name: str, call: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        want = torch.autograd.grad(call(x, weight).square().sum(), (x, weight))
        free = x.detach(), weight.detach()
        got = torch.func.grad(lambda *args: call(*args).square().sum(), (0, 1))(*free)
        torch.testing.assert_close(got, want, msg=name)
        y, pull = torch.func.vjp(call, *free)
        want = torch.autograd.grad(call(x, weight).sum(), (x, weight))
        torch.testing.assert_close(pull(torch.ones_like(y)), want, msg=name)
        jacobian = torch.func.jacrev(lambda x: call(x, free[1]).sum().view(1), chunk_size=1)
        torch.testing.assert_close(jacobian(free[0])[0], want[0], msg=name)
        torch.testing.assert_close(torch.func.functionalize(call)(*free), call(*free), msg=name)

    _for_each(world, check, flux.layers)


def test_gradients_of_torch_func_are_those_of_backward() -> None:
    run_ranks(2, _functional)


def _refused(rank: int, world: int) -> None:
    """What has no rule raises, before anything moves; no derivative is dropped."""

    def check(name: str, call: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        free = x.detach(), weight.detach()
        want = call(*free)
        with pytest.raises(ValueError, match=r"vmap has no rule|transforms of torch\.func"):
            torch.func.vmap(call)(*[torch.stack([t, t]) for t in free])
        with pytest.raises(ValueError, match="forward-mode differentiation"):
            torch.func.jvp(call, free, free)
        for position in range(2):
            with forward_ad.dual_level(), torch.no_grad():
                mixed = list(free)
                mixed[position] = forward_ad.make_dual(free[position], free[position])
                with pytest.raises(ValueError, match="forward-mode differentiation"):
                    call(*mixed)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            (dx,) = torch.autograd.grad(call(x, weight).square().sum(), x, create_graph=True)
            dx.square().sum().backward()
        torch.testing.assert_close(call(*free), want, msg=name)

    _for_each(world, check, flux.layers, domino_layers)
    group = dist.group.WORLD.group_name
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(K, N)
    y = flux.ops.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
    with pytest.raises(RuntimeError, match="has no backward"):
        y.sum().backward()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        flux.ops.fused_matmul_reduce_scatter(a, b, "sum", 0, group)


def test_transforms_without_a_rule_raise() -> None:
    run_ranks(2, _refused)


def _traced(rank: int, world: int) -> None:
    def check(name: str, call: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = call(*leaves)
            return y, *torch.autograd.grad(y.square().sum(), leaves)

        args = x.detach(), weight.detach()
        graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
        torch.testing.assert_close(graph(*args), step(*args), msg=name)

    _for_each(world, check, flux.layers, ops=False)


def test_traces_contain_the_communication() -> None:
    run_ranks(2, _traced)
