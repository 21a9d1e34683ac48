"""Threads that wait for peers, and the end of the program.

torch.distributed waits as long as the timeout of a group, half an hour by default, and a Ctrl-C
does not end that wait. So such a call runs on a daemon thread (``Abandonable``), and its caller
waits for the thread.

A thread left inside torch does not keep the program from ending. But its call may return while the
interpreter is being finalized, because the connections break when a peer ends. Python before 3.14
then ends the thread by pthread_exit when it takes the GIL. That happens in a destructor of
pybind11, which must not throw, so the C++ runtime aborts the process. Therefore threads that still
wait when the program ends are stopped, by a signal whose handler does not return. A thread of gloo
takes the GIL, too, when it drops the tensors of a collective, some time after the ranks have its
result. The end of the program waits for it.

Python collects an object late or never if a traceback, a compiled graph or a reference cycle holds
it. Its peers would then wait for it until their timeouts. So ``end_at_exit`` ends what has threads,
or peers that wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

T = TypeVar("T")
_Inbox = queue.SimpleQueue["Abandonable[Any] | None"]

_inside: set[threading.Thread] = set()
"""Threads that may be inside torch."""
_membership = threading.Lock()
"""Held to enter or leave ``_inside``: no thread ends while another thread holds this lock."""
_ended = False
"""Whether the program ends: no thread enters torch any more."""
_OF_MAIN_THREAD = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCHLD,
}


MOST_STEP_S = 0.25
"""Seconds; as in csrc/cpu/clock.h. Waits look several times as often."""


@dataclass
class Patience:
    """A time limit of a wait that looks at least every MOST_STEP_S seconds.

    It counts only the time in which this thread could look. While a process is stopped (SIGSTOP,
    `docker pause`, a suspended virtual machine) the clock goes on. If all ranks of a job are
    stopped for longer than their timeout, none of them is late. So a step of the clock between two
    looks counts as MOST_STEP_S at most.

    The first argument is the limit in seconds; inf: no limit.
    """

    _left_s: float
    _last: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative once the limit has passed. Reading it is a look."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, MOST_STEP_S)
        self._last = now
        return self._left_s


class Abandonable(Generic[T]):
    """A call on a daemon thread, with the caller's CUDA device.

    Args:
        body: the call.
        threads: execute the call; None: a thread of its own does.
    """

    def __init__(self, body: Callable[[], T], threads: Threads | None = None) -> None:
        self._body = body
        self._value: T | None = None
        self.error: BaseException | None = None
        """What the call has raised. No signal handler runs on its thread, so it is the call's."""
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.done = False
        """Whether the call has returned or raised."""
        self._running = threading.Lock()
        self._running.acquire()
        if threads is not None:
            threads.execute(self)
        else:
            inbox: _Inbox = queue.SimpleQueue()
            inbox.put(self)
            inbox.put(None)
            threading.Thread(target=_serve, args=(inbox, []), daemon=True).start()

    def execute(self) -> None:
        """Make the call on this thread. ``_serve`` calls it."""
        this = threading.current_thread()
        with _membership:
            if _ended:  # this thread would not be stopped any more
                self.error = RuntimeError("the program is exiting")
                return
            _inside.add(this)
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # the current device is per thread
            self._value = self._body()
        except BaseException as error:
            self.error = error
        finally:
            del self._body
            with _membership:
                _inside.discard(this)

    def finish(self) -> None:
        """Wake the caller. ``_serve`` calls it."""
        self.done = True
        self._running.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the call; return whether it has ended. A signal handler may raise.

        Args:
            timeout_s: in seconds; None: no limit.
        """
        if not self.done and self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._running.release()
        return self.done

    def result(self) -> T:
        """Return the call's value, or raise its error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # its traceback would keep the caller's objects alive
        return cast(T, self._value)


@dataclass(eq=False)
class Threads:
    """Daemon threads that execute calls, kept from call to call until ``close``.

    Starting a thread takes 0.4 ms. There is one thread, unless a call does not return: its thread
    stays in it, and the next call gets a new one.
    """

    _idle: list[_Inbox] = field(default_factory=list)
    _all: list[tuple[_Inbox, threading.Thread]] = field(default_factory=list)

    def execute(self, call: Abandonable[Any]) -> None:
        """Execute a call on an idle thread, or on a new one."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(inbox, self._idle), daemon=True)
            self._all.append((inbox, thread))
            thread.start()
        inbox.put(call)

    def close(self) -> None:
        """End the threads, and wait for those that are in no call. Idempotent."""
        if sys.is_finalizing():  # where daemon threads run no more
            return
        idle = set(map(id, self._idle))
        for inbox, thread in self._all:
            inbox.put(None)
            if id(inbox) in idle and thread is not threading.current_thread():
                thread.join()
        self._all.clear()


def _serve(inbox: _Inbox, idle: list[_Inbox]) -> None:
    """Execute the calls of an inbox, until None."""
    # Blocked also to keep a stopped thread stopped: pause returns when another signal is handled.
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_MAIN_THREAD)
    while (call := inbox.get()) is not None:
        call.execute()
        idle.append(inbox)  # before the caller goes on, and makes its next call
        call.finish()
        del call  # with its value


# -- the end of the program ------------------------------------------------------------------------

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


@atexit.register
def _stop_all() -> None:
    """Stop the threads that are still inside torch. Runs before ``_at_exit``."""
    for thread in list(_inside):
        thread.join(0.01)  # a thread that waits only for the GIL takes it and leaves
    global _ended
    with _membership:
        _ended = True
        if not _inside:
            return
        numbers = range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
        unused = next(n for n in numbers if signal.getsignal(n) is signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(unused, ctypes.cast(libc.pause, ctypes.c_void_p))
        for thread in _inside:
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, unused)


def _forget_all() -> None:
    """Reset the state in a forked child, which has none of its parent's threads."""
    global _membership
    _membership = threading.Lock()
    _inside.clear()
    _owners.clear()


os.register_at_fork(after_in_child=_forget_all)
