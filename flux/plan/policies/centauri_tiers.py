"""Centauri's operation and model tier in closed form (C. Chen et al., ASPLOS 2024, section 3.2).

The policy treats what these functions return as candidates, of which the simulator takes the best.
"""

from __future__ import annotations

from math import ceil, isfinite

from flux.core.problem import checked_integer


def operation_tier(
    inner: float,
    comm: float,
    comp: float,
    c_inter: float,
    inter: int,
    intra: int,
    max_chunks: int,
    grouped: bool = True,
) -> list[float]:
    """Return the fractions into which a collective and what depends on it are cut: Algorithm 1.

    Args:
        inner: cost of independent operators, which run alongside the collective in any case.
        comm: cost of the collective.
        comp: cost of the operators that depend on it.
        c_inter: cost of its part between hosts, if it is partitioned by groups.
        inter: ranks of a group between hosts.
        intra: ranks of a group inside a host.
        max_chunks: most chunks of an even partition.
        grouped: whether the collective is an AllGather that is partitioned by groups.

    Returns:
        Fractions, in the order of execution. Partitioned by groups: the part between hosts first
        (two fractions, where ``inner`` hides it), or the part inside the host first: two fractions,
        or three, where own shards alone go between hosts. Costs may have any common unit.
    """
    costs = {"inner": inner, "comm": comm, "comp": comp, "c_inter": c_inter}
    for name, cost in costs.items():
        if not (isfinite(cost) and cost >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {cost!r}")
    inter, intra = checked_integer("inter", inter, 1), checked_integer("intra", intra, 1)
    max_chunks = checked_integer("max_chunks", max_chunks, 1)
    if inner >= comm:
        return [1.0]
    if not grouped:
        chunks = max_chunks if inner == 0 else min(max_chunks, ceil(min(comm / inner, max_chunks)))
        return [1 / chunks] * chunks
    world = inter * intra
    if inner > c_inter:
        return [inter / world, 1 - inter / world]
    if comp / inter > intra * c_inter:
        return [intra / world, 1 - intra / world]
    return [intra / world, (inter - 1) / world, 1 - (inter + intra - 1) / world]


def model_tier(
    gather: float,
    scatter: float,
    forward: float,
    backward: float,
    memory: float,
    free: float,
    micro_batches: int,
    depth: int = 1,
    joint: bool = False,
) -> tuple[int, int]:
    """Return L1 and L2, micro-batches launched together forward and backward: Eq. 2.

    Minimises max(gather - L1 * forward, 0) + max(scatter - L2 * backward, 0). Each term is convex
    in its own variable, so adding micro-batches where they gain most is optimal. Of equally good
    pairs the one with fewest micro-batches is returned, because those hold memory.

    Args:
        gather: cost of the AllGather of weights of a stage (C_AG).
        scatter: cost of the ReduceScatter of its gradients (C_RS).
        forward: cost of the forward of a micro-batch (C_fw).
        backward: cost of its backward (C_bw).
        memory: bytes of activations of a micro-batch (m).
        free: bytes for activations (M): L1 * memory and L2 * memory are at most that.
        micro_batches: of a step (mb).
        depth: pipeline stages: least L1 and L2, where there are so many micro-batches.
        joint: demand L1 + L2 <= micro_batches as Eq. 2 does; figure 7c of the paper does not.
    """
    for name, cost in (
        *(("gather", gather), ("scatter", scatter), ("forward", forward)),
        *(("backward", backward), ("memory", memory), ("free", free)),
    ):
        if not cost >= 0:
            raise ValueError(f"{name} must be at least 0, got {cost!r}")
    micro_batches = checked_integer("micro_batches", micro_batches, 1)
    depth = checked_integer("depth", depth, 1)
    least = min(depth, micro_batches)
    most = micro_batches if memory == 0 else int(min(free / memory, micro_batches))
    total = micro_batches if joint else 2 * micro_batches
    if most < least or 2 * least > total:
        raise ValueError(
            f"{least} micro-batches at a time do not fit: memory is for {most}"
            + (f", and L1 + L2 must be at most {total}" if joint else "")
        )
    counts = [least, least]
    left = [gather - least * forward, scatter - least * backward]
    hides = (forward, backward)
    while sum(counts) < total:
        gains = [min(hides[i], max(left[i], 0.0)) if counts[i] < most else 0.0 for i in (0, 1)]
        best = 0 if gains[0] >= gains[1] else 1
        if gains[best] <= 0:
            break
        counts[best] += 1
        left[best] -= hides[best]
    return counts[0], counts[1]
