"""How far the op simulator may be off published times."""

from __future__ import annotations

import op_simulator as published
import pytest

from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.machine.cluster import load_cluster
from flux.select.cost import gemm_ms, library_ms


def test_simulated_totals_are_within_a_tenth_of_published_ones() -> None:
    """The fused calls of the other clusters have more tiles, and take a second each."""
    for row in published.PUBLISHED:
        for method in ("torch", "flux") if row.cluster == "flux-h800" else ("torch",):
            beside = published.line(row, method)
            assert abs(beside["total_off"]) <= published.LIMITS["total"], beside


def test_the_librarys_collective_between_hosts_is_a_ring() -> None:
    """From two published figures of one cluster follows how long its library's collective takes.

    With g the GEMM, c the collective, S the speed-up and E the overlap efficiency:
    S = (g + c) / (g + (1 - E) c), so c = g (S - 1) / (1 - S (1 - E)).
    """
    row = next(r for r in published.PAPER_TWO_HOSTS if r.cluster == "flux-a100-nvlink")
    cluster = load_cluster(row.cluster)
    n, k = published.SIZES["ag_gemm"]
    problem = Problem(Op.ag_gemm, published.TWO_HOSTS_ROWS, n, k, "bfloat16", 16, 2)
    gemm = gemm_ms(problem, cluster)
    implied = gemm * (row.speedup - 1) / (1 - row.speedup * (1 - row.efficiency))
    ring = library_ms(problem, cluster)
    assert ring == pytest.approx(implied, rel=0.1)
    hierarchical = ring * (1 / 2) / (15 / 16)  # each row crosses between the two hosts once
    assert hierarchical < 0.6 * implied
