"""Tensor-parallel linear layers that hide communication, forward and backward.

``ColumnParallelLinear`` and ``RowParallelLinear`` are for plain PyTorch. The forms for
Megatron-core are in ``flux.layers.megatron``, imported at first use: flux does not need
Megatron-core.
"""

from __future__ import annotations

from typing import Any

from flux.layers import compiled as compiled
from flux.layers.linear import ColumnParallelLinear, RowParallelLinear
from flux.layers.replace import replace_linears, sequence_parallel_plan
from flux.ops.pool import close_pools

_MEGATRON = {
    "FluxSpecProvider": "FluxSpecProvider",
    "MegatronColumnParallelLinear": "ColumnParallelLinear",
    "MegatronRowParallelLinear": "RowParallelLinear",
}

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "close_pools",
    "replace_linears",
    "sequence_parallel_plan",
]


def __getattr__(name: str) -> Any:
    if name == "UlyssesAttention":
        from flux.layers import ulysses

        return ulysses.UlyssesAttention
    if name in _MEGATRON:
        from flux.layers import megatron

        return getattr(megatron, _MEGATRON[name])
    raise AttributeError(f"module 'flux.layers' has no attribute {name!r}")
