"""Draw timelines as one HTML page: which stage runs what when, policies above each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from flux.plan.graph import FUSED, Op
from flux.plan.mesh import parse_group
from flux.plan.simulate import Timeline

MOST_OPS = 20_000
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


def page(title: str, timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return an HTML page; all timelines have one time scale.

    Args:
        title: of the page.
        timelines: label and timeline of each policy.

    Raises:
        ValueError: there are more than MOST_OPS operators.
    """
    count = sum(len(timeline.start) for _, timeline in timelines)
    if count > MOST_OPS:
        raise ValueError(
            f"a picture of {count} operators is too large (at most {MOST_OPS}): draw fewer layers "
            "or micro-batches, or use a trace"
        )
    longest = max((timeline.iteration_ms for _, timeline in timelines), default=0.0) or 1.0
    used: dict[tuple[str, str], None] = {}
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
                used[_key(op)] = None
                parts.append(_bar(op, timeline.start[number], timeline.end[number], longest, top))
            top += _ROW
        top += _GAP
    legend = "".join(
        f'<span><i style="background:{_COLOURS[key][0]}"></i>{_COLOURS[key][1]}</span>'
        for key in _COLOURS
        if key in used
    )
    height, width = top + _GAP, _LEFT + _WIDTH + 10
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px;color:#1a202c}"
        "text{font-size:12px;fill:#2d3748}.head{font-weight:600;font-size:13px}"
        "span{margin-right:18px}i{display:inline-block;width:11px;height:11px;margin-right:5px}"
        "</style>"
        f"<h1 style='font-size:17px'>{escape(title)}</h1><p>{legend}</p>"
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg><p>0 to {longest:.2f} ms from left to right; "
        "point at a bar for its name and times.</p></html>\n"
    )


def _bar(op: Op, start: float, end: float, longest: float, top: int) -> str:
    x, width = (_WIDTH * value / longest for value in (start, end - start))
    shape = " x ".join(map(str, op.shape))
    name = f"{op.name} ({op.kind} {shape}): {start:.3f} to {end:.3f} ms"
    return (
        f'<rect x="{_LEFT + x:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{_ROW - 3}" '
        f'fill="{_COLOURS[_key(op)][0]}"><title>{escape(name)}</title></rect>'
    )
