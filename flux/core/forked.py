"""Stop a forked child from using resources of its parent: sockets, threads, streams.

A child that ends normally runs atexit handlers and destructors on its copies of our objects. gloo's
destructor would remove the parent's sockets from the epoll set, which both processes share, and
join threads that the child does not have. NCCL's would talk to the parent's proxy thread. Shared
memory needs no such care: a mapping ends with its process, and the engine checks the process itself
(csrc/cpu/engine.cpp).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class ResourceOwner(Protocol):
    """An object with resources that only the process that made them may use or end."""

    def abandon(self) -> Iterable[object]:
        """Forget the resources without touching them. Runs in a forked child.

        Returns:
            Objects whose destructors must never run in the child.
        """
        ...


_owners: weakref.WeakSet[ResourceOwner] = weakref.WeakSet()


def abandon_in_children(owner: ResourceOwner) -> None:
    """Call ``owner.abandon`` in every child that is forked while ``owner`` lives."""
    _owners.add(owner)


def _abandon_all() -> None:
    for owner in list(_owners):
        for kept in owner.abandon():
            # Leak a reference, so that the destructor never runs. A global list does not work: the
            # interpreter clears it at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _owners.clear()


os.register_at_fork(after_in_child=_abandon_all)
