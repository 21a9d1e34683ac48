"""The cost model: times of GEMMs, kernels, collectives and messages. predict.py has calls of ops.

    GEMM        roofline: the larger of operations / peak and bytes / memory bandwidth
    links       alpha-beta: a latency for every hop, and bytes / bandwidth

On a GPU the height of a band of tiles (Knobs.raster) determines how much of A and B each wave of
tiles reads, and how many rows must have arrived before the band can end:

    raster 1   a wave covers few rows and many columns: little of A, much of B, in every wave
    raster 8   a wave covers a square: less of both, but the band waits for 8 rows of tiles

hardware.py has the shares, latencies and overheads, and cycles.py ranks kernels. Ops without tuning
results, the pruner of `flux tune`, the planner and the op simulator call these functions, and have
no formulas of their own. A measurement always takes precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flux.core.knobs import Op
from flux.core.problem import DTYPES, SCALED, Problem, ceil_div
from flux.machine.cluster import Cluster, DeviceSpec, bytes_per_ms
from flux.select.hardware import (
    ATTENTION_SHARE,
    BACKWARD_ATTENTION,
    ELEMENTWISE_SHARE,
    GEMM_SHARE,
    LIBRARY_LATENCY_US,
    LIBRARY_SHARE,
    LOW_LATENCY,
    UNHIDDEN,
    blocks_per_wave,
    duplex_share,
)
from flux.select.share import gemm_units

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig

TILE = (128, 256)
"""Rows and columns of a GEMM's tile on a GPU, where no kernel is known."""
_GRADIENTS = ("dgrad", "wgrad")


# -- devices ---------------------------------------------------------------------------------------


def memory_ms(device: DeviceSpec, nbytes: float, share: float = 1.0) -> float:
    """Return the time in which the memory moves this many bytes, at a share of its speed."""
    return nbytes / (device.memory_gbs * 1e6 * share)


def gemm_ms(
    problem: Problem, cluster: Cluster, rows: int | None = None, slower: float = 1.0
) -> float:
    """Return the time of a whole local GEMM of ``rows`` rows; by default all rows.

    ``slower``: time of multiplying over that on all multiprocessors.

    Roofline: the larger of operations / (peak * share) and bytes / memory bandwidth. Waves are not
    counted: kernels are ranked by cycles, which count them, and the mean error against the GEMM
    times of docs/use/simulator.md is 1.8% without waves and 4.2% with them on H800, 9.0% and 18.9%
    on A800, 26.5% and 32.5% on L20.
    """
    m, (n, k) = problem.m if rows is None else rows, problem.local
    dtype = DTYPES[problem.dtype]
    operands, result = dtype.itemsize, DTYPES[dtype.result].itemsize
    moved = operands * (m * k + problem.experts * n * k) + result * m * n
    return roofline_ms(cluster.device, problem.dtype, 2.0 * m * n * k * slower, moved)


def shuffle_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of the kernel between a library's collective and its grouped GEMM.

    It copies tokens to the rows of their experts, or sums a token's rows; 0 without experts.
    """
    if problem.experts == 1:
        return 0.0
    elements = problem.row_elements * (problem.m + problem.m // problem.topk)
    return memory_ms(cluster.device, problem.itemsize * elements, ELEMENTWISE_SHARE)


def sliced_gemm_ms(
    shape: Sequence[int],
    dtype: str,
    itemsize: int,
    device: DeviceSpec,
    role: str = "fwd",
    *,
    serves: bool = False,
) -> float:
    """Return the time of a GEMM [m, n, k] that competes with the same GEMM in slices.

    As ``gemm_ms``, but the last wave of tiles counts as a full one: each slice has one of its own,
    so a plan must not take slices for free. Memory reaches the share of elementwise kernels. In
    inference less than a wave of tiles is cut along k, weights are stored in ``dtype``, and shape
    has the number of experts, if any.

    ``role``: of its operator; products of a linear differ where they were measured.
    """
    m, n, k, *experts = shape
    weights = float(DTYPES[dtype].itemsize if serves else itemsize) * sum(experts or (1,)) * n * k
    if device.measured is not None:
        role = role if role in _GRADIENTS else "fwd"
        time = device.measured.gemm_ms((m, n, k), dtype, role)
        return max(time, kernel_ms(device, weights)) if experts else time
    waves = 1.0
    if device.kind == "cuda":
        tiles = ceil_div(m, TILE[0]) * ceil_div(n, TILE[1])
        full = m * n / (TILE[0] * TILE[1] * device.units)
        if full and not (serves and tiles < device.units):
            waves = max(1.0, ceil_div(tiles, device.units) / full)
    moved = itemsize * (m * k + m * n) + weights
    operations = 2.0 * m * n * k * waves
    return max(roofline_ms(device, dtype, operations, 0.0), kernel_ms(device, moved))


def kernel_ms(
    device: DeviceSpec,
    nbytes: float,
    function: str = "",
    elements: float = 0.0,
    *,
    backward: bool = False,
) -> float:
    """Return the time of a kernel that moves this many bytes.

    Args:
        device: of one rank.
        nbytes: that it reads and writes.
        function: of torch, whose measured time it takes if there are any; "": of an addition.
        elements: of one of its tensors.
        backward: of the function's backward.
    """
    if device.measured is not None and device.measured.knows("elementwise"):
        return device.measured.kernel_ms(function, elements, nbytes, backward)
    return memory_ms(device, nbytes, device.memory_share or ELEMENTWISE_SHARE)


def roofline_ms(
    device: DeviceSpec,
    dtype: str,
    operations: float,
    moved: float,
    share: float | None = None,
) -> float:
    """Return the time of a kernel; a dtype that the data sheet lacks has the slowest one's peak.

    Args:
        device: of one rank.
        dtype: of the operands.
        operations: of the kernel.
        moved: bytes that it reads and writes.
        share: of the peak that it reaches; None: that of GEMMs.
    """
    share = (device.gemm_share or GEMM_SHARE[device.kind]) if share is None else share
    if dtype == SCALED and device.kind == "cpu":
        dtype = "float32"  # as CPUs multiply it
    rate = 1e9 * (device.tflops.get(dtype) or min(device.tflops.values())) * share
    return max(operations / rate, memory_ms(device, moved))


def attention_ms(
    shape: Sequence[int], dtype: str, device: DeviceSpec, *, backward: bool = False, read: float = 0
) -> float:
    """Return the time of causal attention, which computes half of the pairs.

    Args:
        shape: batch, heads, queries, keys, elements of a head.
        dtype: of the operands.
        device: of one rank.
        backward: of its backward.
        read: bytes that a decode reads; its shape has 1 query, and the width of keys and values.
    """
    if device.measured is not None and device.measured.knows("attention") and not read:
        return device.measured.attention_ms(shape, backward)
    batch, heads, queries, keys, dim = shape
    operations = 4.0 * batch * heads * queries * keys * dim / 2
    if backward:
        operations *= BACKWARD_ATTENTION
    share = device.attention_share or ATTENTION_SHARE[device.kind]
    computing = roofline_ms(device, dtype, operations, 0, share)
    return max(computing, kernel_ms(device, read)) if read else computing


def traffic_ms(problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int) -> float:
    """Return the time in which memory delivers A and B, once per wave of tiles and band.

    The blocks of a wave read the same k tiles at about the same time, so shared data is read once.
    By the next wave, about 100 us later, L2 holds other data.
    """
    (n, k), (rows, columns) = problem.local, kernel.cluster_tile
    down, across = ceil_div(problem.m, rows), ceil_div(n, columns)
    size = kernel.cluster[0] * kernel.cluster[1]
    clusters = min(
        max(blocks_per_wave(kernel, gemm_units(problem, cluster)) / size, 1.0), down * across
    )
    band = min(raster, down)
    wide = min(max(clusters / band, 1.0), across)
    high = max(band, clusters / wide)  # the rest of a wave is in other bands
    waves = down * across / clusters
    moved = waves * (high * rows + wide * columns) * k * kernel.itemsize
    return memory_ms(cluster.device, moved)


def raster_ms(
    problem: Problem, cluster: Cluster, kernel: GemmConfig | None, raster: int | None
) -> float:
    """Return the time of a band of this height beyond the best one, which libraries use."""
    if kernel is None or raster is None:
        return 0.0
    whole = gemm_ms(problem, cluster)

    def cost(height: int) -> float:
        moved = traffic_ms(problem, cluster, kernel, height)
        return max(0.0, moved - whole) + UNHIDDEN * min(moved, whole)

    return max(0.0, cost(raster) - min(cost(1 << power) for power in range(6)))


def gemm_beside_transfers_ms(
    problem: Problem, cluster: Cluster, kernel: GemmConfig, raster: int | None, alone_ms: float
) -> float:
    """Return the time of a GEMM while its op's transfers use the same memory.

    AllGather: a rank receives W - 1 chunks, and sends as many. ReduceScatter: it receives the
    partials of its rows from W - 1 ranks; those that it sends come from multiprocessors. As in
    ``cycles``, a share UNHIDDEN of the shorter of both times is exposed.

    Args:
        problem: op and sizes.
        cluster: devices and links.
        kernel: of the GEMM.
        raster: rows of tiles of a band; None: of the best height.
        alone_ms: time of the GEMM without transfers.
    """
    if problem.world == 1:
        return alone_ms
    chunks = (problem.world - 1) * (2 if problem.op.gathers else 1)
    moved = chunks * problem.chunk * problem.row_bytes
    if problem.op.reduces and problem.topk > 1:  # a token's products are read again, to be summed
        moved += problem.m * problem.row_elements * problem.itemsize
    transfers = memory_ms(cluster.device, moved)
    busy = alone_ms + raster_ms(problem, cluster, kernel, raster)
    return busy + UNHIDDEN * min(busy, transfers)


# -- collectives and messages ----------------------------------------------------------------------


def library_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of the library's collective alone; 0 for one rank."""
    lanes = problem.lanes
    shard = float(problem.chunk * problem.row_bytes)
    return collective_ms(problem.op, shard, problem.world, lanes, cluster)


def collective_ms(
    op: Op,
    shard: float,
    size: int,
    per_host: int,
    cluster: Cluster,
    network_gbs: float | None = None,
    *,
    low_latency: bool = False,
) -> float:
    """Return the time of an AllGather, ReduceScatter or AllReduce.

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
        low_latency: on GPUs of one host, take the protocol for small messages where it is faster.
    """
    if size == 1:
        return 0.0
    kind, link, network = cluster.device.kind, cluster.link, cluster.network
    hosts, share = ceil_div(size, per_host), LIBRARY_SHARE[kind][op]
    speed = bytes_per_ms(link.library_gbs or link.gbs * share)
    ports = bytes_per_ms(network.gbs if network_gbs is None else network_gbs)
    near = (size - 1) * shard / speed
    if kind == "cuda":
        far = (size - 1) * shard / (ports * share)
    else:
        near = (per_host - 1) * shard / speed
        far = (hosts - 1) * per_host * shard / ports
    hops_us = (size - hosts) * link.latency_us + (hosts - 1) * network.latency_us
    passes = 2 if op.all_reduces else 1
    starts = passes if kind == "cuda" else 1  # gloo's was measured for all three alike
    start_ms = 1e-3 * LIBRARY_LATENCY_US[kind]
    moved = max(near, far) if hosts > 1 else near
    time = passes * (moved + hops_us * 1e-3) + starts * start_ms
    if not (low_latency and kind == "cuda" and hosts == 1):
        return time
    hop, slower = LOW_LATENCY
    return min(time, passes * (slower * moved + hop * hops_us * 1e-3) + start_ms)


def all_to_all_ms(
    payload: float, size: int, per_host: int, cluster: Cluster, network_gbs: float
) -> float:
    """Return the time of an all-to-all of ``payload`` bytes of each rank, sent directly.

    ``network_gbs``: of the ports that these ranks have of their host.
    """
    link, share = cluster.link, LIBRARY_SHARE[cluster.device.kind][Op.gemm_rs]
    ports = network_gbs * 1e6 * (share if cluster.device.kind == "cuda" else 1.0)
    speed = max(link.gbs, 1e-6) * 1e6 * share * duplex_share(link)
    near = payload * (per_host - 1) / size / speed
    far = payload * (size - per_host) / size / max(ports, 1e-6) * per_host
    hosts = ceil_div(size, per_host)
    hops_us = (per_host - 1) * link.latency_us + (hosts - 1) * cluster.network.latency_us
    return max(near, far) + hops_us * 1e-3


def send_ms(payload: float, cluster: Cluster, network_gbs: float | None) -> float:
    """Return the time of one message of ``payload`` bytes.

    ``network_gbs``: of the sender's share of its host's ports; None: it stays on the host.
    """
    if network_gbs is None:
        return payload / (cluster.link.gbs * 1e6) + cluster.link.latency_us * 1e-3
    return payload / (network_gbs * 1e6) + cluster.network.latency_us * 1e-3
