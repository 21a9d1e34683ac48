"""Run all ranks of a group in one process on one GPU, with the real kernels and copies.

This is for correctness tests, and for machines with a single GPU. Every rank gets its own stream
and an equal share of the multiprocessors. So kernels that wait cannot block the kernels that they
wait for. Ops are built and called rank after rank, from one thread:

    world = VirtualWorld(4)
    ops = [flux.AGGemm(world.rank(r), max_m=8192, n=8192, k=4096, dtype=torch.bfloat16)
           for r in range(4)]
    outs = world.run(lambda r: ops[r](x[r], w[r]))
    world.close()

``VirtualWorld(4, nodes=2)`` simulates two nodes of two ranks. Ranks of different nodes do not
address each other's memory, and a remote moves rows between them (docs/kernels/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from flux import _C
from flux.core.tensors import address_of
from flux.transport.base import WORD, Memory, first_signal, sm_share
from flux.transport.device import Device
from flux.transport.one_gpu import OneGpuRank, OneGpuWorld

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.core.spec import OpSpec

T = TypeVar("T")

MOST_COPIES = 128
"""Copies of one rank's call. One thread makes the calls of all ranks, so none of them may fill the
queue of a stream that waits for the next one: the thread would wait, too."""


def least_tile_rows(world: int, m: int, pieces: int = 1) -> int:
    """Return the least rows of a communication tile with which a call of ``m`` rows is possible.

    ``pieces``: copies of a tile to or from one peer.
    """
    chunk = -(-m // world)
    tiles = max(1, MOST_COPIES // max(1, (world - 1) * pieces))
    return -(-chunk // tiles)


class VirtualWorld(OneGpuWorld):
    """``world`` ranks on one GPU.

    Args:
        world: number of ranks.
        device: their GPU; the current CUDA device by default.
        nodes: number of sets of consecutive ranks, of one size, that share memory.

    Raises:
        ValueError: ``world`` is not in [1, 15], in [1, 10] with several nodes, or ``nodes`` does
            not divide it.
        RuntimeError: there is no CUDA device.
    """

    transport = "virtual"

    def __init__(self, world: int, device: Device | None = None, nodes: int = 1) -> None:
        super().__init__(world, 1, device, streams=2 if nodes == 1 else 3)
        if nodes < 1 or world % nodes:
            raise ValueError(f"nodes must divide the {world} ranks of the world, got {nodes}")
        self.nodes = nodes
        self.streams = [self.new_stream() for _ in range(world)]

    @property
    def sm_share(self) -> int:
        """An equal share of the multiprocessors."""
        return sm_share(self.device, self.world)

    def reason_unsupported(self, spec: OpSpec, knobs: Knobs) -> str | None:
        """Return why the world cannot run such an op; None if it can.

        The calls of one thread may not make more than MOST_COPIES copies each.
        """
        rows = knobs.comm_tile_rows
        least = least_tile_rows(self.world, spec.max_m, max(1, len(spec.heads)))
        copied = spec.op.gathers and (not spec.dispatches or self.nodes > 1)  # kernels push
        copied |= spec.op.kernel == "ag_gemm" and spec.op.exchanges
        if copied and rows is not None and rows < least:
            return f"ranks of one thread need comm_tile_rows >= {least} for M = {spec.max_m}"
        return super().reason_unsupported(spec, knobs)

    def rank(self, rank: int) -> OneGpuRank:
        """Return the group argument for the ops of one rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank must be in [0, {self.world}), got {rank}")
        return OneGpuRank(self, rank)

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote | None:
        """Return the connection between nodes: direct copies under a remote's rules, or None."""
        if self.nodes == 1:
            return None
        op = self._ops[number]
        assert op.memory is not None
        if not op.mail:
            words = _C.mail_words(self.world, boxes)
            op.mail += [self.device.zeros(words, torch.int32) for _ in range(self.world)]
        here = [data.numel() > 0 for data in memory.data]
        before = (first_signal(self.world) - 2 * _C.STATUS_WORDS) * WORD
        return _C.DirectRemote(
            driver=self.device.driver,
            rank=rank,
            others=[r for r in range(self.world) if not here[r]],
            data=[address_of(data) for data in op.memory.data],
            mail=[address_of(mail) for mail in op.mail],
            status=[address_of(pad) + before for pad in op.memory.pads],
            boxes=boxes,
        )

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run ``body(rank)`` for every rank, each on its own stream; return the results by rank.

        The ranks start after earlier work on the current stream, and the current stream continues
        when all ranks are done. All ranks must make their calls in here: two ranks on the same
        stream would deadlock.
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
