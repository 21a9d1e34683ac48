"""Apply a tensor-parallel plan to a model, so that modules that share parameters still do.

torch's styles put a new parameter into one module and do not look for others that hold the old one.
Here parameters that were one before are one afterwards. A linear or embedding layer that the plan
does not name, and that shares a parameter with one that it names, gets a style of its own: its
parameters are sharded alike, and its results are what they were, whole and on every rank.

The plan is rehearsed first, on a twin of the model whose tensors are on the meta device. So a wrong
plan raises before the model is changed and before ranks communicate.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

from flux.layers import dtensor
from flux.layers.huggingface import TransformersStyle

SPLITS = (torch_styles.ColwiseParallel, torch_styles.RowwiseParallel)
Holder = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


def apply_plan(model: nn.Module, styles: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Give the modules of a model their styles, in place. Collective.

    Args:
        model: all of it: what shares parameters is found inside of it.
        styles: by module name, in which * stands for any part; None: the module stays as it is.
        mesh: of one dimension.

    Raises:
        ValueError: the plan names no linear layer, or shards a shared parameter in two ways. The
            model is as it was. So it is after what the styles themselves raise.
    """
    names = {module: name for name, module in model.named_modules()}
    steps = steps_of(model, styles)
    shared = _shared(model)
    twins = twins_of(model, _on_meta)
    before = {holder: twins[holder[0]]._parameters[holder[1]] for holder in _holders(names)}
    for module, style in steps:
        parallelize_module(twins[module], mesh, style)
    fused = any(isinstance(twin, dtensor.StyledLinear) for twin in twins.values())
    if not fused and not any(isinstance(style, TransformersStyle) for _, style in steps):
        raise ValueError(f"the plan names no linear layer of the model: {sorted(styles)}")

    def placements(holder: Holder) -> tuple[Placement, ...] | None:
        """Return how the plan places a parameter; None: it stays as it is."""
        twin = twins[holder[0]]._parameters.get(holder[1])
        return None if twin is before[holder] else getattr(twin, "placements", ())

    styled = {module for module, _ in steps}
    while (adopted := _adopt(shared, styled, placements)) is not None:
        parallelize_module(twins[adopted[0]], mesh, adopted[1])
        styled.add(adopted[0])
        steps.append(adopted)
    changed = [holder for holder in before if placements(holder) is not None]
    for holders in shared:
        _check_alike(holders, names, placements)
    _check_memory(changed, before, names)

    for module, style in steps:
        parallelize_module(module, mesh, style)
    for holders in shared:
        if placements(holders[0]) is not None:
            parameter = holders[0][0]._parameters[holders[0][1]]
            for module, name in holders[1:]:
                module.register_parameter(name, parameter)


def steps_of(model: nn.Module, styles: Mapping[str, Any]) -> list[tuple[nn.Module, Any]]:
    """Return what to apply to which module, in the order of the plan.

    A module that several names lead to is listed once for equal styles.
    """
    steps: list[tuple[nn.Module, Any]] = []
    for pattern, style in styles.items():
        modules = [model]
        for part in pattern.split(".") if pattern else []:
            children = [child for module in modules for child in module._modules.items()]
            modules = [c for name, c in children if c is not None and fnmatch(name, part)]
        if not modules:
            warnings.warn(
                f"the plan names {pattern!r}, which the model does not have", stacklevel=4
            )
        for module in modules if style is not None else []:
            earlier = [other for named, other in steps if named is module]
            if not any(_equal(style, other) for other in earlier):
                _check_style(pattern, module, style, earlier)
                steps.append((module, style))
    return steps


def _check_style(pattern: str, module: nn.Module, style: Any, earlier: list[Any]) -> None:
    """Raise for a style that shards a module twice, or one whose weight is no parameter."""
    if not isinstance(style, SPLITS):
        return
    for other in earlier:
        if isinstance(other, SPLITS):
            raise ValueError(f"{pattern!r} leads to a module that the plan gives {other} already")
    for name in ("weight", "bias"):
        if name not in module._parameters and isinstance(getattr(module, name, None), torch.Tensor):
            raise ValueError(
                f"{pattern!r} leads to a module whose {name} is computed from other parameters "
                "(weight_norm, a parametrization), and cannot be sharded: remove that before"
            )


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def _holders(modules: Iterable[nn.Module]) -> list[Holder]:
    return [
        (module, name)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _shared(model: nn.Module) -> list[list[Holder]]:
    """Return the holders of each parameter that has several."""
    by_parameter: defaultdict[int, list[Holder]] = defaultdict(list)
    for module, name in _holders(model.modules()):
        by_parameter[id(module._parameters[name])].append((module, name))
    return [holders for holders in by_parameter.values() if len(holders) > 1]


def twins_of(
    model: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> dict[nn.Module, nn.Module]:
    """Return a twin of each module: the same tree and attributes, with other tensors.

    Args:
        model: stays as it is.
        stand_in: returns a tensor for one of the model's; called once for each.
    """
    tensors: dict[int, torch.Tensor] = {}
    twins: dict[nn.Module, nn.Module] = {}

    def other(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            twin = stand_in(tensor)
            if isinstance(tensor, nn.Parameter) and twin is not tensor:
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            tensors[id(tensor)] = twin
        return tensors[id(tensor)]

    def twin_of(module: nn.Module | None) -> nn.Module | None:
        if module is None or module in twins:
            return None if module is None else twins[module]
        twin = twins[module] = object.__new__(type(module))
        for name, value in vars(module).items():
            vars(twin)[name] = value.copy() if isinstance(value, (dict, set)) else value
        tables: list[Any] = [twin._parameters, twin._buffers]
        for table in tables:
            for name, tensor in table.items():
                table[name] = other(tensor)
        for name, child in twin._modules.items():
            twin._modules[name] = twin_of(child)
        return twin

    twin_of(model)
    return twins


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


# -- shared parameters -----------------------------------------------------------------------------


def _adopt(shared: list[list[Holder]], styled: set[nn.Module], placements: Any) -> Any:
    """Return a module that shares a parameter with one of the plan, and a style for it, or None."""
    for holders in shared:
        wanted = next((p for holder in holders if (p := placements(holder)) is not None), None)
        if wanted is None:
            continue
        for module, name in holders:
            if module not in styled and placements((module, name)) is None:
                style = _style_for(module, name, wanted)
                if style is not None:
                    return module, style
    return None


def _style_for(module: nn.Module, name: str, wanted: tuple[Placement, ...]) -> Any:
    """Return a style that places a parameter so, for whole inputs and outputs; None: there is none.

    An embedding that changes its weight in forward (max_norm) or has sparse gradients has none.
    """
    whole = Replicate()
    if type(module) is nn.Linear:
        if wanted == (Shard(0),):
            return dtensor.ColwiseParallel(output_layouts=whole)
        if wanted == ((Shard(1),) if name == "weight" else (whole,)):
            return dtensor.RowwiseParallel(input_layouts=whole)
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.sparse:
        if wanted == (Shard(0),):
            return torch_styles.RowwiseParallel(input_layouts=whole)
        if wanted == (Shard(1),):
            return torch_styles.ColwiseParallel(output_layouts=whole)
    return None


def _check_alike(holders: list[Holder], names: dict[nn.Module, str], placements: Any) -> None:
    placed = {holder: placements(holder) for holder in holders}
    if len(set(placed.values())) == 1:
        return
    each = ", ".join(
        f"{_name(holder, names)} {'is not sharded' if p is None else f'becomes {p}'}"
        for holder, p in placed.items()
    )
    raise ValueError(
        f"modules share one parameter, and the plan does not shard it alike: {each}. Change the "
        "plan, or give the modules parameters of their own before"
    )


def _check_memory(
    changed: list[Holder], every: Iterable[Holder], names: dict[nn.Module, str]
) -> None:
    """Raise for parameters that share memory although they are two: the plan would part them."""
    owners: dict[Any, Holder] = {}
    for holder in [*changed, *every]:
        parameter: Any = holder[0]._parameters[holder[1]]
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.numel() == 0:
            continue
        place = parameter.device, parameter.data_ptr(), parameter.shape
        other = owners.setdefault(place, holder) if holder in changed else owners.get(place)
        if other is not None and other[0]._parameters[other[1]] is not parameter:
            raise ValueError(
                f"{_name(other, names)} and {_name(holder, names)} are two parameters in the same "
                "memory, which the plan would part: let both modules hold one parameter"
            )


def _name(holder: Holder, names: dict[nn.Module, str]) -> str:
    return f"{names[holder[0]]}.{holder[1]}".lstrip(".")
