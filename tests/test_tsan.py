"""The copy engine and the signal pad with ranks as threads: data races, lost wake-ups, faults.

csrc/tests has the programs. ThreadSanitizer finds a missing release or acquire on any machine, x86
included, whose strong ordering would hide it from every other test; the plain build is fast enough
for many more calls.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
ENGINE = ("host/engine", "host/engine_reduce", "host/engine_network", "host/engine_trace")
UNITS = (
    *ENGINE,
    "host/routes",
    "host/schedule",
    "host/reduce",
    "tests/test_engine_threads",
    "tests/test_engine_faults",
)
FLAGS = {"plain": [], "tsan": ["-fsanitize=thread"]}
KINDS = pytest.mark.parametrize("kind", FLAGS)
CALLS = {"plain": "1500", "tsan": "300"}  # per op and world: tens of thousands in all
COMPILER = os.environ.get("CXX") or "g++"

pytestmark = pytest.mark.timeout(400)  # of a busy machine; 15 s each otherwise


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def compiled(kind: str, csrc: Path, unit: str, into: Path) -> Path:
    target = into / f"{Path(unit).name}.o"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *FLAGS[kind], f"-I{csrc}"]
    done = run([COMPILER, *flags, "-c", str(csrc / f"{unit}.cpp"), "-o", str(target)], 300)
    assert done.returncode == 0, done.stderr
    return target


def linked(kind: str, objects: list[Path], program: Path) -> Path:
    done = run([COMPILER, *FLAGS[kind], *map(str, objects), "-pthread", "-o", str(program)], 120)
    assert done.returncode == 0, done.stderr
    return program


class Builds:
    """Object files and programs, built when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects: dict[str, list[Path]] = {}

    def program(self, kind: str) -> Path:
        self._check(kind)
        into = self.root / kind
        if kind not in self.objects:
            into.mkdir()
            self.objects[kind] = [compiled(kind, CSRC, unit, into) for unit in UNITS]
            linked(kind, self.objects[kind], into / "program")
        return into / "program"

    def mutant(self, kind: str, header_or_source: str, old: str, new: str) -> Path:
        """The program with one passage of the engine's code replaced."""
        self.program(kind)
        copy = self.root / f"mutant-{kind}"
        shutil.copytree(CSRC, copy)
        path = copy / header_or_source
        text = path.read_text()
        assert text.count(old) == 1, f"{header_or_source} no longer has {old!r}: adapt this test"
        path.write_text(text.replace(old, new))
        engine = [compiled(kind, copy, unit, copy) for unit in ENGINE]
        return linked(kind, [*engine, *self.objects[kind][len(ENGINE) :]], copy / "program")

    def _check(self, kind: str) -> None:
        if shutil.which(COMPILER) is None:
            pytest.skip(f"no C++ compiler {COMPILER}")
        if kind == "tsan":
            probe = self.root / "probe.cpp"
            probe.write_text("int main() { return 0; }\n")
            command = [COMPILER, "-fsanitize=thread", str(probe), "-o", str(self.root / "probe")]
            if run(command, 60).returncode != 0:
                pytest.skip(f"{COMPILER} has no ThreadSanitizer runtime")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("engine"))


def execute(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    done = run([str(program), *args], 240)
    if "unexpected memory mapping" in done.stderr:
        # Kernels with much address randomisation collide with the sanitizer's shadow memory.
        if shutil.which("setarch") is None:
            pytest.skip("ThreadSanitizer needs less address randomisation, and setarch is missing")
        done = run(["setarch", platform.machine(), "-R", str(program), *args], 240)
    return done


@KINDS
def test_back_to_back_calls(builds: Builds, kind: str) -> None:
    done = execute(builds.program(kind), CALLS[kind])
    assert done.returncode == 0, done.stderr


@KINDS
def test_faults(builds: Builds, kind: str) -> None:
    done = execute(builds.program(kind), "faults")
    assert done.returncode == 0, done.stderr


# The tests above prove something only if they fail when the code is wrong.


def test_a_raise_without_release_is_found(builds: Builds) -> None:
    mutant = builds.mutant(
        "tsan",
        "host/signal_pad.h",
        "pad.signals()[index].store(epoch, std::memory_order_seq_cst)",
        "pad.signals()[index].store(epoch, std::memory_order_relaxed)",
    )
    done = execute(mutant, "50")
    assert done.returncode == 66 and "data race" in done.stderr, done.stderr


def test_a_write_before_all_have_entered_is_found(builds: Builds) -> None:
    mutant = builds.mutant(
        "plain",
        "host/engine.cpp",
        "if (!wait_entries(limit)) return false;\n    entries_seen_ = true;",
        "entries_seen_ = true;",
    )
    done = execute(mutant, "1500")
    assert done.returncode == 1 and "expected" in done.stderr, done.stderr
