"""Draw timelines as an HTML page or SVG file: which stage runs what when, by policy.

A page has names and times of operators as tooltips. An SVG file is meant for documents: it has
larger text, and one path for all bars of a colour in a row, a tenth of the bytes.

The elements are written here and not by matplotlib: flux does not depend on it, it has no tooltips,
and 40,000 bars took it 27 s and 170 bytes each, where an SVG file of ours has 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flux.plan.graph import FUSED, RING, Operator
from flux.plan.mesh import parse_group
from flux.plan.page import STYLE
from flux.plan.simulate import Timeline

MOST_OPS = 40_000
"""Operators of a page: a browser takes a second for so many."""
_WIDTH, _LEFT = 1100, 150  # pixels
_COLOURS = {
    ("gemm", "fwd"): ("#2b6cb0", "GEMM, forward"),
    ("gemm", "recompute"): ("#4c51bf", "GEMM, again"),
    ("gemm", "dgrad"): ("#63a4db", "GEMM, dgrad"),
    ("gemm", "wgrad"): ("#a9cdf0", "GEMM, wgrad"),
    ("attention", ""): ("#6b46c1", "attention"),
    ("other", ""): ("#a0aec0", "norm, elementwise, optimizer"),
    ("comm", "tp"): ("#dd6b20", "tensor parallel"),
    ("comm", "cp"): ("#b7791f", "context parallel"),
    ("comm", "ep"): ("#c53030", "expert parallel"),
    ("comm", "dp"): ("#2f855a", "data parallel"),
    ("comm", "pp"): ("#d53f8c", "pipeline"),
}


def _key(op: Operator) -> tuple[str, str]:
    if op.is_collective:
        group = parse_group(op.group).base
        return "comm", "dp" if group == "edp" else group
    if op.kind in ("gemm", *FUSED):
        return "gemm", op.role
    return ("attention", "") if op.kind in ("attention", RING) else ("other", "")


@dataclass(frozen=True)
class _Size:
    """Pixels: of text, from one row to the next, and between policies."""

    text: int
    row: int
    gap: int

    @property
    def style(self) -> str:
        return (
            f"text{{font:{self.text}px system-ui,sans-serif;fill:#2d3748}}"
            f"text.head{{font-weight:600;font-size:{self.text + 1}px}}"
        )


_SCHEMES = (
    ".ground{fill:#ffffff}"
    "@media (prefers-color-scheme:dark){text{fill:#e6eaef}.ground{fill:#171c23}}"
)
"""Colours of a picture for readers of light and of dark pages."""
_PAGE = _Size(12, 18, 14)
_PICTURE = _Size(17, 24, 10)  # documents show it at two thirds of its width


def page(title: str, timelines: Sequence[tuple[str, Timeline]], sections: str = "") -> str:
    """Return an HTML page, of sections (``flux.plan.page``) and timelines on one time scale."""
    parts, height, longest = _rows(timelines, _PAGE)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for colour, name in _legend(timelines)
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px;color:#1a202c}"
        f"{_PAGE.style}{STYLE}"
        "span{margin-right:18px}i{display:inline-block;width:11px;height:11px;margin-right:5px}"
        "</style>"
        f"<h1 style='font-size:17px'>{escape(title)}</h1>{sections}<h2>Timelines</h2>"
        f"<p>{legend}</p>{_svg(parts, height)}<p>0 to {longest:.2f} ms from left to right; "
        "point at a bar for its name and times.</p></html>\n"
    )


def drawable(timelines: Sequence[tuple[str, Timeline]]) -> bool:
    """Return whether a picture can hold so many operators."""
    return sum(len(timeline.start) for _, timeline in timelines) <= MOST_OPS


def drawing(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return the same timelines as an SVG file, with a legend below. Raises as ``page``."""
    size = _PICTURE
    parts, top, longest = _rows(timelines, size)
    top, left = top + size.row // 2, 0.0
    for colour, name in [*_legend(timelines), ("none", f"0 to {longest:.2f} ms")]:
        needed = 44 + 0.53 * size.text * len(name)
        if left + needed > _LEFT + _WIDTH:
            top, left = top + size.row, 0.0
        parts.append(
            f'<rect x="{left:g}" y="{top - 13}" width="14" height="14" fill="{colour}"/>'
            f'<text x="{left + 20:g}" y="{top}">{escape(name)}</text>'
        )
        left += round(needed)
    background = '<rect width="100%" height="100%" class="ground"/>'
    style = f"<style>{size.style}{_SCHEMES}</style>"
    return _svg([style, background, *parts], top + size.gap) + "\n"


def _svg(parts: Sequence[str], height: int) -> str:
    width = _LEFT + _WIDTH + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def _legend(timelines: Sequence[tuple[str, Timeline]]) -> list[tuple[str, str]]:
    """Return colour and name of each kind of operator that there is."""
    used = {_key(op) for _, timeline in timelines for op in timeline.schedule.graph.ops}
    return [_COLOURS[key] for key in _COLOURS if key in used]


def _rows(timelines: Sequence[tuple[str, Timeline]], size: _Size) -> tuple[list[str], int, float]:
    """Return the elements of all timelines, their height in pixels, and the time scale in ms."""
    if not drawable(timelines):
        count = sum(len(timeline.start) for _, timeline in timelines)
        raise ValueError(
            f"a picture of {count} operators is too large (at most {MOST_OPS}): draw fewer layers "
            "or micro-batches, or use a trace"
        )
    longest = max((timeline.iteration_ms for _, timeline in timelines), default=0.0) or 1.0
    parts, top = [], 0
    for label, timeline in timelines:
        text = f"{label}: {timeline.iteration_ms:.2f} ms, exposed {timeline.exposed_comm_ms:.2f} ms"
        top += size.row
        parts.append(f'<text x="0" y="{top}" class="head">{escape(text)}</text>')
        top += size.row // 3
        for stage, stream in sorted(timeline.schedule.lanes):
            row = f"stage {stage}, {stream}" if timeline.schedule.graph.stages > 1 else stream
            parts.append(f'<text x="0" y="{top + size.text}">{escape(row)}</text>')
            numbers = timeline.schedule.lanes[stage, stream]
            if size is _PAGE:
                parts += [_bar(timeline, number, longest, top) for number in numbers]
            else:
                parts += _paths(timeline, numbers, longest, top)
            top += size.row
        top += size.gap
    return parts, top + size.gap, longest


def _span(timeline: Timeline, number: int, longest: float) -> tuple[float, float]:
    """Return where an operator's bar begins, and its width, in pixels."""
    start, end = timeline.start[number], timeline.end[number]
    return _LEFT + _WIDTH * start / longest, max(_WIDTH * (end - start) / longest, 0.3)


def _bar(timeline: Timeline, number: int, longest: float, top: int) -> str:
    """Return an operator's bar, with a tooltip."""
    op = timeline.schedule.graph.ops[number]
    x, width = _span(timeline, number, longest)
    shape = " x ".join(map(str, op.shape))
    name = f"{op.name} ({op.kind} {shape}): {timeline.start[number]:.3f} to "
    name += f"{timeline.end[number]:.3f} ms"
    return (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_PAGE.row - 3}" '
        f'fill="{_COLOURS[_key(op)][0]}"><title>{escape(name)}</title></rect>'
    )


def _paths(timeline: Timeline, numbers: Sequence[int], longest: float, top: int) -> list[str]:
    """Return a row's bars, those of one colour as one path."""
    bars: dict[str, list[str]] = {}
    height = _PICTURE.row - 4
    for number in numbers:
        x, width = _span(timeline, number, longest)
        colour = _COLOURS[_key(timeline.schedule.graph.ops[number])][0]
        right = f"{x + width - (0.6 if width > 3 else 0):.1f}"  # bars of one colour stay apart
        bars.setdefault(colour, []).append(f"M{x:.1f} {top}H{right}v{height}H{x:.1f}")
    return [f'<path fill="{colour}" d="{"".join(parts)}z"/>' for colour, parts in bars.items()]
