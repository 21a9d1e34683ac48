"""Counters and traces of the PTX machine: what is counted, for which warps, on which lines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ptx_machine import Counters, Device, Module, Trace
from ptx_machine.counters import Tally, work_of
from ptx_text import LANES, await_phase, kernel, run

SHARED = ".shared .align 1024 .b8 memory[8192]; mov.u32 %r1, memory;"


def counted(body: str, params: int = 1, **options: Any) -> Counters:
    """Of a kernel whose threads write to the same places, so that it is short."""
    tensors = [torch.zeros(4096, dtype=torch.int64) for _ in range(params)]
    return run(kernel(body, params), tensors, races=False, **options)


# -- units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement, tallies",
    [
        ("ld.global.v4.f32", {"global_loads": 16 * 64}),
        ("ld.acquire.sys.global.u32", {"global_loads": 4 * 64}),
        ("st.shared.v2.b64", {"shared_stores": 16 * 64}),
        ("st.shared::cta.b8", {"shared_stores": 64}),
        ("ld.local.b128", {"local_loads": 16 * 64}),
        ("ld.u32", {"generic_loads": 4 * 64}),
        ("ld.param.u64", {}),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", {"shared_loads": 512 * 2}),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {"mma": 2, "flop": 2 * 4096}),
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", {"wgmma": 2, "flop": 2 * 131072}),
        ("wgmma.fence.sync.aligned", {}),
        ("multimem.ld_reduce.global.add.v4.bf16x2", {"multimem": 16 * 64}),
        ("atom.global.add.u32", {"atomics": 64}),
        ("red.release.sys.global.add.u32", {"atomics": 64}),
        ("fence.proxy.async", {"fences": 64}),
        ("bar.sync", {"barriers": 2}),
        ("bar.warp.sync", {}),
        ("mbarrier.try_wait.parity.shared::cta.b64", {"mbarrier_waits": 2}),
        ("mbarrier.arrive.shared::cta.b64", {"mbarrier_arrivals": 64}),
        ("cp.async.cg.shared.global", {"copies": 7}),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", {"bulk_copies": 7}),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile", {"tensor_loads": 7}),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add", {"tensor_stores": 7}),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32", {"bulk_copies": 7}),
        ("cp.async.mbarrier.arrive.noinc.shared::cta.b64", {"mbarrier_arrivals": 64}),
    ],
)
def test_what_a_statement_counts_as(statement: str, tallies: dict[str, int]) -> None:
    """Executed by two warps of 32 threads, after three tries; copies of seven bytes."""
    work = work_of(statement, Tally(executed=2, threads=64, tries=3, bytes=7))
    assert work.nonzero() == {"statements": 2, "instructions": 64, "waiting": 3, **tallies}


def test_bytes_and_products_of_a_kernel() -> None:
    """Bytes of a bulk copy are what its register says; of a loop, once for each round."""
    body = f"""
        {SHARED}
        ld.param.u64 %rd1, [p0];
        mov.u32 %r5, 0;
    AGAIN:
        cp.async.ca.shared.global [%r1], [%rd1], 8;
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, 3;
        @%p1 bra AGAIN;
        cp.async.wait_all;
        setp.ne.u32 %p2, %r0, 0;
        @%p2 bra END;
        mov.u32 %r6, 160;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r6;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    END:
    """
    work = counted(body, grid=2, block=64).work
    assert work.copies == 2 * 64 * 3 * 8
    assert work.bulk_copies == 2 * 160


def test_threads_are_counted_not_warps() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 5;
        ld.param.u64 %rd1, [p0];
        @%p1 st.global.u32 [%rd1], %r0;
    """
    counters = counted(body, grid=3)
    assert counters.work.global_stores == 3 * 5 * 4
    assert counters.blocks == 3
    assert counters.statements == counters.work.statements
    assert counters.instructions == counters.work.instructions


# -- roles -----------------------------------------------------------------------------------------

# Warp 0 copies, warps 1 to 3 wait for it; warp 3 stores.
ROLES = f"""
    {SHARED}
    ld.param.u64 %rd1, [p0];
    shr.u32 %r5, %r0, 5;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    bar.sync 0;
    setp.ne.u32 %p2, %r5, 0;
    @%p2 bra CONSUMER;
    @!%p1 bra END;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], 256, [%r1];
    bra END;
CONSUMER:
    {await_phase("%r1", 0, "WAIT")}
    setp.ne.u32 %p3, %r5, 3;
    @%p3 bra END;
    st.global.u32 [%rd1+2048], %r0;
END:
"""


def test_warps_with_the_same_work_are_a_role() -> None:
    counters = counted(ROLES, grid=2, block=128)
    roles = {role.name: role for role in counters.roles}
    assert list(roles) == ["warp 0", "warps 1-2", "warp 3"]
    assert roles["warp 0"].does == "bulk copies"
    assert roles["warps 1-2"].does == "mbarrier waits"
    assert roles["warp 3"].does == "global stores, mbarrier waits"
    assert roles["warp 0"].work.bulk_copies == 2 * 256
    assert roles["warps 1-2"].work.mbarrier_waits == 2 * 2
    assert roles["warps 1-2"].work.waiting > 0
    assert roles["warp 3"].work.global_stores == 2 * LANES * 4
    assert sum(role.work.statements for role in counters.roles) == counters.statements


def test_lines_add_up_to_the_kernel() -> None:
    counters = counted(ROLES, grid=2, block=128)
    lines = counters.lines()
    assert sum(line.work.instructions for line in lines) == counters.instructions
    assert [line.work.instructions for line in lines] == sorted(
        (line.work.instructions for line in lines), reverse=True
    )
    assert all(line.file == "" and line.line > 0 for line in lines)  # it has no .loc


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced() -> Trace:
    module = Module(kernel(ROLES, 1))
    return Device().trace(
        module, "k", grid=2, block=128, args=[torch.zeros(4096, dtype=torch.int64)], races=False
    )


def test_a_trace_has_every_statement(traced: Trace) -> None:
    executed = [event for event in traced.events if not event.waits]
    assert len(executed) == traced.counters.statements
    assert traced.dropped == 0
    assert [event.time for event in executed] == list(range(len(executed)))
    assert traced.blocks == [(0, 0, 0), (1, 0, 0)]


def test_the_text_of_a_warp(traced: Trace) -> None:
    lines = list(traced.text(1, 3))
    assert "st.global.u32 [%rd1+2048], %r0;" in lines[-2]
    assert any("waits at mbarrier.try_wait" in line for line in lines)
    assert not any("cp.async.bulk" in line for line in lines)
    assert any("cp.async.bulk" in line and "  00000001  " in line for line in traced.text(1, 0))


def test_spans_of_a_warp_follow_each_other(traced: Trace) -> None:
    spans = [span for span in traced.spans() if (span.block, span.warp) == (0, 1)]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))
    (wait,) = [span for span in spans if span.waits and "try_wait" in span.ptx]
    assert wait.end > wait.begin


def test_the_json_of_perfetto(traced: Trace) -> None:
    rows = traced.chrome()["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert {"block (0, 0, 0)", "block (1, 0, 0)", "warp 0", "warp 3"} <= names
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == len(traced.spans())
    assert any(row["cat"] == "wait" and "mbarrier.try_wait" in row["name"] for row in spans)


def test_a_trace_keeps_the_first_events() -> None:
    module = Module(kernel(ROLES, 1))
    tensor = torch.zeros(4096, dtype=torch.int64)
    options = {"grid": 1, "block": 128, "args": [tensor], "races": False}
    trace = Device().trace(module, "k", most_events=10, **options)
    assert len(trace.events) == 10 and trace.dropped > 0
