"""libflux_nvshmem.so for the PTX machine, with the emulated NVSHMEM; calls that native code makes.

The machine, and so a MachineDevice, must be there before the library is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated import EmulatedDevice, Puts
from flux import _C
from flux.transport.nvshmem_library import NvshmemLibrary
from ptx_machine.gpu import LIBRARY

PREFIX = "ptx_machine_nvshmem_"  # of names in /dev/shm, then the process that made the id


def remove_leftovers() -> None:
    """Remove the names in /dev/shm of jobs whose rank 0 was killed before all ranks had joined."""
    for path in Path("/dev/shm").glob(f"{PREFIX}*"):
        if not Path("/proc", path.name.removeprefix(PREFIX).split("_")[0]).exists():
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def nvshmem_library(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The library, in the directory of ``ptx_kernels``; skips the test as that does."""
    kernels: Path = request.getfixturevalue("ptx_kernels")
    from flux.kernels import runtime

    remove_leftovers()
    yield runtime.scan(kernels)[0].path
    remove_leftovers()


def load(path: Path) -> NvshmemLibrary:
    """Load it, as the real one is loaded behind NVSHMEM."""
    return NvshmemLibrary(path, LIBRARY)


def puts_of(device: EmulatedDevice, path: Path) -> Puts:
    """Its functions for virtual nodes."""
    library = load(path)
    return Puts(
        library.put_signal,
        library.signal,
        library.relay,
        library.node_sum,
        device.library.emulated_nvshmem_add_heaps,
    )


_WORLD = _C.MAX_KERNEL_WORLD
_p, _i, _l = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Sync(ctypes.Structure):
    """FluxSync."""

    _fields_ = (
        ("epoch", ctypes.c_uint32),
        ("launch", _i),
        ("timeout_ns", _l),
        ("status", _p),
        ("report", _p),
        ("count", _p),
        ("trace", _p),
    )


class RelayArgs(ctypes.Structure):
    """FluxRelayArgs."""

    _fields_ = (
        *((name, _i) for name in ("dtype", "m", "n", "world", "tile_m", "tile_n", "blocks")),
        ("source_count", _i),
        ("sources", _i * _WORLD),
        ("owner_count", _i),
        ("owners", _i * _WORLD),
        ("slots", _p * _WORLD),
        ("slot_bytes", _l),
        ("flags", _p * _WORLD),
        ("staging", _p * _WORLD),
        ("to", _p * _WORLD),
        ("words", _p * _WORLD),
        ("entries", _p),
        ("sync", Sync),
    )


class ReduceArgs(ctypes.Structure):
    """FluxReduceArgs."""

    _fields_ = (
        *((name, _i) for name in ("rows", "n", "first_row", "m", "tile_m", "tile_n")),
        *((name, _i) for name in ("world", "rank")),
        ("slots", _p * _WORLD),
        ("slot_ld", _l),
        ("flags", _p),
        ("by_source", _i),
        ("outs", _p * _WORLD),
        ("out_count", _i),
        ("slot_count", _i),
        ("out_ld", _l),
        ("switch_in", _p),
        ("switch_out", _p),
        ("bias", _p),
        ("scale", ctypes.c_float),
        ("sm_count", _i),
        ("sync", Sync),
        *((name, _i) for name in ("first_source", "source_count", "most_blocks", "early")),
        ("shares", _p),
    )


class NodeSumArgs(ctypes.Structure):
    """FluxNodeSumArgs."""

    _fields_ = (
        ("sum", ReduceArgs),
        ("dtype", _i),
        ("source_count", _i),
        ("sources", _i * _WORLD),
        ("node_count", _i),
        ("words", _p * _WORLD),
    )


assert (ctypes.sizeof(RelayArgs), ctypes.sizeof(NodeSumArgs)) == _C.NVSHMEM_ABI[1:]


class Native:
    """What only native code calls, on the default stream."""

    def __init__(self, table: NvshmemLibrary) -> None:
        size, word = ctypes.c_uint64, ctypes.c_uint64
        put = (ctypes.c_int, _p, _p, size, _p, word, ctypes.c_int, _p)
        self._put_signal = ctypes.CFUNCTYPE(*put)(table.put_signal)
        self._signal = ctypes.CFUNCTYPE(ctypes.c_int, _p, word, ctypes.c_int, _p)(table.signal)
        self._relay = ctypes.CFUNCTYPE(ctypes.c_int, _p, _p)(table.relay)
        self._node_sum = ctypes.CFUNCTYPE(ctypes.c_int, _p, _p)(table.node_sum)

    def put_signal(self, to: int, source: int, size: int, word: int, value: int, pe: int) -> None:
        assert self._put_signal(to, source, size, word, value, pe, None) == 0

    def signal(self, word: int, value: int, pe: int) -> None:
        assert self._signal(word, value, pe, None) == 0

    def relay(self, args: RelayArgs) -> None:
        assert self._relay(ctypes.addressof(args), None) == 0

    def node_sum(self, args: NodeSumArgs) -> None:
        assert self._node_sum(ctypes.addressof(args), None) == 0
