"""Successive halving: decide which candidates are measured next.

The rules are pure, so that the same measurements lead to the same decisions after a crash.

    rung 0   all candidates, two rounds each                -> the best third goes on
    rung 1   these, two more                                -> the best of these go on
    rung 2   a sixth, some rounds                           -> the best of these go on
    rung 3   a handful, as many rounds as a benchmark has   -> the winner

Rounds are interleaved, and the unfused path is timed in each. A candidate's score is its median
over that of the unfused path *in the same rounds*. So candidates measured at different times on a
noisy machine compare fairly. `unfused` and `medium` are never eliminated before the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flux.core.problem import ceil_div

ROUNDS = (2, 4, 10, 30)
"""Rounds of each candidate by the end of each rung; more for short calls, see ``rounds_for``."""
SHARES = (3, 6, 25)
"""One in this many candidates goes on to the next rung."""
FEWEST = 2
"""Least number of candidates that go on."""

SHORT_MS = 25.0
"""Below this time, one-time work (touching pages, starting threads) is a large part of a call."""

Samples = Mapping[str, Sequence[tuple[float, float]]]
"""By candidate: (ms of its slowest rank, ms of the anchor's slowest rank) of each round."""


def rounds_for(ms: float) -> tuple[int, ...]:
    """Return rounds by rung for calls of about this time.

    A short call consists mostly of wake-ups of threads, whose duration varies by as much as itself.
    Its rounds are also cheap.
    """
    times = 4 if ms < 5 else 2 if ms < SHORT_MS else 1
    return tuple(times * rounds for rounds in ROUNDS)


@dataclass(frozen=True)
class HalvingStep:
    """The next measurement: these candidates, until each has ``rounds``.

    In the last rung, one of them will be the winner.
    """

    last_rung: bool
    names: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Halving:
    """The rules.

    Attributes:
        names: candidates, most promising first.
        always: candidates that every rung measures.
        rounds: by rung.
    """

    names: tuple[str, ...]
    always: tuple[str, ...]
    rounds: tuple[int, ...] = ROUNDS

    def next_step(self, samples: Samples, excluded: Collection[str]) -> HalvingStep | None:
        """Return the next measurement; None if all rungs are done."""
        alive = [name for name in self.names if name not in excluded]
        for rung, rounds in enumerate(self.rounds):
            lacking = tuple(name for name in alive if len(samples.get(name, ())) < rounds)
            if lacking:
                return HalvingStep(rung == len(self.rounds) - 1, lacking, rounds)
            if rung < len(SHARES):
                alive = self._survivors(alive, samples, rounds, rung)
        return None

    def planned_rounds(self) -> int:
        """Return the approximate number of calls that a whole search times."""
        count, total, before = len(self.names), 0, 0
        for rung, rounds in enumerate(self.rounds):
            total += count * (rounds - before)
            before = rounds
            if rung < len(SHARES):
                kept = max(FEWEST, ceil_div(len(self.names), SHARES[rung]))
                count = min(count, kept + len(self.always))
        return total

    def best(self, samples: Samples, excluded: Collection[str]) -> str | None:
        """Return the best candidate so far, among those with at least half of the most rounds.

        None if no candidate has been measured.
        """
        counts = {
            name: len(taken)
            for name, taken in samples.items()
            if taken and name in self.names and name not in excluded
        }
        if not counts:
            return None
        enough = max(counts.values()) / 2
        among = [name for name in self.names if counts.get(name, 0) >= enough]
        scores = [score(samples[name]) for name in among]
        return among[scores.index(min(scores))]

    def _survivors(
        self, alive: Sequence[str], samples: Samples, rounds: int, rung: int
    ) -> list[str]:
        keep = max(FEWEST, ceil_div(len(self.names), SHARES[rung]))
        # Uses the rounds of this rung alone: later rounds must not change this decision.
        rivals = [name for name in alive if name not in self.always]
        scores = {name: score(samples[name][:rounds]) for name in rivals}
        ranked = sorted(rivals, key=scores.__getitem__)
        chosen = {*ranked[:keep], *self.always}
        return [name for name in alive if name in chosen]


def score(samples: Sequence[tuple[float, float]]) -> float:
    """Return the time relative to the anchor's in the same rounds; smaller is better.

    For an even number of rounds the lower middle value counts. Disturbances only make a call
    longer, so of two rounds the undisturbed one says more than their mean.
    """
    own, anchors = zip(*samples, strict=True)
    return float(statistics.median_low(own) / statistics.median_low(anchors))


def median_ms(samples: Sequence[tuple[float, float]]) -> float:
    """Return the median over rounds of the slowest rank's time."""
    return statistics.median([own for own, _ in samples])
