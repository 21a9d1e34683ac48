"""Run calls into torch that wait for peers on threads that this process can abandon.

torch.distributed waits as long as the timeout of a group, half an hour by default, and a Ctrl-C
does not end that wait. So such a call runs on a daemon thread, and its caller waits for the thread.

A thread left inside torch does not keep the program from ending. But its call may return while the
interpreter is being finalized, because the connections break when a peer ends. Python before 3.14
then ends the thread by pthread_exit when it takes the GIL. That happens in a destructor of
pybind11, which must not throw, so the C++ runtime aborts the process. Therefore threads that still
wait when the program ends are stopped, by a signal whose handler does not return.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

T = TypeVar("T")

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


class Abandonable(Generic[T]):
    """A call on a daemon thread, with the caller's CUDA device."""

    def __init__(self, body: Callable[[], T]) -> None:
        self._body = body
        self._value: T | None = None
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Blocked also to keep a stopped thread stopped: pause returns when another signal is
        # handled.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_MAIN_THREAD)
        this = threading.current_thread()
        with _membership:
            if _ended:  # this thread would not be stopped any more
                self._error = RuntimeError("the program is exiting")
                return
            _inside.add(this)
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # the current device is per thread
            self._value = self._body()
        except BaseException as error:
            self._error = error
        finally:
            del self._body
            with _membership:
                _inside.discard(this)

    @property
    def done(self) -> bool:
        """Whether the call has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the call; return whether it has ended. A signal handler may raise.

        Args:
            timeout_s: in seconds; None: no limit.
        """
        self._thread.join(timeout_s)
        return self.done

    @property
    def error(self) -> BaseException | None:
        """What the call has raised. No signal handler runs on its thread, so it is the call's."""
        return self._error

    def result(self) -> T:
        """Return the call's value, or raise its error."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback would keep the caller's objects alive
        return cast(T, self._value)


@atexit.register
def _stop_all() -> None:
    """Stop the threads that are still inside torch."""
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


os.register_at_fork(after_in_child=_forget_all)
