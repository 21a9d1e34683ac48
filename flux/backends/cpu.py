"""CPU backend: executes tile schedules in real processes, over shared memory and the network.

The calling thread runs the GEMM tiles (ATen) in schedule order. Beside it the native engine
(csrc/host/engine.h) moves communication tiles, raises and awaits signals, and reduces.

    AGGemm    calling thread   own rows --- wait --- rows of peer --- wait --- rows of peer ...
              worker           push own tiles to the peers' gathered buffers, raising their signals
    GemmRS    calling thread   rows of peer, raise --- rows of peer, raise --- own rows
              worker           (staged: copy tiles to their owner) ... reduce in rank order
    GemmAR    as GemmRS, then the worker takes every reduced tile from its owner

With ``store = direct`` the GEMM of a ReduceScatter writes straight into the owner's memory, as the
epilogue of the fused GPU kernel does (Flux paper, Algorithm 1), so nothing is left to copy. Slabs
of rows are the GEMM tiles of this backend; which slabs there are depends on the schedule alone,
never on what happens to have arrived, so results are bitwise equal from run to run. Rows that need
no communication are never cut: the own rows are one slab.

Ranks on other hosts have stand-ins in private memory, which transport/send_recv.py makes true.

Memory ordering and buffer reuse: csrc/host/signal_pad.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flux import _C
from flux.backends.epilogue import (
    Multiplier,
    pack,
    scale_of_rows,
    spoil,
    travelling_dtype,
    travelling_row_bytes,
    unpack,
)
from flux.backends.slabs import merge_visits
from flux.backends.unfused import ALONE, Beside, nothing
from flux.env import POISON, SPIN_US, WINDOW_MB
from flux.errors import PeerTimeoutError
from flux.heuristic import MAX_COMM_TILES, across_hosts, ceil_div
from flux.host import usable_cores
from flux.knobs import Direction, Knobs, Op, Order
from flux.ops.call import Call
from flux.ops.spec import DTYPES, OpSpec
from flux.schedule import Parcel, ParcelKind, TileSchedule, Visit
from flux.topology import Topology
from flux.trace.recorder import COPY_LANE, GEMM_LANE, Recorder, Work
from flux.transport import shm
from flux.transport.exchange import Exchange
from flux.transport.send_recv import Network, Piece

if TYPE_CHECKING:
    from flux.tune.choice import Choice

REFUSED = 0xFFFFFFFF


@dataclass
class _Sources:
    """Memory of one call that tiles for other hosts come from."""

    x: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    partial: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    out: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class Layout:
    """Sizes of one rank's symmetric memory, in bytes unless said otherwise."""

    signals: int  # count
    row_bytes: int
    blocks: int  # of partials, count
    slot_bytes: int  # one of them
    result_offset: int
    data_bytes: int

    @staticmethod
    def serving(spec: OpSpec, topology: Topology, choice: Choice) -> Layout:
        """The least memory that serves every M up to ``spec.max_m``, with the knobs that it gets.

        Calls of one op may differ in order, direction and tile sizes as they may in M: nobody
        writes before all have entered, whatever the call before was (docs/architecture.md).
        """
        layouts = [
            Layout.of(spec, topology, knobs, choice.most_tiles) for knobs in choice.variants()
        ]
        partials = max(layout.result_offset for layout in layouts)
        results = max(layout.data_bytes - layout.result_offset for layout in layouts)
        return Layout(
            max(layout.signals for layout in layouts),
            layouts[0].row_bytes,
            max(layout.blocks for layout in layouts),
            max(layout.slot_bytes for layout in layouts),
            partials,
            partials + results,
        )

    @staticmethod
    def of(spec: OpSpec, topology: Topology, knobs: Knobs, most_tiles: int = 0) -> Layout:
        """The same for one choice of knobs; ``most_tiles`` where comm_tile_rows are open."""
        world = topology.world
        knobs = across_hosts(spec.op, knobs, topology.nodes)
        chunk = ceil_div(spec.max_m, world)
        row = travelling_row_bytes(spec)
        tiles = min(chunk, most_tiles or MAX_COMM_TILES)
        if knobs.comm_tile_rows is not None:
            tiles = ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
        signals = world * tiles
        if knobs.path == "unfused":
            return Layout(0, row, 0, 0, 0, 0)
        if spec.op is Op.ag_gemm:
            return Layout(signals, row, 0, 0, 0, spec.max_m * row)
        blocks, regions = _C.room_for(
            order=Order[knobs.order or "direct"],
            direction=Direction[knobs.direction or "push"],
            mesh=topology.mesh,
            hosts=topology.placement,
        )
        partials = blocks * chunk * row
        if spec.op is Op.gemm_rs:
            return Layout(regions * signals, row, blocks, chunk * row, partials, partials)
        # GemmAR: a pulled result needs the own block only, a pushed one the whole [M, N].
        result = (spec.max_m if knobs.direction == "push" else chunk) * row
        bytes_ = partials + result
        return Layout((regions + 1) * signals, row, blocks, chunk * row, partials, bytes_)


def _spin_seconds(exchange: Exchange, local: Sequence[bool]) -> float:
    """How long to spin: not for long when ranks of this host share cores. Collective."""
    cores: set[int] = set()
    for here, of_rank in zip(local, exchange.all_gather(usable_cores()), strict=True):
        cores |= of_rank if here else set()
    micros = SPIN_US.get()
    if micros < 0:
        micros = 200.0 if sum(local) <= len(cores) else 5.0
    return micros * 1e-6


class CpuBackend:
    """Executor of one op on one rank. Construction is collective; calls are serial."""

    def __init__(
        self,
        spec: OpSpec,
        exchange: Exchange,
        choice: Choice,
        topology: Topology,
        local: Sequence[bool],
        timeout_s: float,
    ) -> None:
        """``local`` says, by rank, who shares this rank's memory; the others are on other hosts."""
        self.spec = spec
        self.rank = exchange.rank
        self.world = exchange.world
        self.timeout_s = timeout_s
        self.spin_s = _spin_seconds(exchange, local)
        self.poison = POISON.get()
        layout = Layout.serving(spec, topology, choice)
        memory = shm.allocate(exchange, local, layout.signals, layout.data_bytes, spec.label)
        data = memory.data
        self.workspace_bytes = memory.nbytes
        self.engine = _C.Engine(
            rank=self.rank,
            pads=memory.pads,
            data=[d.data_ptr() for d in data],
            remote=[not here for here in local],
            row_bytes=layout.row_bytes,
            slot_bytes=layout.slot_bytes,
            result_offset=layout.result_offset,
            dtype=DTYPES[spec.out_dtype],
            signals=layout.signals,
        )
        self.recorder: Recorder | None = None
        self._memory: shm.SymmetricMemory | None = memory
        self._kept_slabs: dict[int, tuple[TileSchedule, list[tuple[int, int, Visit]]]] = {}
        self._wire = travelling_dtype(spec)
        row = layout.row_bytes // self._wire.itemsize
        # AllGather: the gathered input; pushed GemmAR: where peers leave the result.
        self.gathered = torch.empty(0, row, dtype=self._wire)
        self.slots: list[torch.Tensor] = []
        if layout.blocks:
            chunk = ceil_div(spec.max_m, self.world)
            self.slots = [
                self._view(d, layout.blocks * chunk * row).view(layout.blocks, chunk, row)
                for d in data
            ]
        if layout.data_bytes - layout.result_offset >= spec.max_m * layout.row_bytes:
            rest = data[self.rank][layout.result_offset :]
            self.gathered = self._view(rest, spec.max_m * row).view(-1, row)
        self.network: Network | None = None
        if not all(local):
            remote = [rank for rank in range(self.world) if not local[rank]]
            window = int(WINDOW_MB.get() * 1e6)
            self.network = Network(exchange, remote, self.engine, timeout_s, window)

    def _view(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        return data[: elements * self._wire.itemsize].view(self._wire)

    def empty(self, *shape: int) -> torch.Tensor:
        """A fresh output, full of NaN when FLUX_POISON is set."""
        out = torch.empty(*shape, dtype=self.spec.out_dtype)
        return spoil(out) if self.poison else out

    def trace(self, recorder: Recorder | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        of_caller = None if recorder is None else recorder.lane(GEMM_LANE)
        self.engine.trace(of_caller, None if recorder is None else recorder.lane(COPY_LANE))
        if self.network is not None:
            self.network.trace(recorder)
        self.recorder = recorder

    # -- ops ---------------------------------------------------------------------------------------

    def ag_gemm(
        self,
        schedule: TileSchedule,
        call: Call,
        gather: bool,
        beside: Beside = ALONE,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """[own rows, K] x [K, N/W] each -> [M, N/W] each, and the gathered [M, K] if asked for."""
        engine, spec = self.engine, self.spec
        lane = self._lane(schedule)
        x = pack(spec, call)
        if self.network is not None:
            x = x.contiguous()
        outs = [self.empty(call.m, columns) for columns in call.columns]
        x_full = torch.empty(call.m, spec.k, dtype=spec.dtype) if gather else None
        multiply = Multiplier(spec, call)
        threaded = schedule.knobs.copy_streams == 1
        engine.begin(
            schedule.native,
            call.m,
            threaded,
            self.timeout_s,
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.itemsize,
        )
        self._begin_network(schedule, call.m, _Sources(x=x))
        if not threaded:
            self._await(engine.finish)
        begin = _C.core.row_begin(call.m, self.world, self.rank)
        slabs = self._slabs(schedule)
        foreign = [number for number, slab in enumerate(slabs) if slab[2].owner != self.rank]
        if not foreign:
            beside.both()
        for number, (first, last, v) in enumerate(slabs):
            if v.owner == self.rank:
                a = x[v.row_begin - begin : v.row_end - begin]
            else:
                if number == foreign[0]:
                    beside.meanwhile()
                for index in range(first, last):
                    if not engine.wait_visit(index, self.timeout_s, self.spin_s):
                        self._raise_failure()
                if number == foreign[-1]:
                    beside.arrived()
                a = self.gathered[v.row_begin : v.row_end]
            began = 0 if lane is None else lane.now()
            rows, scale = unpack(spec, a)
            if x_full is not None and v.col_begin == 0:
                x_full[v.row_begin : v.row_end] = rows
            self._columns(rows, call.scale_x if scale is None else scale, v, call, outs, multiply)
            if lane is not None:
                lane.add(Work.gemm, began, first, last)
        if threaded:
            self._await(engine.finish)
        self._finish_network()
        if self.poison:
            self._poison_gathered(schedule, call.m)
        return outs, x_full

    def gemm_rs(
        self, schedule: TileSchedule, call: Call, meanwhile: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """[M, K/W] x [K/W, N] -> [own rows, N]; GemmAR: [M, N].

        ``meanwhile`` runs when the GEMM is through, while the last rows are under way.
        """
        engine, spec = self.engine, self.spec
        lane = self._lane(schedule)
        own = _C.core.row_count(call.m, self.world, self.rank)
        full = spec.op is Op.gemm_ar
        out = self.empty(call.m if full else own, spec.n[0])
        direct = schedule.knobs.store == "direct"
        partial = out[:0] if direct else self.empty(call.m, spec.n[0])
        bias = call.biases[0]
        digest = call.m * 2 + (bias is not None)
        threaded = schedule.knobs.copy_streams == 1
        engine.begin(
            schedule.native,
            digest,
            threaded,
            self.timeout_s,
            partial=partial.data_ptr(),
            out=out.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            scale=1.0 / self.world if spec.reduce == "avg" else 1.0,
        )
        self._begin_network(schedule, digest, _Sources(partial=partial, out=out))
        if direct:  # the first tile may land in a peer's buffer: it must have finished with it
            self._await(engine.wait_entries)
        multiply = Multiplier(spec, call)
        for first, last, v in self._slabs(schedule):
            target = (
                self._partial_rows(schedule, v, out, full)
                if direct
                else (partial[v.row_begin : v.row_end])
            )
            began = 0 if lane is None else lane.now()
            whole = v.col_end - v.col_begin == spec.n[0]
            columns = slice(None) if whole else slice(v.col_begin, v.col_end)
            multiply(
                call.x[v.row_begin : v.row_end],
                target if whole else target[:, columns],
                columns=columns,
                scale_x=scale_of_rows(call, v.row_begin, v.row_end),
            )
            for index in range(first, last):
                engine.visit_done(index)
            if lane is not None:
                lane.add(Work.gemm, began, first, last)
        meanwhile()
        self._await(engine.finish)
        self._finish_network()
        if self.poison and self.slots and schedule.knobs.direction == "push":
            spoil(self.slots[self.rank])  # nobody writes here before we enter again
            spoil(self.gathered)
        return out

    gemm_ar = gemm_rs

    def meet(self, schedule: TileSchedule, digest: int) -> Callable[[], None]:
        """Begin to meet the peers without moving anything; what is returned waits for them, and
        raises where calls do not fit together (path unfused)."""
        self._lane(schedule)
        self.engine.begin(schedule.native, digest, False, self.timeout_s)
        if self.network is not None:
            self.network.begin(self.engine.epoch, digest, lambda peer: (), lambda peer: ())

        def met() -> None:
            self._await(self.engine.wait_entries)
            self._finish_network()

        return met

    # -- pieces ------------------------------------------------------------------------------------

    def _lane(self, schedule: TileSchedule) -> _C.Lane | None:
        """Where the calling thread records this call; None while nobody traces."""
        return None if self.recorder is None else self.recorder.begin(schedule)

    def _columns(
        self,
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        v: Visit,
        call: Call,
        outs: list[torch.Tensor],
        multiply: Multiplier,
    ) -> None:
        """Multiply rows of x with the visit's columns of every weight."""
        single = len(outs) == 1
        if not single and v.col_begin != 0:
            return  # several weights are computed whole, at the first tile of their rows
        for number, (bias, out) in enumerate(zip(call.biases, outs, strict=True)):
            target, columns = out[v.row_begin : v.row_end], slice(None)
            if single and v.col_end - v.col_begin != out.shape[1]:
                columns = slice(v.col_begin, v.col_end)
                target = target[:, columns]
            multiply(rows, target, weight=number, columns=columns, scale_x=scale, bias=bias)

    def _partial_rows(
        self, schedule: TileSchedule, v: Visit, out: torch.Tensor, full: bool
    ) -> torch.Tensor:
        """Where a tile of one owner's rows is stored under store = direct."""
        m = schedule.shape[0]
        base = _C.core.row_begin(m, self.world, v.owner)
        rows = slice(v.row_begin - base, v.row_end - base)
        if v.owner == self.rank:
            return out[v.row_begin : v.row_end] if full else out[rows]
        holder, block = schedule.homes[v.owner]
        return self.slots[holder][block, rows]

    def _slabs(self, schedule: TileSchedule) -> list[tuple[int, int, Visit]]:
        """What is multiplied at once: (first, last) GEMM tiles, and the rows and columns of all."""
        kept = self._kept_slabs.get(schedule.shape[0])
        if kept is None or kept[0] is not schedule:
            kept = self._kept_slabs[schedule.shape[0]] = (schedule, merge_visits(schedule))
        return kept[1]

    # -- other hosts -------------------------------------------------------------------------------

    def _begin_network(self, schedule: TileSchedule, digest: int, sources: _Sources) -> None:
        if self.network is None:
            return

        def outgoing(peer: int) -> Iterator[Piece]:
            for p in schedule.parcels_for(peer):
                yield self._outgoing(schedule, sources, peer, p)

        def incoming(peer: int) -> Iterator[Piece]:
            for p in schedule.of_rank(peer).parcels_for(self.rank):
                yield Piece(self._landing(p, schedule), p.signal)

        self.network.begin(self.engine.epoch, digest, outgoing, incoming)

    def _outgoing(self, schedule: TileSchedule, sources: _Sources, peer: int, p: Parcel) -> Piece:
        """Where a tile for another host lies here. Only own rows of x are there from the start."""
        rows = slice(p.row_begin, p.row_end)
        base = _C.core.row_begin(schedule.shape[0], self.world, p.chunk)
        in_chunk = slice(p.row_begin - base, p.row_end - base)
        if p.kind is ParcelKind.gather:
            own = p.chunk == self.rank
            tensor = sources.x[in_chunk] if own else self.gathered[rows]
            return Piece(tensor, None if own else p.signal)
        if p.kind is ParcelKind.result:
            tensor = sources.out[rows] if p.chunk == self.rank else self.gathered[rows]
        elif p.kind is ParcelKind.partial and schedule.knobs.store == "staged":
            tensor = sources.partial[rows]
        else:
            tensor = self.slots[peer][p.block, in_chunk]
        return Piece(tensor, p.signal)

    def _landing(self, p: Parcel, schedule: TileSchedule) -> torch.Tensor:
        """Where a tile from another host goes."""
        if p.kind in (ParcelKind.gather, ParcelKind.result):
            return self.gathered[p.row_begin : p.row_end]
        base = _C.core.row_begin(schedule.shape[0], self.world, p.chunk)
        return self.slots[self.rank][p.block, p.row_begin - base : p.row_end - base]

    def _finish_network(self) -> None:
        why = None if self.network is None else self.network.finish()
        if why is not None:
            self.close(failed=True)
            raise PeerTimeoutError(
                f"{self.spec.label}: rank {self.rank}, call {self.engine.epoch}: {why}"
            )

    def _poison_gathered(self, schedule: TileSchedule, m: int) -> None:
        """Spoil the rows that no peer can still be reading, until we enter the next call."""
        if schedule.knobs.direction == "push":
            spoil(self.gathered)
        elif schedule.knobs.order == "direct":  # peers pull the own rows only
            spoil(self.gathered[: _C.core.row_begin(m, self.world, self.rank)])
            spoil(self.gathered[_C.core.row_end(m, self.world, self.rank) :])

    # -- failure and end ---------------------------------------------------------------------------

    def _await(self, wait: Callable[[float, float], bool]) -> None:
        if not wait(self.timeout_s, self.spin_s):
            self._raise_failure()

    def _raise_failure(self) -> None:
        f = self.engine.failure()
        label, peer = self.spec.label, f["peer"]
        if f["kind"] == "mismatch":
            self.engine.settle()
            if self.network is not None:
                self.network.settle()
            raise ValueError(self._mismatch_text(f))
        if f["kind"] == "ended":
            self.close(failed=True, culprit=self.rank)
            raise RuntimeError(f"{label}: closed during call {self.engine.epoch}")
        tile = f"tile {f['tile']} of chunk {f['chunk']}" if f["tile"] >= 0 else "the call to begin"
        where = f"{label}: rank {self.rank}, call {self.engine.epoch}, waiting for {tile}"
        seen = ""
        if f["tile"] >= 0:
            seen = f" (signal: expected {f['expected']}, observed {f['observed']})"
        what = {
            "timeout": f"rank {peer} did not deliver within {self.timeout_s:g} s{seen}",
            "peer_closed": f"rank {peer} has closed the op",
            "peer_failed": f"rank {peer} gave up"
            + (f" on rank {f['culprit']}" if f["culprit"] not in (-1, 0xFFFFFFFF, peer) else ""),
        }[f["kind"]]
        detail = self.network.problem_with(peer) if self.network is not None else ""
        self.close(failed=True, culprit=peer)
        raise PeerTimeoutError(f"{where}: {what}{f' ({detail})' if detail else ''}")

    def _mismatch_text(self, f: _C.FailureDict) -> str:
        label, peer = self.spec.label, f["peer"]
        if f["ran_ahead"]:
            return f"{label}: rank {peer} is ahead of rank {self.rank}: ranks made different calls"
        if f["observed"] == REFUSED:
            return f"{label}: rank {peer} refused its input: {f['refusal']}"
        mine, theirs = f["expected"], f["observed"]
        if self.spec.op is Op.ag_gemm:
            texts = [f"M = {d}" for d in (theirs, mine)]
        else:
            texts = [f"M = {d // 2} {'with' if d % 2 else 'without'} bias" for d in (theirs, mine)]
        return f"{label}: ranks disagree: rank {peer} has {texts[0]}, rank {self.rank} {texts[1]}"

    def refuse(self, why: str) -> None:
        """Tell the peers, who are about to make the same call, that this rank's input is bad."""
        self.engine.refuse(why)
        if self.network is not None:
            self.network.refuse(self.engine.epoch, why)

    def end_call(self) -> None:
        """Let the call that is going on, in another thread or further up the stack, give up."""
        self.engine.end_call()

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Stop the worker and let go of the shared memory. Idempotent."""
        if self._memory is None:
            return
        self.engine.close(failed, culprit)
        if self.network is not None:
            self.network.close(failed)
        self._memory = None
        self.slots = []
        self.gathered = torch.empty(0)
