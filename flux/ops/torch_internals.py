"""The one place that touches internals of PyTorch, which move between releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._higher_order_ops.effects as _effects
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

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


class _FirstOperand(TorchDispatchMode):
    """Takes the first operand of an addmm, which is not computed."""

    operand: torch.Tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.default:
            return func(*args, **(kwargs or {}))  # the cast, where the cache has none
        self.operand = args[0]
        return args[1]


def behind_autocast(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what an addmm that adds to ``parameter`` [N, K] or [K] gets from autocast's cache.

    Autograd saves nothing for this addmm, so hooks on saved tensors do not see it.
    """
    columns = parameter.shape[-1]
    nothing = torch.empty((0, columns), dtype=dtype, device=parameter.device)
    rows = parameter.shape[0] if parameter.dim() == 2 else 1
    taken = cast(Any, _FirstOperand)()
    with taken:
        torch.addmm(parameter, nothing.new_empty((rows, 0)), nothing)
    operand: torch.Tensor = taken.operand
    return operand


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
