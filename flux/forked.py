"""Keep a forked child from acting on what is its parent's: sockets, threads, streams.

A child that ends normally runs atexit handlers and destructors over its copies of our objects.
gloo's would take the parent's sockets out of the epoll set, which both processes share, and join
threads that the child does not have; NCCL's would talk to the parent's proxy thread. Shared memory
needs nothing of this: a mapping ends with its process, and the engine checks the process itself
(csrc/host/engine.cpp).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Owner(Protocol):
    """Has resources that only the process that made them may use or end."""

    def abandon(self) -> Iterable[object]:
        """Forget the resources without touching them. Runs in a forked child.

        Returns:
            Objects whose destructors must never run in the child.
        """
        ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def abandon_in_children(owner: Owner) -> None:
    """Call ``owner.abandon`` in every child that is forked while ``owner`` lives."""
    _owners.add(owner)


def _abandon_all() -> None:
    for owner in list(_owners):
        for kept in owner.abandon():
            # A reference too many. A global list would be emptied when the interpreter ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _owners.clear()


os.register_at_fork(after_in_child=_abandon_all)
