"""`flux bench serve`: settings, report and exit status. tests/clients run it with real programs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flux.bench import command_serve, serve_report
from flux.bench.serve import ServeConfig
from flux.bench.serve_report import PhaseTimes
from flux.cli.app import app

CONFIG = ServeConfig("transformers", "llama3-8b", 2, prompts=(64,), batches=(1,), repeats=5)
FORMS = {"stock": [4.0, 4.0, 4.2, 4.0, 3.9], "flux": [2.0, 2.0, 2.1, 2.0, 2.0]}
PHASES = [
    PhaseTimes("prefill", 64, FORMS | {"alone": [5.0] * 5}, 1e-6),
    PhaseTimes("decode", 1, FORMS | {"alone": [1.0] * 5}, 2e-6),
]


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_report, "program_version", lambda program: "5.0")


def test_a_file_of_shapes_becomes_a_llama_whose_heads_all_ranks_have() -> None:
    llama = ServeConfig("transformers", "llama3-8b", 4, scale=16).llama
    assert llama["hidden_size"] == 256 and llama["intermediate_size"] == 896
    assert llama["num_attention_heads"] % 4 == 0 == llama["num_key_value_heads"] % 4
    assert llama["max_position_embeddings"] >= 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"program": "sglang"}, "program must be"),
        ({"world": 1}, "world must be at least 2"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"prompts": (512, 0)}, "prompts and batches"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"model": "gpt3-175b"}, "no Llama"),
        ({"model": "nowhere"}, "nowhere"),
        ({"scale": 3}, "divisible"),
        ({"program": "vllm", "world": 4, "hosts": "3+1"}, "equally many ranks"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    settings = {"program": "transformers", "model": "llama3-8b", "world": 2} | changes
    with pytest.raises(ValueError, match=message):
        ServeConfig(**settings)  # type: ignore[arg-type]


def test_the_report_has_ratios_with_intervals() -> None:
    content = serve_report.document(CONFIG, PHASES, ["flux", "bench", "serve"])
    prefill, decode = content["phases"]
    assert prefill["ratio_to_stock"] == 0.5 and prefill["ratio_to_alone"] == 0.4
    low, high = prefill["ratio_to_stock_interval"]
    assert low <= 0.5 <= high
    assert decode["ratio_to_alone"] == 2.0 and decode["repeats_ms"]["flux"] == FORMS["flux"]
    out = io.StringIO()
    serve_report.show(content, Console(file=out, width=80))
    assert "TTFT, prompt 64" in out.getvalue() and "0.50 (" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_wrong_result_has_no_time_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = PhaseTimes("decode", 1, {}, 0.5, "decode 1: tokens of rank 1 differ from stock's")
    monkeypatch.setattr("flux.bench.launch.on_ranks", lambda *_: [PHASES[0], wrong])
    monkeypatch.setattr(command_serve.importlib.util, "find_spec", lambda name: object())
    target = tmp_path / "serve.json"
    done = CliRunner().invoke(app, ["bench", "serve", "--json", str(target)])
    assert done.exit_code == 1
    assert "wrong result" in done.stdout and "tokens of rank 1 differ" in done.stderr
    phase = json.loads(target.read_text())["phases"][1]
    assert phase["wrong"] == wrong.complaint and "repeats_ms" not in phase
