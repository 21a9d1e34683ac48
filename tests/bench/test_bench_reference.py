"""The benchmark's check: it accepts every correct way to compute, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flux.bench.methods import UnfusedMethod
from flux.bench.reference import (
    Inputs,
    Reference,
    growth,
    judge,
    make_inputs,
    make_reference,
    reference_of_all,
)
from flux.core.knobs import OPS, Op
from flux.core.problem import DTYPES, SCALED, Problem
from harness import run_ranks


def alone(op: str, dtype: str, m: int = 40, n: int = 24, k: int = 512) -> tuple[Problem, Reference]:
    problem = Problem(Op[op], m, n, k, dtype, world=1, scaling="row" if dtype == SCALED else "")
    inputs = make_inputs(problem, 0, seed=7)
    return problem, make_reference(problem, 0, inputs)


def right(problem: Problem) -> torch.Tensor:
    return product(problem, make_inputs(problem, 0, seed=7))


def product(problem: Problem, inputs: Inputs) -> torch.Tensor:
    if problem.dtype != SCALED:
        return torch.mm(inputs.x, inputs.weight.t())
    x, weight = inputs.exact
    return torch.mm(x.float(), weight.float().t()).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_correct_result_is_accepted(op: str, dtype: str) -> None:
    problem, reference = alone(op, dtype)
    verdict = judge(problem, 0, right(problem), reference)
    assert verdict.ok, verdict.complaint
    assert 0 <= verdict.max_abs_err < float(reference.bound.max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_of_summation_is_accepted(dtype: str) -> None:
    problem, reference = alone("gemm_rs", dtype)
    inputs = make_inputs(problem, 0, seed=7)
    wide = torch.float64 if dtype == "float64" else torch.float32
    backwards = torch.zeros(problem.m, problem.n, dtype=wide)
    x, weight = inputs.exact
    for column in reversed(range(problem.k)):
        one = slice(column, column + 1)
        backwards += torch.mm(x[:, one].to(wide), weight[:, one].to(wide).t())
    assert judge(problem, 0, backwards.to(problem.result_dtype), reference).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_product_in_every_row_is_detected(dtype: str) -> None:
    problem, reference = alone("ag_gemm", dtype)
    inputs = make_inputs(problem, 0, seed=7)
    inputs.x[:, -1] = 0  # a GEMM that stops one short of K
    verdict = judge(problem, 0, product(problem, inputs), reference)
    assert not verdict.ok
    assert verdict.max_abs_err > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_rows_are_detected(dtype: str) -> None:
    problem, reference = alone("gemm_ar", dtype)
    swapped = right(problem)
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not judge(problem, 0, swapped, reference).ok


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_scales_of_other_rows_or_ranks_are_detected(op: str, scaling: str) -> None:
    problem = Problem(Op[op], 24, 16, 64, SCALED, 2, scaling=scaling)
    everybody = [make_inputs(problem, rank, seed=5) for rank in range(2)]
    references = reference_of_all(problem, everybody)

    def verdict() -> bool:
        """Whether rank 0's result of these inputs is accepted."""
        mine, peer = everybody
        if problem.op.gathers:
            x = torch.cat([mine.exact[0], peer.exact[0]])
            result = x @ mine.exact[1].t()
        else:
            result = mine.exact[0] @ mine.exact[1].t() + peer.exact[0] @ peer.exact[1].t()
        own = slice(*problem.rows(0)) if problem.op.scatters else slice(None)
        return judge(problem, 0, result[own].bfloat16(), references[0]).ok

    assert verdict()
    assert problem.op.reduces or scaling == "row" or everybody[0].scale_x == everybody[1].scale_x
    for name in ("scale_x", "scale_weight"):
        right = getattr(everybody[0], name)
        wrong = right.roll(1) if scaling == "row" else right * 1.25
        setattr(everybody[0], name, wrong)
        assert not verdict(), name
        setattr(everybody[0], name, right)


def test_result_of_lower_precision_is_detected() -> None:
    problem, reference = alone("ag_gemm", "float32")
    inputs = make_inputs(problem, 0, seed=7)
    low = torch.mm(inputs.x.bfloat16(), inputs.weight.bfloat16().t()).float()
    assert not judge(problem, 0, low, reference).ok


def test_complaint_names_the_wrong_element() -> None:
    problem, reference = alone("ag_gemm", "float32")
    result = right(problem)
    result[17, 5] += 1
    verdict = judge(problem, 0, result, reference)
    assert not verdict.ok
    assert "1 of 960 elements are wrong" in verdict.complaint
    assert "element [17, 5]" in verdict.complaint
    assert verdict.max_abs_err == pytest.approx(1, rel=1e-3)


def test_nan_is_never_right() -> None:
    problem, reference = alone("ag_gemm", "float32")
    result = right(problem)
    result[39, 23] = float("nan")
    verdict = judge(problem, 0, result, reference)
    assert not verdict.ok
    assert "1 NaN" in verdict.complaint
    assert "element [39, 23]" in verdict.complaint


def test_wrong_shape_dtype_and_type_are_named() -> None:
    problem, reference = alone("ag_gemm", "float32")
    assert "expected [40, 24]" in judge(problem, 0, right(problem)[:-1], reference).complaint
    assert "float64" in judge(problem, 0, right(problem).double(), reference).complaint
    assert "not a tensor" in judge(problem, 0, None, reference).complaint


def test_growth_returns_the_smaller_of_two_bounds() -> None:
    assert growth(1) == 1
    assert growth(100) == 100
    assert growth(10_000) == 1000


@given(
    st.sampled_from(OPS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40),
    st.integers(1, 9),
)  # fmt: skip
def test_shares_cover_the_problem_once(op: str, m: int, n: int, k: int, world: int) -> None:
    problem = Problem(Op[op], m, n, k, "float32", world)
    ranks = range(world)
    assert sum(end - begin for begin, end in map(problem.rows, ranks)) == m
    x = [problem.x_shape(rank) for rank in ranks]
    weight = [problem.weight_shape(rank) for rank in ranks]
    result = [problem.result_shape(rank) for rank in ranks]
    if op == "ag_gemm":
        assert sum(rows for rows, _ in x) == m
        assert {columns for _, columns in x + weight} == {k}
        assert sum(rows for rows, _ in weight) == n
        assert all(shape == (m, rows) for shape, (rows, _) in zip(result, weight, strict=True))
    else:
        assert sum(columns for _, columns in x) == sum(columns for _, columns in weight) == k
        assert {rows for rows, _ in x} == {m}
        assert {columns for _, columns in result} == {n}
        assert sum(rows for rows, _ in result) == (m if op == "gemm_rs" else m * world)


def _library_path(
    rank: int, world: int, op: str, dtype: str, shape: tuple[int, int, int], scaling: str
) -> tuple[bool, str, list[float]]:
    problem = Problem(Op[op], *shape, dtype, world, scaling=scaling)
    inputs = make_inputs(problem, rank, seed=3)
    reference = make_reference(problem, rank, inputs)
    verdict = judge(problem, rank, UnfusedMethod(problem, rank)(inputs), reference)
    return verdict.ok, verdict.complaint, reference.expected.flatten().tolist()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world, shape", [(2, (64, 48, 96)), (3, (7, 5, 4)), (4, (2, 9, 3))])
def test_library_path_passes_on_ragged_shapes(
    op: str, world: int, shape: tuple[int, int, int]
) -> None:
    for dtype, scaling in [*((dtype, "") for dtype in DTYPES), (SCALED, "row")]:
        verdicts = run_ranks(world, _library_path, op, dtype, shape, scaling)
        assert all(ok for ok, _, _ in verdicts), verdicts
        if op == "gemm_ar":
            assert all(values == verdicts[0][2] for _, _, values in verdicts)
