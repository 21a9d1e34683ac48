"""Which of the built kernels to run, for shapes that nobody has tuned."""

from __future__ import annotations

from collections.abc import Sequence

from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def cost(config: GemmConfig, problem: GemmProblem, sm_count: int) -> float:
    """Relative time of the GEMM: waves of tiles, each as long as its multiply and its loads.

    A block loads (tile m + tile n) elements for tile m * tile n multiply-adds per step of k; below
    some 100 of these per loaded element the loads are what it waits for. Kernels without wgmma take
    about 1.6 times as long on a GPU that has it. Stream-K spreads the last wave over all
    multiprocessors.
    """
    tile_m, tile_n, _ = config.tile
    tiles = _ceil_div(problem.m, tile_m) * _ceil_div(problem.n, tile_n)
    waves = tiles / sm_count
    if config.schedule != "stream_k" or waves < 0.25:
        waves = float(_ceil_div(tiles, sm_count))
    generation = 1.0 if config.arch == "90a" else 1.6
    return waves * generation * max(tile_m * tile_n, 100 * (tile_m + tile_n))


def choose(
    candidates: Sequence[BuiltKernel], problem: GemmProblem, sm_count: int
) -> BuiltKernel | None:
    """The candidate of least cost; of equals the first by name. None if there is no candidate."""
    key = {kernel.symbol: cost(kernel.config, problem, sm_count) for kernel in candidates}
    return min(candidates, key=lambda k: (key[k.symbol], k.symbol), default=None)
