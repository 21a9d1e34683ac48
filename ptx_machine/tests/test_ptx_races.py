"""Accesses without an order: each rule in a few statements, with and without what orders them."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import kernel, run

MEMORY = ".shared .align 16 .b8 memory[2048]; mov.u32 %r1, memory; ld.param.u64 %rd1, [p0];"
# Each thread writes its word; it reads that of the thread {by} further on.
EXCHANGE = f"""
    {MEMORY}
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r0;
    {{sync}}
    xor.b32 %r4, %r2, {{by}};
    add.u32 %r4, %r1, %r4;
    ld.shared.u32 %r5, [%r4];
"""
# Block 0 writes data and then a flag; block 1 awaits the flag and reads the data.
MESSAGE = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READ;
    {write}
    bra END;
READ:
    {read}
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra READ;
    {behind}
    ld.global.u32 %r3, [%rd1];
END:
"""
DATA = "st.global.u32 [%rd1], 7;"


def check(text: str, error: str | None, **options: object) -> None:
    """Run a text over some seeds. It fails with this error for each, or for none."""
    for seed in range(4):
        data = torch.zeros(1024, dtype=torch.int32)
        if error is None:
            run(kernel(text, 1), [data], seed=seed, **options)
            continue
        with pytest.raises(PtxError, match=error):
            run(kernel(text, 1), [data], seed=seed, **options)


@pytest.mark.parametrize(
    "sync, by, error",
    [
        ("", 4, "race: this read of 4 bytes at offset .* bar.warp.sync"),
        ("bar.warp.sync -1;", 4, None),
        ("", 128, "race: this .* a barrier of both warps"),
        ("bar.warp.sync -1;", 128, "race: this .* a barrier of both warps"),
        ("membar.gl;", 128, "race: this .* a barrier of both warps"),
        ("bar.sync 0;", 128, None),
    ],
)
def test_threads_of_a_block(sync: str, by: int, error: str | None) -> None:
    check(EXCHANGE.format(sync=sync, by=by), error, block=64)


@pytest.mark.parametrize(
    "write, read, behind, error",
    [
        ("st.release.gpu", "ld.acquire.gpu", "", None),
        ("st.relaxed.gpu", "ld.acquire.gpu", "", "race: .* scope .gpu"),
        ("st.release.gpu", "ld.relaxed.gpu", "", "race: .* scope .gpu"),
        ("st.release.gpu", "ld.relaxed.gpu", "fence.acq_rel.gpu;", None),
        ("fence.acq_rel.gpu; st.relaxed.gpu", "ld.acquire.gpu", "", None),
        ("membar.gl; st.volatile", "ld.volatile", "membar.gl;", None),
        ("membar.cta; st.volatile", "ld.volatile", "membar.gl;", "race: .* scope .gpu"),
        ("st.release.cta", "ld.acquire.cta", "", "race: .* scope .gpu at both"),
        ("st", "ld.acquire.gpu", "", "race: .* scope .gpu"),
    ],
)
def test_a_message_between_blocks(write: str, read: str, behind: str, error: str | None) -> None:
    text = MESSAGE.format(
        write=f"{DATA} {write}.global.u32 [%rd1+128], 1;",
        read=f"{read}.global.u32 %r2, [%rd1+128];",
        behind=behind,
    )
    check(text, error, grid=2)


def test_a_flag_before_its_data() -> None:
    text = MESSAGE.format(
        write=f"st.release.gpu.global.u32 [%rd1+128], 1; {DATA}",
        read="ld.acquire.gpu.global.u32 %r2, [%rd1+128];",
        behind="",
    )
    check(text, "race: .* missing is a release and an acquire", grid=2)


@pytest.mark.parametrize(
    "behind, reset, error",
    [
        ("bar.sync 0;", "st.global.u32 [%rd1+128], 0;", None),
        ("bar.sync 0;", "st.global.u64 [%rd1+128], 0;", None),
        ("", "st.global.u32 [%rd1+128], 0;", "race: this write .* have no order; missing is"),
        ("bar.sync 0;", "ld.global.u32 %r3, [%rd1];", "race: this read .* scope .gpu"),
    ],
)
def test_a_store_comes_before_what_is_behind_a_load_that_saw_it(
    behind: str, reset: str, error: str | None
) -> None:
    """Though nothing that comes before the store does: nothing is released, nothing acquired."""
    body = f"""
        ld.param.u64 %rd1, [p0];
        mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READ;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        {DATA}
        st.relaxed.gpu.global.u32 [%rd1+128], 1;
        bra END;
    READ:
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra BEHIND;
    POLL:
        ld.relaxed.gpu.global.u32 %r2, [%rd1+128];
        setp.eq.u32 %p2, %r2, 0;
        @%p2 bra POLL;
    BEHIND:
        {behind}
        setp.ne.u32 %p1, %r0, 32;
        @%p1 bra END;
        {reset}
    END:
    """
    check(body, error, grid=2, block=64)


def test_the_same_value_is_no_conflict() -> None:
    check(f"{MEMORY} st.shared.u32 [%r1], 5;", None, block=64)
    check(f"{MEMORY} st.shared.u32 [%r1], %r0;", "race: this write .* and the write", block=64)


def test_a_message_names_both_accesses() -> None:
    with pytest.raises(PtxError) as raised:
        check(EXCHANGE.format(sync="", by=128), None, block=64)
    text = str(raised.value)
    assert text.count("PTX line") == 2 and "st.shared" in text and "ld.shared" in text
    assert text.count("of block (0, 0, 0)") == 2


def test_shared_memory_that_was_never_written() -> None:
    read = f"{MEMORY} ld.shared.u32 %r2, [%r1+64];"
    check(read, None)
    error = "register %r2 is read .* was loaded from memory that was never written"
    check(f"{read} st.global.u32 [%rd1], %r2;", error)
    check(f"{MEMORY} red.shared.add.u32 [%r1+64], 1;", "never written is read")


@pytest.mark.parametrize(
    "fence, wait, error",
    [
        ("fence.proxy.async.shared::cta;", "wait_group.read", None),
        ("fence.proxy.async;", "wait_group", None),
        ("", "wait_group", "missing is a fence.proxy.async between them"),
        ("fence.proxy.async.global;", "wait_group", "missing is a fence.proxy.async between them"),
        ("fence.proxy.async;", "commit_group", "missing is cp.async.bulk.wait_group.read"),
    ],
)
def test_a_bulk_store_and_its_source(fence: str, wait: str, error: str | None) -> None:
    waits = f"cp.async.bulk.{wait}" + (" 0;" if "wait" in wait else ";")
    body = f"""
        {MEMORY}
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        st.shared.v4.u32 [%r1], {{%r0, %r0, %r0, %r0}};
        {fence}
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;
        cp.async.bulk.commit_group;
        {waits}
        st.shared.u32 [%r1], 3;
        cp.async.bulk.wait_group 0;
    END:
    """
    check(body, error)


def test_the_result_of_a_bulk_store_needs_the_whole_wait() -> None:
    body = f"""
        {MEMORY}
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        st.shared.v4.u32 [%r1], {{%r0, %r0, %r0, %r0}};
        fence.proxy.async;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        ld.global.u32 %r2, [%rd1];
    END:
    """
    check(body, r"cp.async.bulk.wait_group \(without .read\)")
    check(body.replace("wait_group.read", "wait_group"), None)


# Block 0 stores 1 to two words, one behind the other; block 1 awaits the second one and keeps the
# first.
TWO_WORDS = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READ;
    st.relaxed.gpu.global.u32 [%rd1], 1;
    {store}.global.u32 [%rd1+128], 1;
    bra END;
READ:
    {load}.global.u32 %r2, [%rd1+128];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra READ;
    {behind}
    ld.relaxed.gpu.global.u32 %r3, [%rd1];
    ld.relaxed.gpu.global.u32 %r4, [%rd1];
    st.global.u32 [%rd1+256], %r3;
    st.global.u32 [%rd1+260], %r4;
END:
"""


def pairs_read(**parts: str) -> set[tuple[int, int]]:
    """Return what block 1 has read of the first word, over many seeds."""
    parts = {"behind": "", **parts}
    pairs = set()
    for seed in range(1, 201):
        data = torch.zeros(1024, dtype=torch.int32)
        run(kernel(TWO_WORDS.format(**parts), 1), [data], seed=seed, grid=2)
        pairs.add((int(data[64]), int(data[65])))
    return pairs


@pytest.mark.parametrize("store, behind", [("", ""), ("", "fence.sc.gpu;"), ("fence.sc.gpu;", "")])
def test_a_strong_load_may_return_an_older_value(store: str, behind: str) -> None:
    """But none older than what the same thread has loaded before: coherence.

    A fence of one of the two threads alone orders nothing.
    """
    pairs = pairs_read(store=f"{store} st.relaxed.gpu", load="ld.relaxed.gpu", behind=behind)
    assert {(0, 1), (1, 1)} <= pairs <= {(0, 0), (0, 1), (1, 1)}


# Blocks 0 and 1 each store to a word of their own, then load the other's. Block 2 acquires what
# block 1 releases behind that, and loads the word of block 0.
CROSSED = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    ld.relaxed.gpu.global.u32 %r2, [%rd1];
    ld.relaxed.gpu.global.u32 %r2, [%rd1+128];
    ld.relaxed.gpu.global.u32 %r2, [%rd1+768];
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra LAST;
    shl.b32 %r2, %r1, 7;
    cvt.u64.u32 %rd2, %r2;
    add.u64 %rd2, %rd1, %rd2;
    xor.b32 %r3, %r2, 128;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd3, %rd1, %rd3;
    st.relaxed.gpu.global.u32 [%rd2], 1;
    {fence}
    ld.relaxed.gpu.global.u32 %r3, [%rd3];
    st.global.u32 [%rd2+256], %r3;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra END;
    st.release.gpu.global.u32 [%rd1+768], 1;
    bra END;
LAST:
    ld.acquire.gpu.global.u32 %r2, [%rd1+768];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra LAST;
    ld.relaxed.gpu.global.u32 %r3, [%rd1];
    st.global.u32 [%rd1+512], %r3;
END:
"""


@pytest.mark.parametrize("fence", ["fence.acq_rel.gpu;", "fence.sc.gpu;"])
def test_of_two_sequential_fences_one_is_behind_the_other(fence: str) -> None:
    """And with it what the later one's thread releases."""
    crossed, passed_on = set(), set()
    for seed in range(1, 401):
        data = torch.zeros(1024, dtype=torch.int32)
        run(kernel(CROSSED.format(fence=fence), 1), [data], seed=seed, grid=3)
        crossed.add((int(data[64]), int(data[96])))
        passed_on.add((int(data[64]), int(data[128])))
    every = {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert crossed == (every if "acq" in fence else every - {(0, 0)})
    assert "acq" in fence or (0, 0) not in passed_on


@pytest.mark.parametrize(
    "store, load, behind",
    [
        ("st.release.gpu", "ld.acquire.gpu", ""),
        ("fence.acq_rel.gpu; st.relaxed.gpu", "ld.relaxed.gpu", "fence.acq_rel.gpu;"),
        ("fence.sc.gpu; st.relaxed.gpu", "ld.relaxed.gpu", "fence.sc.gpu;"),
    ],
)
def test_release_and_acquire_make_older_values_too_old(store: str, load: str, behind: str) -> None:
    assert pairs_read(store=store, load=load, behind=behind) == {(1, 1)}


def test_atomics_see_the_newest_value() -> None:
    text = "ld.param.u64 %rd1, [p0]; atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;"
    for seed in range(1, 20):
        data = torch.zeros(1024, dtype=torch.int32)
        run(kernel(text, 1), [data], seed=seed, grid=4, block=64)
        assert data[0] == 256


COPY = "ld.param.u64 %rd1, [p0]; add.u64 %rd1, %rd1, %rd0;"


@pytest.mark.parametrize(
    "statements, error",
    [
        (
            "st.global.u64 [%rd1], %rd0; ld.global.u64 %rd2, [%rd1]; st.global.u64 [%rd1], %rd2;",
            None,
        ),
        ("ld.global.u64 %rd2, [%rd1];", None),  # loops that load ahead use it no more
        (
            "ld.global.u64 %rd2, [%rd1]; st.global.u64 [%rd1], %rd2;",
            "loaded from memory that was never written",
        ),
        (
            "st.global.u32 [%rd1], %r0; ld.global.u64 %rd2, [%rd1]; st.global.u64 [%rd1], %rd2;",
            "loaded from memory that was never written",
        ),
        (
            "atom.global.add.u64 %rd2, [%rd1], 1;",
            "global memory that was never written is read, 8 bytes at 0 bytes behind the start",
        ),
    ],
)
def test_global_memory_that_was_never_written(statements: str, error: str | None) -> None:
    device, module = Device(), Module(kernel(f"{COPY} {statements}", 1))
    data = torch.zeros(32, dtype=torch.int64)
    for _ in range(2):  # it may be said again
        device.register(data, written=False)
        if error is None:
            device.launch(module, "k", grid=1, block=32, args=[data])
            continue
        with pytest.raises(PtxError, match=error):
            device.launch(module, "k", grid=1, block=32, args=[data])


def test_what_one_launch_writes_another_may_read() -> None:
    device, data = Device(), torch.zeros(32, dtype=torch.int64)
    device.register(data, written=False)
    for statements in (
        "st.global.u64 [%rd1], %rd0;",
        "ld.global.u64 %rd2, [%rd1]; st.global.u64 [%rd1], %rd2;",
    ):
        module = Module(kernel(f"{COPY} {statements}", 1))
        device.launch(module, "k", grid=1, block=32, args=[data])
    assert data[3] == 24


# Block 0 stores pairs (i, i) until the end; block 1 loads them and counts those that differ.
PAIRS = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    mov.u32 %r2, 0;
    mov.u32 %r5, 0;
NEXT:
    add.u32 %r2, %r2, 1;
    setp.ne.u32 %p1, %r1, 0;
    @!%p1 st.volatile.global.v2.u32 [%rd1], {%r2, %r2};
    @%p1 ld.volatile.global.v2.u32 {%r3, %r4}, [%rd1];
    @%p1 setp.ne.u32 %p2, %r3, %r4;
    @!%p1 setp.ne.u32 %p2, 0, 0;
    @%p2 add.u32 %r5, %r5, 1;
    setp.lt.u32 %p3, %r2, 40;
    @%p3 bra NEXT;
    @%p1 st.global.u32 [%rd1+64], %r5;
END:
"""


@pytest.mark.parametrize("vectors", ["apart", "whole", "reported"])
def test_elements_of_a_vector(vectors: str) -> None:
    """PTX takes them as accesses of their own, which see several stores."""
    mixed, reports = 0, 0
    for seed in range(1, 21):
        data = torch.zeros(32, dtype=torch.int32)
        try:
            run(kernel(PAIRS, 1), [data], seed=seed, grid=2, vectors=vectors)
        except PtxError as error:
            assert "a load mixes elements of two stores" in str(error)
            reports += 1
        mixed += int(data[16])
    assert (mixed > 0, reports > 0) == (vectors == "apart", vectors == "reported")


def test_memory_that_a_kernel_writes_is_not_constant() -> None:
    body = f"{COPY} st.global.u64 [%rd1], %rd0; {{behind}} ld.global.nc.u64 %rd2, [%rd1];"
    check(body.format(behind="bar.sync 0;"), "race: .* missing is a load without .nc")
    check(f"{COPY} ld.global.nc.u64 %rd2, [%rd1]; st.global.u64 [%rd1], %rd2;", None)
