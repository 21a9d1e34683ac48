"""What the two ways to run a group on one GPU have in common: ranks, their memory, its end.

``virtual.VirtualWorld`` has all ranks on the GPU, for correctness. ``loopback.LoopbackWorld`` has
rank 0 there and its peers' memory behind PCIe, for time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from typing_extensions import Self

from flux import _C
from flux.backends.device import QUEUES, CudaDevice, Device
from flux.transport.device import Memory, Peers

if TYPE_CHECKING:
    from flux.backends.layout import Layout
    from flux.knobs import Knobs
    from flux.ops.spec import OpSpec

T = TypeVar("T")

CLOSE_S = 60.0


def most_ranks(queues: int = QUEUES, streams: int = 2) -> int:
    """Ranks that one GPU can hold. Of its queues, no two streams of a world may share one: they
    wait.

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
    """``world`` ranks of one process that share a GPU, or have one of them on it.

    Attributes:
        transport: the name that ops know it by.
        nodes: how many sets of ranks there are that share memory.
        sm_share: multiprocessors that each rank's kernels may occupy.
    """

    transport: ClassVar[str]
    multicast: ClassVar[bool] = False  # there is no switch between ranks of one GPU
    relays: ClassVar[bool] = False

    nodes = 1

    def __init__(self, world: int, least: int, device: Device | None, streams: int = 2) -> None:
        """Raises ValueError for a ``world`` that is out of range."""
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
        raise NotImplementedError

    @property
    def real(self) -> range:
        """Ranks that have ops; others are played."""
        return range(self.world)

    def why_not(self, spec: OpSpec, knobs: Knobs) -> str | None:
        """Why the world cannot run such an op; None if it can."""
        if knobs.path == "unfused":
            return "path = unfused needs a process group"
        return None

    def new_stream(self) -> int:
        """A stream that lives as long as the world."""
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
        """Give the streams back, when they are done. Idempotent; close the ops first.

        Raises:
            RuntimeError: work on them is not done after a minute, since a rank waits for a call
                that another has not made, and its op is still open.
        """
        while self._streams:
            self.finish(self._streams[-1:])
            self.device.driver.destroy_stream(self._streams.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- what ops ask for --------------------------------------------------------------------------

    def join_op(self, rank: int, label: str, what: Mapping[str, object]) -> int:
        """Take part in the construction of the rank's next op; its number.

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
        """The symmetric memory of an op: made for all ranks by the first that asks."""
        op = self._ops[number]
        if op.memory is None:
            ranks = range(self.world)
            pads = [self._allocate(rank, words, torch.int32) for rank in ranks]
            data = [self._allocate(rank, data_bytes, torch.uint8) for rank in ranks]
            op.memory = Memory(pads, data)
        return op.memory

    def _allocate(self, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of a rank that all ranks can write to."""
        return self.device.zeros(count, dtype)

    def mail(self, number: int) -> list[torch.Tensor]:
        """Words of an op by which ranks of different nodes tell each other what came; by rank."""
        return self._ops[number].mail

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote | None:
        """The peers of a rank on other nodes. ``memory``: of the op, as the rank has it."""
        return None

    def peers(
        self, number: int, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory
    ) -> Peers:
        """What is done for the peers of an op's ranks. ``tile``: of its kernel, in elements."""
        return Peers()

    def leave_op(self, number: int, rank: int) -> None:
        """Give up a rank's part of an op; the last one frees its memory."""
        op = self._ops[number]
        op.members.discard(rank)
        if not op.members:
            op.memory = None
            op.mail.clear()


@dataclass(frozen=True)
class OneGpuRank:
    """One rank of such a world; takes the place of a process group."""

    of: OneGpuWorld
    number: int


class OneGpuExchange:
    """What an op asks of its group while it is built; ranks come one after the other."""

    def __init__(self, rank: OneGpuRank, label: str) -> None:
        self.of = rank.of
        self.rank = rank.number
        self.world = rank.of.world
        self.label = label
        self.multicast = rank.of.multicast
        self.relays = rank.of.relays
        self.op = -1

    @property
    def nodes(self) -> int:
        """How many sets of ranks there are that share memory."""
        return self.of.nodes

    def all_gather(self, value: T) -> list[T]:
        """Everybody's value: the same for ranks of one process."""
        return [value] * self.world

    def agree(self, label: str, problem: Exception | None, spec: Mapping[str, object]) -> None:
        """Check that this rank builds what earlier ranks did.

        Raises:
            ValueError, TypeError: the arguments were refused, or differ.
        """
        if problem is not None:
            raise problem
        self.op = self.of.join_op(self.rank, label, spec)

    @property
    def device(self) -> Device:
        """Where the rank lives, or is played."""
        return self.of.device

    @property
    def sm_share(self) -> int:
        """Multiprocessors that its kernels may occupy."""
        return self.of.sm_share

    def ready(self, problem: str | None) -> None:
        """Raises ValueError: the rank cannot run the op. The others find out by themselves."""
        if problem is not None:
            raise ValueError(problem)

    def memory(self, words: int, data_bytes: int) -> Memory:
        """The symmetric memory of the op."""
        everybody = self.of.memory(self.op, words, data_bytes)
        lanes = self.world // self.nodes
        node = range(self.rank // lanes * lanes, (self.rank // lanes + 1) * lanes)

        def here(of_all: list[torch.Tensor]) -> list[torch.Tensor]:
            return [t if r in node else torch.empty(0) for r, t in enumerate(of_all)]

        return Memory(here(everybody.pads), here(everybody.data), everybody.multicast)

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """The peers of other nodes."""
        return self.of.remote(self.op, self.rank, memory, boxes)

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """What is done for the peers."""
        return self.of.peers(self.op, spec, layout, tile, memory)

    def leave(self) -> None:
        """Give up the rank's part of the op."""
        self.of.leave_op(self.op, self.rank)
