"""Time limits that count only the time in which this thread could look.

While a process is stopped (SIGSTOP, `docker pause`, a suspended virtual machine) the clock goes on.
If all ranks of a job are stopped for longer than their timeout, none of them is late. So a step of
the clock between two looks counts as MOST_STEP_S at most.
"""

from __future__ import annotations

import time

MOST_STEP_S = 0.25
"""Seconds; as in csrc/cpu/clock.h. Waits look several times as often."""


class Patience:
    """A time limit of a wait that looks at least every MOST_STEP_S seconds.

    Args:
        limit_s: in seconds; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._left_s = float("inf") if limit_s is None else limit_s
        self._last = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative once the limit has passed. Reading it is a look."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, MOST_STEP_S)
        self._last = now
        return self._left_s
