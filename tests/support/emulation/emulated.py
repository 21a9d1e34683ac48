"""An emulated GPU (emulated_gpu.cpp), as a flux.transport.device.Device."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from emulated_registry import EmulatedRegistry, hopper_kernels, multistage_kernels
from flux import _C
from flux.transport.base import WORD, Memory, first_signal
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("device", "gpu", "kernels", "nccl", "streams")
SOURCES = [Path(__file__).with_name(f"emulated_{part}.cpp") for part in PARTS]


def compiler() -> str:
    """The host's C++ compiler."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert found, "no C++ compiler"
    return found


def build(folder: Path) -> Path:
    """The emulator of GPU and NCCL as a shared library, built with the host's C++ compiler."""
    target = folder / "libemulated_gpu.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    command = [compiler(), *options, *map(str, SOURCES), "-lrt", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@contextmanager
def emulated_device(library: Path) -> Iterator[EmulatedDevice]:
    """A device on which nothing illegal has been done in the end, and whose streams must all have
    been given back."""
    device = EmulatedDevice(library)
    before = device.streams()  # a test that failed may have left some
    yield device
    device.set_delay(0)
    assert not device.error() and not device.starved()
    device.close()
    assert device.streams() == before


class SwitchedWorld(VirtualWorld):
    """Virtual ranks behind an NVLink switch: their memory has a multicast address."""

    multicast = True

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        memory = super().memory(number, words, data_bytes)
        if memory.multicast == 0:
            device = self.device
            assert isinstance(device, EmulatedDevice)
            memory.multicast = device.multicast(
                [data.data_ptr() for data in memory.data], data_bytes
            )
        return memory


@dataclass(frozen=True)
class Puts:
    """Where the functions of libflux_nvshmem are, or of what stands in for it; how it learns where
    the heaps of ranks are that are in one process."""

    put_signal: int
    signal: int
    relay: int
    node_sum: int
    add_heaps: Callable[..., None]


class HeapWorld(VirtualWorld):
    """Virtual nodes whose remotes are NVSHMEM's: each rank has pad, mail and data in a symmetric
    heap."""

    relays = True
    MAIL = 8 * 4096  # bytes

    def __init__(self, world: int, device: Device, nodes: int, puts: Puts) -> None:
        super().__init__(world, device, nodes)
        self.puts = puts

    def memory(self, number: int, words: int, data_bytes: int) -> Memory:
        op = self._ops[number]
        if op.memory is None:
            mail = -(-words * 4 // 256) * 256
            begin = mail + self.MAIL
            heaps = [self.device.zeros(begin + data_bytes, torch.uint8) for _ in range(self.world)]
            begins = (ctypes.c_size_t * self.world)(*(heap.data_ptr() for heap in heaps))
            self.puts.add_heaps(self.world, begins, ctypes.c_size_t(begin + data_bytes))
            op.mail += [heap[mail:begin].view(torch.int64) for heap in heaps]
            op.memory = Memory(
                [heap[: words * 4].view(torch.int32) for heap in heaps],
                [heap[begin:] for heap in heaps],
            )
        return super().memory(number, words, data_bytes)

    def remote(self, number: int, rank: int, memory: Memory, boxes: int) -> _C.Remote:
        assert _C.mail_words(self.world, boxes) * 8 <= self.MAIL
        before = (first_signal(self.world) - 2 * _C.STATUS_WORDS) * WORD
        return _C.NvshmemRemote(
            driver=self.device.driver,
            put=self.puts.put_signal,
            raise_=self.puts.signal,
            relay=self.puts.relay,
            node_sum=self.puts.node_sum,
            rank=rank,
            world=self.world,
            others=[r for r in range(self.world) if memory.data[r].numel() == 0],
            data=memory.data[rank].data_ptr(),
            mail=self.mail(number)[rank].data_ptr(),
            status=memory.pads[rank].data_ptr() + before,
            boxes=boxes,
        )


class EmulatedGraph:
    """What was captured, with all memory that it uses."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.handle: int | None = None
        self.kept: list[torch.Tensor] = []
        self.bodies: list[Any] = []

    def replay(self) -> None:
        """Put it on the current stream."""
        self.device.library.emulator_replay(
            ctypes.c_void_p(self.handle), ctypes.c_void_p(self.device.current_stream())
        )

    def close(self) -> None:
        """Give its streams back; replays must be finished."""
        self.device.library.emulator_destroy_graph(ctypes.c_void_p(self.handle))


@dataclass(frozen=True)
class DriverCall:
    """One call of the driver, or one launch, as the host made it.

    Attributes:
        name: copy, fill, write, wait, batch, event_record, event_wait, launch, synchronize,
            stream_create, stream_destroy, replay.
        stream: 0 is the default stream.
        details: bytes, addresses, words, values, name of a kernel, numbers of waits and writes.
    """

    name: str
    stream: int
    details: dict[str, str]


@dataclass(frozen=True)
class Executed:
    """What a stream did: a driver call, a whole kernel, or one tile of it.

    Attributes:
        what: name of the call or of the kernel.
        kind: "kernel", "tile", or "" for all else.
        start_ns, end_ns: of one clock. A kernel starts when it may place blocks, a tile when what
            it waits for is there.
    """

    what: str
    stream: int
    start_ns: int
    end_ns: int
    kind: str


class EmulatedDevice:
    """Memory is the process's own, streams are threads."""

    torch_device = torch.device("cpu")
    index = 0
    sm_count = 8
    capability = (9, 0)
    identity = "emulated"
    queues = 32  # as on a GPU; streams share them only after set_queues

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.driver = _C.Driver(str(library))
        traced = hopper_kernels(library, "_traced")
        self.registry = EmulatedRegistry((), hopper_kernels(library), (), (), (), traced)
        self.multistage = EmulatedRegistry((), multistage_kernels(library), (), (), ())
        self._current = 0
        self._kept: list[torch.Tensor] = []
        self._bodies: list[Any] = []
        self._places: list[torch.Tensor] = []  # of multicast addresses, which are never used again
        self._loaded: set[object] = set()  # functions of `enqueue`
        self._loading_s = 5.0
        self._upload_s = 5.0
        self.current = True  # whether this is the thread's device, and how often it was made so
        self.made = 0
        self.reset()

    # -- rules, and what tests ask for -------------------------------------------------------------

    def reset(self) -> None:
        """Forget errors, notes, the log and memory; set all rules to what they are by default."""
        self._call("reset")
        self._room_for_copies = False
        self.limit_room()
        self.load_lazily()

    def _call(self, name: str, *arguments: Any) -> int:
        # Recorders of other tests have no rules.
        function = getattr(self.library, f"emulator_{name}", None)
        return 0 if function is None else int(function(*arguments))

    def _text(self, name: str) -> str:
        function = getattr(self.library, "emulator_text", None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return bytes(function(name.encode())).decode()

    def set_delay(self, microseconds: int) -> None:
        """How long one in eight copies and GEMM tiles is held back."""
        self._call("set_delay", microseconds)

    def set_copy_delay(self, microseconds: int) -> None:
        """How long every copy takes at least."""
        self._call("set_copy_delay", microseconds)

    def set_launch_delay(self, microseconds: int) -> None:
        """How long the host takes for a launch, in which it encodes tensor maps."""
        self._call("set_launch_delay", microseconds)

    def limit_room(self, on: bool = True) -> None:
        """Let blocks of kernels wait for room on one of ``sm_count`` multiprocessors."""
        self._call("limit_room", int(on))

    def load_lazily(self, on: bool = True) -> None:
        """Let the first use of a kernel or of a function of torch wait until no kernel runs."""
        self._lazy = on
        self._call("load_lazily", int(on))

    def copies_need_room(self, on: bool = True) -> None:
        """Let a block make each copy and fill inside the device.

        Memory that is pinned from now on is the host's.
        """
        self._room_for_copies = on
        self._call("copies_need_room", int(on))

    def set_graph_order(self, order: str) -> None:
        """Replay graphs ``"concurrent"``, or one node after the other, ``"kernels first"``."""
        self._call("kernels_first", {"concurrent": 0, "kernels first": 1}[order])

    def set_queues(self, count: int) -> None:
        """Let streams share so many hardware queues; 0: none is shared. While all are idle.

        Devices begin with FLUX_EMULATED_QUEUES of them.
        """
        self._call("set_queues", count)

    def forbid_waits(self, address: int, size: int) -> None:
        """Refuse waits of streams for words in memory of another device."""
        self._call("forbid_waits", ctypes.c_size_t(address), ctypes.c_size_t(size))

    def host_memory(self, address: int, size: int) -> None:
        """Copies from and to there are not made by multiprocessors."""
        self._call("host_memory", ctypes.c_size_t(address), ctypes.c_size_t(size))

    def starving_after(self, seconds: float) -> None:
        """When a block without room is noted."""
        self._call("starving_after", int(seconds * 1e3))

    def give_up_after(self, seconds: float) -> None:
        """When a module is not loaded, and a pageable copy not made, since a kernel waits."""
        self._loading_s = self._upload_s = seconds
        self._call("loading_after", int(seconds * 1e3))

    def error(self) -> str:
        """The first illegal thing that was done; empty: none."""
        return self._text("error")

    def clear_error(self) -> None:
        """Forget it, and what starved. When all streams are idle."""
        self._call("clear_error")

    def starved(self) -> str:
        """Which kernel found no room, and what those that had it waited for; empty: none."""
        return self._text("starved")

    def resident(self) -> bool:
        """Whether a kernel has a block on a multiprocessor."""
        return bool(self._call("resident"))

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        """Log calls of the driver and what streams do."""
        self._call("record", 1)
        try:
            yield
        finally:
            self._call("record", 0)

    def calls(self) -> list[DriverCall]:
        """What was recorded, in the order of submission."""
        return [
            DriverCall(name, int(stream), dict(p.split("=", 1) for p in details.split(";") if p))
            for name, stream, details in (x.split("\t") for x in self._text("calls").splitlines())
        ]

    def timeline(self) -> list[Executed]:
        """What streams did while calls were recorded, by the time at which it ended."""
        return [
            Executed(what, int(stream), int(start), int(end), kind)
            for what, stream, start, end, kind in (
                x.split("\t") for x in self._text("timeline").splitlines()
            )
        ]

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy pageable memory to the device: the host waits for the current stream.

        Raises:
            RuntimeError: the stream is not done in time.
        """
        until = time.monotonic() + self._upload_s
        while not self.driver.ready(self._current):
            if time.monotonic() > until:
                raise RuntimeError(f"a pageable copy waits for stream {self._current}")
            time.sleep(0.0002)
        return tensor.clone()

    def streams(self) -> int:
        """Created streams that have not been destroyed."""
        return int(self.library.emulator_streams())

    def timed_events(self) -> int:
        """Events with times that have not been destroyed."""
        return int(self.library.emulator_timed_events())

    # -- flux.transport.device.Device --------------------------------------------------------------

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(count, dtype=dtype)
        if self._room_for_copies:
            self.host_memory(memory.data_ptr(), memory.numel() * memory.element_size())
        return memory

    def current_stream(self) -> int:
        return self._current

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        """Wait for the current stream; what torch does to this memory is done at once."""
        self.driver.synchronize(self._current)

    def multicast(self, members: list[int], size: int) -> int:
        """An address that stands for the same memory of several ranks, for kernels alone."""
        place = torch.empty(size, dtype=torch.uint8)
        self._places.append(place)
        addresses = (ctypes.c_size_t * len(members))(*members)
        self.library.multicast_add(
            ctypes.c_size_t(place.data_ptr()), ctypes.c_size_t(size), addresses, len(members)
        )
        return place.data_ptr()

    def is_current(self) -> bool:
        return self.current

    @contextmanager
    def made_current(self) -> Iterator[None]:
        assert not self.current
        self.current = True
        try:
            yield
        finally:
            self.current = False
            self.made += 1

    def enqueue(self, body: Callable[[], None]) -> None:
        """Put it on the current stream.

        Raises:
            RuntimeError: its code had to be loaded while kernels waited.
        """
        self._load(body)
        function = ctypes.CFUNCTYPE(None)(body)
        self._bodies.append(function)
        self.library.emulator_put(ctypes.c_void_p(self._current), function)

    def _load(self, body: Any) -> None:
        """What kernels of torch do when they are launched first."""
        while isinstance(body, partial):
            body = body.func
        body = getattr(body, "__func__", body)
        key = getattr(body, "__code__", body)
        if not self._lazy or key in self._loaded:
            return
        name = getattr(body, "__qualname__", repr(body))
        if self._call("load_module", name.encode()):
            raise RuntimeError(self.error())
        self._loaded.add(key)

    def keep(self, *tensors: torch.Tensor) -> None:
        self._kept += tensors

    def know(self, *tensors: torch.Tensor) -> None:
        """Let kernels access memory that peers share; stand-ins access any."""

    @contextmanager
    def capture(self) -> Iterator[EmulatedGraph]:
        """Capture what is put on the current stream, and on streams that follow it."""
        graph = EmulatedGraph(self)
        before = self._kept, self._bodies
        self._kept, self._bodies = graph.kept, graph.bodies
        self.library.emulator_begin_capture(ctypes.c_void_p(self._current))
        try:
            yield graph
        finally:
            self.library.emulator_end_capture.restype = ctypes.c_void_p
            graph.handle = self.library.emulator_end_capture()
            self._kept, self._bodies = before

    def finish(self) -> None:
        """Wait for the current stream, as a reader of results must."""
        self.driver.synchronize(self._current)
        self._kept.clear()
        self._bodies.clear()

    def close(self) -> None:
        """Leave no rule behind: the next device of the process is the same one."""
        self.reset()
