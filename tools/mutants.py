"""Seed faults, one at a time, and report which test finds each: make mutants.

A mutant is a patch in tests/mutants with three lines in front:

    what: the fault, in plain words
    hurts: whose work it would break, and how
    tests: the tests that are to find it, as pytest takes them

It is applied to a copy of the tree in build/mutants, in which its tests run until the first
failure. flux._C is compiled anew when the patch touches csrc. Kernels run on the PTX machine.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_config_var
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, MISSED, BROKEN = "caught", "MISSED", "not run"
STYLE = {CAUGHT: "green", MISSED: "bold red", BROKEN: "bold red"}
KERNEL_TESTS = ("tests/gpu/", "tests/ptx/")  # where kernels run on the PTX machine
TEST_TIMEOUT_S = 120  # some mutants hang, and the test that then waits has found something


@dataclass(frozen=True)
class Mutant:
    """A patch, and what its first lines say of it."""

    name: str
    patch: Path
    what: str
    hurts: str
    tests: tuple[str, ...]
    touched: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        test, test_s: the test that failed first, and the seconds it took.
        build_s, total_s: seconds to compile flux._C, and all in all.
        note: why it was not run, or how pytest ended.
    """

    name: str
    what: str
    hurts: str
    outcome: str
    test: str = ""
    test_s: float = 0.0
    build_s: float = 0.0
    total_s: float = 0.0
    note: str = ""


def read_mutant(patch: Path) -> Mutant:
    """Return the mutant in a file; raise ValueError if a line of its head is missing."""
    head, separator, diff = patch.read_text(encoding="utf-8").partition("\ndiff --git ")
    lines = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    missing = [name for name in ("what", "hurts", "tests") if not lines.get(name, "").strip()]
    touched = tuple(re.findall(r"^--- a/(\S+)$", diff, re.MULTILINE))
    if missing or not separator or not touched:
        raise ValueError(f"{patch}: no {' and '.join(missing) or 'diff as git makes it'}")
    what, hurts, tests = lines["what"], lines["hurts"], tuple(shlex.split(lines["tests"]))
    return Mutant(patch.stem, patch, what, hurts, tests, touched)


class Tree:
    """A copy of the working tree, to which patches are applied.

    Args:
        root: the checkout; what git ignores is not copied, but for flux._C and the PTX machine.
        work: the copy is made here. It is kept for the next time, with its build directory.
    """

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work, self.path = root, work, work / "tree"
        self.native = self.path / "build" / "native-mutants"
        self.path.mkdir(parents=True, exist_ok=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout
        present = [name for name in names.split("\0") if name and (root / name).is_file()]
        # A checkout may hold builds for other Pythons, too.
        suffix = get_config_var("EXT_SUFFIX")
        self.extension = [path.name for path in (root / "flux").glob(f"_C{suffix}")]
        machine = [
            f"ptx_machine/{p.relative_to(root / 'ptx_machine')}"
            for p in (root / "ptx_machine").rglob("*.so")
        ]
        kept = {*present, *(f"flux/{name}" for name in self.extension), *machine}
        for path in [path for path in self.path.rglob("*") if path.is_file()]:
            name = path.relative_to(self.path).as_posix()
            if name not in kept and not name.startswith("build/"):
                path.unlink()
        self.restore(sorted(kept))

    def restore(self, names: Sequence[str]) -> None:
        """Make files what they are in the checkout. Times are not copied: ninja looks at them."""
        for name in names:
            source, target = self.root / name, self.path / name
            if not target.exists() or not filecmp.cmp(source, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                # Renamed over the old file: a process that still runs may have mapped flux._C.
                fresh = shutil.copyfile(source, target.with_name(f".{target.name}.new"))
                shutil.copymode(source, fresh)
                os.replace(fresh, target)
                self._forget_bytecode(target)

    def _run(self, command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **more}
        return subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True
        )

    def apply(self, mutant: Mutant, *options: str) -> str:
        """Apply a patch; return what git has against it, or an empty string."""
        # Without a ceiling git would find our repository, and leave out what is not at its top.
        command = ["git", "apply", *options, str(mutant.patch)]
        done = self._run(command, GIT_CEILING_DIRECTORIES=str(self.work))
        for name in mutant.touched:
            self._forget_bytecode(self.path / name)
        return done.stderr.strip() if done.returncode else ""

    def _forget_bytecode(self, source: Path) -> None:
        """Python compares times in whole seconds, within which a file may change twice."""
        for old in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
            old.unlink()

    def build(self) -> None:
        """Compile flux._C, one file at a time; raise RuntimeError with the compiler's words."""
        import pybind11

        bin_dir, build = Path(sys.executable).parent, self.native
        cmake = str(bin_dir / "cmake")
        configure = [cmake, "-S", str(self.path), "-B", str(build), "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={bin_dir / 'ninja'}", "-DFLUX_WERROR=ON"]
        configure += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFLUX_VERSION={version('flux-overlap')}",
        ]
        configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] * bool(shutil.which("ccache"))
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1")
        make = [cmake, "--build", str(build), "--target", "_C", "--parallel", jobs]
        for command in (make,) if (build / "build.ninja").exists() else (configure, make):
            done = self._run(command)
            if done.returncode:
                raise RuntimeError(f"flux._C was not built: {(done.stdout + done.stderr)[-2000:]}")
        for name in self.extension:
            fresh = shutil.copy2(build / name, self.path / "flux" / f".{name}.new")
            os.replace(fresh, self.path / "flux" / name)

    def build_kernels(self) -> None:
        """Compile kernels for the PTX machine, outside of the time that a test has for it."""
        program = [sys.executable, "tools/compile_kernels.py", "--set", "minimal"]
        target = ["--arch", "80,90a", "--emulated", "--out", "build/emulated-kernels"]
        done = self._run([*program, *target], PYTHONPATH=str(self.path))
        if done.returncode:
            raise RuntimeError(f"no kernels were built: {(done.stdout + done.stderr)[-2000:]}")

    def test(self, tests: Sequence[str], result: Result) -> Result:
        """Run tests until the first failure, and say which that was."""
        report = self.work / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", f"--timeout={TEST_TIMEOUT_S}", *tests]
        done = self._run(command, PYTHONPATH=str(self.path))
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            if case.find("failure") is not None or case.find("error") is not None:
                name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
                took = float(case.get("time", "0"))
                return replace(result, outcome=CAUGHT, test=name, test_s=took)
        if done.returncode == 0:
            return replace(result, outcome=MISSED)
        if done.returncode < 0:
            return replace(result, outcome=CAUGHT, note=f"pytest: signal {-done.returncode}")
        return replace(result, outcome=BROKEN, note=(done.stdout + done.stderr)[-2000:])

    def run(self, mutant: Mutant, everything: bool) -> Result:
        """Apply a mutant, run its tests (then all others, if wanted), and take it back."""
        begin = time.monotonic()
        result = Result(mutant.name, mutant.what, mutant.hurts, BROKEN)
        try:
            if problem := self.apply(mutant):
                return replace(result, note=problem)
            if any(test.startswith(KERNEL_TESTS) for test in mutant.tests) and any(
                name.startswith(("csrc/cuda/", "csrc/cuda_moe/")) for name in mutant.touched
            ):
                self.build_kernels()
                result = replace(result, build_s=time.monotonic() - begin)
            # The host's side includes the headers of csrc/cuda that no nvcc is needed for.
            if any(re.match(r"csrc/(?!cuda(_moe)?/.*\.cuh?$)", name) for name in mutant.touched):
                self.build()
                result = replace(result, build_s=time.monotonic() - begin)
            result = self.test(mutant.tests, result)
            if result.outcome == MISSED and everything:
                result = self.test((), result)
        except RuntimeError as error:
            result = replace(result, note=str(error))
        finally:
            self.restore([*mutant.touched, *(f"flux/{name}" for name in self.extension)])
            (self.native / "libflux_host.a").unlink(missing_ok=True)  # it may hold the fault
        return replace(result, total_s=time.monotonic() - begin)


def show(results: Sequence[Result], console: Console) -> None:
    """Print a table, and a line that counts."""
    table = Table("mutant", "outcome", "test that failed first", "test s", "build s", "all s")
    table.columns[2].overflow = "fold"
    for r in results:
        times = (f"{r.test_s:.1f}", f"{r.build_s:.1f}" if r.build_s else "", f"{r.total_s:.1f}")
        outcome = f"[{STYLE[r.outcome]}]{r.outcome}[/]"
        # A test may have square brackets in its name, which would be markup.
        table.add_row(r.name, outcome, (r.test or r.note[-200:]).replace("[", r"\["), *times)
    caught = sum(r.outcome == CAUGHT for r in results)
    console.print(table, f"{caught} of {len(results)} caught")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Seed faults and see which test finds each.")
    parser.add_argument("names", nargs="*", help="names of mutants, without .patch (default: all)")
    parser.add_argument(
        "--all", action="store_true", help="also run all other tests if the named ones pass"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results as JSON")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to copy")
    given = parser.parse_args(arguments)
    folder = given.root / "tests" / "mutants"
    there = {path.stem: path for path in sorted(folder.glob("*.patch"))}
    unknown = sorted(set(given.names) - set(there))
    if unknown or not there:
        parser.error(f"no such mutant: {', '.join(unknown) or 'none at all'} in {folder}")
    try:
        mutants = [read_mutant(there[name]) for name in given.names or there]
    except ValueError as error:
        parser.error(str(error))
    tree = Tree(given.root, given.root / "build" / "mutants")
    stale = [(m.name, problem) for m in mutants if (problem := tree.apply(m, "--check"))]
    for name, problem in stale:
        print(f"mutant {name} does not apply: {problem}", file=sys.stderr)
    if stale:
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = []
    for number, mutant in enumerate(mutants, 1):
        r = tree.run(mutant, given.all)
        results.append(r)
        print(f"{number}/{len(mutants)} {r.name}: {r.outcome} {r.test or r.note}", flush=True)
    show(results, console)
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    return 0 if all(r.outcome == CAUGHT for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
