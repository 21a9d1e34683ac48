"""Traces and their events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from flux.core.datafile import shown

_MOST_US = 1e15
"""30 years."""


class Kind(str, Enum):
    """The activity of a lane: computing a tile, moving one, or waiting."""

    gemm = "gemm"
    reduce = "reduce"
    copy = "copy"
    send = "send"  # over the network
    receive = "receive"
    wait = "wait"
    barrier = "barrier"


@dataclass(frozen=True)
class Event:
    """An interval of time in one lane of one rank.

    Attributes:
        rank: the rank of the lane.
        lane: a thread, a copy queue or a multiprocessor: events of one lane do not overlap.
        kind: the activity.
        name: short description: "tile (3, 0)", "rows 128-255 to rank 1", "waits for tile 2".
        start_us: microseconds since the op began on the first rank, on a clock all ranks share.
        duration_us: microseconds, never negative.
        details: tile, rows, peer, bytes, call.
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
        """End of the interval, in microseconds."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Trace:
    """The activity of all ranks in some calls.

    Attributes:
        events: of all ranks; time zero is the start of the first call on the first rank.
        metadata: description of the trace, JSON-serialisable. ``calls`` holds the [begin, end] of
            every call by rank in us. ``dropped`` holds the number of events without room, by rank
            and lane. ``clock_uncertainty_us`` bounds the shift of each rank's times against those
            of rank 0. On GPUs, ``gpu_clock_us`` holds by rank the bound between its kernels' and
            its streams' times (``kernels_to_streams``), and the step of kernels' times
            (``resolution``).
    """

    events: list[Event]
    metadata: dict[str, Any]

    @property
    def dropped(self) -> int:
        """Number of events that had no room."""
        return sum(sum(lanes.values()) for lanes in self.metadata.get("dropped", {}).values())


def event_from(values: Mapping[str, Any]) -> Event:
    """Return the event with these fields, as read from a file: ``kind`` is its value.

    Raises:
        ValueError: a field is missing or has another type, or a time is out of range.
    """
    for name, kind in {"rank": int, "lane": str, "name": str, "details": dict}.items():
        if type(values.get(name)) is not kind:
            raise ValueError(f"{name}: expected a {kind.__name__}, got {shown(values.get(name))}")
    kinds = [kind.value for kind in Kind]
    if values.get("kind") not in kinds:
        raise ValueError(f"kind: expected one of {kinds}, got {shown(values.get('kind'))}")
    for name, least in (("start_us", -_MOST_US), ("duration_us", 0)):
        value: Any = values.get(name)
        if type(value) not in (int, float) or not least <= value <= _MOST_US:
            raise ValueError(
                f"{name}: expected a number in [{least:g}, {_MOST_US:g}], got {shown(value)}"
            )
    return Event(
        rank=values["rank"],
        lane=values["lane"],
        kind=Kind(values["kind"]),
        name=values["name"],
        start_us=values["start_us"],
        duration_us=values["duration_us"],
        details=values["details"],
    )
