"""Which of the built kernels to run, for shapes that have no tuned winner.

The model counts cycles of a multiprocessor. Its rates are those of an H100 or H200 data sheet, or
rounded from published measurements; only ratios between kernels matter. Nothing here is fitted to
measurements of these kernels: `flux tune` measures, and overrules it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flux.env import KERNEL_CHOICE
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel

MACS_PER_CYCLE = 2048
"""Of 16-bit operands: wgmma m64n256k16 takes 128 cycles. 8-bit operands: twice as many."""
SM80_SHARE = 0.6
"""Of wgmma's and TMA's speed that mma.sync and cp.async reach on a GPU that has both. On other GPUs
all kernels are sm_80 code, and the factor changes no choice."""
L2_BYTES = 40
"""Per cycle that L2 delivers to each of all multiprocessors together. Tiles of 128 x 256 without
clusters, which reach some 700 TFLOP/s on an H100, take 36."""
PORT_BYTES = 64
"""Per cycle that one multiprocessor takes from L2 when others take less."""
DRAM_BYTES = 16
"""Per cycle and multiprocessor of the device's memory: 14.5 on an H100, 20.7 on an H200."""
STORE_BYTES = 32
"""Per cycle of an epilogue's results."""
UNALIGNED = 2.0
"""Loads of fewer than 16 bytes take at least twice the instructions."""
FIXUP_BYTES = 24
"""Per cycle of partial sums, added up by atomic operations in L2 (some 5.5 TB/s of all)."""
FIXUP_LINK = 2500
"""Cycles from one part of a tile to the next, which waits for it: 1 to 2 us."""
FILL = 1800
"""Cycles from the start of a block to its first multiplication: about 1 us."""
CLEAR = 3500
"""Cycles of the memset that stream-K puts in front of the kernel when tiles are shared: 2 us."""
UNHIDDEN = 0.125
"""Of the shorter of multiplying and reading memory: ramps at both ends overlap with nothing."""

GPC_SMS = 18  # multiprocessors in which a cluster must find room (CUTLASS, tile_scheduler_params.h)
MIN_UNIT = 8  # k tiles that CUTLASS's stream-K gives a block at least


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks_per_wave(config: GemmConfig, sm_count: int) -> int:
    """Return the thread blocks that run at once: clusters do not cross the borders of GPCs."""
    size = config.cluster[0] * config.cluster[1]
    if size == 1:
        return sm_count
    whole, rest = divmod(sm_count, GPC_SMS)
    fitting = whole * (GPC_SMS - GPC_SMS % size) + (rest - rest % size)
    return max(fitting, size)


@dataclass(frozen=True)
class Work:
    """How a kernel divides a problem among blocks.

    Attributes:
        blocks: that run at once.
        whole: tiles that a block does by itself, one after the other.
        shared: k tiles of its share in tiles that several blocks do; 0: there are none.
        parts: blocks that add up one such tile.
        tiles: of the result, those that fill up clusters included.
    """

    blocks: int
    whole: int
    shared: int
    parts: int
    tiles: int


def divide(config: GemmConfig, problem: GemmProblem, sm_count: int) -> Work:
    """Return what the tile scheduler makes of the problem, by CUTLASS 4.2's own rules.

    Stream-K runs tiles whole (data-parallel) if the last wave is full or at least half full, or if
    K has 8 k tiles or fewer. Else the blocks of one wave share the last wave and the one before it,
    evenly along K; a block does at least 8 k tiles. Where tiles divide the blocks, each is split in
    equal parts (split-K).
    """
    tile_m, tile_n, tile_k = config.tile
    cluster_m, cluster_n = config.cluster
    rows = _ceil_div(_ceil_div(problem.m, tile_m), cluster_m) * cluster_m
    columns = _ceil_div(_ceil_div(problem.n, tile_n), cluster_n) * cluster_n
    tiles, depth = rows * columns, _ceil_div(problem.k, tile_k)
    blocks = blocks_per_wave(config, sm_count)
    full, tail = divmod(tiles, blocks)
    whole = Work(blocks, full + (tail > 0), 0, 1, tiles)
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
    # Where shares begin within tiles, most tiles have one part more.
    parts = _ceil_div(units, sharing) + (units % sharing > 0)
    return Work(blocks, before, _ceil_div(sharing * depth, units), parts, tiles)


def _sm80_saves(sharing: int, depth: int, units: int, blocks: int) -> bool:
    """Whether CUTLASS 2.x splits tiles: its own count of iterations saved and lost.

    It tries fewer units, too; here all of them stand for its best try.
    """
    share = _ceil_div(sharing * depth, units)
    even = units % sharing == 0
    peers = units // sharing if even else _ceil_div(units, sharing) + 1
    lost = int(2 + 2 * peers + (0.0 if even else 0.02 * peers * share))
    return depth * _ceil_div(sharing, blocks) - share - lost >= 0


def _bytes_per_k(config: GemmConfig, problem: GemmProblem) -> float:
    """Return the bytes that L2 reads for one block and element of K.

    Blocks of a cluster share: one read of B serves the blocks below one another, one of A those
    beside one another. TMA and cp.async do not fetch rows beyond the matrix.
    """
    rows = min(config.tile[0], problem.m) / config.cluster[1]
    columns = min(config.tile[1], problem.n) / config.cluster[0]
    return (rows + columns) * config.itemsize


@dataclass(frozen=True)
class Cycles:
    """Parts of a launch, in cycles of a multiprocessor.

    Attributes:
        multiply, load: of the slowest block, all its k tiles; the longer of the two counts.
        store: epilogues that no multiplication hides.
        fixup: adding up parts of shared tiles, and clearing their barriers before.
        memory: A, B and the result, read and written once.
    """

    multiply: float
    load: float
    store: float
    fixup: float
    memory: float

    @property
    def total(self) -> float:
        """Blocks and memory work at once; what is behind the last multiplication comes on top."""
        busy = max(self.multiply, self.load)
        overlapped = max(busy, self.memory) + UNHIDDEN * min(busy, self.memory)
        return FILL + overlapped + self.store + self.fixup

    @property
    def limit(self) -> str:
        """What takes longest: ``multiply`` | ``L2`` | ``memory``."""
        parts = {"multiply": self.multiply, "L2": self.load, "memory": self.memory}
        return max(parts, key=lambda name: parts[name])


def cycles(config: GemmConfig, problem: GemmProblem, sm_count: int) -> Cycles:
    """Return the modelled parts of a launch.

    * Waves: a block does its tiles one after the other, and the slowest block counts.
    * Loads: all blocks together share L2's bandwidth; few blocks are limited by their own ports.
    * Epilogues: exposed once per tile, or once per launch with pingpong, where one warp group
      multiplies while the other stores.
    * Shared tiles (stream-K, split-K): each part but the first reads and writes fp32 sums through
      L2, and parts of a tile wait for one another.
    * Memory: for few rows this is the floor, the N * K weights.
    """
    tile_m, tile_n, tile_k = config.tile
    work = divide(config, problem, sm_count)
    k_tiles = work.whole * _ceil_div(problem.k, tile_k) + work.shared
    rate = MACS_PER_CYCLE * 2 / config.itemsize
    busy = 1.0 if work.shared else min(1.0, work.tiles / sm_count)
    load = _bytes_per_k(config, problem) * max(1 / PORT_BYTES, busy / L2_BYTES)
    if config.arch == "80" and config.alignment_elements * config.itemsize < 16:
        load *= UNALIGNED
    store = tile_m * tile_n * config.output_itemsize / STORE_BYTES
    stores = 1 if config.schedule == "pingpong" else work.whole + (work.shared > 0)
    fixup = 0.0
    if work.shared:
        fixup = CLEAR + 2 * 4 * tile_m * tile_n / FIXUP_BYTES + (work.parts - 1) * FIXUP_LINK
    m, n, k = problem.m, problem.n, problem.k
    moved = (m * k + n * k) * config.itemsize + m * n * config.output_itemsize
    return Cycles(
        multiply=k_tiles * tile_k * tile_m * tile_n / rate,
        load=k_tiles * tile_k * load,
        store=stores * store,
        fixup=fixup,
        memory=moved / (DRAM_BYTES * sm_count),
    )


def cost(config: GemmConfig, problem: GemmProblem, sm_count: int) -> float:
    """Return the modelled cycles of the GEMM; only ratios between kernels mean something."""
    total = cycles(config, problem, sm_count).total
    return total if config.arch == "90a" else total / SM80_SHARE


CLOSE = 1.005
"""Ratio of two costs that the model cannot tell apart."""


def best_of(configs: Sequence[GemmConfig], costs: Sequence[float]) -> int:
    """Return the index of the config to take: of those within CLOSE of the least cost the one with
    the largest tile, which loads the fewest bytes for each multiplication and so leaves more of the
    GPU's power to multiplying; of equals the cheapest, then the first by name."""
    least = min(costs)

    def order(index: int) -> tuple[float, float, str]:
        m, n, _ = configs[index].tile
        return (1 / m + 1 / n, costs[index], configs[index].name)

    return min((i for i, cost in enumerate(costs) if cost <= least * CLOSE), key=order)


def choose(
    candidates: Sequence[BuiltKernel],
    problem: GemmProblem,
    sm_count: int,
    capability: tuple[int, int] | None = None,
) -> BuiltKernel | None:
    """Return the candidate of least cost (``best_of``); None if there is none.

    With FLUX_KERNEL_CHOICE=nvidia and a ``capability``, nvidia-matmul-heuristics ranks them, if it
    is installed and knows the GPU.
    """
    configs = [kernel.config for kernel in candidates]
    rank: Callable[[GemmConfig], float] | None = None
    if capability is not None and KERNEL_CHOICE.get() == "nvidia":
        from flux.kernels import nvidia_heuristics

        rank = nvidia_heuristics.ranking(configs, problem, sm_count, capability)
    if rank is None:
        rank = partial(cost, problem=problem, sm_count=sm_count)
    return candidates[best_of(configs, [rank(config) for config in configs])] if configs else None
