"""What a CPU rank needs for calls: slabs of rows that are multiplied at once, and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flux import _C
from flux.core.knobs import Direction, Knobs, Op, Order, Topology
from flux.core.problem import ceil_div
from flux.core.schedule import TileSchedule, Visit
from flux.core.sparse_call import NeededTokens
from flux.core.spec import OpSpec
from flux.select.all_to_all import most_block_tiles
from flux.select.heuristic import across_hosts, most_comm_tiles

if TYPE_CHECKING:
    from flux.select.choose import Choice


def merge_visits(
    schedule: TileSchedule, own_in_place: bool = False
) -> list[tuple[int, int, Visit]]:
    """Merge neighbouring GEMM tiles, since every cut of a GEMM costs packing of the weight.

    Tiles of the own rows wait for nobody, and nobody waits for them. Between hosts, tiles of an
    AllGather are merged by what they wait for:

        same host       come through memory, at once
        another host    all of a chunk but the last tile, so that little is left to compute when
                        the last byte arrives; chunks of one tile come together, as their ranks
                        share the wire, and are one

    ``own_in_place``: own rows lie among those that arrive, and are one with those of the host.
    """
    m, world, rank = schedule.shape[0], schedule.world, schedule.rank
    gathers = Op[schedule.op].gathers and schedule.topology.nodes > 1
    hosts = schedule.topology.hosts if gathers else ()

    def is_whole(v: Visit) -> bool:
        first, last = (_C.core.owner_of(m, world, row) for row in (v.row_begin, v.row_end - 1))
        begins = v.row_begin == _C.core.row_begin(m, world, first)
        return begins and v.row_end == _C.core.row_end(m, world, last)

    def joins(last: Visit, v: Visit) -> bool:
        if v.owner == rank or not hosts or v.owner < 0:
            return v.owner == last.owner == rank
        near = hosts[v.owner] == hosts[rank]
        if last.owner == v.owner:
            return near or v.row_end < _C.core.row_end(m, world, v.owner)
        owners = (_C.core.owner_of(m, world, row) for row in (last.row_begin, last.row_end - 1))
        if any(hosts[owner] != hosts[v.owner] for owner in owners):
            return False
        if near:
            return own_in_place or last.owner != rank
        return is_whole(last) and is_whole(v)

    slabs: list[tuple[int, int, Visit]] = []
    for index, v in enumerate(schedule.visits):
        if slabs:
            first, _, last = slabs[-1]
            columns = (last.col_begin, last.col_end) == (v.col_begin, v.col_end)
            touches = last.row_end == v.row_begin or last.row_begin == v.row_end
            if columns and touches and joins(last, v):
                begin, end = min(last.row_begin, v.row_begin), max(last.row_end, v.row_end)
                owner = v.owner if last.owner == v.owner else -1
                merged = last._replace(row_begin=begin, row_end=end, owner=owner)
                slabs[-1] = (first, index + 1, merged)
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
        own_place: where a slab reads own rows among those that arrive, [own rows, K]; None: none.
        hops: the ranks behind each transfer, once a call has needed them.
    """

    schedule: TileSchedule
    threaded: bool
    direct: bool
    own_rows: int
    slabs: list[Slab]
    first_foreign: int
    last_foreign: int
    own_place: torch.Tensor | None = None
    hops: _C.Hops | None = None

    def selection(self, needed: NeededTokens, ep: int) -> _C.Selection:
        """Return the rows that transfers of a call carry."""
        if self.hops is None:
            self.hops = _C.Hops(self.schedule.native, ep)
        return needed.selection(self.hops)

    def forget_memory(self) -> None:
        """Drop the views of symmetric memory."""
        self.own_place = None
        for slab in self.slabs:
            slab.shared = None


def make_plan(
    schedule: TileSchedule,
    n: int | None,
    gathered: torch.Tensor,
    slots: Sequence[torch.Tensor],
    grouped: bool = False,
) -> SlabPlan:
    """Return the plan of a schedule.

    Args:
        schedule: of one rank.
        n: columns of the result on this rank; None: there are several results, whose columns are
            computed whole.
        gathered: rows that an AllGather receives, [max_m, K].
        slots: by rank: its blocks for partial results, [blocks, rows of a chunk, N].
        grouped: whether rows go to experts, so that a slab packs the weights of them all: more than
            a copy of the own rows costs.
    """
    m, world, rank = schedule.shape[0], schedule.world, schedule.rank
    gathers = Op[schedule.op].gathers
    direct = schedule.knobs.store == "direct"
    scattered = Op[schedule.op].scatters and direct
    begin, own = _C.core.row_begin(m, world, rank), _C.core.row_count(m, world, rank)
    slabs = []
    in_place = grouped and not schedule.native.publishes_own
    for first, last, v in merge_visits(schedule, in_place):
        # An AllGather's x, and what GemmRS with store = direct returns, begin at the own rows.
        rows = _part(v.row_begin, v.row_end, 0, m)
        own_part = _part(v.row_begin, v.row_end, begin, own)
        columns = None if n is None else _part(v.col_begin, v.col_end, 0, n)
        target = own_part if scattered and v.owner == rank else rows
        both = target if columns is None else (target or slice(None), columns)
        shared: torch.Tensor | None = None
        if v.owner != rank and gathers:
            shared = gathered[v.row_begin : v.row_end]
        elif v.owner != rank and direct:
            base = _C.core.row_begin(m, world, v.owner)
            holder, block = schedule.homes[v.owner]
            shared = slots[holder][block, v.row_begin - base : v.row_end - base]
            shared = shared if columns is None else shared[:, columns]
        slabs.append(Slab(first, last, v, own_part if gathers else rows, both, columns, shared))
    foreign = [number for number, slab in enumerate(slabs) if slab.visit.owner != rank]
    owns = [i for slab in slabs for i in range(slab.first, slab.last) if slab.visit.owner < 0]
    copies = gathers and any(schedule.visits[i].owner == rank for i in owns)
    return SlabPlan(
        schedule,
        threaded=schedule.knobs.copy_streams == 1,
        direct=direct,
        own_rows=own,
        slabs=slabs,
        first_foreign=foreign[0] if foreign else -1,
        last_foreign=foreign[-1] if foreign else -1,
        own_place=gathered[begin : begin + own] if copies else None,
    )


def _part(begin: int, end: int, base: int, length: int) -> slice | None:
    """Return the slice of [begin, end) in a range of ``length`` from ``base``; None: all of it."""
    if begin == base and end == base + length:
        return None
    return slice(begin - base, end - base)


@dataclass(frozen=True)
class SegmentLayout:
    """Sizes of one rank's symmetric memory, in bytes unless said otherwise."""

    signals: int  # count
    row_bytes: int
    blocks: int  # of partials, count
    slot_bytes: int  # one of them
    result_offset: int
    data_bytes: int

    @staticmethod
    def serving(spec: OpSpec, topology: Topology, choice: Choice) -> SegmentLayout:
        """Return the least memory that serves every M up to ``spec.max_m`` with its knobs.

        Calls of one op may differ in order, direction and tile sizes as they may in M: nobody
        writes before all have entered, whatever the call before was
        (docs/contribute/architecture.md).
        """
        layouts = [
            SegmentLayout.of(spec, topology, knobs, choice.most_tiles) for knobs in choice.variants
        ]
        partials = max(layout.result_offset for layout in layouts)
        results = max(layout.data_bytes - layout.result_offset for layout in layouts)
        return SegmentLayout(
            max(layout.signals for layout in layouts),
            layouts[0].row_bytes,
            max(layout.blocks for layout in layouts),
            max(layout.slot_bytes for layout in layouts),
            partials,
            partials + results,
        )

    @staticmethod
    def of(spec: OpSpec, topology: Topology, knobs: Knobs, most_tiles: int = 0) -> SegmentLayout:
        """Return the least memory that serves every M with one choice of knobs.

        ``most_tiles`` is what ``Choice.most_tiles`` has.
        """
        world = topology.world
        elements, dtype = spec.travelling(world)
        row = elements * dtype.itemsize
        if not knobs.is_tiled:
            return SegmentLayout(0, row, 0, 0, 0, 0)
        chunk = ceil_div(spec.max_m, world)
        if spec.op.exchanges:
            slot, blocks = chunk * row, world - 1
            signals = min(world * most_block_tiles(chunk, knobs), _C.core.max_tiles)
            return SegmentLayout(signals, row, blocks, slot, blocks * slot, blocks * slot)
        knobs = across_hosts(spec.op, knobs, topology.nodes)
        tiles = most_comm_tiles(spec.op, chunk, knobs, topology.nodes, most_tiles)
        blocks, regions = 0, 1
        if spec.op.reduces:
            blocks, regions = _C.room_for(
                order=Order[knobs.order or "direct"],
                direction=Direction[knobs.direction or "push"],
                mesh=topology.mesh,
                hosts=topology.uneven,
            )
        partials = blocks * chunk * row
        rest = spec.max_m * row if spec.op.gathers else 0
        if spec.op.all_reduces:
            # A pulled result needs the own block only, a pushed one the whole [M, N].
            rest = (spec.max_m if knobs.direction == "push" else chunk) * row
            regions += 1
        # There is no schedule with more than max_tiles signals.
        signals = min(regions * world * tiles, _C.core.max_tiles)
        slot = chunk * row if spec.op.reduces else 0
        return SegmentLayout(signals, row, blocks, slot, partials, partials + rest)
