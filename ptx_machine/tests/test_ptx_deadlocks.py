"""Reports of deadlocks: each group of threads, and what it waits for."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import await_phase, kernel, run


def deadlock(body: str, **options: Any) -> str:
    """Run ``body``; return the report."""
    with pytest.raises(PtxError, match="deadlock: every thread waits") as raised:
        run(kernel(body, 1), [torch.zeros(64, dtype=torch.int64)], **options)
    return str(raised.value)


SHARED = ".shared .align 16 .b8 memory[64]; mov.u32 %r1, memory;"


def test_barriers_say_how_many_have_arrived() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 64;
        @%p1 bra FIRST;
        bar.sync 3, 96;
    FIRST:
        bar.sync 2, 128;
    """
    text = deadlock(body, block=128, grid=3)
    assert "block (0, 0, 0) and 2 others like it" in text
    assert "warps 0-1, lanes ffffffff: k, PTX line" in text
    assert "waits for barrier 2, where 64 of 128 threads have arrived" in text
    assert "warps 2-3" in text
    assert "waits for barrier 3, where 64 of 96 threads have arrived" in text


def test_mbarriers_say_what_is_missing() -> None:
    body = f"""
        {SHARED}
        setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r1+8], 2;
        bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+8], 48;
        {await_phase("%r1+8", 0, "WAIT")}
    """
    text = deadlock(body, block=64)
    assert "waits for the mbarrier at offset 8 (parity 0)" in text
    assert "phase of parity 0 still needs 1 arrival of 2 and 48 bytes" in text


def test_clusters_say_how_many_have_arrived() -> None:
    body = """
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r2, 1;
        @%p1 bra OTHER;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    OTHER:
        @%p1 bar.sync 1, 64;
    """
    text = deadlock(body, grid=2, cluster=2, block=32)
    assert "waits for the barrier of its cluster, where 32 of 64 threads have arrived" in text
    assert "waits for barrier 1, where 32 of 64 threads have arrived" in text


def test_registers_that_nobody_gives_back() -> None:
    body = """
        setmaxnreg.inc.sync.aligned.u32 240;
    """
    text = deadlock(body, block=384)
    assert "waits for 2304 more registers, of which its block has 0 free" in text


def test_lanes_that_are_elsewhere() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 8;
        @%p1 bra FIRST;
        bar.warp.sync 0xffffffff;
    FIRST:
        bar.warp.sync 0xffffffff;
    """
    text = deadlock(body)
    assert "lanes ffffff00: " in text
    assert "waits for lanes 000000ff of its warp, which are elsewhere" in text


def test_many_blocks_are_not_all_listed() -> None:
    body = """
        mov.u32 %r2, %ctaid.x;
        and.b32 %r2, %r2, 15;
        mov.u32 %r3, 64;
        bar.sync %r2, %r3;
    """
    text = deadlock(body, grid=32, block=32)
    assert text.count("and 1 other like it") == 16
    assert "waits for barrier 15, where 32 of 64 threads have arrived" in text


def test_blocks_without_room_are_counted() -> None:
    text = deadlock("bar.sync 1, 64;", grid=40, block=32, multiprocessors=1)
    assert "8 more blocks have no room on a multiprocessor" in text


# -- polls -----------------------------------------------------------------------------------------

POLL = """
    ld.param.u64 %rd1, [p0];
WAIT:
    {before}
    ld.acquire.gpu.global.u32 %r2, [%rd1+16];
    {behind}
    setp.lt.s32 %p1, %r2, 3;
    @%p1 bra WAIT;
"""
NEVER = "waits for a change of 4 bytes at 16 bytes behind the start of argument 0 of k, seen: 0"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "before, behind, expected",
    [
        ("", "", ", expected: value >= 3"),
        ("nanosleep.u32 20;", "sub.s32 %r2, %r2, 7;", r", expected: \(value - 7\) >= 3"),
        # Lanes that try in turn, and come back to where they were after some rounds.
        ("add.u32 %r3, %r3, 1; and.b32 %r3, %r3, 7;", "", ", expected: value >= 3"),
        ("bar.sync 0;", "", ", expected: value >= 3"),
        ("st.global.u32 [%rd1+64], 7;", "", ", expected: value >= 3"),
        ("atom.global.cas.b32 %r4, [%rd1+64], 1, 2;", "", ", expected: value >= 3"),
    ],
)
def test_a_flag_that_never_comes(before: str, behind: str, expected: str, seed: int) -> None:
    """At once: not after all the statements that a launch may have."""
    body = "mov.u32 %r3, 0;" + POLL.format(before=before, behind=behind)
    with pytest.raises(PtxError, match="deadlock: every thread waits, or polls") as raised:
        data = torch.zeros(64, dtype=torch.int64)
        run(kernel(body, 1), [data], block=64, grid=2, seed=seed, max_statements=300_000)
    text = str(raised.value)
    assert re.search(NEVER + expected, text), text
    if "bar.sync" not in before:  # where one of the warps may be found at the barrier
        assert "block (0, 0, 0) and 1 other like it" in text and "warps 0-1" in text


@pytest.mark.parametrize("seed", [0, 1])
def test_a_poll_that_ends_by_itself_is_none(seed: int) -> None:
    body = "mov.u32 %r3, 0;" + POLL.format(
        before="", behind="add.u32 %r3, %r3, 1; setp.gt.u32 %p2, %r3, 5000; @%p2 mov.u32 %r2, 3;"
    )
    data = torch.zeros(64, dtype=torch.int64)
    Device(idle_patience=0.01).launch(
        Module(kernel(body, 1)), "k", grid=1, block=32, args=[data], seed=seed
    )


def test_launches_that_wait_for_each_other() -> None:
    """One polls, the other waits at a barrier: both are told of; while one computes, none is."""
    device, module = Device(idle_patience=0.1), Module(kernel(POLL.format(before="", behind=""), 1))
    errors: list[str] = []

    def poll(data: torch.Tensor) -> None:
        try:
            device.launch(module, "k", grid=1, block=32, args=[data])
        except PtxError as error:
            errors.append(str(error))

    flags = [torch.zeros(64, dtype=torch.int64) for _ in range(2)]
    threads = [threading.Thread(target=poll, args=(flag,)) for flag in flags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and all(error.count(NEVER) == 2 for error in errors), errors
    flags[0][2] = 3
    poll(flags[0])
    assert len(errors) == 2
