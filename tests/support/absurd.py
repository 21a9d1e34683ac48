"""Absurd values for every option of every command: none ends in a traceback, or takes long.

    python tests/support/absurd.py [PART OF A COMMAND'S NAME]

tries all values on all options, in this process; ranks do not start. The test tries some of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

import flux.bench.launch
import flux.launch.supervisors
import flux.tune.machine
from flux.cli.app import app
from fuzz_files import HangError, cpu_limit

STARTED = 77
"""Exit status where ranks would have started."""
CPU_SECONDS = 3
NUMBERS = [
    *("0", "-1", "nan", "inf", "-inf", "1e300", "1e308", "1" + "0" * 30, "9" * 400, "9" * 5000),
    *("", "٣", "0x10", "1_000", "1.5", "99999999", "2147483647", "4294967296", "1073741824"),
    *("-9223372036854775809", "65536", "-0", "1e-320", "true"),
]
TEXTS = [
    *("", " ", "~nosuchuser", "~nosuchuser/x", "\x1b[31mred", "two\nlines", "a" * 5000, "\udcff"),
    *("/", ".", "/dev/full", "/nosuch\x1b/dir", "[/bold]", "%s{0}", ",", ":", "=", "+", "-1", "0"),
    *("domino:slices=1" + "0" * 30, "domino:slices=-1", "domino:x=1", "domino:slices=nan"),
    *("9" * 400 + "bit", "1e300", "0x0", "1x" + "9" * 400, "-1x-1", "99999999x99999999"),
    *("99999999", "2+2+99999999", "1e999s", "9" * 400 + "h", "train,,", "float128", "٣", "é"),
]
SIMULATED = ["--m", "256", "--n", "512", "--k", "256", "--nproc", "2", "--quiet"]
PLANNED = ["--policy", "serial", "--layers", "2", "--model", "gpt-6.7b"]
FOUND = ["--gpus", "2", "--model", "gpt-6.7b", "--batch", "4", "--sequence", "256", "--beam", "3"]
BASES = {
    "compile": ["--list"],
    "bench model": ["--quiet"],
    "bench suite": ["--quiet"],
    "bench op": ["--quiet"],
    "tune": ["--explain", "--op", "ag_gemm", "--m", "64", "--n", "64", "--k", "64"],
    "tune export": ["/dev/null"],
    "tune import": [],
    "tune clear": ["--yes"],
    "trace op": ["--quiet"],
    "simulate op": SIMULATED,
    "plan simulate": PLANNED,
    "plan explain": PLANNED,
    "plan run": ["--policy", "serial", "--quiet"],
    "plan search": [*FOUND, "--policy", "serial", "--memory", "200", "--quiet"],
}
"""Options of each command with which it is quick."""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, as typer has them."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))
        if not hasattr(command, "commands") or (path and command.invoke_without_command):
            yield " ".join(path), command

    return walk(typer.main.get_command(app), ())


def cases() -> list[tuple[str, list[str]]]:
    """(name of the option, command line) for each value of each option that takes one."""
    command_lines = []
    for name, command in commands():
        for param in command.params:
            if getattr(param, "is_flag", False) or name not in BASES:
                continue
            option, base = param.opts[0], BASES[name]
            if option in base:
                at = base.index(option)
                base = base[:at] + base[at + 2 :]
            described = str(getattr(param, "type_descriptor", None) or param.type)
            is_number = any(
                kind in described.split("parameter_info")[0] for kind in ("int", "float")
            )
            for value in NUMBERS if is_number else TEXTS:
                arguments = [f"{option}={value}"] if option.startswith("-") else ["--", value]
                command_lines.append((f"{name} {option}", [*name.split(), *base, *arguments]))
    return command_lines


@contextmanager
def without_ranks() -> Iterator[None]:
    """Commands end with status STARTED where they would start ranks."""

    def start(*_: Any, **__: Any) -> None:
        raise SystemExit(STARTED)

    find = importlib.util.find_spec
    with (
        mock.patch.object(flux.bench.launch, "run_ranks", start),
        mock.patch.object(flux.launch.supervisors, "run_ranks", start),
        mock.patch.object(
            importlib.util, "find_spec", lambda name, *of: find(name, *of) or name == "megatron"
        ),
    ):
        yield


def problem_of(words: list[str]) -> str | None:
    """Run a command line in this process; say what is wrong with how it ends."""
    try:
        with cpu_limit(CPU_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of directories that are refused
            result = CliRunner().invoke(app, words)
    except HangError as error:
        return str(error)
    if isinstance(result.exception, HangError):
        return str(result.exception)
    if not isinstance(result.exception, (SystemExit, type(None))):
        return f"{type(result.exception).__name__}: {result.exception!s:.300}"
    if result.exit_code not in (0, 1, 2, STARTED):
        return f"exit status {result.exit_code}"
    if not result.output.replace("\n", "").isprintable():
        return f"control characters: {result.output!r:.300}"
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit_code in (1, 2) and not ("Usage" in result.stderr or "error:" in result.stderr):
        return f"says nothing: {result.output!r:.300}"
    if result.exit_code == 2 and "Usage" not in result.stderr and len(errors) != 1:
        return f"{len(errors)} lines: {result.stderr!r:.300}"
    return None


def main() -> int:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [case for case in cases() if only in case[0]]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, without_ranks():
        os.chdir(folder)
        with mock.patch.dict("os.environ", FLUX_TUNE_CACHE=folder, FLUX_KERNEL_CACHE=folder):
            for name, words in chosen:
                begin = time.process_time()
                problem = problem_of(words)
                seconds = time.process_time() - begin
                if problem is None and seconds > 1:
                    problem = f"takes {seconds:.1f} s"
                if problem is not None:
                    wrong += 1
                    print(f"{name}: {[word[:60] for word in words]}: {problem}", flush=True)
    print(f"{len(chosen)} cases, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
