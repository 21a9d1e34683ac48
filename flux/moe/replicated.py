"""The first grouped GEMM of tokens that every rank has, as without sequence parallelism.

    y[r]  = x[token of r] @ w[expert of r].T + b               local: nothing travels
    dx    = sum over ranks and choices of dy @ w               GroupedGemmAR, beside
    dw[e] = dy[rows of e].T @ x[tokens of e]

``expand_tokens`` goes before a call of GroupedGemmAR, the second GEMM of the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from flux.core.backend import OverlapHooks
from flux.core.call import rows_of_call
from flux.moe.autograd import (
    _bias_grad,
    _columns,
    _each,
    _op,
    _turned,
    _weight_grads,
    _where,
    gather_grads_flops,
)
from flux.moe.checks import GroupedChecker, Operands
from flux.moe.ops import GroupedGemmAR, Weights
from flux.moe.product import Experts, GatherProduct
from flux.moe.routing import Routing
from flux.ops.autograd import Mirrors
from flux.ops.library import product_flops
from flux.ops.transforms import Formula, call, define

Tensors = Sequence[torch.Tensor]


def expand_tokens(
    op: GroupedGemmAR,
    x: torch.Tensor,
    weights: Weights,
    experts: torch.Tensor,
    bias: torch.Tensor | None = None,
    max_rows: int | None = None,
) -> torch.Tensor:
    """Return the first product of the experts whose second one is ``op``. Local.

    All ranks have all tokens. In backward the gradient of x is summed over the ranks, while they
    multiply: call that on all ranks alike.

    Args:
        op: of the second product, from [R, K/tp] to [M, N].
        x: all tokens, [M, N].
        weights: [E, C, N] of this rank's E experts ([E, N, C] if ``op`` takes transposed weights),
            or a sequence of E weights. C columns: K/tp, or a multiple of it (gate and up) if tp
            divides K.
        experts: as for AGGroupedGemm.
        bias: [E, C], or None.
        max_rows: as for AGGroupedGemm; on GPUs the host reads ``experts`` all the same.

    Returns:
        y [R, C], sorted by expert, then by token; with ``max_rows`` as many rows, zeros behind R.

    Raises:
        ValueError, TypeError: illegal input; the peers hear of it in their next call of ``op``.
    """
    x, cast, bias = op._as_autocast(x, weights, bias)
    listed, biases = list(cast), [] if bias is None else [bias]
    op._check_tensors(x, *listed, *biases, experts)
    args = (x, listed, biases, experts, op.handle, max_rows)
    out: torch.Tensor = op._dispatched(*args, name="grouped_gemm")
    return out


def _check(op: GroupedGemmAR, x: torch.Tensor, operands: Operands) -> Routing:
    """Check the arguments of a call; return the routed rows of this rank."""
    checker, spec = cast(GroupedChecker, op._checker), op.spec
    label, (width,) = f"{spec.label}, first product", spec.n
    weights, experts = operands.weights, operands.experts
    if spec.scaling != "none":
        raise ValueError(f"{label}: experts of float8 have none, got {spec.dtype}")
    routing: Routing = checker._routed(operands)
    x = checker._tensor("x", x, spec.dtype)
    expected = [experts.shape[0], width]
    if list(x.shape) != expected:
        raise ValueError(f"{label}: x must be {expected}, got {list(x.shape)}")
    rows_of_call(spec, op.world, op.rank, x.shape[0], x.shape[0])
    shape = list(weights[0].shape) if weights else []
    own = shape[-1 if spec.transpose_weight else -2] if len(shape) > 1 else 0
    equal = spec.k % (op.world // spec.ep) == 0
    if own != checker.k and not (equal and own > 0 and own % checker.k == 0):
        text = f"{checker.k} columns" + (" or a multiple of them" if equal else "")
        raise ValueError(f"{label}: weights must have {text}, got {shape}")
    checker._weights(weights, (own, width))
    if operands.bias is not None:
        checker._expert_bias(operands.bias, own)
    return routing


def _expand(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    handle: int,
    max_rows: int | None,
) -> torch.Tensor:
    op = cast(GroupedGemmAR, _op(handle))
    bias = biases[0] if biases else None
    try:
        routing = _check(op, x, Operands(weights, bias, experts, max_rows=max_rows))
    except (TypeError, ValueError) as error:
        op._guarded(op._refuse, error)
        raise
    out = x.new_empty(max_rows or routing.rows, _columns(op, weights))
    product = GatherProduct(op.spec, Experts(_each(op, weights, transposed=False), bias, routing))
    product(x, 0, x.shape[0], out, None)
    out[routing.rows :].zero_()
    return out


def _expand_fake(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    experts: torch.Tensor,
    handle: int,
    max_rows: int | None,
) -> torch.Tensor:
    rows: Any = max_rows
    if max_rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(rows, _columns(_op(handle), weights))


def _expand_flops(x: Any, *args: Any, out_shape: Any) -> int:
    return product_flops(*out_shape, x[1])


def _grads(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    experts: torch.Tensor,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    """Return the gradients that are needed of x [M, K], the weights and the bias."""
    op = _op(handle)
    need_x, need_w, need_b = needed
    routing = op.routing(experts)
    dy = dy[: routing.rows]  # of a call with max_rows there are more
    dws: list[torch.Tensor] = []

    def multiply() -> None:
        if need_w:
            rows = x.index_select(0, routing.on(x.device)[0])
            dws.extend(_weight_grads(op, dy, rows, routing, weights))

    dxs: list[torch.Tensor] = []
    if need_x:
        m, spec = x.shape[0], op.spec
        own, parts = dy.shape[1], op.world // spec.ep
        columns = spec.k if own == op._checker.k else own * parts
        mirrors = Mirrors(op, m, x.dtype)
        mirror = _turned(op, mirrors, GroupedGemmAR, m, x.shape[1], columns, x.dtype)
        hooks = OverlapHooks(multiply)
        dxs = mirror.execute(dy, Operands(weights, None, experts), hooks=hooks)
    else:
        multiply()
    return [*dxs, *dws, *([_bias_grad(dy, routing, len(op.local_experts))] if need_b else [])]


def _grads_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: Tensors,
    experts: torch.Tensor,
    needed: Sequence[bool],
    handle: int,
) -> list[torch.Tensor]:
    grads = [x.new_empty(x.shape)] if needed[0] else []
    grads += [w.new_empty(w.shape) for w in weights if needed[1]]
    return grads + ([dy.new_empty(len(_op(handle).local_experts), dy.shape[1])] * needed[2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weights, biases, experts, ctx.handle, _ = inputs
    ctx.op = _op(ctx.handle)
    ctx.save_for_backward(x, experts, *weights)
    ctx.biased = len(biases)


def _backward(ctx: Any, saved: Tensors, needed: Sequence[Any], dy: torch.Tensor) -> tuple[Any, ...]:
    x, experts, *weights = saved
    need_w = list(needed[1])
    needs = [bool(needed[0]), any(need_w), any(needed[2])]
    delivered: Any = iter(())
    if any(needs):
        delivered = iter(call("grouped_gemm_grads", dy, x, weights, experts, needs, ctx.handle))
    dx = next(delivered) if needs[0] else None
    dws = _where(need_w, delivered)
    dbs = [next(delivered) if needs[2] else None] * ctx.biased
    return dx, dws, dbs, None, None, None


define(
    "grouped_gemm(Tensor x, Tensor[] weights, Tensor[] biases, Tensor experts, int handle, "
    "SymInt? max_rows) -> Tensor",
    _expand,
    _expand_fake,
    formula=Formula(_setup, _backward),
    flops=_expand_flops,
)
define(
    "grouped_gemm_grads(Tensor dy, Tensor x, Tensor[] weights, Tensor experts, bool[] needed, "
    "int handle) -> Tensor[]",
    _grads,
    _grads_fake,
    ordered=True,
    flops=gather_grads_flops,
)
