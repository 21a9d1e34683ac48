"""Find the data that flux ships (`tuning/`); read every data file, JSON or TOML; replace files.

A file may hold anything: it may be truncated, edited by hand, or from an untrusted source. This
module returns only data from a file of bounded size in valid UTF-8, with finite numbers of at most
64 bits, no lone surrogates, no duplicate key and at most ``MOST_DEPTH`` levels. Any other file
raises a ValueError with a one-line message, so callers need no checks of their own.

Python's json parses, since its hooks see each object before duplicate keys are gone. msgspec (0.22)
keeps the last duplicate, takes integers of any size, and its messages do not quote the wrong value.

A ``Table`` returns the values of one TOML table or JSON object and checks each. It rejects keys
that no caller has read: a misspelt key must not silently mean the default. Strict models of
pydantic (2.14) would need the checks of this module all the same: they keep the last duplicate, and
accept NaN and control characters. Their errors take several lines and do not name the file, and
the import takes 15 times as long as that of the module that reads cluster files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_PACKAGE = Path(__file__).resolve().parents[1]

MOST_BYTES = 64 << 20
"""Largest size of a file, unless a reader sets another."""
MOST_DEPTH = 64
"""Most levels of objects and lists. Python's own limit is a thousand stack frames, which code that
walks a document shares with its callers."""
_MOST_TOML_BYTES = 1 << 20
_MOST_TOML_LINE = 10_000
"""Characters. tomllib takes time quadratic in the number of parts of a dotted key."""
_MOST_INTEGER = 2**64
_MOST_SHOWN = 80
_MOST_TEXT = 1000
_MOST_NUMBER = 1e15
MOST_SIZE = 1 << 30
"""The largest M, N and K (csrc/core/problem.h)."""


def one_line(text: str, most: int = 400) -> str:
    """Return ``text`` as an error may quote it: on one line, at most ``most`` characters.

    Line breaks and control characters are escaped.
    """
    shown = text[:most] + ("..." if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def shown(value: object) -> str:
    """Return ``repr(value)`` for an error, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: the file cannot be read or is not regular: a pipe without a writer would block.
        ValueError: the file has more than ``most`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            text = os.strerror(code) if code == errno.EISDIR else "not a regular file"
            raise OSError(code, text, str(path))
        if status.st_size <= most:
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(most + 1)  # bounded, in case the file grows meanwhile
            if len(data) <= most:
                return data
        raise ValueError(f"has more than {most} bytes")
    finally:
        os.close(descriptor)


def parse_json(data: bytes) -> Any:
    """Return the parsed JSON document.

    Raises:
        ValueError: not JSON in UTF-8, or a value that this module rejects (see above); the message
            is one line and says where.
    """
    with _parsing("JSON"):
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    _check(content)
    return content


@contextlib.contextmanager
def _parsing(form: str) -> Iterator[None]:
    """Turn a parser's errors into ValueError of one line."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"not {form}: {one_line(str(error))}") from error


def load_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the parsed contents of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: as ``read_bytes`` and ``parse_json``; the message does not name the file.
    """
    return parse_json(read_bytes(path, most))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"duplicate key {shown(twice)}")
    return table


def _check(value: Any, where: str = "", depth: int = 1) -> None:
    """Raise ValueError if a value breaks the guarantees in the module docstring."""
    if isinstance(value, dict):
        for key in value:
            _check(key, where)
        parts = ((f"{where}.{key}" if where else key, item) for key, item in value.items())
    elif isinstance(value, list):
        parts = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    else:
        problem = ""
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                problem = f"a lone surrogate in {shown(value)}"
        elif isinstance(value, int):
            if not -_MOST_INTEGER <= value <= _MOST_INTEGER:
                problem = "an integer beyond 64 bits"
        elif isinstance(value, float) and not math.isfinite(value):
            problem = f"expected a number that is finite, got {value}"
        if problem:
            raise ValueError(f"{one_line(where, 80)}: {problem}" if where else problem)
        return
    if depth > MOST_DEPTH:
        raise ValueError(f"{one_line(where, 80)}: nested more than {MOST_DEPTH} levels deep")
    for place, item in parts:
        _check(item, place, depth + 1)


def data_root() -> Path:
    """Return `tuning/` of the checkout, or else the copy in the wheel.

    Raises:
        FileNotFoundError: neither exists.
    """
    for candidate in (_PACKAGE.parent / "tuning", _PACKAGE / "tuning"):
        # Another package may have a directory `tuning` in site-packages.
        if (candidate / "clusters").is_dir() and (candidate / "spaces").is_dir():
            return candidate
    raise FileNotFoundError(
        "flux's data directory tuning/ was found neither beside the package nor in it: reinstall "
        "flux-overlap"
    )


def find(kind: str, name: str | Path) -> Path:
    """Return the file that the user names: a path, or the bare name of a file that flux ships.

    Raises:
        ValueError: there is no such file; the message lists the files that flux ships.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path
        shipped = data_root() / kind / (path.name if path.suffix == ".toml" else f"{name}.toml")
        if path.parent in (Path(), Path("tuning", kind)) and shipped.is_file():
            return shipped
    except FileNotFoundError:  # from data_root
        raise
    except OSError as error:  # a name that is too long, or a directory without search permission
        raise ValueError(f"{one_line(str(name))}: {error.strerror}") from error
    names = ", ".join(sorted(file.stem for file in (data_root() / kind).glob("*.toml")))
    raise ValueError(f"no file {one_line(str(name))}; {kind} shipped with flux: {names}")


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(eq=False)
class Table:
    """One table of a TOML file, or object of a JSON file.

    Reading a value removes it; ``done`` rejects keys that remain.
    """

    file: Path
    _values: dict[str, Any]
    _prefix: str = ""
    _what: str = ""

    @classmethod
    def load_json(cls, file: Path, what: str, form: int | None = None) -> Table:
        """Read a file with one JSON object.

        Args:
            file: its path.
            what: it should be, for errors, such as "a profile of flux".
            form: that its key "format" must say, if it has such a key.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not JSON, holds a value that this module rejects, or is of another
                format.
        """
        try:
            content = load_json(file)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        return cls.of_json(file, content, what, form)

    @classmethod
    def of_json(cls, file: Path, content: Any, what: str = "", form: int | None = None) -> Table:
        """Return a JSON document of ``parse_json`` that must be one object; see ``load_json``."""
        table = cls(file, dict(content) if isinstance(content, dict) else {}, _what=what)
        if not isinstance(content, dict):
            raise ValueError(f"{table._title}: expected an object, got {shown(content)}")
        if form is not None:
            stated = table._take("format")
            if type(stated) is not int or stated != form:
                table.fail("format", f"expected {form}, got {shown(stated)}")
        return table

    @classmethod
    def load(cls, file: Path) -> Table:
        """Read a file.

        Raises:
            ValueError: the file cannot be read, is not TOML, or holds a value that this module
                rejects.
        """
        # Imported here, because kernel builds read only JSON and may not have tomli.
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            data = read_bytes(file, _MOST_TOML_BYTES)
            with _parsing("TOML"):
                text = data.decode("utf-8")
                if any(len(line) > _MOST_TOML_LINE for line in text.split("\n")):
                    raise ValueError(f"a line has more than {_MOST_TOML_LINE} characters")
                values = tomllib.loads(text)
            _check(values)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        return cls(file, values)

    @property
    def keys(self) -> list[str]:
        """Keys that have not been read yet."""
        return list(self._values)

    @property
    def _title(self) -> str:
        return f"{self.file} is not {self._what}" if self._what else str(self.file)

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise ValueError with file, key and problem."""
        raise ValueError(f"{self._title}: {one_line(self._prefix + key, 80)}: {one_line(problem)}")

    def _take(self, key: str, default: Any = None) -> Any:
        if key not in self._values:
            if default is None:
                self.fail(key, "missing")
            return default
        return self._values.pop(key)

    def text(
        self, key: str, default: str | None = None, choices: Sequence[str] | None = None
    ) -> str:
        """Return a string of printable characters, one of ``choices`` if given."""
        value = self._take(key, default)
        if not isinstance(value, str):
            self.fail(key, f"expected a string, got {shown(value)}")
        if choices is not None and value not in choices:
            self.fail(key, f"expected one of {', '.join(choices)}, got {shown(value)}")
        if not value.isprintable() or len(value) > _MOST_TEXT:  # terminals show it
            self.fail(
                key, f"expected at most {_MOST_TEXT} printable characters, got {shown(value)}"
            )
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        least: float = 0.0,
        most: float = _MOST_NUMBER,
        *,
        whole: bool = False,
    ) -> float:
        """Return a number in [``least``, ``most``]. 1e15 keeps sums and products finite."""
        value = self._take(key, default)
        what = "an integer" if whole else "a number"
        if type(value) not in ((int,) if whole else (int, float)) or value < least:
            self.fail(key, f"expected {what} >= {_plain(least)}, got {shown(value)}")
        if value > most:
            self.fail(key, f"expected {what} <= {_plain(most)}, got {shown(value)}")
        return value if whole else float(value)

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MOST_SIZE
    ) -> int:
        """Return an integer in [``least``, ``most``]: no size of a problem is above 2^30."""
        return int(self.number(key, default, least, most, whole=True))

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self._take(key, None)
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, got {shown(value)}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers in [1, 2^30], which is not empty."""
        values = self._take(key, None)
        good = isinstance(values, list) and values
        if not good or not all(type(v) is int and 1 <= v <= MOST_SIZE for v in values):
            wanted = f"a list of integers >= 1 and <= {MOST_SIZE}"
            self.fail(key, f"expected {wanted}, got {shown(values)}")
        return tuple(values)

    def values(self, key: str, empty: bool = False) -> list[Any]:
        """Return a list of any values, which may be empty if ``empty``."""
        values = self._take(key, None)
        if not isinstance(values, list) or not (values or empty):
            wanted = "a list" if empty else "a list that is not empty"
            self.fail(key, f"expected {wanted}, got {shown(values)}")
        return values

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings of any length and characters; it may be empty."""
        values = self.values(key, empty=True)
        if not all(isinstance(value, str) for value in values):
            self.fail(key, f"expected strings, got {shown(values)}")
        return tuple(values)

    def objects(self, key: str) -> dict[str, dict[str, Any]]:
        """Return a table of tables by name, for classes that check their own fields."""
        rest = self.table(key)
        for name, value in rest._values.items():
            if not isinstance(value, dict):
                rest.fail(name, f"expected a table, got {shown(value)}")
        return rest._values

    def scalars(self, key: str) -> dict[str, Any]:
        """Return a table of texts, numbers, booleans and nulls by name."""
        rest = self.table(key)
        for name, value in rest._values.items():
            if isinstance(value, (dict, list)) or not name.isprintable():
                rest.fail(name, f"expected one value, got {shown(value)}")
        return {
            name: rest.text(name) if isinstance(value, str) else value
            for name, value in list(rest._values.items())
        }

    def flat(self) -> dict[str, str]:
        """Return all values as texts, by names with dots; lists with blanks between."""
        texts: dict[str, str] = {}
        for name, value in self._values.items():
            if isinstance(value, dict):
                texts |= Table(self.file, value, f"{self._prefix}{name}.").flat()
            else:
                words = value if isinstance(value, list) else [value]
                texts[self._prefix + name] = " ".join(
                    str(word).lower() if isinstance(word, bool) else str(word) for word in words
                )
        return texts

    def table(self, key: str) -> Table:
        """Return a table inside this one."""
        value = self._take(key, None)
        if not isinstance(value, dict):
            self.fail(key, f"expected a table, got {shown(value)}")
        return Table(self.file, dict(value), f"{self._prefix}{key}.", self._what)

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables inside this one; empty if the key is missing."""
        values = self._take(key, ())
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, dict) for v in values):
            self.fail(key, f"expected [[{key}]] tables, got {shown(values)}")
        return [
            Table(self.file, dict(value), f"{self._prefix}{key}[{index}].", self._what)
            for index, value in enumerate(values)
        ]

    def done(self) -> None:
        """Raise ValueError if a key remains that no caller has read."""
        for key in self._values:
            self.fail(key, "unknown key")


# -- writing ---------------------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, atomically even on a crash or power cut.

    The text is written to ``.<name>.<random>.tmp`` in the same directory. That file stays behind
    only if the process is killed. A link of that name is not followed.

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # Like mkstemp, but mkstemp has only mode 0600, and other users may need to read ``path``.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also on Ctrl-C
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems do not allow opening a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or directory to ``<name>.damaged-<n>``, of the first free n; return it.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def write_output(path: Path, text: str) -> None:
    """Write a file that the user has named: whole, as ``write_whole``, and through links.

    Write into the existing file, without replacing it, if it is not regular, such as /dev/stdout,
    or if its directory is not writable. Escape characters that UTF-8 lacks, as in names of files.

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged, if it is a regular file.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    target = Path(os.path.realpath(path))
    replaceable = target.is_file() and os.access(target.parent, os.W_OK)
    if path.exists() and not replaceable:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
    else:
        write_whole(target, text)
