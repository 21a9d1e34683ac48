"""The ops that rewritten graphs call: products with communication, on pooled ops of a group.

Unlike the functional forms (flux.ops.functional) they do not compare arguments with their peers
first, because the ranks of a group run the same graph. Their workspaces stay until
``flux.layers.close_pools()``: a graph has more shapes than a small cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flux.ops import AGGemm, GemmAR, GemmRS
from flux.ops.functional import (
    all_gather_matmul_fake,
    around_gather,
    around_scatter,
    matmul_reduce_scatter_fake,
)
from flux.ops.library import LIBRARY, register_fake, spread
from flux.ops.pool import pool_of

for _schema in (
    "graph_all_gather_matmul(Tensor A, Tensor[] Bs, Tensor[] biases, bool[] has_bias, "
    "int gather_dim, str group_name, bool return_A) -> Tensor[]",
    "graph_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    "graph_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _as_weights(products: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return right operands [K, N] in an op's form, and whether they are transposed to [N, K].

    They stay in their memory layout, so that nothing is copied.
    """
    turned = all(B.stride(0) == 1 for B in products)
    return ([B.t() for B in products] if turned else list(products)), turned


def _all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    gather_dim: int,
    group_name: str,
    return_A: bool,
) -> list[torch.Tensor]:
    """Return products [*A.shape[:-1], N_i], gathered along ``gather_dim``.

    With ``return_A`` the last element is the gathered A.
    """
    pool = pool_of(group_name)
    bias = spread(biases, has_bias)
    weights, turned = _as_weights(Bs)

    def product(rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        m, n = rows.shape[0] * pool.world, tuple(B.shape[1] * pool.world for B in Bs)
        op = pool.op(
            AGGemm, pool.graphs, m, n, rows.shape[1], rows.dtype, transpose_weight=not turned
        )
        result = op(rows, weights, bias, return_gathered=return_A)
        return result if return_A else (result, None)

    outs, gathered = around_gather(A, gather_dim, pool.world, product)
    return outs if gathered is None else [*outs, gathered]


def _matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Return ``reduce_scatter(A @ B, reduce_op, scatter_dim)``."""
    pool = pool_of(group_name)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weights, turned = _as_weights([weight])
        sizes = (weight.shape[1], weight.shape[0] * pool.world, rows.dtype)
        op = pool.op(
            GemmRS,
            pool.graphs,
            rows.shape[0],
            *sizes,
            transpose_weight=not turned,
            reduce=reduce_op,
        )
        return op(rows, *weights)

    return around_scatter(A, B, scatter_dim, pool.world, product)


def _matmul_all_reduce(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    """Return ``all_reduce(A [M, K] @ B [K, N], reduce_op)``."""
    pool = pool_of(group_name)
    weights, turned = _as_weights([B])
    sizes = (B.shape[1], B.shape[0] * pool.world, A.dtype)
    op = pool.op(
        GemmAR, pool.graphs, A.shape[0], *sizes, transpose_weight=not turned, reduce=reduce_op
    )
    return op(A, *weights)


LIBRARY.impl("graph_all_gather_matmul", _all_gather_matmul, "CompositeExplicitAutograd")
LIBRARY.impl("graph_matmul_reduce_scatter", _matmul_reduce_scatter, "CompositeExplicitAutograd")
LIBRARY.impl("graph_matmul_all_reduce", _matmul_all_reduce, "CompositeExplicitAutograd")


@register_fake("graph_all_gather_matmul")
def _all_gather_matmul_fake(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    gather_dim: int,
    group_name: str,
    return_A: bool,
) -> list[torch.Tensor]:
    gathered, outs = all_gather_matmul_fake(A, Bs, gather_dim, group_name, return_A)
    return outs if gathered is None else [*outs, gathered]


register_fake("graph_matmul_reduce_scatter")(matmul_reduce_scatter_fake)


@register_fake("graph_matmul_all_reduce")
def _matmul_all_reduce_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    return A.new_empty(A.shape[0], B.shape[1])
