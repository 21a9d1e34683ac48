"""One real rank on the GPU, with simulated peers whose memory is pinned on the host.

This gives a real link, PCIe, on a single GPU, so that its transfer time can be measured, hidden or
not.

    world = LoopbackWorld(4)
    op = flux.AGGemm(world.rank(), max_m=8192, n=49152, k=12288, dtype=torch.bfloat16)
    world.provide(op, 8192, [x1, x2, x3])    # the shards of ranks 1 to 3
    y = op(x0, w)

Rank 0 is the real one: its kernels, copies, signals and waits are those of any rank. Peers r >= 1
have their part of the symmetric memory on the host, which the GPU reads and writes at the host's
own addresses. They compute nothing: the caller provides their rows, partials and results. The
transfers that they would make run on one stream per peer, its *agent*, when the op is called:

    agent of r, always   entry of r -> rank 0 | ...
    AllGather, push      await entry of 0 | rows of r -> gathered rows of 0, signal 0 | ...
               pull      offers to 0 | await offer of 0, rows of 0 -> gathered rows of r, signal r
    ReduceScatter        await entry of 0 | partial of r, a slab -> slot r of 0, its flags | ...
    AllReduce            ... | behind the GEMM of 0: result rows of r -> result of 0, "done" -> 0

So both directions of the link are as busy as with real peers, in the order of the peers' own
schedules. Peers start together with this rank, and are never late. Peers that push reach this rank
in turn, and meanwhile send to others: so their agents copy one after the other. Two things take no
time here
that take time with real peers. First, links between two peers: a chunk that a peer forwards is
available to it from the start. Second, the peers' GEMMs: only a result waits for them, for as long
as this rank's GEMM takes.

Flags. A GEMM tile raises one flag, so a slab of partials raises many consecutive flags. A stream
memory operation writes the first, which makes the slab visible to the system. Behind it the rest is
copied from pinned words that hold the epoch. A memset does not work: it runs on multiprocessors,
and the reduction that waits for the flags may occupy all of them.

Write access and its order, beyond csrc/cuda_host/gather_tiles.h and docs/kernels/kernels.md:

    gathered rows, slots,  the entry of rank 0 says that it no longer reads them; the agent awaits
      result of rank 0     it before its first copy.
    own gathered rows,     read by agents, which raise their next entry behind that, in the order of
      pull                 their stream; rank 0 awaits the entries before it writes its own rows.
    memory of the peers    written by rank 0 alone in the order of its streams (push: the copy
                           stream, ReduceScatter: the kernels), or by the agent alone (pull); the
                           agent's entry says that it has ended its last call. It is never read.
    provided data, and     written by the host, into buffers that no stream reads any more: rank 0
      epoch words          writes the epoch into ``finished`` at the end of its call, by which time
                           all copies of agents are done; then the buffers are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.core.env import POISON
from flux.core.recorder import Work
from flux.core.tensors import address_of
from flux.transport.base import Memory, Peers, first_signal
from flux.transport.device import Device
from flux.transport.one_gpu import OneGpuRank, OneGpuWorld

if TYPE_CHECKING:
    from flux.core.knobs import Knobs
    from flux.core.layout import Layout
    from flux.core.schedule import TileSchedule
    from flux.core.spec import OpSpec

WORD = 4  # bytes of a signal
REAL = 0  # the rank on the GPU


class PlayedOp(Protocol):
    """An op of the public API, as far as LoopbackWorld uses it."""

    @property
    def closed(self) -> bool:
        """Whether the op is closed."""
        ...


class LoopbackWorld(OneGpuWorld):
    """``world`` ranks, of which rank 0 is on the GPU and the others are simulated.

    Args:
        world: number of ranks.
        device: the device of rank 0; the current CUDA device by default.

    Raises:
        ValueError: ``world`` is not in [2, 15].
        RuntimeError: there is no CUDA device.
    """

    transport = "loopback"
    acts_for_peers = True

    def __init__(self, world: int, device: Device | None = None) -> None:
        super().__init__(world, 2, device)
        self.agents = {peer: self.new_stream() for peer in range(1, world)}

    @property
    def sm_share(self) -> int:
        """All multiprocessors: copy engines do the peers' part."""
        return self.device.sm_count

    @property
    def real(self) -> range:
        """Ranks that have ops."""
        return range(REAL, REAL + 1)

    def reason_unsupported(self, spec: OpSpec, knobs: Knobs) -> str | None:
        """Return why the world cannot run such an op; None if it can.

        The simulated peers neither add nor quantise.
        """
        if knobs.reduce == "in_flight":
            return "reduce = in_flight is not possible: simulated peers do not add"
        if knobs.path == "in_kernel":
            return "path = in_kernel is not possible: simulated peers run no kernels"
        if spec.scales_travel:
            return "scaling = row is not possible: simulated peers have no scales"
        return super().reason_unsupported(spec, knobs)

    def rank(self) -> OneGpuRank:
        """Return the group argument for ops."""
        return OneGpuRank(self, REAL)

    def provide(
        self,
        op: PlayedOp,
        m: int,
        rows: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Set the peers' data for all calls of an op from now on. The data is copied.

        Earlier calls keep their data, whether or not they are done.

        Args:
            op: an op of this world.
            m: global rows M of those calls.
            rows: of ranks 1, 2, ... AGGemm: their shards, [own rows of the rank, K]. GemmRS,
                GemmAR: their partials of rank 0's rows, [own rows of rank 0, N]. In the op's dtype,
                on any device.
            results: GemmAR only, of ranks 1, 2, ...: their rows of the result, [own rows of the
                rank, N].

        Raises:
            ValueError: the op is closed or not of this world, or sizes do not match the above.
            TypeError: a tensor has another dtype than the op.
        """
        peers = getattr(getattr(op, "_backend", None), "peers", None)
        if op.closed or not (isinstance(peers, LoopbackPeers) and peers.of is self):
            raise ValueError(f"provide needs an open op of this LoopbackWorld, got {op!r}")
        peers.provide(m, rows, results)

    def _allocate(self, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return (self.device.zeros if rank == REAL else self.device.pinned)(count, dtype)

    def peers(
        self, number: int, spec: OpSpec, layout: Layout, tile: tuple[int, int], memory: Memory
    ) -> LoopbackPeers:
        """Return the simulated peers of an op."""
        return LoopbackPeers(self, spec, layout, tile, memory)

    def leave_op(self, number: int, rank: int) -> None:
        """Free the op's memory once the agents no longer use it."""
        self.finish(self.agents.values())
        super().leave_op(number, rank)


class PinnedPool:
    """Pinned buffers of one size, reused when the calls that read them are over.

    Args:
        make: makes a new one.
        over: whether the calls up to an epoch are over.
    """

    def __init__(self, make: Callable[[], torch.Tensor], over: Callable[[int], bool]) -> None:
        self._make = make
        self._over = over
        self._given: deque[tuple[int, torch.Tensor]] = deque()

    def take(self) -> torch.Tensor:
        """Return a buffer that no call reads."""
        if self._given and self._over(self._given[0][0]):
            return self._given.popleft()[1]
        return self._make()

    def give(self, buffer: torch.Tensor, epoch: int) -> None:
        """Return a buffer to the pool; calls up to ``epoch`` read it. Epochs never decrease."""
        self._given.append((epoch, buffer))


@dataclass(frozen=True)
class _Provided:
    """The peers' data for calls of ``m`` rows.

    ``rows`` is laid out as gathered rows (AllGather), or as slots (ReduceScatter), then the result.
    """

    m: int
    rows: torch.Tensor


@dataclass(frozen=True)
class _Slab:
    """Rows of a slot, as bytes, and the flags that their tiles raise, from ``tile_row`` on."""

    begin: int
    size: int
    tile_row: int
    flags: int


class LoopbackPeers(Peers):
    """The simulated peers of rank 0 in one op."""

    idle = False

    def __init__(
        self,
        of: LoopbackWorld,
        spec: OpSpec,
        layout: Layout,
        tile: tuple[int, int],
        memory: Memory,
    ) -> None:
        self.of, self.spec, self.layout, self.tile = of, spec, layout, tile
        self.world = of.world
        self.memory = memory
        self.driver = of.device.driver
        self.pads = [address_of(pad) for pad in memory.pads]
        self.data = [address_of(data) for data in memory.data]
        self.signals = [pad + first_signal(self.world) * WORD for pad in self.pads]
        self.offers = [signals + layout.signals * WORD for signals in self.signals]
        pinned = of.device.pinned
        self.finished = finished = pinned(1, torch.int32)

        # Holds no reference to the peers: a cycle would keep their memory alive.
        def over(epoch: int) -> bool:
            reached = int(finished[0]) & 0xFFFFFFFF
            return _C.core.epoch_reached(reached, epoch & 0xFFFFFFFF)

        self._sets = PinnedPool(lambda: pinned(layout.data_bytes, torch.uint8), over)
        self._words = PinnedPool(lambda: pinned(layout.signals, torch.int32), over)
        self._provided: _Provided | None = None
        self._streams: _C.StreamTrace | None = None
        self._epoch = 0  # of the last call

    # -- data from the user ------------------------------------------------------------------------

    def provide(
        self, m: int, rows: Sequence[torch.Tensor], results: Sequence[torch.Tensor] | None
    ) -> None:
        """Set the peers' data; see LoopbackWorld.provide."""
        label, layout = self.spec.label, self.layout
        if not 1 <= m <= self.spec.max_m:
            raise ValueError(f"{label}: M must be in [1, {self.spec.max_m}], got {m}")
        gathers, reduces_all = self.spec.op.gathers, self.spec.op.all_reduces
        if (results is not None) != reduces_all:
            kind = "none" if results is None else "some"
            raise ValueError(f"{label}: results are for GemmAR, and required there, got {kind}")
        count = _C.core.row_count
        own = [count(m, self.world, peer) for peer in range(1, self.world)]
        parts = own if gathers else [count(m, self.world, REAL)] * len(own)
        self._check("rows", rows, parts)
        self._check("results", results or (), own if reduces_all else [])
        kept = self._sets.take()
        if POISON.get():
            kept.fill_(0xFF)  # NaN
        for index in range(len(own)):
            peer = index + 1
            begin = self._row(m, peer) if gathers else layout.slot_offset(peer)
            self._put(kept, begin, rows[index])
            if results is not None:
                self._put(kept, layout.rest_offset + self._row(m, peer), results[index])
        if self._provided is not None:
            self._sets.give(self._provided.rows, self._epoch)
        self._provided = _Provided(m, kept)

    def _row(self, m: int, rank: int) -> int:
        """Return the offset of a rank's first row in [M, ...], in bytes."""
        return _C.core.row_begin(m, self.world, rank) * self.layout.row_bytes

    def _check(self, what: str, tensors: Sequence[torch.Tensor], rows: list[int]) -> None:
        spec = self.spec
        dtype = spec.dtype if spec.op.gathers else spec.out_dtype
        if len(tensors) != len(rows):
            raise ValueError(
                f"{spec.label}: {what} must be {len(rows)} tensors, one for each of the ranks 1 to "
                f"{self.world - 1}, got {len(tensors)}"
            )
        for index, (tensor, count) in enumerate(zip(tensors, rows, strict=True)):
            shape, name = [count, spec.row_elements], f"{spec.label}: {what} of rank {index + 1}"
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
            if tensor.dtype != dtype:
                raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")

    def _put(self, kept: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
        size = rows.numel() * rows.element_size()
        kept[begin : begin + size].view(rows.dtype).view(rows.shape).copy_(rows)

    def check(self, m: int) -> None:
        """Raise if the peers have no data for a call of ``m`` rows."""
        if self._provided is None:
            raise ValueError(
                f"{self.spec.label}: the peers have no data: call LoopbackWorld.provide before the "
                f"op, with M = {m}"
            )
        if self._provided.m != m:
            raise ValueError(
                f"{self.spec.label}: the peers have been provided for M = {self._provided.m}, "
                f"got a call with M = {m}"
            )

    # -- calls -------------------------------------------------------------------------------------

    def _enter(self, epoch: int) -> int:
        """Start a call on the agents; return the address of the peers' data."""
        assert self._provided is not None
        self._epoch = epoch
        for peer, agent in self.of.agents.items():
            with self._traced(agent, Work.enter, peer):
                self.driver.signal(agent, self.pads[REAL] + peer * WORD, epoch & 0xFFFFFFFF)
        return address_of(self._provided.rows)

    @contextmanager
    def _traced(self, agent: int, work: Work, peer: int, **what: int) -> Iterator[None]:
        """Record the work put on an agent's stream within the context, if a trace is on."""
        streams = self._streams
        token = -1 if streams is None else streams.begin(agent)
        yield
        if streams is not None:
            streams.end(token, agent, work, call=self._epoch & 0xFFFFFFFF, peer=peer, **what)

    def trace(self, streams: _C.StreamTrace | None) -> dict[int, int]:
        """Record the agents' work from now on; None: stop. Return peer by agent."""
        self._streams = streams
        return {agent: peer for peer, agent in self.of.agents.items()}

    def wait(self) -> None:
        """Wait until the agents are done."""
        self.of.finish(self.of.agents.values())

    def gather(self, schedule: TileSchedule, epoch: int, data: list[int]) -> list[int]:
        """Push this rank's gathered rows, or pull from them.

        Returns:
            The addresses at which this rank reads gathered rows, by rank.
        """
        rows = self._enter(epoch)
        m = schedule.shape[0]
        sources = [data[REAL]] + [rows] * (self.world - 1)
        schedules = {peer: schedule.of_rank(peer) for peer in self.of.agents}
        before: int | None = None
        for peer in sorted(schedules, key=lambda peer: _first_to(schedules[peer], REAL)):
            agent = self.of.agents[peer]
            if schedule.knobs.direction == "push" and before is not None:
                self.driver.order_after(later=agent, earlier=before)
            before = agent
            _C.act_as_peer(
                driver=self.driver,
                schedule=schedules[peer].native,
                real=REAL,
                stream=agent,
                epoch=epoch & 0xFFFFFFFF,
                parts=[(rows + self._row(m, peer), self.layout.row_bytes, data, sources)],
                entries=self.pads,
                signals=self.signals,
                offers=self.offers,
                trace=self._streams,
            )
        return sources

    def scatter(self, schedule: TileSchedule, epoch: int) -> None:
        """Store the peers' partials of this rank's rows, in slabs of about a communication tile."""
        partials = self._enter(epoch)
        value = epoch & 0xFFFFFFFF
        tiling = _C.core.ScatterTiling(schedule.shape[0], self.spec.n[0], self.world, *self.tile)
        slabs = self._slabs(tiling, schedule.shape[0], schedule.knobs.comm_tile_rows or 1)
        words = self._words.take()
        words[: max((slab.flags for slab in slabs), default=0)] = _as_int32(value)
        self._words.give(words, epoch)
        for peer, agent in self.of.agents.items():
            with self._traced(agent, Work.entry, REAL):
                self.driver.await_signal(agent, self.pads[peer] + REAL * WORD, value)
            for slab in slabs:
                at = self.layout.slot_offset(peer) + slab.begin
                flag = tiling.flag_index(peer, REAL, slab.tile_row, 0)
                flags = {"at": REAL, "begin": flag, "end": flag + slab.flags}
                with self._traced(agent, Work.slab, REAL, nbytes=slab.size, **flags):
                    self.driver.copy(agent, self.data[REAL] + at, partials + at, slab.size)
                address = self.signals[REAL] + flag * WORD
                self.driver.signal(agent, address, value)
                rest = (slab.flags - 1) * WORD
                self.driver.copy(agent, address + WORD, address_of(words), rest)
            if schedule.copied:  # one flag of each source, behind all
                self.driver.signal(agent, self.signals[REAL] + peer * WORD, value)

    def _slabs(self, tiling: _C.core.ScatterTiling, m: int, rows: int) -> list[_Slab]:
        """Return this rank's rows in slabs of whole tile rows, about ``rows`` each."""
        tile_m, row = self.tile[0], self.layout.row_bytes
        begin, end = (f(m, self.world, REAL) for f in (_C.core.row_begin, _C.core.row_end))
        first, last = tiling.tiles_of_owner(REAL)
        step = max(1, rows // tile_m)
        slabs = []
        for tile in range(first, last, step):
            beyond = min(tile + step, last)
            low, high = max(tile * tile_m, begin), min(beyond * tile_m, end)
            flags = (beyond - tile) * tiling.flag_columns()
            slabs.append(_Slab((low - begin) * row, (high - low) * row, tile, flags))
        return slabs

    def send_results(self, stream: int, m: int, epoch: int) -> None:
        """Store the peers' rows of the result.

        A peer reduces when its GEMM is over, which takes as long as this rank's GEMM.
        """
        assert self._provided is not None
        for peer, agent in self.of.agents.items():
            self.driver.order_after(later=agent, earlier=stream)
            begin = self.layout.rest_offset + self._row(m, peer)
            size = _C.core.row_count(m, self.world, peer) * self.layout.row_bytes
            provided = address_of(self._provided.rows)
            with self._traced(agent, Work.copy, REAL, nbytes=size):
                self.driver.copy(agent, self.data[REAL] + begin, provided + begin, size)
            done = self.pads[REAL] + (self.world + peer) * WORD
            self.driver.signal(agent, done, epoch & 0xFFFFFFFF)

    def end(self, stream: int, epoch: int) -> None:
        """Signal that no stream reads the provided data any more."""
        self.driver.signal(stream, address_of(self.finished), epoch & 0xFFFFFFFF)

    def let_go(self, epoch: int) -> None:
        """Raise every word of the peers' pads, which only agents and this rank's copies await."""
        for pad in self.memory.pads[REAL + 1 :]:
            pad.fill_(_as_int32(epoch & 0xFFFFFFFF))


def _first_to(schedule: TileSchedule, rank: int) -> int:
    """Return how many transfers a rank makes before its first one to ``rank``."""
    return next((i for i, t in enumerate(schedule.transfers) if t.dst == rank), 0)


def _as_int32(value: int) -> int:
    """Return the signed number with the bits of an unsigned one."""
    return (value ^ 0x80000000) - 0x80000000
