"""benchmarks/gpu_check.sh with commands that only write down that they were called; and what the
benchmarks that it runs do when they are cut short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_kernels
import gpu_loopback
import gpu_schedulers
import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
  *-c*import*missing_plugin*) exit 1 ;;
  *"-m pytest"*"regression"*) exit "${REGRESSION:-5}" ;;
esac
for pattern in $FAIL; do case "$*" in *"$pattern"*) echo "failed on purpose"; exit 9 ;; esac; done
for pattern in $SLOW; do case "$*" in *"$pattern"*) sleep 60 ;; esac; done
if [ "$(basename "$0")" = nvcc ]; then
  while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done
  [ $# -eq 0 ] && exit 0
  printf '#!/bin/sh\\necho "$(basename "$0") $*" >> "$CALLS"\\n' > "$2" && chmod +x "$2"
fi
exit 0
"""
COMMANDS = ("python3", "nvcc", "nvidia-smi", "g++", "compute-sanitizer")
Run = Callable[..., "Outcome"]


class Outcome:
    """The result of one run of the script."""

    def __init__(self, done: subprocess.CompletedProcess[str], work: Path, calls: Path) -> None:
        self.status, self.output, self.work = done.returncode, done.stdout + done.stderr, work
        self.calls = calls.read_text().splitlines() if calls.exists() else []
        self.steps = [
            line.removeprefix("=== ") for line in done.stdout.splitlines() if line[:4] == "=== "
        ]

    def called(self, text: str) -> int:
        return sum(text in call for call in self.calls)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the script in a copy of the folders that it looks at, with fake commands."""
    root, commands = tmp_path / "root", tmp_path / "bin"
    for folder in (
        "benchmarks",
        "tests/bench",
        "tests/gpu",
        "csrc/schedule",
        "csrc/plan",
        "csrc/cpu",
        "csrc/cuda_host",
        "csrc/bindings",
        "flux/lib/kernels/a_traced_b",
    ):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "gpu_check.sh", root / "benchmarks")
    for part in ("", "_loopback", "_graphs", "_processes", "_interop"):
        (root / f"tests/gpu/test_gpu{part}.py").write_text("import pytest\n")
    (root / "tests/bench/test_gpu_bench.py").write_text("import pytest\n")
    (root / "flux/lib/kernels/a_traced_b/kernel.so").touch()
    (root / "flux/lib/kernels/a_traced_b/kernel.json").write_text('{"tile_scheduler": "dynamic"}')
    for part in ("schedule", "cpu", "cuda_host", "bindings"):
        (root / f"csrc/{part}/one.cpp").touch()
    commands.mkdir()
    for name in COMMANDS:
        (commands / name).write_text(FAKE)
        (commands / name).chmod(0o755)

    def call(*arguments: str, **variables: str) -> Outcome:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            [str(root / "benchmarks/gpu_check.sh"), str(tmp_path / "work"), *arguments],
            env={
                "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "CALLS": str(calls),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Outcome(done, tmp_path / "work", calls)

    return call


def test_all_steps_run_and_leave_their_status(run: Run) -> None:
    outcome = run()
    assert outcome.status == 0, outcome.output
    states = {path.name: path.read_text() for path in (outcome.work / "state").iterdir()}
    assert states == dict.fromkeys(outcome.steps, "0\n")
    plain = "-o addopts= -p no:cacheprovider -m gpu"
    assert outcome.called(f"{plain} tests/gpu/test_gpu.py -x -k small or plain")
    assert outcome.called("tma_store host")  # loopback's peers have their memory there
    assert outcome.called("gpu_schedulers.py") == 1
    early = ("in_kernel", "kernels_small", "kernels_large", "schedulers", "loopback")
    assert [step for step in outcome.steps if step in early] == list(early)
    assert outcome.called("--path in_kernel") == 4


def test_failed_step_does_not_stop_later_steps(run: Run) -> None:
    outcome = run("environment", "plain", "fp8", FAIL="--plain --version")
    assert outcome.status == 1 and outcome.steps == ["environment", "plain", "fp8"]
    assert (outcome.work / "state" / "plain").read_text() == "9\n"
    assert "failed: environment plain" in outcome.output
    again = run("plain")
    assert again.status == 1 and not again.called("--plain")
    assert "plain: done before, status 9" in again.output


def test_done_steps_are_skipped_unless_asked_for_again(run: Run) -> None:
    assert run("plain", "fp8").called("gpu_kernels.py") == 2
    assert run("plain", "fp8").called("gpu_kernels.py") == 0
    assert run("--again", "plain").called("gpu_kernels.py") == 1
    assert run("fp8").called("gpu_kernels.py") == 0


def test_interrupted_step_restarts(run: Run) -> None:
    outcome = run("plain", "fp8", FLUX_GPU_CHECK_S="7", SLOW="--plain")
    assert outcome.status == 1
    assert "plain: cut short" in outcome.output and "fp8: no time left" in outcome.output
    assert not (outcome.work / "state" / "plain").exists()
    again = run("plain", "fp8")
    assert again.status == 0 and again.called("gpu_kernels.py") == 2


def test_absent_plugins_skip_their_steps(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "root/benchmarks/gpu_check.sh"
    script.write_text(script.read_text().replace("in pytest $(", "in missing_plugin $("))
    outcome = run("test_gpu", "plain")
    assert outcome.status == 0 and outcome.steps == ["plain"]
    assert "test_gpu: skipped, there is no missing_plugin" in outcome.output


def test_step_fails_if_a_test_fails_but_not_if_none_is_selected(run: Run) -> None:
    assert run("test_regressions").status == 0
    outcome = run("--again", "test_regressions", REGRESSION="1")
    assert outcome.status == 1 and "test_regressions: status 1" in outcome.output


def test_kernels_load_eagerly(run: Run, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "python3"
    fake.write_text('#!/bin/sh\necho "loading $CUDA_MODULE_LOADING" >> "$CALLS"\n')
    assert run("plain").called("loading EAGER") == 1


def test_invalid_argument_exits_with_status_2(run: Run) -> None:
    assert run("--agian").status == 2


# -- what is gone on with --------------------------------------------------------------------------


def test_shapes_in_the_file_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = tmp_path / "kernels.json", []

    def run_shape(device: object, op: str, m: int, n: int, k: int, *_: object) -> dict[str, Any]:
        asked.append((op, m))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"op": op, "m": m, "n": n, "k": k, "dtype": "bf16", "complaints": []}

    def start(*rows: str) -> object:
        arguments = ["gpu_kernels.py", "--json", str(target), "--rows", *rows]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises((KeyboardInterrupt, SystemExit)) as stopped:
            gpu_kernels.main()
        return getattr(stopped.value, "code", None)

    monkeypatch.setattr(gpu_kernels, "CudaDevice", lambda: type("Device", (), {"index": 0})())
    monkeypatch.setattr(gpu_kernels, "run_shape", run_shape)
    monkeypatch.setattr(gpu_kernels, "show", lambda found: None)
    monkeypatch.setattr(gpu_kernels.torch.cuda, "get_device_name", lambda index: "a GPU")
    start("8192", "4096")
    assert start("8192", "4096") == 0
    assert asked == [("ag_gemm", 8192), ("gemm_rs", 8192), ("ag_gemm", 4096),
                     ("ag_gemm", 4096), ("gemm_rs", 4096)]  # fmt: skip
    assert len(json.loads(target.read_text())["shapes"]) == 4


def test_loopback_benchmarks_resume_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = tmp_path / "loopback.json", []

    def run_shape(problem: Any, *_: object) -> dict[str, Any]:
        asked.append(problem)
        found = {"op": problem.op.name, "m": problem.m, "world": problem.world}
        return {**found, "methods": {}, "complaints": []}

    monkeypatch.setattr(gpu_loopback, "run_shape", run_shape)
    monkeypatch.setattr(gpu_loopback, "table", lambda found: "")
    for rows, count in (("8192", 4), ("8192", 4), ("4096", 8)):
        monkeypatch.setattr(sys, "argv", ["gpu_loopback.py", str(target), "--rows", rows])
        with pytest.raises(SystemExit) as stopped:
            gpu_loopback.main()
        assert stopped.value.code == 0 and len(asked) == count


# -- times -----------------------------------------------------------------------------------------


def nothing(_: int) -> None:
    pass


def test_rounds_with_a_slow_host_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps, firsts = [], []

    def one_round(methods: Any, round_: int, inner: int, cycles: int) -> dict[str, float] | None:
        sleeps.append(cycles)
        if cycles < 4 * gpu_kernels.SLEEP_CYCLES:
            return None
        firsts.append(methods[0][0])
        return {name: 1.0 + round_ for name, _ in methods}

    monkeypatch.setattr(gpu_kernels, "one_round", one_round)
    times, complaints = gpu_kernels.measure({"a": nothing, "b": nothing}, 4, 1)
    assert not complaints and [len(values) for values in times.values()] == [4, 4]
    assert sleeps[:3] == [gpu_kernels.SLEEP_CYCLES * factor for factor in (1, 2, 4)]
    assert firsts[:4] == ["a", "b", "a", "b"], "the order rotates"
    assert times["a"][0] == 1.0 + gpu_kernels.WARM_UP

    monkeypatch.setattr(gpu_kernels, "one_round", lambda *_: None)
    times, complaints = gpu_kernels.measure({"a": nothing}, 4, 1)
    assert times == {"a": []} and "too slow" in complaints[0]


def test_ratios_are_formed_within_rounds() -> None:
    """A machine that becomes twice as slow half way through changes no ratio."""
    base = [1.0] * 10 + [2.0] * 10
    found = gpu_kernels.ratio([1.1 * value for value in base], base)
    assert found["median"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx((1.1, 1.1))


def test_short_kernels_run_several_times_between_events() -> None:
    counts = [gpu_kernels.inner_calls(m, 6144, 12288) for m in (8192, 1024, 64, 1)]
    assert counts == sorted(counts) and counts[0] == 1 and 1 < counts[-1] <= gpu_kernels.MAX_INNER


def test_tile_schedulers_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way alone and beside another kernel in a round; ratios are to the static one alone."""
    timed = []

    def one_time(run: Any, other: Any, _: int) -> float:
        timed.append((run(0), None if other is None else other(0)))
        return {"static": 2.0, "dynamic": 3.0}.get(run(0), 4.0) * (2 if other else 1)

    shape = SimpleNamespace(method=lambda name, sm_count=0: lambda _: f"{name}{sm_count or ''}")
    fakes = {
        "Shape": lambda *_: shape,
        "cheapest": lambda device, op, problem, scheduler: scheduler,
        "usable": lambda *_: ["plain"],
        "checked": lambda *_: ({}, {"a kernel": 1.0}),
        "one_time": one_time,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(gpu_schedulers, name, fake)
    device: Any = SimpleNamespace(sm_count=132)
    result = gpu_schedulers.run_shape(device, "ag_gemm", 64, 8, 8, rounds=3)
    plain = f"plain{gpu_schedulers.TAKEN}"
    rounds = [timed[i : i + 6] for i in range(0, len(timed), 6)]
    every = {(way, o) for way in ("static", "dynamic", "static108") for o in (None, plain)}
    assert len(rounds) == 3 + gpu_schedulers.WARM_UP
    assert all(set(round_) == every for round_ in rounds) and rounds[0][1:] == rounds[1][:-1]
    ratios = {name: ratio["median"] for name, ratio in result["vs_static_alone"].items()}
    assert (ratios["static, beside"], ratios["dynamic, alone"]) == (2.0, 1.5)
    assert result["complaints"] == ["a kernel: wrong by 1.0"]
    assert "ag_gemm 64" in gpu_schedulers.table({"shapes": [result]})


def test_wrong_results_and_nan_are_complaints() -> None:
    errors = {"right": 1e-3, "wrong": 0.5, "nan": float("nan")}
    assert len(gpu_kernels.complaints_of(errors, "bf16")) == 2
    fast, promoted = (f"flux_gemm_sm90a_e4m3_nk_64x128x128{part}" for part in ("", "_promoted"))
    (complaint,) = gpu_kernels.complaints_of({fast: 8e-3, promoted: 8e-3}, "e4m3")
    assert complaint.startswith(promoted)
