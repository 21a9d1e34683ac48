"""CPU kernels of the float8 ops.

AGGemm and GemmRS serve float8_e4m3fn operands with bfloat16 results. For other dtypes and for
result scales the library path runs: rows are gathered before, or sums scattered after,
``torch._scaled_mm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux.core.spec import DTYPES, FP8
from flux.ops.ag_gemm import AGGemm
from flux.ops.gemm_rs import GemmRS
from flux.ops.pool import OpPool, pool_of

_FLOAT8 = (FP8, torch.float8_e5m2)


def all_gather_scaled_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ``(A, [_scaled_mm(A, B, ...) for B in Bs])`` of a gathered A. Collective.

    Args:
        A: [..., K], float8_e4m3fn or float8_e5m2, equal in shape on all ranks.
        Bs: float8 matrices [K, N_i].
        A_scale: float32; one value, [..., 1] of the own rows, or [..., 1] of the gathered rows.
        B_scales: float32, one value each, or with scales of rows N_i values each.
        gather_dim: dimension of A to gather, not the last.
        group_name: name of the process group.
        biases: [N_i] or None, one per B.
        result_scales: one value or None, one per B.
        out_dtypes: dtype of the result, one per B; None is that of A.
        use_fast_accum: for ``torch._scaled_mm``, one per B.

    Raises:
        ValueError, TypeError: refused input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.
    """
    from torch.distributed._symmetric_memory import _maybe_convert_scalar_types_to_dtypes

    pool = pool_of(group_name)
    dtypes = [
        A.dtype if dtype is None else dtype
        for dtype in _maybe_convert_scalar_types_to_dtypes(list(out_dtypes))
    ]
    has_op = A.dtype == FP8 and all(
        _has_op(*operands) for operands in zip(Bs, biases, result_scales, dtypes, strict=False)
    )

    def checked() -> str:
        lists = (B_scales, biases, result_scales, dtypes, use_fast_accum)
        if not Bs or any(len(values) != len(Bs) for values in lists):
            counts = [len(Bs), *map(len, lists)]
            raise ValueError(f"one of each list must be given per B, and one B at least: {counts}")
        if A.dim() < 2 or not 0 <= gather_dim < A.dim() - 1:
            raise ValueError(
                f"gather_dim must be a dimension of A {list(A.shape)} but the last, "
                f"got {gather_dim}"
            )
        by_row = _scales_of_rows(A, A_scale, gather_dim, pool.world) != "tensor"
        for B, B_scale, bias, result_scale in zip(Bs, B_scales, biases, result_scales, strict=True):
            _check_operands(A, B, B_scale, bias, result_scale, by_row)
        return (
            f"fused_all_gather_scaled_matmul(A {tuple(A.shape)} {A.dtype}, A_scale "
            f"{tuple(A_scale.shape)}, N {[B.shape[1] for B in Bs]}, gather_dim {gather_dim}, out "
            f"{dtypes}, {'fused' if has_op else 'unfused'})"
        )

    pool.agree(checked)
    kind = _scales_of_rows(A, A_scale, gather_dim, pool.world)
    rows, m = _to_front(A, gather_dim), A.shape[:-1].numel() * pool.world
    scale = A_scale if kind == "tensor" else A_scale.movedim(gather_dim, 0)
    if has_op:
        if kind == "gathered":
            scale = scale.chunk(pool.world)[pool.rank]
        op = pool.recent(
            AGGemm,
            m,
            tuple(B.shape[1] * pool.world for B in Bs),
            A.shape[-1],
            FP8,
            transpose_weight=True,
            scaling="tensor" if kind == "tensor" else "row",
        )
        outs, full = op(
            rows,
            list(Bs),
            list(biases),
            return_gathered=True,
            scale_x=scale.reshape(-1),
            scale_weight=[B_scale.reshape(-1) for B_scale in B_scales],
        )
    else:
        full = _gathered(pool, rows.view(FP8), m).view(A.dtype)
        if kind != "tensor":
            scale = scale.reshape(-1, 1)
        if kind == "own":
            scale = _gathered(pool, scale, m)
        arguments = zip(Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True)
        outs = [_scaled_mm(full, B, scale, *rest) for B, *rest in arguments]
    lead = A.movedim(gather_dim, 0).shape[:-1]

    def restore(t: torch.Tensor) -> torch.Tensor:
        return t.view(lead[0] * pool.world, *lead[1:], t.shape[-1]).movedim(0, gather_dim)

    return restore(full), [restore(out) for out in outs]


def scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return ``reduce_scatter(_scaled_mm(A, B, ...))``. Collective.

    Args:
        A: [..., K], float8, this rank's share of the contraction.
        B: [K, N], float8.
        A_scale: float32; one value, or [..., 1] of A's rows.
        B_scale: float32; one value, or with scales of rows N values.
        reduce_op: ``"sum"`` or ``"avg"``.
        orig_scatter_dim: dimension of the product, in its ``output_shape``, to scatter; the world
            divides its size. Not the last.
        scatter_dim_after_maybe_reshape: that dimension in A. It follows from the others.
        group_name: name of the process group.
        output_shape: of the product before it is scattered; None: [..., N] as A.
        bias: [N] or None; every rank adds its own.
        result_scale: one value or None.
        out_dtype: of the result, not float8; None is the dtype of A, which is refused.
        use_fast_accum: for ``torch._scaled_mm``.

    Raises:
        ValueError, TypeError: refused input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.
    """
    pool = pool_of(group_name)
    dtype = A.dtype if out_dtype is None else out_dtype
    has_op = A.dtype == FP8 and bias is None and _has_op(B, bias, result_scale, dtype)
    shape = [*A.shape[:-1], B.shape[-1]] if output_shape is None else list(output_shape)

    def checked() -> str:
        if reduce_op not in ("sum", "avg"):
            raise ValueError(f"reduce_op must be 'sum' or 'avg', got {reduce_op!r}")
        if dtype not in DTYPES or dtype == FP8:
            raise TypeError(f"out_dtype must be one that can be summed, got {dtype}")
        if A.dim() < 2 or not 0 <= scatter_dim_after_maybe_reshape < A.dim():
            raise ValueError(
                f"scatter_dim_after_maybe_reshape must be a dimension of A {list(A.shape)}, "
                f"got {scatter_dim_after_maybe_reshape}"
            )
        if not 0 <= orig_scatter_dim < len(shape) - 1:
            raise ValueError(
                f"orig_scatter_dim must be a dimension of {shape} but the last, "
                f"got {orig_scatter_dim}"
            )
        _check_operands(A, B, B_scale, bias, result_scale, A_scale.numel() > 1)
        if math.prod(shape[:-1]) != A.shape[:-1].numel() or shape[-1] != B.shape[1]:
            raise ValueError(
                f"output_shape must have the rows of A {list(A.shape)} and the columns of B "
                f"{list(B.shape)}, got {shape}"
            )
        if shape[orig_scatter_dim] % pool.world:
            raise ValueError(
                f"dimension {orig_scatter_dim} of the product must be divisible by the world "
                f"{pool.world}, got {shape}"
            )
        if _scales_of_rows(A, A_scale, 0, 1) == "gathered":
            raise ValueError(f"A_scale must have a value per row of A, got {list(A_scale.shape)}")
        return (
            f"fused_scaled_matmul_reduce_scatter(A {tuple(A.shape)} {A.dtype}, B "
            f"{tuple(B.shape)}, A_scale {tuple(A_scale.shape)}, {reduce_op}, scatter_dim "
            f"{orig_scatter_dim} of {shape}, out {dtype}, {'fused' if has_op else 'unfused'})"
        )

    pool.agree(checked)
    dim, by_row = orig_scatter_dim, A_scale.numel() > 1
    rows = _to_front(A.reshape(*shape[:-1], A.shape[-1]), dim)
    scale = _to_front(A_scale.reshape(*shape[:-1], 1), dim) if by_row else A_scale
    m = rows.shape[0]
    options: dict[str, Any] = {"transpose_weight": True, "reduce": reduce_op}
    if has_op:
        scaling = "row" if by_row else "tensor"
        k = A.shape[-1] * pool.world
        op = pool.recent(GemmRS, m, B.shape[1], k, FP8, scaling=scaling, **options)
        out = op(rows, B, scale_x=scale.reshape(-1), scale_weight=B_scale.reshape(-1))
    else:
        arguments = (B, scale, B_scale, bias, result_scale, dtype, use_fast_accum)
        partial = _scaled_mm(rows, *arguments)
        scattering = pool.recent(GemmRS, m, B.shape[1], pool.world, dtype, **options)
        out = scattering._unfused.scatter_rows(partial)
        if reduce_op == "avg":
            out = out / pool.world
    lead = [shape[dim] // pool.world, *shape[:dim], *shape[dim + 1 : -1]]
    return out.view(*lead, B.shape[1]).movedim(0, dim).contiguous()


def _has_op(
    B: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Return whether an op of flux computes this product of a float8_e4m3fn A."""
    fits = bias is None or bias.dtype == torch.bfloat16
    return B.dtype == FP8 and dtype == torch.bfloat16 and fits and result_scale is None


def _scales_of_rows(A: torch.Tensor, A_scale: torch.Tensor, dim: int, world: int) -> str:
    """Return which rows A_scale has values of: ``own``, ``gathered``, or ``tensor`` (one for all).

    Raises:
        ValueError: none of these.
    """
    own = list(A.shape[:-1])
    full = [*own[:dim], own[dim] * world, *own[dim + 1 :]]
    if list(A_scale.shape) == [*own, 1]:
        return "own"
    if A_scale.numel() == 1:
        return "tensor"
    if list(A_scale.shape) == [*full, 1]:
        return "gathered"
    raise ValueError(
        f"A_scale must have one value, or be {[*own, 1]} or {[*full, 1]}, got {list(A_scale.shape)}"
    )


def _check_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    by_row: bool,
) -> None:
    if A.numel() == 0:
        raise ValueError(f"A must be non-empty, got {list(A.shape)}")
    if B.dim() != 2 or B.shape[0] != A.shape[-1] or B.shape[1] < 1:
        raise ValueError(f"B must be [{A.shape[-1]}, N], got {list(B.shape)}")
    if A.dtype not in _FLOAT8 or B.dtype not in _FLOAT8:
        raise TypeError(f"A and B must be float8, got {A.dtype} and {B.dtype}")
    columns = B.shape[1]
    wanted = columns if by_row else 1
    if B_scale.dtype != torch.float32 or B_scale.numel() != wanted:
        raise ValueError(
            f"B_scale must be float32 of {wanted} value(s), as A_scale has "
            f"{'one per row' if by_row else 'one'}, got {B_scale.dtype} {list(B_scale.shape)}"
        )
    if bias is not None and list(bias.shape) != [columns]:
        raise ValueError(f"bias must be [{columns}], got {list(bias.shape)}")
    if result_scale is not None and result_scale.numel() != 1:
        raise ValueError(f"a result scale must be one value, got {list(result_scale.shape)}")


def _to_front(A: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the rows [rows, K] of A, with a dimension moved to the front."""
    return A.movedim(dim, 0).flatten(0, -2).contiguous()


def _gathered(pool: OpPool, rows: torch.Tensor, m: int) -> torch.Tensor:
    """Return all ranks' rows [m, K], gathered by the library."""
    options: dict[str, Any] = {"scaling": "tensor"} if rows.dtype == FP8 else {}
    shape = m, (pool.world,), rows.shape[1], rows.dtype
    op = pool.recent(AGGemm, *shape, transpose_weight=True, **options)
    full: torch.Tensor = op._unfused.gather_rows(rows, m)
    return full.clone() if pool.world == 1 else full  # an output must not alias the input


def _scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Return the library's product of A [rows, K] and B [K, N]."""
    if B_scale.numel() > 1:
        B_scale = B_scale.reshape(1, -1).contiguous()
    product: Callable[..., torch.Tensor] = torch._scaled_mm
    return product(A, B, A_scale, B_scale, bias, result_scale, out_dtype=dtype, use_fast_accum=fast)
