"""Store the progress of a `flux tune` run on disk after every step, so that a run can resume.

One line of JSON for each event, appended and synced before the next step begins. A kill can cut off
only the last line. That line is dropped, and the run repeats its step.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from typing_extensions import Self

from flux.core.datafile import parse_json

FORMAT = 1
_MOST_LINE = 16 << 20
"""Bytes. The longest line is the first one, which names all candidates of all shapes."""


class BusyError(RuntimeError):
    """Another process works on the same run."""


def run_id(what: Mapping[str, Any]) -> str:
    """Return the name of a run: the same for the same shapes, candidates and options."""
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The events of one run.

    Args:
        directory: of all runs.
        name: of this one (``run_id``).
        what: description of the run, stored for display.

    Attributes:
        resumed: whether an earlier run left events.

    Raises:
        BusyError: another process has it open.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, name: str, what: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}.jsonl"
        self._lock = FileLock(directory / f"{name}.lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise BusyError(f"another `flux tune` works on this run: {self.path}") from None
        try:
            self.events = self._recover()
            self.resumed = len(self.events) > 1
            self._file = self.path.open("a", encoding="utf-8")
            if not self.events:
                self.add("run", format=FORMAT, name=name, what=dict(what))
        except BaseException:
            self._lock.release()
            raise

    def add(self, kind: str, **content: Any) -> None:
        """Append an event; it is on disk when this returns."""
        event = {"event": kind, **content}
        self._file.write(json.dumps(event, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(event)

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        self._file.close()
        self._lock.release()

    def finish(self) -> None:
        """Delete the journal of a completed run. The next run of this name begins anew."""
        self.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _recover(self) -> list[dict[str, Any]]:
        """Return the complete events; cut off the file after the first incomplete one."""
        try:
            # O_NONBLOCK, so that a pipe of this name does not block.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return []
        events: list[dict[str, Any]] = []
        with open(descriptor, "r+b", buffering=0) as unbuffered:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))
            file = io.BufferedReader(unbuffered)
            good, damaged = 0, False
            while line := file.readline(_MOST_LINE):
                event = _parse(line)
                if event is None or (not events and not self._is_header(event)):
                    # A kill cuts off the last line only. Anything else is damage.
                    damaged = not events or line.endswith(b"\n") or file.read(1) != b""
                    break
                events.append(event)
                good += len(line)
            if good < status.st_size:
                if damaged:
                    warnings.warn(
                        f"damaged journal {self.path}: {status.st_size - good} bytes behind event "
                        f"{len(events)} are dropped, and that part of the run is repeated",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                os.ftruncate(descriptor, good)
                os.fsync(descriptor)
        return events

    def _is_header(self, event: Mapping[str, Any]) -> bool:
        stated = (event.get("event"), event.get("format"), event.get("name"))
        return stated == ("run", FORMAT, self.path.stem)


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
