"""Predict the time of calls of fused ops, and choose between their paths.

    unfused   library collective | GEMM                      the sum
    one_shot  GEMM | one message to each host                the sum, with a latency of its own;
                                                             cut along rounds: as fused
    medium    | chunk | chunk | chunk | chunk |              W steps, each as long as the longer of
              | GEMM  | GEMM  | GEMM  | GEMM  |              its chunk's GEMM and transfer, with a
                                                             kernel in waves of its own
    fused     copies  ~~~~~~~~~~~~~~~                        the longer of the two, and the first
              GEMM  ==========================               (or last) tile, which is not hidden
    in_kernel rows | GEMM                                    the sum, without launches between
              GEMM | sums, results                           with the partials of the last wave

A CPU has no copy engine: inside a host copies take their time from the GEMM, and are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from flux.core.knobs import Knobs
from flux.core.problem import Problem, ceil_div
from flux.machine.cluster import Cluster
from flux.select.cost import gemm_ms, library_ms, memory_ms, raster_ms
from flux.select.gathers import (
    copied_ms,
    copied_partials_ms,
    entered_ms,
    own_sums_ms,
    pushed_ms,
    sent_ms,
    summed_ms,
    waves,
)
from flux.select.hardware import (
    ENGINE_US,
    LAUNCH_US,
    MEMORY_COPY_SHARE,
    NETWORK_CALL_US,
    SIGNAL_US,
)
from flux.select.heuristic import resolve
from flux.select.nodes import between_nodes_ms, transfer_ms
from flux.select.one_shot import ONE_SHOTS, cut_ms, network_cpu_ms, one_shot_exposed_ms, one_shot_ms
from flux.select.share import gemm_units, slowdown

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig


class Prediction(NamedTuple):
    """Parts of a call, whose sum is its time."""

    gemm_ms: float
    exposed_ms: float


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
    knobs = resolve(problem, knobs, None if kernel is None else kernel.cluster_tile)
    whole, world = gemm_ms(problem, cluster), problem.world
    if world == 1:
        return Prediction(whole, 0.0)
    kind = cluster.device.kind
    if knobs.path == "unfused":
        comm = library_ms(problem, cluster)
        if kind == "cpu" and problem.nodes > 1:
            comm = max(comm, network_cpu_ms(problem, cluster))
        return Prediction(whole, comm)
    alone = whole
    whole = gemm_ms(problem, cluster, slower=slowdown(problem, cluster, knobs, kernel))
    if knobs.path == "one_shot":
        comm = one_shot_ms(problem, cluster)
        return Prediction(whole, one_shot_exposed_ms(problem, cluster, knobs, whole, comm))
    if knobs.path == "in_kernel":
        if problem.op.reduces:
            by_switch = knobs.reduce == "in_flight"
            comm = summed_ms(problem, cluster, kernel, whole, by_switch=by_switch)
        else:
            comm = pushed_ms(problem, cluster)
        return Prediction(whole, comm + raster_ms(problem, cluster, kernel, knobs.raster))
    assert knobs.comm_tile_rows is not None and knobs.tile is not None
    tiles = ceil_div(problem.chunk, knobs.comm_tile_rows)
    transfers = (world - 1) * tiles
    comm = transfer_ms(problem, cluster, knobs.order) + transfers * SIGNAL_US[kind] * 1e-3
    latency = cluster.link.latency_us if problem.nodes == 1 else cluster.network.latency_us
    stores = kernel is not None and knobs.path == "fused" and knobs.reduce != "in_flight"
    if stores and problem.op.scatters and problem.nodes == 1:
        comm = sent_ms(problem, cluster) + SIGNAL_US[kind] * 1e-3
    if kernel is not None and knobs.path == "medium":
        # Plans do without the model of kernels behind it.
        from flux.select.chunks import chunk_gemm_ms

        units = gemm_units(problem, cluster, knobs)
        part = chunk_gemm_ms(problem, cluster.device, kernel, (alone, kernel), units)
        part += LAUNCH_US[kind] * 1e-3
        step = max(part, comm / (world - 1) + latency * 1e-3)
        return Prediction(whole, max(0.0, (world - 1) * step + part - whole))
    if kernel is not None and problem.nodes > 1:
        exposed = between_nodes_ms(problem, cluster, knobs, kernel, whole)
        exposed += _band_exposed_ms(problem, knobs, whole, comm)
        return Prediction(whole, exposed + raster_ms(problem, cluster, kernel, knobs.raster))
    overhead = _cut_ms(problem, cluster, knobs, whole)
    if kind == "cpu" and problem.nodes > 1:
        calls = 1.0 if world == problem.nodes else 1.5  # ranks of a host wake each other, too
        overhead += calls * NETWORK_CALL_US * 1e-3 + network_cpu_ms(problem, cluster)
    if kind == "cpu" and knobs.copy_streams:
        overhead += ENGINE_US * 1e-3
    if kind == "cpu" and problem.nodes == 1:
        # Partials that the GEMM writes directly into their owner's memory need no copy.
        stored = problem.op.reduces and knobs.store == "direct" and knobs.path == "fused"
        comm = comm * (0.5 if stored else 1.0) + cluster.link.latency_us * 1e-3
        return Prediction(whole, comm + overhead)
    if knobs.path == "medium":
        overhead += world * latency * 1e-3  # the small GEMMs of a ring do not fill the device
        exposed = max(0.0, comm - whole * (world - 1) / world) + comm / world
    else:
        if kernel is not None and problem.op.gathers:
            comm = copied_ms(comm, transfers, cluster.link)
        if kernel is not None and knobs.sends == "copies":
            behind = copied_partials_ms(problem, cluster, knobs, kernel, whole) + latency * 1e-3
            behind += own_sums_ms(problem, cluster, knobs, kernel, whole)
            bands = raster_ms(problem, cluster, kernel, knobs.raster)
            return Prediction(whole, behind + bands + _results_ms(problem, cluster))
        on_cpu = kind == "cpu"
        exposed = _fused_exposed_ms(problem, knobs, whole, comm, transfers, on_cpu)
        if on_cpu and problem.op.all_reduces:
            # Results follow the sums of own rows, which are multiplied last.
            half = _fused_exposed_ms(problem, knobs, whole, comm / 2, transfers, on_cpu)
            exposed = comm / 2 + half
        if kernel is not None:
            band = _band_exposed_ms(problem, knobs, whole, comm)
            if problem.op.gathers:
                wave = whole / waves(problem, cluster, kernel)
                exposed = max(exposed + band, comm + wave - whole)
                overhead += entered_ms(problem, cluster, knobs, kernel)
            elif problem.op.all_reduces:
                behind = summed_ms(problem, cluster, kernel, whole, in_kernel=False)
                exposed = max(exposed, band, behind - latency * 1e-3)
            else:
                exposed = max(exposed, band)
                if knobs.reduce != "in_flight":
                    overhead += own_sums_ms(problem, cluster, knobs, kernel, whole)
            overhead += raster_ms(problem, cluster, kernel, knobs.raster)
    return Prediction(whole, exposed + latency * 1e-3 + overhead)


def _results_ms(problem: Problem, cluster: Cluster) -> float:
    """Return the time in which the sums of an AllReduce go to all ranks, and to the result."""
    if not problem.op.all_reduces:
        return 0.0
    copied = 2.0 * problem.m * problem.row_bytes
    launches = 2e-3 * LAUNCH_US["cuda"] + 1e-3 * SIGNAL_US["cuda"]
    return (
        sent_ms(problem, cluster) + memory_ms(cluster.device, copied, MEMORY_COPY_SHARE) + launches
    )


def _fused_exposed_ms(
    problem: Problem, knobs: Knobs, whole: float, comm: float, transfers: int, on_cpu: bool
) -> float:
    """Return the time of a fused kernel's transfers that the GEMM does not hide.

    AllGather      | own rows | others', as they come |  others' last tile has to come first
    ReduceScatter  | others' rows | own rows |          others' first tile has to be there
                                                        first, and their last may outlast the rest
    """
    assert knobs.comm_tile_rows is not None and knobs.tile is not None
    rows = min(knobs.comm_tile_rows, knobs.tile[0])  # of a GPU's tiles many run at once
    if on_cpu:  # a slab is sent, or multiplied, as a whole
        sent = knobs.comm_tile_rows
        last = (problem.chunk - 1) % sent + 1 if problem.op.gathers else sent
        rows = max(last, knobs.tile[0])
    tile = whole * min(1.0, rows / max(problem.m, 1))
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
        slabs = _slabs(problem, knobs.tile[0]) * ceil_div(problem.local[0], knobs.tile[1])
        return cut_ms(problem, whole, slabs)
    if knobs.path != "medium":
        return 0.0  # a fused kernel runs the same tiles in any case
    return max(0.0, problem.world * gemm_ms(problem, cluster, problem.chunk) - whole)


def _slabs(problem: Problem, rows: int) -> int:
    """Return how many slabs a CPU multiplies: see ``merge_visits`` (flux/backends/cpu/slabs.py)."""
    if problem.nodes == 1 or not problem.op.gathers or rows > problem.chunk:
        return ceil_div(problem.m, rows)
    lanes, hosts = problem.lanes, problem.nodes
    near = 1 if problem.experts > 1 else min(lanes, 2)
    if rows < problem.chunk:
        return near + (hosts - 1) * 2 * lanes
    return near + (1 if hosts == 2 else (hosts - 1) * lanes)  # chunks of several hosts take turns


def choose(problem: Problem, cluster: Cluster, candidates: Sequence[Knobs] | None = None) -> Knobs:
    """Return the candidate of least predicted time, the first of equals.

    By default: the heuristic's knobs, one chunk per rank, and the unfused path; between hosts, on
    CPUs, the ways of path one_shot, too.
    """
    if candidates is None:
        candidates = (Knobs(), Knobs(path="medium"), Knobs(path="unfused"))
        if cluster.device.kind == "cpu" and problem.nodes > 1:
            candidates = (*candidates, *ONE_SHOTS)
    times = [sum(predict(problem, cluster, knobs)) for knobs in candidates]
    return candidates[times.index(min(times))]
