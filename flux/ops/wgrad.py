"""The weight gradient of a linear layer, delivered as Megatron-core expects.

Megatron may keep its own gradient buffer per parameter, ``weight.main_grad``, often in float32
under 16-bit weights. With gradient accumulation fusion the layer itself adds its gradient to that
buffer. It returns none, or a placeholder that the data-parallel hooks can wait for. Megatron may
also defer the weight gradient: the last layer of a pipeline keeps the operands, and Megatron
multiplies them when the pipeline drains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flux.core.tensors import check_memory

try:
    import fused_weight_gradient_mlp_cuda as apex  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    apex = None

Grad = torch.Tensor | None


def weight_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient [N, K] of a weight, for dy [M, N] and x [M, K]."""
    return dy.t() @ x


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
