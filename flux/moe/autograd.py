"""``torch.ops.flux`` for mixtures of experts, and their backward: the mirror image, fused in turn.

    AGGroupedGemm   dx    = scatter(sum over choices of dy @ w)    GroupedGemmRS, beside a gather
                            of x that began before
                    dw[e] = dy[rows of e].T @ gather(x)[tokens of e]    while tokens travel
    GroupedGemmRS   dx    = p * (gather(dz)[token] @ w)            AGGroupedGemm, whose dz is kept
                    dw[e] = (p * gather(dz)[tokens of e]).T @ x[rows of e]
                    dp    = sum over ranks of x . (gather(dz)[token] @ w)    all_reduce, [M, topk]
    GroupedGemmAR   as GroupedGemmRS; dz is the same on all ranks, so nothing is gathered
    DispatchGroupedGemm, GroupedGemmCombine
                    each is the other's dx; the dispatched x is kept for dw

A bias of GroupedGemmRS is a parameter that ranks share: each gets its whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from flux.core.backend import OverlapHooks, nothing
from flux.moe.checks import Operands
from flux.moe.expert_parallel import DispatchGroupedGemm, GroupedGemmCombine
from flux.moe.ops import AGGroupedGemm, GroupedGemmRS, GroupedOp
from flux.moe.product import Experts, GatherProduct, SumProduct
from flux.moe.routing import Routing
from flux.ops.autograd import Mirrors
from flux.ops.base import op_of
from flux.ops.gradients import Grad
from flux.ops.library import own_bounds, own_rows, product_flops
from flux.ops.transforms import FORMULAS, Formula, call, define

Tensors = Sequence[torch.Tensor]


def _op(handle: int) -> Any:
    return cast(GroupedOp, op_of(handle))


def _gather(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    return_gathered: bool,
    handle: int,
    max_rows: int | None,
    scales: Tensors,
) -> list[torch.Tensor]:
    op = _op(handle)
    bias = biases[0] if biases else None
    operands = Operands(weights, bias, experts, max_rows=max_rows, scales=scales)
    outs: list[torch.Tensor] = op.execute(x, operands, return_gathered)
    return outs


def _sum(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    probs: Tensors,
    handle: int,
    max_rows: int | None,
    scales: Tensors,
) -> torch.Tensor:
    op = _op(handle)
    bias, of_choices = biases[0] if biases else None, probs[0] if probs else None
    operands = Operands(weights, bias, experts, of_choices, max_rows=max_rows, scales=scales)
    out: torch.Tensor = op.execute(x, operands)[0]
    return out


def _columns(op: GroupedOp, weights: Tensors) -> Any:
    columns = weights[0].shape[-1 if op.spec.transpose_weight else -2]
    return columns // 2 if op.spec.gated else columns


def _gather_fake(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    return_gathered: bool,
    handle: int,
    max_rows: int | None,
    scales: Tensors,
) -> list[torch.Tensor]:
    op = _op(handle)
    rows: Any = max_rows
    if max_rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()  # choices are dropped, or of other ranks
    outs = [x.new_empty(rows, _columns(op, weights), dtype=op.spec.out_dtype)]
    gathered = rows if op.dispatches else experts.shape[0]
    return [*outs, x.new_empty(gathered, x.shape[1])] if return_gathered else outs


def _sum_fake(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    probs: Tensors,
    handle: int,
    max_rows: int | None,
    scales: Tensors,
) -> torch.Tensor:
    op, m = _op(handle), experts.shape[0]
    rows = own_rows(op, m) if op.kind.scatters else m
    return x.new_empty(rows, _columns(op, weights), dtype=op.spec.out_dtype)


def _gather_flops(x: Any, weights: Any, *args: Any, out_shape: Any) -> int:
    wide = out_shape[0][0], weights[0][-2] * weights[0][-1]
    return product_flops(*wide)


def _sum_flops(x: Any, weights: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*x, out_shape[1])


# -- gradients -----------------------------------------------------------------------------------


def _mirror(op: GroupedOp, mirrors: Mirrors, m: int, dtype: torch.dtype) -> Any:
    """Return the op of the backward of ``op``: n and k change places. Collective."""
    sums, gathers = GroupedGemmRS, AGGroupedGemm
    if op.dispatches:
        sums, gathers = GroupedGemmCombine, DispatchGroupedGemm
    kind: Any = sums if op.kind.gathers else gathers
    return _turned(op, mirrors, kind, m, op.spec.k, sum(op.spec.n), dtype)


def _turned(
    op: GroupedOp,
    mirrors: Mirrors,
    kind: type[GroupedOp],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Any:
    """Return an op of the experts of ``op``, whose weights it takes transposed. Collective."""
    spec = op.spec
    options = {"experts": spec.experts, "topk": spec.topk, "ep": spec.ep}
    transposed = not spec.transpose_weight
    return mirrors.op(cast(Any, kind), m, n, k, dtype, transpose_weight=transposed, **options)


def _weight_grads(
    op: GroupedOp, dy: torch.Tensor, x: torch.Tensor, routing: Routing, weights: Tensors
) -> list[torch.Tensor]:
    """Return the gradients of the weights; ``dy`` and ``x`` are routed rows."""
    grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights]
    each = list(grads[0].unbind()) if grads[0].dim() == 3 else grads
    empty = set(range(len(each)))
    for expert, begin, end in routing.groups(0, routing.positions.shape[0]):
        dys, xs = dy[begin:end], x[begin:end]
        left, right = (xs, dys) if op.spec.transpose_weight else (dys, xs)
        torch.mm(left.t(), right, out=each[expert])
        empty.discard(expert)
    for expert in empty:
        each[expert].zero_()
    return grads


def _each(op: GroupedOp, weights: Tensors, transposed: bool) -> list[torch.Tensor]:
    """Return each expert's weight, [N, K] or with ``transposed`` [K, N]."""
    stacked = len(weights) > 0 and weights[0].dim() == 3
    each = list(weights[0].unbind()) if stacked else list(weights)
    return [w.t() for w in each] if transposed != op.spec.transpose_weight else each


def _gather_grads(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    experts: torch.Tensor,
    d_gathered: Grad,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return the gradients that are needed of x [own rows, K], the weights and the bias.

    ``x``: own rows, or of an op that dispatches the routed ones, [R, K]. Tokens travel if any rank
    needs them: the experts of some may be frozen.
    """
    op, m = _op(handle), experts.shape[0]
    need_x, need_w, need_b = needed
    needs = [need_x, need_w, d_gathered is not None]
    travels = need_x or not op.dispatches
    mirrors = Mirrors(op, m, x.dtype, needs) if travels else None
    any_x, any_w, any_gathered = needs if mirrors is None else mirrors.needs
    routing = op.routing(experts)
    dy = dy[: routing.rows]  # of a call with max_rows there are more
    dbs = [_bias_grad(dy, routing, len(op.local_experts))] if need_b else []
    mirror = None
    if mirrors is not None and any_x and not any_gathered:
        mirror = _mirror(op, mirrors, m, x.dtype)
    wait = None
    if any_w:
        own = x[: op.own_rows(m)]
        wait = (lambda: x[: routing.rows]) if op.dispatches else op._unfused.start_gather(own, m)
    dws: list[torch.Tensor] = []

    def multiply() -> None:
        if wait is not None:
            routed = wait()
            if not need_w:
                return
            if not op.dispatches:
                routed = routed.index_select(0, routing.on(x.device)[0])
            dws.extend(_weight_grads(op, dy, routed, routing, weights))

    if mirror is not None:
        operands = Operands(weights, None, experts)
        dxs = mirror.execute(dy, operands, hooks=OverlapHooks(multiply))
        return [*(dxs if need_x else []), *dws, *dbs]
    multiply()
    if not any_x:
        return [*dws, *dbs]
    of_tokens = x.new_zeros(m, x.shape[1]) if d_gathered is None else d_gathered
    partial = torch.empty_like(of_tokens)
    of_experts = Experts(_each(op, weights, transposed=True), None, routing)
    SumProduct(op.spec, of_experts, None)(dy, 0, m, partial, None)
    dx = op._unfused.scatter_rows(partial + of_tokens)
    return [*([dx] if need_x else []), *dws, *dbs]


def _sum_grads(
    dz: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    probs: Tensors,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return the gradients that are needed of x, the weights, the probabilities and the bias."""
    op, m = _op(handle), experts.shape[0]
    need_x, need_w, need_p, need_b = needed
    needs = [need_x or need_p, need_p]
    mirrors = Mirrors(op, m, dz.dtype, needs) if op.kind.scatters else None
    any_dh, any_p = needs if mirrors is None else mirrors.needs
    routing = op.routing(experts)
    room, x = x, x[: routing.rows]  # of a call with max_rows
    of_rows, dh = _scattered_back(op, mirrors, dz, weights, experts, routing, any_dh)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    choices = routing.on(x.device)[1]
    p = probs[0].reshape(-1)[choices].to(wide)[:, None] if probs else None
    dps, summed = [], nothing
    if any_p:
        dots = torch.linalg.vecdot(x.to(wide), dh.to(wide))
        if biases and op.adds_bias:
            for expert, begin, end in routing.groups(0, m):
                dots[begin:end] += of_rows[begin:end].to(wide) @ biases[0][expert].to(wide)
        dps = [dots.new_zeros(m * op.spec.topk).index_copy_(0, choices, dots)]
        summed = op._unfused.start_sum(dps[0])  # which travels beside the products
    dxs, dws, dbs = [], [], []
    if need_x:
        dxs = [dh if p is None else (dh.to(wide) * p).to(x.dtype)]
        if len(room) > len(x):
            dxs = [torch.cat([*dxs, room.new_zeros(len(room) - len(x), room.shape[1])])]
    if need_w or need_b:
        weighted = of_rows if p is None else (of_rows.to(wide) * p).to(x.dtype)
        dws = _weight_grads(op, weighted, x, routing, weights) if need_w else []
        dbs = [_bias_grad(weighted, routing, len(op.local_experts))] if need_b else []
    summed()
    return [*dxs, *dws, *(dp.view(m, -1).to(probs[0].dtype) for dp in dps if need_p), *dbs]


def _scattered_back(
    op: GroupedOp,
    mirrors: Mirrors | None,
    dz: torch.Tensor,
    weights: Tensors,
    experts: torch.Tensor,
    routing: Routing,
    multiply: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dz of routed rows, [R, N], and with ``multiply`` dz @ w of them, [R, K/tp]."""
    m = experts.shape[0]
    if mirrors is not None and (multiply or op.dispatches):
        operands = Operands(weights, None, experts, keeps=True)
        dh, routed = _mirror(op, mirrors, m, dz.dtype).execute(dz, operands)
        return routed, dh
    full = op._unfused.gather_rows(dz, m) if op.kind.scatters else dz
    each = _each(op, weights, transposed=True)
    dh = dz.new_empty(routing.rows, op._checker.k)
    if not multiply:
        return full.index_select(0, routing.on(dz.device)[0]), dh
    routed = dz.new_empty(routing.rows, dz.shape[1])
    GatherProduct(op.spec, Experts(each, None, routing), routed)(full, 0, m, dh, None)
    return routed, dh


def _bias_grad(dy: torch.Tensor, routing: Routing, experts: int) -> torch.Tensor:
    """Return the sums of each expert's rows of ``dy``, [experts, columns]."""
    grad = dy.new_zeros(experts, dy.shape[1])
    for expert, begin, end in routing.groups(0, routing.positions.shape[0]):
        torch.sum(dy[begin:end], 0, out=grad[expert])
    return grad


def _gather_grads_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    experts: torch.Tensor,
    d_gathered: Grad,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    op = _op(handle)
    rows = own_rows(op, experts.shape[0])
    grads = [x.new_empty(rows, x.shape[1])] if needed[0] else []
    grads += [w.new_empty(w.shape) for w in weights if needed[1]]
    return grads + ([dy.new_empty(len(op.local_experts), dy.shape[1])] if needed[2] else [])


def gather_grads_flops(dy: Any, x: Any, *args: Any, out_shape: Any) -> int:
    """Return the operations of both products; the last arguments are which, and the handle."""
    need_x, need_w, _ = args[-2]
    return int(sum((need_x, need_w))) * product_flops(*dy, x[1])


def _sum_grads_flops(dz: Any, x: Any, *args: Any, out_shape: Any) -> int:
    need_x, need_w, need_p, _ = args[-2]
    return int(sum((need_x or need_p, need_w))) * product_flops(*x, dz[1])


def _sum_grads_fake(
    dz: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    probs: Tensors,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    op = _op(handle)
    bias = (len(op.local_experts), dz.shape[1])
    grads = [x.new_empty(x.shape)] if needed[0] else []
    grads += [w.new_empty(w.shape) for w in weights if needed[1]]
    grads += [probs[0].new_empty(probs[0].shape)] if needed[2] else []
    return grads + ([dz.new_empty(bias)] if needed[3] else [])


def _gather_choices(
    experts: torch.Tensor, probs: torch.Tensor, m: int, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the choices for own rows, [own, topk], into those of all M rows."""
    op = _op(handle)
    full: tuple[torch.Tensor, torch.Tensor] = op._guarded(op.share_choices, experts, probs, m)
    return full


def _gather_choices_fake(
    experts: torch.Tensor, probs: torch.Tensor, m: int, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = experts.new_empty(m, experts.shape[1], dtype=torch.int64)
    return wide, probs.new_empty(m, probs.shape[1])


def _setup_choices(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, probs, ctx.m, ctx.handle = inputs
    ctx.op = _op(ctx.handle)
    ctx.rows = probs.shape[0]
    ctx.mark_non_differentiable(output[0])


def _backward_choices(
    ctx: Any, saved: Tensors, needed: Sequence[Any], grad_experts: Grad, grad: torch.Tensor
) -> tuple[Any, ...]:
    begin, end = own_bounds(_op(ctx.handle), ctx.m)
    padding = grad.new_zeros(ctx.rows - (end - begin), grad.shape[1])
    return None, torch.cat([grad[begin:end], padding]), None, None


define(
    "gather_choices(Tensor experts, Tensor probs, SymInt m, int handle) -> (Tensor, Tensor)",
    _gather_choices,
    _gather_choices_fake,
    ordered=True,
)
FORMULAS["gather_choices"] = Formula(_setup_choices, _backward_choices)
_SUM = (
    "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor experts, Tensor[] probs, int handle, "
    "SymInt? max_rows, Tensor[] scales)"
)
define(
    "ag_grouped_gemm(Tensor x, Tensor[] weights, Tensor[] biases, Tensor experts, "
    "bool return_gathered, int handle, SymInt? max_rows, Tensor[] scales) -> Tensor[]",
    _gather,
    _gather_fake,
    ordered=True,
    flops=_gather_flops,
)
for _name in ("grouped_gemm_rs", "grouped_gemm_ar"):
    define(f"{_name}{_SUM} -> Tensor", _sum, _sum_fake, ordered=True, flops=_sum_flops)
define(
    "ag_grouped_gemm_grads(Tensor dy, Tensor x, Tensor[] weights, Tensor experts, "
    "Tensor? d_gathered, bool[] needed, int handle) -> Tensor[]",
    _gather_grads,
    _gather_grads_fake,
    ordered=True,
    flops=gather_grads_flops,
)
define(
    "grouped_gemm_rs_grads(Tensor dz, Tensor x, Tensor[] weights, Tensor[] biases, Tensor experts, "
    "Tensor[] probs, bool[] needed, int handle) -> Tensor[]",
    _sum_grads,
    _sum_grads_fake,
    ordered=True,
    flops=_sum_grads_flops,
)


# -- formulas ------------------------------------------------------------------------------------


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, experts, return_gathered, handle, *_ = inputs
    ctx.op = _op(handle)
    ctx.dispatches = ctx.op.dispatches
    kept = output[1] if ctx.dispatches and return_gathered else x
    ctx.save_for_backward(kept, experts, *weights)
    ctx.biased, ctx.gathered, ctx.handle = len(biases), return_gathered, handle
    ctx.shape, ctx.rows = output[0].shape, x.shape[0]


def _backward_gather(
    ctx: Any, saved: Tensors, needed: Sequence[Any], grads: Sequence[Grad]
) -> tuple[Any, ...]:
    x, experts, *weights = saved
    need_w = list(needed[1])
    needs = [bool(needed[0]), any(need_w), any(needed[2])]
    dy = x.new_zeros(ctx.shape) if grads[0] is None else grads[0]
    delivered: Any = iter(())
    if any(needs):
        of_gathered = grads[1] if ctx.gathered and not ctx.dispatches else None
        options = (of_gathered, needs, ctx.handle)
        delivered = iter(call("ag_grouped_gemm_grads", dy, x, weights, experts, *options))
    dx = next(delivered) if needs[0] else None
    dws = _where(need_w, delivered)
    dbs = [next(delivered) if needs[2] else None] * ctx.biased
    padding = 0 if dx is None else ctx.rows - dx.shape[0]
    if dx is not None and padding > 0:
        dx = torch.cat([dx, dx.new_zeros(padding, dx.shape[1])])
    return dx, dws, dbs, None, None, None, None, []


def _where(needed: Sequence[bool], delivered: Any) -> list[Grad]:
    """Return the gradients of the weights, of which none or all are delivered."""
    grads = [next(delivered) if any(needed) else None for _ in needed]
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weights, biases, experts, probs, handle, *_ = inputs  # no scales: these have no backward
    ctx.op = _op(handle)
    ctx.save_for_backward(x, experts, *probs, *biases, *weights)
    ctx.biased, ctx.weighted, ctx.handle = len(biases), len(probs), handle


def _backward_sum(
    ctx: Any, saved: Tensors, needed: Sequence[Any], dz: torch.Tensor
) -> tuple[Any, ...]:
    x, experts, *rest = saved
    probs, rest = rest[: ctx.weighted], rest[ctx.weighted :]
    biases, weights = rest[: ctx.biased], rest[ctx.biased :]
    need_w = list(needed[1])
    needs = [bool(needed[0]), any(need_w), any(needed[4]), any(needed[2])]
    grads = iter(
        call("grouped_gemm_rs_grads", dz, x, weights, biases, experts, probs, needs, ctx.handle)
        if any(needs)
        else ()
    )
    dx = next(grads) if needs[0] else None
    dws = _where(need_w, grads)
    dps = [next(grads) if needs[2] else None] * ctx.weighted
    dbs = [next(grads) if needs[3] else None] * ctx.biased
    return dx, dws, dbs, None, dps, None, None, []


FORMULAS["ag_grouped_gemm"] = Formula(_setup_gather, _backward_gather)
FORMULAS["grouped_gemm_rs"] = Formula(_setup_sum, _backward_sum)
FORMULAS["grouped_gemm_ar"] = FORMULAS["grouped_gemm_rs"]
