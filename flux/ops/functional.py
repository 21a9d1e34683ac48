"""Products with a collective, without an op object: functional forms, and ops of compiled graphs.

The functional forms have the signatures of PyTorch's async-TP ops (torch.ops.symm_mem). Their ranks
compare arguments first (flux/ops/pool.py). The ops named ``graph_*`` are for flux.compile. They
compare nothing, because the ranks of a group run the same graph, and their workspaces stay until
``flux.layers.close_pools()``: a graph has more shapes than a small cache holds.

Any gather or scatter dimension other than the first is moved to the front, where ranks own whole
rows; callers whose tensors are contiguous that way pay no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp
from flux.ops.gemm_ar import GemmAR
from flux.ops.gemm_rs import GemmRS
from flux.ops.library import product_flops, spread
from flux.ops.pool import OpPool, pool_of
from flux.ops.transforms import call, define
from flux.transport.exchange import resolve_group


def fused_all_gather_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return ``(A, [A @ B for B in Bs])`` for ``A = all_gather(A_shard, gather_dim)``. Collective.

    Args:
        A_shard: [..., K] with at least two dimensions, equal on all ranks.
        Bs: matrices [K, N_i]; gathering the last dimension wants [K * W, N_i].
        gather_dim: dimension of A_shard to gather.
        group_name: name of the process group.
        return_A: return the gathered A, else None in its place.

    Raises:
        ValueError, TypeError: refused input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.

    Gathering the last dimension gathers the contraction itself: every output element needs all
    ranks, so there is nothing to overlap with, and the library path runs.
    """
    args = (A_shard, list(Bs), gather_dim, group_name)
    gathered, outs = call("fused_all_gather_matmul", *args, return_A=return_A)
    return gathered, outs


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Return ``reduce_scatter(A @ B, reduce_op, scatter_dim)``. Collective.

    Args:
        A: [..., K], this rank's share of the contraction.
        B: [K, N].
        reduce_op: ``"sum"`` or ``"avg"``.
        scatter_dim: dimension of A @ B to scatter; its size must be divisible by the world.
        group_name: name of the process group.

    Raises:
        ValueError, TypeError: refused input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.
    """
    args = (A, B, reduce_op, scatter_dim, group_name)
    out: torch.Tensor = call("fused_matmul_reduce_scatter", *args)
    return out


# -- kernels ---------------------------------------------------------------------------------------


def _all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    pool = pool_of(group_name)

    def checked() -> str:
        dim, ns = _check_gather(A, Bs, gather_dim, pool.world), [B.shape[1] for B in Bs]
        return f"fused_all_gather_matmul(A {tuple(A.shape)} {A.dtype}, N {ns}, gather_dim {dim})"

    pool.agree(checked)
    dim = gather_dim % A.dim()
    if dim == A.dim() - 1:
        full = _gather_last(pool, A)
        return (full if return_A else None), [torch.matmul(full, B) for B in Bs]
    outs, gathered = _multiply_gathered(pool, False, A, Bs, None, dim, return_A)
    return gathered, outs


def _graph_all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    gather_dim: int,
    group_name: str,
    return_A: bool,
) -> list[torch.Tensor]:
    pool, bias = pool_of(group_name), spread(biases, has_bias)
    outs, gathered = _multiply_gathered(pool, True, A, Bs, bias, gather_dim, return_A)
    return outs if gathered is None else [*outs, gathered]


def _matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    pool = pool_of(group_name)

    def checked() -> str:
        dim = _check_scatter(A, B, reduce_op, scatter_dim, pool.world)
        return (
            f"fused_matmul_reduce_scatter(A {tuple(A.shape)} {A.dtype}, B {tuple(B.shape)}, "
            f"{reduce_op}, scatter_dim {dim})"
        )

    pool.agree(checked)
    return _multiply_scattered(pool, False, A, B, reduce_op, scatter_dim % A.dim())


def _graph_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    return _multiply_scattered(pool_of(group_name), True, A, B, reduce_op, scatter_dim)


def _graph_matmul_all_reduce(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    op, weights = _op_for(pool_of(group_name), True, GemmAR, A, [B], reduce=reduce_op)
    out: torch.Tensor = op(A, *weights)
    return out


def _op_for(
    pool: OpPool,
    in_graph: bool,
    kind: type[TensorParallelOp],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    **options: Any,
) -> tuple[Any, list[torch.Tensor]]:
    """Return an op for x [rows, K] @ weights [K, N_i], and the weights as it takes them.

    In a graph, strides are the same on all ranks, and an op is built for them: nothing is copied.
    Elsewhere they may differ: ranks have compared shapes alone.
    """
    (rows, depth), world = x.shape, pool.world
    n: int | tuple[int, ...]
    m, n, k = rows, weights[0].shape[1], depth * world
    if kind.kind.gathers:
        m, n, k = rows * world, tuple(B.shape[1] * world for B in weights), depth
    sizes = m, n, k, x.dtype
    if not in_graph:
        return pool.recent(kind, *sizes, transpose_weight=True, **options), list(weights)
    turned = all(B.stride(0) == 1 for B in weights)
    op = pool.op(kind, pool.graphs, *sizes, transpose_weight=not turned, **options)
    return op, [B.t() for B in weights] if turned else list(weights)


def _multiply_gathered(
    pool: OpPool,
    in_graph: bool,
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None] | None,
    dim: int,
    return_A: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return products of an A gathered along any dimension but the last, and A if it is wanted."""
    x = A.movedim(dim, 0)
    rows = x.flatten(0, -2)
    op, weights = _op_for(pool, in_graph, AGGemm, rows, Bs)
    result = op(rows, weights, biases, return_gathered=return_A)
    outs, gathered = result if return_A else (result, None)
    lead = (pool.world * x.shape[0], *x.shape[1:-1])

    def restore(t: torch.Tensor) -> torch.Tensor:
        return t.view(*lead, t.shape[-1]).movedim(0, dim)

    full = None if gathered is None else restore(gathered)
    if full is not None and pool.world == 1:  # PyTorch's is A as it is then
        full = full.contiguous()
    return [restore(y) for y in outs], full


def _multiply_scattered(
    pool: OpPool, in_graph: bool, A: torch.Tensor, B: torch.Tensor, reduce: str, dim: int
) -> torch.Tensor:
    """Return a product that is reduced and scattered along any dimension.

    The result has no gaps, and its dimensions are in order, as that of the library's collective.
    """

    def product(rows: torch.Tensor, weight: torch.Tensor) -> Any:
        op, weights = _op_for(pool, in_graph, GemmRS, rows, [weight], reduce=reduce)
        return op(rows, *weights)

    if dim == A.dim() - 1:
        # Scattering columns is scattering the rows of the transposed product, (A @ B)^T = B^T A^T.
        flat = A.reshape(-1, A.shape[-1])
        columns: torch.Tensor = product(B.t(), flat.t()).t().contiguous()
        return columns.view(*A.shape[:-1], B.shape[1] // pool.world)
    x = A.movedim(dim, 0)
    lead = (x.shape[0] // pool.world, *x.shape[1:-1])
    y: torch.Tensor = product(x.flatten(0, -2), B).view(*lead, B.shape[1]).movedim(0, dim)
    return y.contiguous().view(y.shape)  # the view has the usual strides for dimensions of 1, too


def _gather_last(pool: OpPool, A: torch.Tensor) -> torch.Tensor:
    """Gather along the last dimension: ranks' shards side by side."""
    if pool.world == 1:
        # An output must not alias the input.
        return A.clone(memory_format=torch.contiguous_format)
    rows = A.reshape(-1, A.shape[-1])
    m, n = rows.shape[0] * pool.world, (pool.world,)
    op = pool.recent(AGGemm, m, n, rows.shape[1], A.dtype, transpose_weight=True)
    full = op._unfused.gather_rows(rows, m)
    return full.view(pool.world, *A.shape).movedim(0, -2).flatten(-2)


# -- checks ----------------------------------------------------------------------------------------


def _normal_dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name} must be in [{-ndim}, {ndim}), got {dim}")
    return dim % ndim


def _check_operands(A: torch.Tensor, Bs: Sequence[torch.Tensor], k: int) -> None:
    if A.dim() < 2 or A.numel() == 0:
        raise ValueError(f"A must be non-empty, of at least 2 dimensions, got {list(A.shape)}")
    if not Bs:
        raise ValueError("Bs must hold at least one matrix, got none")
    for B in Bs:
        if B.dim() != 2 or B.shape[0] != k or B.shape[1] < 1:
            raise ValueError(f"B must be [{k}, N], got {list(B.shape)}")
        if B.dtype != A.dtype:
            raise TypeError(f"B must be {A.dtype} as A is, got {B.dtype}")
        if B.device != A.device:
            raise ValueError(f"B must be on {A.device} as A is, got {B.device}")
    if A.device.type != "cpu":
        raise ValueError(f"A must be on the CPU, got {A.device}")


def _check_gather(A: torch.Tensor, Bs: Sequence[torch.Tensor], dim: int, world: int) -> int:
    dim = _normal_dim("gather_dim", dim, A.dim())
    last = dim == A.dim() - 1
    _check_operands(A, Bs, A.shape[-1] * world if last else A.shape[-1])
    return dim


def _check_scatter(A: torch.Tensor, B: torch.Tensor, reduce_op: str, dim: int, world: int) -> int:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op must be 'sum' or 'avg', got {reduce_op!r}")
    _check_operands(A, [B], A.shape[-1] if A.dim() else 0)
    dim = _normal_dim("scatter_dim", dim, A.dim())
    size = B.shape[1] if dim == A.dim() - 1 else A.shape[dim]
    if size % world:
        raise ValueError(
            f"dimension {dim} of A @ B must be divisible by the world {world}, got {size}"
        )
    return dim


# -- fake kernels and registration -----------------------------------------------------------------


def _all_gather_matmul_fake(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    world = resolve_group(group_name).size()
    dim = _normal_dim("gather_dim", gather_dim, A.dim())
    lead = list(A.shape[:-1])
    if dim == A.dim() - 1:
        full = A.new_empty(*lead, A.shape[-1] * world)
        return (full if return_A else None), [A.new_empty(*lead, B.shape[1]) for B in Bs]
    moved = [lead[dim] * world, *lead[:dim], *lead[dim + 1 :]]
    outs = [A.new_empty(*moved, B.shape[1]).movedim(0, dim) for B in Bs]
    if not return_A:
        return None, outs
    if world == 1:
        return A.new_empty(A.shape), outs
    return A.new_empty(*moved, A.shape[-1]).movedim(0, dim), outs


def _graph_all_gather_matmul_fake(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    gather_dim: int,
    group_name: str,
    return_A: bool,
) -> list[torch.Tensor]:
    gathered, outs = _all_gather_matmul_fake(A, Bs, gather_dim, group_name, return_A)
    return outs if gathered is None else [*outs, gathered]


def _matmul_reduce_scatter_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    world = resolve_group(group_name).size()
    dim = _normal_dim("scatter_dim", scatter_dim, A.dim())
    lead = list(A.shape[:-1])
    if dim == A.dim() - 1:
        return A.new_empty(*lead, B.shape[1] // world)
    lead[dim] //= world
    return A.new_empty(*lead, B.shape[1])


def _matmul_all_reduce_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    return A.new_empty(A.shape[0], B.shape[1])


def _all_gather_matmul_flops(A: Any, Bs: Any, *args: Any, out_shape: Any, **options: Any) -> int:
    return sum(product_flops(*out, B[0]) for B, out in zip(Bs, out_shape[1], strict=True))


def _graph_all_gather_matmul_flops(A: Any, Bs: Any, *args: Any, out_shape: Any) -> int:
    return sum(product_flops(*out, B[0]) for B, out in zip(Bs, out_shape, strict=False))


def _matmul_flops(A: Any, B: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*A, B[1])


define(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A = True) -> (Tensor?, Tensor[])",
    _all_gather_matmul,
    _all_gather_matmul_fake,
    ordered=True,
    flops=_all_gather_matmul_flops,
)
define(
    "graph_all_gather_matmul(Tensor A, Tensor[] Bs, Tensor[] biases, bool[] has_bias, "
    "int gather_dim, str group_name, bool return_A) -> Tensor[]",
    _graph_all_gather_matmul,
    _graph_all_gather_matmul_fake,
    flops=_graph_all_gather_matmul_flops,
)
_SCATTER = "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor"
define(
    "fused_matmul_reduce_scatter" + _SCATTER,
    _matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
    ordered=True,
    flops=_matmul_flops,
)
define(
    "graph_matmul_reduce_scatter" + _SCATTER,
    _graph_matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
    flops=_matmul_flops,
)
define(
    "graph_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name) -> Tensor",
    _graph_matmul_all_reduce,
    _matmul_all_reduce_fake,
    flops=_matmul_flops,
)
