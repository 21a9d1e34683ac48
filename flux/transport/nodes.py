"""Ranks on the GPUs of several hosts: symmetric memory inside a host, NCCL between them.

A *node* is a set of ranks that share memory, as symm_mem.py has it. Ranks of different nodes send
and receive by NCCL, through a communicator of the op's own, so that its order of operations is the
op's alone. The same serves GPUs of one host that have no P2P: then every rank is a node.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.device import Device
from flux.errors import PeerTimeoutError
from flux.transport.device import Memory, Peers, sm_share
from flux.transport.exchange import Exchange
from flux.transport.symm_mem import SymmMem, own_device, say_if_ready

if TYPE_CHECKING:
    from flux.backends.layout import Layout
    from flux.ops.spec import OpSpec

NCCL = "libnccl.so.2"
"""As torch has loaded it already."""


_groups: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group of these global ranks. Collective among them.

    It is kept for later ops, as torch gives a new one the name of one that was destroyed, and what
    that has left behind; it goes with the default group.
    """
    world = dist.group.WORLD
    of, group = _groups.get(members, (None, None))
    if group is None or of is not world:
        group = dist.new_group(list(members), use_local_synchronization=True)
        assert group is not None
        _groups[members] = (world, group)
    return group


class Nodes:
    """One op's ranks, each with a GPU of its own. Construction is collective.

    Args:
        exchange: the op's process group.
        device: where this rank lives.
        nodes: how many nodes; consecutive ranks, as many in each.
        timeout_s: how long peers may take to connect.

    Raises:
        ValueError: two ranks are on one GPU, which NCCL does not serve; on all ranks.
    """

    multicast = False  # not between nodes
    relays = False  # NCCL is driven by streams

    def __init__(self, exchange: Exchange, device: Device, nodes: int, timeout_s: float) -> None:
        self.exchange = exchange
        self.rank, self.world = exchange.rank, exchange.world
        self.device = device
        self.nodes = nodes
        self.timeout_s = timeout_s
        self.sm_share = sm_share(device, 1)
        everybody = exchange.all_gather(device.identity)
        for rank, identity in enumerate(everybody):
            if everybody.index(identity) < rank:
                raise ValueError(
                    f"{exchange.label}: NCCL needs a GPU for each rank, and ranks "
                    f"{everybody.index(identity)} and {rank} are both on {identity}"
                )
        lanes = self.world // nodes
        first = self.rank // lanes * lanes
        self.node = range(first, first + lanes)
        self._inside: SymmMem | None = None
        self._kept: Memory | None = None
        if lanes > 1:
            members = tuple(dist.get_global_rank(exchange.group, rank) for rank in self.node)
            self._inside = SymmMem(Exchange(_group_of(members), exchange.label), device)

    def ready(self, problem: str | None) -> None:
        """Hear of ranks that cannot run the op. Collective.

        Raises:
            ValueError: some rank cannot; on all ranks.
        """
        say_if_ready(self.exchange, problem)

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Zeroed memory that the ranks of a node have mapped. Collective."""
        if self._inside is not None:
            inside = self._inside.memory(words, data_bytes)
        else:
            pad = self.device.zeros(words, torch.int32)
            inside = Memory([pad], [self.device.zeros(data_bytes, torch.uint8)])
            self.device.synchronize()
        self._kept = inside

        def by_rank(of_node: list[torch.Tensor]) -> list[torch.Tensor]:
            empty = torch.empty(0)
            return [
                of_node[rank - self.node.start] if rank in self.node else empty
                for rank in range(self.world)
            ]

        return Memory(by_rank(inside.pads), by_rank(inside.data))

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote:
        """A communicator of all ranks, of which those of other nodes are used. Collective.

        Raises:
            PeerTimeoutError: a rank did not connect.
        """
        own = _C.nccl_unique_id(NCCL) if self.rank == 0 else b""
        identifier = self.exchange.all_gather(own)[0]
        try:
            return _C.NcclRemote(
                driver=self.device.driver,
                library=NCCL,
                id=identifier,
                rank=self.rank,
                world=self.world,
                data=memory.data[self.rank].data_ptr(),
                blocks=blocks,
                timeout_ns=int(self.timeout_s * 1e9),
            )
        except _C.PeerLostError as error:
            raise PeerTimeoutError(f"{self.exchange.label}: rank {self.rank}: {error}") from error

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """They act for themselves."""
        return Peers()

    def leave(self) -> None:
        """Let go of the memory."""
        if self._inside is not None:
            self._inside.leave()
            self._inside = None
        self._kept = None


def open_nodes(exchange: Exchange, nodes: int, timeout_s: float) -> Nodes:
    """The ranks of a process group, each on its current CUDA device. Collective.

    Raises:
        ValueError: a rank has no CUDA device, or NCCL is not there; on all ranks.
    """
    return Nodes(exchange, own_device(exchange, lacks_nccl), nodes, timeout_s)


def lacks_nccl() -> str:
    """Why NCCL cannot be used; empty if it can."""
    try:
        ctypes.CDLL(NCCL)
    except OSError as error:
        return f"ranks that share no memory need NCCL: {error}"
    return ""
