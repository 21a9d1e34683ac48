"""Ops of experts that move only the tokens that a rank needs, in virtual time (csrc/cuda_moe).

    lists      kernels make the lists of work from the experts of all tokens
    dispatch   own rows | blocks claim pushes: rows -> d, signal, and tiles: await signals, multiply
    combine    blocks claim tiles, and sums of a token's products -> owner | reduction of own rows

Several hosts: all rows move, by the streams of gather.py and scatter.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

from flux.core.events import Kind
from flux.core.schedule import Visit
from flux.opsim.gather import Gather
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import LAUNCH_US, LinkPiece, SimulatedCall, TileQueue
from flux.opsim.scatter import Scatter
from flux.select.hardware import PUSH_US, STORE_SHARE


def _listed(call: SimulatedCall, rank: int) -> Process:
    assert call.routed is not None
    yield LAUNCH_US + 1e3 * call.routed.parts["lists of work"]
    call.note(rank, "stream", Kind.copy, "lists of work", 0.0)


class Dispatch(Gather):
    """The processes of all ranks of a dispatch."""

    def __init__(self, call: SimulatedCall) -> None:
        super().__init__(call)
        assert call.routed is not None
        self._works, self._pushes = call.routed.works, call.routed.moves
        self._copies_own = True

    def _stream(self, rank: int, tiles: TileQueue) -> Process:
        yield from _listed(self._call, rank)
        yield from super()._stream(rank, tiles)

    def _item(self, rank: int, lane: str, index: int) -> Process:
        work, there = self._works[rank], self._signals[rank]
        item = work.items[index]
        if item < -1:
            yield from self._push(rank, lane, *work.pushes[-2 - item])
            return
        tile, column = divmod(item, work.columns)
        needed = list(there) if item < 0 else [n for n in work.touches[tile] if n in there]
        yield from self._await(rank, lane, needed, "all rows" if item < 0 else f"tile {tile}")
        if item >= 0:
            yield from self._call.multiply(rank, lane, tile, column)

    def _push(self, rank: int, lane: str, peer: int, signal: int, count: int) -> Process:
        call, start = self._call, self._call.machine.now_us
        route = call.routes[rank, peer]
        yield PUSH_US
        yield call.machine.send(route.resources, count * call.problem.row_bytes / STORE_SHARE)
        call.note(rank, lane, Kind.copy, f"pushes {count} rows to rank {peer}", start)
        call.note_move(rank, peer, (0, count), start)
        call.machine.spawn(call.signal(rank, peer, self._signals[peer][signal]))


class Combine(Scatter):
    """The processes of all ranks of a combine."""

    def __init__(self, call: SimulatedCall) -> None:
        super().__init__(call)
        assert call.routed is not None
        self._works, self._drawn = call.routed.works, call.routed.drawn
        self._moves = call.routed.moves
        self._tiles: list[dict[tuple[int, int], Visit]] = []
        # By rank and (tile of sums, column): tiles of products that are not computed.
        self._awaited: list[dict[tuple[int, int], Counter]] = []
        rows, width = call.kernel.tile[:2]
        for rank, work in enumerate(self._works):
            visits = call.schedules[rank].visits
            self._tiles.append({(v.row_begin // rows, v.col_begin // width): v for v in visits})
            awaited: dict[tuple[int, int], Counter] = defaultdict(lambda: Counter(0))
            for touched in work.touches:
                for column in range(work.columns):
                    for tile in touched:
                        awaited[tile, column].missing += 1
            self._awaited.append(awaited)

    def _stream(self, rank: int) -> Process:
        yield from _listed(self._call, rank)
        yield from super()._stream(rank)

    def _item(self, rank: int, lane: str, index: int) -> Generator[float | Flag, None, list[Flag]]:
        call, work = self._call, self._works[rank]
        item, awaited = work.items[index], self._awaited[rank]
        tile, column = divmod(item if item >= 0 else -1 - item, work.columns)
        if item >= 0:
            yield from call.multiply(rank, lane, tile, column)
            for touched in work.touches[tile]:
                call.machine.arrive(awaited[touched, column])
            return []
        visit, start = self._tiles[rank][tile, column], call.machine.now_us
        if work.counts[tile]:
            yield awaited[tile, column].flag
        call.note_wait(rank, f"{lane} loads", f"waits for products of tile {tile}", start)
        start = call.machine.now_us
        width = visit.col_end - visit.col_begin
        # Blocks share the memory's speed.
        yield call.blocks * call.memory_us(work.counts[tile] * width * self._itemsize)
        call.note(rank, lane, Kind.reduce, f"sums products of tile {tile}, {column}", start)
        return [self._store(rank, piece) for piece in self._split(visit)]

    def _nbytes(self, rank: int, piece: LinkPiece) -> float:
        count = piece.row_end - piece.row_begin
        if self._moves:
            count = int(self._drawn.count(piece.row_begin, piece.row_end)[rank])
        return count * (piece.column_end - piece.column_begin) * self._itemsize

    def _add(self, rank: int, piece: LinkPiece, passes: float) -> Process:
        """Sum the partials that there are."""
        rows = piece.row_end - piece.row_begin
        if self._moves:
            passes = 1 + int(self._drawn.count(piece.row_begin, piece.row_end).sum()) / rows
        yield from super()._add(rank, piece, passes)
