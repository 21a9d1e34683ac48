"""`flux bench op --backend cuda` on real GPUs, as a person runs it: `pytest -m gpu`, after
`make kernels`. With one GPU the part for several is skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_cases import cuda_device
from matrix import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = ["--m", "512", "--n", "1024", "--k", "512", "--repeats", "5"]


def bench(target: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a run that must have been right."""
    command = [sys.executable, "-m", "flux", "bench", "op", *SHAPE, "--backend", "cuda"]
    done = subprocess.run(
        [*command, *arguments, "--json", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(target.read_text())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ["virtual", "loopback", "symm_mem"])
def test_every_method_is_right(op: str, transport: str, tmp_path: Path) -> None:
    cuda_device()
    if transport == "symm_mem" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    target = tmp_path / "found.json"
    found = bench(target, "--op", op, "--transport", transport, "--nproc", "2")
    assert found["device"] == torch.cuda.get_device_name(0)
    assert list(found["methods"]) == ["unfused", "medium", "flux"]
    for method in found["methods"].values():
        assert method["overall_ms"] > 0 and "wrong" not in method
        assert (method["speedup_vs_unfused"] is None) == (transport == "virtual")
