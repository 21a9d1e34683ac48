"""Pause Python's garbage collector while many objects are made, or calls are timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector(*, collect: bool = False) -> Iterator[None]:
    """Pause Python's garbage collector; with ``collect``, collect garbage before.

    With half a million operators of a step it would take a quarter of the time. It would free
    nothing: they have no cycles of references. In a measurement, one collection lasts longer than
    many GEMMs.
    """
    was_on = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
