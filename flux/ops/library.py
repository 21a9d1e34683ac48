"""Registration with torch.library: ``torch.ops.flux.*``, with fake kernels and autograd.

The ops take an integer handle instead of the op object, so that a compiled graph can hold it.
Kernels are registered for every device: one that the op does not run on is refused by the op's own
checks, with its own message, and on all ranks alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flux.core.knobs import Op
from flux.ops.base import TensorParallelOp, op_of
from flux.ops.transforms import define

GATHERING_SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, SymInt? m, "
    "bool return_gathered, int handle, Tensor[] scales) -> Tensor[]"
)
"""Of ops that gather rows: any number of weights share the gathered rows."""
REDUCING_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor[] biases, int handle, Tensor[] scales) -> Tensor"
)
"""Of ops that sum partial results."""


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


def own_bounds(op: TensorParallelOp, m: Any) -> tuple[Any, Any]:
    """Return the first own row of ``m``, and the end of them; ``m`` may be a symbol.

    A number that is made of a symbol by flux._C would be that of one graph: each M, a graph.
    """
    chunk = (m + op.world - 1) // op.world
    return torch.sym_min(m, op.rank * chunk), torch.sym_min(m, (op.rank + 1) * chunk)


def own_rows(op: TensorParallelOp, m: Any) -> Any:
    """Return ``op.own_rows(m)`` for fake kernels, where ``m`` may be a symbol."""
    begin, end = own_bounds(op, m)
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
