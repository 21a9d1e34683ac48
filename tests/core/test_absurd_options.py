"""Absurd options, variables and outputs end commands in one line, before anything starts."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import absurd
from absurd import NUMBERS, TEXTS
from flux.cli import terminal
from flux.cli.app import app
from flux.core import datafile, env
from flux.doctor.examine import Findings, Item, examine, show
from flux.launch import spawn
from flux.launch.hosts import parse_hosts, parse_rate
from harness import STRESS

CASES = 60 * STRESS
"""Of some 7000; `python tests/support/absurd.py` tries all."""
ESCAPES = "\x1b[31mred\a\x9b2J\u202e\udcff"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("FLUX_TUNE_CACHE", "FLUX_KERNEL_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.mark.timeout(3600 if STRESS > 1 else 240)
def test_options_of_all_commands_are_checked_before_ranks_start() -> None:
    everything = absurd.cases()
    options = {option for option, _ in everything}
    assert len(options) > 200 and {"bench op --threads", "plan run --scale"} <= options
    with absurd.without_ranks():
        chosen = random.Random(STRESS).sample(everything, CASES)
        wrong = {str(words)[:300]: absurd.problem_of(words) for _, words in chosen}
    assert not {words: problem for words, problem in wrong.items() if problem is not None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["bench", "op", "--timeout", "inf"],
            "timeout must be above 0 and at most 1e+09 s",
        ),
        (
            ["plan", "run", "--timeout", "nan"],
            "timeout must be above 0 and at most 1e+09 s",
        ),
        (["tune", "--op", "ag_gemm", "--candidate-timeout", "inf"], "--candidate-timeout must be"),
        (["bench", "op", "--threads", "100000000"], "threads must be at most "),
        (["tune", "--op", "ag_gemm", "--threads", "100000000"], "threads must be at most "),
        (["bench", "op", "--nproc", "99999999"], "world must be at most 65536, got 99999999"),
        (["bench", "op", "--nproc", "65536"], "at most 1024 ranks can be started, got 65536"),
        (["plan", "run", "--tp", "1", "--dp", "99999999"], "at most 1024 ranks can be started"),
        (["bench", "op", "--hosts", "2", "--link-rate", "9" * 400 + "bit"], "link rate must be in"),
        (["bench", "op", "--m", "1" + "0" * 30], "m must be at most 1073741824"),
        (["bench", "op", "--seed", "1" + "0" * 30], "seed must be at most"),
        (["bench", "op", "--m", "1073741824", "--n", "65536"], "GiB of memory are needed, and"),
        (["bench", "model", "--scale", "1", "--batch", "999999"], "GiB of memory are needed, and"),
        (["tune", "--op", "gemm_ar", "--m", "1073741824"], "GiB of memory are needed, and"),
        (
            ["plan", "run", "--policy", "serial", "--micro-batch", "9999999"],
            "GiB of memory are needed, and",
        ),
        (["plan", "simulate", "--micro-batches", "99999999"], "are too many operators to plan"),
        (["plan", "search", "--gpus", "2", "--batch", "1" + "0" * 30], "batch must be at most"),
        (["plan", "search", "--gpus", "2", "--memory", "inf"], "memory must be at most 1e9 GB"),
        (["compile", "--list", "--out", "~nosuchuser/x"], "no home directory is known for"),
    ],
)
def test_errors_of_large_values_say_what_is_allowed(words: list[str], said: str) -> None:
    with absurd.without_ranks():
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert said in result.stderr


def test_rates_and_hosts_have_ranges() -> None:
    for rate in ("9" * 400 + "bit", "1e3gbit", "1001gbit", "0.5kbit", "٣gbit", "nan"):
        with pytest.raises(ValueError, match="link rate must"):
            parse_rate(rate)
    assert parse_rate("1000gbit") == 1e12
    for hosts in ("٣", "1_0+1", "9" * 5000, "+", "2+" + "9" * 400):
        with pytest.raises(ValueError, match="hosts"):
            parse_hosts(hosts, 4)


# -- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_variables_have_ranges(
    variable: env.Variable[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (*NUMBERS, *TEXTS):
        monkeypatch.setenv(variable.name, text)
        try:
            value = variable.get()
        except env.VariableError as error:
            assert str(error).startswith(f"environment variable {variable.name}=")
            assert str(error).isprintable() and len(str(error)) < 400
            continue
        if type(value) in (int, float):
            assert (0 <= value <= 1e9 and text.isascii()) or not text, text
        if variable.name == "FLUX_WINDOW_MB":
            assert int(value * 1e6) < 2**63


def test_directories_are_of_users_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_TUNE_CACHE", "~nosuchuser/x")
    result = CliRunner().invoke(app, ["tune", "show"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "FLUX_TUNE_CACHE='~nosuchuser/x'" in result.stderr
    monkeypatch.delenv("FLUX_TUNE_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and no such user
    with pytest.raises(env.VariableError, match=r"FLUX_TUNE_CACHE: .*no home directory is known"):
        env.TUNE_CACHE.path()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="no current directory"):
        env.user_path("kernels")
    assert env.user_path(tmp_path) == tmp_path


# -- what is printed and written -------------------------------------------------------------------


def test_nothing_commands_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.printable("a\nb" + ESCAPES) == r"a" "\n" r"b\x1b[31mred\x07\x9b2J\u202e\udcff"
    monkeypatch.setenv("COLUMNS", "9" * 12)
    monkeypatch.setenv("LINES", "²")
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    console = terminal.open_console()
    assert console.width <= 1000
    findings = Findings({"one": [Item(f"[/x]{ESCAPES}", ESCAPES, "broken", ESCAPES)]})
    with console.capture() as captured:
        show(findings, console)
        console.print(f"[/bold]{ESCAPES}")
    text = captured.get()
    assert text.replace("\n", "").isprintable() and "[/bold]" in text and r"[/x]\x1b" in text
    for words in ([ESCAPES], ["tune", "import", ESCAPES], ["bench", "op", f"--{ESCAPES}"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert result.output.replace("\n", "").isprintable(), result.output


def test_doctor_shows_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_KERNEL_CACHE", "~nosuchuser/\x1b[31m")
    findings = examine()
    assert not findings.usable
    assert findings.sections["kernels"][0].value == "a bad value"
    console = terminal.open_console()
    with console.capture() as captured:
        show(findings, console)
    assert captured.get().replace("\n", "").isprintable()


def test_outputs_replace_files_and_no_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("pipe", "link"):
        datafile.write_output(tmp_path / name, "text\udcff")
    assert os.read(reader, 99) == b"text\\udcff"
    os.close(reader)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text\\udcff"
    datafile.write_output(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="No space left"):
        datafile.write_output(Path("/dev/full"), "more")


WRITING = {
    "simulate op": [*absurd.SIMULATED, "--json", "FILE"],
    "simulate op, trace": [*absurd.SIMULATED, "--trace", "FILE"],
    "plan simulate": [*absurd.PLANNED, "--tp", "2", "--json", "FILE"],
    "plan simulate, trace": [*absurd.PLANNED, "--tp", "2", "--trace", "FILE"],
    "plan simulate, html": [*absurd.PLANNED, "--tp", "2", "--html", "FILE"],
    "tune export": ["FILE"],
}


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_is_said_in_one_line(name: str) -> None:
    words = ["/dev/full" if word == "FILE" else word for word in WRITING[name]]
    result = CliRunner().invoke(app, [*name.partition(",")[0].split(), *words])
    assert (result.exit_code, result.stderr) == (
        1,
        "error: cannot write /dev/full: No space left on device\n",
    )


SCRIPT = """
import sys
from flux.cli.app import app
app()
"""


def _command(words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    python = f"{sys.executable} -c '{SCRIPT}'"
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {python} {words}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        timeout=120,
        check=False,
    )


def test_streams_that_are_full_closed_or_not_unicode() -> None:
    """In processes: the interpreter flushes once more as it ends."""
    exports = {
        "--version > /dev/full": (1, rb"error: stdout: No space left on device\n"),
        "bench é 2> /dev/full": (2, rb""),
        "--version | true": (1, rb""),
        "--version >&- <&- 2>&-": (0, rb""),
        "bench é": (2, rb"(?s).*No such command .\\xe9.*"),
    }
    for words, (status, said) in exports.items():
        done = _command(words, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
        assert done.returncode == status, (words, done)
        assert re.fullmatch(said, done.stderr), (words, done)


def test_a_long_tmpdir_leaves_sockets_a_short_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multiprocessing
    import tempfile
    from multiprocessing import util

    long = tmp_path / ("t" * 130)
    long.mkdir()
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delitem(config, "tempdir", raising=False)
    spawn.use_short_socket_paths()
    assert len(util.get_temp_dir()) < 60 and tempfile.gettempdir() == str(long)
    monkeypatch.delitem(config, "tempdir")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match=r"TMPDIR is .* bytes long, too long for sockets"):
        spawn.use_short_socket_paths()
