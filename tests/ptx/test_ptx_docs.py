"""docs/kernels/ptx-machine.md: its examples run and print what it shows; its options exist."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ptx_machine.cli.app import app
from ptx_machine.cli.programs import find_nvcc

PAGE = Path(__file__).parents[2] / "docs" / "kernels" / "ptx-machine.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def matches(shown: str, printed: str) -> bool:
    """Whether a text is what a page shows, where "..." stands for anything."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip()) is not None


def test_commands_and_python_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    monkeypatch.chdir(tmp_path)
    sections = blocks()
    ((_, source),) = [block for block in sections if block[0] == "cuda"]
    Path("row_sums.cu").write_text(source)
    command = [nvcc, "-ptx", "-lineinfo", "-arch=sm_90a", "row_sums.cu"]
    subprocess.run(command, check=True)
    checked = 0
    for (language, content), (_, shown) in itertools.pairwise(sections):
        if language == "sh":
            words = shlex.split(content)
            assert words[:3] == ["python", "-m", "ptx_machine"]
            printed = CliRunner().invoke(app, words[3:]).output
        elif language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(content, str(PAGE), "exec"), {})
            printed = output.getvalue()
        else:
            continue
        assert matches(shown, printed), printed
        checked += 1
    assert checked == 3


def test_the_page_names_every_option() -> None:
    group = typer.main.get_command(app)
    options = {
        name
        for command in group.commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--")
    }
    rows = re.findall(r"^\| (`--.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(--[\w-]+)`", row)}
    assert named == options
