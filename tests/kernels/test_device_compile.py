"""csrc/core compiles for the device: kernels run the very maps that the other tests check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import stress_only

CSRC = Path(__file__).parents[2] / "csrc"
CHECK = CSRC / "tests" / "check_device.cu"


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")


def test_the_check_names_every_core_function() -> None:
    source = CHECK.read_text()
    headers = sorted((CSRC / "core").glob("*.h"))
    functions = {
        name
        for header in headers
        for name in re.findall(r"^FLUX_HD constexpr [\w:]+ (\w+)\(", header.read_text(), re.M)
    }
    assert len(functions) > 30, "the pattern no longer matches how functions are declared"
    missing = {name for name in functions if not re.search(rf"\b{name}\(", source)}
    assert not missing, f"add them to {CHECK.name}"
    assert all(f'#include "core/{header.name}"' in source for header in headers)


@stress_only  # the kernels of the PTX machine include it
def test_core_compiles_for_the_device(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is neither under CUDA_HOME nor on the PATH")
    command = [nvcc, "-std=c++17", f"-I{CSRC}", "-Werror", "all-warnings"]
    for arch in ("80", "90a"):
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    command += ["-c", str(CHECK), "-o", str(tmp_path / "check.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert not done.stderr.strip(), done.stderr
