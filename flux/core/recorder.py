"""Records of what the threads of one rank do, for tracing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flux import _C

if TYPE_CHECKING:
    import torch

    from flux.core.schedule import TileSchedule

CAPACITY = 4096
"""Records per lane by default, 64 bytes each."""

GEMM_LANE = "GEMM thread"
COPY_LANE = "copy thread"
STREAM_LANE = "stream"
COPY_STREAM_LANE = "copy stream"
NETWORK_STREAM_LANE = "network stream"


class Work(IntEnum):
    """The kind of a record; values as in csrc/cpu/lane.h."""

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
    call = 10  # on streams of a GPU: from the start of a call to its end
    enter = 11  # tells the peers that this rank has entered
    entry = 12  # waits for a peer's entry
    result = 13  # waits for all ranks' rows of the result
    collect = 14  # copies rows from symmetric memory to the caller's tensor
    slab = 15  # partials of a simulated peer; first, last: the flags that follow


class HostStamps:
    """Records start and end of library calls in one lane, on the host's clock."""

    def __init__(self, lane: _C.Lane) -> None:
        self._lane = lane

    def began(self) -> int:
        """Return the start time, to be passed to ``ended``."""
        return self._lane.now()

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """Record work from ``began`` until now."""
        self._lane.add(work, began, nbytes=nbytes)


class Record(NamedTuple):
    """One record of a lane, as csrc/cpu/lane.h has it; -1 where a field does not apply."""

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
    """All records of one lane in the order in which they were made, and the number dropped."""

    name: str
    records: list[Record]
    dropped: int


def sender_lane(peer: int) -> str:
    """Return the lane of the thread that waits for tiles to send to a rank on another host."""
    return f"sender to rank {peer}"


def outgoing_lane(peer: int) -> str:
    """Return the lane of the outgoing connection to a rank on another host."""
    return f"to rank {peer}"


def incoming_lane(peer: int) -> str:
    """Return the lane of the incoming connection from a rank on another host."""
    return f"from rank {peer}"


class CallRecorder(Protocol):
    """Records calls of an op whose kernels and streams stamp themselves (flux.trace.gpu)."""

    def began(self, rank: int, schedule: TileSchedule) -> None:
        """Note that the next call of this rank runs this schedule."""
        ...

    def routed(self, rank: int, experts: torch.Tensor) -> None:
        """Note the experts of the tiles of this rank's call: read when it has ended."""
        ...


class Recorder:
    """The lanes of one rank. Allocates all memory before the first record."""

    def __init__(self, capacity: int = CAPACITY, remote: Sequence[int] = ()) -> None:
        """Make the lanes.

        Args:
            capacity: records per lane.
            remote: ranks on other hosts; their connections have their own lanes.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        names = [GEMM_LANE, COPY_LANE]
        for peer in remote:
            names += [sender_lane(peer), outgoing_lane(peer), incoming_lane(peer)]
        self._lanes = {name: _C.Lane(capacity) for name in names}
        self.schedules: list[TileSchedule] = []

    def begin(self, schedule: TileSchedule) -> _C.Lane:
        """Set the schedule of the next call, and return the lane of its calling thread."""
        self.schedules.append(schedule)
        return self._lanes[GEMM_LANE]

    def lane(self, name: str) -> _C.Lane:
        """Return the lane with this name."""
        return self._lanes[name]

    def read(self) -> list[LaneRecords]:
        """Return all records. Call it only between calls of the op."""
        return [
            LaneRecords(name, [Record(*record) for record in lane.records], lane.dropped)
            for name, lane in self._lanes.items()
        ]
