"""Tile schedules: the single description of a call, used by every executor.

A schedule is a pure function of its fields. It evaluates the maps in ``csrc/core``, which a GPU
thread block evaluates itself. Here they are unrolled into lists, for the CPU backend, the tests,
and debugging: ``print(schedule)`` shows all tiles and transfers in order. ``make_schedule``
(flux/select/heuristic.py) checks arguments and fills in open knobs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from flux import _C
from flux.core.knobs import Direction, Knobs, Order, Store, Swizzle, Topology, op_row


class ParcelKind(IntEnum):
    """The content of a parcel; values as in csrc/schedule/schedule.h."""

    gather = 0
    partial = 1
    combined = 2
    result = 3


class Transfer(NamedTuple):
    """One communication tile from ``src`` to ``dst``; rows are those of the [M, ...] matrix.

    ``src == dst`` is a tile that stays on its rank: an own tile published for pulling peers, or the
    own share of a reduction. A ``forwarded`` tile was received by ``src`` before ``src`` sends it
    on.
    """

    step: int
    src: int
    dst: int
    chunk: int
    tile: int
    row_begin: int
    row_end: int
    signal: int
    forwarded: bool


class Parcel(NamedTuple):
    """One communication tile for a rank on another host, in sending order.

    ``kind`` is its content: rows of x, a partial, a sum over the ranks of a host, or a result.
    ``signal`` is raised in the receiver's pad. ``block`` is the receiver's block for partials.
    """

    kind: ParcelKind
    chunk: int
    row_begin: int
    row_end: int
    signal: int
    block: int


class Visit(NamedTuple):
    """One GEMM tile: rows and columns of the local output, half-open.

    ``waits`` is the range of signals (AllGather, all-to-all) that the tile waits for. ``owner`` is
    the rank that owns all its rows, or -1. ``completes`` is the range of ``transfers``
    (ReduceScatter, all-to-all) that may leave after it. All-to-all: rows are those of the block to
    or from ``owner``, and a visit without columns copies them.
    """

    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    waits: tuple[int, int]
    owner: int
    completes: tuple[int, int]


@dataclass(frozen=True)
class TileSchedule:
    """The work of one rank in one call: GEMM tiles, transfers, signals. Hashable and printable.

    Attributes:
        op: ``ag_gemm`` | ``gemm_rs`` | ``gemm_ar`` | ``gemm_all_to_all`` | ``all_to_all_gemm``.
        shape: global (m, n, k), in elements.
        world: number of ranks.
        rank: the rank of this schedule.
        topology: the mesh of ranks.
        knobs: all fields set.
        spread: for GPUs between hosts, whose partials cross links: ranks of a host store partials
            for other hosts to different ranks at a time, and not all to one.
        splits: a GPU runs a GEMM for each chunk, in place of one for all.
        rows: all-to-all: of each rank; M has as many rows for each block as the largest one.
        copied: a GPU's partials go to own memory, from which copy engines take them.
    """

    op: str
    shape: tuple[int, int, int]
    world: int
    rank: int
    topology: Topology
    knobs: Knobs
    spread: bool = False
    splits: bool = False
    rows: tuple[int, ...] = ()
    copied: bool = False

    @cached_property
    def native(self) -> _C.Schedule:
        """The same schedule as the native engine represents it."""
        knobs = self.knobs
        assert knobs.tile is not None and knobs.comm_tile_rows is not None
        m, n, k = self.shape
        return _C.build_schedule(
            op=op_row(self.op),
            m=m,
            n=n,
            k=k,
            rank=self.rank,
            mesh=self.topology.mesh,
            tile_m=knobs.tile[0],
            tile_n=knobs.tile[1],
            raster=knobs.raster or 1,
            comm_rows=knobs.comm_tile_rows,
            direction=Direction[knobs.direction or "push"],
            order=Order[knobs.order or "direct"],
            swizzle=Swizzle[knobs.swizzle or "rank_shift"],
            store=Store[knobs.store or "staged"],
            hosts=self.topology.uneven,
            spread=self.spread,
            split=self.splits,
            copied=self.copied,
            in_kernel=self.knobs.path == "in_kernel",
            sums_in_kernel=self.knobs.reduce == "in_kernel",
            rows=self.rows,
        )

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """GEMM tiles in the order in which this rank computes them."""
        return tuple(Visit(*v) for v in self.native.visits)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Communication tiles in the order in which this rank moves them."""
        return tuple(Transfer(*t) for t in self.native.transfers)

    @cached_property
    def results(self) -> tuple[Transfer, ...]:
        """GemmAR: tiles of the reduced result that this rank moves."""
        return tuple(Transfer(*t) for t in self.native.results)

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """ReduceScatter, by owner: (rank that receives the partial rows, block in its memory)."""
        return self.native.homes

    def of_rank(self, rank: int) -> TileSchedule:
        """Return the schedule of another rank for the same call."""
        return _of_rank(self, rank)

    def parcels_for(self, peer: int) -> list[Parcel]:
        """Return the tiles that this rank sends to ``peer`` on another host, in order."""
        return [Parcel(ParcelKind(kind), *rest) for kind, *rest in self.native.parcels_for(peer)]

    @cached_property
    def signals(self) -> int:
        """Number of signals in each rank's pad for this call."""
        return self.native.signals

    def __str__(self) -> str:
        m, n, k = self.shape
        lines = [
            f"{self.op} m={m} n={n} k={k}, rank {self.rank} of {self.world} ({self.topology})",
            f"knobs: {self._knobs_text()}",
            f"GEMM tiles ({len(self.visits)}):",
        ]
        lines += [f"  {i:>3}  {self._visit_text(v)}" for i, v in enumerate(self.visits)]
        lines += self._transfer_lines("transfers", self.transfers)
        if self.results:
            lines += self._transfer_lines(
                "transfers of the result",
                self.results,
                # With pull, the last fetch of a call raises no signal: no rank waits for it.
                lands="waits for" if self.knobs.direction == "pull" else "raises",
            )
        return "\n".join(lines)

    def _knobs_text(self) -> str:
        gathers = op_row(self.op).gathers
        return str(replace(self.knobs, store=None) if gathers else self.knobs)

    def _visit_text(self, v: Visit) -> str:
        text = f"rows [{v.row_begin}, {v.row_end})  columns [{v.col_begin}, {v.col_end})"
        if op_row(self.op).exchanges and v.waits != (0, 0):
            first, last = v.waits
            return f"{text}  from rank {v.owner}, waits for signals [{first}, {last})"
        if op_row(self.op).gathers:
            first, last = v.waits
            return text + (
                f"  waits for signals [{first}, {last})" if last > first else "  own rows, no wait"
            )
        first, last = v.completes
        text += f"  owner {v.owner}" if v.owner >= 0 else "  several owners"
        return text + (f"  then transfers [{first}, {last}) leave" if last > first else "")

    def _transfer_lines(
        self, title: str, transfers: tuple[Transfer, ...], lands: str = "raises"
    ) -> list[str]:
        how = f"{self.knobs.direction}, store {self.knobs.store}"
        if op_row(self.op).gathers:
            how = f"{self.knobs.direction}, {self.knobs.order}"
        lines = [f"{title} ({len(transfers)}, {how}):"]
        for i, t in enumerate(transfers):
            verb = lands if t.src != t.dst else "raises"
            route = f"rank {t.src} -> {t.dst}" if t.src != t.dst else f"stays at {t.dst}  "
            lines.append(
                f"  {i:>3}  step {t.step:>2}  {route}  rows [{t.row_begin}, {t.row_end})"
                f"  chunk {t.chunk} tile {t.tile}  {verb} signal {t.signal}"
                + ("  (forwarded)" if t.forwarded else "")
            )
        return lines


@lru_cache(maxsize=1024)
def _of_rank(schedule: TileSchedule, rank: int) -> TileSchedule:
    return replace(schedule, rank=rank)
