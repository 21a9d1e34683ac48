"""CUTLASS's own GEMMs, and Flux's kernels of the set `full`, on the PTX machine.

Nobody wrote CUTLASS's kernels with the machine in mind. Of Flux's there are as many as have every
value of every parameter. Compiling takes 5 minutes of a core for CUTLASS's and 20 for Flux's, so
`make stress` runs most of them. Figures: benchmarks/results/ptx.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from covering import covering, values_of
from cutlass_gemms import GEMMS, SM80, SM90, is_built
from flux.kernels.build import MissingToolError, find_tools
from flux.kernels.sets import FUSED, config_set
from harness import STRESS, stress_only

ROOT = Path(__file__).parents[2]


def need_tools() -> None:
    """Skip the test where nvcc or CUTLASS is missing."""
    try:
        find_tools()
    except MissingToolError as error:
        pytest.skip(str(error))


def run(script: str, *options: str) -> None:
    """Run a script of tests/support/emulation in a process whose device has no other streams."""
    need_tools()
    command = [sys.executable, str(ROOT / "tests/support/emulation" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# -- CUTLASS's GEMMs -------------------------------------------------------------------------------


BUILT = ["sm80_Multistage_bf16_kk_128x128x32_1x1_a8"]
BUILT += [f"sm90a_{name}" for name in ("Cooperative_e4m3", "Pingpong_bf16_mnmn", "StreamK_fp16")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", BUILT)
def test_gemms_that_are_built(kernel: str) -> None:
    (library,) = {g.library for g in GEMMS if g.name.startswith(kernel)}
    need_tools()
    if not is_built(library):
        pytest.skip("compiled by make stress")
    run("cutlass_gemms.py", "--only", kernel, "--seeds", "1")


def test_what_is_compared() -> None:
    """Schedules, clusters, dtypes and orders of the operands, each with each that matters."""
    assert len({gemm.name for gemm in GEMMS}) == len(GEMMS)
    stream_k = {(g.dtype, g.a, g.b) for g in SM80 if g.kind == "StreamK"}
    assert {"bf16", "fp16"} == {dtype for dtype, _, _ in stream_k}
    plain = [g for g in SM80 if g.dtype in ("bf16", "fp16")]
    assert {(g.a, g.b) for g in plain} == {(a, b) for a in ("k", "mn") for b in ("k", "mn")}
    for schedule in ("Cooperative", "Pingpong", "StreamK"):
        of_schedule = [g for g in SM90 if g.kind in (schedule, f"Fast{schedule}")]
        assert {g.cluster for g in of_schedule} == {(1, 1), (2, 1), (1, 2)}
        assert {g.dtype for g in of_schedule} == {"bf16", "fp16", "e4m3"}
        assert {g.a for g in of_schedule} == {g.b for g in of_schedule} == {"k", "mn"}


# -- Flux's kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, most", [("80", 30), ("90a", 23)])
def test_few_configs_have_every_value(arch: str, most: int) -> None:
    chosen = covering(arch)
    every = [config for config in config_set("full", [arch]) if config.op in FUSED]
    assert set(chosen) <= set(every) and len(chosen) <= most
    assert set().union(*map(values_of, chosen)) == set().union(*map(values_of, every))


def test_all_of_them_have_run() -> None:
    """What was committed is of the configs that there are now."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "ptx" / "kernels.json").read_text())
    ran = {row["config"] for row in figures["rows"]}
    assert {config.name for arch in ("80", "90a") for config in covering(arch)} <= ran


# -- hours of both ---------------------------------------------------------------------------------


@stress_only
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize(
    "command",
    [
        ("cutlass_gemms.py", "--only", "sm{arch}", "--seeds", "4"),
        ("every_kernel.py", "--arch", "{arch}"),
        ("every_kernel.py", "--arch", "{arch}", "--traced"),
        ("seeds.py", "--arch", "{arch}", "--seeds", str(20 * STRESS)),
    ],
    ids=["CUTLASS", "every value", "trace builds", "seeds"],
)
def test_no_run_finds_a_fault(command: tuple[str, ...], arch: str) -> None:
    """Results match float64, and trace builds compute the same bits as others."""
    run(*(word.format(arch=arch) for word in command))
