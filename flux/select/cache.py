"""Winners on disk: one readable file per key, replaced atomically.

<root>/v1/<key>.json             all M of one op on one kind of machine
          .locks/<key>.lock      held while a process writes or sets aside that file
          .<key>.json.<random>.tmp  written under the lock; remains only if the process is killed
          <key>.json.damaged-<n> set aside, and ignored from then on

Readers take no lock: a file is replaced by a rename, so they see the old one or the new one.
Writers read, add and write under the key's lock, so no winner is lost if several processes add
winners at once. The lock is the kernel's (flock), and ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from flux.core import env
from flux.core.datafile import data_root, load_json, set_aside, write_whole
from flux.core.sparse_problem import NAMES
from flux.select.winners import FORMAT, DamagedEntryError, Entry, Key

LOCK_S = 60.0
"""Seconds that a writer waits for others; each holds the lock for milliseconds."""

LOOK_UP_S = 1.0
"""Seconds that the constructor of an op waits for a writer, at most."""

_MOST_EXPORTED = 256 << 20
"""Bytes: an export has the winners of all files."""

_OURS = re.compile(rf"(?:{'|'.join(NAMES)})_\w[\w.+-]*\.json")


class Cache:
    """The winners in one directory.

    Args:
        root: the directory; need not exist.
        read_only: if true, nothing is written there, and damaged files stay in place.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root
        self.directory = root if read_only else root / f"v{FORMAT}"
        self.read_only = read_only

    # -- reading -----------------------------------------------------------------------------------

    def load(self, key: Key | str, timeout_s: float = LOCK_S) -> Entry | None:
        """Return the winners of a key; None if there are none. A damaged file is set aside.

        Args:
            key: the op and the machine, or its ``name``.
            timeout_s: how long to wait, before a damaged file is set aside, for a writer that may
                replace it; it stays in place then.
        """
        path = self.directory / f"{key if isinstance(key, str) else key.name}.json"
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except (DamagedEntryError, OSError) as error:
            return self._set_aside_unless_mended(path, str(error), timeout_s)

    def entries(self) -> Iterator[Entry]:
        """Yield all readable entries, by file name; other programs' files are ignored."""
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            _warn(f"tuning results in {self.directory} cannot be read: {error.strerror}")
            return
        for name in names:
            if _OURS.fullmatch(name):
                entry = self.load(name.removesuffix(".json"))
                if entry is not None:
                    yield entry

    def damaged(self) -> list[Path]:
        """Return the files that were set aside."""
        return sorted(self.directory.glob("*.damaged-*"))

    def _set_aside_unless_mended(self, path: Path, why: str, timeout_s: float) -> Entry | None:
        problem = "in a directory that flux does not write to"
        if not self.read_only:
            try:
                with self._lock(path.stem, timeout_s):
                    try:
                        return read(path)  # a writer has replaced it meanwhile
                    except FileNotFoundError:
                        return None
                    except DamagedEntryError as error:
                        _set_aside(path, str(error))
                        return None
            except (OSError, Timeout) as error:
                problem = f"it cannot be set aside: {error}"
        _warn(f"damaged tuning results {path} are ignored ({why}); {problem}")
        return None

    # -- writing -----------------------------------------------------------------------------------

    def store(self, entry: Entry, *, keep_newer: bool = False) -> Entry:
        """Add all winners of an entry, replacing those for their M; return the file's contents.

        With ``keep_newer``, add only winners that are not older than the stored ones.

        Raises:
            OSError: the directory cannot be written.
            filelock.Timeout: another process holds the lock for a minute.
        """
        path = self.directory / f"{entry.key.name}.json"
        with self._lock(entry.key.name):
            try:
                merged = read(path)
            except FileNotFoundError:
                merged = Entry(entry.key, entry.machine)
            except DamagedEntryError as error:
                _set_aside(path, str(error))
                merged = Entry(entry.key, entry.machine)
            by_m = {winner.m: winner for winner in merged.winners}
            for winner in entry.winners:
                old = by_m.get(winner.m)
                if old is None or not keep_newer or winner.tuned_at >= old.tuned_at:
                    by_m[winner.m] = winner
            merged = replace(merged, winners=tuple(by_m[m] for m in sorted(by_m)))
            for leftover in self.directory.glob(f".{path.name}.*.tmp"):
                leftover.unlink(missing_ok=True)  # its writer is dead: else it would hold the lock
            text = json.dumps(merged.as_dict(), indent=1, allow_nan=False) + "\n"
            write_whole(path, text)
        return merged

    def remove(self, key: Key) -> None:
        """Remove the winners of a key."""
        with self._lock(key.name):
            (self.directory / f"{key.name}.json").unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise OSError if winners cannot be written here."""
        with self._lock("check"):
            tempfile.TemporaryFile(dir=self.directory).close()

    def _lock(self, name: str, timeout_s: float = LOCK_S) -> FileLock:
        locks = self.directory / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / f"{name}.lock", timeout=timeout_s)


def read(path: Path) -> Entry:
    """Return the entry in a file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedEntryError: the contents differ from what was written, or belong under another name.
    """
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedEntryError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedEntryError(str(error)) from error
    entry = Entry.from_dict(content)
    if path.name != f"{entry.key.name}.json":
        raise DamagedEntryError(f"contains the entry of {entry.key.name}.json")
    return entry


def read_export(path: Path) -> list[Entry]:
    """Return the entries in a file that ``flux tune export`` wrote.

    Raises:
        OSError: the file cannot be read.
        DamagedEntryError: the contents differ from what was written.
    """
    try:
        content = load_json(path, most=_MOST_EXPORTED)
    except ValueError as error:
        raise DamagedEntryError(str(error)) from error
    if not isinstance(content, dict) or content.get("flux_winners") != 1:
        raise DamagedEntryError("not a file of `flux tune export`, or from a newer flux")
    listed = content.get("entries")
    if not isinstance(listed, list):
        raise DamagedEntryError("entries: expected a list")
    return [_entry(entry, f"entries[{index}]") for index, entry in enumerate(listed)]


def _entry(content: object, where: str) -> Entry:
    try:
        return Entry.from_dict(content)
    except DamagedEntryError as error:
        raise DamagedEntryError(f"{where}: {error}") from error


def _set_aside(path: Path, why: str) -> None:
    _warn(f"damaged tuning results set aside as {set_aside(path)}: {why}")


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def default_caches() -> Sequence[Cache]:
    """Return the caches that ops search, most preferred first: the user's, then the shipped one."""
    caches = [Cache(env.TUNE_CACHE.path())]
    with contextlib.suppress(FileNotFoundError):
        caches.append(Cache(data_root() / "results", read_only=True))
    return caches


def look_up(
    key: Key, caches: Sequence[Cache] | None = None, *, timeout_s: float | None = None
) -> Entry | None:
    """Return the winners of a key, from the most preferred cache that has any.

    If they cannot be read, warn and return None: ops run without winners then.

    Args:
        key: the op and the machine.
        caches: where to look; None: where ops do.
        timeout_s: of the op that needs them. A part of it is waited for the lock of a damaged file,
            while its peers wait for this rank.
    """
    limit_s = LOCK_S if timeout_s is None else min(LOOK_UP_S, timeout_s / 4)
    try:
        for cache in default_caches() if caches is None else caches:
            entry = cache.load(key, limit_s)
            if entry is not None and entry.winners:
                return entry
    # For example a missing home directory, or numbers and nesting beyond Python's limits.
    except (OSError, RuntimeError, ValueError, ArithmeticError) as error:
        _warn(
            f"tuned winners cannot be read, so none are used: {type(error).__name__}: {error}",
        )
    return None
