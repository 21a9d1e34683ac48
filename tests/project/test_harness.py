"""The tests' own tools: failures are reported, hangs end, the reference detects small errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from emulated_nvshmem import PREFIX, remove_leftovers
from harness import RanksFailed, fresh_ranks, run_ranks
from reference import DTYPES, Inputs, Problem
from scripts import ROOT, start_interruptible


def add_up(rank: int, world: int, start: int) -> tuple[int, int, int]:
    total = torch.tensor(rank + start)
    dist.all_reduce(total)
    return rank, int(total), os.getpid()


def test_rank_processes_are_reused_by_the_next_test() -> None:
    first = run_ranks(3, add_up, 10)
    assert [r[:2] for r in first] == [(0, 33), (1, 33), (2, 33)]
    assert [r[2] for r in run_ranks(3, add_up, 0)] == [r[2] for r in first]


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()  # fails or hangs because of rank 1


def test_first_failure_is_reported_and_ranks_are_replaced() -> None:
    before = [psutil.Process(r[2]) for r in run_ranks(2, add_up, 0)]
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2: .*in one_raises.*the cause"):
        run_ranks(2, one_raises)
    after = [r[2] for r in run_ranks(2, add_up, 0)]
    assert not {process.pid for process in before} & set(after)
    assert not any(process.is_running() for process in before)


def one_hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(60)


def test_hanging_rank_is_killed_and_reported() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)ranks \[0\] hang after 0.5 s.*in one_hangs"):
        run_ranks(2, one_hangs, timeout=0.5)


def one_dies(rank: int, world: int, by: signal.Signals) -> None:
    if rank == 1:
        os.kill(os.getpid(), by)
    dist.barrier()


def test_death_of_a_rank_is_reported_as_the_first_cause() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2: killed by SIGKILL"):
        run_ranks(2, one_dies, signal.SIGKILL)


def test_a_crash_is_reported_with_the_stacks_of_the_rank() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2: killed by SIGSEGV.*in one_dies"):
        run_ranks(2, one_dies, signal.SIGSEGV)


def test_fresh_ranks_end_with_their_block() -> None:
    with fresh_ranks(2) as ranks:
        pids = [r[2] for r in ranks.run(add_up, 0, timeout=10)]
        assert pids == ranks.pids
        processes = [psutil.Process(pid) for pid in pids]
    assert not any(process.is_running() for process in processes)


KILLED = """
import os, signal, harness
harness.PRELOAD[:] = ["torch"]  # the rest takes seconds to import
ranks = harness.Ranks(2)
print(*ranks.pids, flush=True)
os.kill(ranks.pids[0], signal.SIGSTOP)  # as ranks are between tests
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_pytest_however_it_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,  # it imports torch twice, beside other tests
        cwd=ROOT / "tests" / "support",
        env={**os.environ, "TMPDIR": str(tmp_path)},  # what it leaves there goes with the test
    )
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 2 and done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_the_reference_notices_small_errors(op: str, dtype: torch.dtype) -> None:
    """A plain matmul passes; without one of the products, a row or the bias it does not."""
    problem = Problem(op, 20, (30,), 100, dtype=dtype)
    inputs = Inputs(problem, 20, 1, seed=1)
    x, w, b = inputs.local(0)
    good = torch.addmm(b, x, w.t())
    inputs.check([good], 0)
    missing = torch.addmm(b, x[:, 1:], w[:, 1:].t())
    wrong = {
        "one product is missing": missing,
        "one row is another": torch.cat([good[1:2], good[1:]]),
        "no bias": x @ w.t(),
        "NaN": torch.where(torch.arange(30) == 29, float("nan"), good).to(dtype),
    }
    for what, result in wrong.items():
        with pytest.raises(AssertionError, match="elements are wrong"):
            inputs.check([result], 0)
            raise RuntimeError(f"accepted: {what}")
    with pytest.raises(AssertionError, match="expected"):
        inputs.check([good[1:]], 0)
    with pytest.raises(AssertionError, match="expected"):
        inputs.check([good.to(torch.complex64)], 0)


def test_commands_can_be_interrupted_where_pytest_ignores_it() -> None:
    """Background jobs of a shell script inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asks = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
        process = start_interruptible([sys.executable, "-c", asks], stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.communicate(timeout=60)[0] == "default_int_handler\n"


def test_shared_memory_of_dead_nvshmem_jobs_is_removed() -> None:
    process = subprocess.Popen(["true"])
    process.wait(30)
    names = [Path(f"/dev/shm/{PREFIX}{pid}_1_0") for pid in (process.pid, os.getpid())]
    try:
        for name in names:
            name.touch()
        remove_leftovers()
        assert [name.exists() for name in names] == [False, True]
    finally:
        for name in names:
            name.unlink(missing_ok=True)
