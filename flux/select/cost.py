"""Predict the time of a call from data sheets, to prune candidates and for shapes without tuning.

A measurement always takes precedence over the model.

    GEMM    roofline: the larger of operations / peak and bytes / memory bandwidth
    links   alpha-beta: a latency for every transfer, and bytes / bandwidth

    unfused   library collective | GEMM                      the sum
    medium    | chunk | chunk | chunk | chunk |              W steps, each as long as the longer of
              | GEMM  | GEMM  | GEMM  | GEMM  |              its chunk's GEMM and transfer
    fused     copies  ~~~~~~~~~~~~~~~                        the longer of the two, and the first
              GEMM  ==========================               (or last) tile, which is not hidden

A CPU has no copy engine: inside a host copies take their time from the GEMM, and are added.

On a GPU the height of a band of tiles (Knobs.raster) determines how much of A and B each wave of
tiles reads, and how many rows must have arrived before the band can end:

    raster 1   a wave covers few rows and many columns: little of A, much of B, in every wave
    raster 8   a wave covers a square: less of both, but the band waits for 8 rows of tiles
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux.core.heuristic import resolve
from flux.core.heuristic_cuda import ClusterTile, resolve_cuda
from flux.core.integers import ceil_div
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.kernels.config import GemmConfig
from flux.kernels.cost import UNHIDDEN, blocks_per_wave
from flux.machine.cluster import Cluster

LIBRARY_SHARE = {
    "cpu": {Op.ag_gemm: 0.075, Op.gemm_rs: 0.025, Op.gemm_ar: 0.09},
    "cuda": dict.fromkeys(Op, 0.8),
}
"""Share of a link's nominal speed that library collectives reach. gloo sends through sockets: of 10
GB/s in shared memory its all_gather reached 0.75, its reduce_scatter, which is an all_reduce
inside, 0.22 to 0.35, and its all_reduce, which moves twice as much, 0.9 (benchmarks/results/cpu,
comm_ms). NCCL's large messages reach about 80%."""
LIBRARY_LATENCY_US = {"cpu": 2000.0, "cuda": 15.0}
"""On the CPU from the same files, at M = 1."""
GEMM_SHARE = {"cpu": 0.8, "cuda": 0.75}
"""Share of the peak that a large GEMM reaches."""
SIGNAL_US = {"cpu": 3.0, "cuda": 1.0}
"""Time to raise and see the signal of one communication tile."""
SLAB_COST_ROWS = 50.0
"""A GEMM cut into slabs packs its weight again for each slab. The cost equals that of this many
more rows (5% of 1024 rows, 10% of 512, 20% of 256: flux/core/heuristic.py)."""
ENGINE_US = 60.0
"""Time to hand copies to another thread, on a CPU: two wake-ups."""


def resolved(problem: Problem, knobs: Knobs, kernel: GemmConfig | None = None) -> Knobs:
    """Return the knobs with every field set, as the op would set them; ``kernel``: on a GPU."""
    p = problem
    sizes = (p.op, p.m, *p.local, p.world, p.itemsize, knobs)
    if kernel is None:
        return resolve(*sizes, p.nodes)
    return resolve_cuda(*sizes, ClusterTile.of([kernel]), p.nodes)


@dataclass(frozen=True)
class Prediction:
    """Parts of a call, in ms; ``total`` is the time of the call."""

    gemm_ms: float
    comm_ms: float
    exposed_ms: float

    @property
    def total(self) -> float:
        """Time of the call, in ms."""
        return self.gemm_ms + self.exposed_ms


def gemm_ms(problem: Problem, cluster: Cluster, rows: int | None = None) -> float:
    """Return the time of a whole local GEMM of ``rows`` rows; by default all rows."""
    m = problem.m if rows is None else rows
    n, k = problem.local
    device = cluster.device
    peak = device.tflops.get(problem.dtype) or min(device.tflops.values())
    operations = 2.0 * m * n * k / (peak * 1e12 * GEMM_SHARE[device.kind])
    moved = problem.itemsize * (m * k + n * k + m * n) / (device.memory_gbs * 1e9)
    return 1e3 * max(operations, moved)


def _transfer_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of one rank's copies in one direction: W - 1 chunks.

    Transfers between hosts include all ranks of a host, which share its ports. With the
    hierarchical order, every row crosses to each other host once.
    """
    chunk_bytes = problem.chunk * problem.row_bytes
    lanes = ceil_div(problem.world, problem.nodes)
    twice = 2 if problem.op.all_reduces else 1
    inside = twice * (lanes - 1) * chunk_bytes / _bytes_per_ms(cluster.link.gbs)
    if problem.nodes == 1:
        return inside
    across = twice * (problem.nodes - 1) * lanes * chunk_bytes
    share = LIBRARY_SHARE["cuda"][problem.op] if cluster.device.kind == "cuda" else 1.0
    return max(inside, across / _bytes_per_ms(cluster.network.gbs) / share)


def _bytes_per_ms(gbs: float) -> float:
    # If the speed is unknown, assume a slow link: 1 Gbit/s.
    return (gbs or 0.125) * 1e6


def library_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of the library's collective alone; 0 for one rank."""
    lanes = ceil_div(problem.world, problem.nodes)
    shard = float(problem.chunk * problem.row_bytes)
    return collective_ms(problem.op, shard, problem.world, lanes, cluster)


def collective_ms(
    op: Op,
    shard: float,
    size: int,
    per_host: int,
    cluster: Cluster,
    network_gbs: float | None = None,
    start_us: float | None = None,
) -> float:
    """Return the time of a library's collective: the one model of it, also of `flux plan`.

    NCCL's AllGather and ReduceScatter are a ring through all ranks. So W - 1 shards pass each link,
    those between hosts too, and a shard takes the latency of each hop on its way. An AllReduce is
    both. A hierarchical collective would send (hosts - 1) / hosts of the data between hosts, half
    as much on two hosts; docs/use/simulator.md says why the published times are those of a ring.
    gloo's between hosts, on a CPU, is rated as if it were hierarchical.

    Args:
        op: whose collective it is: AllGather, ReduceScatter or AllReduce.
        shard: bytes of one rank's part.
        size: ranks.
        per_host: of them on one host.
        cluster: devices and links.
        network_gbs: GB/s of the ports that these ranks have of their host; None: all of them.
        start_us: time until its first byte moves; None: the library's.
    """
    if size == 1:
        return 0.0
    kind, link, network = cluster.device.kind, cluster.link, cluster.network
    hosts, share = ceil_div(size, per_host), LIBRARY_SHARE[kind][op]
    speed = _bytes_per_ms(link.library_gbs or link.gbs * share)
    ports = _bytes_per_ms(network.gbs if network_gbs is None else network_gbs)
    near = (size - 1) * shard / speed
    if kind == "cuda":
        far = (size - 1) * shard / (ports * share)
    else:
        near = (per_host - 1) * shard / speed
        far = (hosts - 1) * per_host * shard / ports
    hops_us = (size - hosts) * link.latency_us + (hosts - 1) * network.latency_us
    passes = 2 if op.all_reduces else 1
    starts = passes if kind == "cuda" else 1  # gloo's was measured for all three alike
    start_ms = 1e-3 * (LIBRARY_LATENCY_US[kind] if start_us is None else start_us)
    moved = max(near, far) if hosts > 1 else near
    return passes * (moved + hops_us * 1e-3) + starts * start_ms


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
    return 1e3 * moved / (cluster.device.memory_gbs * 1e9)


def raster_ms(problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int) -> float:
    """Return the extra time of a band of this height over the best height, as libraries use."""
    whole = gemm_ms(problem, cluster)

    def cost(height: int) -> float:
        moved = traffic_ms(problem, cluster, kernel, height)
        return max(0.0, moved - whole) + UNHIDDEN * min(moved, whole)

    return cost(raster) - min(cost(1 << power) for power in range(6))


def predict(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig | None = None
) -> Prediction:
    """Return the predicted time of a call with these knobs on this cluster.

    Args:
        problem: the op and its sizes.
        cluster: the devices and links.
        knobs: any field may be open.
        kernel: on a GPU, the kernel that runs the call, if known.
    """
    knobs = resolved(problem, knobs, kernel)
    whole, world = gemm_ms(problem, cluster), problem.world
    if world == 1:
        return Prediction(whole, 0.0, 0.0)
    kind = cluster.device.kind
    if knobs.path == "unfused":
        comm = library_ms(problem, cluster)
        return Prediction(whole, comm, comm)
    assert knobs.comm_tile_rows is not None and knobs.tile is not None
    tiles = ceil_div(problem.chunk, knobs.comm_tile_rows)
    transfers = (world - 1) * tiles
    comm = _transfer_ms(problem, cluster) + transfers * SIGNAL_US[kind] * 1e-3
    overhead = _cut_ms(problem, cluster, knobs, whole)
    if kind == "cpu" and knobs.copy_streams:
        overhead += ENGINE_US * 1e-3
    if kind == "cpu" and problem.nodes == 1:
        # Partials that the GEMM writes directly into their owner's memory need no copy.
        stored = problem.op.reduces and knobs.store == "direct" and knobs.path == "fused"
        comm = comm * (0.5 if stored else 1.0) + cluster.link.latency_us * 1e-3
        return Prediction(whole, comm, comm + overhead)
    latency = cluster.link.latency_us if problem.nodes == 1 else cluster.network.latency_us
    if knobs.path == "medium":
        overhead += world * latency * 1e-3  # the small GEMMs of a ring do not fill the device
        exposed = max(0.0, comm - whole * (world - 1) / world) + comm / world
    else:
        exposed = _fused_exposed_ms(problem, knobs, whole, comm, transfers)
        if kernel is not None and knobs.raster is not None:
            exposed += _band_exposed_ms(problem, knobs, whole, comm)
            overhead += max(0.0, raster_ms(problem, cluster, kernel, knobs.raster))
    return Prediction(whole, comm, exposed + latency * 1e-3 + overhead)


def _fused_exposed_ms(
    problem: Problem, knobs: Knobs, whole: float, comm: float, transfers: int
) -> float:
    """Return the time of a fused kernel's transfers that the GEMM does not hide.

    AllGather      | own rows | others', as they come |  others' last tile has to come first
    ReduceScatter  | others' rows | own rows |          others' first tile has to be there
                                                        first, and their last may outlast the rest
    """
    assert knobs.comm_tile_rows is not None and knobs.tile is not None
    tile = whole * min(1.0, min(knobs.comm_tile_rows, knobs.tile[0]) / max(problem.m, 1))
    exposed = max(0.0, comm + tile - whole)
    if problem.op.gathers:
        return exposed
    return max(exposed, comm / transfers - whole / problem.world)


def _band_exposed_ms(problem: Problem, knobs: Knobs, whole: float, comm: float) -> float:
    """Return the exposed transfer time of a band over several chunks, beyond that of single tiles.

    AllGather: the last band ends after its last chunk has arrived, and takes its share of the GEMM.
    ReduceScatter: the last band's owners get the last of their rows with its last column.
    """
    assert knobs.raster is not None and knobs.tile is not None
    chunk = problem.chunk
    band = min(knobs.raster * knobs.tile[0], problem.m)
    beyond = min(max(band / chunk - 1.0, 0.0), problem.world - 1.0)
    if problem.op.gathers:
        return min(comm, whole * band / problem.m) * beyond / (problem.world - 1.0)
    return comm * beyond / (problem.world - 1.0) * min(1.0, chunk / band)


def _cut_ms(problem: Problem, cluster: Cluster, knobs: Knobs, whole: float) -> float:
    """Return the cost of cutting the GEMM."""
    assert knobs.tile is not None
    if cluster.device.kind == "cpu":
        slabs = ceil_div(problem.m, knobs.tile[0]) * ceil_div(problem.local[0], knobs.tile[1])
        return whole * (slabs - 1) * SLAB_COST_ROWS / max(problem.m, 1)
    if knobs.path != "medium":
        return 0.0  # a fused kernel runs the same tiles in any case
    return max(0.0, problem.world * gemm_ms(problem, cluster, problem.chunk) - whole)


def choose(problem: Problem, cluster: Cluster, candidates: Sequence[Knobs] | None = None) -> Knobs:
    """Return the candidate of least predicted time, the first of equals.

    By default: the heuristic's knobs (flux/core/heuristic.py), one chunk per rank, and the unfused
    path.
    """
    if candidates is None:
        candidates = (Knobs(), Knobs(path="medium"), Knobs(path="unfused"))
    return min(candidates, key=lambda knobs: predict(problem, cluster, knobs).total)
