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
from flux.machine.cluster import Cluster
from flux.select.cost import TILE, all_to_all_ms, gemm_ms, memory_ms, shuffle_ms
from flux.select.gathers import sent_ms
from flux.select.hardware import (
    ELEMENTWISE_SHARE,
    GEMM_SHARE,
    LAUNCH_US,
    LIBRARY_LATENCY_US,
    MEMORY_COPY_SHARE,
    PUSH_US,
    ROUTE,
    ROUTE_MANY,
    ROUTE_ONE_BLOCK,
    SIGNAL_US,
    blocks_per_wave,
)
from flux.select.heuristic import resolve
from flux.select.nodes import between_nodes_ms
from flux.select.one_shot import sending_ms
from flux.select.predict import Prediction, predict
from flux.select.share import gemm_units, slowdown

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig


def needed_share(problem: SparseProblem, parts: int = 1) -> float:
    """Return the share of all tokens that a rank needs, with a balanced router.

    ``parts``: of the experts, as many as the ranks of a host have: the share that a host needs.
    """
    others, share = problem.experts - max(problem.experts * parts // problem.ep, 1), 1.0
    for choice in range(problem.topk):
        share *= max(others - choice, 0) / (problem.experts - choice)
    return 1.0 - share


def on_cpus(problem: Problem) -> Problem:
    """Return the dense op that a CPU takes as long for, with E / topk weights in place of one.

    The dense weight has as many elements as those of a token's experts, and tokens of a slab have
    all of them: each slab packs E / topk times as much (``cut_ms``). Of an op that dispatches the
    tokens travel that another host needs, once.
    """
    weights, travels = ceil_div(problem.experts, problem.topk), 1.0
    if isinstance(problem, SparseProblem) and problem.dispatches:
        parts = ceil_div(problem.ep, problem.nodes) if problem.nodes > 1 else 1
        travels = needed_share(problem, parts)
    return replace(problem.dense, experts=weights, travels=travels)


def _sent_by_library(problem: SparseProblem, cluster: Cluster) -> float:
    """Return the time of an all-to-all on CPUs, of the tokens that each rank needs."""
    rows = needed_share(problem) * problem.chunk  # from each rank to each
    sent = unfused_parts(problem, cluster, rows * problem.world)["AllToAll"]
    far = rows * problem.row_bytes * (problem.world - problem.lanes)
    return max(sent, sending_ms(cluster, far))


def predict_sparse(
    problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig | None = None
) -> Prediction:
    """Return the predicted time of a call: see ``predict``, which does all but what is here."""
    on_gpus = cluster.device.kind == "cuda" and problem.world > 1
    if not isinstance(problem, SparseProblem):
        return predict(problem, cluster, knobs, kernel)
    if not on_gpus:
        dense = on_cpus(problem)
        if knobs.path == "one_shot":  # which moves all tokens
            dense = replace(dense, travels=1.0)
        if problem.dispatches and knobs.path == "unfused" and problem.world > 1:
            return Prediction(gemm_ms(dense, cluster), _sent_by_library(problem, cluster))
        return predict(dense, cluster, knobs, kernel)
    if knobs.comm_tile_rows is not None:
        knobs = replace(knobs, comm_tile_rows=knobs.comm_tile_rows * problem.topk)
    routed = with_rows(problem)
    cluster = _filling(cluster, routed, problem.ep, kernel)
    if problem.dispatches:
        gemm, exposed = _dispatched(problem, routed, cluster, knobs, kernel)
        return Prediction(gemm, exposed + lists_ms(problem))
    gemm, exposed = predict(routed, cluster, knobs, kernel)
    passes = shuffle_ms(routed, cluster) if knobs.path == "unfused" else 0.0
    return Prediction(gemm, exposed + passes)


def with_rows(problem: SparseProblem) -> Problem:
    """Return the dense op whose rows are those of all experts that have some."""
    used = problem.experts * (1.0 - (1.0 - problem.topk / problem.experts) ** problem.m)
    return Problem(
        problem.op,
        problem.m * problem.topk,
        problem.n,
        problem.k,
        problem.dtype,
        problem.world,
        problem.nodes,
        experts=max(round(used), problem.topk),
        topk=problem.topk,
        **problem.scales,
    )


def _rows_of_tiles(routed: Problem, ep: int, high: int) -> int:
    """Return the rows of tiles of a rank. The last tile of an expert is half full."""
    rows, used = ceil_div(routed.m, ep), ceil_div(routed.experts, ep)
    return max(used, ceil_div(2 * rows + used * high, 2 * high))


def _filling(cluster: Cluster, routed: Problem, ep: int, kernel: GemmConfig | None) -> Cluster:
    """Return a cluster that multiplies as much more slowly as tiles have rows without a token."""
    if kernel is None:
        return cluster
    high = kernel.tile[0]
    filled = routed.m / ep / (high * _rows_of_tiles(routed, ep, high))
    share = (cluster.device.gemm_share or GEMM_SHARE["cuda"]) * min(1.0, filled)
    return replace(cluster, device=replace(cluster.device, gemm_share=share))


def lists_ms(problem: SparseProblem) -> float:
    """Return the time of the kernel that lists the work of a grouped GEMM."""
    choices = problem.m * problem.topk
    many = choices > ROUTE_ONE_BLOCK
    least_us, each_ns = ROUTE_MANY if many else ROUTE[problem.op.gathers]
    return 1e-3 * (least_us + 1e-3 * each_ns * choices)


def unfused_parts(problem: SparseProblem, cluster: Cluster, rows: float) -> dict[str, float]:
    """Return the parts of an unfused dispatch but its GEMM, in their order, in ms.

    ``rows``: that each rank sends, as many to each rank, itself included.
    """
    sent, lanes, ports = rows * problem.row_bytes, problem.lanes, cluster.network.gbs
    kind = cluster.device.kind
    library = all_to_all_ms(sent, problem.world, lanes, cluster, ports)
    one_pass = memory_ms(cluster.device, 2 * sent, ELEMENTWISE_SHARE) + 1e-3 * LAUNCH_US[kind]
    library += 1e-3 * LIBRARY_LATENCY_US[kind]
    return {"rows by rank": one_pass, "AllToAll": library, "rows of experts": one_pass}


def _dispatched(
    problem: SparseProblem,
    dense: Problem,
    cluster: Cluster,
    knobs: Knobs,
    kernel: GemmConfig | None,
) -> Prediction:
    share = needed_share(problem)
    if knobs.path == "unfused":
        parts = unfused_parts(problem, cluster, share * problem.world * problem.chunk)
        return Prediction(gemm_ms(dense, cluster), sum(parts.values()))
    if problem.nodes > 1 and kernel is None:
        return predict(dense, cluster, knobs)
    knobs = resolve(dense, knobs, None if kernel is None else kernel.cluster_tile)
    waves, slower = 1, slowdown(dense, cluster, knobs, None)
    if kernel is not None:
        high, wide = kernel.tile[:2]
        tiles = _rows_of_tiles(dense, problem.ep, high) * ceil_div(problem.local[0], wide)
        waves = ceil_div(tiles, blocks_per_wave(kernel, gemm_units(dense, cluster, knobs, kernel)))
        slower = waves / ceil_div(tiles, blocks_per_wave(kernel, cluster.device.units))
    whole = gemm_ms(dense, cluster, slower=slower)
    wave = whole / waves
    # A tile has rows of one expert, so of as many tokens as have that many choices of it.
    rows = TILE[0] if kernel is None else kernel.tile[0]
    late = max(wave, whole * min(1.0, rows * problem.experts / (problem.topk * problem.m)))
    if kernel is not None and problem.nodes > 1:
        exposed = between_nodes_ms(dense, cluster, knobs, kernel, whole - late + wave)
        exposed += 0.0 if dense.op.gathers else sum(_sums_ms(problem, cluster, problem.lanes))
        return Prediction(whole, exposed + 2e-3 * LAUNCH_US["cuda"])
    sent = share * sent_ms(dense, cluster)
    if dense.op.gathers:
        exposed = _pushed(problem, dense, cluster, knobs, kernel, (whole, late, sent))
    else:
        products, own = _sums_ms(problem, cluster, share * problem.world)
        sent = max(sent, products)  # a block's sums and stores take turns with those of others
        exposed = own + max(sent * late / whole, late + sent - whole)
    signals_us = 2 * (cluster.link.latency_us + SIGNAL_US["cuda"])  # entries, and behind stores
    return Prediction(whole, exposed + 1e-3 * (signals_us + 2 * LAUNCH_US["cuda"]))


def _pushed(
    problem: SparseProblem,
    dense: Problem,
    cluster: Cluster,
    knobs: Knobs,
    kernel: GemmConfig | None,
    times: tuple[float, float, float],
) -> float:
    """Return the time of a call beyond its GEMM whose blocks push a share of the rows.

    Own rows are copied first. Rows arrive while blocks that do not push multiply; tiles of the
    last rows follow them. ``times``: of the GEMM, of these tiles, and of the link.
    """
    whole, late, sent = times
    assert knobs.comm_tile_rows is not None
    units = gemm_units(dense, cluster, knobs, kernel)
    blocks = units if kernel is None else blocks_per_wave(kernel, units)
    pushes = (dense.world - 1) * ceil_div(dense.chunk, knobs.comm_tile_rows)
    own = memory_ms(cluster.device, 2 * problem.chunk * problem.row_bytes, MEMORY_COPY_SHARE)
    return own + 1e-3 * PUSH_US + max(min(1.0, pushes / blocks) * sent, sent + late - whole)


def _sums_ms(problem: SparseProblem, cluster: Cluster, partials: float) -> tuple[float, float]:
    """Return the times of the sums of a combine: of products, and of own rows' partials."""

    def passes_ms(rows: float) -> float:
        return memory_ms(cluster.device, rows * problem.row_bytes, MEMORY_COPY_SHARE)

    return passes_ms(problem.m * problem.topk / problem.ep), passes_ms(
        (partials + 1) * problem.chunk
    )
