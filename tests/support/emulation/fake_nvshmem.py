"""libflux_nvshmem.so for machines without GPUs: fake_nvshmem.cpp around the real kernels."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from emulated import EmulatedDevice, Puts
from flux import _C
from flux.transport.nvshmem_library import NvshmemLibrary
from side_by_side import built_once

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
_KERNEL_SOURCES = (
    "cuda/runtime/relay.cuh",
    "cuda/gemm/reduce.cuh",
    "cuda/sync.cuh",
    "cuda/trace.cuh",
)
_PTX = (
    (
        r'asm volatile\("ld\.acquire\.sys\.global\.u(?:32|64) %0, \[%1\];".*?\);',
        "value = __atomic_load_n(word, __ATOMIC_ACQUIRE);",
    ),
    (
        r'asm volatile\("st\.release\.sys\.global\.u32 \[%0\], %1;".*?\);',
        "__atomic_store_n(word, value, __ATOMIC_RELEASE);",
    ),
    (r'asm volatile\("mov\.u64 %0, %%globaltimer;".*?\);', "now = shim::nanoseconds();"),
    (r'asm volatile\("fence\.proxy\.[^;]*;".*?\);', ""),  # of a host, all memory is one
    (r'asm volatile\("griddepcontrol\.[^;]*;".*?\);', ""),  # launches here are never early
    # A few will do, one for each rank of a node and each other node: they are threads of the host.
    (r"constexpr int kReduceThreads = \d+;", "constexpr int kReduceThreads = 8;"),
)
_STANDS_FOR = ("cuda_runtime.h", "nvshmem.h", "nvshmemx.h")
_STANDS_FOR_OURS = ("cuda/nvls.cuh",)
_STANDS_FOR_CUTLASS = ("cutlass/array.h", "cutlass/numeric_conversion.h")


def as_host_code(include: Path, names: Sequence[str]) -> None:
    """Write device sources of csrc below ``include`` as the host compiles them."""
    for name in names:
        text = (ROOT / "csrc" / name).read_text()
        for pattern, replacement in _PTX:
            text = re.sub(pattern, replacement, text, flags=re.S)
        assert "asm volatile" not in text, f"{name} has PTX unknown here"
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text(text)


def build(folder: Path) -> Path:
    """The library, built with the host's C++ compiler."""
    assert ctypes.sizeof(RelayArgs) == _C.NVSHMEM_ABI[1], "RelayArgs is not FluxRelayArgs"
    include = folder / "include"
    for name in (*_STANDS_FOR, *_STANDS_FOR_CUTLASS, *_STANDS_FOR_OURS):
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text('#include "device_shim.h"\n')
    as_host_code(include, _KERNEL_SOURCES)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler"
    target = folder / "libflux_nvshmem.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    includes = [f"-I{include}", *(f"-I{path}" for path in (HERE, ROOT / "csrc", ROOT / "emulator"))]
    source = str(HERE / "fake_nvshmem.cpp")
    subprocess.run([compiler, *options, *includes, source, "-o", str(target), "-lrt"], check=True)
    return target


@pytest.fixture(scope="session")
def fake_nvshmem_library(pytestconfig: pytest.Config) -> Iterator[Path]:
    remove_leftovers()
    yield built_once(pytestconfig, "nvshmem", build)
    remove_leftovers()


def remove_leftovers() -> None:
    """Remove the names in /dev/shm of jobs whose rank 0 was killed before all ranks had joined."""
    for path in Path("/dev/shm").glob("flux-fake-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            path.unlink(missing_ok=True)


def on_streams_of(device: EmulatedDevice, path: Path) -> NvshmemLibrary:
    """The library, with the streams and the delays of an emulated device."""
    functions = [
        ctypes.cast(getattr(device.library, name), ctypes.c_void_p)
        for name in ("emulator_run", "emulator_dawdle")
    ]
    ctypes.CDLL(str(path)).fake_nvshmem_use(*functions)
    return NvshmemLibrary(path, None)


def puts_of(device: EmulatedDevice, path: Path) -> Puts:
    """The same, for virtual nodes."""
    library = on_streams_of(device, path)
    return Puts(
        library.put_signal,
        library.signal,
        library.relay,
        library.node_sum,
        ctypes.CDLL(str(path)).fake_nvshmem_heaps,
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


class SumArgs(ctypes.Structure):
    """FakeSum."""

    _fields_ = (
        *((name, _i) for name in ("rank", "world", "m", "n", "tile_m", "tile_n")),
        ("source_count", _i),
        ("node_count", _i),
        ("sources", _i * _WORLD),
        ("slots", _p * _WORLD),
        ("words", _p * _WORLD),
        ("flags", _p),
        ("out", _p),
        ("sync", Sync),
    )


class Native:
    """What only native code calls, of the library that ``path`` is."""

    def __init__(self, table: NvshmemLibrary, path: Path) -> None:
        size, word = ctypes.c_uint64, ctypes.c_uint64
        put = (ctypes.c_int, _p, _p, size, _p, word, ctypes.c_int, _p)
        self._put_signal = ctypes.CFUNCTYPE(*put)(table.put_signal)
        self._signal = ctypes.CFUNCTYPE(ctypes.c_int, _p, word, ctypes.c_int, _p)(table.signal)
        self._relay = ctypes.CFUNCTYPE(ctypes.c_int, _p, _p)(table.relay)
        self._node_sum = ctypes.CDLL(str(path)).fake_node_sum

    def put_signal(self, to: int, source: int, size: int, word: int, value: int, pe: int) -> None:
        assert self._put_signal(to, source, size, word, value, pe, None) == 0

    def signal(self, word: int, value: int, pe: int) -> None:
        assert self._signal(word, value, pe, None) == 0

    def relay(self, args: RelayArgs) -> None:
        assert self._relay(ctypes.addressof(args), None) == 0

    def node_sum(self, args: SumArgs) -> None:
        assert self._node_sum(ctypes.byref(args)) == 0


class Device:
    """As much of a flux.transport.device.Device as transports look at."""

    torch_device = torch.device("cpu")
    sm_count = 16

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = f"fake {index}"

    def synchronize(self) -> None:
        """Return at once: no work is pending."""
