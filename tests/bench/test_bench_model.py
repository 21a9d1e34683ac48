"""`flux bench model`: Megatron-core's layer with its own linear layers and with ours."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import megatron_cases as mc  # noqa: F401  which skips all this where Megatron-core is not
from flux.bench import model_layers, model_report, model_run
from flux.bench.model import PHASES, ModelConfig, scaled
from flux.bench.model_run import FormResult, PhaseResult, covered, measure_model
from flux.bench.shapes import Layer, layer_of
from flux.cli.app import app
from harness import run_ranks

TINY = """
model = "tiny"
dtype = "float32"
tensor_parallel = [2]
[layer]
hidden = 64
intermediate = 128
heads = 8
kv_heads = {kv_heads}
head_dim = 16
gated = {gated}
layers = 1
[[workload]]
name = "training"
sequence = 8
batch = [1]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> ModelConfig:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(kv_heads=8, gated="false"))
    return ModelConfig(str(file), 2, scale=1, sequence=8, decode_batch=3, repeats=2, warmup=1)


def _measure(rank: int, world: int, config: ModelConfig) -> list[PhaseResult]:
    with torch.compiler.set_stance("force_eager"):  # else Inductor compiles Megatron's functions
        return measure_model((config, None), rank)


@pytest.mark.parametrize("gated", [False, True], ids=["gpt", "llama"])
def test_all_phases_on_two_ranks(tiny: ModelConfig, gated: bool) -> None:
    if gated:
        Path(tiny.model).write_text(TINY.format(kv_heads=4, gated="true"))
        tiny = replace(tiny, batch=2, sequence_parallel=False, dtype="bfloat16")
    ours, others = run_ranks(2, _measure, tiny)
    assert [result.phase for result in ours] == list(PHASES)
    for result, other in zip(ours, others, strict=True):
        assert result == other, "all ranks come to the same figures"
        assert result.complaint == "" and result.max_error <= model_run.TOLERANCE[tiny.dtype]
        assert list(result.forms) == ["megatron", "flux"]
        for form in result.forms.values():
            assert len(form.repeats_ms) == tiny.repeats_of(result.phase)
            assert form.host_ms > 0
            parts = result.compute_ms + form.exposed_ms + form.host_ms
            assert parts == pytest.approx(form.overall_ms)


def _ops_of_each_form(rank: int, world: int, config: ModelConfig) -> dict[str, list[int]]:
    """Count the calls of flux ops by each form, per phase."""
    from flux.bench.megatron_cpu import megatron_on_cpu
    from flux.layers import close_pools

    counts: dict[str, list[int]] = {form: [] for form in model_layers.FORMS}
    with megatron_on_cpu(world), torch.compiler.set_stance("force_eager"):
        for phase in PHASES:
            for form, call in model_layers.make_calls(config, phase, rank).items():
                calls: list[None] = []
                with model_run.around_ops(lambda calls=calls: nullcontext(calls.append(None))):
                    call()
                counts[form].append(len(calls))
        close_pools()
    return counts


def test_only_layers_of_flux_call_ops_of_flux(tiny: ModelConfig) -> None:
    # Four linear layers, each fused forward and backward; in decoding, the two that reduce.
    expected = {"compute": [0, 0, 0], "megatron": [0, 0, 0], "flux": [8, 4, 2]}
    assert run_ranks(2, _ops_of_each_form, tiny) == [expected] * 2


def _measure_wrong(rank: int, world: int, config: ModelConfig) -> list[PhaseResult]:
    original = model_layers.LayerCall.__call__

    def wrong(self: Any) -> torch.Tensor:
        y = original(self)
        if rank == 1 and type(self.layer.mlp.linear_fc1).__module__.startswith("flux"):
            self.results["output"] = self.results["output"] + 1
        return y

    eager = torch.compiler.set_stance("force_eager")
    with eager, mock.patch.object(model_layers.LayerCall, "__call__", wrong):
        return measure_model((config, None), rank)


def test_wrong_result_hides_the_speed(tiny: ModelConfig) -> None:
    for results in run_ranks(2, _measure_wrong, replace(tiny, phases=("decode",))):
        (result,) = results
        assert result.forms == {} and result.ratio is None
        assert result.complaint == "decode: results of rank 1 differ from Megatron's"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world": 1}, "world must be at least 2, got 1"),
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"sequence": 7}, "not divisible by 2 ranks"),
        ({"phases": ("train", "sleep")}, "phases must be some of"),
        ({"dtype": "float16"}, "float32 or bfloat16"),
        ({"link_rate": "1gbit"}, "at least 2 hosts"),
        ({"scale": 0}, "scale must be at least 1"),
        ({"scale": 5}, "must be divisible by 5"),
        ({"model": "no-such-model"}, "no file no-such-model"),
        ({"model": "flux-paper"}, "expected the [layer] of a model"),
    ],
    ids=str,
)
def test_invalid_options_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(**{"model": "gpt3-175b", "world": 2, **options})
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("model", "scale", "world", "expected"),
    [
        ("gpt3-175b", 16, 2, (768, 3072, 6, 6)),
        ("gpt3-175b", 16, 4, (768, 3072, 4, 4)),  # 6 heads are not for 4 ranks
        ("llama2-70b", 8, 2, (1024, 3584, 8, 2)),  # 8 heads of queries for one of keys, but 2 ranks
        ("llama3-405b", 16, 2, (1024, 3328, 8, 2)),
    ],
)
def test_scaled_layer_keeps_head_dim_and_divides_among_ranks(
    model: str, scale: int, world: int, expected: tuple[int, int, int, int]
) -> None:
    whole = layer_of(model)
    layer = scaled(whole, scale, world)
    assert (layer.hidden, layer.intermediate, layer.heads, layer.kv_heads) == expected
    assert (layer.head_dim, layer.gated) == (whole.head_dim, whole.gated)


def test_scaled_heads_are_divisible_by_the_world() -> None:
    for heads, kv_heads in ((7, 7), (12, 3), (40, 8), (64, 8)):
        for world in (2, 3, 4, 8):
            for scale in (1, 2, 8):
                layer = scaled(Layer(192, 384, heads, kv_heads, 16, False), scale, world)
                assert layer.heads % world == layer.kv_heads % world == 0
                assert layer.heads % layer.kv_heads == 0


def test_covered_returns_the_length_of_the_union_of_spans() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4


RESULTS = [
    PhaseResult(
        "train",
        6.0,
        {
            "megatron": FormResult(10.0, 3.0, 1.0, [10.0]),
            "flux": FormResult(8.0, 0.5, 1.5, [8.0]),
        },
        1e-6,
    ),
    PhaseResult("decode", 0.0, {}, 2.0, "decode: results of rank 1 differ from Megatron's"),
]


def test_command_prints_the_table_and_sets_the_exit_status(tmp_path: Path) -> None:
    target = tmp_path / "model.json"
    arguments = ["bench", "model", "--phases", "train,decode", "--json", str(target)]
    with mock.patch("flux.bench.launch.on_ranks", lambda *_: RESULTS):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 1, "a wrong result"
    assert "results of rank 1 differ" in result.output
    content = json.loads(target.read_text())
    assert content["phases"]["train"]["ratio"] == 0.8
    assert content["phases"]["decode"]["ratio"] is None
    console = Console(file=io.StringIO(), width=120)
    model_report.show(content, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.split() for line in shown.splitlines()]
    assert ["train", "megatron", "10.00", "6.00", "3.00", "1.00"] in lines
    assert ["flux", "8.00", "6.00", "0.50", "1.50", "0.800"] in lines
    assert ["decode", "wrong", "result"] in lines


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc", "1"], "world must be at least 2"),
        (["--json", "/proc/nowhere/x.json"], "cannot write"),
    ],
)
def test_command_rejects_invalid_options(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["bench", "model", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and text in result.output
