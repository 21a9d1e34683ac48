"""`flux bench op` end to end: real ranks, tiny shapes; and what it does with wrong or dead ones."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import bench_methods
from flux.bench import launch
from flux.bench.config import BenchConfig
from flux.bench.timing import StartLine
from flux.cli.app import app
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.launch import spawn
from harness import more, nothing_left_in_shared_memory, run_ranks, stress_only
from scripts import (
    forked,
    processes_of_session,
    start_forked_command,
    start_interruptible,
    under_torchrun,
)

SHAPE = ["--m", "13", "--n", "10", "--k", "9"]
SHORT = ["--repeats", "3", "--warmup", "1"]
KEYS = [
    "op",
    "m",
    "n",
    "k",
    "dtype",
    "world",
    "hosts",
    "backend",
    "transport",
    "device",
    "versions",
    "methods",
]
FIGURES = ["overall_ms", "gemm_non_split_ms", "comm_ms", "ect_ms"]
RATIOS = ["overlap_efficiency", "bounded_efficiency", "speedup_vs_unfused"]
METHOD_KEYS = [
    *FIGURES,
    *RATIOS,
    "overlap_efficiency_interval",
    "max_abs_err",
    "repeats_ms",
    "knobs",
]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "op", *arguments])


def rank_processes() -> set[int | None]:
    """Return this process's ranks, idle ones of other tests too, but none of other workers."""
    return {process.pid for process in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    run_ranks(2, _nothing)  # its ranks stay
    before = rank_processes()
    with nothing_left_in_shared_memory():
        yield
    deadline = time.monotonic() + 5
    while (left := rank_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _nothing(rank: int, world: int) -> None:
    pass


def check_document(document: dict[str, Any], op: str, world: int = 2) -> None:
    assert list(document)[: len(KEYS)] == KEYS
    assert document["op"] == op
    assert document["world"] == world
    assert document["hosts"] == 1
    for key in ("m", "n", "k", "world", "hosts"):
        assert type(document[key]) is int
    for key in ("dtype", "backend", "transport", "device"):
        assert isinstance(document[key], str) and document[key]
    assert set(document["versions"]) >= {"flux", "torch", "python"}
    assert list(document["methods"]) == ["unfused", "medium", "flux"]
    for method in document["methods"].values():
        assert list(method) == [*METHOD_KEYS, "comm_cpu_ms", "link_bytes"]
        assert type(method["comm_cpu_ms"]) is float
        assert method["link_bytes"] is None, "one host has no link"
        assert all(type(method[key]) is float for key in FIGURES)
        assert all(type(method[key]) in (float, type(None)) for key in RATIOS)
        assert len(method["repeats_ms"]) == document["repeats"]
        assert min(method["repeats_ms"]) <= method["overall_ms"] <= max(method["repeats_ms"])
        assert min(method["repeats_ms"]) > 0
        assert method["ect_ms"] == pytest.approx(
            method["overall_ms"] - method["gemm_non_split_ms"], abs=2e-4
        )
        assert 0 <= method["max_abs_err"] < 1e-3
        assert isinstance(method["knobs"], dict) and method["knobs"]["path"]
    unfused = document["methods"]["unfused"]
    assert unfused["speedup_vs_unfused"] == 1
    assert document["methods"]["medium"]["knobs"]["path"] == "medium"


@pytest.mark.parametrize("op", ["gemm_rs", *more("ag_gemm", "gemm_ar")])
def test_table_and_json_agree(op: str, tmp_path: Path) -> None:
    target = tmp_path / "new folder" / "out.json"
    result = invoke("--op", op, *SHAPE, *SHORT, "--nproc", "2", "--json", str(target))
    assert result.exit_code == 0, result.output
    document = json.loads(target.read_text())
    check_document(document, op)
    assert document["methods"]["flux"]["knobs"]["path"] == "fused"
    assert f"{op} 13 x 10 x 9" in result.stdout
    assert "2 ranks x 1 thread" in result.stdout
    for word in ("method", "overall", "GEMM", "comm", "ECT", "overlap", "bounded", "error"):
        assert word in result.stdout
    for name, method in document["methods"].items():
        row = next(line for line in result.stdout.splitlines() if line.split()[:1] == [name])
        assert float(row.split()[1]) == pytest.approx(method["overall_ms"], abs=2e-3, rel=1e-3)
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "wrote" not in line)


@pytest.mark.parametrize("world", [1, 3])
def test_json_is_complete_for_one_rank_and_three(world: int, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = invoke(*SHAPE, *SHORT, "--nproc", str(world), "--json", str(target), "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    check_document(json.loads(target.read_text()), "ag_gemm", world)


def test_knobs_reach_the_op(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    knobs = ["--direction", "pull", "--comm-tile-rows", "3", "--tile", "4x8", "--order", "ring1d"]
    knobs += ["--swizzle", "none", "--store", "staged"]
    result = invoke(*SHAPE, *SHORT, *knobs, "--dtype", "bf16", "--json", str(target))
    assert result.exit_code == 0, result.output
    document = json.loads(target.read_text())
    used = document["methods"]["flux"]["knobs"]
    assert document["dtype"] == "bfloat16"
    assert (used["direction"], used["order"], used["swizzle"]) == ("pull", "ring1d", "none")
    assert (used["comm_tile_rows"], used["store"]) == (3, "staged")
    assert document["methods"]["medium"]["knobs"]["path"] == "medium"


def test_json_on_stdout_has_no_other_output_beside_it() -> None:
    done = forked("-m", "flux", "bench", "op", *SHAPE, *SHORT, "--json", "-", timeout_s=200)
    assert done.returncode == 0, done.stderr
    check_document(json.loads(done.stdout), "ag_gemm")


def test_joins_torchrun(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = ["-m", "flux", "bench", "op", "--op", "gemm_rs", *SHAPE, *SHORT]
    printed = under_torchrun(*command, "--json", str(target), timeout_s=100)
    check_document(json.loads(target.read_text()), "gemm_rs")
    assert printed.count("gemm_rs 13 x 10 x 9") == 1  # one of the ranks speaks


def test_nproc_that_differs_from_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = invoke("--nproc", "3")
    assert result.exit_code == 2
    assert "--nproc 3" in result.stderr and "2 ranks" in result.stderr


# -- wrong results ---------------------------------------------------------------------------------


def bench_with(fault: Any, monkeypatch: pytest.MonkeyPatch, target: Path) -> Any:
    factory = functools.partial(bench_methods.beside_unfused, fault=fault)
    monkeypatch.setattr(launch, "measured", functools.partial(launch.measured, factory=factory))
    return invoke(*SHAPE, *SHORT, "--json", str(target))


@pytest.mark.parametrize(
    "fault, complaint",
    [
        (bench_methods.off_by_a_little, "flux: rank 1, checked before timing: 1 of 65 elements"),
        (bench_methods.unwritten, "flux: rank 0, checked before timing: 5 of 65 elements"),
        (bench_methods.wrong_shape, "returned [12, 5] torch.float32, expected [13, 5]"),
        (bench_methods.stale_later, "flux: rank 0, checked after timing:"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_result_hides_the_speed(
    fault: Any, complaint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    result = bench_with(fault, monkeypatch, target)
    assert result.exit_code == 1
    assert complaint in result.stderr
    row = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["flux"])
    assert row.split()[1:8] == ["WRONG", *["-"] * 6]
    methods = json.loads(target.read_text())["methods"]
    assert all(methods["flux"][key] is None for key in [*FIGURES, *RATIOS])
    assert methods["flux"]["repeats_ms"] == []
    assert any(complaint in text for text in methods["flux"]["wrong"])
    assert methods["unfused"]["overall_ms"] > 0
    if fault is bench_methods.off_by_a_little:
        assert "element [3, 2]" in result.stderr
        assert methods["flux"]["max_abs_err"] == pytest.approx(0.01, rel=0.01)


# -- ranks that fail -------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin = time.monotonic()
    result = bench_with(bench_methods.killed, monkeypatch, tmp_path / "out.json")
    assert result.exit_code == 1
    assert "error: rank 1: killed by SIGKILL" in result.stderr
    assert time.monotonic() - begin < 30  # and not after the 60 s that a peer is waited for
    assert not (tmp_path / "out.json").exists()


def test_a_ranks_error_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin = time.monotonic()
    result = bench_with(bench_methods.raising, monkeypatch, tmp_path / "out.json")
    assert result.exit_code == 1
    assert "error: rank 1: RuntimeError: the injected fault" in result.stderr
    assert "in raising" in result.stderr  # the traceback of the rank
    assert time.monotonic() - begin < 30


def test_a_stuck_rank_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "STALL_S", 1.0)
    config = BenchConfig(Problem(Op.ag_gemm, 13, 10, 9, "float32", 2), timeout_s=2.0)
    with pytest.raises(spawn.RankFailedError, match=r"ranks \[0, 1\] reported nothing for 5 s"):
        stuck = functools.partial(bench_methods.beside_unfused, fault=bench_methods.stuck)
        launch.measured(config, lambda *step: None, stuck)


def test_invalid_problem_prints_no_traceback() -> None:
    result = invoke(*SHAPE, *SHORT, "--backend", "abacus")
    assert result.exit_code == 1
    assert "backend must be" in result.stderr and "'abacus'" in result.stderr
    assert "Traceback" not in result.stderr


ENDLESS = ["-m", "flux", "bench", "op", *SHAPE, "--repeats", "1000000"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_an_interrupt_ends_all_processes(number: int, status: int, tmp_path: Path) -> None:
    process = start_forked_command(ENDLESS, tmp_path)
    while len(processes_of_session(process.pid)) < 4:  # itself, a server, two ranks
        assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(process.pid, number)
    assert_ended(process)
    assert process.exitcode == status
    assert "Traceback" not in (tmp_path / "err").read_text()


def assert_ended(process: Any) -> None:
    """Check that a forked command ends soon, and all its processes with it."""
    process.join(20)
    assert process.exitcode is not None
    deadline = time.monotonic() + 5
    while (left := processes_of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@stress_only  # of the interpreters, which import torch
def test_a_command_in_the_background_can_be_ended() -> None:
    """A shell script starts it with SIGINT ignored."""
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *ENDLESS]
    with start_interruptible(command) as process:
        try:
            parent = psutil.Process(process.pid)
            deadline = time.monotonic() + 60
            while len(parent.children(recursive=True)) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)  # a tracker, a server, two ranks
            children = parent.children(recursive=True)
            assert len(children) >= 4
            time.sleep(0.5)
            process.terminate()
            assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--op", "gemm"], "all_to_all_gemm, got 'gemm'"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--dtype", "e4m3", "--scaling", "block"], "must be tensor, row, got 'block'"),
        (["--fast-accum"], "fast_accum is for float8_e4m3fn"),
        (["--dtype", "e4m3", "--transport", "loopback"], "does not measure float8"),
        (["--m", "0"], "m must be at least 1, got 0"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--tile", "12"], "tile must look like 512x1024, got '12'"),
        (["--order", "random"], "Knobs.order must be one of"),
        (["--timeout", "0"], "timeout must be above 0"),
        (["--json", "/dev/null/out.json"], "cannot write /dev/null/out.json"),
        (["--json", "/"], "cannot write /"),
    ],
)
def test_usage_errors_start_nothing(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "measured", None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


# -- pieces ----------------------------------------------------------------------------------------


def test_progress_counts_up_to_the_end() -> None:
    config = BenchConfig(Problem(Op.gemm_rs, 5, 4, 6, "float32", 2), repeats=4, warmup=2)
    steps: list[tuple[str, int, int]] = []
    measurement = launch.measured(config, lambda *step: steps.append(step))
    assert [done for _, done, _ in steps] == list(range(8))
    assert {total for _, _, total in steps} == {8}
    assert not measurement.complaints


def _start(rank: int, world: int) -> list[int]:
    line = StartLine(world, threads=1)
    starts = []
    for _ in range(30):
        line.wait()
        starts.append(time.monotonic_ns())
    return starts


@pytest.mark.alone
def test_ranks_start_together() -> None:
    first, second = run_ranks(2, _start)
    apart = sorted(abs(a - b) for a, b in zip(first, second, strict=True))
    # The median, and generously: other programs may have the cores.
    assert apart[len(apart) // 2] < 5_000_000, apart
    assert first == sorted(first)


def test_version_option_prints_the_version() -> None:
    import flux

    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"flux {flux.__version__}\n")


def test_command_restores_the_environment() -> None:
    assert "FLUX_POISON" not in os.environ


# -- listening addresses ---------------------------------------------------------------------------


def _listening(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}


def _listeners(parent: int, rank: int, progress: Any) -> list[tuple[str, int]]:
    """Return the listening addresses of ranks and of their parent."""
    dist.new_group(backend="gloo")
    found: list[set[tuple[str, int]]] = [set(), set()]
    dist.all_gather_object(found, _listening(os.getpid()) | _listening(parent))
    return sorted(set.union(*found))


def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    """The listeners unpickle data from any client, so they must not be reachable."""
    before = _listening(os.getpid())
    found = spawn.run_ranks(_listeners, os.getpid(), 2)
    assert found
    for address, port in set(found) - before:
        assert ipaddress.ip_address(address).is_loopback, (address, port)


SHAPES = """
model = "tiny"
dtype = "float32"
tensor_parallel = [2]
[[shape]]
op = "gemm_rs"
m = [64]
n = 64
k = 64
"""
SEVERAL_HOSTS = """
import os
os.environ["FLUX_HOST"] = os.environ["RANK"]
import torch.distributed as dist
from flux.launch.progress import silent
from flux.launch.supervisors import Joined

if __name__ == "__main__":
    launcher = Joined()
    assert len(set(launcher.hosts)) == 2
    dist.TCPStore = None  # workers, which are other processes, have theirs
    for _ in range(2):
        found = launcher.run(print, "", silent, stall_s=60.0)
        assert found == (None, ""), found
    launcher.close()
"""


def test_workers_of_several_hosts_use_the_store_of_torchrun(tmp_path: Path) -> None:
    """Another store would listen on all interfaces."""
    script = tmp_path / "script.py"
    script.write_text(SEVERAL_HOSTS)
    under_torchrun(str(script), timeout_s=120)


PROBLEM = ["--m", "64", "--n", "64", "--k", "64", "--nproc", "2"]
COMMANDS = {
    "bench op": [*PROBLEM, "--op", "gemm_rs", "--repeats", "3"],
    "bench suite": ["--shapes", "SHAPES", "--repeats", "3"],
    "trace op": [*PROBLEM, "--op", "gemm_rs", "--warmup", "2000"],  # ranks live long enough
    "tune": [*PROBLEM, "--op", "gemm_rs", "--budget", "2s"],
}


def _arguments(command: str, folder: Path) -> list[str]:
    shapes = folder / "shapes.toml"
    shapes.write_text(SHAPES)
    words = [str(shapes) if word == "SHAPES" else word for word in COMMANDS[command]]
    return ["-m", "flux", *command.split(), *words]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_listens_beyond_its_host(command: str, tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()
    settings = {"FLUX_TUNE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = start_forked_command(_arguments(command, tmp_path), tmp_path, settings, tmp_path)
    while process.is_alive():
        for pid in processes_of_session(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                seen |= _listening(pid)
        time.sleep(0.05)  # the cores are the command's
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert seen, "found no rank"
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in seen), seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_command(number: signal.Signals, tmp_path: Path) -> None:
    """Whenever the command is ended: ranks start, meet, wait or run then."""
    for most in (0, 2):  # processes of the session, beside the command, at the moment
        process = start_forked_command(_arguments("bench op", tmp_path), tmp_path, cwd=tmp_path)
        while len(processes_of_session(process.pid)) <= most + 1 and process.is_alive():
            time.sleep(0.01)
        time.sleep(random.random() * 0.5)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(process.pid, number)
        assert_ended(process)
