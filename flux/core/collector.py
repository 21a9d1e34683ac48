"""Pause Python's garbage collector while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause Python's garbage collector.

    With half a million operators of a step it would take a quarter of the time. It would free
    nothing: they have no cycles of references.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
