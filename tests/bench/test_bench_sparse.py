"""`flux bench op` and `flux bench suite` of ops of experts and heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flux.bench import sparse
from flux.bench.config import BenchConfig, link_bytes_minimum
from flux.bench.op import measure
from flux.bench.places.sparse import SparseRanks
from flux.bench.shapes import load_shapes, model_in
from flux.bench.sparse_reference import draw_choices
from flux.cli.app import app
from flux.core.datafile import data_root
from flux.core.sparse_problem import SPARSE, SparseProblem, make_problem
from harness import run_ranks

ROUTED = [name for name in SPARSE if "grouped" in name]


class Damaged(sparse.FusedSparse):
    """The op; one element of its last routing is wrong by less than a hundredth of most others."""

    def __call__(self, inputs: Any) -> Any:
        results = list(super().__call__(inputs))
        results[-1] = results[-1].clone()
        results[-1].view(-1)[-1] += 0.01 if results[-1].dtype is torch.float32 else 8.0
        return results


def _measured(rank: int, world: int, name: str, scales: dict[str, Any]) -> None:
    sizes = {"ep": 1} if name == "ag_grouped_gemm" else {}
    if name not in ROUTED:
        sizes = {"head_dim": 4, "heads": (6,) if name == "all_to_all_gemm" else (6, 3)}
    packed = 4 * sum(sizes.get("heads", (1,)))
    n, k = (packed, 9) if name == "gemm_all_to_all" else (9, packed)
    dtype = "float8_e4m3fn" if scales else "float32"
    problem = make_problem(name, 13, n, k, dtype, world, {**sizes, **scales})
    config = BenchConfig(problem=problem, repeats=2, warmup=0, skews=(0.0, 2.0), backend="cpu")
    place = SparseRanks(config, rank)

    def factory(config: BenchConfig, rank: int) -> list[Any]:
        return [*place.factory(config, rank), Damaged("damaged", config, None)]

    results = measure(config, rank, factory=factory, place=place).methods
    wrong = {method.name for method in results if method.complaints}
    assert wrong == {"damaged"}, [method.complaints for method in results]
    names = ["unfused", "medium", "flux", "damaged"]
    assert [method.name for method in results] == [
        n for n in names if n != "medium" or "gr" in name
    ]
    assert all(m.metrics is not None and m.metrics.ect_ms for m in results if m.name != "damaged")


@pytest.mark.parametrize("name", SPARSE)
def test_methods_are_right_and_a_wrong_element_is_found(name: str) -> None:
    run_ranks(3, _measured, name, {})
    for scaling in ("tensor", "row") if name in ROUTED else ():
        run_ranks(3, _measured, name, {"scaling": scaling, "fast_accum": scaling == "row"})


def _small(rank: int, world: int) -> None:
    """A rank without columns, one with one expert fewer or none, and products of few terms."""
    for name, m, n, k, sizes in (
        ("ag_grouped_gemm", 3, 1, 5, {"experts": 4, "topk": 2}),
        ("dispatch_grouped_gemm", 61, 34, 18, {"experts": 5, "topk": 3, "ep": world}),
        ("grouped_gemm_combine", 61, 34, 18, {"experts": 5, "topk": 3, "ep": world}),
        ("grouped_gemm_rs", 500, 64, 2, {"experts": 2, "topk": 1}),
    ):
        problem = make_problem(name, m, n, k, "float32", world, sizes)
        config = BenchConfig(problem=problem, repeats=1, warmup=0, backend="cpu")
        for method in measure(config, rank).methods:
            assert not method.complaints, (name, method.name, method.complaints)


def test_small_sizes_are_judged_right() -> None:
    run_ranks(4, _small)


def test_routers_are_balanced_or_skewed() -> None:
    def most(skew: float) -> float:
        experts, probs = draw_choices(4000, 16, 2, skew, 3)
        assert experts.shape == probs.shape == (4000, 2) and experts.max() < 16
        assert (experts[:, 0] != experts[:, 1]).all() and (probs > 0).all()
        return float(experts.flatten().bincount(minlength=16).max()) / 500

    assert most(0.0) < 1.15 and 1.5 < most(1.0) < most(3.0)


def test_sizes_of_ops_are_checked() -> None:
    problem = make_problem("dispatch_grouped_gemm", 64, 8, 8, "float32", 4, {"experts": 5})
    assert isinstance(problem, SparseProblem) and problem.ep == 4 and problem.variant == "e5t2p4"
    assert link_bytes_minimum(problem, (0, 0, 1, 1)) == 0
    heads = make_problem("all_to_all_gemm", 64, 8, 256, "float32", 4)
    assert heads.sizes == {"heads": (4,), "head_dim": 64}
    assert link_bytes_minimum(heads, (0, 0, 1, 1)) == 64 * 256 * 4 // 2
    for name, sizes, text in (
        ("ag_grouped_gemm", {"ep": 3}, "ep must divide the 4 ranks, got 3"),
        ("ag_grouped_gemm", {"topk": 9}, "topk and ep must be at most experts = 8"),
        (
            "ag_grouped_gemm",
            {"heads": 4},
            "sizes of ag_grouped_gemm are experts, topk, ep; got heads",
        ),
        ("gemm_all_to_all", {"heads": (3,)}, "n must be heads"),
        ("ag_gemm", {"topk": 2}, "none beside m, n and k"),
        ("unknown", {}, "op must be one of ag_gemm, .*all_to_all_gemm"),
    ):
        with pytest.raises(ValueError, match=text):
            make_problem(name, 64, 8, 8, "float32", 4, sizes)


def test_the_command_and_the_suite_print_sizes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shape = ["--m", "24", "--n", "6", "--k", "5", "--repeats", "3", "--warmup", "0"]
    sizes = ["--sizes", "experts=4,topk=3,skew=1.5"]
    run = ["bench", "op", "--op", "grouped_gemm_rs", *shape, *sizes, "--json", str(out)]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    assert "experts=4, topk=3, ep=1, skews=1.5" in " ".join(result.output.split())
    document = json.loads(out.read_text())
    assert document["topk"] == 3 and document["methods"]["flux"]["overall_ms"] > 0
    for bad in ("experts=x", "topk", "experts=4 topk=2"):
        result = CliRunner().invoke(app, [*run[:-2], "--sizes", bad])
        assert result.exit_code == 2 and "--sizes must look like" in result.output

    file = tmp_path / "few.toml"
    text = 'model = "few"\ndtype = "float32"\ntensor_parallel = [2]\n[[shape]]\nop = "{}"\n'
    text += "m = [8]\nn = 6\nk = 8\n{}"
    file.write_text(text.format("all_to_all_gemm", "heads = [4]\nhead_dim = 2\n"))
    results, page = tmp_path / "suite.json", tmp_path / "page.html"
    run = ["bench", "suite", "--shapes", str(file), "--repeats", "3", "--warmup", "0"]
    options = ["--json", str(results), "--report", str(page)]
    result = CliRunner().invoke(app, [*run, *options])
    assert result.exit_code == 0, result.output
    assert "heads=4 head_dim=2" in result.output and "heads=4 head_dim=2" in page.read_text()
    again = CliRunner().invoke(app, [*run, *options, "--resume"])
    assert "resuming: 1 of 1" in again.output


def test_files_of_shapes_have_float8(tmp_path: Path) -> None:
    file, results = tmp_path / "few.toml", tmp_path / "suite.json"
    head = 'model = "few"\ndtype = "{}"\ntensor_parallel = [2]\nscaling = "row"\n'
    shape = '[[shape]]\nop = "gemm_rs"\nm = [8]\nn = 6\nk = 8\n'
    file.write_text(head.format("float8_e4m3fn") + shape)
    shapes = load_shapes(file)
    for dtype, scales, variant in (
        (None, None, "row"),
        (None, {"fast_accum": True}, "row-fast"),
        (None, {"scaling": "tensor"}, "tensor"),
        ("bfloat16", None, ""),
    ):
        (problem,) = shapes.problems(2, dtype, scales)
        assert problem.variant == variant
    run = ["bench", "suite", "--shapes", str(file), "--repeats", "3", "--warmup", "0"]
    for more, seen in (([], "scaling=row"), (["--resume"], "resuming: 1 of 1")):
        result = CliRunner().invoke(app, [*run, "--json", str(results), *more])
        assert result.exit_code == 0 and seen in result.output, result.output
    model = (data_root() / "shapes" / "llama3-8b.toml").read_text()
    file.write_text(model.replace('dtype = "bfloat16"', 'dtype = "float8_e4m3fn"'))
    assert {p.variant for p in load_shapes(file).problems(2)} == {"tensor"}
    with pytest.raises(ValueError, match=r"dtype: .* float64, float32, bfloat16, float16"):
        model_in(file)  # activations are not float8
    file.write_text(head.format("bfloat16") + shape)
    with pytest.raises(ValueError, match="scaling: is for dtype float8_e4m3fn, got bfloat16"):
        load_shapes(file)


def test_the_shipped_file_has_every_op() -> None:
    shapes = load_shapes("experts-cpu")
    assert {problem.name for problem in shapes.problems(2)} == set(SPARSE)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_experts_of_float8_on_gpus_are_compared_with_the_librarys_product(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which CPUs do not have: its arguments are checked, and what it is to compute."""

    def product(x: Any, weight: Any, of_rows: Any, of_columns: Any, ends: Any, **rest: Any) -> Any:
        assert rest == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        assert of_rows.shape == x.shape[:1] and of_columns.shape == (4, 32)
        assert weight.shape == (4, 48, 32) and weight.stride(1) == 1
        out, begin = [], 0
        for expert, end in enumerate(ends.tolist()):
            wide = x[begin:end].float() @ weight[expert].float() * of_columns[expert]
            out.append(wide * of_rows[begin:end, None])
            begin = end
        return torch.cat(out).bfloat16()

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product, raising=False)
    sizes = {"experts": 4, "topk": 3, "scaling": scaling, "fast_accum": True}
    for name in ("ag_grouped_gemm", "grouped_gemm_rs", "dispatch_grouped_gemm"):
        problem = make_problem(name, 21, 32, 48, "float8_e4m3fn", 1, sizes)
        assert isinstance(problem, SparseProblem)
        share = sparse.SparseShare(problem, 0, gpus=True)
        inputs = share.inputs(1, (0.0,))
        (case,) = inputs.routings
        call = sparse.grouped(problem, inputs, share.routing(case.experts), at_once=True)
        rows = case.exact
        if problem.op.gathers:
            tokens, _ = share.routing(case.experts).on(rows.device)
            scale = case.scale_x if scaling == "tensor" else case.scale_x[tokens]
            got, rows = (
                call(case.x.view(torch.uint8)[tokens].view(case.x.dtype), scale),
                rows[tokens],
            )
        else:
            got = call(case.x, case.scale_x)
        for expert, begin, end in share.routing(case.experts).groups(0, 21):
            right = rows[begin:end] @ inputs.exact_weight(expert).t()
            torch.testing.assert_close(got[begin:end].double(), right, rtol=1e-2, atol=1e-2)
