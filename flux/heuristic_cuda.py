"""Default knobs of the CUDA backend, for shapes that have no tuned winner.

They differ from the CPU's (flux/heuristic.py), because the costs differ:

* **Communication tiles** are halves or quarters of a chunk, in whole rows of cluster tiles. A copy
  between GPUs costs about 3 us before its first byte (tuning/clusters), in which NVLink at 450 GB/s
  moves 1.3 MB, and 2 to 4 us of the host to enqueue. A tile of 2 MiB or more spends most of its
  time on bytes. Two or four tiles let the GEMM start on a chunk before all of it is there; more of
  them arrive no earlier, since copies of one stream are serial.
* **Raster**: with N = K = 12288 a wave of 132 tiles of 128 x 256 covers less than three rows of
  tiles, so with raster 1 all of B (302 MB) streams through in every wave of some 142 us: 2.2 TB/s,
  half of what the memory of an H200 does. Bands of 8 rows of clusters of 256 x 256 share columns of
  B: 0.7 TB/s, A included. A higher band gains little and asks for more rows at once.
* **Bands end where chunks end.** AllGather: a band that reaches into the next chunk waits for rows
  that have not arrived, while tiles that could run stand behind it. ReduceScatter: no tile waits
  for rows, but a band over several owners completes all of them with its last column. The own rows,
  which need no transfer, then no longer cover the last transfers to others.
* **Push**: the source's copy engine writes and then raises the signal, so no stream waits for a
  word in a peer's memory. **Direct**: every GPU reaches every other at full speed through NVSwitch,
  and a ring would forward what can be sent at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flux.heuristic import across_hosts, ceil_div
from flux.kernels.config import GemmConfig
from flux.knobs import Knobs, Op

COMM_TILE_BYTES = 2 << 20
COMM_TILE_COUNTS = (4, 2)
"""Communication tiles of a chunk, most first, as long as each has COMM_TILE_BYTES."""
MAX_RASTER = 8


@dataclass(frozen=True)
class ClusterTile:
    """What the schedule needs to know of an op's GPU kernels.

    Attributes:
        rows, columns: of the result that a cluster of thread blocks computes at once.
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, configs: Iterable[GemmConfig]) -> ClusterTile:
        """Return the extents that hold a cluster tile of each of these kernels."""
        tiles = [config.cluster_tile for config in configs]
        return cls(max(rows for rows, _ in tiles), max(columns for _, columns in tiles))


def comm_tile_rows(chunk: int, row_bytes: int, cluster_rows: int) -> int:
    """Return the rows of a communication tile: a chunk, or about a half or a quarter of it.

    Args:
        chunk: rows of a rank.
        row_bytes: bytes of a row that travels.
        cluster_rows: rows of a cluster tile. A communication tile of fewer rows lets no GEMM tile
            start.
    """
    for count in COMM_TILE_COUNTS:
        rows = ceil_div(ceil_div(chunk, count), cluster_rows) * cluster_rows
        if rows < chunk and rows * row_bytes >= COMM_TILE_BYTES:
            return rows
    return chunk


def raster(chunk: int, cluster_rows: int) -> int:
    """Return the rows of cluster tiles that are swept together: equal bands, at most 8 rows high.

    Up to 8 rows it is all of the chunk's, min(8, chunk // cluster_rows). 12 rows are two bands of
    6: with 8, every second band would reach into the next chunk.
    """
    rows = max(1, chunk // cluster_rows)
    return ceil_div(rows, ceil_div(rows, MAX_RASTER))


def resolve_cuda(
    op: Op,
    m: int,
    local_n: int,
    local_k: int,
    world: int,
    itemsize: int,
    knobs: Knobs,
    cluster: ClusterTile,
    nodes: int = 1,
) -> Knobs:
    """Fill in the fields that the user left open. Pure: equal arguments, equal result on all ranks.

    Args:
        op: the fused op.
        m, local_n, local_k: extents of the local GEMM, in elements.
        world: number of ranks.
        itemsize: bytes of an element that travels.
        knobs: what the user fixed.
        cluster: of the op's kernels, the same on all ranks.
        nodes: number of sets of ranks that share memory.
    """
    # Owners pull results of GemmAR on a CPU; here the reduction stores them into all ranks' memory.
    knobs = across_hosts(op, replace(knobs, direction=knobs.direction or "push"), nodes)
    chunk = ceil_div(m, world)
    row_bytes = itemsize * (local_k if op is Op.ag_gemm else local_n)
    comm_rows = knobs.comm_tile_rows
    if comm_rows is None:
        whole = knobs.path == "medium"
        comm_rows = chunk if whole else comm_tile_rows(chunk, row_bytes, cluster.rows)
    # A schedule whose GEMM tiles are stored directly has tiles inside one owner's rows. The kernel
    # has no such limit: it stores a tile once per owner.
    tile = knobs.tile or (chunk if knobs.store == "direct" else cluster.rows, cluster.columns)
    return replace(
        knobs,
        tile=(min(tile[0], m), min(tile[1], local_n)),
        raster=knobs.raster or raster(chunk, cluster.rows),
        comm_tile_rows=min(comm_rows, chunk),
        swizzle=knobs.swizzle or "rank_shift",
        store=knobs.store or "staged",
        reduce=knobs.reduce or "local",
        copy_streams=1 if knobs.copy_streams is None else knobs.copy_streams,
    )
