"""CUDA backend: executes tile schedules with the fused kernels, copy streams and signals of a GPU.

A call checks, allocates its results, and leaves the rest to one native call
(csrc/cuda_host/cuda_op.h, which has the pictures): entries, copies, signals, kernels and the
reduction go onto streams, and the host waits for nothing. Captured calls become part of the CUDA
graph (csrc/cuda_host/cuda_op_captured.cpp).

Waits inside kernels give up after the timeout and leave a record, which the next call, or
``check``, raises. Streams cannot: ``close`` raises all words of the own pad, which lets them go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from flux import _C
from flux.backends.cuda import nvtx
from flux.backends.cuda.exchange import ExchangeCalls
from flux.backends.cuda.grouped import GroupedCalls
from flux.backends.cuda.op_calls import OpParts
from flux.backends.cuda.operands import Fit, of_zeros, row_step
from flux.backends.cuda.refusals import check_possible, reason_untraceable
from flux.backends.cuda.setup import (
    buffers_of,
    by_switch,
    choose_kernels,
    cluster_tile,
    margin_of,
    spare_of,
    sums_by_switch,
)
from flux.backends.cuda.waits import StreamWaits
from flux.backends.cuda.workspaces import Workspaces
from flux.backends.epilogue import ACTIVATE, spoil
from flux.core.backend import OverlapHooks, nothing
from flux.core.call import CachedCall, CachedCalls, Call
from flux.core.env import GRAPH_OVERLAP, POISON
from flux.core.errors import PeerTimeoutError
from flux.core.forked import abandon_in_children
from flux.core.knobs import ClusterTile, Knobs, Topology
from flux.core.layout import Layout
from flux.core.problem import ceil_div
from flux.core.recorder import CallRecorder
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import DeviceChoices, MadeMaps
from flux.core.spec import OpSpec
from flux.core.tensors import address_of
from flux.kernels import loading
from flux.kernels.registry import BuiltKernel
from flux.select.heuristic import IN_KERNEL_ROWS, copies_partials, most_comm_tiles
from flux.select.share import beside
from flux.transport.base import WORD, DeviceTransport, Peers
from flux.transport.device import Device
from flux.transport.watch import Watch

if TYPE_CHECKING:
    from flux.select.choose import Choice


F = TypeVar("F", bound=Callable[..., Any])


def on_its_device(method: F) -> F:
    """Make the op's device current during ``method``: streams and launches belong to a device."""

    @wraps(method)
    def run(self: CudaBackend, *args: Any, **options: Any) -> Any:
        try:
            if self.device.is_current():
                return method(self, *args, **options)
            with self.device.made_current():
                return method(self, *args, **options)
        except _C.PeerLostError as error:
            raise PeerTimeoutError(f"{self.spec.label}: rank {self.rank}: {error}") from error

    return cast(F, run)


class CudaBackend:
    """``Backend`` of one op on one rank."""

    asynchronous = True
    waits_for_hosts = False
    remote_peers = ()

    def __init__(
        self,
        spec: OpSpec,
        transport: DeviceTransport,
        choice: Choice,
        topology: Topology,
        timeout_s: float,
        watch: Watch | None = None,
    ) -> None:
        """Build the executor: kernels, symmetric memory and streams.

        ``choice`` has one kernel, and one direction, order and way to reduce, for all M: tiles of a
        call may come while a peer is still in the call before (docs/kernels/protocol.md).

        Raises:
            ValueError: no built kernel can do the op.
            RuntimeError: a kernel cannot be loaded.
        """
        self.spec = spec
        self.transport = transport
        self.rank, self.world = transport.rank, transport.world
        self.nodes = transport.nodes
        self.topology = topology
        self.timeout_s = timeout_s
        self.watch = watch
        self.poison = POISON.get()
        self.recorder: CallRecorder | None = None
        nvtx.switch()
        self.device: Device = transport.device
        self.sm_count = transport.sm_share
        # Of calls whose rows copies bring; those that kernels push have memory of their own.
        ways = [k for k in choice.variants if k.path != "unfused"]
        knobs = next((k for k in ways if k.path != "in_kernel"), ways[0] if ways else Knobs())
        in_kernel = any(k.path == "in_kernel" for k in choice.variants)
        self.sums_by_switch = sums_by_switch(spec, transport, knobs, in_kernel=in_kernel)
        if self.sums_by_switch:
            knobs = replace(knobs, reduce="local")  # as far as kernels and memory are concerned
        self.margin = margin_of(spec, transport, knobs)
        self.pulls = knobs.direction == "pull"
        self.sm_count = max(1, self.sm_count - self.margin)
        spare = spare_of(spec, transport, knobs, self.margin)
        sizes = (knobs, choice.kernel, spare)
        chosen = choose_kernels(spec, transport, self.sm_count, *sizes)
        self._activate_after = any(kernel.activate_after for kernel in chosen)
        self.beside = 0
        if self.nodes > 1:  # wherever those blocks run, whole clusters of the GEMM fit beside them
            self.beside = beside(self.sm_count)
            cluster = max(math.prod(kernel.built.config.cluster) for kernel in chosen)
            self.sm_count = max(1, self.sm_count - self.beside * cluster)
        self.configs = [kernel.built.config for kernel in chosen]
        self.lends_margin = spare > 0 and all(c.tile_scheduler == "dynamic" for c in self.configs)
        self.cluster: ClusterTile | None = cluster_tile(
            spec, transport, self.sm_count, self.configs, *sizes
        )
        self.kernels = [self._load(kernel.built) for kernel in chosen]
        self._fit = Fit(max(kernel.built.config.alignment_elements for kernel in chosen))
        tile = self.kernels[0].tile
        # Bulk stores of sm_90a kernels spoil rows in front of slots.
        guard = _C.core.guard_rows if self.configs[0].arch == "90a" else 0
        most_tiles = most_comm_tiles(
            spec.op, ceil_div(spec.max_m, self.world), knobs, 1, choice.most_tiles
        )
        pushed = IN_KERNEL_ROWS if in_kernel else 0
        copied = any(copies_partials(spec.op, self.nodes, k) for k in ways)
        way = (self.nodes, transport.relays, guard, pushed, buffers_of(spec, transport, knobs))
        self.layout = Layout.of(spec, self.world, knobs, tile, most_tiles, *way, copied)
        self.pad_words = self.layout.pad_words(self.world)
        memory = transport.memory(self.pad_words, self.layout.data_bytes)
        self.pads = [address_of(pad) for pad in memory.pads]
        self.data = [address_of(data) for data in memory.data]
        switched = by_switch(spec, self.configs, self.sums_by_switch)
        self.multicast = memory.multicast if switched else 0
        self.peers = transport.peers(spec, self.layout, tile, memory)
        self._own_data = memory.data[self.rank]
        self._remote = transport.remote(memory, self.layout.boxes, self.beside)
        self._report = self.device.pinned(_C.STATUS_WORDS, torch.int64)
        self.driver = self.device.driver
        self.native = self._native(timeout_s)
        abandon_in_children(self)
        self._workspaces = Workspaces(self.device)
        # Producers of sm_90a claim an item while another one is multiplied.
        items = self.sm_count * (2 if self.configs[0].arch == "90a" else 1)
        kernel = (tile, items, self._activate_after, self.nodes)
        parts = OpParts(spec, self.device, self.native, self._workspaces, self._fit)
        self._grouped = GroupedCalls(parts, self.kernels[0], *kernel)
        self._exchange: ExchangeCalls | None = None
        if spec.op.exchanges:
            ranks = (self._own_data, self.world, self.rank)
            self._exchange = ExchangeCalls(parts, self.layout, *ranks)
        who = f"{spec.label}: rank {self.rank}"
        noticed = (self.native, self.peers, watch, self._report)
        self._waits = StreamWaits(who, transport, *noticed, timeout_s)
        self._touch_peers()
        self._calls = CachedCalls()
        self.repeats = 0  # calls that were recognised
        self._open = True
        self.refusals = 0
        if self._activate_after:
            self._load_activation()

    @on_its_device
    def _native(self, timeout_s: float) -> _C.CudaOp:
        spec = self.spec
        return _C.CudaOp(
            driver=self.driver,
            kernels=self.kernels,
            rank=self.rank,
            pads=self.pads,
            data=self.data,
            multicast=self.multicast,
            sums_by_switch=self.sums_by_switch,
            scales_travel=spec.scales_travel,
            all_reduce=spec.op.all_reduces,
            scale=1.0 / self.world if spec.reduce == "avg" else 1.0,
            report=address_of(self._report),
            timeout_ns=int(timeout_s * 1e9),
            sm_count=self.sm_count,
            device=self.device.index,
            poison=self.poison,
            nodes=self.nodes,
            remote=self._remote,
            beside=self.beside,
            dtype=int(spec.out_dtype == torch.float16),  # FLUX_BF16, FLUX_F16
            shared=self.transport.sm_share < self.device.sm_count,
            graph_overlap=GRAPH_OVERLAP.get(),
            lane=self.transport.lane,
            margin=self.margin,
            lends_margin=self.lends_margin,
            scaled_rows=spec.scaling == "row",
            x_bytes=spec.dtype.itemsize,
            **self.layout.native,
        )

    @on_its_device
    def _touch_peers(self) -> None:
        """Make the first copies between this rank and its peers: see ``CudaOp.touch_peers``.

        Raises:
            PeerTimeoutError: a kernel of another op kept them from ending.
        """
        self.native.touch_peers()
        if not self._waits.drain(self.native.copy_stream, self.timeout_s):
            raise PeerTimeoutError(
                f"{self.spec.label}: rank {self.rank}: the first copies to its peers were not done "
                f"after {self.timeout_s:g} s"
            )

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self.pad_words * WORD + self.layout.data_bytes

    @on_its_device
    def _load(self, built: BuiltKernel) -> _C.Kernel:
        """Load a kernel with all of its code; a load under a waiting kernel may wait with it."""
        kernel = loading.load(built)
        kernel.prepare(self.device.index)
        return kernel

    @on_its_device
    def _load_activation(self) -> None:
        """Run the activation once.

        torch loads its code at the first use, which must not be behind a kernel that waits.
        """
        some = torch.zeros(64, dtype=self.spec.out_dtype, device=self.device.torch_device)
        self.device.keep(some)
        self.device.enqueue(partial(self._activate, some))

    # -- ops ---------------------------------------------------------------------------------------

    @on_its_device
    def run(
        self,
        schedule: TileSchedule,
        call: Call,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Put a call on the current stream: see ``Backend.run``."""
        if self.spec.experts:
            rows, stream = self._rows_of(call.m), self._begin(schedule, awaits_maps=False)
            outs = self._grouped.run(schedule, stream, call, rows, gather, self._empty)
            if self.recorder is not None:
                self.recorder.routed(self.rank, self._grouped.tile_experts())
        elif self._exchange is not None:
            outs = self._exchange.run(schedule, self._begin(schedule), call, self._empty)
        elif self.spec.op.gathers:
            outs = self._ag_gemm(schedule, call, gather)
        else:
            outs = [self._gemm_rs(schedule, call)]
        if hooks is not None:
            hooks.both()  # behind the kernels on the caller's stream, which it does not wait for
        return outs

    @on_its_device
    def make_maps(self, schedule: TileSchedule, choices: DeviceChoices, columns: int) -> MadeMaps:
        """Have a kernel begin to make the maps of the next call: see ``RoutingBackend``."""
        stream = self._begin(schedule)
        return self._grouped.make_maps(schedule, stream, choices, columns, self._waits)

    def _ag_gemm(self, schedule: TileSchedule, call: Call, gather: bool) -> list[torch.Tensor]:
        stream = self._begin(schedule)
        as_passed, call = call, self._fit.call(call, gathers=True)
        outs = [self._empty(call.m, columns) for columns in call.columns]
        x_full = self._empty(call.m, self.spec.k, self.spec.dtype) if gather else None
        scale = 0 if call.scale_x is None else self._address(call.scale_x)
        operands = [self._operand(call, number, out) for number, out in enumerate(outs)]
        self._workspaces.make_room(self.native, schedule, stream, operands, self.spec.k)
        self.native.ag_gemm(
            schedule.native,
            stream,
            (self._address(call.x), self.spec.k, self.spec.k, scale),
            operands,
            0 if x_full is None else address_of(x_full),
            self.peers.gather(schedule, self.next_epoch, self.data),
        )
        if self._activate_after:
            for out in outs:
                self.device.enqueue(partial(self._activate, out))
        self.peers.end(stream, self.native.epoch)
        self._remember(schedule, as_passed, self.world)
        return outs if x_full is None else [*outs, x_full]

    def _gemm_rs(self, schedule: TileSchedule, call: Call) -> torch.Tensor:
        stream = self._begin(schedule)
        as_passed = call
        if call.x.shape[1] == 0:
            call = of_zeros(self.spec, call, self.device)
        call = self._fit.call(call, gathers=False)
        full = self.spec.op.all_reduces
        rows = call.m if full else self._rows_of(call.m)
        out = self._empty(rows, self.spec.n[0])
        scale = 0 if call.scale_x is None else self._address(call.scale_x)
        step = row_step(call.x.shape, call.x.stride())
        x = (self._address(call.x), step, call.x.shape[1], scale)
        operand = self._operand(call, 0, out)
        self._workspaces.make_room(self.native, schedule, stream, [operand], call.x.shape[1])
        if self.peers.idle:
            self.native.gemm_rs(schedule.native, stream, x, operand, address_of(out))
            self._remember(schedule, as_passed, 1)
            return out
        self.peers.scatter(schedule, self.next_epoch)
        if full:
            with _C.CallSpan(self.spec.label, call.m):
                self.native.scatter(schedule.native, stream, x, operand)
                self.peers.send_results(stream, call.m, self.native.epoch)
                self.native.reduce(schedule.native, stream, operand, address_of(out))
        else:
            self.native.gemm_rs(schedule.native, stream, x, operand, address_of(out))
        self.peers.end(stream, self.native.epoch)
        return out

    def _remember(self, schedule: TileSchedule, call: Call, shard_of: int) -> None:
        """Keep what ``repeat`` needs, if the call is one that can be repeated."""
        weight, bias = call.weights[0], call.biases[0]
        plain = len(self.kernels) == 1 and self.spec.scaling == "none" and self.peers.idle
        fits = all(t is None or self._fit.fits(t) for t in (weight, bias))
        x_fits = self._fit.fits(call.x) if shard_of == 1 else call.x.is_contiguous()
        empty = call.columns[0] == 0 or call.x.shape[1] == 0
        if plain and fits and x_fits and not empty and not self._activate_after:
            rows = self._rows_of(call.m) if self.spec.op.scatters else call.m
            unit = self._fit.unit(call.x) if shard_of == 1 else 1
            self._calls.keep(schedule, call, shard_of, rows, unit)

    def again(
        self, x: torch.Tensor, weight: object, bias: object, m: int | None
    ) -> Callable[[], list[torch.Tensor]] | None:
        """Return what repeats the last call with this weight, or None: see ``Backend.again``."""
        last = self._calls.find(x, weight, bias, m)
        if last is None:
            return None
        return partial(self.repeat, last, x, cast(torch.Tensor, weight))

    @on_its_device
    def repeat(self, last: CachedCall, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        """Make the call that ``last`` is of, with other contents of x and weight."""
        stream = self._begin(last.schedule)
        out = x.new_empty(last.out_rows, last.columns)  # in less time than by torch.empty
        if self.poison:
            spoil(out)
        self.device.keep(x, weight, out)
        self.repeats += 1
        at, ld, k = address_of(out), last.columns, last.x_shape[1]
        operand = (address_of(weight), last.weight_ld, ld, at, ld, last.bias_ptr, 0)
        self._workspaces.make_room(self.native, last.schedule, stream, [operand], k)
        operand_a = (address_of(x), row_step(last.x_shape, last.x_stride), k, 0)
        if self.spec.op.gathers:
            self.native.ag_gemm(last.schedule.native, stream, operand_a, [operand], 0, [])
        else:
            self.native.gemm_rs(last.schedule.native, stream, operand_a, operand, at)
        return [out]

    # -- pieces ------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Return whether the current stream is captured into a CUDA graph."""
        return self.driver.capture(self.device.current_stream()) != 0

    def _rows_of(self, m: int) -> int:
        return _C.core.row_count(m, self.world, self.rank)

    @property
    def next_epoch(self) -> int:
        """The number of the next call."""
        return (self.native.epoch + 1) & 0xFFFFFFFF

    def _begin(self, schedule: TileSchedule, awaits_maps: bool = True) -> int:
        """Raise failures of earlier calls, note the call in a trace, and return its stream.

        Raises:
            PeerTimeoutError: see ``check``.
            PeerDiedError: a peer can take no part in the call.
            ValueError: the stream is being captured into a graph, and the transport's peers are
                played by the host.
        """
        if self.native.failed:
            self.check(wait=False)
        self._waits.look()
        stream = self.device.current_stream()
        try:
            check_possible(self, schedule, awaits_maps)
        except ValueError:
            self.refusals += 1
            raise
        if self.recorder is not None and not (self.spec.experts and awaits_maps):
            self.recorder.began(self.rank, schedule)
        self._waits.streams.add(stream)
        return stream

    def _address(self, tensor: torch.Tensor) -> int:
        self.device.keep(tensor)
        return address_of(tensor)

    def _operand(self, call: Call, number: int, out: torch.Tensor) -> _C.Operand:
        """Return one weight, and where its product goes, in the form of ``_C.CudaOp``."""
        weight, bias = call.weights[number], call.biases[number]
        scales = call.scale_weights
        return (
            self._address(weight),
            weight.stride(0),
            call.columns[number],
            address_of(out),
            out.stride(0),
            0 if bias is None else self._address(bias),
            self._address(scales[number]) if scales else 0,
        )

    def _empty(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.spec.out_dtype
        out = torch.empty(rows, columns, dtype=dtype, device=self.device.torch_device)
        self.device.keep(out)
        return spoil(out) if self.poison else out

    def _activate(self, out: torch.Tensor) -> None:
        out.copy_(ACTIVATE[self.spec.activation](out))

    # -- faults and the end ------------------------------------------------------------------------

    @on_its_device
    def check(self, wait: bool = True) -> None:
        """Raise what waits of earlier calls have found; with ``wait``, once those are done.

        Raises:
            PeerTimeoutError: a wait took longer than the timeout, or a peer has given up.
            PeerDiedError: the process of a peer on this host has ended before its part was done.
        """
        self._waits.check(wait)

    def look(self) -> None:
        """Raise PeerDiedError if the process of a peer on this host has ended."""
        self._waits.look()

    def silent_peer(self) -> int:
        """Return -1: unknown."""
        return -1

    def require_room(self, schedule: TileSchedule) -> None:
        """Raise ValueError if the op's memory is too small: see ``Backend.require_room``."""
        if schedule.knobs.path != "unfused":
            self.native.require_room(schedule.native)

    def input_slot(self, m: int) -> torch.Tensor | None:
        """Return this rank's rows among gathered ones, if pushed: see ``Backend.input_slot``."""
        if self.poison or self.pulls or not self.peers.idle:
            return None
        begin = self.layout.own_row(_C.core.row_begin(m, self.world, self.rank), self.next_epoch)
        rows = self._own_data.view(torch.uint8)[begin:][: self._rows_of(m) * self.layout.row_bytes]
        return rows.view(self.spec.dtype).view(-1, self.spec.k)

    def meet(self, schedule: TileSchedule | None, digest: int) -> Callable[[], None]:
        """Do nothing: on GPUs no rank waits for a peer before a call.

        FLUX_CHECK finds calls that do not fit together.
        """
        return nothing

    def refuse(self, why: str) -> None:
        """Do nothing, since the host does not meet its peers.

        The caller's own rank raises at once. The other ranks wait until their timeout, unless
        FLUX_CHECK is set.
        """

    def end_call(self) -> None:
        """End a wait for calls, in another thread or further up the stack."""
        self._waits.ending = True

    def reason_untraceable(self, fused: bool) -> str | None:
        """Return why calls cannot be traced: a capture, or kernels of no trace build."""
        return reason_untraceable(self, fused)

    def abandon(self) -> Iterable[object]:
        """Leave streams and NCCL's communicator to the parent of this forked child."""
        self._open = False
        return (self.native,)

    @on_its_device
    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Wait for calls that are under way, then release everything. Idempotent."""
        if not self._open:
            return
        waits = self._waits
        waits.ending = False
        if failed:
            waits.let_go()
        for stream in (*waits.streams, self.native.copy_stream, self.native.network_stream):
            if stream or stream in waits.streams:  # torch's default stream is 0
                waits.drain(stream)
        self._open = False  # until here a signal handler may interrupt this, which is then repeated
        try:
            if not failed:
                self.native.look()
                if self.native.failed:
                    waits.let_go()  # peers wait for what this rank's kernels have not done
        finally:
            if self.watch is not None:  # not before: what peers wait for has been done
                self.watch.close(failed)
            self.native.close()
            self._own_data = torch.empty(0, device="cpu")
            if self._exchange is not None:
                self._exchange.close()
            self.transport.leave()
            self.peers = waits.peers = Peers()
