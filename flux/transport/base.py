"""Interfaces of the CUDA backend to GPU transports and to the peers of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.transport.device import Device

if TYPE_CHECKING:
    from flux.core.layout import Layout
    from flux.core.schedule import TileSchedule
    from flux.core.spec import OpSpec


WORD = 4  # bytes of a signal

SPARE = 4
"""Multiprocessors that kernels leave to copies and fills if ranks share a GPU."""


def sm_share(device: Device, sharing: int) -> int:
    """Return the multiprocessors that each of ``sharing`` ranks on a GPU may occupy.

    Kernels that wait must leave room for the kernels they wait for, and for copies inside the
    device.
    """
    return device.sm_count if sharing == 1 else max(1, (device.sm_count - SPARE) // sharing)


def first_signal(world: int) -> int:
    """Return the words of a pad before its signals or flags.

    See CudaOpSetup in csrc/cuda_host/cuda_op.h.
    """
    return 2 * world + 2 * _C.STATUS_WORDS


@dataclass
class Memory:
    """The symmetric memory of one op, by rank: the words of its pad, and its data.

    Both are empty for ranks of other nodes.
    """

    pads: list[torch.Tensor]
    data: list[torch.Tensor]
    multicast: int = 0
    """Address at which the NVLink switch maps the data of all ranks, or 0."""


class Peers:
    """Does the peers' part of an op if they cannot do it themselves. Here: nothing, all peers can.

    Within a call, the backend calls the methods in the order below.
    """

    idle = True
    """True if the methods do nothing."""

    def check(self, m: int) -> None:
        """Raise if the peers cannot make this call. Runs before anything is put on a stream.

        Raises:
            ValueError: the peers cannot make a call of ``m`` global rows.
        """

    def gather(self, schedule: TileSchedule, epoch: int, data: list[int]) -> list[int]:
        """AllGather: move the peers' tiles.

        Returns:
            Where this rank reads gathered rows, by rank; empty: in ``data``, or a second buffer.
        """
        return []

    def scatter(self, schedule: TileSchedule, epoch: int) -> None:
        """ReduceScatter: move the peers' partials of this rank's rows.

        Runs before the GEMM is launched.
        """

    def send_results(self, stream: int, m: int, epoch: int) -> None:
        """AllReduce: move the peers' rows of the result. Runs behind the GEMM on ``stream``."""

    def end(self, stream: int, epoch: int) -> None:
        """End the call. Runs behind all other work of the call on ``stream``."""

    def let_go(self, epoch: int) -> None:
        """Release every stream that waits on behalf of a peer."""

    def wait(self) -> None:
        """Wait until the peers' part of all calls is done."""

    def trace(self, streams: _C.StreamTrace | None) -> dict[int, int]:
        """Record the work done for the peers from now on; None: stop.

        Returns:
            The rank that each stream acts for, by stream.
        """
        return {}


class DeviceTransport(Protocol):
    """The ranks of one op on GPUs, and their memory.

    Attributes:
        rank: this rank.
        world: number of ranks.
        device: the GPU of this rank.
        nodes: number of sets of ranks that share memory: consecutive, of one size.
        sm_share: multiprocessors that this rank's kernels may occupy.
        multicast: whether the memory will have a multicast address; the same on all ranks.
        lane: number of this rank among those of its process, whose calls are ordered apart.
        acts_for_peers: whether the host makes the peers' part of each call.
        relays: whether the device itself puts sums to other nodes (Relay, csrc/cuda_host/remote.h).
    """

    rank: int
    world: int
    multicast: bool
    lane: int
    acts_for_peers: bool

    @property
    def relays(self) -> bool:
        """Whether the device itself puts sums to other nodes."""
        ...

    @property
    def nodes(self) -> int:
        """Number of sets of ranks that share memory."""
        ...

    @property
    def device(self) -> Device:
        """The GPU of this rank."""
        ...

    @property
    def sm_share(self) -> int:
        """Multiprocessors that this rank's kernels may occupy."""
        ...

    def ready(self, problem: str | None) -> None:
        """Exchange whether each rank can run the op. Runs before ``memory``. Collective.

        Args:
            problem: why this rank cannot; None if it can.

        Raises:
            ValueError: a rank cannot; on every rank that takes part.
        """
        ...

    def reason_no_adds(self) -> str | None:
        """Return why this rank's kernels cannot add in the memory of all peers; None if they can.

        Local; the answers of ranks may differ.
        """
        ...

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Return zeroed symmetric memory, the same sizes on all ranks. Collective."""
        ...

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """Return the connection to peers of other nodes; None if there are none. Collective.

        Args:
            memory: the return value of ``memory``.
            boxes: words for what arrives in a call.
            blocks: blocks that network kernels may use.

        Raises:
            PeerTimeoutError: a peer did not connect in time.
        """
        ...

    def peers(self, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory) -> Peers:
        """Return the object that acts for the peers. ``tile``: of the op's kernel, in elements."""
        ...

    def leave(self) -> None:
        """Release the memory. Local."""
        ...
