"""Centauri's FSDP for an ordinary module: communication by groups and in chunks, alongside compute.

C. Chen et al., ASPLOS 2024; ``flux.plan.policies.centauri`` plans it, and this module runs it.

    from flux.runtime.centauri.module import RuntimePlan, parallelize

    mesh = init_device_mesh("cpu", (hosts, ranks_of_a_host))
    parallelize(model, mesh, RuntimePlan())
    optimizer = torch.optim.AdamW(model.parameters())      # of DTensors, as with FSDP2
    model(x).sum().backward(); optimizer.step()

Parameters become DTensors sharded along their first dimension, as those of torch's ``fully_shard``,
so optimizers, clipping and checkpoints are the same, and checkpoints of one load into the other.

    forward     a unit's weights are gathered while the units before it compute. Reading a weight
                waits for it alone: those of later matmuls are under way alongside the first.
    backward    the same again, in reverse. When the gradients of a chunk are complete, their
                ReduceScatter begins, and the end of ``backward()`` waits for the last one.

Between hosts first: each rank exchanges its shard with its twins on other hosts, and then with the
ranks of its host. So each byte crosses a link once per host. The part of a chunk between hosts
runs alongside the part of the previous chunk inside hosts. On CPUs the ranks of a host share whole
weights (memory.py).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map

from flux.runtime.centauri.lanes import make_lane
from flux.runtime.centauri.memory import share_memory
from flux.runtime.centauri.passes import Backward, Forward
from flux.runtime.centauri.plan import (
    WHOLE,
    RuntimePlan,
    UnitOf,
    all_layouts,
    checked_units,
    ranks_of,
)
from flux.runtime.centauri.routes import Groups, Routes
from flux.runtime.centauri.saved import Saved, saving
from flux.runtime.centauri.shards import Managed
from flux.runtime.centauri.stages import whole_backward_in_stage
from flux.runtime.centauri.units import Parameters, Traffic, Unit, added_parameters, refuse_copy

__all__ = ["RuntimePlan", "Sharded", "parallelize", "sharded"]

_STATE = "_flux_centauri"


class Sharded:
    """What ``parallelize`` has made of a model; ``sharded(model)`` returns it."""

    def __init__(
        self,
        model: nn.Module,
        unit_specs: Sequence[UnitOf],
        layout: torch.Tensor,
        plan: RuntimePlan,
        device: torch.device,
    ) -> None:
        self.plan, self.reduces, self.held = plan, True, False
        timeout = timedelta(seconds=plan.timeout_s)
        self.lanes = [make_lane(device, timeout) for _ in range(4)]
        self._groups = Groups(all_layouts(layout), timeout)
        lanes = (self.lanes[0], self.lanes[1]), (self.lanes[2], self.lanes[3])
        self.routes = Routes(layout, *lanes, self._groups, device.type == "cuda")
        self.mesh = self._groups.device_mesh(layout, device.type, plan.replicate)
        self._traffic = Traffic(plan, self.routes)
        self._forward: Forward | None = None
        self._inside = 0  # calls of parts in it
        self._backward: Backward | None = None
        self._reach: set[Unit] = set()  # of the calls since the last backward
        self._reached = False
        self.units: list[Unit] = []
        self._chunk_of: dict[int, tuple[Unit, Managed]] = {}  # by storage
        owners: dict[int, tuple[Unit, Managed]] = {}  # by original parameter
        for number, (name, _, parameters) in enumerate(unit_specs):
            managed = [Managed(n, p, self.mesh, plan.param_dtype) for n, p in parameters]
            unit = Unit(number, name, managed, self._traffic)
            self.units.append(unit)
            owners |= {id(p): (unit, m) for (_, p), m in zip(parameters, managed, strict=True)}
        self._allocate(device)
        self._model = weakref.ref(model)
        units = {module: unit for (_, module, _), unit in zip(unit_specs, self.units, strict=True)}
        for module in {model: None, **units}:
            used = {owners[id(p)][0] for p in module.parameters()}
            _Hooks(self, module, units.get(module), sorted(used, key=lambda u: u.number))
        for module in model.modules():
            here = {n: owners[id(p)] for n, p in module._parameters.items() if id(p) in owners}
            if here:
                module._parameters = Parameters(module._parameters, here, self.read)

    def _allocate(self, device: torch.device) -> None:
        """Give all parameters room for whole tensors: of the host, or of this rank."""
        plan, routes = self.plan, self.routes
        chunks = [chunk for unit in self.units for chunk in unit.chunks]
        row = routes.intra.group
        if row is not None and device.type == "cpu" and plan.shared_memory is not False:
            sizes = [chunk.nbytes for chunk in chunks]
            allocated = share_memory(plan.shared_memory, row, sizes, plan.timeout_s)
            if isinstance(allocated, str):
                warnings.warn(f"no shared memory, so sockets carry all: {allocated}", stacklevel=4)
            else:
                routes.memory = allocated
        for number, chunk in enumerate(chunks):
            memory = routes.memory
            chunk.attach(None if memory is None else memory.region(number, chunk.dtype))
        for unit in self.units:
            for parameter in unit.parameters:
                self._chunk_of[parameter.buffer.untyped_storage()._cdata] = (unit, parameter)

    # -- forward -----------------------------------------------------------------------------------

    def enter(self, call: _PartCall, module: nn.Module, units: Sequence[Unit]) -> None:
        """Begin a call of a part: of a forward that runs, of backward's recomputation, or new."""
        if not (self._in_backward() or self.held):
            if self._forward is None:
                self._begin(module, units)
            self._inside += 1
            call.forward = self._forward
        call.entered = True
        call.hooks = saving(self._pack)
        call.hooks.__enter__()

    def _begin(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Begin a call from outside, with weights as they are now."""
        self._traffic.check()
        whole = module is self._model()
        if self._backward is not None and self._backward.thread == threading.get_ident():
            self._backward.abandon()  # it has raised
            self._backward = None
        self._agree(f"a call of {type(module).__name__}", units[0].number << 16 | len(units))
        if self._reached:
            self._reached = False
            self._reach.clear()
        self._reach.update(units)
        if self._backward is None:  # else another thread's: no optimizer has run
            for unit in self.units:
                unit.free()
        keeps: set[Unit] = set()
        if self.routes.memory is not None:
            # It stays allocated in any case. So units that run again are not gathered again, which
            # ranks of several hosts would have to do alike.
            keeps = set(units)
        elif torch.is_grad_enabled():
            if not self.plan.reshard_after_forward:
                keeps = set(units)
            elif whole:  # what backward needs first: the model's own parameters, and the last unit
                keeps = {u for u in units if u is self.units[-1] or u.name == WHOLE}
        whole_backward_in_stage()
        self._forward = Forward(units, keeps, self.plan.prefetch)

    def leave(self, call: _PartCall, units: Sequence[Unit], output: Any) -> None:
        """End a call of a part, which has begun as far as ``call`` says."""
        if call.entered:
            self._watch(call.unit, output)
        forward = call.forward
        if forward is None:
            return
        self._inside -= 1
        if self._traffic.failure:
            self._forward = None if self._inside == 0 else self._forward
        elif self._inside == 0:
            self._forward = None
            forward.finish()
        else:
            forward.release(units)

    def _in_backward(self) -> bool:
        """Return whether this thread runs backward of the model."""
        return self._backward is not None and torch._C._current_graph_task_id() != -1

    def need(self, unit: Unit) -> None:
        """Gather a unit in its turn."""
        if self._in_backward():
            assert self._backward is not None
            self._backward.need(unit)
        elif self._forward is not None and self._forward.has(unit):
            self._forward.need(unit)
        else:
            unit.gather()

    def read(self, unit: Unit, parameter: Managed) -> nn.Parameter | None:
        """Return a whole tensor when it is filled; None if modules read none of its unit now."""
        in_use = self.held or unit.depth > 0 or unit.in_backward or self._in_backward()
        if not in_use and (self._forward is None or not self._forward.has(unit)):
            return None
        if not unit.gathered:
            self.need(unit)
        return unit.read(parameter)

    def _agree(self, what: str, kind: int) -> None:
        """Check that all ranks do the same now, with weights that can be gathered.

        Raises:
            ValueError: on every rank, before any weight moves.
        """
        model = self._model()
        assert model is not None
        wrong = added_parameters(model)
        words = [kind, int(self.reduces), len(wrong)]
        parameters = [p for unit in self.units for p in unit.parameters]
        for p in parameters:
            problem = p.problem()
            if problem is not None:
                wrong.append(f"{p.name}: {problem}")
            words.append(2 * (problem is not None) + p.sharded.requires_grad)
        names = ["the part of the model that is called", "set_requires_gradient_sync"]
        names += ["parameters that came after parallelize"]
        names += [f"requires_grad, dtype or place of {p.name}" for p in parameters]
        differing: list[torch.Tensor] = []
        values = torch.tensor(words, dtype=torch.int32)
        self._traffic.guarded(lambda: differing.append(self.routes.agree(what, values)))
        if wrong:
            raise ValueError("; ".join(wrong[:3]))
        if differing[0].any():
            first = names[int(differing[0].nonzero()[0])]
            raise ValueError(f"{what}: ranks differ in {first}; it must be the same on all of them")
        for unit in self.units:
            for p in unit.parameters:
                p.trained = p.sharded.requires_grad
                p.follow(_accept(self, unit, p))

    def cast(self, inputs: Any) -> Any:
        """Return inputs in the dtype of weights, where the plan gives one."""
        dtype = self.plan.param_dtype
        if dtype is None:
            return inputs

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        return tree_map(cast, inputs)

    # -- backward ----------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Saved | None:
        """Return a weight that autograd saves; None: another tensor."""
        owner = self._chunk_of.get(tensor.untyped_storage()._cdata)
        return None if owner is None else Saved(self._weight_is_read, tensor, *owner)

    def _weight_is_read(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() != -1 and not unit.in_backward:
            self.backward().need(unit)

    def _watch(self, unit: Unit | None, output: Any) -> None:
        """Begin backward with the first gradient of a call's outputs."""
        tensors = [
            t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(
                tensors, lambda _: self._gradient_comes(unit), mode="any"
            )

    def _gradient_comes(self, unit: Unit | None) -> None:
        backward = self.backward()
        if unit is not None:
            backward.need(unit)

    def backward(self) -> Backward:
        """Return the backward that this graph belongs to, which begins now if it has not."""
        if self._backward is None:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
            for p in (p for unit in self.units for p in unit.parameters):
                p.whole.requires_grad_(p.whole.requires_grad and p.sharded.requires_grad)
            self._backward = Backward(self.units, self._reach, self._traffic, self.reduces)
        return self._backward

    def _end_backward(self) -> None:
        """Wait for all gradients, and free all weights: the end of ``backward()``."""
        backward, self._backward = self._backward, None
        self._reached = True
        if backward is not None:
            backward.finish()

    # -- for users ---------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        """Set whether backward reduces gradients; without, they add up whole on each rank.

        For gradient accumulation with less communication and more memory, as FSDP2's.
        """
        self.reduces = reduces

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Make weights whole inside a ``with`` block. Collective."""
        self._traffic.check()
        self._agree("summon", -2)
        parameters = [p for unit in self.units for p in unit.parameters]
        self.held = True
        try:
            for unit in self.units:
                unit.gather()
            for unit in self.units:
                unit.wait()
            versions = [p.whole._version for p in parameters]
            yield
            for p, version in zip(parameters, versions, strict=True):
                p.sharded.requires_grad_(p.whole.requires_grad)
                if p.whole._version != version:
                    raise RuntimeError(
                        f"{p.name} was written inside summon, which keeps no change; write into "
                        "the shards outside of it, under torch.no_grad"
                    )
        finally:
            self.held = False
            for unit in self.units:
                if unit.depth == 0:
                    unit.free()

    def close(self) -> None:
        """End lanes and destroy groups; the shards stay. Idempotent."""
        if self._traffic.closed:
            return
        self._traffic.closed = True
        for lane in self.lanes:
            lane.close()
        self._groups.close()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        refuse_copy()


class _Hooks:
    """Gather what a module's calls read, and free it."""

    def __init__(
        self, owner: Sharded, module: nn.Module, unit: Unit | None, units: Sequence[Unit]
    ) -> None:
        self._owner, self._unit, self._units = owner, unit, units
        self._calls: list[_PartCall] = []
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        # Also if forward raises: hooks of autograd must not stay behind.
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit, those before it, and those ahead."""
        call = _PartCall()
        self._calls.append(call)
        self._owner.enter(call, module, self._units)
        if self._unit is None:
            return args, kwargs
        self._unit.depth += 1
        call.unit = self._unit
        self._owner.need(self._unit)
        return self._owner.cast((args, kwargs))

    def after(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Free units that nothing reads any more; watch for backward."""
        if not self._calls:  # a hook before ours has raised
            return
        call = self._calls.pop()
        if call.hooks is not None:
            call.hooks.__exit__()
        if call.unit is not None:
            call.unit.depth -= 1
        self._owner.leave(call, self._units, output)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        refuse_copy()


class _PartCall:
    """A call of a module that has hooks: what it has begun, and must end."""

    def __init__(self) -> None:
        self.entered = False
        self.forward: Forward | None = None
        self.unit: Unit | None = None
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None


def _accept(owner: Sharded, unit: Unit, parameter: Managed) -> Callable[[torch.Tensor], None]:
    # Weak: Python's collector does not see what a tensor's hooks refer to.
    owner_of, unit_of, parameter_of = weakref.ref(owner), weakref.ref(unit), weakref.ref(parameter)

    def accept(_: torch.Tensor) -> None:
        owner, unit, parameter = owner_of(), unit_of(), parameter_of()
        if owner is not None and unit is not None and parameter is not None:
            owner.backward().accept(unit, parameter)

    return accept


def sharded(model: nn.Module) -> Sharded:
    """Return what ``parallelize`` has made of a model."""
    state = getattr(model, _STATE, None)
    if not isinstance(state, Sharded):
        raise ValueError("the model was not parallelized by flux.runtime.centauri")
    return state


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: RuntimePlan | None = None) -> nn.Module:
    """Shard a model's parameters over all ranks of a mesh, in place.

    Collective: all ranks of the world call it, each with a mesh that it is in. The mesh may be a
    part of a larger one, ``world["hosts", "data"]``, alongside tensor or pipeline parallelism:
    gradients are averaged over its ranks alone. Linear layers of ``flux.layers`` and Megatron-core
    keep their tensor-parallel parts as plain parameters, which are sharded as all others.

    Args:
        model: with equal parameters on all ranks of the mesh, on its device.
        mesh: [hosts, ranks of a host], or of one dimension: one host. With ``plan.replicate``
            there is one of replicas in front: [replicas, hosts, ranks of a host], or [replicas,
            ranks of a host].
        plan: how; by default ``RuntimePlan()``.

    Raises:
        ValueError: arguments that cannot be, before any communication; or ranks of a mesh that do
            not agree on it, on every rank.
    """
    plan = RuntimePlan() if plan is None else plan
    checked = checked_units(model, mesh, plan)
    device = next(p for _, _, of in checked for _, p in of).device
    state = Sharded(model, checked, ranks_of(mesh, plan), plan, device)
    object.__setattr__(model, _STATE, state)
    return model
