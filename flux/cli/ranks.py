"""The common part of the commands that run on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from flux.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    PLAIN,
    bar_on_request,
    complain,
    open_console,
    refuse,
)

if TYPE_CHECKING:
    from flux.launch.progress import Progress


def torchrun_or_own(nproc: int | None, hosts: str = "1") -> int | None:
    """Return the number of torchrun's ranks, or None; exit if options contradict it."""
    from flux.launch.supervisors import torchrun_world

    world = torchrun_world()
    if world is not None and nproc not in (None, world):
        refuse(f"--nproc {nproc} was given, but torchrun started {world} ranks")
    if world is not None and hosts != "1":
        refuse("--hosts cannot be used under torchrun, which has placed the ranks already")
    return world


def check_writable(*targets: str | Path | None) -> None:
    """Exit if a target cannot be written, before the measurement rather than after it.

    None is no target, and "-" is stdout.
    """
    for target in map(str, filter(lambda target: target not in (None, "-"), targets)):
        path = Path(target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            writable = os.access(path if path.exists() else path.parent, os.W_OK)
            if not target or path.is_dir() or not writable:
                refuse(f"cannot write {target!r}" if not target else f"cannot write {target}")
        except OSError as error:  # a name that is too long, too
            refuse(f"cannot write {target}: {error.strerror}")


def speaks() -> bool:
    """Return whether this process prints and writes: under torchrun, rank 0 does."""
    from flux.launch.supervisors import torchrun_rank, torchrun_world

    return torchrun_world() is None or torchrun_rank() == 0


def say_wrong(complaints: Sequence[str]) -> None:
    """Print complaints about results to stderr."""
    errors = open_console(stderr=True)
    for complaint in complaints:
        errors.print(f"[bold red]wrong result:[/] {escape(complaint)}", **PLAIN)


@contextmanager
def watched_ranks(silent: bool) -> Iterator[Progress]:
    """Show a progress bar on terminals while ranks run; report failures and exit."""
    console = open_console()
    with (
        ranks_or_exit(),
        progress_bar(console, shown=console.is_terminal and not silent) as progress,
    ):
        yield progress


@contextmanager
def ranks_or_exit() -> Iterator[None]:
    """Report failed ranks, and exit."""
    from flux.launch.hosts import HostsUnavailableError
    from flux.launch.spawn import RankFailedError

    try:
        yield
    except (HostsUnavailableError, ValueError) as error:
        refuse(str(error))
    except RankFailedError as error:
        if error.details:
            details = escape(error.details.rstrip())
            open_console(stderr=True).print(details, style="dim", **PLAIN)
        complain(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def progress_bar(console: Console, *, shown: bool) -> Iterator[Progress]:
    """Show a bar of the ranks' progress, if ``shown``."""
    if not shown:
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn

    columns = ("{task.description:<16}", BarColumn(), MofNCompleteColumn())
    with bar_on_request(console, *columns) as bar:
        task = bar.add_task("starting ranks", total=None)
        bar.refresh()

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            bar.refresh()

        yield update
