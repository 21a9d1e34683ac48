"""Flux: tensor-parallel communication hidden behind the GEMM it depends on."""

import importlib
from typing import Any

from flux import ops
from flux.errors import PeerTimeoutError
from flux.knobs import Knobs
from flux.ops import AGGemm, GemmAR, GemmRS
from flux.schedule import TileSchedule, make_schedule
from flux.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "AGGemm",
    "GemmAR",
    "GemmRS",
    "Knobs",
    "PeerTimeoutError",
    "TileSchedule",
    "Topology",
    "make_schedule",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name in ("compile", "layers"):  # imported when they are asked for
        return importlib.import_module(f"flux.{name}")
    raise AttributeError(f"module 'flux' has no attribute {name!r}")
