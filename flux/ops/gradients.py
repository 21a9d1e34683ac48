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
                                                      (pool.EarlyGather)
    row, GemmAR          z  = all_reduce(x @ w.T)
                         dx = dz @ w,  dw = dz.T @ x  no communication: dz is the same on all ranks

    backward of a column layer, SP, on one rank:
        GEMM   [ dy @ w: others' rows | own rows ][ dy.T @ x ] sum of dx
        wires  [ x arrives, if it has not | dx is sent as it is ready ]

Megatron may keep its own gradient buffer per parameter, ``weight.main_grad``, often in float32
under 16-bit weights. With gradient accumulation fusion the layer itself adds its gradient to that
buffer (``WeightGrad``). It returns none, or a placeholder that the data-parallel hooks can wait
for. Megatron may also defer the weight gradient: the last layer of a pipeline keeps the operands,
and Megatron multiplies them when the pipeline drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from flux import _C
from flux.core.backend import nothing
from flux.core.tensors import check_memory
from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp
from flux.ops.gemm_rs import GemmRS
from flux.ops.pool import meet

try:
    import fused_weight_gradient_mlp_cuda as apex  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    apex = None

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


# -- weight gradients ------------------------------------------------------------------------------


def weight_grad(dy: torch.Tensor, x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Return the gradient [N, K] of a weight, or [K, N] (transposed), for dy [M, N], x [M, K]."""
    return x.t() @ dy if transposed else dy.t() @ x


@dataclass(frozen=True)
class WeightGrad:
    """The handling of a layer's weight gradient.

    Attributes:
        accumulate: add it to ``weight.main_grad`` (gradient_accumulation_fusion).
        deferred: append the gradient of the output here instead of computing a weight gradient.
        deferral_limit: as long as ``deferred`` has fewer elements than this; 0: no limit.
    """

    accumulate: bool = False
    deferred: list[torch.Tensor] | None = None
    deferral_limit: int | None = 0

    @property
    def has_side_effects(self) -> bool:
        """Whether it changes tensors or lists of Megatron, which no graph contains."""
        return self.accumulate or self.deferred is not None

    def defer(self, dy: torch.Tensor) -> bool:
        """Return whether the weight gradient is deferred; if so, keep the output's gradient."""
        limit, kept = self.deferral_limit, self.deferred
        if kept is None or (limit and len(kept) >= limit):
            return False
        kept.append(dy)
        return True

    def deliver(
        self, weight: Any, main_grad: Grad, dy: torch.Tensor, x: torch.Tensor | None
    ) -> Grad:
        """Return the gradient for ``weight``, after adding its part to ``main_grad``.

        Args:
            weight: the parameter, whose attributes Megatron reads and writes.
            main_grad: its buffer, as it was in forward.
            dy: [M, N].
            x: [M, K]; None if the gradient is deferred.
        """
        if not self.accumulate:
            return None if x is None else weight_grad(dy, x).to(weight.dtype)
        weight.main_grad = main_grad
        if x is not None:
            if main_grad is None and not hasattr(weight, "__fsdp_param__"):
                raise RuntimeError("gradient_accumulation_fusion: the weight has no main_grad")
            if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP makes the buffer on request
                weight.main_grad = weight.get_main_grad()
                weight.main_grad.zero_()
            accumulate(weight.main_grad, dy, x)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # Hooks on the gradient must run now, in the thread of the backward pass, so a gradient must
        # exist. Its values are unused, unless zero_out_wgrad says that they are added up.
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        make = torch.zeros if zero else torch.empty
        return make(weight.main_grad.shape, dtype=weight.dtype, device=weight.device)


def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """Compute ``main_grad += dy.T @ x``, in float32 if main_grad is float32.

    Raises:
        RuntimeError: main_grad is neither float32 nor of a 16-bit dtype (nor that of dy).
        ValueError: main_grad has no memory.
    """
    check_memory("gradient accumulation fusion", main_grad=main_grad)
    kind = main_grad.dtype
    if kind not in (torch.float32, torch.float16, torch.bfloat16, dy.dtype):
        raise RuntimeError(
            f"gradient accumulation fusion takes main_grad in float32, float16 or bfloat16, "
            f"got {kind}"
        )
    if apex is not None and dy.is_cuda and kind != torch.float64:
        run = apex.wgrad_gemm_accum_fp32 if kind == torch.float32 else apex.wgrad_gemm_accum_fp16
        run(x, dy, main_grad)
    elif kind == dy.dtype:
        torch.addmm(main_grad, dy.t(), x, out=main_grad)  # which counters of operations know
    elif dy.is_cuda and kind == torch.float32:
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
    else:
        wide = torch.promote_types(kind, dy.dtype)
        main_grad.add_(dy.t().to(wide) @ x.to(wide))
