"""The `flux` command. Its commands are imported at their first use.

Other packages add some by entry points:

    [project.entry-points."flux.commands"]
    greet = "greeter.command:greet"           # flux greet
    "plan.greet" = "greeter.command:planned"  # flux plan greet, one more of that group

An entry point is a function with typer's options, or a `typer.Typer` with several such functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flux.cli.terminal import (
    EXIT_FAILED,
    EXIT_USAGE,
    complain,
    printable,
    refuse,
    say,
    silence,
)
from flux.core.datafile import one_line
from flux.core.env import VariableError

GROUP = "flux.commands"
OWN = {
    "doctor": "flux.doctor.command:doctor",
    "compile": "flux.kernels.command:compile_kernels",
    "bench": "flux.bench.command:bench",
    "bench.model": "flux.bench.command_model:bench_model",
    "bench.serve": "flux.bench.command_serve:bench_serve",
    "bench.suite": "flux.bench.command_suite:suite",
    "bench.op": "flux.bench.command:bench_op",
    "tune": "flux.tune.command:tune",
    "trace": "flux.bench.command_trace:trace",
    "simulate": "flux.opsim.command:simulate",
    "plan": "flux.trainers.command:plan",
    "plan.run": "flux.runtime.command:run_command",
    "plan.search": "flux.plan.command_search:search_command",
}
"""Commands of this package, in the order of --help. Those of other packages follow by name."""


class MountedGroup(TyperGroup):
    """A group of commands that entry points extend: ``typer.Typer(name=..., cls=MountedGroup)``."""

    def __init__(self, *, name: str, commands: Any = None, **attributes: Any) -> None:
        super().__init__(name=name, **attributes)
        own_or_mounted: dict[str, Any] = dict(commands or {})
        for full, entry in entries().items():
            parent, _, last = full.rpartition(".")
            if parent == ("" if name == "flux" else name):
                own_or_mounted.setdefault(last, entry)
        self.commands = MountedCommands(own_or_mounted)


@dataclass(eq=False)
class MountedCommands(MutableMapping[str, Any]):
    """Commands of a group by name; entry points are loaded when asked for."""

    _values: dict[str, Any]

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
    """Return the entry points of commands by name, ours first.

    If two packages have the same name, the first on ``sys.path`` gets it. Ours cannot be replaced.
    """
    ours = {name: EntryPoint(name, value, GROUP) for name, value in OWN.items()}
    others: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if not entry.module.startswith("flux."):  # else of an older version of this package
            others.setdefault(entry.name, entry)
    return ours | {name: others[name] for name in sorted(others.keys() - ours)}


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


class FluxCommands(MountedGroup):
    """The commands of all installed packages. Each ends with an error message, wherever it goes."""

    _status = EXIT_FAILED
    """With which a command ends that cannot print its error."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command, then flush its output."""
        _open_streams()
        _check_size()
        try:
            try:
                return super().main(*args, **options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except VariableError as error:
            complain(one_line(str(error)))
            sys.exit(EXIT_USAGE)
        except BrokenPipeError:  # `| head` has read enough
            silence(sys.stdout)
            sys.exit(EXIT_FAILED)
        except OSError as error:
            silence(sys.stdout)
            of_stream = "stdout: " if error.errno in (errno.ENOSPC, errno.EIO) else ""
            where = of_stream if error.filename is None else f"{error.filename}: "
            complain(one_line(f"{where}{error.strerror or error}"))
            sys.exit(self._status)
        except MemoryError as error:
            complain(one_line(f"not enough memory: {error}".removesuffix(": ")))
            sys.exit(EXIT_FAILED)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the command line; errors quote the line, control characters escaped."""
        with self._printable_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; errors quote the command line, control characters escaped."""
        with self._printable_errors():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _printable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = getattr(error, "message", None)  # of errors in a command line
            if isinstance(message, str):
                self._status = EXIT_USAGE
                error.message = printable(message)  # type: ignore[attr-defined]
            raise


def _check_size() -> None:
    """Forget a size of the terminal in the environment that none has: it is what lines fill."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"[0-9]{0,3}", os.environ.get(name, ""), re.ASCII):
            del os.environ[name]


def _open_streams() -> None:
    """Let every text be written, whatever the encoding, and no file be taken for a stream.

    With a stream closed (``>&-``), the next file that is opened would get its descriptor, and what
    libraries and children print would go there.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


app = typer.Typer(
    name="flux",
    cls=FluxCommands,
    help="Tensor-parallel GEMMs with overlapped communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import flux

        say(f"flux {flux.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
