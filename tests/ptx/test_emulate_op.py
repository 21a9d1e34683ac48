"""tools/emulate_op.py: a call of an op on the PTX machine, alone and under `profile`."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ptx_machine import cuda_device
from ptx_machine.cli.app import app

SCRIPT = Path(__file__).parents[2] / "tools" / "emulate_op.py"
SHAPE = ["--m", "130", "--n", "64", "--k", "64"]


@pytest.fixture
def built(ptx_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels."""
    monkeypatch.setattr("sys.path", [*sys.path])  # the script adds to it
    return ptx_kernels


def test_profile_of_a_call(built: Path) -> None:
    cuda_device().clear()
    words = ["profile", str(SCRIPT), "--json", "--", str(built), "--op", "gemm_rs", *SHAPE]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said, _, tables = result.output.partition("\n")
    assert said == "gemm_rs 130 x 64 x 64, 2 ranks: right"
    kernels = {kernel["kernel"]: kernel for kernel in json.loads(tables)}
    (gemm,) = (kernel for name, kernel in kernels.items() if "flux_gemm_rs_sm80" in name)
    (reduction,) = (kernel for name, kernel in kernels.items() if "reduce_kernel" in name)
    assert gemm["launches"] == reduction["launches"] == 2
    assert any("mma.sync" in role["does"] for role in gemm["roles"])
    cuda_device().clear()


def test_a_call_that_fails(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(self: object, *_: object) -> None:
        raise AssertionError("result differs")

    monkeypatch.setattr("reference.Inputs.check", wrong)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(built), *SHAPE, "--seed", "3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 1
    assert "result differs\nrun it again with --seed 3" in capsys.readouterr().out
    cuda_device().seed = 0
