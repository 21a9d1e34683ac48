"""AllGather of weights and ReduceScatter of gradients: between hosts, and inside them.

AllGather of a unit's weights:

    enter    all ranks meet, or, where ranks of a host share memory, these: they gather the same
             unit, and it is free on all of them
    across   each rank exchanges its shard with its twins on other hosts
    within   ranks of a host exchange columns; or they meet again (where they share memory)

ReduceScatter of gradients is within, across, and then AllReduce over the replicas if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from flux.runtime.centauri.lanes import Done, Group, Lane
from flux.runtime.centauri.memory import HostMemory

PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda mesh: mesh.transpose(1, 2).flatten(0, 1),  # twins on different hosts
    "rows": lambda mesh: mesh.flatten(0, 1),  # ranks of a host
    "replicas": lambda mesh: mesh.flatten(1).T,  # ranks that hold the same shard
    "shards": lambda mesh: mesh.flatten(1),  # ranks among which a replica is sharded
    "everyone": lambda mesh: mesh.flatten(0).unsqueeze(0),
}
"""Ranks of each part of a mesh [replicas, hosts, ranks of a host]."""


class Groups:
    """Makes process groups of parts of meshes. Every call is collective for the world.

    All ranks of the world make the groups of all meshes, in one order, as ``dist.new_group`` wants.
    """

    def __init__(self, layouts: Sequence[torch.Tensor], timeout: timedelta) -> None:
        self._layouts, self._timeout = layouts, timeout
        self._made: list[dist.ProcessGroup] = []

    def _new(self, parts: str, ways: int = 1, least: int = 1) -> list[dist.ProcessGroup]:
        """Make ``ways`` groups of each part with at least ``least`` ranks; return this rank's."""
        mine: list[dist.ProcessGroup] = []
        every = (ranks for layout in self._layouts for ranks in PARTS[parts](layout).tolist())
        for ranks in (ranks for ranks in every if len(ranks) >= least):
            made = [dist.new_group(ranks, self._timeout) for _ in range(ways)]
            mine = made if dist.get_rank() in ranks else mine
        return mine

    def lane(self, parts: str) -> Group:
        """Return the group of a lane, of the part that this rank is in."""
        ways = 2 if dist.get_backend() == "gloo" else 1
        mine = self._new(parts, ways, least=2)
        self._made += mine
        return Group(mine[0] if mine else None, self._timeout, mine[1] if len(mine) > 1 else None)

    def device_mesh(self, layout: torch.Tensor, device_type: str, replicate: bool) -> DeviceMesh:
        """Return the mesh of the shards: of one dimension, or of two with replicas in front.

        Its groups stay after ``close``: optimizers and checkpoints of the shards use them.
        """
        whole = layout.numel() == dist.get_world_size() and len(layout) == 1
        world: Any = dist.group.WORLD
        group = world if whole else self._new("shards")[0]
        if not replicate:
            return DeviceMesh.from_group(group, device_type)
        (twins,) = self._new("replicas")
        names = ("replicas", "shards")
        return DeviceMesh.from_group(
            [twins, group], device_type, layout.flatten(1), mesh_dim_names=names
        )

    def close(self) -> None:
        """Destroy the groups of lanes."""
        made, self._made = self._made, []
        for group in made:
            dist.destroy_process_group(group)


class Routes:
    """The groups and lanes of AllGather and ReduceScatter, made once. Construction is collective.

    Gathers and reductions have lanes of their own, so neither waits for the other.

    Args:
        mesh: [replicas, hosts, ranks of a host]: global ranks.
        gather_lanes: between hosts, and inside.
        scatter_lanes: between hosts, and inside.

    Attributes:
        memory: what the ranks of a host share; None: nothing.
    """

    def __init__(
        self,
        mesh: torch.Tensor,
        gather_lanes: tuple[Lane, Lane],
        scatter_lanes: tuple[Lane, Lane],
        groups: Groups,
        on_cuda: bool,
    ) -> None:
        self.on_cuda = on_cuda
        _, hosts, size = mesh.shape
        _, self.host, self.place = (mesh == dist.get_rank()).nonzero()[0].tolist()
        self.rank, self.world = self.host * size + self.place, hosts * size
        self.gather_lanes, self.scatter_lanes = gather_lanes, scatter_lanes
        # Sub-groups of gathers and of reductions: calls of two lanes must not meet.
        self.inter, self.inter_sum = groups.lane("columns"), groups.lane("columns")
        self.intra, self.intra_sum = groups.lane("rows"), groups.lane("rows")
        self.entered = groups.lane("rows")
        self.everyone = groups.lane("everyone")
        self.copies = groups.lane("replicas")
        self.memory: HostMemory | None = None

    def agree(self, what: str, values: torch.Tensor) -> torch.Tensor:
        """Return which values differ between ranks of the mesh. All ranks call it, and wait."""
        differing: list[torch.Tensor] = []
        task = lambda: differing.append(self.everyone.differing(values))  # noqa: E731
        self.gather_lanes[0].submit(f"agreement on {what}", task).wait()
        return differing[0]

    def enter(self, number: int, label: str) -> None:
        """Let gathers that follow begin when all ranks have freed the unit and ask for it.

        Where ranks ask for different units, their gathers fail: each would take the other's bytes
        for its own.
        """
        if self.on_cuda:  # the host would wait for the stream
            return

        # Weights that a host shares stay until the next call, and are gathered once in each.
        group = self.everyone if self.memory is None else self.entered

        def same() -> None:
            if group.differing(torch.tensor([number])).any():
                raise ValueError(
                    "other ranks gather another unit now. One that runs again after it was freed, "
                    "on some ranks only, needs RuntimePlan(reshard_after_forward=False)"
                )

        self.gather_lanes[0].submit(f"AllGather of {label}", same)

    def gather(
        self, label: str, every: torch.Tensor, own: Sequence[torch.Tensor], rooms: Sequence[int]
    ) -> Done:
        """Begin an AllGather in place: between hosts, then inside.

        ``every`` is [ranks, share], where it goes; ``own`` are this rank's shards, ``rooms`` the
        elements of each there, one after the other. The last ranks fill fewer.
        """
        grid = every.view(self.inter.size, self.intra.size, -1)
        hosts, inside = range(self.inter.size), range(self.intra.size)
        own_column = [[grid[h, self.place]] for h in hosts]
        columns = [[grid[h, j] for h in hosts] for j in inside]
        across, within = self.gather_lanes
        what = f"AllGather of {label}"

        def between() -> None:
            begin = 0
            for shard, room in zip(own, rooms, strict=True):
                every[self.rank, begin : begin + shard.numel()].copy_(shard.reshape(-1))
                begin += room
            self.inter.gather(own_column)

        first = across.submit(what, between)
        if self.intra.size == 1:
            return first
        if self.memory is not None:
            return within.submit(what, self.intra.meet, [first])
        return within.submit(what, lambda: self.intra.gather(columns), [first])

    def average(self, what: str, values: torch.Tensor) -> torch.Tensor:
        """Return the means of values over all ranks, when the reductions before have ended."""
        done, sums = self.scatter(what, values.expand(self.world, -1).contiguous())
        done.wait()
        return sums[0].cpu()

    def scatter(self, what: str, parts: torch.Tensor) -> tuple[Done, list[torch.Tensor]]:
        """Begin a ReduceScatter: inside, then between hosts; the mean will be in the list."""
        grid = parts.view(self.inter.size, self.intra.size, -1)
        scale = 1.0 / (self.world * self.copies.size)
        sums: list[torch.Tensor] = []
        across, within = self.scatter_lanes

        def inside() -> None:
            if self.memory is not None:
                sums.append(self.memory.sum_columns(grid, self.intra_sum.meet))
            elif self.intra.size == 1:
                sums.append(grid[:, 0])
            else:
                permuted = grid.transpose(0, 1).contiguous()  # for each rank of this host
                sums.append(self.intra_sum.sum_parts(permuted))

        def between() -> None:
            total = self.inter_sum.sum_parts(sums.pop(), scale)
            self.copies.add_up(total)
            sums.append(total)

        first = within.submit(what, inside)
        return across.submit(what, between, [first]), sums
