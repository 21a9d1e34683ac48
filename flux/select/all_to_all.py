"""Knobs and schedule of an all-to-all (flux.ulysses), which has winners, and no cost model.

Inside a host blocks are written where their rank reads them, so tiles would gain nothing, and the
unfused path only adds copies. Between hosts a block leaves in tiles. Each costs 0.1 to 2 ms of the
core that multiplies (flux/select/heuristic.py) and packs the weight again, so they have TILE_BYTES
at least, and a block has at most MAX_TILES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from flux.core.knobs import AllToAllOp, Knobs, Topology
from flux.core.problem import ceil_div
from flux.core.schedule import TileSchedule

TILE_BYTES = 1 << 18
"""Bytes of a communication tile between hosts, at least."""
MAX_TILES = 8
"""Communication tiles of a block, at most."""
FIXED = {
    "direction": ("push", None),
    "order": ("direct", None),
    "swizzle": ("rank_shift", None),
    "store": ("direct", None),
    "reduce": ("local", None),
    "path": ("fused", "unfused"),
}
"""The knobs of an all-to-all that have one legal value, or two."""


def reason_illegal(knobs: Knobs) -> str | None:
    """Return why an all-to-all cannot run with these knobs, or None."""
    for name, legal in FIXED.items():
        value = getattr(knobs, name)
        if value not in legal:
            wanted = " or ".join(str(choice) for choice in legal if choice is not None)
            return f"an all-to-all has {name} = {wanted}, got {value}"
    return None


def most_block_tiles(chunk: int, knobs: Knobs) -> int:
    """Return no less than the most tiles that a block of up to ``chunk`` rows is cut into."""
    if knobs.comm_tile_rows is None:
        return min(chunk, MAX_TILES)
    return ceil_div(chunk, min(knobs.comm_tile_rows, chunk))


def block_schedule(
    op: AllToAllOp,
    rows: Sequence[int],
    sizes: tuple[int, int],
    row_bytes: int,
    rank: int,
    topology: Topology,
    knobs: Knobs,
) -> TileSchedule:
    """Return the schedule of a rank.

    Args:
        op: the op.
        rows: of each rank; not all are 0.
        sizes: columns and depth of the GEMM of one block.
        row_bytes: bytes of a row of a block.
        rank: the rank.
        topology: of the ranks.
        knobs: open fields are filled in.

    Raises:
        ValueError: the sizes or knobs are illegal.
    """
    return _block_schedule(op, tuple(rows), sizes, row_bytes, rank, topology, knobs)


@lru_cache(maxsize=1024)
def _block_schedule(
    op: AllToAllOp,
    rows: tuple[int, ...],
    sizes: tuple[int, int],
    row_bytes: int,
    rank: int,
    topology: Topology,
    knobs: Knobs,
) -> TileSchedule:
    reason = reason_illegal(knobs)
    if reason is not None:
        raise ValueError(reason)
    chunk = max(rows)
    tile_rows = max(ceil_div(chunk, MAX_TILES), TILE_BYTES // row_bytes, 1)
    tile_rows = min(knobs.comm_tile_rows or tile_rows, chunk)
    knobs = replace(
        knobs,
        tile=(tile_rows, sizes[0]),
        raster=1,
        comm_tile_rows=tile_rows,
        direction="push",
        order="direct",
        swizzle="rank_shift",
        store="direct",
        reduce="local",
        copy_streams=0,
    )
    world = topology.world
    schedule = TileSchedule(
        op.name, (world * chunk, *sizes), world, rank, topology, knobs, rows=rows
    )
    _ = schedule.native  # raises here, not at the first use
    return schedule
