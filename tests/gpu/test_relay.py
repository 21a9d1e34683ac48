"""The sums of nodes (csrc/cuda/runtime/relay.cuh): kernels of libflux_nvshmem on the PTX machine.

Ranks are processes that reach other nodes by puts alone. Each does by hand what its GEMM would do.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from emulated_nvshmem import Native, NodeSumArgs, RelayArgs, Sync, load
from emulated_processes import run
from flux import _C
from flux.core.problem import ceil_div
from flux.transport import nvshmem
from flux.transport.exchange import Exchange
from ptx_device import MachineDevice

BF16 = torch.bfloat16
TILE = (24, 16)
MAX_M = 80
ENTRY, PARTIAL, NODE, ABANDONED = 2, 3, 6, 4  # FLUX_WAIT_*, FLUX_ABANDONED


@pytest.fixture
def path(nvshmem_library: Path) -> Path:
    return nvshmem_library


class Regions:
    """Hands out pieces of the symmetric memory; by name, where they begin."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.size = 0

    def add(self, name: str, size: int) -> None:
        self.at[name] = self.size
        self.size += ceil_div(size, 256) * 256


class Rank:
    """One rank: its memory, and the parts that a call of GemmRS has."""

    def __init__(
        self, rank: int, world: int, path: Path, lanes: int, n: int, arch: str = "90a"
    ) -> None:
        os.environ["EMULATED_NVSHMEM_LANES"] = str(lanes)
        self.device = MachineDevice(arch=arch)
        self.device.identity = f"emulated {rank}"
        self.device.cuda.seed = 1 + rank
        self.rank, self.world, self.lanes, self.n = rank, world, lanes, n
        self.node = range(rank // lanes * lanes, (rank // lanes + 1) * lanes)
        self.owners = [o for o in range(world) if o not in self.node and self.holder(o) == rank]
        exchange = Exchange(dist.group.WORLD, "Op")
        self.transport = nvshmem.open_nvshmem(
            exchange, self.device, lambda: load(path), world // lanes
        )
        self.native = Native(self.transport.job.library)
        largest = _C.core.ScatterTiling(MAX_M, n, world, *TILE)
        chunk = ceil_div(MAX_M, world) * n * 2
        regions = Regions()
        for name in ("entries", "status", "report"):
            regions.add(name, 8 * max(world, 8))
        for of in range(world):
            regions.add(f"flags {of}", 4 * largest.flag_count())
            regions.add(f"words {of}", 8 * largest.strip_count())
            regions.add(f"staging {of}", chunk)
            regions.add(f"inbox {of}", chunk)
            for source in range(lanes):
                regions.add(f"slot {of} {source}", chunk)
        self.regions = regions.at
        self.slot_bytes = ceil_div(chunk, 256) * 256
        self.memory = self.transport.memory(1, regions.size)
        self.begin = self.memory.data[rank].data_ptr()
        self.epoch = 0

    def holder(self, owner: int) -> int:
        """Return the rank of the own node that sums the node's partials for the owner."""
        return owner if owner in self.node else self.node[owner % self.lanes]

    def address(self, name: str) -> int:
        return self.begin + self.regions[name]

    def view(self, rank: int, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Of a rank of this node."""
        at = self.regions[name]
        return self.memory.data[rank][at : at + count * dtype.itemsize].view(dtype)

    def status(self) -> list[int]:
        return self.view(self.rank, "status", 5, torch.int64).tolist()

    def report(self) -> list[int]:
        """What kernels wrote for the host."""
        return self.view(self.rank, "report", 5, torch.int64).tolist()

    def sync(self, timeout_s: float) -> Sync:
        status, report = self.address("status"), self.address("report")
        return Sync(self.epoch, 0, int(timeout_s * 1e9), status, report)

    def enter(self, m: int) -> None:
        """Begin a call: everybody may write to this rank."""
        self.epoch += 1
        self.m = m
        self.tiling = _C.core.ScatterTiling(m, self.n, self.world, *TILE)
        for peer in range(self.world):
            word = self.address("entries") + 8 * self.rank
            self.native.signal(word, self.epoch, peer)

    def rows(self, owner: int) -> slice:
        begin = _C.core.row_begin(self.m, self.world, owner)
        return slice(begin, begin + _C.core.row_count(self.m, self.world, owner))

    def scatter(self, partial: torch.Tensor, rng: random.Random, leave_out: int = -1) -> None:
        """What the GEMM does: partials to whoever adds them up for their owner, then flags. But for
        one flag for ``leave_out``, of the last tile in the first row of tiles."""
        entries = self.view(self.rank, "entries", self.world, torch.int64)
        for owner in rng.sample(range(self.world), self.world):
            to = self.holder(owner)
            deadline = time.monotonic() + 30.0
            while int(entries[to]) < self.epoch:
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            mine = partial[self.rows(owner)]
            self.view(to, f"slot {owner} {self.rank % self.lanes}", mine.numel(), BF16)[:] = (
                mine.flatten()
            )
            flags = self.view(to, f"flags {owner}", self.tiling.flag_count(), torch.int32)
            tile_rows = range(*self.tiling.tiles_of_owner(owner))
            columns = self.tiling.flag_columns()
            for row in tile_rows:
                for column in range(columns):
                    if (owner, row, column) == (leave_out, tile_rows[0], columns - 1):
                        continue
                    if rng.random() < 0.1:
                        time.sleep(0.002)
                    flags[self.tiling.flag_index(self.rank, owner, row, column)] = self.epoch

    def finish(self) -> None:
        """Wait for this rank's kernels, and for what they put."""
        self.device.finish()
        self.device.library.emulated_nvshmem_await_puts()
        assert not self.device.error()

    def relay(self, timeout_s: float = 30.0) -> None:
        args = RelayArgs()
        args.m, args.n, args.world, args.blocks = self.m, self.n, self.world, 2
        args.tile_m, args.tile_n = TILE
        args.source_count, args.owner_count = self.lanes, len(self.owners)
        args.sources[: self.lanes] = self.node
        args.slot_bytes = self.slot_bytes
        for place, owner in enumerate(self.owners):
            args.owners[place] = owner
            args.slots[place] = self.address(f"slot {owner} 0")
            args.flags[place] = self.address(f"flags {owner}")
            args.staging[place] = self.address(f"staging {owner}")
            args.to[place] = self.address(f"inbox {self.node[0]}")
            args.words[place] = self.address(f"words {self.node[0]}")
        args.entries = self.address("entries")
        args.sync = self.sync(timeout_s)
        self.native.relay(args)

    def node_sum(self, timeout_s: float = 30.0) -> torch.Tensor:
        """Launch the sum; return where it will be, [own rows, n]."""
        rows = self.rows(self.rank)
        out = torch.full((rows.stop - rows.start, self.n), float("nan"), dtype=BF16)
        self.device.keep(out)
        args = NodeSumArgs()
        parts = args.sum
        parts.rank, parts.world, parts.m, parts.n = self.rank, self.world, self.m, self.n
        parts.first_row, parts.rows = rows.start, rows.stop - rows.start
        parts.tile_m, parts.tile_n = TILE
        parts.scale, parts.sm_count = 1.0, 1
        args.source_count = self.lanes
        args.sources[: self.lanes] = self.node
        slots = [self.address(f"slot {self.rank} {source}") for source in range(self.lanes)]
        others = [first for first in range(0, self.world, self.lanes) if first != self.node[0]]
        args.node_count = len(others)
        for place, first in enumerate(others):
            args.words[place] = self.address(f"words {first}")
            slots.append(self.address(f"inbox {first}"))
        parts.slots[: len(slots)] = slots
        parts.slot_count = len(slots)
        parts.slot_ld = parts.out_ld = self.n
        parts.flags = self.address(f"flags {self.rank}")
        parts.outs[0], parts.out_count = out.data_ptr(), 1
        parts.sync = self.sync(timeout_s)
        self.native.node_sum(args)
        return out

    def expected(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """The very bits: fp32 sums, rounded when they leave their node."""
        rows = self.rows(self.rank)
        total = torch.zeros(rows.stop - rows.start, self.n)
        for source in self.node:
            total += partials[source][rows].float()
        for first in range(0, self.world, self.lanes):
            if first != self.node[0]:
                of_node = torch.zeros_like(total)
                for source in range(first, first + self.lanes):
                    of_node += partials[source][rows].float()
                total += of_node.to(BF16).float()
        return total.to(BF16)


def partials_of(world: int, m: int, n: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(m, n, generator=generator).to(BF16) for _ in range(world)]


def _calls(rank: int, world: int, path: Path, lanes: int, n: int, arch: str) -> None:
    me = Rank(rank, world, path, lanes, n, arch)
    me.device.set_delay(2000)
    rng = random.Random(rank)
    for call, m in enumerate((70, 80, 41, 3, 70)):
        partials = partials_of(world, m, n, call)
        me.enter(m)
        me.relay()
        me.scatter(partials[rank], rng)
        got = me.node_sum()
        me.finish()
        assert me.status()[0] == 0, me.status()
        assert torch.equal(got, me.expected(partials)), (call, m)
        exact = sum(partial.double()[me.rows(rank)] for partial in partials)
        if got.numel():
            assert float((got.double() - exact).abs().max()) < 2.0**-8 * 3 * world  # 3 roundings
    assert me.report() == [0] * 5
    # A peer gives up when all that this rank waits for is there: the host hears of it all the same.
    given_up = [ABANDONED, 0, (rank + 1) % world, 5, 0]
    me.view(rank, "status", 5, torch.int64)[:] = torch.tensor(given_up)
    got = me.node_sum()
    me.finish()
    assert torch.equal(got, me.expected(partials))
    assert me.report() == given_up
    dist.barrier()
    me.transport.leave()
    nvshmem.shutdown()
    me.device.close()


@pytest.mark.parametrize(
    ("lanes", "n", "arch"), [(2, 24, "90a"), (2, 24, "80"), (1, 24, "90a"), (2, 13, "90a")]
)
def test_rows_are_summed_over_nodes(path: Path, lanes: int, n: int, arch: str) -> None:
    """With every M another tiling; n = 13 has no rows that are aligned."""
    run(4, _calls, path, lanes, n, arch)


def _a_flag_is_missing(rank: int, world: int, path: Path) -> None:
    """Rank 1 never says that one of its tiles for rank 2 is there, so rank 0, which adds up for it,
    must not send what that tile is part of, and rank 2 must not take it for right."""
    me = Rank(rank, world, path, 2, 24)
    partials = partials_of(world, 70, 24, 1)
    me.enter(70)
    me.scatter(partials[rank], random.Random(rank), leave_out=2 if rank == 1 else -1)
    dist.barrier()
    me.relay(timeout_s=1.0)
    me.finish()
    if rank == 0:
        first, last = me.tiling.tiles_of_owner(2)[0], me.tiling.flag_columns() - 1
        flag = me.tiling.flag_index(1, 2, first, last)
        assert me.status() == me.report() == [PARTIAL, first, flag, 1, 0]
    else:
        assert me.status()[0] == me.report()[0] == 0
    dist.barrier()
    words = me.view(rank, f"words {2 - me.node[0]}", me.tiling.strip_count(), torch.int64).tolist()
    strips = range(me.tiling.strips_of_owner(rank))
    first = me.tiling.tiles_of_owner(rank)[0]
    for index in strips:
        tile_row, begin, end = me.tiling.strip_of_owner(rank, index)
        withheld = begin >= end or (rank == 2 and tile_row == first)
        assert words[index] == (0 if withheld else 1), (index, words)
    got = me.node_sum(timeout_s=0.5)
    me.finish()
    if rank == 2:
        assert me.status()[0] == NODE and me.status()[2] == 0
        assert me.report() == me.status()
        begin = me.rows(rank).start
        wrong = torch.tensor([(begin + row) // TILE[0] == first for row in range(got.shape[0])])
        assert bool(got[wrong].isnan().all())
        assert torch.equal(got[~wrong], me.expected(partials)[~wrong])
    else:
        assert torch.equal(got, me.expected(partials))


def test_a_strip_that_lacks_a_partial_is_not_sent(path: Path) -> None:
    run(4, _a_flag_is_missing, path)


def _an_owner_is_late(rank: int, world: int, path: Path) -> None:
    """Rank 2 has not entered the call: what it may still read must not be written."""
    me = Rank(rank, world, path, 2, 24)
    inbox = me.view(rank, f"inbox {2 - me.node[0]}", 16, torch.int64)
    if rank != 2:
        me.enter(70)
        me.finish()
        dist.barrier()
    else:
        inbox.fill_(99)
        dist.barrier()
        me.epoch, me.m = 1, 70
    if rank == 0:
        me.tiling = _C.core.ScatterTiling(70, 24, world, *TILE)
        flags = me.view(0, "flags 2", me.tiling.flag_count(), torch.int32)
        flags.fill_(1)  # all partials are there
        me.relay(timeout_s=0.5)
        me.finish()
        assert me.status()[0] == ENTRY and me.status()[2:] == [2, 1, 0]
    dist.barrier()
    if rank == 2:
        assert inbox.tolist() == [99] * 16
        assert not me.view(2, "words 0", 4, torch.int64).any()


def test_owner_that_has_not_entered_receives_no_puts(path: Path) -> None:
    run(4, _an_owner_is_late, path)
