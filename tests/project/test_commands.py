"""Commands are entry points: other packages add some, and a broken one does not stop the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flux.cli import app as cli
from flux.cli.app import app


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that installs a package `visitor` with a module and entry points."""

    def installed(module: str, **commands: str) -> None:
        (tmp_path / "visitor.py").write_text(module, encoding="utf-8")
        info = tmp_path / "visitor-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: visitor\nVersion: 1.5\n")
        lines = [f"{name.replace('__', '.')} = {value}" for name, value in commands.items()]
        (info / "entry_points.txt").write_text("\n".join(["[flux.commands]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "visitor", raising=False)
        cli.entries.cache_clear()

    yield installed
    cli.entries.cache_clear()


def flux(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_every_command_of_this_package_can_be_loaded() -> None:
    assert list(cli.entries())[: len(cli.OWN)] == list(cli.OWN)
    assert "cannot load" not in flux("--help").stdout


def test_a_command_imports_no_package_but_its_own() -> None:
    script = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from flux.cli.app import app\n"
        "result = CliRunner().invoke(app, ['plan', 'simulate', '--help'])\n"
        "print(json.dumps([result.exit_code, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    packages = {name.split(".")[1] for name in modules if name.startswith("flux.")}
    assert code == 0 and packages == {"cli", "core", "plan", "trainers"} and "torch" not in modules


def test_a_simulated_step_enters_few_files_and_functions() -> None:
    """What a reader of `flux plan simulate` has to open; class bodies count as functions."""
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "import flux\n"
        "entered, root = set(), str(Path(flux.__file__).parent)\n"
        "def note(frame, event, _):\n"
        "    code = frame.f_code\n"
        "    if event == 'call' and code.co_filename.startswith(root):\n"
        "        if not code.co_name.startswith('<'):\n"
        "            entered.add((code.co_filename, code.co_name, code.co_firstlineno))\n"
        "sys.setprofile(note)\n"
        "from flux.cli.app import app\n"
        "try:\n"
        "    app(['plan', 'simulate', '--layers', '4'])\n"
        "finally:\n"
        "    sys.setprofile(None)\n"
        "    print(json.dumps([len({file for file, *_ in entered}), len(entered)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    files, functions = json.loads(done.stdout.splitlines()[-1])
    assert 20 < files <= 36 and 100 < functions <= 281


def test_the_cost_model_loads_no_torch() -> None:
    """Planner and simulators start with it, and torch takes a second."""
    modules = "cost, heuristic, nodes, one_shot, predict"
    script = f"import sys; from flux.select import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split() == [b"False"]


def test_other_packages_add_commands_groups_and_commands_of_groups(
    install: Callable[..., None],
) -> None:
    install(
        "import typer\n"
        "def hello(name: str = 'you') -> None:\n"
        "    'Greet a name.'\n"
        "    print(f'hello {name}')\n"
        "group = typer.Typer(help='More.')\n"
        "group.command('hi')(hello)\n",
        hello="visitor:hello",
        more="visitor:group",
        plan__greet="visitor:hello",
        doctor="visitor:hello",
    )
    assert flux("hello", "--name", "x").stdout == "hello x\n"
    assert flux("more", "hi").stdout == flux("plan", "greet").stdout == "hello you\n"
    listed = flux("--help").stdout
    assert listed.index("plan ") < listed.index("hello ") < listed.index("more ")
    assert "Greet a name." in flux("plan", "--help").stdout
    assert "Greet" not in flux("doctor", "--help").stdout  # nobody replaces ours


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("run = 3", "visitor:run is neither a function nor a typer.Typer"),
        ("1 +", "SyntaxError"),
        ("", "has no attribute 'run'"),
    ],
)
def test_a_broken_command_says_why_and_leaves_the_others_alone(
    install: Callable[..., None], module: str, reason: str
) -> None:
    install(module, wrong="visitor:run")
    listed = flux("--help")
    assert listed.exit_code == 0 and "doctor" in listed.stdout and "cannot load" in listed.stdout
    for words in (("wrong",), ("wrong", "--help"), ("wrong", "--option", "3")):
        result = flux(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: cannot load the command wrong of visitor 1.5")
        assert reason in result.stderr and result.stderr.count("\n") == 1
    assert flux("tune", "--help").exit_code == 0
