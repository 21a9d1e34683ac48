"""`flux bench op --backend cuda` on emulated GPUs: measurement, checks and terminal output.

On a real one: test_gpu_bench.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bench_gpus
from emulated import EmulatedDevice
from emulated_processes import emulate
from flux.bench import launch
from flux.bench.config import BenchConfig
from flux.bench.methods import Method
from flux.bench.op import Measurement, measure
from flux.bench.places import gpu
from flux.bench.places.virtual import Ranks
from flux.cli.app import app
from flux.core.knobs import Op
from flux.core.problem import SCALED, Problem
from flux.transport.loopback import LoopbackPeers
from harness import fresh_ranks, run_ranks
from matrix import OPS

NO_GPU = "--backend cuda needs a CUDA device that torch can see; there is none"


@pytest.fixture
def library(device: EmulatedDevice) -> Path:
    """Return the path of the emulator, for use in other processes."""
    return Path(device.library._name)


@pytest.fixture
def machine(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    bench_gpus.use(device, monkeypatch)
    return device


def config_of(
    op: str, transport: str | None, world: int = 2, scaling: str = "", **options: Any
) -> BenchConfig:
    dtype = SCALED if scaling else "bfloat16"
    problem = Problem(Op[op], 13, 16, 24, dtype, world, scaling=scaling)
    options = {"repeats": 2, "warmup": 1, **options}
    return BenchConfig(problem, backend="cuda", transport=transport, **options)


def check(found: Measurement, comparable: bool = True) -> None:
    assert found.complaints == []
    assert [method.name for method in found.methods] == ["unfused", "medium", "flux"]
    for method in found.methods:
        assert method.metrics is not None and len(method.repeats_ms) == 2
        assert 0 < method.max_abs_err < 1
        assert (method.metrics.speedup_vs_unfused is not None) == comparable
        assert method.comm_cpu_ms is None  # GPUs do the work
    gemms = {"gemm/linear", "gemm/mm", "gemm/mm_out"}
    assert set(found.parts_ms) in (gemms | {"comm/library"}, {"gemm/scaled_mm", "comm/library"})
    assert found.start_skew_ms is None and found.device == "emulated"


@pytest.mark.parametrize(
    ("transport", "world", "op"),
    [*((each, 3, op) for each in ("virtual", "loopback") for op in OPS), ("virtual", 1, "gemm_ar")],
)
def test_all_methods_of_ranks_on_one_gpu_are_correct(
    machine: EmulatedDevice, transport: str, world: int, op: str
) -> None:
    config = config_of(op, transport, world)
    check(measure(config, 0), comparable=transport == "loopback")


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("op", OPS)
def test_float8_is_measured_with_scales(machine: EmulatedDevice, op: str, scaling: str) -> None:
    found = measure(config_of(op, "virtual", 3, scaling), 0)
    check(found, comparable=False)
    assert found.methods[0].knobs["gemm"] == "torch._scaled_mm"
    assert found.methods[-1].knobs["kernel"].endswith(f"_nk_{scaling}")


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_knobs_reach_the_op(machine: EmulatedDevice, direction: str) -> None:
    knobs = {"direction": direction, "comm_tile_rows": 2}
    found = measure(config_of("ag_gemm", "loopback", knobs=knobs), 0)
    check(found)
    used = found.methods[-1].knobs
    assert (used["direction"], used["comm_tile_rows"]) == (direction, 2)


def _on_gpus(rank: int, world: int, library: Path, op: str) -> Measurement:
    device = emulate(rank, library)
    gpu.open_machine = lambda index: bench_gpus.EmulatedMachine(device)  # type: ignore
    found = measure(config_of(op, None, world), rank)
    device.close()
    assert device.streams() == 0
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_process_and_a_gpu_per_rank(library: Path, op: str) -> None:
    with fresh_ranks(2) as ranks:
        for found in ranks.run(_on_gpus, library, op, timeout=200.0):
            check(found)


class Late:
    """A method whose ranks, except rank 0, return their previous result again."""

    def __init__(self, method: Method) -> None:
        self._method, self._before = method, None
        self.name, self.knobs, self.comm_only = method.name, method.knobs, method.comm_only
        self.wait, self.close = method.wait, method.close

    def __call__(self, inputs: Any) -> Any:
        first, *others = self._method(inputs)
        self._before = self._before or others
        return [first, *self._before]


class LateRanks(Ranks):
    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        unfused, _, fused = super().factory(config, rank)
        return [unfused, Late(fused)]


def test_wrong_result_on_one_rank_hides_the_time(machine: EmulatedDevice) -> None:
    config = config_of("gemm_rs", "virtual", repeats=3)  # the last inputs differ from the first
    found = measure(config, 0, place=LateRanks(config, 0))
    unfused, fused = found.methods
    assert unfused.metrics is not None and fused.metrics is None
    (complaint,) = found.complaints
    assert "checked after timing: as rank 1: " in complaint and "elements are wrong" in complaint


@pytest.mark.parametrize("op", OPS)
def test_wrong_rows_from_peers_void_the_measurement(
    machine: EmulatedDevice, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LoopbackPeers._put
    monkeypatch.setattr(
        LoopbackPeers, "_put", lambda self, kept, begin, rows: put(self, kept, begin, rows * 2)
    )
    found = measure(config_of(op, "loopback"), 0)
    assert [method.metrics is None for method in found.methods] == [False, True, True]
    assert all("elements are wrong" in text for text in found.complaints)


@pytest.mark.parametrize("op", OPS)
def test_rows_sent_to_peers_are_checked(
    machine: EmulatedDevice, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator drops the last byte of every copy and store to a peer."""
    from flux.bench.places import loopback

    judge_sent = loopback.RealRank._judge_sent

    def spoilt(self: Any, op: Any, peer: int, *rest: Any) -> Any:
        peers = op._backend.peers
        first = peers.layout.slot_offset(0) // torch.bfloat16.itemsize
        peers.memory.data[peer].view(torch.bfloat16)[first] += 1000
        return judge_sent(self, op, peer, *rest)

    monkeypatch.setattr(loopback.RealRank, "_judge_sent", spoilt)
    found = measure(config_of(op, "loopback"), 0)
    sent = [text for text in found.complaints if "sent to rank 1: 1 of" in text]
    assert len(sent) == 2  # medium and flux


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(machine: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`flux bench op` with one GPU, in this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "measured", lambda config, progress: measure(config, 0, progress))
    shape = ["--m", "13", "--n", "16", "--k", "24", "--repeats", "5"]

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["bench", "op", *shape, *arguments])

    return invoke


def test_terminal_output_of_virtual(command: Any, tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    result = command("--transport", "virtual", "--nproc", "3", "--json", str(target))
    assert result.exit_code == 0, result.output
    assert "bfloat16, 3 ranks, cuda/virtual" in result.output
    assert "times cannot be compared" in " ".join(result.output.split())
    content = json.loads(target.read_text())
    assert (content["backend"], content["transport"]) == ("cuda", "virtual")
    assert content["device"] == "emulated"
    assert list(content["methods"]) == ["unfused", "medium", "flux"]
    assert all(m["overlap_efficiency"] is None for m in content["methods"].values())


def test_terminal_output_of_loopback(command: Any) -> None:
    result = command("--backend", "cuda", "--transport", "loopback")
    assert result.exit_code == 0, result.output
    assert "2 ranks, cuda/loopback" in result.output
    assert "times are those of the PCIe link" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--backend", "cuda", "--nproc", "4"), "4 ranks need a GPU each, and torch sees 1"),
        (("--backend", "cuda"), "--transport virtual (all ranks on it: results, no times)"),
        (("--transport", "virtual", "--nproc", "16"), "takes --nproc 1 to 15, got 16"),
        (("--transport", "loopback", "--nproc", "1"), "takes --nproc 2 to 15, got 1"),
        (("--backend", "cuda", "--transport", "shm"), "transports symm_mem, virtual, loopback"),
        (("--backend", "cuda", "--hosts", "2"), "--hosts creates hosts without GPUs"),
    ],
)
def test_options_that_one_gpu_does_not_support(
    command: Any, arguments: tuple[str, ...], text: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())


def test_a_missing_gpu_is_an_error_of_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = CliRunner().invoke(app, ["bench", "op", "--backend", "cuda"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line == f"error: {NO_GPU}"


def test_torchrun_needs_a_gpu_per_rank() -> None:
    config = config_of("ag_gemm", None, world=8)
    assert gpu.reason_unsupported(config, gpus=4, ranks_here=4) is None
    assert gpu.reason_unsupported(replace(config, hosts="2"), gpus=4, ranks_here=4) is None
    assert "8 ranks need a GPU each, and torch sees 4" in str(gpu.reason_unsupported(config, 4, 8))
    virtual = config_of("ag_gemm", "virtual")
    assert "without torchrun" in str(gpu.reason_unsupported(virtual, 4, 2))


def _without_gpus(rank: int, world: int) -> str:
    with pytest.raises(ValueError) as caught:
        launch.check_gpus(config_of("ag_gemm", None, world))
    return str(caught.value)


def test_a_rank_without_gpu_raises_on_all_ranks() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    said = run_ranks(2, _without_gpus, timeout=60.0, fresh=True)
    assert said == [f"rank 0: {NO_GPU}"] * 2
