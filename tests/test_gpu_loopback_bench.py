"""benchmarks/gpu_loopback.py on the emulated device: that it runs, and notices wrong results. Its
times mean nothing here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated import EmulatedDevice, emulated_device
from flux.transport.loopback import LoopbackPeers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gpu_loopback


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedDevice]:
    with emulated_device(tmp_path_factory.mktemp("gpu")) as device:
        yield device


class EmulatedMachine(gpu_loopback.Machine):
    """The host multiplies, when the streams are done."""

    device: EmulatedDevice

    def multiply(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        self.synchronize()
        torch.mm(x, w.t(), out=out)

    def plain(self, problem: object) -> None:
        return None

    def synchronize(self) -> None:
        self.device.finish()

    def time(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3


def run(device: EmulatedDevice, op: str) -> dict[str, Any]:
    shape = gpu_loopback.Shape(op, 2, 16, 16, 24)
    return gpu_loopback.run_shape(EmulatedMachine(device), shape, [1, 4], repeats=5)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_every_method_has_its_figures(device: EmulatedDevice, op: str) -> None:
    torch.manual_seed(0)
    found = run(device, op)
    assert found["complaints"] == []
    variants = 4 if op == "ag_gemm" else 2
    assert len(found["methods"]) == 1 + variants
    assert all(len(times) == 5 for times in found["repeats_ms"].values())
    text = gpu_loopback.table(found)
    assert f"{op}, W = 2, M = 16" in text and "| unfused |" in text


def test_a_wrong_method_gets_no_figures(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    put = LoopbackPeers._put
    monkeypatch.setattr(
        LoopbackPeers, "_put", lambda self, kept, begin, rows: put(self, kept, begin, rows * 2)
    )
    found = run(device, "gemm_rs")
    assert list(found["methods"]) == ["unfused"]
    assert len(found["complaints"]) == 2 and "wrong by" in found["complaints"][0]
    assert "WRONG flux" in gpu_loopback.table(found)


def test_the_largest_shapes_come_first() -> None:
    found = gpu_loopback.shapes([2, 4], [4096, 8192])
    assert [(s.m, s.world) for s in found[::2]] == [(8192, 4), (8192, 2), (4096, 4), (4096, 2)]
