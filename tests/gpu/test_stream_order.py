"""What streams of the emulated GPU order, and what they do not: programs, with what the PTX
machine says of each.

Each step is done before the next one is submitted, and the host does not wait for a stream
meanwhile: so what is reported is what nothing orders, whatever the timing was.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from emulation.ptx_device import MachineDevice
from ptx_machine import Module, PtxError
from ptx_text import kernel

pytestmark = pytest.mark.timeout(60)

# Kernels of one thread: its first statements, by the verb of a step. p0 is the buffer, p1 a flag.
BODIES = {
    "write": "st.global.u32 [%rd1], 5;",
    "read": "ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd2+4], %r2;",
    "constant": "ld.global.nc.u32 %r2, [%rd1]; st.global.u32 [%rd2+4], %r2;",
    "own": "st.global.u32 [%rd1], 5; ld.global.nc.u32 %r2, [%rd1];",
    "signal": "st.release.sys.global.u32 [%rd2], 1;",
    "relaxed": "st.relaxed.sys.global.u32 [%rd2], 1;",
    "acquire": "ld.acquire.sys.global.u32 %r3, [%rd2];",
    "look": "ld.relaxed.sys.global.u32 %r3, [%rd2];",
    "poll": "ld.volatile.global.u64 %rd3, [%rd1];",
    "acquire.gpu": "ld.acquire.gpu.global.u32 %r3, [%rd2];",
    "reduce": """
        .shared .align 16 .b8 memory[16];
        mov.u32 %r4, memory;
        st.shared.v4.u32 [%r4], {1, 1, 1, 1};
        fence.proxy.async.shared::cta;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r4], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    """,
}


class Program:
    """Runs steps ``STREAM VERB ...`` on a machine."""

    def __init__(self, machine: MachineDevice) -> None:
        self.machine = machine
        self.memory: dict[str, torch.Tensor] = {}
        self.streams: dict[str, int] = {}
        self.events: dict[str, ctypes.c_void_p] = {}
        self.errors: list[str] = []

    def buffer(self, name: str) -> int:
        if name not in self.memory:
            self.memory[name] = torch.zeros(64, dtype=torch.int32)
            self.machine.know(self.memory[name])
        return int(self.memory[name].data_ptr())

    def run(self, steps: str) -> None:
        """Run steps that stand one a line."""
        for step in filter(None, map(str.strip, steps.split(";"))):
            words = step.split()
            if words[0] == "host":
                self._of_host(*words[1:])
            else:
                self._of_stream(*words)

    def _of_host(self, verb: str, name: str) -> None:
        if verb == "awaits":
            self.machine.wait_for(self.streams[name])
        else:
            assert verb == "frees"
            self.buffer(name)
            self.kept = int(self.memory[name].data_ptr())
            del self.memory[name]
            gc.collect()

    def _of_stream(self, name: str, verb: str, *names: str) -> None:
        if name not in self.streams:
            self.streams[name] = self.machine.driver.create_stream()
        stream = ctypes.c_void_p(self.streams[name])
        library, call = self.machine.library, ctypes.c_size_t
        if verb in ("copies", "flags"):
            size = 4 if verb == "flags" else 256
            source, target = (self._address(name) for name in names)
            library.cuMemcpyAsync(call(target), call(source), call(size), stream)
        elif verb == "fills":
            library.cuMemsetD32Async(call(self.buffer(names[0])), 3, call(64), stream)
        elif verb == "raises":
            library.cuStreamWriteValue32_v2(stream, call(self.buffer(names[0])), 1, 0)
        elif verb == "awaits":
            library.cuStreamWaitValue32_v2(stream, call(self.buffer(names[0])), 1, 0)
        elif verb == "records":
            event = self.events.setdefault(names[0], ctypes.c_void_p())
            library.cuEventCreate(ctypes.byref(event), 0)
            library.cuEventRecord(event, stream)
        elif verb == "behind":
            library.cuStreamWaitEvent(stream, self.events[names[0]], 0)
        else:
            self._launch(stream.value or 0, verb, *names)
            return
        self._put(stream.value or 0, lambda: None)

    def _address(self, name: str) -> int:
        return self.kept if name == "freed" else self.buffer(name)

    def _launch(self, stream: int, verbs: str, target: str = "x", flag: str = "f") -> None:
        body = "".join(BODIES[verb] for verb in verbs.split("+"))
        first = "setp.ne.u32 %p1, %r0, 0; @%p1 bra END;"
        pointers = "ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];"
        module = Module(kernel(f"{first}{pointers}{body} END:", 2))
        params = b"".join(self._address(name).to_bytes(8, "little") for name in (target, flag))
        cuda, device = self.machine.cuda, 1 + list(self.streams.values()).index(stream)

        def run() -> None:
            try:
                cuda.machine.launch(
                    module,
                    "k",
                    (1, 1, 1),
                    (32, 1, 1),
                    params,
                    device=device,
                    peer_reductions=cuda.peer_reductions,
                )
            except PtxError as error:
                self.errors.append(str(error))

        self._put(stream, run)

    def _put(self, stream: int, body: Callable[[], None]) -> None:
        """Put a function on a stream, and return when it is done."""
        done = threading.Event()

        def run() -> None:
            body()
            done.set()

        with self.machine.on_stream(stream):
            self.machine.enqueue(run)
        assert done.wait(20)

    def error(self) -> str:
        return "\n".join([*self.errors, self.machine.cuda.error()]).strip()


@pytest.fixture
def program() -> Iterator[Program]:
    machine = MachineDevice()
    machine.cuda.copy_races = True
    made = Program(machine)
    yield made
    for stream in made.streams.values():
        machine.library.cuStreamDestroy_v2(ctypes.c_void_p(stream))
    machine.close()


UNORDERED = "race: .* of another launch .* have no order"
COPY_WRITES = "race: this write by a copy engine of .* have no order; missing is an event"
COPY_READS = "race: this read by a copy engine of .* have no order; missing is an event"
BY_COPY = "race: .* and a write by the host or a copy engine have no order"
COPY_READ = "race: this write of .* and a read by a copy engine have no order"

CASES: list[tuple[str, str | None]] = [
    # The end of a launch orders what comes behind it on its stream.
    ("a write x; a read x", None),
    ("a write x; b read x", UNORDERED),
    ("a read x; b write x", UNORDERED),
    ("a write x; host awaits a; b read x", None),
    ("a write x; a records e; b behind e; b read x", None),
    ("a records e; a write x; b behind e; b read x", UNORDERED),
    ("a write x; a records e; b behind e; c read x", UNORDERED),
    ("a write x; a raises g; b awaits g; b read x", None),
    ("a raises g; a write x; b awaits g; b read x", UNORDERED),
    ("a write x; a records e; b behind e; b raises g; c awaits g; c read x", None),
    ("a write x; host awaits a; c write y; b read x", None),
    ("a write y; a write x; b read y; host awaits a", UNORDERED),
    # Copies come behind what they read and overwrite.
    ("a write x; a copies x y; a read y", None),
    ("a write x; b copies x y", COPY_READS),
    ("a read x; b copies y x", COPY_WRITES),
    ("a read x; a records e; b behind e; b copies y x", None),
    ("a read x; b fills x", COPY_WRITES),
    ("a write x; b fills x", COPY_WRITES),
    ("a copies x y; b copies z y", COPY_WRITES),
    ("a copies x y; b copies x z", None),
    ("a copies y x; b copies x z", COPY_READS),
    ("a write+signal x; b awaits f; b copies x y", None),
    ("a write+relaxed x; b awaits f; b copies x y", COPY_READS),
    ("a signal+write x; b awaits f; b copies x y", COPY_READS),
    # Launches come behind the copies of what they read and write.
    ("a copies x y; b write x", COPY_READ),
    ("a copies x y; a records e; b behind e; b write x", None),
    ("a copies x y; b read y", BY_COPY),
    ("a copies x y; b write y", BY_COPY),
    ("a fills y; b read y", BY_COPY),
    # An acquire of a signal covers what it was raised behind.
    ("a copies x y; a raises f; b acquire+read y", None),
    ("a copies x y; a raises f; b look+read y", BY_COPY),
    ("a copies x y; a raises f; b acquire.gpu+read y", BY_COPY),
    ("a raises f; a copies x y; b acquire+read y", BY_COPY),
    ("a copies x y; a raises f; c copies x z; b acquire+read z", BY_COPY),
    ("a copies x y; b copies x z; b raises f; c acquire+read y", BY_COPY),
    ("a copies x y; a flags one f; b acquire+read y", None),
    ("a flags one f; a copies x y; b acquire+read y", BY_COPY),
    ("a copies x y; a raises f; b acquire+write x", None),
    ("a raises f; a copies x y; b acquire+write x", COPY_READ),
    ("a copies x y; a raises f; b acquire y; c read y", BY_COPY),
    # A status code of 64 bits is polled while the copy of a rank that gives up writes it.
    ("a copies x y; b poll y", None),
    # Memory is constant for .nc as long as a launch runs.
    ("a copies x y; a constant y", None),
    ("a copies x y; a raises f; b acquire+constant y", "missing is a load without .nc"),
    ("a write x; a constant x", None),
    ("a own x", "missing is a load without .nc"),
    # Reductions of bulk copies have the scope .gpu; kernels of a and b run on two GPUs.
    ("a reduce x; a reduce x", None),
    ("a reduce x; b reduce x", "missing is the scope .sys at both"),
    # Memory that was freed.
    ("host frees x; a read freed", r"use after free: access of 4 bytes, 0 bytes behind the start"),
    ("host frees x; a reduce freed", "use after free: access of 16 bytes, 0 bytes behind"),
]


@pytest.mark.parametrize("steps, error", CASES, ids=[steps for steps, _ in CASES])
def test_what_streams_order(program: Program, steps: str, error: str | None) -> None:
    program.machine.native_peer_atomics(False)
    for name in ("one", "f", "x", "y"):  # so that none of them gets the memory of a freed one
        program.buffer(name)
    program.memory["one"].fill_(1)
    program.run(steps)
    if error is None:
        assert not program.error()
    else:
        assert re.search(error, program.error()), program.error() or "nothing was reported"


def test_reductions_among_gpus_with_nvlink(program: Program) -> None:
    program.machine.native_peer_atomics()
    program.run("a reduce x; b reduce x")
    assert not program.error()
    assert program.memory["x"][:5].tolist() == [2, 2, 2, 2, 0]
