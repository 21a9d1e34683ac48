"""End threads and notify peers before the interpreter exits.

Python collects an object late or never if a traceback, a compiled graph or a reference cycle holds
it. Its peers would then wait for it until their timeouts.

A Python thread of ours that is inside torch when the interpreter exits would abort the program.
CPython before 3.14 ends such a thread by unwinding its stack, which C++ does not allow in
destructors. A thread of gloo does the same: it drops the tensors of a collective some time after
the ranks have its result, and for that takes the GIL.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives to the threads that run gloo's collectives. In older releases (2.9) they
have the name of the process."""
SETTLE_S = 1.0


class ThreadOwner(Protocol):
    """An object with threads, or with peers that wait for it."""

    def end(self) -> None:
        """End the threads and notify the peers.

        Runs when the program ends. It also runs after an interrupted ``close``, and while a daemon
        thread is inside a call.
        """
        ...


_owners: weakref.WeakValueDictionary[int, ThreadOwner] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def end_at_exit(owner: ThreadOwner) -> None:
    """Call ``owner.end`` when the program ends while ``owner`` lives; not in forked children.

    Owners are ended in the order of registration: an engine before the network that serves it.
    """
    _owners[next(_numbers)] = owner


def _running(names: set[str]) -> bool:
    """Return whether a thread with one of these names, not of Python, has or awaits a processor."""
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, state = (thread / "stat").read_text().partition("(")[2].rpartition(") ")
        except OSError:  # it has just ended
            continue
        if name in names and state.startswith("R") and thread.name not in of_python:
            return True
    return False


def _await_gloo() -> None:
    """Wait until the threads of gloo wait for the next collective, SETTLE_S at most.

    A thread that waits for the GIL gets it meanwhile. A thread inside a collective that waits for a
    peer is not running.
    """
    deadline = time.monotonic() + SETTLE_S
    names = {GLOO_THREAD, Path("/proc/self/comm").read_text().rstrip("\n")}
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        quiet = 0 if _running(names) else quiet + 1


@atexit.register
def _at_exit() -> None:
    try:
        _end_all()
    finally:
        _await_gloo()


def _end_all() -> None:
    owners = list(_owners.values())
    if not owners:
        return
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Without this, a Ctrl-C would leave threads behind, and the program would abort instead of
        # ending by the signal.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.ExitStack() as stack:  # an error in one owner does not skip the others
        for owner in reversed(owners):
            stack.callback(owner.end)


os.register_at_fork(after_in_child=_owners.clear)
