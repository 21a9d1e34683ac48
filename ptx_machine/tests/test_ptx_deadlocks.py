"""Reports of deadlocks: each group of threads, and what it waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptx_machine import PtxError
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
