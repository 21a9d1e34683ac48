"""`flux bench suite`: end to end on two ranks; plans, failures, budget, resuming, arguments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import suite_data
from browser import open_page
from flux.bench import command_suite as suite_cli
from flux.bench import launch, page, results, suite, suite_ranks, suite_trace
from flux.bench.config import BenchConfig
from flux.bench.metrics import Metrics
from flux.bench.op import Measurement, MethodResult
from flux.cli.app import app
from flux.core.events import Kind
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.launch.progress import Progress
from flux.launch.spawn import RankFailedError
from harness import more, stress_only
from peer_cases import Stub
from scripts import ROOT, SUPPORT, start_forked_command, under_torchrun

SHAPES = """
model = "tiny"
dtype = "float32"
tensor_parallel = [2]
[[shape]]
op = "ag_gemm"
m = [5, 64]
n = 12
k = 10
[[shape]]
op = "gemm_rs"
m = [6]
n = 9
k = 14
"""


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SHAPES)
    return str(path)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "suite", *arguments])


def measurement(config: BenchConfig, names: tuple[str, ...] = ("unfused", "medium", "flux")) -> Any:
    figures = Metrics(2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    methods = [MethodResult(name, figures, 1e-6, [2.0], {"path": name}, []) for name in names]
    return Measurement(methods, {}, {}, 0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """Record the configs that would be measured, without starting ranks."""
    seen: list[BenchConfig] = []

    def measured(config: BenchConfig, progress: Progress, factory: Any = None) -> Measurement:
        seen.append(config)
        progress("measuring", 1, 2)
        return measurement(config)

    monkeypatch.setattr(launch, "measured", measured)
    monkeypatch.setattr(suite_trace, "reason_unsupported", lambda config: "no ranks")
    return seen


def read(target: Path) -> dict[str, Any]:
    """Return the JSON of a file that the suite's own reader accepts."""
    results.load(target)
    document: dict[str, Any] = json.loads(target.read_text())
    return document


# -- end to end ------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_tiny_suite_from_shapes_to_page(shapes: str, tmp_path: Path) -> None:
    target, table, html = (tmp_path / name for name in ("out.json", "out.csv", "out.html"))
    outputs = ["--json", str(target), "--csv", str(table), "--report", str(html)]
    options = ["--shapes", shapes, "--repeats", "5", "--warmup", "1", "--sweeps"]
    result = invoke(*options, *outputs)
    assert result.exit_code == 0, result.output
    document = read(target)
    done = [(one["kind"], one["op"], one["m"]) for one in document["entries"]]
    assert done == [
        ("shape", "ag_gemm", 5),
        ("shape", "ag_gemm", 64),
        ("shape", "gemm_rs", 6),
        ("comm_tile_rows", "ag_gemm", 64),
        ("direction", "ag_gemm", 64),
        ("comm_tile_rows", "gemm_rs", 6),
        ("direction", "gemm_rs", 6),
    ]
    assert {entry["status"] for entry in document["entries"]} == {"done"}
    methods = [list(entry["result"]["methods"]) for entry in document["entries"]]
    assert methods[:3] == [["unfused", "medium", "flux"]] * 3
    assert methods[3:5] == [["unfused", "32", "16"], ["unfused", "push", "pull"]]
    sweep = document["entries"][3]["result"]["methods"]
    assert [sweep[name]["knobs"]["comm_tile_rows"] for name in ("32", "16")] == [32, 16]
    direction = document["entries"][4]["result"]["methods"]
    assert [direction[name]["knobs"]["direction"] for name in ("push", "pull")] == ["push", "pull"]
    for name, reason in document["peers"].items():
        assert reason, f"{name} is on no machine that runs these tests"
        assert f"absent: {name}: {reason}" in result.stdout
        assert name in html.read_text()
    for entry in document["entries"]:
        for one in entry["result"]["methods"].values():
            assert f"{one['overall_ms']:.4g}" in result.stdout
    assert table.read_text() == results.to_csv(results.from_json(document))
    events = results.from_json(document).timeline.events
    assert {event.rank for event in events} == {0, 1}
    assert {Kind.gemm, Kind.copy} <= {event.kind for event in events}
    assert html.read_text().count('class="event k-') == len(events)
    assert document["timeline"]["title"] == "ag_gemm 64 x 12 x 10, 2 ranks"
    again = tmp_path / "again.html"
    shown = invoke("--from", str(target), "--report", str(again))
    assert shown.exit_code == 0, shown.output
    assert again.read_text() == html.read_text() == page.render(results.from_json(document))


@pytest.mark.usefixtures("browser")
def test_a_suite_of_this_machine_in_a_browser(
    shapes: str, quick: list[BenchConfig], tmp_path: Path
) -> None:
    html = tmp_path / "out.html"
    assert invoke("--shapes", shapes, "--report", str(html), "--sweeps").exit_code == 0
    seen = open_page(html, "g.bar", "tr.figures", "tr.peer")
    assert seen["messages"] == []
    assert seen["counts"] == {"g.bar": 21, "tr.figures": 21, "tr.peer": 1}
    assert all(view["wide"] == [] for view in seen["widths"].values())


# -- what is measured ------------------------------------------------------------------------------


def test_default_shapes_on_cpus_are_scaled_down_from_the_paper(quick: list[BenchConfig]) -> None:
    assert invoke().exit_code == 0
    assert len(quick) == 12
    assert {(c.problem.op.name, c.problem.n, c.problem.k) for c in quick} == {
        ("ag_gemm", 3072, 768),
        ("gemm_rs", 768, 3072),
    }
    assert {c.problem.world for c in quick} == {2}
    from flux.bench.shapes import load_shapes

    paper = load_shapes("flux-paper").sizes
    ours = [(op, m * 4, n * 16, k * 16) for op, m, n, k in load_shapes("flux-paper-cpu").sizes]
    assert ours == list(paper)


def test_default_shapes_on_gpus_are_those_of_the_paper(
    quick: list[BenchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from flux.bench.places import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(gpu, "problem_here", lambda config: None)
    assert invoke("--quiet").exit_code == 0
    assert {c.problem.world for c in quick} == {8}
    assert {c.backend for c in quick} == {"cuda"}
    sizes = [(c.problem.op.name, c.problem.m, c.problem.n, c.problem.k) for c in quick]
    assert sizes[0] == ("ag_gemm", 64, 49152, 12288)
    assert sizes[-1] == ("gemm_rs", 8192, 12288, 49152)


def test_options_select_ops_rows_and_settings(shapes: str, quick: list[BenchConfig]) -> None:
    options = ["--ops", "gemm_rs", "--m", "3,4", "--nproc", "3", "--dtype", "fp64", "--seed", "7"]
    assert invoke("--shapes", shapes, *options, "--repeats", "2", "--timeout", "9").exit_code == 0
    assert [(c.problem.op.name, c.problem.m, c.problem.world) for c in quick] == [
        ("gemm_rs", 3, 3),
        ("gemm_rs", 4, 3),
    ]
    assert {(c.problem.dtype, c.seed, c.repeats, c.timeout_s) for c in quick} == {
        ("float64", 7, 2, 9.0)
    }


def test_sweeps_halve_the_chunk() -> None:
    problems = [
        Problem(op, m, 8, 8, "float32", 4) for op in (Op.ag_gemm, Op.gemm_rs) for m in (64, 9)
    ]
    sweeps = suite.sweeps_of(problems)
    assert [(one.problem.op.name, one.problem.m, one.knob) for one in sweeps] == [
        (op, 64, knob) for op in ("ag_gemm", "gemm_rs") for knob in ("comm_tile_rows", "direction")
    ]
    assert list(sweeps[0].variants()) == ["16"]
    large = suite.Sweep("comm_tile_rows", Problem(Op.ag_gemm, 8192, 8, 8, "float32", 8))
    assert list(large.variants()) == ["1024", "512", "256", "128", "64", "32"]
    assert {one.problem.m for one in suite.sweeps_of(problems, 9)} == {9}
    with pytest.raises(ValueError, match="no shape has M = 10"):
        suite.sweeps_of(problems, 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "nothing.toml"], "no file nothing.toml; shapes shipped with flux: "),
        (["--ops", "gemm_ar"], "--ops gemm_ar: the file has ag_gemm, gemm_rs"),
        (["--m", "x"], "--m must be integers >= 1"),
        (["--budget", "soon"], "a duration must look like"),
        (["--resume"], "--resume needs the results of the earlier run: pass --json FILE"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--backend", "tpu"], "--backend must be cpu or cuda"),
        (["--backend", "cuda"], "needs a CUDA device"),
        (["--hosts", "3", "--nproc", "2"], "hosts must be in [1, 2], got 3"),
        (["--link-rate", "1gbit"], "a link rate needs at least 2 hosts"),
        (["--sweeps", "--sweep-m", "3"], "no shape has M = 3"),
        (["--report", "/dev/null/x.html"], "cannot write /dev/null/x.html"),
        (["--from", "/no/such.json"], "cannot read /no/such.json: No such file"),
        (["--from", "/dev/null"], "cannot read /dev/null: not a regular file"),
    ],
)
def test_usage_errors_measure_nothing(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "measured", None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


# -- torchrun, hosts -------------------------------------------------------------------------------


@stress_only
@pytest.mark.timeout(400)
def test_suite_under_torchrun(shapes: str, tmp_path: Path) -> None:
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    command = ["-m", "flux", "bench", "suite", "--shapes", shapes, "--ops", "ag_gemm"]
    command += ["--json", str(target), "--repeats", "2"]
    printed = under_torchrun(*command, "--report", str(html), timeout_s=200)
    document = read(target)
    assert [entry["status"] for entry in document["entries"]] == ["done"] * 2
    assert (document["settings"]["world"], document["settings"]["hosts"]) == (2, "1")
    assert {event.rank for event in results.from_json(document).timeline.events} == {0, 1}
    assert printed.count("[2/2] ag_gemm 64 x 12 x 10") == 1  # one of the ranks speaks
    document["entries"][1]["status"] = "failed"  # what rank 0's file says is what all ranks do
    results.save(results.from_json(document), target)
    printed = under_torchrun(*command, "--resume", timeout_s=200)
    assert "resuming: 1 of 2 are measured already" in printed
    again = read(target)
    assert [entry["status"] for entry in again["entries"]] == ["done"] * 2
    assert again["entries"][0] == document["entries"][0]


@pytest.mark.timeout(300)
def test_a_dead_rank_under_torchrun_costs_one_attempt(tmp_path: Path) -> None:
    script = tmp_path / "suite_under_torchrun.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = {[*SUPPORT, str(ROOT / "benchmarks")]!r}
import json
from dataclasses import replace
from flux.bench import suite
from flux.bench.config import BenchConfig
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.bench.suite_ranks import TorchrunRanks
from peer_cases import Stub

if __name__ == "__main__":
    ranks = TorchrunRanks()
    base = BenchConfig(Problem(Op.gemm_rs, 4, 4, 4, "float32", 2), repeats=2, warmup=0)
    peers = (Stub("fine"), Stub("faulty", "kill"), Stub("raises", "raise"))
    document = suite.new_document([base], [], {{}}, {{peer.name: None for peer in peers}}, [])
    if ranks.leads:
        for some in (peers[::2], peers[:2]):
            document.entries[0].status, document.entries[0].peers = "pending", {{}}
            made = suite.Suite(
                document, base, lambda: None, suite.Watcher(), peers=some, run=ranks.measure
            )
            made.run()
            print(json.dumps(document.entries[0].as_json()))
        ranks.done()
    else:
        ranks.follow()
    ranks.close()
"""
    )
    lines = under_torchrun(str(script), timeout_s=200).splitlines()
    raised, killed = (json.loads(line) for line in lines if line.startswith("{"))
    assert raised["status"] == killed["status"] == "done"
    assert list(raised["result"]["methods"]) == ["unfused", "medium", "flux", "fine"]
    assert "peer raises: RuntimeError: the injected fault" in raised["peers"]["raises"]
    assert list(killed["result"]["methods"]) == ["unfused", "medium", "flux"]
    assert "rank 1: exited with 9" in killed["peers"]["faulty"]


def test_peer_is_measured_only_if_all_hosts_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(suite_ranks.TorchrunRanks)
    everybody = [{"a": None, "b": None}, {"a": "not installed", "b": None}]
    monkeypatch.setattr(ranks, "agree", lambda value: everybody, raising=False)
    assert ranks.survey() == {"a": "not installed", "b": None}


@pytest.mark.parametrize(
    ("everybody", "text"),
    [
        ([("", {"backend": "cpu"}), ("needs a CUDA device", None)], "needs a CUDA device"),
        ([("", {"backend": "cpu"}), ("", {"backend": "cuda"})], "different plans"),
    ],
)
def test_error_or_different_plan_on_one_rank_exits_on_all_ranks(
    everybody: list[Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for leads in (True, False):
        ranks: Any = SimpleNamespace(leads=leads, agree=lambda value: everybody)
        plan: Any = SimpleNamespace(settings=everybody[0][1])
        with pytest.raises(typer.Exit) as caught:
            suite_cli._agreed(ranks, lambda plan=plan: plan)  # type: ignore[misc]
        assert caught.value.exit_code == 2
        assert (text in capsys.readouterr().err) == leads


@pytest.mark.timeout(240)
def test_suite_runs_on_hosts_made_of_network_namespaces(
    shapes: str, make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    make_hosts(2).close()  # skips where there can be none
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    options = ["--shapes", shapes, "--m", "64", "--hosts", "2", "--link-rate", "1gbit"]
    options += ["--repeats", "3", "--warmup", "1", "--sweeps"]
    result = invoke(*options, "--json", str(target), "--report", str(html))
    assert result.exit_code == 0, result.output
    document = read(target)
    assert [(one["kind"], one["status"]) for one in document["entries"]] == [
        ("shape", "done"),
        ("shape", "done"),
        ("comm_tile_rows", "done"),
        ("comm_tile_rows", "done"),
    ]
    for entry in document["entries"]:
        found = entry["result"]
        assert (found["hosts"], found["link_rate"]) == (2, "1gbit")
        assert all(
            m["link_bytes"] >= found["link_bytes_minimum"] for m in found["methods"].values()
        )
    assert document["settings"]["hosts"] == "2"
    assert {event.rank for event in results.from_json(document).timeline.events} == {0, 1}
    result = invoke(*options, "--json", str(target), "--resume", "--link-rate", "500mbit")
    assert result.exit_code == 2
    assert "(link_rate '1gbit', now '500mbit')" in " ".join(result.stderr.split())


# -- when something goes wrong ---------------------------------------------------------------------


def test_a_shape_that_fails_does_not_end_the_run(
    shapes: str, quick: list[BenchConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = launch.measured

    def measured(config: BenchConfig, progress: Progress, factory: Any = None) -> Measurement:
        if config.problem.m == 5:
            raise RankFailedError("rank 1: killed by SIGKILL")
        return good(config, progress, factory)

    monkeypatch.setattr(launch, "measured", measured)
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    options = ["--shapes", shapes, "--json", str(target), "--report", str(html)]
    result = invoke(*options)
    assert result.exit_code == 1
    failed = "ag_gemm 5 x 12 x 10: RankFailedError: rank 1: killed by SIGKILL"
    assert failed in result.stderr
    assert [entry["status"] for entry in read(target)["entries"]] == [
        "failed",
        "done",
        "done",
    ]
    assert "killed by SIGKILL" in html.read_text()
    # Once it is mended, --resume measures that one alone.
    monkeypatch.setattr(launch, "measured", good)
    quick.clear()
    assert invoke(*options, "--resume").exit_code == 0
    assert [config.problem.m for config in quick] == [5]
    assert "error" not in read(target)["entries"][0]


def test_wrong_results_set_the_exit_status(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(config: BenchConfig, progress: Progress, factory: Any = None) -> Measurement:
        made = measurement(config)
        wrong = replace(made.methods[2], metrics=None, complaints=["flux: rank 0: 3 are wrong"])
        return replace(made, methods=[*made.methods[:2], wrong])

    monkeypatch.setattr(launch, "measured", measured)
    result = invoke("--shapes", shapes)
    assert result.exit_code == 1
    assert "flux: rank 0: 3 are wrong" in result.stderr
    assert "WRONG" in result.stdout


def test_the_budget_ends_the_run_between_shapes(
    shapes: str, quick: list[BenchConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = launch.measured

    def slow(config: BenchConfig, progress: Progress, factory: Any = None) -> Measurement:
        time.sleep(0.3)
        return good(config, progress, factory)

    monkeypatch.setattr(launch, "measured", slow)
    target = tmp_path / "out.json"
    options = ["--shapes", shapes, "--json", str(target)]
    assert invoke(*options, "--budget", "0.2s").exit_code == 0
    entries = read(target)["entries"]
    assert [entry["status"] for entry in entries] == ["done", "skipped", "skipped"]
    assert "--budget was used up" in entries[1]["error"]
    assert invoke(*options, "--resume").exit_code == 0
    assert [config.problem.m for config in quick] == [5, 64, 6]


def test_resume_rejects_a_file_of_another_run(
    shapes: str, quick: list[BenchConfig], tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    options = ["--shapes", shapes, "--json", str(target)]
    assert invoke(*options, "--resume").exit_code == 0, "nothing there yet: begins anew"
    result = invoke(*options, "--resume", "--repeats", "3")
    assert result.exit_code == 2
    assert "its settings differ (repeats 15, now 3)" in " ".join(result.stderr.split())
    first = shutil.copy(target, tmp_path / "first.json")
    document = json.loads(target.read_text())
    document["versions"]["torch"] = "1.0"
    target.write_text(json.dumps(document))
    assert "versions differ (torch '1.0', now" in " ".join(
        invoke(*options, "--resume").stderr.split()
    )
    document["versions"] = read(Path(shutil.copy(first, target)))["versions"]
    document["peers"]["async_tp"] = None
    target.write_text(json.dumps(document))
    told = " ".join(invoke(*options, "--resume").stderr.split())
    assert "the available peers differ (async_tp True, now False)" in told
    target.write_text("{")
    assert "damaged" in invoke(*options, "--resume").stderr


@pytest.mark.timeout(180)
def test_an_interrupted_suite_keeps_its_results(shapes: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = ["-m", "flux", "bench", "suite", "--shapes", shapes]
    command += ["--json", str(target), "--m", "64,65,66,67", "--repeats", "60"]
    process = start_forked_command(command, tmp_path)
    errors = tmp_path / "err"
    deadline = time.monotonic() + 100
    while not _done(target):
        assert process.is_alive() and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert "run the same command with --resume to continue" in " ".join(errors.read_text().split())
    states = [entry["status"] for entry in read(target)["entries"]]
    assert states[0] == "done" and "done" not in states[states.index("pending") :]


def _done(target: Path) -> bool:
    """Return whether an entry is done. The file must be valid at any moment."""
    return target.exists() and read(target)["entries"][0]["status"] == "done"


# -- peers that misbehave --------------------------------------------------------------------------


def run_with(peers: tuple[Stub, ...], fails: Callable[[tuple[str, ...]], str | None]) -> Any:
    """A document of two shapes, measured without ranks; ``fails`` sees which peers take part."""
    base = BenchConfig(Problem(Op.ag_gemm, 4, 4, 4, "float32", 2))
    configs = [replace(base, problem=replace(base.problem, m=m)) for m in (4, 6)]
    there = {peer.name: peer.available() for peer in peers}
    document = suite.new_document(configs, [], {"world": 2, "dtype": "float32"}, there, [])

    def measured(config: BenchConfig, progress: Progress, factory: Any = None) -> Measurement:
        names = () if factory is None else factory.keywords["names"]
        problem = fails(names)
        if problem is not None:
            raise RankFailedError(problem)
        return measurement(config, ("unfused", "medium", "flux", *names))

    suite.Suite(document, base, lambda: None, suite.Watcher(), peers=peers, run=measured).run()
    results.check(document.as_json())
    return [(list(entry.methods)[3:], entry.peers) for entry in document.entries]


def test_a_peer_that_raises_is_left_out_of_that_shape() -> None:
    asked = []

    def fails(names: tuple[str, ...]) -> str | None:
        asked.append(names)
        return "rank 1: PeerError: peer bad: no kernel" if len(asked) == 1 else None

    first, second = run_with((Stub("good"), Stub("bad")), fails)
    assert asked == [("good", "bad"), ("good",), ("good", "bad")]
    assert first[0] == ["good"]
    assert first[1] == {"good": None, "bad": "failed: rank 1: PeerError: peer bad: no kernel"}
    assert second == (["good", "bad"], {"good": None, "bad": None})


def test_all_peers_are_excluded_when_a_rank_dies_and_no_peer_is_named() -> None:
    def fails(names: tuple[str, ...]) -> str | None:
        return "rank 1: killed by SIGSEGV" if names else None

    first, second = run_with((Stub("one"), Stub("two")), fails)
    assert first[0] == second[0] == []
    assert set(first[1].values()) == {"failed: rank 1: killed by SIGSEGV"}
    assert all("excluded after a failure" in reason for reason in second[1].values())


@pytest.mark.parametrize("fault", ["raise", "kill", *more("")])
def test_faulty_peer_is_excluded_and_other_results_stay(fault: str) -> None:
    base = BenchConfig(Problem(Op.gemm_rs, 4, 4, 4, "float32", 2), repeats=2, warmup=0)
    odd = replace(base, problem=replace(base.problem, m=5))
    peers = (Stub("fine"), Stub("faulty", fault))
    document = suite.new_document(
        [base, odd], [], {}, {peer.name: peer.available() for peer in peers}, []
    )
    suite.Suite(document, base, lambda: None, suite.Watcher(), peers=peers).run()
    first, second = document.entries
    assert first.status == second.status == "done"
    there = {"": ["fine", "faulty"], "raise": ["fine"], "kill": []}[fault]
    assert list(first.methods) == ["unfused", "medium", "flux", *there]
    if fault == "raise":
        assert "peer faulty: RuntimeError: the injected fault" in first.peers["faulty"]
    assert list(second.methods) == ["unfused", "medium", "flux"]
    assert fault == "kill" or second.peers["fine"] == "has no shape with an odd M"


def test_shown_tables_name_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from flux.bench import suite_view

    suite_view.show(results.from_json(suite_data.document()), Console(width=140))
    printed = capsys.readouterr().out
    for words in ("WRONG", "failed", "skipped", "absent: cublasmp: nvmath-python is not installed"):
        assert words in printed
