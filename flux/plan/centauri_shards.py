"""Sharded parameters of Centauri's FSDP: where they lie, and how they travel.

A parameter [d, ...] is sharded along its first dimension as FSDP2 does it: rank r has rows r * c to
(r + 1) * c with c = ceil(d / W); the last ones may have fewer. Its whole tensor has room for W * c
rows, so that each rank's rows are one contiguous slice of it, into which they are received:

    mesh [2 hosts, 2 ranks]      whole of a weight: | r0 | r1 | r2 | r3 |      on rank 0
      between hosts   r2 arrives from rank 2, its twin              | r0 |    | r2 |    |
      inside          r1 and r3 arrive from rank 1                  | r0 | r1 | r2 | r3 |

So the permutation that gathering between hosts first leaves (``gathered_order``) costs no copy.
Small parameters of a unit travel together, and are copied out. Where the ranks of a host share
memory (``centauri_memory``), there is one whole weight for all of them, and nothing moves inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from flux.core.integers import ceil_div
from flux.plan.centauri_lanes import Done
from flux.plan.centauri_routes import Routes


class Managed:
    """One parameter: its shard, and its whole tensor while that is there.

    Args:
        name: in the model.
        parameter: whole; its rows of this rank are kept.
        mesh: of one dimension: the ranks of the shards; or of two: replicas of them in front.
        dtype: of the whole tensor in forward and backward.

    Attributes:
        buffer: the whole tensor, with padding; see ``attach``.
        whole: the parameter that the module uses, a view of it.
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
        self.padded = source.new_zeros(self.rows * self.row)
        local = self.padded[: own * self.row].view(own, *source.shape[1:])
        local.copy_(source[begin : begin + own])
        stride = tuple(torch.empty(self.shape, device="meta").stride())
        self.mesh, self._stride = mesh, stride
        self.trained = parameter.requires_grad
        self.sharded = nn.Parameter(self._dtensor(local), requires_grad=self.trained)
        self.size = world * self.padded.numel()  # elements of the whole, with padding
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
            region = torch.empty(self.size, dtype=self.dtype, device=self.padded.device)
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
        """Rows of this rank: fewer than ``padded`` has on the last ones."""
        shard: Any = self.sharded
        tensor: torch.Tensor = shard.detach().to_local()
        return tensor

    def allocate(self) -> None:
        """Make room for the whole tensor; what autograd has saved of it refers to it again."""
        if not self._fixed:
            self.buffer.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory of the whole tensor back; the host's stays."""
        if not self._fixed:
            self.buffer.untyped_storage().resize_(0)

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add this rank's rows of a gradient, [rows * row], to the shard's, or make them that."""
        count = self.local.numel()
        own = grad[:count].view(self.local.shape).to(self.padded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = self._dtensor(own)
        else:
            held: Any = self.sharded.grad
            held.to_local().add_(own)


class Chunk:
    """Parameters that travel together.

    Args:
        parameters: one, which is received in place; or several small ones.
        label: for errors.
    """

    def __init__(self, parameters: Sequence[Managed], label: str) -> None:
        self.parameters, self.label = list(parameters), label
        self.share = sum(p.padded.numel() for p in self.parameters)  # elements of a rank
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
                flat = self.parameters[0].padded.new_empty(
                    routes.world * self.share, dtype=self.dtype
                )
            self._together = every = flat.view(routes.world, self.share)
        own = [p.padded for p in self.parameters]
        self.done = routes.gather(self.label, every, own)

    def wait(self) -> None:
        """Wait until the whole tensors are filled."""
        if self.done is None:
            return
        self.done.wait()
        if self._together is not None:
            begin = 0
            for p in self.parameters:
                count = p.padded.numel()
                p.buffer.data.view(-1, count).copy_(self._together[:, begin : begin + count])
                begin += count
        self.done = self._together = None

    def start_reduce(
        self, routes: Routes, dtype: torch.dtype | None, grads: Sequence[torch.Tensor | None]
    ) -> tuple[Done, list[torch.Tensor]]:
        """Begin the ReduceScatter of gradients; return what to wait for, and where the sum will be.

        Args:
            routes: of all ranks.
            dtype: of the sum; None: of the gradients.
            grads: of the parameters, whole; None counts as zeros. The caller gives them away.
        """
        dtype = dtype or self.dtype
        return routes.scatter(self.label, self._parts(routes.world, dtype, grads))

    def _parts(
        self, world: int, dtype: torch.dtype, grads: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return gradients by rank, [ranks, share]: without a copy where one has that form."""
        only = grads[0]
        if len(grads) == 1 and only is not None and only.numel() == world * self.share:
            return only.detach().to(dtype).contiguous().view(world, self.share)
        parts = self.parameters[0].padded.new_zeros(world, self.share, dtype=dtype)
        begin = 0
        for p, grad in zip(self.parameters, grads, strict=True):
            count = p.padded.numel()
            if grad is not None:
                flat = grad.reshape(-1)
                full = flat.numel() // count if count else 0
                parts[:full, begin : begin + count].copy_(flat[: full * count].view(full, count))
                at = full * count
                if at < flat.numel():
                    parts[full, begin : begin + flat.numel() - at].copy_(flat[at:])
            begin += count
        return parts
