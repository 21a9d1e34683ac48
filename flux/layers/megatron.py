"""Drop-in forms of Megatron-core's tensor-parallel linear layers.

They are Megatron's own classes except for the products and the communication beside them. So
parameters, their attributes, initial values and checkpoints are Megatron's, and both kinds of
layers can load each other's checkpoints. ``tp_comm_overlap`` and its related switches decide what
is fused:

    tp_comm_overlap                  off: Megatron's own path, everywhere
    tp_comm_overlap_ag               gathers: forward of column layers, backward of row layers
    tp_comm_overlap_rs               reductions: forward of row layers, backward of column layers
    tp_comm_overlap_disable_qkv/fc1  no gathers in the layers of that name

A call that cannot be fused uses Megatron's path too, and the log ("flux.layers") records the reason
once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from megatron.core.transformer.moe import moe_layer

from flux.layers.autograd import LinearConfig, column_linear, row_linear
from flux.layers.eligible import reason_unsupported, say_once
from flux.layers.megatron_moe import MoELayer
from flux.ops.gradients import WeightGrad
from flux.ops.pool import User, pool_of

if "_forward_impl" not in vars(megatron_layers.ColumnParallelLinear):
    # Older releases choose the product inside forward, where we cannot replace it.
    raise ImportError("flux.layers.megatron needs megatron-core 0.16 or newer")


F = TypeVar("F", bound=Callable[..., object])


def _outside_graphs(function: F) -> F:
    """Exclude a function from torch.compile's graphs.

    Accumulating or deferring a gradient is a side effect on Megatron's tensors and lists, which no
    graph contains. Such calls run in eager mode, between two graphs.
    """
    reason = "a weight gradient that is accumulated or deferred cannot be part of a graph"
    return cast(F, torch.compiler.disable(function, reason=reason))


_eager_column, _eager_row = _outside_graphs(column_linear), _outside_graphs(row_linear)


class _Fused:
    """The common part of both layers, as a mixin that can also be applied to existing layers.

    It has no state except what the first call makes.
    """

    overlap: bool | None = None
    """True or False override the configuration's tp_comm_overlap; None follows it."""

    tp_comm_buffer_name: str | None = None
    _flux_user: User | None = None
    config: Any
    tp_group: Any
    explicit_expert_comm: bool
    gradient_accumulation_fusion: bool

    def _switches(self) -> tuple[bool, bool]:
        """Return whether to fuse gathers, and whether to fuse reductions."""
        config = self.config
        on = config.tp_comm_overlap if self.overlap is None else self.overlap
        name = self.tp_comm_buffer_name
        named_off = name in ("qkv", "fc1") and getattr(
            config, f"tp_comm_overlap_disable_{name}", False
        )
        gathers = on and getattr(config, "tp_comm_overlap_ag", True) and not named_off
        return gathers, on and getattr(config, "tp_comm_overlap_rs", True)

    def _reason_unfused(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        config = self.config
        if not any(self._switches()):
            return "tp_comm_overlap is off in the configuration"
        for recipe in ("fp8", "fp4"):
            if getattr(config, recipe, None):
                return f"{recipe} = {getattr(config, recipe)} is not supported by flux"
        if getattr(config, "batch_invariant_mode", False):
            return "batch_invariant_mode fixes how a product is computed"
        offloading = getattr(config, "_cpu_offloading_context", None)
        if offloading is not None and offloading.inside_context:
            return "activations are being offloaded"
        if x.numel() == 0:
            return "the input is empty"
        if getattr(self, "gtp_remat_size", 1) > 1:
            return "the weight is sharded once more (gtp_remat)"
        return reason_unsupported(self.tp_group.group_name, x, weight)

    def _config(
        self,
        fuses: bool,
        sequence_parallel: bool,
        reduce_dx: bool = True,
        wgrad: WeightGrad | None = None,
    ) -> LinearConfig:
        if self._flux_user is None and not torch.compiler.is_compiling():
            self._flux_user = User()
        switches = self._switches() if fuses else (False, False)
        name = self.tp_group.group_name if sequence_parallel or reduce_dx else None
        return LinearConfig(
            name,
            sequence_parallel,
            reduce_dx,
            *switches,
            user=self._flux_user,
            wgrad=wgrad or WeightGrad(),
        )

    def _fuses(self, x: torch.Tensor, weight: torch.Tensor, communicates: bool) -> bool:
        """Return whether to use the fused path; log the reason once if not."""
        if not communicates:
            return False  # no communication: nothing to fuse or to log
        reason = self._reason_unfused(x, weight)
        if reason is not None:
            say_once(f"{type(self).__name__}: Megatron's own path, because {reason}")
        return reason is None

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank; the layer stays usable."""
        if self._flux_user is not None:
            pool_of(self.tp_group).release(self._flux_user)


def _megatron_cannot_accumulate() -> bool:
    """Return whether APEX's extension is missing; then we fuse gradient accumulation."""
    return not hasattr(megatron_layers, "fused_weight_gradient_mlp_cuda")


def _constructor(original: Any) -> Any:
    """Wrap Megatron's constructor, with its signature, for layers that accumulate without APEX."""

    @wraps(original)
    def construct(self: Any, *args: Any, config: Any, **options: Any) -> None:
        plain = config
        if config.gradient_accumulation_fusion and _megatron_cannot_accumulate():
            plain = copy.copy(config)
            plain.gradient_accumulation_fusion = False
        original(self, *args, config=plain, **options)
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.tp_comm_buffer_name = options.get("tp_comm_buffer_name")

    return construct


class ColumnParallelLinear(_Fused, megatron_layers.ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron-core's ColumnParallelLinear; AGGemm and GemmRS, or GemmAR, compute its products.

    Constructor, ``forward`` and everything else: see Megatron's class.
    """

    __init__ = _constructor(megatron_layers.ColumnParallelLinear.__init__)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        """Return the product; Megatron's ``forward`` passes its settings by name."""
        sequence_parallel, allreduce_dgrad = how["sequence_parallel"], how["allreduce_dgrad"]
        communicates = sequence_parallel or allreduce_dgrad
        fuses = self._fuses(input, weight, communicates)
        buffer, accumulate = how["grad_output_buffer"], how["gradient_accumulation_fusion"]
        if not fuses and not (accumulate and _megatron_cannot_accumulate()):
            y: torch.Tensor = super()._forward_impl(input=input, weight=weight, **how)
            return y
        if buffer is not None and not weight.requires_grad:
            raise ValueError("a weight gradient cannot be deferred: the weight is frozen")
        wgrad = WeightGrad(accumulate, buffer, how["wgrad_deferral_limit"])
        config = self._config(fuses, sequence_parallel, allreduce_dgrad, wgrad)
        apply = _eager_column if wgrad.has_side_effects else column_linear
        return apply(input, weight, how["bias"], config)


class RowParallelLinear(_Fused, megatron_layers.RowParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron-core's RowParallelLinear; GemmRS and AGGemm, or GemmAR, compute its products.

    Constructor, ``forward`` and everything else: see Megatron's class.
    """

    __init__ = _constructor(megatron_layers.RowParallelLinear.__init__)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer. Collective.

        Args:
            input_: [sequence, batch, hidden].

        Returns:
            (the result, the bias if the caller must add it).
        """
        communicates = self.tp_group is not None and self.tp_group.size() > 1
        communicates = communicates and not self.explicit_expert_comm
        if not self._fuses(input_, self.weight, communicates):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return result
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        wgrad = WeightGrad(self.gradient_accumulation_fusion)
        config = self._config(True, self.sequence_parallel, wgrad=wgrad)
        apply = _eager_row if wgrad.has_side_effects else row_linear
        output = apply(input_, self.weight, config)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        """Return the local product of Megatron's own path."""
        if how["gradient_accumulation_fusion"] and _megatron_cannot_accumulate():
            config = self._config(False, False, reduce_dx=False, wgrad=WeightGrad(True))
            return _eager_column(input, weight, how["bias"], config)
        y: torch.Tensor = super()._forward_impl(input=input, weight=weight, **how)
        return y


# -- swapping in -----------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    moe_layer.MoELayer: MoELayer,
    megatron_layers.ColumnParallelLinear: ColumnParallelLinear,
    megatron_layers.RowParallelLinear: RowParallelLinear,
}


def flux_spec(spec: Any, swaps: Mapping[type, type] = SWAPS) -> Any:
    """Return a copy of a layer specification in which Megatron's linear layers are ours.

    Other linear layers, such as Transformer Engine's, stay as they are.

    Args:
        spec: a ModuleSpec, or an element of one: submodules, classes, tuples, lists, dictionaries
            and partials of those.
        swaps: our class for each of Megatron's.
    """

    def swapped(part: Any) -> Any:
        return flux_spec(part, swaps)

    if isinstance(spec, type):
        return swaps.get(spec, spec)
    if isinstance(spec, partial):
        keywords = {name: swapped(value) for name, value in spec.keywords.items()}
        return partial(swapped(spec.func), *map(swapped, spec.args), **keywords)
    if dataclasses.is_dataclass(spec):
        copied = copy.copy(spec)
        for field in dataclasses.fields(spec):
            setattr(copied, field.name, swapped(getattr(spec, field.name)))
        return copied
    if isinstance(spec, dict):
        return {name: swapped(value) for name, value in spec.items()}
    if type(spec) in (list, tuple):
        return type(spec)(map(swapped, spec))
    return spec


class FluxSpecProvider(BackendSpecProvider):  # type: ignore[misc, unused-ignore]
    """Megatron-core's BackendSpecProvider with our linear layers.

    Args:
        fallback: the provider of everything else; Megatron's LocalSpecProvider by default.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        self.fallback: Any = LocalSpecProvider() if fallback is None else fallback

    def column_parallel_linear(self) -> type:
        """Return the class of column-parallel linear layers: ours."""
        return cast(type, ColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        """Return the class of row-parallel linear layers: ours."""
        return cast(type, RowParallelLinear)

    def fuse_layernorm_and_linear(self) -> bool:
        """Return False: norms are separate modules."""
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        """Return None: there is no module that combines layer norm and linear layer."""
        return None

    def layer_norm(self, *args: Any, **options: Any) -> Any:
        """Return the fallback's layer norm."""
        return self.fallback.layer_norm(*args, **options)

    def core_attention(self) -> Any:
        """Return the fallback's attention."""
        return self.fallback.core_attention()

    def grouped_mlp_modules(self, *args: Any, **options: Any) -> Any:
        """Return the fallback's modules for experts, with our linear layers."""
        return flux_spec(self.fallback.grouped_mlp_modules(*args, **options))

    def activation_func(self) -> Any:
        """Return the fallback's activation."""
        return self.fallback.activation_func()

    def __getattr__(self, name: str) -> Any:
        if name == "fallback":  # not set yet, or deleted
            raise AttributeError(name)
        return getattr(self.fallback, name)


def swap(model: torch.nn.Module, overlap: bool | None) -> int:
    """Make Megatron's linear layers in ``model`` ours, in place; return the number of our layers.

    Parameters, hooks and optimizers that hold them are not changed.
    """
    count = 0
    for name, module in model.named_modules():
        new = SWAPS.get(type(module))
        if new is not None:
            module.__class__ = new
        if new is not None and isinstance(module, _Fused):
            last = name.rpartition(".")[2]
            cast(Any, module).tp_comm_buffer_name = last.removeprefix("linear_")
        if isinstance(module, (_Fused, MoELayer)):
            module.overlap = overlap if overlap is not None else module.overlap
            count += 1
    return count
