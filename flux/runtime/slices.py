"""Slices of a batch that take turns in one thread, for ``flux.runtime.domino``.

Each slice runs the model's forward in a *greenlet*: code that can be left in the middle of a call
and continued there later. Greenlets are one thread, because autograd numbers its nodes by thread.

A slice has modes of torch of its own (``flux.runtime.modes``), and random numbers of its own. The
first slice goes on with the caller's random numbers, so that the caller has drawn as many
afterwards as without slices. Others begin streams which follow from the caller's.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import greenlet
import torch

from flux.runtime import modes

T = TypeVar("T")


@dataclass
class SliceRecord:
    """What ran, in order.

    Attributes:
        events: (phase, slice, number of the linear layer in its slice, what): what is "column",
            "row", "launch column", "launch row", "wait column" or "wait row"; of a fused op, in
            forward only, "fused column" or "fused row".
    """

    events: list[tuple[str, int, int, str]] = field(default_factory=list)


_record: SliceRecord | None = None
_before_wait: Callable[[], None] | None = None


def set_before_wait(call: Callable[[], None] | None) -> Callable[[], None] | None:
    """Set the function called before a linear layer waits for its collective; return the last.

    ``flux.runtime.dhelix.strands`` lets another micro-batch go on there.
    """
    global _before_wait
    before, _before_wait = _before_wait, call
    return before


def before_wait() -> None:
    """Call what ``set_before_wait`` has set, if anything."""
    if _before_wait is not None:
        _before_wait()


@contextmanager
def recorded() -> Iterator[SliceRecord]:
    """Record the order in which linear layers compute, launch and wait."""
    global _record
    before, _record = _record, SliceRecord()
    try:
        yield _record
    finally:
        _record = before


def note(phase: str, number: int, linear: int, what: str) -> None:
    """Record an event of a slice, if events are recorded."""
    if _record is not None:
        _record.events.append((phase, number, linear, what))


class _Slice(greenlet.greenlet):  # type: ignore[misc, unused-ignore]
    """The greenlet of a slice."""

    def __init__(self, slices: Slices, number: int, body: Callable[..., Any]) -> None:
        super().__init__(body)
        self.slices, self.number = slices, number
        self.gr_context = contextvars.copy_context()  # a greenlet's own would be empty


class Slices:
    """Runs slices by turns in the calling thread."""

    def __init__(self, count: int, size: int, order: str, columns: int) -> None:
        self.count, self.size, self.order, self.columns = count, size, order, columns
        self.current = 0
        self.linears = [0] * count  # that a slice has begun
        self.rows = [0] * count  # row-parallel ones, of these
        self.backward = torch._C._current_graph_task_id()  # that computes the slices again, or -1
        self._outer = running()
        self._transforms = modes.transform_depth()
        self._ending = False
        self._calls: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def first(self) -> int:
        """Return the number of the running slice's first sample in the whole batch."""
        outer = 0 if self._outer is None else self._outer.first
        return outer + self.current * self.size

    def number_call(self, layer: object, new: Callable[[], int]) -> int:
        """Return the number of a layer's call, which is one for the equal calls of all slices."""
        numbers, made = self._calls.setdefault(id(layer), ([], [0] * self.count))
        at = made[self.current]
        made[self.current] += 1
        if at == len(numbers):
            numbers.append(new() if self._outer is None else self._outer.number_call(layer, new))
        return numbers[at]

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a body for each slice; return their results.

        Raises:
            BaseException: what a body raised first; the others are ended where they are.
        """
        results: list[Any] = [None] * self.count
        seeds = self._seeds()
        drawn = modes.generator_states()

        def begin(number: int, body: Callable[[], T]) -> T:
            nonlocal drawn
            self._leave()  # with the caller's modes, which are this slice's at first
            if number > 0:
                modes.seed_generators(seeds[number])
            result = body()
            if number == 0:
                drawn = modes.generator_states()
            return result

        waiting = {number: _Slice(self, number, begin) for number in range(self.count)}
        with modes.kept_modes():
            try:
                for number, job in waiting.items():
                    job.switch(number, bodies[number])
                self._take_turns(waiting, results)
            except BaseException as error:
                self._end(waiting, error)
                raise
        modes.set_generator_states(drawn)
        return results

    def _seeds(self) -> list[int]:
        """Return a seed for the random numbers of each slice; that of the first is not used.

        Other cuts give others. The caller's generator stays where it is.
        """
        copy = torch.Generator()
        copy.set_state(torch.default_generator.get_state())
        drawn = int(torch.randint(2**62, (), generator=copy, device="cpu", dtype=torch.int64))
        count, size = self.count, self.size
        return [((drawn * count + n) * 1_000_003 + size) % 2**63 for n in range(count)]

    def _take_turns(self, waiting: dict[int, _Slice], results: list[Any]) -> None:
        """Switch to the slices by turns until all have ended; keep their results."""
        for turn in itertools.count():
            if not waiting:
                return
            for number, job in list(waiting.items()):
                if self.order == "staggered" and number > turn:
                    break  # a slice begins one segment after the one before it
                self.current = number
                results[number] = job.switch()
                if job.dead:
                    del waiting[number]

    def _end(self, waiting: dict[int, _Slice], error: BaseException) -> None:
        """End slices where they are, each with its own modes."""
        self._ending = True
        for number, job in waiting.items():
            self.current = number
            try:
                if not job.dead:
                    job.throw(greenlet.GreenletExit)
            except BaseException as other:  # becomes the context of what ends the slices
                other.__context__, error.__context__ = error.__context__, other

    def _leave(self) -> None:
        """Let the others go on; return when it is this slice's turn again."""
        if self._ending:
            raise greenlet.GreenletExit
        with modes.kept_modes():
            greenlet.getcurrent().parent.switch(None)

    def switch(self, place: str, *, gathers: bool = False) -> None:
        """Let the other slices go on, if they shall here; return when it is this one's turn again.

        ``place`` is "entered" (after ``in``), "row" (before a row-parallel linear) or "launched"
        (after one). ``gathers``: a gather has been started, which something should hide.
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
        modes.check_transforms(self._transforms)
        self._leave()


def running() -> Slices | None:
    """Return the slices of which the calling code is one; None outside of Domino.

    Backward that a slice starts is none of it: what it computes again cannot be left.
    """
    current = greenlet.getcurrent()
    if isinstance(current, _Slice) and torch._C._current_graph_task_id() == current.slices.backward:
        return current.slices
    return None


def current_slice() -> int:
    """Return the number of the slice that is running; 0 outside of Domino."""
    slices = running()
    return 0 if slices is None else slices.current
