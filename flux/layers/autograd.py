"""Forward and backward of tensor-parallel linear layers, with hidden communication in both.

flux/ops/gradients.py has the formulas, with a picture. Under autocast operands are cast as
torch.nn.functional.linear's would be (flux/ops/autocast.py). Shapes are those of
torch.nn.Linear, too: x may have one dimension (without SP), and no rows at all. The backward of a
backward would have to communicate once more; it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.nn.functional import linear

from flux.core.backend import nothing
from flux.core.tensors import check_memory
from flux.ops import AGGemm, GemmAR, GemmRS, torch_internals
from flux.ops.autocast import autocast_off, cast_once, compute_dtype
from flux.ops.base import TensorParallelOp
from flux.ops.gradients import (
    Grad,
    WeightGrad,
    as_rows,
    column_grads,
    fresh,
    no_rows,
    row_grads,
)
from flux.ops.pool import Alone, EarlyGather, OpPool, User, pool_of
from flux.ops.transforms import RefuseTwice, call

O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741  as in flux/ops/pool.py

GRAPH_SETTINGS = 6
"""The first fields of LinearConfig, which ops of graphs take as arguments."""


class LinearConfig(NamedTuple):
    """How a layer communicates, where its ops come from, and what becomes of its weight gradient.

    A graph holds ``in_graph()``: tensors, numbers and names, but no user and no buffers.

    Attributes:
        group_name: of the ranks that the layer is split over; None: this rank is alone.
        sequence_parallel: whether activations outside of the layer are shards of rows.
        reduce_dx: sum the gradient of a column layer's input over the ranks (without SP).
        fuse_ag: fuse gathers; else use the library's collective.
        fuse_rs: fuse reductions; else use the library's collective.
        features: of the whole layer, in the dimension of the weight that ranks split, as
            torch.chunk splits it; None: the rank's own times W.
        user: the layer, as the pool of ops knows it; None: all compiled graphs together.
        wgrad: handling of the weight gradient.
    """

    group_name: str | None
    sequence_parallel: bool
    reduce_dx: bool = True
    fuse_ag: bool = True
    fuse_rs: bool = True
    features: int | None = None
    user: User | None = None
    wgrad: WeightGrad = WeightGrad()

    def in_graph(self) -> tuple[Any, ...]:
        """Return the settings that ops of graphs take as arguments: those before ``user``."""
        return self[:GRAPH_SETTINGS]


class LayerOps:
    """The ops of a layer with a configuration, as flux/ops/gradients.py takes them.

    The pool is looked up once, for a forward and its backward.
    """

    __slots__ = ("config", "pool", "world")

    def __init__(self, config: LinearConfig) -> None:
        name = config.group_name
        self.config = config
        self.pool = cast(OpPool, Alone()) if name is None else pool_of(name)
        self.world = self.pool.world

    @property
    def reduces_dx(self) -> type[GemmRS] | None:
        """The op that sums a column layer's dx."""
        if self.config.sequence_parallel:
            return GemmRS if self.world > 1 else None
        return GemmAR if self.world > 1 and self.config.reduce_dx else None

    @property
    def gathers_dz(self) -> bool:
        """Whether a row layer's dz is a shard of rows."""
        return self.config.sequence_parallel

    @property
    def splits_wgrad(self) -> bool:
        """Whether a weight gradient may be a sum of products: main_grad takes a single one."""
        return not self.config.wgrad.accumulate

    def whole(self, own: int) -> int:
        """Return the features of the whole layer, of which this rank has ``own``."""
        features = self.config.features
        return own * self.world if features is None else features

    def op(
        self,
        kind: type[O],
        m: int,
        n: int | tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> O:
        """Return an op for ``m`` rows, one at least. Collective if it has to be built."""
        pool, config = self.pool, self.config
        fused = config.fuse_ag if kind is AGGemm else config.fuse_rs
        user = pool.graphs if config.user is None else config.user
        return pool.op(kind, user, max(m, 1), n, k, dtype, fused=fused, **options)


# -- layers ----------------------------------------------------------------------------------------


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: LinearConfig
) -> torch.Tensor:
    """Apply a column-parallel layer: x [s(/W), ..., K] -> [s, ..., N/W]. Collective.

    In graphs it is an op, unless its weight gradient has side effects.

    Args:
        x: own rows (SP), or all rows, the same on every rank.
        weight: [N/W, K].
        bias: [N/W] or None.
        config: the group, and what is fused.

    Raises:
        ValueError: illegal input, on all ranks alike.
        TypeError: illegal input, on all ranks alike.
        PeerTimeoutError: a peer died or stalled.
    """
    dtype = compute_dtype(x)
    if not config.wgrad.has_side_effects and torch_internals.is_traced(x, weight, bias):
        own_bias = bias if bias is not None and bias.dtype == dtype else None
        operands, settings = (x.to(dtype), weight.to(dtype), own_bias), config.in_graph()
        y: torch.Tensor = call("column_linear", *operands, *settings)
        return y if bias is None or own_bias is not None else y + bias
    torch_internals.check_no_forward_mode("a layer of flux")
    ops = LayerOps(config)
    # Where the op gets the operands as they are, it checks them, on all ranks alike.
    if not config.sequence_parallel or not x.dtype == weight.dtype == dtype:
        check_memory("column layer", x=x, weight=weight, bias=bias)
    # The next row layer's backward begins the gather of what this layer's backward gathers.
    early = config.sequence_parallel and ops.world > 1 and config.wgrad.deferred is None
    early = early and weight.requires_grad and torch.is_grad_enabled()
    # The weight in the dtype of the product, without history; None: it has that dtype.
    operand = None if weight.dtype == dtype else cast_once(weight, dtype).detach()
    y = cast(Any, _Column).apply(x, weight, bias, ops, operand, early)
    return y


def row_linear(x: torch.Tensor, weight: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    """Apply a row-parallel layer without its bias: x [s, ..., K/W] -> [s(/W), ..., N]. Collective.

    Args:
        x: this rank's columns of all rows; with SP, W divides s.
        weight: [N, K/W].
        config: the group, and what is fused.

    Raises:
        ValueError: as ``column_linear``.
        TypeError: as ``column_linear``.
        PeerTimeoutError: as ``column_linear``.
    """
    dtype = compute_dtype(x)
    if not config.wgrad.has_side_effects and torch_internals.is_traced(x, weight):
        z: torch.Tensor = call("row_linear", x.to(dtype), weight.to(dtype), *config.in_graph())
        return z
    torch_internals.check_no_forward_mode("a layer of flux")
    ops = LayerOps(config)
    if not x.dtype == weight.dtype == dtype:  # else the op checks, on all ranks alike
        check_memory("row layer", x=x, weight=weight)
    before, ops.pool.early_gather = ops.pool.early_gather, None
    operand = None if weight.dtype == dtype else cast_once(weight, dtype).detach()
    z = cast(Any, _Row).apply(x, weight, ops, operand, before)
    return z


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


def unsharded(x: torch.Tensor, parts: int = 1) -> str | None:
    """Return why ranks cannot have shards of rows of an x [s, ..., K], or None.

    ``parts``: ranks that s is to be scattered over.
    """
    if x.dim() < 2:
        return (
            f"with sequence parallelism ranks have shards of the first dimension, and x must have "
            f"another for its features, got {list(x.shape)}"
        )
    if x.shape[0] % parts:
        return (
            f"the first dimension must be divisible by the {parts} ranks that it is scattered "
            f"over, got {list(x.shape)}"
        )
    return None


def _open(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, operand: torch.Tensor, ops: LayerOps
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
    ctx.main_grad = getattr(weight, "main_grad", None) if ops.config.wgrad.accumulate else None
    ctx.ops = ops
    ctx.shape, ctx.dtype = x.shape, x.dtype


# -- column ----------------------------------------------------------------------------------------


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: LayerOps,
        operand: torch.Tensor | None,
        early: bool,
    ) -> torch.Tensor:
        operand = weight if operand is None else operand
        dtype = operand.dtype
        ctx.input_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        x = x.to(dtype)
        _open(ctx, x, weight, operand, ops)
        ctx.early = None
        if early:
            ctx.early = ops.pool.early_gather = EarlyGather(ctx, partial(begin_gather, ops))
        with autocast_off(x):
            own_bias = bias if bias is not None and bias.dtype == dtype else None
            y = column_product(x, operand, own_bias, ops)
            # A bias of another dtype determines the dtype of the sum, as in Megatron.
            return y if bias is None or own_bias is not None else y + bias

    @staticmethod
    @once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        ops: LayerOps = ctx.ops
        early: EarlyGather | None = ctx.early
        x, weight, wait = (*ctx.saved_tensors, None) if early is None else early.take(ctx)
        if wait is None:
            check_memory("backward of a column layer", x=x)
        check_memory("backward of a column layer", weight=weight)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        deferred = need_w and ops.config.wgrad.defer(dy)
        dtype = ctx.dtype
        rows = as_rows(dy).to(dtype)
        if wait is None and need_w and not deferred:
            wait = begin_gather(ops, x, weight)

        def deliver() -> Grad:
            if not need_w:
                return None
            full = None if wait is None else wait()
            return ops.config.wgrad.deliver(ctx.parameter, ctx.main_grad, rows, full)

        dx, dw = column_grads(ops, rows, weight, need_x, deliver)
        if dx is not None:
            dx = dx.view(ctx.shape).to(ctx.input_dtype)
        db = as_rows(dy).sum(0).to(ctx.bias_dtype) if need_b else None
        return dx, dw, db, None, None, None


def column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ops: LayerOps
) -> torch.Tensor:
    """Return the forward result of a column layer, on operands of one dtype."""
    rows, columns = as_rows(x), weight.shape[0]
    if not ops.config.sequence_parallel:
        return fresh(linear(rows, weight, bias), *x.shape[:-1], columns)
    m = rows.shape[0] * ops.world
    op = ops.op(AGGemm, m, ops.whole(columns), weight.shape[1], x.dtype)
    if (reason := unsharded(x)) is not None:
        op._turn_away(ValueError, reason)
    y = op(rows, weight, bias) if m else no_rows(op, rows, columns)
    return fresh(y, x.shape[0] * ops.world, *x.shape[1:-1], columns)


def begin_gather(
    ops: LayerOps, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Begin to gather all rows of a column layer's input; return a function that waits for them."""
    rows = as_rows(x)
    m = rows.shape[0] * ops.world
    if m == 0 or not ops.config.sequence_parallel:
        return lambda: rows
    op = ops.op(AGGemm, m, ops.whole(weight.shape[0]), weight.shape[1], x.dtype)
    return op.start_gather(rows, m)


# -- row -------------------------------------------------------------------------------------------


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        ops: LayerOps,
        operand: torch.Tensor | None,
        before: EarlyGather | None,
    ) -> torch.Tensor:
        ctx.input_dtype, ctx.before = x.dtype, before
        operand = weight if operand is None else operand
        x = x.to(operand.dtype)
        _open(ctx, x, weight, operand, ops)
        with autocast_off(x):
            return row_product(x, operand, ops)

    @staticmethod
    @once
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
        ops: LayerOps = ctx.ops
        x, weight = ctx.saved_tensors
        check_memory("backward of a row layer", x=x, weight=weight)
        need_x, need_w = ctx.needs_input_grad[:2]
        rows = as_rows(dz).to(ctx.dtype)
        x = as_rows(x) if need_w else None
        deliver = partial(ops.config.wgrad.deliver, ctx.parameter, ctx.main_grad)
        before: EarlyGather | None = ctx.before
        idle = nothing if before is None else before.begin
        m = rows.shape[0] * (ops.world if ops.config.sequence_parallel else 1)
        dx, dw = row_grads(ops, rows, weight, m, need_x, x, deliver, idle)
        dx = None if dx is None else dx.view(ctx.shape).to(ctx.input_dtype)
        dw = None if dw is None else dw.to(ctx.parameter.dtype)
        return dx, dw, None, None, None


def row_product(x: torch.Tensor, weight: torch.Tensor, ops: LayerOps) -> torch.Tensor:
    """Return the forward result of a row layer, on operands of one dtype."""
    rows, scatters = as_rows(x), ops.config.sequence_parallel
    m, n, k = rows.shape[0], weight.shape[0], ops.whole(weight.shape[1])
    op, lead = ops.op(GemmRS if scatters else GemmAR, m, n, k, x.dtype), tuple(x.shape[:-1])
    if scatters:
        if (reason := unsharded(x, ops.world)) is not None:
            op._turn_away(ValueError, reason)
        lead = (x.shape[0] // ops.world, *x.shape[1:-1])
    return fresh(op(rows, weight) if m else no_rows(op, rows, n), *lead, n)
