"""python -m ptx_machine: run, trace and profile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ptx_machine.cli.app import app
from ptx_machine.cli.programs import UsageError, find_nvcc, load, ptx_of_library
from ptx_text import kernel

# y[i] = x[i] + by, for the 32 threads of a block.
ADD = """
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    ld.param.u64 %rd3, [p2];
    cvt.u32.u64 %r5, %rd3;
    mul.wide.u32 %rd4, %r0, 4;
    add.s64 %rd1, %rd1, %rd4;
    add.s64 %rd2, %rd2, %rd4;
    ld.global.u32 %r6, [%rd1];
    add.u32 %r6, %r6, %r5;
    st.global.u32 [%rd2], %r6;
"""

# The last of the warps to come leaves its number. The stores are strong, so none is a data race.
LAST = """
    ld.param.u64 %rd1, [p0];
    shr.u32 %r5, %r0, 5;
    st.relaxed.gpu.global.u32 [%rd1], %r5;
"""

ARGS = ["--block", "32", "--arg", "x:int32[32]=arange", "--arg", "y:int32[32]", "--arg", "7"]


@pytest.fixture
def add(tmp_path: Path) -> str:
    path = tmp_path / "add.ptx"
    path.write_text(kernel(ADD, 3))
    return str(path)


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def fails(status: int, *words: str) -> str:
    result = command(*words)
    assert result.exit_code == status, result.output
    return result.output


# -- run -------------------------------------------------------------------------------------------


def test_run_prints_what_changed(add: str) -> None:
    result = command("run", add, *ARGS)
    assert result.exit_code == 0, result.output
    assert "k: 1 blocks" in result.output
    assert "y: int32[32]" in result.output and "7,  8,  9" in result.output
    assert "x:" not in result.output


def test_run_saves_tensors_and_loads_them(add: str, tmp_path: Path) -> None:
    source, target = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(source, np.full(32, 5, np.int32))
    words = ["--block", "32", "--arg", str(source), "--arg", "y:int32[32]", "--arg", "0x10"]
    assert command("run", add, *words, "--save", f"y={target}", "--quiet").output.count("\n") == 1
    assert (np.load(target) == 21).all()


def test_seeds_find_an_order_that_changes_the_result(tmp_path: Path) -> None:
    path = tmp_path / "last.ptx"
    path.write_text(kernel(LAST, 1))
    words = ["--block", "128", "--arg", "x:int32[1]"]
    assert command("run", str(path), *words).exit_code == 0
    output = fails(1, "run", str(path), *words, "--seeds", "20")
    assert "x differs between the orders of --seed 0 and --seed" in output


def test_seeds_that_agree(add: str) -> None:
    result = command("run", add, *ARGS, "--seeds", "3")
    assert result.exit_code == 0 and "3 orders" in result.output


def test_a_failing_kernel_says_how_to_replay_it(add: str) -> None:
    words = [*ARGS]
    words[words.index("y:int32[32]")] = "y:int32[31]"
    output = fails(1, "run", add, *words, "--seed", "4")
    assert "outside of global memory" in output and "st.global.u32" in output
    assert "run it again with --seed 4" in output


def test_a_kernel_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "loop.ptx"
    path.write_text(kernel("L: bra L;", 0))
    output = fails(1, "run", str(path), "--max-statements", "1000")
    assert "no end after 1000 statements" in output


@pytest.mark.parametrize(
    "words, error",
    [
        (["--arg", "1"], "takes 3 arguments (bytes: 8, 8, 8), got 1"),
        (["--arg", "int32[3"], "is none of 300"),
        (["--arg", "int33[3]"], "torch has no type int33"),
        (["--arg", "int32[3]=two"], "two is none of zeros"),
        (["--arg", "a:1", "--arg", "a:2"], "two arguments are called a"),
        (["--arg", "nowhere.npy"], "cannot be read"),
        (["--arg", "bytes=0"], "hexadecimal"),
        (["--grid", "0"], "expected one to three sizes"),
        (["--kernel", "other"], "no kernel with 'other' in its name:\n  k"),
        (["--save", "z=z.npy"], "expected NAME=FILE.npy"),
        (["--device", "B1"], "no device is called B1"),
        (["--shared", str(300 * 1024)], "a block needs 32 threads"),
    ],
)
def test_options_that_do_not_fit(add: str, words: list[str], error: str) -> None:
    own = {"--arg", "--shared"} & set(words)
    base = ["--block", "32"] if "--arg" in own else ARGS
    output = command("run", add, *base, *words)
    assert output.exit_code in (1, 2) and error in output.output


def test_files_that_hold_no_kernel(tmp_path: Path) -> None:
    assert "there is no file" in fails(2, "run", str(tmp_path / "none.ptx"))
    (tmp_path / "a.txt").write_text("")
    assert "is neither .ptx nor .cu" in fails(2, "run", str(tmp_path / "a.txt"))
    (tmp_path / "a.so").write_bytes(b"ELF")
    assert "holds no PTX" in fails(2, "run", str(tmp_path / "a.so"))
    (tmp_path / "a.ptx").write_text(kernel("frobnicate.u32 %r1, %r1;", 0))
    output = fails(1, "run", str(tmp_path / "a.ptx"))
    assert "unknown instruction: k, PTX line" in output and "frobnicate" in output


def test_cuda_source(tmp_path: Path) -> None:
    if find_nvcc() is None:
        pytest.skip("there is no nvcc")
    source = tmp_path / "scale.cu"
    source.write_text(
        """
        extern "C" __global__ void first(float* x) { x[threadIdx.x] = BY; }
        extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }
        """
    )
    words = ["--block", "4", "--arg", "x:float32[4]=ones", "--arg", "2.5", "--nvcc", "-DBY=3"]
    output = fails(2, "run", str(source), *words)
    assert "several such kernels" in output and "scale" in output
    result = command("run", str(source), *words, "--kernel", "scale")
    assert result.exit_code == 0 and "2.5000, 2.5000" in result.output, result.output
    assert "nvcc fails" in fails(2, "run", str(source), "--nvcc", "-DBY=?")


def test_ptx_of_libraries() -> None:
    """A fatbinary as nvcc writes it: a header, entries with headers; the first is no PTX."""
    text = kernel("", 0).encode() + b"\0"
    entries = b""
    for kind, content in ((2, b"cubin"), (1, text)):
        head = kind.to_bytes(2, "little") + bytes(2) + (64).to_bytes(4, "little")
        entries += (head + len(content).to_bytes(8, "little")).ljust(64, b"\0") + content
    fatbinary = (
        (0xBA55ED50).to_bytes(4, "little") + b"\1\0\x10\0" + len(entries).to_bytes(8, "little")
    )
    assert list(ptx_of_library(b"xx" + fatbinary + entries + b"yy", "a.so")) == [kernel("", 0)]
    compressed = bytearray(entries)
    compressed[64 + len(b"cubin") + 41] = 0x20  # in the flags of the PTX
    with pytest.raises(UsageError, match="compressed"):
        list(ptx_of_library(fatbinary + bytes(compressed), "a.so"))


def test_an_exact_name_wins(tmp_path: Path) -> None:
    one = kernel("", 0)
    path = tmp_path / "two.ptx"
    body = one[one.index(".visible") :]
    path.write_text(one + body.replace("entry k(", "entry kk("))
    assert load(path, "k", "90a", []).kernel == "k"
    with pytest.raises(UsageError, match=r"several such kernels(.|\n)*kk"):
        load(path, None, "90a", [])


# -- trace and profile -----------------------------------------------------------------------------


def test_trace_writes_spans(add: str, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    result = command("trace", add, *ARGS, "--out", str(target))
    assert result.exit_code == 0, result.output
    rows = json.loads(target.read_text())["traceEvents"]
    assert any(row.get("args", {}).get("ptx", "").startswith("st.global") for row in rows)


def test_trace_prints_the_text_of_a_warp(add: str) -> None:
    result = command("trace", add, *ARGS, "--text", "0:0")
    assert "ffffffff  st.global.u32 [%rd2], %r6;" in result.output
    assert "expected BLOCK:WARP" in fails(2, "trace", add, *ARGS, "--text", "0")
    assert "are left out" in command("trace", add, *ARGS, "--text", "0:0", "--most", "3").output


def test_profile_prints_tables_and_json(add: str) -> None:
    result = command("profile", add, *ARGS, "--grid", "2")
    assert "warp 0" in result.output and "global stores, bytes" in result.output
    assert "PTX:" in result.output
    (counters,) = json.loads(command("profile", add, *ARGS, "--grid", "2", "--json").output)
    assert counters["blocks"] == 2
    (role,) = counters["roles"]
    assert role["warps"] == [0] and role["work"]["global_stores"] == 2 * 32 * 4


def test_profile_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys, torch
from ptx_machine import Device, Module
x, y = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
Device().launch(Module({kernel(ADD, 3)!r}), "k", grid=1, block=32, args=[x, y, int(sys.argv[1])])
print("sum", int(y.sum()))
"""
    )
    result = command("profile", str(script), "--", "4")
    assert result.exit_code == 0, result.output
    assert "sum 160" in result.output and "global stores, bytes" in result.output
