"""Damaged files: bit flips, bad edits, truncation and foreign content. Seeded.

About half of the mutations change bytes and lines. The others change the parsed document, so that
they get past the parser: types, ranges, keys, nesting.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What json.dumps cannot write, or only slowly: put in place of a text that stands for it.
_RAW = {
    "raw:digits": b"1" * 5000,
    "raw:overflow": b"1e999",
    "raw:hex": b"0x" + b"f" * 6000,
    "raw:900 lists": b"[" * 900 + b"]" * 900,
    "raw:deep lists": b"[" * 100_000 + b"]" * 100_000,
    "raw:deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "raw:invalid utf-8": b'"\xff\xfe\xc3"',
    "raw:long": b'"' + b"x" * 300_000 + b'"',
    "raw:constant": b"-Infinity",
    "raw:date": b"1979-05-27T07:32:00Z",
}
_NUMBERS = [
    *(0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 + 1, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1e15, 1e16, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
]
_TEXTS = [
    *(
        "",
        " ",
        "\0",
        "\x1b[31mred",
        "two\nlines",
        "\ud800",
        "\N{COMBINING ACUTE ACCENT}",
        "[/bold]",
    ),
    *("<script>", "../../etc/passwd", "%s{0}", "inf", "0", "m*0", "m/0", "x" * 5000, "٣"),
]
_TOKENS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"=", b"\\", b"\0", b"null", b"true", b"NaN", b"-"),
    *(
        b"1e999",
        b"9" * 400,
        b"9" * 5000,
        b"\xff",
        b"\xef\xbb\xbf",
        b"\\ud800",
        b"a.b.c.",
        b"'''",
        b"#",
    ),
]


def nested(levels: int) -> Any:
    """A list in a list in a list."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """One mutation of bytes or lines."""
    at = draw.randrange(len(data) + 1)
    lines = data.splitlines(keepends=True)
    line = draw.randrange(len(lines)) if lines else 0
    match draw.randrange(12):
        case 0:
            flipped = bytearray(data or b"x")
            for _ in range(draw.choice((1, 1, 2, 8))):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 1:
            return data[:at]
        case 2:
            return b"".join(lines[:line] + lines[line + 1 :])
        case 3:
            return b"".join(lines[: line + 1] + lines[line:])
        case 4:
            draw.shuffle(lines)
            return b"".join(lines)
        case 5:
            return data[:at] + draw.choice(_TOKENS) + data[at:]
        case 6:
            return data[:at] + draw.choice(_TOKENS) + data[at + draw.randrange(1, 20) :]
        case 7:
            begin = draw.randrange(len(data) + 1)
            return data[:at] + data[begin : begin + draw.randrange(1, 60)] + data[at:]
        case 8:
            return data.replace(b"\n", b"\r\n")
        case 9:
            return b"\xef\xbb\xbf" + data
        case 10:
            digits = [i for i, byte in enumerate(data) if byte in b"0123456789"]
            if not digits:
                return b""
            where = draw.choice(digits)
            return data[:where] + str(draw.randrange(1000)).encode() + data[where + 1 :]
        case _:
            return draw.choice((b"", b"\n", b"null", b"[]", b"{}", b"1", data + data, data + b"\0"))


def changed_document(document: Any, draw: random.Random) -> Any:
    """The document with one to three values, keys or levels of it changed."""
    changed = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        holder: dict[str, Any] = {"top": changed}
        parent, key = _place(holder, "top", draw)
        _change(parent, key, document, draw)
        changed = holder.get("top")
    return changed


def _place(parent: Any, key: Any, draw: random.Random) -> tuple[Any, Any]:
    """A random place in a document: what holds the value, and its key there."""
    while isinstance(parent[key], (dict, list)) and parent[key] and draw.random() < 0.85:
        parent = parent[key]
        key = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
    return parent, key


def _change(parent: Any, key: Any, document: Any, draw: random.Random) -> None:
    match draw.randrange(12):
        case 0 | 1 | 2:
            parent[key] = draw.choice(_NUMBERS)
        case 3 | 4:
            parent[key] = draw.choice(_TEXTS)
        case 5:
            odd = [None, True, False, [], {}, [[]], {"": None}, nested(3), nested(70)]
            parent[key] = copy.deepcopy(draw.choice(odd))
        case 6:
            parent[key] = draw.choice(list(_RAW))
        case 7:  # another part of the document
            other, place = _place({"top": document}, "top", draw)
            parent[key] = copy.deepcopy(other[place])
        case 8:
            del parent[key]
        case 9 if isinstance(parent, dict):
            parent[draw.choice(["", "extra", "k\n\x1b", "sha256", "x" * 3000])] = parent[key]
        case 10 if isinstance(parent, dict):
            parent[str(draw.choice(_TEXTS))] = parent.pop(key)
        case 11 if isinstance(parent, list):
            parent.insert(draw.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        case _:
            value = parent[key]
            parent[key] = [value] if draw.random() < 0.5 else str(value)


def _with_raw(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    for name, raw in _RAW.items():
        data = data.replace(json.dumps(name).encode(), raw)
    return data


def json_of(document: Any, draw: random.Random) -> bytes:
    """The document as JSON, in one of several styles; now and then with a key twice."""
    text = json.dumps(
        document,
        indent=draw.choice((None, 1)),
        ensure_ascii=draw.random() < 0.7,
        sort_keys=False,
    )
    if draw.random() < 0.05:
        text = text.replace("{", '{"key": 1, "key": 2, ', 1)
    return _with_raw(text)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        parts = (f"{json.dumps(str(key))} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return "[]" if value is None else json.dumps(value)


def toml_of(document: Any, draw: random.Random) -> bytes:
    """The document as TOML, with inline tables below the second level."""
    if not isinstance(document, dict):
        document = {"top": document}
    lines, tables = [], []
    for key, value in document.items():
        name = json.dumps(str(key))
        if isinstance(value, dict):
            body = [f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()]
            tables += [f"[{name}]", *body]
        else:
            lines.append(f"{name} = {_toml_value(value)}")
    return _with_raw("\n".join([*lines, *tables]) + "\n")


def parsed(data: bytes, form: str) -> Any:
    """The document in a file of ours: ``json``, ``toml``, or ``lines`` of JSON."""
    if form == "toml":
        return tomllib.loads(data.decode())
    if form == "lines":
        return [json.loads(line) for line in data.splitlines()]
    return json.loads(data)


def written(document: Any, form: str, draw: random.Random) -> bytes:
    """A document as a file."""
    if form == "toml":
        return toml_of(document, draw)
    if form == "lines" and isinstance(document, list):
        parts = [json_of(line, draw).replace(b"\n", b"") for line in document]
        return b"\n".join(parts) + b"\n"
    return json_of(document, draw)


def mutation(
    data: bytes, form: str, draw: random.Random, seal: Callable[[Any], Any] | None = None
) -> bytes:
    """A damaged copy of a file; ``seal`` puts a new checksum into a changed document."""
    if form == "text" or draw.random() < 0.45:
        return changed_bytes(data, draw)
    document = changed_document(parsed(data, form), draw)
    if seal is not None and draw.random() < 0.7:
        document = seal(document)
    damaged = written(document, form, draw)
    return changed_bytes(damaged, draw) if draw.random() < 0.05 else damaged
