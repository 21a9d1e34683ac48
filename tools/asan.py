"""Run the native tests and tests of ops under AddressSanitizer and UBSan: make asan.

Compiled with them are the engine, the schedule builder and the native tests. The bindings are those
of flux._C as it was built last. A package of that name in build/asan has the instrumented module
beside links to everything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "asan"
COMPILER = os.environ.get("CXX") or "g++"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", *SANITIZE]
WHICH_MODULE = """
import flux._C
from harness import run_ranks

def module(rank: int, world: int) -> str:
    return str(flux._C.__file__)

def test_ranks_have_the_instrumented_module() -> None:
    paths = [module(0, 1), *run_ranks(2, module)]
    assert all("build/asan" in path for path in paths), paths
"""
PROGRAMS = ("test_engine", "test_collectives")
CALLS = 40  # per op and world, of the native tests
OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
NETWORK = "tests/hosts/test_network.py"
TESTS = (
    "tests/core/test_bounds.py",
    *(f"tests/cpu/test_every_op.py::test_random_cases[3-{op}]" for op in OPS),
    *(f"{NETWORK}::test_random_cases[{hosts}-{op}]" for hosts in ("aab", "aabb") for op in OPS),
    f"{NETWORK}::test_chunks_of_many_messages_match_float64[ab]",
    f"{NETWORK}::test_a_schedule_that_needs_more_memory_is_refused_on_all_ranks",
)


def run(command: Sequence[object], folder: Path = ROOT, **more: str) -> None:
    """Run a command; exit with its status if that is not 0."""
    environment = {**os.environ, **more}
    status = subprocess.run(list(map(str, command)), cwd=folder, env=environment).returncode
    if status:
        sys.exit(status if status > 0 else 128 - status)


def compiled(unit: Path) -> Path:
    """Return the object file of a source file, compiled anew if any source file is newer."""
    target = BUILD / f"{unit.stem}.o"
    newest = max(path.stat().st_mtime for path in ROOT.glob("csrc/**/*.*"))
    if not target.exists() or target.stat().st_mtime < newest:
        run([COMPILER, *FLAGS, "-Icsrc", "-c", unit, "-o", target])
    return target


def runtimes() -> str:
    """Return the sanitizers' libraries, which must be loaded before all others."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        if not Path(found).is_absolute():
            sys.exit(f"{COMPILER} has no {name}: make asan CXX=g++, with its sanitizers installed")
        paths.append(str(Path(found).resolve()))
    return ":".join(paths)


def package(objects: Sequence[Path]) -> None:
    """Make build/asan/flux: the package, with an instrumented flux._C."""
    [native] = ROOT.glob("build/native-*/libflux_host.a")
    bindings = sorted(native.parent.glob("CMakeFiles/_C.dir/**/*.o"))
    folder = BUILD / "flux"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in (ROOT / "flux").iterdir():
        if not path.name.endswith(".so"):
            (folder / path.name).symlink_to(path)
    module = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    link = [COMPILER, *SANITIZE, "-shared", *bindings, *objects, native]
    run([*link, "-pthread", "-ldl", "-o", module])


def main() -> None:
    """Compile, link, and run."""
    BUILD.mkdir(parents=True, exist_ok=True)
    libraries = runtimes()
    sources = [path for part in ("cpu", "schedule") for path in ROOT.glob(f"csrc/{part}/*.cpp")]
    programs = {name: sorted(ROOT.glob(f"csrc/tests/{name}*.cpp")) for name in PROGRAMS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        units = [*sources, *(unit for of_program in programs.values() for unit in of_program)]
        objects = dict(zip(units, pool.map(compiled, units), strict=True))
    library = [objects[unit] for unit in sources]
    for name, of_program in programs.items():
        linked = [*library, *(objects[unit] for unit in of_program)]
        run([COMPILER, *SANITIZE, *linked, "-pthread", "-o", BUILD / name])
    package(library)
    options = {
        # Python frees little of its own at the end, and torch nothing.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    }
    run([BUILD / "test_engine", "faults"], **options)
    for name in PROGRAMS:
        run([BUILD / name, CALLS], **options)
    python = {**options, "LD_PRELOAD": libraries, "PYTHONPATH": str(BUILD)}
    which = BUILD / "test_which_module.py"
    which.write_text(WHICH_MODULE)
    # In build/asan, since Python looks for packages in the current folder first. So do the ranks.
    pytest = [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider"]
    paths = (
        "pythonpath=build/asan . benchmarks tools tests/support tests/support/emulation build/asan"
    )
    pytest += ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-o", paths]
    tests = [which, *(ROOT / test for test in TESTS)]
    run([*pytest, *tests, *sys.argv[1:]], BUILD, **python)


if __name__ == "__main__":
    main()
