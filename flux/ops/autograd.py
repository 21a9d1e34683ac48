"""Backward passes of ``torch.ops.flux``: the mirror image of the forward, fused in its turn.

flux/ops/gradients.py has the formulas. GemmAR's dz is taken to be equal on all ranks, as it is when
every rank goes on with the same result (the identity backward of Megatron's
reduce_from_tensor_model_parallel_region). A bias is added once per result row, so its gradient on a
rank covers the rows that rank returned.

What communicates is an op of its own with a fake kernel, so that a backward can be traced:
``ag_gemm_grads`` and ``gemm_rs_grads`` return the gradients that are needed of x and the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch

from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp, op_of
from flux.ops.gemm_rs import GemmRS
from flux.ops.gradients import Grad, column_grads, row_grads, weight_grad
from flux.ops.library import own_rows, product_flops
from flux.ops.pool import pool_of
from flux.ops.transforms import FORMULAS, Formula, call, define

O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741


class Mirrors:
    """The ops of the backward of ``op`` with ``m`` rows. Construction is collective.

    Attributes:
        needs: which gradients any of the ranks needs, of those that this rank ``needs``.
    """

    reduces_dx = GemmRS
    gathers_dz = True
    splits_wgrad = False

    def __init__(
        self, op: TensorParallelOp, m: int, dtype: torch.dtype, needs: Sequence[bool] = ()
    ) -> None:
        spec, group = op.spec, op._unfused.group
        if group is None:
            raise RuntimeError(
                f"{spec.label}: the backward needs a process group, not a virtual rank"
            )
        self._op, self._pool = op, pool_of(group)
        what = f"the backward of {spec.label}(m {m}, n {spec.n}, k {spec.k}, {dtype})"
        self.needs = list(needs)
        try:
            self._pool.agree(lambda: f"{what}, gradients {self.needs}", op.timeout_s)
        except ValueError:  # on all ranks
            self._pool.agree(lambda: what, op.timeout_s)
            of_ranks = self._pool.exchange.all_gather(self.needs)
            self.needs = [any(of) for of in zip(*of_ranks, strict=True)]

    def whole(self, own: int) -> int:
        """Return the size of the split dimension, over all ranks."""
        spec = self._op.spec
        return sum(spec.n) if self._op.kind.gathers else spec.k

    def op(self, kind: type[O], m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> O:
        """Return an op for ``m`` rows."""
        columns = (n,) if kind.kind.gathers else n
        timeout_s = self._op.timeout_s
        return self._pool.recent(kind, m, columns, k, dtype, timeout_s=timeout_s, **options)


def _as_nk(op: TensorParallelOp, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as [N, K], for both layouts."""
    return weight.t() if op.spec.transpose_weight else weight


# -- what communicates ---------------------------------------------------------------------------


def _ag_gemm_grads(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    d_gathered: Grad,
    need_x: bool,
    need_w: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return dx [own rows, K] if needed, then the gradients of the weights that need one.

    ``dys``: [M, N_i/W]; ``d_gathered``: of the gathered x, [M, K].
    """
    op, m = cast(AGGemm, op_of(handle)), dys[0].shape[0]
    mirrors = Mirrors(op, m, x.dtype)
    wait = op.start_gather(x[: op.own_rows(m)], m) if any(need_w) else None

    def multiply() -> list[torch.Tensor]:
        if wait is None:
            return []
        full, transposed = wait(), op.spec.transpose_weight
        needed = [dy for dy, need in zip(dys, need_w, strict=True) if need]
        return [weight_grad(dy, full, transposed) for dy in needed]

    kn = [_as_nk(op, w) for w in weights]
    dy = torch.cat(list(dys), dim=1) if len(dys) > 1 else dys[0]
    weight = torch.cat(kn) if len(kn) > 1 else kn[0]
    fused = need_x and d_gathered is None
    dx, dws = column_grads(mirrors, dy, weight, fused, multiply)
    if need_x and d_gathered is not None:
        dx = op._unfused.scatter_rows(torch.addmm(d_gathered, dy, weight))
    return dws if dx is None else [dx, *dws]


def _ag_gemm_grads_fake(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    d_gathered: Grad,
    need_x: bool,
    need_w: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    rows = own_rows(op_of(handle), dys[0].shape[0])
    dx = [x.new_empty(rows, x.shape[1])] if need_x else []
    return dx + [w.new_empty(w.shape) for w, need in zip(weights, need_w, strict=True) if need]


def _ag_gemm_grads_flops(
    dys: Any,
    x: Any,
    weights: Any,
    d_gathered: Any,
    need_x: bool,
    need_w: Any,
    *args: Any,
    out_shape: Any,
) -> int:
    each = zip(dys, need_w, strict=True)
    return sum((need_x + need) * product_flops(*dy, x[1]) for dy, need in each)


def _gemm_rs_grads(
    dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, handle: int
) -> list[torch.Tensor]:
    """Return dx [M, K/W] and the gradient of the weight, those that are needed."""
    op, m = op_of(handle), x.shape[0]

    deliver = partial(weight_grad, transposed=op.spec.transpose_weight)
    mirrors, rows = Mirrors(op, m, dz.dtype), x if need_w else None
    grads = row_grads(mirrors, dz, _as_nk(op, weight), m, need_x, rows, deliver)
    return [grad for grad in grads if grad is not None]


def grads_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, *rest: Any
) -> list[torch.Tensor]:
    """Return what an op for the gradients of x and a weight returns: those that are needed."""
    needed = (x, need_x), (weight, need_w)
    return [tensor.new_empty(tensor.shape) for tensor, need in needed if need]


def row_grads_flops(
    dz: Any, x: Any, weight: Any, need_x: bool, need_w: bool, *rest: Any, out_shape: Any
) -> int:
    """Return the operations of both products, on all rows of x."""
    return (need_x + need_w) * product_flops(*x, dz[-1])


def _gather_rows(x: torch.Tensor, m: int, handle: int) -> torch.Tensor:
    """Gather own rows of x into all M rows."""
    op = op_of(handle)
    full = op._unfused.gather_rows(x, m)
    return full.clone() if op.world == 1 else full


def _gather_rows_fake(x: torch.Tensor, m: int, handle: int) -> torch.Tensor:
    return x.new_empty(m, x.shape[1])


define(
    "ag_gemm_grads(Tensor[] dys, Tensor x, Tensor[] weights, Tensor? d_gathered, bool need_x, "
    "bool[] need_w, int handle) -> Tensor[]",
    _ag_gemm_grads,
    _ag_gemm_grads_fake,
    ordered=True,
    flops=_ag_gemm_grads_flops,
)
define(
    "gemm_rs_grads(Tensor dz, Tensor x, Tensor weight, bool need_x, bool need_w, int handle) "
    "-> Tensor[]",
    _gemm_rs_grads,
    grads_fake,
    ordered=True,
    flops=row_grads_flops,
)
define(
    "gather_rows(Tensor x, SymInt m, int handle) -> Tensor",
    _gather_rows,
    _gather_rows_fake,
    ordered=True,
)


# -- formulas ------------------------------------------------------------------------------------


def _setup_ag_gemm(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    # No scales: ops with scales are not differentiated.
    x, weights, _, has_bias, _, return_gathered, handle, _ = inputs
    ctx.save_for_backward(x, *weights)
    ctx.has_bias = list(has_bias)
    ctx.m = output[0].shape[0]
    ctx.return_gathered = return_gathered
    ctx.op, ctx.handle = op_of(handle), handle  # its graph keeps it


def _backward_ag_gemm(
    ctx: Any, saved: Sequence[torch.Tensor], needed: Sequence[Any], grads: Sequence[Grad]
) -> tuple[Any, ...]:
    op = op_of(ctx.handle)
    x, *weights = saved
    need_x, need_w, need_b = needed[:3]
    dys = []
    for grad, weight in zip(grads, weights, strict=False):
        columns = _as_nk(op, weight).shape[0]
        dys.append(x.new_zeros(ctx.m, columns) if grad is None else grad)
    dx: Grad = None
    dws: list[Grad] = [None] * len(weights)
    if need_x or any(need_w):
        d_gathered = grads[-1] if ctx.return_gathered else None
        needs = bool(need_x), [bool(need) for need in need_w]
        delivered = iter(call("ag_gemm_grads", dys, x, weights, d_gathered, *needs, ctx.handle))
        dx = next(delivered) if need_x else None
        dws = [next(delivered) if need else None for need in need_w]
    padding = 0 if dx is None else x.shape[0] - dx.shape[0]
    if dx is not None and padding > 0:
        dx = torch.cat([dx, dx.new_zeros(padding, dx.shape[1])])
    biased = [dy for dy, present in zip(dys, ctx.has_bias, strict=True) if present]
    dbs = [dy.sum(0) if n else None for dy, n in zip(biased, need_b, strict=True)]
    return dx, dws, dbs, None, None, None, None, []


def _setup_gemm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, handle, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.op, ctx.handle = op_of(handle), handle


def _backward_gemm(
    ctx: Any, saved: Sequence[torch.Tensor], needed: Sequence[Any], dz: torch.Tensor
) -> tuple[Any, ...]:
    op = op_of(ctx.handle)
    x, weight = saved
    need_x, need_w, need_b = bool(needed[0]), bool(needed[1]), needed[2]
    dbs = [dz.sum(0) if n else None for n in need_b]
    if op.spec.reduce == "avg":
        dz = dz / op.world
    dx: Grad = None
    dw: Grad = None
    if not op.kind.scatters:  # no communication: a compiler sees both products
        dx = dz @ _as_nk(op, weight) if need_x else None
        dw = weight_grad(dz, x, op.spec.transpose_weight) if need_w else None
    elif need_x or need_w:
        grads = call("gemm_rs_grads", dz, x, weight, need_x, need_w, ctx.handle)
        dx, dw = (grads[0] if need_x else None), (grads[-1] if need_w else None)
    return dx, dw, dbs, None, []


FORMULAS["ag_gemm"] = Formula(_setup_ag_gemm, _backward_ag_gemm)
FORMULAS["gemm_rs"] = FORMULAS["gemm_ar"] = Formula(_setup_gemm, _backward_gemm)
