"""Record the activity of ranks on GPUs: kernels in device memory, streams by events.

Kernels of a trace build stamp with the GPU's own clock (csrc/cuda/trace.cuh), streams with events
of the driver (csrc/cuda_host/stream_trace.h). Both clocks are related to the host's clock before
the first call, on an idle device, in rounds of

    host     begin ---------------------------------------- end
    device         event | a kernel reads the clock | event

The round that is fastest on the host relates events to the host; half its duration bounds the
error. The round with the closest events relates kernels to events; half the time between those
events bounds that error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from flux import _C
from flux.core.recorder import COPY_STREAM_LANE, NETWORK_STREAM_LANE, STREAM_LANE, Record, Work
from flux.core.tensors import address_of

if TYPE_CHECKING:
    from flux.backends.cuda.backend import CudaBackend
    from flux.core.schedule import TileSchedule
    from flux.ops.base import TensorParallelOp

BLOCKS = 4096
"""Thread blocks of a persistent kernel that can record the start of a tile; GPUs hold hundreds."""
_HEADER = 4  # words of FluxTrace
_RECORD = _C.TRACE_RECORD_BYTES // 8


class KernelRecord(NamedTuple):
    """FluxTraceRecord of csrc/cuda/abi.h; times are on the host's clock."""

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


class ClockOffset(NamedTuple):
    """The relation of a device's clocks to its host's; ns."""

    offset: int
    uncertainty: int
    between: int
    resolution: int


class RankRecords(NamedTuple):
    """The records of one rank.

    Attributes:
        rank: the rank.
        backend: of its op.
        schedules: of its calls; empty if the library made them (path = unfused).
        experts: of the tiles of each of them, of an op of experts.
        first_epoch: number of the call before the first.
        kernels: of its kernels.
        streams: of its streams, by lane.
        agents: of streams that act for simulated peers, by peer.
        dropped: number of records without room, by source.
    """

    rank: int
    backend: CudaBackend
    schedules: list[TileSchedule]
    experts: list[list[int]]
    first_epoch: int
    kernels: list[KernelRecord]
    streams: dict[str, list[Record]]
    agents: dict[int, list[Record]]
    dropped: dict[str, int]


class KernelTrace:
    """A FluxTrace in the memory of a device, with room for ``capacity`` records."""

    def __init__(self, backend: CudaBackend, capacity: int) -> None:
        self.capacity = capacity
        self._first_epoch = backend.native.epoch
        self._rank = backend.rank if backend.spec.op.reduces else None
        begun = BLOCKS * _C.TRACE_UNITS
        self.memory = backend.device.zeros(_HEADER + begun + capacity * _RECORD, torch.int64)
        self._records = self.memory[_HEADER + begun :]
        address = address_of(self.memory)
        header = (capacity << 32, address + 8 * (_HEADER + begun), address + 8 * _HEADER, BLOCKS)
        self.memory[:_HEADER] = torch.tensor(header, dtype=torch.int64, device="cpu")

    def read(self, offset_ns: int) -> tuple[list[KernelRecord], int]:
        """Return the records, and the number dropped. Call it when the kernels are done."""
        first, _, _, last = self.memory[:_HEADER].tolist()
        count = first & 0xFFFFFFFF
        kept = min(count, self.capacity)
        words = self._records[: kept * _RECORD].cpu()
        times = words.view(kept, _RECORD)[:, :2].tolist()
        numbers = words.view(torch.int32).view(kept, 2 * _RECORD)[:, 4:].tolist()
        records = [
            self._of_call(
                (begin or end) + offset_ns,  # 0: the start was not recorded
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

    def _of_call(self, *fields: int) -> KernelRecord:
        """Return a record with the host's number of the call: see FLUX_TRACE_IN_KERNEL."""
        record = KernelRecord(*fields)
        if not record.launch & _C.TRACE_IN_KERNEL:
            return record
        number, weight = divmod(record.launch & ~_C.TRACE_IN_KERNEL, 256)
        since = (number - self._first_epoch) % (_C.TRACE_IN_KERNEL // 256)
        epoch = (self._first_epoch + since) & 0xFFFFFFFF
        return record._replace(epoch=epoch, launch=weight if self._rank is None else self._rank)


class StreamStamps:
    """Records start and end of library calls on the current stream."""

    def __init__(self, recorder: GpuRecorder, backend: CudaBackend) -> None:
        self._recorder, self._device = recorder, backend.device

    def began(self) -> int:
        """Return a token for the start, to be passed to ``ended``."""
        stream = self._device.current_stream()
        self._recorder.homes.setdefault(stream, self._recorder.rank_on(self._device))
        return self._recorder.streams.begin(stream)

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """Record the work put on the stream since ``began``."""
        stream, call = self._device.current_stream(), self._recorder.number
        self._recorder.streams.end(began, stream, work, call=call, nbytes=nbytes)


class GpuRecorder:
    """The records of some ranks of this process: one rank, or all ranks that share a GPU.

    All memory and events are allocated before the first record. Call ``start`` and ``stop`` between
    calls of the op.
    """

    def __init__(self, ops: Sequence[TensorParallelOp], capacity: int) -> None:
        """Allocate the records.

        Args:
            ops: of the ranks.
            capacity: records of each multiprocessor, and of each rank's streams together.
        """
        self.ops = ops
        self.backends = [cast("CudaBackend", op._backend) for op in ops]
        self.number = 0  # of the call
        self.homes: dict[int, int] = {}  # rank by the stream of its calls
        self.schedules: dict[int, list[TileSchedule]] = {b.rank: [] for b in self.backends}
        self.experts: dict[int, list[torch.Tensor]] = {b.rank: [] for b in self.backends}
        self.tie = ClockOffset(0, 0, 0, 0)
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
        """Return the rank whose library calls run on a device: a process has one."""
        return next(b.rank for b in self.backends if b.device is device)

    def began(self, rank: int, schedule: TileSchedule) -> None:
        """Note that a rank makes its next call on the current stream."""
        self.schedules[rank].append(schedule)
        self.homes[self.device.current_stream()] = rank

    def routed(self, rank: int, experts: torch.Tensor) -> None:
        """Note the experts of the tiles of a rank's call, which a kernel is about to write."""
        self.experts[rank].append(experts)

    def start(self) -> None:
        """Relate the clocks, on an idle device, and record calls from now on."""
        self.device.synchronize()
        with nullcontext() if self.device.is_current() else self.device.made_current():
            kernel = self.backends[0].kernels[0]
            tied = self.streams.tie(
                self.device.current_stream(),
                kernel if kernel.traces else None,
                address_of(self._times),
            )
        self.tie = ClockOffset(*tied)
        for op, backend in zip(self.ops, self.backends, strict=True):
            memory = self.kernels.get(backend.rank)
            backend.native.trace(0 if memory is None else address_of(memory.memory), self.streams)
            self._agents |= backend.peers.trace(self.streams)
            backend.recorder = self
            op._unfused.trace(StreamStamps(self, backend))

    def wait(self) -> None:
        """Wait until all calls are done.

        Raises:
            PeerTimeoutError: a wait of one of them took longer than the timeout.
        """
        for op, backend in zip(self.ops, self.backends, strict=True):
            op.wait()
            backend.peers.wait()
        self.device.synchronize()

    def stop(self) -> None:
        """Stop recording, and free everything once no kernel or stream can write to it."""
        with ExitStack() as stack:
            stack.callback(self.streams.close)
            stack.callback(self.kernels.clear)
            for op, backend in zip(self.ops, self.backends, strict=True):
                stack.callback(self._detach, op, backend)
                if not op.closed:
                    stack.callback(op.wait)  # raises, and closes the op, if the calls never end

    def _detach(self, op: TensorParallelOp, backend: CudaBackend) -> None:
        backend.recorder = None
        backend.native.trace(0, None)
        backend.peers.trace(None)
        op._unfused.trace(None)

    def read(self) -> list[RankRecords]:
        """Return the records, by rank. Call it after ``wait``."""
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
        recorded = []
        for backend in self.backends:
            rank, dropped = backend.rank, {}
            records: list[KernelRecord] = []
            if rank in self.kernels:
                records, dropped["kernels"] = self.kernels[rank].read(self.tie.offset)
            if rank == real:
                dropped["streams"] = self.streams.dropped
            recorded.append(
                RankRecords(
                    rank,
                    backend,
                    self.schedules[rank],
                    [experts.tolist() for experts in self.experts[rank]],
                    self._first[rank],
                    records,
                    lanes[rank],
                    agents[rank],
                    {name: count for name, count in dropped.items() if count},
                )
            )
        return recorded
