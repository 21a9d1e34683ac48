"""Default knobs of the CUDA backend, for shapes without tuning results.

They differ from the CPU's (flux/core/heuristic.py), because the costs differ:

* **Communication tiles** are halves or quarters of a chunk, in whole rows of cluster tiles. A copy
  between GPUs costs about 3 us before its first byte (tuning/clusters), in which NVLink at 450 GB/s
  moves 1.3 MB, and 2 to 4 us of host time to enqueue. A tile of 2 MiB or more spends most of its
  time on bytes. With two or four tiles the GEMM can start on a chunk before all of it has arrived.
  More tiles arrive no earlier, because copies of one stream are serial.
* **Raster**: with N = K = 12288 a wave of 132 tiles of 128 x 256 covers less than three rows of
  tiles. So with raster 1 all of B (302 MB) streams through in every wave of about 142 us: 2.2 TB/s,
  half of the memory bandwidth of an H200. Bands of 8 rows of clusters of 256 x 256 share columns of
  B: 0.7 TB/s, A included. A higher band gains little and needs more rows at once.
* **Bands end where chunks end.** AllGather: a band that reaches into the next chunk waits for rows
  that have not arrived, and blocks tiles behind it that could run. ReduceScatter: no tile waits for
  rows, but a band over several owners completes all of them with its last column. Then the own
  rows, which need no transfer, no longer hide the last transfers to other ranks.
* **Push**: the source's copy engine writes and then raises the signal, so no stream waits for a
  word in a peer's memory. **Direct**: NVSwitch connects every pair of GPUs at full speed. A ring
  would only forward data that can be sent at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from flux.core.heuristic import MAX_COMM_TILES, across_hosts
from flux.core.integers import ceil_div, round_up
from flux.core.knobs import Knobs, Op

COMM_TILE_BYTES = 2 << 20
COMM_TILE_COUNTS = (4, 2)
"""Communication tiles per chunk to try, largest first; each must have COMM_TILE_BYTES."""
MAX_RASTER = 8


class HasClusterTile(Protocol):
    """The part of flux.kernels.config.GemmConfig that schedules depend on."""

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """(rows, columns) of the result that a cluster of thread blocks computes at once."""
        ...


@dataclass(frozen=True)
class ClusterTile:
    """The properties of an op's GPU kernels that schedules depend on.

    Attributes:
        rows: rows of the result that a cluster of thread blocks computes at once.
        columns: columns of the same.
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, configs: Iterable[HasClusterTile]) -> ClusterTile:
        """Return the smallest extents that hold a cluster tile of each of these kernels."""
        tiles = [config.cluster_tile for config in configs]
        return cls(max(rows for rows, _ in tiles), max(columns for _, columns in tiles))


def comm_tile_rows(chunk: int, row_bytes: int, cluster_rows: int) -> int:
    """Return the rows of a communication tile: a chunk, or about a half or a quarter of it.

    Args:
        chunk: rows of a rank.
        row_bytes: bytes of a row of the communicated matrix.
        cluster_rows: rows of a cluster tile. A communication tile of fewer rows lets no GEMM tile
            start.
    """
    for count in COMM_TILE_COUNTS:
        rows = round_up(ceil_div(chunk, count), cluster_rows)
        if rows < chunk and rows * row_bytes >= COMM_TILE_BYTES:
            return rows
    return chunk


def most_comm_tiles(chunk: int, knobs: Knobs) -> int:
    """Return no less than the most communication tiles that ``resolve_cuda`` cuts a chunk into.

    Args:
        chunk: rows of a chunk at the largest M.
        knobs: the fields that the user fixed.
    """
    if knobs.comm_tile_rows is not None:
        return ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
    return min(chunk, MAX_COMM_TILES)


def raster(chunk: int, cluster_rows: int) -> int:
    """Return the rows of cluster tiles in one sweep: equal bands, at most 8 rows high.

    Up to 8 rows the band covers the whole chunk, min(8, chunk // cluster_rows). 12 rows become two
    bands of 6: with bands of 8, every second band would reach into the next chunk.
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
        m: rows of the local GEMM.
        local_n: columns of the local GEMM, in elements.
        local_k: depth of the local GEMM, in elements.
        world: number of ranks.
        itemsize: bytes per element of the communicated matrix.
        knobs: the fields that the user fixed.
        cluster: cluster tile of the op's kernels, the same on all ranks.
        nodes: number of sets of ranks that share memory.
    """
    # On a CPU the owners' results of GemmAR are pulled; here the reduction stores them into all
    # ranks' memory.
    knobs = across_hosts(op, replace(knobs, direction=knobs.direction or "push"), nodes)
    chunk = ceil_div(m, world)
    row_bytes = itemsize * (local_k if op.gathers else local_n)
    comm_rows = knobs.comm_tile_rows
    if comm_rows is None:
        whole = knobs.path == "medium"
        comm_rows = chunk if whole else comm_tile_rows(chunk, row_bytes, cluster.rows)
    # In a schedule with direct stores, each GEMM tile lies inside one owner's rows. The kernel
    # itself has no such limit: it stores a tile once per owner.
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
