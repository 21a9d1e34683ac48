"""AllGather + GEMM in virtual time, whose blocks push the rows themselves (csrc/cuda/gather.cuh).

    blocks   own rows -> all peers, words at them | await the words of a tile's rows, multiply | ...

A call is one launch. All blocks push before any of them multiplies, so a rank sends to all peers at
once, and its GEMM begins when its own rows have left.
"""

from __future__ import annotations

from flux.core.events import Kind
from flux.core.problem import ceil_div
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import SimulatedCall, TileQueue, count_ends
from flux.select.hardware import PUSH_US, STORE_SHARE


class Pushed:
    """The processes of all ranks."""

    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        self._words = [[Flag() for _ in range(call.world)] for _ in range(call.world)]
        self._ends = count_ends(call, call.blocks)

    def start(self) -> list[Counter]:
        """Start them; return the counter of each rank's end."""
        for rank in range(self._call.world):
            self._call.machine.spawn(self._rank(rank))
        return self._ends

    def _rank(self, rank: int) -> Process:
        """Push the own rows, and start the blocks' tiles."""
        call, machine = self._call, self._call.machine
        begin, end = call.problem.rows(rank)
        if call.world > 1:
            yield PUSH_US
            start = machine.now_us
            pushed = Counter(call.world - 1)
            for step in range(1, call.world):
                machine.spawn(self._push(rank, (rank + step) % call.world, pushed))
            yield pushed.flag
            if begin < end:
                name = f"pushes rows {begin}-{end - 1}"
                call.note(rank, "pushes", Kind.copy, name, start)
            for peer in range(call.world):
                if peer != rank:
                    machine.spawn(call.signal(rank, peer, self._words[peer][rank]))
        machine.raise_(self._words[rank][rank])
        tiles = call.tiles_of(rank)
        for block in range(call.blocks):
            machine.spawn(self._block(rank, block, tiles))

    def _push(self, rank: int, peer: int, pushed: Counter) -> Process:
        call, start = self._call, self._call.machine.now_us
        begin, end = rows = call.problem.rows(rank)
        route = call.routes[rank, peer]
        nbytes = (end - begin) * call.problem.row_bytes
        yield call.machine.send(route.resources, nbytes / STORE_SHARE)
        if begin < end:
            call.note_move(rank, peer, rows, start)
        call.machine.arrive(pushed)

    def _block(self, rank: int, block: int, tiles: TileQueue) -> Process:
        call, machine, lane = self._call, self._call.machine, f"SM {block}"
        chunk, visits = call.problem.chunk, call.schedules[rank].visits
        yield from tiles.start(block)
        for index in tiles.of_block(block):
            visit, start = visits[index], machine.now_us
            for owner in range(visit.row_begin // chunk, ceil_div(visit.row_end, chunk)):
                yield self._words[rank][owner]
            name = f"waits for rows {visit.row_begin}-{visit.row_end - 1}"
            call.note_wait(rank, f"{lane} loads", name, start)
            yield from call.multiply(rank, lane, visit.row_begin, visit.col_begin)
        tiles.end()
        machine.arrive(self._ends[rank])
