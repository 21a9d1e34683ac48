"""Load libflux_nvshmem.so (csrc/cuda/runtime/nvshmem_abi.h) and the NVSHMEM that it needs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from flux import _C
from flux.kernels import runtime, trust
from flux.kernels.registry import default_roots
from flux.machine import toolchain

ID_BYTES = 128  # FLUX_NVSHMEM_ID_BYTES

_pointer, _int = ctypes.c_void_p, ctypes.c_int


class _Table(ctypes.Structure):
    """FluxNvshmem. Functions that only native code calls are plain addresses."""

    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("relay_bytes", ctypes.c_uint32),
        ("node_sum_bytes", ctypes.c_uint32),
        ("version", ctypes.c_char_p),
        ("message", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("unique_id", ctypes.CFUNCTYPE(_int, _pointer)),
        ("prepare", ctypes.CFUNCTYPE(_int, _int)),
        ("init", ctypes.CFUNCTYPE(_int, _int, _int, _pointer, _int)),
        ("finalize", ctypes.CFUNCTYPE(_int)),
        ("allocate", ctypes.CFUNCTYPE(_int, ctypes.c_uint64, ctypes.POINTER(_pointer))),
        ("release", ctypes.CFUNCTYPE(_int, _pointer)),
        ("peer_pointer", ctypes.CFUNCTYPE(_pointer, _pointer, _int)),
        ("put_signal", _pointer),
        ("signal", _pointer),
        ("relay", _pointer),
        ("node_sum", _pointer),
    )


class NvshmemLibrary:
    """The functions of a loaded library.

    They block without holding Python's lock, and raise RuntimeError with the library's message.

    Args:
        path: of the shared object, which no other user may be able to write or replace.
        host: of NVSHMEM's host library, loaded first unless a copy is already loaded; None for a
            library that brings its own.
        sha256: of the library when its manifest was read; None: no comparison.

    Raises:
        RuntimeError: the library cannot be loaded, or does not fit this version of flux.

    Attributes:
        address: of the table, for native code.
        put_signal: address of a function that only native code calls.
        signal: the same.
        relay: the same.
        node_sum: the same.
        version: of the NVSHMEM that the library was compiled with.
    """

    def __init__(self, path: Path, host: Path | None, sha256: str | None = None) -> None:
        loaded = None if host is None else _load_host(host)
        with trust.verified(path, sha256) as file:
            name = file.name_to_load()
            try:
                self._library = ctypes.CDLL(name)
                # The version is the first word of the table in every version of it.
                abi = ctypes.c_uint32.in_dll(self._library, runtime.SYMBOL)
            except (OSError, ValueError) as error:
                reason = str(error).replace(name, str(path))
                raise RuntimeError(f"{path} cannot be loaded: {reason}") from error
        self.address = ctypes.addressof(abi)
        expected = _C.NVSHMEM_ABI
        mismatch = f"{path} has ABI {{}}, expected {{}}: build it again with flux compile --runtime"
        if abi.value != expected[0]:
            raise RuntimeError(mismatch.format(abi.value, expected[0]))
        self._table = _Table.from_address(self.address)
        layout = (abi.value, self._table.relay_bytes, self._table.node_sum_bytes)
        if layout != expected:
            raise RuntimeError(mismatch.format(layout, expected))
        self.version: str = self._table.version.decode()
        self.put_signal: int = self._table.put_signal
        self.signal: int = self._table.signal
        self.relay: int = self._table.relay
        self.node_sum: int = self._table.node_sum
        if loaded is not None and _version_of(loaded) != self.version:
            raise RuntimeError(
                f"{path} is built for NVSHMEM {self.version}, but {_version_of(loaded)} is loaded: "
                "build it again with flux compile --runtime"
            )

    def _check(self, status: int) -> None:
        if status != 0:
            said = self._table.message() or b"no reason given"
            raise RuntimeError(f"{said.decode(errors='replace')} (status {status})")

    def unique_id(self) -> bytes:
        """Return an id that one rank makes and all ranks pass to ``init``."""
        made = ctypes.create_string_buffer(ID_BYTES)
        self._check(self._table.unique_id(made))
        return made.raw

    def prepare(self, device: int) -> None:
        """Check that this rank can take part with this device."""
        self._check(self._table.prepare(device))

    def init(self, rank: int, world: int, identity: bytes, device: int) -> None:
        """Join the other ranks. Collective."""
        if len(identity) != ID_BYTES:
            raise ValueError(f"an id has {ID_BYTES} bytes, got {len(identity)}")
        self._check(self._table.init(rank, world, identity, device))

    def finalize(self) -> None:
        """Leave, and give all memory back. Collective."""
        self._check(self._table.finalize())

    def allocate(self, size: int) -> int:
        """Return the address of zeroed symmetric memory. Collective."""
        address = _pointer()
        self._check(self._table.allocate(size, ctypes.byref(address)))
        return address.value or 0

    def release(self, address: int) -> None:
        """Free memory. Collective."""
        self._check(self._table.release(address))

    def peer_pointer(self, address: int, rank: int) -> int:
        """Return the address at which this rank sees another rank's memory; 0 if it cannot."""
        return self._table.peer_pointer(address, rank) or 0


def load() -> NvshmemLibrary:
    """Return the library that is built for the installed NVSHMEM package.

    Raises:
        RuntimeError: there is none, or it does not load; the message says what to do.
    """
    built = runtime.usable(default_roots())
    package = toolchain.nvshmem(built.package.rpartition("-cu")[2])
    assert package is not None  # usable() has checked it
    host = Path(package.path, "lib", toolchain.NVSHMEM_HOST_LIBRARY)
    return NvshmemLibrary(built.path, host, built.sha256)


def _load_host(path: Path) -> ctypes.CDLL:
    """Return NVSHMEM's host library: the copy that is already loaded, or else this one.

    torch may have loaded a copy.

    A library that depends on it gets any loaded copy of that name. So one copy must be loaded
    first, and no second one.
    """
    try:
        return ctypes.CDLL(path.name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass  # not loaded yet
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"NVSHMEM cannot be loaded: {error}") from error


def _version_of(host: ctypes.CDLL) -> str:
    numbers = [_int() for _ in range(3)]
    host.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)
