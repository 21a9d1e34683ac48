"""Build and call Megatron-core's transformer layer, on CPU ranks.

All forms are Megatron's layer. They differ in the linear layers (Megatron's or ours) or in the
group: ``compute`` is Megatron's layer on a group whose collectives return at once, so its time is
that of the arithmetic and of Megatron's Python.

Rotary embeddings and dropout are left out: they are element-wise, and equal in all forms.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.megatron_cpu import Norm
from flux.bench.model import ModelConfig

FORMS = ("compute", "megatron", "flux")
"""The forms that are timed; the first is a part of the others, not an alternative."""


def _settings(config: ModelConfig, phase: str) -> Any:
    from megatron.core.transformer import TransformerConfig

    layer = config.layer
    gated = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
    }
    return TransformerConfig(
        num_layers=1,
        hidden_size=layer.hidden,
        num_attention_heads=layer.heads,
        num_query_groups=layer.kv_heads,
        kv_channels=layer.head_dim,
        ffn_hidden_size=layer.intermediate,
        add_bias_linear=not layer.gated,
        **(gated if layer.gated else {}),
        tensor_model_parallel_size=config.world,
        sequence_parallel=config.sequence_parallel_in(phase),
        params_dtype=config.torch_dtype,
        pipeline_dtype=config.torch_dtype,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _layer(config: ModelConfig, phase: str, form: str, still: dist.ProcessGroup) -> Any:
    """Return the layer in one form; its values depend only on the configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from flux.layers import replace_linears

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if form == "compute":
        groups = copy.copy(groups)
        groups.tp = still
    torch.manual_seed(config.seed)
    layer = TransformerLayer(
        _settings(config, phase), spec.submodules, layer_number=1, pg_collection=groups
    )
    layer = layer.to(config.torch_dtype)
    return replace_linears(layer, overlap=True) if form == "flux" else layer


def still_group() -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives do nothing. Collective."""
    # The import registers the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    group: dist.ProcessGroup = dist.new_group(backend="fake")
    return group


@dataclass
class LayerCall:
    """One form of the layer in one phase, called repeatedly with the same input.

    Attributes:
        config: of the run.
        phase: of the call.
        layer: the layer.
        rank: this rank.
        results: of the latest call, by name: output, and gradients if it has any.
    """

    config: ModelConfig
    phase: str
    layer: Any
    rank: int
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, phase = self.config, self.phase
        width, dtype = config.layer.hidden, config.torch_dtype
        split = config.sequence_parallel_in(phase)
        length = 1 if phase == "decode" else config.sequence
        batch = config.decode_batch if phase == "decode" else config.batch
        torch.manual_seed(config.seed + 1)
        whole = torch.randn(2, length, batch, width)
        mine = whole.chunk(config.world, 1)[self.rank] if split else whole
        self.x, self.dy = mine.to(dtype).unbind()
        self.x = self.x.clone().requires_grad_(phase == "train")
        self.mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
        self.past = None if phase == "train" else self._past(batch)

    def _past(self, batch: int) -> Any:
        """Return the memory of keys and values; in decoding, as after a prompt."""
        from megatron.core.inference.contexts import StaticInferenceContext

        context = StaticInferenceContext(batch, self.config.sequence + 1)
        if self.phase == "decode":
            memory = self._key_value_memory(batch)
            context.key_value_memory_dict[self.layer.layer_number] = memory
            context.enable_decode_mode()
            context.sequence_len_offset = self.config.sequence
        return context

    def _key_value_memory(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer, world = self.config.layer, self.config.world
        heads = layer.kv_heads // world
        torch.manual_seed(self.config.seed + 2 + self.rank)
        shape = (2, self.config.sequence + 1, batch, heads, layer.head_dim)
        keys, values = torch.randn(shape).to(self.config.torch_dtype).unbind()
        return keys, values

    def __call__(self) -> torch.Tensor:
        """Run one call; keep its results."""
        if self.phase == "train":
            return self._train()
        with torch.inference_mode():
            mask = None if self.phase == "decode" else self.mask
            y, _ = self.layer(self.x, attention_mask=mask, inference_context=self.past)
        self.results = {"output": y}
        return self.results["output"]

    def _train(self) -> torch.Tensor:
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        y, _ = self.layer(self.x, attention_mask=self.mask)
        y.backward(self.dy)
        named = [("input", self.x), *self.layer.named_parameters()]
        self.results = {"output": y.detach(), **{name: tensor.grad for name, tensor in named}}
        return self.results["output"]


def make_calls(config: ModelConfig, phase: str, rank: int) -> dict[str, LayerCall]:
    """Return the forms of the layer. Collective, within ``megatron_on_cpu``."""
    still = still_group()
    calls = {}
    for form in FORMS:
        layer = _layer(config, phase, form, still)
        calls[form] = LayerCall(config, phase, layer.train(phase == "train"), rank)
    return calls


def largest_error(got: LayerCall, right: LayerCall) -> float:
    """Return the largest relative error over all results of the latest calls.

    It is relative to the largest magnitude of each result.

    Raises:
        ValueError: the two calls have different results.
    """
    if got.results.keys() != right.results.keys():
        raise ValueError(f"expected results {list(right.results)}, got {list(got.results)}")
    worst = 0.0
    for name, value in right.results.items():
        error = (got.results[name].double() - value.double()).abs().max()
        worst = max(worst, float(error / value.double().abs().max()))
    return worst
