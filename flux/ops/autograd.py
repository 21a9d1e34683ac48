"""Backward passes of ``torch.ops.flux``: the mirror image of the forward, fused in its turn.

    AGGemm    y_i = gather(x) W_i^T
              dx = reduce_scatter(sum_i dy_i W_i)    dW_i = dy_i^T gather(x)
    GemmRS    z = scatter(sum_r x W^T)
              dx = gather(dz) W                      dW = gather(dz)^T x
    GemmAR    z = sum_r x W^T
              dx = dz W                              dW = dz^T x

GemmAR's dz is taken to be equal on all ranks, as it is when every rank goes on with the same result
(the identity backward of Megatron's reduce_from_tensor_model_parallel_region).
A bias is added once per result row, so its gradient on a rank covers the rows that rank returned.

Whatever communicates is an op of its own with a fake kernel, so that a backward can be traced.
The layers have formulas of their own (flux/layers/autograd.py): they multiply while rows travel,
and deliver weight gradients into Megatron's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp, op_of
from flux.ops.gemm_rs import GemmRS
from flux.ops.library import define, differentiate, product_flops
from flux.ops.pool import pool_of
from flux.ops.transforms import call

Grad = torch.Tensor | None
O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741


def _mirror(
    op: TensorParallelOp, kind: type[O], m: int, n: int | tuple[int, ...], k: int, dz: torch.Tensor
) -> O:
    """Return an op for the backward of ``op`` with ``m`` rows, on weights [K, N]. Collective."""
    spec, group = op.spec, op._unfused.group
    if group is None:
        raise RuntimeError(f"{spec.label}: the backward needs a process group, not a virtual rank")
    pool = pool_of(group)
    what = f"the backward of {spec.label}(m {m}, n {spec.n}, k {spec.k}, {dz.dtype})"
    pool.agree(lambda: what, op.timeout_s)
    return pool.recent(kind, m, n, k, dz.dtype, timeout_s=op.timeout_s, transpose_weight=True)


def _as_nk(op: TensorParallelOp, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as [N, K], for both layouts."""
    return weight.t() if op.spec.transpose_weight else weight


def _weight_grad(op: TensorParallelOp, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Dy [M, N], x [M, K] -> gradient in the layout of the weight."""
    return x.t() @ dy if op.spec.transpose_weight else dy.t() @ x


# -- what communicates ---------------------------------------------------------------------------


def _scatter_grad(
    dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], d_gathered: Grad, handle: int
) -> torch.Tensor:
    """sum_i dy_i [M, N_i/W] @ W_i, plus d_gathered [M, K], summed over ranks -> [own rows, K]."""
    op = op_of(handle)
    kn = [_as_nk(op, w) for w in weights]
    dy = torch.cat(list(dys), dim=1) if len(dys) > 1 else dys[0]
    weight = torch.cat(kn) if len(kn) > 1 else kn[0]
    if d_gathered is not None:
        return op._unfused.scatter_rows(torch.addmm(d_gathered, dy, weight))
    m, n = dy.shape[0], sum(op.spec.n)
    return _mirror(op, GemmRS, m, op.spec.k, n, dy)(dy, weight)


def _scatter_grad_fake(
    dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], d_gathered: Grad, handle: int
) -> torch.Tensor:
    op = op_of(handle)
    return dys[0].new_empty(op.own_rows_symbolic(dys[0].shape[0]), op.spec.k)


def _scatter_grad_flops(dys: Any, weights: Any, *args: Any, out_shape: Any) -> int:
    return sum(product_flops(*dy, out_shape[1]) for dy in dys)


def _gather_grad(
    dz: torch.Tensor, weight: torch.Tensor, m: int, need_full: bool, handle: int
) -> list[torch.Tensor]:
    """gather(dz) [M, N] @ W -> [M, K/W], and the gathered dz if it is needed."""
    op = op_of(handle)
    gemm = _mirror(op, AGGemm, m, (op.spec.k,), op.spec.n[0], dz)
    result = gemm(dz, _as_nk(op, weight), m=m, return_gathered=need_full)
    return list(result) if need_full else [result]


def _gather_grad_fake(
    dz: torch.Tensor, weight: torch.Tensor, m: int, need_full: bool, handle: int
) -> list[torch.Tensor]:
    op = op_of(handle)
    dx = dz.new_empty(m, _as_nk(op, weight).shape[1])
    return [dx, dz.new_empty(m, dz.shape[1])] if need_full else [dx]


def _gather_grad_flops(dz: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*out_shape[0], dz[1])


def _gather_rows(x: torch.Tensor, m: int, handle: int) -> torch.Tensor:
    """Gather own rows of x into all M rows; padding at the end of x is ignored."""
    op = op_of(handle)
    full = op._unfused.gather_rows(x[: op.own_rows(m)], m)
    return full.clone() if op.world == 1 else full


def _gather_rows_fake(x: torch.Tensor, m: int, handle: int) -> torch.Tensor:
    return x.new_empty(m, x.shape[1])


define(
    "scatter_grad(Tensor[] dys, Tensor[] weights, Tensor? d_gathered, int handle) -> Tensor",
    _scatter_grad,
    _scatter_grad_fake,
    ordered=True,
    flops=_scatter_grad_flops,
)
define(
    "gather_grad(Tensor dz, Tensor weight, SymInt m, bool need_full, int handle) -> Tensor[]",
    _gather_grad,
    _gather_grad_fake,
    ordered=True,
    flops=_gather_grad_flops,
)
define(
    "gather_rows(Tensor x, SymInt m, int handle) -> Tensor",
    _gather_rows,
    _gather_rows_fake,
    ordered=True,
)


# -- formulas ------------------------------------------------------------------------------------


def _setup_ag_gemm(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    # No scales: what has some is not differentiated.
    x, weights, _, has_bias, _, return_gathered, handle, _ = inputs
    ctx.save_for_backward(x, *weights)
    ctx.has_bias = list(has_bias)
    ctx.m = output[0].shape[0]
    ctx.return_gathered = return_gathered
    ctx.handle = handle


def _backward_ag_gemm(ctx: Any, grads: Sequence[Grad]) -> tuple[Any, ...]:
    op = op_of(ctx.handle)
    x, *weights = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    dys = []
    for grad, weight in zip(grads, weights, strict=False):
        columns = _as_nk(op, weight).shape[0]
        dys.append(x.new_zeros(ctx.m, columns) if grad is None else grad)
    dx: Grad = None
    if need_x:
        d_gathered = grads[-1] if ctx.return_gathered else None
        dx = call("scatter_grad", dys, weights, d_gathered, ctx.handle)
        padding = x.shape[0] - dx.shape[0]
        if padding > 0:
            dx = torch.cat([dx, dx.new_zeros(padding, dx.shape[1])])
    dws: list[Grad] = [None] * len(weights)
    if any(need_w):
        full = call("gather_rows", x, ctx.m, ctx.handle)
        dws = [_weight_grad(op, dy, full) if n else None for dy, n in zip(dys, need_w, strict=True)]
    biased = [dy for dy, present in zip(dys, ctx.has_bias, strict=True) if present]
    dbs = [dy.sum(0) if n else None for dy, n in zip(biased, need_b, strict=True)]
    return dx, dws, dbs, None, None, None, None, []


def _setup_gemm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, handle, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.handle = handle


def _backward_gemm_rs(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
    op = op_of(ctx.handle)
    x, weight = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    m = x.shape[0]
    dbs = [dz.sum(0) if n else None for n in need_b]
    if op.spec.reduce == "avg":
        dz = dz / op.world
    dx: Grad = None
    full: Grad = None
    if need_x:
        dx, *rest = call("gather_grad", dz, weight, m, need_w, ctx.handle)
        full = rest[0] if need_w else None
    elif need_w:
        full = call("gather_rows", dz, m, ctx.handle)
    return dx, (None if full is None else _weight_grad(op, full, x)), dbs, None, []


def _backward_gemm_ar(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
    op = op_of(ctx.handle)
    x, weight = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    dbs = [dz.sum(0) if n else None for n in need_b]
    if op.spec.reduce == "avg":
        dz = dz / op.world
    dx = dz @ _as_nk(op, weight) if need_x else None
    return dx, (_weight_grad(op, dz, x) if need_w else None), dbs, None, []


differentiate("ag_gemm", _setup_ag_gemm, _backward_ag_gemm)
differentiate("gemm_rs", _setup_gemm, _backward_gemm_rs)
differentiate("gemm_ar", _setup_gemm, _backward_gemm_ar)
