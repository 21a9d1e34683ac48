"""Each slice has its own modes of torch, and the caller gets its own back."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from flux.plan.domino import ORDERS, Domino
from flux.plan.slices import current_slice, running
from flux.plan.strands import Strands

setting = contextvars.ContextVar("setting", default=0)


def turn(x: torch.Tensor) -> torch.Tensor:
    """Let the other slices go on, as a linear layer does behind a launch."""
    slices = running()
    if slices is not None:
        slices.switch("launched")
    return x


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def variable() -> Iterator[None]:
    token = setting.set(1)
    try:
        yield
    finally:
        setting.reset(token)


def pack(x: torch.Tensor) -> torch.Tensor:
    return x


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "single thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of half": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(pack, pack),
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "dtype": lambda: default_dtype(torch.float64),
    "device": lambda: default_device("meta"),
    "with device": lambda: torch.device("meta"),
    "function mode": _Mode,
    "no functions": torch._C.DisableTorchFunction,
    "flops": lambda: FlopCounterMode(display=False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": deterministic,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "early stop": lambda: set_checkpoint_early_stop(False),
    "warnings": warnings.catch_warnings,
    "variable": variable,
    "forked": lambda: torch.random.fork_rng(devices=[]),
}


def probe() -> list[Any]:
    """Return all modes that the contexts above set."""
    from torch.utils import checkpoint as checkpoints

    c: Any = torch._C
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        c._is_multithreading_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        c._autograd._top_saved_tensors_default_hooks(True),
        c._autograd._saved_tensors_hooks_is_enabled(),
        torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.empty(0).device if c._is_torch_function_enabled() else None,
        c._is_torch_function_enabled(),
        [c._get_function_stack_at(at) for at in range(c._len_torch_function_stack())],
        [c._get_dispatch_stack_at(at) for at in range(c._len_torch_dispatch_stack())],
        torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        checkpoints._enable_checkpoint_early_stop,
        id(warnings.filters),
        setting.get(),
        str(c._dispatch_tls_local_include_set()),
        str(c._dispatch_tls_local_exclude_set()),
    ]


class Within(nn.Module):
    """The identity, which takes turns inside and outside of a context.

    Args:
        contexts: those of the slices.
        fails: the slice that raises inside of its context, -1: none does.
    """

    def __init__(self, contexts: list[Callable[[], Any]], fails: int = -1) -> None:
        super().__init__()
        self.contexts, self.fails = contexts, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = probe()
        for _ in range(1 + current_slice()):
            turn(x)
        assert probe() == before
        with self.contexts[current_slice()]():
            inside = probe()
            for _ in range(3):
                turn(x)
                assert probe() == inside
                if self.fails == current_slice():
                    raise KeyError("in a slice")
        assert probe() == before
        turn(x)
        assert probe() == before
        return x


def check_modes(contexts: list[Callable[[], Any]], order: str = "staggered") -> None:
    """Run slices inside of contexts, in which each of them may fail."""
    before = probe()
    for fails in range(-1, len(contexts)):
        model = Domino(Within(contexts, fails), len(contexts), order=order)
        ends = pytest.raises(KeyError) if fails >= 0 else contextlib.nullcontext()
        with ends:
            model(torch.ones(6, 2))
        assert probe() == before


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_slices_have_modes_of_their_own(name: str) -> None:
    mode, others = MODES[name], contextlib.nullcontext
    for outer in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with outer():
            for order in ORDERS:
                check_modes([mode, mode, mode], order)
            check_modes([others, mode, others])
    with contextlib.suppress(RuntimeError), mode():  # the caller's own mode; hooks may be forbidden
        check_modes([others, MODES["no_grad"], others])
