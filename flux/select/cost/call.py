"""Predict the time of a call from data sheets, to prune candidates and for shapes without tuning.

    unfused   library collective | GEMM                      the sum
    medium    | chunk | chunk | chunk | chunk |              W steps, each as long as the longer of
              | GEMM  | GEMM  | GEMM  | GEMM  |              its chunk's GEMM and transfer
    fused     copies  ~~~~~~~~~~~~~~~                        the longer of the two, and the first
              GEMM  ==========================               (or last) tile, which is not hidden

A CPU has no copy engine: inside a host copies take their time from the GEMM, and are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux.core.integers import ceil_div
from flux.core.knobs import Knobs
from flux.core.problem import Problem
from flux.kernels.config import GemmConfig
from flux.machine.cluster import Cluster
from flux.select.cost.collective import library_ms, transfer_ms
from flux.select.cost.gemm import gemm_ms, raster_ms
from flux.select.cost.hardware import ENGINE_US, SIGNAL_US
from flux.select.heuristic import resolved

SLAB_COST_ROWS = 50.0
"""A GEMM cut into slabs packs its weight again for each slab. The cost equals that of this many
more rows (5% of 1024 rows, 10% of 512, 20% of 256: flux/select/heuristic.py)."""


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
    comm = transfer_ms(problem, cluster) + transfers * SIGNAL_US[kind] * 1e-3
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

    By default: the heuristic's knobs, one chunk per rank, and the unfused path.
    """
    if candidates is None:
        candidates = (Knobs(), Knobs(path="medium"), Knobs(path="unfused"))
    return min(candidates, key=lambda knobs: predict(problem, cluster, knobs).total)
