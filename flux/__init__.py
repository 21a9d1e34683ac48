"""Flux: tensor-parallel communication hidden behind the GEMM it depends on."""

import importlib
from typing import TYPE_CHECKING, Any

from flux.core.version import __version__

if TYPE_CHECKING:
    from flux import compile, layers, ops
    from flux.core.errors import PeerDiedError, PeerFailedError, PeerTimeoutError
    from flux.core.knobs import Knobs, Topology
    from flux.core.schedule import TileSchedule
    from flux.ops import AGGemm, Collectives, GemmAR, GemmRS
    from flux.select.heuristic import make_schedule

__all__ = [
    "AGGemm",
    "Collectives",
    "GemmAR",
    "GemmRS",
    "Knobs",
    "PeerDiedError",
    "PeerFailedError",
    "PeerTimeoutError",
    "TileSchedule",
    "Topology",
    "__version__",
    "compile",
    "layers",
    "make_schedule",
    "ops",
]

_PACKAGES = ("compile", "layers", "ops")
_HOMES = {
    "AGGemm": "flux.ops",
    "Collectives": "flux.ops",
    "GemmAR": "flux.ops",
    "GemmRS": "flux.ops",
    "Knobs": "flux.core.knobs",
    "PeerDiedError": "flux.core.errors",
    "PeerFailedError": "flux.core.errors",
    "PeerTimeoutError": "flux.core.errors",
    "TileSchedule": "flux.core.schedule",
    "Topology": "flux.core.knobs",
    "make_schedule": "flux.select.heuristic",
}
"""Where the public names come from, each of which is imported at its first use."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"flux.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'flux' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
