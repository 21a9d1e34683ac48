"""Segments of shared memory, who may map them, and the processes of peers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flux import _C, AGGemm
from flux.machine.host import host_identity, memory_identity
from flux.transport import shm
from flux.transport.placement import Placement
from harness import held, run_ranks, settled


@pytest.fixture
def segment() -> Iterator[shm.Segment]:
    made = shm.create(8192)
    yield made
    os.close(made.descriptor)


def test_segments_are_checked_before_they_are_mapped(segment: shm.Segment) -> None:
    assert os.fstat(segment.descriptor).st_nlink == 0, "it has a name"
    assert shm.attach(segment, 8192).nbytes == 8192
    with pytest.raises(OSError, match="has 8192 bytes of 1048576"):
        shm.attach(segment, 1 << 20)
    other = shm.create(8192).descriptor
    with pytest.raises(OSError, match="is not the file that the rank announced"):
        shm.attach(replace(segment, descriptor=other), 8192)
    os.close(other)
    with pytest.raises(OSError, match=f"No such file or directory: /proc/{os.getpid()}/fd/{other}"):
        shm.attach(replace(segment, descriptor=other), 8192)
    if os.geteuid() == 0:  # others cannot give files away
        os.chown(segment.descriptor, 12345, -1)
        with pytest.raises(OSError, match="belongs to user 12345"):
            shm.attach(segment, 8192)


def test_memory_is_asked_for_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank alike, whichever host has too little."""
    monkeypatch.setattr(shm, "create", lambda nbytes: pytest.fail("allocated"))
    nbytes = _C.pad_bytes(4) + (1 << 20)
    told = {0: (2, 5 << 20), 1: (2, 9 << 20), 2: (2, 2 << 20), 3: (1, None)}  # ranks, available
    for rank, (ranks, available) in told.items():
        monkeypatch.setattr(shm, "available_memory", lambda has=available: has)
        others = {r: (nbytes, *of) for r, of in told.items() if r != rank}

        def gather(own: Any, rank: int = rank, others: Any = others) -> list[Any]:
            return [own if r == rank else others[r] for r in told]

        exchange: Any = SimpleNamespace(rank=rank, all_gather=gather)
        nodes = ("here" if (r - rank) % 4 < ranks else str(r) for r in told)
        with pytest.raises(OSError, match=r"op: rank 2 cannot allocate .* its host need 2.0 MiB, "):
            shm.allocate(exchange, Placement(tuple(nodes)), 4, 1 << 20, "op")
    other: Any = SimpleNamespace(rank=0, all_gather=lambda own: [own, (7, *own[1:])])
    with pytest.raises(ValueError, match="op: ranks disagree; rank 1 has segments of 7 bytes"):
        shm.allocate(other, Placement.together(2), 4, 1 << 20, "op")


def in_child(body: Callable[[], str]) -> str:
    """Return the result of ``body`` from a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, body().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def test_attach_to_an_uninspectable_process_is_denied() -> None:
    """As after prctl(PR_SET_DUMPABLE, 0), or of a program with privileges of its own."""

    def as_nobody() -> str:
        if os.geteuid() == 0:
            os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        segment = shm.create(8192)

        def attach() -> str:
            try:
                shm.attach(segment, 8192)
            except OSError as error:
                return str(error)
            return "mapped"

        return in_child(attach)

    assert re.search(r"Permission denied: /proc/\d+/fd/\d+", in_child(as_nobody))


def test_missing_support_for_unnamed_files_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=r"/dev/shm has no unnamed files \(O_TMPFILE\)"):
        shm.create(8192)


def test_pid_namespaces_of_one_host_share_no_memory() -> None:
    """Such processes do not find each other in /proc, so they use the network."""
    namespaces = (0x20000000, "CLONE_NEWPID"), (0x20020000, "CLONE_NEWPID and CLONE_NEWNS")
    here = memory_identity()
    assert in_child(memory_identity) == here
    for flags, name in namespaces:

        def identities(flags: int = flags) -> str:
            libc = ctypes.CDLL(None)
            if libc.unshare(flags) != 0:
                return "not allowed"

            def inside() -> str:
                if flags & 0x20000:  # with a /proc of its own, as containers have it
                    libc.mount(b"none", b"/", None, 0x44000, None)
                    libc.mount(b"none", b"/proc", b"proc", 0, None)
                return f"{host_identity()} {memory_identity()}"

            return in_child(inside)

        told = in_child(identities)
        if told == "not allowed":
            pytest.skip(f"{name} needs privileges")
        host, memory = told.split(" ", 1)
        assert host == host_identity() and memory.startswith(host) and memory != here


def unreachable(rank: int, world: int) -> str:
    with AGGemm(max_m=8, n=world, k=8):  # what stays for good is started by the first op
        dist.barrier()
    before = held()
    with contextlib.ExitStack() as stack:
        if rank == 1:
            problem = errno.EACCES, "Permission denied: /proc/1/fd/9"
            refused = mock.patch.object(shm, "attach", side_effect=PermissionError(*problem))
            stack.enter_context(refused)
        with pytest.raises(OSError) as raised:
            AGGemm(max_m=8, n=8, k=8)
    text = str(raised.value)
    del stack, raised
    if rank == 1:
        del refused
    gc.collect()
    after = settled(before)
    assert after == before, f"{before} -> {after}"
    return text


def test_memory_that_cannot_be_opened_raises_on_all_ranks() -> None:
    for text in run_ranks(3, unreachable):
        assert re.search(r"AGGemm: rank 1 cannot allocate \d+ .*denied: /proc/1/fd/9", text), text


def test_processes_are_watched_by_descriptor() -> None:
    before = held()
    children = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    processes = _C.Processes([0, children[0].pid, children[1].pid, 2**31 - 1])
    assert held()["descriptors"] == before["descriptors"] + 2
    children[0].send_signal(signal.SIGSTOP)
    children[1].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)
    assert [processes.ended(rank) for rank in range(5)] == [False, False, True, True, False]
    children[0].kill()
    for child in children:
        child.wait()
    assert processes.ended(1)
    processes.close()
    assert not processes.ended(1) and held() == before
