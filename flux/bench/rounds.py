"""Interleaved rounds: each round makes every call once, in an order that rotates.

Drift of the machine affects all calls of a round alike. Rotation prevents that a call always runs
after the same predecessor and its cache contents. All ranks make the same sequence of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from flux.bench.methods import OwnTime
from flux.bench.places.base import Call, Timer, Timing
from flux.launch.hosts import link_bytes


class Rounds:
    """Times calls, each started by all ranks together. Collective.

    Args:
        calls: calls to time, by name.
        timer: starts and times them.
        across: whether to count the bytes that leave the host.
    """

    def __init__(self, calls: Mapping[str, Call], timer: Timer, *, across: bool = False) -> None:
        self._calls = calls
        self._names = list(calls)
        self._time: Callable[[Call], tuple[object, Timing]] = timer.time
        self._across = across
        self._seen = link_bytes() if across else 0
        self.last: dict[str, object] = {}
        """The result of each call in the latest round."""
        self.sent: dict[str, float] = {}
        """Bytes that left this host in each call, if they are counted."""

    def run(self, index: int) -> dict[str, Timing]:
        """Run one round; ``index`` determines which call comes first."""
        names, times = self._names, {}
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            self.last.pop(name, None)  # freed outside of the timing, as a loop variable would be
            result, taken = self._time(self._calls[name])
            if isinstance(result, OwnTime):  # this process has only waited for another one
                taken = replace(taken, wall_ms=result.wall_ms, cpu_ms=None)
                result = result.result
            self.last[name], times[name] = result, taken
            if self._across:
                dist.barrier()  # other ranks of this host may still be sending
                before, self._seen = self._seen, link_bytes()
                self.sent[name] = self._seen - before
        return times
