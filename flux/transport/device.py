"""The CUDA backend's interface to a device; tests substitute another."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch

from flux import _C

if TYPE_CHECKING:
    from flux.kernels.registry import Registry


class Device(Protocol):
    """One GPU.

    Attributes:
        torch_device: the device of tensors.
        index: number of the device, as kernels take it.
        sm_count: multiprocessors.
        capability: compute capability, (major, minor).
        identity: equal for two processes exactly if they use the same GPU.
        driver: stream operations. Streams are integers.
        registry: the kernels that are built.
        queues: how many streams can make progress independently of one another.
    """

    torch_device: torch.device
    index: int
    sm_count: int
    capability: tuple[int, int]
    identity: str
    queues: int

    @property
    def driver(self) -> _C.Driver:
        """Stream operations. Streams are integers."""
        ...

    @property
    def registry(self) -> Registry:
        """The kernels that are built."""
        ...

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed device memory that peers can write to."""
        ...

    def current_stream(self) -> int:
        """Return the stream of the caller's work."""
        ...

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Make a stream the current one."""
        ...

    def peer_atomics(self, identity: str) -> bool | None:
        """Return whether this GPU does atomic operations on another one's memory natively.

        Returns:
            None if this process does not see the other GPU.
        """
        ...

    def enqueue(self, body: Callable[[], None]) -> None:
        """Put operations of torch on the current stream."""
        ...

    def is_current(self) -> bool:
        """Return whether this device is the thread's current device."""
        ...

    def made_current(self) -> AbstractContextManager[Any]:
        """Make this device the thread's current device within the context."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed host memory that the device reads and writes at the same address."""
        ...

    def synchronize(self) -> None:
        """Wait until all work that torch has put on the device is done."""
        ...

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep tensors from being reused before the work now on the current stream is done."""
        ...


QUEUES = 32  # the most that CUDA offers


def _want_queues(count: int) -> None:
    """Ask CUDA for ``count`` device queues. CUDA reads the setting when it is initialised.

    Streams share the device's queues, and a stream that waits for memory blocks all streams on its
    queue. The work it waits for must not be among them.

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


def _identity(properties: Any) -> str:
    """Return the identity of the GPU that torch describes by these properties."""
    return f"{socket.gethostname()}/{properties.uuid}"


@cache
def _driver(index: int) -> _C.Driver:
    """Return the driver of a device. Its ops share a stream, and the order of their calls."""
    torch.zeros(1, device=torch.device("cuda", index))  # makes the context of its streams
    return _C.Driver()


class CudaDevice:
    """A CUDA device of this process.

    Args:
        index: number of the device; the current one by default.
        queues: how many streams must make progress independently; None: as many as CUDA gives.

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
        self.queues = QUEUES if queues is None else queues
        self.sm_count: int = properties.multi_processor_count
        self.capability = (properties.major, properties.minor)
        self.identity = _identity(properties)

    @property
    def driver(self) -> _C.Driver:
        """The driver library that torch has already loaded; one object per device."""
        return _driver(self.index)

    @cached_property
    def registry(self) -> Registry:
        """Kernels of the package and of the cache, as of the first access."""
        from flux.kernels.registry import Registry

        return Registry.load()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed device memory that peers can write to."""
        return torch.zeros(count, dtype=dtype, device=self.torch_device)

    def current_stream(self) -> int:
        """Return torch's current stream of this device."""
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def on_stream(self, stream: int) -> AbstractContextManager[Any]:
        """Make a stream torch's current one."""
        external = torch.cuda.ExternalStream(stream, device=self.torch_device)
        return torch.cuda.stream(external)

    def peer_atomics(self, identity: str) -> bool | None:
        """Return whether this GPU does atomic operations on another one's memory natively."""
        for peer in range(torch.cuda.device_count()):
            if _identity(torch.cuda.get_device_properties(peer)) == identity:
                return peer == self.index or self.driver.peer_atomics(self.index, peer)
        return None

    def enqueue(self, body: Callable[[], None]) -> None:
        """Run ``body``: torch itself puts operations on the current stream."""
        body()

    def is_current(self) -> bool:
        """Return whether torch's current device is this one."""
        return torch.cuda.current_device() == self.index

    def made_current(self) -> AbstractContextManager[Any]:
        """Make this device torch's current device within the context."""
        return torch.cuda.device(self.index)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory: with unified addressing, the device uses the host's address."""
        return torch.zeros(count, dtype=dtype, device="cpu", pin_memory=True)

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        torch.cuda.synchronize(self.torch_device)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Do nothing: torch's allocator reuses memory only in stream order."""
