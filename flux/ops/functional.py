"""Functional forms, signature-compatible with PyTorch's async-TP ops (torch.ops.symm_mem).

Registered as ``torch.ops.flux.fused_all_gather_matmul`` and
``torch.ops.flux.fused_matmul_reduce_scatter``, with fake kernels. Any gather or scatter dimension
other than the first is moved to the front, where ranks own whole rows; callers whose tensors are
contiguous that way pay no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flux.ops.library import LIBRARY, keep_in_order, register_fake
from flux.ops.workspace import Workspace, workspace_of
from flux.transport.exchange import resolve_group

LIBRARY.define(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A = True) -> (Tensor?, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    gathered, outs = torch.ops.flux.fused_all_gather_matmul(
        A_shard, list(Bs), gather_dim, group_name, return_A=return_A
    )
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
    out: torch.Tensor = torch.ops.flux.fused_matmul_reduce_scatter(
        A, B, reduce_op, scatter_dim, group_name
    )
    return out


def _all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    work = workspace_of(group_name)
    dim = _checked(work, lambda: _check_gather(A, Bs, gather_dim, work.world))
    ns = tuple(B.shape[1] for B in Bs)
    work.agree(f"fused_all_gather_matmul(A {tuple(A.shape)} {A.dtype}, N {ns}, gather_dim {dim})")
    if dim == A.dim() - 1:
        full = _gather_last(work, A)
        return (full if return_A else None), [torch.matmul(full, B) for B in Bs]

    def product(rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        m = rows.shape[0] * work.world
        op = work.ag_gemm(m, tuple(n * work.world for n in ns), rows.shape[1], A.dtype)
        result = op(rows, list(Bs), return_gathered=return_A)
        return result if return_A else (result, None)

    outs, gathered = around_gather(A, dim, work.world, product)
    return gathered, outs


def around_gather(
    A: torch.Tensor,
    dim: int,
    world: int,
    product: Callable[[torch.Tensor], tuple[list[torch.Tensor], torch.Tensor | None]],
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Apply ``product``, which takes rows [rows, K], to an A gathered along any dim but the last.

    ``product`` returns what has all rows, [W * rows, ...] each: results, and A if it is wanted.
    """
    x = A.movedim(dim, 0)
    outs, gathered = product(x.flatten(0, -2))
    lead = (world * x.shape[0], *x.shape[1:-1])

    def restore(t: torch.Tensor) -> torch.Tensor:
        return t.view(*lead, t.shape[-1]).movedim(0, dim)

    full = None if gathered is None else restore(gathered)
    if full is not None and world == 1:  # PyTorch's is A as it is then
        full = full.contiguous()
    return [restore(y) for y in outs], full


def _gather_last(work: Workspace, A: torch.Tensor) -> torch.Tensor:
    """Gather along the last dimension: ranks' shards side by side."""
    if work.world == 1:
        # An output must not alias the input.
        return A.clone(memory_format=torch.contiguous_format)
    rows = A.reshape(-1, A.shape[-1])
    m = rows.shape[0] * work.world
    full = work.ag_gemm(m, (work.world,), rows.shape[1], A.dtype)._unfused.gather_rows(rows, m)
    return full.view(work.world, *A.shape).movedim(0, -2).flatten(-2)


def _matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    work = workspace_of(group_name)
    dim = _checked(work, lambda: _check_scatter(A, B, reduce_op, scatter_dim, work.world))
    work.agree(
        f"fused_matmul_reduce_scatter(A {tuple(A.shape)} {A.dtype}, B {tuple(B.shape)}, "
        f"{reduce_op}, scatter_dim {dim})"
    )

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        k, n = weight.shape
        op = work.gemm_rs(rows.shape[0], n, k * work.world, A.dtype, reduce_op)
        return op(rows, weight)

    return around_scatter(A, B, dim, work.world, product)


def around_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    dim: int,
    world: int,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Apply ``product``, which takes rows [M, K] and [K, N], to an A of any rank and ``dim``.

    ``product`` returns this rank's rows of the result, [M / W, N]. The result has no gaps, and its
    dimensions are in order, as that of the library's collective.
    """
    if dim == A.dim() - 1:
        # Scattering columns is scattering the rows of the transposed product, (A @ B)^T = B^T A^T.
        flat = A.reshape(-1, A.shape[-1])
        columns = product(B.t(), flat.t()).t().contiguous()
        return columns.view(*A.shape[:-1], B.shape[1] // world)
    x = A.movedim(dim, 0)
    lead = (x.shape[0] // world, *x.shape[1:-1])
    y = product(x.flatten(0, -2), B).view(*lead, B.shape[1]).movedim(0, dim)
    return y.contiguous().view(y.shape)  # the view has the usual strides for dimensions of 1, too


def _checked(work: Workspace, check: Callable[[], int]) -> int:
    try:
        return check()
    except (TypeError, ValueError) as error:
        work.refuse(str(error))
        raise


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


LIBRARY.impl("fused_all_gather_matmul", _all_gather_matmul, "CompositeExplicitAutograd")
LIBRARY.impl("fused_matmul_reduce_scatter", _matmul_reduce_scatter, "CompositeExplicitAutograd")


@register_fake("fused_all_gather_matmul")
def all_gather_matmul_fake(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return empty tensors with shapes and strides of ``fused_all_gather_matmul``'s results."""
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


@register_fake("fused_matmul_reduce_scatter")
def matmul_reduce_scatter_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Return an empty tensor with shape and strides of ``fused_matmul_reduce_scatter``."""
    world = resolve_group(group_name).size()
    dim = _normal_dim("scatter_dim", scatter_dim, A.dim())
    lead = list(A.shape[:-1])
    if dim == A.dim() - 1:
        return A.new_empty(*lead, B.shape[1] // world)
    lead[dim] //= world
    return A.new_empty(*lead, B.shape[1])


keep_in_order("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
