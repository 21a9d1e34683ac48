"""Child processes that can be killed all at once, with the processes that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Cancelled(Exception):
    """The work was called off."""


class Children:
    """Programs run from several threads. ``kill`` ends those that run and refuses new ones."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def run(
        self, command: Sequence[str], directory: Path, variables: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run a program in ``directory``; returns its status and what it printed.

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
                # A group of its own: nvcc starts the compilers proper, which end with it.
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
        """End everything that runs. May be called more than once."""
        self.cancelled.set()
        with self._lock:
            for process in self._running:
                if process.returncode is None:  # not waited for yet: the id is still its own
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
