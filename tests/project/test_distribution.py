"""What CI runs with which rights, and what wheels say of the code of others in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.joinpath(".github/workflows").glob("*.yml"))
NOTICES = ROOT / "THIRD_PARTY_NOTICES.txt"


def jobs() -> dict[str, str]:
    """The text of each job of CI."""
    text = ROOT.joinpath(".github/workflows/ci.yml").read_text(encoding="utf-8")
    _, _, listed = text.partition("\njobs:\n")
    parts = re.split(r"^  (\w+):\n", listed, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# -- CI --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_ci_runs(workflow: Path) -> None:
    """Prerequisites of a command are then those of .ci/run, and are tried with it."""
    commands = re.findall(r"^ +- run: (.*)$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands and set(commands) <= {".ci/run", ".ci/run checks", ".ci/run test-core"}


def test_make_help_lists_every_target() -> None:
    helped = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    listed = set(re.findall(r"^  make ([\w-]+)", helped.stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", ROOT.joinpath("Makefile").read_text(), re.MULTILINE)
    assert phony is not None and listed == set(phony.group(1).split()) - {"FORCE"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_have_few_rights(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert re.search(r"^permissions:\n  contents: read\n(?! )", text, re.MULTILINE)
    assert "write" not in re.findall(r"^ +[\w-]+: (write|read)\b", text, re.MULTILINE)


def test_the_oldest_and_the_newest_torch_are_tested() -> None:
    project = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'"torch>=([\d.]+)"', project)
    assert oldest is not None
    assert re.search(rf'torch: \["torch=={oldest.group(1)}\.\d+", "torch"\]', jobs()["torch"])
    makefile = ROOT.joinpath("Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^CORE_TESTS = (.*?)\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = re.sub(r".*suffix \.py,", "", listed.group(1), flags=re.DOTALL)
    files = [f"{name}.py" for name in names.strip(" \\)\n").replace("\\\n", " ").split()]
    assert len(files) > 8
    missing = [name for name in files if not ROOT.joinpath("tests", name).is_file()]
    assert missing == []


# -- the code of others ----------------------------------------------------------------------------


def test_notices_have_the_license_of_the_cutlass_that_kernels_are_built_with() -> None:
    try:
        cutlass = metadata.distribution("nvidia-cutlass")
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cutlass is not installed: make kernels")
    [path] = [file for file in cutlass.files or () if file.name == "LICENSE.txt"]
    text = Path(str(cutlass.locate_file(path))).read_text(encoding="utf-8")
    assert text.strip() in NOTICES.read_text(encoding="utf-8")


def test_notices_name_all_that_is_compiled_into_kernels() -> None:
    text = NOTICES.read_text(encoding="utf-8")
    project = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    pinned = re.search(r'"nvidia-cutlass==(\d+\.\d+\.\d+)\.\d+"', project)
    assert pinned is not None
    assert f"CUTLASS {pinned.group(1)} " in text
    for part in ("CUTLASS\n---", "CUDA runtime\n---", "(libcu++)\n---", "NVSHMEM\n---"):
        assert part in text
    assert text.count("\nLicense: ") == 4
    assert len(re.findall(r"^Copyright \(c\) ", text, re.MULTILINE)) == 4


@pytest.mark.parametrize("command", ["prepare_metadata_for_build_wheel", "build_sdist"])
def test_wheels_and_sources_have_the_notices(command: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77.0.3")
    checkout = tmp_path / "checkout"
    (checkout / "flux").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copy(NOTICES, checkout)
    (checkout / "flux/__init__.py").touch()
    call = f"from setuptools import build_meta; build_meta.{command}('out')"
    (checkout / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=checkout, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if command == "build_sdist":
        [archive] = (checkout / "out").glob("*.tar.gz")
        shutil.unpack_archive(archive, checkout / "out", filter="data")
    notices = [path for path in (checkout / "out").rglob(NOTICES.name) if path.is_file()]
    assert [path.read_bytes() for path in notices] == [NOTICES.read_bytes()]
