"""The tuner: choice of the fastest candidate, faulty candidates, interruption and resumption."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tune_makers
from flux.core.datafile import data_root
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.launch.supervisors import Spawned
from flux.machine.detection import detect
from flux.select.cache import Cache
from flux.select.space import load_space
from flux.tune.halving import Halving, score
from flux.tune.journal import BusyError, Journal, run_id
from flux.tune.machine import survey
from flux.tune.tuner import Options, Search, Tuner, TuningObserver, describe, make_search
from harness import STRESS, stress_only
from scripts import (
    SUPPORT,
    forked,
    processes_of_session,
    start_forked_command,
    under_torchrun,
)

# -- halving ---------------------------------------------------------------------------------------


def play(halving: Halving, ms: dict[str, float], noise: float, seed: int = 0) -> tuple[str, int]:
    """Simulate a search with noise and drift; return the winner and the timed calls."""
    rng = random.Random(seed)
    samples: dict[str, list[tuple[float, float]]] = {}
    calls = 0
    while (step := halving.next_step(samples, ())) is not None:
        while any(len(samples.get(name, ())) < step.rounds for name in step.names):
            drift = rng.uniform(1.0, 2.0)  # of the whole machine, from round to round
            anchor = ms["unfused"] * drift * rng.uniform(1 - noise, 1 + noise)
            for name in step.names:
                time_ms = ms[name] * drift * rng.uniform(1 - noise, 1 + noise)
                samples.setdefault(name, []).append((time_ms, anchor))
                calls += 1
    best = halving.best(samples, ())
    assert best is not None
    return best, calls


@settings(max_examples=60)
@given(count=st.integers(1, 80), seed=st.integers(0, 10**6))
def test_halving_finds_the_fastest_in_less_than_a_quarter_of_the_calls(
    count: int, seed: int
) -> None:
    rng = random.Random(seed)
    names = ("unfused", "medium", *(f"c{i}" for i in range(count)))
    ms = {name: rng.uniform(1.0, 3.0) for name in names}
    halving = Halving(names, ("unfused", "medium"))
    best, calls = play(halving, ms, noise=0.01, seed=seed)
    assert ms[best] <= 1.02 * min(ms.values())
    assert calls == halving.planned_rounds() or count < 8
    if count >= 40:
        assert calls <= 0.23 * len(names) * halving.rounds[-1]


def test_the_always_candidates_are_measured_to_the_end() -> None:
    names = ("unfused", "medium", *(f"c{i}" for i in range(20)))
    halving = Halving(names, ("unfused", "medium"))
    samples: dict[str, list[tuple[float, float]]] = {}
    while (step := halving.next_step(samples, {"c3"})) is not None:
        assert "c3" not in step.names
        for name in step.names:  # the library path is the slowest by far
            samples.setdefault(name, []).append((9.0 if name in names[:2] else 1.0, 9.0))
    assert {len(samples["unfused"]), len(samples["medium"])} == {30}
    assert "c3" not in samples


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), cut=st.floats(0, 1))
def test_resumed_search_repeats_its_decisions(seed: int, cut: float) -> None:
    rng = random.Random(seed)
    names = ("unfused", *(f"c{i}" for i in range(30)))
    halving = Halving(names, ("unfused",))
    samples: dict[str, list[tuple[float, float]]] = {}
    log: list[tuple[str, tuple[float, float]]] = []
    steps = []
    while (step := halving.next_step(samples, ())) is not None:
        steps.append(step.last_rung)
        name = step.names[0]
        taken = (rng.uniform(1, 2), 1.0)
        samples.setdefault(name, []).append(taken)
        log.append((name, taken))
    assert steps == sorted(steps)
    again: dict[str, list[tuple[float, float]]] = {}
    for index, (name, taken) in enumerate(log):
        if index >= int(cut * len(log)):
            step = halving.next_step(again, ())
            assert step is not None and step.names[0] == name
        again.setdefault(name, []).append(taken)
    assert halving.next_step(again, ()) is None


def test_scores_compare_with_the_anchor_of_the_same_rounds() -> None:
    assert score([(2.0, 4.0), (20.0, 40.0), (3.0, 6.0)]) == 0.5


# -- the journal -----------------------------------------------------------------------------------


def events(path: Path) -> list[int]:
    with Journal(path.parent, path.stem, {}) as journal:
        return [event["number"] for event in journal.events[1:]]


@pytest.mark.filterwarnings("ignore:damaged journal")
def test_truncated_journal_keeps_its_complete_lines(tmp_path: Path) -> None:
    with Journal(tmp_path, "run", {"a": 1}) as journal:
        assert not journal.resumed
        for number in range(5):
            journal.add("round", number=number)
        path = journal.path
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        assert events(path) == list(range(max(0, complete - 1))), cut
        with Journal(tmp_path, "run", {}) as journal:  # and it can be gone on with
            journal.add("round", number=99)
        assert events(path)[-1] == 99


def test_a_journal_damaged_in_the_middle_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path, "run", {}) as journal:
        for number in range(5):
            journal.add("round", number=number)
        path = journal.path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\0\0\0\n", *lines[4:]]))
    with pytest.warns(RuntimeWarning, match="damaged journal"):
        assert events(path) == [0, 1]
    path.write_text('{"event": "run", "format": 99, "name": "run"}\n{"event": "round"}\n')
    with pytest.warns(RuntimeWarning, match="damaged journal"):
        assert events(path) == []


def test_second_writer_of_a_journal_raises(tmp_path: Path) -> None:
    with Journal(tmp_path, "run", {}), pytest.raises(BusyError, match="another `flux tune`"):
        Journal(tmp_path, "run", {})
    Journal(tmp_path, "run", {}).close()


def test_a_finished_run_leaves_no_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "run", {})
    journal.add("round")
    journal.finish()
    with Journal(tmp_path, "run", {}) as journal:
        assert not journal.resumed


# -- real ranks ------------------------------------------------------------------------------------

SPACE = """
backend = "cpu"
prune_above = 1000
[ag_gemm]
tile_rows = ["m"]
tile_columns = ["n"]
comm_tile_rows = [1, 2, 4, 8, 16]
direction = ["push"]
order = ["direct"]
copy_streams = [0]
"""


class Log(TuningObserver):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, search: Search, event: dict[str, Any]) -> None:
        self.events.append(event)


def tune(
    folder: Path, make: Any, *, m: int = 32, options: Options | None = None, log: Log | None = None
) -> tuple[Search, Cache]:
    """Tune one small shape in this process's ranks."""
    file = folder / "space.toml"
    file.write_text(SPACE)
    options = replace(options or Options(rounds=(2, 3, 4), candidate_timeout_s=10), make=make)
    launcher = Spawned(2)
    here = survey(launcher, "cpu", None, 1)
    problem = Problem(Op.ag_gemm, m, 16, 16, "float32", 2)
    search = make_search(problem, load_space(file), here.cluster, here.placement, options)
    cache = Cache(folder / "cache")
    what = describe([search], here, options)
    with Journal(folder / "runs", run_id(what), what) as journal:
        Tuner([search], launcher, here, cache, journal, options, log).run()
    return search, cache


def rows_of(search: Search, name: str) -> int | None:
    candidate = next(one for one in search.candidates if one.name == name)
    return candidate.knobs.comm_tile_rows


@pytest.mark.timeout(300)
def test_the_fastest_wins_and_is_remembered_in_full(tmp_path: Path) -> None:
    log = Log()
    search, cache = tune(tmp_path, tune_makers.times, log=log)
    assert search.winner is not None and search.settled
    assert search.winner.knobs.comm_tile_rows == 1
    assert search.winner.rounds == 4
    assert search.winner.ms < (search.winner.unfused_ms or 0) < (search.winner.medium_ms or 0)
    (entry,) = cache.entries()
    assert entry.winners == (search.winner,)
    assert entry.key.world == "1x2" and entry.key.n == 16
    assert entry.key.fingerprint == detect("cpu", 1).fingerprint("1x2")
    assert all(value is not None for value in search.winner.as_dict()["knobs"].values())
    assert sum(event["event"] == "round" for event in log.events) >= 4
    assert not list((tmp_path / "runs").glob("*.jsonl"))


def test_candidates_are_built_once_for_all_rungs_and_finalists_once_more(
    tmp_path: Path,
) -> None:
    made = tune_makers.made_by(os.getpid())
    made.unlink(missing_ok=True)
    try:
        search, _ = tune(tmp_path, tune_makers.counted, options=Options(rounds=(1, 2, 3)))
        count = Counter(made.read_text().splitlines())
    finally:
        made.unlink(missing_ok=True)
    finalists = {name for name, taken in search.samples.items() if len(taken) == 3}
    assert set(count) == {one.name for one in search.candidates} > finalists
    for name, times in count.items():  # once on memory full of NaN
        assert times == (2 if name in finalists else 1), name


@pytest.mark.timeout(300)
def test_faulty_candidates_are_excluded_and_reported(tmp_path: Path) -> None:
    search, _ = tune(tmp_path, tune_makers.faulty)
    assert search.winner is not None
    assert search.winner.knobs.comm_tile_rows == 16  # the default
    reasons = {rows_of(search, name): why for name, why in search.excluded.items()}
    assert set(reasons) == {1, 2, 4, 8}
    assert "wrong result" in reasons[1] and "rank 1" in reasons[1]
    assert "wrong result" in reasons[2]
    assert "SIGSEGV" in reasons[4]
    assert "SIGKILL" in reasons[8]


@pytest.mark.timeout(300)
def test_a_candidate_that_hangs_is_excluded_within_its_timeout(tmp_path: Path) -> None:
    begin = time.monotonic()
    options = Options(rounds=(2, 3), candidate_timeout_s=2)
    search, _ = tune(tmp_path, tune_makers.hanging, options=options)
    assert search.winner is not None
    (name,) = search.excluded
    assert rows_of(search, name) == 4
    assert time.monotonic() - begin < 200  # not the ten minutes that it would hang for


def test_refusals_are_excluded_without_new_ranks(tmp_path: Path) -> None:
    search, _ = tune(tmp_path, tune_makers.refusing)
    assert search.winner is not None and search.winner.knobs.path == "unfused"
    assert all("refused: no" in why for why in search.excluded.values())
    assert len(search.excluded) == len(search.candidates) - 1


def test_ranks_that_are_told_to_end_are_no_candidates_fault(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        tune(tmp_path, tune_makers.ended)
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    assert "excluded" not in journal.read_text()


def test_search_without_a_correct_candidate_has_no_winner(tmp_path: Path) -> None:
    search, cache = tune(tmp_path, tune_makers.all_wrong)
    assert search.winner is None and "no candidate is left" in search.problem_text
    assert not list(cache.entries())


def test_tuning_real_ops_excludes_no_candidate(tmp_path: Path) -> None:
    search, _ = tune(tmp_path, None, m=64)
    assert not search.excluded, search.excluded
    assert search.winner is not None and search.winner.unfused_ms is not None


@pytest.mark.timeout(300)
def test_a_budget_ends_the_search_and_a_later_run_goes_on(tmp_path: Path) -> None:
    whole = Options(rounds=(2, 12))
    for budget_s in (3.0, 12.0):  # ranks of a busy machine may take the first one to start
        short = replace(whole, budget_s=budget_s)
        first, cache = tune(tmp_path, tune_makers.times, options=short)
        if first.rounds_done:
            break
    assert not first.settled and first.rounds_done
    if first.winner is not None:
        assert list(cache.entries())
    second, _ = tune(tmp_path, tune_makers.times, options=whole)
    assert second.settled and second.winner is not None
    for name, taken in first.samples.items():
        assert second.samples[name][: len(taken)] == taken, "what was measured is measured again"


# -- killed processes ------------------------------------------------------------------------------

COMMAND = ["-m", "flux", "tune", "--op", "ag_gemm", "--m", "8,24", "--n", "16", "--k", "16"]


def command(folder: Path) -> tuple[list[str], dict[str, str]]:
    space = folder / "space.toml"
    space.write_text(SPACE.replace("[1, 2, 4, 8, 16]", "[1, 16]"))
    return [*COMMAND, "--space", str(space)], {"FLUX_TUNE_CACHE": str(folder / "cache")}


@pytest.mark.timeout(400)
def test_killed_search_resumes_and_keeps_the_cache_intact(tmp_path: Path) -> None:
    rng = random.Random(5)
    arguments, variables = command(tmp_path)
    runs = tmp_path / "cache" / "runs"
    journal_bytes = 0
    for _ in range(1 if STRESS == 1 else 6):
        process = start_forked_command(arguments, tmp_path, variables)
        while not any("round" in path.read_text() for path in runs.glob("*.jsonl")):
            assert process.is_alive(), (tmp_path / "err").read_text()
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.1 * STRESS))
        process.kill()
        process.join()
        cache = Cache(tmp_path / "cache")
        list(cache.entries())
        assert cache.damaged() == []
        journals = list(runs.glob("*.jsonl"))
        size = sum(path.stat().st_size for path in journals)
        if journals:
            assert size >= journal_bytes - 4096, "what was written down is lost"
            journal_bytes = size
    done = forked(*arguments, "--json", timeout_s=280, settings=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [document["settled"] for document in found] == [True, True]
    winners = [w.m for entry in Cache(tmp_path / "cache").entries() for w in entry.winners]
    assert winners == [8, 24]
    assert Cache(tmp_path / "cache").damaged() == []


def test_workers_end_when_the_tuner_is_killed(tmp_path: Path) -> None:
    arguments, variables = command(tmp_path)
    process = start_forked_command(arguments, tmp_path, variables)
    while len(processes_of_session(process.pid)) < 4:  # itself, what it forks from, two workers
        assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.05)
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while alive := processes_of_session(process.pid):
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.2)


@stress_only
@pytest.mark.timeout(300)
def test_under_torchrun_workers_are_replaced_too(tmp_path: Path) -> None:
    """Each of torchrun's ranks supervises one worker; a candidate kills one of them."""
    script = tmp_path / "tune_under_torchrun.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = {SUPPORT!r}
import json, tune_makers
from pathlib import Path
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.select.cache import Cache
from flux.tune.journal import Journal, run_id
from flux.launch.supervisors import Joined
from flux.tune.machine import survey
from flux.select.space import load_space
from flux.tune.tuner import Options, Tuner, make_search

if __name__ == "__main__":
    folder = Path({str(tmp_path)!r})
    launcher = Joined()
    options = Options(rounds=(2, 3), candidate_timeout_s=10, make=tune_makers.faulty)
    here = survey(launcher, "cpu", None, 1)
    problem = Problem(Op.ag_gemm, 32, 16, 16, "float32", 2)
    space = load_space(folder / "space.toml")
    search = make_search(problem, space, here.cluster, here.placement, options)
    journal = Journal(folder / "runs", "run", {{}}) if launcher.leads else None
    Tuner([search], launcher, here, Cache(folder / "cache"), journal, options).run()
    if launcher.leads:
        print(json.dumps({{"excluded": search.excluded, "winner": search.winner.as_dict()}}))
    launcher.close()
"""
    )
    (tmp_path / "space.toml").write_text(SPACE)
    document = json.loads(under_torchrun(str(script), timeout_s=280).splitlines()[-1])
    assert document["winner"]["knobs"]["comm_tile_rows"] == 16
    assert len(document["excluded"]) == 4


def test_space_of_these_tests_has_the_form_of_shipped_spaces() -> None:
    assert (data_root() / "spaces" / "cpu.toml").exists()
