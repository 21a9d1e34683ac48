"""The benchmark's figures: by hand-computed numbers, and what must hold for any numbers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flux.bench import metrics, report

milliseconds = st.floats(1e-3, 1e5)


def test_metrics_match_a_hand_computed_example() -> None:
    # 10 ms of GEMM, 6 ms of collective, 17 ms unfused (1 ms lost between them), 12 ms fused.
    got = metrics.evaluate(overall_ms=12, gemm_non_split_ms=10, comm_ms=6, non_overlap_ms=17)
    assert got.ect_ms == 2
    assert got.overlap_efficiency == pytest.approx(1 - 2 / 7)
    assert got.bounded_efficiency == pytest.approx((17 - 12) / (17 - 10))
    assert got.speedup_vs_unfused == pytest.approx(17 / 12)


def test_bounded_efficiency_when_communication_dominates() -> None:
    # Communication is the longer part: at best the call lasts 20 ms, and 22 ms hides 5 of 7.
    got = metrics.evaluate(overall_ms=22, gemm_non_split_ms=8, comm_ms=20, non_overlap_ms=29)
    assert got.overlap_efficiency == pytest.approx(1 - 14 / 21)
    assert got.bounded_efficiency == pytest.approx(7 / 9)


def test_the_papers_readme_example() -> None:
    # A800, TP8, M=4096 N=49152 K=12288: GEMM 2.378 ms, total 2.469 ms; unfused total 3.099 ms.
    assert metrics.effective_communication_time(2.469, 2.378) == pytest.approx(0.091)
    got = metrics.overlap_efficiency(2.469, 2.378, 3.099)
    assert got == pytest.approx(1 - 0.091 / 0.721)


def test_overlap_efficiency_is_zero_for_unfused_and_negative_for_slower_methods() -> None:
    same = metrics.evaluate(17, 10, 6, 17)
    assert (same.overlap_efficiency, same.bounded_efficiency) == (0, 0)
    assert same.speedup_vs_unfused == 1
    slower = metrics.evaluate(20, 10, 6, 17)
    assert slower.overlap_efficiency == pytest.approx(1 - 10 / 7)
    assert slower.bounded_efficiency == pytest.approx(-3 / 7)


@pytest.mark.parametrize(
    "overall, gemm, comm, non_overlap",
    [
        (10, 10, 0, 10),  # nothing is communicated, as with one rank
        (10, 11, 0, 10),  # the GEMM alone was measured slower than the whole call
        (10, 9.999, 0, 10),  # a difference below the resolution of the measurement
    ],
)
def test_ratios_are_none_when_their_denominator_is_noise(
    overall: float, gemm: float, comm: float, non_overlap: float
) -> None:
    got = metrics.evaluate(overall, gemm, comm, non_overlap)
    assert got.overlap_efficiency is None
    assert got.bounded_efficiency is None
    assert got.speedup_vs_unfused == pytest.approx(1)


def test_without_a_baseline_there_is_no_ratio() -> None:
    got = metrics.evaluate(12, 10, 6, None)
    assert got.ect_ms == 2
    assert got.overlap_efficiency is None
    assert got.bounded_efficiency is None
    assert got.speedup_vs_unfused is None


@given(milliseconds, milliseconds, milliseconds, milliseconds)
def test_metrics_are_finite_and_serialisable(
    overall: float, gemm: float, comm: float, non_overlap: float
) -> None:
    got = metrics.evaluate(overall, gemm, comm, non_overlap)
    json.dumps(got.__dict__, allow_nan=False)
    for value in got.__dict__.values():
        assert value is None or math.isfinite(value)


@given(milliseconds, milliseconds, milliseconds, st.floats(0.01, 0.99))
def test_bounded_efficiency_equals_the_hidden_share(
    gemm: float, comm: float, lost: float, share: float
) -> None:
    """An ideal overlap of `share` of what can be hidden has exactly that bounded efficiency."""
    non_overlap = gemm + comm + lost
    hideable = non_overlap - max(gemm, comm)
    assume(hideable > 0.01 * non_overlap)
    overall = non_overlap - share * hideable
    got = metrics.bounded_efficiency(overall, gemm, comm, non_overlap)
    assert got == pytest.approx(share, rel=1e-6, abs=1e-6)


@given(milliseconds, milliseconds, milliseconds, milliseconds, st.floats(0.01, 100))
def test_efficiencies_do_not_depend_on_the_unit(
    overall: float, gemm: float, comm: float, non_overlap: float, unit: float
) -> None:
    a = metrics.evaluate(overall, gemm, comm, non_overlap)
    b = metrics.evaluate(overall * unit, gemm * unit, comm * unit, non_overlap * unit)
    for name in ("overlap_efficiency", "bounded_efficiency", "speedup_vs_unfused"):
        first, second = getattr(a, name), getattr(b, name)
        if first is not None and second is not None:
            assert first == pytest.approx(second, rel=1e-6, abs=1e-6)


@given(milliseconds, milliseconds, milliseconds, milliseconds)
def test_faster_is_never_less_efficient(
    gemm: float, comm: float, non_overlap: float, overall: float
) -> None:
    a = metrics.evaluate(overall, gemm, comm, non_overlap)
    b = metrics.evaluate(overall * 0.9, gemm, comm, non_overlap)
    for name in ("overlap_efficiency", "bounded_efficiency", "speedup_vs_unfused"):
        first, second = getattr(a, name), getattr(b, name)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert second >= first


@given(st.lists(st.lists(milliseconds, min_size=5, max_size=5), min_size=1, max_size=8))
def test_slowest_rank_returns_the_maximum_of_each_repeat(ranks: list[list[float]]) -> None:
    slowest = metrics.slowest_rank(ranks)
    assert len(slowest) == 5
    for repeat, time in enumerate(slowest):
        assert time in [times[repeat] for times in ranks]
        assert all(time >= times[repeat] for times in ranks)


def test_max_comes_before_median() -> None:
    # Each rank's own median is 1, yet every repeat took 9: ranks were slow in turns.
    ranks = [[9, 1, 1], [1, 9, 1], [1, 1, 9]]
    assert metrics.median(metrics.slowest_rank(ranks)) == 9


def test_invalid_samples_raise() -> None:
    with pytest.raises(ValueError, match="same number of repeats"):
        metrics.slowest_rank([[1, 2], [1]])
    with pytest.raises(ValueError, match="no samples"):
        metrics.median([])


def scattered(centre: float, spread: float, repeats: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [centre + spread * draw.gauss(0, 1) for _ in range(repeats)]


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """GEMM 100, unfused 160, fused 115: 75% hidden. Each sample scatters by 5."""
    inside, widths = 0, []
    for seed in range(0, 150, 3):
        gemm, unfused, fused = (
            scattered(centre, 5, 25, seed + index) for index, centre in enumerate((100, 160, 115))
        )
        interval = metrics.overlap_efficiency_interval(fused, [gemm], unfused)
        assert interval is not None
        inside += interval[0] <= 0.75 <= interval[1]
        widths.append(interval[1] - interval[0])
    assert 40 <= inside <= 50  # 45 expected
    assert 0.04 < sum(widths) / len(widths) < 0.16


def test_interval_ignores_drift_that_all_calls_of_a_repeat_share() -> None:
    drift = scattered(1, 0.2, 15, seed=1)
    gemm, unfused, fused = ([centre * by for by in drift] for centre in (100, 160, 115))
    interval = metrics.overlap_efficiency_interval(fused, [gemm, [2 * t for t in gemm]], unfused)
    assert interval == pytest.approx((0.75, 0.75))


def test_no_interval_of_few_samples_or_of_an_undefined_figure() -> None:
    assert metrics.overlap_efficiency_interval([2.0] * 4, [[1.0] * 4], [3.0] * 4) is None
    assert metrics.overlap_efficiency_interval([2.0] * 5, [[1.0] * 5], [3.0] * 5) is not None
    assert metrics.overlap_efficiency_interval([2.0] * 5, [[1.0] * 5], [1.0] * 5) is None


def _measured(fused: list[float], unfused: list[float], gemm_ms: float) -> dict[str, Any]:
    """Return the parts of a `flux bench op` document that its conclusion reads."""
    methods = {}
    for name, times in (("flux", fused), ("unfused", unfused)):
        found = metrics.evaluate(metrics.median(times), gemm_ms, 1.0, metrics.median(unfused))
        methods[name] = {**asdict(found), "repeats_ms": times}
    return {"methods": methods, "transport": "shm"}


@pytest.mark.parametrize(
    ("fused", "unfused", "gemm_ms", "words"),
    [
        ([7.0, 7.1, 6.9] * 3, [10.0, 10.1, 9.9] * 3, 6.0, ["30% less time", "40% of", "hid 75%"]),
        ([5.0, 5.1, 4.9] * 3, [10.0, 10.1, 9.9] * 3, 6.0, ["50% less time", "hid all of it"]),
        ([12.0, 12.1, 11.9] * 3, [10.0, 10.1, 9.9] * 3, 6.0, ["20% more time", "hid none"]),
        ([9.0, 11.0, 10.0] * 3, [10.0, 9.0, 11.0] * 3, 6.0, ["9 repeats show no difference"]),
        ([9.5, 9.5, 9.5] * 3, [10.0, 10.1, 9.9] * 3, 9.6, ["4% of", "little to hide"]),
        ([7.0, 7.1], [10.0, 10.1], 6.0, ["2 repeats are too few to compare"]),
    ],
)
def test_conclusion_states_saved_time_and_hidden_share(
    fused: list[float], unfused: list[float], gemm_ms: float, words: list[str]
) -> None:
    said = report.conclusion(_measured(fused, unfused, gemm_ms))
    assert all(word in said for word in words), said


def test_no_conclusion_without_a_right_result_or_a_baseline() -> None:
    content = _measured([7.0] * 5, [10.0] * 5, 6.0)
    for change in ({"flux": {"overall_ms": None}}, {"unfused": {"overall_ms": None}}):
        assert report.conclusion({**content, "methods": {**content["methods"], **change}}) == ""
    assert report.conclusion({**content, "transport": "virtual"}) == ""
