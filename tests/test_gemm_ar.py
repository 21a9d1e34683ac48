"""GemmAR against float64, on 1 to 8 ranks; every rank must hold the same bits."""

from __future__ import annotations

import pytest
import torch

from flux import GemmAR, Knobs
from harness import WORLDS, run_ranks
from op_cases import Call, Case, check_cases, every_dtype, random_cases
from reference import LAYOUTS, Inputs, Problem
from test_gemm_rs import combinations

COUNT = {1: 30, 2: 80, 3: 40, 4: 30, 8: 12}


@pytest.mark.parametrize("world", WORLDS)
def test_random_cases(world: int) -> None:
    cases = random_cases(3, "gemm_ar", world, COUNT[world])
    assert run_ranks(world, check_cases, cases) == [sum(len(c.calls) for c in cases)] * world


@pytest.mark.parametrize("world", [2, 4])
def test_every_combination_of_knobs(world: int) -> None:
    run_ranks(world, check_cases, combinations("gemm_ar", world))


@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_layout_and_weight_order(world: int, path: str) -> None:
    cases = [
        Case(
            problem,
            Knobs(path=path),
            tuple(
                Call(m, seed=m, layout=layout, bias=m % 2 == 0)
                for m, layout in zip((1, 4, 13, 32), LAYOUTS, strict=True)
            ),
        )
        for transposed, reduce in ((False, "avg"), (True, "sum"))
        for problem in every_dtype(
            Problem("gemm_ar", 32, (13,), 31, transpose_weight=transposed, reduce=reduce)
        )
    ]
    run_ranks(world, check_cases, cases)


@pytest.mark.parametrize(
    "knobs", [Knobs(), Knobs(direction="push"), Knobs(store="staged", comm_tile_rows=1)], ids=str
)
def test_a_problem_that_needs_the_copy_thread(knobs: Knobs) -> None:
    """Megabytes, so that the heuristic's own choice is the worker, several tiles and slabs."""
    problem = Problem("gemm_ar", max_m=2100, n=(700,), k=96)
    run_ranks(2, check_cases, [Case(problem, knobs, tuple(Call(m, m) for m in (2100, 1, 1999)))])


def results(rank: int, world: int, knobs: Knobs, dtype: torch.dtype) -> list[bytes]:
    problem = Problem("gemm_ar", max_m=50, n=(9,), k=40, dtype=dtype)
    out = []
    with problem.build(tuning=knobs) as op:
        for m in (1, 6, 49, 50):
            y = Inputs(problem, m, world, seed=m).call(op, rank)[0]
            out.append(y.view(torch.uint8).numpy().tobytes())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_hold_the_same_bits(world: int, dtype: torch.dtype) -> None:
    """Whatever the way the result took; and the ways differ in nothing but time."""
    tile = (1, 9)
    ways = [
        run_ranks(world, results, knobs, dtype)
        for knobs in (
            Knobs(tile=tile, direction="pull", store="direct", copy_streams=0),
            Knobs(tile=tile, direction="push", store="direct", copy_streams=1),
            Knobs(tile=tile, direction="pull", store="staged", copy_streams=1, comm_tile_rows=3),
            Knobs(tile=tile, direction="push", store="staged", copy_streams=0),
        )
    ]
    assert all(of_rank == ways[0][0] for way in ways for of_rank in way)


def is_an_op_of_its_own(rank: int, world: int) -> None:
    with GemmAR(max_m=5, n=2, k=world) as op:
        y = op(torch.ones(5, 1), torch.ones(2, 1), torch.tensor([0.0, 1.0]))
        assert torch.equal(y, torch.tensor([[world, world + 1.0]]).expand(5, 2))
        assert repr(op).startswith("GemmAR(")


@pytest.mark.parametrize("world", WORLDS)
def test_the_bias_is_added_once(world: int) -> None:
    run_ranks(world, is_an_op_of_its_own)
