"""Intervals of time."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Begin and end."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint intervals that cover the same time, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def covered(spans: Iterable[Span]) -> float:
    """Return the time that intervals cover together."""
    return sum(end - begin for begin, end in union(spans))
