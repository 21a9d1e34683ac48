"""Ranks that die, stall or leave, and memory that runs out.

Survivors raise PeerTimeoutError in time, say what they waited for, hold nothing afterwards, and go
on as a new group. Each test has rank processes of its own; groups that sit out a timeout do so
together.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
import flux.transport.shm
from flux import AGGemm, GemmRS, Knobs, PeerDiedError, PeerTimeoutError
from flux.backends.unfused import UnfusedBackend
from flux.core.knobs import Op
from flux.core.spec import OpSpec
from harness import (
    BUSY,
    fresh_ranks,
    held,
    join_group,
    more,
    nothing_left_in_shared_memory,
    run_ranks,
    shared_mappings,
)
from reference import OPS, Inputs, Problem

TIMEOUT_S = 1.5  # longer than a slice of the worker, which is 1 s (csrc/cpu/engine.cpp)
SLACK_S = 2.0 * BUSY
PATIENT_S = 60.0  # where a timeout must not be what ends a wait

PROBLEMS = {
    "ag_gemm": Problem("ag_gemm", 24, (12,), 12),
    "gemm_rs": Problem("gemm_rs", 24, (12,), 12),
    "gemm_ar": Problem("gemm_ar", 24, (12,), 12),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check_call(op: Any, problem: Problem, rank: int, world: int, seed: int) -> None:
    Inputs(problem, 24, world, seed, bias=False).call_and_check(op, rank)


def failing_call(call: Callable[[], Any]) -> dict[str, Any]:
    """Repeat a call until it raises PeerTimeoutError: what it said, and how long that call took."""
    for _ in range(4):
        began = time.monotonic()
        try:
            call()
        except PeerTimeoutError as error:
            died = isinstance(error, PeerDiedError)
            return {"text": str(error), "took": time.monotonic() - began, "died": died}
    raise AssertionError("no call failed")


def go_on(survivors: list[int], rank: int) -> None:
    """Form a new group of the survivors, in the same processes."""
    dist.destroy_process_group()
    join_group("survivors", survivors.index(rank), len(survivors))
    for problem in PROBLEMS.values():
        with problem.build() as op:
            for seed in range(3):
                check_call(op, problem, op.rank, op.world, seed)


# -- killed ----------------------------------------------------------------------------------------


def victim_hook(when: str, op: Any) -> None:
    """Arrange for this rank to be killed at some point of its next call."""
    if when == "before":
        die()
    elif when == "gemm":
        multiply, calls = torch.mm, []

        def mm(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                die()
            return multiply(*args, **options)

        torch.mm = mm
    else:  # while tiles are on their way: the whole call takes seconds now
        op._backend.engine.set_delay(0.4, 5)
        threading.Timer(0.3, die).start()


def killed(rank: int, world: int, op_name: str, knobs: Knobs, when: str) -> dict[str, Any]:
    problem, victim = PROBLEMS[op_name], world - 1
    problem.build().close()  # what is kept for a group comes with its first op
    before = held()
    op = problem.build(tuning=knobs, timeout_s=PATIENT_S)
    check_call(op, problem, rank, world, seed=0)
    if rank == victim:
        victim_hook(when, op)
    told = failing_call(lambda: check_call(op, problem, rank, world, seed=1))
    with pytest.raises(RuntimeError, match="is closed: an earlier call failed"):
        check_call(op, problem, rank, world, seed=2)
    gc.collect()  # the exceptions' tracebacks hold views of the memory
    assert op.closed and shared_mappings() == 0, f"{shared_mappings()} segments are still mapped"
    assert held()["threads"] <= before["threads"]
    assert held()["descriptors"] <= before["descriptors"], "descriptors of processes are left"
    go_on([r for r in range(world) if r != victim], rank)
    return told


KNOBS = {
    2: Knobs(comm_tile_rows=2, tile=(6, 4), copy_streams=1),
    3: Knobs(comm_tile_rows=2, tile=(4, 12), copy_streams=0, direction="pull", store="direct"),
    4: Knobs(comm_tile_rows=2, tile=(5, 4), copy_streams=1, order="ring1d", direction="push"),
}


@pytest.mark.parametrize(
    ("world", "when"),
    [
        *((2, "before"), (3, "gemm"), (4, "copying")),
        *more(*((2, when) for when in ("gemm", "copying")), (3, "copying"), (4, "gemm")),
    ],
)
def test_killed_rank_raises_on_survivors(world: int, when: str) -> None:
    with nothing_left_in_shared_memory(), contextlib.ExitStack() as stack:
        groups = {op: stack.enter_context(fresh_ranks(world)) for op in OPS}
        for op, ranks in groups.items():
            ranks.start(killed, op, KNOBS[world], when)
        for op, ranks in groups.items():
            outcomes = ranks.collect(30)
            victim = outcomes[world - 1]
            assert victim is not None and victim.signal == signal.SIGKILL, victim
            reports = [o.value if o and o.ok else o for o in outcomes[:-1]]
            label, dead = OPS[op].__name__, f"rank {world - 1}"
            for rank, report in enumerate(reports):
                assert isinstance(report, dict), report
                text = report["text"]
                assert re.match(
                    rf"{label}: rank {rank}, call \d+, "
                    r"waiting for (the call to begin|tile \d+ of chunk \d+): rank \d ",
                    text,
                ), text
                ended = rf"(on {dead}, which|: {dead}) died \(process {ranks.pids[-1]} ended\)$"
                assert report["died"] and re.search(ended, text), text
                assert report["took"] < SLACK_S, report


def killed_in_a_collective(rank: int, world: int, op_name: str) -> dict[str, Any]:
    problem = PROBLEMS[op_name]
    op = problem.build(tuning=Knobs(path="unfused"), timeout_s=PATIENT_S)
    check_call(op, problem, rank, world, seed=0)
    if rank == 0:
        torch.mm = lambda *args, **options: die()
    told = failing_call(lambda: check_call(op, problem, rank, world, seed=1))
    gc.collect()
    assert op.closed and shared_mappings() == 0
    go_on([r for r in range(world) if r != 0], rank)
    return told


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_rank_killed_on_the_library_path_raises_on_survivors(op: str) -> None:
    """Of 4 ranks in a ring one has no connection to the dead one that it would miss."""
    with nothing_left_in_shared_memory(), fresh_ranks(4) as ranks:
        ranks.start(killed_in_a_collective, op)
        for rank, outcome in enumerate(ranks.collect(20)[1:], 1):
            assert outcome is not None and outcome.ok, outcome
            told = outcome.value
            assert told["text"].startswith(f"{OPS[op].__name__}: rank {rank}, in a coll"), told
            assert told["died"] and f"rank 0 died (process {ranks.pids[0]} ended)" in told["text"]
            assert told["took"] < SLACK_S, told


def killed_while_building(rank: int, world: int, at: str) -> Any:
    if rank == world - 1:
        create = flux.transport.shm.create

        def fatal(*args: Any) -> None:
            if at == "create":
                create(*args)
            die()

        setattr(flux.transport.shm, at, fatal)
    began = time.monotonic()
    text = failing_call(lambda: AGGemm(max_m=100, n=100, k=100))["text"]
    assert time.monotonic() - began < 5 * BUSY
    gc.collect()
    assert shared_mappings() == 0
    go_on(list(range(world - 1)), rank)
    return text


@pytest.mark.parametrize("at", ["create", "attach"])
def test_rank_killed_during_construction_raises_on_survivors(at: str) -> None:
    """Before the others know of its segment, and after."""
    with nothing_left_in_shared_memory(), fresh_ranks(3) as ranks:
        ranks.start(killed_while_building, at)
        *outcomes, victim = ranks.collect(30)
        assert victim is not None and victim.signal == signal.SIGKILL
        for outcome in outcomes:
            assert outcome is not None and outcome.ok, outcome
            assert re.match(r"AGGemm: rank [01] lost a peer", outcome.value), outcome.value


def building(rank: int, world: int, folder: str, where: str) -> None:
    os.setpgrp()  # with whatever this process starts, such as a tracker of shared memory
    if where == "mapping":

        def there(*args: Any) -> None:
            (Path(folder) / str(rank)).touch()
            signal.pause()

        flux._C.SharedMapping = there  # type: ignore[assignment, misc]
    while True:
        AGGemm(max_m=100, n=100, k=100).close()
        (Path(folder) / str(rank)).touch()


@pytest.mark.parametrize("where", ["mapping", 0, *more(1, 2, 3)])
def test_group_killed_during_construction_leaves_no_shared_memory(
    where: str | int, tmp_path: Path
) -> None:
    """When all segments are made and none is mapped, and at random moments. Nobody is left to
    clear up."""
    with nothing_left_in_shared_memory(), fresh_ranks(2) as ranks:
        ranks.start(building, str(tmp_path), where)
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline, "the ranks do not build"
            time.sleep(0.001)
        if where != "mapping":
            time.sleep(random.Random(where).uniform(0.0, 0.01))
        for pid in ranks.pids:
            os.killpg(pid, signal.SIGKILL)
        for outcome in ranks.collect(10):
            assert outcome is not None and outcome.signal == signal.SIGKILL, outcome


# -- stalled ---------------------------------------------------------------------------------------


def wait_until_stopped(pid: int) -> None:
    for _ in range(1000):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return
        time.sleep(0.01)
    raise AssertionError("the rank did not stop")


def stalled(rank: int, world: int, op_name: str, timeout_s: float, where: str) -> dict[str, Any]:
    problem = PROBLEMS[op_name]
    op = problem.build(tuning=Knobs(comm_tile_rows=2, copy_streams=1), timeout_s=timeout_s)
    check_call(op, problem, rank, world, seed=0)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        if where == "before":
            stop()
        else:
            op._backend.engine.set_delay(0.1, 1)
            threading.Timer(0.1, stop).start()
    began = time.monotonic()
    told = {"text": ""}
    try:
        check_call(op, problem, rank, world, seed=1)
        check_call(op, problem, rank, world, seed=2)
    except PeerTimeoutError as error:
        told = {"text": str(error)}
        gc.collect()
        assert op.closed and shared_mappings() == 0
    told["took"] = time.monotonic() - began
    op.close()
    return told


@pytest.mark.alone
@pytest.mark.parametrize("where", ["inside", *more("before")])
def test_stalled_rank_raises_on_all_ranks(where: str) -> None:
    """The other ranks time out. The stalled rank raises as soon as it continues."""
    with contextlib.ExitStack() as stack:
        groups = {op: stack.enter_context(fresh_ranks(3)) for op in OPS}
        for op, ranks in groups.items():
            ranks.start(stalled, op, TIMEOUT_S, where)
        for ranks in groups.values():
            wait_until_stopped(ranks.pids[1])
        for op, ranks in groups.items():
            ranks.collect(0.1)
            deadline = time.monotonic() + 15
            while sum(o is not None for o in ranks.collect(0.05)) < 2:
                assert time.monotonic() < deadline, f"{op}: the survivors wait for ever"
            for rank in (0, 2):
                outcome = ranks.collect(0)[rank]
                assert outcome is not None and outcome.ok, outcome
                assert f"{OPS[op].__name__}: rank {rank}, call" in outcome.value["text"]
                assert "died" not in outcome.value["text"]
                assert outcome.value["took"] < 2 * TIMEOUT_S + SLACK_S
        for ranks in groups.values():
            os.kill(ranks.pids[1], signal.SIGCONT)
            late = ranks.collect(10)[1]
            assert late is not None and late.ok, late
            assert re.search(r"rank [02] (gave up|did not deliver)", late.value["text"]), late


@pytest.mark.parametrize("where", ["before", *more("inside")])
def test_stall_shorter_than_the_timeout_is_survived(where: str) -> None:
    """A stall shorter than the timeout only delays the other ranks."""
    with contextlib.ExitStack() as stack:
        groups = {op: stack.enter_context(fresh_ranks(3)) for op in OPS}
        for op, ranks in groups.items():
            ranks.start(stalled, op, 20.0, where)
        for ranks in groups.values():
            wait_until_stopped(ranks.pids[1])
        time.sleep(0.5)
        for ranks in groups.values():
            assert not any(ranks.collect(0)), "did not wait for the stalled rank"
            os.kill(ranks.pids[1], signal.SIGCONT)
        for ranks in groups.values():
            for outcome in ranks.collect(30):
                assert outcome is not None and outcome.ok, outcome
                assert outcome.value["text"] == ""


def waiting(rank: int, world: int, knobs: Knobs, transport: str | None, ready: str) -> str:
    """Wait in a call for the last rank, until all are stopped."""
    problem = PROBLEMS["gemm_rs"]
    with problem.build(tuning=knobs, timeout_s=1.0, transport=transport) as op:
        check_call(op, problem, rank, world, seed=0)
        dist.barrier()
        Path(f"{ready}-{rank}").touch()
        if rank == 0:
            time.sleep(0.5)
        try:
            check_call(op, problem, rank, world, seed=1)
        except PeerTimeoutError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("stopped", ["all", "rank 0"])
def test_time_in_which_all_ranks_are_stopped_does_not_count(stopped: str, tmp_path: Path) -> None:
    """As by docker pause. A single rank that is stopped as long is late, and named."""
    cases = [(Knobs(copy_streams=1), None), (Knobs(), "send_recv"), (Knobs(path="unfused"), None)]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(fresh_ranks(2)) for _ in cases]
        for number, (ranks, case) in enumerate(zip(groups, cases, strict=True)):
            ranks.start(waiting, *case, str(tmp_path / str(number)))
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 * len(cases):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids = [pid for ranks in groups for pid in ranks.pids[: 2 if stopped == "all" else 1]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for ranks in groups:
            outcomes = ranks.collect(20)
            if stopped == "all":
                assert all(o is not None and o.ok and o.value == "" for o in outcomes), outcomes
            else:
                assert outcomes[1] is not None and "rank 0" in outcomes[1].value, outcomes


def left_behind_in_a_ring(rank: int, world: int) -> None:
    problem, knobs = PROBLEMS["ag_gemm"], Knobs(order="ring1d", direction="push", copy_streams=1)
    for seed in range(3):
        with problem.build(tuning=knobs) as op:
            if rank == 1:
                op._backend.engine.set_delay(0.1, seed)
            check_call(op, problem, rank, world, seed)


def test_an_owner_in_a_ring_may_leave_when_its_rows_are_passed_on() -> None:
    """Rank 2 waits for rows of rank 0, which rank 1 hands over; rank 0 is through before that."""
    run_ranks(3, left_behind_in_a_ring)


def slow_but_steady(rank: int, world: int, op_name: str) -> float:
    problem, timeout_s = PROBLEMS[op_name], 0.6
    knobs = Knobs(tile=(1, 12), comm_tile_rows=1, copy_streams=1)
    with problem.build(tuning=knobs, timeout_s=timeout_s) as op:
        if rank == 1:
            op._backend.engine.set_delay(0.16, 1)
        began = time.monotonic()
        check_call(op, problem, rank, world, seed=1)
        return (time.monotonic() - began) / timeout_s


def test_a_slow_peer_that_makes_progress_is_waited_for() -> None:
    """The timeout limits the wait of one GEMM tile, not the whole call."""
    with contextlib.ExitStack() as stack:
        groups = {op: stack.enter_context(fresh_ranks(2)) for op in ("ag_gemm", "gemm_rs")}
        for op, ranks in groups.items():
            ranks.start(slow_but_steady, op)
        for ranks in groups.values():
            for outcome in ranks.collect(30):
                assert outcome is not None and outcome.ok, outcome
                assert outcome.value > 1.5, "too quick to mean anything"


# -- interrupted, and leaving ----------------------------------------------------------------------


def interrupted(rank: int, world: int, op_name: str) -> float:
    problem = PROBLEMS[op_name]
    op = problem.build(tuning=Knobs(copy_streams=1), timeout_s=30)
    check_call(op, problem, rank, world, seed=0)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        began = time.monotonic()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            check_call(op, problem, rank, world, seed=1)
        took = time.monotonic() - began - 0.3
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        assert op.closed and shared_mappings() == 0
        dist.barrier()
    else:
        dist.barrier()  # rank 0 waits for us in its call meanwhile
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="gave up"):
            check_call(op, problem, rank, world, seed=1)
        took = time.monotonic() - began
    return took


def test_ctrl_c_interrupts_a_wait() -> None:
    with nothing_left_in_shared_memory(), contextlib.ExitStack() as stack:
        groups = [stack.enter_context(fresh_ranks(3)) for _ in OPS]
        for op, ranks in zip(OPS, groups, strict=True):
            ranks.start(interrupted, op)
        for ranks in groups:
            for outcome in ranks.collect(20):
                assert outcome is not None and outcome.ok, outcome
                assert outcome.value < SLACK_S, "noticed too late"


def leaving(rank: int, world: int, op_name: str, how: str) -> str:
    problem = PROBLEMS[op_name]
    op = problem.build(timeout_s=30)
    check_call(op, problem, rank, world, seed=0)
    if rank == 1:
        time.sleep(0.2)
        if how == "close":
            op.close()
        else:
            del op
        return ""
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        check_call(op, problem, rank, world, seed=1)
    assert time.monotonic() - began < SLACK_S, "noticed too late"
    return str(caught.value)


@pytest.mark.parametrize("how", ["close", "del"])
def test_close_by_a_peer_raises_in_waiting_ranks(how: str) -> None:
    with fresh_ranks(2) as ranks:
        for op in OPS:
            text, _ = ranks.run(leaving, op, how, timeout=20)
            assert "waiting for the call to begin: rank 1 has closed the op" in text, text


def failing_inside(rank: int, world: int) -> str:
    """Raise an unexpected error in one rank's call; its peers raise before the timeout."""
    problem = PROBLEMS["gemm_rs"]
    op = problem.build(timeout_s=30)
    check_call(op, problem, rank, world, seed=0)
    began = time.monotonic()
    if rank == 1:
        multiply = torch.mm

        def broken(*args: Any, **options: Any) -> None:
            raise MemoryError("no memory for this tile")

        torch.mm = broken
        with pytest.raises(MemoryError):
            check_call(op, problem, rank, world, seed=1)
        torch.mm = multiply
        text = ""
    else:
        with pytest.raises(PeerTimeoutError) as caught:
            check_call(op, problem, rank, world, seed=1)
        text = str(caught.value)
    assert time.monotonic() - began < SLACK_S, "noticed too late"
    with pytest.raises(RuntimeError, match="is closed"):
        check_call(op, problem, rank, world, seed=1)
    return text


def test_error_inside_a_call_raises_on_peers_before_the_timeout() -> None:
    assert "rank 1 gave up" in run_ranks(2, failing_inside, timeout=20, fresh=True)[0]


# -- out of memory ---------------------------------------------------------------------------------


def far_too_large(rank: int, world: int) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(OSError) as caught:
        AGGemm(max_m=2**20, n=8, k=2**18)
    took = time.monotonic() - began
    gc.collect()
    assert shared_mappings() == 0
    with AGGemm(max_m=8, n=world, k=8) as op:  # the group is as good as before
        op(torch.zeros(1, 8), torch.zeros(1, 8))
    return str(caught.value), took


def test_too_much_shared_memory_raises_on_all_ranks() -> None:
    with nothing_left_in_shared_memory(), fresh_ranks(3) as ranks:
        for text, took in ranks.run(far_too_large, timeout=30):
            assert re.search(r"AGGemm: rank 0 cannot allocate 10995\d+ bytes \(1024.0 GiB\)", text)
            assert "3 ranks of its host need 3072.0 GiB" in text
            assert took < 5 * BUSY


class Awaited:
    """Work of a collective that notes which threads wait for it, and for how long."""

    def __init__(self) -> None:
        self.waits: list[tuple[threading.Thread, object]] = []

    def wait(self, *timeout: object) -> None:
        self.waits.append((threading.current_thread(), *timeout))  # type: ignore[arg-type]


class GroupOf:
    """A group whose collectives on GPUs are of a library."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._device_types = [torch.device("cuda" if library else "cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._library)


@pytest.mark.parametrize("library", ["nccl", "gloo", ""])
def test_the_calling_thread_waits_for_collectives_of_gpus(library: str) -> None:
    """Such a wait is of the thread's current stream; GPU backends watch no peers by it. NCCL's has
    no timeout: it would hold the host until the collective has ended."""
    spec = OpSpec(Op.gemm_ar, 8, (8,), 8, torch.float32, False, "sum")
    exchange: Any = SimpleNamespace(group=GroupOf(library))
    backend, work = UnfusedBackend(spec, exchange, 0, 2, 1.0), Awaited()
    backend._wait(work)  # type: ignore[arg-type]
    limits = () if library == "nccl" else (timedelta(seconds=1),)
    assert work.waits == [(threading.current_thread(), *limits)]
    assert backend.waits_on_streams() == (library == "nccl")


CLONE_FS, CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x200, 0x20000, 0x4000, 0x40000


def with_small_shared_memory(rank: int, world: int, size: int) -> list[str] | None:
    """All ranks in one mount namespace, whose /dev/shm holds ``size`` bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    ok = libc.unshare(CLONE_FS | (CLONE_NEWNS if rank == 0 else 0)) == 0
    if rank == 0:
        ok = ok and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        ok = ok and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=%d" % size) == 0
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (ok, os.getpid()))
    if rank != 0 and ok and told[0][0]:
        with open(f"/proc/{told[0][1]}/ns/mnt") as namespace:
            ok = libc.setns(namespace.fileno(), CLONE_NEWNS) == 0
    dist.all_gather_object(told, ok)
    if not all(told):
        return None
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == size
    texts = []
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            GemmRS(max_m=1000, n=400, k=4)  # 0.8 MB per rank, of which one fits
        texts.append(str(caught.value))
        gc.collect()
        dist.barrier()
        assert shared_mappings() == 0 and os.listdir("/dev/shm") == []
        assert os.statvfs("/dev/shm").f_bfree * os.statvfs("/dev/shm").f_frsize == size
        dist.barrier()
    with GemmRS(max_m=200, n=400, k=2) as op:
        op(torch.zeros(200, 1), torch.zeros(400, 1))
    return texts


def test_full_shared_memory_raises_on_all_ranks() -> None:
    results = run_ranks(2, with_small_shared_memory, 1 << 20, timeout=30, fresh=True)
    if None in results:
        pytest.skip("mounting a small /dev/shm needs privileges")
    for texts in results:
        for text in texts:
            assert re.search(r"GemmRS: rank [01] cannot allocate 8\d{5} bytes \(0.8 MiB\)", text), (
                text
            )
            assert "No space left on device" in text
