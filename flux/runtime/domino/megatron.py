"""Megatron-core's linear layers with Domino's collectives, a layer specification, and the wrapper.

spec = domino_spec(get_gpt_layer_local_spec())
model = GPTModel(config, spec, ...)
cut_batch(model, slices=2)          # its decoder runs slices of the batch
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region

from flux.layers.autograd import LinearConfig
from flux.layers.megatron import flux_spec
from flux.ops.pool import User
from flux.runtime.domino.linear import column_linear, row_linear
from flux.runtime.domino.module import Domino


class ColumnParallelLinear(megatron_layers.ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron-core's ColumnParallelLinear in models that ``Domino`` runs."""

    fused_in_slices = False

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        """Return the product; Megatron's ``forward`` passes its settings by name."""
        group, sequence_parallel = self.tp_group, how["sequence_parallel"]
        communicates = sequence_parallel or how["allreduce_dgrad"]
        if group is None or group.size() == 1 or not communicates:
            y: torch.Tensor = super()._forward_impl(input=input, weight=weight, **how)
            return y
        if how["gradient_accumulation_fusion"] or how["grad_output_buffer"] is not None:
            raise ValueError(
                "Domino computes weight gradients between dgrad and the wait for its AllReduce: "
                "switch gradient_accumulation_fusion and defer_embedding_wgrad_compute off"
            )
        config = _config(self, sequence_parallel, how["allreduce_dgrad"])
        return column_linear(input, weight, group, sequence_parallel, config, how["bias"])


class RowParallelLinear(megatron_layers.RowParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron-core's RowParallelLinear in models that ``Domino`` runs."""

    fused_in_slices = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer. Collective."""
        group = self.tp_group
        if group is None or group.size() == 1 or self.explicit_expert_comm:
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return result
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=group)
        config = _config(self, self.sequence_parallel, True)
        output = row_linear(input_, self.weight, group, self.sequence_parallel, config)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


def _config(layer: Any, sequence_parallel: bool, reduce_dx: bool) -> LinearConfig | None:
    """Return how a layer's fused ops communicate; None if it has none."""
    if not layer.fused_in_slices:
        return None
    if "_flux_user" not in vars(layer):
        layer._flux_user = User()
    name = layer.tp_group.group_name
    return LinearConfig(name, sequence_parallel, reduce_dx, user=layer._flux_user)


SWAPS: dict[type, type] = {
    megatron_layers.ColumnParallelLinear: ColumnParallelLinear,
    megatron_layers.RowParallelLinear: RowParallelLinear,
}


def domino_spec(spec: Any) -> Any:
    """Return a copy of a layer specification in which Megatron's linear layers are Domino's."""
    return flux_spec(spec, SWAPS)


def cut_batch(model: Any, slices: int = 2, columns: int = 1, *, order: str = "staggered") -> Any:
    """Let a GPTModel's decoder run slices of the batch, in place; return the model."""
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        raise ValueError(f"{type(model).__name__} has no decoder whose batch could be cut")
    model.decoder = DominoDecoder(decoder, slices, columns, order=order)
    return model


class DominoDecoder(Domino):
    """A TransformerBlock that runs slices of its batch; other attributes are the block's."""

    def __init__(self, block: Any, slices: int, columns: int, *, order: str) -> None:
        super().__init__(
            block, slices, columns, order=order, batch_dim=1, sliced={"attention_mask": 0}
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(cast(Any, super().__getattr__("module")), name)
