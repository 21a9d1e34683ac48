"""The emulated GPU (ptx_machine/gpu) as a flux.transport.device.Device, with stand-in kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from emulated_registry import EmulatedRegistry, hopper_kernels
from flux import _C
from flux.transport.base import WORD, Memory, first_signal
from flux.transport.device import Device
from flux.transport.virtual import VirtualWorld
from ptx_machine.gpu import LIBRARY, Gpu

ROOT = Path(__file__).resolve().parents[3]


def compiler() -> str:
    """The host's C++ compiler."""
    path = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert path, "no C++ compiler"
    return path


def build(folder: Path) -> Path:
    """Kernels that stand for flux's, linked to the emulated GPU, by the host's C++ compiler."""
    assert LIBRARY.exists(), "make emulator"
    target = folder / "libstand_in_kernels.so"
    options = ["-std=c++17", "-O0", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    options += [f"-I{ROOT / 'ptx_machine'}", f"-Wl,-rpath,{LIBRARY.parent}"]
    sources = [str(Path(__file__).with_name("emulated_kernels.cpp")), str(LIBRARY)]
    subprocess.run([compiler(), *options, *sources, "-o", str(target)], check=True)
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


class CrowdedWorld(VirtualWorld):
    """Virtual ranks whose kernels have more blocks than their device has room for."""

    @property
    def sm_share(self) -> int:
        return 12


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


class EmulatedDevice(Gpu):
    """The emulated GPU as a flux.transport.device.Device, with kernels that stand for flux's."""

    torch_device = torch.device("cpu")
    index = 0
    sm_count = 8
    capability = (9, 0)
    identity = "emulated"

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.driver = _C.Driver(str(library))
        traced = hopper_kernels(library, "_traced")
        self.registry = EmulatedRegistry((), hopper_kernels(library), (), (), (), traced)
        self._places: list[torch.Tensor] = []  # of multicast addresses, which are never used again
        self.current = True  # whether this is the thread's device, and how often it was made so
        self.made = 0

    def multicast(self, members: list[int], size: int) -> int:
        """An address that stands for the same memory of several ranks, for kernels alone."""
        place = torch.empty(size, dtype=torch.uint8)
        self._places.append(place)
        self._add_multicast(place.data_ptr(), members, size)
        return place.data_ptr()

    def _add_multicast(self, address: int, members: list[int], size: int) -> None:
        """Stand-ins refuse to access it."""

    def know(self, *tensors: torch.Tensor) -> None:
        """Let kernels access memory that peers share; stand-ins access any."""

    def peer_atomics(self, identity: str) -> bool | None:
        return self.driver.peer_atomics(0, 1)

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
