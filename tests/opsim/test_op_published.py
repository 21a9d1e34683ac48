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


def test_mixtures_of_experts_on_pcie_are_within_a_sixth_of_published_times() -> None:
    for case in published.EXPERTS[1:2]:  # the others take a second each, or are explained
        for row in published.experts(case):
            assert abs(row["off"]) <= 0.16, row
            assert row["unfused_ms"] > row["gemm_ms"] + row["comm_ms"], "rows are sorted or summed"


def test_experts_fill_whole_tiles_and_their_tokens_travel_once() -> None:
    cluster = load_cluster("flux-h800")
    even = Problem(Op.ag_gemm, 4096, 8192, 8192, "bfloat16", 8, experts=8, topk=2)
    times = {}
    for experts, topk in ((1, 1), (8, 1), (8, 2), (64, 2)):
        problem = Problem(Op.ag_gemm, 4096, 8192, 8192, "bfloat16", 8, experts=experts, topk=topk)
        times[experts, topk] = published.best(problem, cluster)
    assert times[8, 2].comm_ms < 0.6 * times[8, 1].comm_ms, "half of the rows travel"
    assert times[8, 2].total_ms < times[8, 1].total_ms
    assert times[64, 2].total_ms > 1.5 * times[8, 2].total_ms, "64 rows of an expert fill 256"
    with pytest.raises(ValueError, match="path = medium of a grouped GEMM"):
        published.simulate(even, cluster, published.Knobs(path="medium"))
    with pytest.raises(ValueError, match="topk must be at most experts = 1"):
        Problem(Op.ag_gemm, 4096, 8192, 8192, "bfloat16", 8, topk=2)
