"""The copy engine and the signal pad with ranks as threads: data races, lost wake-ups, faults.

csrc/tests has the programs. ThreadSanitizer finds a missing release or acquire on any machine, x86
included, whose strong ordering would hide it from every other test. What one thread enters alone,
such as the builder of schedules, is linked as flux._C has it. The plain program, all of which is
linked so, is fast enough for many more calls: `make stress` runs it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import STRESS, stress_only
from side_by_side import built_once

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
PROGRAM = ("tests/test_engine_threads", "tests/test_engine_faults")
ENGINE = ("cpu/engine", "cpu/engine_reduce", "cpu/engine_network", "cpu/engine_trace")
UNITS = {"plain": PROGRAM, "tsan": (*PROGRAM, *ENGINE, "cpu/processes", "cpu/reduce")}
FLAGS = {"plain": [], "tsan": ["-fsanitize=thread"]}
KINDS = pytest.mark.parametrize("kind", ["tsan", pytest.param("plain", marks=stress_only)])
CALLS = {"plain": 150 * STRESS, "tsan": 25 * STRESS}  # per op and world
COMPILER = os.environ.get("CXX") or "g++"

pytestmark = pytest.mark.timeout(400 * STRESS)  # of a busy machine; 15 s each otherwise


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def compiled(kind: str, csrc: Path, unit: str, into: Path) -> Path:
    target = into / f"{Path(unit).name}.o"
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", *FLAGS[kind], f"-I{csrc}"]
    done = run([COMPILER, *flags, "-c", str(csrc / f"{unit}.cpp"), "-o", str(target)], 300)
    assert done.returncode == 0, done.stderr
    return target


def linked(kind: str, objects: list[Path], program: Path) -> Path:
    files = map(str, [*objects, library()])
    done = run([COMPILER, *FLAGS[kind], *files, "-pthread", "-ldl", "-o", str(program)], 120)
    assert done.returncode == 0, done.stderr
    return program


def library() -> Path:
    """What flux._C is made of, but for its bindings, as it was built last."""
    built = ROOT.glob("build/native-*/libflux_host.a")
    newest = max(built, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        pytest.skip("flux._C was not built in this folder")
    return newest


class Builds:
    """Programs, built when they are first asked for, beside the object files they are made of."""

    def __init__(self, root: Path, config: pytest.Config) -> None:
        self.root, self.config = root, config

    def program(self, kind: str) -> Path:
        def build(into: Path) -> Path:
            objects = [compiled(kind, CSRC, unit, into) for unit in UNITS[kind]]
            return linked(kind, objects, into / "program")

        self._check(kind)
        return built_once(self.config, f"engine-{kind}", build)

    def mutant(self, kind: str, header_or_source: str, old: str, new: str) -> Path:
        """Build the program with one passage of the engine's code replaced."""
        objects = self.program(kind).parent
        copy = self.root / f"mutant-{kind}"
        shutil.copytree(CSRC, copy)
        path = copy / header_or_source
        text = path.read_text()
        assert text.count(old) == 1, f"{header_or_source} no longer has {old!r}: adapt this test"
        path.write_text(text.replace(old, new))
        stem = header_or_source.removesuffix(".cpp")
        # Of a header's function the linker takes that of the first object, which is the engine's.
        changed = [stem if stem in ENGINE else "cpu/engine"]
        fresh = [compiled(kind, copy, unit, copy) for unit in changed]
        others = [objects / f"{Path(u).name}.o" for u in UNITS[kind] if u not in changed]
        return linked(kind, [*fresh, *others], copy / "program")

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
def builds(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Builds:
    return Builds(tmp_path_factory.mktemp("engine"), pytestconfig)


def execute(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    done = run([str(program), *args], 240 * STRESS)
    if "unexpected memory mapping" in done.stderr:
        # Kernels with much address randomisation collide with the sanitizer's shadow memory.
        if shutil.which("setarch") is None:
            pytest.skip("ThreadSanitizer needs less address randomisation, and setarch is missing")
        done = run(["setarch", platform.machine(), "-R", str(program), *args], 240 * STRESS)
    return done


@KINDS
def test_back_to_back_calls_have_no_data_race(builds: Builds, kind: str) -> None:
    done = execute(builds.program(kind), str(CALLS[kind]))
    assert done.returncode == 0, done.stderr


@KINDS
def test_faults_end_every_wait(builds: Builds, kind: str) -> None:
    done = execute(builds.program(kind), "faults")
    assert done.returncode == 0, done.stderr


# The tests above prove something only if they fail when the code is wrong.


def test_a_raise_without_release_is_found(builds: Builds) -> None:
    mutant = builds.mutant(
        "tsan",
        "cpu/signal_pad.h",
        "pad.signals()[index].store(epoch, std::memory_order_seq_cst)",
        "pad.signals()[index].store(epoch, std::memory_order_relaxed)",
    )
    done = execute(mutant, "50")
    assert done.returncode == 66 and "data race" in done.stderr, done.stderr


@stress_only
def test_a_write_before_all_have_entered_is_found(builds: Builds) -> None:
    mutant = builds.mutant(
        "plain",
        "cpu/engine.cpp",
        "if (!wait_entries(limit)) return false;\n    entries_seen_ = true;",
        "entries_seen_ = true;",
    )
    done = execute(mutant, "1500")
    assert done.returncode == 1 and "expected" in done.stderr, done.stderr
