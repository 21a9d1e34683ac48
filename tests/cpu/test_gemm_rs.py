"""Properties of GemmRS alone; test_every_op.py has those of all ops."""

from __future__ import annotations

import itertools

import pytest
import torch

from flux import GemmRS, Knobs
from harness import run_ranks
from reference import Inputs, Problem


def direct_store_of_any_m(rank: int, world: int) -> None:
    problem = Problem("gemm_rs", max_m=40, n=(5,), k=7)
    with problem.build(tuning=Knobs(store="direct")) as op:
        for m in (1, 2, 7, 39, 40):
            assert op.schedule(m).knobs.store == "direct"
            Inputs(problem, m, world, seed=m).call_and_check(op, rank)


@pytest.mark.parametrize("world", [2, 3])
def test_the_heuristic_finds_a_tile_for_store_direct(world: int) -> None:
    run_ranks(world, direct_store_of_any_m)


def accumulates_in_float32(rank: int, world: int) -> None:
    """2048 + 1 + 1 stays 2048 in float16, where 1 is half of the last place."""
    x = torch.full((world, 1), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    with GemmRS(max_m=world, n=3, k=world, dtype=torch.float16) as op:
        y = op(x, torch.ones(3, 1, dtype=torch.float16))
    assert torch.equal(y, torch.full((1, 3), 2048.0 + world - 1, dtype=torch.float16)), y


@pytest.mark.parametrize("world", [3])
def test_partials_are_summed_in_float32(world: int) -> None:
    run_ranks(world, accumulates_in_float32)


def sums_in_rank_order(rank: int, world: int) -> None:
    """(1e8 + 1) - 1e8 is 0 or 1 in float32, depending on the order of the three ranks' terms."""
    big = 1e8
    for values, result in (
        ((big, 1.0, -big), 0.0),
        ((big, -big, 1.0), 1.0),
        ((1.0, big, -big), 0.0),
    ):
        for direction, store in itertools.product(("push", "pull"), ("direct", "staged")):
            knobs = Knobs(direction=direction, store=store, tile=(1, 2), comm_tile_rows=1)
            with GemmRS(max_m=6, n=2, k=3, tuning=knobs) as op:
                y = op(torch.full((6, 1), values[rank]), torch.ones(2, 1))
            assert torch.equal(y, torch.full((2, 2), result)), (values, y)


def test_partials_are_summed_in_rank_order() -> None:
    run_ranks(3, sums_in_rank_order)
