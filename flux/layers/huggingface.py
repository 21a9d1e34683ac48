"""Tensor-parallel plans of Hugging Face Transformers, with fused linear layers.

A plan maps names of modules and parameters to names of styles, which Transformers keeps in a
registry (ALL_PARALLEL_STYLES). Linear layers under Transformers' ColwiseParallel and
RowwiseParallel, in every layout, get ours (flux/layers/dtensor.py). Gradients of replicated
parameters are summed by ours, too. Transformers' own code applies every other style, known to us or
not, and the log ("flux.layers") names it once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from flux.layers import dtensor
from flux.layers.eligible import say_once
from flux.layers.linear import sum_grad


def is_pretrained(model: object) -> bool:
    """Return whether a model is one of Transformers' models."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # else there is none
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def styles_of(model: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return ParallelStyle objects by exact module names, for names of Transformers' styles.

    Entries for modules that the model does not have are ignored: a plan serves all models of a
    family.

    Args:
        model: one of Transformers' models.
        plan: names or ParallelStyle objects by names of modules or parameters, in which * stands
            for a number. Objects keep their entries.

    Raises:
        ValueError: Transformers does not know a style, and the module is not a linear layer. A
            module that stays whole among others' shards could give wrong results.
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
        if key in named or of_parameters:
            style = _style_of(model, module_name, module, named.get(key), of_parameters)
            if style is not None:
                styles[module_name] = style
    return styles | {n: dtensor.fused_style(s) for n, s in plan.items() if n not in named}


def _generic(name: str) -> str:
    """Return the name of a module or parameter as plans write it: with * for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _registry() -> Any:
    return import_module("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES


def _style_of(
    model: Any, name: str, module: nn.Module, style: str | None, of_parameters: dict[str, str]
) -> Any:
    """Return the style of one module, from those of the module and of its own parameters."""
    registry = _registry()
    used = {s for s in (style, *of_parameters.values()) if s is not None}
    for unknown in sorted(s for s in used if s not in registry):
        if type(module) is not nn.Linear:
            raise ValueError(
                f"the plan gives {name!r} the style {unknown!r}, which is unknown to the installed "
                f"Transformers; known: {sorted(registry)}"
            )
        say_once(f"{unknown!r}, a style unknown to Transformers: {_generic(name)} stays whole")
        return None
    if len(used) == 1 and type(module) is nn.Linear:
        fused = _fused(registry[next(iter(used))])
        if fused is not None:
            return fused
    if style == "replicated_with_grad_allreduce" and used == {style}:
        return SumGradients()
    for unfused in sorted(used):
        say_once(f"style {unfused!r} of {_generic(name)}: applied by Transformers itself")
    entries = dict(of_parameters)
    if style is not None:
        entries[""] = style
    return TransformersStyle(entries, model.config)


def _fused(style: Any) -> Any:
    """Return our form of Transformers' style of a linear layer, or None."""
    styles = import_module("transformers.integrations.tensor_parallel")
    for theirs, ours in (
        (styles.ColwiseParallel, dtensor.ColwiseParallel),
        (styles.RowwiseParallel, dtensor.RowwiseParallel),
    ):
        if type(style) is theirs:
            layouts = style.input_layouts, style.output_layouts
            if all(isinstance(layout, Placement) for layout in layouts):
                return ours(
                    input_layouts=layouts[0],
                    output_layouts=layouts[1],
                    use_local_output=style.use_local_output,
                )
    return None


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
        if "mla_kv_a_proj" in self.entries.values():
            module.config = self.config  # Transformers reads the sizes of the product's parts there
        tensor_parallel.apply_tensor_parallelism(module, device_mesh, self.entries)
        return module


# -- replicated parameters whose gradients are parts -----------------------------------------------


class SumGradients(ParallelStyle):
    """Replicated parameters that each rank applies to its own features, such as norms of heads.

    Each backward's gradients are summed over ranks before they are added to ``grad``, so
    accumulation over several backwards is right.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
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
