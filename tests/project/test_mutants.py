"""tools/mutants.py tells faults that a test finds from those that none does."""

from __future__ import annotations

import json
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest

from scripts import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mutants

SOURCE = (
    "def total(values):\n    return sum(values)\n\n\ndef first(values):\n    return values[0]\n"
)
TEST = "from counting import total\n\ndef test_total():\n    assert total([1, 2]) == 3\n"
HEAD = """what: {name} is off by one
hurts: callers of {name}
tests: test_counting.py

diff --git a/counting.py b/counting.py
"""


def patch_of(name: str, old: str) -> str:
    new = SOURCE.replace(old, f"{old} + 1").splitlines(True)
    files = ("a/counting.py", "b/counting.py")
    return HEAD.format(name=name) + "".join(unified_diff(SOURCE.splitlines(True), new, *files, n=1))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "counting.py").write_text(SOURCE)
    (tmp_path / "test_counting.py").write_text(TEST)
    (tmp_path / ".gitignore").write_text("/build/\n__pycache__/\n")
    folder = tmp_path / "tests" / "mutants"
    folder.mkdir(parents=True)
    for name, old in (("total", "sum(values)"), ("first", "values[0]")):
        (folder / f"{name}.patch").write_text(patch_of(name, old))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_a_fault_is_caught_or_missed(checkout: Path) -> None:
    report = checkout / "report.json"
    assert mutants.main(["--root", str(checkout), "--json", str(report), "total", "first"]) == 1
    caught, missed = json.loads(report.read_text())
    assert (caught["name"], caught["outcome"]) == ("total", mutants.CAUGHT)
    assert caught["test"] == "test_counting.py::test_total"
    assert (missed["name"], missed["outcome"]) == ("first", mutants.MISSED)
    assert (checkout / "counting.py").read_text() == SOURCE
    assert (checkout / "build" / "mutants" / "tree" / "counting.py").read_text() == SOURCE


def test_a_patch_that_no_longer_applies_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "counting.py").write_text(SOURCE.replace("sum(values)", "sum(values, 0)"))
    assert mutants.main(["--root", str(checkout)]) == 2
    said = capsys.readouterr().err
    assert "mutant total does not apply" in said and "mutant first" not in said


def test_patch_without_a_header_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = checkout / "tests" / "mutants" / "total.patch"
    patch.write_text(patch.read_text().replace("tests:", "test:"))
    with pytest.raises(SystemExit, match="2"):
        mutants.main(["--root", str(checkout)])
    assert "total.patch: no tests" in capsys.readouterr().err


def test_mutants_name_tests_that_are_there() -> None:
    for patch in (ROOT / "tests" / "mutants").glob("*.patch"):
        for test in mutants.read_mutant(patch).tests:
            path, *inside = test.split("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert all(name.partition("[")[0] in source for name in inside), f"{patch}: {test}"


def test_every_seeded_fault_applies() -> None:
    patches = sorted(str(path) for path in (ROOT / "tests/mutants").glob("*.patch"))
    assert len(patches) >= 25
    for patch in patches:
        done = subprocess.run(
            ["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_kernels_are_built_before_the_time_of_a_test_runs(checkout: Path) -> None:
    files = {
        "csrc/cuda/rows.cuh": "int rows = 1;\n",
        "tools/compile_kernels.py": "import shutil\nshutil.copy('csrc/cuda/rows.cuh', 'built')\n",
        "tests/gpu/test_rows.py": "def test_rows():\n    assert '1' in open('built').read()\n",
        "tests/mutants/rows.patch": "what: rows\nhurts: rows\ntests: tests/gpu/test_rows.py\n\n"
        "diff --git a/csrc/cuda/rows.cuh b/csrc/cuda/rows.cuh\n"
        "--- a/csrc/cuda/rows.cuh\n+++ b/csrc/cuda/rows.cuh\n"
        "@@ -1 +1 @@\n-int rows = 1;\n+int rows = 2;\n",
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    report = checkout / "report.json"
    assert mutants.main(["--root", str(checkout), "--json", str(report), "rows"]) == 0
    (caught,) = json.loads(report.read_text())
    assert caught["test"] == "tests/gpu/test_rows.py::test_rows" and caught["build_s"] > 0
