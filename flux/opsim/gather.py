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
from flux.opsim.parts import LAUNCH_US, RAISE_US, Move, SimulatedCall, TileQueue, count_ends
from flux.select.heuristic import awaits_entries, copies_own_rows


def gather_processes(call: SimulatedCall) -> list[Counter]:
    """Start the processes of all ranks; return the counter of each rank's end."""
    return _Gather(call).start()


class _Gather:
    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        knobs = call.schedules[0].knobs
        self._pulls = knobs.direction == "pull"
        self._enters = awaits_entries(call.problem, knobs)
        self._copies_own = copies_own_rows(call.problem, knobs, call.kernel.tile[0])
        self._signals: list[dict[int, Flag]] = [{} for _ in range(call.world)]
        self._own = [Flag() for _ in range(call.world)]
        # The GEMM's blocks, the copy stream and the network's stream.
        self._ends = count_ends(call, call.blocks + 2)

    def start(self) -> list[Counter]:
        call = self._call
        for schedule in call.schedules:
            for transfer in schedule.transfers:
                if transfer.src != transfer.dst:
                    self._signals[transfer.dst].setdefault(transfer.signal, Flag())
        for rank, schedule in enumerate(call.schedules):
            inside: list[Transfer] = []
            across: list[Transfer] = []
            for transfer in schedule.transfers:
                if transfer.src == transfer.dst:
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
            call.log.add(rank, "stream", Kind.barrier, "enters the call", 0.0, machine.now_us)
        if call.world > 1 and self._copies_own:
            begin, end = call.problem.rows(rank)
            start = machine.now_us
            yield LAUNCH_US + call.memory_us(2.0 * (end - begin) * call.problem.row_bytes)
            call.log.add(rank, "stream", Kind.copy, "own rows", start, machine.now_us)
        machine.raise_(self._own[rank])
        for block in range(call.blocks):
            machine.spawn(self._block(rank, block, tiles))

    def _block(self, rank: int, block: int, tiles: TileQueue) -> Process:
        call, machine = self._call, self._call.machine
        lane = f"SM {block}"
        visits = call.schedules[rank].visits
        yield from tiles.start(block)
        for index in tiles.of_block(block):
            visit = visits[index]
            start = machine.now_us
            last = None
            for number in self._remote(rank, visit):
                signal = self._signals[rank][number]
                if signal.at_us is None:
                    last = number
                    yield signal
            if last is not None:
                awaited = {"awaits": f"{rank}:{last}"}
                name = f"waits for rows {visit.row_begin}-{visit.row_end - 1}"
                call.log.add(
                    rank, f"{lane} loads", Kind.wait, name, start, machine.now_us, **awaited
                )
            start = machine.now_us
            yield call.tile_us
            name = f"tile {visit.row_begin}, {visit.col_begin}"
            call.log.add(rank, lane, Kind.gemm, name, start, machine.now_us)
        tiles.end()
        machine.arrive(self._ends[rank])

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
            if machine.now_us > start:
                name = f"waits for tile {transfer.chunk}.{transfer.tile}"
                call.log.add(rank, lane, Kind.wait, name, start, machine.now_us)
                start = machine.now_us
            yield call.routes[source, transfer.dst].latency_us
            rows = transfer.row_end - transfer.row_begin
            yield call.copy(source, transfer.dst, rows * call.problem.row_bytes)
            self._log_copy(rank, lane, transfer, start)
            yield RAISE_US
            machine.raise_(self._signals[transfer.dst][transfer.signal])
        machine.arrive(self._ends[rank])

    def _log_copy(self, rank: int, lane: str, transfer: Transfer, start: float) -> None:
        call, now = self._call, self._call.machine.now_us
        t = transfer
        peer = t.dst if rank == t.src else t.src
        name = f"rows {t.row_begin}-{t.row_end - 1} {'to' if rank == t.src else 'of'} rank {peer}"
        kind = Kind.copy if lane == "copy" else Kind.send
        call.log.add(rank, lane, kind, name, start, now, peer=peer, raises=f"{t.dst}:{t.signal}")
        columns = (0, call.problem.row_elements)
        call.log.moves.append(Move(t.src, t.dst, t.row_begin, t.row_end, *columns, start, now))
