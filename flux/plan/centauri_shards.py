"""Sharded parameters of Centauri's FSDP: where they lie, and how they travel.

A parameter [d, ...] is sharded along its first dimension as FSDP2 does it: rank r has rows r * c to
(r + 1) * c with c = ceil(d / W); the last ones may have fewer. Its whole tensor has room for W * c
rows, so that each rank's rows are one contiguous slice of it, into which they are received:

    mesh [2 hosts, 2 ranks]      whole of a weight: | r0 | r1 | r2 | r3 |      on rank 0
      between hosts   r2 arrives from rank 2, its twin              | r0 |    | r2 |    |
      inside          r1 and r3 arrive from rank 1                  | r0 | r1 | r2 | r3 |

So the permutation that gathering between hosts first leaves (``gathered_order``) costs no copy.
Small parameters of a unit travel together, and are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from flux.core.integers import ceil_div
from flux.plan.centauri_lanes import Done, Group, Lane


class Managed:
    """One parameter: its shard, and its whole tensor while that is there.

    Args:
        name: in the model.
        parameter: whole; its rows of this rank are kept.
        mesh: of one dimension: all ranks.
        dtype: of the whole tensor in forward and backward.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, mesh: DeviceMesh, dtype: torch.dtype | None
    ) -> None:
        self.name, self.shape = name, parameter.shape
        world, rank = mesh.size(), mesh.get_local_rank()
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
        self.sharded = nn.Parameter(self._dtensor(local), requires_grad=parameter.requires_grad)
        self.size = world * self.padded.numel()  # elements of the whole, with padding
        dtype = dtype if dtype is not None and source.is_floating_point() else source.dtype
        self.buffer = torch.empty(self.size, dtype=dtype, device=source.device)
        whole = self.buffer[: first * self.row].view(self.shape)
        self.whole = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self.free()

    def _dtensor(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self._stride
        )

    @property
    def local(self) -> torch.Tensor:
        """Rows of this rank: fewer than ``padded`` has on the last ones."""
        shard: Any = self.sharded
        tensor: torch.Tensor = shard.detach().to_local()
        return tensor

    def allocate(self) -> None:
        """Make room for the whole tensor; what autograd has saved of it refers to it again."""
        self.buffer.untyped_storage().resize_(self.size * self.buffer.element_size())

    def free(self) -> None:
        """Give the memory of the whole tensor back."""
        self.buffer.untyped_storage().resize_(0)

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add this rank's rows of a gradient, [rows * row], to the shard's."""
        count = self.local.numel()
        own = grad[:count].view(self.local.shape).to(self.padded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = self._dtensor(own.clone())
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
        self.done: Done | None = None
        self._together: torch.Tensor | None = None

    def start_gather(self, routes: Routes) -> None:
        """Begin to fill the whole tensors, which are allocated."""
        first = self.parameters[0]
        world = routes.inter.size * routes.intra.size
        if len(self.parameters) == 1:
            every = first.buffer.data.view(world, self.share)
            every[routes.rank].copy_(first.padded)
        else:
            every = first.buffer.new_empty(world, self.share)
            torch.cat([p.padded.to(every.dtype) for p in self.parameters], out=every[routes.rank])
            self._together = every
        self.done = routes.gather(self.label, every)

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
            grads: of the parameters, whole; None counts as zeros.
        """
        world = routes.inter.size * routes.intra.size
        first = self.parameters[0].buffer
        parts = first.new_zeros(world, self.share, dtype=dtype or first.dtype)
        begin = 0
        for p, grad in zip(self.parameters, grads, strict=True):
            count = p.padded.numel()
            if grad is not None:
                flat, at = grad.reshape(-1), 0
                full = flat.numel() // count if count else 0
                parts[:full, begin : begin + count].copy_(flat[: full * count].view(full, count))
                at = full * count
                if at < flat.numel():
                    parts[full, begin : begin + flat.numel() - at].copy_(flat[at:])
            begin += count
        return routes.scatter(self.label, parts)


class Routes:
    """The groups and lanes of AllGather and ReduceScatter, made once. Construction is collective.

    Gathers and reductions have lanes of their own, so neither waits behind the other.

    Args:
        mesh: [hosts, ranks of a host]: global ranks.
        gather_lanes: between hosts, and inside.
        scatter_lanes: between hosts, and inside.
        groups: makes the group of a list of global ranks that this one is in; collective.
    """

    def __init__(
        self,
        mesh: torch.Tensor,
        gather_lanes: tuple[Lane, Lane],
        scatter_lanes: tuple[Lane, Lane],
        groups: Callable[[list[list[int]]], Group],
    ) -> None:
        size = mesh.shape[1]
        rank = dist.get_rank()
        found = (mesh == rank).nonzero()[0].tolist()
        self.host, self.place = int(found[0]), int(found[1])
        self.rank = self.host * size + self.place
        self.gather_lanes, self.scatter_lanes = gather_lanes, scatter_lanes
        columns = [mesh[:, j].tolist() for j in range(size)]
        rows = mesh.tolist()
        # Sub-groups of gathers and of reductions: calls of two lanes must not meet.
        self.inter, self.inter_sum = groups(columns), groups(columns)
        self.intra, self.intra_sum = groups(rows), groups(rows)

    def gather(self, label: str, every: torch.Tensor) -> Done:
        """Begin an AllGather in place: between hosts, then inside.

        Args:
            label: for errors.
            every: [ranks, share], whose own slice is there.
        """
        grid = every.view(self.inter.size, self.intra.size, -1)
        hosts, inside = range(self.inter.size), range(self.intra.size)
        own_column = [[grid[h, self.place]] for h in hosts]
        columns = [[grid[h, j] for h in hosts] for j in inside]
        across, within = self.gather_lanes
        what = f"AllGather of {label}"
        first = across.submit(what, lambda: self.inter.gather(own_column))
        if self.intra.size == 1:
            return first
        return within.submit(what, lambda: self.intra.gather(columns), [first])

    def scatter(self, label: str, parts: torch.Tensor) -> tuple[Done, list[torch.Tensor]]:
        """Begin a ReduceScatter: inside, then between hosts; the sum will be in the list.

        Args:
            label: for errors.
            parts: [ranks, share].
        """
        grid = parts.view(self.inter.size, self.intra.size, -1)
        world = self.inter.size * self.intra.size
        sums: list[torch.Tensor] = []
        across, within = self.scatter_lanes
        what = f"ReduceScatter of {label}"

        def inside() -> None:
            permuted = grid.transpose(0, 1).contiguous()  # for each rank of this host, all hosts'
            sums.append(self.intra_sum.sum_parts(permuted))

        def between() -> None:
            total = self.inter_sum.sum_parts(sums.pop().contiguous())
            sums.append(total.div_(world))

        first = within.submit(what, inside)
        return across.submit(what, between, [first]), sums
