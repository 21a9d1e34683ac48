"""What the package says of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flux
from harness import run_ranks

ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_pyproject() -> None:
    text = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    stated = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert stated is not None
    assert flux.__version__ == stated.group(1)


def test_every_public_name_is_there() -> None:
    for name in flux.__all__:
        assert getattr(flux, name) is not None
    for name in flux.ops.__all__:
        assert getattr(flux.ops, name).__doc__


def test_importing_flux_loads_little() -> None:
    """Public names are imported at their first use: transports, kernels and tuner with them."""
    script = (
        "import sys, flux; print(*sorted(m for m in sys.modules if m.partition('.')[0] == 'flux'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "flux" in loaded and len(loaded) <= 25
    assert not [name for name in loaded if name.split(".")[1:2] not in ([], ["core"])]


def test_an_op_on_the_cpu_loads_nothing_of_gpus() -> None:
    script = (
        "import sys, torch, torch.distributed as dist, flux\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "with flux.AGGemm(max_m=8, n=8, k=8) as op:\n"
        "    op(torch.zeros(8, 8), torch.zeros(8, 8))\n"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] == 'flux'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "flux.ops.ag_gemm" in loaded
    of_gpus = ("backends.cuda", "kernels.build", "kernels.registry", "symm_mem", "nvshmem")
    assert not [name for name in loaded for part in of_gpus if part in name]
    assert len(loaded) <= 64


def test_backends_are_told_apart_by_their_package_alone() -> None:
    """The protocol of flux/core/backend.py is all that the rest knows of them."""
    classes = {"CpuBackend", "CudaBackend", "UnfusedBackend"}
    for path in ROOT.joinpath("flux").rglob("*.py"):
        if "backends" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not names & classes, f"{path}:{node.lineno}"


def _functions_of_calls(rank: int, world: int, name: str) -> list[list[tuple[str, str]]]:
    """Return file and name of the functions of flux that two calls enter.

    The first has a weight that the op has not met, the second differs from it in nothing.
    """
    with getattr(flux, name)(max_m=8, n=8, k=8, tuning=flux.Knobs(path="fused")) as op:
        x, weight = (torch.zeros(rows, 8 if name == "AGGemm" else 4) for rows in (4, 4))
        if name == "GemmRS":
            x, weight = torch.zeros(8, 4), torch.zeros(8, 4)
        op(x, weight.clone())
        entered: list[tuple[str, str]] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            path = Path(code.co_filename)
            if event == "call" and path.is_relative_to(ROOT / "flux"):
                entered.append((path.relative_to(ROOT).as_posix(), code.co_name))

        found = []
        for _ in range(2):
            entered.clear()
            sys.setprofile(note)
            try:
                op(x, weight)
            finally:
                sys.setprofile(None)
            found.append(list(entered))
    return found


@pytest.mark.parametrize(
    ("name", "file", "most", "most_again"),
    [("AGGemm", "ag_gemm.py", 53, 34), ("GemmRS", "gemm_rs.py", 44, 31)],
)
def test_a_call_passes_through_the_files_that_the_docs_name(
    name: str, file: str, most: int, most_again: int
) -> None:
    text = ROOT.joinpath("docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## Following one call")[1].split("\n## ")[0]
    named = set(re.findall(r"\]\(\.\./(flux/[a-z_/]+\.py)\)", section))
    named = {path.replace("ag_gemm.py", file) for path in named}
    first, second = run_ranks(2, _functions_of_calls, name)[0]
    assert {path for path, _ in first} == named
    assert len(first) <= most and len(second) <= most_again
