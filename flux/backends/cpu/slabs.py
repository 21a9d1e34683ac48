"""Slabs of rows: what the CPU backend multiplies at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flux import _C
from flux.core.knobs import Op
from flux.core.schedule import TileSchedule, Visit


def merge_visits(schedule: TileSchedule) -> list[tuple[int, int, Visit]]:
    """Merge neighbouring GEMM tiles, since every cut of a GEMM costs packing of the weight.

    Tiles of the own rows wait for nobody, and nobody waits for them. Tiles of an AllGather from
    another host come over a wire that is slower than memory: all of a chunk but the last tile are
    one, so that little is left to compute when the last byte arrives (what the own rows take to
    compute, the wire has for the others).
    """
    m, world, rank = schedule.shape[0], schedule.world, schedule.rank
    tail_only = Op[schedule.op].gathers and schedule.topology.nodes > 1
    hosts = schedule.topology.hosts if tail_only else ()

    def joins(v: Visit) -> bool:
        if v.owner == rank:
            return True
        far = tail_only and v.owner >= 0 and hosts[v.owner] != hosts[rank]
        return far and v.row_end < _C.core.row_end(m, world, v.owner)

    slabs: list[tuple[int, int, Visit]] = []
    for index, v in enumerate(schedule.visits):
        if slabs:
            first, _, last = slabs[-1]
            columns = (last.col_begin, last.col_end) == (v.col_begin, v.col_end)
            if last.owner == v.owner and columns and last.row_end == v.row_begin and joins(v):
                slabs[-1] = (first, index + 1, last._replace(row_end=v.row_end))
                continue
        slabs.append((index, index + 1, v))
    return slabs


@dataclass(slots=True)
class Slab:
    """GEMM tiles that are multiplied at once, with what a call would work out again and again.

    Attributes:
        first: the first of its GEMM tiles.
        last: the tile behind its last one.
        visit: its rows, columns and owner.
        source: its rows of x as this rank holds it, [own rows, K] or [M, K/W]; None: all of them.
        target: its rows and columns of the result or of the partials; None: all of them.
        columns: its columns of the weight; None: all of them.
        shared: in symmetric memory, the rows that an AllGather receives, [rows, K], or the place
            that store = direct writes to, [rows, columns]; None: the slab has neither.
    """

    first: int
    last: int
    visit: Visit
    source: slice | None
    target: slice | tuple[slice, slice] | None
    columns: slice | None
    shared: torch.Tensor | None = None


@dataclass(slots=True)
class SlabPlan:
    """What the calls with one schedule have in common on one rank.

    Attributes:
        schedule: the schedule.
        threaded: whether the engine's worker moves the tiles, not the calling thread.
        direct: whether tiles of a ReduceScatter are stored where their owner reduces them.
        own_rows: rows of the [M, ...] matrix that this rank owns.
        slabs: in the order in which they are multiplied.
        first_foreign: index of the first slab of other ranks' rows, and of the last; -1: none.
        last_foreign: see ``first_foreign``.
    """

    schedule: TileSchedule
    threaded: bool
    direct: bool
    own_rows: int
    slabs: list[Slab]
    first_foreign: int
    last_foreign: int

    def use_memory(self, gathered: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """Set ``Slab.shared`` of each slab.

        Args:
            gathered: rows that an AllGather receives, [max_m, K].
            slots: by rank: its blocks for partial results, [blocks, rows of a chunk, N].
        """
        m, world, rank = self.schedule.shape[0], self.schedule.world, self.schedule.rank
        gathers = Op[self.schedule.op].gathers
        for slab in self.slabs:
            v = slab.visit
            if v.owner == rank:
                continue
            if gathers:
                slab.shared = gathered[v.row_begin : v.row_end]
            elif self.direct:
                base = _C.core.row_begin(m, world, v.owner)
                holder, block = self.schedule.homes[v.owner]
                rows = slots[holder][block, v.row_begin - base : v.row_end - base]
                slab.shared = rows if slab.columns is None else rows[:, slab.columns]

    def forget_memory(self) -> None:
        """Drop the views of symmetric memory."""
        for slab in self.slabs:
            slab.shared = None


def make_plan(schedule: TileSchedule, n: int | None) -> SlabPlan:
    """Return the plan of a schedule, without views of symmetric memory.

    Args:
        schedule: of one rank.
        n: columns of the result on this rank; None: there are several results, whose columns are
            computed whole.
    """
    m, world, rank = schedule.shape[0], schedule.world, schedule.rank
    gathers = Op[schedule.op].gathers
    scattered = Op[schedule.op].scatters and schedule.knobs.store == "direct"
    begin, own = _C.core.row_begin(m, world, rank), _C.core.row_count(m, world, rank)
    slabs = []
    for first, last, v in merge_visits(schedule):
        # An AllGather's x, and what GemmRS with store = direct returns, begin at the own rows.
        rows = _part(v.row_begin, v.row_end, 0, m)
        own_part = _part(v.row_begin, v.row_end, begin, own)
        columns = None if n is None else _part(v.col_begin, v.col_end, 0, n)
        target = own_part if scattered and v.owner == rank else rows
        both = target if columns is None else (target or slice(None), columns)
        slabs.append(Slab(first, last, v, own_part if gathers else rows, both, columns))
    foreign = [number for number, slab in enumerate(slabs) if slab.visit.owner != rank]
    return SlabPlan(
        schedule,
        threaded=schedule.knobs.copy_streams == 1,
        direct=schedule.knobs.store == "direct",
        own_rows=own,
        slabs=slabs,
        first_foreign=foreign[0] if foreign else -1,
        last_foreign=foreign[-1] if foreign else -1,
    )


def _part(begin: int, end: int, base: int, length: int) -> slice | None:
    """Return the slice of [begin, end) in a range of ``length`` from ``base``; None: all of it."""
    if begin == base and end == base + length:
        return None
    return slice(begin - base, end - base)
