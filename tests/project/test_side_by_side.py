"""Tests are shared out among workers: each runs once, and those marked alone beside no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import ROOT

pytest.importorskip("xdist")

_CONFTEST = """
import json, os, time
import pytest

@pytest.fixture(autouse=True)
def written(request):
    begin = time.monotonic()
    yield
    what = [request.node.nodeid, os.environ["PYTEST_XDIST_WORKER"], begin, time.monotonic()]
    with open("ran.jsonl", "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
_TESTS = """
import os, time
import pytest
from side_by_side import built_once

@pytest.mark.parametrize("number", range(6))
def test_unmarked(number):
    time.sleep(0.1)

@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_marked_alone(number):
    time.sleep(0.2)

def test_shared_folder_is_built(pytestconfig):
    def build(folder):
        with open("builds", "a") as file:
            file.write("built\\n")
        time.sleep(0.2)
        (folder / "made").write_text("whole")
        return folder / "made"

    assert built_once(pytestconfig, "it", build).read_text() == "whole"
"""
_CRASH = """
import os, pytest

def test_crashing_worker():
    os._exit(1)

@pytest.mark.alone
def test_marked_alone_after_the_crash():
    pass
"""
_SLOW = """
import time
from xdist.workermanage import WorkerController

send, receivers = WorkerController.send_runtest_some, []

def send_slowly(worker, indices):
    send(worker, indices)
    receivers.append(worker)
    if len(receivers) == 2:  # a worker begins a test when it knows the next: this one crashes
        deadline = time.monotonic() + 20
        while worker.gateway.hasreceiver() and time.monotonic() < deadline:
            time.sleep(0.01)

WorkerController.send_runtest_some = send_slowly
"""


@dataclass(frozen=True)
class Ran:
    name: str
    worker: str
    begin: float
    end: float


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[str, list[Ran]]:
    """Run pytest; return its last line and the tests that ended."""
    for name, text in {"conftest.py": _CONFTEST, **files}.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone\n")
    command = [sys.executable, "-m", "pytest", "-p", "side_by_side", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (folder / "ran.jsonl").exists(), f"no test ran: {done.stdout}{done.stderr}"
    lines = (folder / "ran.jsonl").read_text().splitlines()
    return done.stdout.splitlines()[-1], [Ran(*json.loads(line)) for line in lines]


def test_each_runs_once_and_some_alone(tmp_path: Path) -> None:
    closing, ran = run(tmp_path, {f"test_{name}.py": _TESTS for name in "abc"}, "-n", "2")
    assert "27 passed" in closing
    assert len({test.name for test in ran}) == len(ran) == 27
    assert {test.worker for test in ran} == {"gw0", "gw1"}
    worker = {test.name: test.worker for test in ran}
    first = [[worker[f"test_{file}.py::test_unmarked[{n}]"] for n in (0, 1)] for file in "bc"]
    assert sorted(first) == [["gw0", "gw0"], ["gw1", "gw1"]], "files are taken as a whole"
    for test in ran:
        if "test_marked_alone" in test.name:
            assert all(o is test or o.end <= test.begin or o.begin >= test.end for o in ran), ran
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_worker_that_crashes_costs_its_test_alone(tmp_path: Path) -> None:
    """Even before it knows all its tests: sending it the next one ended the whole run."""
    files = {"test_a.py": _TESTS, "test_b.py": _CRASH, "conftest.py": _CONFTEST + _SLOW}
    closing, ran = run(tmp_path, files, "-n", "2")
    assert "1 failed, 10 passed" in closing
    assert len({test.name for test in ran}) == len(ran) == 10


@pytest.mark.parametrize(
    ("options", "passed"), [(("-k", "test_marked_alone"), 2), (("-k", "built"), 1)]
)
def test_selection_may_lack_alone_or_unmarked_tests(
    options: tuple[str, ...], passed: int, tmp_path: Path
) -> None:
    closing, ran = run(tmp_path, {"test_a.py": _TESTS}, "-n", "2", *options)
    assert f"{passed} passed" in closing and len(ran) == passed
