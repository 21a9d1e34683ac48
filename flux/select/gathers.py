"""Predict what GPUs of one node wait for: links, and the last wave of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flux.core.problem import Problem, ceil_div
from flux.machine.cluster import Cluster, Link, bytes_per_ms
from flux.select.hardware import (
    BESIDE_GBS,
    COPY_SHARE,
    LAUNCH_US,
    MEMORY_COPY_SHARE,
    PUSH_US,
    SIGNAL_US,
    STORE_SHARE,
    SUM_US,
    blocks_per_wave,
    duplex_share,
)
from flux.select.heuristic import awaits_entries, copies_own_rows
from flux.select.share import gemm_units

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.kernels.config import GemmConfig


def copied_ms(bytes_ms: float, copies: int, link: Link) -> float:
    """Return the time of copies, each of which begins when the one before it ends.

    Args:
        bytes_ms: of all of them, at the link's nominal speed.
        copies: of one stream.
        link: that they take.
    """
    return bytes_ms / (COPY_SHARE * duplex_share(link)) + 1e-3 * (copies - 1) * link.latency_us


def entered_ms(problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig) -> float:
    """Return the time ahead of an AllGather's kernel: of entries, and a copy of own rows."""
    ahead = 1e-3 * SIGNAL_US["cuda"] if awaits_entries(problem, knobs) else 0.0
    if copies_own_rows(problem, knobs, kernel.tile[0]):
        moved = 2.0 * problem.chunk * problem.row_bytes
        speed = cluster.device.memory_gbs * 1e6 * MEMORY_COPY_SHARE
        ahead += 1e-3 * LAUNCH_US["cuda"] + moved / speed
    return ahead


def _chunk_ms(problem: Problem, cluster: Cluster) -> float:
    link = cluster.link
    nbytes = problem.chunk * problem.row_bytes
    return nbytes / bytes_per_ms(link.gbs * STORE_SHARE * duplex_share(link))


def sent_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time in which multiprocessors of all ranks store a chunk at each other rank."""
    moved = (problem.world - 1) * _chunk_ms(problem, cluster)
    return max(moved, _crossing_ms(problem, cluster, STORE_SHARE))


def _crossing_ms(problem: Problem, cluster: Cluster, share: float) -> float:
    """Return the time of what crosses between processors, at a share of that link's speed.

    Over PCIe that is half of the ranks' rows, once for each rank behind.
    """
    link, world = cluster.link, problem.world
    if link.kind != "pcie" or not link.numa_gbs or cluster.numa_domains != 2:
        return 0.0
    crossing = world // 2 * ceil_div(world, 2) * problem.chunk * problem.row_bytes
    return crossing / bytes_per_ms(link.numa_gbs * share)


def copied_partials_ms(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig, whole: float
) -> float:
    """Return the time of a ReduceScatter by copy engines that its GEMM does not hide.

    The first copy begins when a communication tile is computed, and the bands that hold it, the
    last when the rows of an owner are. A signal is in front of each copy, and one behind it.
    """
    link, world = cluster.link, problem.world
    moved = (world - 1) * problem.chunk * problem.row_bytes / bytes_per_ms(link.gbs)
    copies = copied_ms(moved, world - 1, link) + 2e-3 * (world - 1) * SIGNAL_US["cuda"]
    copies = max(copies, _crossing_ms(problem, cluster, COPY_SHARE))
    band = (knobs.raster or 1) * kernel.cluster_tile.rows
    rows = min(max(knobs.comm_tile_rows or problem.chunk, band), problem.m)
    first = whole * rows / problem.m
    last = copies / (world - 1) * (min(rows / problem.chunk, 1.0) if world == 2 else 1.0)
    behind = max(first + copies, whole * (world - 1) / world + last)
    return max(0.0, behind - whole)


def pushed_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of an AllGather whose rows the blocks of a GEMM push."""
    signal_us = cluster.link.latency_us + SIGNAL_US["cuda"]
    return sent_ms(problem, cluster) + 1e-3 * (PUSH_US + signal_us)


def summed_ms(
    problem: Problem,
    cluster: Cluster,
    kernel: GemmConfig | None,
    whole: float,
    *,
    in_kernel: bool = True,
    by_switch: bool = False,
) -> float:
    """Return the time of an AllReduce behind its GEMM.

    Partials leave with their tiles, those of the last wave behind all tiles. Sums follow. On other
    paths ranks enter, and a kernel that meets and copies of result and status are behind the sums.

    A switch that adds up reads all partials of a rank from its memory, behind the tiles, and takes
    each sum once.
    """
    sent = sent_ms(problem, cluster)
    last = 1.0 / (1 if kernel is None else waves(problem, cluster, kernel))
    late = max(sent * last, sent - whole * (1.0 - last))
    signal = 1e-3 * (cluster.link.latency_us + SIGNAL_US["cuda"])
    steps_us = SUM_US if in_kernel else SIGNAL_US["cuda"] + 3 * LAUNCH_US["cuda"]
    if by_switch:
        late, sent = 0.0, (problem.world + 1) * _chunk_ms(problem, cluster)
    # Sums of tiles that came earlier leave meanwhile; on other paths behind the last one's signal.
    sums = max(sent, signal) if in_kernel else sent + signal
    return late + sums + signal + 1e-3 * steps_us


def own_sums_ms(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig, whole: float
) -> float:
    """Return the time of the sums of a ReduceScatter that its GEMM does not hide.

    A reduction that follows is a launch behind the GEMM. Idle warps of the kernel sum the tiles of
    own rows while later ones, the last of all, multiply.
    """
    speed = bytes_per_ms(cluster.device.memory_gbs * MEMORY_COPY_SHARE)
    nbytes = problem.chunk * problem.row_bytes * (problem.world + 1)
    if knobs.reduce != "in_kernel":
        return nbytes / speed + 1e-3 * LAUNCH_US["cuda"]
    own = whole / problem.world
    last = min(own, whole / waves(problem, cluster, kernel))
    beside = (own - last) * bytes_per_ms(BESIDE_GBS * gemm_units(problem, cluster, knobs))
    return max(nbytes - beside, nbytes * last / own) / speed + 1e-3 * SUM_US / 2


def waves(problem: Problem, cluster: Cluster, kernel: GemmConfig) -> int:
    """Return how many tiles the busiest block computes. In the last wave all rows must be there."""
    rows, columns = kernel.tile[:2]
    down = max(ceil_div(problem.m, rows), problem.experts)  # a tile has rows of one expert
    tiles = down * ceil_div(problem.local[0], columns)
    return ceil_div(tiles, blocks_per_wave(kernel, gemm_units(problem, cluster)))
