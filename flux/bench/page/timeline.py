"""Draw a timeline of one call of one op: work, transfers and waits of every lane.

One row for each lane of each rank; a box for each event, with a descriptive title. Waits are
hatched, so that they are visible without colour too.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from flux.bench.page.svg import hatch, milliseconds, steps, tag
from flux.core.events import Event, Kind

_WIDTH, _LEFT, _RIGHT, _TOP = 960.0, 128.0, 10.0, 10.0
_ROW, _BOX, _BETWEEN = 22.0, 16.0, 8.0  # a row, the boxes in it, and the space between ranks
_NARROWEST = 0.8  # least width of a box: short events must stay visible
_NAMED = 6.2  # width of a letter of a name inside a box
_LONGEST_WAITS = 8
_WORDS = {
    Kind.gemm: "GEMM tile",
    Kind.reduce: "reduction",
    Kind.copy: "tile moved",
    Kind.send: "sent",
    Kind.receive: "received",
    Kind.wait: "waits",
    Kind.barrier: "barrier",
}
WAITS = (Kind.wait, Kind.barrier)

Lane = tuple[int, str]


def lanes(events: Sequence[Event]) -> list[Lane]:
    """Return (rank, lane) of all rows: by rank, lanes in the order of their first event."""
    rank_lanes = dict.fromkeys(
        (event.rank, event.lane) for event in sorted(events, key=lambda event: event.start_us)
    )
    return sorted(rank_lanes, key=lambda lane: lane[0])


def describe(event: Event) -> str:
    """Return a description of an event."""
    details = ", ".join(f"{name} {value}" for name, value in event.details.items())
    text = (
        f"rank {event.rank}, {event.lane}: {event.name} ({event.kind.value}), "
        f"{event.start_us:.1f} to {event.end_us:.1f} µs, {event.duration_us:.1f} µs"
    )
    return f"{text}; {details}" if details else text


def timeline(events: Sequence[Event]) -> str:
    """Return the SVG, with its legend above it; a sentence if there are no events."""
    if not events:
        return tag("p", "No timeline was recorded.", class_="note")
    rows = lanes(events)
    begin = min(event.start_us for event in events)
    end = max(event.end_us for event in events)
    span = max(end - begin, 1e-6)

    def x(time_us: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (time_us - begin) / span

    heights: dict[Lane, float] = {}
    at, before = _TOP, rows[0][0]
    for lane in rows:
        at += _BETWEEN if lane[0] != before else 0.0
        heights[lane], at, before = at, at + _ROW, lane[0]
    content = [_axis(begin, end, x, at), *(_label(lane, heights[lane]) for lane in rows)]
    by_lane: dict[Lane, list[Markup]] = {lane: [] for lane in rows}
    for event in sorted(events, key=lambda event: event.start_us):
        lane = (event.rank, event.lane)
        by_lane[lane].append(_event(event, x, heights[lane]))
    for (rank, name), boxes in by_lane.items():
        content.append(tag("g", boxes, class_="lane", data_rank=rank, data_lane=name))
    picture = tag(
        "svg",
        tag("title", "Timeline of one call"),
        tag("desc", "A row for each lane of each rank, a box for each event; waits are hatched."),
        tag("defs", hatch("waiting")),
        *content,
        viewBox=f"0 0 {_WIDTH:g} {at + 34:g}",
        role="img",
        class_="chart timeline",
        style="min-width:640px",
    )
    return Markup("{}{}").format(_legend(events), tag("div", picture, class_="scroll", tabindex=0))


def _axis(begin: float, end: float, x: object, bottom: float) -> Markup:
    assert callable(x)
    marks = []
    for time_us in steps(0.0, end - begin, 8):
        at = x(begin + time_us)
        marks.append(tag("line", x1=at, x2=at, y1=_TOP - 4, y2=bottom + 2, class_="grid"))
        marks.append(tag("text", f"{time_us:g}", x=at, y=bottom + 16, class_="tick middle"))
    unit = tag("text", "µs", x=_WIDTH - _RIGHT, y=bottom + 30, class_="tick end")
    return tag("g", marks, unit, class_="times")


def _label(lane: Lane, top: float) -> Markup:
    text = f"rank {lane[0]} · {lane[1]}"
    short = text if len(text) <= 20 else text[:19] + "…"
    return tag("text", tag("title", text), short, x=4, y=top + _BOX - 3, class_="tick")


def _event(event: Event, x: object, top: float) -> Markup:
    assert callable(x)
    left = x(event.start_us)
    wide = max(x(event.end_us) - left, _NARROWEST)
    parts = [
        tag("title", describe(event)),
        tag("rect", x=left, y=top, width=wide, height=_BOX, rx=min(2.0, wide / 2)),
    ]
    if event.kind in WAITS:
        stripes = {"x": left, "y": top, "width": wide, "height": _BOX, "fill": "url(#waiting)"}
        parts.append(tag("rect", class_="stripes", **stripes))
    if wide >= _NAMED * len(event.name) + 6:
        name = tag("text", event.name, x=left + wide / 2, y=top + _BOX - 4.5, class_="name middle")
        parts.append(name)
    return tag("g", parts, class_=f"event k-{event.kind.value}")


def _legend(events: Sequence[Event]) -> Markup:
    there = {event.kind for event in events}
    items = [
        tag("li", tag("span", "", class_=f"swatch k-{kind.value}"), words)
        for kind, words in _WORDS.items()
        if kind in there
    ]
    return tag("ul", items, class_="legend")


def lane_rows(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return the timeline as a table: of each lane events, microseconds of work and of waiting."""
    rows: list[tuple[str, ...]] = []
    for rank, lane in lanes(events):
        here = [event for event in events if (event.rank, event.lane) == (rank, lane)]
        waits = [event for event in here if event.kind in WAITS]
        waited = sum(event.duration_us for event in waits)
        worked = sum(event.duration_us for event in here) - waited
        rows.append(
            (str(rank), lane, str(len(here)), f"{worked:.1f}", str(len(waits)), f"{waited:.1f}")
        )
    return rows


def longest_waits(events: Sequence[Event]) -> list[str]:
    """Return descriptions of the longest waits."""
    waits = [event for event in events if event.kind in WAITS and event.duration_us > 0]
    waits.sort(key=lambda event: -event.duration_us)
    return [
        f"rank {event.rank}, {event.lane}: {event.name}, {milliseconds(event.duration_us)} µs "
        f"from {milliseconds(event.start_us)} µs on"
        for event in waits[:_LONGEST_WAITS]
    ]
