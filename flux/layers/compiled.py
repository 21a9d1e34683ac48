"""The layers as ops of torch.library, which torch.compile can put into graphs.

A graph can hold tensors, numbers and names, but no pools. So these ops take the name of the group
and find its pool at run time, as functional collectives find their group. The whole backward of a
layer is one op, ``column_linear_grad``. If the compiler saw a gather, two products and a reduction,
it could reorder them so that no communication is hidden.

    column_linear      y             backward: column_linear_grad -> dx, dw
    row_linear         z             backward: row_linear_grad -> dx, dw
    gather_features    all features  backward: cut_features, and vice versa
    sum_grad           a copy        backward: an all-reduce of the gradient

Operands have one dtype: casts, including autocast's, are outside of the ops, visible to the
compiler. The ops behind a graph stay until ``close_pools()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flux.backends.unfused import all_gather
from flux.layers.autograd import (
    LinearConfig,
    autocast_off,
    begin_gather,
    column_grads,
    column_product,
    compute_dtype,
    fresh,
    row_grads,
    row_product,
)
from flux.ops.library import LIBRARY, register_fake
from flux.ops.pool import pool_of
from flux.transport.exchange import resolve_group

Grad = torch.Tensor | None


class Named(NamedTuple):
    """``LinearConfig`` in a form that a graph can hold."""

    group_name: str
    sequence_parallel: bool
    reduce_dx: bool = True
    fuse_ag: bool = True
    fuse_rs: bool = True


_HOW = "str group_name, bool sequence_parallel, bool reduce_dx, bool fuse_ag, bool fuse_rs"
for _schema in (
    f"column_linear(Tensor x, Tensor weight, Tensor? bias, {_HOW}) -> Tensor",
    f"column_linear_grad(Tensor dy, Tensor x, Tensor weight, bool need_x, bool need_w, {_HOW}) "
    "-> Tensor[]",
    f"row_linear(Tensor x, Tensor weight, {_HOW}) -> Tensor",
    f"row_linear_grad(Tensor dz, Tensor x, Tensor weight, bool need_x, bool need_w, {_HOW}) "
    "-> Tensor[]",
    "gather_features(Tensor x, str group_name) -> Tensor",
    "cut_features(Tensor x, str group_name) -> Tensor",
    "sum_grad(Tensor parameter, str group_name) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Named
) -> torch.Tensor:
    """Apply ``flux.layers.autograd.column_linear`` in a graph."""
    dtype = compute_dtype(x)
    own_bias = bias if bias is not None and bias.dtype == dtype else None
    y: torch.Tensor = torch.ops.flux.column_linear(x.to(dtype), weight.to(dtype), own_bias, *how)
    return y if bias is None or own_bias is not None else y + bias


def row_linear(x: torch.Tensor, weight: torch.Tensor, how: Named) -> torch.Tensor:
    """Apply ``flux.layers.autograd.row_linear`` in a graph."""
    dtype = compute_dtype(x)
    z: torch.Tensor = torch.ops.flux.row_linear(x.to(dtype), weight.to(dtype), *how)
    return z


def _parallel(how: Sequence[Any]) -> LinearConfig:
    name, *switches = how
    pool = pool_of(name)
    return LinearConfig(pool, pool.graphs, *switches)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _scaled(rows: Any, group_name: str, up: bool, does: bool) -> Any:
    """Return the rows after a gather (up) or scatter over a group, if it ``does`` that."""
    world = resolve_group(group_name).size() if does else 1
    return rows * world if up else rows // world


# -- column ----------------------------------------------------------------------------------------


def _column(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    with autocast_off(x):
        return column_product(x, weight, bias, _parallel(how))


def _column_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, *how: Any
) -> list[torch.Tensor]:
    rows = _rows(dy)

    def weight_grad(full: torch.Tensor | None) -> Grad:
        assert full is not None
        return rows.t() @ full

    parallel = _parallel(how)
    with autocast_off(x):
        wait = begin_gather(parallel, x, weight) if need_w else None
        dx, dw = column_grads(rows, wait, weight, parallel, need_x, weight_grad if need_w else None)
    grads = (None if dx is None else fresh(dx, *x.shape), dw)
    return [grad for grad in grads if grad is not None]


@register_fake("column_linear")
def _column_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    rows = _scaled(x.shape[0], how[0], True, how[1])
    return x.new_empty(rows, *x.shape[1:-1], weight.shape[0])


@register_fake("column_linear_grad")
def _column_grad_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, *how: Any
) -> list[torch.Tensor]:
    dx = [x.new_empty(x.shape)] if need_x else []
    return [*dx, *([weight.new_empty(weight.shape)] if need_w else [])]


def _setup_column(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def _backward_column(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    dx: Grad = None
    dw: Grad = None
    if need_x or need_w:
        needs = (bool(need_x), bool(need_w))
        grads = torch.ops.flux.column_linear_grad(dy, x, weight, *needs, *ctx.how)
        dx, dw = (grads[0] if need_x else None), (grads[-1] if need_w else None)
    db = _rows(dy).sum(0) if need_b else None
    return dx, dw, db, *[None] * len(ctx.how)


# -- row -------------------------------------------------------------------------------------------


def _row(x: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
    with autocast_off(x):
        return row_product(x, weight, _parallel(how))


def _row_grad(
    dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, *how: Any
) -> list[torch.Tensor]:
    rows, all_x = _rows(dz), _rows(x) if need_w else None
    with autocast_off(dz):
        dx, dw = row_grads(rows, all_x, weight, _parallel(how), need_x, lambda dz, x: dz.t() @ x)
    grads = (None if dx is None else fresh(dx, *x.shape), dw)
    return [grad for grad in grads if grad is not None]


@register_fake("row_linear")
def _row_fake(x: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
    rows = _scaled(x.shape[0], how[0], False, how[1])
    return x.new_empty(rows, *x.shape[1:-1], weight.shape[0])


@register_fake("row_linear_grad")
def _row_grad_fake(
    dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_w: bool, *how: Any
) -> list[torch.Tensor]:
    return _column_grad_fake(dz, x, weight, need_x, need_w)


def _setup_row(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def _backward_row(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_w = (bool(need) for need in ctx.needs_input_grad[:2])
    if not ctx.how[1]:  # no communication: the compiler sees both products
        rows = _rows(dz)
        dx = (rows @ weight).view(x.shape) if need_x else None
        return dx, rows.t() @ _rows(x) if need_w else None, *[None] * len(ctx.how)
    dx, dw = None, None
    if need_x or need_w:
        grads = torch.ops.flux.row_linear_grad(dz, x, weight, need_x, need_w, *ctx.how)
        dx, dw = (grads[0] if need_x else None), (grads[-1] if need_w else None)
    return dx, dw, *[None] * len(ctx.how)


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


@register_fake("gather_features")
def _gather_features_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _scaled(x.shape[-1], group_name, True, True))


@register_fake("cut_features")
def _cut_features_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _scaled(x.shape[-1], group_name, False, True))


def _sum_grad(parameter: torch.Tensor, group_name: str) -> torch.Tensor:
    return parameter.clone(memory_format=torch.contiguous_format)


@register_fake("sum_grad")
def _sum_grad_fake(parameter: torch.Tensor, group_name: str) -> torch.Tensor:
    return parameter.new_empty(parameter.shape)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group_name = inputs[1]


def _backward_sum_grad(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    functional = torch.ops._c10d_functional
    total = functional.all_reduce(grad.contiguous(), "sum", ctx.group_name)
    return functional.wait_tensor(total), None


def _backward_gather(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.flux.cut_features(dy, ctx.group_name), None


def _backward_cut(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.flux.gather_features(dy, ctx.group_name), None


# -- registration ----------------------------------------------------------------------------------

for _name, _kernel in (
    ("column_linear", _column),
    ("column_linear_grad", _column_grad),
    ("row_linear", _row),
    ("row_linear_grad", _row_grad),
    ("gather_features", _gather_features),
    ("cut_features", _cut_features),
    ("sum_grad", _sum_grad),
):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

for _name, _backward, _setup in (
    ("column_linear", _backward_column, _setup_column),
    ("row_linear", _backward_row, _setup_row),
    ("gather_features", _backward_gather, _keep_group),
    ("cut_features", _backward_cut, _keep_group),
    ("sum_grad", _backward_sum_grad, _keep_group),
):
    torch.library.register_autograd(f"flux::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
