"""The layers' products: in a graph of torch.compile as ops of torch.library, else directly.

A graph can hold tensors, numbers and names, but no pools. So these ops take the name of the group
and find its pool at run time, as functional collectives find their group. The whole backward of a
layer is one op, which computes the formulas of flux/ops/gradients.py. If the compiler saw a
gather, two products and a reduction, it could reorder them so that no communication is hidden.

    column_linear      y             backward: column_linear_grad -> dx, dw
    row_linear         z             backward: row_linear_grad -> dx, dw
    gather_features    all features  backward: cut_features, and vice versa
    sum_grad           a copy        backward: an all-reduce of the gradient

Operands have one dtype: casts, including autocast's, are outside of the ops, visible to the
compiler. The ops of a graph stay until ``close_pools()``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flux.backends.unfused import all_gather
from flux.layers.autograd import (
    GRAPH_SETTINGS,
    LayerOps,
    LinearConfig,
    begin_gather,
    column_product,
    row_product,
    unsharded,
)
from flux.ops.autocast import autocast_off
from flux.ops.autograd import grads_fake, row_grads_flops
from flux.ops.gradients import Grad, as_rows, column_grads, fresh, row_grads
from flux.ops.library import product_flops
from flux.ops.transforms import Formula, call, define
from flux.transport.exchange import resolve_group


def _scaled(rows: Any, group_name: str, up: bool) -> Any:
    """Return the rows after a gather (up) or scatter over a group."""
    world = resolve_group(group_name).size()
    return rows * world if up else rows // world


def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, settings: tuple[Any, ...], up: bool
) -> torch.Tensor:
    """Return the result's shape: x [s, ..., K] -> [s * W, ..., N] (up) or [s / W, ..., N]."""
    lead = list(x.shape[:-1])
    config = LinearConfig(*settings)
    if config.sequence_parallel:
        if (reason := unsharded(x)) is not None:
            raise ValueError(reason)
        lead[0] = _scaled(lead[0], settings[0], up)
    return x.new_empty(*lead, weight.shape[0])


def _grads(dx: Grad, dw: Grad, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients that exist; schemas have no lists with None in them."""
    dx = None if dx is None else fresh(dx, *x.shape)
    return [grad for grad in (dx, dw) if grad is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])  # x, weight
    ctx.settings = inputs[-GRAPH_SETTINGS:]


def _backward(
    grads_of: str, ctx: Any, saved: Sequence[torch.Tensor], needed: Sequence[bool], dy: torch.Tensor
) -> tuple[Grad, Grad]:
    """Return (dx, dw), or None in place of one that is not needed. ``grads_of``: a library op."""
    need_x, need_w = bool(needed[0]), bool(needed[1])
    if not (need_x or need_w):
        return None, None
    grads = call(grads_of, dy, *saved, need_x, need_w, *ctx.settings)
    return (grads[0] if need_x else None), (grads[-1] if need_w else None)


# -- column ----------------------------------------------------------------------------------------


def _column(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    with autocast_off(x):
        return column_product(x, weight, bias, LayerOps(LinearConfig(*settings)))


def _column_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    need_x: bool,
    need_w: bool,
    *settings: Any,
) -> list[torch.Tensor]:
    ops, rows = LayerOps(LinearConfig(*settings)), as_rows(dy)
    with autocast_off(x):
        wait = begin_gather(ops, x, weight) if need_w else None

        def deliver() -> Grad:
            return None if wait is None else ops.config.wgrad.deliver(weight, None, rows, wait())

        dx, dw = column_grads(ops, rows, weight, need_x, deliver)
    return _grads(dx, dw, x)


def _column_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    return _linear_fake(x, weight, settings, True)


def _backward_column(
    ctx: Any, saved: Sequence[torch.Tensor], needed: Sequence[bool], dy: torch.Tensor
) -> tuple[Any, ...]:
    dx, dw = _backward("column_linear_grad", ctx, saved, needed, dy)
    db = as_rows(dy).sum(0) if needed[2] else None
    return dx, dw, db, *[None] * len(ctx.settings)


# -- row -------------------------------------------------------------------------------------------


def _row(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    with autocast_off(x):
        return row_product(x, weight, LayerOps(LinearConfig(*settings)))


def _row_grad(
    dz: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    need_x: bool,
    need_w: bool,
    *settings: Any,
) -> list[torch.Tensor]:
    ops, rows, all_x = LayerOps(LinearConfig(*settings)), as_rows(dz), as_rows(x)
    deliver = partial(ops.config.wgrad.deliver, weight, None)
    with autocast_off(dz):
        x_or_none = all_x if need_w else None
        dx, dw = row_grads(ops, rows, weight, len(all_x), need_x, x_or_none, deliver)
    return _grads(dx, dw, x)


def _row_fake(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    return _linear_fake(x, weight, settings, False)


def _backward_row(
    ctx: Any, saved: Sequence[torch.Tensor], needed: Sequence[bool], dz: torch.Tensor
) -> tuple[Any, ...]:
    if LinearConfig(*ctx.settings).sequence_parallel:
        dx, dw = _backward("row_linear_grad", ctx, saved, needed, dz)
    else:  # no communication: the compiler sees both products
        (x, weight), rows = saved, as_rows(dz)
        dx = (rows @ weight).view(x.shape) if needed[0] else None
        dw = rows.t() @ as_rows(x) if needed[1] else None
    return dx, dw, *[None] * len(ctx.settings)


# -- features, and gradients of parameters that all ranks have -------------------------------------


def _gather_features(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return every rank's last dimension, side by side."""
    group = resolve_group(group_name)
    world = group.size()
    parts = x.new_empty(world * x.shape[0], *x.shape[1:])
    all_gather(parts, x.contiguous(), group=group)
    beside = parts.view(world, *x.shape).movedim(0, -2).contiguous()
    return fresh(beside, *x.shape[:-1], world * x.shape[-1])


def _cut_features(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return this rank's part of the last dimension."""
    group = resolve_group(group_name)
    part = x.chunk(group.size(), -1)[group.rank()]
    return part.clone(memory_format=torch.contiguous_format)


def _gather_features_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _scaled(x.shape[-1], group_name, True))


def _cut_features_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _scaled(x.shape[-1], group_name, False))


def _sum_grad(parameter: torch.Tensor, group_name: str) -> torch.Tensor:
    return parameter.clone(memory_format=torch.contiguous_format)


def _sum_grad_fake(parameter: torch.Tensor, group_name: str) -> torch.Tensor:
    return parameter.new_empty(parameter.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group_name = inputs[1]


def _backward_sum_grad(ctx: Any, saved: Any, needed: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    functional = torch.ops._c10d_functional
    total = functional.all_reduce(grad.contiguous(), "sum", ctx.group_name)
    return functional.wait_tensor(total), None


def _backward_gather(ctx: Any, saved: Any, needed: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return call("cut_features", dy, ctx.group_name), None


def _backward_cut(ctx: Any, saved: Any, needed: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return call("gather_features", dy, ctx.group_name), None


# -- operations of this rank's products, for counters ----------------------------------------------


def _linear_flops(x: Any, weight: Any, *args: Any, out_shape: Any) -> int:
    # The rows that are multiplied: all, which a column layer returns and a row layer takes.
    rows = max(math.prod(x[:-1]), math.prod(out_shape[:-1]))
    return product_flops(rows, *weight)


def _column_grad_flops(
    dy: Any, x: Any, weight: Any, need_x: bool, need_w: bool, *settings: Any, out_shape: Any
) -> int:
    return (need_x + need_w) * product_flops(*dy, weight[1])


# -- registration ----------------------------------------------------------------------------------

_SETTINGS = "str group_name, bool sequence_parallel, bool reduce_dx, bool fuse_ag, bool fuse_rs"
_SETTINGS += ", int? features = None"
_GRADS = f"(Tensor dy, Tensor x, Tensor weight, bool need_x, bool need_w, {_SETTINGS}) -> Tensor[]"
define(
    f"column_linear(Tensor x, Tensor weight, Tensor? bias, {_SETTINGS}) -> Tensor",
    _column,
    _column_fake,
    formula=Formula(_setup, _backward_column),
    flops=_linear_flops,
)
define(
    f"row_linear(Tensor x, Tensor weight, {_SETTINGS}) -> Tensor",
    _row,
    _row_fake,
    formula=Formula(_setup, _backward_row),
    flops=_linear_flops,
)
define("column_linear_grad" + _GRADS, _column_grad, grads_fake, flops=_column_grad_flops)
define("row_linear_grad" + _GRADS, _row_grad, grads_fake, flops=row_grads_flops)
for _name, _kernel, _fake, _backward_of in (
    ("gather_features", _gather_features, _gather_features_fake, _backward_gather),
    ("cut_features", _cut_features, _cut_features_fake, _backward_cut),
    ("sum_grad", _sum_grad, _sum_grad_fake, _backward_sum_grad),
):
    _schema = _name + "(Tensor x, str group_name) -> Tensor"
    define(_schema, _kernel, _fake, formula=Formula(_keep_group, _backward_of))
