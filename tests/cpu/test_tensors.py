"""Tensors that are lazy or have no memory, and modes of PyTorch, in calls of every op."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux
from flux.core.tensors import address_of, bytes_needed, reason_without_memory, settled
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools
from harness import run_ranks

M, N, K = 8, 16, 12
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _resized(nbytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    return make


class _Wrapper(torch.Tensor):
    """A subclass without memory of its own, on which our ops are not implemented."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"no {func}")


ABSENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "freed": _resized(0),
    "too short": _resized(8),
    "sparse": lambda tensor: tensor.to_sparse(),
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "meta": lambda tensor: tensor.to("meta"),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor]),
    "functional": torch._to_functional_tensor,
    "wrapper": _Wrapper,
}
LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda tensor: torch._neg_view(-tensor),
    "of a conjugate": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "of zeros": lambda tensor: torch._efficientzerotensor(tuple(tensor.shape)),
}


def _ops(world: int, **options: Any) -> Iterator[tuple[Any, Operands]]:
    for kind in (flux.AGGemm, flux.GemmRS, flux.GemmAR):
        torch.manual_seed(0)
        shapes = ((M, K // world), (N, K // world), (N,))
        if kind is flux.AGGemm:
            shapes = ((M // world, K), (N // world, K), (N // world,))
        operands = tuple(torch.randn(*shape) for shape in shapes)
        with kind(max_m=M, n=N, k=K, timeout_s=20.0, **options) as op:
            yield op, operands  # type: ignore[misc]


def _absent(rank: int, world: int) -> None:
    for op, operands in _ops(world):
        want = op(*operands)
        for name, make in ABSENT.items():
            for position in range(3):
                mixed = list(operands)
                if rank == position % world:  # the others have to hear of it
                    mixed[position] = make(mixed[position])
                with pytest.raises((ValueError, NotImplementedError)) as caught:
                    op(*mixed)
                assert rank == position % world or f"rank {position % world} refused" in str(
                    caught.value
                ), (name, position)
        assert torch.equal(op(*operands), want)  # the op stays usable


def test_tensors_without_memory_are_refused_on_all_ranks() -> None:
    run_ranks(2, _absent)


def _lazy(rank: int, world: int) -> None:
    for knobs in (flux.Knobs(), flux.Knobs(path="unfused")):
        for op, operands in _ops(world, tuning=knobs):
            for make in LAZY.values():
                for position in range(3):
                    mixed = list(operands)
                    mixed[position] = make(mixed[position])
                    want = op(*[tensor.clone() + 0 for tensor in mixed])
                    op(*operands)
                    for _ in range(2):
                        torch.testing.assert_close(op(*mixed), want)


def test_lazy_tensors_give_their_values() -> None:
    run_ranks(2, _lazy)


def _scales(rank: int, world: int) -> None:
    fp8 = torch.float8_e4m3fn
    with flux.AGGemm(max_m=M, n=N, k=K, dtype=fp8, scaling="row", timeout_s=20.0) as op:
        x, weight = torch.ones(M // world, K).to(fp8), torch.ones(N // world, K).to(fp8)
        scales = torch.rand(M // world), torch.rand(N // world)
        want = op(x, weight, scale_x=scales[0], scale_weight=scales[1])
        lazy = [LAZY["negative"](scale) for scale in scales]
        assert torch.equal(op(x, weight, scale_x=lazy[0], scale_weight=lazy[1]), want)
        with pytest.raises(ValueError, match="in memory"):
            op(x, weight, scale_x=_resized(0)(scales[0]), scale_weight=scales[1])


def test_scales_are_checked_too() -> None:
    run_ranks(2, _scales)


def _changed(rank: int, world: int) -> None:
    """A call that repeats another one looks at the memory of its arguments, not at objects only."""
    for op, operands in _ops(world):
        want = op(*operands)
        for position in range(3):
            values = operands[position].clone()
            tensor = values.clone()
            args = list(operands)
            args[position] = tensor
            assert torch.equal(op(*args), want) and torch.equal(op(*args), want)
            tensor.data = torch._neg_view(tensor.data)  # the same memory
            torch.testing.assert_close(op(*args), op(*[arg.clone() for arg in args]))
            tensor.data = torch._neg_view(-values)
            torch.testing.assert_close(op(*args), want)
            tensor.data = values.clone()
            assert torch.equal(op(*args), want)
            tensor.set_(torch.cat([values.flatten(), values.flatten()]).view(2, *values.shape)[1])
            assert torch.equal(op(*args), want)
            for nbytes in (8, 0):
                tensor.untyped_storage().resize_(nbytes)
                with pytest.raises(ValueError, match="freed or resized"):
                    op(*args)
            tensor.data = values
            assert torch.equal(op(*args), want)


def test_repeated_calls_notice_changed_memory() -> None:
    run_ranks(2, _changed)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class _Deferred(TorchFunctionMode):
    """Makes every new tensor on no device, as initialization that is deferred does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.full):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "default device": _default_device,
    "default dtype": _default_dtype,
    "deferred": _Deferred,
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
}


def _under_modes(rank: int, world: int) -> None:
    wanted = [op(*operands) for op, operands in _ops(world)]
    for name, mode in MODES.items():
        for kind, want in zip((flux.AGGemm, flux.GemmRS, flux.GemmAR), wanted, strict=True):
            with mode():
                op = kind(max_m=M, n=N, k=K, timeout_s=20.0)
            operands = next(args for other, args in _ops(world) if type(other) is kind)
            assert torch.equal(op(*operands), want), name
            if name != "fake":
                for _ in range(2):
                    with mode():
                        got = op(*operands)
                    assert torch.equal(got, want) and got.dtype == want.dtype, name
            op.close()
    close_pools()
    torch.manual_seed(0)
    layers = [ColumnParallelLinear(K, N, sequence_parallel=True)]
    layers.append(RowParallelLinear(N, K, sequence_parallel=True))  # type: ignore[arg-type]
    for _ in range(2):  # the first call builds the ops
        for mode in (MODES["device"], MODES["default dtype"], MODES["deferred"]):
            x = torch.ones(M // world, K, requires_grad=True)
            with mode():
                y = layers[1](layers[0](x))
                y.sum().backward()
            assert y.device == x.grad.device == torch.device("cpu") and y.dtype == torch.float32


def test_modes_change_no_memory_of_an_op() -> None:
    run_ranks(2, _under_modes)


def _fake(rank: int, world: int) -> None:
    for op, operands in _ops(world):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t).requires_grad_() for t in operands]
            y = op(*fakes)
            y.sum().backward()
        assert y.shape == op(*operands).shape
        assert [fake.grad.shape for fake in fakes] == [t.shape for t in operands]
        with mode, pytest.raises(AssertionError, match="FakeTensors"):
            op(*operands)  # real tensors under the mode
        assert torch.isfinite(op(*operands)).all()


def test_fake_tensors_have_shapes_and_gradients() -> None:
    run_ranks(2, _fake)


@pytest.mark.parametrize("backend", ["fake", "cpu:fake,cuda:fake"])
def test_a_fake_process_group_is_named(backend: str) -> None:
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=4)
    try:
        for build in (
            lambda: flux.AGGemm(max_m=M, n=N, k=K),
            lambda: ColumnParallelLinear(K, N, sequence_parallel=True)(torch.ones(2, K)),
            lambda: flux.ops.fused_matmul_reduce_scatter(
                torch.ones(4, 4), torch.ones(4, 4), "sum", 0, dist.group.WORLD.group_name
            ),
        ):
            with pytest.raises(ValueError, match="backend 'fake'"):
                build()
        for sp in (True, False):
            with torch.device("meta"):  # shapes need no ranks
                up, down = (
                    ColumnParallelLinear(K, N, sequence_parallel=sp, gather_output=not sp),
                    RowParallelLinear(N, K, sequence_parallel=sp, input_is_parallel=sp),
                )
                x = torch.ones(4, K, requires_grad=True)
                y = down(up(x))
            y.sum().backward()
            assert y.shape == x.grad.shape == x.shape
    finally:
        dist.destroy_process_group()


def test_bytes_are_counted_to_the_last_element() -> None:
    base = torch.empty(100)
    for size, stride in (((3, 4), (4, 1)), ((3, 4), (0, 1)), ((2, 3), (50, 7)), ((0, 4), (4, 1))):
        tensor = base.as_strided(size, stride)
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        assert bytes_needed(tensor) == (0 if 0 in size else 4 * (last + 1))
        assert reason_without_memory(tensor) is None
    tail = base[90:]
    base.untyped_storage().resize_(4 * 99)
    assert "needs 40 bytes and its storage has 36" in (reason_without_memory(tail) or "")


def test_only_tensors_with_memory_have_an_address() -> None:
    whole = torch.ones(4)
    assert address_of(whole) == whole.data_ptr() and address_of(whole[:0]) == 0
    for tensor in (_resized(0)(whole), torch._neg_view(whole), whole.to("meta")):
        with pytest.raises(RuntimeError, match="address of a tensor"):
            address_of(tensor)
    assert settled(whole) is whole
    assert torch.equal(settled(torch._neg_view(whole)), -whole)


def test_addresses_are_taken_at_one_place() -> None:
    package = Path(flux.__file__).parent
    taking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\.data_ptr\(", path.read_text(encoding="utf-8"))
    }
    comparing = {
        "core/call.py",
        "layers/planned.py",
        "runtime/centauri/shards.py",
        "runtime/domino/trees.py",
    }
    assert taking == {"core/tensors.py"} | comparing
