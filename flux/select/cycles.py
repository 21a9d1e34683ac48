"""Model the cost of kernels in cycles, to rank them for shapes without tuning results.

The model counts cycles of a multiprocessor. Its rates are from the H100 or H200 data sheet, or
rounded from published measurements; only ratios between kernels matter. No rate is fitted to
measurements of these kernels: `flux tune` measures, and its results take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux.core.problem import ceil_div, round_up
from flux.select.hardware import UNHIDDEN, blocks_per_wave

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig
    from flux.kernels.legality import GemmProblem

MACS_PER_CYCLE = 2048
"""For 16-bit operands: wgmma m64n256k16 takes 128 cycles. For 8-bit operands: twice as many."""
SM80_SHARE = 0.6
"""Share of the speed of wgmma and TMA that mma.sync and cp.async reach on a GPU that has both. On
other GPUs all kernels are sm_80 code, and the factor changes no choice."""
L2_BYTES = 40
"""Bytes per cycle that L2 delivers to each multiprocessor if all load. Tiles of 128 x 256 without
clusters, which reach about 700 TFLOP/s on an H100, need 36."""
PORT_BYTES = 64
"""Bytes per cycle that one multiprocessor takes from L2 if others take less."""
DRAM_BYTES = 16
"""Bytes per cycle and multiprocessor of the device's memory: 14.5 on an H100, 20.7 on an H200."""
STORE_BYTES = 32
"""Bytes per cycle of an epilogue's results."""
UNALIGNED = 2.0
"""Slowdown of loads of fewer than 16 bytes, which need at least twice the instructions."""
PROMOTED_DEPTH = 128
"""Depth of K after which sums of float8 are promoted: CUTLASS's interval of 4 multiplications."""
ADDS_PER_CYCLE = 128
"""Float32 additions of a multiprocessor."""
EXPOSED_ADDS = 0.44
"""Share of the additions that two warp groups of a tile do not hide. On an H100
GEMMs of M = 2048 and 8192 took 1.10 to 1.12 of those that promote nothing and multiply as much,
where the additions are 0.25 of the multiplying (benchmarks/results/h100/kernels_e4m3.json)."""
FIXUP_BYTES = 24
"""Bytes per cycle of partial sums, added by atomic operations in L2 (about 5.5 TB/s in total)."""
FIXUP_LINK = 2500
"""Cycles from one part of a tile to the next part, which waits for it: 1 to 2 us."""
FILL = 1800
"""Cycles from the start of a block to its first multiplication: about 1 us."""
CLAIM = {"90a": 1800, "80": 1200}
"""Cycles in which a dynamic tile scheduler claims a tile and nothing multiplies: an atomic addition
in L2 and a barrier. On sm_90a of the first tile, since a warp claims the others ahead; on sm_80 of
each tile. Our assumption."""
CLEAR = 3500
"""Cycles of the memset that stream-K puts before the kernel if tiles are shared: 2 us."""
MIN_UNIT = 8  # k tiles that CUTLASS's stream-K gives a block at least


@dataclass(frozen=True)
class GemmWork:
    """How a kernel divides a problem among blocks.

    Attributes:
        blocks: blocks that run at once.
        whole: tiles that a block computes alone, one after the other.
        shared: k tiles of a block's share in tiles that several blocks compute; 0: there are none.
        parts: blocks that add up one such tile.
        tiles: tiles of the result, including those that fill up clusters.
    """

    blocks: int
    whole: int
    shared: int
    parts: int
    tiles: int


def divide(config: GemmConfig, problem: GemmProblem, sm_count: int) -> GemmWork:
    """Return the division that the tile scheduler makes, by CUTLASS 4.2's own rules.

    Stream-K runs tiles whole (data-parallel) if the last wave is full or at least half full, or if
    K has 8 k tiles or fewer. Else the blocks of one wave share the last wave and the one before it,
    evenly along K; a block computes at least 8 k tiles. If the number of tiles divides the number
    of blocks, each tile is split in equal parts (split-K).
    """
    _, tile_n, tile_k = config.tile
    cluster_m, cluster_n = config.cluster
    rows = round_up(_tile_rows(config, problem), cluster_m)
    columns = round_up(ceil_div(problem.n, tile_n), cluster_n)
    tiles, depth = rows * columns, ceil_div(problem.k, tile_k)
    blocks = blocks_per_wave(config, sm_count)
    full, tail = divmod(tiles, blocks)
    whole = GemmWork(blocks, full + (tail > 0), 0, 1, tiles)
    if config.schedule != "stream_k" or tail == 0:
        return whole
    before = max(full - 1, 0)
    sharing = tiles - before * blocks
    if config.arch == "80":
        units = min(blocks, sharing * depth // 2)
        splits = units > 0 and _sm80_saves(sharing, depth, units, blocks)
    else:
        size = cluster_m * cluster_n
        units = min(blocks, depth * sharing // MIN_UNIT // size * size)
        splits = units > 0 and depth > MIN_UNIT and 2 * tail < blocks
    if not splits:
        return whole
    # If shares begin inside tiles, most tiles have one more part.
    parts = ceil_div(units, sharing) + (units % sharing > 0)
    return GemmWork(blocks, before, ceil_div(sharing * depth, units), parts, tiles)


def _tile_rows(config: GemmConfig, problem: GemmProblem) -> int:
    """Return the rows of tiles. The last tile of an expert is on average half full.

    Routers do not choose experts equally often: two of 96 rows on average may have 60 and 132.
    """
    height = config.tile[0]
    if problem.experts == 1:
        return ceil_div(problem.m, height)
    used = min(problem.experts, problem.m)
    return max(used, ceil_div(2 * problem.m + used * height, 2 * height))


def busiest_depth(config: GemmConfig, problem: GemmProblem, sm_count: int) -> int:
    """Return the elements of K that the busiest block multiplies, over all of its tiles."""
    work, tile_k = divide(config, problem, sm_count), config.tile[2]
    return tile_k * (work.whole * ceil_div(problem.k, tile_k) + work.shared)


def _sm80_saves(sharing: int, depth: int, units: int, blocks: int) -> bool:
    """Return whether CUTLASS 2.x splits tiles, by its own count of iterations saved and lost.

    CUTLASS also tries fewer units; this model takes all units as its best try.
    """
    share = ceil_div(sharing * depth, units)
    even = units % sharing == 0
    peers = units // sharing if even else ceil_div(units, sharing) + 1
    lost = int(2 + 2 * peers + (0.0 if even else 0.02 * peers * share))
    return depth * ceil_div(sharing, blocks) - share - lost >= 0


def bytes_per_k(config: GemmConfig, problem: GemmProblem) -> float:
    """Return the bytes that L2 reads for one block and element of K.

    Blocks of a cluster share loads: one read of B serves the blocks in a column, one of A those in
    a row. TMA and cp.async do not fetch rows beyond the matrix.
    """
    rows = min(config.tile[0], ceil_div(problem.m, problem.experts)) / config.cluster[1]
    columns = min(config.tile[1], problem.n) / config.cluster[0]
    return (rows + columns) * config.itemsize


@dataclass(frozen=True)
class Cycles:
    """Parts of a launch, in cycles of a multiprocessor.

    Attributes:
        multiply: multiplications of the slowest block, all its k tiles, and their promotion.
        load: loads of the slowest block; the longer of ``multiply`` and ``load`` counts.
        store: epilogues that no multiplication hides.
        fixup: adding up parts of shared tiles, and clearing their barriers before.
        claim: claims of tiles, with a dynamic tile scheduler.
        memory: A, B and the result, read and written once.
    """

    multiply: float
    load: float
    store: float
    fixup: float
    claim: float
    memory: float

    @property
    def total(self) -> float:
        """Cycles of the launch. Blocks and memory overlap; the other parts come on top."""
        busy = max(self.multiply, self.load)
        overlapped = max(busy, self.memory) + UNHIDDEN * min(busy, self.memory)
        return FILL + overlapped + self.store + self.fixup + self.claim

    @property
    def limit(self) -> str:
        """The longest part: ``multiply`` | ``L2`` | ``memory``."""
        parts = {"multiply": self.multiply, "L2": self.load, "memory": self.memory}
        return max(parts, key=lambda name: parts[name])


def cycles(config: GemmConfig, problem: GemmProblem, sm_count: int) -> Cycles:
    """Return the modelled parts of a launch.

    * Waves: a block computes its tiles one after the other, and the slowest block counts.
    * Promotion: the accumulators are added to others. Nothing multiplies meanwhile with pingpong,
    whose warp groups take turns; else the other warp group does, in part.
    * Loads: all blocks share L2's bandwidth; a few blocks are limited by their own ports.
    * Epilogues: exposed once per tile; once per launch with pingpong, where one warp group
    multiplies while the other stores.
    * Shared tiles (stream-K, split-K): each part except the first reads and writes fp32 sums
    through L2, and parts of a tile wait for one another.
    * Memory: for few rows this is the lower bound, the N * K weights, of each expert that has rows.
    """
    tile_m, tile_n, tile_k = config.tile
    work = divide(config, problem, sm_count)
    k_tiles = work.whole * ceil_div(problem.k, tile_k) + work.shared
    multiply = k_tiles * tile_k * tile_m * tile_n * config.itemsize / (MACS_PER_CYCLE * 2)
    if config.promoted:
        adds = k_tiles * tile_k / PROMOTED_DEPTH * tile_m * tile_n / ADDS_PER_CYCLE
        multiply += adds if config.schedule == "pingpong" else EXPOSED_ADDS * adds
    busy = 1.0 if work.shared else min(1.0, work.tiles / sm_count)
    load = bytes_per_k(config, problem) * max(1 / PORT_BYTES, busy / L2_BYTES)
    if config.arch == "80" and config.alignment_elements * config.itemsize < 16:
        load *= UNALIGNED
    store = tile_m * tile_n * config.output_itemsize / STORE_BYTES
    stores = 1 if config.schedule == "pingpong" else work.whole + (work.shared > 0)
    fixup = 0.0
    if work.shared:
        fixup = CLEAR + 2 * 4 * tile_m * tile_n / FIXUP_BYTES + (work.parts - 1) * FIXUP_LINK
    claim = 0.0
    if config.tile_scheduler == "dynamic":
        claim = CLAIM[config.arch] * (work.whole if config.arch == "80" else 1)
    m, n, k = problem.m, problem.n, problem.k
    weights = n * k * min(problem.experts, m)
    moved = (m * k + weights) * config.itemsize + m * n * config.output_itemsize
    return Cycles(
        multiply=multiply,
        load=k_tiles * tile_k * load,
        store=stores * store,
        fixup=fixup,
        claim=claim,
        memory=moved / (DRAM_BYTES * sm_count),
    )


def cost(config: GemmConfig, problem: GemmProblem, sm_count: int, taken: int = 0) -> float:
    """Return the modelled cycles of the GEMM; only ratios between kernels are meaningful.

    Args:
        config: the kernel.
        problem: the GEMM.
        sm_count: multiprocessors of its grid.
        taken: of these, held by other kernels when it starts. Blocks that find no room start when
            others end. They claim what is left; with a static tile scheduler they have as much to
            do as the others.
    """
    if config.tile_scheduler == "dynamic":
        total = cycles(config, problem, max(sm_count - taken, 1)).total
    else:
        work = divide(config, problem, sm_count)
        late = min(work.tiles, work.blocks) > sm_count - taken
        total = cycles(config, problem, sm_count).total * (2 if late else 1)
    return total if config.arch == "90a" else total / SM80_SHARE
