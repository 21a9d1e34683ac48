"""Forward and backward of tensor-parallel linear layers, with hidden communication in both.

W ranks; x [rows, K], weight [N, K] of this rank; SP: sequence parallelism, shards of rows outside.

    column, SP     y  = gather(x) @ w.T          AGGemm; of x, only the shard is saved
                   dx = scatter(dy @ w)          GemmRS, beside a gather of x that began before it
                   dw = dy.T @ gather(x)         while the last rows of dx are sent
    column         y  = x @ w.T                  no communication
                   dx = all_reduce(dy @ w)       GemmAR
                   dw = dy.T @ x                 while the last rows of dx are sent
    row, SP        z  = scatter(x @ w.T)         GemmRS
                   dx = gather(dz) @ w           AGGemm, whose gathered dz is kept
                   dw = gather(dz).T @ x         while the column layer's x is gathered
                                                 (flux/ops/early_gather.py)
    row            z  = all_reduce(x @ w.T)      GemmAR
                   dx = dz @ w,  dw = dz.T @ x   no communication: dz is the same on all ranks

    backward of a column layer, SP, on one rank:
        GEMM   [ dy @ w: others' rows | own rows ][ dy.T @ x ] sum of dx
        wires  [ x arrives, if it has not | dx is sent as it is ready ]

Under autocast operands are cast as torch.nn.functional.linear's would be (flux/layers/autocast.py).
Shapes are those of torch.nn.Linear, too: x may have one dimension (without SP), and no rows at all.
The backward of a backward would have to communicate once more; it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch.nn.functional import linear

from flux import _C
from flux.core.backend import nothing
from flux.core.tensors import check_memory
from flux.layers.autocast import autocast_off, cast_once, compute_dtype
from flux.layers.wgrad import Grad, WeightGrad
from flux.ops import AGGemm, GemmAR, GemmRS
from flux.ops.base import TensorParallelOp
from flux.ops.early_gather import EarlyGather
from flux.ops.pool import OpPool, User, meet
from flux.ops.transforms import RefuseTwice, check_no_forward_mode

O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741  as in flux/ops/pool.py


@dataclass(frozen=True)
class LinearConfig:
    """How a layer communicates: all settings except the tensors of a call.

    Attributes:
        pool: of the layer's ops.
        user: the layer, as the pool knows it.
        sequence_parallel: whether activations outside of the layer are shards of rows.
        reduce_dx: sum the gradient of a column layer's input over the ranks (without SP).
        fuse_ag: fuse gathers; else use the library's collective.
        fuse_rs: fuse reductions; else use the library's collective.
        features: of the whole layer, in the dimension of the weight that ranks split, as
            torch.chunk splits it; None: the rank's own times W.
        wgrad: handling of the weight gradient.
    """

    pool: OpPool
    user: User
    sequence_parallel: bool
    reduce_dx: bool = True
    fuse_ag: bool = True
    fuse_rs: bool = True
    features: int | None = None
    wgrad: WeightGrad = field(default_factory=WeightGrad)

    def whole(self, own: int) -> int:
        """Return the features of the whole layer, of which this rank has ``own``."""
        return own * self.pool.world if self.features is None else self.features

    def op(self, kind: type[O], m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> O:
        """Return an op for ``m`` rows, one at least. Collective if it has to be built."""
        fused = self.fuse_ag if kind is AGGemm else self.fuse_rs
        return self.pool.op(kind, self.user, max(m, 1), n, k, dtype, fused=fused, **options)


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: LinearConfig
) -> torch.Tensor:
    """Apply a column-parallel layer: x [s(/W), ..., K] -> [s, ..., N/W]. Collective.

    Args:
        x: own rows (SP), or all rows, the same on every rank.
        weight: [N/W, K].
        bias: [N/W] or None.
        how: the group, and what is fused.

    Raises:
        ValueError: illegal input, on all ranks alike.
        TypeError: illegal input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.
    """
    check_no_forward_mode("a layer of flux")
    if not how.sequence_parallel or _casts(x, weight):  # else the op checks, on all ranks alike
        check_memory("column layer", x=x, weight=weight, bias=bias)
    early, operand = _early_gather(how, weight), _cast_of(weight, x)
    y: torch.Tensor = cast(Any, _Column).apply(x, weight, bias, how, operand, early)
    return y


def row_linear(x: torch.Tensor, weight: torch.Tensor, how: LinearConfig) -> torch.Tensor:
    """Apply a row-parallel layer without its bias: x [s, ..., K/W] -> [s(/W), ..., N]. Collective.

    Args:
        x: this rank's columns of all rows; with SP, W divides s.
        weight: [N, K/W].
        how: the group, and what is fused.

    Raises:
        ValueError: as ``column_linear``.
        TypeError: as ``column_linear``.
        PeerTimeoutError: as ``column_linear``.
    """
    check_no_forward_mode("a layer of flux")
    if _casts(x, weight):  # else the op checks, on all ranks alike
        check_memory("row layer", x=x, weight=weight)
    before, how.pool.early_gather = how.pool.early_gather, None
    z: torch.Tensor = cast(Any, _Row).apply(x, weight, how, _cast_of(weight, x), before)
    return z


def _cast_of(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in the dtype of the product, without history; None if it has that dtype."""
    dtype = compute_dtype(x)
    return None if weight.dtype == dtype else cast_once(weight, dtype).detach()


def _early_gather(how: LinearConfig, weight: torch.Tensor) -> EarlyGather | None:
    """Return an early gather for a column layer whose backward gathers its input, else None.

    The next row layer's backward begins that gather.
    """
    gathers = how.sequence_parallel and how.pool.world > 1 and how.wgrad.deferred is None
    if not (gathers and weight.requires_grad and torch.is_grad_enabled()):
        return None
    gather = how.pool.early_gather = EarlyGather(partial(begin_gather, how))
    return gather


# -- common part -----------------------------------------------------------------------------------


def once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wrap a backward so that differentiating its results raises.

    Without this, autograd would treat the results as constants.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        tensors = [r.detach().requires_grad_() for r in results if isinstance(r, torch.Tensor)]
        count = len(tensors)
        refusing = iter(cast(Any, RefuseTwice).apply(count, *tensors, *grads) if count else ())
        return tuple(next(refusing) if isinstance(r, torch.Tensor) else r for r in results)

    return run


def fresh(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a newly computed result in another shape, not as a view.

    A Function's result may be changed in place (Megatron's cross entropy does so with logits),
    unless it is a view made inside the Function.
    """
    out: torch.Tensor = torch.ops.aten._unsafe_view(result, shape)
    return out


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as [M, K], and [K] as one row."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1: M is unknown where K is 0


def _casts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether an operand is cast before it is multiplied."""
    return not x.dtype == weight.dtype == compute_dtype(x)


def check_sharded(x: torch.Tensor, parts: int = 1) -> None:
    """Raise ValueError for an x [s, ..., K] of which ranks cannot have shards of rows.

    ``parts``: ranks that s is to be scattered over.
    """
    if x.dim() < 2:
        raise ValueError(
            f"with sequence parallelism ranks have shards of the first dimension, and x must have "
            f"another for its features, got {list(x.shape)}"
        )
    if x.shape[0] % parts:
        raise ValueError(
            f"the first dimension must be divisible by the {parts} ranks that it is scattered "
            f"over, got {list(x.shape)}"
        )


def _refuse_unsharded(op: TensorParallelOp, x: torch.Tensor, parts: int = 1) -> None:
    """Apply ``check_sharded``; the peers hear of a refusal."""
    try:
        check_sharded(x, parts)
    except ValueError as error:
        op._turn_away(error)


def _no_rows(op: TensorParallelOp, x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the result of an op without rows, [0, columns]. Collective: ranks compare M."""
    meet(op, 0)
    return x.new_empty(0, columns)


def _open(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, operand: torch.Tensor, how: LinearConfig
) -> None:
    """Save what every backward needs; ``operand`` is the weight in the dtype of the product.

    Only the weight gradient needs x. Without SP, and in a row layer, the saved x has all rows, else
    this rank's shard.
    """
    kept = x if ctx.needs_input_grad[1] else None
    ctx.save_for_backward(kept, operand)
    # Also keep the parameter itself. Hooks on saved tensors, such as those of activation
    # checkpointing, may return another tensor without Megatron's attributes.
    ctx.parameter = weight
    ctx.main_grad = getattr(weight, "main_grad", None) if how.wgrad.accumulate else None
    ctx.how = how
    ctx.shape, ctx.dtype = x.shape, x.dtype


# -- column ----------------------------------------------------------------------------------------


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: LinearConfig,
        operand: torch.Tensor | None,
        early: EarlyGather | None,
    ) -> torch.Tensor:
        dtype = compute_dtype(x)
        ctx.input_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        x, operand = x.to(dtype), weight if operand is None else operand
        _open(ctx, x, weight, operand, how)
        ctx.early = early
        if early is not None:
            early.saved_by(ctx)
        with autocast_off(x):
            own_bias = bias if bias is not None and bias.dtype == dtype else None
            y = column_product(x, operand, own_bias, how)
            # A bias of another dtype determines the dtype of the sum, as in Megatron.
            return y if bias is None or own_bias is not None else y + bias

    @staticmethod
    @once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        how: LinearConfig = ctx.how
        early: EarlyGather | None = ctx.early
        x, weight, wait = (*ctx.saved_tensors, None) if early is None else early.take(ctx)
        if wait is None:
            check_memory("backward of a column layer", x=x)
        check_memory("backward of a column layer", weight=weight)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        deferred = need_w and how.wgrad.defer(dy)
        dtype = ctx.dtype
        rows = as_rows(dy).to(dtype)
        deliver = partial(how.wgrad.deliver, ctx.parameter, ctx.main_grad) if need_w else None
        if wait is None and need_w and not deferred:
            wait = begin_gather(how, x, weight)
        dx, dw = column_grads(rows, wait, weight, how, need_x, deliver)
        if dx is not None:
            dx = dx.view(ctx.shape).to(ctx.input_dtype)
        db = as_rows(dy).sum(0).to(ctx.bias_dtype) if need_b else None
        return dx, dw, db, None, None, None


def column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: LinearConfig
) -> torch.Tensor:
    """Return the forward result of a column layer, on operands of one dtype."""
    world, rows = how.pool.world, as_rows(x)
    if not how.sequence_parallel:
        return fresh(linear(rows, weight, bias), *x.shape[:-1], weight.shape[0])
    m, columns = rows.shape[0] * world, weight.shape[0]
    op = how.op(AGGemm, m, how.whole(columns), weight.shape[1], x.dtype)
    _refuse_unsharded(op, x)
    y = op(rows, weight, bias) if m else _no_rows(op, rows, columns)
    return fresh(y, x.shape[0] * world, *x.shape[1:-1], columns)


def column_grads(
    dy: torch.Tensor,
    wait_for_x: Callable[[], torch.Tensor] | None,
    weight: torch.Tensor,
    how: LinearConfig,
    need_x: bool,
    deliver: Callable[[torch.Tensor, Grad], Grad] | None,
) -> tuple[Grad, Grad]:
    """Return the gradients of a column layer's input, [rows, K], and of its weight.

    Args:
        dy: [M, N/W], in the dtype of the weight.
        wait_for_x: returns all rows of forward's input, [M, K]; None if the weight gradient is
            deferred or not needed.
        weight: of the layer.
        how: the group, and what is fused.
        need_x: whether the input needs a gradient.
        deliver: makes the weight gradient of dy and all rows of x, [M, K] (None: it is deferred);
            None if the weight needs no gradient.
    """
    dw: list[Grad] = [None]

    def weight_grad() -> None:
        if deliver is not None:
            dw[0] = deliver(dy, None if wait_for_x is None else wait_for_x())

    dx: Grad = None
    if need_x:
        dx = _column_dx(how, dy, weight, weight_grad)
    else:
        weight_grad()
    return dx, dw[0]


def begin_gather(
    how: LinearConfig, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Begin to gather all rows of a column layer's input; return a function that waits for them."""
    rows, world = as_rows(x), how.pool.world
    m = rows.shape[0] * world
    if m == 0 or not how.sequence_parallel:
        return lambda: rows
    op = how.op(AGGemm, m, how.whole(weight.shape[0]), weight.shape[1], x.dtype)
    return op.start_gather(rows, m)


def _column_dx(
    how: LinearConfig, dy: torch.Tensor, weight: torch.Tensor, meanwhile: Callable[[], None]
) -> torch.Tensor:
    """Return dy [M, N/W] @ weight [N/W, K], reduced.

    ``meanwhile`` runs while the last rows are sent.
    """
    pool = how.pool
    if pool.world == 1 or not (how.sequence_parallel or how.reduce_dx):
        dx = dy @ weight
        meanwhile()
        return dx
    kind = GemmRS if how.sequence_parallel else GemmAR
    m, n, k = dy.shape[0], weight.shape[1], how.whole(weight.shape[0])
    op = how.op(kind, m, n, k, dy.dtype, transpose_weight=True)
    if m:
        return op.overlapped(dy, weight, meanwhile)
    dx = _no_rows(op, dy, n)
    meanwhile()
    return dx


# -- row -------------------------------------------------------------------------------------------


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        how: LinearConfig,
        operand: torch.Tensor | None,
        before: EarlyGather | None,
    ) -> torch.Tensor:
        ctx.input_dtype, ctx.before = x.dtype, before
        x, operand = x.to(compute_dtype(x)), weight if operand is None else operand
        _open(ctx, x, weight, operand, how)
        with autocast_off(x):
            return row_product(x, operand, how)

    @staticmethod
    @once
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
        how: LinearConfig = ctx.how
        x, weight = ctx.saved_tensors
        check_memory("backward of a row layer", x=x, weight=weight)
        need_x, need_w = ctx.needs_input_grad[:2]
        rows = as_rows(dz).to(ctx.dtype)
        x = as_rows(x) if need_w else None
        deliver = partial(how.wgrad.deliver, ctx.parameter, ctx.main_grad)
        before: EarlyGather | None = ctx.before
        idle = nothing if before is None else before.begin
        dx, dw = row_grads(rows, x, weight, how, need_x, deliver, idle)
        dx = None if dx is None else dx.view(ctx.shape).to(ctx.input_dtype)
        dw = None if dw is None else dw.to(ctx.parameter.dtype)
        return dx, dw, None, None, None


def row_product(x: torch.Tensor, weight: torch.Tensor, how: LinearConfig) -> torch.Tensor:
    """Return the forward result of a row layer, on operands of one dtype."""
    pool, rows = how.pool, as_rows(x)
    kind = GemmRS if how.sequence_parallel else GemmAR
    m, n, k = rows.shape[0], weight.shape[0], how.whole(weight.shape[1])
    op, lead = how.op(kind, m, n, k, x.dtype), tuple(x.shape[:-1])
    if how.sequence_parallel:
        _refuse_unsharded(op, x, pool.world)
        lead = (x.shape[0] // pool.world, *x.shape[1:-1])
    return fresh(op(rows, weight) if m else _no_rows(op, rows, n), *lead, n)


def row_grads(
    dz: torch.Tensor,
    x: Grad,
    weight: torch.Tensor,
    how: LinearConfig,
    need_x: bool,
    deliver: Callable[[torch.Tensor, torch.Tensor], Grad],
    idle: Callable[[], None] = nothing,
) -> tuple[Grad, Grad]:
    """Return the gradients of a row layer's input, [M, K/W], and of its weight.

    Args:
        dz: own rows (SP) or all, in the dtype of the weight.
        x: all rows of forward's input; None if the weight needs no gradient.
        weight: of the layer.
        how: the group, and what is fused.
        need_x: whether the input needs a gradient.
        deliver: makes the weight gradient of all rows of dz [M, N] and x.
        idle: called when the last rows have arrived, before they are multiplied.
    """
    if not how.sequence_parallel or dz.shape[0] == 0:
        dx = dz @ weight if need_x else None
        idle()
        return dx, None if x is None else deliver(dz, x)
    m, n, k = dz.shape[0] * how.pool.world, how.whole(weight.shape[1]), weight.shape[0]
    op = how.op(AGGemm, m, n, k, dz.dtype, transpose_weight=True)
    if x is None:
        dx = op(dz, weight) if need_x else None
        idle()
        return dx, None
    own = _OwnRows(op, dz, x) if op.waits_for_hosts and how.wgrad.in_parts(dz.dtype) else None
    meanwhile = nothing if own is None else own.multiply
    if need_x:
        dx, full = op.overlapped(dz, weight, meanwhile, idle)
    else:
        wait = op.start_gather(dz, m)
        meanwhile()
        dx, full = None, wait()
        idle()
    return dx, deliver(full, x) if own is None else own.complete(full)


class _OwnRows:
    """A weight gradient; the part of the own rows is computed while the others are in flight.

    This is done whether or not they have arrived, so that sums have the same order in every run.
    """

    def __init__(self, op: AGGemm, dz: torch.Tensor, x: torch.Tensor) -> None:
        self._dz, self._x = dz, x
        begin = _C.core.row_begin(x.shape[0], op.world, op.rank)
        self._end = begin + dz.shape[0]
        self._begin = begin
        self._dw: Grad = None

    def multiply(self) -> None:
        """Multiply the own rows."""
        self._dw = self._dz.t() @ self._x[self._begin : self._end]

    def complete(self, full: torch.Tensor) -> torch.Tensor:
        """Add the others' rows, of the gathered rows [M, N]; return the gradient."""
        assert self._dw is not None
        for rows in (slice(self._begin), slice(self._end, None)):
            # By out=, which counters of operations know.
            torch.addmm(self._dw, full[rows].t(), self._x[rows], out=self._dw)
        return self._dw
