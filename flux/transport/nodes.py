"""Connect GPUs of several hosts: symmetric memory inside a host, NCCL between hosts.

A *node* is a set of ranks that share memory, as in symm_mem.py. Ranks of different nodes send and
receive by NCCL, through a communicator per op, so that the order of its operations depends on that
op only. The same code serves GPUs of one host without P2P: then every rank is a node.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flux import _C
from flux.core.errors import PeerTimeoutError
from flux.core.tensors import address_of
from flux.transport.base import Memory, Peers, sm_share
from flux.transport.device import Device
from flux.transport.exchange import Exchange
from flux.transport.symm_mem import SymmMem, own_device, say_if_ready

if TYPE_CHECKING:
    from flux.core.layout import Layout
    from flux.core.spec import OpSpec

NCCL = "libnccl.so.2"
"""The copy that torch has already loaded."""


_groups: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group of these global ranks. Collective among them.

    It is cached for later ops. Otherwise torch would give a new group the name of a destroyed one,
    and with it that group's remaining state. The cache lasts as long as the default group.
    """
    world = dist.group.WORLD
    of, group = _groups.get(members, (None, None))
    if group is None or of is not world:
        group = dist.new_group(list(members), use_local_synchronization=True)
        assert group is not None
        _groups[members] = (world, group)
    return group


class Nodes:
    """The ranks of one op, each with its own GPU. Construction is collective.

    Args:
        exchange: the op's process group.
        device: the GPU of this rank.
        nodes: number of nodes; consecutive ranks, equally many in each.
        timeout_s: how long peers may take to connect.

    Raises:
        ValueError: two ranks are on one GPU, which NCCL does not support; on all ranks.
        PeerTimeoutError: a rank of the node did not connect.
    """

    lane = 0
    acts_for_peers = False
    multicast = False  # not available between nodes
    relays = False  # NCCL is launched from the host, on streams

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
            group = exchange.within("make a group of a node", lambda: _group_of(members))
            self._inside = SymmMem(exchange.inside(group), device)

    def ready(self, problem: str | None) -> None:
        """Exchange whether each rank can run the op. Collective.

        Args:
            problem: why this rank cannot; None if it can.

        Raises:
            ValueError: a rank cannot; on all ranks.
        """
        say_if_ready(self.exchange, problem)

    def reason_no_adds(self) -> str | None:
        """Return a reason: ranks of other nodes have memory that this rank cannot address."""
        return f"ranks are on {self.nodes} nodes"

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Return zeroed memory that the ranks of a node have mapped. Collective."""
        if self._inside is not None:
            inside = self._inside.memory(words, data_bytes)
        else:
            pad = self.device.zeros(words, torch.int32)
            inside = Memory([pad], [self.device.zeros(data_bytes, torch.uint8)])
            self.device.synchronize()
        self._kept = inside

        def by_rank(of_node: list[torch.Tensor]) -> list[torch.Tensor]:
            empty = torch.empty(0, device="cpu")
            return [
                of_node[rank - self.node.start] if rank in self.node else empty
                for rank in range(self.world)
            ]

        return Memory(by_rank(inside.pads), by_rank(inside.data))

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote:
        """Return a communicator of all ranks; only the ranks of other nodes are used. Collective.

        Args:
            memory: the return value of ``memory``.
            boxes: words for what arrives in a call.
            blocks: blocks that NCCL may use.

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
                data=address_of(memory.data[self.rank]),
                blocks=blocks,
                timeout_ns=int(self.timeout_s * 1e9),
            )
        except _C.PeerLostError as error:
            raise PeerTimeoutError(f"{self.exchange.label}: rank {self.rank}: {error}") from error

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """Return peers that do nothing: real ranks act for themselves."""
        return Peers()

    def leave(self) -> None:
        """Release the memory."""
        if self._inside is not None:
            self._inside.leave()
            self._inside = None
        self._kept = None


def open_nodes(exchange: Exchange, nodes: int, timeout_s: float) -> Nodes:
    """Return the ranks of a process group, each on its current CUDA device. Collective.

    Raises:
        ValueError: a rank has no CUDA device, or NCCL is missing; on all ranks.
    """
    return Nodes(exchange, own_device(exchange, lacks_nccl), nodes, timeout_s)


def lacks_nccl() -> str:
    """Return why NCCL cannot be used; empty if it can."""
    try:
        ctypes.CDLL(NCCL)
    except OSError as error:
        return f"ranks that share no memory need NCCL: {error}"
    return ""
