"""Winners on disk: one readable file for each key, which appears whole or not at all.

<root>/v1/<key>.json             all M of one op on one kind of machine
          .locks/<key>.lock      held by whoever writes or sets aside that file
          .<key>.json.<random>.tmp  by whoever holds the lock; left behind only if killed
          <key>.json.damaged-<n> set aside, never looked at again

Readers take no lock: a file is replaced by a rename, so they see the old one or the new one.
Writers read, add and write under the key's lock, so of several that add winners at once none is
lost. The lock is the kernel's (flock), and ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flux import env
from flux.datafile import data_root
from flux.knobs import Op
from flux.tune.keys import Key
from flux.tune.winners import FORMAT, DamagedEntryError, Entry, Winner
from flux.wholefile import write_whole

LOCK_S = 60.0
"""How long a writer waits for others; each holds the lock for milliseconds."""

_OURS = re.compile(rf"(?:{'|'.join(Op.__members__)})_\w[\w.+-]*\.json")


class Cache:
    """The winners in one directory.

    Args:
        root: the directory; need not exist.
        read_only: nothing is written there, and damaged files stay where they are.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root
        self.directory = root if read_only else root / f"v{FORMAT}"
        self.read_only = read_only

    # -- reading -----------------------------------------------------------------------------------

    def load(self, key: Key) -> Entry | None:
        """The winners of a key; None if there are none. A damaged file is set aside."""
        return self._load(self.directory / f"{key.name}.json")

    def entries(self) -> Iterator[Entry]:
        """Everything that can be read, by file name; files that are not ours are left alone."""
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if _OURS.fullmatch(name):
                entry = self._load(self.directory / name)
                if entry is not None:
                    yield entry

    def damaged(self) -> list[Path]:
        """What was set aside."""
        return sorted(self.directory.glob("*.damaged-*"))

    def _load(self, path: Path) -> Entry | None:
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except (DamagedEntryError, OSError) as error:
            return self._set_aside_unless_mended(path, str(error))

    def _set_aside_unless_mended(self, path: Path, why: str) -> Entry | None:
        problem = "in a directory that flux does not write to"
        if not self.read_only:
            try:
                with self._lock(path.stem):
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

    def store(self, key: Key, winner: Winner, machine: Mapping[str, Any]) -> Entry:
        """Add a winner, in place of an older one for its M; returns what the file holds now.

        Raises:
            OSError: the directory cannot be written.
            filelock.Timeout: somebody holds the lock for a minute.
        """
        return self.merge(Entry(key, machine, (winner,)))

    def merge(self, entry: Entry, *, keep_newer: bool = False) -> Entry:
        """Add all winners of an entry; with ``keep_newer`` only those not older than what is there.

        Raises:
            As ``store``.
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
            there = {winner.m: winner for winner in merged.winners}
            for winner in entry.winners:
                old = there.get(winner.m)
                if old is None or not keep_newer or winner.tuned_at >= old.tuned_at:
                    merged = merged.with_winner(winner)
            for leftover in self.directory.glob(f".{path.name}.*.tmp"):
                leftover.unlink(missing_ok=True)  # its writer is dead, or would have the lock
            text = json.dumps(merged.as_dict(), indent=1, allow_nan=False) + "\n"
            write_whole(path, text)
        return merged

    def remove(self, key: Key) -> None:
        """Forget the winners of a key."""
        with self._lock(key.name):
            (self.directory / f"{key.name}.json").unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raises OSError: winners could not be written here."""
        with self._lock("check"):
            tempfile.TemporaryFile(dir=self.directory).close()

    def _lock(self, name: str) -> FileLock:
        locks = self.directory / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / f"{name}.lock", timeout=LOCK_S)


def read(path: Path) -> Entry:
    """The entry in a file.

    Raises:
        FileNotFoundError: there is none.
        DamagedEntryError: it is not what was written, or belongs under another name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedEntryError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedEntryError(f"not JSON: {error}") from error
    entry = Entry.from_dict(content)
    if path.name != f"{entry.key.name}.json":
        raise DamagedEntryError(f"holds what belongs into {entry.key.name}.json")
    return entry


def _set_aside(path: Path, why: str) -> None:
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, target)
    _warn(f"damaged tuning results set aside as {target}: {why}")


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def cache_root() -> Path:
    """Where `flux tune` puts winners: FLUX_TUNE_CACHE."""
    return Path(env.TUNE_CACHE.get()).expanduser().absolute()


def default_caches() -> Sequence[Cache]:
    """Where ops look for winners, most preferred first: the user's, then what flux came with."""
    caches = [Cache(cache_root())]
    with contextlib.suppress(FileNotFoundError):
        caches.append(Cache(data_root() / "results", read_only=True))
    return caches


def look_up(key: Key, caches: Sequence[Cache] | None = None) -> Entry | None:
    """The winners of a key, of the most preferred cache that has any."""
    for cache in default_caches() if caches is None else caches:
        entry = cache.load(key)
        if entry is not None and entry.winners:
            return entry
    return None
