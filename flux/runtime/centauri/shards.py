"""Sharded parameters of Centauri's FSDP: where they lie, and how they travel.

A parameter [d, ...] is sharded along its first dimension as FSDP2 does it: rank r has rows r * c to
(r + 1) * c with c = ceil(d / W); the last ones may have fewer. Its whole tensor has room for W * c
rows, so that each rank's rows are one contiguous slice of it, into which they are received:

    mesh [2 hosts, 2 ranks]      whole of a weight: | r0 | r1 | r2 | r3 |      on rank 0
      between hosts   r2 arrives from rank 2, its twin              | r0 |    | r2 |    |
      inside          r1 and r3 arrive from rank 1                  | r0 | r1 | r2 | r3 |

So the permutation that gathering between hosts first leaves costs no copy.
Small parameters of a unit travel together, and are copied out. Where the ranks of a host share
memory (memory.py), there is one whole weight for all of them, and nothing moves inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from flux.core.problem import ceil_div
from flux.runtime.centauri.lanes import Done
from flux.runtime.centauri.routes import Routes


def _local(tensor: Any) -> torch.Tensor:
    """Return a DTensor's part of this rank, outside of autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def _storages(shard: torch.Tensor) -> tuple[torch.UntypedStorage, torch.UntypedStorage]:
    """Return the storages of a DTensor and of its local part.

    Assigning ``.data`` changes the first alone, and torch goes on with the second.
    """
    return shard.untyped_storage(), _local(shard).untyped_storage()


class Managed:
    """One parameter: its shard, and its whole tensor while that is there.

    Args:
        parameter: whole; its rows of this rank are kept.
        mesh: of one dimension: the ranks of the shards; or of two: replicas of them in front.

    Attributes:
        sharded: what the module shows, optimizers change, and the next gather reads.
        buffer: the whole tensor, with padding; see ``attach``.
        whole: the parameter that forward uses, a view of it.
        share: elements of a rank, with padding.
        trained: whether it had a gradient when ranks last agreed on it.
        places: the modules' dictionaries that show ``sharded``, and its name in each.
    """

    buffer: torch.Tensor
    whole: nn.Parameter

    def __init__(
        self, name: str, parameter: nn.Parameter, mesh: DeviceMesh, dtype: torch.dtype | None
    ) -> None:
        self.name, self.shape = name, parameter.shape
        world, rank = mesh.size(-1 % mesh.ndim), mesh.get_local_rank(-1 % mesh.ndim)
        source = parameter.detach()
        first = source.shape[0] if source.dim() else 1
        self.rows = ceil_div(first, world)
        self.row = source.numel() // max(first, 1)  # elements of one
        begin = min(rank * self.rows, first)
        own = min(begin + self.rows, first) - begin
        self.share = self.rows * self.row
        local = source[begin : begin + own].clone()
        stride = tuple(torch.empty(self.shape, device="meta").stride())
        self.mesh, self._stride = mesh, stride
        self.trained = parameter.requires_grad
        self.sharded = nn.Parameter(self._dtensor(local), requires_grad=self.trained)
        self.places: list[tuple[dict[str, Any], str]] = []
        self._given = (local.dtype, local.device, local.shape)
        self._storages = _storages(self.sharded)
        self._node: Any = None
        self.size = world * self.share  # elements of the whole, with padding
        floats = dtype is not None and source.is_floating_point()
        self.dtype = dtype if dtype is not None and floats else source.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, with padding."""
        return self.size * self.dtype.itemsize

    def attach(self, region: torch.Tensor | None) -> None:
        """Set where the whole tensor is: memory of the host, or None: of this rank's own."""
        self._fixed = region is not None
        if region is None:
            region = torch.empty(self.size, dtype=self.dtype, device=self._given[1])
        self.buffer = region
        whole = self.buffer[: self.shape.numel()].view(self.shape)
        self.whole = nn.Parameter(whole, requires_grad=self.trained)
        self.free()

    def _dtensor(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)],
            run_check=False,
            shape=self.shape,
            stride=self._stride,
        )

    @property
    def local(self) -> torch.Tensor:
        """Rows of this rank, as the module's shard has them now: on the last ranks fewer."""
        return _local(self.sharded)

    @property
    def version(self) -> tuple[int, int]:
        """Another value when the shard was changed in place or got another tensor."""
        local = self.local
        return local.data_ptr(), local._version + self.sharded._version

    def assign(self, value: Any) -> None:
        """Take another shard, as ``load_state_dict(assign=True)`` gives it."""
        old: Any = self.sharded
        if (
            not isinstance(value, nn.Parameter)
            or not isinstance(value, DTensor)
            or (value.shape, value.device_mesh, value.placements)
            != (old.shape, old.device_mesh, old.placements)
        ):
            raise RuntimeError(
                f"{self.name} is sharded and cannot be replaced; copy into it, or prepare the "
                "model before flux.runtime.centauri.parallelize"
            )
        self.sharded = value
        self._storages = _storages(value)
        for parameters, name in self.places:
            dict.__setitem__(parameters, name, value)

    def problem(self) -> str | None:
        """Return why the shard cannot be gathered as it is now, or None."""
        before, now = self._storages, _storages(self.sharded)
        if now[0]._cdata != before[0]._cdata:  # ``.data = `` or ``_apply``
            self._storages = now
            if now[1]._cdata == before[1]._cdata:
                return ".data was assigned, which a DTensor ignores; use copy_ under torch.no_grad"
        local = self.local
        for kind, recorded, current in zip(
            ("dtype", "device", "rows of a rank"),
            self._given,
            (local.dtype, local.device, local.shape),
            strict=True,
        ):
            if recorded != current:
                return (
                    f"its {kind} was {recorded} when it was sharded, and is {current}; convert the "
                    "model before parallelize, or give RuntimePlan(param_dtype=...)"
                )
        return None

    def follow(self, accept: Callable[[torch.Tensor], None]) -> None:
        """Let the whole tensor have a gradient if the shard has one, and tell of each."""
        self.whole.requires_grad_(self.sharded.requires_grad)
        if self.whole.requires_grad and self._node is None:
            self.whole.register_post_accumulate_grad_hook(accept)
            with torch.inference_mode(False):
                self._node = torch.autograd.graph.get_gradient_edge(self.whole).node

    def awaits_gradient(self) -> bool:
        """Return whether the backward that runs will come to this parameter."""
        if self._node is None or not self.whole.requires_grad:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(self._node))
        except RuntimeError:  # ``autograd.grad`` returns its gradient, and accumulates none
            return False

    def take_grad(self) -> torch.Tensor | None:
        """Return the whole gradient, which is the caller's from now on."""
        grad, self.whole.grad = self.whole.grad, None
        return grad

    def allocate(self) -> None:
        """Make room for the whole tensor; what autograd has saved of it refers to it again."""
        if not self._fixed:
            self.buffer.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory of the whole tensor back; the host's stays."""
        if not self._fixed:
            self.buffer.untyped_storage().resize_(0)

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add this rank's rows of a gradient, [rows * row], to the shard's, or make them that.

        The shard is no part of the graph, so its hooks are called here.
        """
        shard, local = self.sharded, self.local
        own: Any = self._dtensor(grad[: local.numel()].view(local.shape).to(local.dtype))
        for hook in tuple((shard._backward_hooks or {}).values()):
            changed = hook(own)
            own = own if changed is None else changed
        if shard.grad is None:
            shard.grad = own
        else:
            _local(shard.grad).add_(own.to_local())
        for hook in tuple((getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(shard)


class Chunk:
    """Parameters that travel together."""

    def __init__(self, parameters: Sequence[Managed], label: str) -> None:
        self.parameters, self.label = list(parameters), label
        self.share = sum(p.share for p in self.parameters)  # elements of a rank
        self.owed = False  # gradients of a backward pass that did not reduce
        self.nbytes = sum(p.nbytes for p in self.parameters)
        self.dtype = self.parameters[0].dtype
        self.done: Done | None = None
        self._region: torch.Tensor | None = None  # of several parameters
        self._together: torch.Tensor | None = None

    def attach(self, region: torch.Tensor | None) -> None:
        """Set where whole tensors are; see ``Managed.attach``. Small ones are copied out of it."""
        alone = len(self.parameters) == 1
        self._region = None if alone else region
        for p in self.parameters:
            p.attach(region if alone else None)

    def start_gather(self, routes: Routes) -> None:
        """Begin to fill the whole tensors, which are allocated."""
        if len(self.parameters) == 1:
            every = self.parameters[0].buffer.data.view(routes.world, self.share)
        else:
            flat = self._region
            if flat is None:
                flat = torch.empty(
                    routes.world * self.share,
                    dtype=self.dtype,
                    device=self.parameters[0].buffer.device,
                )
            self._together = every = flat.view(routes.world, self.share)
        own, rooms = [p.local for p in self.parameters], [p.share for p in self.parameters]
        self.done = routes.gather(self.label, every, own, rooms)

    def wait(self) -> None:
        """Wait until the whole tensors are filled."""
        if self.done is None:
            return
        self.done.wait()
        if self._together is not None:
            begin = 0
            for p in self.parameters:
                count = p.share
                p.buffer.data.view(-1, count).copy_(self._together[:, begin : begin + count])
                begin += count
        self.done = self._together = None

    def start_reduce(
        self, routes: Routes, dtype: torch.dtype | None, grads: Sequence[torch.Tensor | None]
    ) -> tuple[Done, list[torch.Tensor]]:
        """Begin the ReduceScatter of gradients; return what to wait for, and where the sum will be.

        Of ``grads`` (whole, given away by the caller) None counts as zeros. ``dtype`` is of the
        sum; None: of the gradients.
        """
        parts = self._parts(routes.world, dtype or self.dtype, grads)
        return routes.scatter(f"ReduceScatter of {self.label}", parts)

    def _parts(
        self, world: int, dtype: torch.dtype, grads: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return gradients by rank, [ranks, share]: without a copy where one has that form."""
        only = grads[0]
        if len(grads) == 1 and only is not None and only.numel() == world * self.share:
            return only.detach().to(dtype).contiguous().view(world, self.share)
        device = self.parameters[0].buffer.device
        parts = torch.zeros(world, self.share, dtype=dtype, device=device)
        begin = 0
        for p, grad in zip(self.parameters, grads, strict=True):
            count = p.share
            if grad is not None:
                flat = grad.reshape(-1)
                full = flat.numel() // count if count else 0
                parts[:full, begin : begin + count].copy_(flat[: full * count].view(full, count))
                at = full * count
                if at < flat.numel():
                    parts[full, begin : begin + flat.numel() - at].copy_(flat[at:])
            begin += count
        return parts
