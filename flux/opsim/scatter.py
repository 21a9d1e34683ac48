"""GEMM + ReduceScatter and GEMM + AllReduce in virtual time (docs/kernels/kernels.md).

    blocks     tile: multiply | store to its owner | next tile ...
    reduction  partials of a tile from all ranks: sum, in rank order | next tile of own rows ...
    network    sum of this host's partials -> owner on another host
    GemmAR     what comes behind the sums is in result.py

A block keeps its multiprocessor until its stores have left it, since they are in its shared memory
(or, on sm_80, in its registers). So in the first wave, whose blocks all store at once, blocks leave
one after the other; later they find the link free. A pingpong kernel multiplies the next tile
meanwhile. sm_90a with sm_margin = 0: the reduction starts as soon as blocks find no more tiles
(programmatic dependent launch); else after the GEMM.

reduce = in_kernel: warps of the blocks sum while others multiply, as fast as few registers allow.

path = in_kernel: no entries; blocks that find no more tiles sum, and copy the result to the output.
With reduce = in_flight partials stay, and a sum is a load through the NVLink switch, and a store.

path = medium: a tile is the GEMM of an owner's rows. A copy engine sends it while the next one
multiplies, and the reduction follows the last one.

sends = copies: tiles stay in own memory, and a copy engine sends an owner's rows when all of them
are there, in the order of the GEMM; those of the first owner by communication tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

from flux.core.events import Kind
from flux.core.schedule import Parcel, ParcelKind, Visit
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import (
    LAUNCH_US,
    RAISE_US,
    LinkPiece,
    Move,
    SimulatedCall,
    Stores,
    TileQueue,
    count_ends,
)
from flux.opsim.result import Results
from flux.select.hardware import SUM_US


class Scatter:
    """The processes of all ranks."""

    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        # A token's rows are summed before they leave.
        self._itemsize = call.problem.row_bytes / call.problem.row_elements
        world, lanes = call.world, call.world // call.problem.nodes
        # (holder, piece): partials of the holder's host that have not arrived.
        self._missing: dict[tuple[int, LinkPiece], Counter] = {}
        # By owner, in its own order.
        self._pieces: list[list[LinkPiece]] = [[] for _ in range(world)]
        for rank in range(world):
            for visit in call.schedules[rank].visits:
                self._pieces[rank] += [p for p in self._split(visit) if p.owner == rank]
        for rank, schedule in enumerate(call.schedules):
            for owner, pieces in enumerate(self._pieces):
                holder = schedule.homes[owner][0] if schedule.homes else owner
                # A rank that sends its own partials itself holds nobody else's.
                senders = 1 if call.hosts[holder] != call.hosts[rank] else lanes
                for piece in pieces:
                    at = rank if senders == 1 else holder
                    self._missing.setdefault((at, piece), Counter(senders))
        self._inbox: dict[tuple[int, int, int], Flag] = defaultdict(Flag)
        by_sums = [Stores(call, rank) for rank in range(world)]
        medium = call.knobs.path == "medium"
        copies = [Stores(call, rank, copied=True) for rank in range(world)]
        self._stores = copies if medium else by_sums
        # (rank, piece): it is computed; sends = copies.
        self._computed: dict[tuple[int, LinkPiece], Flag] = defaultdict(Flag)
        self._by_chunk = call.copied and not medium
        self._idle = [Flag() for _ in range(world)]
        self._gemm = count_ends(call, call.blocks)
        self._results = Results(call, by_sums, [len(pieces) for pieces in self._pieces])
        self._ends = count_ends(call, 2)  # the stream and the network's stream

    def start(self) -> list[Counter]:
        """Start them; return the counter of each rank's end."""
        for rank in range(self._call.world):
            self._call.machine.spawn(self._stream(rank))
            self._call.machine.spawn(self._network(rank))
        return self._ends

    def _split(self, visit: Visit) -> list[LinkPiece]:
        """Return the parts of a GEMM tile by owner."""
        chunk = self._call.problem.chunk
        pieces = []
        begin = visit.row_begin
        while begin < visit.row_end:
            end = min(visit.row_end, (begin // chunk + 1) * chunk)
            pieces.append(LinkPiece(begin // chunk, begin, end, visit.col_begin, visit.col_end))
            begin = end
        return pieces

    def _stream(self, rank: int) -> Process:
        """Enter, launch the kernel, then reduce."""
        call, machine = self._call, self._call.machine
        if call.world > 1 and call.knobs.path != "in_kernel":
            yield RAISE_US
            call.note(rank, "stream", Kind.barrier, "enters the call", machine.now_us - RAISE_US)
        tiles = call.tiles_of(rank)
        for block in range(call.blocks):
            machine.spawn(self._block(rank, block, tiles))
        if self._by_chunk and call.world > 1:
            machine.spawn(self._copies(rank))
        if call.world == 1:
            yield self._gemm[rank].flag
        else:
            yield from self._reduce(rank)
            if call.knobs.path == "in_kernel":
                yield from self._results.copy_out(rank)
            elif call.problem.op.all_reduces:
                yield from self._results.finish(rank)
        machine.arrive(self._ends[rank])

    def _block(self, rank: int, block: int, tiles: TileQueue) -> Process:
        call, machine = self._call, self._call.machine
        lane = f"SM {block}"
        ahead = call.kernel.schedule == "pingpong"
        before: list[Flag] = []  # stores that a pingpong kernel, or a copy engine, still makes
        yield from tiles.start(block)
        for index in tiles.of_block(block):
            leaving = yield from self._item(rank, lane, index)
            start = machine.now_us
            if call.knobs.path == "medium":
                before += leaving
                continue
            for stored in before if ahead else leaving:
                yield stored
            before = leaving
            call.note_wait(rank, f"{lane} stores", "stores leave", start)
        machine.raise_(self._idle[rank])
        for stored in before:
            yield stored
        tiles.end()
        machine.arrive(self._gemm[rank])

    def _item(self, rank: int, lane: str, index: int) -> Generator[float | Flag, None, list[Flag]]:
        """Compute a tile; return when its stores have left."""
        visit = self._call.schedules[rank].visits[index]
        yield from self._call.multiply(rank, lane, visit.row_begin, visit.col_begin)
        return [self._store(rank, piece) for piece in self._split(visit)]

    def _nbytes(self, rank: int, piece: LinkPiece) -> float:
        """Return the bytes of a rank's partials of a piece."""
        return piece.elements * self._itemsize

    def _store(self, rank: int, piece: LinkPiece) -> Flag:
        """Store a piece where its owner, or the rank that sends it to the owner, reads it."""
        call, machine = self._call, self._call.machine
        homes = call.schedules[rank].homes
        to = homes[piece.owner][0] if homes else piece.owner
        stays = to == rank or call.hosts[to] != call.hosts[rank]
        done, start = Flag(at_us=machine.now_us), machine.now_us
        if stays or self._by_chunk:
            if self._by_chunk and to != rank:
                machine.raise_(self._computed[rank, piece])
            else:
                machine.arrive(self._missing[rank, piece])
            return done
        if call.knobs.reduce != "in_flight":
            done = self._stores[rank].put(to, self._nbytes(rank, piece))
        machine.spawn(self._arrival(rank, to, piece, done, start))
        return done

    def _copies(self, rank: int) -> Process:
        """Copy the rows of each owner, in the order in which the GEMM completes them."""
        call, machine = self._call, self._call.machine
        computed = [p for v in call.schedules[rank].visits for p in self._split(v)]
        owners = [o for o in dict.fromkeys(piece.owner for piece in computed) if o != rank]
        yield LAUNCH_US
        for owner in owners:
            pieces = [piece for piece in computed if piece.owner == owner]
            first, last = call.problem.rows(owner)
            step = call.schedules[rank].knobs.comm_tile_rows if owner == owners[0] else None
            for begin in range(first, last, step or last - first):
                end = min(begin + (step or last - first), last)
                start = machine.now_us
                for piece in pieces:
                    if piece.row_begin < end and begin < piece.row_end:
                        yield self._computed[rank, piece]
                yield RAISE_US
                call.note_wait(rank, "copy", "waits for tiles", start)
                yield from call.carry(rank, "copy", (rank, owner), (begin, end))
            yield RAISE_US
            for piece in pieces:
                machine.arrive(self._missing[owner, piece])

    def _arrival(self, src: int, dst: int, piece: LinkPiece, done: Flag, start: float) -> Process:
        call, machine = self._call, self._call.machine
        yield done
        if call.knobs.reduce != "in_flight":
            call.log.moves.append(Move(src, dst, *piece[1:], start, machine.now_us))
        yield RAISE_US + (0.0 if call.knobs.path == "medium" else call.routes[src, dst].latency_us)
        machine.arrive(self._missing[dst, piece])

    def _reduce(self, rank: int) -> Process:
        """Sum the partials of the own rows, tile by tile."""
        call, machine = self._call, self._call.machine
        nodes = call.problem.nodes
        lanes = call.world // nodes
        if call.knobs.path == "in_kernel":
            yield self._idle[rank]
            yield SUM_US / 2
        elif call.knobs.reduce == "in_kernel":
            yield 0.0  # beside the tiles
        elif call.reduces_early:
            yield self._idle[rank]
        else:
            yield self._gemm[rank].flag
            yield LAUNCH_US
        for piece in self._pieces[rank]:
            start = machine.now_us
            yield self._missing[rank, piece].flag
            for host in range(nodes):
                if host != call.hosts[rank]:
                    for first in self._strips(rank, piece):
                        yield self._inbox[rank, host, first]
            call.note_wait(rank, "sums", "waits for partials", start)
            start = machine.now_us
            yield from self._add(rank, piece, lanes + nodes)
            name = f"sums rows {piece.row_begin}-{piece.row_end - 1}"
            call.note(rank, "sums", Kind.reduce, name, start)
            if call.problem.op.all_reduces:
                self._results.hand_out(rank, piece)
        yield self._gemm[rank].flag

    def _add(self, rank: int, piece: LinkPiece, passes: float) -> Process:
        """Sum partials, in passes over them and over the sums."""
        call, nbytes = self._call, piece.elements * self._itemsize
        if call.knobs.reduce == "in_flight":
            yield from call.through_switch(rank, nbytes, reads=True)
            return
        beside = call.knobs.reduce == "in_kernel" and self._idle[rank].at_us is None
        yield call.beside_us(nbytes * passes) if beside else call.memory_us(nbytes * passes)

    def _strips(self, owner: int, piece: LinkPiece) -> range:
        """Return the first rows of the owner's communication tiles that a piece touches."""
        rows = self._call.schedules[owner].knobs.comm_tile_rows
        assert rows is not None
        base, _ = self._call.problem.rows(owner)
        return range(base + (piece.row_begin - base) // rows * rows, piece.row_end, rows)

    def _network(self, rank: int) -> Process:
        """Send the sums of this host's partials to owners on other hosts."""
        call, machine = self._call, self._call.machine
        schedule = call.schedules[rank]
        own = call.hosts[rank]
        others = [peer for peer in range(call.world) if call.hosts[peer] != own]
        others.sort(key=lambda peer: ((call.hosts[peer] - own) % call.problem.nodes, peer))
        for peer in others:
            for parcel in schedule.parcels_for(peer):
                if parcel.kind != ParcelKind.result:
                    yield from self._parcel(rank, peer, parcel)
        machine.arrive(self._ends[rank])

    def _parcel(self, rank: int, peer: int, parcel: Parcel) -> Process:
        call, machine = self._call, self._call.machine
        for piece in self._pieces[peer]:
            if piece.row_begin < parcel.row_end and parcel.row_begin < piece.row_end:
                yield self._missing[rank, piece].flag
        nbytes = (parcel.row_end - parcel.row_begin) * call.problem.row_bytes
        lanes = call.world // call.problem.nodes
        if parcel.kind == ParcelKind.combined and lanes > 1:
            start = machine.now_us
            yield LAUNCH_US + call.memory_us(nbytes * (lanes + 1.0))
            call.note(rank, "network", Kind.reduce, "sums for a host", start)
        rows = (parcel.row_begin, parcel.row_end)
        yield from call.carry(rank, "network", (rank, peer), rows)
        machine.raise_(self._inbox[peer, call.hosts[rank], parcel.row_begin])
