"""Common part of the two ways to run a group on one GPU: ranks, their memory, shutdown.

``virtual.VirtualWorld`` has all ranks on the GPU, for correctness. ``loopback.LoopbackWorld`` has
rank 0 on it and its peers' memory behind PCIe, to measure time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from typing_extensions import Self

from flux import _C
from flux.transport.base import Memory, Peers
from flux.transport.device import QUEUES, CudaDevice, Device

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.core.layout import Layout
    from flux.core.spec import OpSpec

T = TypeVar("T")

CLOSE_S = 60.0


def most_ranks(queues: int = QUEUES, streams: int = 2) -> int:
    """Return the number of ranks that one GPU can hold.

    No two streams of a world may share a queue of the GPU, because streams wait for one another.

    Args:
        queues: of the GPU; one is the caller's, and one is spare.
        streams: of each rank.
    """
    return (queues - 2) // streams


@dataclass
class _Op:
    """An op while its ranks are built one by one."""

    what: dict[str, object]
    memory: Memory | None = None
    mail: list[torch.Tensor] = field(default_factory=list)
    members: set[int] = field(default_factory=set)


class OneGpuWorld:
    """``world`` ranks of one process that share a GPU, or of which one is on it.

    Attributes:
        transport: the name by which ops know it.
        nodes: number of sets of ranks that share memory.
        sm_share: multiprocessors that each rank's kernels may occupy.
    """

    transport: ClassVar[str]
    multicast: ClassVar[bool] = False  # there is no switch between ranks of one GPU
    relays: ClassVar[bool] = False
    acts_for_peers: ClassVar[bool] = False

    nodes = 1

    def __init__(self, world: int, least: int, device: Device | None, streams: int = 2) -> None:
        """Create the world.

        Args:
            world: number of ranks.
            least: least number of ranks.
            device: the GPU; the current CUDA device by default.
            streams: streams per rank.

        Raises:
            ValueError: ``world`` is out of range.
        """
        self.device = device or CudaDevice()
        most = most_ranks(self.device.queues, streams)
        if not least <= world <= most:
            raise ValueError(f"a {self.transport} world has {least} to {most} ranks, got {world}")
        self.world = world
        self._ops: list[_Op] = []
        self._built = [0] * world
        self._streams: list[int] = []

    @property
    def sm_share(self) -> int:
        """Multiprocessors that each rank's kernels may occupy."""
        raise NotImplementedError

    @property
    def real(self) -> range:
        """Ranks that have ops; the others are simulated."""
        return range(self.world)

    def reason_unsupported(self, spec: OpSpec, knobs: Knobs) -> str | None:
        """Return why the world cannot run such an op; None if it can."""
        if knobs.path == "unfused":
            return "path = unfused needs a process group"
        return None

    def new_stream(self) -> int:
        """Return a stream that lives as long as the world."""
        self._streams.append(self.device.driver.create_stream())
        return self._streams[-1]

    def finish(self, streams: Iterable[int]) -> None:
        """Wait for streams of the world.

        Raises:
            RuntimeError: work on them is not done after a minute.
        """
        deadline = time.monotonic() + CLOSE_S
        for stream in streams:
            while not self.device.driver.ready(stream):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"a {self.transport} world was closed while its ops wait: close those"
                    )
                time.sleep(0.0005)

    def close(self) -> None:
        """Destroy the streams once they are done. Idempotent; close the ops first.

        Raises:
            RuntimeError: work is not done after a minute: a rank with an open op waits for a call
                that another rank has not made.
        """
        while self._streams:
            self.finish(self._streams[-1:])
            self.device.driver.destroy_stream(self._streams.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- interface for ops -------------------------------------------------------------------------

    def join_op(self, rank: int, label: str, what: Mapping[str, object]) -> int:
        """Take part in the construction of the rank's next op; return the op's number.

        Raises:
            ValueError: an earlier rank built something else.
        """
        number = self._built[rank]
        if number == len(self._ops):
            self._ops.append(_Op(dict(what)))
        first = self._ops[number]
        for key, value in what.items():
            if first.what.get(key) != value:
                raise ValueError(
                    f"{label}: ranks disagree; rank {rank} has {key} = {value!r} "
                    f"(before: {first.what.get(key)!r})"
                )
        self._built[rank] += 1
        first.members.add(rank)
        return number

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        """Return the symmetric memory of an op, allocated for all ranks at the first request."""
        op = self._ops[number]
        if op.memory is None:
            ranks = range(self.world)
            pads = [self._allocate(rank, words, torch.int32) for rank in ranks]
            data = [self._allocate(rank, data_bytes, torch.uint8) for rank in ranks]
            op.memory = Memory(pads, data)
        return op.memory

    def _allocate(self, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory of a rank that all ranks can write to."""
        return self.device.zeros(count, dtype)

    def mail(self, number: int) -> list[torch.Tensor]:
        """Return, by rank, an op's words by which ranks of different nodes signal arrivals."""
        return self._ops[number].mail

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote | None:
        """Return the connection of a rank to other nodes; None here.

        ``memory``: the op's memory, as the rank sees it.
        """
        return None

    def peers(
        self, number: int, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory
    ) -> Peers:
        """Return the object that acts for the peers. ``tile``: of the op's kernel, in elements."""
        return Peers()

    def leave_op(self, number: int, rank: int) -> None:
        """Release a rank's part of an op; the last one frees its memory."""
        op = self._ops[number]
        op.members.discard(rank)
        if not op.members:
            op.memory = None
            op.mail.clear()


@dataclass(frozen=True)
class OneGpuRank:
    """One rank of such a world; passed in place of a process group."""

    of: OneGpuWorld
    number: int


class OneGpuExchange:
    """The exchange of an op that is built on one GPU; ranks are built one after the other."""

    def __init__(self, rank: OneGpuRank, label: str) -> None:
        self.of = rank.of
        self.rank = self.lane = rank.number
        self.world = rank.of.world
        self.label = label
        self.multicast = rank.of.multicast
        self.relays = rank.of.relays
        self.acts_for_peers = rank.of.acts_for_peers
        self.op = -1

    @property
    def nodes(self) -> int:
        """Number of sets of ranks that share memory."""
        return self.of.nodes

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, which are equal in one process."""
        return [value] * self.world

    def agree(self, problem: Exception | None, spec: Mapping[str, object]) -> None:
        """Check that this rank builds what earlier ranks did.

        Raises:
            ValueError: the arguments differ or were rejected.
            TypeError: the arguments were rejected with a TypeError.
        """
        if problem is not None:
            raise problem
        self.op = self.of.join_op(self.rank, self.label, spec)

    @property
    def device(self) -> Device:
        """The device of the rank, real or simulated."""
        return self.of.device

    @property
    def sm_share(self) -> int:
        """Multiprocessors that the rank's kernels may occupy."""
        return self.of.sm_share

    def ready(self, problem: str | None) -> None:
        """Raise ValueError if the rank cannot run the op. Each other rank checks for itself."""
        if problem is not None:
            raise ValueError(problem)

    def reason_no_adds(self) -> str | None:
        """Return None: all memory is the GPU's own."""
        return None

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Return the symmetric memory of the op, empty for ranks of other nodes."""
        everybody = self.of.memory(self.op, words, data_bytes)
        lanes = self.world // self.nodes
        node = range(self.rank // lanes * lanes, (self.rank // lanes + 1) * lanes)

        def here(of_all: list[torch.Tensor]) -> list[torch.Tensor]:
            return [t if r in node else torch.empty(0, device="cpu") for r, t in enumerate(of_all)]

        return Memory(here(everybody.pads), here(everybody.data), everybody.multicast)

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """Return the connection to peers of other nodes."""
        return self.of.remote(self.op, self.rank, memory, boxes)

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """Return the object that acts for the peers."""
        return self.of.peers(self.op, spec, layout, tile, memory)

    def leave(self) -> None:
        """Release the rank's part of the op."""
        self.of.leave_op(self.op, self.rank)
