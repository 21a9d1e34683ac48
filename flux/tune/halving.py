"""Successive halving: who is measured next, and who is out. Pure, so that what was measured before
a crash leads to the very same decisions after it.

    rung 0   all candidates, two rounds each                -> the best third goes on
    rung 1   these, two more                                -> the best of these go on
    rung 2   a sixth, some rounds                           -> the best of these go on
    rung 3   a handful, as many rounds as a benchmark has   -> the winner

Rounds are interleaved, and the unfused path is timed in each, so a candidate's score is its median
over that of the unfused path *in the same rounds*: candidates that were measured at different times
of a noisy day compare fairly. `unfused` and `medium` are never out before the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flux.heuristic import ceil_div

ROUNDS = (2, 4, 10, 30)
"""Of each candidate by the end of each rung; of short calls more, see ``rounds_for``."""
SHARES = (3, 6, 25)
"""One of so many candidates goes on to the next rung."""
FEWEST = 2
"""So many at least."""

SHORT_MS = 25.0
"""Below it, what happens once (pages are touched, threads start) is a large part of a call."""

Samples = Mapping[str, Sequence[tuple[float, float]]]
"""By candidate: (ms of its slowest rank, ms of the anchor's slowest rank) of each round."""


def rounds_for(ms: float) -> tuple[int, ...]:
    """Rounds by rung where calls take about so long: wake-ups of threads make up most of a short
    one and scatter by their own size, and its rounds are cheap."""
    times = 4 if ms < 5 else 2 if ms < SHORT_MS else 1
    return tuple(times * rounds for rounds in ROUNDS)


@dataclass(frozen=True)
class Step:
    """What to measure next: these candidates, until each has ``rounds``. In the last rung, one of
    them will be the winner."""

    last_rung: bool
    names: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Halving:
    """The rules.

    Attributes:
        names: candidates, most promising first.
        always: those that every rung measures.
        rounds: by rung.
    """

    names: tuple[str, ...]
    always: tuple[str, ...]
    rounds: tuple[int, ...] = ROUNDS

    def next_step(self, samples: Samples, excluded: Collection[str]) -> Step | None:
        """What is to be measured next; None when all rungs are done."""
        alive = [name for name in self.names if name not in excluded]
        for rung, rounds in enumerate(self.rounds):
            lacking = tuple(name for name in alive if len(samples.get(name, ())) < rounds)
            if lacking:
                return Step(rung == len(self.rounds) - 1, lacking, rounds)
            if rung < len(SHARES):
                alive = self._survivors(alive, samples, rounds, rung)
        return None

    def planned_rounds(self) -> int:
        """Calls that a whole search times, about."""
        count, total, before = len(self.names), 0, 0
        for rung, rounds in enumerate(self.rounds):
            total += count * (rounds - before)
            before = rounds
            if rung < len(SHARES):
                kept = max(FEWEST, ceil_div(len(self.names), SHARES[rung]))
                count = min(count, kept + len(self.always))
        return total

    def best(self, samples: Samples, excluded: Collection[str]) -> str | None:
        """The best so far, of those that have been measured about as often as any; None if none
        has."""
        counts = {
            name: len(taken)
            for name, taken in samples.items()
            if taken and name in self.names and name not in excluded
        }
        if not counts:
            return None
        enough = max(counts.values()) / 2
        among = [name for name in self.names if counts.get(name, 0) >= enough]
        return min(among, key=lambda name: score(samples[name]))

    def _survivors(
        self, alive: Sequence[str], samples: Samples, rounds: int, rung: int
    ) -> list[str]:
        keep = max(FEWEST, ceil_div(len(self.names), SHARES[rung]))
        # By the rounds of this rung alone: later ones must not change what was decided here.
        rivals = [name for name in alive if name not in self.always]
        ranked = sorted(rivals, key=lambda name: score(samples[name][:rounds]))
        chosen = {*ranked[:keep], *self.always}
        return [name for name in alive if name in chosen]


def score(samples: Sequence[tuple[float, float]]) -> float:
    """Time relative to the anchor's in the same rounds; smaller is better.

    Of an even number of rounds the lower of the two in the middle counts: what disturbs a call
    makes it longer, and of two rounds one in which nothing did tells more than their mean.
    """
    own, anchors = zip(*samples, strict=True)
    return float(statistics.median_low(own) / statistics.median_low(anchors))


def median_ms(samples: Sequence[tuple[float, float]]) -> float:
    """Median over rounds of the slowest rank's time."""
    return statistics.median([own for own, _ in samples])
