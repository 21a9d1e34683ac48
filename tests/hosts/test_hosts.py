"""Hosts made of network namespaces: links of known speed, that stall, are cut, and go away.

What needs root and iproute2 is skipped, with the reason, where they are missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux import Knobs, PeerTimeoutError
from flux.bench.config import BenchConfig
from flux.core.knobs import Op
from flux.core.problem import Problem as BenchProblem
from flux.launch import hosts as hosts_module
from flux.launch.hosts import (
    Hosts,
    HostsUnavailableError,
    link_bytes,
    parse_hosts,
    parse_rate,
    remove_leftovers,
    set_link,
)
from flux.launch.spawn import run_ranks
from flux.select.choose import Modelled
from flux.transport.link_speed import SIZES
from harness import BUSY, more
from reference import Inputs, Problem
from scripts import Ended, forked, start_forked_command

MakeHosts = Callable[..., Hosts]


def reason_unsupported() -> str:
    """Return the reason why this machine cannot make hosts, or an empty string."""
    try:
        with Hosts(2, "1gbit"):
            return ""
    except HostsUnavailableError as error:
        return str(error)


REASON = reason_unsupported()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)


def namespaces(process: int | str = "*") -> set[str]:
    """Hosts and switches that are there, or those that a process has made."""
    folder = Path("/run/netns")
    return {path.name for path in folder.glob(f"flux-{process}-*")} if folder.exists() else set()


# -- link rates and host counts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 1e9), ("500mbit", 5e8), ("2.5Gbit", 2.5e9), ("8kbit", 8e3)]
)
def test_link_rates_are_parsed(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0mbit", "-1gbit", "1gb", "1 gbit/s"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="link rate must look like"):
        parse_rate(text)


def test_ranks_are_spread_over_hosts() -> None:
    assert parse_hosts("1", 3) == (0, 0, 0)
    assert parse_hosts("2", 4) == (0, 0, 1, 1)
    assert parse_hosts("2", 3) == (0, 0, 1)
    assert parse_hosts("3+1", 4) == (0, 0, 0, 1)
    for text, world in (("0", 2), ("3", 2), ("2+1", 4), ("2+0", 2), ("a", 2), ("", 2)):
        with pytest.raises(ValueError, match="hosts"):
            parse_hosts(text, world)


def test_a_rate_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 hosts"):
        BenchConfig(BenchProblem(Op.ag_gemm, 8, 8, 8, "float32", 2), link_rate="1gbit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "need root"),
        (lambda patch: patch.setattr(hosts_module.shutil, "which", lambda tool: None), "iproute2"),
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "Linux"),
    ],
)
def test_missing_requirements_are_reported(
    change: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(HostsUnavailableError, match=message):
        Hosts(2)


@needs_hosts
def test_failed_creation_leaves_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hosts_module._run

    def without_tbf(*command: str) -> str:
        return run(*(word.replace("tbf", "no-such-qdisc") for word in command))

    monkeypatch.setattr(hosts_module, "_run", without_tbf)
    with pytest.raises(HostsUnavailableError, match=r"`tc .*` failed"), Hosts(2, "1gbit"):
        pass
    assert not namespaces(os.getpid())


# -- hosts that are there --------------------------------------------------------------------------


def measured_speed() -> float:
    """Return the GB/s that the cost model gets, after checks of how it gets there."""
    problem = Problem("gemm_ar", 64, (512,), 64)
    speeds = []
    for _ in range(2):
        before = link_bytes()
        with problem.build(tuning="cache") as op:
            choice = op._choice
            assert isinstance(choice, Modelled)
            speeds.append(choice.cluster.network.gbs)
        sent = link_bytes() - before
    assert sent < SIZES[0]  # the group's first op has measured
    everywhere = [None, None]
    dist.all_gather_object(everywhere, speeds)
    assert len({speed for speeds in everywhere for speed in speeds or ()}) == 1
    return speeds[0]


def throughput(megabytes: int, rank: int, progress: Any) -> tuple[float, int, float]:
    """Seconds that a transfer from rank 0 to rank 1 took, and the bytes that left rank 0's host.

    Then the speed that ops measure, in GB/s.
    """
    data = torch.ones(megabytes << 18)
    before = link_bytes()
    dist.barrier()
    began = time.monotonic()
    dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
    dist.barrier()
    return time.monotonic() - began, link_bytes() - before, measured_speed()


@pytest.mark.alone
def test_a_link_has_its_speed(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, "200mbit")
    took, sent, measured = run_ranks(throughput, 8, 2, places=hosts.placed((0, 1)))
    wire = (8 << 20) * 8 / 200e6
    assert 0.9 * wire < took < 2.0 * wire
    assert 8 << 20 <= sent < 1.05 * (8 << 20)
    assert 0.5 * 0.025 < measured < 1.2 * 0.025
    hosts.close()
    assert not namespaces(os.getpid())


KILLED = """
import time
from flux.launch.hosts import Hosts
with Hosts(2, "1gbit") as hosts:
    print(*hosts.names, flush=True)
    time.sleep(60)
"""


@pytest.mark.alone  # others that make hosts remove these, too
@needs_hosts
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_hosts_of_a_dead_process_are_removed(sign: signal.Signals, tmp_path: Path) -> None:
    """At once when it could still clean up, else by whoever makes hosts next."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = start_forked_command([str(script)], tmp_path)
    printed = tmp_path / "out"
    while not (printed.exists() and printed.read_text().endswith("\n")):
        assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.02)
    names = set(printed.read_text().split())
    assert len(names) == 2 and names <= namespaces()
    os.kill(process.pid, sign)
    process.join(30)
    assert bool(names & namespaces()) == (sign == signal.SIGKILL)
    remove_leftovers()
    assert not names & namespaces()


# -- links that fail -------------------------------------------------------------------------------


def stall_and_return(argument: tuple[str, float, int], rank: int, progress: Any) -> dict[str, Any]:
    """Make calls while rank 0 takes a link down and up again from time to time."""
    switch, pause, every = argument
    problem = Problem("gemm_rs", 512, (512,), 64)
    longest = 0.0
    with problem.build(timeout_s=20.0) as op:
        for call in range(2 * every):
            inputs = Inputs(problem, 512, 2, seed=call)
            dist.barrier()
            if rank == 0 and call % every == 1:
                set_link(switch, 1, up=False)
                threading.Timer(pause, set_link, (switch, 1), {"up": True}).start()
            began = time.monotonic()
            got = inputs.call(op, rank)
            longest = max(longest, time.monotonic() - began)
            inputs.check(got, rank)
    # The rank whose data left before the link went down waits for nothing.
    of_all = torch.tensor([longest])
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return {"calls": 2 * every, "longest": of_all.item()}


@pytest.mark.parametrize(("pause", "every"), [(0.3, 4), *more((2.0, 2))])
def test_calls_complete_when_the_link_returns_in_time(
    pause: float, every: int, make_hosts: MakeHosts
) -> None:
    hosts = make_hosts(2, "1gbit")
    argument = (hosts.switch, pause, every)
    done = run_ranks(stall_and_return, argument, 2, places=hosts.placed((0, 1)))
    assert done["calls"] == 2 * every and done["longest"] > 0.9 * pause, done


def host_disappears(switch: str, rank: int, progress: Any) -> dict[str, Any]:
    problem = Problem("ag_gemm", 30, (30,), 64)
    op = problem.build(timeout_s=1.5)
    inputs = Inputs(problem, 30, 3, seed=1)
    inputs.call_and_check(op, rank)
    dist.barrier()
    if rank == 0:
        set_link(switch, 1, up=False)
    time.sleep(0.3)
    began = time.monotonic()
    try:
        inputs.call(op, rank)
    except PeerTimeoutError as error:
        return {"text": str(error), "took": time.monotonic() - began}
    raise AssertionError("the call did not notice")


def test_a_host_that_disappears_is_noticed_in_time(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, "1gbit")
    told = run_ranks(host_disappears, hosts.switch, 3, places=hosts.placed((0, 0, 1)))
    assert told["took"] < 1.5 + 2.0 * BUSY and told["text"].startswith("AGGemm: rank 0, call 2"), (
        told
    )


def cable_pulled(argument: tuple[str, str, float, int], rank: int, progress: Any) -> None:
    """A link goes down amid large tiles. Errors come in time, and threads end soon afterwards."""
    switch, op_name, delay, host = argument
    timeout_s = 1.0
    problem = Problem(op_name, 1024, (1024,), 64)
    op = problem.build(timeout_s=timeout_s)
    inputs = Inputs(problem, 1024, 2, seed=1).local(rank)
    op(*inputs)
    dist.barrier()
    if rank == 0:
        threading.Timer(delay, set_link, (switch, host), {"up": False}).start()
    last = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=f"rank {1 - rank} did not deliver"):
        while True:
            op(*inputs)
            last = time.monotonic()
    took = time.monotonic() - last
    assert took < timeout_s + 1.0 * BUSY and op.closed, took
    deadline = time.monotonic() + 0.5 * BUSY
    while left := [thread.name for thread in threading.enumerate() if "flux-" in thread.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize(("op", "host"), [("gemm_ar", 0), ("gemm_rs", 1)])
def test_a_link_that_goes_down_amid_tiles_raises_in_time(
    op: str, host: int, make_hosts: MakeHosts
) -> None:
    hosts = make_hosts(2, "500mbit")
    run_ranks(cable_pulled, (hosts.switch, op, 0.15, host), 2, places=hosts.placed((0, 1)))


def all_stopped(argument: None, rank: int, progress: Any) -> list[str]:
    """All ranks are stopped for longer than the timeout, while each sends tiles to the others."""
    problem = Problem("ag_gemm", 12, (3,), 1 << 17)  # rows of 0.5 MiB: 0.7 s on the links
    op = problem.build(tuning=Knobs(comm_tile_rows=1), timeout_s=1.0)
    inputs, pids, texts = Inputs(problem, 12, 3, seed=1), [0] * 3, [""] * 3
    dist.all_gather_object(pids, os.getpid())
    sent = op._backend.network.bytes_sent

    def stop_all() -> None:
        while not any(sent.values()):
            time.sleep(0.01)
        ranks = " ".join(map(str, pids))
        script = f"sleep 0.1; kill -STOP {ranks}; sleep 2.3; kill -CONT {ranks}"
        subprocess.Popen(["sh", "-c", script], start_new_session=True)

    if rank == 0:
        threading.Thread(target=stop_all).start()
    text, began = "", time.monotonic()
    try:
        inputs.call_and_check(op, rank)
        assert time.monotonic() - began > 2.3, "not stopped during the call"
    except PeerTimeoutError as error:
        text = str(error)
    dist.all_gather_object(texts, text)
    return texts


def test_time_in_which_all_hosts_are_stopped_amid_tiles_does_not_count(
    make_hosts: MakeHosts,
) -> None:
    hosts = make_hosts(3, "50mbit")
    assert run_ranks(all_stopped, None, 3, places=hosts.placed((0, 1, 2))) == [""] * 3


# -- the command -----------------------------------------------------------------------------------


def bench(*arguments: str) -> Ended:
    """Run a command; assert that it leaves no hosts."""
    done = forked("-m", "flux", "bench", "op", *arguments, timeout_s=200)
    assert not namespaces(done.pids[0])
    return done


SMALL = ("--m", "256", "--n", "256", "--k", "128", "--repeats", "3", "--warmup", "1")


@needs_hosts
@pytest.mark.parametrize(
    ("op", "hosts", "nproc"),
    [("ag_gemm", "2", "2"), ("gemm_rs", "2+1", "3"), ("gemm_ar", "2", "4")],
)
def test_bench_op_over_hosts(op: str, hosts: str, nproc: str, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    where = ("--nproc", nproc, "--hosts", hosts, "--link-rate", "1gbit")
    done = bench("--op", op, *SMALL, *where, "--json", str(target))
    assert done.returncode == 0, done.stderr
    content = json.loads(target.read_text())
    assert content["hosts"] == 2 and content["link_rate"] == "1gbit"
    assert content["transport"] == ("send_recv" if nproc == "2" else "shm+send_recv")
    least = content["link_bytes_minimum"]
    assert least == 256 * (128 if op == "ag_gemm" else 256) * 4 * (2 if op == "gemm_ar" else 1)
    for name in ("flux", "medium"):
        method = content["methods"][name]
        assert method["overall_ms"] > 0 and method["comm_cpu_ms"] is not None
        assert method["link_bytes"] >= least
    # Headers and acknowledgements come on top of small messages.
    assert content["methods"]["flux"]["link_bytes"] < 1.2 * least + 40_000


def test_bench_op_explains_invalid_host_options() -> None:
    for arguments, message in (
        (("--hosts", "3", "--nproc", "2"), "hosts must be in [1, 2]"),
        (("--hosts", "2", "--link-rate", "quick"), "link rate must look like"),
        (("--link-rate", "1gbit"), "at least 2 hosts"),
    ):
        done = bench(*SMALL, *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def leaves_at_once(argument: None, rank: int, progress: Any) -> None:
    """Rank 0 has nothing to wait for: it closes while what it sent is still on its way."""
    problem = Problem("ag_gemm", 1, (2,), 1 << 20)  # one row of 4 MiB, rank 0's
    op = problem.build(timeout_s=20.0)
    inputs = Inputs(problem, 1, 2, seed=3)
    got = inputs.call(op, rank)
    op.close()
    inputs.check(got, rank)


def test_close_delivers_data_in_flight(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, "50mbit")
    run_ranks(leaves_at_once, None, 2, places=hosts.placed((0, 1)))
