"""What AGGemm, GemmRS and GemmAR all have to get right, against float64, on 1 to 8 ranks."""

from __future__ import annotations

import itertools

import pytest

from flux import Knobs, Topology
from harness import WORLDS, run_ranks
from op_cases import Call, Case, check_cases, every_dtype, meshes, random_cases
from reference import LAYOUTS, Problem

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
ORDERS = ("direct", "ring1d", "ring2d", "hierarchical", "numa")
SWIZZLES = ("none", "rank_shift", "xor")
COUNT = {1: 20, 2: 50, 3: 25, 4: 20, 8: 8}

each_op = pytest.mark.parametrize("op", OPS)


@each_op
@pytest.mark.parametrize("world", WORLDS)
def test_random_cases(op: str, world: int) -> None:
    cases = random_cases(OPS.index(op) + 1, op, world, COUNT[world])
    assert run_ranks(world, check_cases, cases) == [sum(len(c.calls) for c in cases)] * world


def gathering_grid(world: int) -> list[tuple[Knobs, Topology, tuple[int, ...]]]:
    """Tiles that straddle chunks, communication tiles that divide neither."""
    topologies = itertools.cycle(meshes(world))
    return [
        (
            Knobs(
                tile=(7, 3),
                comm_tile_rows=3,
                direction=direction,
                order=order,
                swizzle=swizzle,
                copy_streams=streams,
            ),
            next(topologies),
            (1, world, 29, 40),
        )
        for direction, order, swizzle, streams in itertools.product(
            ("push", "pull"), ORDERS, SWIZZLES, (0, 1)
        )
    ]


def reducing_grid(world: int) -> list[tuple[Knobs, Topology, tuple[int, ...]]]:
    """Orders, which only permute the owners here, and meshes take turns.

    Stored directly, a tile must fit the rows of its owner; staged, it may straddle.
    """
    topologies, orders = itertools.cycle(meshes(world)), itertools.cycle(ORDERS)
    return [
        (
            Knobs(
                tile=(2, 3) if store == "direct" else (7, 3),
                comm_tile_rows=5,
                direction=direction,
                order=next(orders),
                swizzle=swizzle,
                store=store,
                copy_streams=streams,
            ),
            next(topologies),
            (2 * world, 12 * world, 10 * world - 1),
        )
        for direction, swizzle, store, streams in itertools.product(
            ("push", "pull"), SWIZZLES, ("direct", "staged"), (0, 1)
        )
    ]


@each_op
@pytest.mark.parametrize("world", [2, 4])
def test_every_combination_of_knobs(op: str, world: int) -> None:
    gathers = op == "ag_gemm"
    grid = gathering_grid(world) if gathers else reducing_grid(world)
    problem = Problem(op, max_m=48, n=(11,), k=9, reduce="sum" if gathers else "avg")
    cases = [
        Case(
            problem,
            knobs,
            tuple(Call(m, seed=i * 10 + m, gather=gathers) for m in sizes),
            topology=topology,
        )
        for i, (knobs, topology, sizes) in enumerate(grid)
    ]
    run_ranks(world, check_cases, cases)


@each_op
@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_layout_and_weight_order(op: str, world: int, path: str) -> None:
    gathers = op == "ag_gemm"
    reduces = ("sum", "sum") if gathers else ("sum", "avg")
    cases = [
        Case(
            problem,
            Knobs(path=path),
            tuple(
                Call(m, seed=m, layout=layout, padded=gathers, gather=gathers, bias=m % 2 == 0)
                for m, layout in zip((1, 4, 13, 32), LAYOUTS, strict=True)
            ),
        )
        for transposed, reduce in zip((False, True), reduces, strict=True)
        for problem in every_dtype(
            Problem(op, 32, (13,), 31, transpose_weight=transposed, reduce=reduce)
        )
    ]
    run_ranks(world, check_cases, cases)


@each_op
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(),
        Knobs(direction="pull"),
        Knobs(direction="push"),
        Knobs(store="staged", tile=(256, 64), comm_tile_rows=100),
        Knobs(store="staged", comm_tile_rows=1),
        Knobs(path="medium"),
    ],
    ids=str,
)
def test_a_problem_that_needs_the_copy_thread(op: str, knobs: Knobs) -> None:
    """Megabytes, so that the heuristic's own choice is the worker, several tiles and slabs."""
    n, k = (96, 700) if op == "ag_gemm" else (700, 96)
    calls = tuple(Call(m, seed=m, gather=op == "ag_gemm") for m in (4200, 1, 3999))
    run_ranks(2, check_cases, [Case(Problem(op, 4200, (n,), k), knobs, calls)])
