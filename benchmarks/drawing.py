"""Charts as SVG text, for pages as narrow as 400 px, on light and dark backgrounds.

`bars` draws horizontal bars in groups, one bar per series or segments in a row; `lines` draws
times against sizes on logarithmic axes. A chart brings its own background, so it is legible
whatever the page around it looks like. What it is drawn from: charts.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flux.bench.page.svg import steps, tag

WIDTH = 440.0
FONT = 14.0
"""Of all text but the title. A page of 400 px shows a chart 368 px wide: 14 become 11.7 px."""
NARROWEST = 368.0
SHOWN_WIDTH = 560
"""Pixels of a chart where there is room."""
COLOURS = 6
_MARGIN = 12.0
_LINE = 19.0  # of text
_BAR, _PITCH, _GAP = 14.0, 18.0, 9.0
_VALUE = 52.0  # right of the axis: the longest bar's value
_PLOT = 190.0  # height of a panel of lines

_STYLE = """
svg { --ground: #ffffff; --ink: #1c2128; --soft: #4d5661; --line: #dfe3e8;
  --c0: #7d8590; --c1: #c77700; --c2: #1668c7; --c3: #7a4fc9; --c4: #0f8a6a; --c5: #c2378a;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #171c23; --ink: #e6eaef; --soft: #aab4bf; --line: #2f3842;
    --c0: #97a1ad; --c1: #f0a53a; --c2: #58a6ff; --c3: #b394f5; --c4: #3fc79d; --c5: #f07fbf; } }
text { fill: var(--ink); font-size: 14px; }
.title { font-size: 15px; font-weight: 600; } .soft { fill: var(--soft); }
.section { font-weight: 600; }
.halo { fill: var(--ground); fill-opacity: 0.85; }
.ground { fill: var(--ground); stroke: var(--line); } .grid { stroke: var(--line); }
.one { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
.whisker { stroke: var(--ink); stroke-width: 1.5; }
.mark { stroke: var(--ink); stroke-width: 3; }
.line { fill: none; stroke-width: 2.5; } .dashed { stroke-dasharray: 6 4; }
.b0 { fill: var(--c0); } .b1 { fill: var(--c1); } .b2 { fill: var(--c2); }
.b3 { fill: var(--c3); } .b4 { fill: var(--c4); } .b5 { fill: var(--c5); }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); }
.l3 { stroke: var(--c3); } .l4 { stroke: var(--c4); } .l5 { stroke: var(--c5); }
"""


@dataclass(frozen=True)
class Bar:
    """One value of a group.

    Attributes:
        value: None leaves the place empty.
        interval: ends of the whisker.
        mark: where a thick stroke crosses the bar.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    mark: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars side by side, in the order of the chart's series.

    Attributes:
        label: left of the bars.
        section: heading above this group, where it differs from that of the group before.
    """

    label: str
    bars: tuple[Bar, ...]
    section: str = ""


@dataclass(frozen=True)
class Series:
    """A name of the legend, and the number of its colour."""

    name: str
    colour: int


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one series, from left to right."""

    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def _text(content: str, x: float, y: float, classes: str = "", anchor: str | None = None) -> Markup:
    return tag("text", content, x=x, y=y, class_=classes or None, text_anchor=anchor)


def _stroke(x1: float, y1: float, x2: float, y2: float, classes: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=classes)


def text_width(content: str, *, bold: bool = False) -> float:
    """Return the width of a text of FONT, or of a title; for DejaVu Sans, a wide font."""
    width = 0.0
    for letter in content:
        wide = 13.0 if letter in "mwMW" else 10.0 if letter.isupper() else 9.0
        width += 5.2 if letter in " .,;:'ijlrtf/()|" else wide
    return width * 1.2 if bold else width


def _wrapped(content: str, *, bold: bool = False) -> list[str]:
    """Return lines that are no wider than a chart."""
    found = [""]
    for word in content.split():
        longer = f"{found[-1]} {word}".strip()
        if text_width(longer, bold=bold) > WIDTH - 2 * _MARGIN:
            found.append(word)
        else:
            found[-1] = longer
    return found


def _head(title: str, subtitle: str, entries: Sequence[tuple[str, Markup]]) -> tuple[Markup, float]:
    """Return title, subtitle and legend, and the y below them. Symbols are drawn at (0, 0)."""
    y, parts = _MARGIN + 13, []
    for line in _wrapped(title, bold=True):
        parts.append(_text(line, _MARGIN, y, "title"))
        y += _LINE + 1
    for line in _wrapped(subtitle):
        parts.append(_text(line, _MARGIN, y, "soft"))
        y += _LINE
    x, y = _MARGIN, y + 6
    for name, symbol in entries:
        room = 22 + text_width(name) + 12
        if x > _MARGIN and x + room > WIDTH:
            x, y = _MARGIN, y + _LINE
        parts.append(tag("g", symbol, transform=f"translate({x:g} {y:g})"))
        parts.append(_text(name, x + 22, y))
        x += room
    return Markup("").join(parts), y + (10 if entries else -16)


def _swatch(series: Series) -> Markup:
    return tag("rect", x=0, y=-11, width=16, height=12, rx=2, class_=f"b{series.colour}")


def _document(title: str, description: str, height: float, *content: Markup) -> str:
    shown = height * SHOWN_WIDTH / WIDTH
    ground = tag("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=6, class_="ground")
    image = tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        tag("style", Markup(_STYLE)),
        ground,
        *(part + Markup("\n") for part in content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=SHOWN_WIDTH,
        height=f"{shown:.0f}",
        role="img",
    )
    return f"{image}\n"


def _axis(top: float, bottom: float, last: float, x: Callable[[float], float]) -> Markup:
    """Return vertical lines and their numbers, from 0 to `last`."""
    parts = []
    for value in steps(0.0, last, 5):
        parts.append(_stroke(x(value), top, x(value), bottom, "grid"))
        parts.append(_text(f"{value:,.6g}", x(value), bottom + 17, "soft", "middle"))
    return Markup("").join(parts)


def _reach(group: Group, stacked: bool) -> float:
    """Return the largest x that a group needs."""
    values = [bar.value or 0.0 for bar in group.bars]
    if stacked:
        return sum(values)
    return max([*values, *(bar.interval[1] for bar in group.bars if bar.interval)])


def bars(
    title: str,
    subtitle: str,
    axis: str,
    series: Sequence[Series],
    groups: Sequence[Group],
    *,
    reference: float | None = None,
    interval: str = "",
    mark: str = "",
    stacked: bool = False,
    most: float = math.inf,
    value_text: Callable[[float], str] = "{:.2f}".format,
) -> str:
    """Return a chart of horizontal bars.

    Args:
        axis: what the numbers below the chart are, with their unit.
        reference: where a dashed line stands, 1.0 for ratios.
        interval, mark: names of whiskers and marks in the legend; empty without them.
        stacked: bars of a group are segments of one.
        most: the axis ends there; a longer bar or whisker is cut off, and its value still written.
    """
    entries = [(one.name, _swatch(one)) for one in series] if len(series) > 1 or mark else []
    if mark:
        entries.append((mark, _stroke(8, -13, 8, 3, "mark")))
    if interval:
        entries.append((interval, _stroke(0, -5, 16, -5, "whisker")))
    head, top = _head(title, subtitle, entries)
    left = _MARGIN + 8 + max(text_width(group.label) for group in groups)
    last = min(max([reference or 0.0, *(_reach(group, stacked) for group in groups)]) * 1.02, most)

    def x(value: float) -> float:
        return left + (WIDTH - left - _MARGIN - _VALUE) * min(value, last) / last

    drawn, values, y, section = [], [], top, ""
    for group in groups:
        if group.section != section:
            section = group.section
            drawn.append(_text(section, _MARGIN, y + 15, "section"))
            y += _LINE + 4
        size = _PITCH * (1 if stacked else len(group.bars))
        drawn.append(_text(group.label, left - 8, y + size / 2 + 4, "", "end"))
        if stacked:
            drawn.append(_stack(group, y, series, x))
            whole = _reach(group, stacked)
            values.append(_value(value_text(whole), x(whole), y))
        for number, bar in enumerate(() if stacked else group.bars):
            at = y + _PITCH * number
            shapes, end = _bar(bar, at, series[number], x, last)
            said = "–" if bar.value is None else value_text(bar.value)
            drawn.append(shapes)
            values.append(_value(said, end, at))
        y += size + _GAP
    lines = [_axis(top, y, last, x)]
    strokes = [] if reference is None else [_stroke(x(reference), top, x(reference), y, "one")]
    caption = y + 38
    for line in _wrapped(axis):
        lines.append(_text(line, WIDTH / 2, caption, "", "middle"))
        caption += _LINE
    return _document(title, subtitle, caption - 4, head, *lines, *drawn, *strokes, *values)


def _bar(
    bar: Bar,
    y: float,
    series: Series,
    x: Callable[[float], float],
    last: float,
) -> tuple[Markup, float]:
    """Return what is drawn, and where it ends."""
    if bar.value is None:
        return Markup(""), x(0)
    middle = y + _BAR / 2
    wide = max(x(bar.value) - x(0), 1.0)
    parts = [tag("rect", x=x(0), y=y, width=wide, height=_BAR, class_=f"b{series.colour}")]
    end = x(bar.value)
    if bar.interval is not None:
        low, high = (x(one) for one in bar.interval)
        end = max(end, high)
        parts.append(_stroke(low, middle, high, middle, "whisker"))
        ends = [low] if bar.interval[1] > last else [low, high]
        parts += [_stroke(one, middle - 4, one, middle + 4, "whisker") for one in ends]
    if bar.mark is not None:
        at = x(bar.mark)
        parts.append(_stroke(at, y - 2, at, y + _BAR + 2, "mark"))
    return tag("g", *parts), end


def _value(content: str, end: float, y: float) -> Markup:
    """Return the value behind a bar, legible in front of lines."""
    room = len(content) * 8.0 + 2
    halo = tag("rect", x=end + 3, y=y - 1, width=room, height=_BAR + 2, rx=0, class_="halo")
    return halo + _text(content, end + 5, y + 12)


def _stack(
    group: Group,
    y: float,
    series: Sequence[Series],
    x: Callable[[float], float],
) -> Markup:
    """Return the segments of one bar."""
    parts, whole = [], 0.0
    for one, bar in zip(series, group.bars, strict=True):
        begin, whole = whole, whole + (bar.value or 0.0)
        wide = x(whole) - x(begin)
        parts.append(tag("rect", x=x(begin), y=y, width=wide, height=_BAR, class_=f"b{one.colour}"))
    return tag("g", *parts)


def _decades(low: float, high: float, factor: float) -> list[float]:
    """Return powers of a factor that reach from below `low` to above `high`."""
    first = math.floor(math.log(low, factor) + 1e-9)
    last = math.ceil(math.log(high, factor) - 1e-9)
    return [factor**power for power in range(first, last + 1)]


def lines(
    title: str,
    subtitle: str,
    axis: str,
    upright: str,
    series: Sequence[Series],
    panels: Sequence[tuple[str, Sequence[Line]]],
) -> str:
    """Return a chart of lines on logarithmic axes, one panel below the other.

    Args:
        axis, upright: what runs to the right and upwards, with units.
        panels: heading and lines, in the order of the series.
    """
    dashes = [("dashed" if line.dashed else "") for line in panels[0][1]]
    symbols = [
        _stroke(0, -5, 18, -5, f"line l{one.colour} {dash}")
        for one, dash in zip(series, dashes, strict=True)
    ]
    names = [one.name for one in series]
    head, top = _head(title, subtitle, list(zip(names, symbols, strict=True)))
    points = [point for _, found in panels for line in found for point in line.points]
    sizes = sorted({point[0] for point in points})
    heights = _decades(min(p[1] for p in points), max(p[1] for p in points), 10.0)
    left, right = 58.0, WIDTH - _MARGIN - 16

    def x(value: float) -> float:
        return left + (right - left) * math.log(value / sizes[0]) / math.log(sizes[-1] / sizes[0])

    drawn: list[Markup] = []
    for heading, found in panels:
        drawn.append(_text(f"{heading}: {upright}", _MARGIN, top + 16, "section"))
        top += _LINE + 12
        bottom = top + _PLOT

        def y(value: float, top: float = top) -> float:
            whole = math.log(heights[-1] / heights[0])
            return top + _PLOT * math.log(heights[-1] / value) / whole

        for value in heights:
            drawn.append(_stroke(left, y(value), right, y(value), "grid"))
            drawn.append(_text(f"{value:,.6g}", left - 7, y(value) + 5, "soft", "end"))
        for value in sizes:
            drawn.append(_stroke(x(value), top, x(value), bottom, "grid"))
            drawn.append(_text(f"{value:.6g}", x(value), bottom + 18, "soft", "middle"))
        for one, line in zip(series, found, strict=True):
            path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
            dash = " dashed" if line.dashed else ""
            drawn.append(tag("polyline", points=path, class_=f"line l{one.colour}{dash}"))
            drawn += [
                tag("circle", cx=x(a), cy=y(b), r=4, class_=f"b{one.colour}")
                for a, b in line.points
            ]
        top = bottom + 24
    for caption in _wrapped(axis):
        top += _LINE
        drawn.append(_text(caption, WIDTH / 2, top, "", "middle"))
    return _document(title, subtitle, top + 14, head, *drawn)
