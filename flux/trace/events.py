"""The events of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Kind(str, Enum):
    """What a lane was doing: working on a tile, moving one, or held up."""

    gemm = "gemm"
    reduce = "reduce"
    copy = "copy"
    send = "send"  # over the network
    receive = "receive"
    wait = "wait"
    barrier = "barrier"


@dataclass(frozen=True)
class Event:
    """A stretch of time of one lane of one rank.

    Attributes:
        rank: whose lane.
        lane: a thread, a copy queue or a multiprocessor: events of one lane do not overlap.
        kind: what it did.
        name: in words, short: "tile (3, 0)", "rows 128-255 to rank 1", "waits for tile 2".
        start_us: microseconds since the op began on the first rank, on a clock all ranks share.
        duration_us: microseconds, never negative.
        details: which tile, rows, peer, bytes, call.
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    start_us: float
    duration_us: float
    details: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us
