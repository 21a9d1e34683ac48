"""The C ABI of kernels (csrc/cuda/abi.h) has one layout under all compilers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = [CSRC / "cuda" / "abi.h", CSRC / "cuda_moe" / "groups.h"]


def structs() -> dict[str, list[str]]:
    """Field names by struct, as the header declares them."""
    text = "".join(header.read_text() for header in HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    sizes = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\}(?: \1)?;", text, flags=re.S):
        fields = []
        for declaration in body.split(";"):
            pointer = re.search(r"\(\*(\w+)\)", declaration)
            names = (
                [pointer.group(1)]
                if pointer
                else re.findall(r"(\w+)(?:\[\w+\])?\s*(?:,|$)", declaration.strip())
            )
            fields += names
        sizes[name] = fields
    return sizes


def layout(folder: Path, compiler: str, suffix: str, *options: str) -> str:
    lines = [
        f'  printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
        for name, fields in structs().items()
        for field in fields
    ] + [f'  printf("{name} %zu\\n", sizeof({name}));' for name in structs()]
    source = folder / f"layout{suffix}"
    source.write_text(
        '#include <stdio.h>\n#include "cuda_moe/groups.h"\nint main(void) {\n'
        + "\n".join(lines)
        + "\n}\n"
    )
    program = folder / f"layout{suffix}.out"
    command = [compiler, *options, f"-I{CSRC}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=200)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def test_the_header_is_read_completely() -> None:
    declared = structs()
    assert set(declared) == {
        "FluxOrder",
        "FluxTraceRecord",
        "FluxTrace",
        "FluxSync",
        "FluxGather",
        "FluxAllReduce",
        "FluxCollectArgs",
        "FluxGroups",
        "FluxRouteArgs",
        "FluxGemmArgs",
        "FluxReduceArgs",
        "FluxMeetArgs",
        "FluxKernel",
    }
    assert {"m", "slots", "entries", "device"} <= set(declared["FluxGemmArgs"])
    assert declared["FluxKernel"][0] == "abi_version", (
        "the version must come first, in every version"
    )


def test_c_and_cpp_agree(tmp_path: Path) -> None:
    c, cpp = shutil.which("cc"), shutil.which("c++")
    if c is None or cpp is None:
        pytest.skip("no C or no C++ compiler")
    as_c = layout(tmp_path, c, ".c", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
    assert as_c == layout(tmp_path, cpp, ".cpp", "-std=c++17", "-Wall", "-Wextra", "-Werror")
    assert "FluxGemmArgs.sync" in as_c


def test_nvcc_agrees(tmp_path: Path) -> None:
    nvcc, cpp = shutil.which("nvcc"), shutil.which("c++")
    if nvcc is None or cpp is None:
        pytest.skip("no nvcc")
    assert layout(tmp_path, nvcc, ".cu") == layout(tmp_path, cpp, ".cpp", "-std=c++17")


def test_prepare_loads_the_code() -> None:
    """CUDA loads a kernel when it is first asked about, but not when an attribute is set: a kernel
    that waits would keep a later load waiting, too."""
    text = (CSRC / "cuda" / "load.cuh").read_text()
    (body,) = re.findall(r"int prepare_on\(.*?\) \{\n(.*?)\n\}", text, flags=re.S)
    assert "load_code(kernel)" in body and "cudaFuncGetAttributes(&attributes, kernels)" in text
    for header in ("cuda_moe/grouped.cuh", "cuda/gemm/sm80/gemm.cuh", "cuda/gemm/sm90/gemm.cuh"):
        assert "prepare_on(device, " in (CSRC / header).read_text()
