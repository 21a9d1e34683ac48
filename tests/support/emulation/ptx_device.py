"""The emulated GPU with flux's own kernels: streams and driver of emulated_gpu.cpp, and a machine
that executes the kernels' PTX."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from emulated import EmulatedDevice
from emulator import PtxError, cuda_device, extent
from flux.kernels.registry import Registry


class PtxDevice(EmulatedDevice):
    """A GPU of compute capability 8.0 whose kernels are those of emulated libraries.

    Args:
        library: emulated_gpu.cpp, built.
        kernels: directory of kernel libraries, built by `flux compile --emulated`.
    """

    capability = (8, 0)

    def __init__(self, library: Path, kernels: Path) -> None:
        self.cuda = cuda_device()
        super().__init__(library)
        self.registry = Registry.load([kernels])  # type: ignore[assignment]
        self.cuda.model = "A100" if self.capability < (9, 0) else "H200"
        self.cuda.multiprocessors = self.sm_count
        entries = [getattr(self.library, f"emulator_{name}") for name in ("run", "fail")]
        run, fail = (ctypes.cast(entry, ctypes.c_void_p).value for entry in entries)
        self.cuda.attach(run, fail)

    def reset(self) -> None:
        super().reset()
        self.cuda.clear()

    def know(self, *tensors: torch.Tensor) -> None:
        """Let kernels access the memory of these tensors."""
        for tensor in tensors:
            address, size = extent(tensor)
            if size:
                self.cuda.machine.add_memory(address, size, f"a tensor of {tuple(tensor.shape)}")

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


@contextmanager
def ptx_device(library: Path, kernels: Path) -> Iterator[PtxDevice]:
    """A device on which nothing illegal has been done in the end."""
    device = PtxDevice(library, kernels)
    before = device.streams()  # a test that failed may have left some
    yield device
    device.check()
    assert not device.error()
    device.close()
    assert device.streams() == before
