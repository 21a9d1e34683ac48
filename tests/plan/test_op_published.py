"""The op simulator beside published times: the committed figures, and how far off they may be."""

from __future__ import annotations

import json
from typing import Any

import op_simulator as published
import pytest


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
