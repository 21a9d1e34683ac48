"""What an op did when, on which rank.

``record_op`` and what it returns come from ``flux.trace.record``, files from ``flux.trace.chrome``;
they are imported when they are first asked for, since executors need this package too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .events import Event, Kind

if TYPE_CHECKING:
    from .chrome import read_chrome, write_chrome
    from .record import Trace, record_op

__all__ = ["Event", "Kind", "Trace", "read_chrome", "record_op", "write_chrome"]


def __getattr__(name: str) -> Any:
    if name in ("Trace", "record_op"):
        from . import record as module
    elif name in ("read_chrome", "write_chrome"):
        from . import chrome as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
