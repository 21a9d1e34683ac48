"""The terminal output of `flux tune`: a bar with the best so far, or a line for each shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from flux.cli.terminal import PLAIN, bar_on_request, say
from flux.tune.tuner import Search, TuningObserver


@contextmanager
def observer(console: Console, *, silent: bool) -> Iterator[TuningObserver]:
    """Show a bar with the best so far on a terminal; else a line for each shape."""
    if silent:
        yield TuningObserver()
    elif not console.is_terminal:
        yield TuningLines()
    else:
        columns = ("{task.description}", BarColumn(), "{task.fields[best]}", TimeElapsedColumn())
        with bar_on_request(console, *columns) as bar:
            yield TuningBar(bar)


def best_so_far(search: Search) -> str:
    """Return the best so far: ``best 1.23 ms, 0.71 x unfused: path=...``."""
    name = search.best()
    if name is None:
        return "checking"
    ms, unfused = search.ms(name), search.ms("unfused")
    ratio = f", {ms / unfused:.2f} x unfused" if ms and unfused else ""
    return f"best {ms:.3g} ms{ratio}: {name}"


class TuningLines(TuningObserver):
    """A line for each shape."""

    def compiling(self, search: Search, count: int) -> None:
        """Say so."""
        if count:
            say(f"{search.label}: building {count} kernels")

    def event(self, search: Search, event: dict[str, Any]) -> None:
        """Say which candidate is excluded."""
        if event["event"] == "excluded":
            say(f"{search.label}: excluded {event['name']}: {event['reason']}")

    def ended(self, search: Search) -> None:
        """Say what is best."""
        how = "" if search.settled else " (not settled: the budget was used up)"
        say(f"{search.label}: {best_so_far(search)}{how}")


class TuningBar(TuningObserver):
    """A bar with the best so far."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None, best="")
        self._place = ""

    def started(self, search: Search, number: int, total: int) -> None:
        """Begin a bar."""
        self._place = f"[{number + 1}/{total}] {search.label}"
        self._draw(search)

    def compiling(self, search: Search, count: int) -> None:
        """Say so beside the bar."""
        if count:
            what = f"{self._place}: building {count} kernels"
            self._bar.update(self._task, description=what, total=None)
            self._bar.refresh()

    def event(self, search: Search, event: dict[str, Any]) -> None:
        """Draw the bar again, and say which candidate is excluded."""
        if event["event"] == "excluded":
            text = f"[yellow]excluded[/] {escape(event['name'])}: {escape(event['reason'])}"
            self._bar.console.print(text, **PLAIN)
        self._draw(search)

    def ended(self, search: Search) -> None:
        """Say what is best."""
        self._bar.console.print(f"{search.label}: {escape(best_so_far(search))}", **PLAIN)

    def _draw(self, search: Search) -> None:
        planned = search.halving.planned_rounds()
        self._bar.update(
            self._task,
            description=self._place,
            completed=min(search.rounds_done, planned),
            total=planned,
            best=escape(best_so_far(search)[: max(20, self._bar.console.width // 2)]),
        )
        self._bar.refresh()
