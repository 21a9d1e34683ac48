"""Record and show the activity of an op on all ranks over time.

``record_op`` is in ``flux.trace.record``, files are in ``flux.trace.chrome``. Both are imported at
first use, so that a program that only records pays for no writer, and a reader of files for no op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flux.core.events import Event, Kind, Trace

if TYPE_CHECKING:
    from flux.trace.chrome import read_chrome, write_chrome
    from flux.trace.record import record_op

__all__ = ["Event", "Kind", "Trace", "read_chrome", "record_op", "write_chrome"]


def __getattr__(name: str) -> Any:
    if name == "record_op":
        from flux.trace import record as module
    elif name in ("read_chrome", "write_chrome"):
        from flux.trace import chrome as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
