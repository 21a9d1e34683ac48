"""The cases that every executor of the ops has to get right: CPU processes, virtual ranks."""

from __future__ import annotations

import itertools

from flux import Knobs, Topology
from op_cases import Call, Case, every_dtype, meshes
from reference import LAYOUTS, Problem

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
ROUTES = [*((op, "push") for op in OPS), ("ag_gemm", "pull")]
"""Ops with directions: partials are always pushed, so pulling changes no more than their order."""
ORDERS = ("direct", "ring1d", "ring2d", "hierarchical", "numa")
SWIZZLES = ("none", "rank_shift", "xor")


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


def every_combination_of_knobs(op: str, world: int) -> list[Case]:
    """Everything that can be combined, on small ragged problems."""
    gathers = op == "ag_gemm"
    grid = gathering_grid(world) if gathers else reducing_grid(world)
    problem = Problem(op, max_m=48, n=(11,), k=9, reduce="sum" if gathers else "avg")
    return [
        Case(
            problem,
            knobs,
            tuple(Call(m, seed=i * 10 + m, gather=gathers) for m in sizes),
            topology=topology,
        )
        for i, (knobs, topology, sizes) in enumerate(grid)
    ]


def every_dtype_layout_and_weight_order(op: str, path: str) -> list[Case]:
    """dtypes, weights as [N, K] and [K, N], and where the inputs lie in memory."""
    gathers = op == "ag_gemm"
    reduces = ("sum", "sum") if gathers else ("sum", "avg")
    return [
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
