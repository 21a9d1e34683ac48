"""Where the threads of one rank put down what they do, while they are traced."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from flux import _C

if TYPE_CHECKING:
    from flux.schedule import TileSchedule

CAPACITY = 4096
"""Records of a lane, if not said otherwise: 64 bytes each."""

GEMM_LANE = "GEMM thread"
COPY_LANE = "copy thread"
STREAM_LANE = "stream"
COPY_STREAM_LANE = "copy stream"
NETWORK_STREAM_LANE = "network stream"


class Work(IntEnum):
    """What a record is about; values as in csrc/host/lane.h."""

    gemm = 0
    reduce = 1
    copy = 2
    send = 3
    receive = 4
    wait = 5
    barrier = 6
    own_gemm = 7  # waits for a tile of the rank's own GEMM
    own_copies = 8  # waits for the rank's own copies and reductions
    collective = 9  # of the library: path = unfused
    call = 10  # on streams of a GPU: from the begin of a call to its end
    enter = 11  # tells the peers that this rank has entered
    entry = 12  # waits for a peer's entry
    result = 13  # waits for all ranks' rows of the result
    collect = 14  # copies rows from symmetric memory to where the caller wants them
    slab = 15  # a played peer's partials; first, last: the flags that follow


class HostStamps:
    """Stamps of the host's clock around what library calls do, in one lane."""

    def __init__(self, lane: _C.Lane) -> None:
        self._lane = lane

    def began(self) -> int:
        """What ``ended`` wants to know."""
        return self._lane.now()

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """This is what went on since then."""
        self._lane.add(work, began, nbytes=nbytes)


class Record(NamedTuple):
    """One record of a lane, as csrc/host/lane.h has it; -1 where a field does not apply."""

    begin_ns: int
    end_ns: int
    call: int
    work: int
    peer: int
    chunk: int
    tile: int
    first: int
    last: int
    at: int
    signal: int
    nbytes: int


class LaneRecords(NamedTuple):
    """All of one lane: records in the order in which they were made, and how many had no room."""

    name: str
    records: list[Record]
    dropped: int


def sender_lane(peer: int) -> str:
    """The thread that waits for tiles that are to leave for a rank on another host."""
    return f"sender to rank {peer}"


def outgoing_lane(peer: int) -> str:
    """The connection to a rank on another host."""
    return f"to rank {peer}"


def incoming_lane(peer: int) -> str:
    """The connection from one."""
    return f"from rank {peer}"


class Recorder:
    """The lanes of one rank. All memory is there before anything is recorded."""

    def __init__(self, capacity: int = CAPACITY, remote: Sequence[int] = ()) -> None:
        """``remote``: ranks on other hosts, whose connections have lanes of their own."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        names = [GEMM_LANE, COPY_LANE]
        for peer in remote:
            names += [sender_lane(peer), outgoing_lane(peer), incoming_lane(peer)]
        self._lanes = {name: _C.Lane(capacity) for name in names}
        self.schedules: list[TileSchedule] = []

    def begin(self, schedule: TileSchedule) -> _C.Lane:
        """The next call executes this schedule; the lane of its calling thread."""
        self.schedules.append(schedule)
        return self._lanes[GEMM_LANE]

    def lane(self, name: str) -> _C.Lane:
        """The lane of this name."""
        return self._lanes[name]

    def read(self) -> list[LaneRecords]:
        """What was recorded. Between calls only."""
        return [
            LaneRecords(name, [Record(*record) for record in lane.records], lane.dropped)
            for name, lane in self._lanes.items()
        ]
