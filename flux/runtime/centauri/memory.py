"""Memory that the ranks of one host share: whole weights once per host, and slots for gradients.

Over loopback TCP a byte between two ranks of a host is copied into the kernel and out of it, and
each rank keeps weights of its own. Here the ranks of a host map the same pages: what one of them
receives from its twin on another host is there for all, and a gradient is read where the other
rank has put it. Only words travel through gloo: the ranks that have arrived.

**Order of memory accesses.** A *meeting* is one byte from each rank of the host to each other one.
A rank sends it after its stores and reads after it has received all of them. Sender and receiver
take the lock of the socket in the kernel, so stores before a meeting are visible after it. Stores
of a lane's thread follow the program's by the lock of the lane's queue.

**Reuse of weights.** The region of a chunk is written by the ranks of the host and by their twins,
each its column. Before a unit's gather all ranks of the host meet (``enter``). A rank takes part
when its program asks for the gather, which it does only while the unit is free, so after its last
read. A twin's bytes arrive in a receive that is posted after that meeting. After the second
meeting, when all columns are there, ranks only read until they free the unit again.

**Reuse of slots.** Each rank has two slots, and piece k of the sums is in slot k modulo 2. Ranks
write their slot, meet, and read the others'. Slot k modulo 2 was read for piece k - 2; a rank joins
the meeting of piece k - 1 only after that, and piece k is written after that meeting. Reductions
have one lane, so pieces come one after the other, on all ranks in the same order.

A rank that is killed sends no word, so the others wait until gloo or the timeout raises, and read
nothing that is half written. The files have no name (``flux.transport.shm``): nothing remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flux import _C
from flux.core.problem import DTYPES, round_up
from flux.core.tensors import address_of
from flux.machine.host import memory_identity
from flux.transport import shm
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.placement import Placement

SLOT_BYTES = 4 << 20
"""Of a slot. A piece of a sum that stays in the cache until the other ranks have read it."""
_ALIGNMENT = 64


class HostMemory:
    """Regions for whole weights, and two slots of each rank. Construction is collective.

    Raises:
        OSError: on every rank of the host: there is not enough room in /dev/shm.
    """

    def __init__(self, exchange: Exchange, sizes: Sequence[int]) -> None:
        self.place, self.count = exchange.rank, exchange.world
        ends = [2 * SLOT_BYTES] * self.count
        self._regions: list[tuple[int, int, int]] = []  # (segment, begin, bytes)
        for size in sizes:
            segment = ends.index(min(ends))
            self._regions.append((segment, ends[segment], size))
            ends[segment] = round_up(ends[segment] + size, _ALIGNMENT)
        memory = shm.allocate(
            exchange, Placement.together(self.count), 0, max(ends), "weights of a host"
        )
        memory.processes.close()  # gloo tells of ranks that have died
        self._data = memory.data
        self._pieces = 0

    def region(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a region as a flat tensor with a storage of its own."""
        segment, begin, size = self._regions[number]
        return self._view(segment, begin, size, dtype)

    def _view(self, segment: int, begin: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=dtype)
        # Through a buffer, since a slice of a tensor has the storage of all of it.
        buffer = self._data[segment][begin : begin + size].numpy()
        return torch.frombuffer(buffer, dtype=dtype)

    def sum_columns(self, parts: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
        """Return the sum over this host's ranks of this rank's column: [hosts, share].

        ``parts`` is [hosts, ranks of a host, share]: of this rank, for all. ``meet`` waits for all
        ranks of the host.
        """
        hosts, count, share = parts.shape
        out = parts.new_empty(hosts, share)
        room = SLOT_BYTES // (parts.element_size() * hosts * (count - 1))
        if room == 0:
            raise ValueError(f"a slot of {SLOT_BYTES} bytes is too small for {hosts} hosts")
        for begin in range(0, share, room):
            piece = parts[:, :, begin : begin + room]
            slots = [
                self._view(rank, self._pieces % 2 * SLOT_BYTES, SLOT_BYTES, parts.dtype)
                for rank in range(count)
            ]
            self._pieces += 1
            width = piece.shape[2]
            shapes = [s[: (count - 1) * hosts * width].view(-1, hosts, width) for s in slots]
            for place in range(count):
                if place != self.place:
                    shapes[self.place][place - (place > self.place)].copy_(piece[:, place])
            meet()
            column = [
                piece[:, self.place]
                if rank == self.place
                else shapes[rank][self.place - (self.place > rank)]
                for rank in range(count)
            ]
            for host in range(hosts):
                into = out[host, begin : begin + width]
                add_up(into, [of[host] for of in column])
        return out


def add_up(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Store the sum of contiguous tensors, in their order; of halves in float32, rounded once."""
    dtype = DTYPES.get(str(out.dtype).removeprefix("torch."))
    if dtype is None or dtype.native is None:
        raise ValueError(f"gradients of {out.dtype} cannot be added up")
    if out.numel():
        pointers = [address_of(source) for source in sources]
        _C.reduce(dtype.native, pointers, address_of(out), 0, 1, out.numel(), scale)


def share_memory(
    wanted: bool | None, row: dist.ProcessGroup, sizes: Sequence[int], timeout_s: float
) -> HostMemory | str:
    """Return what the ranks of this host share, or why not. Collective over all ranks.

    All hosts decide alike. ``wanted``: see ``RuntimePlan.shared_memory``.

    Raises:
        ValueError: memory is wanted, and a row of the mesh cannot share it.
        OSError: memory is wanted, and /dev/shm of a host has too little of it.
    """
    everybody = Exchange(resolve_group(None), "flux.runtime.centauri", timeout_s)
    inside = Exchange(row, "flux.runtime.centauri", timeout_s)
    same_host = len(set(inside.all_gather(memory_identity()))) == 1
    if not all(everybody.all_gather(same_host)):
        why = "ranks of one row of the mesh are on several hosts, or cannot map each other's memory"
        if wanted:
            raise ValueError(f"shared_memory: {why}")
        return why
    memory: HostMemory | None = None
    failure: OSError | None = None
    try:
        memory = HostMemory(inside, sizes)
    except OSError as error:
        failure = error
    failures = [message for message in everybody.all_gather(failure and str(failure)) if message]
    if memory is not None and not failures:
        return memory
    if wanted:
        raise failure or OSError(failures[0])
    return failures[0]
