"""Load built kernels into this process: only files that no other user can write or replace."""

from __future__ import annotations

from flux import _C
from flux.kernels import trust
from flux.kernels.registry import BuiltKernel


def load(built: BuiltKernel) -> _C.Kernel:
    """Load a kernel of a library. The library is hashed and loaded from one open file.

    Raises:
        RuntimeError: another user can write or replace the library, it has changed since its
            manifest was read, or it cannot be loaded.
    """
    with trust.verified(built.library, built.sha256) as file:
        return _C.Kernel(str(built.library), built.symbol, file.name_to_load())
