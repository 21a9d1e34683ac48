"""The weight gradient of a linear layer, and where Megatron-core wants it to go.

Megatron may keep a gradient buffer of its own per parameter, ``weight.main_grad``, often in float32
under 16-bit weights. With gradient accumulation fusion the layer adds its gradient to that buffer
itself and returns none, or a placeholder that the data-parallel hooks can wait for. Or it puts the
weight gradient off: the last layer of a pipeline keeps the operands, and Megatron multiplies them
when the pipeline drains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

try:
    import fused_weight_gradient_mlp_cuda as apex  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    apex = None

Grad = torch.Tensor | None


@dataclass(frozen=True)
class WeightGrad:
    """What becomes of a layer's weight gradient.

    Attributes:
        accumulate: add it to ``weight.main_grad`` (gradient_accumulation_fusion).
        deferred: put the gradient of the output there instead of computing a weight gradient.
        deferral_limit: as long as ``deferred`` holds fewer than these; 0 for no limit.
    """

    accumulate: bool = False
    deferred: list[torch.Tensor] | None = None
    deferral_limit: int | None = 0

    def defer(self, dy: torch.Tensor) -> bool:
        """Put the weight gradient off, if it is to be; the output's gradient is kept for it."""
        limit, kept = self.deferral_limit, self.deferred
        if kept is None or (limit and len(kept) >= limit):
            return False
        kept.append(dy)
        return True

    def in_parts(self, dtype: torch.dtype) -> bool:
        """Whether the gradient may be the sum of several products: of 16-bit ones each would be
        rounded, and main_grad takes one."""
        return not self.accumulate and dtype in (torch.float32, torch.float64)

    def deliver(
        self, weight: Any, main_grad: Grad, dy: torch.Tensor | None, x: torch.Tensor | None
    ) -> Grad:
        """The gradient to return for ``weight``, after ``main_grad`` has got its part.

        Args:
            weight: the parameter, whose attributes Megatron reads and writes.
            main_grad: its buffer, as it was in forward.
            dy, x: [M, N], [M, K]; None when the gradient has been put off.
        """
        if not self.accumulate:
            return None if dy is None or x is None else (dy.t() @ x).to(weight.dtype)
        weight.main_grad = main_grad
        if dy is not None and x is not None:
            if main_grad is None and not hasattr(weight, "__fsdp_param__"):
                raise RuntimeError("gradient_accumulation_fusion: the weight has no main_grad")
            if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP makes the buffer when asked
                weight.main_grad = weight.get_main_grad()
                weight.main_grad.zero_()
            accumulate(weight.main_grad, dy, x)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # Hooks on the gradient must run now, in the thread of the backward pass, so there has to be
        # one. Nobody reads it, unless zero_out_wgrad says that somebody adds it up.
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        make = torch.zeros if zero else torch.empty
        return make(weight.main_grad.shape, dtype=weight.dtype, device=weight.device)


def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """``main_grad += dy.T @ x``, in float32 where main_grad is.

    Raises:
        RuntimeError: main_grad is neither float32 nor of a 16-bit dtype (nor that of dy).
    """
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
        main_grad.addmm_(dy.t(), x)
    elif dy.is_cuda and kind == torch.float32:
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
    else:
        wide = torch.promote_types(kind, dy.dtype)
        main_grad.add_(dy.t().to(wide) @ x.to(wide))
