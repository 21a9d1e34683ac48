"""Default knobs of the CPU backend, for shapes that nobody has tuned.

Two measurements on a 2-core AVX-512 machine shape them (benchmarks/README.md has the commands):

* A GEMM cut into slabs of rows packs the weight once per slab. Slabs of 512 rows and more cost 1 to
  4% over the whole GEMM, slabs of 256 rows 10 to 25%.
* Handing work to the copy thread costs two wake-ups, 50 to 100 us together, in which the calling
  thread copies some 256 KiB by itself.
"""

from __future__ import annotations

from dataclasses import replace

from flux.knobs import Knobs, Op

MIN_SLAB_ROWS = 512
COMM_TILE_BYTES = 1 << 20
MAX_COMM_TILES = 64
INLINE_BYTES = 256 << 10


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for positive b."""
    return -(-a // b)


def slab_rows(m: int, world: int) -> int:
    """Rows of a GEMM tile: whole chunks, at least MIN_SLAB_ROWS of them unless the problem ends."""
    chunk = ceil_div(m, world)
    if m < 2 * MIN_SLAB_ROWS:
        return m
    return min(m, chunk * ceil_div(MIN_SLAB_ROWS, chunk))


def resolve(
    op: Op, m: int, local_n: int, local_k: int, world: int, itemsize: int, knobs: Knobs
) -> Knobs:
    """Fill in the fields that the user left open. Pure: equal arguments, equal result on all ranks.

    Args:
        op: the fused op.
        m, local_n, local_k: extents of the local GEMM, in elements.
        world: number of ranks.
        itemsize: bytes per element.
        knobs: what the user fixed.
    """
    chunk = ceil_div(m, world)
    medium = knobs.path == "medium"
    row_bytes = itemsize * (local_k if op is Op.ag_gemm else local_n)
    tile = knobs.tile or ((chunk if medium else slab_rows(m, world)), local_n)
    tile = (min(tile[0], m), min(tile[1], local_n))
    aligned = tile[0] == chunk or world == 1
    store = knobs.store or ("direct" if aligned and not medium else "staged")
    if knobs.comm_tile_rows is not None:
        comm_rows = min(knobs.comm_tile_rows, chunk)
    elif medium:
        comm_rows = chunk
    else:
        comm_rows = max(COMM_TILE_BYTES // row_bytes, ceil_div(chunk, MAX_COMM_TILES), 1)
        comm_rows = min(comm_rows, chunk)
    copy_streams = knobs.copy_streams
    if copy_streams is None:
        moved = (world - 1) * chunk * row_bytes
        copy_streams = int(moved > INLINE_BYTES and world > 1)
    return replace(
        knobs,
        tile=tile,
        raster=knobs.raster or 1,
        comm_tile_rows=comm_rows,
        direction=knobs.direction or ("pull" if op is Op.gemm_ar else "push"),
        order=knobs.order or ("ring1d" if medium else "direct"),
        swizzle=knobs.swizzle or "rank_shift",
        store=store,
        reduce=knobs.reduce or "local",
        copy_streams=copy_streams,
    )
