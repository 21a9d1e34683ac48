"""PTX kernels around a few statements, for tests of the machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from ptx_machine import Counters, Device, Module
from ptx_machine.cli.programs import find_nvcc

LANES = 32
BUILT = Path(__file__).parents[2] / "build" / "ptx-tests"


def kernel(body: str, params: int, outside: str = "", maps: int = 0, attributes: str = "") -> str:
    """Return a kernel ``k``; %rd0 is 8 * tid.x.

    Args:
        body: its statements, but the last ``ret``.
        params: number of pointers p0, p1, ... among its parameters.
        outside: declarations before the kernel.
        maps: number of tensor maps m0, m1, ... behind the pointers.
        attributes: of the kernel, as in ``.maxntid 128``.
    """
    declared = [f".param .u64 p{number}" for number in range(params)]
    declared += [f".param .align 64 .b8 m{number}[128]" for number in range(maps)]
    names = ", ".join(declared)
    return f"""
.version 8.7
.target sm_90a
.address_size 64
{outside}
.visible .entry k({names})
{attributes}
{{
    .reg .pred %p<16>;
    .reg .b16 %h<32>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<64>;
    .reg .f32 %f<64>;
    .reg .f64 %fd<16>;
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd0, %r0, 8;
    {body}
    ret;
}}
"""


def await_phase(barrier: str, parity: object, label: str) -> str:
    """Return a loop until the phase of this parity is complete; it uses %p15."""
    return f"""
    {label}:
        mbarrier.try_wait.parity.shared::cta.b64 %p15, [{barrier}], {parity};
        @!%p15 bra {label};
    """


def run(text: str, tensors: list[torch.Tensor], **options: Any) -> Counters:
    """Run kernel ``k`` with these tensors as its arguments."""
    settings: dict[str, Any] = {"grid": 1, "block": LANES, **options}
    device = Device(multiprocessors=settings.pop("multiprocessors", 8))
    return device.launch(Module(text), "k", args=tensors, **settings)


def apply(statement: str, operands: list[torch.Tensor], width: int, out: int) -> torch.Tensor:
    """Execute ``statement`` on a thread for each value of an operand.

    Args:
        statement: with {d} for its target and {0}, {1}, ... for its operands.
        operands: [threads] int64 each: the bits of a value.
        width: bits of an operand.
        out: bits of the result.

    Returns:
        [threads] int64, the result's bits.
    """
    names = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}
    lines = []
    for number, _ in enumerate(operands):
        lines += [
            f"ld.param.u64 %rd1, [p{number}];",
            "add.s64 %rd1, %rd1, %rd0;",
            f"ld.global.b{width} {names[width]}{10 + number}, [%rd1];",
        ]
    sources = [f"{names[width]}{10 + number}" for number in range(len(operands))]
    target = f"{names[out]}20"
    lines += [
        statement.format(*sources, d=target),
        f"ld.param.u64 %rd1, [p{len(operands)}];",
        "add.s64 %rd1, %rd1, %rd0;",
        f"st.global.b{out} [%rd1], {target};",
    ]
    threads = len(operands[0])
    result = torch.zeros(threads, dtype=torch.int64)
    run(kernel("\n    ".join(lines), len(operands) + 1), [*operands, result], block=threads)
    return result


def nvcc() -> str:
    """Return the path of nvcc; skip the test where there is none."""
    path = find_nvcc()
    if path is None:
        pytest.skip("there is no nvcc")
    return path


def compiled(text: str, *options: str) -> Module:
    """Compile CUDA source to PTX, with source lines: once in a checkout, for all processes.

    It is compiled again where a file of a folder of headers (-I) has changed.
    """
    command = [nvcc(), "-std=c++17", "-O3", "-lineinfo", "-ptx", *options]
    folders = [Path(option[2:]) for option in options if option.startswith("-I")]
    headers = sorted(path for folder in folders for path in folder.rglob("*.*h"))
    contents = [path.read_bytes() for path in headers]
    key = repr((text, command, Path(command[0]).resolve().stat().st_mtime_ns, contents))
    target = BUILT / f"{hashlib.sha256(key.encode()).hexdigest()}.ptx"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=BUILT) as folder:
            source, whole = Path(folder, "kernels.cu"), Path(folder, "kernels.ptx")
            source.write_text(text)
            subprocess.run([*command, source, "-o", whole], check=True, env=dict(os.environ))
            whole.replace(target)
    return Module(target.read_text())
