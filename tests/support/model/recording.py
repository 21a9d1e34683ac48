"""What the CUDA backend puts on its streams, written down by recording_gpu.cpp.

``record`` builds real ops on a VirtualWorld, calls them a few times, and returns the operations of
all streams in order, with their addresses and values. Nothing is computed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emulated import ROOT, EmulatedDevice, HeapWorld, Puts, SwitchedWorld
from flux import _C, AGGemm, GemmAR, GemmRS, Knobs, Topology
from flux.select.choose import Fixed
from flux.transport.virtual import VirtualWorld
from model.records import (
    ELEMENT,
    GATHERED,
    MASK,
    PUSHED,
    WORD,
    Content,
    Kind,
    Record,
    Recording,
    Region,
    Scenario,
    What,
)

OPS = {"ag_gemm": AGGemm, "gemm_rs": GemmRS, "gemm_ar": GemmAR}


class _Record(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("tile", ctypes.c_int32),
        ("what", ctypes.c_int32),
        ("source", ctypes.c_int32),
        ("stream", ctypes.c_uint64),
        ("at", ctypes.c_uint64),
        ("from_", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("value", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


def build(folder: Path) -> Path:
    """The recorder as a shared library, built with the host's C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler"
    target = folder / "librecording_gpu.so"
    options = ["-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'ptx_machine'}"]
    source = Path(__file__).with_name("recording_gpu.cpp")
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
    return target


class RecordingDevice(EmulatedDevice):
    """A device that runs nothing; its kernels go by the names of the emulated ones."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.library.recorder_records.restype = ctypes.POINTER(_Record)
        self.library.recorder_count.restype = ctypes.c_size_t
        self.library.recorder_record_bytes.restype = ctypes.c_size_t
        self.library.recorder_invented.restype = ctypes.c_size_t
        self.library.recorder_invented_stream.restype = ctypes.c_uint64
        assert self.library.recorder_record_bytes() == ctypes.sizeof(_Record)

    def _add_multicast(self, address: int, members: list[int], size: int) -> None:
        addresses = (ctypes.c_size_t * len(members))(*members)
        self.library.multicast_add(
            ctypes.c_size_t(address), ctypes.c_size_t(size), addresses, len(members)
        )

    def clear(self) -> None:
        self.library.recorder_clear()
        self._kept.clear()

    def begin_call(self, rank: int, epoch: int, capture: int) -> None:
        """Whose call is next, what tells its contents apart, and its capture or 0."""
        self.library.recorder_begin_call(rank, ctypes.c_uint32(epoch), ctypes.c_uint64(capture))

    def count(self) -> int:
        return int(self.library.recorder_count())

    def puts(self) -> Puts:
        """In place of NVSHMEM's."""
        names = ("put_signal", "signal", "relay", "node_sum")
        functions = [getattr(self.library, f"recorder_{name}") for name in names]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
        return Puts(*addresses, self.library.recorder_heaps)

    def invented(self) -> Iterator[tuple[int, int]]:
        """Streams that were invented for what goes on beside a kernel (puts, early reductions), and
        the rank of each."""
        rank, find = ctypes.c_int(), self.library.recorder_invented_stream
        for number in range(self.library.recorder_invented()):
            yield find(ctypes.c_size_t(number), ctypes.byref(rank)), rank.value

    def records(self) -> list[_Record]:
        return list(self.library.recorder_records()[: self.count()])


class ApartWorld(VirtualWorld):
    """Ranks that have a device each, as far as they know."""

    @property
    def sm_share(self) -> int:
        return self.device.sm_count


@contextmanager
def _poison(on: bool) -> Iterator[None]:
    before = os.environ.get("FLUX_POISON")
    os.environ["FLUX_POISON"] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLUX_POISON"]
        else:
            os.environ["FLUX_POISON"] = before


def record(device: RecordingDevice, scenario: Scenario) -> Recording:
    """Make the scenario's calls, rank after rank, none waiting for another rank's."""
    device.clear()
    device.begin_call(0, 0, 0)
    with _poison(scenario.poison), _world(device, scenario) as world:
        session = _Session(device, world, scenario)
        recording = session.run()
    return recording


def _world(device: RecordingDevice, scenario: Scenario) -> VirtualWorld:
    if scenario.puts:
        return HeapWorld(scenario.world, device, scenario.nodes, device.puts())
    kind = ApartWorld if scenario.apart else SwitchedWorld if scenario.switch else VirtualWorld
    return kind(scenario.world, device, scenario.nodes)


@dataclass(frozen=True)
class _FewRows(Fixed):
    """The given knobs, but for calls of up to ``few_rows``, which end in their kernels."""

    few_rows: int = 0

    def knobs(self, m: int) -> Knobs:
        return Knobs(path="in_kernel") if m <= self.few_rows else self.given

    @property
    def variants(self) -> tuple[Knobs, ...]:
        return (self.given, Knobs(path="in_kernel"))


@dataclass(frozen=True)
class _Span:
    """The records of one call."""

    begin: int
    end: int
    op: int
    call: int


class _Session:
    def __init__(self, device: RecordingDevice, world: VirtualWorld, scenario: Scenario) -> None:
        self.device, self.world, self.scenario = device, world, scenario
        self.spans: list[_Span] = []
        self.out = Recording(scenario)
        self.out.word_before = (scenario.epoch(0) - 1) & MASK
        self.out.streams[device.current_stream()] = (-1, "host's stream")
        for rank, stream in enumerate(world.streams):
            self.out.streams[stream] = (rank, "caller's stream")
        ranks = range(scenario.world)
        self.ops = [[self._build(name, r) for name in scenario.ops] for r in ranks]
        self.x = [[self._shared_x(op, r) for op in range(len(scenario.ops))] for r in ranks]
        self.more = [
            [device.driver.create_stream() for _ in range(scenario.streams - 1)] for _ in ranks
        ]
        for rank, streams in enumerate(self.more):
            for number, stream in enumerate(streams):
                self.out.streams[stream] = (rank, f"caller's stream {number + 2}")
        device.clear()

    def _build(self, name: str, rank: int) -> Any:
        s = self.scenario
        gathers = name == "ag_gemm"
        n, k = (s.n or 4 * s.world, 4 * s.buffers) if gathers else (8, 2 * s.world)
        order = None if s.nodes > 1 and s.order == "direct" else s.order
        rows = s.comm_tile_rows
        knobs = Knobs(
            path=s.path, direction=s.direction, order=order, comm_tile_rows=rows, buffers=s.buffers
        )
        margin = 0 if s.apart else None  # else the reduction would not begin early
        of_sums = Knobs(reduce="in_flight" if s.switch else "local", sm_margin=margin)
        if s.path != "fused" or s.sends or s.reduce:
            reduce = "in_flight" if s.switch else s.reduce
            of_sums = Knobs(path=s.path, sends=s.sends, reduce=reduce, comm_tile_rows=rows)
        tuning = knobs if gathers else of_sums
        op = OPS[name](
            self.world.rank(rank),
            max_m=max(s.rows),
            n=n,
            k=k,
            dtype=torch.bfloat16,
            tuning=_FewRows(tuning, few_rows=s.few_rows) if s.few_rows else tuning,
            topology=Topology(*s.topology) if s.topology else None,
            timeout_s=1.0,
        )
        backend = op._backend
        if gathers or s.nodes > 1 or s.path == "medium" or s.sends:
            self.out.streams[backend.native.copy_stream] = (rank, "copy stream")
        if s.nodes > 1:
            self.out.streams[backend.native.network_stream] = (rank, "network's stream")
        self._regions(s.ops.index(name), rank, backend)
        return op

    def _regions(self, op: int, rank: int, backend: Any) -> None:
        s, layout = self.scenario, backend.layout
        data = backend.data[rank]
        self._pad_regions(op, rank, backend)

        def region(at: int, size: int, name: str, unit: int) -> None:
            self.out.regions.append(Region(at, size, rank, op, name, unit))

        status = _C.STATUS_WORDS * 8
        region(backend._report.data_ptr(), status, "report, word", status)
        for mail in self.world.mail(backend.transport.op)[rank : rank + 1]:
            unit = mail.element_size()
            at, boxes = mail.data_ptr(), mail.data_ptr() + self.scenario.world * unit
            for begin, count, name in (
                (at, self.scenario.world, "opened by rank"),
                (boxes, layout.boxes, "box"),
            ):
                words = Region(begin, count * unit, rank, op, name, unit, True)
                self.out.regions.append(words)
        if not layout.slot_bytes:
            for offset, name in zip(sorted({0, layout.second_offset}), GATHERED, strict=False):
                region(data + offset, layout.sums_offset, name, layout.row_bytes)
            for number, name in enumerate(PUSHED):
                at = data + layout.sums_offset + number * layout.pushed_bytes
                region(at, layout.pushed_bytes, name, layout.row_bytes)
            return
        for slot in range(layout.slots):
            at = data + layout.slot_offset(slot)
            of = " of owner" if s.switch else " of source" if s.nodes == 1 else ""
            size = layout.slot_bytes - layout.guard_bytes
            region(at, size, f"slot{of} {slot}, row", layout.row_bytes)
        if layout.sums_offset > layout.rest_offset:
            size = layout.sums_offset - layout.rest_offset
            region(data + layout.rest_offset, size, "result, row", layout.row_bytes)
        if layout.copied_offset:
            for owner in range(s.world):
                at = data + layout.copied_offset + layout.slot_offset(owner)
                size = layout.slot_bytes - layout.guard_bytes
                region(at, size, f"partial for owner {owner}, row", layout.row_bytes)
            return
        for at in range(layout.sums_offset, layout.data_bytes, layout.slot_bytes):
            region(data + at, layout.slot_bytes, "sum to put, row", layout.row_bytes)

    def _pad_regions(self, op: int, rank: int, backend: Any) -> None:
        """As CudaOpSetup in csrc/cuda_host/cuda_op.h has them."""
        world, layout, at = self.scenario.world, backend.layout, backend.pads[rank]
        others = "flag" if layout.slot_bytes else "signal"
        status = _C.STATUS_WORDS * 8
        for name, count in (
            ("entry of rank", world),
            ("'done' of rank", world),
            ("status, word", status // WORD),
            (others, layout.signals),
            ("offer", layout.offers),
            ("graph count", 1),
            ("graph entry of rank", world),
            ("graph 'done' of rank", world),
            (f"graph {others}", layout.signals),
            ("graph offer", layout.offers),
            ("push word of rank", world),
            ("gather count", 5),
            ("sum flag", layout.sum_flags),
            ("sum word", layout.sum_words - layout.sum_flags),
            ("signal of odd calls", layout.signals if layout.second_offset else 0),
        ):
            is_pad = not name.startswith("status")
            unit = WORD if is_pad else status
            self.out.regions.append(Region(at, count * WORD, rank, op, name, unit, is_pad))
            at += count * WORD
        assert at == backend.pads[rank] + backend.pad_words * WORD

    def _shared_x(self, op: int, rank: int) -> list[torch.Tensor]:
        """The caller's x of every call."""
        calls = len(self.scenario.rows)
        if self.scenario.fresh_x:
            return [self._x(op, rank) for _ in range(calls)]
        return [self._x(op, rank)] * calls

    def _x(self, op: int, rank: int) -> torch.Tensor:
        s = self.scenario
        made = self.ops[rank][op]
        gathers = s.ops[op] == "ag_gemm"
        rows = -(-max(s.rows) // s.world) if gathers else max(s.rows)
        x = torch.zeros(rows, made.spec.local_k(s.world, rank), dtype=torch.bfloat16)
        row = x.shape[1] * ELEMENT
        self.out.regions.append(Region(x.data_ptr(), x.numel() * ELEMENT, rank, op, "x, row", row))
        return x

    def run(self) -> Recording:
        self.world.run(self._calls_of)
        what = "put" if self.scenario.puts else "early reduction"
        for number, (stream, rank) in enumerate(self.device.invented()):
            self.out.streams[stream] = (rank, f"{what} {number}")
        for raw in enumerate(self.device.records()):
            self.out.records.append(self._convert(*raw))
        for ops in self.ops:
            for op in ops:
                op.close()
        for streams in self.more:
            for stream in streams:
                self.device.driver.destroy_stream(stream)
        return self.out

    def _calls_of(self, rank: int) -> None:
        s, driver = self.scenario, self.device.driver
        own = self.device.current_stream()
        streams = [own, *self.more[rank]]
        for later in streams[1:]:
            driver.order_after(later=later, earlier=own)
        for turn, m in enumerate(s.rows):
            with self.device.on_stream(streams[turn % len(streams)]):
                for op in range(len(s.ops)):
                    begin = self.device.count()
                    self._call(rank, op, turn, m)
                    call = turn * len(s.ops) + op
                    self.spans.append(_Span(begin, self.device.count(), op, call))
        for earlier in streams[1:]:
            driver.order_after(later=own, earlier=earlier)

    def _call(self, rank: int, number: int, turn: int, m: int) -> None:
        s, op, epoch = self.scenario, self.ops[rank][number], self.scenario.epoch(turn)
        captured = turn in s.captured
        if s.epochs:  # else the op counts: captured calls have numbers of their own
            op._backend.native.epoch = (epoch - 1) & MASK
        self.device.begin_call(rank, epoch & MASK, turn + 1 if captured else 0)
        gathers = s.ops[number] == "ag_gemm"
        x = self.x[rank][number][turn][: op.own_rows(m) if gathers else m]
        if s.in_slot:
            x = op.input_slot(m)
        # The caller's own work: it writes x where it pleases, as far as the stream allows.
        words = x.numel() * ELEMENT // WORD
        self.device.driver.fill(self.device.current_stream(), x.data_ptr(), epoch & MASK, words)
        weight = torch.zeros(
            op.spec.local_n(s.world, rank)[0],
            op.spec.local_k(s.world, rank),
            dtype=torch.bfloat16,
        )
        if gathers:
            got = op(x, weight, m=m, return_gathered=s.gather)
            out, gathered = got if s.gather else (got, None)
            self._expect_rows(rank, What.output, rank, number, epoch, out)
            if gathered is not None:
                for r in range(s.world):
                    rows = self._share(gathered, m, r)
                    self._expect_rows(rank, What.x, r, number, epoch, rows)
            return
        out = op(x, weight)
        for r in range(s.world):
            first = _C.core.row_begin(m, s.world, r) * out.shape[1] * ELEMENT
            if s.ops[number] == "gemm_ar":
                rows = self._share(out, m, r)
                self._expect_rows(rank, What.result, r, number, epoch, rows, first)
            elif r == rank:
                self._expect_rows(rank, What.result, r, number, epoch, out, first)

    def _share(self, rows: torch.Tensor, m: int, rank: int) -> torch.Tensor:
        w = self.scenario.world
        return rows[_C.core.row_begin(m, w, rank) : _C.core.row_end(m, w, rank)]

    def _expect_rows(
        self,
        rank: int,
        what: What,
        source: int,
        op: int,
        epoch: int,
        rows: torch.Tensor,
        offset: int = 0,
    ) -> None:
        """These rows were returned to ``rank``: what should they hold in the end?"""
        if rows.numel():
            at, size = rows.data_ptr(), rows.numel() * ELEMENT
            content = Content(at, size, what, op, source, epoch & MASK, offset)
            self.out.results.append(content)
            row = rows.shape[1] * ELEMENT
            self.out.regions.append(Region(at, size, rank, op, "returned rows, row", row))

    def _convert(self, number: int, raw: _Record) -> Record:
        span = next((s for s in self.spans if s.begin <= number < s.end), None)
        kind, content = Kind(raw.kind), None
        op = span.op if span else -1
        written = GATHERED if self.scenario.in_slot else ("x, row",)  # by the caller
        if kind in (Kind.read, Kind.write):
            what = What(raw.what)
            content = Content(raw.at, raw.bytes, what, op, raw.source, raw.value, raw.offset)
        elif kind is Kind.fill and any(
            r.name in written and r.at <= raw.at < r.at + r.bytes for r in self.out.regions
        ):
            rank = self.out.streams[raw.stream][0]
            content = Content(raw.at, raw.bytes, What.x, op, rank, raw.value, 0)
        call = span.call if span else -1
        return Record(
            kind,
            raw.stream,
            call,
            raw.tile,
            raw.at,
            raw.from_,
            raw.bytes,
            raw.value,
            content,
        )
