"""Search over policies and layouts: what is tried, what is ranked, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.cli.app import app
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.policies import planned, policy_of
from flux.plan.search import (
    Plan,
    Query,
    default_policies,
    estimate,
    layout_of,
    layouts,
    search,
    winner_of,
)
from flux.plan.simulate import simulate

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
    assert all(step.parallel.dp % step.parallel.ep == 0 for step in experts)


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
        fabric = Fabric(asked.cluster, few.parallel)
        cost = AnalyticCost(fabric, few.dtype, few.itemsize)
        schedule = planned(policy_of("serial"), build_step(few, fabric), fabric, cost)
        peak = simulate(schedule, cost).peak_memory_bytes
        assert estimate(few, asked.cluster).memory_bytes == pytest.approx(peak), layout_of(step)
    assert {zero for *_, zero in seen} == {1, 3}


def test_a_wide_beam_finds_no_faster_plan(tmp_path: Path) -> None:
    text = (ROOT / "tuning" / "shapes" / "gpt-6.7b.toml").read_text()
    model = tmp_path / "small.toml"
    model.write_text(text.replace("layers = 32", "layers = 4"))
    asked = query(model=str(model), gpus=4, batch=4)
    narrow = search(replace(asked, beam=12), silent)
    wide = search(replace(asked, beam=100_000), silent)
    assert wide.layouts == narrow.layouts and wide.simulated > narrow.simulated
    times = [plan.iteration_ms for plan in wide.ranked]
    assert times == sorted(times) and len(times) > len(narrow.ranked)
    assert narrow.ranked[0].iteration_ms <= 1.01 * times[0]


def check(plan: Plan, cluster: Any) -> None:
    timeline = plan.timeline(cluster)
    assert timeline.iteration_ms == plan.iteration_ms
    assert timeline.peak_memory_bytes == plan.peak_memory_bytes


def test_only_what_fits_is_ranked() -> None:
    asked = query(memory_gb=40.0, beam=8)
    found = search(asked, silent)
    assert found.too_large > 0
    assert all(plan.peak_memory_bytes <= 40e9 for plan in found.ranked)
    check(found.ranked[0], asked.cluster)
    with pytest.raises(ValueError, match=r"fits into 4 GB: the smallest needs \d+\.\d GB"):
        search(query(memory_gb=4.0), silent)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gpus": 10_000}, "and 10000 are asked for"),
        ({"gpus": 0}, "gpus must be an integer of at least 1"),
        ({"memory_gb": 0.0}, "memory must be above 0 GB"),
        ({"beam": 0}, "beam must be an integer of at least 1"),
        ({"model": "nobody"}, "nobody"),
        ({"gpus": 7, "batch": 3}, "no layout of gpt-6.7b on 7 GPUs is possible"),
        ({"policies": (("combined", {}),), "beam": 2}, "no policy can be used: combined"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(query(**changes), silent)


def test_all_installed_policies_are_tried() -> None:
    names = [name for name, _ in default_policies()]
    assert {"serial", "domino", "centauri", "dhelix", "zbv"} <= set(names)
    assert len(names) == len(default_policies()) and names.count("domino") > 1


def test_the_command_writes_plans_that_run_takes(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out, trace, page = (tmp_path / name for name in ("plans.json", "trace.json", "page.html"))
    words = ["plan", "search", "--model", "gpt-6.7b", "--cluster", "flux-h800", "--gpus", "2"]
    words += ["--batch", "4", "--sequence", "256", "--beam", "3", "--policy", "domino:slices=2"]
    words += ["--memory", "200", "--json", str(out), "--trace", str(trace), "--html", str(page)]
    result = run(app, words)
    assert result.exit_code == 0 and "the winner: " in result.output, result.output
    content = json.loads(out.read_text())
    first = content["plans"][0]
    assert {"policy", "model", "cluster", "tp", "dp", "pp", "iteration_ms"} <= set(first)
    assert first["tp"] * first["dp"] * first["pp"] == 2
    assert content["why"] and trace.stat().st_size and "<svg" in page.read_text()
    words = ["plan", "run", "--plan", str(out), "--scale", "64", "--layers", "2"]
    ran = run(app, [*words, "--sequence", "16", "--repeats", "1", "--json", "-"])
    assert ran.exit_code == 0, ran.output
    _, best = json.loads(ran.output)
    assert best["policy"] == first["policy"] and best["tp"] == first["tp"]
    bad = run(app, ["plan", "run", "--plan", str(trace)])
    assert bad.exit_code == 2 and "is not an outcome of flux plan search" in bad.output
    # All degrees are taken over, and checked.
    out.write_text(json.dumps(content | {"plans": [first | {"cp": 2, "dp": 4, "ep": 2}]}))
    assert {key: winner_of(str(out))[key] for key in ("cp", "dp", "ep")} == {
        "cp": 2,
        "dp": 4,
        "ep": 2,
    }
    for key, value in (("ep", "2"), ("zero", True), ("regather", 1)):
        out.write_text(json.dumps(content | {"plans": [first | {key: value}]}))
        with pytest.raises(ValueError, match=f"plans.json is not an outcome.*{key}: expected"):
            winner_of(str(out))
    out.write_text("{")
    with pytest.raises(ValueError, match=r"plans.json: not JSON"):
        winner_of(str(out))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--memory", "0"], "memory must be above 0 GB, got 0"),
        (["--policy", "serial", "--policy", "nobody"], "got 'nobody'"),
        (["--policy", "dhelix:longest=-1"], "longest must be at least 0, got -1"),
    ],
    ids=str,
)
def test_the_command_refuses_bad_options_before_it_searches(words: list[str], message: str) -> None:
    # The model does not fit, which the search would say.
    result = CliRunner().invoke(app, ["plan", "search", "--gpus", "8", *words])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
