"""Centauri's FSDP for an ordinary module: communication by groups and in chunks, beside compute.

C. Chen et al., ASPLOS 2024; ``flux.plan.policies.centauri`` plans it, and this module runs it.

    from flux.plan.centauri import RuntimePlan, parallelize

    mesh = init_device_mesh("cpu", (hosts, ranks_of_a_host))
    parallelize(model, mesh, RuntimePlan())
    optimizer = torch.optim.AdamW(model.parameters())      # of DTensors, as with FSDP2
    model(x).sum().backward(); optimizer.step()

Parameters become DTensors sharded along their first dimension, as those of torch's ``fully_shard``,
so optimizers, clipping and checkpoints are the same, and checkpoints of one load into the other.

    forward     a unit's weights are gathered while the units before it compute. Reading a weight
                waits for it alone: those of later matmuls are under way beside the first.
    backward    the same again, in reverse. When the gradients of a chunk are complete, their
                ReduceScatter begins, and the end of ``backward()`` waits for the last one.

Between hosts first: each rank exchanges its shard with its twins on other hosts, and then with the
ranks of its host. So each byte crosses a link once per host, and the part between hosts of one
chunk runs beside the part inside of the one before. On CPUs the ranks of a host share whole weights
(``centauri_memory``).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map

from flux.core.errors import PeerTimeoutError
from flux.plan.centauri_lanes import Done, make_lane
from flux.plan.centauri_memory import share_memory
from flux.plan.centauri_plan import (
    RuntimePlan,
    Unit,
    all_layouts,
    checked_units,
    chunked,
    layout_of,
)
from flux.plan.centauri_routes import Groups, Routes
from flux.plan.centauri_shards import Chunk, Managed

__all__ = ["RuntimePlan", "Sharded", "parallelize", "sharded"]

_STATE = "_flux_centauri"


class _Parameters(dict[str, Any]):
    """A module's parameters: reading one by name while its unit is in use gives the whole tensor.

    ``items`` and ``values`` always give the shards, so that optimizers and checkpoints see them.
    """

    def __init__(self, given: dict[str, Any], owners: dict[str, tuple[_Unit, Managed]]) -> None:
        super().__init__(given)
        self._owners = owners

    def __getitem__(self, name: str) -> Any:
        owner = self._owners.get(name)
        if owner is not None and owner[0].in_use:
            return owner[0].read(owner[1])
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._owners and value is not super().__getitem__(name):
            raise RuntimeError(
                f"{self._owners[name][1].name} is sharded and cannot be replaced; copy into it, or "
                "prepare the model before flux.plan.centauri.parallelize"
            )
        super().__setitem__(name, value)


class _Unit:
    """Parameters that are gathered for one module's forward and backward."""

    def __init__(self, number: int, name: str, chunks: list[Chunk], owner: Sharded) -> None:
        self.number, self.name, self.chunks, self.owner = number, name, chunks, owner
        self.chunk_of = {id(p): chunk for chunk in chunks for p in chunk.parameters}
        self.depth = 0  # of forward calls
        self.in_backward = False
        self.gathered = False
        self.grads: dict[int, torch.Tensor] = {}
        self.missing = {id(chunk): self._trained(chunk) for chunk in chunks}

    @staticmethod
    def _trained(chunk: Chunk) -> set[int]:
        return {id(p) for p in chunk.parameters if p.trained}

    @property
    def in_use(self) -> bool:
        return self.depth > 0 or self.in_backward or self.owner.held

    def gather(self) -> None:
        if self.gathered:
            return
        self.owner.check()
        self.gathered = True
        self.owner.routes.enter(self.name)
        # Lanes write into tensors that are made here, which those of inference mode do not allow.
        with torch.inference_mode(False):
            for chunk in self.chunks:
                for p in chunk.parameters:
                    p.allocate()
                chunk.start_gather(self.owner.routes)
                if not self.owner.plan.overlap:
                    self.owner.guarded(chunk.wait)

    def read(self, parameter: Managed) -> nn.Parameter:
        self.gather()
        self.owner.guarded(self.chunk_of[id(parameter)].wait)
        return parameter.whole

    def free(self) -> None:
        if not self.gathered or self.owner.failed:  # a lane may still write there
            return
        for chunk in self.chunks:
            self.owner.guarded(chunk.wait)
            for p in chunk.parameters:
                p.free()
        self.gathered = False

    # -- gradients ---------------------------------------------------------------------------------

    def accept(self, parameter: Managed) -> None:
        """Take a gradient that is complete; start the ReduceScatter of a chunk that is."""
        if not self.owner.reduces:
            return
        grad = parameter.whole.grad
        assert grad is not None
        parameter.whole.grad = None
        chunk = self.chunk_of[id(parameter)]
        self.grads[id(parameter)] = grad
        self.missing[id(chunk)].discard(id(parameter))
        if not self.missing[id(chunk)]:
            self.reduce(chunk)
            frozen = any(not p.trained for c in self.chunks for p in c.parameters)
            if not frozen and not any(self.missing.values()) and self.depth == 0:
                self.in_backward = False
                if self.owner.plan.reshard_after_forward:
                    self.free()

    def reduce(self, chunk: Chunk) -> None:
        given = [self.grads.pop(id(p), None) for p in chunk.parameters]
        if all(grad is None for grad in given):
            return
        done, sums = chunk.start_reduce(self.owner.routes, self.owner.plan.reduce_dtype, given)
        if not self.owner.plan.overlap:
            self.owner.guarded(done.wait)
        has = [grad is not None for grad in given]
        self.owner.pending.append((done, sums, chunk, has))

    def finish_backward(self) -> None:
        for chunk in self.chunks:
            for p in chunk.parameters:
                # Gradients of backward passes that did not reduce, of parameters unused in this.
                if self.owner.reduces and p.whole.grad is not None:
                    self.grads[id(p)] = p.whole.grad
                    p.whole.grad = None
            self.reduce(chunk)
            self.missing[id(chunk)] = self._trained(chunk)
        self.in_backward = False
        if self.depth == 0:
            self.free()


class Sharded:
    """What ``parallelize`` has made of a model; ``sharded(model)`` returns it.

    Attributes:
        plan: as given.
        reduces: whether backward reduces gradients; see ``set_requires_gradient_sync``.
        held: whether weights are whole because of ``summon``.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Unit],
        layout: torch.Tensor,
        plan: RuntimePlan,
        device: torch.device,
    ) -> None:
        self.plan, self.reduces, self.held = plan, True, False
        timeout = timedelta(seconds=plan.timeout_s)
        self.lanes = [make_lane(device, timeout) for _ in range(4)]
        self._groups = Groups(all_layouts(layout), timeout)
        lanes = (self.lanes[0], self.lanes[1]), (self.lanes[2], self.lanes[3])
        self.routes = Routes(layout, *lanes, self._groups)
        self.mesh = self._groups.device_mesh(layout, device.type, plan.replicate)
        self.pending: list[tuple[Done, list[torch.Tensor], Chunk, list[bool]]] = []
        self._failure: PeerTimeoutError | None = None
        self._closed = False
        self._running = 0  # calls of the model
        self._queued = False
        self.units: list[_Unit] = []
        self._chunk_of: dict[int, tuple[_Unit, Managed]] = {}  # by storage
        owners: dict[int, tuple[_Unit, Managed]] = {}  # by original parameter
        for number, (name, module, parameters) in enumerate(found):
            managed = [Managed(n, p, self.mesh, plan.param_dtype) for n, p in parameters]
            chunks = [Chunk(of, n) for n, of in chunked(managed, plan.chunk_bytes, name)]
            unit = _Unit(number, name, chunks, self)
            self.units.append(unit)
            owners |= {id(p): (unit, m) for (_, p), m in zip(parameters, managed, strict=True)}
            self._hook(module, unit, model)
        self._allocate(device)
        for module in model.modules():
            here = {n: owners[id(p)] for n, p in module._parameters.items() if id(p) in owners}
            if here:
                given = {
                    n: here[n][1].sharded if n in here else p for n, p in module._parameters.items()
                }
                module._parameters = _Parameters(given, here)
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _allocate(self, device: torch.device) -> None:
        """Give all parameters room for whole tensors: of the host, or of this rank."""
        plan, routes = self.plan, self.routes
        chunks = [chunk for unit in self.units for chunk in unit.chunks]
        row = routes.intra.group
        if row is not None and device.type == "cpu" and plan.shared_memory is not False:
            sizes = [chunk.nbytes for chunk in chunks]
            found = share_memory(plan.shared_memory, row, sizes, plan.timeout_s)
            if isinstance(found, str):
                warnings.warn(f"no shared memory, so sockets carry all: {found}", stacklevel=4)
            else:
                routes.memory = found
        for number, chunk in enumerate(chunks):
            memory = routes.memory
            chunk.attach(None if memory is None else memory.region(number, chunk.dtype))
        for unit in self.units:
            for one in (p for chunk in unit.chunks for p in chunk.parameters):
                self._chunk_of[one.buffer.untyped_storage()._cdata] = (unit, one)
                if one.trained:
                    one.whole.register_post_accumulate_grad_hook(_accept(unit, one))

    # -- hooks -------------------------------------------------------------------------------------

    def _begin(self, *_: Any) -> None:
        """Free, before the model's forward, what no backward came for: shards may have changed."""
        self.check()
        self._running += 1
        for unit in self.units:
            if unit.depth == 0 and not unit.in_backward and not self.held:
                unit.free()

    def _end(self, *_: Any) -> None:
        self._running -= 1

    def _hook(self, module: nn.Module, unit: _Unit, model: nn.Module) -> None:
        saved: list[Any] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            unit.gather()
            unit.depth += 1
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            hooks.__enter__()
            saved.append(hooks)
            for ahead in self.units[unit.number + 1 : unit.number + 1 + self.plan.prefetch]:
                ahead.gather()
            return self._cast((args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if saved:
                saved.pop().__exit__()
            unit.depth -= 1
            self._watch(unit, output)
            # What backward needs first stays: the last unit, and the model's own parameters. What a
            # host shares stays allocated in any case, so that freeing it would gain nothing.
            ends = module is model or unit.number == len(self.units) - 1
            keeps = not self.plan.reshard_after_forward or ends or self.routes.memory is not None
            keeps = keeps and torch.is_grad_enabled() and self._running > 0
            if unit.depth == 0 and not unit.in_backward and not keeps and not self.held:
                unit.free()

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # Also if forward raises: hooks of autograd must not stay behind.
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _cast(self, given: Any) -> Any:
        dtype = self.plan.param_dtype
        if dtype is None:
            return given

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        return tree_map(cast, given)

    def _pack(self, tensor: torch.Tensor) -> Any:
        owner = self._chunk_of.get(tensor.untyped_storage()._cdata)
        return tensor if owner is None else (tensor, owner)

    def _watch(self, unit: _Unit, output: Any) -> None:
        """Begin a unit's backward with the first gradient of its outputs."""
        tensors = [
            t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if not tensors:
            return
        torch.autograd.graph.register_multi_grad_hook(
            tensors, lambda _: self._before_backward(unit), mode="any"
        )

    def _before_backward(self, unit: _Unit) -> None:
        if not self._queued:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        unit.in_backward = True
        unit.gather()
        first = max(0, unit.number - self.plan.prefetch)
        for ahead in reversed(self.units[first : unit.number]):
            if any(p.trained for c in ahead.chunks for p in c.parameters):
                ahead.in_backward = True
                ahead.gather()

    def _end_backward(self) -> None:
        """Wait for all gradients, and free all weights: the end of ``backward()``."""
        self._queued = False
        for unit in reversed(self.units):
            unit.finish_backward()
        pending, self.pending = self.pending, []
        for done, sums, chunk, has in pending:
            self.guarded(done.wait)
            begin = 0
            for p, given in zip(chunk.parameters, has, strict=True):
                count = p.padded.numel()
                if given:
                    p.accumulate(sums[0][begin : begin + count])
                begin += count

    # -- errors ------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a wait has failed."""
        return self._failure is not None

    def check(self) -> None:
        """Raise what an earlier wait has raised, or if this was closed.

        Raises:
            PeerTimeoutError: a peer has failed before.
            RuntimeError: ``close`` was called.
        """
        if self._failure is not None:
            raise PeerTimeoutError(f"a peer has failed before: {self._failure}") from self._failure
        if self._closed:
            raise RuntimeError("the model's communication was closed by flux.plan.centauri")

    def guarded(self, wait: Callable[[], None]) -> None:
        """Call a wait; after a failure every further one fails."""
        try:
            wait()
        except PeerTimeoutError as error:
            self._failure = self._failure or error
            raise

    # -- for users ---------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        """Set whether backward reduces gradients; without, they add up whole on each rank.

        For gradient accumulation with less communication and more memory, as FSDP2's.
        """
        self.reduces = reduces

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Make weights whole inside a ``with`` block. Collective."""
        self.held = True
        try:
            for unit in self.units:
                unit.gather()
                for chunk in unit.chunks:
                    self.guarded(chunk.wait)
            yield
        finally:
            self.held = False
            for unit in self.units:
                unit.free()

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[str, str]]]:
        """Record collectives as they begin inside a ``with`` block: (kind, label of the chunk)."""
        order: list[tuple[str, str]] = []
        self.routes.order = order
        try:
            yield order
        finally:
            self.routes.order = None

    def close(self) -> None:
        """End lanes and destroy groups; the shards stay. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for lane in self.lanes:
            lane.close()
        self._groups.close()


def _accept(unit: _Unit, parameter: Managed) -> Callable[[torch.Tensor], None]:
    # Weak: Python's collector does not see what a tensor's hooks refer to.
    own, one = weakref.ref(unit), weakref.ref(parameter)

    def accept(_: torch.Tensor) -> None:
        unit, parameter = own(), one()
        if unit is not None and parameter is not None:
            unit.accept(parameter)

    return accept


def _unpack(packed: Any) -> torch.Tensor:
    """Return a saved tensor; of a weight, when it is there again."""
    if isinstance(packed, tuple):
        tensor, (unit, parameter) = packed
        unit.in_backward = True
        unit.read(parameter)
    else:
        tensor = packed
    found: torch.Tensor = tensor
    return found


def sharded(model: nn.Module) -> Sharded:
    """Return what ``parallelize`` has made of a model.

    Raises:
        ValueError: it was not parallelized.
    """
    found = getattr(model, _STATE, None)
    if not isinstance(found, Sharded):
        raise ValueError("the model was not parallelized by flux.plan.centauri")
    return found


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: RuntimePlan | None = None) -> nn.Module:
    """Shard a model's parameters over all ranks of a mesh, in place.

    Collective: all ranks of the world call it, each with a mesh that it is in. The mesh may be a
    part of a larger one, ``world["hosts", "data"]``, beside tensor or pipeline parallelism:
    gradients are averaged over its ranks alone. Linear layers of ``flux.layers`` and Megatron-core
    keep their tensor-parallel parts as plain parameters, which are sharded as all others.

    Args:
        model: with equal parameters on all ranks of the mesh, on its device.
        mesh: [hosts, ranks of a host], or of one dimension: one host. With ``plan.replicate``
            there is one of replicas in front: [replicas, hosts, ranks of a host], or [replicas,
            ranks of a host].
        plan: how; by default ``RuntimePlan()``.

    Returns:
        The model. Its parameters are DTensors; make the optimizer afterwards.

    Raises:
        ValueError: arguments that cannot be, before any communication; or ranks of a mesh that do
            not agree on it, on every rank.
    """
    plan = RuntimePlan() if plan is None else plan
    found = checked_units(model, mesh, plan)
    device = next(p for _, _, of in found for _, p in of).device
    state = Sharded(model, found, layout_of(mesh, plan), plan, device)
    object.__setattr__(model, _STATE, state)
    return model
