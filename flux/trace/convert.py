"""Convert the records of a rank's lanes to events with readable names.

Two details connect events: ``raises`` names the condition that an event made true, ``awaits`` the
condition that an event waited for. The strings are equal if one event ended the other's wait.

    "1:6"      signal 6 in the pad of rank 1
    "0>1:6"    the same in its stand-in on rank 0's host: the tile may leave
    "0>>1:6"   the tile is being sent
    "0.gemm:1.2"   rank 0's part of tile 2 of chunk 1 is computed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flux.core.events import Event, Kind
from flux.core.knobs import op_row
from flux.core.recorder import LaneRecords, Record, Work
from flux.core.schedule import Parcel, TileSchedule, Transfer, Visit

Details = dict[str, int | str]

KINDS = {
    Work.gemm: Kind.gemm,
    Work.reduce: Kind.reduce,
    Work.copy: Kind.copy,
    Work.collective: Kind.copy,
    Work.send: Kind.send,
    Work.receive: Kind.receive,
    Work.wait: Kind.wait,
    Work.own_gemm: Kind.wait,
    Work.own_copies: Kind.wait,
    Work.barrier: Kind.barrier,
}


def collective(op: str) -> str:
    """Return the name of an op's collective, for people."""
    return op_row(op).collective.replace("_", "-")


@dataclass(frozen=True)
class Span:
    """One call of one rank, on its clock."""

    begin_ns: int
    end_ns: int


def rows_text(begin: int, end: int) -> str:
    """Return text for rows [begin, end)."""
    return f"row {begin}" if end == begin + 1 else f"rows {begin}-{end - 1}"


class _TracedCall:
    """Interprets the records of one call; ``schedule`` is None in a world of one rank."""

    def __init__(self, op: str, rank: int, schedule: TileSchedule | None) -> None:
        self.op = op
        self.rank = rank
        self.schedule = schedule

    def _remote(self, peer: int) -> bool:
        assert self.schedule is not None
        hosts = self.schedule.topology.hosts
        return hosts[peer] != hosts[self.rank]

    def _raised(self, at: int, signal: int) -> str:
        """Return the name of a signal that this rank has raised."""
        stand_in = at != self.rank and self._remote(at)
        return f"{self.rank}>{at}:{signal}" if stand_in else f"{at}:{signal}"

    def _parcel(self, record: Record, sender: int, receiver: int) -> Parcel:
        assert self.schedule is not None
        return self.schedule.of_rank(sender).parcels_for(receiver)[record.first]

    def _completed(self, visits: Sequence[Visit]) -> Iterator[Transfer]:
        assert self.schedule is not None
        for visit in visits:
            yield from self.schedule.transfers[slice(*visit.completes)]

    def describe(self, record: Record) -> tuple[str, Details]:
        """Return name and details of the event."""
        describe: dict[Work, Callable[[Record], tuple[str, Details]]] = {
            Work.gemm: self._gemm,
            Work.reduce: self._reduce,
            Work.copy: self._copy,
            Work.collective: self._collective,
            Work.send: self._send,
            Work.receive: self._receive,
            Work.wait: self._wait,
            Work.own_gemm: self._own_gemm,
            Work.own_copies: lambda r: ("waits for its copies and sums", {}),
            Work.barrier: lambda r: ("all ranks enter the call", {}),
        }
        return describe[Work(record.work)](record)

    def _gemm(self, record: Record) -> tuple[str, Details]:
        schedule = self.schedule
        if schedule is None or schedule.knobs.path == "unfused" or record.last == 0:
            return "GEMM", {}
        visits = schedule.visits[record.first : record.last]
        first, last = visits[0], visits[-1]
        many = record.last - record.first > 1
        tiles = f"tiles {record.first}-{record.last - 1}" if many else f"tile {record.first}"
        details: Details = {
            "tile": record.first,
            "tiles": record.last - record.first,
            "row_begin": first.row_begin,
            "row_end": last.row_end,
            "col_begin": first.col_begin,
            "col_end": last.col_end,
        }
        if first.owner >= 0:
            details["owner"] = first.owner
        raised = list(self._raised_by_gemm(visits))
        if raised:
            details["raises"] = " ".join(raised)
        return f"{tiles}: {rows_text(first.row_begin, last.row_end)}", details

    def _raised_by_gemm(self, visits: Sequence[Visit]) -> Iterator[str]:
        """Yield the conditions that tiles of GEMM + ReduceScatter made true.

        A tile may leave now (store = staged), or is already in its owner's memory (store = direct).
        """
        assert self.schedule is not None
        if op_row(self.op).gathers:
            return
        staged = self.schedule.knobs.store == "staged"
        for t in self._completed(visits):
            if staged:
                yield f"{self.rank}.gemm:{t.chunk}.{t.tile}"
            # Tiles for other hosts are sent from where they were computed.
            if not staged or self._remote(t.dst):
                yield self._raised(t.dst, t.signal)

    def _rows(self, record: Record) -> Details:
        details: Details = {
            "chunk": record.chunk,
            "tile": record.tile,
            "row_begin": record.first,
            "row_end": record.last,
            "bytes": record.nbytes,
        }
        if record.at >= 0:
            details["raises"] = self._raised(record.at, record.signal)
        return details

    def _reduce(self, record: Record) -> tuple[str, Details]:
        name = f"sums {rows_text(record.first, record.last)}"
        details = self._rows(record)
        if record.peer != self.rank:
            details["peer"] = record.peer
            name += f" for rank {record.peer}"
        return name, details

    def _copy(self, record: Record) -> tuple[str, Details]:
        if self.schedule is not None and op_row(self.op).exchanges:
            name, details = self._gemm(record)
            return f"copies {name}", details
        details = self._rows(record)
        rows = rows_text(record.first, record.last)
        if record.peer == self.rank:
            return f"{rows} within own memory", details
        details["peer"] = record.peer
        direction = "to" if record.at == record.peer else "from"
        return f"{rows} {direction} rank {record.peer}", details

    def _collective(self, record: Record) -> tuple[str, Details]:
        return collective(self.op), {"bytes": record.nbytes}

    def _of_parcel(self, parcel: Parcel, record: Record) -> Details:
        return {
            "chunk": parcel.chunk,
            "row_begin": parcel.row_begin,
            "row_end": parcel.row_end,
            "peer": record.peer,
            "bytes": record.nbytes,
            "holds": parcel.kind.name,
        }

    def _send(self, record: Record) -> tuple[str, Details]:
        parcel = self._parcel(record, self.rank, record.peer)
        details = self._of_parcel(parcel, record)
        details["raises"] = f"{self.rank}>>{record.peer}:{parcel.signal}"
        return f"{rows_text(parcel.row_begin, parcel.row_end)} to rank {record.peer}", details

    def _receive(self, record: Record) -> tuple[str, Details]:
        parcel = self._parcel(record, record.peer, self.rank)
        details = self._of_parcel(parcel, record)
        details["awaits"] = f"{record.peer}>>{self.rank}:{parcel.signal}"
        details["raises"] = f"{self.rank}:{parcel.signal}"
        return f"{rows_text(parcel.row_begin, parcel.row_end)} from rank {record.peer}", details

    def _wait(self, record: Record) -> tuple[str, Details]:
        if record.signal < 0:  # a sender's thread
            parcel = self._parcel(record, self.rank, record.peer)
            rows = rows_text(parcel.row_begin, parcel.row_end)
            awaited = f"{self.rank}>{record.peer}:{parcel.signal}"
            return f"waits for {rows}", {"peer": record.peer, "awaits": awaited}
        details: Details = {
            "chunk": record.chunk,
            "tile": record.tile,
            "peer": record.peer,
            "awaits": f"{record.at}:{record.signal}",
        }
        whose = "its own" if record.peer == self.rank else f"rank {record.peer}'s"
        return f"waits for {whose} tile {record.tile} of chunk {record.chunk}", details

    def _own_gemm(self, record: Record) -> tuple[str, Details]:
        awaited = f"{self.rank}.gemm:{record.chunk}.{record.tile}"
        details: Details = {"chunk": record.chunk, "tile": record.tile, "awaits": awaited}
        return f"waits for its own tile {record.tile} of chunk {record.chunk}", details


def events_of(
    op: str,
    rank: int,
    lanes: Iterable[LaneRecords],
    schedules: Sequence[TileSchedule],
    spans: Sequence[Span],
    offset_ns: int,
    origin_ns: int,
) -> list[Event]:
    """Return the events of one rank, by lane and in order.

    Args:
        op: ``ag_gemm`` | ``gemm_rs`` | ``gemm_ar``.
        rank: the rank of the events.
        lanes: the records.
        schedules: of each call; empty in a world of one rank.
        spans: of each call.
        offset_ns: to add to this rank's clock to get rank 0's.
        origin_ns: time zero of the trace, on rank 0's clock.
    """
    calls = [
        _TracedCall(op, rank, schedules[number] if schedules else None)
        for number in range(len(spans))
    ]
    events = []
    for lane in lanes:
        number = 0
        for record in lane.records:
            while number + 1 < len(spans) and record.begin_ns >= spans[number + 1].begin_ns:
                number += 1
            name, details = calls[number].describe(record)
            events.append(
                Event(
                    rank,
                    lane.name,
                    KINDS[Work(record.work)],
                    name,
                    (record.begin_ns + offset_ns - origin_ns) / 1000,
                    (record.end_ns - record.begin_ns) / 1000,
                    {"call": number, **details},
                )
            )
    return events
