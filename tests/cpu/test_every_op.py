"""Results of AGGemm, GemmRS and GemmAR against float64, on 1 to 8 ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flux import Knobs
from harness import STRESS, WORLDS, more, run_ranks
from matrix import OPS, every_combination_of_knobs, every_dtype_layout_and_weight_order
from op_cases import Call, Case, check_cases, random_cases
from reference import Inputs, Problem

COUNT = {1: 4, 2: 10, 3: 6, 4: 4, 8: 1}

each_op = pytest.mark.parametrize("op", OPS)


@each_op
@pytest.mark.parametrize("world", WORLDS)
def test_random_cases(op: str, world: int) -> None:
    cases = random_cases(OPS.index(op) + 1, op, world, COUNT[world] * STRESS)
    assert (
        run_ranks(world, check_cases, cases, timeout=120.0 * STRESS)
        == [sum(len(c.calls) for c in cases)] * world
    )


@each_op
@pytest.mark.parametrize("world", [2, *more(4)])
def test_every_combination_of_knobs(op: str, world: int) -> None:
    run_ranks(world, check_cases, every_combination_of_knobs(op, world))


@each_op
@pytest.mark.parametrize("path", ["fused", "unfused", *more("medium")])
@pytest.mark.parametrize("world", [*more(1, 2), 3])
def test_every_dtype_layout_and_weight_order(op: str, world: int, path: str) -> None:
    run_ranks(world, check_cases, every_dtype_layout_and_weight_order(op, path))


@each_op
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(),
        Knobs(direction="pull"),
        Knobs(store="staged", tile=(256, 64), comm_tile_rows=100),
        Knobs(path="medium"),
        *more(Knobs(direction="push"), Knobs(store="staged", comm_tile_rows=1)),
    ],
    ids=str,
)
def test_problem_that_needs_the_copy_thread_matches_float64(op: str, knobs: Knobs) -> None:
    """Megabytes, so that the heuristic's own choice is the worker, several tiles and slabs."""
    n, k = (96, 700) if op == "ag_gemm" else (700, 96)
    calls = tuple(Call(m, seed=m, gather=op == "ag_gemm") for m in (4200, 1, 3999))
    run_ranks(2, check_cases, [Case(Problem(op, 4200, (n,), k), knobs, calls)])


def _rows_with_nan(rank: int, world: int, op: str, path: str) -> list[int]:
    p = Problem(op, 64, (64,), 65 if op == "ag_gemm" else 65 * world, torch.bfloat16)
    inputs = Inputs(p, 64, world, seed=1)
    inputs.x[5] = float("nan")
    with p.build(tuning=Knobs(path=path)) as built:
        (out,) = inputs.call(built, rank)
    return [int(row) for row in out.isnan().any(dim=1).nonzero()]


@each_op
@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
def test_a_row_of_nan_spoils_no_other_row(op: str, path: str) -> None:
    """oneDNN multiplies the start of a row by zero, for the row before it, on CPUs with AMX."""
    found = run_ranks(2, _rows_with_nan, op, path)
    assert found == ([[5], []] if op == "gemm_rs" else [[5], [5]])


def _idle_ranks(rank: int, world: int, op: str) -> None:
    for size, path in itertools.product((1, world - 1, world + 1), ("fused", "medium", "unfused")):
        n, k = (size, 4) if op == "ag_gemm" else (4, size)
        problem = Problem(op, 9, (n,), k)
        with problem.build(tuning=Knobs(path=path)) as built:
            for m in (1, world - 1, 9):
                inputs = Inputs(problem, m, world, seed=m)
                inputs.call_and_check(built, rank, path, gather=problem.gathers)


@each_op
@pytest.mark.parametrize("world", [3, *more(8)])
def test_ranks_without_columns_depth_or_rows_take_part(world: int, op: str) -> None:
    run_ranks(world, _idle_ranks, op)


def _expanded(rank: int, world: int, op: str) -> None:
    gathers = op == "ag_gemm"
    sizes = (6 * world, (4 * world,), 5) if gathers else (6, (4,), 5 * world)
    with Problem(op, *sizes).build() as built:
        for x, w in (
            ((torch.arange(5.0) + rank).expand(6, 5), torch.arange(5.0).expand(4, 5)),
            (torch.tensor(2.0 + rank).expand(6, 5), torch.tensor(3.0).expand(4, 5)),
            (torch.arange(6.0)[:, None].expand(6, 5), torch.arange(4.0)[:, None].expand(4, 5)),
        ):
            y, dense = built(x, w), (x.contiguous(), w.contiguous())
            assert torch.equal(y, built(*dense))
            assert torch.equal(y, built(x, w, torch.zeros(1).expand(4)))
            if gathers:
                assert torch.equal(y[6 * rank : 6 * rank + 6], dense[0] @ dense[1].t())


@each_op
@pytest.mark.parametrize("world", [1, 2])
def test_expanded_inputs_give_correct_results(world: int, op: str) -> None:
    run_ranks(world, _expanded, op)


def _outputs_apart(rank: int, world: int, op: str) -> None:
    p = Problem(op, 4 * world, (2 * world,), 3 * world)
    stores = [None] if p.gathers else ["direct", "staged"]
    options = {"return_gathered": True} if p.gathers else {}
    x, weight, _ = Inputs(p, p.max_m, world, seed=1).local(rank)
    given = x.clone(), weight.clone()
    for store in stores:
        with p.build(tuning=Knobs(store=store, tile=(4, 2))) as built:

            def call(x: torch.Tensor, built: Any = built) -> list[torch.Tensor]:
                outs = built(x, weight, **options)
                return list(outs) if options else [outs]

            outs = call(x)
            kept = [out.clone() for out in outs]
            later = call(x + 1)
            assert all(map(torch.equal, outs, kept)) and not any(map(torch.equal, later, kept))
            for out in outs:
                out.zero_()  # neither the inputs nor a later call may see this
            assert all(map(torch.equal, call(x), kept))
        assert all(map(torch.equal, (x, weight), given))


@each_op
@pytest.mark.parametrize("world", [1, 3])
def test_outputs_share_no_memory_with_inputs_or_later_outputs(world: int, op: str) -> None:
    run_ranks(world, _outputs_apart, op)
