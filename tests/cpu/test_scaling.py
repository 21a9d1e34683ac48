"""float8 with scales, and activations: what is refused, and what scales may look like. That results
are right is shown with everything else in test_every_op.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flux
from flux import moe
from flux.backends import epilogue
from flux.backends.unfused import UnfusedBackend
from flux.core.call import CallChecker
from flux.core.knobs import Op
from flux.core.spec import OpSpec
from harness import run_ranks
from reference import Inputs, Problem

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (flux.AGGemm, {"dtype": FP8}, "needs scaling = tensor or row"),
        (flux.GemmRS, {"scaling": "row"}, "other dtypes none; got torch.float32"),
        (flux.AGGemm, {"dtype": FP8, "scaling": "block"}, "one of none, tensor, row, got 'block'"),
        (flux.GemmAR, {"fast_accum": True}, "for float8_e4m3fn.*got True with torch.float32"),
        (flux.AGGemm, {"dtype": FP8, "scaling": "row", "fast_accum": 1}, "True or False; got 1"),
        (flux.AGGemm, {"activation": "relu"}, "one of none, gelu, silu, got 'relu'"),
        (flux.GemmAR, {"tuning": flux.Knobs(reduce="in_flight")}, "needs backend cuda"),
    ],
)
def test_invalid_scaling_and_activation_options_raise(
    op: Any, options: dict[str, Any], message: str
) -> None:
    run_ranks(1, _cannot_be_built, op, options, message)


def _cannot_be_built(rank: int, world: int, op: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(max_m=8, n=8, k=8, **options)


P = Problem("ag_gemm", 8, (6,), 4, FP8, scaling="row")


def _refused(rank: int, world: int, change: dict[str, Any], message: str, kind: Any) -> None:
    """Refused on every rank when rank 0's scales are wrong, and nothing is lost."""
    with P.build() as op:
        inputs = Inputs(P, 8, world, seed=1)
        x, weight, bias = inputs.local(rank)
        scales = inputs.scales(rank, x.shape[0])
        if rank == 0:
            scales = {**scales, **change}
        with pytest.raises(kind if rank == 0 else ValueError, match=message):
            op(x, weight, bias, m=8, **scales)
        inputs.call_and_check(op, rank)


@pytest.mark.parametrize(
    ("change", "message", "kind"),
    [
        ({"scale_x": None}, r"takes 2 scales .*, got 1", ValueError),
        ({"scale_x": torch.ones(5)}, r"scale_x must have 4 value\(s\).*\[5\]", ValueError),
        ({"scale_x": torch.ones(2, 2)}, r"in one row or column, got \[2, 2\]", ValueError),
        ({"scale_weight": torch.ones(())}, r"scale_weight must have 3 value\(s\)", ValueError),
        ({"scale_weight": torch.ones(3).bfloat16()}, "must be torch.float32", TypeError),
        ({"scale_x": 1.0}, "expected a tensor, got float", TypeError),
        ({"scale_x": torch.ones(4, requires_grad=True)}, "have no backward", ValueError),
    ],
)
def test_wrong_scales_are_refused_on_all_ranks(
    change: dict[str, Any], message: str, kind: type[Exception]
) -> None:
    run_ranks(2, _refused, change, message, kind)


def _shapes(rank: int, world: int) -> None:
    for scaling in ("row", "tensor"):
        p = Problem("gemm_rs", 8, (6,), 4, FP8, scaling=scaling, fast_accum=scaling == "row")
        with p.build() as op:
            inputs = Inputs(p, 8, world, seed=2)
            x, weight, bias = inputs.local(rank)
            scale_x, scale_weight = inputs.scales(rank, 8).values()
            shapes = [(-1, 1), (1, -1), (-1,)] + [()] * (scaling == "tensor")
            for shape in shapes:
                out = op(x, weight, bias, scale_x.view(shape), scale_weight.view(shape))
                inputs.check([out], rank)
    p = Problem("ag_gemm", 2, (6,), 4, FP8, scaling="row")
    with p.build() as op:
        inputs = Inputs(p, 2, world, seed=2)
        x, weight, bias = inputs.local(rank)
        scales = inputs.scales(rank, 1)
        scales["scale_x"] = scales["scale_x"].repeat(2)[::2]  # of one row, with a stride of two
        inputs.check([op(x, weight, bias, **scales)], rank)


def test_scales_in_a_row_or_a_column() -> None:
    run_ranks(2, _shapes)


def _no_grad(rank: int, world: int) -> None:
    with flux.AGGemm(max_m=8, n=6, k=4, activation="gelu") as op:
        x, weight = torch.randn(4, 4), torch.randn(3, 4, requires_grad=True)
        with pytest.raises(ValueError, match="have no backward; use torch"):
            op(x, weight)
        with torch.no_grad():
            assert op(x, weight).shape == (8, 3)


def test_gradient_through_an_activation_raises() -> None:
    run_ranks(2, _no_grad)


@pytest.mark.parametrize("by_row", [False, True])
def test_the_library_path_of_gpus_has_the_librarys_product(
    by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs torch has it, too. It takes multiples of 16, and memory in rows."""
    monkeypatch.setattr(epilogue, "SCALED_ON", ("cpu",))
    epilogue._has_scaled_mm.cache_clear()
    try:
        for scaled, layout, (m, n, k) in (
            (True, "dense", (5, 32, 48)),
            (True, "inside", (1, 16, 16)),
            (True, "transposed", (7, 48, 32)),
            (False, "dense", (5, 24, 48)),
            (False, "dense", (5, 32, 40)),
        ):
            p = Problem("ag_gemm", m, (n,), k, FP8, scaling="row" if by_row else "tensor")
            inputs = Inputs(p, m, 1, seed=n)
            x, weight, bias = inputs.local(0, layout)
            scales = inputs.scales(0, m).values()
            product = epilogue.scaled_mm(x, weight.t(), *scales, bias)
            assert (product is not None) == scaled
            if product is not None:
                inputs.check([product], 0, "unfused")
            run = UnfusedBackend(_spec(p), None, 0, 1, 1.0).run
            call = CallChecker(_spec(p), 1, 0).check(x, [weight], [bias], m, list(scales))
            inputs.check(run(call), 0, "unfused")
    finally:
        epilogue._has_scaled_mm.cache_clear()


def _spec(p: Problem) -> OpSpec:
    sizes = (p.max_m, p.n, p.k, p.dtype, p.transpose_weight, p.reduce)
    return OpSpec(Op[p.op], *sizes, scaling=p.scaling)


def _gather_apart(rank: int, world: int, path: str) -> None:
    """Ranks that each quantise their own rows; nothing is lost."""
    p = replace(P, scaling="tensor")
    inputs = Inputs(p, 8, world, seed=1)
    x, weight, _ = inputs.local(rank)
    with p.build(tuning=flux.Knobs(path=path)) as op:
        for own in (0.5 + rank, (-1.0) ** rank, float("nan") if rank else 1.0):
            with pytest.raises(ValueError, match=r"rank . passed different M or scale_x"):
                op(x, weight, m=8, scale_x=torch.tensor(own), scale_weight=torch.ones(1))
        with pytest.raises(ValueError, match="different M"):
            rows = x[: 1 + rank]
            op(rows, weight, m=world * len(rows), scale_x=torch.ones(1), scale_weight=torch.ones(1))
        inputs.call_and_check(op, rank)
    rows, weights = torch.zeros(4, 4).to(FP8), torch.zeros(2, 6 // world, 4).to(FP8)
    choices = torch.zeros(4 * world, 1, dtype=torch.int64)
    sizes: Any = {"max_m": 4 * world, "n": 6, "k": 4, "experts": 2, "topk": 1}
    with moe.AGGroupedGemm(**sizes, dtype=FP8, scaling="tensor", timeout_s=30) as grouped:
        own = torch.full((1,), 0.5 + rank)
        with pytest.raises(
            ValueError, match="different tokens, routing, probs or biases or scale_x"
        ):
            grouped(rows, weights, choices, scale_x=own, scale_weight=torch.ones(2))


@pytest.mark.parametrize("path", ["fused", "unfused", "one_shot"])
def test_ranks_with_different_scales_of_one_gathered_tensor_raise(path: str) -> None:
    run_ranks(2, _gather_apart, path)


def _in_autocast(rank: int, world: int) -> None:
    for op in ("ag_gemm", "gemm_rs"):
        p = Problem(op, 8, (6,), 64, FP8, scaling="row")
        with p.build() as made:
            inputs = Inputs(p, 8, world, seed=1)
            (right,) = inputs.call(made, rank)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                (got,) = inputs.call(made, rank)
            assert torch.equal(got, right)
    sizes: Any = {"max_m": 8, "n": 6, "k": 64, "experts": 1, "topk": 1}
    with moe.GroupedGemmRS(**sizes, dtype=FP8, scaling="tensor", timeout_s=30) as grouped:
        x, weight, _ = inputs.local(rank)
        choices = torch.zeros(8, 1, dtype=torch.int64)
        scales = {"scale_x": torch.ones(1), "scale_weight": torch.ones(1)}
        right = grouped(x, weight[None], choices, **scales)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(grouped(x, weight[None], choices, **scales), right)


def test_autocast_does_not_round_products_before_they_are_scaled() -> None:
    run_ranks(2, _in_autocast)
