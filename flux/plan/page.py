"""Sections of an HTML page about plans: all candidates, and the same with a slower link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from flux.machine.cluster import Cluster

Row = Mapping[str, Any]
"""Of ``flux.plan.report.document``; ``layout``: degrees of a search's plan; ``error``: why not."""
SHORTENED = "timelines below are of a few layers and micro-batches"
_PARTS = (
    ("#2b6cb0", "computing"),
    ("#dd6b20", "exposed communication"),
    ("#e2e8f0", "idle time and interference"),
)
STYLE = (
    "table{border-collapse:collapse;margin:8px 0 20px}td,th{padding:3px 10px;text-align:right;"
    "border-bottom:1px solid #e2e8f0;white-space:nowrap}td:first-child,th:first-child,"
    "td.text,th.text{text-align:left;white-space:normal}tr.best{background:#ebf8ff;"
    "font-weight:600}tr.no td{color:#718096}h2{font-size:15px;margin:22px 0 4px}"
    "div.bar{display:flex;width:240px;height:12px}ul,details{margin:4px 0;padding-left:18px}"
)


def halved(cluster: Cluster, ranks: int) -> tuple[Cluster, str]:
    """Return a cluster whose link is half as fast, and what the link is.

    That between hosts if so many ranks are on several, else that inside a host.
    """
    link, network = cluster.link, cluster.network
    if ranks > cluster.devices:
        slower = replace(cluster, network=replace(network, gbits=network.gbits / 2))
        return slower, f"the network between hosts ({network.gbs:g} GB/s of a host)"
    half = replace(link, gbs=link.gbs / 2, library_gbs=link.library_gbs / 2)
    return replace(cluster, link=half), f"the link inside a host ({link.gbs:g} GB/s of a device)"


def candidates(rows: Sequence[Row], notes: Iterable[str] = (), refused: Sequence[str] = ()) -> str:
    """Return the comparison of all candidates, the fastest one marked; notes and refusals below."""
    longest = max((row["iteration_ms"] for row in rows if "iteration_ms" in row), default=1.0)
    best, has_layouts = _fastest(rows), any("layout" in row for row in rows)
    heads = ["policy", *(["layout"] if has_layouts else []), "step", "", "over the best"]
    heads += ["tokens/s/GPU", "MFU", "exposed", "bubble", "memory"]
    lines = []
    for row in rows:
        reason = f": {row['error']}" if "error" in row else ""
        cells = [_text(f"{row['policy']}{reason}")]
        cells += [_text(row.get("layout", ""))] if has_layouts else []
        if "iteration_ms" not in row:
            lines.append(("no", [*cells, '<td colspan="8"></td>']))
            continue
        ms = row["iteration_ms"]
        kinds = "; ".join(f"{k} {v / 1e9:.1f} GB" for k, v in row["memory_bytes"].items())
        cells += [
            *(_cell(f"{ms:,.1f} ms"), f"<td>{_bar(row, longest)}</td>"),
            *(_cell(f"{ms / best['iteration_ms']:.2f}"), *_rates(row)),
            _cell(f"{100 * row['idle_ms'] / ms:.0f}%"),
            _cell(f"{row['peak_memory_bytes'] / 1e9:.1f} GB", kinds),
        ]
        lines.append(("best" if row is best else "no" if reason else "", cells))
    legend = "".join(f'<span><i style="background:{c}"></i>{name}</span>' for c, name in _PARTS)
    below = _list(notes)
    if refused:
        below += (
            f"<details><summary>not possible: {len(refused)}</summary>{_list(refused)}</details>"
        )
    return f"<h2>Candidates</h2>{_table(heads, lines)}<p>{legend}</p>{below}"


def slower(rows: Sequence[Row], again: Sequence[Row], link: str) -> str:
    """Return what half the speed of a link changes: ``again`` are the same plans' rows with it.

    Policies plan anew, and one that chooses something by itself may choose otherwise.
    """
    pairs = [
        (row, then)
        for row, then in zip(rows, again, strict=True)
        if "error" not in row and "error" not in then
    ]
    pairs.sort(key=lambda pair: float(pair[1]["iteration_ms"]))
    if not pairs:
        return ""
    best, (first, then) = _fastest([row for row, _ in pairs]), pairs[0]
    (winner_then,) = (after for row, after in pairs if row is best)
    if first is best:
        says = f"{_name(best)} is the fastest of these plans at both speeds"
    else:
        gain = winner_then["iteration_ms"] / then["iteration_ms"] - 1
        says = (
            f"{_name(best)} is no longer the fastest of these plans: {_name(then)} is faster than "
            f"it by {100 * gain:.1f}%"
        )
    lines = []
    for row, then in pairs:
        change = 100 * (then["iteration_ms"] / row["iteration_ms"] - 1)
        cells = [_text(_name(then)), _cell(f"{row['iteration_ms']:,.1f} ms")]
        cells += [_cell(f"{then['iteration_ms']:,.1f} ms"), _cell(f"{change:+.1f}%")]
        for before, after in zip(_rates(row), _rates(then), strict=True):
            cells += [before, after]
        lines.append(("best" if row is best else "", cells))
    heads = ["plan", "step", "at half", "change", "tokens/s/GPU", "at half", "MFU", "at half"]
    return (
        f"<h2>At half the speed of {escape(link)}</h2><p>{escape(says)}.</p>"
        f"{_table([*heads, 'exposed', 'at half'], lines)}"
    )


def _fastest(rows: Sequence[Row]) -> Row:
    """Return the fastest row that can be used, or else the fastest one."""
    timed = [row for row in rows if "iteration_ms" in row]
    fine = [row for row in timed if "error" not in row]
    return min(fine or timed, key=lambda row: float(row["iteration_ms"]))


def _name(row: Row) -> str:
    return ", ".join(filter(None, (row["policy"], row.get("layout", ""))))


def _rates(row: Row) -> list[str]:
    share = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
    rate, exposed = row["tokens_per_s_per_device"], row["exposed_comm_ms"]
    return [_cell(f"{rate:,.0f}"), _cell(share), _cell(f"{exposed:,.1f} ms")]


def _bar(row: Row, longest: float) -> str:
    """Return a step's time as a bar: computing, exposed communication, and the rest."""
    parts = [row["compute_ms"], row["exposed_comm_ms"]]
    parts.append(max(row["iteration_ms"] - sum(parts), 0.0))
    blocks = (
        f'<div style="width:{100 * ms / longest:.2f}%;background:{colour}" '
        f'title="{name}: {ms:,.1f} ms"></div>'
        for ms, (colour, name) in zip(parts, _PARTS, strict=True)
    )
    return f"<div class=bar>{''.join(blocks)}</div>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _text(text: str) -> str:
    return f"<td class=text>{escape(text)}</td>"


def _cell(text: str, title: str = "") -> str:
    return f'<td title="{escape(title)}">{text}</td>' if title else f"<td>{text}</td>"


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th{' class=text' if h == 'layout' else ''}>{h}</th>" for h in heads)
    lines = (f'<tr class="{kind}">{"".join(cells)}</tr>' for kind, cells in rows)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
