"""Multiprocessors that the GEMM of a fused call has, and those that it leaves to other kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flux.core.knobs import Knobs

if TYPE_CHECKING:
    from flux.core.knobs import OpRow
    from flux.core.problem import Problem
    from flux.kernels.config import GemmConfig
    from flux.machine.cluster import Cluster

BESIDE = 8
"""Most blocks that run beside a GEMM between nodes: sums for other nodes, and network kernels.
Eight blocks move more bytes than the network of a GPU does."""
MARGIN = 8
"""Multiprocessors that are left at most, by default."""
_OPEN = Knobs()


def beside(sm_share: int) -> int:
    """Return how many of these blocks ``sm_share`` multiprocessors can spare."""
    return max(1, min(BESIDE, sm_share // 16))


def margin(sm_count: int) -> int:
    """Return the multiprocessors that kernels that wait for peers leave to other kernels.

    A kernel of another stream may be what a peer is waiting for. Nothing must keep it from a
    multiprocessor until this rank's own wait is over.
    """
    return min(MARGIN, sm_count // 16) or int(sm_count > 1)


def lends_margin(op: OpRow, nodes: int, knobs: Knobs) -> bool:
    """Return whether blocks that claim tiles multiply on the margin too, until they had to wait.

    They leave the kernel then (csrc/cuda/gemm/tile_counter.cuh). Not a margin that the user sets,
    and not where kernels of this op itself need it: those that forward rows, or take partials to
    their owners.
    """
    if nodes > 1 or op.exchanges or knobs.path != "fused" or knobs.sm_margin is not None:
        return False
    if op.gathers:
        return knobs.direction == "pull" or knobs.order in (None, "direct")
    return knobs.sends != "copies" and knobs.reduce != "in_kernel"


def lends(problem: Problem, knobs: Knobs | None) -> bool:
    """Return whether the op's calls lend their margin to blocks that claim tiles."""
    if problem.experts > 1:
        return False
    return lends_margin(problem.op, problem.nodes, knobs or _OPEN)


def gemm_units(
    problem: Problem,
    cluster: Cluster,
    knobs: Knobs | None = None,
    kernel: GemmConfig | None = None,
) -> int:
    """Return the multiprocessors of the GEMM of a fused call, of all that a rank's device has.

    Between nodes the GEMM leaves room for kernels beside it in place of the margin. A kernel whose
    blocks claim tiles has the margin too where it is lent.
    """
    units = cluster.device.units
    if problem.world == 1 or cluster.device.kind != "cuda":
        return units
    if kernel is not None and kernel.tile_scheduler == "dynamic" and lends(problem, knobs):
        return units
    if knobs is not None and knobs.sm_margin is not None:
        units = max(1, units - knobs.sm_margin)
    elif problem.nodes == 1:
        units -= margin(units)
    return units if problem.nodes == 1 else max(1, units - beside(units))


def slowdown(problem: Problem, cluster: Cluster, knobs: Knobs, kernel: GemmConfig | None) -> float:
    """Return the time of a fused call's GEMM over that on all multiprocessors, if it multiplies.

    With a kernel: by the tiles of its busiest block, of which a few multiprocessors less may mean
    one more.
    """
    units, every = gemm_units(problem, cluster, knobs, kernel), cluster.device.units
    if kernel is None or units == every:
        return every / units
    # Plans do without the model of kernels.
    from flux.kernels.legality import GemmProblem
    from flux.select.cycles import busiest_depth

    gemm = GemmProblem.of(problem)
    return busiest_depth(kernel, gemm, units) / busiest_depth(kernel, gemm, every)


def taken_units(knobs: Knobs, sm_count: int, nodes: int) -> int:
    """Return the multiprocessors of a GEMM's grid that other kernels may hold when it starts.

    Those kernels are assumed where a margin is set, and between nodes. The margin is a number of
    multiprocessors that the grid leaves: it keeps no kernel to particular ones.
    """
    return knobs.sm_margin or (beside(sm_count) if nodes > 1 else 0)
