"""The common part of all commands: exit codes, and error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}  # one line stays one line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def complain(message: str) -> None:
    """Print an error to stderr."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", **PLAIN)


def refuse(message: str) -> NoReturn:
    """Print why the command cannot run with these options, and exit with status 2."""
    complain(message)
    raise typer.Exit(EXIT_USAGE)


def bar_on_request(console: Console, *columns: str | ProgressColumn) -> Progress:
    """Return a bar that is drawn on request: a redrawing thread would disturb the measurement."""
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, auto_refresh=False)
