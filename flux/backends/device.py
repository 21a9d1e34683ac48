"""What the CUDA backend asks of a device, so that tests can put an emulated one in its place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch

from flux import _C
from flux.kernels.registry import Registry


class Device(Protocol):
    """One GPU.

    Attributes:
        torch_device: where tensors live.
        index: number of the device, as kernels take it.
        sm_count: multiprocessors.
        capability: compute capability, (major, minor).
        identity: the same for two processes exactly if they use the same GPU.
        driver: stream operations. Streams are integers.
        registry: the kernels that are built.
    """

    torch_device: torch.device
    index: int
    sm_count: int
    capability: tuple[int, int]
    identity: str

    @property
    def driver(self) -> _C.Driver: ...

    @property
    def registry(self) -> Registry: ...

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for the peers to write to."""
        ...

    def current_stream(self) -> int:
        """The stream that the caller's work is put on."""
        ...

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Make a stream the current one."""
        ...

    def enqueue(self, body: Callable[[], None]) -> None:
        """Put operations of torch on the current stream."""
        ...

    def is_current(self) -> bool:
        """Whether the thread's work goes to this device."""
        ...

    def made_current(self) -> AbstractContextManager[Any]:
        """Let it go there meanwhile."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the host that the device reads and writes, at the same address."""
        ...

    def synchronize(self) -> None:
        """Wait until all that torch has put on the device is done."""
        ...

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep tensors from being reused before what is on the current stream now is done."""
        ...


QUEUES = 32  # the most there are


def _want_queues(count: int) -> None:
    """Streams share the device's queues, and one that waits for memory holds up all that share its
    queue: the work it waits for must not be among them. Read when CUDA is initialised.

    Raises:
        RuntimeError: CUDA has fewer, and is initialised already.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not torch.cuda.is_initialized():
        os.environ.setdefault(name, str(count))
    have = int(os.environ.get(name, "8"))
    if have < count:
        raise RuntimeError(
            f"ranks that share a GPU need {count} queues, and {name} is {have}: set it to {count} "
            "before CUDA is initialised"
        )


class CudaDevice:
    """A CUDA device of this process.

    Args:
        index: number of the device; the current one by default.
        queues: how many streams must be able to go on beside one another; None: what CUDA gives.

    Raises:
        RuntimeError: torch sees no CUDA device, or CUDA was initialised with too few queues.
    """

    def __init__(self, index: int | None = None, queues: int | None = QUEUES) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("backend cuda needs a CUDA device that torch can see; there is none")
        if queues is not None:
            _want_queues(queues)
        self.index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self.index)
        properties = torch.cuda.get_device_properties(self.index)
        self.sm_count: int = properties.multi_processor_count
        self.capability = (properties.major, properties.minor)
        self.identity = f"{socket.gethostname()}/{properties.uuid}"

    @cached_property
    def driver(self) -> _C.Driver:
        """The driver that torch has loaded already."""
        torch.zeros(1, device=self.torch_device)  # streams are made in a context, which this makes
        return _C.Driver()

    @cached_property
    def registry(self) -> Registry:
        """Kernels of the package and of the cache, as they were at the first look."""
        return Registry.load()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for the peers to write to."""
        return torch.zeros(count, dtype=dtype, device=self.torch_device)

    def current_stream(self) -> int:
        """torch's current stream of this device."""
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Make a stream torch's current one."""
        external = torch.cuda.ExternalStream(stream, device=self.torch_device)
        return torch.cuda.stream(external)

    def enqueue(self, body: Callable[[], None]) -> None:
        """torch does so by itself."""
        body()

    def is_current(self) -> bool:
        """torch knows."""
        return torch.cuda.current_device() == self.index

    def made_current(self) -> AbstractContextManager[Any]:
        """As torch does it."""
        return torch.cuda.device(self.index)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory: with unified addressing, the device uses the host's address."""
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """As torch does it."""
        torch.cuda.synchronize(self.torch_device)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Nothing to do: torch's allocator hands memory out again in the order of the stream."""
