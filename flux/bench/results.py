"""The document of `flux bench suite`: its entries, its file, and the checks when it is read.

{format, version, command, started, host, device, versions, settings, peers, about, entries,
timeline}

An entry is one run of the benchmark: a shape with all methods, or a sweep of one knob. Its result
is the JSON object of `flux bench op`. The file is replaced as a whole after each entry, so an
interrupted suite keeps all measurements until then.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flux.bench.report import FIGURES, rounded
from flux.core.datafile import MOST_SIZE, load_json, one_line, shown
from flux.core.events import Event, event_from
from flux.core.knobs import OPS
from flux.core.wholefile import write_output

FORMAT, VERSION = "flux-bench-suite", 1
DONE, FAILED, SKIPPED, PENDING = "done", "failed", "skipped", "pending"
SHAPE = "shape"
SWEEPS = ("comm_tile_rows", "direction")
_MOST_FIGURE = 1e15
_TOP = {
    "command": list,
    "started": str,
    "host": str,
    "device": str,
    "versions": dict,
    "settings": dict,
    "peers": dict,
    "entries": list,
}
_ENTRY = {"kind": str, "op": str, "m": int, "n": int, "k": int, "status": str, "peers": dict}
_RESULT = {
    "op": str,
    "m": int,
    "n": int,
    "k": int,
    "dtype": str,
    "world": int,
    "backend": str,
    "transport": str,
    "device": str,
    "versions": dict,
    "methods": dict,
    "repeats": int,
}
CSV_COLUMNS = (
    "kind",
    "op",
    "m",
    "n",
    "k",
    "dtype",
    "world",
    "backend",
    "transport",
    "status",
    "method",
    *FIGURES,
    "overlap_efficiency_low",
    "overlap_efficiency_high",
    "max_abs_err",
    "knobs",
    "note",
)


def entry_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify an entry's run."""
    return tuple(entry[name] for name in ("kind", "op", "m", "n", "k"))


def label(entry: dict[str, Any]) -> str:
    """Return a line of text about an entry."""
    text = f"{entry['op']} {entry['m']} x {entry['n']} x {entry['k']}"
    return text if entry["kind"] == SHAPE else f"{text}, sweep of {entry['kind']}"


def save(document: dict[str, Any], path: Path) -> None:
    """Write the document atomically.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rounded(document), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text)


def load(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: it cannot be read, or has another format; the message says what is wrong.
    """
    try:
        document = load_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or not JSON: {error}") from error
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    result: dict[str, Any] = document
    return result


def check(document: Any) -> None:
    """Raise ValueError if this is not a document of `flux bench suite`; name what is wrong."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not results of `flux bench suite --json`: format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(f"version: expected {VERSION}, got {shown(document.get('version'))}")
    _fields(document, _TOP, "")
    _fields(document["settings"], {"world": int, "dtype": str}, "settings.")
    _texts_or_null(document["peers"], "peers.")
    about = document.get("about", {})  # which documents of before do not have
    _expect(isinstance(about, dict), "about", "an object", about)
    _texts_or_null(about, "about.")
    for index, entry in enumerate(document["entries"]):
        _check_entry(entry, f"entries[{index}]")
    events_of(document)


def _check_entry(entry: Any, where: str) -> None:
    _expect(isinstance(entry, dict), where, "an object", entry)
    _fields(entry, _ENTRY, f"{where}.")
    kinds, states = (SHAPE, *SWEEPS), (DONE, FAILED, SKIPPED, PENDING)
    _expect(entry["kind"] in kinds, f"{where}.kind", f"one of {', '.join(kinds)}", entry["kind"])
    _expect(entry["status"] in states, f"{where}.status", f"one of {', '.join(states)}", "other")
    _expect(entry["op"] in OPS, f"{where}.op", f"one of {', '.join(OPS)}", entry["op"])
    for name in ("m", "n", "k"):
        _expect(1 <= entry[name] <= MOST_SIZE, f"{where}.{name}", "a size", entry[name])
    _texts_or_null(entry["peers"], f"{where}.peers.")
    _texts_or_null({"error": entry.get("error")}, f"{where}.")
    if entry["status"] != DONE:
        return
    result = entry.get("result")
    _expect(isinstance(result, dict), f"{where}.result", "an object", result)
    assert isinstance(result, dict)
    _fields(result, _RESULT, f"{where}.result.")
    for name in ("op", "m", "n", "k"):
        _expect(
            result[name] == entry[name], f"{where}.result.{name}", f"{entry[name]}", result[name]
        )
    for name, method in result["methods"].items():
        _check_method(method, f"{where}.result.methods.{name}")


def _check_method(method: Any, where: str) -> None:
    _expect(isinstance(method, dict), where, "an object", method)
    for key in (*FIGURES, "max_abs_err"):
        value = method.get(key, "nothing")
        _expect(value is None or _is_figure(value), f"{where}.{key}", "a number or null", value)
    overall, gemm = method["overall_ms"], method["gemm_non_split_ms"]
    if overall is not None:
        _expect(overall >= 0, f"{where}.overall_ms", "a time", overall)
        good = gemm is not None and gemm >= 0
        _expect(good, f"{where}.gemm_non_split_ms", "a time, as overall_ms is there", gemm)
    speedup = method["speedup_vs_unfused"]
    _expect(speedup is None or speedup >= 0, f"{where}.speedup_vs_unfused", "at least 0", speedup)
    repeats = method.get("repeats_ms", [])
    good = isinstance(repeats, list) and all(_is_figure(one) and one >= 0 for one in repeats)
    _expect(good, f"{where}.repeats_ms", "times", repeats)
    _expect(isinstance(method.get("knobs"), dict), f"{where}.knobs", "an object", "other")
    interval = method.get("overlap_efficiency_interval", "nothing")
    good = interval is None or (
        isinstance(interval, list) and len(interval) == 2 and all(map(_is_figure, interval))
    )
    _expect(good, f"{where}.overlap_efficiency_interval", "two numbers or null", interval)
    wrong = method.get("wrong", [])
    good = isinstance(wrong, list) and all(isinstance(text, str) for text in wrong)
    _expect(good, f"{where}.wrong", "a list of texts", wrong)


def _is_figure(value: Any) -> bool:
    """Return whether this is a finite number whose sums and quotients cannot overflow."""
    return type(value) in (int, float) and abs(value) <= _MOST_FIGURE


def _texts_or_null(table: Mapping[str, Any], where: str) -> None:
    for name, value in table.items():
        good = value is None or isinstance(value, str)
        _expect(good, f"{where}{name}", "a string or null", value)


def _fields(table: Mapping[str, Any], expected: Mapping[str, type], where: str) -> None:
    for name, kind in expected.items():
        value = table.get(name)
        _expect(type(value) is kind, f"{where}{name}", f"a {kind.__name__}", value)


def _expect(good: bool, where: str, wanted: str, got: object) -> None:
    if not good:
        raise ValueError(f"{one_line(where, 160)}: expected {wanted}, got {shown(got)}")


def timeline_of(events: Sequence[Event], title: str) -> dict[str, Any]:
    """Return a timeline in the document's format."""
    return {
        "title": title,
        "events": [{**asdict(event), "kind": event.kind.value} for event in events],
    }


def events_of(document: dict[str, Any]) -> list[Event]:
    """Return the events of the document's timeline; none if there is no timeline.

    Raises:
        ValueError: the timeline is damaged.
    """
    timeline = document.get("timeline")
    if timeline is None:
        return []
    _expect(isinstance(timeline, dict), "timeline", "an object or null", timeline)
    _fields(timeline, {"title": str, "events": list}, "timeline.")
    return [_event(one, f"timeline.events[{i}]") for i, one in enumerate(timeline["events"])]


def _event(event: Any, where: str) -> Event:
    _expect(isinstance(event, dict), where, "an object", event)
    try:
        return event_from(event)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the CSV file.

    There is one row for each method of each measured entry, one for each entry that was not
    measured, and one for each absent peer, with the reason.
    """
    settings = document["settings"]
    for entry in document["entries"]:
        row: dict[str, Any] = dict.fromkeys(CSV_COLUMNS)
        row |= {name: entry[name] for name in ("kind", "op", "m", "n", "k", "status")}
        row |= {name: settings.get(name) for name in ("dtype", "world", "backend", "transport")}
        row["note"] = entry.get("error")
        result = entry.get("result")
        if result is None:
            yield row
        else:
            for name, method in result["methods"].items():
                yield row | _method_row(name, method)
        for name, reason in entry["peers"].items():
            if reason is not None:
                yield row | {"method": name, "status": "absent", "note": reason}


def _method_row(name: str, method: dict[str, Any]) -> dict[str, Any]:
    low, high = method["overlap_efficiency_interval"] or (None, None)
    return {
        "method": name,
        **{key: method[key] for key in FIGURES},
        "overlap_efficiency_low": low,
        "overlap_efficiency_high": high,
        "max_abs_err": method["max_abs_err"],
        "knobs": json.dumps(method["knobs"]),
        "note": "; ".join(method.get("wrong", ())) or None,
    }


def to_csv(document: dict[str, Any]) -> str:
    """Return the rows as CSV, with a header; missing values are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(document))
    return stream.getvalue()
