"""Connect GPUs of one host by torch's symmetric memory (NVLink or PCIe), a process per GPU.

Every rank allocates pad and data in one piece, which ``torch.distributed._symmetric_memory`` maps
into the address spaces of its peers. After that, torch.distributed is not involved: copies, signals
and kernels use the peers' addresses. All uses of unstable parts of torch are in ``_map_everywhere``
and ``_has_multicast``.

Several ranks may share a GPU, for tests. torch then needs
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, and the processes take turns, so no communication is
hidden.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flux import _C
from flux.core.problem import round_up
from flux.transport.base import Memory, Peers, sm_share
from flux.transport.device import CudaDevice, Device
from flux.transport.exchange import Exchange

if TYPE_CHECKING:
    from flux.core.layout import Layout
    from flux.core.spec import OpSpec

WORD = 4
ALIGNMENT = 256  # bytes; of data behind the pad


class SymmMem:
    """The ranks of one op, normally with a GPU each. Construction is collective.

    Args:
        exchange: the op's process group.
        device: the GPU of this rank.
    """

    nodes = 1
    lane = 0
    acts_for_peers = False
    relays = False

    def __init__(self, exchange: Exchange, device: Device) -> None:
        self.exchange = exchange
        self.rank, self.world = exchange.rank, exchange.world
        self.device = device
        self._identities = everybody = exchange.all_gather(device.identity)
        self.sm_share = sm_share(device, everybody.count(device.identity))
        # A device cannot be added to a multicast group twice: torch may raise if ranks share a
        # device.
        apart = len(set(everybody)) == self.world
        self.multicast = apart and self._find_multicast()
        self._kept: Any = None

    def _find_multicast(self) -> bool:
        """Return whether symmetric memory of the group gets a multicast address. Collective.

        The devices may support multicast although the group does not: its ranks may not all be
        behind one NVLink switch. So a small allocation is tried.
        """
        if not all(self.exchange.all_gather(_has_multicast(self.device))):
            return False
        (_, handle), _ = _map_everywhere(self.exchange, self.device, ALIGNMENT)
        return all(self.exchange.all_gather(handle.multicast_ptr != 0))

    def ready(self, problem: str | None) -> None:
        """Exchange whether each rank can run the op. Collective.

        Args:
            problem: why this rank cannot; None if it can.

        Raises:
            ValueError: a rank cannot; on all ranks.
        """
        say_if_ready(self.exchange, problem)

    def reason_no_adds(self) -> str | None:
        """Return why this rank's kernels cannot add in the memory of all peers; None if they can.

        Over PCIe atomic operations on a peer's memory are lost, or a fault. A GPU that this process
        does not see (CUDA_VISIBLE_DEVICES) cannot be asked about.
        """
        for rank, identity in enumerate(self._identities):
            if identity == self.device.identity:
                continue
            native = self.device.peer_atomics(identity)
            if native is None:
                return f"this process does not see the GPU of rank {rank}, to ask for atomics"
            if not native:
                return f"there are no native atomic operations on the GPU of rank {rank}"
        return None

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Return zeroed memory that all ranks have mapped. Collective."""
        pad = round_up(words * WORD, ALIGNMENT)
        size = pad + round_up(max(data_bytes, 1), ALIGNMENT)
        self._kept, buffers = _map_everywhere(self.exchange, self.device, size)
        multicast = self._kept[1].multicast_ptr + pad if self.multicast else 0
        buffers[self.rank].zero_()
        self.device.synchronize()
        self.exchange.all_gather(True)  # no rank may write to memory that is still being zeroed
        return Memory(
            [buffer[: words * WORD].view(torch.int32) for buffer in buffers],
            [buffer[pad : pad + data_bytes] for buffer in buffers],
            multicast,
        )

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """Return None: there are no other nodes."""
        return None

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """Return peers that do nothing: real ranks act for themselves."""
        return Peers()

    def leave(self) -> None:
        """Release the memory; torch unmaps it with the last tensor."""
        self._kept = None


def say_if_ready(exchange: Exchange, problem: str | None) -> None:
    """Exchange whether each rank has a problem; raise on all ranks if one has. Collective.

    Args:
        exchange: the op's process group.
        problem: of this rank; None if it has none.

    Raises:
        ValueError: a rank has a problem; on all ranks.
    """
    for rank, text in enumerate(exchange.all_gather(problem or "")):
        if text:
            raise ValueError(text if rank == exchange.rank else f"rank {rank} refused: {text}")


def own_device(exchange: Exchange, lacks: Callable[[], str] = str) -> Device:
    """Return this rank's current CUDA device. Collective.

    Args:
        exchange: the op's process group.
        lacks: returns what else this rank lacks; empty if nothing.

    Raises:
        ValueError: a rank has no CUDA device, or lacks something; on all ranks.
    """
    device, problem = None, ""
    try:
        device = CudaDevice(queues=None)
        problem = lacks()
    except RuntimeError as error:
        problem = str(error)
    problems = exchange.all_gather(problem)
    for rank, text in enumerate(problems):
        if text:
            raise ValueError(f"{exchange.label}: rank {rank}: {text}")
    assert device is not None
    return device


def open_symm_mem(exchange: Exchange) -> SymmMem:
    """Return the ranks of a process group, each on its current CUDA device. Collective.

    Raises:
        ValueError: a rank has no CUDA device; on all ranks.
    """
    return SymmMem(exchange, own_device(exchange))


def _has_multicast(device: Device) -> bool:
    """Return whether a device can take part in a multicast group (NVLink SHARP)."""
    if device.torch_device.type != "cuda":
        return False
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    kind: Any = importlib.import_module("torch._C._autograd").DeviceType.CUDA
    return bool(c10d._SymmetricMemory.has_multicast_support(kind, device.index))


def _map_everywhere(
    exchange: Exchange, device: Device, size: int
) -> tuple[Any, list[torch.Tensor]]:
    """Allocate ``size`` bytes on every rank and map them on all ranks. Collective.

    The memory is an allocation of its own. Since torch 2.11 ``symmetric.empty`` takes it from a
    pool, which reuses freed blocks: different blocks on different ranks, so that buffers of
    different ops are paired (pytorch #190977), and parts of blocks, whose offset ``get_buffer``
    ignores.

    Returns:
        (objects that must live as long as the memory, each rank's memory as this rank addresses
        it).
    """
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    own = c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device.torch_device)
    # Without this, rendezvous would wait half an hour for a rank without memory.
    exchange.all_gather(None)
    handle = symmetric.rendezvous(own, exchange.group.group_name)
    ranks = range(exchange.world)
    buffers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in ranks]
    return (own, handle), buffers
