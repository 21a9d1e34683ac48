"""An emulated GPU: streams, events, graphs and batched operations of the CUDA driver, and NCCL.

Streams are threads, memory is the process's own, and every copy can be delayed at random. What a
GPU refuses, or what would starve there, is an error. Kernels come from libraries: those that are
built with ``cudart/cudart.cpp`` run on the PTX machine, which shares these streams; stand-ins that
are written in C++ are launched through ``device.h``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("libemulated_gpu.so")  # make emulator builds it

DRIVER_ERRORS = {
    1: "invalid value",
    600: "not ready",
    719: "launch failure",
    801: "not supported by the emulator",
    900: "not permitted while the stream is captured",
    901: "the capture was invalidated",
    903: "not the stream on which a capture began",
    904: "a stream that joined the capture was not joined back",
    905: "a dependency between a capture and work outside of it",
}
"""Values of CUresult."""


class Graph:
    """What was captured on streams, with all memory that it uses; made by ``Gpu.capture``."""

    def __init__(self, device: Gpu) -> None:
        self.device = device
        self.handle = ctypes.c_void_p()
        self.kept: list[torch.Tensor] = []
        self.bodies: list[Any] = []

    def replay(self) -> None:
        """Put the captured work on the current stream."""
        self.device.call_driver("cuGraphLaunch", self.handle, ctypes.c_void_p(self.device._current))

    def close(self) -> None:
        """Destroy the streams of the graph; replays must be finished."""
        self.device.call_driver("cuGraphExecDestroy", self.handle)


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


class Gpu:
    """The emulated GPU of this process, which has one.

    Args:
        library: ``LIBRARY``, or a library of kernels that is linked to it.
    """

    queues = 32  # as on a GPU; streams share them only after set_queues

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self._current = 0
        self._kept: list[torch.Tensor] = []
        self._bodies: list[Any] = []
        self._loaded: set[object] = set()  # functions of `enqueue`
        self._loading_s = 5.0
        self._upload_s = 5.0
        self.reset()

    # -- rules, and what tests ask for -------------------------------------------------------------

    def reset(self) -> None:
        """Forget errors, notes, the log and memory; set all rules to what they are by default."""
        self._call("reset")
        self.take_turns(0)
        self._room_for_copies = False
        self.limit_room()
        self.load_lazily()

    def _call(self, name: str, *arguments: Any) -> int:
        # Recorders of other tests have no rules.
        function = getattr(self.library, f"emulator_{name}", None)
        return 0 if function is None else int(function(*arguments))

    def call_driver(self, name: str, *arguments: Any) -> None:
        """Call an entry point of the driver.

        Raises:
            RuntimeError: it returns an error.
        """
        self._check(name, getattr(self.library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{name} returned {status} ({DRIVER_ERRORS.get(status, 'refused')})")

    def _text(self, name: str) -> str:
        function = getattr(self.library, "emulator_text", None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return bytes(function(name.encode())).decode()

    def set_delay(self, microseconds: int) -> None:
        """Hold one in eight copies and tiles of stand-in kernels back for so long."""
        self._call("set_delay", microseconds)

    def set_copy_delay(self, microseconds: int) -> None:
        """Let every copy take at least so long."""
        self._call("set_copy_delay", microseconds)

    def set_launch_delay(self, microseconds: int) -> None:
        """Let the host take so long for a launch, in which it encodes tensor maps."""
        self._call("set_launch_delay", microseconds)

    def limit_room(self, on: bool = True) -> None:
        """Let blocks of kernels wait for room on one of ``sm_count`` multiprocessors."""
        self._call("limit_room", int(on))

    def load_lazily(self, on: bool = True) -> None:
        """Let the first use of a kernel or of a function of torch wait until no kernel runs.

        So does the first copy, fill or memory operation on the memory of each other device, which
        ``forbid_waits`` tells of.
        """
        self._lazy = on
        self._call("load_lazily", int(on))

    def copies_need_room(self, on: bool = True) -> None:
        """Let a block make each copy and fill inside the device.

        Memory that is pinned from now on is the host's.
        """
        self._room_for_copies = on
        self._call("copies_need_room", int(on))

    @contextmanager
    def on_gpu(self, gpu: int) -> Iterator[None]:
        """Make streams on one of several GPUs with ``sm_count`` multiprocessors each.

        Streams that are made outside of such contexts are on GPU 0.
        """
        self._call("use_gpu", gpu)
        try:
            yield
        finally:
            self._call("use_gpu", 0)

    def gpu_memory(self, address: int, size: int, gpu: int) -> None:
        """Declare memory of one of several GPUs, for ``write_late``."""
        self._call("gpu_memory", ctypes.c_size_t(address), ctypes.c_size_t(size), gpu)

    def write_late(self, microseconds: int) -> None:
        """Let copies and stand-in kernels write to other GPUs' memory so much later.

        The data is there earlier if a kernel of that GPU sees a word that it waits for. A stream
        that waits may see the word, and not yet the data.
        """
        self._call("write_late", microseconds)

    def native_peer_atomics(self, on: bool = True) -> None:
        """Let the driver say that atomic operations on memory of other devices are native."""
        self._call("peer_atomics", int(on))

    def set_graph_order(self, order: str) -> None:
        """Replay graphs ``"concurrent"``, or one node after the other, ``"kernels first"``."""
        self._call("kernels_first", {"concurrent": 0, "kernels first": 1}[order])

    def take_turns(self, seed: int) -> None:
        """Let one stream act at a time, in an order that the seed decides, so that runs repeat.

        Streams start nothing until the host waits for one of them. 0: streams run at the same time.
        While all are idle.
        """
        self._call("take_turns", ctypes.c_uint64(seed))

    def turns_digest(self) -> int:
        """Return a number that stands for the order of all turns since ``take_turns``."""
        self.library.emulator_turns_digest.restype = ctypes.c_uint64
        return int(self.library.emulator_turns_digest())

    def set_queues(self, count: int) -> None:
        """Let streams share so many hardware queues; 0: none is shared. While all are idle.

        Devices begin with PTX_MACHINE_QUEUES of them.
        """
        self._call("set_queues", count)

    def set_places(self, count: int) -> None:
        """Let a stream hold so many operations; the host waits where one is full.

        1024 by default, as on a GPU; 0: any number.
        """
        self._call("set_places", count)

    def forbid_waits(self, address: int, size: int) -> None:
        """Refuse waits of streams for words in memory of another device."""
        self._call("forbid_waits", ctypes.c_size_t(address), ctypes.c_size_t(size))

    def host_memory(self, address: int, size: int) -> None:
        """Declare memory of the host: copies from and to it need no multiprocessor."""
        self._call("host_memory", ctypes.c_size_t(address), ctypes.c_size_t(size))

    def starving_after(self, seconds: float) -> None:
        """Note a block that has found no room for so long."""
        self._call("starving_after", int(seconds * 1e3))

    def give_up_after(self, seconds: float) -> None:
        """Fail to load a module, or to make a pageable copy, after so long beside a kernel.

        The same for the host that waits because a stream is full.
        """
        self._loading_s = self._upload_s = seconds
        self._call("loading_after", int(seconds * 1e3))
        self._call("full_after", int(seconds * 1e3))

    def error(self) -> str:
        """Return the first illegal thing that was done; empty: none."""
        return self._text("error")

    def clear_error(self) -> None:
        """Forget errors, and what starved. When all streams are idle."""
        self._call("clear_error")

    def starved(self) -> str:
        """Return which kernel found no room, and what its holders waited for; empty: none."""
        return self._text("starved")

    def resident(self) -> bool:
        """Return whether a kernel has a block on a multiprocessor."""
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
        """Return what was recorded, in the order of submission."""
        return [
            DriverCall(name, int(stream), dict(p.split("=", 1) for p in details.split(";") if p))
            for name, stream, details in (x.split("\t") for x in self._text("calls").splitlines())
        ]

    def timeline(self) -> list[Executed]:
        """Return what streams did while calls were recorded, by the time at which it ended."""
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
        while not self.ready(self._current):
            if time.monotonic() > until:
                raise RuntimeError(f"a pageable copy waits for stream {self._current}")
            time.sleep(0.0002)
        return tensor.clone()

    def streams(self) -> int:
        """Return how many created streams have not been destroyed."""
        return int(self.library.emulator_streams())

    def timed_events(self) -> int:
        """Return how many events with times have not been destroyed."""
        return int(self.library.emulator_timed_events())

    # -- memory and streams ------------------------------------------------------------------------

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory of the device."""
        return torch.zeros(count, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory of the host that the device reads and writes."""
        memory = torch.zeros(count, dtype=dtype)
        if self._room_for_copies:
            self.host_memory(memory.data_ptr(), memory.numel() * memory.element_size())
        return memory

    def current_stream(self) -> int:
        """Return the stream of the caller's work; 0 is the default stream."""
        return self._current

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make a stream the current one."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def ready(self, stream: int) -> bool:
        """Return whether a stream is idle."""
        return int(self.library.cuStreamQuery(ctypes.c_void_p(stream))) == 0

    def wait_for(self, stream: int) -> None:
        """Wait until a stream is idle.

        Raises:
            RuntimeError: something illegal was done on the device.
        """
        if self.library.cuStreamSynchronize(ctypes.c_void_p(stream)):
            raise RuntimeError(self.error())

    def synchronize(self) -> None:
        """Wait for the current stream; what torch does to this memory is done at once."""
        self.wait_for(self._current)

    def enqueue(self, body: Callable[[], None]) -> None:
        """Put a function of the host on the current stream.

        Raises:
            RuntimeError: its code had to be loaded while kernels waited.
        """
        self._load(body)
        function = ctypes.CFUNCTYPE(None)(body)
        self._bodies.append(function)
        self.library.emulator_put(ctypes.c_void_p(self._current), function)

    def _load(self, body: Any) -> None:
        """Load the code of a function, as the first launch of a kernel of torch does."""
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
        """Keep tensors until ``finish``, or as long as the graph that is being captured."""
        self._kept += tensors

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture what is put on the current stream, and on streams that follow it.

        Raises:
            RuntimeError: the driver refuses the capture, as of streams that are not joined.
        """
        graph = Graph(self)
        before = self._kept, self._bodies
        self._kept, self._bodies = graph.kept, graph.bodies
        stream, captured = ctypes.c_void_p(self._current), ctypes.c_void_p()
        self.call_driver("cuStreamBeginCapture_v2", stream, 0)
        try:
            yield graph
        finally:
            self._kept, self._bodies = before
            status = self.library.cuStreamEndCapture(stream, ctypes.byref(captured))
            if captured:
                made = ctypes.byref(graph.handle)
                self.call_driver("cuGraphInstantiateWithFlags", made, captured, ctypes.c_uint64(0))
                self.call_driver("cuGraphDestroy", captured)
        self._check("cuStreamEndCapture", status)

    def finish(self) -> None:
        """Wait for the current stream, as a reader of results must."""
        self.wait_for(self._current)
        self._kept.clear()
        self._bodies.clear()

    def close(self) -> None:
        """Leave no rule behind: the next device of the process is the same one."""
        self.reset()
