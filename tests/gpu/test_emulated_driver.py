"""Stream capture and virtual memory of the emulated driver, called as cuda.h has them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from emulated_cases import eventually, never
from emulation.ptx_device import MachineDevice
from ptx_machine import Module, PtxError
from ptx_text import LANES, kernel

PAGE = 2 << 20


@pytest.fixture
def gpu(emulator: Path) -> Iterator[EmulatedDevice]:
    with emulated_device(emulator) as device:
        yield device


@pytest.fixture
def streams(gpu: EmulatedDevice) -> Iterator[tuple[int, int]]:
    made = gpu.driver.create_stream(), gpu.driver.create_stream()
    yield made
    for stream in made:
        gpu.driver.destroy_stream(stream)


class Driver:
    """Calls of the driver by name, with integers, which return its status."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: object) -> int:
        passed = [ctypes.c_uint64(x) if isinstance(x, int) else x for x in arguments]
        return int(getattr(self.library, name)(*passed))

    def made(self, name: str, *arguments: object) -> int:
        """Return what a call makes, which is its first argument."""
        out = ctypes.c_uint64()
        assert self(name, ctypes.byref(out), *arguments) == 0
        return out.value

    def status(self, stream: int) -> int:
        """Return what cuStreamIsCapturing says: 0 no, 1 yes, 2 invalidated."""
        capture_status = ctypes.c_int(-1)
        assert self("cuStreamIsCapturing", stream, ctypes.byref(capture_status)) == 0
        return capture_status.value


# -- capture ---------------------------------------------------------------------------------------


@pytest.fixture
def driver(gpu: EmulatedDevice) -> Driver:
    return Driver(gpu.library)


def ended(driver: Driver, stream: int) -> tuple[int, int]:
    """End a capture; return the status, and the graph."""
    graph = ctypes.c_uint64()
    return driver("cuStreamEndCapture", stream, ctypes.byref(graph)), graph.value


def test_captured_work_runs_when_its_graph_is_launched(
    gpu: EmulatedDevice, driver: Driver, streams: tuple[int, int]
) -> None:
    first, other = streams
    words = torch.zeros(4, dtype=torch.int32)
    word = words.data_ptr()
    assert driver.status(first) == 0
    assert driver("cuStreamBeginCapture_v2", first, 0) == 0
    assert driver("cuStreamBeginCapture_v2", first, 0) != 0  # it is under way
    gpu.driver.signal(first, word, 7)
    assert driver.status(first) == 1 and driver.status(other) == 0
    gpu.driver.order_after(other, first)
    gpu.driver.copy(other, word + 4, word, 4)
    assert driver.status(other) == 1
    gpu.driver.order_after(first, other)
    gpu.driver.copy(first, word + 8, word + 4, 4)
    status, graph = ended(driver, first)
    assert status == 0 and driver.status(first) == 0 and driver.status(other) == 0
    assert never(lambda: bool(words.any()))
    execs = [driver.made("cuGraphInstantiateWithFlags", graph, 0) for _ in range(2)]
    assert driver("cuGraphDestroy", graph) == 0  # what was made of it stays
    for made in execs:
        for stream in (first, other, 0):
            words.zero_()
            assert driver("cuGraphLaunch", made, stream) == 0
            gpu.driver.synchronize(stream)
            assert words.tolist() == [7, 7, 7, 0]
        assert driver("cuGraphExecDestroy", made) == 0


def test_launches_of_a_graph_follow_one_another(
    gpu: EmulatedDevice, driver: Driver, streams: tuple[int, int]
) -> None:
    first, other = streams
    gates = torch.zeros(2, dtype=torch.int32)
    with gpu.on_stream(first), gpu.capture() as graph:
        gpu.driver.await_signal(first, gates.data_ptr(), 1)
        gpu.driver.signal(first, gates.data_ptr() + 4, 1)
        gpu.driver.signal(first, gates.data_ptr(), 0)
    for stream in (first, other):
        with gpu.on_stream(stream):
            graph.replay()
    for _ in range(2):
        assert never(lambda: bool(gates[1]))
        gates[0] = 1
        assert eventually(lambda: gates.tolist() == [0, 1])
        gates[1] = 0
    for stream in (first, other):
        gpu.driver.synchronize(stream)
    graph.close()


@pytest.mark.parametrize("ask", ["cuStreamSynchronize", "cuStreamQuery"])
def test_waiting_for_a_captured_stream_ends_the_capture(
    driver: Driver, streams: tuple[int, int], ask: str
) -> None:
    first, other = streams
    assert driver("cuStreamBeginCapture_v2", first, 1) == 0
    assert driver(ask, other) == 0 and driver.status(first) == 1
    assert driver(ask, first) == 900
    assert driver.status(first) == 2
    assert ended(driver, first) == (901, 0)
    assert driver.status(first) == 0 and driver(ask, first) == 0


def test_streams_that_join_a_capture_are_joined_back(
    gpu: EmulatedDevice, driver: Driver, streams: tuple[int, int]
) -> None:
    first, other = streams
    word = torch.zeros(1, dtype=torch.int32)
    assert driver("cuStreamEndCapture", first, ctypes.byref(ctypes.c_uint64())) == 903
    for work in (False, True):
        assert driver("cuStreamBeginCapture_v2", first, 0) == 0
        gpu.driver.order_after(other, first)
        if work:  # a dependency alone needs no join
            gpu.driver.signal(other, word.data_ptr(), 1)
        status, graph = ended(driver, first)
        assert (status, bool(graph)) == ((904, False) if work else (0, True))
        if graph:
            driver("cuGraphDestroy", graph)
    assert driver("cuStreamBeginCapture_v2", first, 0) == 0
    gpu.driver.order_after(other, first)
    assert ended(driver, other) == (903, 0)  # it began on another one
    assert ended(driver, first) == (901, 0)
    with pytest.raises(RuntimeError, match=r"904 .*not joined back"), gpu.capture():
        gpu.driver.order_after(first, 0)
        gpu.driver.signal(first, word.data_ptr(), 1)
    assert not word.any()


def test_captures_depend_on_nothing_outside(
    gpu: EmulatedDevice, driver: Driver, streams: tuple[int, int]
) -> None:
    first, other = streams
    before = driver.made("cuEventCreate", 2)
    assert driver("cuEventRecord", before, other) == 0
    assert driver("cuStreamBeginCapture_v2", first, 0) == 0
    inside = driver.made("cuEventCreate", 2)
    assert driver("cuEventRecord", inside, first) == 0
    assert driver("cuStreamBeginCapture_v2", other, 0) == 0
    assert driver("cuStreamWaitEvent", other, inside, 0) == 905  # two captures
    assert ended(driver, other) == (901, 0)
    assert driver("cuStreamWaitEvent", first, before, 0) == 905
    assert ended(driver, first) == (901, 0)
    assert driver("cuStreamWaitEvent", other, inside, 0) == 905  # a capture that is over
    for event in (before, inside):
        assert driver("cuEventDestroy_v2", event) == 0
    third = gpu.driver.create_stream()
    assert driver("cuStreamBeginCapture_v2", first, 0) == 0
    gpu.driver.order_after(third, first)
    gpu.driver.destroy_stream(third)
    assert ended(driver, first) == (901, 0)


# -- virtual memory --------------------------------------------------------------------------------


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class MulticastProp(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_uint),
        ("size", ctypes.c_size_t),
        ("handle_types", ctypes.c_ulonglong),
        ("flags", ctypes.c_ulonglong),
    )


class Memory(Driver):
    """Virtual memory of a driver."""

    def create(self, pages: int = 1, device: int = 0, shared: bool = False) -> int:
        prop = AllocationProp(1, int(shared), Location(1, device))
        return self.made("cuMemCreate", pages * PAGE, ctypes.byref(prop), 0)

    def reserve(self, pages: int, alignment: int = 0) -> int:
        return self.made("cuMemAddressReserve", pages * PAGE, alignment, 0, 0)

    def access(self, address: int, pages: int, flags: int = 3, device: int = 0) -> int:
        desc = AccessDesc(Location(1, device), flags)
        return self("cuMemSetAccess", address, pages * PAGE, ctypes.byref(desc), 1)

    def objects(self) -> int:
        return int(self.library.emulator_memory_objects())


@pytest.fixture
def machine() -> Iterator[MachineDevice]:
    device = MachineDevice()
    yield device
    device.check()
    device.close()


@pytest.fixture
def memory(machine: MachineDevice) -> Iterator[Memory]:
    made = Memory(machine.library)
    before = made.objects(), len(os.listdir("/proc/self/fd"))
    yield made
    assert (made.objects(), len(os.listdir("/proc/self/fd"))) == before


INCREMENT = Module(
    kernel(
        """
        ld.param.u64 %rd2, [p0];
        mul.wide.u32 %rd3, %r0, 4;
        add.u64 %rd2, %rd2, %rd3;
        ld.global.u32 %r1, [%rd2];
        add.u32 %r1, %r1, 1;
        st.global.u32 [%rd2], %r1;
        """,
        1,
    )
)


def launch(machine: MachineDevice, module: Module, address: int) -> None:
    """Run a kernel on one warp."""
    params = address.to_bytes(8, "little")
    machine.cuda.machine.launch(module, "k", (1, 1, 1), (LANES, 1, 1), params)


def increment(machine: MachineDevice, address: int) -> None:
    """Add 1 to a warp's words."""
    launch(machine, INCREMENT, address)


def words(machine: MachineDevice, address: int, count: int = LANES) -> list[int]:
    """Copy words to the host."""
    out = torch.zeros(count, dtype=torch.int32)
    machine.driver.copy(0, out.data_ptr(), address, 4 * count)
    machine.synchronize()
    return [int(word) for word in out]


def test_kernels_access_mapped_memory(machine: MachineDevice, memory: Memory) -> None:
    assert (
        memory.made(
            "cuMemGetAllocationGranularity", ctypes.byref(AllocationProp(1, 0, Location(1, 0))), 0
        )
        == PAGE
    )
    alignment = 16 * PAGE
    base = memory.reserve(3, alignment)
    assert base % alignment == 0
    handle, other = memory.create(), memory.create()
    at = base + PAGE
    with pytest.raises(PtxError, match="outside of global memory"):
        increment(machine, at)
    assert memory("cuMemMap", at, PAGE, 0, handle, 0) == 0
    with pytest.raises(PtxError, match="outside of global memory"):
        increment(machine, at)  # mapped, and without access
    assert memory.access(at, 1) == 0
    increment(machine, at)
    with pytest.raises(PtxError, match="outside of global memory"):
        increment(machine, at + PAGE - 4)  # ends behind it
    assert words(machine, at) == [1] * LANES
    # The memory outlives its handle, and a mapping; the same bytes come at another address.
    assert memory("cuMemMap", base, PAGE, 0, handle, 0) == 0
    assert memory("cuMemRelease", handle) == 0 and memory("cuMemRelease", handle) == 400
    assert memory("cuMemUnmap", at, PAGE) == 0
    with pytest.raises(PtxError, match=r"use after free: .* mapped memory, which was freed"):
        increment(machine, at)
    with pytest.raises(RuntimeError, match="use after free: a copy of 128 bytes touches"):
        words(machine, at)
    machine.clear_error()
    assert memory.access(base, 1) == 0
    increment(machine, base)
    assert words(machine, base) == [2] * LANES
    again = memory.made("cuMemRetainAllocationHandle", base + 5)
    assert memory("cuMemMap", at, PAGE, 0, other, 0) == 0
    assert memory.access(base, 2) == 0 and words(machine, at) == [0] * LANES
    flags = ctypes.c_ulonglong()
    for wanted in (3, 0):
        assert memory("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(Location(1, 0)), at) == 0
        assert flags.value == wanted
        assert memory.access(base, 2, flags=0) == 0
    assert memory("cuMemUnmap", base, 2 * PAGE) == 0
    assert memory("cuMemAddressFree", base, 3 * PAGE) == 0
    for each in (again, other):
        assert memory("cuMemRelease", each) == 0


def test_mappings_that_do_not_fit_are_refused(memory: Memory) -> None:
    base, handle = memory.reserve(2), memory.create(2)
    prop = AllocationProp(1, 0, Location(1, 0))
    out = ctypes.byref(ctypes.c_uint64())
    for size in (0, PAGE - 1, PAGE + 4096):
        assert memory("cuMemCreate", out, size, ctypes.byref(prop), 0) == 1
        assert memory("cuMemAddressReserve", out, size, 0, 0, 0) == 1
        assert memory("cuMemMap", base, size, 0, handle, 0) == 1
    assert (
        memory("cuMemCreate", out, PAGE, ctypes.byref(AllocationProp(1, 0, Location(1, 8))), 0)
        == 101
    )
    assert memory("cuMemAddressReserve", out, PAGE, 3 * PAGE, 0, 0) == 1
    assert memory("cuMemMap", base, 3 * PAGE, 0, handle, 0) == 1  # more than the memory
    assert memory("cuMemMap", base + PAGE, 2 * PAGE, 0, handle, 0) == 1  # than the addresses
    assert memory("cuMemMap", base - PAGE, PAGE, 0, handle, 0) == 1
    assert memory("cuMemMap", base + 4096, PAGE, 0, handle, 0) == 1
    assert memory("cuMemMap", base, PAGE, PAGE, handle, 0) == 1  # an offset
    assert memory("cuMemMap", base, PAGE, 0, 10**6, 0) == 400
    assert memory.access(base, 1) == 1  # nothing is mapped
    assert memory("cuMemMap", base, 2 * PAGE, 0, handle, 0) == 0
    assert memory("cuMemMap", base + PAGE, PAGE, 0, handle, 0) == 1  # something is
    assert memory("cuMemUnmap", base, PAGE) == 1  # a part of a mapping
    assert memory("cuMemAddressFree", base, 2 * PAGE) == 1
    assert memory.access(base, 2, device=8) == 101
    assert memory.access(base, 2, flags=1) == 801
    assert memory("cuMemExportToShareableHandle", out, handle, 1, 0) == 800
    assert memory("cuMemUnmap", base, 2 * PAGE) == 0 and memory("cuMemUnmap", base, 2 * PAGE) == 1
    assert memory("cuMemAddressFree", base, PAGE) == 1
    assert memory("cuMemAddressFree", base, 2 * PAGE) == 0
    assert memory("cuMemRelease", handle) == 0


IMPORTER = """
import ctypes, sys
sys.path[:0] = sys.argv[2:]
from test_emulated_driver import PAGE, Memory
from ptx_machine.gpu import LIBRARY
memory = Memory(ctypes.CDLL(str(LIBRARY)))
handle = memory.made("cuMemImportFromShareableHandle", int(sys.argv[1]), 1)
at = memory.reserve(1)
assert memory("cuMemMap", at, PAGE, 0, handle, 0) == 0 and memory.access(at, 1) == 0
assert memory("cuMemsetD32Async", at, 5, 32, 0) == 0
assert memory("cuStreamSynchronize", 0) == 0
"""


def test_other_processes_map_exported_memory(machine: MachineDevice, memory: Memory) -> None:
    handle, at = memory.create(shared=True), memory.reserve(1)
    assert memory("cuMemMap", at, PAGE, 0, handle, 0) == 0 and memory.access(at, 1) == 0
    file = ctypes.c_int(-1)
    assert memory("cuMemExportToShareableHandle", ctypes.byref(file), handle, 1, 0) == 0
    subprocess.run(
        [sys.executable, "-c", IMPORTER, str(file.value), *sys.path],
        pass_fds=[file.value],
        check=True,
        timeout=60,
    )
    os.close(file.value)
    increment(machine, at)
    assert words(machine, at) == [6] * LANES
    assert memory("cuMemUnmap", at, PAGE) == 0 and memory("cuMemAddressFree", at, PAGE) == 0
    assert memory("cuMemRelease", handle) == 0


def test_multicast_objects_stand_for_memory_of_each_device(
    machine: MachineDevice, memory: Memory
) -> None:
    team = memory.made("cuMulticastCreate", ctypes.byref(MulticastProp(2, PAGE, 0, 0)))
    handles = [memory.create(device=device) for device in range(2)]
    base = memory.reserve(3)
    bind = ("cuMulticastBindMem", team, 0)
    assert memory("cuMulticastAddDevice", team, 0) == 0
    assert memory("cuMulticastAddDevice", team, 0) == 1
    assert memory(*bind, handles[0], 0, PAGE, 0) == 1  # one device is missing
    assert memory("cuMulticastAddDevice", team, 1) == 0
    assert memory("cuMulticastAddDevice", team, 2) == 1
    for device, handle in enumerate(handles):
        assert memory(*bind, handle, 0, PAGE, 0) == 0
        assert memory(*bind, handle, 0, PAGE, 0) == 1  # it is bound
        at = base + device * PAGE
        assert memory("cuMemMap", at, PAGE, 0, handle, 0) == 0
        assert memory.access(at, 1, device=device) == 0
        assert memory("cuMemsetD32Async", at, 3 + device, LANES, 0) == 0
    machine.synchronize()
    both = base + 2 * PAGE
    assert memory("cuMemMap", both, PAGE, 0, team, 0) == 0 and memory.access(both, 1) == 0
    total = Module(
        kernel(
            """
            ld.param.u64 %rd2, [p0];
            mul.wide.u32 %rd3, %r0, 4;
            add.u64 %rd2, %rd2, %rd3;
            multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%rd2];
            multimem.st.relaxed.sys.global.u32 [%rd2], %r1;
            """,
            1,
        )
    )
    launch(machine, total, both)
    assert words(machine, base) == words(machine, base + PAGE) == [7] * LANES
    with pytest.raises(PtxError, match="multicast address"):
        increment(machine, both)
    assert memory("cuMemUnmap", base, 3 * PAGE) == 0
    assert memory("cuMemAddressFree", base, 3 * PAGE) == 0
    assert memory("cuMulticastUnbind", team, 0, 0, PAGE) == 0
    assert memory("cuMulticastUnbind", team, 0, 0, PAGE) == 1
    for handle in (team, *handles):
        assert memory("cuMemRelease", handle) == 0
