"""What a run of `flux tune` has found out so far, on disk after every step: a run that is killed
goes on where it was.

One line of JSON for each event, appended and synced before the next step begins. A line that a kill
has cut short is the last one, and is dropped; the run repeats that step.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from typing_extensions import Self

FORMAT = 1


class BusyError(RuntimeError):
    """Another process works on the same run."""


def run_id(what: Mapping[str, Any]) -> str:
    """The name of a run: the same for the same shapes, candidates and options."""
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The events of one run.

    Args:
        directory: of all runs.
        name: of this one (``run_id``).
        what: what the run is of; written down for people.

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
            self._file = self.path.open("a", encoding="utf-8")
            if not self.events:
                self.add("run", format=FORMAT, name=name, what=dict(what))
        except BaseException:
            self._lock.release()
            raise

    @property
    def resumed(self) -> bool:
        """Whether there was anything to go on from."""
        return len(self.events) > 1

    def add(self, kind: str, **content: Any) -> None:
        """Append an event; it is on disk when this returns."""
        event = {"event": kind, **content}
        self._file.write(json.dumps(event, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(event)

    def close(self) -> None:
        """Let go of the run. Idempotent."""
        self._file.close()
        self._lock.release()

    def finish(self) -> None:
        """Forget the run: all of it is done. The next one with its name begins anew."""
        self.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _recover(self) -> list[dict[str, Any]]:
        """The events that are whole; what comes after the first that is not is cut off."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        events: list[dict[str, Any]] = []
        good = 0
        for line in data.splitlines(keepends=True):
            event = _parse(line)
            if event is None or (not events and not self._is_header(event)):
                break
            events.append(event)
            good += len(line)
        if good < len(data):
            rest = data[good:]
            if b"\n" in rest.rstrip(b"\n") or not events:  # more than one line cut short
                warnings.warn(
                    f"damaged journal {self.path}: {len(rest)} bytes behind event {len(events)} "
                    "are dropped, and that part of the run is repeated",
                    RuntimeWarning,
                    stacklevel=3,
                )
            with self.path.open("r+b") as file:
                file.truncate(good)
                os.fsync(file.fileno())
        return events

    def _is_header(self, event: Mapping[str, Any]) -> bool:
        stated = (event.get("event"), event.get("format"), event.get("name"))
        return stated == ("run", FORMAT, self.path.stem)


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None
