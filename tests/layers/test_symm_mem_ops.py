"""torch.ops.symm_mem on CPU ranks, against PyTorch's own definitions."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves, tree_map_only

import harness
from compile_cases import Block, D, S, passes_only, plan, quick_inductor
from flux.integrations import symm_mem
from harness import more, run_ranks, stress_only

harness.PRELOAD += [
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
]

OPS: Any = torch.ops.symm_mem
complete = pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="PyTorch 2.9 gathers no inner dimension and scales no rows on CPUs",
)


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Values that are as near as the dtype permits, in the same layout."""
    assert actual.stride() == expected.stride(), (actual.stride(), expected.stride())
    bound = 5e-2 if actual.dtype == torch.bfloat16 else 1e-5  # PyTorch rounds before it sums
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


def _fake(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What Inductor expects of a call."""
    mode = FakeTensorMode()
    args, options = tree_map_only(torch.Tensor, mode.from_tensor, (args, options))
    with mode:
        return op(*args, **options)


def _same_layout(actual: Any, fake: Any) -> None:
    for real, expected in zip(tree_leaves(actual), tree_leaves(fake), strict=True):
        seen = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (real, expected)]
        assert seen[0] == seen[1], seen


def _gathers(rank: int, world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    with symm_mem.enable():
        for shape in ((5, 6), (3, 4, 6)):
            for dim, count, return_a in itertools.product(range(len(shape)), (1, 3), (True, False)):
                last = dim == len(shape) - 1
                a = torch.randn(shape, dtype=dtype)
                k = shape[-1] * (world if last else 1)
                bs = [torch.randn(n, k, dtype=dtype).t() for n in (7, 1, 4)[:count]]
                full, expected = torch_symm_mem._fused_all_gather_matmul_fallback(a, bs, dim, name)
                got = OPS.fused_all_gather_matmul(a, bs, dim, name, return_A=return_a)
                if return_a:
                    assert torch.equal(got[0], full)
                else:
                    assert got[0] is None
                for x, y in zip(got[1], expected, strict=True):
                    _alike(x, y)
                fake = _fake(OPS.fused_all_gather_matmul, a, bs, dim, name, return_A=return_a)
                _same_layout(got, fake)


def _scatters(rank: int, world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    with symm_mem.enable():
        for shape in ((3 * world, 5), (2 * world, world, 5)):
            for dim, reduce_op in itertools.product(range(len(shape)), ("sum", "avg")):
                args = (
                    torch.randn(shape, dtype=dtype),
                    torch.randn(5, 2 * world, dtype=dtype),
                    reduce_op,
                    dim,
                    name,
                )
                expected = torch_symm_mem._fused_matmul_reduce_scatter_fallback(*args)
                got = OPS.fused_matmul_reduce_scatter(*args)
                _alike(got, expected)
                _same_layout(got, _fake(OPS.fused_matmul_reduce_scatter, *args))


def _large_partials(rank: int, world: int) -> list[bool]:
    """Whether a sum whose partials cancel is exact, without and with float32 partials."""
    a = torch.full((world, 1), 1.0 if rank else -1.0).bfloat16()
    b = torch.tensor([[1.0, 1.0]]).bfloat16() * (256 + 2 * rank)
    a, b = torch.cat([a, a / 256], 1), torch.cat([b, b], 0)  # partials of 9 bits and more
    exact = (a.double() @ b.double()).clone()
    dist.all_reduce(exact)
    results = []
    for wide in (False, True):
        with symm_mem.enable(float32_partials=wide):
            y = OPS.fused_matmul_reduce_scatter(a, b, "sum", 0, dist.group.WORLD.group_name)
        assert y.dtype == a.dtype
        results.append(torch.equal(y, exact[rank : rank + 1].to(y.dtype)))
    return results


def test_float32_partials() -> None:
    assert run_ranks(2, _large_partials) == [[False, True]] * 2


@complete
@pytest.mark.parametrize("dtype", [torch.bfloat16, *more(torch.float32)])
def test_products_equal_pytorch(dtype: torch.dtype) -> None:
    run_ranks(2, _gathers, dtype)
    run_ranks(3, _scatters, dtype)


def _float8(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _scaled_gathers(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    bf16, n = torch.bfloat16, 16
    cases = (  # dtype of A, results, bias, result scale
        (torch.float8_e4m3fn, bf16, None, None),
        (torch.float8_e4m3fn, bf16, torch.randn(n).to(bf16), None),
        (torch.float8_e4m3fn, torch.float32, None, None),
        (torch.float8_e5m2, bf16, None, torch.tensor(0.5)),
    )
    with symm_mem.enable():
        for (dtype, out, bias, result), kind, (shape, dim) in itertools.product(
            cases, ("tensor", "own", "gathered"), (((3, 16), 0), ((2, 3, 16), 0), ((2, 3, 16), 1))
        ):
            a, b = _float8(shape, dtype), _float8((n, 16)).t()
            rows = list(shape[:-1])
            if kind == "gathered":
                rows[dim] *= world
                torch.manual_seed(0)  # equal on all ranks
            a_scale = torch.tensor(0.25) if kind == "tensor" else torch.rand(*rows, 1) + 0.5
            b_scale = torch.tensor(0.5) if kind == "tensor" else torch.rand(1, n) + 0.5
            torch.manual_seed(rank + 1)
            args = ([b, b], a_scale, [b_scale, b_scale], dim, name, [bias, None])
            args = (a, *args, [result, None], [out, out], [False, False])
            full, outs = OPS.fused_all_gather_scaled_matmul(*args)
            parts = [torch.empty_like(a.float()) for _ in range(world)]
            dist.all_gather(parts, a.float())
            expected_full = torch.cat(parts, dim)
            assert full.dtype == dtype and torch.equal(full.float(), expected_full)
            scales = a_scale
            if kind == "own":
                of_ranks = [torch.empty_like(a_scale) for _ in range(world)]
                dist.all_gather(of_ranks, a_scale.contiguous())
                scales = torch.cat(of_ranks, dim)
            for y, add in zip(outs, (bias, None), strict=True):
                expected = (expected_full * scales) @ b.float() * b_scale
                if add is not None:
                    expected = expected + add
                assert y.dtype == out
                torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
            if kind != "gathered" or dim == 0:
                _same_layout((full, outs), _fake(OPS.fused_all_gather_scaled_matmul, *args))


def _scaled_scatters(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    n = 16
    cases = (  # dtype of A, results, bias, result scale
        (torch.float8_e4m3fn, torch.bfloat16, None, None),
        (torch.float8_e4m3fn, torch.bfloat16, torch.randn(n).to(torch.bfloat16), None),
        (torch.float8_e5m2, torch.float32, None, None),
    )
    with symm_mem.enable():
        for (dtype, out, bias, result), by_row, (shape, dim), flat, reduce_op in itertools.product(
            cases,
            (False, True),
            (((2 * world, 16), 0), ((2, 2 * world, 16), 1)),
            (False, True),
            ("sum", "avg"),
        ):
            a, b = _float8(shape, dtype), _float8((n, 16)).t()
            a_scale = torch.rand(*shape[:-1], 1) + 0.5 if by_row else torch.tensor(0.25)
            b_scale = torch.rand(1, n) + 0.5 if by_row else torch.tensor(0.5)
            partial = (a.float() * a_scale) @ b.float() * b_scale
            if bias is not None:
                partial = partial + bias
            dist.all_reduce(partial)
            expected = partial.chunk(world, dim)[rank] / (world if reduce_op == "avg" else 1)
            product = [*shape[:-1], n]
            if flat:  # as the pass calls it for a product of more dimensions
                a = a.flatten(0, -2)
                a_scale = a_scale.flatten(0, -2) if by_row else a_scale
            args = (a, b, a_scale, b_scale, reduce_op, dim, 0 if flat else dim, name)
            args = (*args, product, bias, result, out)
            got = OPS.fused_scaled_matmul_reduce_scatter(*args)
            assert got.dtype == out and got.shape == expected.shape
            torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-1)
            _same_layout(got, _fake(OPS.fused_scaled_matmul_reduce_scatter, *args))


@complete
def test_float8_products() -> None:
    run_ranks(2, _scaled_gathers)
    run_ranks(2, _scaled_scatters)


def _errors(rank: int, world: int) -> list[str]:
    name = dist.group.WORLD.group_name
    a, b = torch.ones(4, 6), torch.ones(6, 4)
    a8, b8, one = _float8((4, 16)), _float8((16, 16)).t(), torch.ones(())
    scaled = OPS.fused_all_gather_scaled_matmul
    scattered = OPS.fused_scaled_matmul_reduce_scatter
    bad: tuple[Callable[[], Any], ...] = (
        lambda: OPS.fused_all_gather_matmul(a, [b], 2, name),
        lambda: OPS.fused_matmul_reduce_scatter(torch.ones(5, 6), b, "sum", 0, name),
        lambda: OPS.fused_matmul_reduce_scatter(a, b, "max", 0, name),
        lambda: scaled(a8, [b8], one, [one], 1, name, [None], [None], [None], [False]),
        lambda: scaled(a8, [b8], one, [one], 0, name, [], [None], [None], [False]),
        lambda: scattered(a8, b8, one, one, "sum", 0, 0, name, [5, 16], out_dtype=torch.float32),
        lambda: scattered(a8, b8, torch.ones(4, 1), one, "sum", 0, 0, name, [4, 16]),
    )
    texts = []
    with symm_mem.enable():
        for call in bad:
            # One rank alone is wrong: all of them raise, before anything is sent.
            with pytest.raises((ValueError, TypeError)) as caught:
                if rank == 1:
                    call()
                else:
                    OPS.fused_all_gather_matmul(a, [b], 0, name)
            texts.append(str(caught.value))
            _, [y] = OPS.fused_all_gather_matmul(a, [b], 0, name)
            assert torch.equal(y, torch.full((4 * world, 4), 6.0))
        with pytest.raises(ValueError, match="ranks disagree"):
            OPS.fused_all_gather_matmul(torch.ones(4 + rank, 6), [b], 0, name)
        x = a.clone().requires_grad_()
        y = OPS.fused_matmul_reduce_scatter(x, b, "sum", 0, name)
        with pytest.raises(RuntimeError, match="has no backward"):
            y.sum().backward()
    return texts


def test_errors_are_equal_on_all_ranks() -> None:
    texts = run_ranks(2, _errors)
    for here, there in zip(texts[1], texts[0], strict=True):
        assert "rank 1 refused" in there and here[:60] in there


def test_enabled_once_and_disabled_without_traces() -> None:
    def kernels() -> list[bool]:
        names = ("symm_mem::fused_all_gather_matmul", "aten::mm.dtype")
        keys = ("CPU", "AutogradCPU", "CUDA")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has(name, key) for name, key in itertools.product(names, keys)]

    before, nccl = kernels(), dist.is_nccl_available
    handle = symm_mem.enable()
    assert symm_mem.enabled() == ("cpu",)
    during = kernels()
    assert during[0] and during[1] and during[3]
    symm_mem.enable()  # no effect
    assert dist.is_nccl_available() == nccl()
    with handle:
        half = torch.randn(5, 8).bfloat16()
        product = torch.mm(half, half.t(), out_dtype=torch.float32)
        assert torch.equal(product, half.float() @ half.float().t())
        assert torch.equal(torch.mm(half, half.t(), out_dtype=half.dtype), half @ half.t())
        with pytest.raises(RuntimeError, match="out_dtype must be"):
            torch.mm(half, half.t(), out_dtype=torch.float64)
    assert kernels() == before and dist.is_nccl_available is nccl and not symm_mem.enabled()
    symm_mem.disable()
    with symm_mem.enable(), pytest.raises(ValueError, match="float32_partials=False"):
        symm_mem.enable(float32_partials=True)
    with pytest.raises(ValueError, match="xpu"):
        symm_mem.enable(["xpu"])
    assert not symm_mem.enabled()


def test_torch_without_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather_matmul(A: Any, Bs: Any, group: Any) -> None:
        raise AssertionError

    known = symm_mem._KERNELS["cpu"]
    monkeypatch.setitem(known, "fused_all_gather_matmul", all_gather_matmul)
    with pytest.raises(RuntimeError, match="defines an op that flux does not know"):
        symm_mem.enable()
    monkeypatch.setattr(torch.ops, "symm_mem", object())
    with pytest.raises(RuntimeError, match="has no torch\\.ops"):
        symm_mem.enable()
    assert not symm_mem.enabled()


def _like_gpus(rank: int, world: int) -> None:
    """The kernels for CUDA, called with CPU tensors: the dispatcher has no GPU here."""
    from flux.integrations.symm_mem import kernels

    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    for shape, dim in (((4, 6), 0), ((2, 4, 6), 1)):
        a, bs = torch.randn(shape), [torch.randn(n, 6).t() for n in (7, 2)]
        full, expected = torch_symm_mem._fused_all_gather_matmul_fallback(a, bs, dim, name)
        for return_a in (True, False):
            got, outs = kernels.gpu_all_gather_matmul(a, bs, dim, name, return_A=return_a)
            assert (got is None) != return_a and (got is None or torch.equal(got, full))
            for x, y in zip(outs, expected, strict=True):
                _alike(x, y)
        b = torch.randn(6, 2 * world)
        for scatter_dim in range(len(shape)):
            args = (a, b, "avg", scatter_dim, name)
            scattered = torch_symm_mem._fused_matmul_reduce_scatter_fallback(*args)
            _alike(kernels.gpu_matmul_reduce_scatter(*args), scattered)
        with pytest.raises(ValueError, match="divisible by the world"):
            kernels.gpu_matmul_reduce_scatter(torch.ones(3, 6), b, "sum", 0, name)
    # What flux has no op for goes to PyTorch's own code, here in its test mode.
    with torch_symm_mem._test_mode():
        wide = torch.randn(6 * world, 3)
        full, [y] = kernels.gpu_all_gather_matmul(torch.randn(4, 6), [wide], 1, name)
        torch.testing.assert_close(y, full @ wide)


@complete
def test_kernels_for_gpus_on_the_cpu() -> None:
    run_ranks(2, _like_gpus)


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the calls of kernels that are enabled inside, by name."""
    calls: Counter[str] = Counter()

    def count(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(kernel)
        def run(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return kernel(*args, **options)

        return run

    kernels = symm_mem._KERNELS["cpu"]
    before = dict(kernels)
    kernels.update({name: count(name, kernel) for name, kernel in before.items()})
    try:
        yield calls
    finally:
        kernels.update(before)


def _micro_pipelined(rank: int, world: int, generate: bool) -> dict[str, int]:
    """A DTensor-parallel block under Inductor's micro-pipeline pass, forward and backward."""
    from torch._inductor import config

    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(bias=False).double()
    parallelize_module(block, init_device_mesh("cpu", (world,)), plan(sequence=True))
    torch.manual_seed(rank)
    x = torch.randn(2, S // world, D, dtype=torch.float64)

    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        grads = [p.grad for p in block.feed_forward.parameters()]
        return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in grads)]

    expected = step(block.half)
    with _counted() as calls, symm_mem.enable(), quick_inductor():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # says that the pass needs it no more
            torch_symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        with config.patch(_micro_pipeline_tp=True, fx_graph_cache=False):
            backend = "inductor" if generate else passes_only
            compiled = torch.compile(block.half, fullgraph=True, backend=backend)
            step(compiled)
        calls.clear()
        results = step(compiled)
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
    return dict(calls)


FUSED = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 1}
"""In the backward the pass fuses no sum of two products, before its reduce-scatter."""


def test_micro_pipelined_block_matches_eager() -> None:
    assert run_ranks(2, _micro_pipelined, False) == [FUSED, FUSED]


@stress_only
@pytest.mark.timeout(400)
def test_micro_pipelined_block_with_generated_code() -> None:
    assert run_ranks(2, _micro_pipelined, True, timeout=380.0) == [FUSED, FUSED]
