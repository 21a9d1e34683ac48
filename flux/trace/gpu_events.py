"""Convert the records of a rank's kernels and streams to events.

Lanes of a rank: a multiprocessor's tiles ("SM 12.0"), the waits of its loads ("SM 12.0 loads"),
waits for entries and flags of its stores ("SM 12.0 stores"), its sums ("SM 12.0 sums"), and rows
that it pushes ("SM 12.0 pushes"). ".1" is
concurrent work on the same multiprocessor: another block, or the other warp group of a ping-pong
kernel. Then the streams: of the calls ("stream"), "copy stream", "network stream", "to rank 3",
"from rank 3".

In addition to those of convert.py, these strings connect events:

    "1.entry:0"     rank 0 has entered the call, as rank 1 sees it; not with two buffers
    "1.flag:1:6"    flag 6 of the rows of rank 1, where rank 1 sees it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

from flux import _C
from flux.core.events import Event, Kind
from flux.core.knobs import Op, op_row
from flux.core.problem import ceil_div
from flux.core.recorder import Record, Work, incoming_lane, outgoing_lane
from flux.trace.convert import Details, Span, collective, rows_text
from flux.trace.gpu import KernelRecord, RankRecords


class KernelEvent(IntEnum):
    """The kind of a kernel's record; values of FLUX_TRACE_* (csrc/cuda/abi.h)."""

    tile = 1
    part = 2
    wait = 3
    release = 4
    sum = 5
    push = 6
    copy = 7
    send = 8
    tokens = 9


GATHER, ENTRY, PARTIAL, RESULT = 1, 2, 3, 7
"""The reasons of kernels' waits: values of FLUX_WAIT_*."""
_WAIT_LANES = {GATHER: "loads", ENTRY: "stores", PARTIAL: "sums", RESULT: "sums"}
_LANES = {
    KernelEvent.tile: "",
    KernelEvent.part: "",
    KernelEvent.release: "stores",
    KernelEvent.sum: "sums",
    KernelEvent.push: "pushes",
    KernelEvent.copy: "sums",
    KernelEvent.send: "",
    KernelEvent.tokens: "",
}
_KINDS = {
    KernelEvent.tile: Kind.gemm,
    KernelEvent.part: Kind.gemm,
    KernelEvent.wait: Kind.wait,
    KernelEvent.release: Kind.copy,
    KernelEvent.sum: Kind.reduce,
    KernelEvent.push: Kind.copy,
    KernelEvent.copy: Kind.copy,
    KernelEvent.send: Kind.send,
    KernelEvent.tokens: Kind.reduce,
}
_STREAM_KINDS = {
    Work.gemm: Kind.gemm,
    Work.collective: Kind.copy,
    Work.copy: Kind.copy,
    Work.slab: Kind.copy,
    Work.collect: Kind.copy,
    Work.send: Kind.send,
    Work.receive: Kind.receive,
    Work.wait: Kind.wait,
    Work.entry: Kind.wait,
    Work.result: Kind.wait,
    Work.own_gemm: Kind.wait,
    Work.enter: Kind.barrier,
}


@dataclass(frozen=True)
class _Nodes:
    """The rank that stores each part of a result: see csrc/cuda_host/cuda_op.h."""

    rank: int
    world: int
    nodes: int

    @property
    def lanes(self) -> int:
        """Ranks per node."""
        return self.world // self.nodes

    @property
    def neighbours(self) -> range:
        """Ranks of this node."""
        begin = self.rank // self.lanes * self.lanes
        return range(begin, begin + self.lanes)

    def holder(self, owner: int) -> int:
        """Return the rank of this node that stores its ranks' parts for the rows of ``owner``."""
        return self.neighbours.start + owner % self.lanes

    @property
    def twins(self) -> list[int]:
        """Ranks whose rows this one stores, itself included."""
        return [node * self.lanes + self.rank % self.lanes for node in range(self.nodes)]


class _Kernels:
    """Interprets the records of the kernels of one call."""

    def __init__(self, rank_records: RankRecords, number: int) -> None:
        backend, schedule = rank_records.backend, rank_records.schedules[number]
        self.experts = rank_records.experts[number] if backend.spec.experts else []
        self.rank, self.world = rank_records.rank, backend.world
        self.spec = backend.spec
        self.m = schedule.shape[0]
        if self.spec.op.exchanges:  # the GEMM of the own rows, as of one rank
            self.m, self.world = schedule.rows[self.rank], 1
        self.tiles = [kernel.tile for kernel in backend.kernels]
        self.widths = backend.spec.local_n(self.world, self.rank)
        self.comm_rows = schedule.knobs.comm_tile_rows or 1
        self.nodes = _Nodes(self.rank, self.world, backend.nodes)
        self.scatters = backend.spec.op.reduces
        self.splits = schedule.splits
        self.flags = _C.core.ScatterTiling(self.m, self.widths[0], self.world, *self.tiles[0])

    def describe(self, r: KernelRecord) -> tuple[str, Details]:
        """Return name and details of the event."""
        describe = {
            KernelEvent.tile: self._tile,
            KernelEvent.part: self._tile,
            KernelEvent.wait: self._wait,
            KernelEvent.release: self._release,
            KernelEvent.sum: self._sum,
            KernelEvent.push: self._push,
            KernelEvent.copy: self._copy,
            KernelEvent.send: self._send,
            KernelEvent.tokens: self._tokens,
        }
        return describe[KernelEvent(r.kind)](r)

    def _place(self, r: KernelRecord) -> Details:
        chunk, weight = divmod(0 if self.scatters else r.launch, len(self.widths))
        tile, width = self.tiles[weight], self.widths[weight]
        first, last = (0, self.m)
        if self.splits:
            first = _C.core.row_begin(self.m, self.world, chunk)
            last = first + _C.core.row_count(self.m, self.world, chunk)
        details: Details = {
            "tile_row": r.row,
            "tile_column": r.column,
            "row_begin": first + r.row * tile[0],
            "row_end": min(last, first + (r.row + 1) * tile[0]),
            "col_begin": r.column * tile[1],
            "col_end": min(width, (r.column + 1) * tile[1]),
        }
        if self.splits:
            details["chunk"] = chunk
        if len(self.widths) > 1:
            details["weight"] = weight
        return details

    def _of_expert(self, r: KernelRecord) -> tuple[str, Details]:
        """Describe a tile of an expert, whose rows are anywhere."""
        width, expert = self.widths[0] * (2 if self.spec.gated else 1), self.experts[r.row]
        columns = {
            "col_begin": r.column * self.tiles[0][1],
            "col_end": min(width, (r.column + 1) * self.tiles[0][1]),
        }
        place: Details = {"tile_row": r.row, "tile_column": r.column, "expert": expert}
        return f"tile ({r.row}, {r.column}) of expert {expert}", place | columns

    def _tile(self, r: KernelRecord) -> tuple[str, Details]:
        if self.spec.experts:
            return self._of_expert(r)
        details = self._place(r)
        name = f"tile ({r.row}, {r.column})"
        if r.kind == KernelEvent.part:
            details["part"] = 1
            name = f"part of {name}"
        if self.scatters:
            owners = range(*self.flags.owners_of_tile(r.row))
            if len(owners) == 1:
                details["owner"] = owners[0]
        return name, details

    def _wait(self, r: KernelRecord) -> tuple[str, Details]:
        if r.column == GATHER:
            per_chunk = ceil_div(_C.core.chunk_rows(self.m, self.world), self.comm_rows)
            chunk, tile = divmod(r.signal, per_chunk)
            details: Details = {"chunk": chunk, "tile": tile, "tile_row": r.row}
            details["awaits"] = f"{self.rank}:{r.signal}"
            return f"waits for tile {tile} of chunk {chunk}", details
        if r.column == ENTRY:
            awaited = f"{self.rank}.entry:{r.signal}"
            return f"waits for rank {r.signal} to enter", {"peer": r.signal, "awaits": awaited}
        if r.column == PARTIAL:
            source = r.signal // (self.flags.flag_rows() * self.flags.flag_columns())
            awaited = f"{self.rank}.flag:{r.launch}:{r.signal}"
            details = {"peer": source, "tile_row": r.row, "awaits": awaited}
            return f"waits for rank {source}'s part of a tile of row {r.row}", details
        if r.column == RESULT:
            details = {"peer": r.signal, "tile_row": r.row}
            return f"waits for rows of the result that rank {r.signal} sums", details
        return f"waits (code {r.column})", {}

    def _release(self, r: KernelRecord) -> tuple[str, Details]:
        details = self._place(r)
        if self.spec.op.exchanges:
            return f"stores of tile ({r.row}, {r.column}) done", details
        raised = []
        for owner in range(*self.flags.owners_of_tile(r.row)):
            flag = self.flags.flag_index(self.rank, owner, r.row, r.column)
            raised.append(f"{self.nodes.holder(owner)}.flag:{owner}:{flag}")
        details["raises"] = " ".join(raised)
        return f"stores of tile ({r.row}, {r.column}) done, flags", details

    def _sum(self, r: KernelRecord) -> tuple[str, Details]:
        details: Details = {"row_begin": r.row, "row_end": r.row + r.signal}
        details["tile_column"] = r.column
        name = f"sums {rows_text(r.row, r.row + r.signal)}"
        if r.launch != self.rank:
            details["owner"] = r.launch
            name += f" of rank {r.launch}"
        return name, details

    def _push(self, r: KernelRecord) -> tuple[str, Details]:
        details: Details = {"piece": r.row}
        if r.signal:
            details["raises"] = " ".join(f"{peer}:{self.rank}" for peer in range(self.world))
        return f"pushes piece {r.row} of the own rows", details

    def _send(self, r: KernelRecord) -> tuple[str, Details]:
        sent = r.row * self.spec.row_elements * self.spec.itemsize
        details: Details = {"peer": r.column, "rows": r.row, "bytes": sent}
        details["raises"] = f"{r.column}:{r.signal}"
        return f"{r.row} rows to rank {r.column}", details

    def _tokens(self, r: KernelRecord) -> tuple[str, Details]:
        return f"sums the products of tile ({r.row}, {r.column})", self._place(r)

    def _copy(self, r: KernelRecord) -> tuple[str, Details]:
        details: Details = {"row_begin": r.row, "row_end": r.row + r.signal}
        details["tile_column"] = r.column
        return f"copies {rows_text(r.row, r.row + r.signal)} of the result out", details


def _lane_class(r: KernelRecord) -> str:
    return (
        _WAIT_LANES.get(r.column, "waits")
        if r.kind == KernelEvent.wait
        else _LANES[KernelEvent(r.kind)]
    )


def _track(r: KernelRecord) -> tuple[int, str, int, int, int]:
    """Return the key of consecutive records; sorts by multiprocessor and kind of lane."""
    return r.sm, _lane_class(r), r.epoch, r.launch, r.unit


def in_lanes(records: Iterable[KernelRecord]) -> dict[str, list[KernelRecord]]:
    """Return the records by lane, in order, so that no two of a lane overlap.

    In a track, a wait starts at the end of the previous one: threads of a block wait for several
    conditions at once, which become true one after the other. Tracks share a lane if one ends
    before the other begins.
    """
    tracks: dict[tuple[int, str, int, int, int], list[KernelRecord]] = {}
    for record in sorted(records, key=lambda r: (r.end_ns, r.begin_ns)):
        track = tracks.setdefault(_track(record), [])
        if track and record.begin_ns < track[-1].end_ns:
            record = record._replace(begin_ns=track[-1].end_ns)
        track.append(record)
    lanes: dict[str, list[KernelRecord]] = {}
    by_begin = sorted(tracks.items(), key=lambda item: (item[0][:2], item[1][0].begin_ns))
    for (sm, suffix), group in groupby(by_begin, key=lambda item: item[0][:2]):
        shared: list[list[KernelRecord]] = []
        for _, track in group:
            free = next((lane for lane in shared if lane[-1].end_ns <= track[0].begin_ns), None)
            if free is None:
                shared.append(free := [])
            free += track
        for number, lane in enumerate(shared):
            lanes[f"SM {sm}.{number} {suffix}".strip()] = lane
    return lanes


class _Streams:
    """Interprets the records of the streams of a rank."""

    def __init__(self, rank_records: RankRecords) -> None:
        backend = rank_records.backend
        self.rank, self.op = rank_records.rank, backend.spec.op.name
        self.schedules, self.first_epoch = rank_records.schedules, rank_records.first_epoch
        # With two buffers an entry is that of the call before: nothing of this call raises it.
        self.credits = backend.layout.second_offset > 0
        self.nodes = _Nodes(rank_records.rank, backend.world, backend.nodes)

    def describe(self, r: Record) -> tuple[str, Details]:
        """Return name and details of the event."""
        work = Work(r.work)
        if work is Work.gemm:
            return "GEMM", {}
        if work is Work.collective:
            return collective(self.op), {"bytes": r.nbytes}
        if work is Work.enter:
            if self.credits:
                return "lets peers write the next call's rows", {}
            raised = [
                f"{peer}.entry:{twin}"
                for peer in self.nodes.neighbours
                for twin in self.nodes.twins
            ]
            return "enters the call", {"raises": " ".join(raised)}
        if work is Work.entry:
            if self.credits:
                return f"waits until rank {r.peer} has a free buffer", {"peer": r.peer}
            if self.op == "all_to_all_gemm":
                return f"waits for the heads of rank {r.peer}", {"peer": r.peer}
            awaited = f"{self.rank}.entry:{r.peer}"
            return f"waits for rank {r.peer} to enter", {"peer": r.peer, "awaits": awaited}
        if work is Work.own_gemm:
            return f"waits for the columns of rank {r.peer}", {"peer": r.peer}
        if work is Work.result:
            return "waits for all ranks' rows of the result", {}
        if work is Work.collect:
            return (
                "copies the result out" if Op[self.op].reduces else "copies gathered rows out",
                {},
            )
        if work is Work.wait:
            details: Details = {"chunk": r.chunk, "tile": r.tile, "awaits": f"{r.at}:{r.signal}"}
            return f"waits for tile {r.tile} of chunk {r.chunk}", details
        return self._moved(work, r)

    def _moved(self, work: Work, r: Record) -> tuple[str, Details]:
        details: Details = {"peer": r.peer, "bytes": r.nbytes}
        rows = "rows"
        if r.first < r.last and work is not Work.slab:
            rows = rows_text(r.first, r.last)
            details |= {"row_begin": r.first, "row_end": r.last}
        if r.chunk >= 0:
            details |= {"chunk": r.chunk, "tile": r.tile}
        if work is Work.send:
            details["raises"] = f"{self.rank}>>{r.peer}:{r.signal}"
            return f"{rows} to rank {r.peer}", details
        if work is Work.receive:
            details["awaits"] = f"{r.peer}>>{self.rank}:{r.signal}"
            if op_row(self.op).gathers or self.op == "gemm_all_to_all":
                details["raises"] = f"{self.rank}:{r.signal}"
            return f"{rows} from rank {r.peer}", details
        if work is Work.slab:
            flags = (f"{r.at}.flag:{r.at}:{flag}" for flag in range(r.first, r.last))
            details["raises"] = " ".join(flags)
            return f"partials to rank {r.peer}", details
        if r.signal >= 0:
            raised = range(r.signal, r.signal + self._tiles(r))
            details["raises"] = " ".join(f"{r.at}:{signal}" for signal in raised)
        if r.peer == self.rank:
            del details["peer"]
            return f"{rows} within own memory", details
        return f"{rows} {'to' if r.at in (r.peer, -1) else 'from'} rank {r.peer}", details

    def _tiles(self, r: Record) -> int:
        """Return the communication tiles of a copy: all own rows are one copy."""
        if not op_row(self.op).gathers or r.first >= r.last:
            return 1
        knobs = self.schedules[(r.call - self.first_epoch - 1) & 0xFFFFFFFF].knobs
        return ceil_div(r.last - r.first, knobs.comm_tile_rows or 1)


class _Played(_Streams):
    """Interprets the records of a simulated peer, which enters only at the one real rank."""

    def __init__(self, rank_records: RankRecords, peer: int) -> None:
        super().__init__(rank_records)
        self.rank, self.real = peer, rank_records.rank

    def describe(self, r: Record) -> tuple[str, Details]:
        """Return name and details of the event."""
        if Work(r.work) is Work.enter:
            return "enters the call", {"raises": f"{self.real}.entry:{self.rank}"}
        return super().describe(r)


def _stream_lane(name: str, r: Record) -> str:
    """Return the lane of a record.

    The two directions of an exchange run at once, so each has its own.
    """
    if r.work == Work.send:
        return outgoing_lane(r.peer)
    return incoming_lane(r.peer) if r.work == Work.receive else name


class _Clock:
    """Converts a rank's times and epochs to times and call numbers of events."""

    def __init__(self, rank_records: RankRecords, offset_ns: int, origin_ns: int) -> None:
        self.first = rank_records.first_epoch
        self.shift = offset_ns - origin_ns

    def call(self, epoch: int) -> int:
        """Return the number of the call with this epoch."""
        return (epoch - self.first - 1) & 0xFFFFFFFF

    def event(
        self,
        rank: int,
        lane: str,
        kind: Kind,
        what: tuple[str, Details],
        r: Record | KernelRecord,
        call: int,
    ) -> Event:
        """Return the event of a record."""
        name, details = what
        begin, length = (r.begin_ns + self.shift) / 1000, (r.end_ns - r.begin_ns) / 1000
        return Event(rank, lane, kind, name, begin, length, {"call": call, **details})


def gpu_events(rank_records: RankRecords, offset_ns: int, origin_ns: int) -> list[Event]:
    """Return the events of one rank, and of its simulated peers, by lane and in order.

    Args:
        rank_records: what the rank recorded.
        offset_ns: to add to this host's clock to get rank 0's.
        origin_ns: time zero of the trace, on rank 0's clock.
    """
    clock = _Clock(rank_records, offset_ns, origin_ns)
    calls = [_Kernels(rank_records, number) for number in range(len(rank_records.schedules))]
    events = []
    for lane, kernel_records in in_lanes(rank_records.kernels).items():
        for k in kernel_records:
            number = clock.call(k.epoch)
            what = calls[number].describe(k)
            events.append(
                clock.event(rank_records.rank, lane, _KINDS[KernelEvent(k.kind)], what, k, number)
            )
    events += _of_streams(rank_records.rank, _Streams(rank_records), rank_records.streams, clock)
    for peer, records in rank_records.agents.items():
        lanes = {"played": records}
        events += _of_streams(peer, _Played(rank_records, peer), lanes, clock)
    return events


def _of_streams(
    rank: int, meaning: _Streams, lanes: dict[str, list[Record]], clock: _Clock
) -> Iterator[Event]:
    for name, records in lanes.items():
        for r in sorted(records, key=lambda r: (r.begin_ns, r.end_ns)):
            if r.work == Work.call:
                continue
            # Library work is recorded by call number, because the library knows no epochs.
            number = r.call if r.work in (Work.gemm, Work.collective) else clock.call(r.call)
            kind, lane = _STREAM_KINDS[Work(r.work)], _stream_lane(name, r)
            yield clock.event(rank, lane, kind, meaning.describe(r), r, number)


def gpu_spans(rank_records: RankRecords, calls: Sequence[Span]) -> list[Span]:
    """Return the time of each call on the GPU; without a record, the time on the host."""
    clock = _Clock(rank_records, 0, 0)
    whole: dict[int, Span] = {}
    parts: dict[int, list[Record]] = {}
    for r in (record for records in rank_records.streams.values() for record in records):
        if r.work == Work.call:
            whole[clock.call(r.call)] = Span(r.begin_ns, r.end_ns)
        elif r.work in (Work.gemm, Work.collective):
            parts.setdefault(r.call, []).append(r)
    for number, of_call in parts.items():
        begin, end = min(r.begin_ns for r in of_call), max(r.end_ns for r in of_call)
        whole.setdefault(number, Span(begin, end))
    return [whole.get(number, span) for number, span in enumerate(calls)]
