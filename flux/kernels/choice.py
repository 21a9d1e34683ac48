"""Choose the built kernel that runs a GEMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flux.core.env import KERNEL_CHOICE
from flux.kernels import nvidia_heuristics
from flux.kernels.config import GemmConfig
from flux.kernels.cost import cost
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel

CLOSE = 1.005
"""Ratio up to which the model cannot distinguish two costs."""


def best_of(configs: Sequence[GemmConfig], costs: Sequence[float]) -> int:
    """Return the index of the best config.

    Of the configs within CLOSE of the least cost, take the one with the largest tile. It loads the
    fewest bytes per multiplication, and so leaves more of the GPU's power to multiplying. Of equal
    tiles take the cheapest, then the first by name.
    """
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
    """Return the candidate of least cost (``best_of``); None if there are no candidates.

    With FLUX_KERNEL_CHOICE=nvidia and a ``capability``, nvidia-matmul-heuristics ranks them, if it
    is installed and knows the GPU.
    """
    configs = [kernel.config for kernel in candidates]
    rank: Callable[[GemmConfig], float] | None = None
    if capability is not None and KERNEL_CHOICE.get() == "nvidia":
        rank = nvidia_heuristics.ranking(configs, problem, sm_count, capability)
    if rank is None:
        rank = partial(cost, problem=problem, sm_count=sm_count)
    return candidates[best_of(configs, [rank(config) for config in configs])] if configs else None
