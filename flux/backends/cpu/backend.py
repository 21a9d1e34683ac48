"""CPU backend: executes tile schedules in real processes, over shared memory and the network.

The calling thread runs the GEMM tiles (ATen) in schedule order. Beside it the native engine
(csrc/cpu/engine.h) moves communication tiles, raises and awaits signals, and reduces.

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

Ranks on other hosts have stand-ins in private memory, which transport/network.py makes true.
Memory ordering and buffer reuse: csrc/cpu/signal_pad.h.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from flux import _C
from flux.backends.cpu.all_to_all import run_all_to_all
from flux.backends.cpu.diagnosis import Diagnosis, mismatch_text
from flux.backends.cpu.one_shot import OneShot
from flux.backends.cpu.slabs import SegmentLayout, SlabPlan, make_plan
from flux.backends.epilogue import Multiplier, pack, scale_of_rows, spoil, unpack
from flux.core.backend import OverlapHooks
from flux.core.call import CachedCalls, Call, Gemm
from flux.core.env import POISON, WINDOW_MB
from flux.core.errors import PeerTimeoutError
from flux.core.knobs import ClusterTile, Topology
from flux.core.problem import ceil_div
from flux.core.recorder import COPY_LANE, GEMM_LANE, Recorder, Work
from flux.core.schedule import TileSchedule
from flux.core.spec import DTYPES, OpSpec
from flux.core.tensors import address_of
from flux.transport import shm
from flux.transport.exchange import Exchange, spin_seconds
from flux.transport.placement import Placement
from flux.transport.threads import end_at_exit

if TYPE_CHECKING:
    from flux.select.choose import Choice
    from flux.transport.network import Network

MAX_PLANS = 1024  # kept per op
_CPU = torch.device("cpu")  # named everywhere: torch.device(...) as a context changes the default
_NO_ROWS = torch.empty(0, device=_CPU)
"""What a closed op has gathered. ``close`` makes no tensor once the network is closed: the end of
the program waits no longer then, and a thread that returns from torch while the interpreter is
finalized aborts the process."""


class CpuBackend:
    """``Backend`` of one op on one rank."""

    asynchronous = False
    transport = None
    cluster: ClusterTile | None = None
    _memory: shm.SymmetricMemory | None = None

    def __init__(
        self,
        spec: OpSpec,
        exchange: Exchange,
        choice: Choice,
        topology: Topology,
        placement: Placement,
        timeout_s: float,
    ) -> None:
        local = placement.shared_with(exchange.rank)
        self.spec = spec
        self.rank = exchange.rank
        self.world = exchange.world
        self.timeout_s = timeout_s
        self.refusals = 0
        self.waits_for_hosts = topology.nodes > 1
        self.spin_s = spin_seconds(exchange, local)
        self.poison = POISON.get()
        layout = SegmentLayout.serving(spec, topology, choice)
        memory = shm.allocate(exchange, placement, layout.signals, layout.data_bytes, spec.label)
        data = memory.data
        self._shared_bytes, self._pids = memory.nbytes, memory.processes.pids
        native = DTYPES[spec.out_dtype].native
        assert native is not None  # results are never float8
        self.engine = _C.Engine(
            rank=self.rank,
            pads=memory.pads,
            data=[address_of(d) for d in data],
            remote=[not here for here in local],
            row_bytes=layout.row_bytes,
            slot_bytes=layout.slot_bytes,
            result_offset=layout.result_offset,
            data_bytes=layout.data_bytes,
            dtype=native,
            signals=layout.signals,
            processes=memory.processes,
            memory=memory.segments,
        )
        self._pid = os.getpid()
        self.network: Network | None = None
        self.one_shot: OneShot | None = None
        end_at_exit(self)
        self.recorder: Recorder | None = None
        self._calls = CachedCalls()
        self._plans: dict[int, SlabPlan] = {}  # by M
        columns = spec.local_n(self.world, self.rank)
        # None: of several weights, or of experts.
        self._columns = columns[0] if len(columns) == 1 and not spec.experts else None
        row, wire = spec.travelling(self.world)
        # AllGather: the gathered input; pushed GemmAR: where peers leave the result.
        self.gathered = torch.empty(0, row, dtype=wire, device=_CPU)
        self.slots: list[torch.Tensor] = []
        if layout.blocks:
            chunk = ceil_div(spec.max_m, self.world)
            self.slots = [
                d[: layout.blocks * layout.slot_bytes].view(wire).view(layout.blocks, chunk, row)
                for d in data
            ]
        if layout.data_bytes - layout.result_offset >= spec.max_m * layout.row_bytes:
            rest = data[self.rank][layout.result_offset :]
            self.gathered = rest[: spec.max_m * layout.row_bytes].view(wire).view(-1, row)
        self._memory = memory
        if not all(local):
            remote = [rank for rank in range(self.world) if not local[rank]]
            window = int(WINDOW_MB.get() * 1e6)
            from flux.transport.network import Network  # which one host does not need

            self.network = Network(exchange, remote, self.engine, timeout_s, window, memory)
            self.network.open()
        if any(knobs.path == "one_shot" for knobs in choice.variants):
            self.one_shot = OneShot(spec, exchange, placement, self.engine, timeout_s, self.spin_s)

    @cached_property
    def _diagnosis(self) -> Diagnosis:
        return Diagnosis(self.spec, self.rank, self.engine, self._pids, self.network)

    @property
    def workspace_bytes(self) -> int:
        """Memory of this rank, in bytes: see ``Backend.workspace_bytes``."""
        one_shot = 0 if self.one_shot is None else self.one_shot.collectives.workspace_bytes
        return self._shared_bytes + one_shot

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """Return a new output, full of NaN when FLUX_POISON is set."""
        out = torch.empty(rows, columns, dtype=self.spec.out_dtype, device=_CPU)
        return spoil(out) if self.poison else out

    def trace(self, recorder: Recorder | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        of_caller = None if recorder is None else recorder.lane(GEMM_LANE)
        self.engine.trace(of_caller, None if recorder is None else recorder.lane(COPY_LANE))
        if self.network is not None:
            self.network.trace(recorder)
        if self.one_shot is not None:
            self.one_shot.trace(recorder)
        self.recorder = recorder

    def require_room(self, schedule: TileSchedule) -> None:
        """Raise ValueError if the op's memory is too small: see ``Backend.require_room``."""
        if schedule.knobs.is_tiled:
            self.engine.require_room(schedule.native)

    def input_slot(self, m: int) -> None:
        """Return None."""

    # -- ops ---------------------------------------------------------------------------------------

    def run(
        self,
        schedule: TileSchedule,
        call: Call,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Execute a call: see ``Backend.run``."""
        if call.blocks is not None:
            return run_all_to_all(self, schedule, call.blocks, call.digest, hooks)
        if self.spec.op.gathers:
            outs = self._ag_gemm(schedule, call, gather, hooks)
        else:
            outs = self._gemm_rs(schedule, call, hooks)
        if len(call.columns) == 1 and self.spec.scaling == "none" and call.grouped is None:
            shard_of = self.world if self.spec.op.gathers else 1
            rows = outs[0].shape[0]
            self._calls.keep(schedule, call, shard_of, rows, x_unit=1)
        return outs

    def again(
        self, x: torch.Tensor, weight: object, bias: object, m: int | None
    ) -> Callable[[], list[torch.Tensor]] | None:
        """Return what repeats the last call with this weight, or None: see ``Backend.again``."""
        last = self._calls.find(x, weight, bias, m)
        if last is None:
            return None
        weights = (weight,) if isinstance(weight, torch.Tensor) else ()
        biases = (cast("torch.Tensor | None", bias),)
        call = Call(last.m, x, weights, (last.columns,), biases, digest=last.digest)
        if not weights:
            call.gemm = cast(Gemm, weight)
        if self.spec.op.gathers:
            return partial(self._ag_gemm, last.schedule, call)
        return partial(self._gemm_rs, last.schedule, call)

    def _ag_gemm(
        self,
        schedule: TileSchedule,
        call: Call,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        if self.one_shot is not None and schedule.knobs.path == "one_shot":
            return self.one_shot.call(self, schedule, call, gather, hooks or OverlapHooks())
        engine, spec = self.engine, self.spec
        lane = None if self.recorder is None else self.recorder.begin(schedule)
        x = pack(call) if spec.scales_travel else call.x
        if self.network is not None:
            x = x.contiguous()
        outs = [self.empty(call.out_rows, columns) for columns in call.columns]
        x_full = x.new_empty(call.m, spec.k, dtype=spec.dtype) if gather else None
        multiply = Multiplier(spec, call)
        plan = self._plan(schedule)
        needed = call.needed
        selection = None if needed is None else plan.selection(needed, spec.ep)
        engine.begin(
            schedule.native,
            call.digest,
            plan.threaded,
            self.timeout_s,
            x=address_of(x),
            x_stride=x.stride(0) * x.itemsize,
            selection=selection,
        )
        if self.network is not None:
            self._begin_network(self.network, schedule, call.digest, selection=selection, x=x)
        if plan.own_place is not None:
            plan.own_place.copy_(x)
        if not plan.threaded:
            self._await(engine.finish)
        if hooks is not None and plan.first_foreign < 0:
            hooks.both()
        for number, slab in enumerate(plan.slabs):
            if slab.shared is None:
                a = x if slab.source is None else x[slab.source]
            else:
                if hooks is not None and number == plan.first_foreign:
                    hooks.meanwhile()
                for index in range(slab.first, slab.last):
                    if not engine.wait_visit(index, self.timeout_s, self.spin_s):
                        self._raise_failure()
                if hooks is not None and number == plan.last_foreign:
                    hooks.arrived()
                a = slab.shared
            began = 0 if lane is None else lane.now()
            rows, scale = unpack(spec, a) if spec.scales_travel else (a, call.scale_x)
            v = slab.visit
            if x_full is not None and v.col_begin == 0:
                x_full[v.row_begin : v.row_end] = rows
            if self._columns is not None or v.col_begin == 0:
                # Several weights are computed whole, at the first tile of their rows.
                whole = slab.target is None or call.grouped is not None
                for weight, (bias, out) in enumerate(zip(call.biases, outs, strict=True)):
                    multiply(
                        rows,
                        out if whole else out[slab.target],
                        weight=weight,
                        columns=slab.columns,
                        scale_x=scale,
                        bias=bias,
                        first=v.row_begin,
                    )
            if lane is not None:
                lane.add(Work.gemm, began, slab.first, slab.last)
        if plan.threaded:
            self._await(engine.finish)
        if self.network is not None:
            self._finish_network(self.network)
        if self.poison:
            self._poison_gathered(schedule, call.m)
        return outs if x_full is None else [*outs, x_full]

    def _gemm_rs(
        self, schedule: TileSchedule, call: Call, hooks: OverlapHooks | None = None
    ) -> list[torch.Tensor]:
        if self.one_shot is not None and schedule.knobs.path == "one_shot":
            return self.one_shot.call(self, schedule, call, False, hooks or OverlapHooks())
        engine, spec = self.engine, self.spec
        lane = None if self.recorder is None else self.recorder.begin(schedule)
        plan = self._plan(schedule)
        out = self.empty(call.m if spec.op.all_reduces else plan.own_rows, spec.n[0])
        sums = out[:0] if plan.direct else self.empty(call.m, spec.n[0])
        bias, needed = call.biases[0], call.needed
        selection = None if needed is None else plan.selection(needed, spec.ep)
        engine.begin(
            schedule.native,
            call.digest,
            plan.threaded,
            self.timeout_s,
            partial=0 if plan.direct else address_of(sums),
            out=address_of(out),
            bias=0 if bias is None else address_of(bias),
            scale=1.0 / self.world if spec.reduce == "avg" else 1.0,
            selection=selection,
        )
        if self.network is not None:
            of_call = {"selection": selection, "partial": sums, "out": out}
            self._begin_network(self.network, schedule, call.digest, **of_call)
        if plan.direct:  # the first tile may land in a peer's buffer: it must have finished with it
            self._await(engine.wait_entries)
        multiply = Multiplier(spec, call)
        private, scaled = out if plan.direct else sums, call.scale_x is not None
        for slab in plan.slabs:
            v = slab.visit
            target = slab.shared
            if target is None:
                target = private if slab.target is None else private[slab.target]
            began = 0 if lane is None else lane.now()
            multiply(
                call.rows_of_x(slab.source),
                target,
                columns=slab.columns,
                scale_x=scale_of_rows(call, v.row_begin, v.row_end) if scaled else None,
                first=v.row_begin,
            )
            for index in range(slab.first, slab.last):
                engine.visit_done(index)
            if lane is not None:
                lane.add(Work.gemm, began, slab.first, slab.last)
        if hooks is not None:
            hooks.meanwhile()
        self._await(engine.finish)
        if self.network is not None:
            self._finish_network(self.network)
        if self.poison and self.slots and schedule.knobs.direction == "push":
            spoil(self.slots[self.rank])  # nobody writes here before we enter again
            spoil(self.gathered)
        return [out]

    def meet(self, schedule: TileSchedule | None, digest: int) -> Callable[[], None]:
        """Begin to meet the peers: see ``Backend.meet``."""
        if self.recorder is not None and schedule is not None:
            self.recorder.begin(schedule)
        self.engine.begin(None, digest, False, self.timeout_s)
        if self.network is not None:
            self.network.begin(self.engine.epoch, digest, lambda peer: (), lambda peer: ())

        def met() -> None:
            self._await(self.engine.wait_entries)
            if self.network is not None:
                self._finish_network(self.network)

        return met

    # -- pieces ------------------------------------------------------------------------------------

    def _plan(self, schedule: TileSchedule) -> SlabPlan:
        """Return what the calls with this schedule have in common."""
        plan = self._plans.get(schedule.shape[0])
        if plan is not None and plan.schedule is schedule:
            return plan
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        grouped = bool(self.spec.experts)
        plan = make_plan(schedule, self._columns, self.gathered, self.slots, grouped)
        self._plans[schedule.shape[0]] = plan
        return plan

    # -- other hosts -------------------------------------------------------------------------------

    def _begin_network(
        self, network: Network, schedule: TileSchedule, digest: int, **of_call: Any
    ) -> None:
        from flux.backends.cpu.remote_tiles import RemoteTiles

        tiles = RemoteTiles(schedule, self.slots, self.gathered, **of_call)
        network.begin(self.engine.epoch, digest, tiles.outgoing, tiles.incoming)

    def _finish_network(self, network: Network) -> None:
        failure = network.finish()
        if failure is not None:
            peer, why = failure
            self.close(failed=True, culprit=peer)
            raise PeerTimeoutError(
                f"{self.spec.label}: rank {self.rank}, call {self.engine.epoch}: {why}"
            )

    def _poison_gathered(self, schedule: TileSchedule, m: int) -> None:
        """Poison the rows that no peer can still be reading before this rank's next call."""
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
        """Raise the error of a failed wait, and close the op unless all ranks refuse the call."""
        f = self.engine.failure()
        if f["kind"] == "mismatch":
            self.engine.settle()
            if self.network is not None:
                self.network.settle()
            error = ValueError(self._mismatch_text(f))
            self.refusals += 1
            raise error
        if f["kind"] == "ended":
            self.close(failed=True, culprit=self.rank)
            raise RuntimeError(f"{self.spec.label}: closed during call {self.engine.epoch}")
        lost, culprit = self._diagnosis.of_wait(f, self.timeout_s)
        self.close(failed=True, culprit=culprit)
        raise lost

    def _mismatch_text(self, f: _C.FailureDict) -> str:
        return mismatch_text(self.spec, self.rank, f)

    def look(self) -> None:
        """Look once, without waiting, whether a peer on this host has died or given up.

        Called while a collective of the library is waited for, from any thread.

        Raises:
            PeerTimeoutError: one has.
        """
        memory = self._memory  # stays mapped until this returns
        error = None if memory is None else self._diagnosis.of_collective()
        if error is not None:
            raise error

    def silent_peer(self) -> int:
        """Return the rank that all others wait for: see ``Backend.silent_peer``."""
        memory = self._memory
        return -1 if memory is None else self._diagnosis.silent_peer()

    def refuse(self, why: str) -> None:
        """Tell the peers, which are about to make the same call, that this rank's input is bad."""
        self.engine.refuse(why)
        if self.network is not None:
            self.network.refuse(self.engine.epoch, why)
        self.refusals += 1

    def capturing(self) -> bool:
        """Return False: the CPU has no graphs."""
        return False

    def check(self) -> None:
        """Do nothing: calls are done when they return."""

    @property
    def remote_peers(self) -> list[int]:
        """Ranks on other hosts."""
        return [] if self.network is None else list(self.network.bytes_sent)

    def reason_untraceable(self, fused: bool) -> str | None:
        """Return None: calls on the CPU can always be traced."""
        return None

    def end_call(self) -> None:
        """End a call that is inside, in another thread or further up the stack."""
        self.engine.end_call()

    def end(self) -> None:
        """Stop the worker and tell the peers, at the program's end.

        A call in another thread raises, and drops its reference to the memory, which the worker may
        still use: hence one here.
        """
        memory = self._memory
        if memory is not None:
            self.engine.end_call()
        self.engine.close()
        if self.one_shot is not None:
            self.one_shot.collectives.close()
        del memory

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Stop the worker and release the shared memory. Idempotent."""
        if self._memory is None:
            return
        self.engine.close(failed, culprit)
        if self.one_shot is not None:
            self.one_shot.collectives.close(failed, culprit)
        if self.network is not None:
            self.network.close(failed, culprit)
        self._memory = None
        for plan in self._plans.values():
            plan.forget_memory()
        self.slots = []
        self.gathered = _NO_ROWS

    def __del__(self) -> None:
        """Release what an exception left, in a constructor or right behind it."""
        if self._memory is not None and self._pid == os.getpid():
            self.close(failed=True)
