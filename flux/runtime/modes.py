"""The modes of torch that each slice and each strand has for itself.

torch keeps modes in the thread (gradients, autocast, hooks) or in the process (default dtype, the
generator). A ``with`` block saves what it finds and puts it back. Slices that take turns inside of
such blocks leave them in another order than they entered them, so each would put back what another
one has set. ``kept_modes`` therefore surrounds every change from one slice to another. Strands are
threads: they share ``ModesOfProcess`` only, and one begins with ``ModesOfThread`` of its caller.

Two mechanisms cover all modes. Guards of torch hold all of autograd's state and all dispatch keys,
which are gradients, inference mode and what autocast is on for. Everything else is a value that can
be read and written: ``_of_thread`` and ``_of_process`` list them.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.utils import stateless

T = TypeVar("T")
_C: Any = torch._C

# torch's functions for Python put a warning handler on their stack, and take it off at their end.
# Slices end such functions in any order: the last one would put back a handler whose stack is gone.
_c10 = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
warning_handler = _c10._ZN3c1012WarningUtils19get_warning_handlerEv
warning_handler.restype = ctypes.c_void_p
_set_warning_handler = _c10._ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE
_set_warning_handler.argtypes = [ctypes.c_void_p]
_set_warning_handler.restype = None


class _Value(NamedTuple):
    """A mode that is a value."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _pair(name: str, setter: str = "") -> _Value | None:
    """Return a value of torch._C that has a getter and a setter; None if this torch has not."""
    read = getattr(_C, f"_get_{name}", None) or getattr(_C, f"_is_{name}", None)
    write = getattr(_C, f"_set_{setter or name}", None)
    return None if read is None or write is None else _Value(read, write)


def _attribute(module: str, name: str) -> _Value | None:
    """Return a variable of a module; None if this version has not."""
    owner = importlib.import_module(module)
    if not hasattr(owner, name):
        return None
    return _Value(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))


def _write_function_stack(modes: Sequence[Any]) -> None:
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def _write_dispatch_stack(modes: Sequence[Any]) -> None:
    for _ in range(_C._len_torch_dispatch_stack()):
        _C._pop_torch_dispatch_stack(None)
    for mode in modes:
        _C._push_on_torch_dispatch_stack(mode)


def _pop_saved_hooks() -> list[Any]:
    pairs = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        pairs.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    return pairs[::-1]


def _saved_hooks() -> tuple[list[Any], str | None]:
    """Return the hooks of saved tensors, and why they are forbidden if they are."""
    message = _C._autograd._saved_tensors_hooks_get_disabled_error_message()
    pairs = _pop_saved_hooks()
    _push_saved_hooks(pairs, message)
    return pairs, message


def _push_saved_hooks(pairs: Sequence[Any], message: str | None) -> None:
    if pairs:  # they cannot be pushed while they are forbidden
        _C._autograd._saved_tensors_hooks_enable()
    for pair in pairs:
        _C._autograd._push_saved_tensors_default_hooks(*pair)
    if message is not None:
        _C._autograd._saved_tensors_hooks_disable(message, False)


def _write_saved_hooks(hooks: tuple[list[Any], str | None]) -> None:
    _pop_saved_hooks()
    _C._autograd._saved_tensors_hooks_enable()
    _push_saved_hooks(*hooks)


_DEVICES: tuple[str, ...] = tuple(_C._autocast_supported_devices())


def _autocast() -> tuple[list[Any], bool, int]:
    """Return autocast's dtypes, whether it keeps casts, and how many regions are open."""
    dtypes = list(map(_C.get_autocast_dtype, _DEVICES))
    torch.autocast_increment_nesting()
    return dtypes, torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting()


def _write_autocast(state: tuple[list[Any], bool, int]) -> None:
    dtypes, keeps, regions = state
    for kind, dtype in zip(_DEVICES, dtypes, strict=True):
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(keeps)
    opened = torch.autocast_increment_nesting()
    for _ in range(opened, regions):
        torch.autocast_increment_nesting()
    for _ in range(regions, opened):
        torch.autocast_decrement_nesting()


@functools.cache
def _of_autograd() -> list[_Value]:
    """Return what the guard of inference mode keeps and resets."""
    values = [
        _Value(torch.is_grad_enabled, _C._set_grad_enabled),
        _pair("fwd_grad_enabled"),
        _pair("multithreading_enabled"),
        _pair("view_replay_enabled"),
        _pair("grad_layout_enforcement_enabled"),
    ]
    return [value for value in values if value]


@functools.cache
def _of_thread() -> list[_Value]:
    eval_frame: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    devices = torch._GLOBAL_DEVICE_CONTEXT
    values = [
        _Value(
            lambda: [_C._get_function_stack_at(at) for at in range(_C._len_torch_function_stack())],
            _write_function_stack,
        ),
        _pair("torch_function_state"),
        _Value(
            lambda: [_C._get_dispatch_stack_at(at) for at in range(_C._len_torch_dispatch_stack())],
            _write_dispatch_stack,
        ),
        _Value(_saved_hooks, _write_saved_hooks),
        _Value(_autocast, _write_autocast),
        _Value(
            lambda: getattr(devices, "device_context", None),
            lambda context: setattr(devices, "device_context", context),
        ),
        _Value(
            lambda: torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
            lambda stream: stream is None or torch.cuda.set_stream(stream),  # and its device
        ),
        _Value(eval_frame.get_eval_frame_callback, eval_frame.set_eval_frame),
    ]
    return [value for value in values if value]


def _write_filters(state: tuple[int, Any]) -> None:
    warnings.filters = state[1]
    if (mutated := getattr(warnings, "_filters_mutated", None)) is not None:
        mutated()  # else Python goes on by what it has looked up before


_DISPATCH = "torch.utils._python_dispatch"


@functools.cache
def _of_process() -> list[_Value]:
    guards: Any = importlib.import_module("torch._C._dynamo.guards")
    flag = _attribute(_DISPATCH, "_is_in_any_mode_without_ignore_compile_internals")
    tell = getattr(guards, "set_is_in_mode_without_ignore_compile_internals", None)
    values = [
        _Value(torch.get_default_dtype, torch.set_default_dtype),
        _Value(
            lambda: (
                _C._get_deterministic_algorithms(),
                _C._get_deterministic_algorithms_warn_only(),
            ),
            lambda state: _C._set_deterministic_algorithms(state[0], warn_only=state[1]),
        ),
        _pair("deterministic_fill_uninitialized_memory"),
        _Value(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda state: torch.autograd.set_detect_anomaly(*state),
        ),
        *(
            _pair(f"{kernel}_sdp_enabled", f"sdp_use_{kernel}")
            for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
        ),
        _pair("sdp_priority_order"),
        _pair("cudnn_enabled"),
        _pair("cudnn_benchmark"),
        _pair("cudnn_deterministic"),
        _pair("mkldnn_enabled"),
        _pair("mkldnn_deterministic"),
        _pair("dtensor_allow_implicit_replication"),
        _attribute("torch.utils._device", "CURRENT_DEVICE"),
        _attribute(_DISPATCH, "_is_in_torch_dispatch_mode"),
        _attribute(_DISPATCH, "_is_in_non_infra_torch_dispatch_mode"),
        flag,
        flag and tell and _Value(flag.read, tell),
        _attribute("torch.utils.checkpoint", "_checkpoint_debug_enabled"),
        _attribute("torch.utils.checkpoint", "_enable_checkpoint_early_stop"),
        _attribute("torch.autograd.graph", "_allow_mutation_on_saved_tensors_enabled"),
        # catch_warnings puts another list in place of the list.
        _Value(lambda: (id(warnings.filters), warnings.filters), _write_filters),
        _attribute("warnings", "showwarning"),
    ]
    return [value for value in values if value]


def _generators() -> list[torch.Generator]:
    """Return torch's generators of the CPU and of the GPU in use."""
    generators: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def generator_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    """Return torch's generators and their states."""
    return [(generator, generator.get_state()) for generator in _generators()]


def set_generator_states(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Let generators go on from where they were."""
    for generator, state in states:
        generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Begin a stream of random numbers in torch's generators."""
    for generator in _generators():
        generator.manual_seed(seed)


def _read(values: Sequence[_Value]) -> list[Any]:
    return [value.read() for value in values]


def _write(values: Sequence[_Value], states: Sequence[Any]) -> None:
    for value, state in zip(values, states, strict=True):
        if value.read() != state:
            value.write(state)


class _Guarded(NamedTuple):
    """Autograd's state and the dispatch keys."""

    inference: bool
    included: Any
    excluded: Any
    autograd: list[Any]

    @classmethod
    def read(cls) -> _Guarded:
        """Return those of this thread."""
        included = _C._dispatch_tls_local_include_set()
        excluded = _C._dispatch_tls_local_exclude_set()
        return cls(torch.is_inference_mode_enabled(), included, excluded, _read(_of_autograd()))

    def put_on(self, guards: contextlib.ExitStack) -> None:
        """Set them; the guards put back what was there, whatever has been set since."""
        guards.enter_context(_C._InferenceMode(self.inference))
        guards.enter_context(_C._ForceDispatchKeyGuard(self.included, self.excluded))
        for value, state in zip(_of_autograd(), self.autograd, strict=True):
            value.write(state)


class ModesOfProcess:
    """The modes that all threads share, and the random numbers, as they are when this is made."""

    def __init__(self) -> None:
        self._states, self._generators = _read(_of_process()), generator_states()

    def put_back(self) -> None:
        """Set them again, whatever has set others since."""
        _write(_of_process(), self._states)
        set_generator_states(self._generators)


@contextlib.contextmanager
def kept_modes() -> Iterator[None]:
    """Put all modes back to what they were, whatever runs inside sets, in whatever order."""
    process, guarded, states = ModesOfProcess(), _Guarded.read(), _read(_of_thread())
    casts, handler = _casts(), warning_handler()
    with contextlib.ExitStack() as guards:
        guarded.put_on(guards)
        try:
            yield
        finally:
            _set_warning_handler(handler)
            differs = _casts() != casts
            process.put_back()
            _write(_of_thread(), states)  # before the guards: stacks change the dispatch keys
            if differs:
                torch.clear_autocast_cache()


def _casts() -> tuple[Any, ...]:
    """Return what decides how autocast casts a weight: it keeps one cast of each weight."""
    dtypes = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtypes


class ModesOfThread:
    """The modes of the thread that makes this, for another thread."""

    def __init__(self) -> None:
        if transform_depth() != (0, 0):
            raise RuntimeError(
                "no other thread can go on inside of a transform of torch.func or forward_ad"
            )
        self._guarded, self._states = _Guarded.read(), _read(_of_thread())
        self._context = contextvars.copy_context()

    def run(self, body: Callable[[], T]) -> T:
        """Run something in this thread with these modes."""

        def with_modes() -> T:
            with kept_modes(), contextlib.ExitStack() as guards:
                self._guarded.put_on(guards)
                _write(_of_thread(), self._states)
                return body()

        return self._context.run(with_modes)


def transform_depth() -> tuple[int, int]:
    """Return how many transforms of torch.func, and levels of forward_ad, are being computed."""
    return _C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level + 1


def check_transforms(depth: tuple[int, int]) -> None:
    """Check that the calling slice can wait here for others.

    Raises:
        RuntimeError: it has begun a transform, which the others would run inside of, too; or it is
            in ``functional_call``, which has exchanged parameters that the others use.
    """
    if transform_depth() != depth or _in_functional_call():
        raise RuntimeError(
            "a slice cannot wait for a collective inside of a transform of torch.func "
            "(grad, vmap, functional_call) or torch.autograd.forward_ad that it began: the others "
            "would run inside, too. Call it around all of them"
        )


def _in_functional_call() -> bool:
    """Return whether a caller, in this greenlet, is torch.func.functional_call."""
    code = stateless._functional_call.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
