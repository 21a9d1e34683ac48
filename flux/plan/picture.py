"""Draw timelines as an HTML page or SVG file: which stage runs what when, by policy."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from flux.plan.graph import FUSED, Op
from flux.plan.mesh import parse_group
from flux.plan.simulate import Timeline

MOST_OPS = 40_000
"""Operators of a page: a browser takes a second for so many."""
_WIDTH, _ROW, _GAP, _LEFT = 1100, 18, 14, 150  # pixels
_COLOURS = {
    ("gemm", "fwd"): ("#2b6cb0", "GEMM, forward"),
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


def _key(op: Op) -> tuple[str, str]:
    if op.is_collective:
        group = parse_group(op.group).base
        return "comm", "dp" if group == "edp" else group
    if op.kind in ("gemm", *FUSED):
        return "gemm", op.role
    return ("attention", "") if op.kind == "attention" else ("other", "")


_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#2d3748}text.head{font-weight:600;font-size:13px}"
)


def page(title: str, timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return an HTML page; all timelines have one time scale.

    Args:
        title: of the page.
        timelines: label and timeline of each policy.

    Raises:
        ValueError: there are more than MOST_OPS operators.
    """
    parts, height, longest = _rows(timelines)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for colour, name in _legend(timelines)
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px;color:#1a202c}"
        f"{_STYLE}"
        "span{margin-right:18px}i{display:inline-block;width:11px;height:11px;margin-right:5px}"
        "</style>"
        f"<h1 style='font-size:17px'>{escape(title)}</h1><p>{legend}</p>"
        f"{_svg(parts, height)}<p>0 to {longest:.2f} ms from left to right; "
        "point at a bar for its name and times.</p></html>\n"
    )


def drawing(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return the same timelines as an SVG file, with a legend below. Raises as ``page``."""
    parts, top, longest = _rows(timelines)
    top, left = top + _ROW, 0
    for colour, name in [*_legend(timelines), ("none", f"0 to {longest:.2f} ms")]:
        if left > _LEFT + _WIDTH - 250:
            top, left = top + _ROW, 0
        parts.append(f'<rect x="{left}" y="{top - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="{top}">{escape(name)}</text>')
        left += 40 + 7 * len(name)
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return _svg([f"<style>{_STYLE}</style>", background, *parts], top + _GAP) + "\n"


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


def _rows(timelines: Sequence[tuple[str, Timeline]]) -> tuple[list[str], int, float]:
    """Return the elements of all timelines, their height in pixels, and the time scale in ms."""
    count = sum(len(timeline.start) for _, timeline in timelines)
    if count > MOST_OPS:
        raise ValueError(
            f"a picture of {count} operators is too large (at most {MOST_OPS}): draw fewer layers "
            "or micro-batches, or use a trace"
        )
    longest = max((timeline.iteration_ms for _, timeline in timelines), default=0.0) or 1.0
    parts, top = [], 0
    for label, timeline in timelines:
        text = f"{label}: {timeline.iteration_ms:.2f} ms, exposed {timeline.exposed_comm_ms:.2f} ms"
        top += _ROW
        parts.append(f'<text x="0" y="{top}" class="head">{escape(text)}</text>')
        top += 6
        for stage, stream in sorted(timeline.schedule.lanes):
            row = f"stage {stage}, {stream}" if timeline.schedule.graph.stages > 1 else stream
            parts.append(f'<text x="0" y="{top + 13}">{escape(row)}</text>')
            for number in timeline.schedule.lanes[stage, stream]:
                op = timeline.schedule.graph.ops[number]
                parts.append(_bar(op, timeline.start[number], timeline.end[number], longest, top))
            top += _ROW
        top += _GAP
    return parts, top + _GAP, longest


def _bar(op: Op, start: float, end: float, longest: float, top: int) -> str:
    x, width = (_WIDTH * value / longest for value in (start, end - start))
    shape = " x ".join(map(str, op.shape))
    name = f"{op.name} ({op.kind} {shape}): {start:.3f} to {end:.3f} ms"
    return (
        f'<rect x="{_LEFT + x:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{_ROW - 3}" '
        f'fill="{_COLOURS[_key(op)][0]}"><title>{escape(name)}</title></rect>'
    )
