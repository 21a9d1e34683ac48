"""Make the tile schedule of a call: check its arguments, and fill in open knobs."""

from __future__ import annotations

from functools import lru_cache

from flux import _C
from flux.core.datafile import MOST_SIZE
from flux.core.knobs import ClusterTile, Knobs, Op, check_legal
from flux.core.schedule import TileSchedule
from flux.core.topology import Topology
from flux.select.heuristic import IN_KERNEL_ROWS, resolve


def make_schedule(
    op: str,
    shape: tuple[int, int, int],
    world: int,
    rank: int,
    topology: Topology | None = None,
    knobs: Knobs | None = None,
    *,
    itemsize: int = 4,
    cluster: ClusterTile | None = None,
) -> TileSchedule:
    """Build the tile schedule of one rank. Pure, and cached.

    Args:
        op: ``ag_gemm`` | ``gemm_rs`` | ``gemm_ar``.
        shape: global (m, n, k), in elements; n (AllGather) or k is divided by ``world``.
        world: number of ranks.
        rank: the rank of the schedule, in [0, world).
        topology: the mesh of ranks; flat by default.
        knobs: fixed fields; the heuristic chooses the rest.
        itemsize: bytes per element, which the heuristic uses to size communication tiles.
        cluster: cluster tile of the GPU kernels; None: the CPU backend's heuristic chooses.

    Raises:
        ValueError: an unknown op, a shape or rank out of range, or an illegal combination of knobs;
            the message holds the operand values.
    """
    if op not in Op.__members__:
        raise ValueError(f"op must be one of {', '.join(Op.__members__)}, got {op!r}")
    topology = topology or Topology.flat(world)
    if topology.world != world:
        raise ValueError(f"topology has {topology.world} ranks, world is {world}")
    m, n, k = shape
    if itemsize < 1:
        raise ValueError(f"{op}: itemsize must be at least 1 byte, got {itemsize}")
    if min(m, n, k) < 1:
        raise ValueError(f"{op}: m, n and k must be positive, got {(m, n, k)}")
    if max(m, n, k) > MOST_SIZE:
        raise ValueError(f"{op}: m, n, k must be at most {MOST_SIZE}, got {(m, n, k)}")
    return _make(op, (m, n, k), world, rank, topology, knobs or Knobs(), itemsize, cluster)


@lru_cache(maxsize=1024)
def _make(
    op: str,
    shape: tuple[int, int, int],
    world: int,
    rank: int,
    topology: Topology,
    knobs: Knobs,
    itemsize: int,
    cluster: ClusterTile | None,
) -> TileSchedule:
    kind = Op[op]
    m, n, k = shape
    if knobs.path == "in_kernel" and not (kind.gathers and m <= IN_KERNEL_ROWS):
        raise ValueError(
            f"path in_kernel is for ag_gemm with M up to {IN_KERNEL_ROWS}, got {op} with M = {m}"
        )
    check_legal(knobs, topology)
    # Rank 0 has the largest share. Knobs must be the same on all ranks, so they come from its
    # sizes.
    local_n, local_k = _C.core.local_n(kind, n, world, 0), _C.core.local_k(kind, k, world, 0)
    sizes = (m, local_n, local_k, world, itemsize)
    knobs = resolve(kind, *sizes, knobs, topology.nodes, cluster)
    schedule = TileSchedule(op, shape, world, rank, topology, knobs, spread=cluster is not None)
    _ = schedule.native  # raises for illegal combinations here, not at the first use
    return schedule
