"""Where ranks on GPUs put down what they do: kernels in device memory, streams by events.

Kernels of a trace build stamp with the GPU's own clock (csrc/cuda/trace.cuh), streams with events
of the driver (csrc/host/stream_trace.h). Both are tied to the host's clock before the first call,
on an idle device, in rounds of

    host     begin ---------------------------------------- end
    device         event | a kernel reads the clock | event

The quickest for the host ties events to it, and half of it bounds the error. That whose events are
closest ties the kernels to the events, and half of what is between those bounds that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from flux import _C
from flux.backends.cuda import CudaBackend

from .recorder import COPY_STREAM_LANE, NETWORK_STREAM_LANE, STREAM_LANE, Record, Work

if TYPE_CHECKING:
    from flux.ops._base import TensorParallelOp
    from flux.schedule import TileSchedule

BLOCKS = 4096
"""Thread blocks of a persistent kernel that can say when a tile began; GPUs hold some hundreds."""
_HEADER = 4  # words of FluxTrace
_RECORD = _C.TRACE_RECORD_BYTES // 8


class KernelRecord(NamedTuple):
    """FluxTraceRecord of csrc/cuda/abi.h; times are of the host's clock."""

    begin_ns: int
    end_ns: int
    kind: int
    row: int
    column: int
    signal: int
    sm: int
    unit: int
    epoch: int
    launch: int


class Tie(NamedTuple):
    """How the clocks of a device are tied to its host's; ns."""

    offset: int
    uncertainty: int
    between: int
    resolution: int


class RankRecords(NamedTuple):
    """What one rank has told.

    Attributes:
        rank: whose.
        backend: of its op.
        schedules: of its calls; empty where the library made them (path = unfused).
        first_epoch: number of the call before the first.
        kernels: of its kernels.
        streams: of its streams, by lane.
        agents: of streams that act for played peers, by peer.
        dropped: records without room, by what made them.
    """

    rank: int
    backend: CudaBackend
    schedules: list[TileSchedule]
    first_epoch: int
    kernels: list[KernelRecord]
    streams: dict[str, list[Record]]
    agents: dict[int, list[Record]]
    dropped: dict[str, int]


class KernelTrace:
    """A FluxTrace in the memory of a device, with room for ``capacity`` records."""

    def __init__(self, backend: CudaBackend, capacity: int) -> None:
        self.capacity = capacity
        begun = BLOCKS * _C.TRACE_UNITS
        self.memory = backend.device.zeros(_HEADER + begun + capacity * _RECORD, torch.int64)
        self._records = self.memory[_HEADER + begun :]
        address = self.memory.data_ptr()
        header = (capacity << 32, address + 8 * (_HEADER + begun), address + 8 * _HEADER, BLOCKS)
        self.memory[:_HEADER] = torch.tensor(header, dtype=torch.int64)

    def read(self, offset_ns: int) -> tuple[list[KernelRecord], int]:
        """Records, and how many had no room. When the kernels are done."""
        first, _, _, last = self.memory[:_HEADER].tolist()
        count = first & 0xFFFFFFFF
        kept = min(count, self.capacity)
        words = self._records[: kept * _RECORD].cpu()
        times = words.view(kept, _RECORD)[:, :2].tolist()
        numbers = words.view(torch.int32).view(kept, 2 * _RECORD)[:, 4:].tolist()
        records = [
            KernelRecord(
                (begin or end) + offset_ns,  # 0: nobody saw it begin
                end + offset_ns,
                *(kind, row, column, signal, sm, unit),
                epoch & 0xFFFFFFFF,
                launch & 0xFFFFFFFF,
            )
            for (begin, end), (kind, row, column, signal, sm, unit, epoch, launch) in zip(
                times, numbers, strict=True
            )
        ]
        return records, count - kept + (last >> 32)


class StreamStamps:
    """Stamps around what the library puts on the current stream."""

    def __init__(self, recorder: GpuRecorder, backend: CudaBackend) -> None:
        self._recorder, self._device = recorder, backend.device

    def began(self) -> int:
        """What ``ended`` wants to know."""
        stream = self._device.current_stream()
        self._recorder.homes.setdefault(stream, self._recorder.rank_on(self._device))
        return self._recorder.streams.begin(stream)

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """This is what has been put there since then."""
        stream, call = self._device.current_stream(), self._recorder.number
        self._recorder.streams.end(began, stream, work, call=call, nbytes=nbytes)


class GpuRecorder:
    """The records of some ranks of this process: one, or all of those that share a GPU.

    All memory and all events are there before anything is recorded. ``start`` and ``stop`` come
    between calls.
    """

    def __init__(self, ops: Sequence[TensorParallelOp], capacity: int) -> None:
        """``capacity``: records of each multiprocessor, and of each rank's streams together."""
        self.ops = ops
        self.backends = [op._backend for op in ops if isinstance(op._backend, CudaBackend)]
        assert len(self.backends) == len(ops)
        self.number = 0  # of the call
        self.homes: dict[int, int] = {}  # rank by the stream of its calls
        self.schedules: dict[int, list[TileSchedule]] = {b.rank: [] for b in self.backends}
        self.tie = Tie(0, 0, 0, 0)
        self._first = {b.rank: b.native.epoch for b in self.backends}
        self._agents: dict[int, int] = {}
        first = self.backends[0]
        self.device = first.device
        self.streams = _C.StreamTrace(first.driver, capacity * len(ops))
        self._times = self.device.pinned(_C.StreamTrace.STAMPS, torch.int64)
        self.kernels: dict[int, KernelTrace] = {}
        for backend in self.backends:
            if all(kernel.traces for kernel in backend.kernels):
                room = capacity * max(1, backend.sm_count)
                self.kernels[backend.rank] = KernelTrace(backend, room)

    def rank_on(self, device: object) -> int:
        """The rank whose library calls are on a device: there is one in a process."""
        return next(b.rank for b in self.backends if b.device is device)

    def began(self, rank: int, schedule: TileSchedule) -> None:
        """A rank makes its next call, on the current stream."""
        self.schedules[rank].append(schedule)
        self.homes[self.device.current_stream()] = rank

    def start(self) -> None:
        """Tie the clocks, while nothing is on the device, and record calls from now on."""
        self.device.synchronize()
        with nullcontext() if self.device.is_current() else self.device.made_current():
            kernel = self.backends[0].kernels[0]
            tied = self.streams.tie(
                self.device.current_stream(),
                kernel if kernel.traces else None,
                self._times.data_ptr(),
            )
        self.tie = Tie(*tied)
        for op, backend in zip(self.ops, self.backends, strict=True):
            memory = self.kernels.get(backend.rank)
            backend.native.trace(0 if memory is None else memory.memory.data_ptr(), self.streams)
            self._agents |= backend.peers.trace(self.streams)
            backend.recorder = self
            op._unfused.trace(StreamStamps(self, backend))

    def wait(self) -> None:
        """Until all calls are done.

        Raises:
            PeerTimeoutError: a wait of one of them took longer than the timeout.
        """
        for op, backend in zip(self.ops, self.backends, strict=True):
            op.wait()
            backend.peers.wait()
        self.device.synchronize()

    def stop(self) -> None:
        """Record no more, and give everything back, when nobody can write to it any more."""
        with ExitStack() as stack:
            stack.callback(self.streams.close)
            stack.callback(self.kernels.clear)
            for op, backend in zip(self.ops, self.backends, strict=True):
                stack.callback(self._detach, op, backend)
                if not op.closed:
                    stack.callback(op.wait)  # or, which closes it, finds out that it never is

    def _detach(self, op: TensorParallelOp, backend: CudaBackend) -> None:
        backend.recorder = None
        backend.native.trace(0, None)
        backend.peers.trace(None)
        op._unfused.trace(None)

    def read(self) -> list[RankRecords]:
        """What was recorded, by rank. After ``wait``."""
        lanes: dict[int, dict[str, list[Record]]] = {b.rank: {} for b in self.backends}
        agents: dict[int, dict[int, list[Record]]] = {b.rank: {} for b in self.backends}
        real = self.backends[0].rank
        names = {b.native.copy_stream: (b.rank, COPY_STREAM_LANE) for b in self.backends}
        names |= {b.native.network_stream: (b.rank, NETWORK_STREAM_LANE) for b in self.backends}
        names |= {stream: (rank, STREAM_LANE) for stream, rank in self.homes.items()}
        for stream, fields in self.streams.records:
            record = Record(*fields)
            if stream in self._agents:
                agents[real].setdefault(self._agents[stream], []).append(record)
                continue
            rank, name = names[stream]
            lanes[rank].setdefault(name, []).append(record)
        found = []
        for backend in self.backends:
            rank, dropped = backend.rank, {}
            records: list[KernelRecord] = []
            if rank in self.kernels:
                records, dropped["kernels"] = self.kernels[rank].read(self.tie.offset)
            if rank == real:
                dropped["streams"] = self.streams.dropped
            found.append(
                RankRecords(
                    rank,
                    backend,
                    self.schedules[rank],
                    self._first[rank],
                    records,
                    lanes[rank],
                    agents[rank],
                    {name: count for name, count in dropped.items() if count},
                )
            )
        return found
