"""The one place that touches internals of PyTorch, which move between releases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch._higher_order_ops.effects as _effects
import torch.distributed as dist
from torch._C import _functorch, _TorchDispatchModeKey
from torch._C._dynamo import eval_frame
from torch._library.autograd import Info, make_autograd_impl
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

try:
    from torch._library.effects import EffectType
except ImportError:  # torch < 2.10
    EffectType = _effects._EffectType  # type: ignore[misc]


def register_ordered(op: Any) -> None:
    """Mark an operator overload as ordered: see ``flux.ops.library.define``."""
    _effects._register_effectful_op(op, EffectType.ORDERED)


def has_kernel(name: str, key: str) -> bool:
    """Whether an op, NAMESPACE::NAME.OVERLOAD, needs no kernel for a dispatch key.

    It has one, also where there is no such op.
    """
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
    except RuntimeError:
        return True


def autograd_kernel(op: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel for an Autograd key of an op overload, registered ``with_keyset``.

    It runs the kernel of the device, as torch.library.register_autograd does for all devices.
    """
    return make_autograd_impl(op, Info(backward, None))


def unregister(library: torch.library.Library) -> None:
    """Remove the registrations of a library."""
    cast(Any, library)._destroy()


_TRACED = (FakeTensor, FunctionalTensor)
_TRACING = (
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FUNCTIONAL,
)


def modes_are_active() -> bool:
    """Whether something watches or transforms calls.

    That is a mode (fake tensors, counters, ...), a transform of torch.func, or forward-mode
    differentiation. A default device does not count: what a call allocates names its device.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _functions_are_watched())
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _functions_are_watched() -> bool:
    """Whether there is a mode for functions that is more than a default device."""
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not all(isinstance(mode, DeviceContext) for mode in stack)


def transforms_are_active() -> bool:
    """Whether a transform of torch.func is in force: grad, vjp, vmap, jvp, functionalize."""
    return _functorch.peek_interpreter_stack() is not None


def transform_needs_a_rule() -> bool:
    """Whether the innermost transform of torch.func differentiates or vectorizes."""
    innermost = _functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() != _functorch.TransformType.Functionalize


NO_FORWARD_MODE = (
    "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp, jacfwd) would lose "
    "the tangents, for which flux has no rule: use reverse mode, or close the level"
)


def check_no_forward_mode(name: str) -> None:
    """Raise ValueError inside forward-mode differentiation, also that of torch.func.jvp."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        raise ValueError(f"{name}: {NO_FORWARD_MODE}")


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors is traced, transformed, or computed by shape only.

    That is in torch.compile's graphs and in others (make_fx, torch.export), inside transforms of
    torch.func, and where only shapes are computed (fake and meta tensors). Then layers use the ops
    of graphs, which have fake kernels, and need no op of their own.
    """
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None:
        return True
    if torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACING
    ):
        return True
    for tensor in tensors:
        if tensor is not None and (isinstance(tensor, _TRACED) or tensor.is_meta):
            return True
    return False


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing their module, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Make real tensors, on the device and as the code says, whatever modes are active.

    The body may make memory that lives longer than the modes.
    """
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


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


def saved_tensors_have_hooks() -> bool:
    """Whether a checkpoint, or another hook, takes what a forward saves for its backward."""
    return cast(Any, torch._C._autograd)._top_saved_tensors_default_hooks(True) is not None


def constant_in_graphs(function: F) -> F:
    """Call a function of constants once while a graph is traced, instead of tracing it.

    This is torch.compiler.assume_constant_result, whose import takes a second.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function


def never_compiled(function: F) -> F:
    """Have torch.compile run a function, and what that calls, as Python does.

    Behind a graph break the interpreter still hands frames to the compiler. This is
    torch.compiler.disable, at no cost to calls, and without its import.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(cast(Any, function).__code__, strategy)
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
