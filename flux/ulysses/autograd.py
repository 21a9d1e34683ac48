"""``torch.ops.flux`` of sequence parallelism by heads, and their backward: the other op.

    GemmAllToAll   dx = all_to_all(dy) @ w       AllToAllGemm, whose gathered dy is kept
                   dw = gathered dy.T @ x
    AllToAllGemm   dx = all_to_all(dz @ w)       GemmAllToAll
                   dw = dz.T @ gathered x        while the last rows of dx are sent; the gathered x
                                                 is saved, in place of x

A head that ranks share gets the sum of their gradients. Weights and biases are whole on every
rank, and their gradients are those of the own tokens: data parallelism sums them over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from flux.core.backend import OverlapHooks
from flux.ops.autograd import Mirrors
from flux.ops.base import op_of
from flux.ops.gradients import Grad, weight_grad
from flux.ops.library import product_flops
from flux.ops.transforms import FORMULAS, Formula, call, define
from flux.ulysses.ops import AllToAllGemm, GemmAllToAll, ProjectionOperands, UlyssesOp

Tensors = Sequence[torch.Tensor]


def _op(handle: int) -> Any:
    return cast(UlyssesOp, op_of(handle))


def _columns(op: UlyssesOp, weight: torch.Tensor) -> Any:
    return weight.shape[1 if op.spec.transpose_weight else 0]


def _mirror(op: UlyssesOp, kind: type[UlyssesOp], rows: int, dtype: torch.dtype) -> Any:
    """Return the op of the backward of ``op``, n and k exchanged. Collective.

    ``rows``: tokens of the largest part of a rank.
    """
    spec, m = op.spec, op.world * rows
    options: dict[str, Any] = {
        "heads": spec.heads,
        "head_dim": spec.head_dim,
        "heads_first": spec.heads_first,
    }
    mirrors, transposed = Mirrors(op, m, dtype), not spec.transpose_weight
    sizes = (m, spec.k, sum(spec.n))
    return mirrors.op(cast(Any, kind), *sizes, dtype, transpose_weight=transposed, **options)


def _largest(x: torch.Tensor, lengths: Sequence[int]) -> int:
    return x.shape[0] * (max(lengths) if lengths else x.shape[1])


def _project(
    x: torch.Tensor, weight: torch.Tensor, biases: Tensors, seq_lens: Sequence[int], handle: int
) -> list[torch.Tensor]:
    bias = biases[0] if biases else None
    outs: list[torch.Tensor] = _op(handle)._start(x, ProjectionOperands(weight, bias, seq_lens))
    return outs


def _project_fake(
    x: torch.Tensor, weight: torch.Tensor, biases: Tensors, seq_lens: Sequence[Any], handle: int
) -> list[torch.Tensor]:
    op = _op(handle)
    total = sum(seq_lens) if len(seq_lens) else x.shape[1] * op.world
    return _heads_fake(op, x, total)


def _heads_fake(op: UlyssesOp, like: torch.Tensor, total: Any) -> list[torch.Tensor]:
    outs = []
    for begin, end in op.spec.columns_of(op.world, op.rank):
        heads = (end - begin) // op.spec.head_dim
        middle = (heads, total) if op.spec.heads_first else (total, heads)
        outs.append(like.new_empty(like.shape[0], *middle, op.spec.head_dim))
    return outs


def _gather(
    x: Tensors,
    weight: torch.Tensor,
    biases: Tensors,
    seq_lens: Sequence[int],
    return_gathered: bool,
    handle: int,
) -> list[torch.Tensor]:
    operands = ProjectionOperands(weight, biases[0] if biases else None, seq_lens, return_gathered)
    outs: list[torch.Tensor] = _op(handle)._start(x, operands)
    return outs


def _gather_fake(
    x: Tensors,
    weight: torch.Tensor,
    biases: Tensors,
    seq_lens: Sequence[Any],
    return_gathered: bool,
    handle: int,
) -> list[torch.Tensor]:
    op = _op(handle)
    total = x[0].shape[2 if op.spec.heads_first else 1]
    batch, own = x[0].shape[0], op.own_length(seq_lens, total)
    outs = [x[0].new_empty(batch, own, _columns(op, weight))]
    return [*outs, x[0].new_empty(batch * own, op.spec.k)] if return_gathered else outs


def _project_flops(x: Any, weight: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*x[:-1], *weight)


def _gather_flops(x: Any, weight: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*out_shape[0][:-1], *weight)


# -- gradients -----------------------------------------------------------------------------------


def _project_grads(
    dys: Tensors,
    x: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: Sequence[int],
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return the gradients that are needed of x, the weight and the bias."""
    op = _op(handle)
    need_x, need_w, need_b = needed
    mirror = _mirror(op, AllToAllGemm, _largest(x, seq_lens), x.dtype)
    gather = need_w or need_b
    grads = mirror.gathered(dys, weight if need_x else None, seq_lens, gather)
    dy = grads.pop() if gather else None
    if need_w:
        rows = x.reshape(-1, x.shape[2])
        grads.append(weight_grad(cast(Any, dy), rows, op.spec.transpose_weight))
    return [*grads, cast(Any, dy).sum(0)] if need_b else grads


def _project_grads_fake(
    dys: Tensors,
    x: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: Sequence[Any],
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    grads = [t.new_empty(t.shape) for t, need in zip((x, weight), needed, strict=False) if need]
    return [*grads, x.new_empty(_columns(_op(handle), weight))] if needed[2] else grads


def _gather_grads(
    dz: torch.Tensor,
    gathered: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: Sequence[int],
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return the gradients that are needed of x, each tensor, and of the weight."""
    op = _op(handle)
    need_x, need_w = needed
    dws: list[torch.Tensor] = []

    def multiply() -> None:
        if need_w:
            rows = dz.reshape(-1, dz.shape[2])
            dws.append(weight_grad(rows, gathered, op.spec.transpose_weight))

    if not need_x:
        multiply()
        return dws
    mirror = _mirror(op, GemmAllToAll, _largest(dz, seq_lens), dz.dtype)
    return [*mirror.overlapped(dz, weight, seq_lens, OverlapHooks(multiply)), *dws]


def _gather_grads_fake(
    dz: torch.Tensor,
    gathered: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: Sequence[Any],
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    op = _op(handle)
    total = sum(seq_lens) if len(seq_lens) else dz.shape[1] * op.world
    dxs = _heads_fake(op, dz, total) if needed[0] else []
    return [*dxs, weight.new_empty(weight.shape)] if needed[1] else dxs


def _project_grads_flops(
    dys: Any, x: Any, weight: Any, seq_lens: Any, needed: Any, handle: int, *, out_shape: Any
) -> int:
    return int(sum(needed[:2])) * product_flops(*x[:-1], *weight)


def _gather_grads_flops(
    dz: Any, gathered: Any, weight: Any, seq_lens: Any, needed: Any, handle: int, *, out_shape: Any
) -> int:
    return int(sum(needed[:2])) * product_flops(*dz[:-1], *weight)


_PACKED = "Tensor weight, SymInt[] seq_lens, bool[] needed, int handle) -> Tensor[]"
define(
    "gemm_all_to_all(Tensor x, Tensor weight, Tensor[] biases, SymInt[] seq_lens, int handle) "
    "-> Tensor[]",
    _project,
    _project_fake,
    ordered=True,
    flops=_project_flops,
)
define(
    "all_to_all_gemm(Tensor[] x, Tensor weight, Tensor[] biases, SymInt[] seq_lens, "
    "bool return_gathered, int handle) -> Tensor[]",
    _gather,
    _gather_fake,
    ordered=True,
    flops=_gather_flops,
)
define(
    f"gemm_all_to_all_grads(Tensor[] dys, Tensor x, {_PACKED}",
    _project_grads,
    _project_grads_fake,
    ordered=True,
    flops=_project_grads_flops,
)
define(
    f"all_to_all_gemm_grads(Tensor dz, Tensor gathered, {_PACKED}",
    _gather_grads,
    _gather_grads_fake,
    ordered=True,
    flops=_gather_grads_flops,
)


# -- formulas ------------------------------------------------------------------------------------


def _none_of(lengths: Sequence[int]) -> list[None] | None:
    """Return the gradient of lengths: an empty list has the structure of its own."""
    return None if lengths else []


def _setup_project(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, biases, seq_lens, ctx.handle = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased, ctx.lengths = len(biases), list(seq_lens)
    ctx.shapes = [out.shape for out in output]


def _backward_project(
    ctx: Any, saved: Tensors, needed: Sequence[Any], grads: Sequence[Grad]
) -> tuple[Any, ...]:
    x, weight = saved
    needs = [bool(needed[0]), bool(needed[1]), any(needed[2])]
    dys = [
        x.new_zeros(shape) if grad is None else grad
        for grad, shape in zip(grads, ctx.shapes, strict=True)
    ]
    delivered: Any = iter(())
    if any(needs):
        options = (ctx.lengths, needs, ctx.handle)
        delivered = iter(call("gemm_all_to_all_grads", dys, x, weight, *options))
    dx, dw, db = (next(delivered) if need else None for need in needs)
    return dx, dw, [db] * ctx.biased, _none_of(ctx.lengths), None


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, weight, biases, seq_lens, gathers, ctx.handle = inputs
    if not gathers:
        raise RuntimeError("flux::all_to_all_gemm needs return_gathered to be differentiated")
    ctx.set_materialize_grads(False)  # that of the gathered heads, which nothing uses
    ctx.save_for_backward(output[1], weight)
    ctx.count, ctx.biased, ctx.lengths = len(tensors), len(biases), list(seq_lens)


def _backward_gather(
    ctx: Any, saved: Tensors, needed: Sequence[Any], grads: Sequence[Grad]
) -> tuple[Any, ...]:
    gathered, weight = saved
    (dz, of_gathered), need_x = grads, list(needed[0])
    if of_gathered is not None:
        raise RuntimeError("flux::all_to_all_gemm: gathered heads have no gradient")
    needs = [any(need_x), bool(needed[1])]
    if dz is None:
        return [None] * ctx.count, None, [None] * ctx.biased, _none_of(ctx.lengths), None, None
    delivered: Any = iter(())
    if any(needs):
        options = (ctx.lengths, needs, ctx.handle)
        delivered = iter(call("all_to_all_gemm_grads", dz, gathered, weight, *options))
    dxs = [next(delivered) if needs[0] else None for _ in need_x]
    dw = next(delivered) if needs[1] else None
    dbs = [dz.sum((0, 1)) if any(needed[2]) else None] * ctx.biased
    return dxs, dw, dbs, _none_of(ctx.lengths), None, None


FORMULAS["gemm_all_to_all"] = Formula(_setup_project, _backward_project)
FORMULAS["all_to_all_gemm"] = Formula(_setup_gather, _backward_gather)
