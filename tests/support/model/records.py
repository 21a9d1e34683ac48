"""What recordings of the CUDA backend's streams consist of (recording.py), and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

WORD = 4  # bytes of a signal
ELEMENT = 2  # bytes of a bfloat16
MASK = 0xFFFFFFFF
GATHERED = ("gathered row", "gathered row of odd calls")
PUSHED = ("row pushed by even calls", "row pushed by odd calls")


class Kind(IntEnum):
    """Kinds of records; records.h has the same list."""

    copy = 0
    fill = 1
    raise_ = 2
    await_ = 3
    event = 4
    join = 5
    launch = 6
    read = 7
    write = 8
    reset = 9


class What(IntEnum):
    """What bytes are; records.h has the same list."""

    nothing = 0
    x = 1
    partial = 2
    result = 3
    output = 4
    sum = 5  # of a node's partials, for rows of another node's rank


@dataclass(frozen=True)
class Content:
    """What ``bytes`` at ``at`` are: a part of a matrix, from byte ``offset`` of it on.

    ``op`` counts the ops of the scenario, ``source`` is the rank that made the content, ``epoch``
    the call of it. Rows of x count from the first row of their rank.
    """

    at: int
    bytes: int
    what: What
    op: int
    source: int
    epoch: int
    offset: int


@dataclass(frozen=True)
class Record:
    """One operation of a stream, or of a tile of the kernel that was launched before."""

    kind: Kind
    stream: int
    call: int  # which of the rank's calls, from 0; -1 outside of calls
    tile: int = -1
    at: int = 0
    from_: int = 0
    bytes: int = 0
    value: int = 0
    content: Content | None = None


@dataclass(frozen=True)
class Region:
    """Memory of a rank: ``unit`` bytes are one row, or (in a pad) one word."""

    at: int
    bytes: int
    rank: int
    op: int
    name: str
    unit: int
    is_pad: bool = False


@dataclass(frozen=True)
class Scenario:
    """What is recorded: every op called once for each of ``rows``, on all ranks.

    Attributes:
        ops: called in turn, on the same streams.
        rows: M of each round of calls.
        epochs: of each round; by default 1, 2, ...
        gather: AGGemm returns the gathered x as well.
        fresh_x: every call has an x of its own; else the caller overwrites the last one.
        n: global columns of AGGemm; by default every rank has 4.
        streams: the rank's calls go round this many streams, which nothing else orders.
        captured: rounds of calls that are captured, each as if by itself and replayed once. A
            replay does what the capture of the same call would do in its place.
        switch: memory has a multicast address, and GemmRS and GemmAR reduce in flight.
        nodes: that the ranks are on.
        puts: nodes reach each other by NVSHMEM, whose kernels send the sums.
        apart: each rank has a GPU of its own, so that reductions begin beside their GEMM, and
            kernels wait for rows that are forwarded.
        path: ``fused`` | ``medium`` | ``in_kernel``.
        few_rows: M up to which calls take path in_kernel.
        buffers: of gathered rows; with 2, rows are so wide that kernels read own ones in place.
        in_slot: the caller writes x into the input slot.
        sends: of GemmRS and GemmAR.
        reduce: the knob, of GemmRS.
    """

    ops: tuple[str, ...]
    world: int
    rows: tuple[int, ...]
    direction: str = "push"
    order: str = "direct"
    topology: tuple[int, int, int] | None = None
    comm_tile_rows: int | None = None
    poison: bool = False
    gather: bool = False
    fresh_x: bool = False
    n: int | None = None
    epochs: tuple[int, ...] | None = None
    streams: int = 1
    captured: tuple[int, ...] = ()
    switch: bool = False
    nodes: int = 1
    puts: bool = False
    apart: bool = False
    path: str = "fused"
    few_rows: int = 0
    buffers: int = 1
    in_slot: bool = False
    sends: str | None = None
    reduce: str | None = None

    def epoch(self, turn: int) -> int:
        return self.epochs[turn] if self.epochs else turn + 1

    def __str__(self) -> str:
        """As one line of a table."""
        rows = ",".join(map(str, self.rows))
        extras = [self.direction] if "ag_gemm" in self.ops else []
        extras += [self.path] if self.path != "fused" else []
        extras += [f"in_kernel up to M = {self.few_rows}"] if self.few_rows else []
        extras += [self.order] if self.order != "direct" else []
        extras += ["two buffers"] if self.buffers == 2 else []
        extras += ["x in the input slot"] if self.in_slot else []
        extras += [f"by {self.sends}"] if self.sends else []
        extras += [f"sums {self.reduce}"] if self.reduce else []
        extras += ["poison"] if self.poison else []
        extras += ["gathered x"] if self.gather else []
        extras += [f"comm tiles of {self.comm_tile_rows}"] if self.comm_tile_rows else []
        extras += [f"epochs from {self.epochs[0]}"] if self.epochs else []
        extras += [f"{self.streams} streams"] if self.streams > 1 else []
        extras += ["by the switch"] if self.switch else []
        extras += ["by puts"] if self.puts else []
        if self.apart:
            extras += ["a GPU each" if self.ops == ("ag_gemm",) else "early reduction"]
        if self.captured:
            every = len(self.captured) == len(self.rows)
            which = "all calls" if every else "call " + ",".join(str(t + 1) for t in self.captured)
            extras += [f"{which} captured"]
        what = ", ".join(extras)
        ranks = f"{self.world} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        return f"{'+'.join(self.ops)}{f' ({what})' if what else ''}, {ranks}, M = {rows}"


@dataclass
class Recording:
    """All records, in the order in which the host made them, and what their addresses mean.

    Attributes:
        streams: handle -> (rank, name); rank -1 is the stream that all others fork from and join.
        results: what the tensors that were returned should hold in the end.
        word_before: value of all words before the first call.
    """

    scenario: Scenario
    records: list[Record] = field(default_factory=list)
    streams: dict[int, tuple[int, str]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    results: list[Content] = field(default_factory=list)
    word_before: int = 0
