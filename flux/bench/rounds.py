"""Interleaved rounds: every call once in each, in an order that rotates from round to round.

Drift of the machine hits all calls of a round alike; rotating keeps any of them from always finding
the caches as the same predecessor left them. All ranks make the same sequence of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from .hosts import link_bytes
from .timing import StartLine, timed


@dataclass(frozen=True)
class Sample:
    """One timed call on one rank; ``sent`` is what left its host meanwhile, where that is asked."""

    wall_ms: float
    cpu_ms: float  # of all threads of the rank
    late_ms: float  # after the instant that all ranks agreed on
    sent: float | None = None


class Rounds:
    """Times calls, each started by all ranks at one instant. Collective.

    Args:
        calls: what to time, by name.
        line: where the ranks start.
        across: count the bytes that leave the host, too.
        starting: told the name of each call as it starts, before its time runs.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[[], object]],
        line: StartLine,
        *,
        across: bool = False,
        starting: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._calls = calls
        self._names = list(calls)
        self._line = line
        self._across = across
        self._starting = starting
        self._seen = link_bytes() if across else 0
        self.last: dict[str, object] = {}
        """The result of each call in the latest round."""

    def run(self, index: int) -> dict[str, Sample]:
        """One round; ``index`` says which call comes first."""
        names, found = self._names, {}
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            self.last.pop(name, None)  # freed as a loop variable would be, not within the timing
            self._line.wait()
            self._starting(name)
            cpu = time.process_time_ns()
            self.last[name], elapsed = timed(self._calls[name])
            cpu = time.process_time_ns() - cpu
            found[name] = Sample(elapsed, cpu * 1e-6, self._line.late_ns * 1e-6, self._sent())
        return found

    def _sent(self) -> float | None:
        if not self._across:
            return None
        dist.barrier()  # others on this host may still be sending
        before, self._seen = self._seen, link_bytes()
        return self._seen - before
