"""benchmarks/gpu_loopback.py on the emulated device: methods are checked, and get their figures."""

from __future__ import annotations

from typing import Any

import gpu_loopback
import pytest

import bench_gpus
from emulated import EmulatedDevice
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.transport.loopback import LoopbackPeers


@pytest.fixture(autouse=True)
def _machine(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_gpus.use(device, monkeypatch)


def run(op: str) -> dict[str, Any]:
    return gpu_loopback.run_shape(Problem(Op[op], 16, 16, 24, "bfloat16", 2), [1, 4], repeats=5)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_every_method_has_its_figures(op: str) -> None:
    found = run(op)
    assert found["complaints"] == []
    variants = 7 if op == "ag_gemm" else 5  # the heuristic's among them
    assert len(found["methods"]) == 1 + variants
    assert all(len(method["repeats_ms"]) == 5 for method in found["methods"].values())
    text = gpu_loopback.table(found)
    assert f"{op}, W = 2, M = 16" in text and "| unfused |" in text


def test_a_wrong_method_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    put = LoopbackPeers._put
    monkeypatch.setattr(
        LoopbackPeers, "_put", lambda self, kept, begin, rows: put(self, kept, begin, rows * 2)
    )
    found = run("gemm_rs")
    right = [name for name, method in found["methods"].items() if method["overall_ms"] is not None]
    assert right == ["unfused"]
    assert len(found["complaints"]) == 5 and "elements are wrong" in found["complaints"][0]
    assert "WRONG flux" in gpu_loopback.table(found)


def test_a_shape_that_stalls_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_loopback, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(LoopbackPeers, "scatter", lambda self, schedule, epoch: None)
    found = run("gemm_rs")
    assert found["methods"] == {} and "rank 0 waited more than 0.3 s" in found["complaints"][0]
    assert "WRONG GemmRS" in gpu_loopback.table(found)


def test_the_largest_shapes_come_first() -> None:
    found = gpu_loopback.problems([2, 4], [4096, 8192])
    assert [(p.m, p.world) for p in found[::2]] == [(8192, 4), (8192, 2), (4096, 4), (4096, 2)]
