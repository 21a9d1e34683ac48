"""Start all ranks at one instant, and time calls from there.

A barrier does not start ranks together: they leave it one after the other, tens of microseconds
apart, and a peer's late start would count as this rank's waiting. Instead the ranks agree, with one
all-reduce, on an instant a little in the future, and each waits for it by itself:

    rank 0  --all_reduce--|.....sleep.....|~spin~|call
    rank 1  ----all_reduce----|...sleep...|~spin~|call
                                                 ^ agreed instant

The processes of one machine share CLOCK_MONOTONIC, which is Python's monotonic clock. Without a
shared clock, ranks start as they leave a barrier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from flux.machine.host import available_cores

T = TypeVar("T")

_LEAD_NS = 1_000_000
_MAX_LEAD_NS = 16_000_000
_SPIN_NS = 200_000
_LATE_NS = 50_000


class StartLine:
    """Synchronises the start of the ranks. Collective: all ranks make the same calls."""

    def __init__(self, world: int, threads: int, common_clock: bool = True) -> None:
        self._common_clock = common_clock
        self._instant = torch.zeros(1, dtype=torch.int64)
        # With more ranks than cores, a spinning rank keeps another one from reaching the line.
        # (Ranks may be pinned to some cores each, so the machine's cores count.)
        cores = os.cpu_count() or available_cores()
        self._spin_ns = _SPIN_NS if world * threads <= cores else 0
        self._lead_ns = _LEAD_NS
        self.late_ns = 0

    def wait(self) -> None:
        """Return at the instant that all ranks agreed on."""
        if not self._common_clock:
            dist.barrier()
            return
        self._instant[0] = time.monotonic_ns() + self._lead_ns
        dist.all_reduce(self._instant, op=dist.ReduceOp.MAX)
        instant = int(self._instant.item())
        ahead = instant - time.monotonic_ns()
        if ahead > self._spin_ns:
            time.sleep((ahead - self._spin_ns) * 1e-9)
        while (now := time.monotonic_ns()) < instant:
            pass
        self.late_ns = now - instant
        # A rank that learns of the instant too late asks for more time before the next one. All
        # ranks take the maximum over the ranks. (A rank that slept too long would not have slept
        # less.)
        lead = self._lead_ns * 2 if ahead < _LATE_NS else self._lead_ns * 15 // 16
        self._lead_ns = min(max(lead, _LEAD_NS), _MAX_LEAD_NS)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return result and duration in ms of one call."""
    begin = time.perf_counter_ns()
    result = call()
    return result, (time.perf_counter_ns() - begin) * 1e-6
