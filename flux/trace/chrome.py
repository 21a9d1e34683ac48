"""Write and read traces in Chrome's trace event format, for chrome://tracing and ui.perfetto.dev.

A rank is a process, a lane is a thread; events are complete events ("X"), in microseconds. An arrow
(a flow, "s" to "f") leads from the event that raised a signal to the wait that it ended. Viewers
draw it between the events that enclose its two ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flux.core.datafile import load_json, one_line, shown, write_output
from flux.core.events import Event, Trace, event_from
from flux.core.recorder import (
    COPY_LANE,
    COPY_STREAM_LANE,
    GEMM_LANE,
    NETWORK_STREAM_LANE,
    STREAM_LANE,
)

_MOST_BYTES = 1 << 30
"""Largest size of a trace file: a GPU has more than a hundred lanes, with thousands of events
each."""
_FIRST_LANES = (GEMM_LANE, COPY_LANE, STREAM_LANE, COPY_STREAM_LANE, NETWORK_STREAM_LANE)


def _lane_order(lane: str) -> tuple[int, list[str]]:
    """Return a sort key that compares numbers in lane names as numbers."""
    first = _FIRST_LANES.index(lane) if lane in _FIRST_LANES else len(_FIRST_LANES)
    return first, [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", lane)]


def flows(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield pairs of an event and the wait, or receive, that it ended."""
    raised: dict[tuple[object, object, str], Event] = {}
    events = list(events)
    for event in events:
        for what in str(event.details.get("raises", "")).split():
            raised[(event.details.get("method"), event.details.get("call"), what)] = event
    for event in events:
        awaited = event.details.get("awaits")
        if awaited is not None:
            key = (event.details.get("method"), event.details.get("call"), str(awaited))
            if key in raised:
                yield raised[key], event


def chrome_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the ``traceEvents`` of these events."""
    lanes = sorted({(e.rank, e.lane) for e in events}, key=lambda at: (at[0], _lane_order(at[1])))
    thread: dict[tuple[int, str], int] = {}
    out: list[dict[str, Any]] = []

    def named(what: str, rank: int, tid: int, **args: object) -> None:
        out.append({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args})

    for rank in sorted({event.rank for event in events}):
        named("process_name", rank, 0, name=f"rank {rank}")
        named("process_sort_index", rank, 0, sort_index=rank)
    for rank, lane in lanes:
        tid = thread[(rank, lane)] = sum(of == rank for of, _ in thread) + 1
        named("thread_name", rank, tid, name=lane)
        named("thread_sort_index", rank, tid, sort_index=tid)
    for e in events:
        out.append(
            {
                "ph": "X",
                "name": e.name,
                "cat": e.kind.value,
                "pid": e.rank,
                "tid": thread[(e.rank, e.lane)],
                "ts": e.start_us,
                "dur": e.duration_us,
                "args": dict(e.details),
            }
        )
    for number, (cause, effect) in enumerate(flows(events)):
        # The waiting thread may have continued before the thread that woke it reads the clock.
        leaves = max(cause.start_us, min(cause.end_us, effect.end_us))
        arrives = max(effect.end_us, leaves)
        for phase, at, event in (("s", leaves, cause), ("f", arrives, effect)):
            flow = {
                "ph": phase,
                "name": "tile",
                "cat": "flow",
                "id": number,
                "pid": event.rank,
                "tid": thread[(event.rank, event.lane)],
                "ts": min(at, event.end_us),
            }
            out.append(flow | {"bp": "e"} if phase == "f" else flow)
    return out


def write_chrome(
    events: Sequence[Event], path: str | Path, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a trace for chrome://tracing and ui.perfetto.dev.

    Args:
        events: of all ranks.
        path: of the file.
        metadata: JSON-serialisable; viewers show it as the trace's own.

    Raises:
        OSError: the file cannot be written.
    """
    content = {
        "displayTimeUnit": "ns",
        "otherData": dict(metadata or {}),
        "traceEvents": chrome_events(events),
    }
    write_output(Path(path), json.dumps(content) + "\n")


def read_chrome(path: str | Path) -> Trace:
    """Return a trace that ``write_chrome`` has written.

    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        content = load_json(Path(path), _MOST_BYTES)
        entries = content["traceEvents"]
        lanes = {
            (entry["pid"], entry["tid"]): entry["args"]["name"]
            for entry in entries
            if entry["ph"] == "M" and entry["name"] == "thread_name"
        }
        events = [
            event_from(
                {
                    "rank": entry["pid"],
                    "lane": lanes[(entry["pid"], entry["tid"])],
                    "kind": entry["cat"],
                    "name": entry["name"],
                    "start_us": entry["ts"],
                    "duration_us": entry["dur"],
                    "details": entry["args"],
                }
            )
            for entry in entries
            if entry["ph"] == "X"
        ]
        metadata = content["otherData"]
        if not isinstance(metadata, dict):
            raise TypeError(f"otherData: expected an object, got {shown(metadata)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of flux: {one_line(repr(error))}") from error
    return Trace(events, metadata)
