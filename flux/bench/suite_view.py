"""The terminal output of `flux bench suite`: a bar while it runs, then a table of all shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flux.bench.report import number
from flux.bench.results import DONE, SHAPE, SuiteDocument, SuiteEntry
from flux.bench.suite import Watcher
from flux.cli.terminal import PLAIN, bar_on_request
from flux.core.datafile import one_line


@contextmanager
def watcher(console: Console, *, silent: bool) -> Iterator[Watcher]:
    """Show a bar on a terminal; else a line for each entry."""
    if silent:
        yield Watcher()
    elif not console.is_terminal:
        yield _Lines(console)
    else:
        counts = (BarColumn(), MofNCompleteColumn(), "{task.fields[what]}", TimeElapsedColumn())
        with bar_on_request(console, "{task.description}", *counts) as bar:
            yield _Bar(console, bar)


class _Lines(Watcher):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._place = ""

    def started(self, entry: SuiteEntry, number: int, total: int) -> None:
        """Remember the entry's number and name."""
        self._place = f"[{number}/{total}] {entry.label}"

    def ended(self, entry: SuiteEntry) -> None:
        """Print the entry's result."""
        self._print(f"{escape(self._place)}: {escape(summary(entry))}")

    def remark(self, text: str) -> None:
        """Print a message."""
        self._print(f"[yellow]{escape(text)}[/]")

    def _print(self, text: str) -> None:
        self._console.print(text, **PLAIN)


class _Bar(_Lines):
    def __init__(self, console: Console, bar: Progress) -> None:
        super().__init__(console)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, what="")

    def started(self, entry: SuiteEntry, number: int, total: int) -> None:
        """Show the start of an entry."""
        super().started(entry, number, total)
        self._draw("starting ranks", 0, None)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show a step of the entry."""
        self._draw(what, done, total)

    def _draw(self, what: str, done: int, total: int | None) -> None:
        place = escape(self._place)
        self._bar.update(self._task, description=place, completed=done, total=total, what=what)
        self._bar.refresh()


def summary(entry: SuiteEntry) -> str:
    """Return the result of an entry in a line."""
    if entry.status != DONE:
        reason = (entry.error or "not measured").partition("\n")[0]
        return f"{entry.status}: {one_line(reason)}"
    parts = []
    for name, method in entry.methods.items():
        time = method["overall_ms"]
        parts.append(f"{one_line(name)} {'WRONG' if time is None else f'{time:.4g} ms'}")
    return ", ".join(parts)


def show(document: SuiteDocument, console: Console) -> None:
    """Print all shapes, the absent peers with reasons, and the sweeps."""
    for op in dict.fromkeys(entry.op for entry in document.entries):
        entries = [e for e in document.entries if e.op == op and e.kind == SHAPE]
        if entries:
            console.print(_table(op, entries))
    for entry in document.entries:
        if entry.kind != SHAPE:
            console.print(f"{escape(entry.label)}: {escape(summary(entry))}", **PLAIN)
    settings, versions = document.settings, document.versions
    for name, reason in document.peers.items():
        if reason is not None:
            console.print(Text(one_line(f"absent: {name}: {reason}"), "dim"), soft_wrap=True)
    about = f"{document.device}; {settings['world']} ranks, {settings['dtype']}; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    console.print(Text(one_line(about), "dim"), soft_wrap=True)


def _table(op: str, entries: list[SuiteEntry]) -> Table:
    methods = dict.fromkeys(
        name for entry in entries if entry.status == DONE for name in entry.methods
    )
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=op, title_justify="left")
    view.add_column("M", justify="right", no_wrap=True)
    view.add_column("N, K", no_wrap=True)
    for name in methods:
        view.add_column(f"{escape(one_line(name))}\nms", justify="right", no_wrap=True)
    view.add_column("flux vs\nunfused", justify="right", no_wrap=True)
    view.add_column("over-\nlap", justify="right", no_wrap=True)
    for entry in entries:
        cells = [str(entry.m), f"{entry.n}, {entry.k}\n{entry.sizes_text.strip()}".strip()]
        if entry.status != DONE:
            cells += [entry.status, *[""] * max(len(methods) + 1, 0)]
            view.add_row(*cells[: len(methods) + 4])
            continue
        cells += [_time(entry.methods.get(name), entry.peers.get(name)) for name in methods]
        flux = entry.methods.get("flux", {})
        cells += [
            number(flux.get("speedup_vs_unfused"), ".2f", "x"),
            number(flux.get("overlap_efficiency"), ".0%"),
        ]
        view.add_row(*cells)
    return view


def _time(method: dict[str, Any] | None, absent: str | None) -> str:
    if method is None:
        return "failed" if absent and absent.startswith("failed") else "-"
    return "WRONG" if method["overall_ms"] is None else f"{method['overall_ms']:.4g}"
