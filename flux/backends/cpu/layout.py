"""Sizes of the shared memory of one rank on the CPU: signals, gathered rows, partials, results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux import _C
from flux.core.integers import ceil_div
from flux.core.knobs import Direction, Knobs, Order
from flux.core.spec import OpSpec
from flux.core.topology import Topology
from flux.select.heuristic import across_hosts, most_comm_tiles

if TYPE_CHECKING:
    from flux.select.choose import Choice


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
            SegmentLayout.of(spec, topology, knobs, choice.most_tiles)
            for knobs in choice.variants()
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
        elements, dtype = spec.travelling_row
        row = elements * dtype.itemsize
        if not knobs.is_tiled:
            return SegmentLayout(0, row, 0, 0, 0, 0)
        knobs = across_hosts(spec.op, knobs, topology.nodes)
        chunk = ceil_div(spec.max_m, world)
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
