"""Drop-in forms of Megatron-core's tensor-parallel linear layers.

They are Megatron's own classes but for the products and the communication beside them, so
parameters, their attributes, initial values and checkpoints are Megatron's, and a checkpoint of one
kind of layer is one of the other. ``tp_comm_overlap`` and the switches that go with it decide what
is fused:

    tp_comm_overlap                  off: Megatron's own path, everywhere
    tp_comm_overlap_ag               what gathers: forward of column layers, backward of row layers
    tp_comm_overlap_rs               what reduces: forward of row layers, backward of column layers
    tp_comm_overlap_disable_qkv/fc1  nothing that gathers in the layers of that name

What cannot be fused takes Megatron's path too, and the log ("flux.layers") says once why.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region

from flux.layers import compiled
from flux.layers.autograd import Parallel, column_linear, row_linear
from flux.layers.eligible import say_once, why_not
from flux.layers.pool import Alone, OpPool, User, pool_of
from flux.layers.wgrad import WeightGrad

if "_forward_impl" not in vars(megatron_layers.ColumnParallelLinear):
    # Older releases choose the product inside forward, where it cannot be replaced.
    raise ImportError("flux.layers.megatron needs megatron-core 0.16 or newer")


F = TypeVar("F", bound=Callable[..., object])


def _outside_graphs(function: F) -> F:
    """What becomes of a gradient that is accumulated or deferred is a side effect, on tensors and
    lists of Megatron's that no graph has: such calls are left to eager mode, between two graphs."""
    reason = "a weight gradient that is accumulated or deferred cannot be part of a graph"
    return cast(F, torch.compiler.disable(function, reason=reason))


_eager_column, _eager_row = _outside_graphs(column_linear), _outside_graphs(row_linear)


class _Fused:
    """What both layers have in common. Made to be mixed in, and to be given to layers that exist:
    it has no state but what is made at the first call."""

    overlap: bool | None = None
    """True or False instead of the configuration's tp_comm_overlap; None to follow that."""

    tp_comm_buffer_name: str | None = None
    _flux_user: User | None = None
    config: Any
    tp_group: Any
    explicit_expert_comm: bool
    gradient_accumulation_fusion: bool

    def _switches(self) -> tuple[bool, bool]:
        """Whether to fuse what gathers, and what reduces."""
        config = self.config
        on = config.tp_comm_overlap if self.overlap is None else self.overlap
        name = self.tp_comm_buffer_name
        named_off = name in ("qkv", "fc1") and getattr(
            config, f"tp_comm_overlap_disable_{name}", False
        )
        gathers = on and getattr(config, "tp_comm_overlap_ag", True) and not named_off
        return gathers, on and getattr(config, "tp_comm_overlap_rs", True)

    def _why_not(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        config = self.config
        if not any(self._switches()):
            return "tp_comm_overlap is off in the configuration"
        for recipe in ("fp8", "fp4"):
            if getattr(config, recipe, None):
                return f"{recipe} = {getattr(config, recipe)} is a recipe that flux lacks"
        if getattr(config, "batch_invariant_mode", False):
            return "batch_invariant_mode fixes how a product is computed"
        offloading = getattr(config, "_cpu_offloading_context", None)
        if offloading is not None and offloading.inside_context:
            return "activations are being offloaded"
        if getattr(self, "gtp_remat_size", 1) > 1:
            return "the weight is sharded once more (gtp_remat)"
        return why_not(self.tp_group.group_name, x, weight)

    def _parallel(self, fuse: bool, communicates: bool, **options: Any) -> Parallel:
        if self._flux_user is None:
            self._flux_user = User()
        fuse_ag, fuse_rs = self._switches() if fuse else (False, False)
        pool = pool_of(self.tp_group) if communicates else cast(OpPool, Alone())
        return Parallel(pool, self._flux_user, fuse_ag=fuse_ag, fuse_rs=fuse_rs, **options)

    def _named(self, sequence_parallel: bool, reduce_dx: bool = True) -> compiled.Named:
        """The same for a graph."""
        name = self.tp_group.group_name
        return compiled.Named(name, sequence_parallel, reduce_dx, *self._switches())

    def _fuses(self, x: torch.Tensor, weight: torch.Tensor, communicates: bool) -> bool:
        """Whether to take the fused path; what does not is said in the log, once."""
        if not communicates:
            return False  # nothing to fuse, and nothing to say
        reason = self._why_not(x, weight)
        if reason is not None:
            say_once(f"{type(self).__name__}: Megatron's own path, because {reason}")
        return reason is None

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank; the layer stays usable."""
        if self._flux_user is not None:
            pool_of(self.tp_group).release(self._flux_user)


def _megatron_cannot_accumulate() -> bool:
    """Whether gradient accumulation fusion has to be done here, for want of APEX's extension."""
    return not hasattr(megatron_layers, "fused_weight_gradient_mlp_cuda")


def _constructor(original: Any) -> Any:
    """Megatron's constructor, with its signature, for layers that need no APEX to accumulate."""

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
    """Megatron-core's ColumnParallelLinear; AGGemm and GemmRS, or GemmAR, carry its products.

    Constructor, ``forward`` and everything else: see Megatron's class.
    """

    __init__ = _constructor(megatron_layers.ColumnParallelLinear.__init__)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        """The product; Megatron's ``forward`` says, by name, what belongs to it."""
        sequence_parallel, allreduce_dgrad = how["sequence_parallel"], how["allreduce_dgrad"]
        communicates = sequence_parallel or allreduce_dgrad
        fuses = self._fuses(input, weight, communicates)
        buffer, accumulate = how["grad_output_buffer"], how["gradient_accumulation_fusion"]
        if not fuses and not (accumulate and _megatron_cannot_accumulate()):
            y: torch.Tensor = super()._forward_impl(input=input, weight=weight, **how)
            return y
        if fuses and torch.compiler.is_compiling() and buffer is None and not accumulate:
            named = self._named(sequence_parallel, allreduce_dgrad)
            return compiled.column_linear(input, weight, how["bias"], named)
        if buffer is not None and not weight.requires_grad:
            raise ValueError("a weight gradient cannot be deferred: the weight is frozen")
        parallel = self._parallel(
            fuses,
            communicates,
            sequence_parallel=sequence_parallel,
            reduce_dx=allreduce_dgrad,
            wgrad=WeightGrad(accumulate, buffer, how["wgrad_deferral_limit"]),
        )
        return _eager_column(input, weight, how["bias"], parallel)


class RowParallelLinear(_Fused, megatron_layers.RowParallelLinear):  # type: ignore[misc, unused-ignore]
    """Megatron-core's RowParallelLinear; GemmRS and AGGemm, or GemmAR, carry its products.

    Constructor, ``forward`` and everything else: see Megatron's class.
    """

    __init__ = _constructor(megatron_layers.RowParallelLinear.__init__)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forward of RowParallelLinear

        Args:
            input_: 3D tensor whose order of dimension is [sequence, batch, hidden]

        Returns:
            - output
            - bias
        """
        communicates = self.tp_group is not None and self.tp_group.size() > 1
        communicates = communicates and not self.explicit_expert_comm
        if not self._fuses(input_, self.weight, communicates):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return result
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        if torch.compiler.is_compiling() and not self.gradient_accumulation_fusion:
            output = compiled.row_linear(input_, self.weight, self._named(self.sequence_parallel))
        else:
            wgrad = WeightGrad(self.gradient_accumulation_fusion)
            how = self._parallel(True, True, sequence_parallel=self.sequence_parallel, wgrad=wgrad)
            output = _eager_row(input_, self.weight, how)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        """The local product of Megatron's own path."""
        if how["gradient_accumulation_fusion"] and _megatron_cannot_accumulate():
            parallel = self._parallel(
                False, False, sequence_parallel=False, reduce_dx=False, wgrad=WeightGrad(True)
            )
            return _eager_column(input, weight, how["bias"], parallel)
        y: torch.Tensor = super()._forward_impl(input=input, weight=weight, **how)
        return y


# -- swapping in -----------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    megatron_layers.ColumnParallelLinear: ColumnParallelLinear,
    megatron_layers.RowParallelLinear: RowParallelLinear,
}


def flux_spec(spec: Any) -> Any:
    """A copy of a layer specification in which Megatron's linear layers are ours.

    ``spec``: a ModuleSpec, or what one holds: submodules, classes, tuples, lists, dictionaries and
    partials of those. Other linear layers, such as Transformer Engine's, stay as they are.
    """
    if isinstance(spec, type):
        return SWAPS.get(spec, spec)
    if isinstance(spec, partial):
        keywords = {name: flux_spec(value) for name, value in spec.keywords.items()}
        return partial(flux_spec(spec.func), *map(flux_spec, spec.args), **keywords)
    if dataclasses.is_dataclass(spec):
        copied = copy.copy(spec)
        for field in dataclasses.fields(spec):
            setattr(copied, field.name, flux_spec(getattr(spec, field.name)))
        return copied
    if isinstance(spec, dict):
        return {name: flux_spec(value) for name, value in spec.items()}
    if type(spec) in (list, tuple):
        return type(spec)(map(flux_spec, spec))
    return spec


class FluxSpecProvider(BackendSpecProvider):  # type: ignore[misc, unused-ignore]
    """Megatron-core's BackendSpecProvider with our linear layers.

    Args:
        fallback: the provider of everything else; Megatron's LocalSpecProvider by default.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        self.fallback: Any = LocalSpecProvider() if fallback is None else fallback

    def column_parallel_linear(self) -> type:
        """Which column parallel linear module the backend uses"""
        return cast(type, ColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        """Which row parallel linear module the backend uses"""
        return cast(type, RowParallelLinear)

    def fuse_layernorm_and_linear(self) -> bool:
        """No: norms are modules of their own."""
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        """None, as there is no single module for layernorm and linear."""
        return None

    def layer_norm(self, *args: Any, **options: Any) -> Any:
        """Which module for layernorm: the fallback's"""
        return self.fallback.layer_norm(*args, **options)

    def core_attention(self) -> Any:
        """Which module to use for attention: the fallback's"""
        return self.fallback.core_attention()

    def grouped_mlp_modules(self, *args: Any, **options: Any) -> Any:
        """Which modules to use for experts: the fallback's, with our linear layers in it"""
        return flux_spec(self.fallback.grouped_mlp_modules(*args, **options))

    def activation_func(self) -> Any:
        """Which module to use for activation function: the fallback's"""
        return self.fallback.activation_func()

    def __getattr__(self, name: str) -> Any:
        if name == "fallback":  # not there yet, or no more
            raise AttributeError(name)
        return getattr(self.fallback, name)


def swap(model: torch.nn.Module, overlap: bool | None) -> int:
    """Make Megatron's linear layers in ``model`` ours, in place; how many there are then.

    Parameters, hooks and optimizers that know them are not touched.
    """
    count = 0
    for name, module in model.named_modules():
        new = SWAPS.get(type(module))
        if new is not None:
            module.__class__ = new
            last = name.rpartition(".")[2]
            cast(Any, module).tp_comm_buffer_name = last.removeprefix("linear_")
        if isinstance(module, _Fused):
            module.overlap = overlap if overlap is not None else module.overlap
            count += 1
    return count
