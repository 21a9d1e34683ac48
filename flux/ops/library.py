"""Registration with torch.library: ``torch.ops.flux.*``, with fake kernels and autograd.

The ops take an integer handle instead of the op object, so that a compiled graph can hold it.
Kernels are registered for every device: one that the op does not run on is refused by the op's own
checks, with its own message, and on all ranks alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flux.core.knobs import Op
from flux.ops import torch_internals
from flux.ops.base import TensorParallelOp, op_of
from flux.ops.transforms import FORMULAS, Formula, no_formula, run_once, without_forward_mode

LIBRARY: torch.library.Library = torch.library.Library("flux", "DEF")
GATHERING_SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, SymInt? m, "
    "bool return_gathered, int handle, Tensor[] scales) -> Tensor[]"
)
"""Of ops that gather rows: any number of weights share the gathered rows."""
REDUCING_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor[] biases, int handle, Tensor[] scales) -> Tensor"
)
"""Of ops that sum partial results."""


def define(
    schema: str,
    kernel: Callable[..., object],
    fake: Callable[..., object],
    *,
    ordered: bool = False,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Any, ...]] | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Define ``torch.ops.flux.NAME``.

    Args:
        schema: NAME, arguments and results.
        kernel: computes it, on any device, without autograd.
        fake: returns empty tensors with the shapes and strides of the results.
        ordered: torch.compile may neither drop calls nor merge or reorder them. They meet other
            ranks: a compiler that removes one whose result nobody reads, or that swaps two because
            this rank's shapes make it look better, leaves the other ranks waiting in another place.
        setup: as for ``differentiate``.
        backward: as for ``differentiate``; None: differentiating the op raises, unless
            ``differentiate`` is called later.
        flops: returns the operations of this rank's products, for counters as torch's
            FlopCounterMode: takes the arguments with shapes in place of tensors, and out_shape;
            None: it has no products.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, without_forward_mode(name, kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flux::{name}", fake, lib=LIBRARY)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.flux, name))(flops)
    if ordered:
        torch_internals.register_ordered(getattr(torch.ops.flux, name).default)
    FORMULAS[name] = no_formula(name)
    if backward is not None and setup is not None:
        differentiate(name, setup, backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any, **options: Any) -> None:
        FORMULAS[name].setup(ctx, inputs, output)

    # torch.library calls ``save`` with keyword-only arguments of the op by a name of their own.
    torch.library.register_autograd(
        f"flux::{name}", partial(run_once, name), setup_context=save, lib=LIBRARY
    )


def differentiate(
    name: str, setup: Callable[..., None], backward: Callable[..., tuple[Any, ...]]
) -> None:
    """Give an op a backward.

    Args:
        name: of the op, as in its schema.
        setup: saves what the backward needs: (ctx, inputs, output).
        backward: returns a gradient or None for each input: (ctx, saved tensors, which inputs need
            a gradient, gradients of the outputs). Its results cannot be differentiated again.
    """
    FORMULAS[name] = Formula(setup, backward)


def spread(biases: Sequence[torch.Tensor], has_bias: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return a bias or None for each weight; schemas have no lists with None in them."""
    rest = iter(biases)
    return [next(rest) if present else None for present in has_bias]


def _gather(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    m: int | None,
    return_gathered: bool,
    handle: int,
    scales: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    op, of_weights = op_of(handle), spread(biases, has_bias)
    return op._guarded(op._call, x, weights, of_weights, m, scales, return_gathered)


def _reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    biases: Sequence[torch.Tensor],
    handle: int,
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    op = op_of(handle)
    return op._guarded(op._call, x, [weight], biases or [None], None, scales)[0]


def _gather_fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    has_bias: Sequence[bool],
    m: Any,
    return_gathered: bool,
    handle: int,
    scales: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    op = op_of(handle)
    rows = x.shape[0] * op.world if m is None else m
    side = 1 if op.spec.transpose_weight else 0
    dtype = op.spec.out_dtype
    outs = [x.new_empty(rows, w.shape[side], dtype=dtype) for w in weights]
    return [*outs, x.new_empty(rows, x.shape[1])] if return_gathered else outs


def _reduce_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    biases: Sequence[torch.Tensor],
    handle: int,
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    op = op_of(handle)
    side = 1 if op.spec.transpose_weight else 0
    rows = own_rows(op, x.shape[0]) if op.kind.scatters else x.shape[0]
    return x.new_empty(rows, weight.shape[side], dtype=op.spec.out_dtype)


def own_rows(op: TensorParallelOp, m: Any) -> Any:
    """Return ``op.own_rows(m)`` for fake kernels, where ``m`` may be a symbol."""
    chunk = (m + op.world - 1) // op.world
    begin, end = (torch.sym_min(m, (op.rank + i) * chunk) for i in (0, 1))
    return end - begin


def product_flops(*shape: int) -> int:
    """Return the operations of a product, of all of its dimensions: those of x, and N."""
    return 2 * math.prod(shape)


def _gather_flops(x: Any, weights: Any, *args: Any, out_shape: Any) -> int:
    return sum(product_flops(*out, x[1]) for out in out_shape[: len(weights)])


def _reduce_flops(x: Any, weight: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*x, out_shape[1])


for _op in Op:
    _how: tuple[Any, ...] = (REDUCING_SCHEMA, _reduce, _reduce_fake, _reduce_flops)
    if _op.gathers:
        _how = (GATHERING_SCHEMA, _gather, _gather_fake, _gather_flops)
    _schema, _kernel, _fake, _flops = _how
    define(_op.name + _schema, _kernel, _fake, ordered=True, flops=_flops)
