"""Record and show the activity of an op on all ranks over time.

``record_op`` and its result types are in ``flux.trace.record``, files in ``flux.trace.chrome``.
They are imported at first use, because executors need this package too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flux.core.events import Event, Kind

if TYPE_CHECKING:
    from flux.trace.chrome import read_chrome, write_chrome
    from flux.trace.record import Trace, record_op

__all__ = ["Event", "Kind", "Trace", "read_chrome", "record_op", "write_chrome"]


def __getattr__(name: str) -> Any:
    if name in ("Trace", "record_op"):
        from flux.trace import record as module
    elif name in ("read_chrome", "write_chrome"):
        from flux.trace import chrome as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
