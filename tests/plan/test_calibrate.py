"""`flux plan calibrate` on a machine that has torch and little else."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flux.bench import calibrate
from flux.bench.calibrate import CalibrationRun
from flux.machine.detection import _detect_cuda

ABSENT = ("flux._C", "msgspec", "greenlet", "filelock", "pynvml", "jinja2")
BARE = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); "
RUN = "import runpy; runpy.run_module('flux.plan.command_calibrate', run_name='__main__')"


def test_a_bare_machine_measures_every_kind(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    words = [sys.executable, "-c", BARE + RUN, "--small", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"wrote .*: 29 points of 1 thread .*\nGEMMs: up to 0\.\d+ TFLOP", done.stdout)
    content = json.loads(out.read_text())
    assert content["complete"] and not content["failed"] and not content["settings"]["left"]
    kinds = Counter(point["kind"] for point in content["points"])
    both = dict.fromkeys(("attention", "rms_norm", "layer_norm", "silu_mul", "gelu", "rotary"), 2)
    once = dict.fromkeys(("add", "cast", "adamw", "copy", "launch"), 1)
    assert kinds == {"gemm": 10, "cross_entropy": 2} | both | once
    for point in content["points"]:
        assert 0 < point["least_us"] <= point["us"] <= point["most_us"]


def test_a_run_cut_short_says_so_and_a_point_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cpu.json"

    def measure(seconds: float) -> dict:
        CalibrationRun("cpu", "float32", out, seconds=seconds, small=True).run()
        return json.loads(out.read_text())

    points = calibrate.points_of("cpu", "float32", float8=False, small=True)
    kept = [point for point in points if point.kind in ("gemm", "add")][-5:]
    wrong = [kept[0]._replace(kind="unheard"), kept[1]._replace(shape=(1 << 12,) * 3)]
    monkeypatch.setattr(calibrate, "points_of", lambda *_, **__: [*wrong, *kept])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    content = measure(60.0)
    assert [point["kind"] for point in content["failed"]] == ["unheard", "gemm"]
    assert "elements of the pool" in content["failed"][1]["error"]
    assert len(content["points"]) == len(kept) and content["settings"]["left"] == 0
    content = measure(1e-9)
    assert not content["complete"] and content["settings"]["left"] == 7


class _OnCpu(TorchFunctionMode):
    """Makes tensors of a GPU on the CPU."""

    def __torch_function__(self, call: Any, kinds: Any, args: Any = (), named: Any = None) -> Any:
        named = {k: v for k, v in (named or {}).items() if k not in ("device", "pin_memory")}
        return call(*args, **named)


class _Event:
    """An event that is over too early every fifth time, as if the host had been late."""

    asked = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        _Event.asked += 1
        return _Event.asked % 5 == 0

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


def test_the_way_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that says it is one: order and bookkeeping, not times."""
    about = {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 8 << 30}
    about |= {"L2_cache_size": 1 << 25, "uuid": "7", "name": "none"}
    fakes = {
        "Event": _Event,
        "synchronize": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(**about),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda _: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(calibrate, "_FILLER", (64, 32))
    monkeypatch.setattr(calibrate, "_MOST_FILLERS", 1 << 20)
    monkeypatch.setattr(calibrate, "_SUSTAINED", (64, 64, 64))
    monkeypatch.setattr(calibrate, "_SUSTAINED_S", 0.01)
    _detect_cuda.cache_clear()
    with _OnCpu():
        run = CalibrationRun("cuda", "bfloat16", tmp_path / "gpu.json", seconds=200, small=True)
        run.content["settings"]["small"] = False  # measure the lasting GEMM, too
        content = run.run()
    _detect_cuda.cache_clear()
    assert content["complete"] and not content["failed"] and content["sustained"]["us"] > 0
    assert content["device"]["arch"] == "sm_90" and content["device"]["no_clocks"]
    variants = {(point["kind"], point["variant"]) for point in content["points"]}
    assert {("launch", "graph"), ("copy", "h2d"), ("gemm", "wgrad")} < variants
    assert sum(point["dtype"] == "float8_e4m3fn" for point in content["points"]) == 3
    assert _Event.asked > 7 * len(run.points)
