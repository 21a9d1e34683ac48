"""`flux tune` and what it does with winners: show, export, import, clear; kernels of candidates."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.cli.app import app
from flux.core.datafile import data_root
from flux.core.knobs import Knobs, Op, Topology
from flux.core.problem import Problem
from flux.kernels import build
from flux.machine.cluster import load_cluster
from flux.select.cache import Cache
from flux.select.space import candidates, load_space
from flux.select.winners import Entry, Key, Winner
from flux.tune import halving, kernels
from kernel_sandbox import Sandbox

KEY = Key("ag_gemm", "float32", 64, 32, "1x2", "0123456789abcdef", "cpu 0.1.0 r1", "torch 2.13")
MACHINE = {"device": {"kind": "cpu"}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("FLUX_TUNE_CACHE", str(tmp_path / "tune"))
    return Cache(tmp_path / "tune")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def winner(m: int, ms: float = 1.0, at: str = "2026-01-01T00:00:00Z") -> Winner:
    return Winner(m, Knobs(comm_tile_rows=m), ms, 2 * ms, None, 18, at)


def test_show_lists_winners_and_says_where_there_are_none(cache: Cache) -> None:
    assert "no winners in" in run("show").stdout or list((data_root() / "results").iterdir())
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    text = run("show").stdout
    assert "ag_gemm" in text and "0.50" in text and "comm_tile_rows=64" in text
    shown = json.loads(run("show", "--json").stdout)
    assert Entry.from_dict(shown[0]).winners == (winner(64),)


def test_winners_move_from_one_cache_to_another(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (8, 64):
        cache.store(Entry(KEY, MACHINE, (winner(m),)))
    cache.store(Entry(replace(KEY, op="gemm_rs"), MACHINE, (winner(16),)))
    file = tmp_path / "winners.json"
    assert "wrote 3 winners" in run("export", str(file)).stdout
    assert json.loads(run("export", "-").stdout) == json.loads(file.read_text())

    monkeypatch.setenv("FLUX_TUNE_CACHE", str(tmp_path / "other"))
    other = Cache(tmp_path / "other")
    other.store(Entry(KEY, MACHINE, (winner(8, ms=5.0, at="2027"),)))
    other.store(Entry(KEY, MACHINE, (winner(64, ms=5.0, at="2020"),)))
    assert "imported 3 winners" in run("import", str(file)).stdout
    entry = other.load(KEY)
    assert entry is not None
    assert [(w.m, w.ms) for w in entry.winners] == [(8, 5.0), (64, 1.0)]
    assert other.load(replace(KEY, op="gemm_rs")) is not None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"flux_winners": 2, "entries": []}',
        '{"flux_winners": 1}',
        '{"flux_winners": 1, "entries": [{}]}',
    ],
)
def test_a_bad_import_is_refused_as_a_whole(cache: Cache, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    result = run("import", str(file))
    assert result.exit_code == 2 and "bad.json" in result.stderr
    assert not list(cache.entries())


def test_an_import_with_one_changed_digit_takes_in_nothing(cache: Cache, tmp_path: Path) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    cache.store(Entry(replace(KEY, k=99), MACHINE, (winner(64),)))
    file = tmp_path / "winners.json"
    run("export", str(file))
    assert run("clear", "--yes").exit_code == 0
    text = file.read_text()
    at = text.rindex('"comm_tile_rows": 64')
    file.write_text(text[:at] + text[at:].replace('"comm_tile_rows": 64', '"comm_tile_rows": 65'))
    result = run("import", str(file))
    assert result.exit_code == 2 and "checksum" in result.stderr
    assert not list(cache.entries())


def test_missing_files_and_places_are_refused(cache: Cache, tmp_path: Path) -> None:
    assert run("import", str(tmp_path / "nowhere")).exit_code == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run("export", str(blocked / "below")).exit_code == 2


def test_clear_asks_for_confirmation_and_filters(cache: Cache) -> None:
    other = replace(KEY, op="gemm_rs", fingerprint="f" * 16)
    for key in (KEY, other):
        cache.store(Entry(key, MACHINE, (winner(64),)))
    assert run("clear").exit_code == 1  # nobody answers
    assert len(list(cache.entries())) == 2
    assert run("clear", "--op", "gemm_rs", "--yes").exit_code == 0
    assert [entry.key for entry in cache.entries()] == [KEY]
    assert run("clear", "--fingerprint", "f", "--yes").exit_code == 0
    assert len(list(cache.entries())) == 1
    cache.store(Entry(other, MACHINE, (winner(64),)))
    (cache.directory / f"{other.name}.json").write_text("{")
    with pytest.warns(RuntimeWarning):
        assert run("clear", "--yes").exit_code == 0
    assert not list(cache.entries()) and not cache.damaged()


def test_unwritable_results_end_the_run_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FLUX_TUNE_CACHE", str(blocked))
    result = run("--op", "ag_gemm", "--m", "8", "--n", "8", "--k", "8", "--backend", "cpu")
    assert result.exit_code == 2 and "cannot write to" in result.stderr


@pytest.mark.timeout(240)
def test_an_op_uses_the_winner_of_a_tuned_shape(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command to the op, in processes that share nothing but the cache."""
    monkeypatch.setattr(halving, "ROUNDS", (1, 2, 3, 4))
    space = tmp_path / "space.toml"
    space.write_text(
        'backend = "cpu"\nprune_above = 1000\n[gemm_rs]\ntile_rows = ["m"]\n'
        'comm_tile_rows = [3]\nstore = ["staged"]\ndirection = ["pull"]\n'
    )
    arguments = ["--op", "gemm_rs", "--m", "40", "--n", "24", "--k", "16", "--space", str(space)]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    (document,) = json.loads(result.stdout)
    assert document["settled"] and document["candidates"] == 4
    from harness import run_ranks

    schedules = run_ranks(2, _knobs_of_an_op, os.environ["FLUX_TUNE_CACHE"])
    found = dict(document["winner"]["knobs"])
    for knobs in schedules:
        for name, value in found.items():
            assert knobs[name] == (tuple(value) if isinstance(value, list) else value), name


def _knobs_of_an_op(rank: int, world: int, place: str) -> dict[str, Any]:
    from dataclasses import asdict

    import flux

    before = os.environ["FLUX_TUNE_CACHE"]
    os.environ["FLUX_TUNE_CACHE"] = place
    try:
        with flux.GemmRS(max_m=64, n=24, k=16) as op:
            return asdict(op.schedule(40).knobs)
    finally:
        os.environ["FLUX_TUNE_CACHE"] = before


def test_kernels_of_candidates_are_built_and_failures_are_named(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_tools", sandbox.tools)
    problem = Problem(Op.ag_gemm, 4096, 49152, 12288, "bfloat16", 8)
    kept, _ = candidates(load_space("sm90a"), problem, Topology.flat(8), load_cluster("flux-h800"))
    configs = [one.kernel for one in kept if one.kernel is not None][:40]
    names = sorted({config.name for config in configs})
    root = tmp_path / "kernels"
    sandbox.set(fail=f"{names[0]},")
    failed = kernels.build_kernels(configs, root)
    assert list(failed) == names[:1] and "nvcc failed" in failed[names[0]]
    sandbox.set(fail="")
    assert kernels.build_kernels(configs, root) == {}
    built = len(sandbox.calls())
    assert kernels.build_kernels(configs, root) == {}
    assert len(sandbox.calls()) == built, "what is built is built again"


def test_without_a_compiler_every_kernel_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing() -> None:
        raise build.MissingToolError("nvcc was not found")

    monkeypatch.setattr(build, "find_tools", nothing)
    monkeypatch.setattr(kernels, "package_root", lambda: tmp_path / "none")
    problem = Problem(Op.ag_gemm, 4096, 49152, 12288, "bfloat16", 8)
    kept, _ = candidates(load_space("sm90a"), problem, Topology.flat(8), load_cluster("flux-h800"))
    configs = [one.kernel for one in kept if one.kernel is not None]
    failed = kernels.build_kernels(configs, tmp_path)
    assert set(failed.values()) == {"nvcc was not found"}
    assert set(failed) == {config.name for config in configs}
