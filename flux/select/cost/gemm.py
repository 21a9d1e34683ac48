"""The time of a local GEMM by roofline, of attention, and what memory traffic adds to a GEMM.

On a GPU the height of a band of tiles (Knobs.raster) determines how much of A and B each wave of
tiles reads, and how many rows must have arrived before the band can end:

    raster 1   a wave covers few rows and many columns: little of A, much of B, in every wave
    raster 8   a wave covers a square: less of both, but the band waits for 8 rows of tiles
"""

from __future__ import annotations

from flux.core.integers import ceil_div
from flux.core.problem import Problem
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster, DeviceSpec
from flux.select.cost.cycles import UNHIDDEN, blocks_per_wave
from flux.select.cost.hardware import (
    ATTENTION_SHARE,
    BACKWARD_ATTENTION,
    ELEMENTWISE_SHARE,
    GEMM_SHARE,
    memory_ms,
    operations_per_ms,
)

TILE = (128, 256)
"""Rows and columns of a GEMM's tile on a GPU, where no kernel is known."""


def gemm_ms(problem: Problem, cluster: Cluster, rows: int | None = None) -> float:
    """Return the time of a whole local GEMM of ``rows`` rows; by default all rows.

    Roofline: the larger of operations / (peak * share) and bytes / memory bandwidth. Waves are not
    counted: kernels are ranked by cycles, which count them, and the mean error against the GEMM
    times of docs/use/simulator.md is 1.8% without waves and 4.2% with them on H800, 9.0% and 18.9%
    on A800, 26.5% and 32.5% on L20.
    """
    m = problem.m if rows is None else rows
    shape, device = (m, *problem.local), cluster.device
    return _roofline_ms(shape, problem.dtype, problem.itemsize, device, waves=1.0, share=1.0)


def sliced_gemm_ms(
    shape: tuple[int, int, int], dtype: str, itemsize: int, device: DeviceSpec
) -> float:
    """Return the time of a GEMM [m, n, k] that competes with the same GEMM in slices.

    As ``gemm_ms``, but the last wave of tiles counts as a full one: each slice has one of its own,
    so a plan must not take slices for free. Memory reaches the share of elementwise kernels.
    """
    m, n, _ = shape
    waves = 1.0
    if device.kind == "cuda":
        tiles = ceil_div(m, TILE[0]) * ceil_div(n, TILE[1])
        full = m * n / (TILE[0] * TILE[1] * device.units)
        waves = max(1.0, ceil_div(tiles, device.units) / full) if full else 1.0
    return _roofline_ms(shape, dtype, itemsize, device, waves, ELEMENTWISE_SHARE)


def _roofline_ms(
    shape: tuple[int, int, int],
    dtype: str,
    itemsize: int,
    device: DeviceSpec,
    waves: float,
    share: float,
) -> float:
    m, n, k = shape
    rate = operations_per_ms(device, dtype) * GEMM_SHARE[device.kind]
    moved = itemsize * (m * k + n * k + m * n)
    return max(2.0 * m * n * k * waves / rate, memory_ms(device, moved, share))


def attention_ms(
    shape: tuple[int, int, int, int, int], dtype: str, device: DeviceSpec, *, backward: bool
) -> float:
    """Return the time of causal attention, which computes half of the pairs.

    Args:
        shape: batch, heads, queries, keys, elements of a head.
        dtype: of the operands.
        device: of one rank.
        backward: of its backward.
    """
    batch, heads, queries, keys, dim = shape
    operations = 4.0 * batch * heads * queries * keys * dim / 2
    if backward:
        operations *= BACKWARD_ATTENTION
    return operations / (operations_per_ms(device, dtype) * ATTENTION_SHARE[device.kind])


def traffic_ms(problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int) -> float:
    """Return the time in which memory delivers A and B, once per wave of tiles and band.

    The blocks of a wave read the same k tiles at about the same time, so shared data is read once.
    By the next wave, about 100 us later, L2 holds other data.
    """
    (n, k), (rows, columns) = problem.local, kernel.cluster_tile
    down, across = ceil_div(problem.m, rows), ceil_div(n, columns)
    size = kernel.cluster[0] * kernel.cluster[1]
    clusters = min(max(blocks_per_wave(kernel, cluster.device.units) / size, 1.0), down * across)
    band = min(raster, down)
    wide = min(max(clusters / band, 1.0), across)
    high = max(band, clusters / wide)  # the rest of a wave is in other bands
    waves = down * across / clusters
    moved = waves * (high * rows + wide * columns) * k * kernel.itemsize
    return memory_ms(cluster.device, moved)


def raster_ms(problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int) -> float:
    """Return the extra time of a band of this height over the best height, as libraries use."""
    whole = gemm_ms(problem, cluster)

    def cost(height: int) -> float:
        moved = traffic_ms(problem, cluster, kernel, height)
        return max(0.0, moved - whole) + UNHIDDEN * min(moved, whole)

    return cost(raster) - min(cost(1 << power) for power in range(6))


def gemm_beside_transfers_ms(
    problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int, alone_ms: float
) -> float:
    """Return the time of a GEMM while its op's transfers use the same memory.

    AllGather: a rank receives W - 1 chunks, and sends as many. ReduceScatter: it receives the
    partials of its rows from W - 1 ranks; those that it sends come from multiprocessors. As in
    ``cycles``, a share UNHIDDEN of the shorter of both times is exposed.

    Args:
        problem: op and sizes.
        cluster: devices and links.
        kernel: of the GEMM.
        raster: rows of tiles of a band.
        alone_ms: time of the GEMM without transfers.
    """
    if problem.world == 1:
        return alone_ms
    chunks = (problem.world - 1) * (2 if problem.op.gathers else 1)
    transfers = memory_ms(cluster.device, chunks * problem.chunk * problem.row_bytes)
    busy = alone_ms + max(0.0, raster_ms(problem, cluster, kernel, raster))
    return busy + UNHIDDEN * min(busy, transfers)
