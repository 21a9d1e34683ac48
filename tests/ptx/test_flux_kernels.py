"""Flux's kernels on the PTX machine: what only a machine can ask of them.

As parts of ops, beside a GPU's: tests/gpu/test_gpu.py.
"""

from __future__ import annotations

import re
import time

import pytest
import torch

from emulator import extent
from flux import _C
from flux.transport.virtual import VirtualWorld
from harness import STRESS
from matrix import OPS
from ptx_device import PtxDevice
from reference import Inputs, Problem
from virtual_cases import call_all

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
@pytest.mark.parametrize("m", [1, 131, 300])
def test_no_order_of_warps_changes_a_bit(ptx: PtxDevice, op: str, m: int) -> None:
    p, found = Problem(op, 300, (160,), 96, BF16), []
    try:
        for seed in range(3 * STRESS):
            ptx.cuda.seed = 1000 * seed
            found.append(results(ptx, p, m, 2))
    finally:
        ptx.cuda.seed = 0
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.alone
def test_a_call_takes_seconds(ptx: PtxDevice) -> None:
    p = Problem("ag_gemm", 256, (512,), 512, BF16)
    results(ptx, p, 256, 2)  # reads the PTX
    begin = time.monotonic()
    results(ptx, p, 256, 2)
    assert time.monotonic() - begin < 3.0


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
        assert "outside of global memory" in text and started in text
        assert built.symbol in text and re.search(r"\.(h|hpp):\d+", text)
        with pytest.raises(RuntimeError, match="outside of global memory"):
            ptx.driver.ready(0)
    finally:
        ptx.clear_error()
        ptx.cuda.clear()
