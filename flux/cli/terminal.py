"""What commands write: exit codes, output, and error messages."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.errors import MarkupError
from rich.markup import escape
from rich.text import Text

from flux.core.datafile import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}  # one line stays one line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def printable(text: str) -> str:
    """Return ``text`` without commands to a terminal: control characters are escaped.

    Names of files and hosts, and variables of the environment may have them. Newlines stay.
    """
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


class SafeConsole(Console):
    """A console that prints strings as they are, control characters escaped."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a string as rich prints and measures it; without valid markup, as it is."""
        text = printable(text)
        try:
            return super().render_str(text, **how)
        except MarkupError:  # of a name in a file
            return super().render_str(text, **{**how, "markup": False})


def open_console(*, stderr: bool = False, least: int = 0) -> Console:
    """Return the console of this process's output, at least ``least`` columns wide."""
    made = SafeConsole(stderr=stderr)
    if made.width < least:
        made.width = least
    return made


def say(text: str) -> None:
    """Print a line to stdout, control characters escaped."""
    print(printable(text), flush=True)


def complain(message: str) -> None:
    """Print an error to stderr."""
    with _if_readable():
        open_console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", **PLAIN)


def refuse(message: str) -> NoReturn:
    """Print why the command cannot run with these options, in one line; exit with status 2."""
    complain(one_line(message, 2000))
    raise typer.Exit(EXIT_USAGE)


@contextlib.contextmanager
def _if_readable() -> Iterator[None]:
    """Print to stderr in the body; if it cannot be written, the exit status alone tells."""
    try:
        yield
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Discard buffered output: the interpreter flushes once more when it ends."""
    # A stream of a test has no descriptor.
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[None]:
    """Write an output of a command in the body; if it cannot be written, exit with status 1."""
    try:
        yield
    except OSError as error:
        complain(one_line(f"cannot write {target}: {error.strerror or error}"))
        raise typer.Exit(EXIT_FAILED) from None


def write_file(target: str | Path, text: str) -> None:
    """Write an output of a command; if it cannot be written, exit with status 1."""
    from flux.core.datafile import write_output

    with writing(target):
        write_output(Path(target), text)


def write_json(content: Any, target: str | None) -> None:
    """Write JSON to a file, or to stdout if it is "-"."""
    if target == "-":
        print(json.dumps(content, indent=1))
    elif target is not None:
        write_file(target, json.dumps(content, indent=1) + "\n")


def new_table(title: str, left: Iterable[str], right: Iterable[str], caption: str = "") -> Table:
    """Return an empty table whose first columns are words, which fold, and the others numbers."""
    from rich.table import Table

    table = Table(title=title, caption=caption or None, title_justify="left")
    table.caption_justify = "left"
    for head in left:
        table.add_column(head, overflow="fold", min_width=9)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def command_line() -> list[str]:
    """Return the words of this command for a file: bytes that are not UTF-8 are escaped."""
    words = ("flux", *sys.argv[1:])
    return [word.encode("utf-8", "backslashreplace").decode("utf-8") for word in words]


def bar_on_request(console: Console, *columns: str | ProgressColumn) -> Progress:
    """Return a bar that is drawn on request: a redrawing thread would disturb the measurement."""
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, auto_refresh=False)
