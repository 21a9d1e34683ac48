"""Render the page of `flux bench suite --report`: one file without scripts or external resources.

document (results.py) -> charts.py, timeline.py: SVG by svg.py
                      -> page.html (a jinja2 template, all text escaped) with style.css

The page draws its own SVG: bars have tooltips and can be reached by the keyboard, colours follow
the reader's scheme, and flux needs no package for it. matplotlib offers none of that.
"""

from __future__ import annotations

import json
import math
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from flux.bench.page import charts, timeline
from flux.bench.page.svg import milliseconds, percent, times
from flux.bench.results import DONE, SHAPE, SuiteDocument, SuiteEntry
from flux.core.sparse_problem import TITLES

_FOLDER = Path(__file__).parent
_SWEEPS = {
    "comm_tile_rows": "Size of the communication tile, in rows",
    "direction": "Push and pull",
}


@cache
def _template() -> jinja2.Template:
    """Return the template, compiled once per process: compiling takes longer than rendering."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def render(document: SuiteDocument) -> str:
    """Return the page of a document."""
    done = [entry for entry in document.entries if entry.status == DONE]
    events = document.timeline.events if document.timeline is not None else []
    return _template().render(
        css=Markup(_FOLDER.joinpath("style.css").read_text(encoding="utf-8")),
        document=document,
        command=shlex.join(str(word) for word in document.command),
        settings={name: _setting(value) for name, value in document.settings.items()},
        summary=_summary(document),
        sections=[_section(op, done) for op in dict.fromkeys(entry.op for entry in done)],
        sweeps=[_sweep(entry) for entry in done if entry.kind != SHAPE],
        troubles=_troubles(document),
        peers=_peers(document),
        timeline=Markup(timeline.timeline(events)) if events else None,
        timeline_title=document.timeline.title if document.timeline is not None else "",
        lanes=timeline.lane_rows(events),
        waits=timeline.longest_waits(events),
    )


def _setting(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "chosen by flux" if value is None else str(value)


def _summary(document: SuiteDocument) -> list[tuple[str, str, str]]:
    """Return (figure, description, details) of each tile at the top."""
    shapes = [entry for entry in document.entries if entry.kind == SHAPE]
    done = [entry for entry in shapes if entry.status == DONE]
    speeds = [
        (float(value), entry)
        for entry in done
        # Rounded to four digits, the speedup of a very slow call is 0, which has no logarithm.
        if (value := entry.methods.get("flux", {}).get("speedup_vs_unfused"))
    ]
    tiles = [(f"{len(done)} of {len(shapes)}", "shapes measured", "")]
    if speeds:
        mean = math.exp(sum(math.log(value) for value, _ in speeds) / len(speeds))
        ordered = sorted(speeds, key=lambda pair: pair[0])
        (least, worst), (most, best) = ordered[0], ordered[-1]
        tiles += [
            (times(mean), "flux beside unfused", "geometric mean over shapes; above 1 is faster"),
            (times(most), "the best shape", best.label),
            (times(least), "the worst shape", worst.label),
        ]
    return tiles


def _section(op: str, done: list[SuiteEntry]) -> dict[str, Any]:
    entries = [entry for entry in done if entry.op == op and entry.kind == SHAPE]
    groups = charts.shape_groups(entries)
    names = dict.fromkeys(name for entry in entries for name in entry.methods)
    sizes = {(entry.n, entry.k, entry.sizes_text) for entry in entries}
    title = TITLES[op]
    # A figure holds as many shapes as a reader can tell apart; a model's file may have more.
    chunks = [groups[begin : begin + 8] for begin in range(0, len(groups), 8)]
    return {
        "op": op,
        "title": title,
        "sizes": " and ".join(f"(n, k) = ({n}, {k}){text}" for n, k, text in sorted(sizes)),
        "bars": [charts.stacked_bars(chunk, f"{title}: GEMM and ECT") for chunk in chunks],
        "efficiency": [
            charts.efficiency(chunk, f"{title}: overlap efficiency") for chunk in chunks
        ],
        "methods": [(name, charts.style(name)) for name in names],
        "rows": [row for entry in entries for row in _rows(entry)],
    }


def _rows(entry: SuiteEntry) -> list[dict[str, Any]]:
    """Return a table's rows of one entry."""
    return [
        {
            "m": entry.m,
            "n": entry.n,
            "k": entry.k,
            "method": name,
            "style": charts.style(name),
            "wrong": "; ".join(method.get("wrong", ())),
            "figures": [
                milliseconds(method["overall_ms"]),
                milliseconds(method["gemm_non_split_ms"]),
                milliseconds(method["comm_ms"]),
                milliseconds(method["ect_ms"]),
                percent(method["overlap_efficiency"]),
                percent(method["bounded_efficiency"]),
                times(method["speedup_vs_unfused"]),
                "–" if method["max_abs_err"] is None else f"{method['max_abs_err']:.1e}",
            ],
            "knobs": " ".join(
                f"{knob}={value if isinstance(value, str) else json.dumps(value)}"
                for knob, value in method["knobs"].items()
            ),
        }
        for name, method in entry.methods.items()
    ]


def _sweep(entry: SuiteEntry) -> dict[str, Any]:
    title = f"{_SWEEPS[entry.kind]}: {entry.op}, m {entry.m}"
    return {
        "title": title,
        "sizes": f"(n, k) = ({entry.n}, {entry.k})",
        "bars": charts.stacked_bars([charts.sweep_group(entry)], title),
        "rows": _rows(entry),
    }


def _troubles(document: SuiteDocument) -> list[tuple[str, str, str]]:
    """Return (entry, status, reason) of entries that were not measured, or are wrong."""
    return [
        (
            entry.label,
            "wrong result" if entry.status == DONE else entry.status,
            entry.error or "not yet measured",
        )
        for entry in document.entries
        if entry.error or entry.status != DONE
    ]


def _peers(document: SuiteDocument) -> list[dict[str, Any]]:
    """Return all peers: their origin, and why they are absent, in general or for some shapes."""
    peers = []
    for name, reason in document.peers.items():
        partly: dict[str, list[str]] = {}
        for entry in document.entries:
            absent = entry.peers.get(name)
            if reason is None and absent is not None:
                partly.setdefault(absent, []).append(entry.label)
        peers.append(
            {
                "name": name,
                "about": document.about.get(name) or "",
                "reason": reason,
                "partly": [(absent, ", ".join(labels)) for absent, labels in partly.items()],
            }
        )
    return peers
