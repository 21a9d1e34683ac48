"""Rank a search's candidates with the op simulator, for hardware that is not here.

The cost model of flux/select/cost.py is a closed form: it ranks thousands of candidates in a
second, and knows nothing of contention, stores in bursts, or waits inside a band of tiles. The
simulator knows them, and takes about a second for 25,000 GEMM tiles. So it ranks only the best few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux.core.problem import Problem, ceil_div
from flux.kernels.legality import GemmProblem
from flux.machine.cluster import Cluster
from flux.opsim.simulator import simulate
from flux.select.cost import gemm_ms
from flux.select.cycles import cost
from flux.select.space import ALWAYS, Candidate

BEST = 4
"""Candidates beside those of ALWAYS that are simulated, at most."""
MOST_TILES = 240_000
"""GEMM tiles of all ranks and candidates that one command simulates: a few seconds."""


@dataclass(frozen=True)
class Ranked:
    """A candidate and its simulated time, in ms."""

    name: str
    simulated_ms: float
    predicted_ms: float


def _tiles(problem: Problem, candidate: Candidate) -> int:
    """Return the GEMM tiles of all ranks in one simulated call."""
    tile = candidate.knobs.tile
    if not candidate.knobs.is_tiled or tile is None:
        return 0
    across = ceil_div(problem.local[0], tile[1])
    return problem.world * ceil_div(problem.m, tile[0]) * across


def ranked(
    problem: Problem,
    cluster: Cluster,
    candidates: Sequence[Candidate],
    most_tiles: int = MOST_TILES,
) -> list[Ranked]:
    """Return the simulated candidates, the fastest first. Pure.

    A kernel's GEMM takes the roofline's time, times its modelled cycles over those of the default's
    kernel.

    Args:
        problem: op and sizes.
        cluster: devices and links.
        candidates: those of ALWAYS first, then the others by predicted time.
        most_tiles: limit of the GEMM tiles that are simulated; candidates are taken in order up to
            it, and at most BEST of those behind ALWAYS.

    Raises:
        ValueError: the simulator cannot run this problem on this cluster.
    """
    gemm, units = GemmProblem.of(problem), cluster.device.units
    kernels = {c.name: c.kernel for c in candidates if c.kernel is not None}
    base = kernels.get("default")
    ranking, left = [], most_tiles
    for candidate in candidates[: len(ALWAYS) + BEST]:
        left -= _tiles(problem, candidate)
        if left < 0:
            break
        kernel, slower = candidate.kernel, 1.0
        if kernel is not None and base is not None:
            slower = cost(kernel, gemm, units) / cost(base, gemm, units)
        call = simulate(
            problem,
            cluster,
            candidate.knobs,
            kernel=kernel,
            gemm_ms=gemm_ms(problem, cluster) * slower,
        )
        ranking.append(Ranked(candidate.name, call.total_ms, candidate.predicted_ms))
    return sorted(ranking, key=lambda row: row.simulated_ms)
