"""Which way a row-parallel layer sums over ranks: fused, or its product and then one all_reduce.

What is faster depends on the link, the product, the cores that are left for communication, and the
number of rows. The first calls try both in turn; then the ranks compare their times and keep one.
All ranks make the same calls, so they try alike, and they decide by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

WARM_UP = 1
TRIALS = 5
"""Calls of each way that are not timed, and that are."""
PATHS = ("fused", "plain")


class PathTrial:
    """The way of calls of one size of layer, with similar numbers of rows.

    Args:
        add: returns the sum over ranks of each of some numbers, the same on all ranks. Collective.
    """

    def __init__(self, add: Callable[[list[float]], list[float]]) -> None:
        self._add = add
        self._seconds: dict[str, list[float]] = {path: [] for path in PATHS}
        self.path: str | None = None
        """The one that was kept; None while both are tried."""

    def next(self) -> str:
        """Return the way of the next call."""
        if self.path is not None:
            return self.path
        return min(PATHS, key=lambda path: len(self._seconds[path]))

    def note(self, path: str, seconds: float) -> None:
        """Take the time of a call, and decide when there are enough. Collective then."""
        if self.path is not None:
            return
        self._seconds[path].append(seconds)
        if all(len(times) == WARM_UP + TRIALS for times in self._seconds.values()):
            sums = self._add([median(self._seconds[path][WARM_UP:]) for path in PATHS])
            self.path = PATHS[sums.index(min(sums))]
