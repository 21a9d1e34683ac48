"""The emulated GPU with kernels whose PTX the machine of ptx_machine/ executes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from emulated import EmulatedDevice
from flux.kernels.registry import Registry
from flux.transport.base import SPARE
from ptx_machine import PtxError, cuda_device, extent
from ptx_machine.gpu import LIBRARY

CAPABILITIES = {"80": (8, 0), "90a": (9, 0)}  # by architecture


class MachineDevice(EmulatedDevice):
    """A GPU whose streams run kernels of emulated libraries.

    Args:
        library: the emulated GPU, or stand-in kernels that are linked to it.
        arch: of the GPU, a key of ``CAPABILITIES``.
    """

    def __init__(self, library: Path = LIBRARY, arch: str = "90a") -> None:
        self.capability = CAPABILITIES[arch]
        self.cuda = cuda_device()
        super().__init__(library)
        self.cuda.model = "A100" if self.capability < (9, 0) else "H200"
        self.cuda.multiprocessors = self.sm_count
        self.cuda.attach(
            *self._addresses(
                "emulator_run",
                "cuStreamCreateWithPriority",
                "cuStreamDestroy_v2",
                "cuStreamSynchronize",
                "emulator_fail",
            )
        )
        names = ("run_early", "release_next", "predecessor_ended")
        self.cuda.attach_early(*self._addresses(*(f"emulator_{name}" for name in names)))
        (yield_turn,) = self._addresses("emulator_yield_turn")
        assert yield_turn is not None
        self.cuda.attach_turns(yield_turn)
        self.library.emulator_attach_memory(*map(ctypes.c_void_p, self.cuda.memory_functions))
        self._gpus: dict[int, int] = {}
        self._known: dict[int, weakref.finalize[Any, Any]] = {}  # memory, by address

    def _addresses(self, *names: str) -> list[int | None]:
        entries = [getattr(self.library, name) for name in names]
        return [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]

    def reset(self) -> None:
        super().reset()
        self.cuda.clear()
        self.library.emulator_attach_ordering(ctypes.c_void_p(self.cuda.ordering))
        self.native_peer_atomics()
        # A rank that gives up lets its copies go, into memory that a slow peer may still read.
        self.cuda.copy_races = False

    def native_peer_atomics(self, on: bool = True) -> None:
        """Let atomics on memory of other devices be native, those of bulk copies too."""
        super().native_peer_atomics(on)
        self.cuda.peer_reductions = on

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make a stream the current one: that of a rank, so of another GPU, as scopes see it."""
        before = self.cuda.device
        self.cuda.device = self._gpus.setdefault(stream, len(self._gpus) + 1)
        try:
            with super().on_stream(stream):
                yield
        finally:
            self.cuda.device = before

    @contextmanager
    def room_for(self, world: int, blocks: int = 2) -> Iterator[None]:
        """Have two places for each of ``world`` ranks' clusters of ``blocks``, within the context.

        Ranks that wait hold multiprocessors that the kernels they wait for must not need.
        """
        before = self.sm_count
        self.sm_count = self.cuda.multiprocessors = SPARE + 2 * world * blocks
        try:
            yield
        finally:
            self.sm_count = self.cuda.multiprocessors = before

    def know(self, *tensors: torch.Tensor) -> None:
        """Let kernels access the memory of these tensors."""
        for tensor in tensors:
            address, size = extent(tensor)
            if size:
                self.cuda.machine.add_memory(address, size, f"a tensor of {tuple(tensor.shape)}")
                if address not in self._known or not self._known[address].alive:
                    freed = self.cuda.machine.remove_memory
                    self._known[address] = weakref.finalize(
                        tensor.untyped_storage(), freed, address
                    )
                    self._known[address].atexit = False

    def keep(self, *tensors: torch.Tensor) -> None:
        self.know(*tensors)
        super().keep(*tensors)

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = super().zeros(count, dtype)
        self.know(memory)
        return memory

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = super().pinned(count, dtype)
        self.know(memory)
        return memory

    def close(self) -> None:
        super().close()
        self.library.emulator_attach_ordering(None)  # the next device may have no machine

    def _add_multicast(self, address: int, members: list[int], size: int) -> None:
        self.cuda.machine.add_multicast(address, size, members)

    def finish(self) -> None:
        """Wait for the current stream.

        Raises:
            PtxError: a kernel did what a device does not allow.
        """
        super().finish()
        self.check()

    def check(self) -> None:
        """Raise the first error of a kernel."""
        if self.cuda.error():
            raise PtxError(self.cuda.error())


@lru_cache(maxsize=4)
def _registry(kernels: Path) -> Registry:
    """The kernels of a directory, which no test changes: telling stale ones apart takes long."""
    return Registry.load([kernels])


class PtxDevice(MachineDevice):
    """A GPU whose kernels are those of emulated libraries.

    Args:
        kernels: directory of kernel libraries, built by `tools/compile_kernels.py --emulated`.
        arch: of the GPU, a key of ``CAPABILITIES``. Kernels for others are left out.
    """

    def __init__(self, kernels: Path, arch: str) -> None:
        super().__init__(arch=arch)
        built = _registry(kernels)
        of_arch = {name: k for name, k in built.kernels.items() if k.config.arch == arch}
        self.registry = replace(built, kernels=of_arch)  # type: ignore[assignment]


@contextmanager
def ptx_device(kernels: Path, arch: str) -> Iterator[PtxDevice]:
    """A device on which nothing illegal has been done in the end."""
    device = PtxDevice(kernels, arch)
    before = device.streams()  # a test that failed may have left some
    yield device
    device.check()
    assert not device.error()
    device.close()
    assert device.streams() == before
