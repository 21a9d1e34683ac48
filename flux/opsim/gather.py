"""AllGather + GEMM in virtual time, with the streams of csrc/cuda_host/gather_tiles.h.

    stream   kernel ............... | join
    copies   await entry of d, rows -> d, signal d | ... | entry -> all peers        (push)

    stream   entry -> all peers | own rows, their signals | kernel ............... | join
             offer own rows | await the offer of s, rows of s, signal, offer | ...   (pull)
    network  rows -> d on another host, signal d | ...

A block takes its next tile, polls the signals of the tile's rows, and multiplies. One stream makes
the copies of a rank one after the other, so each rank keeps one copy engine busy; copies between
hosts have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from flux.core.events import Kind
from flux.core.schedule import Transfer, Visit
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import LAUNCH_US, RAISE_US, SimulatedCall, TileQueue, count_ends
from flux.select.heuristic import awaits_entries, copies_own_rows


class Gather:
    """The processes of all ranks."""

    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        knobs = call.knobs
        self._pulls = knobs.direction == "pull"
        self._enters = awaits_entries(call.problem, knobs)
        self._copies_own = copies_own_rows(call.problem, knobs, call.kernel.tile[0])
        self._signals: list[dict[int, Flag]] = [{} for _ in range(call.world)]
        self._own = [Flag() for _ in range(call.world)]
        self._own_copies = 1
        self._pushes = False  # blocks send the rows, and no copies do
        # The GEMM's blocks, the copy stream and the network's stream.
        self._ends = count_ends(call, call.blocks + 2)

    def start(self) -> list[Counter]:
        """Start them; return the counter of each rank's end."""
        call = self._call
        for schedule in call.schedules:
            for transfer in schedule.transfers:
                if transfer.src != transfer.dst and transfer.signal >= 0:
                    self._signals[transfer.dst].setdefault(transfer.signal, Flag())
        for rank, schedule in enumerate(call.schedules):
            inside: list[Transfer] = []
            across: list[Transfer] = []
            for transfer in schedule.transfers:
                if transfer.src == transfer.dst or self._pushes:
                    continue  # own rows, which are there as soon as they are copied
                same = call.hosts[transfer.src] == call.hosts[transfer.dst]
                (inside if same else across).append(transfer)
            tiles = call.tiles_of(rank)
            call.machine.spawn(self._stream(rank, tiles))
            call.machine.spawn(self._copies(rank, "copy", inside))
            call.machine.spawn(self._copies(rank, "network", across))
        return self._ends

    def _stream(self, rank: int, tiles: TileQueue) -> Process:
        """Enter and copy the own rows, where a call does, and launch the kernel."""
        call, machine = self._call, self._call.machine
        if call.world > 1 and self._enters:
            yield RAISE_US
            call.note(rank, "stream", Kind.barrier, "enters the call", machine.now_us - RAISE_US)
        if call.world > 1 and self._copies_own:
            begin, end = call.problem.rows(rank)
            start, nbytes = machine.now_us, 2.0 * (end - begin) * call.problem.row_bytes
            yield LAUNCH_US + call.memory_us(nbytes * self._own_copies)
            call.note(rank, "stream", Kind.copy, "own rows", start)
        machine.raise_(self._own[rank])
        for block in range(call.blocks):
            machine.spawn(self._block(rank, block, tiles))

    def _block(self, rank: int, block: int, tiles: TileQueue) -> Process:
        call, machine = self._call, self._call.machine
        lane = f"SM {block}"
        visits = call.schedules[rank].visits
        yield from tiles.start(block)

        def is_ready(tile: int) -> bool:
            needed = self._remote(rank, visits[tile])
            return all(self._signals[rank][number].at_us is not None for number in needed)

        claimed = tiles.of_block(block)
        while (yield from tiles.next_is_ready(block, is_ready)):
            index = next(claimed, None)
            if index is None:
                break
            yield from self._item(rank, lane, index)
        tiles.end()
        machine.arrive(self._ends[rank])

    def _item(self, rank: int, lane: str, index: int) -> Process:
        """Await the rows of a tile, and multiply."""
        visit = self._call.schedules[rank].visits[index]
        name = f"rows {visit.row_begin}-{visit.row_end - 1}"
        yield from self._await(rank, lane, self._remote(rank, visit), name)
        yield from self._call.multiply(rank, lane, visit.row_begin, visit.col_begin)

    def _await(self, rank: int, lane: str, signals: Iterable[int], rows: str) -> Process:
        call, start, last = self._call, self._call.machine.now_us, None
        for number in signals:
            signal = self._signals[rank][number]
            if signal.at_us is None:
                last = number
                yield signal
        if last is not None:
            awaits = f"{rank}:{last}"
            call.note(rank, f"{lane} loads", Kind.wait, f"waits for {rows}", start, awaits=awaits)

    def _remote(self, rank: int, visit: Visit) -> Iterable[int]:
        """Return the signals of a tile that come from peers."""
        signals = self._signals[rank]
        return (number for number in range(*visit.waits) if number in signals)

    def _copies(self, rank: int, lane: str, transfers: list[Transfer]) -> Process:
        """Make the copies of one stream, in order."""
        call, machine = self._call, self._call.machine
        if transfers:
            if self._enters:
                yield RAISE_US
            if self._pulls or lane == "network":
                yield self._own[rank]
            yield LAUNCH_US
        for transfer in transfers:
            start = machine.now_us
            source = transfer.src
            # A tile must have come before it is forwarded, and be offered before it is pulled.
            there = self._signals[source].get(transfer.signal) if transfer.forwarded else None
            if there is None and self._pulls:
                there = self._own[source]
            if there is not None:
                if there.at_us is None:
                    yield there
                # A puller polls for the offer, whether it comes first or the offer does.
                offered = (there.at_us or 0.0) + (RAISE_US if self._pulls else 0.0)
                yield max(0.0, offered - machine.now_us)
            call.note_wait(rank, lane, f"waits for tile {transfer.chunk}.{transfer.tile}", start)
            ends, rows = (source, transfer.dst), (transfer.row_begin, transfer.row_end)
            raises = f"{transfer.dst}:{transfer.signal}"
            yield from call.carry(rank, lane, ends, rows, raises=raises)
            if transfer.signal >= 0:
                yield RAISE_US
                machine.raise_(self._signals[transfer.dst][transfer.signal])
        machine.arrive(self._ends[rank])
