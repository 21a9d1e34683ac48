"""Bugs in the PTX of flux's own kernels: each is reported, with the statement that is wrong.

The text is changed when a library is loaded (``CudaDevice.edit``): nothing is compiled again.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated import CrowdedWorld, HeapWorld, SwitchedWorld
from emulated_nvshmem import puts_of
from flux import Knobs
from flux.kernels import runtime
from flux.transport.virtual import VirtualWorld
from grouped_bugs import CASES, GROUPED_BUGS, call_experts
from harness import STRESS, stress_only
from ptx_device import PtxDevice
from reference import Inputs, Problem
from seeded_bug import Bug
from seeded_bugs import BUGS, PAGE, page
from virtual_cases import call_on_and_on

REPLAYS = 4
TRIES = 40  # with other orders of warps: some bugs show where a rank is behind its peer


def problem_of(op: str) -> Problem:
    n, k = (1536, 64) if op == "gemm_ar" else (512, 512)
    return Problem(op, 256, (n,), k, torch.bfloat16)


def built(ranks: VirtualWorld, device: PtxDevice, op: str, knobs: Knobs | None = None) -> list[Any]:
    """Return the op of each rank, which is a GPU of its own."""
    device.set_copy_delay(10_000)
    tuning = knobs or Knobs()
    return [problem_of(op).build(ranks.rank(r), tuning=tuning) for r in range(ranks.world)]


def call(
    device: PtxDevice,
    ranks: VirtualWorld,
    op: str,
    rows: Sequence[int],
    knobs: Knobs | None = None,
) -> None:
    """Call an op on all ranks, once for each number of rows, one behind the other."""
    everything = [Inputs(problem_of(op), m, ranks.world, seed=m) for m in rows]
    # What kernels add up in flight may err by more.
    summed = "local" if knobs is None else knobs.reduce or "local"
    path = "unfused" if summed != "local" else "two_levels" if ranks.nodes > 1 else "fused"
    with ranks:
        ops = built(ranks, device, op, knobs)
        for _ in range(2):  # the first one reads the PTX: copies may be done before kernels start
            outs = call_on_and_on(ranks, ops, everything)
            device.finish()
        for inputs, of_call in zip(everything, outs, strict=True):
            for r, out in enumerate(of_call):
                ops[r].wait()
                inputs.check(out, r, path)
        for one in ops:
            one.close()


def replay(device: PtxDevice, op: str, rows: Sequence[int], world: int = 2) -> None:
    """Capture the calls of all ranks, and replay them several times without a wait between."""
    p = problem_of(op)
    everything = [Inputs(p, m, world, seed=m) for m in rows]
    with VirtualWorld(world, device) as ranks:
        ops = built(ranks, device, op)
        given = [[inputs.local(r) for inputs in everything] for r in range(world)]
        device.know(*(t for of_rank in given for of_call in of_rank for t in of_call))

        def calls(r: int) -> list[torch.Tensor]:
            named = [{"m": m} if p.gathers else {} for m in rows]
            return [ops[r](*of, **name) for of, name in zip(given[r], named, strict=True)]

        with device.capture() as graph:
            outs = ranks.run(calls)
        for _ in range(REPLAYS):
            graph.replay()
        device.finish()
        for r, of_rank in enumerate(outs):
            for inputs, out in zip(everything, of_rank, strict=True):
                inputs.check([out], r)
        graph.close()
        for one in ops:
            one.close()


def nodes_of(device: PtxDevice, kernels: Path) -> HeapWorld:
    """Two ranks, each a node, which the libflux_nvshmem in ``kernels`` connects."""
    return HeapWorld(2, device, 2, puts_of(device, runtime.scan(kernels)[0].path))


def ranks_for(bug: Bug, device: PtxDevice, kernels: Path) -> VirtualWorld:
    """Return new ranks for a call with this bug."""
    if bug.puts:
        return nodes_of(device, kernels)
    kind = CrowdedWorld if bug.crowded else SwitchedWorld if bug.switch else VirtualWorld
    return kind(2, device)


def make_calls(device: PtxDevice, kernels: Path, bug: Bug) -> None:
    for seed in range(TRIES):
        device.cuda.seed = 1000 * seed
        if bug.op in CASES:
            call_experts(device, ranks_for(bug, device, kernels), bug.op, bug.rows)
        elif bug.captured:
            replay(device, bug.op, bug.rows)
        else:
            call(device, ranks_for(bug, device, kernels), bug.op, bug.rows, bug.knobs)


def make_calls_without_bug(device: PtxDevice, kernels: Path) -> None:
    for op in CASES:
        call_experts(device, VirtualWorld(2, device), op, (131, 256))
    for op in ("ag_gemm", "gemm_rs"):
        for seed in range(2 * STRESS if STRESS > 1 else 1):
            device.cuda.seed = 1000 * seed
            for rows in ((131,), (256,)) if STRESS > 1 else ():
                call(device, VirtualWorld(2, device), op, rows)
                call(device, nodes_of(device, kernels), op, rows)
            if op == "gemm_rs" and device.capability >= (9, 0):
                call(device, SwitchedWorld(2, device), op, (131,), Knobs(reduce="in_flight"))
            if seed % 8 == 0:
                call(device, VirtualWorld(2, device), op, (131, 256))  # and again: 256 before 131
                call(device, nodes_of(device, kernels), op, (131, 256))
                replay(device, op, (131,))


def _run(answer: Any, kernels: Path, arch: str, bug: Bug | None) -> None:
    torch.set_num_threads(1)
    device = PtxDevice(kernels, arch)
    device.cuda.edit = None if bug is None else bug.edit
    if bug is not None and bug.idle:
        device.cuda.machine.idle_patience = 2
    try:
        if bug is None:
            make_calls_without_bug(device, kernels)
        else:
            make_calls(device, kernels, bug)
    except Exception as problem:
        answer.send(device.cuda.error() or repr(problem))
        os._exit(0)  # streams that failed are not waited for, nor are ops closed that use them
    answer.send("")
    os._exit(0)


def error_of(kernels: Path, arch: str, bug: Bug | None) -> str:
    """Return the first error of calls in a process of their own, which a bug may leave unusable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ptx_device", "virtual_cases"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, kernels, arch, bug))
    process.start()
    theirs.close()
    try:
        assert ours.poll(400), "the process does not answer"
        return str(ours.recv())
    finally:
        process.kill()
        process.join()


def assert_reports(bug: Bug, text: str) -> None:
    """Check that a message says what is wrong, and of the statement that is wrong."""
    assert re.search(bug.error, text), text or "nothing was reported"
    everywhere = text.startswith("deadlock")
    failing = text if everywhere else text[text.rindex("PTX line") :]
    assert re.search(rf"PTX line \d+ \([^)]*\.(h|hpp|cuh):\d+\): {bug.at}", failing), text


# The others take minutes: make stress.
QUICK = {
    "flags raised relaxed",
    "no proxy fence behind the acquire",
    "bulk stores awaited with .read",
    "a relay without a fence before its put",
    "products counted without a fence",
}
ALL = {**BUGS, **GROUPED_BUGS}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [stress_only]) for n in ALL]
)
def test_a_bug_is_found(request: pytest.FixtureRequest, name: str) -> None:
    bug = ALL[name]
    minimal = bug.reduce == "local" or bug.switch
    fixture = "ptx_kernels" if minimal else "in_flight_kernels"
    if bug.tile_scheduler == "dynamic":
        fixture = "dynamic_kernels"
    kernels = request.getfixturevalue(fixture)
    assert_reports(bug, error_of(kernels, bug.arch, bug))


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_kernels_have_no_race(ptx_kernels: Path, arch: str) -> None:
    assert error_of(ptx_kernels, arch, None) == ""


def test_the_page_lists_all_bugs() -> None:
    wanted = "python tests/support/emulation/seeded_bugs.py"
    assert PAGE.read_text(encoding="utf-8") == page(), wanted
