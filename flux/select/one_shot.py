"""Path one_shot of CPUs: its knobs, its time, and what sending between hosts takes from cores."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from flux.core.knobs import SLOT_BYTES, Knobs, Op
from flux.core.problem import Problem, ceil_div
from flux.machine.cluster import Cluster, bytes_per_ms
from flux.select.hardware import (
    EXPERT_COST_ROWS,
    FEW_ROWS,
    LAUNCH_US,
    NETWORK_CPU_MS_PER_MB,
    ONE_SHOT_US,
    SLAB_COST_COLUMNS,
    SLAB_COST_ROWS,
    SOCKETS_BYTES,
)

ALL_ROWS = 2**31 - 1
ONE_SHOTS = (
    Knobs(path="one_shot"),
    Knobs(path="one_shot", comm_tile_rows=ALL_ROWS),
    Knobs(path="one_shot", tile=(ALL_ROWS, ALL_ROWS)),
)
"""Path one_shot in rounds, in one round, and with a GEMM that is not cut."""

MOST_BLOCKS = 16
"""Blocks of columns that the GEMM of an AllReduce is cut into, at most."""

TWO_PHASES_BYTES = 64 << 10
"""As in csrc/cpu/collectives.cpp."""


def one_shot_defaults(op: Op, m: int, local_n: int, world: int, knobs: Knobs) -> Knobs:
    """Return the rows of a round, and of the slab of the GEMM that belongs to it.

    In rounds, the GEMM of the first slab delays the first message, and each slab packs the weight
    again, which costs as much as SLAB_COST_ROWS more rows. The sum of both is least for slabs of
    sqrt(SLAB_COST_ROWS * M) rows: 160 of 512, 320 of 2048.
    """
    chunk = ceil_div(m, world)
    in_round = world if op.all_reduces else 1  # of the communication tiles, one of each rank
    slab = isqrt(int(SLAB_COST_ROWS) * m)
    rounds = 1 if m <= FEW_ROWS else ceil_div(chunk * in_round, slab)
    comm_rows = min(knobs.comm_tile_rows or ceil_div(chunk, rounds), chunk)
    rows, columns = knobs.tile or (m if m <= FEW_ROWS else comm_rows * in_round, local_n)
    return Knobs(
        tile=(min(rows, m), min(columns, local_n)),
        raster=1,
        comm_tile_rows=comm_rows,
        store="staged",
        copy_streams=0,
    )


def one_shot_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of the collective of path = one_shot, on a CPU.

    Inside a host each rank copies its part in and the result out. Between hosts every byte travels
    once; a sum of few bytes goes to each host whole, a larger one in parts and back.
    """
    lanes, hosts = problem.lanes, problem.nodes
    nbytes = problem.m * problem.row_bytes
    if problem.op.all_reduces:
        across = nbytes * (hosts - 1)
        if _has_two_phases(problem):
            across = 2 * nbytes * (hosts - 1) / hosts
    else:
        across = (hosts - 1) * lanes * problem.chunk * problem.row_bytes
    inside = 0.0
    if lanes > 1:  # copies of ranks that share a core take turns
        inside = 3 * cluster.device.crowding * nbytes / bytes_per_ms(cluster.link.gbs)
    latency_us = ONE_SHOT_US + (cluster.network.latency_us if hosts > 1 else 0.0)
    across_ms = max(across / bytes_per_ms(cluster.network.gbs), network_cpu_ms(problem, cluster))
    return across_ms + inside + latency_us * 1e-3


def _has_two_phases(problem: Problem) -> bool:
    """Return whether an AllReduce sums parts, and then gathers them."""
    return problem.nodes > 2 and problem.m * problem.row_bytes >= TWO_PHASES_BYTES


def one_shot_exposed_ms(
    problem: Problem, cluster: Cluster, knobs: Knobs, whole: float, comm: float
) -> float:
    """Return the time that a call of path = one_shot takes beyond its GEMM, which may be cut.

    One core multiplies, sends and receives. A sum's first message leaves behind the first slab, and
    an AllGather's last slab follows the last message. Ranks that share memory, and those of an
    AllReduce, have no rows of their own to multiply while the last round is on the wire: of an
    AllGather, rows of the same host come with the rounds, too. All ranks' rows of a round are
    multiplied together, and beside them no more than a slot of shared memory is on the wire; of
    ranks that are alone, what sockets hold. Blocks of columns are the rounds of an AllReduce. What
    is gathered after a sum has no multiply beside it.
    """
    assert knobs.tile is not None and knobs.comm_tile_rows is not None
    alone = problem.world == problem.nodes
    rounds = ceil_div(problem.chunk, knobs.comm_tile_rows)
    columns, by_columns = problem.local[0], False
    shares = [1 / rounds] * rounds
    if knobs.tile[0] >= problem.m:
        by_columns = problem.op.all_reduces and knobs.tile[1] < columns
        if not by_columns:
            return comm
        firsts = range(0, columns, knobs.tile[1])
        shares = [min(knobs.tile[1], columns - first) / columns for first in firsts]
    if problem.op.all_reduces:
        slabs = len(shares)
    elif rounds > 1 or (alone and problem.op.reduces):
        slabs = rounds * (problem.world - 1) + 1
    else:
        slabs = 2 if problem.op.gathers else 1
    calls_us = cluster.device.crowding * (ONE_SHOT_US + problem.experts * LAUNCH_US["cpu"])
    cut = cut_ms(problem, whole, slabs, by_columns) + (slabs - 1) * calls_us * 1e-3
    busy = network_cpu_ms(problem, cluster)
    if problem.op.all_reduces:
        summed = comm / 2 if _has_two_phases(problem) else comm
        slot = 1.0 if alone else SLOT_BYTES / (problem.m * problem.row_bytes)
        return _summed_ms(shares, whole + cut + busy, summed, slot) + comm - summed - whole
    slab = (whole + cut) / slabs
    if problem.op.gathers and not alone:
        rows = min(problem.chunk, SLOT_BYTES / problem.world / problem.row_bytes)
        beside = comm * rows / problem.chunk
        slab = max(slab * (problem.world - 1), whole + cut - rounds * beside)
    elif problem.op.gathers:
        held = rounds * SOCKETS_BYTES / (problem.chunk * problem.row_bytes)
        slab = max(slab, whole + cut - comm * min(1.0, held))
    tail = 0.0 if alone else comm / rounds
    return max(cut + busy + tail, comm + slab - whole)


def _summed_ms(shares: Sequence[float], multiply: float, comm: float, slot: float) -> float:
    """Return when the last part of an AllReduce has been sent, each behind its multiply.

    Args:
        shares: of the parts.
        multiply: time of all multiplies.
        comm: time of all messages.
        slot: largest share that is sent beside a multiply.
    """
    now = sent = 0.0
    for share in shares:
        now += multiply * share
        sent = max(sent, now) + comm * share
        now = max(now, sent - comm * slot)
    return sent


def cut_ms(problem: Problem, whole: float, slabs: int, by_columns: bool = False) -> float:
    """Return the cost of cutting a GEMM of a CPU into slabs: each packs the weights again, or x.

    No slab takes longer than the GEMM.
    """
    if by_columns:
        return whole * (slabs - 1) * min(SLAB_COST_COLUMNS / max(problem.local[0], 1), 1.0)
    rows = max(SLAB_COST_ROWS, EXPERT_COST_ROWS * problem.experts)
    return whole * (slabs - 1) * min(rows / max(problem.m, 1), 1.0)


def network_cpu_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time of a core, on a CPU, to send and receive a rank's bytes between hosts."""
    hosts, passes = problem.nodes, 2 if problem.op.all_reduces else 1
    rows = passes * (hosts - 1) * problem.chunk
    return sending_ms(cluster, rows * problem.row_bytes)


def sending_ms(cluster: Cluster, nbytes: float) -> float:
    """Return the time of a core to send bytes to other hosts, and to receive as many."""
    return cluster.device.crowding * NETWORK_CPU_MS_PER_MB * nbytes * 1e-6
