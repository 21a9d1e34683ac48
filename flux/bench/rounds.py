"""Interleaved rounds: every call once in each, in an order that rotates from round to round.

Drift of the machine hits all calls of a round alike; rotating keeps any of them from always finding
the caches as the same predecessor left them. All ranks make the same sequence of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from .hosts import link_bytes
from .methods import OwnTime
from .place import Call, Taken, Timer


class Rounds:
    """Times calls, each started by all ranks together. Collective.

    Args:
        calls: what to time, by name.
        timer: starts them, and has the clock.
        across: count the bytes that leave the host, too.
    """

    def __init__(self, calls: Mapping[str, Call], timer: Timer, *, across: bool = False) -> None:
        self._calls = calls
        self._names = list(calls)
        self._time: Callable[[Call], tuple[object, Taken]] = timer.time
        self._across = across
        self._seen = link_bytes() if across else 0
        self.last: dict[str, object] = {}
        """The result of each call in the latest round."""
        self.sent: dict[str, float] = {}
        """Bytes that left this host in each, if they are counted."""

    def run(self, index: int) -> dict[str, Taken]:
        """One round; ``index`` says which call comes first."""
        names, found = self._names, {}
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            self.last.pop(name, None)  # freed as a loop variable would be, not within the timing
            result, taken = self._time(self._calls[name])
            if isinstance(result, OwnTime):  # this process has only waited for another one
                taken = replace(taken, wall_ms=result.wall_ms, cpu_ms=None)
                result = result.result
            self.last[name], found[name] = result, taken
            if self._across:
                dist.barrier()  # others on this host may still be sending
                before, self._seen = self._seen, link_bytes()
                self.sent[name] = self._seen - before
        return found
