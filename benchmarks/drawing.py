"""Charts as SVG files, for pages as narrow as 400 px, on light and dark backgrounds.

matplotlib draws them. Its colours become CSS variables that follow the reader's colour scheme, and
a chart has a background of its own, so it is legible on any page. A chart's values are also in its
file as text (`description`): screen readers read them aloud, and tables.py compares them with the
raw JSON, for which it does not need matplotlib. What is drawn: charts.py.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

WIDTH = 440.0
"""In pixels; texts have 14, which are 11.7 on a page of 400 pixels, where 368 are left."""
MARGIN, LINE, BAR_PITCH, GAP, PANEL = 12.0, 21.0, 18.0, 9.0, 190.0
VALUE = 46.0
"""Right of the axes, for the longest bar's value."""
LETTERS_PER_LINE = 53
COLOURS = {
    # name: (light, dark)
    "ground": ("#ffffff", "#171c23"),
    "ink": ("#1c2128", "#e6eaef"),
    "soft": ("#4d5661", "#aab4bf"),
    "line": ("#dfe3e8", "#2f3842"),
    "grey": ("#7d8590", "#97a1ad"),
    "orange": ("#c77700", "#f0a53a"),
    "blue": ("#1668c7", "#58a6ff"),
    "violet": ("#7a4fc9", "#b394f5"),
    "green": ("#0f8a6a", "#3fc79d"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 14,
    "svg.fonttype": "none",
    "svg.hashsalt": "flux",
    "figure.facecolor": LIGHT["ground"],
    "axes.facecolor": LIGHT["ground"],
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT["line"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.color": LIGHT["line"],
    "ytick.labelcolor": LIGHT["ink"],
    "lines.color": LIGHT["ink"],
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.columnspacing": 1.2,
}


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
    """Bars one below the other, in the order of the chart's series.

    Attributes:
        label: left of the bars.
        section: heading above this group, where it differs from that of the group before.
    """

    label: str
    bars: tuple[Bar, ...]
    section: str = ""


@dataclass(frozen=True)
class Series:
    """A name of the legend, and the name of its colour."""

    name: str
    colour: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars.

    Attributes:
        axis: what the numbers below the chart are, with their unit.
        reference: where a dashed line stands, 1.0 for ratios.
        interval, mark: names of whiskers and marks in the legend; empty without them.
        stacked: bars of a group are segments of one.
    """

    title: str
    subtitle: str
    axis: str
    series: Sequence[Series]
    groups: Sequence[Group]
    reference: float | None = None
    interval: str = ""
    mark: str = ""
    stacked: bool = False
    value_text: Callable[[float], str] = "{:.2f}".format

    def description(self) -> str:
        """Return the values, a line per group."""
        lines = [f"{self.title}. {self.subtitle}. {self.axis}."]
        for group in self.groups:
            texts = []
            for series, bar in zip(self.series, group.bars, strict=True):
                text = "not measured" if bar.value is None else self.value_text(bar.value)
                if bar.interval is not None:
                    text += " ({} to {})".format(*map(self.value_text, bar.interval))
                if bar.mark is not None:
                    text += f", {self.mark} {self.value_text(bar.mark)}"
                texts.append(f"{series.name} {text}")
            lines.append(f"{group.section} {group.label}: ".lstrip() + "; ".join(texts) + ".")
        return "\n".join(lines)

    def reach(self, group: Group) -> float:
        """Return the largest x that a group needs."""
        values = [bar.value or 0.0 for bar in group.bars]
        if self.stacked:
            return sum(values)
        return max([*values, *(bar.interval[1] for bar in group.bars if bar.interval)])


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one series, from left to right."""

    points: tuple[tuple[float, float], ...]
    dashed: bool = False

    @property
    def style(self) -> Any:
        return (0, (2.4, 1.6)) if self.dashed else "-"


@dataclass(frozen=True)
class LineChart:
    """Lines on logarithmic axes, one panel below the other.

    Attributes:
        axis, upright: what runs to the right and upwards, with units.
        panels: heading and lines, in the order of the series.
    """

    title: str
    subtitle: str
    axis: str
    upright: str
    series: Sequence[Series]
    panels: Sequence[tuple[str, Sequence[Line]]]

    def description(self) -> str:
        """Return the values, a line per curve."""
        lines = [f"{self.title}. {self.subtitle}. {self.upright} by {self.axis}."]
        for heading, curves in self.panels:
            for series, curve in zip(self.series, curves, strict=True):
                values = "; ".join(f"{x:g}: {y:.4g}" for x, y in curve.points)
                lines.append(f"{heading}, {series.name}: {values}.")
        return "\n".join(lines)


Chart = BarChart | LineChart


def described(svg: str) -> str:
    """Return the description in a file's text; empty if it has none."""
    element = re.search(r"<desc>(.*?)</desc>", svg, re.DOTALL)
    return unescape(element[1]) if element else ""


def draw(chart: Chart) -> str:
    """Return the text of a chart's file.

    Raises:
        ValueError: texts overlap, or leave the picture.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, 10), dpi=72)
        if isinstance(chart, BarChart):
            _draw_bars(figure, chart)
        else:
            _draw_lines(figure, chart)
        _check_texts(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return _themed(stream.getvalue(), chart)


def _draw_bars(figure: Any, chart: BarChart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    legend: list[Any] = []
    if len(chart.series) > 1 or chart.mark:
        legend += [Patch(color=LIGHT[series.colour], label=series.name) for series in chart.series]
    if chart.mark:
        legend.append(Line2D([], [], label=chart.mark, marker="|", ms=14, mew=3, lw=0))
    if chart.interval:
        legend.append(Line2D([], [], label=chart.interval, lw=1.5))
    pitch = BAR_PITCH * (1 if chart.stacked else len(chart.series))
    sections = sum(
        bool(name) for name, _ in itertools.groupby(group.section for group in chart.groups)
    )
    height = len(chart.groups) * (pitch + GAP) + sections * LINE
    widest = max(_width(figure, group.label) for group in chart.groups)
    (axes,) = _panels(figure, chart, legend, [height], MARGIN + widest + 8, MARGIN + VALUE)
    y, section, labels = 0.0, "", {}
    for group in chart.groups:
        if group.section != section:
            section = group.section
            place = ("figure fraction", "data")
            at = (MARGIN / WIDTH, y + LINE / 2)
            axes.annotate(section, at, xycoords=place, weight="bold", va="center")
            y += LINE
        labels[y + pitch / 2] = group.label
        _draw_group(axes, chart, group, y)
        y += pitch + GAP
    if chart.reference is not None:
        axes.axvline(chart.reference, color=LIGHT["ink"], lw=1.5, ls=(0, (4, 3)))
    last = max([chart.reference or 0.0, *map(chart.reach, chart.groups)])
    ticks = [
        tick for tick in MaxNLocator(5 if last < 1000 else 4).tick_values(0, last) if tick <= last
    ]
    axes.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axes.set(xlim=(0, last), ylim=(y, 0))
    axes.set_yticks(list(labels), list(labels.values()))
    axes.tick_params(length=0)
    axes.grid(visible=False, axis="y")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_group(axes: Any, chart: BarChart, group: Group, top: float) -> None:
    """Draw the bars of a group, below y = `top`, with their values to the right."""
    left = 0.0
    for number, (series, bar) in enumerate(zip(chart.series, group.bars, strict=True)):
        y = top + BAR_PITCH * (0.5 if chart.stacked else number + 0.5)
        value = bar.value or 0.0
        axes.barh(y, value, 14, left, color=LIGHT[series.colour])
        if bar.interval is not None:
            axes.plot(bar.interval, [y, y], color=LIGHT["ink"], lw=1.5, marker="|", ms=8, mew=1.5)
        if bar.mark is not None:
            axes.plot([bar.mark], [y], "|", color=LIGHT["ink"], ms=17, mew=3)
        if chart.stacked:
            left += value
        else:
            text = "–" if bar.value is None else chart.value_text(value)
            _value(axes, text, max(value, *(bar.interval or (0.0,))), y)
    if chart.stacked:
        _value(axes, chart.value_text(left), left, top + BAR_PITCH / 2)


def _value(axes: Any, text: str, x: float, y: float) -> None:
    """Write a value to the right of its bar, legible in front of lines."""
    halo = {"facecolor": LIGHT["ground"], "alpha": 0.85, "pad": 0, "linewidth": 0}
    axes.annotate(
        text, (x, y), (6, 0), textcoords="offset pixels", va="center_baseline", bbox=halo, zorder=4
    )


def _draw_lines(figure: Any, chart: LineChart) -> None:
    from matplotlib.lines import Line2D

    legend = [
        Line2D([], [], label=series.name, color=LIGHT[series.colour], lw=2.5, ls=curve.style)
        for series, curve in zip(chart.series, chart.panels[0][1], strict=True)
    ]
    panels = _panels(figure, chart, legend, [PANEL] * len(chart.panels), 58, MARGIN + 16)
    for axes, (heading, curves) in zip(panels, chart.panels, strict=True):
        for series, curve in zip(chart.series, curves, strict=True):
            x, y = zip(*curve.points, strict=True)
            axes.loglog(x, y, color=LIGHT[series.colour], lw=2.5, marker="o", ls=curve.style)
        axes.set_title(f"{heading}: {chart.upright}", loc="left")
        sizes = sorted({x for curve in curves for x, _ in curve.points})
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        heights = [math.log10(y) for curve in curves for _, y in curve.points]
        powers = range(math.floor(min(heights)), math.ceil(max(heights)) + 1)
        axes.set_yticks([10.0**power for power in powers], [f"{10.0**power:g}" for power in powers])
        axes.set_ylim(10.0 ** powers[0], 10.0 ** powers[-1])
        axes.minorticks_off()


def _width(figure: Any, text: str) -> float:
    """Return the width of a text in pixels."""
    drawn = figure.text(0, 0, text)
    width = float(drawn.get_window_extent().width)
    drawn.remove()
    return width


def _panels(
    figure: Any,
    chart: Chart,
    legend: Sequence[Any],
    heights: Sequence[float],
    left: float,
    right: float,
) -> list[Any]:
    """Return axes of these heights, one below the other, with all texts above and below them."""
    heads = [(line, "bold") for line in textwrap.wrap(chart.title, LETTERS_PER_LINE - 7)]
    heads += [(line, "normal") for line in textwrap.wrap(chart.subtitle, LETTERS_PER_LINE)]
    captions = textwrap.wrap(chart.axis, LETTERS_PER_LINE)
    top = MARGIN + len(heads) * LINE + 4
    below = [LINE * 1.5] * (len(heights) - 1) + [LINE * (1.2 + len(captions)) + MARGIN]
    above = 2 * LINE if isinstance(chart, LineChart) else 4.0
    for columns in range(len(legend), 0, -1):
        box = figure.legend(handles=legend, ncols=columns, loc="upper left")
        size = box.get_window_extent()
        box.remove()
        if size.width <= WIDTH - 2 * MARGIN or columns == 1:
            top += size.height + 4
            break
    height = top + sum(heights) + len(heights) * above + sum(below)
    figure.set_size_inches(WIDTH / 72, height / 72)
    for number, (line, weight) in enumerate(heads):
        y = 1 - (MARGIN + LINE * (number + 0.5)) / height
        colour = LIGHT["ink" if weight == "bold" else "soft"]
        figure.text(MARGIN / WIDTH, y, line, weight=weight, color=colour, va="center")
    if legend:
        at = (MARGIN / WIDTH, 1 - (MARGIN + LINE * len(heads) + 4) / height)
        figure.legend(handles=legend, ncols=columns, loc="upper left", bbox_to_anchor=at)
    panels = []
    for size, gap in zip(heights, below, strict=True):
        top += above + size
        box = (left / WIDTH, 1 - top / height, (WIDTH - left - right) / WIDTH, size / height)
        panels.append(figure.add_axes(box))
        top += gap
    for number, line in enumerate(reversed(captions)):
        figure.text(0.5, (MARGIN + LINE * (number + 0.4)) / height, line, ha="center", va="center")
    return panels


def _check_texts(figure: Any) -> None:
    """Raise ValueError if two texts overlap, or one leaves the picture."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for text, box in boxes:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            raise ValueError(f"{text!r} leaves the picture: {box}")
    for (text, box), (other, second) in itertools.combinations(boxes, 2):
        if box.overlaps(second):
            raise ValueError(f"{text!r} overlaps {other!r}: {box}, {second}")


def _themed(svg: str, chart: Chart) -> str:
    """Return matplotlib's SVG with title, description, and colours of the reader's scheme."""
    light, dark = (
        " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())
        for scheme in (0, 1)
    )
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    svg = re.sub(r"\n\s+", "\n", svg)
    start = svg.index("<svg")
    end = svg.index(">", start) + 1
    title, text = escape(chart.title), escape(chart.description())
    head = f"\n<title>{title}</title>\n<desc>{text}</desc>\n<style>{style}</style>"
    return svg[start:end].replace("<svg ", '<svg role="img" ') + head + svg[end:]
