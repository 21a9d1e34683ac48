"""An emulated GPU (emulated_gpu.cpp), as a flux.backends.device.Device."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flux import _C
from flux.backends.device import Device
from flux.kernels.config import GemmConfig
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry
from flux.transport.device import WORD, Memory, first_signal
from flux.transport.virtual import VirtualWorld

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [Path(__file__).with_name(f"emulated_{part}.cpp") for part in ("gpu", "nccl")]


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
    """A device whose streams must all have been given back in the end."""
    device = EmulatedDevice(library)
    yield device
    device.set_delay(0)
    device.close()
    assert device.streams() == 0


_VARIANTS: dict[str, dict[str, str]] = {
    "ag_gemm": {},
    "ag_gemm_silu": {"activation": "silu"},
    "ag_gemm_tensor": {"dtype": "e4m3", "scaling": "tensor"},
    "ag_gemm_row": {"dtype": "e4m3", "scaling": "row"},
    "gemm_rs": {},
    "gemm_rs_in_flight": {"reduce": "in_flight"},
    "gemm_rs_tensor": {"dtype": "e4m3", "scaling": "tensor"},
    "gemm_rs_row": {"dtype": "e4m3", "scaling": "row"},
}


def _kernels(library: Path, build: str = "") -> dict[str, BuiltKernel]:
    kernels = {}
    for name, options in _VARIANTS.items():
        for weight in ("nk", "kn"):
            op, rest = name[:7], name[7:]
            # Loads are of single elements, so addresses may be any.
            fields = {"dtype": "bf16", "weight": weight, "alignment": 1, **options}
            config = GemmConfig(op, "90a", tile=(64, 64, 64), schedule="pingpong", **fields)
            symbol = f"flux_emulated_{op}_{weight}{rest}"
            kernels[symbol] = BuiltKernel(config, library, symbol + build, Usage())
    return kernels


class EmulatedRegistry(Registry):
    """Kernels that do every problem."""

    def candidates(self, op: str, dtype: str, *_: object, **wanted: object) -> list[BuiltKernel]:
        wanted |= {"op": op, "dtype": dtype}
        return [
            kernel
            for kernel in self.kernels.values()
            if all(getattr(kernel.config, name) == value for name, value in wanted.items())
        ]


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


class EmulatedDevice:
    """Memory is the process's own, streams are threads."""

    torch_device = torch.device("cpu")
    index = 0
    sm_count = 8
    capability = (9, 0)
    identity = "emulated"
    queues = 32  # as on a GPU; here, streams never share one

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.driver = _C.Driver(str(library))
        traced = _kernels(library, "_traced")
        self.registry = EmulatedRegistry((), _kernels(library), (), (), (), traced)
        self._current = self.driver.create_stream()
        self._main = self._current
        self._kept: list[torch.Tensor] = []
        self._bodies: list[Any] = []
        self._places: list[torch.Tensor] = []  # of multicast addresses, which are never used again
        self.current = True  # whether this is the thread's device, and how often it was made so
        self.made = 0

    def set_delay(self, microseconds: int) -> None:
        """How long one in eight copies and GEMM tiles is held back."""
        self.library.emulator_set_delay(microseconds)

    def streams(self) -> int:
        """Streams that have not been destroyed."""
        return int(self.library.emulator_streams())

    def timed_events(self) -> int:
        """Events with times that have not been destroyed."""
        return int(self.library.emulator_timed_events())

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

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
        """What torch does to this memory is done at once."""

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
        function = ctypes.CFUNCTYPE(None)(body)
        self._bodies.append(function)
        self.library.emulator_put(ctypes.c_void_p(self._current), function)

    def keep(self, *tensors: torch.Tensor) -> None:
        self._kept += tensors

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
        self.driver.destroy_stream(self._main)
