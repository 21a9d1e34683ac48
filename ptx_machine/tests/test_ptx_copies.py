"""Bulk copies of bytes on the PTX machine: results, order, and what is not allowed."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import LANES, await_phase, kernel, run

SEEDS = range(5)
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# %r1: shared memory: two mbarriers for one arrival each, and data from 128 on. Only the first
# thread of a block goes on.
BEGIN = f"""
    .shared .align 128 .b8 memory[2048];
    mov.u32 %r1, memory;
    mov.u32 %r2, %cluster_ctarank;
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.init.shared::cta.b64 [%r1+8], 1;
    fence.mbarrier_init.release.cluster;
    st.shared.u32 [%r1+656], 5;
    fence.proxy.async.shared::cta;
READY:
    {SYNC}
    @%p1 bra END;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {bytes};"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def pattern(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return ((torch.arange(count) * 7919 + 13) % 251).to(dtype)


def copy(body: str, source: torch.Tensor, target: torch.Tensor, **options: object) -> None:
    settings: dict[str, object] = {"block": LANES, **options}
    text = f"{BEGIN} {body} END: {SYNC}"
    run(kernel(text, 2), [source, target], **settings)


def stored(rank_step: int = 0) -> str:
    """Return statements that store 512 bytes of shared memory from 128 on at p1."""
    return f"""
        mad.wide.u32 %rd3, %r2, {rank_step}, %rd2;
        {STORE} [%rd3], [%r1+128], 512;
        {DONE}
    """


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_come_and_go(seed: int) -> None:
    source, target = pattern(128), torch.zeros(128, dtype=torch.int32)
    body = f"""
        mov.u64 %rd4, 0;
        {EXPECT.format(bytes=512)}
        {LOAD} [%r1+128], [%rd1], 256, [%r1];
        {LOAD}.L2::cache_hint [%r1+384], [%rd1+256], 256, [%r1], %rd4;
        cp.async.bulk.prefetch.L2.global [%rd1], 512;
        {await_phase("%r1", 0, "FULL")}
        fence.proxy.async.shared::cta;
        {stored()}
    """
    copy(body, source, target, seed=seed)
    assert torch.equal(source, target)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_to_all_blocks_of_a_cluster(seed: int) -> None:
    """Ranks 0 and 1 each send half of the bytes to ranks 0, 1 and 3. Rank 2 gets none."""
    source, target = pattern(128), torch.zeros(4, 128, dtype=torch.int32)
    body = f"""
        setp.eq.u32 %p2, %r2, 2;
        @%p2 bra END;
        {EXPECT.format(bytes=512)}
        setp.ge.u32 %p3, %r2, 2;
        @%p3 bra WAIT;
        mul.lo.u32 %r3, %r2, 256;
        add.u32 %r4, %r1, %r3;
        cvt.u64.u32 %rd4, %r3;
        add.s64 %rd4, %rd1, %rd4;
        mov.u16 %h1, 11;
        {LOAD}.multicast::cluster [%r4+128], [%rd4], 256, [%r1], %h1;
    WAIT:
        {await_phase("%r1", 0, "FULL")}
        {stored(512)}
    """
    copy(body, source, target, grid=4, cluster=4, seed=seed)
    for rank in range(4):
        assert torch.equal(target[rank], source if rank != 2 else torch.zeros_like(source))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_send_to_each_other(seed: int) -> None:
    """Each block sends what it loaded to the next one, by a copy, by st.async and by red.async."""
    source, target = pattern(256), torch.zeros(2, 128, dtype=torch.int32)
    body = f"""
        xor.b32 %r3, %r2, 1;
        mapa.shared::cluster.u32 %r4, %r1, %r3;
        mad.wide.u32 %rd4, %r2, 512, %rd1;
        {EXPECT.format(bytes=512)}
        {LOAD} [%r1+1024], [%rd4], 512, [%r1];
        {await_phase("%r1", 0, "LOADED")}
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+8], {512 + 16 + 4};
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%r4+128], [%r1+1024], 512, [%r4+8];
        mov.u32 %r5, 1000;
        add.u32 %r6, %r5, %r2;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32
            [%r4+640], {{%r5, %r6, %r5, %r6}}, [%r4+8];
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
            [%r4+656], %r5, [%r4+8];
        {await_phase("%r1+8", 0, "SENT")}
        ld.shared.u32 %r7, [%r1+644];
        ld.shared.u32 %r8, [%r1+656];
        st.shared.u32 [%r1+128], %r7;
        st.shared.u32 [%r1+132], %r8;
        fence.proxy.async.shared::cta;
        {stored(512)}
    """
    copy(body, source, target, grid=2, cluster=2, seed=seed)
    for rank in range(2):
        assert target[rank, :2].tolist() == [1001 - rank, 1005]
        assert torch.equal(target[rank, 2:], source.view(2, 128)[1 - rank, 2:])


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "action, dtype",
    [
        *(("add", dtype) for dtype in (torch.int32, torch.int64, *FLOATS)),
        *((a, d) for a in ("min", "max") for d in (torch.int32, torch.int64, *FLOATS[2:])),
        *((action, torch.int32) for action in ("and", "or", "xor", "inc", "dec")),
    ],
    ids=str,
)
def test_reductions_in_global_memory(action: str, dtype: torch.dtype, seed: int) -> None:
    names = {
        torch.int32: "u32" if action == "inc" or action == "dec" else "s32",
        torch.int64: "s64" if action in ("min", "max") else "u64",
        torch.float32: "f32",
        torch.float64: "f64",
        torch.float16: "f16",
        torch.bfloat16: "bf16",
    }
    name = "b32" if action in ("and", "or", "xor") else names[dtype]
    half = ".noftz" if dtype in FLOATS[2:] and action == "add" else ""
    source = pattern(64, dtype) - 100 if dtype.is_floating_point else pattern(64, dtype)
    target = pattern(64, dtype).flip(0)
    before = target.clone()
    size = source.numel() * source.element_size()
    body = f"""
        {EXPECT.format(bytes=size)}
        {LOAD} [%r1+128], [%rd1], {size}, [%r1];
        {await_phase("%r1", 0, "FULL")}
        cp.reduce.async.bulk.global.shared::cta.bulk_group.{action}{half}.{name}
            [%rd2], [%r1+128], {size};
        {DONE}
    """
    copy(body, source, target, seed=seed)
    by = {
        "add": lambda: before + source,
        "min": lambda: torch.minimum(before, source),
        "max": lambda: torch.maximum(before, source),
        "and": lambda: before & source,
        "or": lambda: before | source,
        "xor": lambda: before ^ source,
        "inc": lambda: torch.where(before >= source, 0, before + 1),
        "dec": lambda: torch.where((before == 0) | (before > source), source, before - 1),
    }
    assert torch.equal(target, by[action]().to(dtype))


# -- when things happen ----------------------------------------------------------------------------


def reused(wait: str) -> str:
    """Return a store whose source is overwritten behind ``wait``."""
    return f"""
        st.shared.v4.u32 [%r1+128], {{1, 1, 1, 1}};
        fence.proxy.async.shared::cta;
        {STORE} [%rd2], [%r1+128], 16;
        cp.async.bulk.commit_group;
        {wait}
        st.shared.u32 [%r1+128], 2;
        cp.async.bulk.wait_group 0;
    """


def test_a_source_is_read_late_but_before_its_wait() -> None:
    source, values = torch.zeros(4, dtype=torch.int32), set()
    for seed in range(12):
        target = torch.zeros(4, dtype=torch.int32)
        copy(reused("cp.async.bulk.wait_group.read 0;"), source, target, seed=seed)
        assert target[0] == 1
        copy(reused(""), source, target, seed=seed, races=False)
        values.add(target[0].item())
    assert 2 in values
    copy(reused("cp.async.bulk.wait_group.read 1;"), source, target, races=False)
    assert target[0] == 2


def test_a_result_is_written_late_but_before_its_wait() -> None:
    """A thread looks at global memory behind .read, and behind the wait for the whole."""
    source = torch.zeros(4, dtype=torch.int32)
    body = f"""
        st.shared.v4.u32 [%r1+128], {{7, 7, 7, 7}};
        fence.proxy.async.shared::cta;
        {STORE} [%rd2], [%r1+128], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        ld.global.u32 %r10, [%rd2];
        cp.async.bulk.wait_group 0;
        ld.global.u32 %r11, [%rd2];
        mad.lo.u32 %r12, %r10, 10, %r11;
        st.global.u32 [%rd1], %r12;
    """
    target = torch.zeros(4, dtype=torch.int32)
    copy(body, source, target, races=False)
    assert source[0] == 7
    for seed in SEEDS:
        target = torch.zeros(4, dtype=torch.int32)
        copy(body, source, target, seed=seed + 1, races=False)
        assert source[0] in (7, 77)


def test_the_end_of_a_kernel_completes_stores() -> None:
    body = f"""
        st.shared.v4.u32 [%r1+128], {{7, 7, 7, 7}};
        fence.proxy.async.shared::cta;
        {STORE} [%rd2], [%r1+128], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    """
    for seed in SEEDS:
        target = torch.zeros(4, dtype=torch.int32)
        copy(body, torch.zeros(4, dtype=torch.int32), target, seed=seed)
        assert target[0] == 7


def test_loads_come_in_any_order() -> None:
    """Two loads of the same bytes of shared memory: either may be the last one."""
    values = set()
    for seed in range(12):
        source, target = pattern(128), torch.zeros(128, dtype=torch.int32)
        body = f"""
            {EXPECT.format(bytes=1024)}
            {LOAD} [%r1+128], [%rd1], 512, [%r1];
            {LOAD} [%r1+128], [%rd2], 512, [%r1];
            {await_phase("%r1", 0, "FULL")}
            {stored()}
        """
        copy(body, source, target, seed=seed, races=False)
        values.add(target[0].item())
    assert values == {0, 13}


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_may_spin_for_what_a_store_writes(seed: int) -> None:
    """Nobody waits for the store; it is written after some time all the same."""
    body = f"""
        st.shared.v4.u32 [%r1+128], {{7, 7, 7, 7}};
        fence.proxy.async.shared::cta;
        {STORE} [%rd2], [%r1+128], 16;
    SPIN:
        ld.volatile.global.u32 %r10, [%rd2];
        setp.ne.u32 %p2, %r10, 7;
        @%p2 bra SPIN;
    """
    copy(body, torch.zeros(4), torch.zeros(4), seed=seed, races=False, max_statements=100_000)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, error",
    [
        (f"{LOAD} [%r1+128], [%rd1], 24, [%r1];", "24 bytes is no multiple of 16"),
        (f"{LOAD} [%r1+136], [%rd1], 16, [%r1];", "not aligned to 16 bytes"),
        (f"{LOAD} [%r1+128], [%rd1+8], 16, [%r1];", "is not aligned to 16 bytes"),
        (f"{LOAD} [%r1+2032], [%rd1], 32, [%r1];", "of shared memory, which has 2048"),
        (
            f"{LOAD} [%r1+128], [%rd1], 1024, [%r1];" + await_phase("%r1", 0, "W"),
            "1024 bytes outside of global memory(.|\n)*started",
        ),
        (f"{LOAD} [%r1+128], [%rd1], 16, [%r1+64];" + await_phase("%r1", 0, "W"), "no mbarrier"),
        (
            f"{LOAD} [%r1+128], [%rd1], 16, [%r1];",
            "has ended while its shared memory is still written",
        ),
        (
            f"{STORE} [%rd2], [%r1+128], 16; cp.async.bulk.commit_group;",
            "ended while its shared .*read",
        ),
        (
            f"mov.u16 %h1, 2; {LOAD}.multicast::cluster [%r1+128], [%rd1], 16, [%r1], %h1;",
            "multicast to rank 1 of a cluster of 1 blocks",
        ),
        (f"{LOAD}.multicast::all [%r1+128], [%rd1], 16, [%r1], %h1;", "unknown instruction"),
        (f"{STORE}.cp_mask [%rd2], [%r1+128], 16, %h1;", "unknown instruction"),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd2], [%r1+128], 16;",
            "unknown instruction",
        ),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd2], [%r1+128], 16;",
            "unknown instruction",
        ),
    ],
)
def test_misuse_of_copies_fails(body: str, error: str) -> None:
    source, target = pattern(64), torch.zeros(64, dtype=torch.int32)
    with pytest.raises(PtxError, match=error):
        copy(body, source, target, races=False)


def test_an_mbarrier_lies_where_the_bytes_go() -> None:
    body = f"mapa.shared::cluster.u32 %r4, %r1, 1; {LOAD} [%r4+128], [%rd1], 16, [%r1];"
    with pytest.raises(PtxError, match="not in the block that the copy goes to"):
        copy(body, pattern(64), pattern(64), grid=2, cluster=2)
