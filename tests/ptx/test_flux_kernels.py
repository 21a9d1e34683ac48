"""Flux's kernels on the PTX machine: what only a machine can ask of them.

As parts of ops, beside a GPU's: tests/gpu/test_gpu.py.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from device_fixtures import with_flux_kernels
from emulated import EmulatedDevice
from emulated_cases import eventually, never
from flux import _C, Knobs
from flux.transport.virtual import VirtualWorld
from harness import STRESS, more, stress_only
from matrix import OPS
from ptx_device import PtxDevice
from ptx_machine import extent
from reference import Inputs, Problem
from virtual_cases import call_all, checked_calls

BF16 = torch.bfloat16


def results(device: PtxDevice, p: Problem, m: int, world: int) -> list[torch.Tensor]:
    """Of one call of all ranks, compared with float64."""
    inputs = Inputs(p, m, world, seed=m)
    with VirtualWorld(world, device) as ranks:
        ops = [p.build(ranks.rank(r)) for r in range(world)]
        outs = call_all(ranks, ops, inputs)
        device.finish()
        for r, op in enumerate(ops):
            op.wait()
            inputs.check(outs[r], r)
            op.close()
    return [part for of_rank in outs for part in of_rank]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [131, *more(1, 300)])
def test_no_order_of_warps_changes_a_bit(ptx: PtxDevice, op: str, m: int) -> None:
    p, outputs = Problem(op, 300, (160,), 96, BF16), []
    try:
        for seed in range(3 * STRESS):
            ptx.cuda.seed = 1000 * seed
            outputs.append(results(ptx, p, m, 2))
    finally:
        ptx.cuda.seed = 0
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


@pytest.fixture(scope="module")
def wide(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    """A device whose GemmRS has clusters two tiles wide."""
    with with_flux_kernels(request, "90a", "wide_kernels") as device:
        yield device


@pytest.mark.timeout(300)  # compiles a kernel
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("reduce", ["local", "in_kernel"])
def test_a_tile_beyond_n_tells_of_no_other(wide: PtxDevice, reduce: str) -> None:
    """Three tiles and two clusters: the last tile's flag would be that of the next row of tiles."""
    p = Problem("gemm_rs", 300, (192,), 96, BF16)
    everything = [Inputs(p, m, 2, seed=m) for m in (300, 131)]
    try:
        for seed in range(2 * STRESS):
            wide.cuda.seed = 1000 * seed
            checked_calls(VirtualWorld(2, wide), p, everything, tuning=Knobs(reduce=reduce))
    finally:
        wide.cuda.seed = 0


def turns_of(ptx: PtxDevice, op: str, seed: int) -> tuple[int, list[tuple[str, int, int]]]:
    """Make calls of three ranks; return the order of turns, and what each kernel executed."""
    p = Problem(op, 150, (48,), 48, BF16)
    ptx.cuda.clear()
    ptx.cuda.seed = seed
    ptx.take_turns(seed)
    try:
        for m in (150, 7):
            results(ptx, p, m, 3)
        done = [(r["kernel"], r["launches"], r["statements"]) for r in ptx.cuda.records()]
        return ptx.turns_digest(), sorted(done)
    finally:
        ptx.cuda.seed = 0
        ptx.take_turns(0)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar", *more("gemm_rs")])
def test_a_seed_repeats_the_order_of_all_streams(ptx: PtxDevice, op: str) -> None:
    """Kernels of all ranks, copies and waits; another seed gives another order."""
    first = turns_of(ptx, op, 1000)
    assert turns_of(ptx, op, 1000) == first
    assert turns_of(ptx, op, 2000)[0] != first[0]


def test_a_library_that_is_loaded_again_is_the_same_module(ptx: PtxDevice) -> None:
    """Machines keep modules: ops that come and go must not add to them."""
    p = Problem("gemm_rs", 64, (64,), 64, BF16)
    results(ptx, p, 64, 2)
    before = ptx.cuda.machine.modules
    for _ in range(2):
        results(ptx, p, 64, 2)
    assert ptx.cuda.machine.modules == before


@pytest.mark.alone
def test_a_call_takes_seconds(ptx: PtxDevice) -> None:
    p = Problem("ag_gemm", 256, (512,), 512, BF16)
    results(ptx, p, 256, 2)  # reads the PTX
    begin = time.monotonic()
    results(ptx, p, 256, 2)
    assert time.monotonic() - begin < 3.0


def plain_gemm(ptx: PtxDevice, kept: list[torch.Tensor]) -> tuple[_C.Kernel, _C.GemmArgs]:
    """The kernel of AGGemm, and a product of one tile that waits for no signal."""
    (built,) = (k for k in ptx.registry.kernels.values() if k.config.op == "ag_gemm")
    kernel = _C.Kernel(str(built.library), built.symbol)
    kernel.prepare(0)
    a, b, out = (torch.zeros(128, 128, dtype=BF16) for _ in range(3))
    kept += [a, b, out]
    ptx.know(*kept)
    args = _C.GemmArgs()
    args.m = args.n = args.k = args.lda = args.ldb = args.ldd = 128
    args.alpha, args.device, args.order.world = 1.0, 0, 1
    args.a, args.b, args.d = a.data_ptr(), b.data_ptr(), out.data_ptr()
    return kernel, args


def test_a_peer_that_has_given_up_is_told_to_the_host(ptx: PtxDevice) -> None:
    """It wrote to this rank's status alone. A kernel looks there when it ends."""
    kept = [torch.zeros(8, dtype=torch.int64) for _ in range(2)]
    status, report = kept
    kernel, args = plain_gemm(ptx, kept)
    signals = torch.full((128,), 5, dtype=torch.int32)  # all rows are there
    args.signals, args.order.comm_tile_rows = signals.data_ptr(), 128
    args.order.nodes = args.order.domains = args.order.lanes = 1
    args.sync.timeout_ns = 10**10
    args.sync.epoch, args.sync.status, args.sync.report = 5, status.data_ptr(), report.data_ptr()
    for given_up in ([0, 0, 0, 0, 0], [4, 0, 3, 5, 0]):  # FLUX_ABANDONED, by rank 3
        status[:5] = torch.tensor(given_up)
        ptx.keep(signals)
        kernel.launch(args, 0)
        ptx.finish()
        assert report[:5].tolist() == given_up


def waiting_reduction(
    ptx: PtxDevice, most_blocks: int, kept: list[torch.Tensor]
) -> tuple[_C.Kernel, _C.ReduceArgs, torch.Tensor]:
    """A reduction of at most so many blocks, and the flags it waits for."""
    (built,) = (k for k in ptx.registry.kernels.values() if k.config.op == "gemm_rs")
    kernel = _C.Kernel(str(built.library), built.symbol)
    kernel.prepare(0)
    rows, n = 1024, 512
    slot, out = (torch.zeros(rows, n, dtype=BF16) for _ in range(2))
    flags, status = torch.zeros(1024, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    kept += [slot, out, flags, status]
    ptx.know(*kept)
    args = _C.ReduceArgs()
    args.rows = args.m = rows
    args.n, args.tile_m, args.tile_n, args.world = n, 128, 128, 1
    args.set_slots([slot.data_ptr()])
    args.set_outs([out.data_ptr()])
    args.slot_ld = args.out_ld = n
    args.scale, args.source_count, args.flags = 1.0, 1, flags.data_ptr()
    args.sm_count, args.most_blocks = 8, most_blocks
    args.sync.epoch, args.sync.timeout_ns, args.sync.status = 1, 10**10, status.data_ptr()
    return kernel, args, flags


def run_beside_gemm(
    ptx: PtxDevice,
    launch: Callable[[int], None],
    blocks: int,
    awaited: torch.Tensor,
    epoch: int = 1,
) -> str:
    """Launch a kernel that waits, and beside it the GEMM of a peer.

    Args:
        ptx: the device.
        launch: puts the kernel on a stream.
        blocks: how many wait.
        awaited: what it waits for; set to ``epoch`` when the GEMM has ended.

    Returns:
        The device's error, or "" if both ended.
    """
    machine = ptx.cuda.machine
    kept: list[torch.Tensor] = []  # until both have ended
    gemm, args = plain_gemm(ptx, kept)
    room = torch.zeros(64, dtype=torch.int64)
    ptx.know(room)
    args.workspace, args.workspace_bytes = room.data_ptr(), 512
    streams = [ptx.driver.create_stream() for _ in range(2)]
    before, machine.patience = machine.patience, 1.0
    try:
        launch(streams[0])
        # They start one by one, so their number may only pass by.
        assert eventually(lambda: never(lambda: machine.blocks_running != blocks))
        gemm.launch(args, streams[1])
        assert eventually(
            lambda: ptx.cuda.error() != "" or ptx.driver.ready(streams[1]), seconds=30
        )
        awaited.fill_(epoch)
        return ptx.cuda.error()
    finally:
        machine.patience = before
        for stream in streams:
            with contextlib.suppress(RuntimeError):  # the device has failed
                ptx.driver.synchronize(stream)
            ptx.driver.destroy_stream(stream)
        ptx.clear_error()
        ptx.cuda.clear()


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
@pytest.mark.parametrize("most_blocks", [4, 0, 8], ids=["share", "default", "all"])
def test_a_reduction_leaves_room_for_the_gemm_of_a_peer(ptx: PtxDevice, most_blocks: int) -> None:
    """Eight multiprocessors. The reduction waits; a GEMM, of a peer or of another stream, runs.

    By default the reduction has a block for a third of the multiprocessors.
    """
    kept: list[torch.Tensor] = []
    kernel, args, flags = waiting_reduction(ptx, most_blocks, kept)
    text = run_beside_gemm(ptx, partial(kernel.reduce, args), most_blocks or 2, flags)
    if most_blocks < 8:
        assert text == ""
        return
    assert "deadlock: blocks wait for room on 8 multiprocessors of A100" in text
    assert "flux_ag_gemm" in text and "waits for room for 1 blocks" in text
    assert "reduce_kernel" in text and "has room for 8 blocks" in text
    assert "sync.cuh:" in text  # where the reduction waits


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
@pytest.mark.parametrize("sm_count, blocks", [(4, 4), (8, 16)], ids=["share", "all"])
def test_a_gemm_that_waits_leaves_room_for_that_of_a_peer(
    ptx: PtxDevice, sm_count: int, blocks: int
) -> None:
    """A kernel for sm_80 has a block for each tile, but no more than its multiprocessors."""
    kept: list[torch.Tensor] = []
    kernel, args = plain_gemm(ptx, kept)
    a, out = torch.zeros(4096, 128, dtype=BF16), torch.zeros(4096, 128, dtype=BF16)
    signals, status = torch.zeros(4096, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    kept += [a, out, signals, status]
    ptx.know(*kept)
    args.m, args.a, args.d = 4096, a.data_ptr(), out.data_ptr()
    args.signals, args.sm_count = signals.data_ptr(), sm_count
    args.order.nodes = args.order.domains = args.order.lanes = 1
    args.order.comm_tile_rows = 4096
    args.sync.epoch, args.sync.timeout_ns, args.sync.status = 1, 10**10, status.data_ptr()
    text = run_beside_gemm(ptx, partial(kernel.launch, args), blocks, signals)
    assert ("waits for room for 1 blocks" in text) == (blocks == 16)


@pytest.mark.parametrize("arch", ["80", pytest.param("90a", marks=stress_only)])
@pytest.mark.parametrize("waiting", [4, 0], ids=["some", "all"])
def test_blocks_of_the_margin_leave_rather_than_wait(
    request: pytest.FixtureRequest, arch: str, waiting: int
) -> None:
    """Of a kernel whose blocks claim tiles, on eight multiprocessors: those of four stay, and wait.

    Blocks that left have claimed nothing: all tiles are computed, in three launches. Rows that are
    there keep nobody waiting: then all blocks stay to the end.
    """
    kept: list[torch.Tensor] = []
    with with_flux_kernels(request, arch, "dynamic_kernels") as ptx:
        kernel, args = plain_gemm(ptx, kept)
        m, n, k = 4096, 256, 128
        a, b = (torch.randn(rows, k).to(BF16) for rows in (m, n))
        out, signals = torch.zeros(m, n, dtype=BF16), torch.zeros(m, dtype=torch.int32)
        status, room = (torch.zeros(64, dtype=torch.int64) for _ in range(2))
        kept += [a, b, out, signals, status, room]
        ptx.know(*kept)
        args.m, args.n, args.k, args.ldd = m, n, k, n
        args.a, args.b, args.d = a.data_ptr(), b.data_ptr(), out.data_ptr()
        args.signals, args.sm_count, args.waiting = signals.data_ptr(), 8, waiting
        args.workspace, args.workspace_bytes = room.data_ptr(), 512
        args.order.nodes = args.order.domains = args.order.lanes = 1
        args.order.comm_tile_rows = 1024
        args.sync.timeout_ns, args.sync.status = 10**10, status.data_ptr()
        per_sm = 2 if arch == "80" else 1
        for epoch in (1, 2, 3):
            args.sync.epoch = epoch
            signals[0] = epoch  # the first quarter of the rows is there, but for the last launch
            if epoch == 3:
                signals[0] = 2
            out.fill_(float("nan"))
            launch = partial(kernel.launch, args)
            text = run_beside_gemm(ptx, launch, per_sm * (waiting or 8), signals, epoch)
            assert ("waits for room for" in text) == (waiting == 0)
            if waiting == 0:
                return
            assert status[0] == 0 and not room.any()
            torch.testing.assert_close(out.float(), a.float() @ b.float().T, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
@pytest.mark.parametrize("by", ["flux", "dlclose"])
def test_libraries_stay_while_kernels_wait(ptx: PtxDevice, tmp_path: Path, by: str) -> None:
    """Unloading waits for them, and they may wait for the call in which garbage is collected."""
    kept: list[torch.Tensor] = []
    kernel, args, flags = waiting_reduction(ptx, 2, kept)
    (built,) = (k for k in ptx.registry.kernels.values() if k.config.op == "ag_gemm")
    copy = Path(shutil.copy(built.library, tmp_path))  # which no other test holds
    ptx.cuda.unload_patience = 0.1
    try:
        kernel.reduce(args, 0)
        assert eventually(lambda: ptx.cuda.machine.blocks_running == 2)
        if by == "flux":
            _C.Kernel(str(copy), built.symbol)  # and drops it
            assert ptx.cuda.error() == ""
        else:
            _ctypes.dlclose(ctypes.CDLL(str(copy))._handle)
            text = r"unloading a library waits for \w*reduce_kernel\w*, which does not end"
            assert re.fullmatch(text, ptx.cuda.error())
        flags.fill_(1)
        with contextlib.suppress(RuntimeError):  # the device has failed
            ptx.driver.synchronize(0)
    finally:
        ptx.cuda.unload_patience = 5.0
        ptx.clear_error()
        ptx.cuda.clear()


def test_memory_that_is_not_known_is_named(ptx: PtxDevice) -> None:
    """The first error is kept, with kernel and source line, and the driver fails from then on."""
    (built,) = (k for k in ptx.registry.kernels.values() if k.config.op == "ag_gemm")
    kernel = _C.Kernel(str(built.library), built.symbol)
    kernel.prepare(0)
    a, b, out = (torch.zeros(128, 128, dtype=BF16) for _ in range(3))
    ptx.know(a, b, out)  # in place of what other tests had there
    ptx.cuda.machine.remove_memory(extent(a)[0])
    args = _C.GemmArgs()
    args.m = args.n = args.k = args.lda = args.ldb = args.ldd = 128
    args.alpha, args.device, args.order.world = 1.0, 0, 1
    args.a, args.b, args.d = a.data_ptr(), b.data_ptr(), out.data_ptr()
    kernel.launch(args, 0)
    try:
        with pytest.raises(RuntimeError) as raised:
            ptx.finish()
        text = ptx.cuda.error()
        assert text in str(raised.value)
        started = {"80": "by thread", "90a": "in an operation that thread"}[built.config.arch]
        assert "use after free" in text and started in text
        assert built.symbol in text and re.search(r"\.(h|hpp):\d+", text)
        with pytest.raises(RuntimeError, match="use after free"):
            ptx.driver.ready(0)
    finally:
        ptx.clear_error()
        ptx.cuda.clear()
