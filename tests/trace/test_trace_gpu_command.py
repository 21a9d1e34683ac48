"""`flux trace op` on GPUs, and ranks that are processes: on emulated devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bench_gpus
from device_fixtures import with_flux_kernels
from emulated import EmulatedDevice
from emulated_processes import emulate
from flux import Knobs
from flux.bench import launch
from flux.bench import traced as trace_run
from flux.bench.traced import trace_methods
from flux.cli.app import app
from flux.core.sparse_problem import SPARSE
from flux.trace import Kind, Trace, read_chrome, record_op
from flux.trace.summary import rank_times
from gpu_trace_cases import CALLS, M, check_awaited, check_spans, check_tiles, problem
from harness import run_ranks, stress_only
from matrix import OPS
from reference import Inputs
from trace_cases import check_chrome, check_sound, of


def _in_processes(rank: int, world: int, library: Path, op: str, path: str) -> Trace | None:
    os.environ["FLUX_TRACE"] = "1"
    device = emulate(rank, library)
    device.set_delay(300)
    p = problem(op)
    inputs = Inputs(p, M, world, seed=2)
    with p.build(tuning=Knobs(path=path), backend="cuda") as made:
        plain, results = inputs.call(made, rank), []
        call = lambda: results.append(inputs.call(made, rank))  # noqa: E731
        trace = record_op(made, call, calls=CALLS, warmup=1)
        made.wait()
        inputs.check(plain, rank, path)
        for result in results:
            assert all(map(torch.equal, result, plain)), "tracing changed a result"
    device.set_delay(0)
    device.finish()
    device.close()
    assert device.streams() == 0 and device.timed_events() == 0
    return trace


@pytest.mark.parametrize("path", ["fused", "unfused"])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar"])
def test_trace_of_a_process_and_a_gpu_per_rank(emulator: Path, op: str, path: str) -> None:
    trace, none = run_ranks(2, _in_processes, emulator, op, path, timeout=200.0, fresh=True)
    assert none is None
    check_sound(trace.events, 2 * max(trace.metadata["clock_uncertainty_us"]) + 50)
    check_spans(trace, 2)
    if path == "fused":
        check_tiles(problem(op), trace, 2, range(2))
        check_awaited(trace.events)
        return
    for rank in range(2):
        (gemm,) = of(trace.events, rank, 1, Kind.gemm)
        (collective,) = of(trace.events, rank, 1, Kind.copy)
        first, last = (collective, gemm) if op == "ag_gemm" else (gemm, collective)
        assert first.end_us <= last.start_us + 1e-3 and gemm.lane == "stream"


@pytest.fixture
def on_emulated_device(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(device, monkeypatch)


def run_here(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ranks of `flux trace op` in this process, on the emulated device."""
    bench_gpus.use(device, monkeypatch)
    monkeypatch.setattr("flux.bench.places.gpu.problem_here", lambda config: None)
    monkeypatch.setattr(trace_run.Registry, "load", classmethod(lambda cls: device.registry))

    def here(entry: Any, config: Any, wanted: Any, progress: Any) -> Any:
        assert (entry, config.processes, config.group) == (trace_methods, 1, "gloo")
        return entry((config, wanted), 0, progress)

    monkeypatch.setattr(launch, "on_ranks", here)


@pytest.mark.parametrize("transport", ["virtual", "loopback"])
@pytest.mark.parametrize("op", OPS)
def test_the_command_writes_a_trace(
    on_emulated_device: None, op: str, transport: str, tmp_path: Path
) -> None:
    out = tmp_path / "trace.json"
    arguments = ["trace", "op", "--op", op, "--m", "26", "--n", "16", "--k", "24", "--nproc", "3"]
    methods = ["flux", "medium"] if op == "ag_gemm" else ["flux"]
    arguments += [part for method in methods for part in ("--method", method)]
    arguments += ["--calls", "2", "--warmup", "1", "--transport", transport, "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    check_chrome(json.loads(out.read_text()))
    trace = read_chrome(out)
    for method in methods:
        mine = [e for e in trace.events if e.details["method"] == method]
        check_sound(mine, 50.0)
        check_awaited(mine)
    times = rank_times(trace.events, trace.metadata)
    assert len(times) == len(methods) * (3 if transport == "virtual" else 1)
    assert all(0 < time.gemm <= time.calls for time in times)
    for word in ("GEMM", "waiting", "clocks of ranks aligned", "kernels to streams", "wrote"):
        assert word in done.output


@stress_only
@pytest.mark.parametrize("op", SPARSE)
def test_the_command_traces_ops_of_experts_and_heads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, op: str, tmp_path: Path
) -> None:
    out = tmp_path / "trace.json"
    arguments = ["trace", "op", "--op", op, "--m", "64", "--n", "128", "--k", "128", "--nproc", "2"]
    arguments += ["--calls", "2", "--warmup", "1", "--transport", "virtual", "--out", str(out)]
    with with_flux_kernels(request, "80", "traced_kernels") as device:
        run_here(device, monkeypatch)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        device.finish()
    check_chrome(json.loads(out.read_text()))
    trace = read_chrome(out)
    check_awaited(trace.events)
    times = rank_times(trace.events, trace.metadata)
    assert len(times) == 2 and all(0 < time.gemm <= time.calls for time in times)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--transport", "virtual", "--method", "unfused"], "has no library collective"),
        (["--transport", "loopback", "--op", "gemm_rs"], "no trace build of gemm_rs kernels"),
        (["--transport", "virtual", "--op", "gemm_ar", "--method", "medium"], "copy engines send"),
    ],
)
def test_unsupported_options_are_reported_before_ranks_start(
    on_emulated_device: None,
    device: EmulatedDevice,
    wrong: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = {name: k for name, k in device.registry.traced.items() if k.config.op == "ag_gemm"}
    monkeypatch.setattr(launch, "on_ranks", lambda *_: pytest.fail("started"))
    monkeypatch.setitem(device.registry.__dict__, "traced", only)
    done = CliRunner().invoke(app, ["trace", "op", *wrong])
    assert done.exit_code == 2 and why in done.output


def test_without_a_gpu_there_is_nothing_to_trace() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["trace", "op", "--backend", "cuda"])
    assert done.exit_code == 2 and "there is none" in done.output
