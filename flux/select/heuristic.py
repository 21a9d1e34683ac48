"""Default knobs fill in what neither the user nor a winner has set; the schedule that they make.

**CPU.** The defaults follow from measurements on a 2-core AVX-512 machine (fp32, one thread per
rank, CPU time; `benchmarks/one_host.py --parts slabs`):

* A GEMM cut into two slabs of rows packs its weight twice. Slabs of 1024 rows and more cost 0 to 5%
  over the whole GEMM, slabs of 512 rows 4 to 10%, slabs of 256 rows 7 to 20%.
* Copying a shard costs 0.5 to 1.5% of the GEMM that reads it. If every core has a rank to run, no
  core is free for the copy. So below slabs of 2048 rows it is faster to gather all rows first
  (through shared memory: several times faster than the library collective) and run one GEMM.
  Partials gain more: a GEMM that writes them where their owner reads them saves both the copy and
  the memory. So a ReduceScatter is cut from 1024 rows on.
* Between hosts (two with one rank each, 1 Gbit/s) each communication tile costs 0.1 to 2 ms of the
  core that multiplies, so tiles are few there, up to 8 or 16 MiB each.
* Handing work to the copy thread costs two wake-ups, 50 to 100 us together. In that time the
  calling thread copies about 256 KiB itself. With one GEMM tile there is no computation to overlap
  with.

**GPU.** The defaults differ, because the costs differ:

* Communication tiles are halves or quarters of a chunk, in whole rows of cluster tiles. With two or
  four tiles the GEMM can start on a chunk before all of it has arrived; more arrive no earlier,
  because copies of one stream are serial. A tile of 2 MiB or more spends most of its time on bytes:
  a copy between GPUs costs about 3 us before its first byte (tuning/clusters), in which NVLink at
  450 GB/s moves 1.3 MB. That decides between nodes, where tiles are passed on. Inside a node an
  AllGather has tiles of 32 MiB or more, mostly whole chunks, since streams pause some 10 us between
  copies: on NVLink copies of 16 MB reached four fifths of the speed of 64 MB (QuACK, on B300).
* On PCIe an AllGather takes longer than its GEMM, and what is multiplied behind the last copy comes
  on top: tiles are halves or quarters of 8 MiB or more there, and bands no higher than they. With
  bands of whole chunks smaller tiles win nothing (an H200, W = 4, M = 8192: 4.0 ms with whole
  chunks, 3.7 with quarters, 3.4 with bands of quarters; benchmarks/results/h200/loopback.json).
* Partials that copy engines send over PCIe take as long: the rows of the first owner leave by
  communication tiles, and bands are no higher than these.
* Raster: with N = K = 12288 a wave of 132 tiles of 128 x 256 covers less than three rows of tiles.
  So with raster 1 all of B (302 MB) streams through in every wave of about 142 us: 2.2 TB/s, half
  of the memory bandwidth of an H200. Bands of 8 rows of clusters of 256 x 256 share columns of B:
  0.7 TB/s, A included. A higher band gains little and needs more rows at once.
* Bands end where chunks end. AllGather: a band that reaches into the next chunk waits for rows that
  have not arrived, and blocks tiles behind it that could run. ReduceScatter: no tile waits for
  rows, but a band over several owners completes all of them with its last column. Then the own
  rows, which need no transfer, no longer hide the last transfers to other ranks.
* Except where chunks are small: each band reads all of B from memory. On an H100, 8 ranks, N =
  12288, K = 6144, M = 2048, bands of one chunk (256 rows) take 1.14 of torch.mm, of 1024 rows 1.06;
  M = 512, 1.32 and 1.08 (benchmarks/results/h100/rasters.json). So a ReduceScatter's bands have
  BAND_ROWS there, and between nodes, where rows of other nodes have to leave early, half. An
  AllGather's bands would wait for more chunks, so they have all rows only where reading B takes
  longer than any transfer: M = 128, tiles of 64 rows, 1.45 and 1.04.
* A ring on PCIe, in an AllGather on one node (Flux paper, section 4.3): each chunk crosses the link
  between processors once. Sent directly, it would cross once for each rank behind it.
* Push: the source's copy engine writes and then raises the signal, so no stream waits for a word in
  a peer's memory. Direct: NVSwitch connects every pair of GPUs at full speed. A ring would only
  forward data that can be sent at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flux import _C
from flux.core.datafile import MOST_SIZE
from flux.core.knobs import ClusterTile, Knobs, Op, OpRow, Topology, check_legal
from flux.core.problem import ceil_div, round_up
from flux.core.schedule import TileSchedule
from flux.select.hardware import FEW_ROWS
from flux.select.one_shot import one_shot_defaults

if TYPE_CHECKING:
    from flux.core.problem import Problem
    from flux.machine.cluster import Cluster

MAX_COMM_TILES = 64
"""Communication tiles of a chunk, at most, where no slab of a ReduceScatter asks for more."""

# CPU
MIN_SLAB_ROWS = {Op.ag_gemm: 2048, Op.gemm_rs: 1024, Op.gemm_ar: 1024}
COMM_TILE_BYTES = 1 << 20
NETWORK_TILE_BYTES = {Op.ag_gemm: 16 << 20, Op.gemm_rs: 8 << 20, Op.gemm_ar: 8 << 20}
MIN_NETWORK_SLAB_ROWS = 512
INLINE_BYTES = 256 << 10

# GPU
GPU_COMM_TILE_BYTES = 2 << 20
GPU_GATHERED_TILE_BYTES = 32 << 20
"""The least size of an AllGather's communication tile. Each tile is a copy, or one for each rank of
the host behind the network, which cost more than a GEMM that starts earlier gains."""
GPU_RING_TILE_BYTES = 8 << 20
"""The same around a ring, which is for links that are slower than the GEMM."""
GPU_COMM_TILE_COUNTS = (4, 2)
"""Communication tiles per chunk to try, largest first; each must have the least size."""
MAX_RASTER = 8
BAND_ROWS = 1024
"""Rows of a ReduceScatter's band, at least; below them a band covers several chunks. Between nodes
half of them."""
IN_KERNEL_ROWS = 512
"""Rows up to which kernels can push them: symmetric memory has two buffers of so many. With more, a
GEMM has several waves of tiles, behind which copies hide."""
PUSHED_ROWS = 64
"""Rows of a communication tile that a block pushes to the ranks with one of their experts."""
TWO_BUFFERS_BYTES = 64 << 20
"""Bytes of gathered rows up to which they have two buffers. In longer calls entries take less than
1% of the time."""
FEW_GATHERED_ROWS = 256
"""Rows up to which an AllGather's GEMM is one band."""


def untuned(problem: Problem, cluster: Cluster) -> Knobs:
    """Return what an op on these GPUs fixes if it has no winners: the order that its links need."""
    if cluster.link.kind == "pcie" and problem.nodes == 1 and problem.op.gathers:
        return Knobs(order="ring1d")
    return Knobs()


def dispatching(problem: Problem) -> Knobs:
    """Return what an op on GPUs fixes that sends rows only where their experts are.

    One block of the kernel pushes the rows of a communication tile to a peer, so tiles are small.
    Between nodes copies move all rows, as in an AllGather.
    """
    if problem.nodes > 1:
        return Knobs()
    chunk = ceil_div(problem.m, problem.world)
    return Knobs(comm_tile_rows=max(PUSHED_ROWS, ceil_div(chunk, MAX_COMM_TILES)))


def reason_one_buffer(op: OpRow, nodes: int, knobs: Knobs) -> str | None:
    """Return why gathered rows of an op on GPUs cannot have two buffers, or None."""
    if not op.gathers:
        return f"{op.label} gathers no rows"
    if knobs.direction == "pull":
        return "peers pull rows from the buffer that the call before has used"
    return f"the ranks are on {nodes} nodes" if nodes > 1 else None


def gathered_buffers(nbytes: float) -> int:
    """Return the default number of buffers of so many bytes of gathered rows."""
    return 2 if nbytes <= TWO_BUFFERS_BYTES else 1


def copies_partials(op: OpRow, nodes: int, knobs: Knobs) -> bool:
    """Return whether copy engines of GPUs move partials, from own memory.

    Raises:
        ValueError: they are wanted to, and cannot.
    """
    if knobs.sends == "copies" and (op.gathers or nodes > 1 or knobs.path == "in_kernel"):
        raise ValueError(
            f"sends = copies is for GemmRS and GemmAR on GPUs of one node, path fused, got "
            f"{op.label} on {nodes} node(s), path {knobs.path}"
        )
    copies = op.reduces and nodes == 1 and (knobs.path == "medium" or knobs.sends == "copies")
    if copies and knobs.reduce == "in_flight":
        raise ValueError(
            f"{op.label}: partials that copy engines move are summed by their owners, got reduce "
            f"in_flight with path {knobs.path}, sends {knobs.sends}"
        )
    return copies


def awaits_entries(problem: Problem, knobs: Knobs) -> bool:
    """Return whether rows of a gathering call on GPUs wait for entries of the same call."""
    if reason_one_buffer(problem.op, problem.nodes, knobs) is not None:
        return True
    return (knobs.buffers or gathered_buffers(problem.m * problem.row_bytes)) == 1


def copies_own_rows(problem: Problem, knobs: Knobs, tile_rows: int) -> bool:
    """Return whether a gathering call on GPUs copies own rows, which no tile reads in place.

    Args:
        problem: the op and its sizes.
        knobs: of the call.
        tile_rows: of a block of the GEMM.
    """
    if knobs.direction == "pull" or problem.nodes > 1:
        return True
    return knobs.path != "medium" and problem.world > 1 and problem.chunk % tile_rows != 0


def reason_not_pushed(op: OpRow, world: int, nodes: int, n: object, columns: int) -> str | None:
    """Return why kernels cannot push the rows or sums of an op, whatever their number, or None.

    Args:
        op: the op.
        world: its ranks.
        nodes: on which they are.
        n: columns of all ranks, for the text.
        columns: of the last rank, which has the fewest. Every rank launches a kernel.
    """
    if op.scatters:
        return f"{op.label} leaves each rank its own rows; use path = fused"
    if nodes > 1:
        return f"the ranks are on {nodes} nodes"
    return None if columns > 0 else f"rank {world - 1} of {world} has no columns, got n = {n}"


def kernels_can_push(problem: Problem) -> bool:
    """Return whether path in_kernel exists for a call of several ranks."""
    world, columns = problem.world, problem.weight_shape(problem.world - 1)[0]
    reason = reason_not_pushed(problem.op, world, problem.nodes, problem.n, columns)
    if problem.op.gathers and problem.scaling == "row":
        return False  # rows travel with their scales: flux.select.in_kernel
    return reason is None and world > 1 and problem.m <= IN_KERNEL_ROWS


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
    if knobs.path == "in_kernel" and (kind.scatters or m > IN_KERNEL_ROWS):
        raise ValueError(
            f"path in_kernel is for ag_gemm and gemm_ar with M up to {IN_KERNEL_ROWS}, got {op} "
            f"with M = {m}"
        )
    check_legal(knobs, topology)
    # Rank 0 has the largest share. Knobs must be the same on all ranks, so they come from its
    # sizes.
    local_n, local_k = _C.core.local_n(kind, n, world, 0), _C.core.local_k(kind, k, world, 0)
    sizes = Sizes(kind, m, (local_n, local_k), world, itemsize, topology.nodes)
    knobs = resolve(sizes, knobs, cluster)
    on_gpus = cluster is not None
    copied = on_gpus and copies_partials(kind, topology.nodes, knobs)
    splits = on_gpus and (kind.gathers or copied) and knobs.path == "medium"
    schedule = TileSchedule(op, shape, world, rank, topology, knobs, on_gpus, splits, copied=copied)
    _ = schedule.native  # raises for illegal combinations here, not at the first use
    return schedule


class Sizes(NamedTuple):
    """What the heuristic reads of a ``Problem``, where the dtype is not known."""

    op: Op
    m: int
    local: tuple[int, int]
    world: int
    itemsize: int
    nodes: int = 1


def resolve(sizes: Problem | Sizes, knobs: Knobs, cluster: ClusterTile | None = None) -> Knobs:
    """Fill in the fields that are open. Pure: equal arguments, equal result on all ranks.

    Args:
        sizes: the op and its sizes.
        knobs: the fields that the user fixed.
        cluster: cluster tile of the op's GPU kernels, the same on all ranks; None: on a CPU.
    """
    if cluster is not None:
        # On a CPU the owners' results of GemmAR are pulled; on a GPU the reduction stores them into
        # all ranks' memory.
        knobs = replace(knobs, direction=knobs.direction or "push")
    knobs = across_hosts(sizes.op, knobs, sizes.nodes)
    row_bytes = sizes.itemsize * sizes.local[1 if sizes.op.gathers else 0]
    if cluster is None:
        defaults = _cpu_defaults(sizes, row_bytes, knobs)
    else:
        defaults = _gpu_defaults(sizes, row_bytes, knobs, cluster)
    return replace(
        knobs,
        tile=defaults.tile,
        raster=knobs.raster or defaults.raster,
        comm_tile_rows=defaults.comm_tile_rows,
        swizzle=knobs.swizzle or "rank_shift",
        store=knobs.store or defaults.store,
        reduce=knobs.reduce or "local",
        copy_streams=defaults.copy_streams if knobs.copy_streams is None else knobs.copy_streams,
    )


def across_hosts(op: OpRow, knobs: Knobs, nodes: int) -> Knobs:
    """Set the knobs that depend only on the number of nodes: order and direction.

    Between hosts memory cannot be pulled from, and every byte should cross once.
    """
    order = knobs.order
    if order is None:
        order = "ring1d" if knobs.path == "medium" else "hierarchical" if nodes > 1 else "direct"
    pulls = op.all_reduces and nodes == 1
    return replace(knobs, order=order, direction=knobs.direction or ("pull" if pulls else "push"))


def most_comm_tiles(op: OpRow, chunk: int, knobs: Knobs, nodes: int, of_winners: int = 0) -> int:
    """Return no less than the most communication tiles that a chunk is cut into, at any M.

    Symmetric memory is sized by this number, so it must change with ``resolve``.

    Args:
        op: the fused op.
        chunk: rows of a chunk at the largest M.
        knobs: the fields that the user fixed.
        nodes: number of hosts; 1 on GPUs, whose partials do not leave by slabs.
        of_winners: most tiles that tuned winners cut a chunk into.
    """
    if knobs.comm_tile_rows is not None:
        most = ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
    else:
        most = MAX_COMM_TILES
        if nodes > 1 and op.reduces:
            # A partial leaves with its slab (message_rows), however many slabs a chunk has.
            slab = MIN_NETWORK_SLAB_ROWS if knobs.tile is None else knobs.tile[0]
            most = max(most, ceil_div(chunk, slab))
    return min(chunk, max(most, of_winners))


# -- CPU -------------------------------------------------------------------------------------------


def _cpu_defaults(sizes: Problem | Sizes, row_bytes: int, knobs: Knobs) -> Knobs:
    """Return default sizes, with fixed ones cut down to the matrix, and other defaults."""
    op, m, local_n, world, nodes = sizes.op, sizes.m, sizes.local[0], sizes.world, sizes.nodes
    chunk = ceil_div(m, world)
    if knobs.path == "one_shot":
        return one_shot_defaults(op, m, local_n, world, knobs)
    medium = knobs.path == "medium"
    # A tile that is stored directly into its owner's memory must not straddle two owners.
    by_chunk = medium or (knobs.store == "direct" and op.reduces)
    slab = slab_rows(op, m, world)
    if nodes > 1:  # no slab is done, or can begin, before a message is complete
        slab = max(network_slab_rows(op, m, world), min(knobs.comm_tile_rows or 1, chunk))
    tile = knobs.tile or ((chunk if medium or (by_chunk and nodes == 1) else slab), local_n)
    tile = (min(tile[0], m), min(tile[1], local_n))
    aligned = world == 1 or (chunk % tile[0] == 0 if nodes > 1 else tile[0] == chunk)
    if knobs.comm_tile_rows is not None:
        comm_rows = min(knobs.comm_tile_rows, chunk)
    elif medium:
        comm_rows = chunk
    else:
        tile_bytes = COMM_TILE_BYTES if nodes == 1 else NETWORK_TILE_BYTES[op]
        comm_rows = max(tile_bytes // row_bytes, ceil_div(chunk, MAX_COMM_TILES), 1)
        comm_rows = min(comm_rows, chunk if nodes == 1 else message_rows(op, chunk, tile[0]))
    moved = (world - 1) * chunk * row_bytes
    one_tile = tile[0] >= m and tile[1] >= local_n
    # A rank alone on its host has no copies to make: the network's own threads move its tiles.
    alone = world == nodes
    return Knobs(
        tile=tile,
        raster=1,
        comm_tile_rows=comm_rows,
        store="direct" if aligned and not medium else "staged",
        copy_streams=int(moved > INLINE_BYTES and not alone and not one_tile),
    )


def slab_rows(op: Op, m: int, world: int) -> int:
    """Return rows of a GEMM tile: whole chunks, at least MIN_SLAB_ROWS; M if under two slabs."""
    chunk = ceil_div(m, world)
    if m < 2 * MIN_SLAB_ROWS[op]:
        return m
    return min(m, chunk * ceil_div(MIN_SLAB_ROWS[op], chunk))


def network_slab_rows(op: Op, m: int, world: int) -> int:
    """Return rows of a GEMM tile between hosts: an equal part of a chunk, or a small chunk whole.

    ReduceScatter: the GEMM computes other hosts' rows first, and small slabs let the first of them
    leave early. With few rows, as in decoding, a GEMM takes as long as reading the weight: cut in
    two, it reads the weight twice.

    AllGather: when the last bytes have arrived, only the last tile remains to be computed; the
    tiles before it are computed as one (backends/cpu/backend.py).
    """
    chunk = ceil_div(m, world)
    if m <= FEW_ROWS and op.reduces:
        return m
    if chunk < 1024:
        return chunk
    if op.gathers:
        return next((chunk // parts for parts in (4, 3, 2) if chunk % parts == 0), chunk)
    least = MIN_NETWORK_SLAB_ROWS
    return next((rows for rows in range(least, 2 * least) if chunk % rows == 0), least)


def message_rows(op: Op, chunk: int, slab: int) -> int:
    """Return the rows of one message between hosts.

    ReduceScatter: a partial leaves with its slab. AllGather: the first message is the rows of x
    that the first slab of the chunk needs, the second is the rest.
    """
    if op.reduces:
        return min(slab, chunk)
    return chunk if slab >= chunk else max(slab, chunk - slab)


# -- GPU -------------------------------------------------------------------------------------------


def _gpu_defaults(
    sizes: Problem | Sizes, row_bytes: int, knobs: Knobs, cluster: ClusterTile
) -> Knobs:
    """Return default sizes, with fixed ones cut down to the matrix, and other defaults."""
    op, m, nodes = sizes.op, sizes.m, sizes.nodes
    chunk = ceil_div(m, sizes.world)
    comm_rows = knobs.comm_tile_rows
    whole = knobs.path in ("medium", "in_kernel")
    ring = op.gathers and nodes == 1 and knobs.order == "ring1d" and not whole
    if comm_rows is None:
        least = GPU_GATHERED_TILE_BYTES if op.gathers else GPU_COMM_TILE_BYTES
        least = GPU_RING_TILE_BYTES if ring else least
        comm_rows = chunk if whole else gpu_comm_tile_rows(chunk, row_bytes, cluster.rows, least)
    band = raster(op, m, chunk, cluster.rows, nodes, copied=knobs.sends == "copies")
    if knobs.sends == "copies" or (ring and m > FEW_GATHERED_ROWS):
        band = min(band, max(1, min(comm_rows, chunk) // cluster.rows))
    # In a schedule with direct stores, each GEMM tile lies inside one owner's rows. The kernel
    # itself has no such limit: it stores a tile once per owner.
    tile = knobs.tile or (chunk if knobs.store == "direct" else cluster.rows, cluster.columns)
    return Knobs(
        tile=(min(tile[0], m), min(tile[1], sizes.local[0])),
        raster=band,
        comm_tile_rows=min(comm_rows, chunk),
        store="staged",
        copy_streams=1,
    )


def gpu_comm_tile_rows(chunk: int, row_bytes: int, cluster_rows: int, least: int) -> int:
    """Return the rows of a communication tile: a chunk, or about a half or a quarter of it.

    Args:
        chunk: rows of a rank.
        row_bytes: bytes of a row of the communicated matrix.
        cluster_rows: rows of a cluster tile. A communication tile of fewer rows lets no GEMM tile
            start.
        least: bytes of a tile, at least.
    """
    for count in GPU_COMM_TILE_COUNTS:
        rows = round_up(ceil_div(chunk, count), cluster_rows)
        if rows < chunk and rows * row_bytes >= least:
            return rows
    return chunk


def raster(
    op: Op, m: int, chunk: int, cluster_rows: int, nodes: int = 1, *, copied: bool = False
) -> int:
    """Return the rows of cluster tiles in one sweep.

    Bands within a chunk are equal, and at most 8 rows high: up to 8 rows the band covers the whole
    chunk, min(8, chunk // cluster_rows). 12 rows become two bands of 6: with bands of 8, every
    second band would reach into the next chunk. The module says where bands cover several chunks;
    not where copies take an owner's rows (``copied``), which the first band would hold up.
    """
    if op.gathers and m <= FEW_GATHERED_ROWS:
        return ceil_div(m, cluster_rows)
    band = BAND_ROWS if nodes == 1 else BAND_ROWS // 2
    if op.reduces and chunk < band and not copied:
        return ceil_div(ceil_div(m, cluster_rows), max(1, m // band))
    rows = max(1, chunk // cluster_rows)
    return ceil_div(rows, ceil_div(rows, MAX_RASTER))
