"""Default knobs of the CPU backend, for shapes without tuning results.

They follow from measurements on a 2-core AVX-512 machine (fp32, one thread per rank, CPU time;
`benchmarks/cpu_slabs.py`):

* A GEMM cut into two slabs of rows packs its weight twice. Slabs of 1024 rows and more cost 0 to 5%
  over the whole GEMM, slabs of 512 rows 4 to 10%, slabs of 256 rows 7 to 20%.
* Copying a shard costs 0.5 to 1.5% of the GEMM that reads it. If every core has a rank to run, no
  core is free for the copy. So below slabs of 2048 rows it is faster to gather all rows first
  (through shared memory: several times faster than the library collective) and run one GEMM.
  Partials gain more: a GEMM that writes them where their owner reads them saves both the copy and
  the memory. So a ReduceScatter is cut from 1024 rows on.
* Between hosts (two with one rank each, 1 Gbit/s) each communication tile costs 0.1 to 2 ms of the
  core that multiplies, so tiles are few there, up to 8 or 16 MiB each.
* Handing work to the copy thread costs two wake-ups, 50 to 100 us together. In that time the
  calling thread copies about 256 KiB itself. With one GEMM tile there is no computation to overlap
  with.
"""

from __future__ import annotations

from dataclasses import replace

from flux.core.integers import ceil_div
from flux.core.knobs import Knobs, Op

MIN_SLAB_ROWS = {Op.ag_gemm: 2048, Op.gemm_rs: 1024, Op.gemm_ar: 1024}
COMM_TILE_BYTES = 1 << 20
NETWORK_TILE_BYTES = {Op.ag_gemm: 16 << 20, Op.gemm_rs: 8 << 20, Op.gemm_ar: 8 << 20}
MAX_COMM_TILES = 64
MIN_NETWORK_SLAB_ROWS = 512
FEW_ROWS = 64
INLINE_BYTES = 256 << 10


def slab_rows(op: Op, m: int, world: int) -> int:
    """Return rows of a GEMM tile: whole chunks, at least MIN_SLAB_ROWS; M if under two slabs."""
    chunk = ceil_div(m, world)
    if m < 2 * MIN_SLAB_ROWS[op]:
        return m
    return min(m, chunk * ceil_div(MIN_SLAB_ROWS[op], chunk))


def network_slab_rows(op: Op, m: int, world: int) -> int:
    """Return rows of a GEMM tile between hosts: an equal part of a chunk, or a small chunk whole.

    ReduceScatter: the GEMM computes other hosts' rows first, and small slabs let the first of them
    leave early. With few rows, as in decoding, a GEMM takes as long as reading the weight: cut in
    two, it reads the weight twice.

    AllGather: when the last bytes have arrived, only the last tile remains to be computed; the
    tiles before it are computed as one (backends/cpu/backend.py).
    """
    chunk = ceil_div(m, world)
    if m <= FEW_ROWS and op.reduces:
        return m
    if chunk < 1024:
        return chunk
    if op.gathers:
        return next((chunk // parts for parts in (4, 3, 2) if chunk % parts == 0), chunk)
    least = MIN_NETWORK_SLAB_ROWS
    return next((rows for rows in range(least, 2 * least) if chunk % rows == 0), least)


def message_rows(op: Op, chunk: int, slab: int) -> int:
    """Return the rows of one message between hosts.

    ReduceScatter: a partial leaves with its slab. AllGather: the first message is the rows of x
    that the first slab of the chunk needs, the second is the rest.
    """
    if op.reduces:
        return min(slab, chunk)
    return chunk if slab >= chunk else max(slab, chunk - slab)


def most_comm_tiles(op: Op, chunk: int, knobs: Knobs, nodes: int) -> int:
    """Return the most communication tiles that ``resolve`` cuts a chunk into, at any M.

    Symmetric memory is sized by this number, so it must change with ``resolve``.

    Args:
        op: the fused op.
        chunk: rows of a chunk at the largest M.
        knobs: the fields that the user fixed.
        nodes: number of hosts.
    """
    if knobs.comm_tile_rows is not None:
        return ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
    most = MAX_COMM_TILES
    if nodes > 1 and op.reduces:
        # A partial leaves with its slab (message_rows), however many slabs a chunk has.
        slab = MIN_NETWORK_SLAB_ROWS if knobs.tile is None else knobs.tile[0]
        most = max(most, ceil_div(chunk, slab))
    return min(chunk, most)


def across_hosts(op: Op, knobs: Knobs, nodes: int) -> Knobs:
    """Set the knobs that depend only on the number of nodes: order and direction.

    Between hosts memory cannot be pulled from, and every byte should cross once.
    """
    order = knobs.order
    if order is None:
        order = "ring1d" if knobs.path == "medium" else "hierarchical" if nodes > 1 else "direct"
    pulls = op.all_reduces and nodes == 1
    return replace(knobs, order=order, direction=knobs.direction or ("pull" if pulls else "push"))


def resolve(
    op: Op,
    m: int,
    local_n: int,
    local_k: int,
    world: int,
    itemsize: int,
    knobs: Knobs,
    nodes: int = 1,
) -> Knobs:
    """Fill in the fields that the user left open. Pure: equal arguments, equal result on all ranks.

    Args:
        op: the fused op.
        m: rows of the local GEMM.
        local_n: columns of the local GEMM, in elements.
        local_k: depth of the local GEMM, in elements.
        world: number of ranks.
        itemsize: bytes per element.
        knobs: the fields that the user fixed.
        nodes: number of hosts.
    """
    knobs = across_hosts(op, knobs, nodes)
    chunk = ceil_div(m, world)
    medium = knobs.path == "medium"
    row_bytes = itemsize * (local_k if op.gathers else local_n)
    # A tile that is stored directly into its owner's memory must not straddle two owners.
    by_chunk = medium or (knobs.store == "direct" and op.reduces)
    slab = slab_rows(op, m, world) if nodes == 1 else network_slab_rows(op, m, world)
    tile = knobs.tile or ((chunk if medium or (by_chunk and nodes == 1) else slab), local_n)
    tile = (min(tile[0], m), min(tile[1], local_n))
    aligned = world == 1 or (chunk % tile[0] == 0 if nodes > 1 else tile[0] == chunk)
    store = knobs.store or ("direct" if aligned and not medium else "staged")
    if knobs.comm_tile_rows is not None:
        comm_rows = min(knobs.comm_tile_rows, chunk)
    elif medium:
        comm_rows = chunk
    else:
        tile_bytes = COMM_TILE_BYTES if nodes == 1 else NETWORK_TILE_BYTES[op]
        comm_rows = max(tile_bytes // row_bytes, ceil_div(chunk, MAX_COMM_TILES), 1)
        comm_rows = min(comm_rows, chunk if nodes == 1 else message_rows(op, chunk, tile[0]))
    copy_streams = knobs.copy_streams
    if copy_streams is None:
        moved = (world - 1) * chunk * row_bytes
        one_tile = tile[0] >= m and tile[1] >= local_n
        # A rank alone on its host has no copies to make: the network's own threads move its tiles.
        alone = world == nodes
        copy_streams = int(moved > INLINE_BYTES and not alone and not one_tile)
    return replace(
        knobs,
        tile=tile,
        raster=knobs.raster or 1,
        comm_tile_rows=comm_rows,
        swizzle=knobs.swizzle or "rank_shift",
        store=store,
        reduce=knobs.reduce or "local",
        copy_streams=copy_streams,
    )
