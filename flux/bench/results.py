"""The document of `flux bench suite`: its entries, its file, and what is checked when it is read.

{format, version, command, started, host, device, versions, settings, peers, entries, timeline}

An entry is one run of the benchmark: a shape with all methods, or a sweep of one knob. Its result
is the JSON object of `flux bench op`. The file is replaced as a whole after each, so that whatever
ends the suite leaves what was measured until then.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flux.bench.report import FIGURES, rounded
from flux.trace.events import Event, Kind
from flux.wholefile import write_whole

FORMAT, VERSION = "flux-bench-suite", 1
DONE, FAILED, SKIPPED, PENDING = "done", "failed", "skipped", "pending"
SHAPE = "shape"
SWEEPS = ("comm_tile_rows", "direction")
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
    """What makes two entries the same run."""
    return tuple(entry[name] for name in ("kind", "op", "m", "n", "k"))


def label(entry: dict[str, Any]) -> str:
    """An entry in a line of text."""
    text = f"{entry['op']} {entry['m']} x {entry['n']} x {entry['k']}"
    return text if entry["kind"] == SHAPE else f"{text}, sweep of {entry['kind']}"


def save(document: dict[str, Any], path: Path) -> None:
    """Write the document in one step that cannot be halved.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rounded(document), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def load(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: it cannot be read, or is not one of ours; the message says what is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no JSON: {error}") from error
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    result: dict[str, Any] = document
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number that JSON knows")


def check(document: Any) -> None:
    """Raises ValueError: not a document of `flux bench suite`; says what is missing or wrong."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not results of `flux bench suite --json`: no format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(f"version {VERSION} was expected, got {document.get('version')!r}")
    _fields(document, _TOP, "")
    for name, reason in document["peers"].items():
        _expect(
            reason is None or isinstance(reason, str), f"peers.{name}", "a text or null", reason
        )
    for index, entry in enumerate(document["entries"]):
        _check_entry(entry, f"entries[{index}]")
    events_of(document)


def _check_entry(entry: Any, where: str) -> None:
    _expect(isinstance(entry, dict), where, "an object", entry)
    _fields(entry, _ENTRY, f"{where}.")
    kinds, states = (SHAPE, *SWEEPS), (DONE, FAILED, SKIPPED, PENDING)
    _expect(entry["kind"] in kinds, f"{where}.kind", f"one of {', '.join(kinds)}", entry["kind"])
    _expect(entry["status"] in states, f"{where}.status", f"one of {', '.join(states)}", "other")
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
        good = value is None or (type(value) in (int, float) and math.isfinite(value))
        _expect(good, f"{where}.{key}", "a number or null", value)
    _expect(isinstance(method.get("knobs"), dict), f"{where}.knobs", "an object", "other")
    interval = method.get("overlap_efficiency_interval")
    good = interval is None or (
        isinstance(interval, list)
        and len(interval) == 2
        and all(type(v) in (int, float) for v in interval)
    )
    _expect(good, f"{where}.overlap_efficiency_interval", "two numbers or null", interval)


def _fields(table: Mapping[str, Any], expected: Mapping[str, type], where: str) -> None:
    for name, kind in expected.items():
        value = table.get(name)
        _expect(type(value) is kind, f"{where}{name}", f"a {kind.__name__}", value)


def _expect(good: bool, where: str, wanted: str, got: object) -> None:
    if not good:
        text = repr(got)
        raise ValueError(
            f"{where}: expected {wanted}, got {text[:77] + '...' if len(text) > 80 else text}"
        )


def timeline_of(events: Sequence[Event], title: str) -> dict[str, Any]:
    """A timeline as it stands in the document."""
    return {
        "title": title,
        "events": [{**asdict(event), "kind": event.kind.value} for event in events],
    }


def events_of(document: dict[str, Any]) -> list[Event]:
    """The events of the document's timeline; none if there is no timeline.

    Raises:
        ValueError: it is damaged.
    """
    timeline = document.get("timeline")
    if timeline is None:
        return []
    _expect(isinstance(timeline, dict), "timeline", "an object or null", timeline)
    _fields(timeline, {"title": str, "events": list}, "timeline.")
    return [_event(one, f"timeline.events[{i}]") for i, one in enumerate(timeline["events"])]


def _event(event: Any, where: str) -> Event:
    _expect(isinstance(event, dict), where, "an object", event)
    _fields(event, {"rank": int, "lane": str, "name": str, "details": dict}, f"{where}.")
    kinds = [kind.value for kind in Kind]
    _expect(event.get("kind") in kinds, f"{where}.kind", f"one of {kinds}", event.get("kind"))
    for name in ("start_us", "duration_us"):
        value = event.get(name)
        good = type(value) in (int, float) and math.isfinite(value)
        _expect(good, f"{where}.{name}", "a number", value)
    _expect(event["duration_us"] >= 0, f"{where}.duration_us", "at least 0", event["duration_us"])
    fields = ("rank", "lane", "name", "start_us", "duration_us", "details")
    return Event(kind=Kind(event["kind"]), **{name: event[name] for name in fields})


def rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each method of each entry that was measured, one for each entry that was not, and
    one for each peer that took no part, which says why."""
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
    """The rows as CSV, with a header; what does not exist is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(document))
    return stream.getvalue()
