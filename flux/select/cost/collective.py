"""The time of a library's collectives, and of single messages.

Alpha-beta: a latency for every hop, and bytes / bandwidth.
"""

from __future__ import annotations

from flux.core.integers import ceil_div
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.machine.cluster import Cluster
from flux.select.cost.hardware import LIBRARY_LATENCY_US, LIBRARY_SHARE, bytes_per_ms


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
        start_us: time until its first byte moves; None: the library's.
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
    start_ms = 1e-3 * (LIBRARY_LATENCY_US[kind] if start_us is None else start_us)
    moved = max(near, far) if hosts > 1 else near
    return passes * (moved + hops_us * 1e-3) + starts * start_ms


def all_to_all_ms(
    payload: float, size: int, per_host: int, cluster: Cluster, network_gbs: float
) -> float:
    """Return the time of an all-to-all, in which ranks send to one another directly.

    Args:
        payload: bytes of one rank.
        size: ranks.
        per_host: of them on one host.
        cluster: devices and links.
        network_gbs: GB/s of the ports that these ranks have of their host.
    """
    link, share = cluster.link, LIBRARY_SHARE[cluster.device.kind][Op.gemm_rs]
    ports = network_gbs * 1e6 * (share if cluster.device.kind == "cuda" else 1.0)
    near = payload * (per_host - 1) / size / (max(link.gbs, 1e-6) * 1e6 * share)
    far = payload * (size - per_host) / size / max(ports, 1e-6) * per_host
    hosts = ceil_div(size, per_host)
    hops_us = (per_host - 1) * link.latency_us + (hosts - 1) * cluster.network.latency_us
    return max(near, far) + hops_us * 1e-3


def send_ms(payload: float, cluster: Cluster, network_gbs: float | None) -> float:
    """Return the time of one message.

    Args:
        payload: bytes.
        cluster: devices and links.
        network_gbs: GB/s of the sender's share of its host's ports; None: it stays on the host.
    """
    if network_gbs is None:
        return payload / (cluster.link.gbs * 1e6) + cluster.link.latency_us * 1e-3
    return payload / (network_gbs * 1e6) + cluster.network.latency_us * 1e-3


def transfer_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of one rank's copies in one direction in a fused op: W - 1 chunks.

    Transfers between hosts include all ranks of a host, which share its ports. With the
    hierarchical order, every row crosses to each other host once.
    """
    chunk_bytes = problem.chunk * problem.row_bytes
    lanes = ceil_div(problem.world, problem.nodes)
    passes = 2 if problem.op.all_reduces else 1
    inside = passes * (lanes - 1) * chunk_bytes / bytes_per_ms(cluster.link.gbs)
    if problem.nodes == 1:
        return inside
    across = passes * (problem.nodes - 1) * lanes * chunk_bytes
    share = LIBRARY_SHARE["cuda"][problem.op] if cluster.device.kind == "cuda" else 1.0
    return max(inside, across / bytes_per_ms(cluster.network.gbs) / share)
