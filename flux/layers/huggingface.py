"""Tensor-parallel plans of Hugging Face Transformers, with fused linear layers.

A plan maps names of modules and parameters to names of styles, which Transformers keeps in a
registry (ALL_PARALLEL_STYLES). Linear layers under Transformers' ColwiseParallel and
RowwiseParallel, in every layout, get ours (flux/layers/dtensor.py), and so do experts
(flux/layers/huggingface_experts.py). Gradients of replicated parameters are summed by ours, too.
Transformers' own code applies every other style, known to us or not, and the log ("flux.layers")
names it once.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from flux.layers import dtensor
from flux.layers.eligible import say_once
from flux.layers.huggingface_experts import ExpertsForward, is_experts
from flux.layers.linear import sum_grad


def is_pretrained(model: object) -> bool:
    """Return whether a model is one of Transformers' models."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # else there is none
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


# -- models that Transformers has sharded ----------------------------------------------------------


def is_sharded(model: Any) -> bool:
    """Return whether a model of Transformers is sharded over ranks, by whom does not matter."""
    return is_pretrained(model) and (getattr(model, "_tp_size", None) or 1) > 1


def mark_sharded(model: Any, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Set what Transformers sets on models that it shards: for saving, caches and the Trainer."""
    if mesh.size() == 1:
        return
    model._tp_size, model._device_mesh = mesh.size(), mesh
    if all(isinstance(style, str) for style in plan.values()):
        model._tp_plan = dict(plan)
    if hasattr(type(model), "_is_distributed_loading_by_transformers"):
        distributed: Any = import_module("transformers.distributed.configuration_utils")
        model.config.distributed_config = distributed.DistributedConfig(tp_size=mesh.size())
        model._is_distributed_loading_by_transformers = True


def fuse_sharded(model: Any, mesh: Any) -> None:
    """Make linear layers ours, of a model whose parameters Transformers has sharded.

    Raises:
        ValueError: no linear layer has a fused form, or ``mesh`` is not of the model's ranks.
    """
    size = model._tp_size
    if mesh is not None and mesh.size() != size:
        raise ValueError(f"Transformers has sharded the model over {size} ranks, got {mesh}")
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            names = parameter.device_mesh.mesh_dim_names
            how = "load the model whole, replace_linears(model, mesh=...), then fully_shard it"
            raise ValueError(f"Transformers has sharded the model over {names}: {how}")
    plan, fused = model.tp_plan or {}, 0
    for name, module in model.named_modules():
        key = _generic(name)
        if plan.get(key) == "replicated_with_grad_allreduce" or _needs_sum(key, module, plan):
            _sum_gradients(module, model)
        if type(module) is nn.Linear and plan.get(key) in _registry():
            style = _fused(_registry()[plan[key]])
            if style is not None:
                fused += _fuse_sharded_linear(key, module, style)
        fused += is_experts(module) and _fuse_sharded_experts(key, module, plan, model)
    if not fused:
        raise ValueError("the model, which is sharded already, has no linear layer to replace")
    model.__deepcopy__ = _refuse_copy


def _refuse_copy(memo: object) -> NoReturn:
    """Raise: forwards that Transformers has made for a sharded model read the original's weights.

    A copy of it would, too, and train others.
    """
    raise NotImplementedError(
        "a model that Transformers has sharded cannot be copied: load it once more, or load it "
        "whole and split it with replace_linears(model, mesh=...)"
    )


def _fuse_sharded_linear(key: str, module: nn.Linear, style: Any) -> bool:
    """Make one linear layer ours; return False if it stays Transformers'."""
    weight: Any = module.weight
    split = {dtensor.ColwiseParallel: Shard(0), dtensor.RowwiseParallel: Shard(1)}.get(type(style))
    if not isinstance(weight, DTensor) or weight.placements != (split,):
        say_once(f"{key}: stays Transformers', because its weight is not sharded as {style}")
        return False
    if not _take_off(module):
        say_once(f"{key}: stays Transformers', because its forward was replaced")
        return False
    if "_bias" in module._parameters:  # Transformers 4 moves it there in the first call
        bias = cast(torch.Tensor, module._parameters.pop("_bias"))
        whole = DTensor.from_local(
            bias.detach(), weight.device_mesh, [Replicate()], run_check=False
        )
        module.bias = nn.Parameter(whole, requires_grad=bias.requires_grad)
    dtensor.fuse_sharded(style, module, weight.device_mesh)
    return True


def _fuse_sharded_experts(key: str, module: Any, plan: Mapping[str, Any], model: Any) -> bool:
    """Make a module of experts ours; return False if it stays Transformers'."""
    forward, weight = vars(module).get("forward"), module.down_proj
    if not isinstance(weight, DTensor):
        return False
    mesh = weight.device_mesh
    if plan.get(key) == "moe_tp_experts" and _is_installed(forward):
        own: Any = InstalledForward(module, _registry()[plan[key]], mesh)
        module.forward = ExpertsForward(module, own, mesh.get_group(), split_experts=False)
        return True
    if getattr(forward, "__qualname__", "").endswith("install_forward.<locals>.ep_forward"):
        ranks = dist.get_process_group_ranks(mesh.get_group())
        if ranks == dist.get_process_group_ranks(_group_of_tokens(model)):
            module.forward = ExpertsForward(module, forward, mesh.get_group(), split_experts=True)
            return True
        say_once(f"{key}: stays Transformers', because its ranks have different tokens")
    return False


def _group_of_tokens(model: Any) -> dist.ProcessGroup:
    """Return the group of the ranks that have the same tokens, of a model that is sharded."""
    group: dist.ProcessGroup = model._mesh_manager.get_mesh("tp").get_group()
    return group


def _take_off(module: nn.Module) -> bool:
    """Remove what Transformers wraps around a module's forward; return whether that was all."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
        for key, hook in list(hooks.items()):
            if hook.__module__.startswith("transformers."):
                del hooks[key]
    forward = vars(module).get("forward")
    if forward is not None:
        if not _is_installed(forward):
            return False
        del module.forward
    return True


def _is_installed(forward: Any) -> bool:
    """Return whether Transformers has made a forward for one module under a style."""
    name = getattr(forward, "__qualname__", "")
    return isinstance(name, str) and name.endswith("install_forward.<locals>.tp_forward")


def _sum_gradients(module: nn.Module, model: Any) -> None:
    """Replace Transformers' sum of gradients, which adds earlier backwards' gradients twice."""
    parameters = [p for p in module.parameters(recurse=False) if p is not None]
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        return  # the hook of Transformers stays on the parameter
    if _take_off(module):
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        SumGradients()._apply(module, next(meshes))


# -- styles by name --------------------------------------------------------------------------------


def styles_of(model: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return ParallelStyle objects by exact module names, for names of Transformers' styles.

    Entries for modules that the model does not have are ignored: a plan serves all models of a
    family. A style that the installed Transformers does not have leaves its module whole, with a
    warning in the log.

    Args:
        model: one of Transformers' models.
        plan: names or ParallelStyle objects by names of modules or parameters, in which * stands
            for a number. Objects keep their entries.

    Raises:
        TypeError: neither a style nor a name.
    """
    styles: dict[str, Any] = {}
    named = {name: style for name, style in plan.items() if isinstance(style, str)}
    for module_name, module in model.named_modules():
        key = _generic(module_name)
        of_parameters: dict[str, str] = {}
        for parameter, _ in module.named_parameters(recurse=False):
            for name in (f"{key}.{parameter}".lstrip("."), key):
                if name in named:
                    of_parameters[parameter] = named[name]
                    break
        if key not in named and _needs_sum(key, module, named):
            styles[module_name] = SumGradients()
        if key in named or of_parameters:
            style = _style_of(model, module_name, module, named.get(key), of_parameters)
            if style is not None:
                styles[module_name] = style
    return styles | {n: dtensor.fused_style(s) for n, s in plan.items() if n not in named}


def _generic(name: str) -> str:
    """Return the name of a module or parameter as plans write it: with * for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def check_heads(model: Any, styles: Mapping[str, Any], world: int) -> None:
    """Raise ValueError if a rank would get a part of a head: models view features as heads."""
    modules = dict(model.named_modules())
    for name, style in styles.items():
        above, _, own = name.rpartition(".")
        if own not in ("q_proj", "k_proj", "v_proj") or name not in modules:
            continue
        size, features = getattr(modules[above], "head_dim", None), modules[name].out_features
        sharded = isinstance(style, dtensor.ColwiseParallel) and style.output_layouts[0] == Shard(
            -1
        )
        if sharded and isinstance(size, int) and features % size == 0 and features // size % world:
            raise ValueError(
                f"{name} has {features // size} heads, which {world} ranks cannot share evenly"
            )


def _needs_sum(key: str, module: nn.Module, named: Mapping[str, str]) -> bool:
    """Return whether a norm or activation has parameters for the features that a rank has.

    Each rank then has a part of their gradients. Not every plan lists these modules.
    """
    above, _, own = key.rpartition(".")
    head, _, tail = own.rpartition("_")
    if tail in ("norm", "layernorm"):
        own = f"{head}_proj"
    elif own == "act_fn":
        own = "up_proj"
    else:
        return False
    return bool(module._parameters) and named.get(f"{above}.{own}") == "colwise"


def _registry() -> Any:
    return import_module("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES


def _style_of(
    model: Any, name: str, module: nn.Module, style: str | None, of_parameters: dict[str, str]
) -> Any:
    """Return the style of one module, from those of the module and of its own parameters."""
    registry = _registry()
    used = {s for s in (style, *of_parameters.values()) if s is not None}
    for unknown in sorted(s for s in used if s not in registry):
        say_once(
            f"{_generic(name)} stays whole: the installed Transformers has no style {unknown!r}. "
            "If the module works on features that are split over ranks, its results are wrong"
        )
        return None
    if len(used) == 1 and type(module) is nn.Linear:
        fused = _fused(registry[next(iter(used))])
        if fused is not None:
            return fused
    if style == "replicated_with_grad_allreduce" and used == {style}:
        return SumGradients()
    experts = style == "moe_tp_experts" and is_experts(module)
    for unfused in sorted(used - {style if experts else None}):
        say_once(f"style {unfused!r} of {_generic(name)}: applied by Transformers itself")
    entries = dict(of_parameters)
    if style is not None:
        entries[""] = style
    return (ExpertsStyle if experts else TransformersStyle)(entries, model.config)


def _fused(style: Any) -> Any:
    """Return our form of Transformers' style of a linear layer, or None."""
    styles = import_module("transformers.integrations.tensor_parallel")
    for theirs, ours in (
        (styles.ColwiseParallel, dtensor.ColwiseParallel),
        (styles.RowwiseParallel, dtensor.RowwiseParallel),
    ):
        if type(style) is theirs and getattr(style, "use_dtensor", True):
            given, wanted = (
                _placement(style, name) for name in ("input_layouts", "output_layouts")
            )
            if given is not None and wanted is not None:
                return ours(
                    input_layouts=given,
                    output_layouts=wanted,
                    use_local_output=style.use_local_output,
                )
    return None


def _placement(style: Any, name: str) -> Placement | None:
    """Return one layout of a style, which Transformers 4 keeps in tuples; None: in another form."""
    layout = getattr(style, name, None)
    if isinstance(layout, tuple) and len(layout) == 1:
        layout = layout[0]
    return layout if isinstance(layout, Placement) else None


class TransformersStyle(ParallelStyle):
    """Transformers' own styles of one module and of its own parameters.

    Args:
        entries: names of styles by parameter, and by "" for the module.
        config: of the model.
    """

    def __init__(self, entries: Mapping[str, str], config: Any) -> None:
        self.entries, self.config = dict(entries), config

    def __repr__(self) -> str:
        return f"TransformersStyle({self.entries})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tensor_parallel = import_module("transformers.integrations.tensor_parallel")
        if not hasattr(tensor_parallel, "apply_tensor_parallelism"):
            return self._apply_as_transformers_4(module, device_mesh)
        if "mla_kv_a_proj" in self.entries.values():
            module.config = self.config  # Transformers reads the sizes of the product's parts there
        had_forward = "forward" in vars(module)
        tensor_parallel.apply_tensor_parallelism(module, device_mesh, self.entries)
        if not had_forward and "" in self.entries and _is_installed(vars(module).get("forward")):
            module.forward = InstalledForward(module, _registry()[self.entries[""]], device_mesh)
        return module

    def _apply_as_transformers_4(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Apply the styles by the functions with which Transformers 4 loads checkpoints."""
        for name, style in self.entries.items():
            layer = _registry()[style]
            if name == "":
                layer.prepare_module_tp(module, mesh)
                if style == "gather":  # it sums results, but not gradients
                    module.register_forward_hook(_raise_in_backward)
                continue
            whole = cast(torch.Tensor, module._parameters[name]).detach()
            try:
                part = layer.partition_tensor(
                    whole, whole, name, whole.dtype, True, mesh.get_local_rank(), mesh
                )
            except (AttributeError, NotImplementedError) as error:
                raise ValueError(
                    f"Transformers' style {style!r} splits parameters only while it loads them "
                    "(from_pretrained); a later Transformers splits those of a model in memory"
                ) from error
            module.register_parameter(name, nn.Parameter(part))
        return module


class ExpertsStyle(TransformersStyle):
    """Transformers' styles of a module of experts, whose sums over the ranks are ours."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if isinstance(vars(module).get("forward"), InstalledForward):
            group = device_mesh.get_group()
            module.forward = ExpertsForward(module, module.forward, group, split_experts=False)
        return module


class InstalledForward:
    """The forward that Transformers installs in one module. A deep copy of the module gets its own.

    Transformers' function holds the module: in a copy it would read the original's parameters.

    Args:
        module: whose forward it is.
        style: of Transformers.
        mesh: of the module's parameters.
    """

    def __init__(self, module: Any, style: Any, mesh: DeviceMesh) -> None:
        self._module, self._style, self._mesh = module, style, mesh
        self._forward: Any = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call Transformers' forward; after a copy, install one first."""
        if self._forward is None:
            outer = vars(self._module).pop("forward")  # this, or what calls it
            self._style.install_forward(self._module, self._mesh)
            self._forward, self._module.forward = self._module.forward, outer
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstalledForward:
        twin = copy.copy(self)
        twin._module, twin._forward = copy.deepcopy(self._module, memo), None
        return twin


def _raise_in_backward(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: return the output, through which no gradient passes."""
    tensors = output if isinstance(output, tuple) else (output,)
    marked = tuple(_NoGradient.apply(t) if torch.is_tensor(t) else t for t in tensors)  # type: ignore[no-untyped-call]
    return marked if isinstance(output, tuple) else marked[0]


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise RuntimeError(
            "Transformers 4 computes wrong gradients under its style 'gather': train this model "
            "with Transformers 5"
        )


# -- replicated parameters whose gradients are parts -----------------------------------------------


class SumGradients(ParallelStyle):
    """Replicated parameters that each rank applies to its own features, such as norms of heads.

    Each backward's gradients are summed over ranks before they are added to ``grad``, so
    accumulation over several backwards is right.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, _Summing):
            return module
        kind = type(module)
        if kind not in _summing:
            _summing[kind] = type(kind.__name__, (_Summing, kind), {})
        module.__class__ = _summing[kind]
        cast(_Summing, module).flux_group_name = device_mesh.get_group().group_name
        return module


class _Summing(nn.Module):
    flux_group_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {n: p for n, p in self._parameters.items() if p is not None and p.requires_grad}
        if not torch.is_grad_enabled() or not own:
            return super().forward(*args, **kwargs)
        for name, parameter in own.items():
            summed: Any = sum_grad(parameter, self.flux_group_name)
            self._parameters[name] = summed
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(own)


_summing: dict[type[nn.Module], type[nn.Module]] = {}
