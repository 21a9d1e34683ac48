"""Path one_shot: a GEMM, and before or after it a collective (transport/host_collectives.py).

With few rows a call between hosts takes as long as its messages: headers, a message per tile and
direction, and the threads that wake for each. Here each rank sends its part once, and the calling
thread itself sends and receives. What ranks must agree on travels with the data.

With more rows the collective has rounds of ``comm_tile_rows`` rows of each rank, and the GEMM is
cut along them: the kernel sends one round's rows while the next one is multiplied. The GEMM of an
AllReduce may be cut along N instead, into blocks of columns, each of which is a round. That packs x
for each block, not the weights for each slab: few rows and many experts lose nothing then.

    GemmRS, GemmAR   multiply, send; multiply, send; ... multiply the own rows; sum what arrives
    AGGemm           send all own rows; multiply them; multiply each round's rows as they arrive

A call counts in the engine, too, without an entry in the pads. A rank that finds out that another
one makes a different call, or refuses this one, enters it there, as the others do then: see
``Engine::is_entered``. So errors are those of the other paths.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.backends.epilogue import Multiplier, pack, scale_of_rows, unpack
from flux.core.backend import OverlapHooks, nothing
from flux.core.call import Call
from flux.core.errors import PeerTimeoutError
from flux.core.problem import ceil_div
from flux.core.recorder import GEMM_LANE, Recorder, Work
from flux.core.schedule import TileSchedule
from flux.core.spec import DTYPES, OpSpec
from flux.core.tensors import address_of
from flux.transport.exchange import Exchange
from flux.transport.host_collectives import Collective, DisagreementError, HostCollectives
from flux.transport.placement import Placement

if TYPE_CHECKING:
    from flux.transport.network import Network

BY_ROWS = 0x5A5A
"""What the digest of a call has where others of the same op are cut by columns, and it is not."""
NOTICE_S = 0.3
"""Seconds to wait for the network to notice what a connection of ours has noticed."""


class Owner(Protocol):
    """The backend of the op."""

    recorder: Recorder | None
    network: Network | None

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """Return memory for a result."""
        ...

    def meet(self, schedule: TileSchedule, digest: int) -> Callable[[], None]:
        """Begin to meet the peers: see ``Backend.meet``."""
        ...

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Release everything, and tell the peers."""
        ...


class OneShot:
    """The one-shot calls of one op on one rank. Construction is collective.

    Args:
        spec: the op.
        exchange: its ranks.
        placement: which of them share memory.
        engine: of the op, which counts its calls.
        timeout_s: how long a call waits for a peer, in seconds.
        spin_s: how long it polls before it sleeps, in seconds.
    """

    def __init__(
        self,
        spec: OpSpec,
        exchange: Exchange,
        placement: Placement,
        engine: _C.Engine,
        timeout_s: float,
        spin_s: float,
    ) -> None:
        self._spec = spec
        self._rank, self._world = exchange.rank, exchange.world
        self._engine = engine
        self._number = 0  # of the last call; the engine's has 32 bits
        row, self._wire = spec.travelling_row
        self._row_bytes = row * self._wire.itemsize
        native = DTYPES[spec.out_dtype].native
        assert native is not None  # results are never float8
        self._dtype = native
        self._lane: _C.Lane | None = None
        self._since = 0
        self.collectives = HostCollectives(
            exchange, placement, timeout_s, spin_s, most_bytes=spec.max_m * self._row_bytes
        )

    def trace(self, recorder: Recorder | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        self._lane = None if recorder is None else recorder.lane(GEMM_LANE)

    def call(
        self,
        backend: Owner,
        schedule: TileSchedule,
        call: Call,
        gather: bool,
        hooks: OverlapHooks,
    ) -> list[torch.Tensor]:
        """Execute a call: see ``Backend.run``; ``backend``: its own one."""
        spec = self._spec
        if backend.recorder is not None:
            backend.recorder.begin(schedule)
        try:
            if spec.op.gathers:
                outs = [backend.empty(call.out_rows, columns) for columns in call.columns]
                if gather:
                    outs.append(call.x.new_empty(call.m, spec.k, dtype=spec.dtype))
                self.gather(call, schedule, outs, gather, hooks)
                return outs
            partial = backend.empty(call.m, spec.n[0])
            own = _C.core.row_count(call.m, self._world, self._rank)
            out = partial
            if not spec.op.all_reduces:
                out = backend.empty(own, spec.n[0])
            elif self._block(call, schedule):
                out = backend.empty(call.m, spec.n[0])
            self.reduce(call, schedule, partial, out, hooks.meanwhile)
            return [out]
        except DisagreementError:
            # The ranks meet in the engine instead, where they find out what differs.
            self._engine.epoch -= 1
            backend.meet(schedule, call.digest)()
            text = "ranks chose different paths, or only some pass gemm="
            raise RuntimeError(f"{spec.label}: {text}") from None
        except PeerTimeoutError as error:
            culprit = getattr(error, "culprit", self._rank)
            text = f"{error}{problem_with(backend.network, culprit)}"
            backend.close(failed=True, culprit=culprit)
            raise type(error)(text) from None

    def reduce(
        self,
        call: Call,
        schedule: TileSchedule,
        partial: torch.Tensor,
        out: torch.Tensor,
        meanwhile: Callable[[], None],
    ) -> None:
        """Multiply into ``partial`` [M, N], and sum it over the ranks into ``out``.

        Args:
            call: the arguments.
            schedule: whose knobs say how many rows a round has.
            partial: memory for this rank's partial results; for GemmAR it may be ``out``, unless
                it has blocks of columns, one behind the other.
            out: the result: [M, N], or of GemmRS the own rows.
            meanwhile: of the caller's hooks.
        """
        spec, bias = self._spec, call.biases[0]
        multiply, row = Multiplier(spec, call), self._row_bytes
        block, digest = self._block(call, schedule), call.digest
        blocks = _Blocks(partial, block) if block else None
        in_rounds = self._in_rounds(schedule)
        if not block and block_columns(schedule, spec):
            in_rounds, digest = True, digest ^ BY_ROWS
        slabs = _Slabs(schedule, spec.op.all_reduces) if in_rounds else None

        def produce(begin: int, end: int) -> None:
            assert slabs is not None
            for first, last in slabs.of(begin // row, ceil_div(end, row)):
                self._stamp(Work.collective)
                scale = scale_of_rows(call, first, last)
                rows = slice(first, last)
                multiply(call.rows_of_x(rows), partial[rows], scale_x=scale, first=first)
                self._stamp(Work.gemm)

        def produce_columns(begin: int, end: int) -> None:
            assert blocks is not None
            for columns, target in blocks.of(begin, end):
                self._stamp(Work.collective)
                multiply(call.x, target, columns=columns, scale_x=call.scale_x)
                self._stamp(Work.gemm)

        cut: Callable[[int, int], None] | None = None
        if block:
            cut = produce_columns
        elif in_rounds:
            cut = produce
        self._begin()
        if cut is None:
            multiply(call.x, partial, scale_x=call.scale_x)
            self._stamp(Work.gemm)
        self._run(
            Collective.all_reduce if spec.op.all_reduces else Collective.reduce_scatter,
            digest,
            partial,
            out,
            schedule,
            bias=0 if bias is None else address_of(bias),
            scale=1.0 / self._world if spec.reduce == "avg" else 1.0,
            block=block,
            produce=cut,
            meanwhile=meanwhile,
        )

    def gather(
        self,
        call: Call,
        schedule: TileSchedule,
        outs: list[torch.Tensor],
        gather: bool,
        hooks: OverlapHooks,
    ) -> None:
        """Gather the rows of x, and multiply them.

        Args:
            call: the arguments.
            schedule: whose knobs say how many rows a round has.
            outs: memory for the result of each weight, [M, columns]; then, with ``gather``, for the
                gathered input, [M, K].
            gather: see ``outs``.
            hooks: of the caller.
        """
        spec = self._spec
        x_full = outs[-1] if gather else None
        x = (pack(call) if spec.scales_travel else call.x).contiguous()
        gathered = x.new_empty(call.m, x.shape[1])
        if x_full is not None and not spec.scales_travel:
            gathered = x_full
        multiplier, row = Multiplier(spec, call), self._row_bytes
        own = tuple(_C.core.row_begin(call.m, self._world, self._rank + i) for i in (0, 1))
        waiting = call.m - (own[1] - own[0])  # rows of other ranks

        def multiply(first: int, last: int) -> None:
            rows, scale = x if (first, last) == own else gathered[first:last], call.scale_x
            if spec.scales_travel:
                rows, scale = unpack(spec, rows)
            if x_full is not None and gathered is not x_full:
                x_full[first:last] = rows
            for weight, (bias, out) in enumerate(zip(call.biases, outs, strict=False)):
                target = out[first:last] if call.grouped is None else out
                multiplier(rows, target, weight=weight, scale_x=scale, bias=bias, first=first)

        in_rounds = self._in_rounds(schedule)
        slabs = _Slabs(schedule, whole=False) if in_rounds else None

        def consume(begin: int, end: int) -> None:
            nonlocal waiting
            assert slabs is not None
            for first, last in slabs.completed_by(begin // row, end // row):
                self._stamp(Work.collective)
                if (first, last) != own:
                    waiting -= last - first
                    if waiting == 0:
                        hooks.arrived()
                multiply(first, last)
                self._stamp(Work.gemm)

        self._begin()
        self._run(
            Collective.all_gather,
            call.digest,
            x,
            gathered,
            schedule,
            consume=consume if in_rounds else None,
            meanwhile=hooks.meanwhile,
        )
        if not in_rounds:
            hooks.arrived()
            self._begin()
            multiply(0, call.m)
            self._stamp(Work.gemm)

    def _block(self, call: Call, schedule: TileSchedule) -> int:
        """Return the columns of a block; 0: the caller's product makes whole rows, or no blocks."""
        return 0 if call.gemm is not None else block_columns(schedule, self._spec)

    def _in_rounds(self, schedule: TileSchedule) -> bool:
        """Return whether the GEMM is cut along the rounds of the collective."""
        tile = schedule.knobs.tile
        assert tile is not None
        return tile[0] < schedule.shape[0]

    def _run(
        self,
        kind: Collective,
        digest: int,
        source: torch.Tensor,
        out: torch.Tensor,
        schedule: TileSchedule,
        *,
        bias: int = 0,
        scale: float = 1.0,
        block: int = 0,
        produce: Callable[[int, int], None] | None = None,
        consume: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        def hook() -> None:
            self._stamp(Work.collective)
            meanwhile()
            self._begin()

        row, world, m = self._row_bytes, self._world, schedule.shape[0]
        if kind == Collective.all_reduce:
            offsets = [0] + [m * row] * world
        else:
            offsets = [_C.core.row_begin(m, world, rank) * row for rank in range(world)] + [m * row]
        assert schedule.knobs.comm_tile_rows is not None
        round_bytes = schedule.knobs.comm_tile_rows * row
        if kind == Collective.all_reduce:
            round_bytes = block * m * self._wire.itemsize if block else round_bytes * world
        self._engine.skip()
        self._number += (self._engine.epoch - self._number) & 0xFFFFFFFF
        self.collectives.run(
            kind,
            self._number,
            digest,
            address_of(source),
            address_of(out),
            offsets,
            self._dtype,
            bias=bias,
            columns=self._spec.n[0],
            scale=scale,
            round_bytes=round_bytes if produce or consume else 0,
            block_columns=block,
            produce=produce,
            consume=consume,
            meanwhile=None if meanwhile is nothing else hook,
            engine=self._engine,
        )
        self._stamp(Work.collective, m * row)

    # -- trace: pieces of the collective and of the GEMM take turns ----------------------------

    def _begin(self) -> None:
        if self._lane is not None:
            self._since = self._lane.now()

    def _stamp(self, work: Work, nbytes: int = 0) -> None:
        """Record what was done since the last stamp."""
        if self._lane is not None:
            self._lane.add(work, self._since, nbytes=nbytes)
            self._since = self._lane.now()


def block_columns(schedule: TileSchedule, spec: OpSpec) -> int:
    """Return the columns of a block that the GEMM of an AllReduce is cut into; 0: it is not."""
    tile = schedule.knobs.tile
    assert tile is not None
    cut = spec.op.all_reduces and tile[0] >= schedule.shape[0] and tile[1] < spec.n[0]
    return tile[1] if cut else 0


class _Blocks:
    """The blocks of columns that a GEMM is cut into, each of which is computed once.

    Args:
        partial: their memory, [M, N], where they lie one behind the other.
        columns: of each but the last.
    """

    def __init__(self, partial: torch.Tensor, columns: int) -> None:
        self._partial = partial.view(-1)
        self._m, self._n = partial.shape
        self._columns = columns
        self._due = set(range(ceil_div(self._n, columns)))

    def of(self, begin: int, end: int) -> Iterable[tuple[slice, torch.Tensor]]:
        """Return the blocks in a range of bytes, except those returned before: columns, memory."""
        block = self._m * self._columns * self._partial.itemsize
        for i in range(begin // block, ceil_div(end, block)):
            if i in self._due:
                self._due.remove(i)
                first, last = i * self._columns, min((i + 1) * self._columns, self._n)
                memory = self._partial[self._m * first : self._m * last]
                yield slice(first, last), memory.view(self._m, last - first)


class _Slabs:
    """The slabs of rows that a GEMM is cut into, each of which is computed once.

    A slab can span several rounds: those of ranks that share memory are no larger than their slots.
    Consecutive slabs that are due together are one.

    Args:
        schedule: whose ``comm_tile_rows`` are the rows of a slab of each rank.
        whole: slabs are cut from all rows, not from each rank's.
    """

    def __init__(self, schedule: TileSchedule, whole: bool) -> None:
        m, rows = schedule.shape[0], schedule.knobs.comm_tile_rows
        assert rows is not None
        chunk = ceil_div(m, schedule.world)
        part, slab = (m, rows * schedule.world) if whole else (chunk, rows)
        self._begins = [
            b for base in range(0, m, part) for b in range(base, min(base + part, m), slab)
        ]
        self._ends = [*self._begins[1:], m]
        self._rows = [0] * len(self._ends)  # of each slab that were named so far

    def of(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Return the ranges of slabs that have rows in a range, except those returned before."""
        due = [i for i in self._overlapping(first, last) if self._rows[i] == 0]
        for i in due:
            self._rows[i] = self._ends[i] - self._begins[i]
        return self._ranges(due)

    def completed_by(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Return the ranges of slabs whose last missing rows are in a range."""
        due = []
        for i in self._overlapping(first, last):
            self._rows[i] += min(last, self._ends[i]) - max(first, self._begins[i])
            if self._rows[i] == self._ends[i] - self._begins[i]:
                due.append(i)
        return self._ranges(due)

    def _overlapping(self, first: int, last: int) -> range:
        if first >= last:
            return range(0)
        return range(bisect_right(self._begins, first) - 1, bisect_left(self._begins, last))

    def _ranges(self, slabs: list[int]) -> Iterable[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for i in slabs:
            begin = self._begins[i]
            if ranges and ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, self._ends[i]))
        return ranges


def problem_with(network: Network | None, culprit: int) -> str:
    """Return what the network says about the connection to a rank that is lost, in parentheses."""
    if network is None or culprit not in network.bytes_sent:
        return ""
    deadline = time.monotonic() + NOTICE_S
    while not network.problem_with(culprit) and time.monotonic() < deadline:
        time.sleep(0.005)
    problem = network.problem_with(culprit)
    return f" ({problem})" if problem else ""
