"""Simulate ops whose ranks exchange some tokens only, or heads: see simulator.py.

The GEMM of an op of experts is that of each rank's own rows: whole tiles, and the weights of those
experts that have a row. Unfused, the busiest rank's counts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flux.core.knobs import Knobs
from flux.core.problem import ceil_div
from flux.core.sparse_problem import SparseProblem
from flux.machine.cluster import Cluster
from flux.opsim import simulator
from flux.opsim.exchange import HeadsGather, HeadsScatter
from flux.opsim.routed import Combine, Dispatch
from flux.opsim.simulator import Simulated
from flux.select.all_to_all import gpu_blocks, own_gemm_ms, unfused_parts
from flux.select.cost import memory_ms
from flux.select.drawn import routed_call
from flux.select.hardware import UNHIDDEN
from flux.select.kernel import default_kernel
from flux.select.share import gemm_units, slowdown


def simulate_sparse(
    problem: SparseProblem,
    cluster: Cluster,
    knobs: Knobs,
    *,
    gemm_ms: float | None = None,
    seed: int = 0,
) -> tuple[Simulated, Simulated]:
    """Return the unfused path and path fused, of one routing. Pure: see ``simulate``.

    ``gemm_ms``: of the busiest rank's whole GEMM; None: the roofline's. ``seed``: of the routing.
    """
    simulator.check(problem, cluster, gemm_ms)
    if knobs.path != "fused":
        raise ValueError(f"path = {knobs.path} of {problem.name} is not simulated")
    topology, world = simulator.topology_of(problem, cluster), problem.world
    call_of = partial(simulator.call_of, problem, cluster, topology, late=0)
    if not problem.op.exchanges:
        routed = routed_call(problem, cluster, topology, knobs, gemm_ms, seed)
        parts, gathers, full = routed.parts, problem.op.gathers, routed.knobs
        tiles = sum(len(work.touches) * work.columns for work in routed.works)
        simulator.check_tiles(tiles, full)
        waves, whole = routed.waves, parts["GEMM"]
        kind: type[simulator.Processes] = Dispatch if gathers else Combine
        names = ("kernel", "schedules", "blocks", "tile_us")
        of_call = {name: getattr(routed, name) for name in names} | {"routed": routed}
    else:
        parts, gathers = unfused_parts(problem, cluster), problem.name == "all_to_all_gemm"
        kernel = default_kernel(problem, cluster)
        tile = kernel.cluster_tile
        tiles = ceil_div(problem.chunk, tile.rows) * ceil_div(problem.n, tile.columns)
        simulator.check_tiles(world * tiles, Knobs(tile=(tile.rows, tile.columns)))
        orders = [gpu_blocks(problem, rank, topology, knobs, tile) for rank in range(world)]
        blocks = simulator.blocks_of(kernel, gemm_units(problem, cluster), tiles)
        modelled = own_gemm_ms(problem, cluster.device, problem.n)
        whole = modelled if gemm_ms is None else gemm_ms
        parts["GEMM"] *= whole / modelled
        busy = whole * slowdown(problem.dense, cluster, Knobs(), None)
        moved = 2.0 * (world - 1) * problem.chunk * problem.row_bytes
        busy += UNHIDDEN * min(busy, memory_ms(cluster.device, moved))
        full, waves = orders[0].knobs, ceil_div(tiles, blocks)
        kind = HeadsGather if gathers else HeadsScatter
        of_call = {"kernel": kernel, "schedules": orders, "blocks": blocks}
        of_call |= {"tile_us": [1e3 * busy / waves] * world, "pieces": len(problem.heads)}
    comm = parts.get("AllToAll", 0.0)
    library = replace(simulator.one_by_one(problem, parts, comm, gathers=gathers), gemm_ms=whole)
    call = call_of(waiting=of_call["blocks"], **of_call)
    return library, simulator.finished(call, kind, full, whole, comm, waves)
