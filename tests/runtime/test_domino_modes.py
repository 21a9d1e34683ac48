"""Each slice has its own modes of torch, and the caller gets its own back."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from flux.runtime.dhelix.strands import Strands
from flux.runtime.domino.module import ORDERS, Domino, Dropout
from flux.runtime.modes import warning_handler
from flux.runtime.slices import before_wait, current_slice, running

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
    for order in ORDERS:
        check_modes([mode, mode, mode], order)
    with torch.inference_mode():
        check_modes([others, mode, others])
    with contextlib.suppress(RuntimeError), mode():  # where saved tensors may have no hooks
        check_modes([others, torch.no_grad, others])


def test_contexts_of_python_are_the_callers_at_first() -> None:
    token = setting.set(5)
    seen = Domino(Call(lambda x, _: turn(x) * setting.get()), 2)(torch.ones(4, 2))
    setting.reset(token)
    assert torch.equal(seen, torch.full((4, 2), 5.0))


class Call(nn.Module):
    """Calls a function, which may use this module's linear layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.linear)


def with_checkpoint(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return turn(torch.tanh(linear(turn(x))))

    x = checkpoint(part, x, use_reentrant=True)
    with torch.no_grad():
        scale = turn(linear(turn(x))).mean(1, keepdim=True)
    return turn(checkpoint(part, x * scale, use_reentrant=False))


def with_autocast(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """Use one weight with gradients, without and in two dtypes, while others do it otherwise."""
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = turn(linear(turn(x)))
    with torch.autocast("cpu", torch.float16):
        second = turn(linear(turn(x)))
    with torch.autocast("cpu", torch.bfloat16):
        third = turn(linear(turn(x)))
    assert (first.dtype, second.dtype, third.dtype) == (torch.bfloat16, torch.half, torch.bfloat16)
    return first.float() + second.float() + third.float()


def with_backward(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """Run a backward, whose recomputation takes no turns, and a generator, inside of a slice."""

    @torch.no_grad()
    def twice() -> Iterator[torch.Tensor]:
        for _ in range(2):
            yield turn(linear(x))

    y = checkpoint(lambda x: turn(linear(turn(x))), turn(x), use_reentrant=False)
    (slope,) = torch.autograd.grad((y**2).sum(), y, create_graph=True)
    (slope * turn(y)).sum().backward(retain_graph=True)
    return y + sum(twice())


@pytest.mark.parametrize(
    "function, tolerance",
    [(with_checkpoint, 1e-5), (with_autocast, 0.1), (with_backward, 1e-5)],
    ids=["checkpoint", "autocast", "backward"],
)
def test_slices_compute_what_the_whole_batch_does(
    function: Callable[..., torch.Tensor], tolerance: float
) -> None:
    torch.manual_seed(1)
    body, results, handler = Call(function), [], warning_handler()
    for model in (body, Domino(body, 2), Domino(Domino(body, 2), 2)):
        body.zero_grad()
        x = torch.linspace(-1, 1, 16).view(8, 2).requires_grad_()
        y = model(x)
        (y**2).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in body.parameters())])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=tolerance, atol=tolerance)
    assert warning_handler() == handler  # one of a slice's stack would be called after its end


def test_what_a_slice_raises_on_its_way_out_does_not_hide_the_first_error() -> None:
    def body(x: torch.Tensor, _: Any) -> torch.Tensor:
        if current_slice() == 1:
            turn(x)
            raise ValueError("slice 1")
        with torch.inference_mode():
            try:
                return turn(turn(turn(x)))
            finally:
                raise KeyError(f"slice {current_slice()}")

    before = probe()
    with pytest.raises(ValueError, match="slice 1") as raised:
        Domino(Call(body), 3, order="grouped")(torch.ones(6, 2))
    others = raised.value.__context__, cast(Any, raised.value.__context__).__context__
    assert sorted(map(str, others)) == ["'slice 0'", "'slice 2'"]
    assert probe() == before


class Exchanged(nn.Module):
    """Calls its layer with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Call(lambda x, linear: turn(linear(turn(x))))
        self.other = {name: torch.ones_like(p) for name, p in self.body.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.body, self.other, x)


TRANSFORMS: dict[str, Callable[..., torch.Tensor]] = {
    "grad": lambda x, _: torch.func.grad(lambda w: turn(w * x).sum())(x),
    "vmap": lambda x, _: torch.func.vmap(turn)(x),
}


@pytest.mark.parametrize("name", [*TRANSFORMS, "functional_call"])
def test_slices_cannot_wait_in_transforms(name: str) -> None:
    model = Exchanged() if name == "functional_call" else Call(TRANSFORMS[name])
    before, parameters = probe(), list(model.parameters())
    with pytest.raises(RuntimeError, match="cannot wait for a collective inside of a transform"):
        Domino(model)(torch.ones(4, 2))
    assert probe() == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    if name == "functional_call":  # around all slices it works
        domino = Domino(cast(Exchanged, model).body)
        ones = {name: torch.ones_like(p) for name, p in domino.named_parameters()}
        found = torch.func.functional_call(domino, ones, torch.ones(4, 2))
        assert torch.equal(found, torch.full((4, 2), 3.0))


# -- strands: a forward and a backward by turns ----------------------------------------------------


def strand(mode: Callable[[], Any], fails: bool) -> None:
    before = probe()
    with mode():
        inside = probe()
        for _ in range(3):
            before_wait()
            assert probe() == inside
        if fails:
            raise KeyError("in a strand")
    before_wait()
    assert probe() == before


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_strands_begin_with_the_callers_modes_and_keep_their_own(name: str) -> None:
    with MODES[name]():
        before = probe()
        inherited = Strands().run(probe, before_wait)
        assert inherited == before
    mode, before = MODES[name], probe()
    Strands("BF").run(lambda: strand(mode, False), lambda: strand(torch.no_grad, False))
    with pytest.raises(KeyError):
        Strands("BF").run(lambda: strand(mode, False), lambda: strand(mode, True))
    assert probe() == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_strand_computes_the_masks_of_its_forward(reentrant: bool) -> None:
    own, torchs = Dropout(0.5, 61), nn.Dropout(0.5)

    def part(x: torch.Tensor) -> torch.Tensor:
        for drop in (torchs, own, torchs):
            before_wait()
            x = drop(x * 1)
        return x

    results = []
    for strands in (False, True):
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(part, x, use_reentrant=reentrant)
        forward, backward = lambda: part(torch.ones(64)), y.sum().backward
        if strands:
            other = Strands("BF").run(forward, backward)
        else:
            backward()
            other = forward()
        results.append([y.detach(), x.grad, other, torch.rand(2)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
