"""Kernels that push an AllGather's rows, end an AllReduce, or sum own rows, on the PTX machine."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch

from emulated import CrowdedWorld
from flux import Knobs, PeerTimeoutError
from flux.transport.virtual import VirtualWorld
from harness import more
from ptx_device import PtxDevice
from reference import Inputs, Problem
from virtual_cases import built, call_all, call_on_and_on, check_all, check_same_bits, checked_calls

IN_KERNEL = Knobs(path="in_kernel")
SUMMING = Knobs(reduce="in_kernel")
OPS = pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar"])


def problem(op: str, world: int) -> Problem:
    n, k = (104 * world, 136) if op == "ag_gemm" else (328, 40 * world)
    return Problem(op, 150, (n,), k, torch.bfloat16)


def of_rows(m: int, world: int, p: Problem) -> Inputs:
    return Inputs(p, m, world, seed=m, bias=m % 2 == 0)


def pad_words(op: Any) -> Any:
    """Words that peers and this rank raise, as the device has them."""
    backend = op._backend
    words = ctypes.c_uint32 * backend.pad_words
    return words.from_address(backend.pads[op.rank])


def check_launches(ptx: PtxDevice, calls: int) -> None:
    """Look for kernels other than the calls' own."""
    assert [r["launches"] for r in ptx.cuda.records()] == [calls]


@pytest.mark.parametrize(
    "ptx, world, rows",
    [
        ("80", 2, (1, 64, 131, 16)),
        ("80", 4, (150, 2, 64)),
        ("90a", 2, (131, 1)),
        *more(("80", 3, (7, 130, 1)), ("90a", 4, (64, 150, 1, 16))),
    ],
    indirect=["ptx"],
)
@OPS
def test_calls_of_changing_rows(ptx: PtxDevice, op: str, world: int, rows: tuple[int, ...]) -> None:
    """None of them is waited for, so a rank can be two calls ahead of another one."""
    p = problem(op, world)
    everything = [of_rows(m, world, p) for m in rows]
    with VirtualWorld(world, ptx) as ranks, built(ranks, p, tuning=IN_KERNEL) as ops:
        ptx.cuda.clear()
        outs = call_on_and_on(ranks, ops, everything)
        ptx.finish()
        for made in ops:
            made.wait()
        check_all(everything, outs)
        check_launches(ptx, len(rows) * world)
        inputs = of_rows(rows[0], world, p)
        again = call_all(ranks, ops, inputs, gather=p.gathers)
        for r, out in enumerate(again):
            ops[r].wait()
            inputs.check(out, r)
        if not p.gathers:  # of one order of sums
            check_same_bits([outs[0]], [again])
            check_same_bits([outs[0][1:]], [outs[0][:-1]])


@pytest.mark.parametrize(
    "ptx, world, rows",
    [("90a", 2, (300, 1, 131)), *more(("90a", 3, (150, 7, 300)), ("90a", 4, (300, 2)))],
    indirect=["ptx"],
)
def test_own_rows_are_summed_beside_the_tiles(
    ptx: PtxDevice, world: int, rows: tuple[int, ...]
) -> None:
    """In one launch, with the bits of a reduction that follows; calls of many tiles, and of few."""
    p = Problem("gemm_rs", 300, (520,), 40 * world, torch.bfloat16)
    everything = [of_rows(m, world, p) for m in rows]
    ptx.cuda.clear()
    outs = checked_calls(VirtualWorld(world, ptx), p, everything, tuning=SUMMING)
    check_launches(ptx, len(rows) * world)
    local = Knobs(reduce="local")
    check_same_bits(outs, checked_calls(VirtualWorld(world, ptx), p, everything, tuning=local))


@pytest.mark.parametrize("ptx", ["90a"], indirect=True)
def test_sums_of_a_captured_call(ptx: PtxDevice) -> None:
    """The workspace says nothing of earlier launches."""
    p = Problem("gemm_rs", 300, (520,), 80, torch.bfloat16)
    inputs = of_rows(300, 2, p)
    with VirtualWorld(2, ptx) as ranks, built(ranks, p, tuning=SUMMING) as ops:
        given = [inputs.local(r) for r in range(2)]
        ptx.know(*(t for of_rank in given for t in of_rank if t is not None))
        with ptx.capture() as graph:
            captured = ranks.run(lambda r: ops[r](*given[r]))
        for _ in range(2):
            graph.replay()
            outs = call_all(ranks, ops, inputs)
            ptx.finish()
            for r in range(2):
                ops[r].wait()
                inputs.check(outs[r], r)
                inputs.check([captured[r]], r)
                captured[r].zero_()
        graph.close()


@pytest.mark.parametrize("ptx", ["90a"], indirect=True)
def test_sums_of_own_rows_without_a_peer_are_nan(ptx: PtxDevice) -> None:
    p = Problem("gemm_rs", 300, (520,), 80, torch.bfloat16)
    inputs = of_rows(300, 2, p)
    with VirtualWorld(2, ptx) as ranks, built(ranks, p, tuning=SUMMING, timeout_s=1.0) as ops:
        silent = inputs.ready(0)
        alone = ranks.run(lambda r: silent(ops[0]) if r == 0 else [])[0]
        ptx.finish()
        with pytest.raises(PeerTimeoutError, match="call 1"):
            ops[0].wait()
        assert all(out.isnan().all() for out in alone)


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
def test_kernels_that_sum_no_own_rows_are_refused(ptx: PtxDevice) -> None:
    p = Problem("gemm_rs", 64, (128,), 80, torch.bfloat16)
    with VirtualWorld(2, ptx) as ranks, pytest.raises(ValueError, match="needs a kernel of sm_90a"):
        p.build(ranks.rank(0), tuning=SUMMING)


@pytest.mark.parametrize("ptx", ["80", *more("90a")], indirect=True)
@OPS
def test_a_graph_is_the_same_launch(ptx: PtxDevice, op: str) -> None:
    """Replays and eager calls count on, in any order; an AllGather has the buffer of its number."""
    p = problem(op, 2)
    everything = [of_rows(m, 2, p) for m in (16, 131)]
    with VirtualWorld(2, ptx) as ranks, built(ranks, p, tuning=IN_KERNEL) as ops:
        given = [[inputs.local(r) for inputs in everything] for r in range(2)]
        ptx.know(*(t for of in given for call in of for t in call if t is not None))

        def call(r: int, number: int) -> torch.Tensor:
            more: dict[str, Any] = {"m": everything[number].m} if p.gathers else {}
            out: torch.Tensor = ops[r](*given[r][number], **more)
            return out

        with ptx.capture() as graph:
            captured = ranks.run(lambda r: [call(r, number) for number in range(2)])
        for eager in (16, 1):
            graph.replay()
            inputs = of_rows(eager, 2, p)
            outs = call_all(ranks, ops, inputs)
            graph.replay()
            ptx.finish()
            for r in range(2):
                ops[r].wait()
                inputs.check(outs[r], r)
                for of_call, out in zip(everything, captured[r], strict=True):
                    of_call.check([out], r)
        graph.close()


@pytest.mark.parametrize("ptx", ["80", *more("90a")], indirect=True)
def test_several_weights_read_what_the_first_kernel_pushed(ptx: PtxDevice) -> None:
    p = Problem("ag_gemm", 64, (64, 160), 64, torch.bfloat16)
    everything = [of_rows(m, 2, p) for m in (64, 1, 33)]
    checked_calls(VirtualWorld(2, ptx), p, everything, tuning=IN_KERNEL)


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
@pytest.mark.parametrize(
    ("op", "awaited"),
    [("ag_gemm", r"rows of x \(AllGather signal 1\)"), ("gemm_ar", r"partials of a peer \(flag")],
)
def test_a_late_rank_is_awaited_and_a_dead_one_reported(
    ptx: PtxDevice, op: str, awaited: str
) -> None:
    p = problem(op, 2)
    inputs = of_rows(64, 2, p)
    with (
        VirtualWorld(2, ptx) as ranks,
        built(ranks, p, tuning=IN_KERNEL, timeout_s=1.0) as ops,
    ):
        calls, more_calls = ([inputs.ready(r) for r in range(2)] for _ in range(2))

        def late(r: int) -> list[torch.Tensor]:
            time.sleep(0.3 * r)
            return calls[r](ops[r])

        for r, out in enumerate(ranks.run(late)):
            ops[r].wait()
            inputs.check(out, r)
        silent = inputs.ready(0)
        alone = ranks.run(lambda r: [*more_calls[0](ops[0]), *silent(ops[0])] if r == 0 else [])[0]
        ptx.finish()
        assert 3 not in pad_words(ops[1])  # which still may be in call 1
        with pytest.raises(PeerTimeoutError, match=rf"{awaited}.* call 2"):
            ops[0].wait()
        assert p.gathers or all(out.isnan().all() for out in alone)
        # Rank 0 has given up, and said so: no rank gets results of a call that it did not end.
        with pytest.raises(PeerTimeoutError, match=r"rank 0 gave up in call|waited more than"):
            ranks.run(lambda r: more_calls[r](ops[r]) if r == 1 else [])
            ops[1].wait()


@pytest.mark.parametrize("ptx", ["80", *more("90a")], indirect=True)
def test_words_that_no_recent_call_raised_are_renewed(ptx: PtxDevice) -> None:
    """They are compared by signed difference: words of 2^31 calls ago would look new."""
    p, counts = problem("gemm_ar", 2), 5
    with VirtualWorld(2, ptx) as ranks, built(ranks, p, tuning=IN_KERNEL) as ops:
        for op in ops:
            first = op._backend.pad_words - op._backend.layout.sum_words
            pad_words(op)[first - counts] = 2**30 - 2
        everything = [of_rows(m, 2, p) for m in (1, 3, 150)]
        outs = call_on_and_on(ranks, ops, everything[:2])
        ptx.finish()
        for op in ops:
            words = pad_words(op)[-op._backend.layout.sum_words :]
            assert set(words) == {2**30}
        outs += call_on_and_on(ranks, ops, everything[2:])
        ptx.finish()
        for op in ops:
            op.wait()
        check_all(everything, outs)


@pytest.mark.parametrize("ptx", ["80"], indirect=True)
def test_blocks_without_tiles_leave_while_others_have_no_room(ptx: PtxDevice) -> None:
    p = Problem("gemm_ar", 128, (1536,), 64, torch.bfloat16)
    checked_calls(CrowdedWorld(2, ptx), p, [of_rows(128, 2, p)], tuning=IN_KERNEL)


@pytest.mark.parametrize("ptx", ["80", *more("90a")], indirect=True)
def test_rows_that_no_kernel_loads_are_refused(ptx: PtxDevice) -> None:
    """Odd N and K are for kernels of alignment 1: every_kernel.py runs those."""
    with VirtualWorld(2, ptx) as ranks:
        for op, n, k in (("gemm_ar", 13, 128), ("ag_gemm", 26, 64), ("gemm_ar", 16, 26)):
            p = Problem(op, 16, (n,), k, torch.bfloat16)
            with pytest.raises(ValueError, match=r"no built kernel supports .* in bf16"):
                p.build(ranks.rank(0), tuning=IN_KERNEL)
