"""Kernels that push the rows of an AllGather themselves (path in_kernel), on the PTX machine."""

from __future__ import annotations

import time

import pytest
import torch

from flux import Knobs, PeerTimeoutError
from flux.transport.virtual import VirtualWorld
from harness import more
from ptx_device import PtxDevice
from reference import Inputs, Problem
from virtual_cases import built, call_all, call_on_and_on, check_all, checked_calls

IN_KERNEL = Knobs(path="in_kernel")


def problem(world: int) -> Problem:
    return Problem("ag_gemm", 150, (104 * world,), 136, torch.bfloat16)


def of_rows(m: int, world: int, p: Problem | None = None) -> Inputs:
    return Inputs(p or problem(world), m, world, seed=m, bias=m % 2 == 0)


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
def test_calls_of_changing_rows(ptx: PtxDevice, world: int, rows: tuple[int, ...]) -> None:
    """None of them is waited for, so a rank can be two calls ahead of another one."""
    everything = [of_rows(m, world) for m in rows]
    with VirtualWorld(world, ptx) as ranks, built(ranks, problem(world), tuning=IN_KERNEL) as ops:
        ptx.cuda.clear()
        outs = call_on_and_on(ranks, ops, everything)
        ptx.finish()
        for op in ops:
            op.wait()
        check_all(everything, outs)
        assert [r["launches"] for r in ptx.cuda.records()] == [len(rows) * world]
        inputs = of_rows(rows[0], world)
        for r, out in enumerate(call_all(ranks, ops, inputs, gather=True)):
            ops[r].wait()
            inputs.check(out, r)


@pytest.mark.parametrize("ptx", ["80", *more("90a")], indirect=True)
def test_a_graph_is_the_same_launch(ptx: PtxDevice) -> None:
    """Replays and eager calls count on, in any order; each has the buffer of its number."""
    everything = [of_rows(m, 2) for m in (16, 131)]
    with VirtualWorld(2, ptx) as ranks, built(ranks, problem(2), tuning=IN_KERNEL) as ops:
        given = [[inputs.local(r) for inputs in everything] for r in range(2)]
        ptx.know(*(t for of in given for call in of for t in call if t is not None))

        def calls(r: int) -> list[torch.Tensor]:
            return [ops[r](*of, m=i.m) for of, i in zip(given[r], everything, strict=True)]

        with ptx.capture() as graph:
            captured = ranks.run(calls)
        for eager in (16, 1):
            graph.replay()
            inputs = of_rows(eager, 2)
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
def test_a_late_rank_is_awaited_and_a_dead_one_reported(ptx: PtxDevice) -> None:
    inputs = of_rows(64, 2)
    with (
        VirtualWorld(2, ptx) as ranks,
        built(ranks, problem(2), tuning=IN_KERNEL, timeout_s=1.0) as ops,
    ):
        calls, more_calls = ([inputs.ready(r) for r in range(2)] for _ in range(2))

        def late(r: int) -> list[torch.Tensor]:
            time.sleep(0.3 * r)
            return calls[r](ops[r])

        for r, out in enumerate(ranks.run(late)):
            ops[r].wait()
            inputs.check(out, r)
        ranks.run(lambda r: more_calls[r](ops[r]) if r == 0 else [])
        with pytest.raises(PeerTimeoutError, match=r"rows of x \(AllGather signal 1\).* call 2"):
            ops[0].wait()
        # Rank 0 has given up, and said so: no rank gets results of a call that it did not end.
        with pytest.raises(PeerTimeoutError, match=r"rank 0 gave up in call|waited more than"):
            ranks.run(lambda r: more_calls[r](ops[r]) if r == 1 else [])
            ops[1].wait()
