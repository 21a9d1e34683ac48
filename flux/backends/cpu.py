"""CPU backend: executes tile schedules in real processes, over shared memory.

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
never on what happens to have arrived, so results are bitwise equal from run to run.

Memory ordering and buffer reuse: csrc/host/signal_pad.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flux import _C
from flux.env import POISON, SPIN_US
from flux.errors import PeerTimeoutError
from flux.heuristic import MAX_COMM_TILES, ceil_div
from flux.host import available_cores
from flux.knobs import Knobs, Op
from flux.ops.call import Call
from flux.ops.spec import DTYPES, OpSpec
from flux.schedule import TileSchedule, Visit
from flux.transport import shm
from flux.transport.exchange import Exchange

REFUSED = 0xFFFFFFFF


@dataclass(frozen=True)
class Layout:
    """Sizes of one rank's symmetric memory, in bytes unless said otherwise."""

    signals: int  # count
    row_bytes: int
    slot_bytes: int  # one block of partials
    result_offset: int
    data_bytes: int

    @staticmethod
    def of(spec: OpSpec, world: int, knobs: Knobs) -> Layout:
        """The least memory that serves every M up to ``spec.max_m``."""
        chunk = ceil_div(spec.max_m, world)
        row = spec.row_elements() * spec.itemsize
        tiles = min(chunk, MAX_COMM_TILES)
        if knobs.comm_tile_rows is not None:
            tiles = ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
        signals = world * tiles
        if knobs.path == "unfused":
            return Layout(0, row, 0, 0, 0)
        if spec.op is Op.ag_gemm:
            return Layout(signals, row, 0, 0, spec.max_m * row)
        partials = (world - 1) * chunk * row
        if spec.op is Op.gemm_rs:
            return Layout(signals, row, chunk * row, partials, partials)
        # GemmAR: a pulled result needs the own block only, a pushed one the whole [M, N].
        result = (spec.max_m if knobs.direction == "push" else chunk) * row
        return Layout(2 * signals, row, chunk * row, partials, partials + result)


def _spin_seconds(world: int) -> float:
    micros = SPIN_US.get()
    if micros < 0:
        micros = 200.0 if world <= available_cores() else 5.0
    return micros * 1e-6


class CpuBackend:
    """Executor of one op on one rank. Construction is collective; calls are serial."""

    def __init__(self, spec: OpSpec, exchange: Exchange, knobs: Knobs, timeout_s: float) -> None:
        self.spec = spec
        self.rank = exchange.rank
        self.world = exchange.world
        self.timeout_s = timeout_s
        self.spin_s = _spin_seconds(self.world)
        self.poison = POISON.get()
        layout = Layout.of(spec, self.world, knobs)
        memory = shm.allocate(exchange, layout.signals, layout.data_bytes, spec.label)
        self.workspace_bytes = memory.nbytes
        self.engine = _C.Engine(
            rank=self.rank,
            pads=memory.pads,
            data=[d.data_ptr() for d in memory.data],
            row_bytes=layout.row_bytes,
            slot_bytes=layout.slot_bytes,
            result_offset=layout.result_offset,
            dtype=DTYPES[spec.dtype],
            signals=layout.signals,
        )
        self._memory: shm.SymmetricMemory | None = memory
        row = spec.row_elements()
        self.gathered = torch.empty(0, row, dtype=spec.dtype)
        self.slots: list[torch.Tensor] = []
        if layout.data_bytes == 0:
            return
        if spec.op is Op.ag_gemm:
            self.gathered = self._view(memory.data[self.rank], spec.max_m * row).view(-1, row)
            return
        chunk = ceil_div(spec.max_m, self.world)
        self.slots = [
            self._view(d, (self.world - 1) * chunk * row).view(self.world - 1, chunk, row)
            for d in memory.data
        ]

    def _view(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        return data[: elements * self.spec.itemsize].view(self.spec.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        """A fresh output, full of NaN when FLUX_POISON is set."""
        out = torch.empty(*shape, dtype=self.spec.dtype)
        return out.fill_(float("nan")) if self.poison else out

    # -- ops ---------------------------------------------------------------------------------------

    def ag_gemm(
        self, schedule: TileSchedule, call: Call, gather: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """[own rows, K] x [K, N/W] each -> [M, N/W] each, and the gathered [M, K] if asked for."""
        engine, x = self.engine, call.x
        outs = [self.empty(call.m, w.shape[1]) for w in call.weights]
        x_full = self.empty(call.m, self.spec.k) if gather else None
        threaded = schedule.knobs.copy_streams == 1
        engine.begin(
            schedule.native,
            call.m,
            threaded,
            self.timeout_s,
            x=x.data_ptr(),
            x_stride=x.stride(0) * self.spec.itemsize,
        )
        if not threaded:
            self._await(engine.finish)
        begin = _C.core.row_begin(call.m, self.world, self.rank)
        for index, v in enumerate(schedule.visits):
            if v.owner == self.rank:
                a = x[v.row_begin - begin : v.row_end - begin]
            else:
                if not engine.wait_visit(index, self.timeout_s, self.spin_s):
                    self._raise_failure()
                a = self.gathered[v.row_begin : v.row_end]
            if x_full is not None and v.col_begin == 0:
                x_full[v.row_begin : v.row_end] = a
            self._columns(a, v, call, outs)
        if threaded:
            self._await(engine.finish)
        if self.poison:
            self._poison_gathered(schedule, call.m)
        return outs, x_full

    def gemm_rs(self, schedule: TileSchedule, call: Call) -> torch.Tensor:
        """[M, K/W] x [K/W, N] -> [own rows, N]; GemmAR: [M, N]."""
        engine, spec = self.engine, self.spec
        own = _C.core.row_count(call.m, self.world, self.rank)
        full = spec.op is Op.gemm_ar
        out = self.empty(call.m if full else own, spec.n[0])
        direct = schedule.knobs.store == "direct"
        partial = out[:0] if direct else self.empty(call.m, spec.n[0])
        bias = call.biases[0]
        threaded = schedule.knobs.copy_streams == 1
        engine.begin(
            schedule.native,
            call.m * 2 + (bias is not None),
            threaded,
            self.timeout_s,
            partial=partial.data_ptr(),
            out=out.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            scale=1.0 / self.world if spec.reduce == "avg" else 1.0,
        )
        if direct:  # the first tile may land in a peer's buffer: it must have finished with it
            self._await(engine.wait_entries)
        weight = call.weights[0]
        for index, v in enumerate(schedule.visits):
            target = (
                self._partial_rows(schedule, v, out, full)
                if direct
                else (partial[v.row_begin : v.row_end])
            )
            whole = v.col_end - v.col_begin == spec.n[0]
            torch.mm(
                call.x[v.row_begin : v.row_end],
                weight if whole else weight[:, v.col_begin : v.col_end],
                out=target if whole else target[:, v.col_begin : v.col_end],
            )
            engine.visit_done(index)
        self._await(engine.finish)
        if self.poison and self.slots and schedule.knobs.direction == "push":
            self.slots[self.rank].fill_(float("nan"))  # nobody writes here before we enter again
        return out

    gemm_ar = gemm_rs

    def check_entries(self, schedule: TileSchedule, digest: int) -> None:
        """Meet the peers without moving anything, so that a mismatch is found (path unfused)."""
        self.engine.begin(schedule.native, digest, False, self.timeout_s)
        self._await(self.engine.wait_entries)

    # -- pieces ------------------------------------------------------------------------------------

    def _columns(self, a: torch.Tensor, v: Visit, call: Call, outs: list[torch.Tensor]) -> None:
        """Multiply rows ``a`` with the visit's columns of every weight."""
        single = len(outs) == 1
        if not single and v.col_begin != 0:
            return  # several weights are computed whole, at the first tile of their rows
        for weight, bias, out in zip(call.weights, call.biases, outs, strict=True):
            target = out[v.row_begin : v.row_end]
            if single and v.col_end - v.col_begin != out.shape[1]:
                columns = slice(v.col_begin, v.col_end)
                weight, target = weight[:, columns], target[:, columns]
                bias = None if bias is None else bias[columns]
            if bias is None:
                torch.mm(a, weight, out=target)
            else:
                torch.addmm(bias, a, weight, out=target)

    def _partial_rows(
        self, schedule: TileSchedule, v: Visit, out: torch.Tensor, full: bool
    ) -> torch.Tensor:
        """Where a tile of one owner's rows is stored under store = direct."""
        m = schedule.shape[0]
        base = _C.core.row_begin(m, self.world, v.owner)
        rows = slice(v.row_begin - base, v.row_end - base)
        if v.owner == self.rank:
            return out[v.row_begin : v.row_end] if full else out[rows]
        pull = schedule.knobs.direction == "pull"
        holder, other = (self.rank, v.owner) if pull else (v.owner, self.rank)
        return self.slots[holder][self.engine.slot_index(holder, other), rows]

    def _poison_gathered(self, schedule: TileSchedule, m: int) -> None:
        """Spoil the rows that no peer can still be reading, until we enter the next call."""
        nan = float("nan")
        if schedule.knobs.direction == "push":
            self.gathered.fill_(nan)
        elif schedule.knobs.order == "direct":  # peers pull the own rows only
            self.gathered[: _C.core.row_begin(m, self.world, self.rank)].fill_(nan)
            self.gathered[_C.core.row_end(m, self.world, self.rank) :].fill_(nan)

    # -- failure and end ---------------------------------------------------------------------------

    def _await(self, wait: Callable[[float, float], bool]) -> None:
        if not wait(self.timeout_s, self.spin_s):
            self._raise_failure()

    def _raise_failure(self) -> None:
        f = self.engine.failure()
        label, peer = self.spec.label, f["peer"]
        if f["kind"] == "mismatch":
            self.engine.settle()
            raise ValueError(self._mismatch_text(f))
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
        self.close(failed=True, culprit=peer)
        raise PeerTimeoutError(f"{where}: {what}")

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

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Stop the worker and let go of the shared memory. Idempotent."""
        if self._memory is None:
            return
        self.engine.close(failed, culprit)
        self._memory = None
        self.slots = []
        self.gathered = torch.empty(0)
