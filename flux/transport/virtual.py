"""Ranks of one process on one GPU: the real kernels and copies, without a second device.

For correctness, and for anyone who has a single card. Every rank gets a stream of its own and an
equal share of the multiprocessors, so that kernels which wait cannot keep those from running that
they wait for. Ops are built and called rank after rank, from one thread:

    world = VirtualWorld(4)
    ops = [flux.AGGemm(world.rank(r), max_m=8192, n=8192, k=4096, dtype=torch.bfloat16)
           for r in range(4)]
    outs = world.run(lambda r: ops[r](x[r], w[r]))
    world.close()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from typing_extensions import Self

from flux.backends.device import CudaDevice, Device

T = TypeVar("T")

CLOSE_S = 60.0
MAX_WORLD = 15  # each has two streams, and no two of them may share one of the 32 queues of a GPU


@dataclass
class Memory:
    """The symmetric memory of one op: by rank, words of its pad, and its data."""

    pads: list[torch.Tensor]
    data: list[torch.Tensor]


@dataclass
class _Op:
    """An op while its ranks are built one by one."""

    what: dict[str, object]
    memory: Memory | None = None
    members: set[int] = field(default_factory=set)


class VirtualWorld:
    """``world`` ranks on one GPU.

    Args:
        world: number of ranks.
        device: where they live; the current CUDA device by default.

    Raises:
        ValueError: ``world`` is not in [1, 15].
        RuntimeError: there is no CUDA device.
    """

    def __init__(self, world: int, device: Device | None = None) -> None:
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"a virtual world has 1 to {MAX_WORLD} ranks, got {world}")
        self.world = world
        self.device = device or CudaDevice()
        self.streams = [self.device.driver.create_stream() for _ in range(world)]
        self._ops: list[_Op] = []
        self._built = [0] * world
        self._closed = False

    def rank(self, rank: int) -> VirtualRank:
        """The group argument of the ops of one rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank must be in [0, {self.world}), got {rank}")
        return VirtualRank(self, rank)

    def run(self, body: Callable[[int], T]) -> list[T]:
        """``body(rank)`` for every rank, each on its own stream, and the results by rank.

        What was put on the current stream before comes first; the current stream goes on when all
        ranks are done. All ranks must make their calls in here: a rank that waits for another on
        the same stream would wait for ever.
        """
        driver, current = self.device.driver, self.device.current_stream()
        for stream in self.streams:
            driver.order_after(later=stream, earlier=current)
        results = []
        for rank, stream in enumerate(self.streams):
            with self.device.on_stream(stream):
                results.append(body(rank))
        for stream in self.streams:
            driver.order_after(later=current, earlier=stream)
        return results

    def close(self) -> None:
        """Give the streams back, when they are done. Idempotent; close the ops first.

        Raises:
            RuntimeError: work on them is not done after a minute, since a rank waits for a call
                that another has not made, and its op is still open.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_S
        for stream in self.streams:
            while not self.device.driver.ready(stream):
                if time.monotonic() > deadline:
                    raise RuntimeError("a virtual world was closed while its ops wait: close those")
                time.sleep(0.0005)
            self.device.driver.destroy_stream(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
            pads = [self.device.zeros(words, torch.int32) for _ in ranks]
            data = [self.device.zeros(data_bytes, torch.uint8) for _ in ranks]
            op.memory = Memory(pads, data)
        return op.memory

    def leave_op(self, number: int, rank: int) -> None:
        """Give up a rank's part of an op; the last one frees its memory."""
        op = self._ops[number]
        op.members.discard(rank)
        if not op.members:
            op.memory = None


@dataclass(frozen=True)
class VirtualRank:
    """One rank of a VirtualWorld; takes the place of a process group."""

    of: VirtualWorld
    number: int


class VirtualExchange:
    """What an op asks of its group while it is built; ranks come one after the other."""

    def __init__(self, rank: VirtualRank, label: str) -> None:
        self.of = rank.of
        self.rank = rank.number
        self.world = rank.of.world
        self.label = label
        self.op = -1

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
