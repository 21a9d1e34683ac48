"""Draw the figures of the Flux paper from the entries of a suite.

stacked bars   time of each method as the fastest whole GEMM and, on top, ECT (figures 4, 11-14);
               the sweeps of tile sizes (figure 10) and of push and pull (figure 9) alike
efficiency     overlap efficiency of each method, with its interval (figure 4)

Times of one shape are shown as shares of its unfused time, so that small and large M fit side by
side; labels and tables have milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flux.bench.metrics import CONFIDENCE, ratio_interval
from flux.bench.page.svg import milliseconds, percent, steps, tag, times
from flux.bench.results import SuiteEntry

_WIDTH, _HEIGHT = 960.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 8.0, 22.0, 58.0
_UNDER = _HEIGHT - _BOTTOM  # base line of bars
_WIDEST = 74.0  # bars and their gaps
_LABELLED = 25.0  # bars of at least this width have their time above them
_TALLEST = 2.0  # bars beyond this share of the unfused time are cut off
_LOWEST, _HIGHEST = -1.0, 1.25  # efficiencies beyond these are drawn at the edge
_KNOWN = ("unfused", "medium", "flux", "async_tp", "te_userbuffers", "byte_flux", "cublasmp")


@dataclass(frozen=True)
class Bar:
    """One method at one shape.

    Attributes:
        name: of the method.
        style: class of its colour.
        figures: of the method, as in JSON.
        caption: text below the bar, if colour does not identify bars.
        best: whether it is the fastest of its group, to be marked.
    """

    name: str
    style: str
    figures: dict[str, Any]
    caption: str = ""
    best: bool = False

    @property
    def title(self) -> str:
        """The tooltip with all figures."""
        figures = self.figures
        if figures["overall_ms"] is None:
            return f"{self.name}: wrong result, not timed"
        overall, gemm, ect = (
            milliseconds(figures[key]) for key in ("overall_ms", "gemm_non_split_ms", "ect_ms")
        )
        return (
            f"{self.name}: {overall} ms = GEMM {gemm} + ECT {ect}; "
            f"overlap efficiency {percent(figures['overlap_efficiency'])}, "
            f"{times(figures['speedup_vs_unfused'])} of unfused's speed"
        )


@dataclass(frozen=True)
class BarGroup:
    """The bars of one shape."""

    label: str
    bars: tuple[Bar, ...]

    @property
    def whole_ms(self) -> float | None:
        """The time that counts as 100%: the unfused time, or the longest time."""
        known = [bar for bar in self.bars if bar.figures["overall_ms"] is not None]
        for bar in known:
            if bar.name == "unfused":
                return float(bar.figures["overall_ms"])
        return max((float(bar.figures["overall_ms"]) for bar in known), default=None)

    def interval(self, bar: Bar) -> tuple[float, float] | None:
        """Return the interval of a bar's time as a share of the unfused time; None: not known."""
        unfused = next((each.figures for each in self.bars if each.name == "unfused"), None)
        if unfused is None or bar.figures is unfused or "repeats_ms" not in bar.figures:
            return None
        if not all(unfused.get("repeats_ms", [0.0])):  # missing, or below what clocks resolve
            return None
        return ratio_interval(bar.figures["repeats_ms"], unfused["repeats_ms"])


def style(name: str) -> str:
    """Return the class of a method's colour."""
    return f"s{_KNOWN.index(name)}" if name in _KNOWN else "s7"


def shape_groups(entries: Sequence[SuiteEntry]) -> list[BarGroup]:
    """Return a group for each shape."""
    return [
        BarGroup(
            f"m {entry.m}",
            tuple(Bar(name, style(name), figures) for name, figures in entry.methods.items()),
        )
        for entry in entries
    ]


def sweep_group(entry: SuiteEntry) -> BarGroup:
    """Return the group of a sweep: its bars have the colour of flux, and their value below them."""
    times_ms = {
        name: figures["overall_ms"]
        for name, figures in entry.methods.items()
        if figures["overall_ms"] and name != "unfused"
    }
    fastest = min(times_ms, key=times_ms.__getitem__, default=None)
    return BarGroup(
        "",
        tuple(
            Bar(name, style(name if name == "unfused" else "flux"), figures, name, name == fastest)
            for name, figures in entry.methods.items()
        ),
    )


def _frame(title: str, words: str, height: float, *content: Any, width: float = _WIDTH) -> Markup:
    return tag(
        "svg",
        tag("title", title),
        tag("desc", words),
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        class_="chart",
        # Text must stay legible: on narrower screens the figure scrolls.
        style=f"min-width:{min(0.75 * width, 640.0):g}px;max-width:{width:g}px",
    )


def _grid(values: Sequence[float], y: Any, strong: Sequence[float], width: float) -> list[Markup]:
    lines = []
    for value in values:
        at = y(value)
        mark = "axis" if any(abs(value - line) < 1e-9 for line in strong) else "grid"
        lines.append(tag("line", x1=_LEFT, x2=width - _RIGHT, y1=at, y2=at, class_=mark))
        lines.append(tag("text", percent(value), x=_LEFT - 7, y=at + 4, class_="tick end"))
    return lines


def stacked_bars(groups: Sequence[BarGroup], title: str) -> Markup:
    """Draw GEMM and ECT of each method, a group of bars for each shape."""
    count = sum(len(group.bars) for group in groups)
    captions = any(bar.caption for group in groups for bar in group.bars)
    # A figure of few bars is narrower; the bars are not wider.
    width = _WIDTH if not captions else min(_WIDTH, max(320.0, _LEFT + _RIGHT + 84.0 * count))
    shares = [
        bar.figures["overall_ms"] / group.whole_ms
        for group in groups
        for bar in group.bars
        if group.whole_ms and bar.figures["overall_ms"] is not None
    ]
    top: float = min(_TALLEST, max([1.0, *shares])) * 1.06
    room = _HEIGHT - _TOP - _BOTTOM

    def y(share: float) -> float:
        return _TOP + room * (1 - share / top)

    content: list[Any] = _grid(steps(0.0, top), y, (0.0, 1.0), width)
    slot = (width - _LEFT - _RIGHT) / max(len(groups), 1)
    for index, group in enumerate(groups):
        content.append(_bars(group, _LEFT + slot * index, slot, y))
    words = (
        "Bars of each method: below the fastest whole GEMM, above it the effective communication "
        f"time, as shares of the unfused time. Lines: the {CONFIDENCE:.0%} intervals of these "
        "shares. A line that crosses 100% tells of no difference. The table below has the same "
        "figures."
    )
    return _frame(title, words, _UNDER + 34, *content, width=width)


def _bars(group: BarGroup, left: float, slot: float, y: Any) -> Markup:
    gap = min(18.0, slot * 0.16)
    count = max(len(group.bars), 1)
    wide = min((slot - gap) / count, _WIDEST)
    first = left + (slot - wide * count) / 2
    drawn: list[Any] = [
        tag("text", group.label, x=left + slot / 2, y=_UNDER + 22, class_="label middle")
    ]
    for number, bar in enumerate(group.bars):
        drawn.append(_bar(group, bar, first + wide * (number + 0.07), wide * 0.86, y))
    return tag("g", drawn, class_="group")


def _bar(group: BarGroup, bar: Bar, x: float, wide: float, y: Any) -> Markup:
    overall, whole = bar.figures["overall_ms"], group.whole_ms
    parts: list[Any] = [tag("title", bar.title)]
    middle = x + wide / 2
    if bar.caption:
        parts.append(tag("text", bar.caption, x=middle, y=_UNDER + 20, class_="tick middle"))
    if overall is None or not whole:
        parts.append(tag("text", "wrong", x=middle, y=y(0) - 5, class_="bad middle"))
        return tag("g", parts, class_=f"bar {bar.style} none")
    share = overall / whole
    shown = min(share, _TALLEST)
    # ECT below zero is noise between medians: then the bar ends at the call's own time.
    gemm = min(bar.figures["gemm_non_split_ms"] / whole, shown)
    parts.append(_box(x, y(gemm), wide, y(0) - y(gemm), "gemm"))
    if shown > gemm:
        parts.append(_box(x, y(shown), wide, y(gemm) - y(shown), "ect"))
    end = shown
    interval = group.interval(bar)
    if interval is not None:
        low, high = (min(share, _TALLEST) for share in interval)
        end = max(shown, high)
        parts.append(tag("line", x1=middle, x2=middle, y1=y(low), y2=y(high), class_="whisker"))
        parts[0] = tag("title", f"{bar.title}; {_certainty(interval)}")
    if wide >= _LABELLED or share > shown:
        text = milliseconds(overall) + (" ↑" if share > shown else "")
        parts.append(tag("text", text, x=middle, y=y(end) - 5, class_="value middle"))
    if bar.best:
        parts.append(tag("text", "fastest", x=middle, y=y(0) - 6, class_="best middle"))
    return tag("g", parts, class_=f"bar {bar.style}", tabindex=0)


def _certainty(interval: tuple[float, float]) -> str:
    low, high = (percent(share) for share in interval)
    return f"{CONFIDENCE:.0%} between {low} and {high} of the unfused time"


def _box(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return tag("rect", x=x, y=y, width=width, height=max(height, 0.0), class_=kind)


def efficiency(groups: Sequence[BarGroup], title: str) -> Markup:
    """Draw the overlap efficiency of all methods except unfused, which is 0 by definition."""
    values = [
        float(value)
        for group in groups
        for bar in group.bars
        if (value := bar.figures["overlap_efficiency"]) is not None
    ]
    ends = [
        float(end)
        for group in groups
        for bar in group.bars
        for end in bar.figures.get("overlap_efficiency_interval") or ()
    ]
    low = max(_LOWEST, min([0.0, *values, *ends]) - 0.05)
    high = min(_HIGHEST, max([1.0, *values, *ends]) + 0.05)
    room = _HEIGHT - _TOP - _BOTTOM + 24

    def y(value: float) -> float:
        return _TOP + room * (1 - (min(max(value, low), high) - low) / (high - low))

    content: list[Any] = _grid(steps(low, high, 7), y, (0.0, 1.0), _WIDTH)
    slot = (_WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    for index, group in enumerate(groups):
        left = _LEFT + slot * index
        shown = [bar for bar in group.bars if bar.name != "unfused"]
        apart = min(40.0, slot * 0.8 / max(len(shown), 1))
        first = left + slot / 2 - apart * (len(shown) - 1) / 2
        dots = [_dot(bar, first + apart * number, y, low, high) for number, bar in enumerate(shown)]
        label = tag("text", group.label, x=left + slot / 2, y=_HEIGHT - 14, class_="label middle")
        content.append(tag("g", label, dots, class_="group"))
    words = (
        "Overlap efficiency of each method at each shape: 0% is the unfused path, 100% a call that "
        "takes no longer than its GEMM. The table below has the same figures."
    )
    return _frame(title, words, _HEIGHT, *content)


def _dot(bar: Bar, x: float, y: Any, low: float, high: float) -> Markup:
    value = bar.figures["overlap_efficiency"]
    interval = bar.figures.get("overlap_efficiency_interval")
    if value is None:
        absent = tag("title", f"{bar.name}: no overlap efficiency at this shape")
        mark = tag("text", "–", x=x, y=y(0) - 4, class_="tick middle")
        return tag("g", absent, mark, class_=f"dot {bar.style} none")
    parts: list[Any] = []
    title = bar.title
    if interval is not None:
        title += f"; {CONFIDENCE:.0%} between {percent(interval[0])} and {percent(interval[1])}"
        parts.append(
            tag("line", x1=x, x2=x, y1=y(interval[0]), y2=y(interval[1]), class_="whisker")
        )
    parts.append(tag("circle", cx=x, cy=y(value), r=5.5))
    if not low <= value <= high:
        text = f"{'↓' if value < low else '↑'} {percent(value)}"
        at = y(value) + (18 if value > high else -10)
        parts.append(tag("text", text, x=x, y=at, class_="tick middle"))
    return tag("g", tag("title", title), parts, class_=f"dot {bar.style}", tabindex=0)
