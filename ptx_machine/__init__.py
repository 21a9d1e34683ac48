"""A machine that executes PTX on the CPU: see README.md.

module = Module(Path("kernel.ptx").read_text())
device = Device()
device.launch(module, "scale", grid=4, block=128, args=[tensor, 2.0, 512])
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptx_machine import _machine
from ptx_machine._machine import CudaDevice, Machine, Module, PtxError
from ptx_machine.counters import Counters, Role, Work, kernel_counters
from ptx_machine.trace import Trace

__all__ = [
    "Counters",
    "CudaDevice",
    "Device",
    "Module",
    "Occupancy",
    "PtxError",
    "Role",
    "Trace",
    "Work",
    "cuda_device",
    "extent",
    "kernel_counters",
    "observed",
]

Size = int | Sequence[int]

# CUtensorMapDataType of types of torch; float8 is copied as bytes, as CUTLASS does.
_ELEMENTS = {
    "uint8": 0,
    "int8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}


@dataclass(frozen=True)
class Occupancy:
    """What a block takes of a multiprocessor.

    Attributes:
        registers_per_thread: an estimate, where the kernel has no ``setmaxnreg``: see README.md.
        threads, registers, shared: of a block, as they are allotted; shared memory in bytes.
        blocks: that fit on a multiprocessor.
    """

    registers_per_thread: int
    threads: int
    registers: int
    shared: int
    blocks: int


_observers: list[Callable[[Counters], None]] = []


@contextmanager
def observed(observe: Callable[[Counters], None]) -> Iterator[None]:
    """Call ``observe`` with the counters of each launch on a Device."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


@cache
def cuda_device() -> CudaDevice:
    """Return the device of this process on which emulated kernel libraries run.

    Call it before such a library is loaded: the library looks for the machine then.
    """
    ctypes.CDLL(_machine.__file__, mode=ctypes.RTLD_GLOBAL)
    return CudaDevice.instance()


def extent(tensor: Any) -> tuple[int, int]:
    """Return (address, bytes) of the whole memory of which a tensor is a part."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())


class Device:
    """A GPU on which kernels run. Tensors of the CPU are its global memory.

    Launches from several threads of Python share its multiprocessors, as kernels of several streams
    do: each waits until there is room for its blocks.

    Args:
        model: ``"H200"`` or ``"A100"``: what a multiprocessor has.
        multiprocessors: how many of them; without: as many as the model has. All blocks that run at
            a time need memory of the host: up to some gigabytes for large kernels on a whole H200.
        patience: seconds for which kernels may change nothing while blocks wait for room; then it
            is a deadlock.
        idle_patience: seconds for which the threads of all kernels may poll memory that nothing
            changes, or wait; then it is a deadlock. 0: kernels may poll for as long as they like.
    """

    def __init__(
        self,
        *,
        model: str = "H200",
        multiprocessors: int | None = 8,
        patience: float = 10.0,
        idle_patience: float = 0.5,
    ) -> None:
        self._machine = Machine()
        self._machine.configure(model, multiprocessors or _machine.multiprocessors_of(model))
        self._machine.patience = patience
        self._machine.idle_patience = idle_patience
        self._kept: dict[int, Any] = {}  # by address, so that nobody else gets the memory

    def register(self, tensor: Any, name: str = "a tensor", *, written: bool = True) -> int:
        """Let kernels access a tensor; return its address.

        Args:
            tensor: contiguous, on the CPU.
            name: for messages.
            written: False: what a kernel reads of it before one has written there is an error, as
                far as its value matters.

        Raises:
            ValueError: the tensor is not contiguous, or not on the CPU.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and on the CPU")
        address = int(tensor.data_ptr())
        self._machine.add_memory(address, tensor.numel() * tensor.element_size(), name, written)
        self._kept[address] = tensor
        return address

    def tensor_map(
        self,
        tensor: Any,
        *,
        box: Sequence[int],
        swizzle: int = 0,
        steps: Sequence[int] | None = None,
        fill_nan: bool = False,
        interleave: int = 0,
        element: str | None = None,
    ) -> bytes:
        """Return the 128 bytes of a tensor map for TMA, as ``cuTensorMapEncodeTiled`` makes them.

        Args:
            tensor: one to five dimensions, the last of them contiguous; it is registered.
            box: elements of a copy in each dimension, in the tensor's order.
            swizzle: bytes after which chunks of 16 bytes change places: 0, 32, 64 or 128.
            steps: every how many elements of a box are copied, in the tensor's order.
            fill_nan: load NaN for elements outside of the tensor, instead of zero.
            interleave: a value of ``CUtensorMapInterleave``.
            element: name of the type of elements, if not the tensor's: ``"uint32"``, ``"uint64"``.

        Raises:
            ValueError: the driver would refuse it, or the machine does not know it.
        """
        extent_address, size = extent(tensor)
        self._machine.add_memory(extent_address, size, "a tensor behind a map")
        self._kept[extent_address] = tensor
        width = tensor.element_size()
        if tensor.stride(-1) != 1:
            raise ValueError("the last dimension of a tensor behind a map must be contiguous")
        return _machine.tensor_map(
            type=_ELEMENTS[element or str(tensor.dtype).removeprefix("torch.")],
            address=int(tensor.data_ptr()),
            sizes=list(tensor.shape[::-1]),
            strides=[stride * width for stride in tensor.stride()[-2::-1]],
            box=list(box[::-1]),
            steps=list((steps or [1] * tensor.dim())[::-1]),
            interleave=interleave,
            swizzle={0: 0, 32: 1, 64: 2, 128: 3}.get(swizzle, swizzle),
            fill=int(fill_nan),
        )

    def release(self, tensor: Any) -> None:
        """Take back what ``register`` gave. Later accesses are errors."""
        address = int(tensor.data_ptr())
        self._machine.remove_memory(address)
        del self._kept[address]

    def add_multicast(self, address: int, tensors: Sequence[Any]) -> None:
        """Let an address stand for the same offset of several tensors of equal size.

        Only ``multimem`` may access it. It takes the members in this order.

        Raises:
            ValueError: the tensors differ in size.
        """
        sizes = {tensor.numel() * tensor.element_size() for tensor in tensors}
        if len(sizes) != 1:
            raise ValueError("members of multicast memory must have the same size")
        members = [self.register(tensor, f"member {i}") for i, tensor in enumerate(tensors)]
        self._machine.add_multicast(address, sizes.pop(), members)

    def launch(
        self,
        module: Module,
        kernel: str,
        *,
        grid: Size,
        block: Size,
        args: Sequence[object],
        cluster: Size | None = None,
        dynamic_shared: int = 0,
        seed: int = 0,
        max_statements: int = 10**9,
        races: bool = True,
        number: int = 0,
        peer_reductions: bool = False,
        vectors: str = "apart",
    ) -> Counters:
        """Run a kernel to its end.

        Args:
            module: what holds the kernel.
            kernel: its name, mangled.
            grid: blocks, one to three sizes.
            block: threads of a block, one to three sizes.
            args: one for each parameter: a tensor (its address; it is registered), an int, a float,
                a bool, or the bytes of a struct.
            cluster: blocks of a cluster, one to three sizes; without: what the kernel asks for.
            dynamic_shared: bytes of dynamic shared memory.
            seed: decides the order of warps; 0: in turn.
            max_statements: of all warps, after which a kernel counts as one without an end.
            races: find accesses that are not ordered, and reads of memory that was never written.
            number: of the GPU; launches at the same time with another one need the scope .sys.
            peer_reductions: take bulk reductions (``cp.reduce.async.bulk``) of global memory as
                atomic among GPUs, as they are over NVLink. PTX gives them the scope .gpu.
            vectors: strong accesses of v2 and v4. ``"apart"``: their elements may come from several
                stores, as PTX allows. ``"whole"``: they do not, which protocols that send data and
                flag together rely on. ``"reported"``: a load that mixes stores is an error.

        Returns:
            What it executed.

        Raises:
            PtxError: the kernel did what a device does not allow, or has no end.
            ValueError: an argument does not fit its parameter.
        """
        record = self._run(
            module,
            kernel,
            grid=grid,
            block=block,
            args=args,
            cluster=cluster,
            dynamic_shared=dynamic_shared,
            seed=seed,
            max_statements=max_statements,
            races=races,
            number=number,
            peer_reductions=peer_reductions,
            vectors=vectors,
        )
        counters = Counters(module, kernel, record)
        for observe in _observers:
            observe(counters)
        return counters

    def trace(
        self, module: Module, kernel: str, *, most_events: int = 2_000_000, **launch: Any
    ) -> Trace:
        """Run a kernel as ``launch`` does, and return what each warp executed and when.

        Args:
            module: what holds the kernel.
            kernel: its name, mangled.
            most_events: statements that are recorded; later ones only count as dropped.
            launch: as for ``launch``.
        """
        record = self._run(module, kernel, most_events=max(1, most_events), **launch)
        return Trace(module, kernel, record)

    def occupancy(
        self, module: Module, kernel: str, *, block: Size, dynamic_shared: int = 0
    ) -> Occupancy:
        """Return what a block of a kernel takes, and how many fit on a multiprocessor."""
        x, y, z = _three(block)
        return Occupancy(**self._machine.occupancy(module, kernel, x * y * z, dynamic_shared))

    def _run(
        self,
        module: Module,
        kernel: str,
        *,
        grid: Size,
        block: Size,
        args: Sequence[object],
        cluster: Size | None = None,
        number: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        return self._machine.launch(
            module,
            kernel,
            grid=_three(grid),
            block=_three(block),
            params=self._pack(module, kernel, args),
            cluster=None if cluster is None else _three(cluster),
            device=number,
            **options,
        )

    def _pack(self, module: Module, kernel: str, args: Sequence[object]) -> bytes:
        params = module.params(kernel)
        if len(params) != len(args):
            sizes = ", ".join(str(size) for _, size in params)
            raise ValueError(
                f"{kernel} takes {len(params)} arguments (bytes: {sizes}), got {len(args)}"
            )
        packed = bytearray()
        for number, ((offset, size), arg) in enumerate(zip(params, args, strict=True)):
            packed += bytes(offset - len(packed))
            packed += self._bytes_of(arg, size, f"argument {number} of {kernel}")
        return bytes(packed)

    def _bytes_of(self, arg: Any, size: int, what: str) -> bytes:
        if isinstance(arg, bytes):
            data = arg
        elif isinstance(arg, float) and size in (4, 8):
            data = struct.pack("<f" if size == 4 else "<d", arg)
        elif isinstance(arg, int) and size <= 8:
            data = (arg % (1 << (8 * size))).to_bytes(size, "little")
        elif hasattr(arg, "data_ptr"):
            data = self.register(arg, what).to_bytes(8, "little")
        else:
            raise ValueError(f"{what} cannot be made of a {type(arg).__name__}")
        if len(data) != size:
            raise ValueError(f"{what} has {size} bytes, got {len(data)}")
        return data


def _three(size: Size) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"expected one to three sizes, got {size!r}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
