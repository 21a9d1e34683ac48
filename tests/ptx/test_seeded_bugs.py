"""Bugs in the PTX of flux's own kernels: each is reported as a race that names both accesses.

The text is changed when a library is loaded (``CudaDevice.edit``): nothing is compiled again.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flux.transport.virtual import VirtualWorld
from harness import STRESS, stress_only
from ptx_device import PtxDevice
from reference import Inputs, Problem
from virtual_cases import call_all

SM80, SM90, REDUCE = "sm806kernel", "device_kernel", "reduce_kernelIN7cutlass10bfloat16_tELi8"


@dataclass(frozen=True)
class Bug:
    """An edit of one kernel.

    Attributes:
        arch: of the kernels.
        op: that is called.
        kernel: a part of its name.
        pattern, change: a regular expression of the PTX text, and what comes in its place.
        error: what the message says.
        number: which match is changed; None: all.
    """

    arch: str
    op: str
    kernel: str
    pattern: str
    change: str
    error: str
    number: int | None = None

    def edit(self, text: str) -> str:
        """Return the text with the bug, where it has the kernel."""
        parts = re.split(r"(?=^\.(?:visible|weak|entry))", text, flags=re.M)
        return "".join(self._edit(part) if self._is_in(part) else part for part in parts)

    def _is_in(self, part: str) -> bool:
        name = re.search(r"\.entry (\w+)", part)
        return name is not None and self.kernel in name.group(1)

    def _edit(self, part: str) -> str:
        matches = list(re.finditer(self.pattern, part))
        assert matches, f"{self.kernel} has no {self.pattern}"
        chosen = matches if self.number is None else [matches[self.number]]
        for match in reversed(chosen):
            part = part[: match.start()] + match.expand(self.change) + part[match.end() :]
        return part


ACQUIRED = "acquire of the signal that announces it"
RELEASED = r"a release and an acquire \(or fences\) of scope .sys"
FENCED = "a fence.proxy.async between them"
BARRIER = "a barrier of both warps"
BULK = r"cp.async.bulk.wait_group \(without .read\) by the thread that copies"
COUNTED = "a wait for the phase of the mbarrier that counts its bytes"
BUGS = {
    # -- sm_80: AllGather + GEMM
    "acquire made relaxed": Bug(
        "80", "ag_gemm", SM80, r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED
    ),
    "acquire of the GPU's scope": Bug(
        "80", "ag_gemm", SM80, r"ld\.acquire\.sys", "ld.acquire.gpu", ACQUIRED
    ),
    "one group of copies less is awaited": Bug(
        "80",
        "ag_gemm",
        SM80,
        r"cp\.async\.wait_group 2",
        "cp.async.wait_group 3",
        "cp.async.wait_group by the thread that copies",
    ),
    "no barrier behind the copies": Bug(
        "80",
        "ag_gemm",
        SM80,
        r"(cp\.async\.wait_group 2;[^@]*?)bar\.sync 0;",
        r"\1",
        "cp.async.wait_group by the thread that copies, and for other threads a barrier",
    ),
    "no barrier in the epilogue": Bug(
        "80", "ag_gemm", SM80, r"bar\.sync 0;", "", "race: .* missing is " + BARRIER, -2
    ),
    # -- sm_80: GEMM + ReduceScatter
    "flags read relaxed": Bug(
        "80", "gemm_rs", REDUCE, r"ld\.acquire\.sys", "ld.relaxed.sys", RELEASED
    ),
    "flags read at the GPU's scope": Bug(
        "80", "gemm_rs", REDUCE, r"ld\.acquire\.sys", "ld.acquire.gpu", "the scope .sys at both"
    ),
    "flags raised relaxed": Bug(
        "80", "gemm_rs", SM80, r"st\.release\.sys", "st.relaxed.sys", RELEASED
    ),
    "flags raised at the GPU's scope": Bug(
        "80", "gemm_rs", SM80, r"st\.release\.sys", "st.release.gpu", "the scope .sys at both"
    ),
    "no barrier behind the wait for flags": Bug(
        "80",
        "gemm_rs",
        REDUCE,
        r"bar\.red\.and\.pred\s+(\S+), 0, (\S+);",
        r"and.pred \1, \2, \2;",
        RELEASED,
    ),
    "no barrier before the flags": Bug(
        "80",
        "gemm_rs",
        SM80,
        r"bar\.red\.and\.pred\s+(\S+), 0, (\S+);",
        r"and.pred \1, \2, \2;",
        RELEASED,
    ),
    # -- sm_90a: AllGather + GEMM
    "no proxy fence behind the acquire": Bug(
        "90a", "ag_gemm", SM90, r"fence\.proxy\.async\.global;", "", FENCED
    ),
    "TMA without the acquire": Bug(
        "90a", "ag_gemm", SM90, r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED
    ),
    "no proxy fence before a store": Bug(
        "90a", "ag_gemm", SM90, r"fence\.proxy\.async\.shared::cta;", "", FENCED
    ),
    "no barrier before a store": Bug(
        "90a",
        "ag_gemm",
        SM90,
        r"(fence\.proxy\.async\.shared::cta;[^@]*?)bar\.sync \S+ \S+;",
        r"\1",
        "missing is ",
    ),
    "the memory of a store is used again": Bug(
        "90a",
        "ag_gemm",
        SM90,
        r"wait_group\.read 1;",
        "wait_group.read 3;",
        "cp.async.bulk.wait_group.read by the thread",
    ),
    "mbarrier waits made relaxed": Bug(
        "90a",
        "ag_gemm",
        SM90,
        r"try_wait\.parity\.shared",
        "try_wait.parity.relaxed.cta.shared",
        "race",
    ),
    "a product is not awaited": Bug(
        "90a",
        "ag_gemm",
        SM90,
        r"wgmma\.wait_group\.sync\.aligned 1",
        "wgmma.wait_group.sync.aligned 2",
        "race",
    ),
    "slots given back relaxed": Bug(
        "90a",
        "ag_gemm",
        SM90,
        r"mbarrier\.arrive\.shared::cluster",
        "mbarrier.arrive.relaxed.cluster.shared::cluster",
        "race",
    ),
    "mbarriers without a fence": Bug(
        "90a", "ag_gemm", SM90, r"fence\.mbarrier_init\.release\.cluster;", "", "race"
    ),
    # -- sm_90a: GEMM + ReduceScatter
    "bulk stores awaited with .read": Bug(
        "90a", "gemm_rs", SM90, r"bulk\.wait_group 0", "bulk.wait_group.read 0", BULK
    ),
    "no warp barrier before the flags": Bug(
        "90a", "gemm_rs", SM90, r"bar\.warp\.sync -1;", "", "race"
    ),
    "flags of bulk stores relaxed": Bug(
        "90a", "gemm_rs", SM90, r"st\.release\.sys", "st.relaxed.sys", "race"
    ),
}


def call(device: PtxDevice, op: str, m: int, world: int = 2) -> None:
    """Call an op on all ranks, each of which is a GPU of its own."""
    p = Problem(op, 256, (512,), 512, torch.bfloat16)
    inputs = Inputs(p, m, world, seed=m)
    with VirtualWorld(world, device) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(world)]
        device.set_copy_delay(10_000)
        for _ in range(2):  # the first one reads the PTX: copies may be done before kernels start
            outs = call_all(ranks, ops, inputs)
            device.finish()
        for r, one in enumerate(ops):
            one.wait()
            inputs.check(outs[r], r)
            one.close()


def _run(
    answer: Any, library: Path, kernels: Path, arch: str, ops: list[str], bug: Bug | None
) -> None:
    torch.set_num_threads(1)
    device = PtxDevice(library, kernels, arch)
    device.cuda.edit = None if bug is None else bug.edit
    error = ""
    try:
        for op in ops:
            for seed in range(1 if bug else 2 * STRESS):
                device.cuda.seed = 1000 * seed
                for m in (256,) if bug else (131, 256):
                    call(device, op, m)
    except Exception as problem:
        error = device.cuda.error() or repr(problem)
    answer.send(error)
    os._exit(0)  # streams that failed are not waited for


def error_of(library: Path, kernels: Path, arch: str, ops: list[str], bug: Bug | None) -> str:
    """Return the first error of calls in a process of their own, which a bug may leave unusable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ptx_device", "virtual_cases"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, library, kernels, arch, ops, bug))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the process does not answer"
        return str(ours.recv())
    finally:
        process.kill()
        process.join()


# The others take minutes: make stress.
QUICK = {
    "acquire made relaxed",
    "flags raised relaxed",
    "no proxy fence behind the acquire",
    "bulk stores awaited with .read",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [stress_only]) for n in BUGS]
)
def test_a_bug_is_found(emulator: Path, ptx_kernels: Path, name: str) -> None:
    bug = BUGS[name]
    text = error_of(emulator, ptx_kernels, bug.arch, [bug.op], bug)
    assert re.search(bug.error, text), text or "nothing was reported"
    assert "PTX line" in text and re.search(r"\.(h|hpp|cuh):\d", text)


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_kernels_have_no_race(emulator: Path, ptx_kernels: Path, arch: str) -> None:
    assert error_of(emulator, ptx_kernels, arch, ["ag_gemm", "gemm_rs"], None) == ""
