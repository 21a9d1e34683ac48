"""`flux plan calibrate` on a machine that has torch and little else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from flux.bench import calibrate
from flux.bench.calibrate import CalibrationRun

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
