"""The op simulator beside published times: the committed figures, and how far off they may be."""

from __future__ import annotations

import json
from typing import Any

import op_simulator as published
import pytest

from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.machine.cluster import load_cluster
from flux.select.cost import gemm_ms, library_ms


@pytest.fixture(scope="module")
def times() -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(published.RESULT.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = content["times"]
    return found


def test_the_committed_figures_are_what_the_simulator_gives(times: list[dict[str, Any]]) -> None:
    """The fused calls of the other clusters have more tiles, and take a second each."""
    for row in published.PUBLISHED:
        for method in ("torch", "flux"):
            if method == "torch" or row.cluster == "flux-h800":
                assert published.line(row, method) in times


def test_published_totals_are_within_a_tenth(times: list[dict[str, Any]]) -> None:
    assert len(times) == 2 * len(published.PUBLISHED)
    for row in times:
        assert abs(row["total_off"]) <= published.LIMITS["total"], row


def test_the_librarys_collective_between_hosts_is_a_ring() -> None:
    """From two published figures of one cluster follows how long its library's collective takes.

    With g the GEMM, c the collective, S the speed-up and E the overlap efficiency:
    S = (g + c) / (g + (1 - E) c), so c = g (S - 1) / (1 - S (1 - E)).
    """
    row = next(one for one in published.PAPER_TWO_HOSTS if one.cluster == "flux-a100-nvlink")
    cluster = load_cluster(row.cluster)
    n, k = published.SIZES["ag_gemm"]
    problem = Problem(Op.ag_gemm, published.TWO_HOSTS_ROWS, n, k, "bfloat16", 16, 2)
    gemm = gemm_ms(problem, cluster)
    implied = gemm * (row.speedup - 1) / (1 - row.speedup * (1 - row.efficiency))
    ring = library_ms(problem, cluster)
    assert ring == pytest.approx(implied, rel=0.1)
    hierarchical = ring * (1 / 2) / (15 / 16)  # each row crosses between the two hosts once
    assert hierarchical < 0.6 * implied
