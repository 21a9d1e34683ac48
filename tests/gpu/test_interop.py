"""Calls on GPUs among what else torch does: streams, memory that is handed out again, the compiler,
odd tensors. What the host code does, with stand-in kernels; what comes out: test_gpu_interop.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flux
from emulated import EmulatedDevice
from flux.backends.cuda.operands import Fit
from flux.core.call import CallChecker
from flux.transport.virtual import VirtualWorld
from matrix import OPS
from reference import Inputs, Problem

BF16 = torch.bfloat16


@pytest.fixture
def world(device: EmulatedDevice) -> Iterator[VirtualWorld]:
    device.set_delay(0)
    with VirtualWorld(2, device) as ranks:
        yield ranks


def problem(op: str, n: tuple[int, ...] = (16,), **options: Any) -> Problem:
    return Problem(op, 12, n, 16, BF16, **options)


class Spy:
    """A native op that shows the arguments of each call before it is made."""

    def __init__(self, native: Any, seen: Callable[..., None]) -> None:
        self._native, self._seen = native, seen

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._native, name)
        if name not in ("ag_gemm", "gemm_rs"):
            return attribute

        def call(*arguments: Any) -> Any:
            self._seen(*arguments)
            return attribute(*arguments)

        return call


def build(world: VirtualWorld, p: Problem, seen: Callable[..., None] | None = None) -> list[Any]:
    ops = [p.build(world.rank(r), timeout_s=60.0) for r in range(2)]
    if seen is not None:
        for op in ops:
            op._backend.native = Spy(op._backend.native, seen)
    return ops


def check(world: VirtualWorld, outs: list[Any], inputs: Inputs, ops: list[Any]) -> None:
    world.device.finish()  # type: ignore[attr-defined]
    for r in range(2):
        inputs.check(outs[r] if isinstance(outs[r], list) else [outs[r]], r)
        ops[r].close()


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_call_uses_the_stream_that_is_current_at_the_call(world: VirtualWorld, op: str) -> None:
    """The stream at construction, or at an earlier identical call, does not count."""
    used: list[int] = []
    device = world.device
    ops = build(world, problem(op), lambda schedule, stream, *_: used.append(stream))
    inputs = Inputs(problem(op), 12, 2, seed=1)
    local = [inputs.local(r) for r in range(2)]
    aside = [device.driver.create_stream() for _ in range(2)]
    for streams in (world.streams, aside, world.streams):
        used.clear()
        outs = []
        for r in range(2):
            with device.on_stream(streams[r]):
                outs.append(ops[r](*local[r]))
        assert used == list(streams)
    assert all(made._backend.repeats == 2 for made in ops)
    for stream in (*aside, *world.streams):
        device.driver.synchronize(stream)
    check(world, outs, inputs, ops)
    for stream in aside:
        device.driver.destroy_stream(stream)


# -- memory ----------------------------------------------------------------------------------------


class Allocator:
    """Knows of tensors by address, and whether they are still there when a native call is made."""

    def __init__(self, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._keep = device.keep
        self.looked_at = 0
        monkeypatch.setattr(device, "keep", self.note)

    def note(self, *tensors: torch.Tensor) -> None:
        """Record operands instead of keeping them alive."""
        self._known |= {tensor.data_ptr(): weakref.ref(tensor) for tensor in tensors}

    def look(self, schedule: Any, stream: int, x: Any, operands: Any, *rest: Any) -> None:
        """All operands are there: now they may be kept, as the emulated streams read them."""
        operands = operands if isinstance(operands, list) else [operands]
        addresses = [x[0], x[3]]
        for weight, _, _, out, _, bias, scale in operands:
            addresses += [weight, out, bias, scale]
        for address in filter(None, addresses):
            if address in self._known:
                tensor = self._known[address]()
                assert tensor is not None, "memory of a tensor that is gone"
                self._keep(tensor)
                self.looked_at += 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scaling", ["none", "row"])
def test_copies_live_until_the_call_is_on_its_streams(
    world: VirtualWorld, op: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several weights with gaps, the copy of the first must not make room for the second's."""
    n = (16, 16, 16) if op == "ag_gemm" else (16,)
    dtype = torch.float8_e4m3fn if scaling == "row" else BF16
    p = Problem(op, 12, n, 16, dtype, scaling=scaling)
    allocator = Allocator(world.device, monkeypatch)  # type: ignore[arg-type]
    ops = build(world, p, allocator.look)
    inputs = Inputs(p, 12, 2, seed=3)
    outs = world.run(lambda r: inputs.call(ops[r], r, layout="strided"))
    assert allocator.looked_at >= 2 * (1 + 2 * len(n))
    check(world, outs, inputs, ops)


def test_memory_may_be_reused_in_the_order_of_the_stream(world: VirtualWorld) -> None:
    """What follows a call on its stream may overwrite all that the call was given: also x, which
    the copy stream reads."""
    device = world.device
    device.set_delay(3000)  # type: ignore[attr-defined]
    device.load_lazily(False)  # type: ignore[attr-defined]  # what follows a call is the caller's
    ops = build(world, problem("ag_gemm"))
    everything = [Inputs(problem("ag_gemm"), 12, 2, seed=s) for s in range(8)]
    x = [torch.empty(6, 16, dtype=BF16) for _ in range(2)]
    weights = [[inputs.local(r)[1:] for r in range(2)] for inputs in everything]

    def calls(r: int) -> list[Any]:
        outs = []
        for inputs, of_ranks in zip(everything, weights, strict=True):
            fresh = inputs.local(r)[0]
            device.enqueue(lambda fresh=fresh: x[r].copy_(fresh))
            outs.append(ops[r](x[r], *of_ranks[r]))
        device.enqueue(lambda: x[r].fill_(float("nan")))
        return outs

    by_rank = world.run(calls)
    device.set_delay(0)  # type: ignore[attr-defined]
    device.finish()  # type: ignore[attr-defined]
    for r in range(2):
        for inputs, got in zip(everything, by_rank[r], strict=True):
            inputs.check([got], r)
        ops[r].close()


# -- modes and the compiler ------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_compiled_call_has_no_graph_break(world: VirtualWorld, op: str) -> None:
    ops = build(world, problem(op))
    inputs = Inputs(problem(op), 12, 2, seed=1)
    local = [inputs.local(r) for r in range(2)]
    compiled = [
        torch.compile(lambda *tensors, made=made: made(*tensors), fullgraph=True, backend="eager")
        for made in ops
    ]
    with torch.no_grad():
        for _ in range(2):
            outs = world.run(lambda r: compiled[r](*local[r]))
    check(world, outs, inputs, ops)


@pytest.mark.parametrize("op", OPS)
def test_fake_results_are_on_the_device_of_x(world: VirtualWorld, op: str) -> None:
    """Fake tensors on a CUDA device need no CUDA."""
    p = problem(op)
    ops = build(world, p)
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(t.shape, dtype=BF16, device="cuda:1")
            for t in Inputs(p, 12, 2, seed=1).local(1)
        )
        handle = ops[1].handle
        if p.gathers:
            outs = torch.ops.flux.ag_gemm(x, [weight], [bias], [True], 12, True, handle, [])
        else:
            run = torch.ops.flux.gemm_rs if op == "gemm_rs" else torch.ops.flux.gemm_ar
            outs = [run(x, weight, [bias], handle, [])]
        rows = 6 if op == "gemm_rs" else 12
        assert list(outs[0].shape) == [rows, 8 if p.gathers else 16]
        assert all(out.device == torch.device("cuda", 1) and out.dtype == BF16 for out in outs)
    for made in ops:
        made.close()


# -- odd tensors -----------------------------------------------------------------------------------


def at(offset: int, dense: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins ``offset`` elements after an aligned address."""
    room = torch.empty(dense.numel() + 64, dtype=dense.dtype)
    start = (-room.data_ptr() % 64) // dense.itemsize + offset
    return room[start : start + dense.numel()].view(dense.shape).copy_(dense)


@pytest.mark.parametrize("op", OPS)
def test_operands_begin_where_kernels_can_load(world: VirtualWorld, op: str) -> None:
    """A kernel that loads 16 bytes at once is given copies of what lies elsewhere."""
    seen: list[int] = []

    def look(schedule: Any, stream: int, x: Any, operands: Any, *rest: Any) -> None:
        (operand,) = operands if isinstance(operands, list) else [operands]
        seen.extend([operand[0], operand[1] * 2, operand[5]])
        seen.extend([] if op == "ag_gemm" else [x[0], x[1] * 2])

    ops = build(world, problem(op), look)
    for made in ops:
        made._backend._fit = Fit(8)
    inputs = Inputs(problem(op), 12, 2, seed=1)
    local = [[None if t is None else at(3, t) for t in inputs.local(r)] for r in range(2)]
    for _ in range(2):  # a copy is not remembered in place of what it is of
        outs = world.run(lambda r: ops[r](*local[r]))
    local = [[at(8, t) for t in of_rank] for of_rank in local]
    outs = world.run(lambda r: ops[r](*local[r]))
    assert all(made._backend.repeats == 0 for made in ops)
    outs = world.run(lambda r: ops[r](*local[r]))
    assert all(made._backend.repeats == 1 for made in ops)
    moved = [[at(3, of_rank[0]), *of_rank[1:]] for of_rank in local]
    outs = world.run(lambda r: ops[r](*moved[r]))  # alike but for the address of x
    assert all(made._backend.repeats == (2 if op == "ag_gemm" else 1) for made in ops)
    assert seen and all(number % 16 == 0 for number in seen)
    check(world, outs, inputs, ops)


def test_operands_that_kernels_cannot_load_are_copied() -> None:
    fit, dense = Fit(8), at(0, torch.zeros(6, 16, dtype=BF16))
    assert fit.tensor(dense) is dense
    assert fit.fits(dense[1:]) and fit.fits(dense[:, 8:]) and fit.fits(dense[0])
    for other in (dense[:, 1:9], dense.t(), dense[:, ::2], at(1, dense), dense[0, 1:]):
        copy = fit.tensor(other)
        assert not fit.fits(other) and fit.fits(copy) and torch.equal(copy, other)
    odd = at(0, torch.zeros(6, 15, dtype=BF16))  # no copy could help: kernels for 15 load less
    assert fit.tensor(odd) is odd


def test_tensors_on_another_device_are_refused() -> None:
    """Also where it is another GPU, as it may be on one rank only."""
    spec = flux.core.spec.OpSpec(flux.core.knobs.Op.gemm_rs, 12, (16,), 16, BF16, False, "sum")
    checker = CallChecker(spec, 2, 1, torch.device("cuda", 1))
    x, weight = torch.zeros(12, 8, dtype=BF16), torch.zeros(16, 8, dtype=BF16)
    with pytest.raises(ValueError, match=r"GemmRS: x must be on cuda:1, got cpu"):
        checker.check(x, [weight], [None], None)
    in_memory = mock.patch("flux.core.call.reason_without_memory", return_value=None)
    with FakeTensorMode(allow_non_fake_inputs=True), in_memory:  # fake, in place of a second GPU
        here, there = (torch.empty(12, 8, dtype=BF16, device=f"cuda:{i}") for i in (1, 0))
        with pytest.raises(ValueError, match=r"GemmRS: x must be on cuda:1, got cuda:0"):
            checker.check(there, [weight], [None], None)
        with pytest.raises(ValueError, match=r"GemmRS: weight must be on cuda:1, got cpu"):
            checker.check(here, [weight], [None], None)


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_refuses_breaks_the_call(world: VirtualWorld, op: str) -> None:
    """Peers wait for what was begun, so it must not look as if nothing had happened."""
    ops = build(world, problem(op))
    inputs = Inputs(problem(op), 12, 2, seed=1)
    library = world.device.library  # type: ignore[attr-defined]
    library.emulator_refuse_launches(1)
    try:
        with (
            world.device.on_stream(world.streams[0]),
            pytest.raises(RuntimeError, match="refused: illegal arguments"),
        ):
            inputs.call(ops[0], 0)
    finally:
        library.emulator_refuse_launches(0)
    assert ops[0].closed
    ops[1].close()
