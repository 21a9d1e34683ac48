"""CUDA backend: executes tile schedules with the fused kernels, copy streams and signals of a GPU.

    AGGemm   caller's stream   entry -> all peers | own rows | kernel: wait, multiply | join
             copy stream       rows to or from peers, their signals ...

    GemmRS   caller's stream   entry -> all peers | kernel: tile -> its owner, flag | reduction

Everything is put on streams in one go; the host waits for nothing. Who may write to which buffer
when: csrc/host/gather_tiles.h (gathered rows), csrc/cuda/gemm/sm90/scatter_store.cuh (partials). An
entry is raised by a stream operation behind all that the stream did before, so it says that the
rank's buffers are no longer read. Signals, flags and entries hold the epoch of the call and are
never reset.

Waits inside kernels give up after the timeout and leave a record, which the next call, or
``check``, finds and raises. Streams that wait for memory cannot give up: ``close`` after a failure
raises all words of the own pad, which lets them go.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch

from flux import _C
from flux.backends.device import Device
from flux.backends.epilogue import ACTIVATE, SCALE_BYTES, scale_of_rows
from flux.env import POISON
from flux.errors import PeerTimeoutError
from flux.heuristic import MAX_COMM_TILES, ceil_div
from flux.kernels.choice import choose
from flux.kernels.config import TMA_BYTES
from flux.kernels.legality import GemmProblem
from flux.kernels.registry import BuiltKernel
from flux.knobs import Direction, Knobs, Op, Order, Swizzle
from flux.ops.call import Call
from flux.ops.spec import FP8, OpSpec
from flux.schedule import TileSchedule
from flux.topology import Topology
from flux.transport.one_gpu import OneGpuExchange, Peers

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "e4m3"}
WORD = 4  # bytes of a signal
ALIGNMENT = 256  # bytes; of every region of symmetric memory
_WAITS = {
    1: "rows of x (AllGather signal {signal})",
    2: "the entry of rank {signal}, whose memory was to be written",
    3: "partials of a peer (flag {signal})",
}


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _up(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Symmetric memory of one rank: words of its pad, and bytes of its data.

    Pad: W entries, W words "my result is everywhere" (GemmAR), then signals or flags.
    Data: gathered rows, then their scales if they have some; or slots of partials, one per source
    or (reduce = in_flight) one that all add to, then (GemmAR) the result.
    """

    words: int
    slots: int
    slot_bytes: int
    rest_offset: int  # of what comes after gathered rows or slots
    data_bytes: int
    row_bytes: int

    @staticmethod
    def of(spec: OpSpec, world: int, knobs: Knobs, tile: tuple[int, int]) -> Layout:
        """The least memory that serves every M up to ``spec.max_m``."""
        chunk = ceil_div(spec.max_m, world)
        row = spec.row_elements() * spec.itemsize
        if spec.op is Op.ag_gemm:
            tiles = min(chunk, MAX_COMM_TILES)
            if knobs.comm_tile_rows is not None:
                tiles = ceil_div(chunk, min(knobs.comm_tile_rows, chunk))
            rows = _up(spec.max_m * row)
            scales = _up(spec.max_m * SCALE_BYTES) if spec.scaling == "row" else 0
            return Layout(2 * world + world * tiles, 0, 0, rows, rows + scales, row)
        flags = _C.core.ScatterTiling(spec.max_m, spec.n[0], world, *tile).flag_count()
        count = 1 if knobs.reduce == "in_flight" else world
        slots = count * _up(chunk * row)
        result = _up(spec.max_m * row) if spec.op is Op.gemm_ar else 0
        return Layout(2 * world + flags, count, _up(chunk * row), slots, slots + result, row)


class CudaBackend:
    """Executor of one op on one rank. Calls are asynchronous, and serial."""

    def __init__(
        self,
        spec: OpSpec,
        exchange: OneGpuExchange,
        knobs: Knobs,
        topology: Topology,
        timeout_s: float,
    ) -> None:
        """Raises ValueError if no built kernel can do the op, RuntimeError if one won't load."""
        self.spec = spec
        self.exchange = exchange
        self.rank, self.world = exchange.rank, exchange.world
        self.topology = topology
        self.timeout_s = timeout_s
        self.poison = POISON.get()
        self.device: Device = exchange.of.device
        self.sm_count = exchange.of.sm_share
        self.knobs = knobs
        self._activate_after = False
        self.kernels = [self._kernel(n) for n in spec.local_n(self.world, self.rank)]
        tile = self.kernels[0].tile
        self.layout = Layout.of(spec, self.world, knobs, tile)
        memory = exchange.of.memory(exchange.op, self.layout.words, self.layout.data_bytes)
        self.pads = [pad.data_ptr() for pad in memory.pads]
        self.data = [data.data_ptr() for data in memory.data]
        self.peers = exchange.of.peers(exchange.op, spec, self.layout, tile, memory)
        self._own_data = memory.data[self.rank]
        self._status = self.device.zeros(_C.STATUS_WORDS, torch.int64)
        self._report = self.device.pinned(_C.STATUS_WORDS, torch.int64)
        self.driver = self.device.driver
        self.copy_stream = self.driver.create_stream()
        self._workspaces: dict[int, torch.Tensor] = {}
        self._streams: set[int] = set()
        self.epoch = 0
        self._open = True

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self.layout.words * WORD + self.layout.data_bytes

    def _kernel(self, n: int) -> _C.Kernel:
        built = self._choose(n)
        kernel = _C.Kernel(str(built.library), built.symbol)
        kernel.prepare(self.device.index)
        return kernel

    def _choose(self, n: int) -> BuiltKernel:
        spec = self.spec
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise ValueError(
                f"{spec.label}: backend cuda needs bfloat16, float16 or float8_e4m3fn, "
                f"got {spec.dtype}"
            )
        problem = GemmProblem(
            spec.max_m, max(n, 1), max(spec.local_k(self.world, self.rank), 1), self.world
        )
        wanted = {
            "weight": "kn" if spec.transpose_weight else "nk",
            "scaling": spec.scaling,
            "reduce": self.knobs.reduce or "local",
        }

        def best(activation: str) -> BuiltKernel | None:
            candidates = self.device.registry.candidates(
                "ag_gemm" if spec.op is Op.ag_gemm else "gemm_rs",
                dtype,
                self.device.capability,
                problem,
                activation=activation,
                **wanted,
            )
            return choose(candidates, problem, self.sm_count)

        found = best(spec.activation)
        if found is None and spec.activation != "none":
            found = best("none")
            if found is not None:
                self._activate_after = True
                _warn_once(
                    f"{spec.label}: no kernel with {spec.activation} is built for this {dtype} "
                    f"problem: it runs as a kernel of its own behind {found.symbol}"
                )
        if found is None:
            options = ", ".join(f"{name} = {value}" for name, value in wanted.items())
            raise ValueError(
                f"{spec.label}: no built kernel does {problem} in {dtype} ({options}) on compute "
                f"capability {self.device.capability}: build some with `flux compile`"
            )
        return found

    # -- ops ---------------------------------------------------------------------------------------

    def ag_gemm(
        self, schedule: TileSchedule, call: Call, gather: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """[own rows, K] x [K, N/W] each -> [M, N/W] each, and the gathered [M, K] if asked for."""
        stream = self._begin(call, pull=schedule.knobs.direction == "pull")
        x = call.x.contiguous()
        outs = [self._empty(call.m, w.shape[1]) for w in call.weights]
        sources = self.peers.gather(schedule, self.epoch, self.data)
        parts = [(x.data_ptr(), self.layout.row_bytes, self.data, sources)]
        scales = call.scale_x
        if scales is not None and self.spec.scaling == "row":
            scales = scales.contiguous()
            at = self.layout.rest_offset
            gathered_scales = [data + at for data in self.data]
            parts.append((scales.data_ptr(), SCALE_BYTES, gathered_scales, gathered_scales))
            self.device.keep(scales)
            scales = self._own_data[at:].view(torch.float32)
        _C.gather_tiles(
            driver=self.driver,
            schedule=schedule.native,
            home=stream,
            stream=self.copy_stream,
            epoch=self.epoch & 0xFFFFFFFF,
            parts=parts,
            entries=self.pads,
            signals=[pad + 2 * self.world * WORD for pad in self.pads],
        )
        gathered = self._own_data[: call.m * self.layout.row_bytes].view(self.spec.dtype)
        gathered = gathered.view(call.m, self.spec.k)
        for number, (kernel, out) in enumerate(zip(self.kernels, outs, strict=True)):
            if out.numel() == 0:
                continue
            args = self._gemm_args(schedule, gathered, call, number, scales)
            bias = call.biases[number]
            args.d, args.ldd = out.data_ptr(), out.stride(0)
            args.bias = 0 if bias is None else bias.data_ptr()
            args.signals = self.pads[self.rank] + 2 * self.world * WORD
            self._launch(kernel, args, stream)
            if self._activate_after:
                self.device.enqueue(partial(self._activate, out))
        # x may be overwritten, and the gathered rows reused, by what follows on the stream.
        self.driver.order_after(later=stream, earlier=self.copy_stream)
        self.device.keep(x)
        if gather and not any(out.numel() for out in outs):
            self._await_rows(schedule, stream)  # no kernel has
        x_full = None
        if gather:
            x_full = self._empty(call.m, self.spec.k, self.spec.dtype)
            self.driver.copy(
                stream, x_full.data_ptr(), gathered.data_ptr(), call.m * self.layout.row_bytes
            )
        self._end(stream)
        return outs, x_full

    def gemm_rs(self, schedule: TileSchedule, call: Call) -> torch.Tensor:
        """[M, K/W] x [K/W, N] -> [own rows, N]; GemmAR: [M, N]."""
        stream = self._begin(call, pull=False)
        spec, layout, n = self.spec, self.layout, self.spec.n[0]
        own = _C.core.row_count(call.m, self.world, self.rank)
        first = _C.core.row_begin(call.m, self.world, self.rank)
        flags = [pad + 2 * self.world * WORD for pad in self.pads]
        if call.x.shape[1] == 0:
            call = self._of_zeros(call)
        args = self._gemm_args(schedule, call.x, call, 0, scale_of_rows(call, 0, call.m))
        mine = self.rank if layout.slots > 1 else 0
        args.set_slots([data + mine * layout.slot_bytes for data in self.data])
        args.set_flags(flags)
        args.slot_ld = n
        args.entries = self.pads[self.rank]
        kernel = self.kernels[0]
        self.peers.scatter(schedule, self.epoch)
        self._launch(kernel, args, stream)
        full = spec.op is Op.gemm_ar
        out = self._empty(0 if full else own, n)
        reduction = _C.ReduceArgs()
        reduction.rows, reduction.n, reduction.m, reduction.first_row = own, n, call.m, first
        reduction.tile_m, reduction.tile_n = kernel.tile
        reduction.world, reduction.rank = self.world, self.rank
        own_data = self.data[self.rank]
        reduction.set_slots([own_data + s * layout.slot_bytes for s in range(layout.slots)])
        reduction.slot_ld = reduction.out_ld = n
        reduction.flags = flags[self.rank]
        bias = call.biases[0]
        reduction.bias = 0 if bias is None else bias.data_ptr()
        reduction.scale = 1.0 / self.world if spec.reduce == "avg" else 1.0
        reduction.sm_count = self.sm_count
        self._sync(reduction.sync)
        if full:
            self.peers.send_results(stream, call.m, self.epoch)
            at = layout.rest_offset + first * layout.row_bytes
            reduction.set_outs([data + at for data in self.data])
        else:
            reduction.set_outs([out.data_ptr()])
        kernel.reduce(reduction, stream)
        if full:
            out = self._collect(call.m, stream)
        self._end(stream)
        return out

    gemm_ar = gemm_rs

    def _collect(self, m: int, stream: int) -> torch.Tensor:
        """GemmAR: the result, once everybody's rows of it have been written here."""
        done = self.world * WORD
        for pad in self.pads:
            self.driver.signal(stream, pad + done + self.rank * WORD, self.epoch & 0xFFFFFFFF)
        for peer in range(self.world):
            word = self.pads[self.rank] + done + peer * WORD
            self.driver.await_signal(stream, word, self.epoch & 0xFFFFFFFF)
        begin, size = self.layout.rest_offset, m * self.layout.row_bytes
        result = self._own_data[begin : begin + size].view(self.spec.out_dtype)
        out = self._empty(m, self.spec.n[0])
        self.driver.copy(stream, out.data_ptr(), result.data_ptr(), size)
        return out

    # -- pieces ------------------------------------------------------------------------------------

    def _begin(self, call: Call, pull: bool) -> int:
        """Start a call on the caller's stream: tell the peers that this rank's buffers are free."""
        self.check(wait=False)
        self.peers.check(call.m)
        self.epoch += 1
        biases = (b for b in call.biases if b is not None)
        self.device.keep(call.x, *call.weights, *biases, *call.scale_weights)
        if call.scale_x is not None:
            self.device.keep(call.scale_x)
        stream = self.device.current_stream()
        self._streams.add(stream)
        if not pull:
            self._fill_with_nan(stream)
        if self.layout.slots == 1:  # what peers add to, once they see the entry
            self.driver.fill(stream, self.data[self.rank], 0, self.layout.slot_bytes // WORD)
        for pad in self.pads:
            self.driver.signal(stream, pad + self.rank * WORD, self.epoch & 0xFFFFFFFF)
        if pull and self.poison:
            # What peers pull themselves is free when they have begun this call, too.
            for peer in range(self.world):
                word = self.pads[self.rank] + peer * WORD
                self.driver.await_signal(stream, word, self.epoch & 0xFFFFFFFF)
            self._fill_with_nan(stream)
        return stream

    def _fill_with_nan(self, stream: int) -> None:
        if self.poison and self._own_data.numel():
            words = self._own_data.numel() // WORD
            self.driver.fill(stream, self.data[self.rank], 0xFFFFFFFF, words)

    def _end(self, stream: int) -> None:
        size = _C.STATUS_WORDS * 8
        self.driver.copy(stream, self._report.data_ptr(), self._status.data_ptr(), size)
        self.peers.end(stream, self.epoch)

    def _empty(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.spec.out_dtype
        out = torch.empty(rows, columns, dtype=dtype, device=self.device.torch_device)
        self.device.keep(out)
        if self.poison:
            out.view(torch.uint8).fill_(255)  # NaN in every dtype
        return out

    def _activate(self, out: torch.Tensor) -> None:
        out.copy_(ACTIVATE[self.spec.activation](out))

    def _await_rows(self, schedule: TileSchedule, stream: int) -> None:
        """Hold a stream back until all gathered rows are there."""
        first = self.pads[self.rank] + 2 * self.world * WORD
        m, rows = schedule.shape[0], schedule.knobs.comm_tile_rows or 1
        for owner in range(self.world):
            begin, end = (f(m, self.world, owner) for f in (_C.core.row_begin, _C.core.row_end))
            if begin == end:
                continue
            for signal in range(*_C.core.signals_of_rows(m, self.world, rows, begin, end)):
                self.driver.await_signal(stream, first + signal * WORD, self.epoch & 0xFFFFFFFF)

    def _of_zeros(self, call: Call) -> Call:
        """A product of zeros, for a rank that no part of K is left for: TMA has no empty maps."""
        rows = max(call.m, self.spec.n[0])
        zeros = self.device.zeros(rows * TMA_BYTES, torch.uint8).view(self.spec.dtype)
        zeros = zeros.view(rows, -1)
        weight = zeros[: self.spec.n[0]].t()
        self.device.keep(zeros)
        return replace(call, x=zeros[: call.m], weights=(weight,))

    def _sync(self, sync: _C.KernelSync) -> None:
        sync.epoch = self.epoch & 0xFFFFFFFF
        sync.timeout_ns = int(self.timeout_s * 1e9)
        sync.status = self._status.data_ptr()

    def _gemm_args(
        self,
        schedule: TileSchedule,
        a: torch.Tensor,
        call: Call,
        number: int,
        scale_a: torch.Tensor | None,
    ) -> _C.GemmArgs:
        """Arguments of every kernel that multiplies with one of the call's weights."""
        knobs, weight = schedule.knobs, call.weights[number]
        transposed = self.spec.transpose_weight
        unit = 1 if transposed else 0
        if weight.stride(unit) != 1:  # [K, columns], unit stride along columns or along K
            weight = weight.contiguous() if transposed else weight.t().contiguous().t()
        self.device.keep(weight)
        args = _C.GemmArgs()
        args.m, args.n, args.k = a.shape[0], weight.shape[1], a.shape[1]
        args.alpha = 1.0
        if scale_a is not None:
            scale_b = call.scale_weights[number].contiguous()
            scale_a = scale_a.contiguous()
            self.device.keep(scale_a, scale_b)
            args.scale_a, args.scale_b = scale_a.data_ptr(), scale_b.data_ptr()
        args.a, args.lda = a.data_ptr(), a.stride(0)
        args.b, args.ldb = weight.data_ptr(), weight.stride(1 - unit)
        order = args.order
        order.world, order.rank = self.world, self.rank
        order.order = Order[knobs.order or "direct"]
        order.direction = Direction[knobs.direction or "push"]
        order.swizzle = Swizzle[knobs.swizzle or "rank_shift"]
        order.nodes, order.domains, order.lanes = self.topology.mesh
        order.raster = knobs.raster or 1
        order.comm_tile_rows = knobs.comm_tile_rows or 1
        args.sm_count, args.device = self.sm_count, self.device.index
        self._sync(args.sync)
        return args

    def _launch(self, kernel: _C.Kernel, args: _C.GemmArgs, stream: int) -> None:
        size = kernel.workspace_bytes(args)
        if size:
            kept = self._workspaces.get(stream)
            if kept is None or kept.numel() < size:
                kept = self._workspaces[stream] = self.device.zeros(size, torch.uint8)
            args.workspace, args.workspace_bytes = kept.data_ptr(), kept.numel()
        kernel.launch(args, stream)

    # -- faults and the end ------------------------------------------------------------------------

    def check(self, wait: bool = True) -> None:
        """Raise what waits of earlier calls have found; with ``wait``, once those are done.

        Raises:
            PeerTimeoutError: a wait took longer than the timeout.
        """
        done = True
        for stream in self._streams if wait else ():
            done &= self._drained(stream)
        code, tile, signal, expected, observed = self._report[:5].tolist()
        who = f"{self.spec.label}: rank {self.rank}"
        if code:
            what = _WAITS[code].format(signal=signal)
            raise PeerTimeoutError(
                f"{who} waited more than {self.timeout_s:g} s for {what}, tile {tile}, "
                f"call {expected}: the word was at {observed}"
            )
        if not done:
            raise PeerTimeoutError(
                f"{who}: call {self.epoch} was not done after {self.timeout_s:g} s: a stream "
                "waited for a peer's signal"
            )

    def _drained(self, stream: int) -> bool:
        """Wait until a stream is done; False if it had to be let go, as it waited for what never
        came. Kernels give up by themselves within the timeout."""
        deadline = time.monotonic() + self.timeout_s + 1.0
        while not self.driver.ready(stream):
            if time.monotonic() > deadline:
                self._let_go()
                self.driver.synchronize(stream)
                return False
            time.sleep(0.0005)
        return True

    def _let_go(self) -> None:
        """Raise every word of the own pad, so that no stream of this rank waits any more."""
        self.peers.let_go(self.epoch)
        rescue = self.driver.create_stream()
        value = self.epoch & 0xFFFFFFFF
        self.driver.fill(rescue, self.pads[self.rank], value, self.layout.words)
        self.driver.synchronize(rescue)
        self.driver.destroy_stream(rescue)

    def check_entries(self, schedule: TileSchedule, digest: int) -> None:
        """The unfused path has no peers to meet on one GPU."""
        raise ValueError(f"{self.spec.label}: path = unfused needs a process group")

    def refuse(self, why: str) -> None:
        """A rank of this process was called with bad input: its caller hears of it at once, and the
        other ranks wait in vain. Nothing to tell them here."""

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Wait for what is under way and give everything back. Idempotent."""
        if not self._open:
            return
        self._open = False
        if failed:
            self._let_go()
        for stream in (*self._streams, self.copy_stream):
            self._drained(stream)
        self.driver.destroy_stream(self.copy_stream)
        self._own_data = torch.empty(0)
        self.exchange.of.leave_op(self.exchange.op, self.rank)
        self.peers = Peers()
