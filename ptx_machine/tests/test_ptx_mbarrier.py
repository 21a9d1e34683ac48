"""mbarrier objects of the PTX machine: phases, arrivals, bytes, waits, and what is not allowed."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import LANES, await_phase, kernel, run

SEEDS = range(4)
SHARED = ".shared .align 16 .b8 memory[1024];"
OWN = "ld.param.u64 %rd1, [p0]; add.s64 %rd1, %rd1, %rd0;"


def threads(body: str, seed: int = 0, **options: object) -> list[int]:
    """Run ``body`` on some threads, each with its %r20 of 32 bits as a result."""
    settings: dict[str, object] = {"grid": 1, "block": LANES, **options}
    count = int(str(settings["block"])) * int(str(settings["grid"]))
    out = torch.zeros(count, dtype=torch.int64)
    text = f"""
        {SHARED}
        mov.u32 %r1, memory;
        mov.u32 %r2, %cluster_ctarank;
        mov.u32 %r20, 0;
        mov.u32 %r3, %ctaid.x;
        mov.u32 %r4, %ntid.x;
        mad.lo.u32 %r5, %r3, %r4, %r0;
        mul.wide.u32 %rd0, %r5, 8;
        {OWN}
        {body}
        st.global.u32 [%rd1], %r20;
    """
    run(kernel(text, 1), [out], seed=seed, **settings)
    return out.tolist()


def first(statements: str, label: str) -> str:
    """Return statements that thread 0 executes."""
    return f"setp.ne.u32 %p14, %r0, 0; @%p14 bra {label}; {statements} {label}: "


INIT = first("mbarrier.init.shared::cta.b64 [%r1], {count};", "READY") + "bar.sync 0;"


@pytest.mark.parametrize("seed", SEEDS)
def test_consumers_wait_for_producers(seed: int) -> None:
    """Warp 1 hands a word on to warp 0, four times, through one slot and two objects."""
    both = "mbarrier.init.shared.b64 [%r1], 32; mbarrier.init.shared.b64 [memory+8], 32;"
    body = f"""
        {first(both, "READY")}
        bar.sync 0;
        mov.u32 %r10, 0;
        setp.ge.u32 %p1, %r0, 32;
        and.b32 %r11, %r0, 31;
        shl.b32 %r11, %r11, 2;
        add.u32 %r11, %r11, %r1;
        @%p1 bra PRODUCE;
    CONSUME:
        and.b32 %r12, %r10, 1;
        {await_phase("%r1", "%r12", "FULL")}
        ld.shared.u32 %r13, [%r11+64];
        mad.lo.u32 %r20, %r20, 10, %r13;
        mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1+8];
        add.u32 %r10, %r10, 1;
        setp.lt.u32 %p2, %r10, 4;
        @%p2 bra CONSUME;
        bra END;
    PRODUCE:
        xor.b32 %r12, %r10, 1;
        and.b32 %r12, %r12, 1;
        {await_phase("memory+8", "%r12", "EMPTY")}
        add.u32 %r13, %r10, 1;
        st.shared.u32 [%r11+64], %r13;
        mbarrier.arrive.shared.b64 %rd10, [%r1];
        add.u32 %r10, %r10, 1;
        setp.lt.u32 %p2, %r10, 4;
        @%p2 bra PRODUCE;
    END:
    """
    assert threads(body, seed, block=64) == [1234] * 32 + [0] * 32


@pytest.mark.parametrize("seed", SEEDS)
def test_states_and_counts(seed: int) -> None:
    """Arrivals return the state before; test_wait never waits."""
    steps = """
        mbarrier.arrive.shared.b64 %rd10, [%r1], 3;
        mbarrier.pending_count.b64 %r10, %rd10;
        mad.lo.u32 %r20, %r20, 10, %r10;
        mbarrier.arrive.noComplete.release.cta.shared.b64 %rd11, [%r1], 4;
        mbarrier.pending_count.b64 %r10, %rd11;
        mad.lo.u32 %r20, %r20, 10, %r10;
        mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd11;
        selp.u32 %r10, 1, 2, %p1;
        mad.lo.u32 %r20, %r20, 10, %r10;
        mbarrier.arrive_drop.shared::cta.b64 %rd12, [%r1];
        mbarrier.test_wait.acquire.cta.shared::cta.b64 %p1, [%r1], %rd12;
        selp.u32 %r10, 1, 2, %p1;
        mad.lo.u32 %r20, %r20, 10, %r10;
        mbarrier.arrive.shared.b64 %rd13, [%r1];
        mbarrier.pending_count.b64 %r10, %rd13;
        mad.lo.u32 %r20, %r20, 10, %r10;
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 1;
        selp.u32 %r10, 1, 2, %p1;
        mad.lo.u32 %r20, %r20, 10, %r10;
    """
    body = f"""
        {INIT.format(count=8)}
        {first(steps, "DONE")}
    """
    # 8 pending, then 5; not complete; complete; 7 are expected after the drop; phase 1 is not.
    assert threads(body, seed)[0] == 852172


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_needs_its_bytes(seed: int) -> None:
    """The tx-count may be negative; the phase ends when it and the pending count are zero."""
    probe = """
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0;
        selp.u32 %r10, 1, 2, %p1;
        mad.lo.u32 %r20, %r20, 10, %r10;
    """
    steps = f"""
        mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 16;
        mbarrier.arrive.expect_tx.shared::cta.b64 %rd10, [%r1], 24;
        {probe}
        mbarrier.arrive.shared::cta.b64 %rd10, [%r1];
        {probe}
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 8;
        mbarrier.complete_tx.shared::cta.b64 [%r1], 8;
        {probe}
        mbarrier.complete_tx.shared::cta.b64 [%r1], 8;
        {probe}
    """
    body = f"""
        {INIT.format(count=2)}
        {first(steps, "DONE")}
    """
    assert threads(body, seed)[0] == 2221


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_arrive_at_each_other(seed: int) -> None:
    """Thread t of each of four blocks arrives at block t; t < 4. Each block waits at home."""
    body = f"""
        {INIT.format(count=4)}
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        setp.ge.u32 %p1, %r0, 4;
        @%p1 bra COME;
        mapa.shared::cluster.u32 %r10, %r1, %r0;
        mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r10], 8;
        mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r10], 8;
    COME:
        {await_phase("%r1", 0, "ALL")}
        mov.u32 %r20, 1;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    assert threads(body, seed, grid=4, cluster=4) == [1] * 128


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc", [True, False])
def test_copies_of_threads_arrive_when_they_are_done(noinc: bool, seed: int) -> None:
    """cp.async.mbarrier.arrive without .noinc needs an arrival of its own besides."""
    body = f"""
        {INIT.format(count=LANES)}
        mad.lo.u32 %r10, %r0, 8, %r1;
        mov.u32 %r11, 0;
        st.shared.u32 [%r10+64], %r11;
        cp.async.ca.shared.global [%r10+64], [%rd1], 8;
        cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared::cta.b64 [%r1];
        {"" if noinc else "mbarrier.arrive.shared::cta.b64 _, [%r1];"}
        {await_phase("%r1", 0, "ALL")}
        xor.b32 %r12, %r10, 8;
        ld.shared.u32 %r20, [%r12+64];
    """
    result = torch.arange(LANES) + 50
    text = f"{SHARED} mov.u32 %r1, memory; {OWN} {body} st.global.u32 [%rd1], %r20;"
    run(kernel(text, 1), [result], seed=seed)
    # %r10 ^ 8: the word of the thread beside.
    assert result.tolist() == [50 + (thread ^ 1) for thread in range(LANES)]


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_do_not_wait_go_on(seed: int) -> None:
    """The lanes of one statement whose predicate is false arrive for those that wait."""
    body = f"""
        {INIT.format(count=16)}
        setp.lt.u32 %p1, %r0, 16;
        setp.ge.u32 %p2, %r0, 16;
    AGAIN:
        @%p1 mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0, 1000;
        @%p2 mbarrier.arrive.shared::cta.b64 _, [%r1];
        @%p2 bra END;
        @!%p3 bra AGAIN;
    END:
        mov.u32 %r20, 1;
    """
    assert threads(body, seed) == [1] * LANES


def once(statements: str) -> str:
    return INIT.format(count=1) + first(statements, "DONE")


@pytest.mark.parametrize(
    "body, error",
    [
        (first("mbarrier.arrive.shared.b64 _, [%r1];", "D"), "no mbarrier has been initialised"),
        (once("st.shared.u32 [%r1+4], 0; mbarrier.arrive.shared.b64 _, [%r1];"), "overwritten"),
        (once("mbarrier.arrive.shared.b64 _, [%r1], 2;"), "2 come, 1 are pending"),
        (once("mbarrier.arrive.shared.b64 _, [%r1], 0;"), "an arrival with a count of 0"),
        (once("mbarrier.init.shared.b64 [%r1], 1;"), "initialised twice"),
        (first("mbarrier.init.shared.b64 [%r1], 1048576;", "D"), "for 1048576 arrivals"),
        (first("mbarrier.init.shared.b64 [%r1], 0;", "D"), "for 0 arrivals"),
        (first("mbarrier.init.shared.b64 [%r1+4], 1;", "D"), "not aligned to 8 bytes"),
        (
            once("mbarrier.expect_tx.shared.b64 [%r1], 1048576;"),
            "tx-count of an mbarrier becomes 1048576",
        ),
        (once("mbarrier.complete_tx.shared.b64 [%r1], 1048576;"), "becomes -1048576"),
        (once("mbarrier.arrive.noComplete.shared.b64 %rd9, [%r1], 1;"), "noComplete completes"),
        (once("mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 2;"), "a parity of 2"),
        (once("mov.u64 %rd9, 7; mbarrier.test_wait.shared.b64 %p1, [%r1], %rd9;"), "no state"),
        (
            once("mbarrier.inval.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];"),
            "no mbarrier",
        ),
        (once("mbarrier.arrive_drop.shared.b64 _, [%r1], 2;"), "drop out than an mbarrier expects"),
        (once(await_phase("%r1", 0, "W")), r"deadlock(.|\n)*mbarrier.try_wait"),
        (
            once("mbarrier.try_wait.parity.shared::cluster.b64 %p1, [%r1], 0;"),
            "unknown instruction",
        ),
        (once("mbarrier.arrive.acquire.cta.shared.b64 _, [%r1];"), "unknown instruction"),
        (once("mbarrier.arrive.multicast.shared.b64 _, [%r1];"), "unknown instruction"),
    ],
)
def test_misuse_of_an_object_fails(body: str, error: str) -> None:
    for seed in SEEDS:
        with pytest.raises(PtxError, match=error):
            threads(body, seed)


def test_an_object_that_is_waited_for_may_not_go() -> None:
    body = f"""
        {INIT.format(count=1)}
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra OTHER;
        {await_phase("%r1", 0, "W")}
    OTHER:
        setp.ne.u32 %p1, %r0, 32;
        @%p1 bra END;
        nanosleep.u32 10;
        mbarrier.inval.shared.b64 [%r1];
    END:
    """
    with pytest.raises(PtxError, match="object with waiting threads"):
        threads(body, block=64)


def test_another_block_returns_no_state() -> None:
    body = f"""
        {INIT.format(count=1)}
        barrier.cluster.arrive;
        barrier.cluster.wait;
        cvt.u64.u32 %rd10, %r1;
        cvta.shared.u64 %rd10, %rd10;
        xor.b32 %r10, %r2, 1;
        mapa.u64 %rd11, %rd10, %r10;
        mbarrier.arrive.b64 %rd12, [%rd11];
    """
    with pytest.raises(PtxError, match="another block returns no state"):
        threads(body, grid=2, cluster=2)
