"""Kernels of the set `full` on the PTX machine, as many as have every value of every parameter.

Compiling them takes some 20 minutes of a core, and running them as long, so `make stress` does it.
Figures: benchmarks/results/ptx.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from covering import covering, values_of
from flux.kernels.build import MissingToolError, find_tools
from flux.kernels.sets import FUSED, config_set
from harness import STRESS, stress_only
from ptx_target import ptx_target

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "support" / "emulation"


def run(script: str, *options: str) -> None:
    """In a process of its own, whose device has no other streams."""
    try:
        find_tools(ptx_target())
    except MissingToolError as error:
        pytest.skip(str(error))
    command = [sys.executable, str(FOLDER / script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("arch, most", [("80", 30), ("90a", 20)])
def test_few_configs_have_every_value(arch: str, most: int) -> None:
    chosen = covering(arch)
    every = [config for config in config_set("full", [arch]) if config.op in FUSED]
    assert set(chosen) <= set(every) and len(chosen) <= most
    assert set().union(*map(values_of, chosen)) == set().union(*map(values_of, every))


def test_all_of_them_have_run() -> None:
    """What was committed is of the configs that there are now."""
    found = json.loads((ROOT / "benchmarks" / "results" / "ptx" / "kernels.json").read_text())
    ran = {row["config"] for row in found["rows"]}
    assert {config.name for arch in ("80", "90a") for config in covering(arch)} <= ran


@stress_only
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_every_value_matches_float64(arch: str) -> None:
    run("every_kernel.py", "--arch", arch)


@stress_only
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_trace_builds_compute_the_same(arch: str) -> None:
    run("every_kernel.py", "--arch", arch, "--traced")


@stress_only
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_no_seed_finds_a_fault(arch: str) -> None:
    run("seeds.py", "--arch", arch, "--seeds", str(20 * STRESS))
