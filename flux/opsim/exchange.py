"""All-to-alls of heads beside a GEMM in virtual time (csrc/cuda_host/cuda_op_exchange.cpp).

    AllToAllGemm   an AllGather by columns (gather.py): own heads, by rank | offer | tiles of rows
    GemmAllToAll   blocks   columns of rank + 1 | columns of rank + 2 | ... | own ones last
                   copies     await columns of d | block -> d, flag | ...  stream: await all, take

A block is a copy for each packed tensor. To a rank of another host it is a message.
"""

from __future__ import annotations

from typing import cast

from flux.core.events import Kind
from flux.opsim.gather import Gather
from flux.opsim.machine import Counter, Process
from flux.opsim.parts import LAUNCH_US, RAISE_US, SimulatedCall, TileQueue, count_ends
from flux.select.all_to_all import GpuBlocks


class HeadsGather(Gather):
    """The processes of all ranks of an AllToAllGemm."""

    def __init__(self, call: SimulatedCall) -> None:
        super().__init__(call)
        self._pulls = self._enters = self._copies_own = True
        self._own_copies = call.world


class HeadsScatter:
    """The processes of all ranks of a GemmAllToAll."""

    def __init__(self, call: SimulatedCall) -> None:
        orders = cast(list[GpuBlocks], call.schedules)
        self._call, self._orders, self._wide = call, orders, call.kernel.cluster_tile.columns
        # By rank and column of tiles: tiles that are not computed.
        self._uncomputed: list[dict[int, Counter]] = [{} for _ in orders]
        for of_rank, order in zip(self._uncomputed, orders, strict=True):
            for visit in order.visits:
                of_rank.setdefault(visit.col_begin // self._wide, Counter(0)).missing += 1
        self._came = [Counter(call.world + 1) for _ in orders]  # two streams, and blocks
        self._gemm, self._ends = count_ends(call, call.blocks), count_ends(call, 1)

    def start(self) -> list[Counter]:
        """Start them; return the counter of each rank's end."""
        call = self._call
        for rank, order in enumerate(self._orders):
            call.machine.spawn(self._stream(rank))
            for lane, is_far in (("copy", False), ("network", True)):
                hosts = call.hosts
                peers = [p for p in order.peers if (hosts[p] != hosts[rank]) == is_far]
                call.machine.spawn(self._copies(rank, lane, peers))
        return self._ends

    def _stream(self, rank: int) -> Process:
        call, machine = self._call, self._call.machine
        if call.world > 1:
            yield RAISE_US
        tiles = TileQueue(call, len(self._orders[rank].visits), False)
        for block in range(call.blocks):
            machine.spawn(self._block(rank, block, tiles))
        yield self._gemm[rank].flag
        if call.world > 1:
            begin, end = call.problem.rows(rank)
            own, start = 2.0 * (end - begin) * call.problem.row_bytes, machine.now_us
            yield LAUNCH_US + call.memory_us(own)
            call.note(rank, "stream", Kind.copy, "own block", start)
            yield self._came[rank].flag
            start = machine.now_us
            yield 2 * LAUNCH_US + call.memory_us(call.world * own)
            call.note(rank, "stream", Kind.copy, "heads of all rows", start)
        machine.arrive(self._ends[rank])

    def _block(self, rank: int, block: int, tiles: TileQueue) -> Process:
        call, lane = self._call, f"SM {block}"
        for index in tiles.of_block(block):
            visit = self._orders[rank].visits[index]
            yield from call.multiply(rank, lane, visit.row_begin, visit.col_begin)
            call.machine.arrive(self._uncomputed[rank][visit.col_begin // self._wide])
        call.machine.arrive(self._gemm[rank])

    def _copies(self, rank: int, lane: str, peers: list[int]) -> Process:
        """Send blocks, each behind the columns of its rank."""
        call, machine = self._call, self._call.machine
        yield LAUNCH_US if peers else 0.0
        for peer in peers:
            start, order = machine.now_us, self._orders[rank]
            for column in order.columns[peer] if order.visits else ():
                yield self._uncomputed[rank][column].flag
            yield RAISE_US
            call.note_wait(rank, lane, f"waits for columns of rank {peer}", start)
            yield from call.carry(rank, lane, (rank, peer), call.problem.rows(rank))
            yield RAISE_US
            machine.arrive(self._came[peer])
        machine.arrive(self._came[rank])
