"""Knobs and schedule of an all-to-all (flux.ulysses): its winners, and on GPUs its cost model.

Inside a host blocks are written where their rank reads them, so tiles would gain nothing, and the
unfused path only adds copies. Between hosts a block leaves in tiles. Each costs 0.1 to 2 ms of the
core that multiplies (flux/select/heuristic.py) and packs the weight again, so they have TILE_BYTES
at least, and a block has at most MAX_TILES.

On GPUs the blocks of GemmAllToAll travel whole, each behind the columns of its rank. Rows of
AllToAllGemm arrive in tiles of whole rows of GEMM tiles, a copy for each peer and packed tensor,
of GPU_TILE_BYTES at least: streams pause some microseconds between copies. Bands of a GEMM have
about as many tiles as run at once. Without winners a call takes the path that the model finds
faster; nothing of this has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from flux.core.knobs import AllToAllOp, ClusterTile, Knobs, Topology
from flux.core.problem import ceil_div, round_up
from flux.core.schedule import TileSchedule, Transfer, Visit
from flux.core.sparse_problem import SparseProblem
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster, DeviceSpec, bytes_per_ms
from flux.select.cost import TILE, all_to_all_ms, memory_ms, sliced_gemm_ms
from flux.select.gathers import copied_ms
from flux.select.hardware import (
    ELEMENTWISE_SHARE,
    LAUNCH_US,
    LIBRARY_LATENCY_US,
    MEMORY_COPY_SHARE,
    NETWORK_SHARE,
    SIGNAL_US,
)
from flux.select.share import slowdown

TILE_BYTES = 1 << 18
"""Bytes of a communication tile between hosts, at least."""
MAX_TILES = 8
"""Communication tiles of a block, at most."""
GPU_TILE_BYTES = 2 << 20
GPU_MAX_TILES = 4
GPU_BAND_TILES = 128
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
    cluster: ClusterTile | None = None,
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
        cluster: cluster tile of the GPU's kernel; None: on a CPU.

    Raises:
        ValueError: the sizes or knobs are illegal.
    """
    return _block_schedule(op, tuple(rows), sizes, row_bytes, rank, topology, knobs, cluster)


def _gpu_sizes(op: AllToAllOp, chunk: int, row_bytes: int, cluster: ClusterTile) -> tuple[int, int]:
    """Return the rows of a communication tile, and the rows or columns of tiles in a band."""
    in_chunk = ceil_div(chunk, cluster.rows)
    if op is AllToAllOp.gemm_all_to_all:
        return chunk, min(max(GPU_BAND_TILES // in_chunk, 1), MAX_TILES)
    rows = max(ceil_div(chunk, GPU_MAX_TILES), ceil_div(GPU_TILE_BYTES, row_bytes))
    rows = min(round_up(rows, cluster.rows), chunk)
    return rows, min(ceil_div(rows, cluster.rows), MAX_TILES)


@lru_cache(maxsize=1024)
def _block_schedule(
    op: AllToAllOp,
    rows: tuple[int, ...],
    sizes: tuple[int, int],
    row_bytes: int,
    rank: int,
    topology: Topology,
    knobs: Knobs,
    cluster: ClusterTile | None,
) -> TileSchedule:
    reason = reason_illegal(knobs)
    if reason is not None:
        raise ValueError(reason)
    chunk = max(rows)
    tile_rows, raster = max(ceil_div(chunk, MAX_TILES), TILE_BYTES // row_bytes, 1), 1
    if cluster is not None:
        tile_rows, raster = _gpu_sizes(op, chunk, row_bytes, cluster)
    tile_rows = min(knobs.comm_tile_rows or tile_rows, chunk)
    knobs = replace(
        knobs,
        tile=(tile_rows, sizes[0]),
        raster=raster,
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


class GpuBlocks(NamedTuple):
    """The order of a GPU's call (csrc/cuda_host/cuda_op_exchange.cpp), as ``TileSchedule`` has it.

    Attributes:
        knobs: all fields set.
        visits: tiles of the GEMM of the own rows; they wait for two signals of each tile of rows.
        transfers: AllToAllGemm: tiles of rows of the peers' blocks, near ones and far ones in one
            order. Behind the last of either kind is a signal; -1: none.
        peers: GemmAllToAll: whose blocks leave in this order, each behind its ``columns``.
        columns: by rank, of tiles.
    """

    knobs: Knobs
    visits: tuple[Visit, ...]
    transfers: tuple[Transfer, ...]
    peers: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]


def gpu_blocks(
    problem: SparseProblem, rank: int, topology: Topology, knobs: Knobs, tile: ClusterTile
) -> GpuBlocks:
    """Return the order of a rank's call; ``tile``: the cluster tile of its kernel."""
    op, world, lanes = AllToAllOp[problem.name], problem.world, problem.lanes
    of_ranks = [problem.rows(r) for r in range(world)]
    rows = [end - begin for begin, end in of_ranks]
    sizes = problem.local, int(problem.row_bytes)
    knobs = block_schedule(op, rows, *sizes, rank, topology, knobs, tile).knobs
    span, raster = knobs.comm_tile_rows or 1, knobs.raster or 1
    first = rank // lanes * lanes
    # Of other hosts another rank of each rank at any step.
    hosts = range(lanes, world, lanes)
    far = [
        (first + host) % world + (rank + step) % lanes for host in hosts for step in range(lanes)
    ]
    near = [first + (rank + step) % lanes for step in range(1, lanes)]
    spec, wide = problem.spec(), tile.columns
    columns = tuple(
        tuple(
            c
            for begin, end in spec.columns_of(world, r)
            for c in range(begin // wide, ceil_div(end, wide))
        )
        for r in range(world)
    )
    down, across = range(ceil_div(rows[rank], tile.rows)), range(ceil_div(problem.n, wide))
    transfers = []
    if op is AllToAllOp.gemm_all_to_all:
        across_ = dict.fromkeys(c for peer in (*far, *near, rank) for c in columns[peer])
        order = [(row, column) for column in across_ for row in down]
    else:
        bands = [down[at : at + raster] for at in range(0, len(down), raster)]
        order = [(row, column) for band in bands for column in across for row in band]
        base, end = of_ranks[rank]
        for number, begin in enumerate(range(base, end, span)):
            for kind, peers in enumerate((near, far)):
                for step, peer in enumerate(peers):
                    signal = 2 * number + kind if peer == peers[-1] else -1
                    rows_ = begin, min(end, begin + span)
                    transfers.append(
                        Transfer(step, peer, rank, rank, number, *rows_, signal, False)
                    )
    visits = []
    for row, column in order:
        begin, end = row * tile.rows, min((row + 1) * tile.rows, rows[rank])
        waits = 2 * (begin // span), 2 * ceil_div(end, span)
        visits.append(
            Visit(begin, end, column * wide, min((column + 1) * wide, problem.n), waits, -1, (0, 0))
        )
    return GpuBlocks(knobs, tuple(visits), tuple(transfers), (*far, *near), columns)


def own_gemm_ms(problem: SparseProblem, device: DeviceSpec, columns: int) -> float:
    """Return the time of a GEMM of a rank's own rows."""
    shape = (problem.chunk, columns, problem.k)
    return sliced_gemm_ms(shape, problem.dtype, problem.itemsize, device)


def unfused_parts(problem: SparseProblem, cluster: Cluster) -> dict[str, float]:
    """Return the parts of an unfused call on GPUs, in the order of AllToAllGemm, in ms."""
    device, world = cluster.device, problem.world
    sent = float(world * problem.chunk * problem.row_bytes)
    one_pass = memory_ms(device, 2 * sent, ELEMENTWISE_SHARE) + 1e-3 * LAUNCH_US["cuda"]
    library = all_to_all_ms(sent, world, problem.lanes, cluster, cluster.network.gbs)
    gemm = own_gemm_ms(problem, device, problem.n)
    if problem.name == "gemm_all_to_all":  # one of each rank's heads
        gemm = world * own_gemm_ms(problem, device, problem.local[0])
    library += 1e-3 * LIBRARY_LATENCY_US["cuda"]
    return {"own heads": one_pass, "AllToAll": library, "all heads": one_pass, "GEMM": gemm}


def predicted_ms(problem: SparseProblem, cluster: Cluster, path: str) -> float:
    """Return the time of a call on GPUs.

        unfused         GEMM of each rank's heads, or of all | library | a pass over memory each way
        GemmAllToAll    GEMM, columns of one rank after the other | copies, a block behind | a pass
        AllToAllGemm    a pass | copies | GEMM, a tile of rows behind

    Between nodes a block, or its tile, is one message, beside the copies.

    Args:
        problem: the op and its sizes.
        cluster: devices and links.
        path: fused | unfused.
    """
    device, world, chunk = cluster.device, problem.world, problem.chunk
    gemm_first = problem.name == "gemm_all_to_all"
    sent = float(world * chunk * problem.row_bytes)
    one_pass = memory_ms(device, 2 * sent, ELEMENTWISE_SHARE) + 1e-3 * LAUNCH_US["cuda"]
    lanes = problem.lanes
    if path == "unfused":
        return sum(unfused_parts(problem, cluster).values())
    gemm = own_gemm_ms(problem, device, problem.n) * slowdown(problem.dense, cluster, Knobs(), None)
    op = AllToAllOp[problem.name]
    rows, _ = _gpu_sizes(op, chunk, int(problem.row_bytes), ClusterTile(*TILE))
    tiles, peers = ceil_div(chunk, rows), world - 1
    link = (lanes - 1) / world * sent / bytes_per_ms(cluster.link.gbs)
    copies = copied_ms(link, (lanes - 1) * tiles * len(problem.heads), cluster.link)
    launch, signal = 1e-3 * LAUNCH_US["cuda"], 1e-3 * SIGNAL_US["cuda"]
    flags = tiles * (2 * peers if gemm_first else 1) * signal
    copies += flags
    if problem.nodes > 1:
        block = sent / world
        port = min(cluster.network.gbits / 8, cluster.network.gbs / lanes)
        message = block / bytes_per_ms(port * NETWORK_SHARE)
        message += memory_ms(device, 2 * block, MEMORY_COPY_SHARE)
        step = 1e-3 * cluster.network.latency_us + launch + (2 * signal if gemm_first else 0.0)
        copies = max(copies, (world - lanes) * (message + tiles * step))
    if not gemm_first:
        return one_pass + signal + launch + max(copies / tiles + gemm, copies + gemm / tiles)
    high, wide = TILE
    waves = ceil_div(ceil_div(chunk, high) * ceil_div(problem.n, wide), device.units)
    first = gemm / min(world, waves)
    behind = (1.0 + 1.0 / world) * one_pass + 2 * launch + signal
    return signal + behind + max(gemm, gemm - first + copies / peers, first + launch + copies)


@dataclass(frozen=True)
class ModelledPath:
    """The faster path by the cost model: a ``Choice`` (flux/select/choose.py)."""

    problem: SparseProblem
    cluster: Cluster
    kernel: GemmConfig | None = None
    most_tiles: int = 0
    variants: tuple[Knobs, ...] = (Knobs(path="fused"), Knobs(path="unfused"))

    def knobs(self, m: int) -> Knobs:
        """Return the knobs of least modelled time."""
        problem = replace(self.problem, m=m)
        times = [predicted_ms(problem, self.cluster, way.path or "fused") for way in self.variants]
        return self.variants[times.index(min(times))]
