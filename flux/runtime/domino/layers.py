"""Linear layers for Domino: those of flux.layers, and of Megatron-core, with Domino's collectives.

Parameters, initial values and checkpoints are those of the classes that they derive from.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar, cast

import torch
from torch import nn

from flux.core.problem import check_choice
from flux.core.tensors import check_memory
from flux.layers import linear
from flux.layers.linear import sum_grad
from flux.ops.transforms import call
from flux.plan.policies.fuse import WHICH
from flux.runtime.domino.linear import column_linear, row_linear

M = TypeVar("M", bound=nn.Module)


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """``flux.layers.ColumnParallelLinear`` in models that ``Domino`` runs."""

    fused_in_slices = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [s(/W), ..., in_features] -> [s, ..., out_features(/W)]. Collective."""
        if self.world == 1:
            return super().forward(x)
        config = self._config() if self.fused_in_slices else None
        y = column_linear(x, self.weight, self.group, self.sequence_parallel, config, self.bias)
        if self.gather_output:
            y = call("gather_features", y, self.group_name)
        return y


class RowParallelLinear(linear.RowParallelLinear):
    """``flux.layers.RowParallelLinear`` in models that ``Domino`` runs."""

    fused_in_slices = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [s, ..., in_features(/W)] -> [s(/W), ..., out_features]. Collective."""
        if self.world == 1:
            return super().forward(x)
        check_memory(type(self).__name__, bias=self.bias)
        if not self.input_is_parallel:
            x = call("cut_features", x, self.group_name)
        config = self._config() if self.fused_in_slices else None
        z = row_linear(x, self.weight, self.group, self.sequence_parallel, config)
        if self.bias is None:
            return z
        bias: torch.Tensor = self.bias
        return z + (sum_grad(bias, self.group_name) if self.sequence_parallel else bias)


_SWAPS: dict[type, type] = {
    linear.ColumnParallelLinear: ColumnParallelLinear,
    linear.RowParallelLinear: RowParallelLinear,
}


def replace(model: M, fused: str = "none") -> M:
    """Make the tensor-parallel linear layers of a model Domino's, in place; return the model.

    Of flux.layers and of Megatron-core; parameters stay the same objects. Wrap the part of the
    model whose batch is to be cut, such as its stack of layers, in ``flux.runtime.domino.Domino``.

    Args:
        model: with linear layers of either library.
        fused: those that are Flux's fused ops: "none", "column", "row", or "all". ``flux plan
            simulate --policy domino:fused=auto`` says which are the fastest.
    """
    check_choice("fused", fused, WHICH)
    swaps = dict(_SWAPS)
    if "megatron.core.tensor_parallel.layers" in sys.modules:  # else no layer can be Megatron's
        from flux.runtime.domino import megatron as domino_megatron

        swaps |= domino_megatron.SWAPS
    count = 0
    for module in model.modules():
        if type(module) in swaps:
            module.__class__ = swaps[type(module)]
        if isinstance(module, tuple(swaps.values())):
            kind = "column" if hasattr(module, "gather_output") else "row"
            cast(Any, module).fused_in_slices = kind in WHICH[fused]
            count += 1
    if count == 0:
        raise ValueError(
            "the model has no ColumnParallelLinear or RowParallelLinear of flux.layers or of "
            "Megatron-core"
        )
    return model
