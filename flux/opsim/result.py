"""The second phase of GemmAR in virtual time: sums travel to all ranks.

    reduction  sum -> memory of all ranks of the own host, tile by tile        (as it is made)
    network    own rows -> one rank of each other host, tile by tile           (after the reduction)
    copies     rows from another host -> the other ranks of the own host, as each tile comes
    stream     "what I send is there", await the own host's ranks | result -> output | status

(csrc/cuda_host/cuda_op_nodes.cpp.) On path in_kernel each sum has a signal, behind which blocks of
the kernel copy it to the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.core.events import Kind
from flux.core.schedule import Transfer
from flux.opsim.machine import Counter, Flag, Process
from flux.opsim.parts import LAUNCH_US, RAISE_US, LinkPiece, Move, SimulatedCall, Stores
from flux.select.hardware import SUM_US


class Results:
    """The results of one call."""

    def __init__(self, call: SimulatedCall, stores: Sequence[Stores], sums: Sequence[int]) -> None:
        self._call, self._stores = call, stores
        self._itemsize = call.problem.row_bytes / call.problem.row_elements
        self._there = [Flag() for _ in range(call.world)]
        # Sums of others that are not there.
        self._put = [Counter(sum(sums) - own) for own in sums]
        self._came: dict[tuple[int, int, int], Flag] = {}  # receiver, owner, tile: across hosts
        self._across: list[list[Transfer]] = []
        self._forwarded: list[list[Transfer]] = []
        for rank, schedule in enumerate(call.schedules):
            host, results = call.hosts[rank], schedule.results
            self._across.append([t for t in results if call.hosts[t.dst] != host])
            forwarded = [t for t in results if t.forwarded and call.hosts[t.dst] == host]
            forwarded.sort(key=self._arrival)
            self._forwarded.append(forwarded)
            for t in self._across[-1]:
                self._came[t.dst, t.chunk, t.tile] = Flag()

    def _arrival(self, transfer: Transfer) -> tuple[int, int]:
        """Return a sort key: hosts are served one after the other, tile by tile."""
        hosts = self._call.hosts
        behind = (hosts[transfer.src] - hosts[transfer.chunk]) % self._call.problem.nodes
        return behind, transfer.tile

    def _beside(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's host, the next one first."""
        world, hosts = self._call.world, self._call.hosts
        others = ((rank + ahead) % world for ahead in range(1, world))
        return [peer for peer in others if hosts[peer] == hosts[rank]]

    def hand_out(self, rank: int, piece: LinkPiece) -> None:
        """Store a sum in the memory of the other ranks of the host."""
        call, nbytes = self._call, piece.elements * self._itemsize
        by_switch = call.knobs.reduce == "in_flight"
        links = call.through_switch(rank, nbytes, reads=False)[1:] if by_switch else None
        for peer in self._beside(rank):
            stored = links[peer] if links else self._stores[rank].put(peer, nbytes)
            call.machine.spawn(self._handed_out(rank, peer, piece, stored, call.machine.now_us))

    def _handed_out(
        self, src: int, dst: int, piece: LinkPiece, stored: Flag, start: float
    ) -> Process:
        yield stored
        call = self._call
        call.log.moves.append(Move(src, dst, *piece[1:], start, call.machine.now_us))
        if call.knobs.path == "in_kernel":
            yield RAISE_US + call.routes[src, dst].latency_us
            call.machine.arrive(self._put[dst])

    def copy_out(self, rank: int) -> Process:
        """Copy sums of other ranks to the output, of path in_kernel."""
        call, machine = self._call, self._call.machine
        start = machine.now_us
        if self._put[rank].missing:
            yield self._put[rank].flag
        call.note(rank, "stream", Kind.wait, "waits for sums", start)
        begin, end = call.problem.rows(rank)
        foreign = (call.problem.m - (end - begin)) * call.problem.row_bytes
        start = machine.now_us
        yield SUM_US / 2 + call.memory_us(2.0 * foreign)
        call.note(rank, "stream", Kind.copy, "sums to output", start)

    def finish(self, rank: int) -> Process:
        """Send the own rows to other hosts, forward theirs, and copy the result to the output."""
        call, machine = self._call, self._call.machine
        shared = Counter(2)
        machine.spawn(self._copies(rank, "network", self._across[rank], shared))
        machine.spawn(self._copies(rank, "copy", self._forwarded[rank], shared))
        beside = self._beside(rank)
        for peer in beside:
            # Stores to one rank leave in order, so all before it have left.
            yield self._stores[rank].put(peer, 0)
        yield shared.flag
        latencies = (call.routes[rank, peer].latency_us for peer in beside)
        yield LAUNCH_US + RAISE_US + max(latencies, default=0.0)
        machine.raise_(self._there[rank])
        start = machine.now_us
        for peer in beside:
            yield self._there[peer]
        call.note(rank, "stream", Kind.wait, "waits for all rows", start)
        start = machine.now_us
        nbytes = 2.0 * call.problem.m * call.problem.n * self._itemsize
        yield LAUNCH_US + call.memory_us(nbytes)
        call.note(rank, "stream", Kind.copy, "result to output", start)
        yield LAUNCH_US

    def _copies(
        self, rank: int, lane: str, transfers: Sequence[Transfer], ended: Counter
    ) -> Process:
        """Make the copies of one stream, in order: own rows at once, others when they have come."""
        call, machine = self._call, self._call.machine
        if transfers:
            yield LAUNCH_US
        for t in transfers:
            if t.forwarded:
                yield self._came[rank, t.chunk, t.tile]
            yield from call.carry(rank, lane, (rank, t.dst), (t.row_begin, t.row_end))
            if lane == "network":
                machine.raise_(self._came[t.dst, t.chunk, t.tile])
        machine.arrive(ended)
