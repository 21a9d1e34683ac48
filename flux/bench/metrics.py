"""The metrics of the Flux paper (section 2.3) and ours, as plain functions of measured times.

    time -->
    unfused   |==== collective ====|======== fastest GEMM ========|     non_overlap_ms
    fused     |======== GEMM, tiles wait for rows ========|~ECT~|       overall_ms
    GEMM      |======== fastest GEMM ========|                          gemm_non_split_ms

ECT, the effective communication time, is the time of a method beyond the fastest whole GEMM of the
same local shape: exposed communication *and* the loss by splitting the GEMM. It can be negative
only by measurement noise. All times are in ms.

A ratio is meaningless if its denominator is not clearly above the measurement noise. It is then
None (null in JSON) rather than a huge number or a division by zero; see ``RESOLUTION``.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESOLUTION = 0.005
"""Smallest denominator of a ratio, as a share of the unfused time. With world 1, for example, no
communication exists that could be hidden, and the difference of two equal times is noise of either
sign."""

CONFIDENCE = 0.9
_RESAMPLES = 1000
_FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Metrics:
    """One method's metrics; None if the metric is undefined."""

    overall_ms: float
    gemm_non_split_ms: float
    comm_ms: float
    ect_ms: float
    overlap_efficiency: float | None
    bounded_efficiency: float | None
    speedup_vs_unfused: float | None


def effective_communication_time(overall_ms: float, gemm_non_split_ms: float) -> float:
    """Return ECT = overall - gemm_non_split."""
    return overall_ms - gemm_non_split_ms


def _ratio(numerator: float, denominator: float, scale: float) -> float | None:
    if not (math.isfinite(numerator) and math.isfinite(denominator)):
        return None
    if denominator <= 0.0 or denominator < RESOLUTION * scale:
        return None
    value = numerator / denominator
    return value if math.isfinite(value) else None


def overlap_efficiency(
    overall_ms: float, gemm_non_split_ms: float, non_overlap_ms: float
) -> float | None:
    """Return 1 - ECT / ECT of the unfused path.

    0 hides nothing, 1 hides everything, below 0 loses.
    """
    share = _ratio(
        effective_communication_time(overall_ms, gemm_non_split_ms),
        effective_communication_time(non_overlap_ms, gemm_non_split_ms),
        non_overlap_ms,
    )
    return None if share is None else 1.0 - share


def bounded_efficiency(
    overall_ms: float, gemm_non_split_ms: float, comm_ms: float, non_overlap_ms: float
) -> float | None:
    """Return the hidden share of the time that can be hidden at best.

    Even with perfect overlap, the call lasts as long as the longer of its two parts. If that is
    communication, overlap efficiency cannot reach 1, but this metric can.
    """
    return _ratio(
        non_overlap_ms - overall_ms,
        non_overlap_ms - max(gemm_non_split_ms, comm_ms),
        non_overlap_ms,
    )


def speedup(overall_ms: float, non_overlap_ms: float) -> float | None:
    """Return unfused time / this time; above 1 is faster than the unfused path."""
    return _ratio(non_overlap_ms, overall_ms, 0.0)


def slowest_rank(per_rank_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of each repeat's slowest rank, from [rank][repeat] times.

    The op is over when all ranks are done.
    """
    lengths = {len(times) for times in per_rank_ms}
    if len(lengths) != 1:
        raise ValueError(f"every rank must have the same number of repeats, got {sorted(lengths)}")
    return [max(times) for times in zip(*per_rank_ms, strict=True)]


def median(times_ms: Sequence[float]) -> float:
    """Return the median; raise ValueError for no samples, so that no invented time is reported."""
    if not times_ms:
        raise ValueError("no samples to take the median of")
    return statistics.median(times_ms)


def evaluate(
    overall_ms: float, gemm_non_split_ms: float, comm_ms: float, non_overlap_ms: float | None
) -> Metrics:
    """Return all metrics of one method; `non_overlap_ms`: time of the unfused method, or None."""
    ect = effective_communication_time(overall_ms, gemm_non_split_ms)
    if non_overlap_ms is None:
        return Metrics(overall_ms, gemm_non_split_ms, comm_ms, ect, None, None, None)
    return Metrics(
        overall_ms=overall_ms,
        gemm_non_split_ms=gemm_non_split_ms,
        comm_ms=comm_ms,
        ect_ms=ect,
        overlap_efficiency=overlap_efficiency(overall_ms, gemm_non_split_ms, non_overlap_ms),
        bounded_efficiency=bounded_efficiency(
            overall_ms, gemm_non_split_ms, comm_ms, non_overlap_ms
        ),
        speedup_vs_unfused=speedup(overall_ms, non_overlap_ms),
    )


def overlap_efficiency_interval(
    overall_ms: Sequence[float], gemms_ms: Sequence[Sequence[float]], unfused_ms: Sequence[float]
) -> tuple[float, float] | None:
    """Return the 90% confidence interval of overlap efficiency, from the samples of each repeat.

    ECT is a small difference of two times, each of which varies by some percent. A figure without
    its interval invites conclusions that another run of the same program refutes. This is a
    bootstrap over repeats. The calls of one repeat ran next to each other and are drawn together,
    so drift of the machine that affects all of them cancels, as it does in the figure itself.

    Args:
        overall_ms: [repeat], the method's time.
        gemms_ms: [variant][repeat]; the variant with the smallest median counts.
        unfused_ms: [repeat].

    Returns:
        The ends of the interval; None for fewer than 5 repeats or if the figure itself is
        undefined.
    """

    def figure(chosen: list[int]) -> float | None:
        def middle(times: Sequence[float]) -> float:
            return statistics.median([times[index] for index in chosen])

        gemm = min(middle(times) for times in gemms_ms)
        return overlap_efficiency(middle(overall_ms), gemm, middle(unfused_ms))

    return bootstrap(figure, len(overall_ms), CONFIDENCE)


def ratio_interval(
    times: Sequence[float], base: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return the confidence interval of median(times) / median(base), by resampling repeats.

    None for fewer than 5 repeats.
    """

    def ratio(chosen: list[int]) -> float:
        return median([times[i] for i in chosen]) / median([base[i] for i in chosen])

    return bootstrap(ratio, min(len(times), len(base)), confidence)


def bootstrap(
    figure: Callable[[list[int]], float | None], repeats: int, confidence: float
) -> tuple[float, float] | None:
    """Return the confidence interval of ``figure``, by resampling repeats.

    Args:
        figure: computes the figure from repeats with these numbers; a number may occur several
            times.
        repeats: number of repeats.
        confidence: of the interval.

    Returns:
        The ends, or None for fewer than 5 repeats or if the figure is undefined for a resample.
    """
    if repeats < _FEWEST_SAMPLES:
        return None
    draw = random.Random(0)  # the same file for the same samples
    values = []
    for _ in range(_RESAMPLES):
        value = figure(draw.choices(range(repeats), k=repeats))
        if value is None:
            return None
        values.append(value)
    values.sort()
    outside = int(_RESAMPLES * (1.0 - confidence) / 2)
    return values[outside], values[-1 - outside]
