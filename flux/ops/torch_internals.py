"""The one place that touches internals of PyTorch, which move between releases."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch._higher_order_ops.effects as _effects
import torch.distributed as dist

try:
    from torch._library.effects import EffectType
except ImportError:  # torch < 2.10
    EffectType = _effects._EffectType  # type: ignore[misc]


def register_ordered(op: Any) -> None:
    """Mark an operator overload as ordered: see ``flux.ops._library.keep_in_order``."""
    _effects._register_effectful_op(op, EffectType.ORDERED)


def modes_are_active() -> bool:
    """Whether a dispatch mode (fake tensors, counters, ...) or functorch transform is in force."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def serves(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a process group has a backend for devices of this type."""
    return any(device.type == device_type for device in cast(Any, group)._device_types)
