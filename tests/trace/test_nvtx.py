"""NVTX ranges of calls on GPUs, recorded by a fake NVTX library."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulated import ROOT, EmulatedDevice, compiler
from flux import _C
from flux.backends.cuda import nvtx
from flux.machine import toolchain
from flux.transport.loopback import LoopbackWorld
from flux.transport.virtual import VirtualWorld
from loopback_cases import call as loopback_call
from reference import Inputs, Problem
from virtual_cases import call_all

SOURCE = ROOT / "tests/support/emulation/fake_nvtx.cpp"
COPY = "cuMemcpyAsync failed: emulated failure"
REFUSED = {"ag_gemm": COPY, "gemm_rs": "launch refused", "gemm_ar": COPY}
NAME = "libnvtx3interop.so.1"


class FakeNvtx:
    """A fake NVTX library and its recorded calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.fake_nvtx_told.restype = ctypes.c_char_p

    def told(self) -> list[str]:
        """Ranges since the last call, by nesting: "call[stage stage]". All must be closed."""
        lines = self._library.fake_nvtx_told().decode().splitlines()
        assert self._library.fake_nvtx_depth() == 0 and "a pop too many" not in lines
        text = ""
        for line in lines:
            text += "]" if line == "-" else line[1:].removeprefix("flux ") + "["
        return [call for call in text.replace("[]", ",").replace("]", "]\n").splitlines() if call]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> FakeNvtx:
    target = tmp_path_factory.mktemp("nvtx") / "libfake_nvtx.so"
    options = ["-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    subprocess.run([compiler(), *options], check=True)
    return FakeNvtx(target)


@pytest.fixture
def heard(library: FakeNvtx, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvtx]:
    """The fake library, installed before any range is requested."""
    monkeypatch.delenv("FLUX_NVTX", raising=False)
    monkeypatch.delenv(nvtx.INJECTION, raising=False)
    monkeypatch.setattr(toolchain, "nvtx_libraries", lambda: [str(library.path)])
    nvtx._library.cache_clear()
    library.told()
    yield library
    nvtx._library.cache_clear()
    _C.load_nvtx("")


def problem(op: str) -> Problem:
    return Problem(op, 12, (16,), 8, torch.bfloat16)


def run(device: EmulatedDevice, op: str, sizes: list[int], gather: bool = False) -> None:
    """Calls on two ranks; the second of two alike is one that is recognised."""
    with VirtualWorld(2, device) as ranks:
        ops = [problem(op).build(ranks.rank(r), timeout_s=5.0) for r in range(2)]
        for m in sizes:
            call_all(ranks, ops, Inputs(problem(op), m, 2, seed=m), gather)
            device.finish()
        for made in ops:
            made.close()


STAGES = {
    "ag_gemm": "entry,own rows,kernel,copies,",
    "gemm_rs": "entry,kernel,reduction,",
    "gemm_ar": "entry,kernel,reduction,collect,",
}
NAMES = {"ag_gemm": "AGGemm", "gemm_rs": "GemmRS", "gemm_ar": "GemmAR"}


@pytest.mark.parametrize("op", list(STAGES))
def test_a_range_per_call_and_stage(
    device: EmulatedDevice, heard: FakeNvtx, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_NVTX", "1")
    run(device, op, [12, 7])
    ranges = [f"{NAMES[op]} M={m}[{STAGES[op]}]" for m in (12, 12, 7, 7)]
    assert heard.told() == ranges


def test_gathered_rows_are_collected(
    device: EmulatedDevice, heard: FakeNvtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_NVTX", "1")
    run(device, "ag_gemm", [12], gather=True)
    assert heard.told() == ["AGGemm M=12[entry,own rows,kernel,copies,collect,]"] * 2


@pytest.mark.parametrize("op", list(STAGES))
def test_a_call_with_simulated_peers_is_one_range(
    device: EmulatedDevice, heard: FakeNvtx, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_NVTX", "1")
    with LoopbackWorld(2, device) as ranks, problem(op).build(ranks.rank()) as built:
        loopback_call(ranks, built, Inputs(problem(op), 12, 2, seed=1))
        device.finish()
    assert heard.told() == [f"{NAMES[op]} M=12[{STAGES[op]}]"]


@pytest.mark.parametrize("op", list(STAGES))
def test_ranges_end_where_a_call_throws(
    device: EmulatedDevice, heard: FakeNvtx, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_NVTX", "1")
    with VirtualWorld(2, device) as ranks:
        ops = [problem(op).build(ranks.rank(r), timeout_s=5.0) for r in range(2)]
        refuse = device.library.emulator_refuse_copies
        if op == "gemm_rs":  # makes no copies
            refuse = device.library.emulator_refuse_launches
        refuse(1)
        inputs = Inputs(problem(op), 12, 2, seed=1)
        try:
            for r in range(2):
                with (
                    device.on_stream(ranks.streams[r]),
                    pytest.raises(RuntimeError, match=REFUSED[op]),
                ):
                    inputs.call(ops[r], r)
        finally:
            refuse(0)
        for made in ops:
            made.close()
    # The stage named last is the one that is refused.
    begun = {
        "ag_gemm": "entry,own rows,",
        "gemm_rs": "entry,kernel,",
        "gemm_ar": STAGES["gemm_ar"],
    }
    assert heard.told() == [f"{NAMES[op]} M=12[{begun[op]}]"] * 2


@pytest.mark.parametrize(
    ("chosen", "attached", "ranges"),
    [("", "", 0), ("", "tool.so", 2), ("0", "tool.so", 0), ("1", "", 2)],
)
def test_ranges_depend_on_flux_nvtx_and_an_attached_tool(
    device: EmulatedDevice,
    heard: FakeNvtx,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    attached: str,
    ranges: int,
) -> None:
    monkeypatch.setenv("FLUX_NVTX", chosen)
    monkeypatch.setenv(nvtx.INJECTION, attached)
    run(device, "gemm_rs", [12])
    assert len(heard.told()) == ranges


def test_a_missing_library_warns_once(
    device: EmulatedDevice, heard: FakeNvtx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_text("not a library")
    names = [str(broken), str(device.library._name)]  # one that cannot be opened, one without NVTX
    monkeypatch.setattr(toolchain, "nvtx_libraries", lambda: names)
    monkeypatch.setenv("FLUX_NVTX", "1")
    with pytest.warns(RuntimeWarning, match="no NVTX library was found") as warned:
        run(device, "gemm_rs", [12])
    (said,) = [str(w.message) for w in warned if w.category is RuntimeWarning]
    assert "libbroken.so" in said and "has no nvtxRangePushA" in said
    assert heard.told() == []


def test_the_library_of_the_package_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvtx3interop.so.1").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    of_package = "/site/nvidia/lib/libnvtx3interop.so.1"
    monkeypatch.setattr(
        toolchain,
        "_package_files",
        lambda package, name: [of_package] if (package, name) == ("nvidia-nvtx", NAME) else [],
    )
    at_home = str(tmp_path / "lib64" / NAME)
    assert toolchain.nvtx_libraries() == [of_package, at_home, NAME, "libnvToolsExt.so.1"]
