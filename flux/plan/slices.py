"""Slices of a batch that take turns in one thread, for ``flux.plan.domino``.

Each slice runs the model's forward in a *greenlet*: code that can be left in the middle of a call
and continued there later. Greenlets are one thread, because autograd numbers its nodes by thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import greenlet
import torch

T = TypeVar("T")


@dataclass
class Record:
    """What ran, in order.

    Attributes:
        events: (phase, slice, number of the linear layer in its slice, what): what is "column",
            "row", "launch column", "launch row", "wait column" or "wait row"; of a fused op, in
            forward only, "fused column" or "fused row".
    """

    events: list[tuple[str, int, int, str]] = field(default_factory=list)


_record: Record | None = None
_slices: Slices | None = None
_before_wait: Callable[[], None] | None = None


def set_before_wait(call: Callable[[], None] | None) -> Callable[[], None] | None:
    """Set what is called before a linear layer waits for its collective; return what it was.

    ``flux.plan.strands`` lets another micro-batch go on there.
    """
    global _before_wait
    before, _before_wait = _before_wait, call
    return before


def before_wait() -> None:
    """Call what ``set_before_wait`` has set, if anything."""
    if _before_wait is not None:
        _before_wait()


@contextmanager
def recorded() -> Iterator[Record]:
    """Record the order in which linear layers compute, launch and wait."""
    global _record
    before, _record = _record, Record()
    try:
        yield _record
    finally:
        _record = before


def note(phase: str, number: int, linear: int, what: str) -> None:
    """Record an event of a slice, if somebody records."""
    if _record is not None:
        _record.events.append((phase, number, linear, what))


class Slices:
    """Runs slices by turns in the calling thread.

    Args:
        count: how many there are.
        size: samples of each.
        order: one of ORDERS.
        columns: pieces of the weights of row-parallel linears (column split).
    """

    def __init__(self, count: int, size: int, order: str, columns: int) -> None:
        self.count, self.size, self.order, self.columns = count, size, order, columns
        self.current = 0
        self.linears = [0] * count  # that a slice has begun
        self.rows = [0] * count  # row-parallel ones, of these

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a body for each slice; return their results.

        Raises:
            Exception: what a body raised; the others are ended where they are.
        """
        global _slices
        before, _slices = _slices, self
        results: list[Any] = [None] * self.count
        waiting = {number: greenlet.greenlet(body) for number, body in enumerate(bodies)}
        try:
            for turn in itertools.count():
                if not waiting:
                    break
                for number, one in list(waiting.items()):
                    if self.order == "staggered" and number > turn:
                        break  # a slice begins one segment behind the one before it
                    self.current = number
                    results[number] = one.switch()
                    if one.dead:
                        del waiting[number]
        finally:
            for one in waiting.values():
                if one and not one.dead:
                    one.throw(greenlet.GreenletExit)
            _slices = before
        return results

    def switch(self, place: str, *, gathers: bool = False) -> None:
        """Let the other slices go on, if they shall here; return when it is this one's turn again.

        Args:
            place: "entered": behind ``in``; "row": in front of a row-parallel linear; "launched":
                behind one.
            gathers: whether a gather has been started, which something should hide.
        """
        behind_attention = self.rows[self.current] % 2 == 1
        stays = {
            "staggered": False,
            "grouped": place == "row"
            or (place == "entered" and not behind_attention and not gathers),
            "blocks": place != "launched" and not gathers,
        }
        if self.count == 1 or stays[self.order]:
            return
        grad = torch.is_grad_enabled()
        casts = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
        greenlet.getcurrent().parent.switch(None)
        torch.set_grad_enabled(grad)
        for kind, on in casts.items():
            torch.set_autocast_enabled(kind, on)


def running() -> Slices | None:
    """Return the slices that run; None outside of Domino."""
    return _slices


def current_slice() -> int:
    """Return the number of the slice that is running; 0 outside of Domino."""
    return 0 if _slices is None else _slices.current
