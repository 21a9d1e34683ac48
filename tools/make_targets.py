"""Run every target of the Makefile from nothing: python tools/make_targets.py [TARGET ...].

Each target runs in a fresh copy of the working tree, without .venv and build. Only what takes long
is replaced. Creating .venv and installing with pip provide the commands of the packages that
are asked for; builds copy what this checkout has built; pytest collects one file, or looks whether
what it loads is there. A command that its target did not set up is then missing there, as it would
be for a newcomer.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
ROOT_VARIABLE = "FLUX_MAKE_TARGETS_ROOT"  # in commands' environment: the checkout with the builds
SHORT = "tests/project/test_harness.py"  # collected by `make test`
LOADED = ("flux/_C*.so", "ptx_machine/_machine*.so", "ptx_machine/gpu/*.so")  # by any pytest


def targets() -> list[str]:
    """Return the names of all targets that users may give."""
    found = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return [name for name in found.group(1).split() if name != "FORCE"]


def copy_tree(into: Path) -> None:
    """Copy the files that git knows or would add."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def provide(folder: Path, *names: str) -> None:
    """Make commands that run this file under their names."""
    for name in names:
        # Renamed into place: another step may be running the command, whose file cannot be written.
        fresh = folder / f".{name}-{os.getpid()}"
        fresh.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --as {name} "$@"\n')
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR)
        fresh.replace(folder / name)


def main(chosen: Sequence[str]) -> int:
    """Try targets, all if none is chosen; return 1 if one fails."""
    unknown = set(chosen) - set(targets())
    if unknown:
        sys.exit(f"no such target: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="flux-make-") as folder:
        pristine, commands = Path(folder, "pristine"), Path(folder, "bin")
        pristine.mkdir()
        commands.mkdir()
        copy_tree(pristine)
        provide(commands, "python3", "setarch")
        inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
        inherited |= {"PATH": f"{commands}:{os.environ['PATH']}", ROOT_VARIABLE: str(ROOT)}

        def succeeds(target: str) -> bool:
            began, clone = time.monotonic(), Path(folder, f"clone-{target}")
            shutil.copytree(pristine, clone)
            command = ["make", target, f"PYTHON={commands / 'python3'}"]
            done = subprocess.run(
                command,
                cwd=clone,
                env=inherited,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
            )
            result = "ok" if done.returncode == 0 else f"failed\n{done.stdout}"
            print(f"make {target}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
            shutil.rmtree(clone)
            return done.returncode == 0

        with ThreadPoolExecutor(2) as pool:  # mostly, each keeps one core busy
            succeeded = list(pool.map(succeeds, chosen or targets()))
    return 0 if all(succeeded) else 1


# -- the stand-ins, in the clone -------------------------------------------------------------------


def stand_in(name: str, arguments: list[str]) -> NoReturn:
    """Do what the command of this name does, as far as it is short."""
    if name.startswith("python"):
        python(arguments)
    elif name == "pytest":
        collect(arguments)
    elif name == "cmake":
        build(arguments)
    elif name == "ctest":
        need(arguments[arguments.index("--test-dir") + 1])
    elif name == "setarch":  # -R COMMAND ...
        subprocess.run(arguments[1:], check=True)
    elif name == "flux":
        need("flux/_C*.so")
        real("-m", "flux", *arguments[:2], "--help")
    sys.exit(0)  # formatters and linters: CI runs them in full


def real(*arguments: str) -> None:
    """Run this checkout's Python on the clone's files."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, *arguments], env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def need(*patterns: str) -> None:
    """Exit if the clone lacks what a command needs."""
    for pattern in patterns:
        if not list(Path().glob(pattern)):
            sys.exit(f"there is no {pattern}: a prerequisite of this target is missing")


def take(*patterns: str) -> None:
    """Copy what was built in this checkout, in place of building it."""
    root = Path(os.environ[ROOT_VARIABLE])
    for pattern in patterns:
        built = sorted(root.glob(pattern))
        if not built:
            sys.exit(f"{root} has no {pattern} to copy: make test builds it")
        for path in built:
            target = Path(path.relative_to(root))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def python(arguments: list[str]) -> None:
    """Stand in for Python: a new .venv, pip, and scripts that take long."""
    script = arguments[0]
    if arguments[:2] == ["-m", "venv"]:
        folder = Path(arguments[-1], "bin")
        folder.mkdir(parents=True)
        provide(folder, "python")
    elif arguments[:3] == ["-m", "pip", "install"]:
        install(arguments[3:])
    elif script == "setup.py":
        take(
            "flux/_C*.so",
            "build/native-*/libflux_host.a",
            "build/native-*/CMakeFiles/_C.dir/**/*.o",
        )
    elif script == "tools/compile_kernels.py":
        real(script, "--help")
    elif script in ("tools/mutants.py", "tools/asan.py"):
        need(script, *LOADED, "build/native-*/libflux_host.a")
    else:
        real(*arguments)


def install(arguments: list[str]) -> None:
    """Provide the commands of packages that pip would install."""
    requirements = [argument for argument in arguments if not argument.startswith("-")]
    if "-r" in arguments:
        file = arguments[arguments.index("-r") + 1]
        requirements.remove(file)
        requirements += Path(file).read_text().split("\n")
    for requirement in requirements:
        if requirement == ".":
            need("flux/_C*.so")
            provide(Path(".venv/bin"), "flux")
            continue
        name = re.match(r"[\w.-]*", requirement)
        try:
            package = metadata.distribution(name.group() if name else "")
        except (metadata.PackageNotFoundError, ValueError):
            continue  # an empty line, or what this checkout lacks, such as CUTLASS
        commands = {script.name for script in package.entry_points.select(group="console_scripts")}
        if not commands:  # it may have programs; lists of files are slow to read
            commands = {path.name for path in package.files or () if path.parent.name == "bin"}
        provide(Path(".venv/bin"), *sorted(commands))


def build(arguments: list[str]) -> None:
    """Stand in for CMake: directories of builds, and the PTX machine of this checkout."""
    if arguments[0] == "--build":
        need(arguments[1])
        if arguments[1] == "build/ptx_machine":
            take("ptx_machine/*.so", "ptx_machine/gpu/*.so")
    else:
        Path(arguments[arguments.index("-B") + 1]).mkdir(parents=True)


def collect(arguments: list[str]) -> None:
    """Stand in for pytest: what it loads and what is named exists; one target loads it."""
    files = [argument for argument in arguments if argument.startswith("tests/")]
    need(*LOADED, *files)
    if "--ignore" in arguments:  # make test
        real("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", SHORT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        stand_in(sys.argv[2], sys.argv[3:])
    sys.exit(main(sys.argv[1:]))
