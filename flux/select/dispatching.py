"""Cost model of the ops of experts on GPUs that move tokens only where their experts are.

A rank needs a token if it has one of its experts. The model has a balanced router: each of a
token's ``topk`` experts is as likely as any other.

    unfused    a pass over memory | all-to-all | a pass | GEMM, or the other way round
    dispatch   blocks push rows to their ranks, then multiply; blocks with no push begin at once
    combine    as GroupedGemmRS, with the partials alone that there are

Kernels push rows: no copy engine starts a copy for each tile. So a push costs its bytes on the
link, and the time of the blocks that store them. Several nodes: all tokens travel, as dense rows,
and the unfused path sends a token to another node once for each of its ranks that needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flux.core.knobs import Knobs
from flux.core.problem import Problem, ceil_div
from flux.core.sparse_problem import SparseProblem
from flux.machine.cluster import Cluster, bytes_per_ms
from flux.select.cost import all_to_all_ms, gemm_ms, memory_ms, shuffle_ms
from flux.select.gathers import waves
from flux.select.hardware import (
    ELEMENTWISE_SHARE,
    LAUNCH_US,
    LIBRARY_LATENCY_US,
    PUSH_US,
    SIGNAL_US,
    STORE_SHARE,
    blocks_per_wave,
)
from flux.select.heuristic import resolve
from flux.select.predict import Prediction, predict
from flux.select.share import gemm_units, slowdown

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig


def needed_share(problem: SparseProblem) -> float:
    """Return the share of all tokens that a rank needs, with a balanced router."""
    others, share = problem.experts - problem.experts // problem.ep, 1.0
    for choice in range(problem.topk):
        share *= max(others - choice, 0) / (problem.experts - choice)
    return 1.0 - share


def predict_sparse(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig | None = None
) -> Prediction:
    """Return the predicted time of a call: see ``predict``, which does all but what is here."""
    on_gpus = cluster.device.kind == "cuda" and problem.world > 1
    if not (on_gpus and isinstance(problem, SparseProblem)):
        return predict(problem.dense, cluster, knobs, kernel)
    if not problem.dispatches:
        gemm, exposed = predict(problem.dense, cluster, knobs, kernel)
        passes = shuffle_ms(problem.dense, cluster) if knobs.path == "unfused" else 0.0
        return Prediction(gemm, exposed + passes)
    dense, share = problem.dense, needed_share(problem)
    if knobs.path == "unfused":
        sent = share * problem.world * problem.chunk * problem.row_bytes
        lanes, ports = problem.lanes, cluster.network.gbs
        library = all_to_all_ms(sent, problem.world, lanes, cluster, ports)
        passes = memory_ms(cluster.device, 4 * sent, ELEMENTWISE_SHARE)
        launches = 1e-3 * (LIBRARY_LATENCY_US["cuda"] + 2 * LAUNCH_US["cuda"])
        return Prediction(gemm_ms(dense, cluster), library + passes + launches)
    if problem.nodes > 1:
        return predict(dense, cluster, knobs, kernel)
    if dense.op.reduces:
        link = replace(cluster.link, gbs=cluster.link.gbs / max(share, 1e-6))
        whole = replace(knobs, comm_tile_rows=None)  # kernels raise flags, by tiles of sums
        return predict(dense, replace(cluster, link=link), whole, kernel)
    return _pushed(dense, share, cluster, knobs, kernel)


def _pushed(
    dense: Problem, share: float, cluster: Cluster, knobs: Knobs, kernel: GemmConfig | None
) -> Prediction:
    """Return the time of a call whose blocks push a share of the rows.

    Rows arrive while blocks that do not push multiply; a tile of the last rows follows them.
    """
    knobs = resolve(dense, knobs, None if kernel is None else kernel.cluster_tile)
    assert knobs.comm_tile_rows is not None
    whole = gemm_ms(dense, cluster, slower=slowdown(dense, cluster, knobs, kernel))
    peers, link = dense.world - 1, cluster.link
    sent = peers * share * dense.chunk * dense.row_bytes / bytes_per_ms(link.gbs * STORE_SHARE)
    units = gemm_units(dense, cluster, knobs, kernel)
    blocks = units if kernel is None else blocks_per_wave(kernel, units)
    busy = min(1.0, peers * ceil_div(dense.chunk, knobs.comm_tile_rows) / blocks)
    last = whole if kernel is None else whole / waves(dense, cluster, kernel)
    exposed = max(busy * sent, sent + last - whole)
    signals_us = PUSH_US + 2 * (link.latency_us + SIGNAL_US["cuda"])  # entries, and behind pushes
    return Prediction(whole, exposed + 1e-3 * signals_us)
