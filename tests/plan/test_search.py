"""Search over policies and layouts: what is tried, what is ranked, and what is refused."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flux.cli.app import app
from flux.machine.cluster import load_cluster
from flux.plan import sample
from flux.plan import search as searching
from flux.plan.closed_form import ClosedForm
from flux.plan.compare import compared
from flux.plan.files import read_plan
from flux.plan.model import Parallel, step_of
from flux.plan.sample import Figures, estimates, figures_of, lengths
from flux.plan.search import (
    MARGIN,
    MEMORY_MARGIN,
    Query,
    SearchedPlan,
    default_policies,
    layouts,
    search,
)
from flux.plan.search_output import layout_of, show

ROOT = Path(__file__).resolve().parents[2]
SMALL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("serial", {}),
    ("domino", {"slices": 2}),
    ("dhelix", {}),
)


def query(**changes: Any) -> Query:
    given = {
        "model": "gpt-6.7b",
        "cluster": load_cluster("flux-h800"),
        "gpus": 8,
        "batch": 16,
        "sequence": 1024,
        "memory_gb": 80.0,
        "policies": SMALL,
    }
    return Query(**(given | changes))


def silent(what: str, done: int, total: int) -> None:
    pass


def test_layouts_share_one_batch_and_all_devices() -> None:
    found = list(layouts(query()))
    assert len(found) == len(set(found))
    for step in found:
        p = step.parallel
        assert p.tp * p.pp * p.dp == 8 and p.tp <= 8
        assert step.micro_batch * step.micro_batches * p.dp == 16
        assert step.layers % p.pp == 0 and not (p.sequence and p.tp == 1)
    degrees = {(s.parallel.tp, s.parallel.pp, s.parallel.dp) for s in found}
    assert degrees == {
        (tp, pp, 8 // tp // pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if 8 % (tp * pp) == 0
    }
    assert {s.parallel.cp for s in found} == {1}
    longer = list(layouts(query(sequence=16384)))
    assert {step.parallel.cp for step in longer} == {1, 2, 4}
    assert {step.parallel.world for step in longer} == {8}
    experts = list(layouts(query(model="phi-moe")))
    assert {step.parallel.ep for step in experts} == {1, 2, 4, 8}
    of = {(p.tp, p.dp, p.ep) for p in (s.parallel for s in experts) if p.sequence and p.pp == 1}
    assert of == {(8, 1, 1), (8, 1, 8), (4, 2, 2), (4, 2, 8), (2, 4, 4), (2, 4, 8)}
    of = {(p.dp, p.ep) for p in (s.parallel for s in experts) if not p.sequence}
    assert of == {(dp, dp) for dp in (1, 2, 4, 8)}


@pytest.mark.parametrize("model", ["gpt-6.7b", "phi-moe"])
def test_the_closed_form_knows_the_memory_of_the_plain_schedule(model: str) -> None:
    """A layout that fits is not left out in the first round, as those with ZeRO-3 once were."""
    asked = query(model=model, sequence=4096)
    seen = set()
    for step in layouts(asked):
        key = step.parallel.pp, step.parallel.tp, step.parallel.sequence, step.zero
        if key in seen or step.micro_batches > 8:
            continue
        seen.add(key)
        few = replace(step, layers=2 * step.parallel.pp)
        ((_, timeline, _),) = compared([("serial", {})], few, asked.cluster)
        peak = timeline.peak_memory_bytes
        assert ClosedForm(few, asked.cluster).rating().memory_bytes == pytest.approx(peak), (
            layout_of(step)
        )
    assert {zero for *_, zero in seen} == {1, 3}


def small_model(folder: Path, layers: int) -> str:
    text = (ROOT / "tuning" / "shapes" / "gpt-6.7b.toml").read_text()
    model = folder / "small.toml"
    model.write_text(text.replace("layers = 32", f"layers = {layers}"))
    return str(model)


def test_without_bubbles_a_micro_batch_still_passes_all_stages() -> None:
    """Else 16 stages with one micro-batch were said to be as fast as one, and took beams."""
    step = step_of("gpt-6.7b", Parallel(pp=8), sequence=1024, micro_batch=2, micro_batches=1)
    cluster = load_cluster("flux-h800")
    rating = ClosedForm(step, cluster).rating()
    assert 0.5 * rating.serial_ms < rating.filled_ms
    for name in ("serial", "zbv"):
        assert rating.filled_ms < figures_of(cluster, step, name, {}).figures.iteration_ms
    many = ClosedForm(replace(step, micro_batches=16), cluster).rating()
    assert many.filled_ms == pytest.approx(16 / 23 * many.serial_ms, rel=0.02)


LONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("serial", {"wgrad_overlap": True}),
    ("serial", {"fused": "auto"}),
    ("domino", {"slices": 2}),
    ("centauri", {"chunks": 2}),
    ("dhelix", {}),
    ("wavelet", {}),
    ("interleaved", {"chunks": 2}),
    ("zbv", {}),
    ("dualpipev", {}),
)


def test_long_steps_follow_from_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each policy fills and drains its pipeline in its own way: the ratio of 1F1B fits no other.

    Here 2 of 4 layers of a stage are simulated, and 4 and 6 of 8 micro-batches.
    """
    monkeypatch.setattr(sample, "few_layers", lambda step: 2)
    cluster = load_cluster("flux-h800")
    parallel = Parallel(tp=2, pp=2, sequence=True)
    step = step_of("gpt-6.7b", parallel, layers=8, sequence=1024, micro_batch=2, micro_batches=8)
    for (name, options), rated in zip(LONG, estimates(cluster, step, LONG), strict=True):
        assert not isinstance(rated, str), rated
        true = figures_of(cluster, step, name, options).figures
        few = figures_of(cluster, step, name, options, lengths(step)).figures
        assert few.iteration_ms == pytest.approx(true.iteration_ms, rel=0.005), (name, options)
        assert few.compute_ms == pytest.approx(true.compute_ms, rel=1e-6), (name, options)
        assert rated.iteration_ms == pytest.approx(true.iteration_ms, rel=MARGIN), (name, options)
        needed = pytest.approx(true.peak_memory_bytes, rel=MEMORY_MARGIN)
        assert few.peak_memory_bytes == needed and rated.peak_memory_bytes == needed, name


HEAVY: dict[str, Any] = {"sequence": 2048, "micro_batches": 8, "head": True}
"""The head of Llama-3 8B, on the last stage, takes as long as two and a half layers."""


def test_stages_are_split_so_that_the_longest_one_is_short() -> None:
    """And fit: the first stage holds as many micro-batches as there are stages."""
    cluster = load_cluster("grand-teton")
    step = step_of("llama3-8b", Parallel(pp=4), layers=12, **HEAVY)
    form = ClosedForm(step, cluster)

    def figures(some: Any) -> Figures:
        return figures_of(cluster, some, "serial", {}).figures

    even, fast = figures(step), searching.with_split(step, cluster, 80.0)
    assert fast.split[-1] < 3 < max(fast.split) and sum(fast.split) == 12
    assert figures(fast).iteration_ms < 0.9 * even.iteration_ms
    assert form.rating(fast.split).memory_bytes == pytest.approx(figures(fast).peak_memory_bytes)
    (rated,) = estimates(cluster, fast, (("serial", {}),))
    assert not isinstance(rated, str)
    assert rated.iteration_ms == pytest.approx(figures(fast).iteration_ms, rel=MARGIN)
    for gb in (0.95, 0.9, 0.8):  # of what even stages need
        limit = gb * even.peak_memory_bytes
        other = searching.with_split(step, cluster, limit / 1e9)
        assert figures(other).peak_memory_bytes <= limit or not form.split(limit)
    assert not form.split(1e9)
    with pytest.raises(ValueError, match="interleaved: cuts the model into stages of its own"):
        figures_of(cluster, fast, "interleaved", {})


def test_a_search_splits_stages_and_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policies = str(ROOT / "tuning/shapes/llama3-8b.toml"), (("serial", {}), ("zbv", {}))
    asked = query(model=model, cluster=load_cluster("grand-teton"), gpus=8, batch=16, beam=4)
    asked = replace(asked, policies=policies, sequence=2048)
    monkeypatch.setattr(
        searching, "layouts", lambda _: iter([step_of("llama3-8b", Parallel(pp=8), **HEAVY)])
    )
    found = search(asked, silent, workers=1).ranked
    with monkeypatch.context() as without:
        without.setattr(searching, "splits", lambda form, limit: [])
        before = search(asked, silent, workers=1).ranked
    serial = [next(p for p in plans if p.policy == "serial") for plans in (found, before)]
    assert serial[0].step.split and serial[0].iteration_ms < 0.95 * serial[1].iteration_ms
    assert found[0].iteration_ms <= before[0].iteration_ms
    assert {(plan.policy, not plan.step.split) for plan in found} >= {
        ("zbv", True),
        ("serial", True),
    }


def test_workers_end_with_a_search_that_is_terminated() -> None:
    """Four processes of 500 MB each stayed behind."""
    lines = [
        "import os, signal",
        "from flux.plan.search import _pool",
        "with _pool(2) as pool:",
        "    print(pool.submit(os.getpid).result(), flush=True)",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    signal.pause()",
    ]
    script = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(script, stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -signal.SIGTERM
    worker, until = Path(f"/proc/{int(ended.stdout)}"), time.monotonic() + 20
    while worker.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not worker.exists()


def test_a_step_is_not_shorter_than_its_compute() -> None:
    with pytest.raises(ValueError, match="a step of 1 ms is shorter than its compute of 2 ms"):
        Figures(1.0, 2.0, 0.0, 0.0, 0.0)


def test_the_first_five_are_those_of_whole_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a policy more never makes the winner slower."""
    monkeypatch.setattr(searching, "MOST_OPS", 500)
    policies = (("serial", {}), ("zbv", {}), ("centauri", {}))
    asked = query(model=small_model(tmp_path, 4), gpus=2, batch=8, policies=policies, beam=4)
    found = search(asked, silent, workers=1)
    steps = dict.fromkeys(plan.step for plan in found.ranked)
    limit = 1e9 * asked.memory_gb
    rated = [(ClosedForm(step, asked.cluster).rating(), step) for step in layouts(asked)]
    best = searching._best([one for one in rated if one[0].memory_bytes <= limit], asked.beam)
    kept = [step for step, _ in searching._variants(best, [], asked)]
    assert set(steps) <= set(kept)
    plain = [step for step in kept if step.parallel.dp == 2]
    assert {step.zero for step in plain} == {1, 2, 3}
    times: dict[str, list[float]] = {}
    for step in kept:
        for name, options in policies:
            try:
                figures = figures_of(asked.cluster, step, name, options).figures
            except ValueError:
                continue
            if figures.peak_memory_bytes <= limit:
                times.setdefault(name, []).append(figures.iteration_ms)
    best = sorted(time for of_policy in times.values() for time in of_policy)
    assert [plan.iteration_ms for plan in found.ranked[:5]] == best[:5]
    assert not any(plan.scaled for plan in found.ranked[:5])
    for one in policies[:2]:
        alone = search(replace(asked, policies=(one,)), silent, workers=1).ranked[0]
        assert alone.iteration_ms == min(times[one[0]]) >= found.ranked[0].iteration_ms


def test_near_copies_of_a_layout_take_no_beam(tmp_path: Path) -> None:
    """They left out a layout that is 10% faster on the better one of two links."""
    asked = query(model="phi-moe", gpus=16, batch=16, sequence=2048, memory_gb=76.0)
    cluster = replace(load_cluster("domino-dgx-h100"), hosts=2)
    for speed in (0.5, 0.8):
        link = cluster.link
        link = replace(link, gbs=speed * link.gbs, library_gbs=speed * link.library_gbs)
        rated = [
            (ClosedForm(step, replace(cluster, link=link)).rating(), step)
            for step in layouts(asked)
        ]
        best = searching._best([one for one in rated if one[0].memory_bytes <= 76e9], 12)
        assert any(
            (step.parallel.tp, step.parallel.ep, step.micro_batch) == (2, 16, 1) for step in best
        )


def test_what_everybody_tries_first_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain data parallelism, FSDP and 1F1B, however much slower than the first."""
    monkeypatch.setattr(searching, "FIRST", 1)
    policies = (("serial", {}), ("centauri", {}))
    asked = query(batch=32, sequence=2048, beam=2, policies=policies)
    outcome = search(asked, silent, workers=1)
    console = Console(width=200, record=True, file=io.StringIO())
    show(asked, outcome, 1, [], console)
    printed = [line for line in console.export_text().splitlines() if line.startswith("│ ")]
    assert printed[0].startswith("│ centauri") and len(printed) == 4
    assert sum("│ serial" in line and "pp=" in line for line in printed) == 1
    of_data = ["zero=3" in line for line in printed if "│ serial" in line and " dp=8 " in line]
    assert sorted(of_data) == [False, True]


def check(plan: SearchedPlan, cluster: Any) -> None:
    timeline = plan.timeline(cluster)
    assert timeline.iteration_ms == plan.iteration_ms
    assert timeline.peak_memory_bytes == plan.peak_memory_bytes


def test_only_what_fits_is_ranked() -> None:
    asked = query(memory_gb=17.0, beam=3)
    found = search(asked, silent, workers=1)
    assert found.too_large > 0
    assert all(plan.peak_memory_bytes <= 17e9 for plan in found.ranked)
    check(found.ranked[0], asked.cluster)
    with pytest.raises(ValueError, match=r"fits into 4 GB: the smallest needs \d+\.\d GB"):
        search(query(memory_gb=4.0), silent, workers=1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gpus": 10_000}, "and 10000 are asked for"),
        ({"gpus": 0}, "gpus must be an integer of at least 1"),
        ({"memory_gb": 0.0}, "memory must be above 0 GB"),
        ({"beam": 0}, "beam must be an integer of at least 1"),
        ({"model": "nobody"}, "nobody"),
        ({"gpus": 7, "batch": 3}, "no layout of gpt-6.7b on 7 GPUs is possible"),
        (
            {"policies": (("interleaved", {"chunks": 64}),), "beam": 2},
            "no policy can be used",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_searched_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(query(**changes), silent, workers=1)


def test_all_installed_policies_are_tried() -> None:
    names = [name for name, _ in default_policies()]
    assert {"serial", "domino", "centauri", "dhelix", "zbv"} <= set(names)
    assert len(names) == len(default_policies()) and names.count("domino") > 1


def test_the_command_writes_plans_that_run_takes(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out, trace, page = (tmp_path / name for name in ("plans.json", "trace.json", "page.html"))
    words = ["plan", "search", "--model", "gpt-6.7b", "--cluster", "llama3-h100", "--gpus", "2"]
    words += ["--batch", "4", "--sequence", "256", "--beam", "1", "--policy", "domino:slices=2"]
    words += ["--memory", "200", "--json", str(out), "--trace", str(trace), "--html", str(page)]
    result = run(app, words)
    assert result.exit_code == 0 and "the winner: " in result.output, result.output
    content = json.loads(out.read_text())
    first = content["plans"][0]
    assert {"policy", "model", "cluster", "tp", "dp", "pp", "iteration_ms"} <= set(first)
    assert first["tp"] * first["dp"] * first["pp"] == 2
    # 4 sequences of 256 tokens; 32 layers of hidden size 4096; a peak of 989.4 TFLOPS.
    seconds = first["iteration_ms"] / 1e3
    of_token = 6 * (32 * (12 * 4096**2 + 4096 * 256) + 51200 * 4096)
    assert first["tokens_per_s"] == pytest.approx(4 * 256 / seconds)
    assert first["mfu"] == pytest.approx(of_token * first["tokens_per_s"] / (2 * 989.4e12))
    assert f"{first['tokens_per_s']:,.0f} tokens/s, {100 * first['mfu']:.1f}% MFU" in result.output
    assert "layout: ranks by kind of parallelism (" in result.output
    assert trace.stat().st_size
    written = page.read_text()
    assert "<svg" in written and "At half the speed of the link inside a host" in written
    assert written.count("<tr") == 2 + 2 * len(content["plans"])
    (told,) = (line for line in content["why"] if line.startswith("why: under serial its layout"))
    share = re.search(r"takes ([\d.]+)% (more|less) time: ", told)
    parts = re.findall(r"([\d.]+) ms (more|less) ", told)
    assert share is not None and parts, told
    sign = {"more": 1, "less": -1}
    difference = sum(float(ms) * sign[way] for ms, way in parts)
    off = float(share[1]) * sign[share[2]] * first["iteration_ms"] / 100 - difference
    assert abs(off) < 0.2 + 5e-4 * first["iteration_ms"], told  # rounded
    ran = run(app, ["plan", "run", "--plan", str(out), "--repeats", "1", "--json", "-"])
    assert ran.exit_code == 0, ran.output
    _, best = json.loads(ran.stdout)
    assert best["policy"].startswith("domino slices=2") and best["tp"] == first["tp"]
    simulate = ["plan", "simulate", "--plan", str(out), "--policy", "domino:slices=2"]
    simulate += ["--json", "-"]
    again = run(app, simulate)  # on the cluster of the search, and in its memory
    assert json.loads(again.stdout)["iteration_ms"] == first["iteration_ms"], again.output
    for one in ("--memory-gb=300", "--headroom=0.01", "--hosts=2"):  # replaces its own alone
        same = run(app, [*simulate, one])
        taken = re.search(r"a device needs", same.output)  # 80 GB with the headroom
        assert taken or json.loads(same.stdout)["cluster"] == first["cluster"], same.output
    other = run(app, [*simulate, "--cluster", "flux-a100-pcie", "--memory-gb", "200"])
    assert json.loads(other.stdout)["iteration_ms"] > first["iteration_ms"], other.output
    bad = run(app, ["plan", "run", "--plan", str(trace)])
    assert bad.exit_code == 2 and "is not an outcome of flux plan search" in bad.output
    # All degrees are taken over, and checked.
    out.write_text(json.dumps(content | {"plans": [first | {"cp": 2, "dp": 4, "ep": 2}]}))
    taken = read_plan(str(out))
    assert [taken.options[key] for key in ("cp", "dp", "ep")] == [2, 4, 2]
    assert taken.policies == (("serial", {}), ("domino", {"slices": 2}))
    for key, value in (("ep", "2"), ("zero", True), ("regather", 1)):
        out.write_text(json.dumps(content | {"plans": [first | {key: value}]}))
        with pytest.raises(ValueError, match=f"plans.json is not an outcome.*{key}: expected"):
            read_plan(str(out))
    out.write_text("{")
    with pytest.raises(ValueError, match=r"plans.json: not JSON"):
        read_plan(str(out))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--memory", "0"], "memory must be above 0 GB, got 0"),
        (["--policy", "serial", "--policy", "nobody"], "got 'nobody'"),
        (["--policy", "dhelix:longest=-1"], "longest must be an integer of at least 0, got -1"),
    ],
    ids=str,
)
def test_the_command_refuses_bad_options_before_it_searches(words: list[str], message: str) -> None:
    # The model does not fit, which the search would say.
    result = CliRunner().invoke(app, ["plan", "search", "--gpus", "8", *words])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
