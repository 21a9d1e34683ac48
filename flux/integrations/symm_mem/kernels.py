"""Kernels of the ops without scales, and of ``torch.mm`` with an ``out_dtype``.

They have the names, arguments and results of PyTorch's definitions: a group is given by name, Bs
are [K, N_i], and any dimension can be gathered or scattered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux.ops import executor
from flux.ops.pool import OpPool, pool_of


def all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> Any:
    """Return ``(A, [A @ B for B in Bs])`` of a gathered A. See ``flux.ops``."""
    return torch.ops.flux.fused_all_gather_matmul(
        A, list(Bs), gather_dim, group_name, return_A=return_A
    )


def matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    """Return ``reduce_scatter(A @ B)``. See ``flux.ops``."""
    return torch.ops.flux.fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)


def matmul_reduce_scatter_float32(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    """Return ``reduce_scatter(A @ B)``, with partial results of half precision as float32."""
    if A.dtype == B.dtype and A.dtype in (torch.bfloat16, torch.float16):
        wide = matmul_reduce_scatter(A.float(), B.float(), reduce_op, scatter_dim, group_name)
        return wide.to(A.dtype)
    return matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)


# -- GPUs ------------------------------------------------------------------------------------------


def gpu_all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> Any:
    """Return what ``all_gather_matmul`` does, on GPUs.

    As PyTorch's, it compares nothing between ranks: the host waits for no peer. PyTorch's own
    implementation runs what flux has no op for: the same calls on all ranks.
    """
    pool = pool_of(group_name)
    dim = gather_dim % max(A.dim(), 1)
    if dim == A.dim() - 1 or not _has_op(pool, A, Bs):
        return _torch_own()._fused_all_gather_matmul(
            A, list(Bs), gather_dim, group_name, return_A=return_A
        )
    absent = [False] * len(Bs)
    outs = torch.ops.flux.graph_all_gather_matmul(
        A, list(Bs), [], absent, dim, group_name, return_A
    )
    return (outs.pop() if return_A else None), outs


def gpu_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    """Return what ``matmul_reduce_scatter`` does, on GPUs, as ``gpu_all_gather_matmul``."""
    pool = pool_of(group_name)
    if not _has_op(pool, A, [B]):
        return _torch_own()._fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    dim = scatter_dim % A.dim()
    size = B.shape[1] if dim == A.dim() - 1 else A.shape[dim]
    if size % pool.world or reduce_op not in ("sum", "avg"):
        raise ValueError(
            f"fused_matmul_reduce_scatter: dimension {dim} of A @ B must be divisible by the world "
            f"{pool.world}, got {size}, and reduce_op must be 'sum' or 'avg', got {reduce_op!r}"
        )
    return torch.ops.flux.graph_matmul_reduce_scatter(A, B, reduce_op, dim, group_name)


def _torch_own() -> Any:
    """Return the module with PyTorch's implementations, which the ops dispatch to no more."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def _has_op(pool: OpPool, A: torch.Tensor, Bs: Sequence[torch.Tensor]) -> bool:
    """Return whether flux has an op for these operands. Collective at the first call of a group."""
    shaped = A.dim() >= 2 and A.numel() > 0 and len(Bs) > 0
    shaped = shaped and all(B.dim() == 2 and B.shape[0] == A.shape[-1] for B in Bs)
    if not shaped or any(B.dtype != A.dtype or B.numel() == 0 for B in Bs) or pool.world == 1:
        return False
    if executor.reason_unsupported([A, *Bs]) is not None:
        return False
    if executor.group_unsupported(pool.exchange.group, A.device.type) is not None:
        return False
    return A.device.type != "cuda" or pool.reason_without_gpus is None


# -- torch.mm with an out_dtype --------------------------------------------------------------------


def mm_to(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b`` in ``out_dtype``: the operands' dtype, or float32 for half precision.

    Raises:
        RuntimeError: another dtype, as PyTorch does on GPUs.
    """
    if out_dtype == a.dtype:
        return torch.mm(a, b)
    if out_dtype != torch.float32 or a.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(
            "out_dtype must be the dtype of the operands, or float32 for bfloat16 and float16; got "
            f"{out_dtype} for {a.dtype}"
        )
    if a.dtype != b.dtype:
        raise RuntimeError(f"operands must be of one dtype, got {a.dtype} and {b.dtype}")
    return torch.mm(a.float(), b.float())  # exact products, summed in float32


def mm_to_out(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    """Write the result of ``mm_to`` to ``out``, of that dtype; return it.

    Raises:
        RuntimeError: ``out`` is of another dtype, or as ``mm_to`` raises it.
    """
    if out.dtype != out_dtype:
        raise RuntimeError(f"out must be {out_dtype}, got {out.dtype}")
    result = mm_to(a, b, out_dtype)
    return out.resize_(result.shape).copy_(result)


OUT_DTYPE: dict[str, Callable[..., torch.Tensor]] = {"mm.dtype": mm_to, "mm.dtype_out": mm_to_out}
"""Kernels by name of an op of aten."""
