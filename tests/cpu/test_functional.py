"""The functional forms against PyTorch's own definition of them, case by case."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import (
    _fused_all_gather_matmul_fallback,
    _fused_matmul_reduce_scatter_fallback,
)

import flux
from flux.core.env import WORKSPACE_CACHE
from flux.ops.pool import pool_of
from harness import held, more, run_ranks


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """What a caller sees beside the values: who asks for a view of it, too."""
    seen = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (actual, expected)]
    assert seen[0] == seen[1], seen


def _columns_gathered(
    a: torch.Tensor, bs: list[torch.Tensor], dim: int, name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather along the last dimension, which PyTorch's definition cannot do in torch 2.9."""
    parts = [torch.empty_like(a.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, a.contiguous())
    gathered = torch.cat(parts, dim)
    return gathered, [gathered @ b for b in bs]


def _all_gather_cases(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    for shape in ((4, 6), (1, 6), (4, 5, 6), (3, 4, 5, 6)):
        for dim, return_a in itertools.product(range(-1, len(shape)), (True, False)):
            last = dim % len(shape) == len(shape) - 1
            a = torch.randn(*shape, dtype=torch.float64)
            k = shape[-1] * (world if last else 1)
            bs = [torch.randn(k, n, dtype=torch.float64) for n in (7, 3)]
            if dim % 2:  # a layout that needs no copy, as well as one that does
                a = a.movedim(dim, 0).contiguous().movedim(0, dim)
            define = _columns_gathered if last else _fused_all_gather_matmul_fallback
            want_a, want = define(a, bs, dim % len(shape), name)
            got_a, got = flux.ops.fused_all_gather_matmul(a, bs, dim, name, return_A=return_a)
            assert (got_a is not None) == return_a
            if return_a:
                assert torch.equal(got_a, want_a)
                _alike(got_a, want_a)
            assert len(got) == len(want)
            for x, y in zip(got, want, strict=True):
                _close(x, y)
                _alike(x, y)


def _reduce_scatter_cases(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    name = dist.group.WORLD.group_name
    for shape in ((4 * world, 6), (4 * world, 2 * world, 6), (3 * world, world, 5 * world, 6)):
        for dim, reduce_op in itertools.product(range(len(shape)), ("sum", "avg")):
            a = torch.randn(*shape, dtype=torch.float64)
            b = torch.randn(6, 3 * world, dtype=torch.float64)
            want = _fused_matmul_reduce_scatter_fallback(a, b, reduce_op, dim, name)
            got = flux.ops.fused_matmul_reduce_scatter(a, b, reduce_op, dim, name)
            assert got.shape == want.shape
            _close(got, want)
            _alike(got, want)


@pytest.mark.parametrize("world", [1, 3, *more(2, 4)])
def test_all_gather_matmul_equals_pytorch(world: int) -> None:
    run_ranks(world, _all_gather_cases)


@pytest.mark.parametrize("world", [1, 3, *more(2, 4)])
def test_matmul_reduce_scatter_equals_pytorch(world: int) -> None:
    run_ranks(world, _reduce_scatter_cases)


def _refusals(rank: int, world: int) -> list[str]:
    name = dist.group.WORLD.group_name
    a, b = torch.ones(4, 6), torch.ones(6, 4)
    bad = (
        lambda: flux.ops.fused_all_gather_matmul(a, [b], 2, name),
        lambda: flux.ops.fused_all_gather_matmul(a, [], 0, name),
        lambda: flux.ops.fused_all_gather_matmul(a, [b[:5]], 0, name),
        lambda: flux.ops.fused_matmul_reduce_scatter(a, b, "max", 0, name),
        lambda: flux.ops.fused_matmul_reduce_scatter(torch.ones(5, 6), b, "sum", 0, name),
        lambda: flux.ops.fused_matmul_reduce_scatter(a[0], b, "sum", 0, name),
    )
    texts = []
    for call in bad:
        # Only rank 1 gets it wrong; the others must hear of it, and the next call must work.
        with pytest.raises(ValueError) as caught:
            if rank == 1:
                call()
            else:
                flux.ops.fused_all_gather_matmul(a, [b], 0, name)
        texts.append(str(caught.value))
        _, [y] = flux.ops.fused_all_gather_matmul(a, [b], 0, name)
        assert torch.equal(y, torch.full((4 * world, 4), 6.0))
    with pytest.raises(ValueError, match="ranks disagree"):  # each fine by itself
        flux.ops.fused_all_gather_matmul(torch.ones(4 + rank, 6), [b], 0, name)
    with pytest.raises(TypeError, match="float64"):
        flux.ops.fused_all_gather_matmul(a, [b.double()], 0, name)
    return texts


def test_invalid_call_raises_on_every_rank_and_the_next_succeeds() -> None:
    texts = run_ranks(3, _refusals)
    for here, there in zip(texts[1], texts[0], strict=True):
        assert "rank 1 refused" in there
        assert here[:60] in there
    assert "gather_dim must be in [-2, 2), got 2" in texts[1][0]
    assert "divisible by the world 3, got 5" in texts[1][4]


def _bounded(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    pool = pool_of(name)
    before = None
    for n in range(1, 3 * pool.recent_limit):
        flux.ops.fused_all_gather_matmul(torch.ones(2, 3), [torch.ones(3, n)], 0, name)
        assert len(pool.recent_ops) <= pool.recent_limit
        if n == 2 * pool.recent_limit:
            before = held()
    assert held() == before
    for rows in (1, 2, 70, 3):  # growing M rebuilds the op, shrinking does not
        a = torch.full((rows, 3), float(rows))
        _, [y] = flux.ops.fused_all_gather_matmul(a, [torch.ones(3, 2)], 0, name)
        assert torch.equal(y, torch.full((rows * world, 2), 3.0 * rows))
    flux.ops.clear_workspaces()
    assert not pool.recent_ops
    flux.ops.fused_all_gather_matmul(torch.ones(2, 3), [torch.ones(3, 2)], 0, name)


def _coming_back(rank: int, world: int, limit: str) -> list[int]:
    """Return how many ops each round over 11 shapes builds."""
    name = dist.group.WORLD.group_name
    pool_of(name).close()
    with WORKSPACE_CACHE.during(limit):
        pool, built, seen = pool_of(name), [], set[int]()
    for _ in range(3):
        before = len(seen)
        for n in range(1, 12):
            flux.ops.fused_all_gather_matmul(torch.ones(2, 3), [torch.ones(3, n)], 0, name)
            seen |= {op.handle for op in pool.recent_ops.values()}
        built.append(len(seen) - before)
    pool.close()
    return built


@pytest.mark.parametrize(("limit", "built"), [("", [11, 3, 0]), ("8", [11, 11, 11])])
def test_shapes_that_come_back_stay(limit: str, built: list[int]) -> None:
    """As the layers of a model do, in each step; a limit that is set holds."""
    assert run_ranks(2, _coming_back, limit) == [built, built]


def test_workspaces_are_cached_and_bounded() -> None:
    run_ranks(2, _bounded)


def _beside_layers(rank: int, world: int) -> None:
    """Between calls of a layer, the first functional call of a group is refused on one rank."""
    flux.layers.close_pools()
    name, x = dist.group.WORLD.group_name, torch.ones(2, 3)
    layer = flux.layers.ColumnParallelLinear(3, 2 * world, sequence_parallel=True)
    layer(x)
    with pytest.raises(ValueError, match=r"rank 1 refused|gather_dim must be"):
        flux.ops.fused_all_gather_matmul(x, [torch.ones(3, 2)], 5 * rank, name)
    pool = pool_of(name)
    assert len(pool.ops) == 1 and not pool.recent_ops
    layer(torch.ones(9, 3))  # grows
    _, [y] = flux.ops.fused_all_gather_matmul(x, [torch.ones(3, 2)], 0, name)
    assert torch.equal(y, torch.full((2 * world, 2), 3.0))
    flux.ops.clear_workspaces()
    assert len(pool.ops) == 1 and not pool.recent_ops
    flux.ops.fused_all_gather_matmul(x, [torch.ones(3, 2)], 0, name)
    (kept,), (recent,) = pool.ops, pool.recent_ops.values()
    flux.layers.close_pools()
    assert kept.closed and recent.closed and pool_of(name) is not pool
    layer(x)
    flux.ops.fused_all_gather_matmul(x, [torch.ones(3, 2)], 0, name)
    flux.layers.close_pools()


def test_functional_calls_and_layers_of_one_group() -> None:
    run_ranks(2, _beside_layers)
