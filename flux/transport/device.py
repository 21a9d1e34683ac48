"""What the CUDA backend asks of whoever moves tiles between GPUs, and of the peers of its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.backends.device import Device

if TYPE_CHECKING:
    from flux.backends.layout import Layout
    from flux.ops.spec import OpSpec
    from flux.schedule import TileSchedule


WORD = 4  # bytes of a signal

SPARE = 4
"""Multiprocessors that the kernels of ranks which share a GPU leave to copies and fills."""


def sm_share(device: Device, sharing: int) -> int:
    """Multiprocessors that the kernels of each of ``sharing`` ranks on a GPU may occupy: kernels
    that wait must leave room for those they wait for, and for copies inside the device."""
    return device.sm_count if sharing == 1 else max(1, (device.sm_count - SPARE) // sharing)


BESIDE = 8
"""Blocks that may run beside a GEMM between nodes: sums for other nodes, and the network's kernels.
Eight move more bytes than the network of a GPU does."""


def beside(sm_share: int) -> int:
    """As many of them as ``sm_share`` multiprocessors can spare."""
    return max(1, min(BESIDE, sm_share // 16))


def first_signal(world: int) -> int:
    """Words of a pad before its signals or flags: see CudaOpSetup in csrc/host/cuda_op.h."""
    return 2 * world + 2 * _C.STATUS_WORDS


@dataclass
class Memory:
    """The symmetric memory of one op: by rank, words of its pad, and its data. Both are empty for
    ranks of other nodes."""

    pads: list[torch.Tensor]
    data: list[torch.Tensor]
    multicast: int = 0
    """Address at which the NVLink switch has everybody's data, or 0."""


class Peers:
    """What the backend of one op does for peers that cannot act for themselves: here, nothing, as
    all of them can. The methods are called in this order within a call."""

    idle = True
    """Whether the methods do nothing."""

    def check(self, m: int) -> None:
        """Before anything is put on a stream.

        Raises:
            ValueError: the peers cannot make a call of ``m`` global rows.
        """

    def gather(self, schedule: TileSchedule, epoch: int, data: list[int]) -> list[int]:
        """AllGather: what the peers move; by rank, where this rank reads gathered rows."""
        return data

    def scatter(self, schedule: TileSchedule, epoch: int) -> None:
        """ReduceScatter: the peers' partials of this rank's rows. Before the GEMM is launched."""

    def send_results(self, stream: int, m: int, epoch: int) -> None:
        """AllReduce: the peers' rows of the result. Behind the GEMM on ``stream``."""

    def end(self, stream: int, epoch: int) -> None:
        """Behind all that the call has put on ``stream``."""

    def let_go(self, epoch: int) -> None:
        """Release every stream that waits on behalf of a peer."""

    def wait(self) -> None:
        """Until their part of all calls is done."""

    def trace(self, streams: _C.StreamTrace | None) -> dict[int, int]:
        """Put down what is done for the peers from now on; None: no more. Returns whom the streams
        act for: ranks, by stream."""
        return {}


class DeviceTransport(Protocol):
    """One op's ranks on GPUs, and their memory.

    Attributes:
        rank, world: of this rank.
        device: where it lives.
        nodes: how many sets of ranks there are that share memory: consecutive, of one size.
        sm_share: multiprocessors that its kernels may occupy.
        multicast: whether the memory will have a multicast address; the same on all ranks.
        relays: whether the device itself puts sums to other nodes (a Relay of csrc/host/remote.h).
    """

    rank: int
    world: int
    multicast: bool

    @property
    def relays(self) -> bool: ...

    @property
    def nodes(self) -> int: ...

    @property
    def device(self) -> Device: ...

    @property
    def sm_share(self) -> int: ...

    def ready(self, problem: str | None) -> None:
        """Say whether this rank can run the op, before ``memory``. Collective.

        Raises:
            ValueError: some rank cannot; everywhere that hears of it.
        """
        ...

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Zeroed symmetric memory, the same sizes on all ranks. Collective."""
        ...

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """The peers of other nodes, if there are some. Collective.

        Args:
            memory: what ``memory`` returned.
            boxes: words for what arrives in a call.
            blocks: that kernels of the network may have.

        Raises:
            PeerTimeoutError: some of them did not come.
        """
        ...

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """What is done for the peers. ``tile``: of the op's kernel, in elements."""
        ...

    def leave(self) -> None:
        """Let go of the memory. Local."""
        ...
