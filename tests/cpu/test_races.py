"""Races: delayed transports, stragglers, and thousands of calls back to back.

FLUX_POISON fills outputs and idle workspaces with NaN and every call has inputs of its own, so what
is read too early, or overwritten too early, is not the right number. Nothing about the arithmetic
depends on timing, so equal inputs must give equal bits, however the tiles travelled.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flux import Knobs
from harness import STRESS, more, run_ranks
from op_cases import same_bits
from reference import Inputs, Problem

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
DIRECTIONS = ("push", "pull")
ORDERS = ("direct", "ring1d", "ring2d", "hierarchical", "numa")
SIZES = (24, 5, 12, 1, 23, 16)


def small_problem(op: str, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(op, max_m=24, n=(12,), k=12, dtype=dtype)


def ways(op: str) -> list[dict[str, Any]]:
    """Every way for tiles to travel: direction x store or order x copy thread or not."""
    if op == "ag_gemm":
        routes: list[dict[str, Any]] = [{"order": order} for order in ORDERS]
    else:
        routes = [{"store": "direct", "tile": (1, 12)}, {"store": "staged", "tile": (5, 7)}]
    return [
        {"direction": direction, "copy_streams": streams, "comm_tile_rows": 2, **route}
        for direction, route, streams in itertools.product(DIRECTIONS, routes, (0, 1))
    ]


def spoilt(rank: int, world: int, op_name: str) -> None:
    problem = small_problem(op_name)
    with problem.build(tuning=Knobs(direction="push", store="staged")) as op:
        backend = op._backend
        assert backend.empty(2, 3).isnan().all(), "outputs"
        Inputs(problem, 24, world, seed=1).call(op, rank)
        for idle in (backend.gathered, *backend.slots[rank : rank + 1]):
            assert idle.isnan().all(), "workspaces"


@pytest.mark.parametrize("op", OPS)
def test_idle_memory_is_full_of_nan(op: str) -> None:
    run_ranks(2, spoilt, op)


def delayed(rank: int, world: int, op_name: str, calls: int) -> None:
    problem = small_problem(op_name)
    for number, way in enumerate(ways(op_name)):
        # All ranks late at random; or one of them, so that the others run ahead as far as they can.
        late_ranks = (None, number % world)
        for late in late_ranks if STRESS > 1 else (late_ranks[(number + number // 2) % 2],):
            with problem.build(tuning=Knobs(**way)) as op:
                if late is None or late == rank:
                    longest = 4e-4 if late is None else 3e-3
                    op._backend.engine.set_delay(longest, 1000 * number + rank)
                for call in range(calls):
                    m = SIZES[(call + number) % len(SIZES)]
                    inputs = Inputs(problem, m, world, seed=100 * number + call)
                    gather = op_name == "ag_gemm" and call % 2 == 0
                    try:
                        inputs.call_and_check(op, rank, gather=gather)
                    except AssertionError as error:
                        raise AssertionError(f"M = {m}, call {call}, {way}: {error}") from error


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [*more(2), 4])
def test_delayed_tiles_are_waited_for(world: int, op: str) -> None:
    run_ranks(world, delayed, op, len(SIZES) * STRESS, timeout=200.0 * STRESS)


def back_to_back(rank: int, world: int, op_name: str, way: dict[str, Any], calls: int) -> None:
    problem = small_problem(op_name)
    every = [Inputs(problem, m, world, seed=m) for m in SIZES]
    local = [inputs.local(rank) for inputs in every]
    with problem.build(tuning=Knobs(**way)) as op:
        first = []
        for inputs in every:
            got = inputs.call(op, rank)
            inputs.check(got, rank)
            first.append(got[0])
        for call in range(calls):
            which = (call * 5 + call // 7) % len(SIZES)
            x, weight, bias = local[which]
            m = {"m": SIZES[which]} if problem.gathers else {}
            y = op(x, weight, bias, **m)
            assert same_bits(y, first[which]), f"call {call}, M = {SIZES[which]}: other bits"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("world", "calls", "way"),
    [
        (2, 400, {}),
        (2, 400, {"copy_streams": 1, "comm_tile_rows": 3}),
        (3, 200, {"direction": "pull", "comm_tile_rows": 2}),
        (3, 200, {"direction": "push", "store": "staged", "tile": (5, 7), "copy_streams": 1}),
        *more((2, 200, {"path": "medium"}), (8, 50, {})),
    ],
    ids=["inline", "threaded", "pull", "push", *more("medium", "world8")],
)
def test_thousands_of_calls_give_the_same_bits(
    op: str, world: int, calls: int, way: dict[str, Any]
) -> None:
    run_ranks(world, back_to_back, op, way, calls * STRESS, timeout=200.0 * STRESS)


def bits_of_every_way(rank: int, world: int, op_name: str, dtype: torch.dtype) -> None:
    problem = small_problem(op_name, dtype)
    for m in (24, 23):
        inputs = Inputs(problem, m, world, seed=m)
        results = []
        for way in ways(op_name):
            with problem.build(tuning=Knobs(**{**way, "tile": (1, 12)})) as op:
                results.append(inputs.call(op, rank)[0])
        for way, result in zip(ways(op_name), results, strict=True):
            assert same_bits(result, results[0]), f"M = {m}: {way} differs from {ways(op_name)[0]}"


@pytest.mark.parametrize("dtype", [torch.float16, *more(torch.float32)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [*more(2), 3])
def test_every_transport_path_gives_the_same_bits(world: int, op: str, dtype: torch.dtype) -> None:
    run_ranks(world, bits_of_every_way, op, dtype)


def across_the_wrap(rank: int, world: int, op_name: str) -> None:
    """A large call, then 2**32 small ones, then a large one: its signals are as old as can be."""
    problem = small_problem(op_name)
    knobs = Knobs(comm_tile_rows=1, copy_streams=1)
    large, small = (Inputs(problem, m, world, seed=m) for m in (24, 2))
    with problem.build(tuning=knobs) as op:
        engine = op._backend.engine
        large.check(large.call(op, rank), rank)
        for quarter in range(1, 9):
            engine.epoch = (quarter * 2**30 - 40) % 2**32
            x, weight, bias = small.local(rank)
            for _ in range(80):  # every entry of the history is written anew, as it would be
                op(x, weight, bias, **({"m": 2} if problem.gathers else {}))
            if quarter % 3 == 2:  # 2**31 calls or more after the last large one
                engine.set_delay(4e-3 if rank == quarter % 2 else 0, quarter)
                large.check(large.call(op, rank), rank)
                engine.set_delay(0, 0)


@pytest.mark.parametrize("op", OPS)
def test_signals_survive_the_wrap_of_the_epoch(op: str) -> None:
    run_ranks(2, across_the_wrap, op)
