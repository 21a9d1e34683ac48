"""Admit one function at a time, also after an exception between two bytecodes.

A signal handler, a trace function or a profiler can raise after any bytecode. If that happens after
a lock is acquired and before the code that releases it is reached, the lock stays locked for good.
No order of statements avoids that. So a holder counts here only while its function runs.
"""

from __future__ import annotations

import sys


class Admission:
    """What a function enters with."""

    slot = -1


class Exclusive:
    """Admits one function at a time. Functions enter or are turned away; they never wait.

    A function enters like this::

        inside = Admission()  # under this name, and referred to by nothing else
        if exclusive.enter(inside):
            try:
                ...
            finally:
                exclusive.leave(inside)
    """

    def __init__(self) -> None:
        self._slots: dict[int, Admission] = {}  # the holder of each generation
        self._generation = 0  # the next one begins if a holder has ended without leaving

    def enter(self, entry: Admission) -> bool:
        """Enter, unless another function is inside; return whether the caller is inside now.

        Args:
            entry: a new one, which the caller keeps in a local variable named ``inside``.
        """
        while True:
            entry.slot = generation = self._generation
            holder = self._slots.setdefault(generation, entry)  # one step for all threads
            if holder is entry:
                return True
            if _runs(holder):
                return False
            # A holder that has left in the meantime has emptied the slot. One that is still there
            # never leaves, so the slot stays taken, whichever thread gets here how late.
            if self._slots.get(generation) is holder:
                self._generation = generation + 1

    def leave(self, entry: Admission) -> None:
        """Leave. Do nothing if the caller is not inside."""
        if self._slots.get(entry.slot) is entry:
            del self._slots[entry.slot]

    @property
    def taken(self) -> bool:
        """Whether a function is inside."""
        return any(_runs(holder) for holder in list(self._slots.values()))


def _runs(entry: Admission) -> bool:
    """Return whether the function that has entered is on the stack of a thread."""
    for bottom in sys._current_frames().values():
        frame = bottom
        while frame is not None:
            if frame.f_locals.get("inside") is entry:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False
