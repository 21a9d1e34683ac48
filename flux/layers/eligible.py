"""Decide what the layers can fuse, and log once why a call is not fused."""

from __future__ import annotations

import logging

import torch

from flux.ops import executor, torch_internals
from flux.ops.pool import pool_of

logger = logging.getLogger("flux.layers")
_said: set[str] = set()


@torch_internals.constant_in_graphs
def say_once(text: str) -> None:
    """Write a warning to the log "flux.layers", once per process and text."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def reason_unsupported(group_name: str, x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Return why flux has no fused form for these operands, or None. The same on all ranks.

    Collective at the first use of a group. torch.compile can trace it.
    """
    device = x.device.type
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"the weight is a {type(weight).__name__}"
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(device):
        return f"the input is {x.dtype} and the weight {weight.dtype}"
    reason = executor.reason_unsupported((x, weight)) or _group_cannot(group_name, device)
    if reason is not None or device == "cpu" or torch.compiler.is_compiling():
        return reason
    return "a CUDA graph is being captured" if torch.cuda.is_current_stream_capturing() else None


@torch_internals.constant_in_graphs
def _group_cannot(group_name: str, device: str) -> str | None:
    pool = pool_of(group_name)
    without_gpus = pool.reason_without_gpus  # collective, so on any device
    reason = executor.group_unsupported(pool.exchange.group, device)
    return without_gpus if reason is None and device == "cuda" else reason


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks would miss that a module is not called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, None) for kind in kinds)
