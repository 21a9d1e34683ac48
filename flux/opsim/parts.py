"""The description and the log of a simulated call, which its parts share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flux.core.events import Kind
from flux.core.knobs import Knobs
from flux.core.problem import Problem
from flux.core.recorder import COPY_STREAM_LANE, NETWORK_STREAM_LANE, STREAM_LANE
from flux.core.schedule import TileSchedule
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster
from flux.opsim.machine import Counter, Flag, Process, Route, SimulatedMachine
from flux.select import hardware
from flux.select.cost import memory_ms
from flux.select.drawn import RoutedCall
from flux.select.heuristic import copies_partials

LAUNCH_US, RAISE_US = hardware.LAUNCH_US["cuda"], hardware.SIGNAL_US["cuda"]
PATIENCE_US, PATIENCE_STEPS = 500.0, 50
"""How long blocks that must not wait for long look again (csrc/cuda/gemm/tile_counter.cuh)."""

SHARED_LANES = {"stream": STREAM_LANE, "copy": COPY_STREAM_LANE, "network": NETWORK_STREAM_LANE}


class Move(NamedTuple):
    """Rows that went from ``src`` to ``dst``; times in microseconds.

    ``column_begin`` and ``column_end`` are those of the communicated matrix.
    """

    src: int
    dst: int
    row_begin: int
    row_end: int
    column_begin: int
    column_end: int
    start_us: float
    end_us: float


class LinkPiece(NamedTuple):
    """The part of a GEMM tile that has one owner; half-open rows and columns."""

    owner: int
    row_begin: int
    row_end: int
    column_begin: int
    column_end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return (self.row_end - self.row_begin) * (self.column_end - self.column_begin)


Span = tuple[int, str, Kind, str, float, float, Mapping[str, "int | str"]]


@dataclass
class Log:
    """What happened: spans of lanes, and moves between ranks."""

    spans: list[Span] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def add(
        self,
        rank: int,
        lane: str,
        kind: Kind,
        name: str,
        start_us: float,
        end_us: float,
        **details: int | str,
    ) -> None:
        """Add the span of one lane."""
        lane = SHARED_LANES.get(lane, lane)
        self.spans.append((rank, lane, kind, name, start_us, end_us, details))


@dataclass
class SimulatedCall:
    """One simulated call.

    Attributes:
        routes: by (source, destination).
        blocks: blocks of the GEMM; a cluster of thread blocks counts as one.
        late: of them, those that find room when others end: other kernels hold multiprocessors.
        waiting: of them, those that wait; the others leave rather than wait for long.
        tile_us: by rank the time of one GEMM tile; path medium: of one GEMM, with its launch.
        routed: of an op that moves some tokens only, what its kernels do.
        pieces: of an all-to-all, the copies of a block.
    """

    problem: Problem
    cluster: Cluster
    kernel: GemmConfig
    schedules: list[TileSchedule]
    hosts: tuple[int, ...]
    routes: Mapping[tuple[int, int], Route]
    blocks: int
    late: int
    waiting: int
    tile_us: Sequence[float]
    machine: SimulatedMachine
    routed: RoutedCall | None = None
    pieces: int = 0
    log: Log = field(default_factory=Log)

    @property
    def knobs(self) -> Knobs:
        """Knobs of the call, equal on all ranks."""
        return self.schedules[0].knobs

    @property
    def copied(self) -> bool:
        """Whether copy engines move partials, from own memory."""
        return copies_partials(self.problem.op, self.problem.nodes, self.knobs)

    @property
    def reduces_early(self) -> bool:
        """Whether the reduction begins beside the end of its GEMM: see cuda_op_scatter.cpp."""
        alone = self.knobs.sm_margin == 0 and self.problem.nodes == 1
        return self.kernel.arch == "90a" and alone and not self.copied

    def through_switch(self, rank: int, nbytes: float, *, reads: bool) -> list[Flag]:
        """Start a load of sums over all ranks, or else a store to all of them.

        The link of every rank carries the bytes once, that of ``rank`` in both directions.
        """
        ranks = range(self.world)
        out = [self.routes[r, (r + 1) % self.world].resources[0] for r in ranks]
        into = [self.routes[r - 1 if r else self.world - 1, r].resources[1] for r in ranks]
        links = [into[rank], *out] if reads else [out[rank], *into]
        return [self.machine.send((link,), nbytes / hardware.STORE_SHARE) for link in links]

    def beside_us(self, nbytes: float) -> float:
        """Return the time in which idle warps beside a GEMM read this many bytes."""
        multiprocessors = self.blocks * math.prod(self.kernel.cluster)
        return nbytes / (hardware.BESIDE_GBS * 1e3 * multiprocessors)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.problem.world

    def memory_us(self, nbytes: float) -> float:
        """Return the time in which a GPU reads or writes this many bytes of its memory."""
        return 1e3 * memory_ms(self.cluster.device, nbytes, hardware.MEMORY_COPY_SHARE)

    def copy(self, src: int, dst: int, nbytes: float) -> Flag:
        """Start a copy, by a copy engine or a network card."""
        route = self.routes[src, dst]
        share = hardware.NETWORK_SHARE if route.across else hardware.COPY_SHARE
        return self.machine.send(route.resources, nbytes / share)

    def note(
        self, rank: int, lane: str, kind: Kind, name: str, start_us: float, **details: int | str
    ) -> None:
        """Log what a lane did until now."""
        self.log.add(rank, lane, kind, name, start_us, self.machine.now_us, **details)

    def note_wait(
        self, rank: int, lane: str, name: str, start_us: float, **details: int | str
    ) -> None:
        """Log a wait of a lane that ends now, if it took any time."""
        if self.machine.now_us > start_us:
            self.note(rank, lane, Kind.wait, name, start_us, **details)

    def note_move(self, src: int, dst: int, rows: tuple[int, int], start_us: float) -> None:
        """Log rows that are there now."""
        columns = (0, self.problem.row_elements)
        self.log.moves.append(Move(src, dst, *rows, *columns, start_us, self.machine.now_us))

    def signal(self, src: int, dst: int, flag: Flag) -> Process:
        """Raise a flag of rank ``dst`` from another one."""
        yield RAISE_US + self.routes[src, dst].latency_us
        self.machine.raise_(flag)

    def multiply(self, rank: int, lane: str, row: int, column: int) -> Process:
        """Compute the GEMM tile that begins there."""
        start = self.machine.now_us
        yield self.tile_us[rank]
        self.note(rank, lane, Kind.gemm, f"tile {row}, {column}", start)

    def carry(
        self, rank: int, lane: str, ends: tuple[int, int], rows: tuple[int, int], **details: str
    ) -> Process:
        """Copy rows from one rank to another, on the lane ``copy`` or ``network`` of a rank."""
        (src, dst), start = ends, self.machine.now_us
        if self.pieces and self.routes[ends].across:  # a kernel packs, or unpacks
            yield LAUNCH_US + self.memory_us(2.0 * (rows[1] - rows[0]) * self.problem.row_bytes)
        yield self.routes[ends].latency_us * (1 if lane == "network" else max(self.pieces, 1))
        yield self.copy(src, dst, (rows[1] - rows[0]) * self.problem.row_bytes)
        peer = dst if rank == src else src
        name = f"rows {rows[0]}-{rows[1] - 1} {'to' if rank == src else 'of'} rank {peer}"
        kind = Kind.copy if lane == "copy" else Kind.send
        self.note(rank, lane, kind, name, start, peer=peer, **details)
        self.note_move(src, dst, rows, start)

    def tiles_of(self, rank: int) -> TileQueue:
        """Return the queue that hands this rank's tiles to its blocks."""
        claims = self.kernel.tile_scheduler == "dynamic"
        # CUTLASS 2.x's stream-K starts a block for each tile, the next one when one ends.
        claims |= (self.kernel.arch, self.kernel.schedule) == ("80", "stream_k")
        routed = self.routed
        tiles = len(routed.works[rank].items) if routed else len(self.schedules[rank].visits)
        return TileQueue(self, tiles, claims)


class TileQueue:
    """Hands a rank's GEMM tiles to its blocks, in the order of the schedule.

    Args:
        call: the call.
        tiles: how many.
        claims: whether blocks claim the next tile (``tile_scheduler`` dynamic); else block b
            computes tiles b, b + blocks, ...
    """

    def __init__(self, call: SimulatedCall, tiles: int, claims: bool) -> None:
        self._call, self._tiles, self._claims = call, tiles, claims
        self._next = 0
        self._late = deque(Flag() for _ in range(call.late))
        self._room = deque(self._late)

    def of_block(self, block: int) -> Iterator[int]:
        """Yield the numbers of the tiles that a block computes."""
        if not self._claims:
            yield from range(block, self._tiles, self._call.blocks)
            return
        while self._next < self._tiles:
            self._next += 1
            yield self._next - 1

    def next_is_ready(
        self, block: int, is_ready: Callable[[int], bool]
    ) -> Generator[float | Flag, None, bool]:
        """Wait, in a block that must not for long, until the next tile waits for nothing.

        Returns:
            Whether there is a next tile, and it is so; of other blocks True.
        """
        if not self._claims or block < self._call.waiting:
            return True
        for _ in range(PATIENCE_STEPS):
            if self._next >= self._tiles or is_ready(self._next):
                return True
            yield PATIENCE_US / PATIENCE_STEPS
        return False

    def start(self, block: int) -> Process:
        """Wait for a multiprocessor."""
        if block >= self._call.blocks - self._call.late:
            yield self._late.popleft()

    def end(self) -> None:
        """Leave a block's multiprocessor to the next one."""
        if self._room:
            self._call.machine.raise_(self._room.popleft())


class Stores:
    """The stores that leave one rank: those to one destination in the order of their tiles.

    Stores to several destinations share the link. If one destination is slow, because other ranks
    store to it too, the others need not wait for it. A copy engine makes one copy after the other.
    """

    def __init__(self, call: SimulatedCall, rank: int, *, copied: bool = False) -> None:
        self._call, self._rank, self._copied = call, rank, copied
        self._queues: dict[int, deque[tuple[int, float, Flag]]] = {}

    def put(self, dst: int, nbytes: float) -> Flag:
        """Store bytes in the memory of ``dst``; the flag: the last of them has crossed the link."""
        done = Flag()
        queue = self._queues.setdefault(-1 if self._copied else dst, deque())
        queue.append((dst, nbytes, done))
        if len(queue) == 1:
            self._call.machine.spawn(self._drain(queue))
        return done

    def _drain(self, queue: deque[tuple[int, float, Flag]]) -> Process:
        machine, rank = self._call.machine, self._rank
        while queue:
            dst, nbytes, done = queue[0]
            route = self._call.routes[rank, dst]
            if self._copied:
                yield route.latency_us
                yield self._call.copy(rank, dst, nbytes)
            else:
                yield machine.send(route.resources, nbytes / hardware.STORE_SHARE)
            machine.raise_(done)
            queue.popleft()


def count_ends(call: SimulatedCall, parts: int) -> list[Counter]:
    """Return, by rank, a counter of the parts of the call that must end: its end."""
    return [Counter(parts) for _ in range(call.world)]
