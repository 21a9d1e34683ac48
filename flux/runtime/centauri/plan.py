"""How a model is sharded for ``flux.runtime.centauri``: options, checks, and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from flux.core.problem import checked_integer

UnitOf = tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]
"""(name, module, parameters by name) of what is gathered together."""

WHOLE = "the model"
"""Name of the unit of parameters that are the model's own."""


@dataclass(frozen=True)
class RuntimePlan:
    """How ``parallelize`` shards and moves parameters.

    Attributes:
        units: classes of the modules whose parameters are gathered together; None: the elements of
            each ``ModuleList``, and the other children of the model.
        by_group: gather and reduce between hosts and inside them, in two steps; False: among all
            ranks at once.
        chunk_bytes: parameters of at least so many bytes travel by themselves, in place; smaller
            ones of a unit travel together.
        prefetch: units that are gathered ahead of the one that computes.
        reshard_after_forward: free weights after a unit's forward, and gather them again in
            backward; False: keep them, for less communication and more memory. Weights in shared
            memory are kept in any case.
        param_dtype: of weights in forward and backward; inputs of units are cast. None: as they
            are.
        reduce_dtype: of the sums of gradients; None: of the gradients.
        shared_memory: on a CPU, whole weights are once per host, in memory that its ranks share,
            and stay allocated; gradients of a host are added there. False: each rank has its own,
            and sockets carry all. None: shared where ranks of a host can; a warning says why not.
        replicate: the first dimension of the mesh holds replicas, as that of ``fully_shard``'s mesh
            of two does; the others are hosts and ranks of a host.
        overlap: False: wait for each gather where it begins, and reduce after backward, to measure
            what overlap gains.
        timeout_s: of each wait for other ranks.
    """

    units: tuple[type[nn.Module], ...] | None = None
    by_group: bool = True
    chunk_bytes: int = 256 << 10
    prefetch: int = 2
    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    shared_memory: bool | None = None
    replicate: bool = False
    overlap: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "prefetch"):
            checked_integer(name, getattr(self, name), 0)
        for name in ("by_group", "reshard_after_forward", "replicate", "overlap"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
        if self.shared_memory is not None and type(self.shared_memory) is not bool:
            raise ValueError(
                f"shared_memory must be True, False or None, got {self.shared_memory!r}"
            )
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s < 1e6:
            raise ValueError(f"timeout_s must be a positive time, got {self.timeout_s!r}")
        if self.units is not None and not (
            isinstance(self.units, tuple)
            and all(isinstance(u, type) and issubclass(u, nn.Module) for u in self.units)
        ):
            raise ValueError(f"units must be a tuple of module classes or None, got {self.units!r}")


def checked_units(model: nn.Module, mesh: DeviceMesh, plan: RuntimePlan) -> list[UnitOf]:
    """Return (name, module, parameters) of each unit."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(plan, RuntimePlan):
        raise ValueError(f"plan must be a RuntimePlan, got {type(plan).__name__}")
    replicas = int(plan.replicate)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim - replicas not in (1, 2):
        raise ValueError(
            "mesh must be a DeviceMesh of one or two dimensions [hosts, ranks of a host]"
            + (", and one of replicas in front of them" if replicas else "")
            + ", got "
            + (f"{mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__)
        )
    if plan.shared_memory and mesh.device_type != "cpu":
        raise ValueError(
            f"shared_memory is for ranks on CPUs, and the mesh is on {mesh.device_type}"
        )
    if dist.get_rank() not in mesh.mesh.flatten().tolist():
        raise ValueError(f"mesh has no place for rank {dist.get_rank()}: {mesh.mesh.tolist()}")
    flat = ranks_of(mesh, plan).flatten(1)
    if not ((flat.diff(dim=0) > 0).all() and (flat.diff(dim=1) > 0).all()):
        raise ValueError(
            "ranks of a mesh must ascend, as those of torch's groups do, got "
            f"{mesh.mesh.tolist()}; where hosts take ranks in turn, give a mesh of one dimension"
        )
    named = dict(model.named_parameters(remove_duplicate=True))
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"{name}: {type(module).__name__} keeps its weights where no hook sees it"
            )
    for name, p in named.items():
        if isinstance(p, DTensor):
            raise ValueError(f"{name} is a DTensor already: parallelize the model before, or once")
        if p.is_meta or p.device.type != mesh.device_type:
            raise ValueError(
                f"{name} is on {p.device}, and the mesh on {mesh.device_type}; materialize and "
                "move the model first"
            )
        if p.dim() == 0:
            raise ValueError(f"{name} has no dimensions and cannot be sharded: give it one")
        if not p.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    return units_of(model, plan)


def units_of(model: nn.Module, plan: RuntimePlan) -> list[UnitOf]:
    """Return (name, module, parameters) of each unit, in the order of the model.

    Parameters that modules of several units share, as tied embeddings, are the model's own.
    """
    chosen: dict[int, str] = {}
    for name, module in model.named_modules():
        if plan.units is not None:
            is_unit = isinstance(module, plan.units)
        else:
            parent = model.get_submodule(name.rpartition(".")[0])
            in_list = isinstance(parent, nn.ModuleList)
            is_unit = in_list or (parent is model and not isinstance(module, nn.ModuleList))
        if is_unit and module is not model:
            chosen[id(module)] = name
    users: dict[int, set[int]] = {}  # of a parameter, the units
    named: dict[int, tuple[str, nn.Parameter]] = {}
    modules = {id(model): ("", model)}

    def visit(module: nn.Module, name: str, unit: int) -> None:
        if id(module) in chosen:
            unit = id(module)
            modules[unit] = (name, module)
        for own, p in module._parameters.items():
            if p is not None:
                users.setdefault(id(p), set()).add(unit)
                named.setdefault(id(p), (f"{name}.{own}".lstrip("."), p))
        for child, of in module.named_children():
            visit(of, f"{name}.{child}".lstrip("."), unit)

    visit(model, "", id(model))
    if not named:
        raise ValueError("the model has no parameters")
    of_unit: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for key, units in users.items():
        of_unit.setdefault(id(model) if len(units) > 1 else units.pop(), []).append(named[key])
    order = [key for key in modules if key in of_unit]
    return [(modules[key][0] or WHOLE, modules[key][1], of_unit[key]) for key in order]


def ranks_of(mesh: DeviceMesh, plan: RuntimePlan) -> torch.Tensor:
    """Return global ranks as [replicas, hosts, ranks of a host]."""
    ranks = mesh.mesh if plan.replicate else mesh.mesh.unsqueeze(0)
    ranks = ranks if ranks.ndim == 3 else ranks.unsqueeze(1)
    return ranks if plan.by_group else ranks.reshape(len(ranks), 1, -1)


def all_layouts(layout: torch.Tensor) -> list[torch.Tensor]:
    """Return the layouts of all ranks of the world, each once. Collective.

    There are several where the mesh is a part of a larger one, with dimensions of tensor or
    pipeline parallelism.

    Raises:
        ValueError: on every rank: the ranks do not agree on the ranks of each mesh.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, layout.tolist())
    takers: dict[str, list[int]] = {}
    for rank, theirs in enumerate(of_ranks):
        takers.setdefault(str(theirs), []).append(rank)
    layouts = [torch.tensor(of_ranks[ranks[0]]) for ranks in takers.values()]
    for theirs, ranks in zip(layouts, takers.values(), strict=True):
        others = set(theirs.flatten().tolist()).difference(ranks)
        if others:
            other = min(others)
            raise ValueError(
                f"rank {ranks[0]} has {theirs.tolist()} as its mesh, and rank {other} has "
                f"{of_ranks[other]}: ranks of one mesh must agree on it"
            )
    return layouts
