"""Commands are entry points of the group `flux.commands`; each is imported at its first use.

    [project.entry-points."flux.commands"]
    doctor = "flux.doctor.command:doctor"             # flux doctor
    plan = "flux.plan.command:plan"                   # flux plan, a group of commands
    "plan.run" = "flux.runtime.command:run_command"   # flux plan run, one more of that group

An entry point is a function with typer's options, or a `typer.Typer` with several such functions.
Every installed package can add some.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from flux.cli.terminal import refuse
from flux.core.datafile import one_line
from flux.core.env import VariableError

GROUP = "flux.commands"
OWN = (
    *("doctor", "compile", "bench", "bench.model", "bench.serve", "bench.suite", "bench.op"),
    *("tune", "trace", "simulate", "plan", "plan.run", "plan.profile", "plan.search"),
)
"""Entry points of this package, in the order of --help. Those of other packages follow by name."""


class MountedGroup(TyperGroup):
    """A group of commands that entry points extend: ``typer.Typer(name=..., cls=MountedGroup)``."""

    def __init__(self, *, name: str, commands: Any = None, **attributes: Any) -> None:
        super().__init__(name=name, **attributes)
        prefix = "" if name == "flux" else f"{name}."
        self.commands = MountedCommands(prefix, commands or {})


class MountedCommands(MutableMapping[str, Any]):
    """Commands by name: those of a group, then its entry points, which are loaded when asked for.

    Args:
        prefix: of the names of the entry points: ``""`` of `flux` itself, ``"plan."`` of
            `flux plan`.
        commands: the group's own, which no entry point replaces.
    """

    def __init__(self, prefix: str, commands: MutableMapping[str, Any]) -> None:
        self._values: dict[str, Any] = {**commands}
        for name, entry in entries().items():
            parent, _, last = name.rpartition(".")
            if parent == prefix.rstrip("."):
                self._values.setdefault(last, entry)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, EntryPoint):
            value = self._values[name] = load(name, value)
        return value

    def __setitem__(self, name: str, command: Any) -> None:
        self._values[name] = command

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@cache
def entries() -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages by name, ours first.

    If two packages have the same name, the first on ``sys.path`` gets it. Ours cannot be replaced.
    """
    by_name: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        ours = entry.name in OWN and entry.module.startswith("flux.")
        if ours or entry.name not in by_name:
            by_name[entry.name] = entry
    order = {name: index for index, name in enumerate(OWN)}
    return dict(sorted(by_name.items(), key=lambda item: (order.get(item[0], len(OWN)), item[0])))


def check_installed() -> None:
    """Exit if the installed metadata of this package lacks some of its commands."""
    missing = set(OWN) - entries().keys()
    if missing:
        refuse(
            "flux-overlap is not installed, or was installed before its code changed: its metadata "
            f"has no command {', '.join(sorted(missing))}. Install it again: pip install "
            "flux-overlap, or in a checkout pip install -e ."
        )


def load(name: str, entry: EntryPoint) -> Any:
    """Return the command of an entry point; if it cannot be loaded, one that says why and exits."""
    holder = typer.Typer(add_completion=False)
    try:
        command = entry.load()
        if isinstance(command, typer.Typer):
            holder.add_typer(command, name=name)
        elif callable(command):
            holder.command(name)(command)
        else:
            raise TypeError(f"{entry.value} is neither a function nor a typer.Typer")
        return typer.main.get_group(holder).commands[name]
    except VariableError:
        raise
    except Exception as error:
        return _broken(name, entry, f"{type(error).__name__}: {error}")


def _broken(name: str, entry: EntryPoint, reason: str) -> Any:
    package = "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    message = one_line(
        f"cannot load the command {name} of {package}, {entry.value}: {reason}", 2000
    )
    holder = typer.Typer(add_completion=False)
    any_words = {"ignore_unknown_options": True, "allow_extra_args": True}

    @holder.command(name, help=message, add_help_option=False, context_settings=any_words)
    def fail() -> None:
        refuse(message)

    return typer.main.get_group(holder).commands[name]
