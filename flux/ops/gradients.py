"""Gradients of products with a collective: which op computes dx, and when dw is multiplied.

The formulas of all backward passes: of ops (flux/ops/autograd.py), of layers
(flux/layers/autograd.py) and of layers in graphs (flux/layers/compiled.py). W ranks; x [rows, K],
weight [N, K] of this rank; SP: sequence parallelism, shards of rows outside.

    column, SP, AGGemm   y  = gather(x) @ w.T
                         dx = scatter(dy @ w)         GemmRS, beside a gather of x that began before
                         dw = dy.T @ gather(x)        while the last rows of dx are sent
    column               y  = x @ w.T                 no communication
                         dx = all_reduce(dy @ w)      GemmAR
                         dw = dy.T @ x                while the last rows of dx are sent
    row, SP, GemmRS      z  = scatter(x @ w.T)
                         dx = gather(dz) @ w          AGGemm, whose gathered dz is kept
                         dw = gather(dz).T @ x        while the column layer's x is gathered
                                                      (flux/ops/early_gather.py)
    row, GemmAR          z  = all_reduce(x @ w.T)
                         dx = dz @ w,  dw = dz.T @ x  no communication: dz is the same on all ranks

    backward of a column layer, SP, on one rank:
        GEMM   [ dy @ w: others' rows | own rows ][ dy.T @ x ] sum of dx
        wires  [ x arrives, if it has not | dx is sent as it is ready ]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from flux import _C
from flux.core.backend import nothing
from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp
from flux.ops.gemm_rs import GemmRS
from flux.ops.pool import meet
from flux.ops.wgrad import weight_grad

Grad = torch.Tensor | None
O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741  as in flux/ops/pool.py
T = TypeVar("T")


class Source(Protocol):
    """Where a backward takes its ops from, and how it communicates."""

    @property
    def reduces_dx(self) -> type[GemmRS] | None:
        """The op that sums a column layer's dx over the ranks; None: no communication."""

    @property
    def gathers_dz(self) -> bool:
        """Whether a row layer's dz is a shard of rows."""

    @property
    def splits_wgrad(self) -> bool:
        """Whether a weight gradient in float32 or float64 may be the sum of several products.

        16-bit products would each be rounded.
        """

    def whole(self, own: int) -> int:
        """Return the features of all ranks, of which this rank has ``own``."""

    def op(self, kind: type[O], m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> O:
        """Return an op for ``m`` rows. Collective if it has to be built."""


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


def no_rows(op: TensorParallelOp, x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the result of an op without rows, [0, columns]. Collective: ranks compare M."""
    meet(op, 0)
    return x.new_empty(0, columns)


def column_grads(
    source: Source,
    dy: torch.Tensor,
    weight: torch.Tensor,
    need_x: bool,
    deliver: Callable[[], T],
) -> tuple[Grad, T]:
    """Return the gradient of a column layer's input, [rows, K], and what ``deliver`` returns.

    Args:
        source: of the ops.
        dy: [M, N/W], in the dtype of the weight.
        weight: [N/W, K].
        need_x: whether the input needs a gradient.
        deliver: multiplies the weight gradient. It is called once, while the last rows of dx are
            sent.
    """
    if not need_x:
        return None, deliver()
    kind = source.reduces_dx
    if kind is None:
        return dy @ weight, deliver()
    m, n = dy.shape[0], weight.shape[1]
    op = source.op(kind, m, n, source.whole(weight.shape[0]), dy.dtype, transpose_weight=True)
    if m == 0:
        return no_rows(op, dy, n), deliver()
    delivered: list[T] = []
    dx = op.overlapped(dy, weight, lambda: delivered.append(deliver()))
    return dx, delivered[0]


def row_grads(
    source: Source,
    dz: torch.Tensor,
    weight: torch.Tensor,
    m: int,
    need_x: bool,
    x: Grad,
    deliver: Callable[[torch.Tensor, torch.Tensor], Grad],
    idle: Callable[[], None] = nothing,
) -> tuple[Grad, Grad]:
    """Return the gradients of a row layer's input, [M, K/W], and of its weight.

    Args:
        source: of the ops.
        dz: own rows, or all if they are not gathered; in the dtype of the weight.
        weight: [N, K/W].
        m: global rows.
        need_x: whether the input needs a gradient.
        x: all rows of forward's input; None if the weight needs no gradient.
        deliver: makes the weight gradient of all rows of dz [M, N] and x.
        idle: called when the last rows have arrived, before they are multiplied.
    """
    if not source.gathers_dz or m == 0:
        dx = dz @ weight if need_x else None
        idle()
        return dx, None if x is None else deliver(dz, x)
    n, k = source.whole(weight.shape[1]), weight.shape[0]
    op = source.op(AGGemm, m, n, k, dz.dtype, transpose_weight=True)
    if x is None:
        dx = op(dz, weight, m=m) if need_x else None
        idle()
        return dx, None
    in_parts = source.splits_wgrad and dz.dtype in (torch.float32, torch.float64)
    own = OwnRows(op, dz, x) if op.waits_for_hosts and in_parts else None
    meanwhile = nothing if own is None else own.multiply
    if need_x:
        dx, full = op.overlapped(dz, weight, meanwhile, idle, m)
    else:
        wait = op.start_gather(dz, m)
        meanwhile()
        dx, full = None, wait()
        idle()
    return dx, deliver(full, x) if own is None else own.complete(full)


class OwnRows:
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
        self._dw = weight_grad(self._dz, self._x[self._begin : self._end])

    def complete(self, full: torch.Tensor) -> torch.Tensor:
        """Add the others' rows, of the gathered rows [M, N]; return the gradient."""
        assert self._dw is not None
        for rows in (slice(self._begin), slice(self._end, None)):
            # By out=, which counters of operations know.
            torch.addmm(self._dw, full[rows].t(), self._x[rows], out=self._dw)
        return self._dw
