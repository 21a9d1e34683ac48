"""Child processes that can be killed together, with the processes that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Cancelled(Exception):
    """The work was cancelled."""


class Children:
    """Runs programs from several threads. ``kill`` ends the running ones and rejects new ones."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def run(
        self, command: Sequence[str], directory: Path, variables: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run a program in ``directory``; return its status and output.

        Raises:
            Cancelled: ``kill`` was called, before or meanwhile.
            OSError: it cannot be started.
        """
        with self._lock:
            if self.cancelled.is_set():
                raise Cancelled
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A process group of its own: nvcc starts the compilers proper, which are killed
                # with it.
                start_new_session=True,
            )
            self._running.add(process)
        try:
            output, _ = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if self.cancelled.is_set():
            raise Cancelled
        return process.returncode, output

    def kill(self) -> None:
        """Kill everything that runs. May be called more than once."""
        self.cancelled.set()
        with self._lock:
            for process in self._running:
                if process.returncode is None:  # not waited for yet, so the id is not reused
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
