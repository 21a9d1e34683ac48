"""torch.autograd.gradcheck of everything that can be differentiated, in float64.

What is checked is a function of the inputs of all ranks, which every rank has and evaluates
together with the others, so that all make the same calls in the same order:

    inputs of all ranks --mine--> this rank's --op--> this rank's result --all_of--> all results
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import flux
from flux import _C
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools
from flux.layers.autograd import LinearConfig, column_linear, row_linear
from harness import more, run_ranks

F64 = torch.float64


def _bounds(total: int, world: int, rank: int) -> slice:
    return slice(_C.core.row_begin(total, world, rank), _C.core.row_end(total, world, rank))


class _Mine(torch.autograd.Function):
    """This rank's rows; gradients of all ranks are put together."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.shape, ctx.dim = whole.shape, dim
        ctx.own = _bounds(whole.shape[dim], dist.get_world_size(), dist.get_rank())
        return whole.narrow(dim, ctx.own.start, ctx.own.stop - ctx.own.start).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = grad.new_zeros(ctx.shape)
        whole.narrow(ctx.dim, ctx.own.start, grad.shape[ctx.dim]).copy_(grad)
        dist.all_reduce(whole)
        return whole, None


class _AllOf(torch.autograd.Function):
    """The rows of all ranks; a rank's part of their gradient, which all ranks have, is its own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, total: int, dim: int) -> torch.Tensor:
        ctx.own, ctx.dim = _bounds(total, dist.get_world_size(), dist.get_rank()), dim
        shape = list(own.shape)
        shape[dim] = total
        whole = own.new_zeros(shape)
        whole.narrow(dim, ctx.own.start, own.shape[dim]).copy_(own)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        size = ctx.own.stop - ctx.own.start
        return grad.narrow(ctx.dim, ctx.own.start, size).contiguous(), None, None


class _Shared(torch.autograd.Function):
    """What all ranks have, each of which sees a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class _SumOf(torch.autograd.Function):
    """The sum over ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def mine(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return _Mine.apply(whole, dim)


def all_of(own: torch.Tensor, total: int, dim: int = 0) -> torch.Tensor:
    return _AllOf.apply(own, total, dim)


def shared(whole: torch.Tensor) -> torch.Tensor:
    return _Shared.apply(whole)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Inputs, the same on all ranks."""
    torch.manual_seed(7)
    return [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]


def check(function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    assert torch.autograd.gradcheck(function, leaves(*shapes))


# -- ops -------------------------------------------------------------------------------------------


def _ag_gemm(rank: int, world: int, m: int, transpose: bool) -> None:
    n, k, way = 2 * world, 3, int(transpose)
    with flux.AGGemm(max_m=m, n=(n, n), k=k, dtype=F64, transpose_weight=transpose) as op:

        def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = [mine(weight, way) for weight in weights]
            ys, full = op(mine(x), own, m=m, return_gathered=True)
            # Every rank goes on with the gathered x in another way.
            return (*(all_of(y, n, 1) for y in ys), _SumOf.apply(full * (rank + 1)))

        weight = (k, n) if transpose else (n, k)
        check(function, (m, k), weight, weight)


@pytest.mark.parametrize("transpose", [True, *more(False)], ids=["kn", *more("nk")])
@pytest.mark.parametrize(("world", "m"), [*more((2, 4), (2, 3)), (3, 2)])
def test_gradients_of_ag_gemm(world: int, m: int, transpose: bool) -> None:
    run_ranks(world, _ag_gemm, m, transpose)


def _reducing(rank: int, world: int, kind: str, m: int, reduce: str, transpose: bool) -> None:
    n, k = 2, 2 * world
    options = {"dtype": F64, "reduce": reduce, "transpose_weight": transpose}
    with getattr(flux, kind)(max_m=m, n=n, k=k, **options) as op:

        def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            own = mine(weight, 0 if transpose else 1)
            if kind == "GemmAR":  # whose gradient all ranks have
                return op(mine(x, 1), own, bias)
            return all_of(op(mine(x, 1), own, shared(bias)), m)

        check(function, (m, k), (k, n) if transpose else (n, k), (n,))


@pytest.mark.parametrize(
    ("reduce", "transpose"),
    [("avg", False), ("sum", True), *more(("sum", False), ("avg", True))],
)
@pytest.mark.parametrize("kind", ["GemmRS", "GemmAR"])
@pytest.mark.parametrize(("world", "m"), [*more((2, 3)), (3, 4)])
def test_gradients_of_gemm_rs_and_gemm_ar(
    world: int, m: int, kind: str, transpose: bool, reduce: str
) -> None:
    run_ranks(world, _reducing, kind, m, reduce, transpose)


# -- layers ----------------------------------------------------------------------------------------


def _column(rank: int, world: int, split: bool, whole: bool) -> None:
    n, k = 2 * world, 3
    layer = ColumnParallelLinear(k, n, sequence_parallel=split, gather_output=whole, dtype=F64)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        values = {"weight": mine(weight), "bias": mine(bias)}
        y = functional_call(layer, values, (mine(x) if split else x,))
        return y if whole else all_of(y, n, 2)

    check(function, (2 * world, 1, k), (n, k), (n,))
    close_pools()


@pytest.mark.parametrize(
    ("split", "whole"), [(False, True), (True, False), *more((False, False), (True, True))]
)
@pytest.mark.parametrize("world", [*more(2), 3])
def test_gradients_of_the_column_layer(world: int, split: bool, whole: bool) -> None:
    run_ranks(world, _column, split, whole)


def _row(rank: int, world: int, split: bool, parallel: bool) -> None:
    n, k, m = 2, 2 * world, 2 * world
    layer = RowParallelLinear(k, n, sequence_parallel=split, input_is_parallel=parallel, dtype=F64)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        values = {"weight": mine(weight, 1), "bias": bias}
        z = functional_call(layer, values, (mine(x, 2) if parallel else x,))
        return all_of(z, m) if split else z

    check(function, (m, 1, k), (n, k), (n,))
    close_pools()


@pytest.mark.parametrize(
    ("split", "parallel"), [(False, True), (True, False), *more((False, False), (True, True))]
)
@pytest.mark.parametrize("world", [*more(2), 3])
def test_gradients_of_the_row_layer(world: int, split: bool, parallel: bool) -> None:
    run_ranks(world, _row, split, parallel)


def _in_graphs(rank: int, world: int, split: bool) -> None:
    """The ops that stand for layers in compiled graphs."""
    n, k, m = 2 * world, 2 * world, 2 * world
    config = LinearConfig(dist.group.WORLD.group_name, split)

    def column(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = column_linear(mine(x) if split else x, mine(weight), mine(bias), config)
        return all_of(y, n, 1)

    def row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = row_linear(mine(x, 1), mine(weight, 1), config)
        return all_of(z, m) if split else z

    check(column, (m, k), (n, k), (n,))
    check(row, (m, k), (n, k))
    close_pools()


@pytest.mark.parametrize("split", [False, True], ids=["", "sequence_parallel"])
def test_gradients_of_ops_in_compiled_graphs(split: bool) -> None:
    run_ranks(2, _in_graphs, split)
