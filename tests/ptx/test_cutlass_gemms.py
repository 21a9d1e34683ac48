"""CUTLASS's own GEMMs on the PTX machine: code that nobody wrote with the machine in mind.

Compiling them takes 30 s for sm_80 and five minutes for sm_90a, so all but a small one run in `make
stress` only, or where they are built already.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_gemms import GEMMS, SM80, SM90, is_built
from flux.kernels.build import MissingToolError, find_tools
from harness import STRESS, stress_only
from ptx_target import ptx_target

SCRIPT = Path(__file__).parents[1] / "support" / "emulation" / "cutlass_gemms.py"


def tools() -> None:
    """Skip the test where nvcc or CUTLASS is missing."""
    try:
        find_tools(ptx_target())
    except MissingToolError as error:
        pytest.skip(str(error))


def run(*options: str) -> None:
    """In a process of its own: the device of this one may have streams."""
    tools()
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.timeout(300)
def test_a_small_gemm_matches_float64() -> None:
    """bf16 for sm_80; compiling it takes 8 s of the first run in a checkout."""
    run("--small", "--seeds", str(2 * STRESS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", ["Cooperative_e4m3", "Pingpong_bf16_mnmn", "StreamK_fp16"])
def test_gemms_for_sm90_that_are_built(kernel: str) -> None:
    (library,) = {g.library for g in SM90 if kernel in g.name and "Fast" not in g.name}
    tools()
    if not is_built(library):
        pytest.skip("compiled by make stress")
    run("--only", f"sm90a_{kernel}", "--seeds", "1")


@stress_only
@pytest.mark.timeout(1800)
def test_gemms_for_sm80_match_float64() -> None:
    run("--only", "sm80", "--seeds", "4")


@stress_only
@pytest.mark.timeout(3000)
def test_gemms_for_sm90_match_float64() -> None:
    run("--only", "sm90", "--seeds", "4")


def test_what_is_compared() -> None:
    """Schedules, clusters, dtypes and orders of the operands, each with each that matters."""
    assert len({gemm.name for gemm in GEMMS}) == len(GEMMS)
    stream_k = {(g.dtype, g.a, g.b) for g in SM80 if g.kind == "StreamK"}
    assert {"bf16", "fp16"} == {dtype for dtype, _, _ in stream_k}
    plain = [g for g in SM80 if g.dtype in ("bf16", "fp16")]
    assert {(g.a, g.b) for g in plain} == {(a, b) for a in ("k", "mn") for b in ("k", "mn")}
    for schedule in ("Cooperative", "Pingpong", "StreamK"):
        of = [g for g in SM90 if g.kind.endswith(schedule)]
        assert {g.cluster for g in of} == {(1, 1), (2, 1), (1, 2)}
        assert {g.dtype for g in of} == {"bf16", "fp16", "e4m3"}
        assert {g.a for g in of} == {g.b for g in of} == {"k", "mn"}
