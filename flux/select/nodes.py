"""Predict the transfers of fused ops, and what calls of GPUs on several hosts wait for.

AllGather       own rows -> ranks of this host, then rows that came -> the same | copy engine
own rows -> one rank of each other host                         | network
ReduceScatter   partials -> the rank of this host that sends them on            | stores
sum of this host's partials -> owner                            | network
reduction, behind the GEMM and what came
AllReduce       the same, then sums -> all ranks, as in an AllGather
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flux import _C
from flux.core.knobs import Op
from flux.core.problem import Problem, ceil_div
from flux.machine.cluster import Cluster, bytes_per_ms
from flux.select.gathers import copied_ms, entered_ms, waves
from flux.select.hardware import (
    LAUNCH_US,
    MEMORY_COPY_SHARE,
    NETWORK_SHARE,
    SIGNAL_US,
    STORE_SHARE,
    duplex_share,
)

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.kernels.config import GemmConfig

_LAUNCH_MS = 1e-3 * LAUNCH_US["cuda"]
_SIGNAL_MS = 1e-3 * SIGNAL_US["cuda"]


def between_nodes_ms(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig, whole: float
) -> float:
    """Return the time of a fused call beyond its GEMM.

    Args:
        problem: op and sizes, on several nodes.
        cluster: devices and links.
        knobs: path fused, with every field set.
        kernel: of the GEMM.
        whole: time of the GEMM in ms.
    """
    wave = whole / waves(problem, cluster, kernel)
    if problem.op.gathers:
        comm = _copies_ms(problem, cluster, knobs)
        ahead = entered_ms(problem, cluster, knobs, kernel)
        return max(0.0, ahead + comm + wave - whole)
    near, far = link_times(problem, cluster, knobs.order)
    if problem.op.all_reduces:  # the other half of the bytes are results
        near, far = near / 2, far / 2
    sent = max(whole, near / (STORE_SHARE * duplex_share(cluster.link)) + wave)
    # Partials of other hosts come first. A sum leaves behind the tiles of its slice.
    assert knobs.comm_tile_rows is not None
    tiles, lanes = ceil_div(problem.chunk, knobs.comm_tile_rows), problem.lanes
    slices = max(1, min(tiles, (_C.core.max_runs - lanes) // (problem.world - lanes)))
    far += (problem.nodes - 1) * tiles * (_LAUNCH_MS + 1e-3 * cluster.network.latency_us)
    behind = sent * (problem.nodes - 1) / problem.nodes
    across = max(behind, behind / slices + far) + _message_ms(problem, cluster, knobs)
    return max(sent, across) - whole + _sums_ms(problem, cluster, knobs)


def _copies_ms(problem: Problem, cluster: Cluster, knobs: Knobs) -> float:
    """Return the time from an AllGather's first copy to its last one's signal."""
    assert knobs.comm_tile_rows is not None
    nodes, lanes = problem.nodes, problem.lanes
    near, far = link_times(problem, cluster, knobs.order)
    tiles = ceil_div(problem.chunk, knobs.comm_tile_rows)
    across = (nodes - 1 if crosses_once(problem.op, knobs.order) else problem.world - lanes) * tiles
    far += across * (1e-3 * cluster.network.latency_us + _SIGNAL_MS)
    if lanes == 1:
        return far
    passed = nodes if crosses_once(problem.op, knobs.order) else 1
    copies = passed * (lanes - 1) * tiles
    near = copied_ms(near, copies, cluster.link) + copies * _SIGNAL_MS
    last = near / (passed * tiles)  # a tile is passed on when it has come
    return max(near, far + (last if passed > 1 else 0.0))


def _message_ms(problem: Problem, cluster: Cluster, knobs: Knobs) -> float:
    """Return the time in which partials of a tile are added up and go to their owner."""
    assert knobs.comm_tile_rows is not None
    lanes, network = problem.lanes, cluster.network
    nbytes = min(knobs.comm_tile_rows, problem.chunk) * problem.row_bytes
    sums = _LAUNCH_MS + nbytes * (lanes + 1) / _memory_speed(cluster)
    port = bytes_per_ms(network.gbs / min(max(network.nics, 1), lanes))
    return sums + nbytes / port + 1e-3 * network.latency_us + _SIGNAL_MS


def _sums_ms(problem: Problem, cluster: Cluster, knobs: Knobs) -> float:
    """Return the time of the reduction behind the last partial, and of an AllReduce's results."""
    passes = problem.lanes + problem.nodes
    own = problem.chunk * problem.row_bytes * passes / _memory_speed(cluster)
    own += _LAUNCH_MS + 2 * _SIGNAL_MS
    if not problem.op.all_reduces:
        return own
    output = 2.0 * problem.m * problem.row_bytes / _memory_speed(cluster) + 3 * _LAUNCH_MS
    return own + output + _copies_ms(problem, cluster, knobs) / 2


def _memory_speed(cluster: Cluster) -> float:
    """Return the bytes of sums or copies that a GPU's memory reads and writes in a ms."""
    return bytes_per_ms(cluster.device.memory_gbs * MEMORY_COPY_SHARE)


# -- links -----------------------------------------------------------------------------------------


def transfer_ms(problem: Problem, cluster: Cluster, order: str | None = None) -> float:
    """Return the time of one rank's transfers in one direction in a fused op.

    Ranks of one host: W - 1 chunks. Between H hosts of L ranks it depends on the order. An order
    that is ``hierarchical`` brings every row to each other host once, where ranks pass it on, or
    adds up a host's partials before they leave:

        hierarchical   H (L - 1) chunks inside the host | L (H - 1) through the host's ports
        ring1d         W - 1 chunks of an AllGather through one port, from the last rank of a host
        direct         L (W - L) chunks to one port: all ranks of a host begin with the same peer

    Partials leave with their tiles, and half as many meet.
    """
    near, far = link_times(problem, cluster, order)
    return max(near, far)


def link_times(problem: Problem, cluster: Cluster, order: str | None = None) -> tuple[float, float]:
    """Return the same time on the link of a rank, and on the network."""
    op, world, nodes = problem.op, problem.world, problem.nodes
    link, network = cluster.link, cluster.network
    lanes, passes = problem.lanes, 2 if op.all_reduces else 1
    chunk_bytes = float(passes * problem.chunk * problem.row_bytes)
    if nodes == 1:
        return (lanes - 1) * chunk_bytes / bytes_per_ms(link.gbs), 0.0
    cuda = cluster.device.kind == "cuda"
    ports = bytes_per_ms(network.gbs) * (NETWORK_SHARE if cuda else 1.0)
    if crosses_once(op, order):
        far = (nodes - 1) * lanes * chunk_bytes / ports
        inside = nodes * (lanes - 1)
        if cuda and link.kind == "pcie":  # the network's card reads and writes through it, too
            inside += nodes - 1
        return inside * chunk_bytes / bytes_per_ms(link.gbs), far
    if order == "ring1d" and op.gathers:
        through = float(world - 1)
    else:
        through = lanes * (world - lanes) / (1 if op.gathers else 2)
    port = ports * max(1.0 / max(network.nics, 1), 1.0 / lanes) if cuda else ports
    return (lanes - 1) * chunk_bytes / bytes_per_ms(link.gbs), through * chunk_bytes / port


def crosses_once(op: Op, order: str | None) -> bool:
    """Return whether every row of an op crosses to each other host once in this order."""
    return order in (None, "hierarchical") or (op.gathers and order in ("ring2d", "numa"))
