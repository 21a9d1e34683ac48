"""The one place that touches internals of PyTorch, which move between releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._higher_order_ops.effects as _effects
import torch.distributed as dist

try:
    from torch._library.effects import EffectType
except ImportError:  # torch < 2.10
    EffectType = _effects._EffectType  # type: ignore[misc]


def register_ordered(op: Any) -> None:
    """Mark an operator overload as ordered: see ``flux.ops.library.define``."""
    _effects._register_effectful_op(op, EffectType.ORDERED)


def modes_are_active() -> bool:
    """Whether a dispatch mode (fake tensors, counters, ...) or functorch transform is in force."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Call a function of constants once while a graph is traced, instead of tracing it.

    This is torch.compiler.assume_constant_result, whose import takes a second.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function


def serves(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a process group has a backend for devices of this type."""
    return any(device.type == device_type for device in cast(Any, group)._device_types)


def decided_when_run(size: Any) -> bool:
    """Whether a size is a symbol that has no value while a graph is compiled."""
    if not isinstance(size, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))
