"""The data that flux comes with (`tuning/`), and TOML files read with errors that help.

A reader hands out the values of one table, each checked, and complains about keys nobody asked for:
a misspelt key must not silently mean the default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """`tuning/` of the checkout, else what the wheel brought.

    Raises:
        FileNotFoundError: neither is there.
    """
    for candidate in (_PACKAGE.parent / "tuning", _PACKAGE / "tuning"):
        # Another package's directory may lie beside ours in site-packages.
        if (candidate / "clusters").is_dir() and (candidate / "spaces").is_dir():
            return candidate
    raise FileNotFoundError(
        "flux's data (tuning/) were found neither beside the package nor in it: install "
        "flux-overlap again"
    )


def find(kind: str, name: str | Path) -> Path:
    """A file that the user names: a path, or the bare name of one that flux comes with.

    Raises:
        ValueError: there is no such file; the message lists those that flux comes with.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = data_root() / kind / (path.name if path.suffix == ".toml" else f"{name}.toml")
    if path.parent in (Path(), Path("tuning", kind)) and shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in (data_root() / kind).glob("*.toml")))
    raise ValueError(f"no file {name}; of {kind} flux comes with {names}")


class Table:
    """One table of a TOML file. Values are taken out; ``done`` complains about what is left."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self._values = dict(values)
        self._prefix = prefix

    @classmethod
    def load(cls, file: Path) -> Table:
        """Raises ValueError: not to be read, or not TOML."""
        try:
            return cls(file, tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not TOML: {error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        """What has not been taken yet."""
        return list(self._values)

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises ValueError: file, key and what is wrong."""
        raise ValueError(f"{self.file}: {self._prefix}{key}: {problem}")

    def _take(self, key: str, default: Any) -> Any:
        if key not in self._values:
            if default is None:
                self.fail(key, "missing")
            return default
        return self._values.pop(key)

    def text(
        self, key: str, default: str | None = None, choices: Sequence[str] | None = None
    ) -> str:
        """A string, one of ``choices`` if given."""
        value = self._take(key, default)
        if not isinstance(value, str):
            self.fail(key, f"expected a text, got {value!r}")
        if choices is not None and value not in choices:
            self.fail(key, f"expected one of {', '.join(choices)}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number above ``least``, or that itself when it is 0."""
        value = self._take(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (good and least <= value < float("inf")):
            self.fail(key, f"expected a number >= {least:g}, got {value!r}")
        return float(value)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self._take(key, default)
        if type(value) is not int or value < least:
            self.fail(key, f"expected an integer >= {least}, got {value!r}")
        return int(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, got {value!r}")
        return value

    def integers(self, key: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """A list of positive integers with at least one in it."""
        values = self._take(key, default)
        good = isinstance(values, (list, tuple)) and len(values) > 0
        if not (good and all(type(value) is int and value >= 1 for value in values)):
            self.fail(key, f"expected a list of integers >= 1, got {values!r}")
        return tuple(values)

    def values(self, key: str, default: Sequence[Any] | None = None) -> list[Any]:
        """A list of anything, with at least one thing in it."""
        values = self._take(key, default)
        if not isinstance(values, (list, tuple)) or not values:
            self.fail(key, f"expected a list that is not empty, got {values!r}")
        return list(values)

    def table(self, key: str) -> Table:
        """A table inside this one."""
        value = self._take(key, None)
        if not isinstance(value, dict):
            self.fail(key, f"expected a table, got {value!r}")
        return Table(self.file, value, f"{self._prefix}{key}.")

    def tables(self, key: str) -> list[Table]:
        """A list of tables inside this one, none if it is not there."""
        values = self._take(key, ())
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, dict) for v in values):
            self.fail(key, f"expected [[{key}]] tables, got {values!r}")
        return [
            Table(self.file, value, f"{self._prefix}{key}[{index}].")
            for index, value in enumerate(values)
        ]

    def done(self) -> None:
        """Raises ValueError: there are keys that mean nothing here."""
        for key in self._values:
            self.fail(key, "unknown key")
