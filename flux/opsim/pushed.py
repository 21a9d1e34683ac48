"""AllGather + GEMM in virtual time, whose blocks push the rows themselves (csrc/cuda/gather.cuh).

    blocks   own rows -> all peers, words at them | await the words of a tile's rows, multiply | ...

A call is one launch. All blocks push before any of them multiplies, so a rank sends to all peers at
once, and its GEMM begins when its own rows have left.
"""

from __future__ import annotations

from collections.abc import Iterator

from flux.core.events import Kind
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import RAISE_US, SimulatedCall, TileQueue, count_ends
from flux.select.hardware import PUSH_US, STORE_SHARE


def pushed_processes(call: SimulatedCall) -> list[Counter]:
    """Start the processes of all ranks; return the counter of each rank's end."""
    words = [[Flag() for _ in range(call.world)] for _ in range(call.world)]
    ends = count_ends(call, call.blocks)
    for rank in range(call.world):
        call.machine.spawn(_rank(call, rank, words, ends))
    return ends


def _rank(call: SimulatedCall, rank: int, words: list[list[Flag]], ends: list[Counter]) -> Process:
    """Push the own rows, and start the blocks' tiles."""
    machine = call.machine
    begin, end = call.problem.rows(rank)
    if call.world > 1:
        yield PUSH_US
        start = machine.now_us
        pushed = Counter(call.world - 1)
        for step in range(1, call.world):
            peer = (rank + step) % call.world
            machine.spawn(_push(call, rank, peer, (begin, end), pushed))
        yield pushed.flag
        if begin < end:
            name = f"pushes rows {begin}-{end - 1}"
            call.note(rank, "pushes", Kind.copy, name, start)
        for peer in range(call.world):
            if peer != rank:
                machine.spawn(_raise(call, rank, peer, words[peer][rank]))
    machine.raise_(words[rank][rank])
    tiles = call.tiles_of(rank)
    for block in range(call.blocks):
        machine.spawn(_block(call, rank, block, tiles, words[rank], ends[rank]))


def _push(
    call: SimulatedCall, rank: int, peer: int, rows: tuple[int, int], pushed: Counter
) -> Process:
    start, (begin, end) = call.machine.now_us, rows
    route = call.routes[rank, peer]
    yield call.machine.send(route.resources, (end - begin) * call.problem.row_bytes / STORE_SHARE)
    if begin < end:
        call.note_move(rank, peer, rows, start)
    call.machine.arrive(pushed)


def _raise(call: SimulatedCall, rank: int, peer: int, word: Flag) -> Process:
    yield RAISE_US + call.routes[rank, peer].latency_us
    call.machine.raise_(word)


def _owners(call: SimulatedCall, row_begin: int, row_end: int) -> Iterator[int]:
    for owner in range(call.world):
        begin, end = call.problem.rows(owner)
        if max(begin, row_begin) < min(end, row_end):
            yield owner


def _block(
    call: SimulatedCall, rank: int, block: int, tiles: TileQueue, words: list[Flag], end: Counter
) -> Process:
    machine, lane = call.machine, f"SM {block}"
    visits = call.schedules[rank].visits
    yield from tiles.start(block)
    for index in tiles.of_block(block):
        visit, start = visits[index], machine.now_us
        for owner in _owners(call, visit.row_begin, visit.row_end):
            yield words[owner]
        name = f"waits for rows {visit.row_begin}-{visit.row_end - 1}"
        call.note_wait(rank, f"{lane} loads", name, start)
        yield from call.multiply(rank, lane, visit.row_begin, visit.col_begin)
    tiles.end()
    machine.arrive(end)
