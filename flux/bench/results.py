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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from flux.bench.report import FIGURES, rounded, shown_size
from flux.core.datafile import MOST_SIZE, load_json, one_line, shown, write_output
from flux.core.events import Event, event_from
from flux.core.problem import SCALE_SIZES, SCALINGS
from flux.core.sparse_problem import EXPERT_SIZES, HEAD_SIZES, NAMES

FORMAT, VERSION = "flux-bench-suite", 1
DONE, FAILED, SKIPPED, PENDING = "done", "failed", "skipped", "pending"
SHAPE = "shape"
SWEEPS = ("comm_tile_rows", "direction")
MOST_HEADS = 64
"""Packed tensors of an op of heads in a document."""
_MOST_FIGURE = 1e15
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


@dataclass
class SuiteEntry:
    """One run of the benchmark.

    Attributes:
        kind: SHAPE with all methods, or the knob that is swept.
        op, m, n, k: the shape.
        status: DONE, FAILED, SKIPPED or PENDING.
        peers: why each peer is absent, by name; None: it takes part.
        seconds: how long the run took.
        result: the JSON object of `flux bench op`.
        error: why there is no result, or what is wrong with it.
        sizes: of an op of experts or heads, beside m, n and k.
    """

    kind: str
    op: str
    m: int
    n: int
    k: int
    status: str = PENDING
    peers: dict[str, str | None] = field(default_factory=dict)
    seconds: float | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    sizes: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify the run."""
        return self.kind, self.op, self.m, self.n, self.k, repr(self.sizes)

    @property
    def label(self) -> str:
        """The shape in a line of text."""
        text = f"{self.op} {self.m} x {self.n} x {self.k}"
        text += self.sizes_text
        return text if self.kind == SHAPE else f"{text}, sweep of {self.kind}"

    @property
    def sizes_text(self) -> str:
        """The sizes of an op of experts or heads, behind a blank."""
        return "".join(f" {name}={shown_size(v)}" for name, v in (self.sizes or {}).items())

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The figures of each method; empty without a result."""
        return {} if self.result is None else self.result["methods"]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; fields that are not known are left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class CallTimeline:
    """The events of one call."""

    title: str
    events: list[Event]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        events = [{**asdict(event), "kind": event.kind.value} for event in self.events]
        return {"title": self.title, "events": events}


@dataclass
class SuiteDocument:
    """All that `flux bench suite` knows and has measured.

    Attributes:
        command: the command line.
        started: date and time.
        host: the machine.
        device: what was measured.
        versions: of packages, by name.
        settings: shown, and compared by --resume.
        peers: why each peer cannot take part, by name; None: it can.
        about: the origin of each peer.
        entries: the runs, in order.
        timeline: of one call.
    """

    command: list[str]
    started: str
    host: str
    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    peers: dict[str, str | None]
    about: dict[str, str | None]
    entries: list[SuiteEntry]
    timeline: CallTimeline | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of the documented format."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **vars(self),
            "entries": [entry.as_json() for entry in self.entries],
            "timeline": None if self.timeline is None else self.timeline.as_json(),
        }


_TOP = {
    name: get_origin(hint) or hint
    for name, hint in get_type_hints(SuiteDocument).items()
    if name not in ("entries", "timeline")
}


def from_json(document: Any) -> SuiteDocument:
    """Return the document of a JSON value.

    Raises:
        ValueError: it is no document of `flux bench suite`; the message says what is wrong.
    """
    check(document)
    names = {attribute.name for attribute in fields(SuiteEntry)}
    return SuiteDocument(
        **{name: document[name] for name in _TOP},
        entries=[
            SuiteEntry(**{name: value for name, value in entry.items() if name in names})
            for entry in document["entries"]
        ],
        timeline=_timeline(document.get("timeline")),
    )


def save(document: SuiteDocument, path: Path) -> None:
    """Write the document atomically.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rounded(document.as_json()), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text)


def load(path: Path) -> SuiteDocument:
    """Read a document.

    Raises:
        ValueError: it cannot be read, or has another format; the message says what is wrong.
    """
    try:
        content = load_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or not JSON: {error}") from error
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check(document: Any) -> None:
    """Raise ValueError if this is not a document of `flux bench suite`; name what is wrong."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not results of `flux bench suite --json`: format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(f"version: expected {VERSION}, got {shown(document.get('version'))}")
    _fields(document, _TOP, "")
    _fields(document["settings"], {"world": int, "dtype": str}, "settings.")
    _texts_or_null(document["peers"], "peers.")
    _texts_or_null(document["about"], "about.")
    _expect(type(document.get("entries")) is list, "entries", "a list", document.get("entries"))
    for index, entry in enumerate(document["entries"]):
        _check_entry(entry, f"entries[{index}]")
    _timeline(document.get("timeline"))


def _check_entry(entry: Any, where: str) -> None:
    _expect(isinstance(entry, dict), where, "an object", entry)
    _fields(entry, _ENTRY, f"{where}.")
    kinds, states = (SHAPE, *SWEEPS), (DONE, FAILED, SKIPPED, PENDING)
    _expect(entry["kind"] in kinds, f"{where}.kind", f"one of {', '.join(kinds)}", entry["kind"])
    _expect(entry["status"] in states, f"{where}.status", f"one of {', '.join(states)}", "other")
    _expect(entry["op"] in NAMES, f"{where}.op", f"one of {', '.join(NAMES)}", entry["op"])
    _check_sizes(entry.get("sizes"), f"{where}.sizes")
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


def _check_sizes(sizes: Any, where: str) -> None:
    _expect(sizes is None or isinstance(sizes, dict), where, "an object", sizes)
    for name, value in (sizes or {}).items():
        if name in SCALE_SIZES:
            known = value is True if name == "fast_accum" else value in SCALINGS[1:]
            _expect(known, f"{where}.{name}", "scales of float8", value)
            continue
        values = value if isinstance(value, list) and name == "heads" else [value]
        good = all(type(size) is int and 1 <= size <= MOST_SIZE for size in values)
        known = name in (*EXPERT_SIZES, *HEAD_SIZES) and len(values) <= MOST_HEADS
        _expect(good and known, f"{where}.{name}", "sizes of an op", value)


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
    good = isinstance(repeats, list) and all(_is_figure(time) and time >= 0 for time in repeats)
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


def _timeline(timeline: Any) -> CallTimeline | None:
    if timeline is None:
        return None
    _expect(isinstance(timeline, dict), "timeline", "an object or null", timeline)
    _fields(timeline, {"title": str, "events": list}, "timeline.")
    events = [_event(event, f"timeline.events[{i}]") for i, event in enumerate(timeline["events"])]
    return CallTimeline(timeline["title"], events)


def _event(event: Any, where: str) -> Event:
    _expect(isinstance(event, dict), where, "an object", event)
    try:
        return event_from(event)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def rows(document: SuiteDocument) -> Iterator[dict[str, Any]]:
    """Yield the rows of the CSV file.

    There is one row for each method of each measured entry, one for each entry that was not
    measured, and one for each absent peer, with the reason.
    """
    for entry in document.entries:
        row: dict[str, Any] = dict.fromkeys(CSV_COLUMNS)
        row |= {name: getattr(entry, name) for name in ("kind", "op", "m", "n", "k", "status")}
        for name in ("dtype", "world", "backend", "transport"):
            row[name] = document.settings.get(name)
        row["note"] = entry.error
        if entry.result is None:
            yield row
        for name, method in entry.methods.items():
            yield row | _method_row(name, method)
        for name, reason in entry.peers.items():
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


def to_csv(document: SuiteDocument) -> str:
    """Return the rows as CSV, with a header; missing values are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(document))
    return stream.getvalue()
