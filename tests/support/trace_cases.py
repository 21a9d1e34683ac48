"""Checks that every trace and trace file must pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from flux.trace import Event, Kind
from flux.trace.chrome import flows


def check_sound(events: list[Event], slack_us: float = 0.0) -> None:
    """No lane does two things at once, nothing ends before it begins, effects follow causes.

    Clocks of several hosts may be off by ``slack_us``.
    """
    lanes: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        assert event.duration_us >= 0, event
        lanes.setdefault((event.rank, event.lane), []).append(event)
    for of_lane in lanes.values():
        for before, after in pairwise(of_lane):
            assert before.end_us <= after.start_us + 2e-3, (before, after)
    for cause, effect in flows(events):
        assert effect.end_us + slack_us >= cause.start_us, (cause, effect)
        assert cause.details["call"] == effect.details["call"]


def of(events: list[Event], rank: int, call: int, kind: Kind) -> list[Event]:
    return [e for e in events if e.rank == rank and e.details["call"] == call and e.kind is kind]


def check_chrome(content: dict[str, Any]) -> None:
    assert content["displayTimeUnit"] in ("ms", "ns")
    entries = content["traceEvents"]
    assert {e["ph"] for e in entries} <= {"M", "X", "s", "f"}
    threads = {(e["pid"], e["tid"]) for e in entries if e.get("name") == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in entries if e["ph"] == "X"} <= threads
    slices = [e for e in entries if e["ph"] == "X"]
    for e in slices:
        assert e["dur"] >= 0 and e["cat"] and e["name"] and isinstance(e["args"], dict)
    ends = {phase: {e["id"]: e for e in entries if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    for end in [*ends["s"].values(), *ends["f"].values()]:  # viewers tie ends to what encloses them
        assert any(
            (s["pid"], s["tid"]) == (end["pid"], end["tid"])
            and s["ts"] <= end["ts"] <= s["ts"] + s["dur"] + 1e-3
            for s in slices
        )
    assert all(end["bp"] == "e" for end in ends["f"].values())
