"""Memory, divergence, barriers and matrix instructions of the PTX machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, kernel, run

POINTERS = """
    ld.param.u64 %rd1, [p0];
    add.s64 %rd1, %rd1, %rd0;
"""  # %rd1: the thread's own element of p0, of 8 bytes


def lanes(body: str, inputs: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    """Run ``body``, which leaves its result in %r20; %r10 is the thread's element of ``inputs``."""
    threads = int(str(options.get("block", LANES)))
    values = torch.arange(threads) if inputs is None else inputs.clone()
    text = f"{POINTERS} ld.global.u32 %r10, [%rd1]; {body} st.global.u32 [%rd1], %r20;"
    outside = str(options.pop("outside", ""))
    run(kernel(text, 1, outside=outside), [values], **options)
    return values & 0xFFFFFFFF


# -- lanes of a warp -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, source",
    [
        ("idx.b32 %r20, %r10, 5, 31", lambda lane: 5),
        ("idx.b32 %r20, %r10, 1, 0x181F", lambda lane: lane // 8 * 8 + 1),
        ("up.b32 %r20, %r10, 3, 0", lambda lane: lane - 3 if lane >= 3 else lane),
        ("down.b32 %r20, %r10, 4, 31", lambda lane: lane + 4 if lane < 28 else lane),
        ("bfly.b32 %r20, %r10, 8, 31", lambda lane: lane ^ 8),
    ],
    ids=["idx", "segments of 8", "up", "down", "bfly"],
)
def test_shuffles(kind: str, source: Callable[[int], int]) -> None:
    inputs = torch.arange(LANES) * 7 + 1
    result = lanes(f"shfl.sync.{kind}, -1;", inputs)
    assert result.tolist() == [7 * source(lane) + 1 for lane in range(LANES)]


@pytest.mark.parametrize("source", [0, 1])
def test_a_lane_may_give_what_it_never_wrote(source: int) -> None:
    """As others than the leader do in warp-aggregated atomics; what nobody uses is no error."""
    body = f"""
        setp.eq.u32 %p1, %r10, 0;
        @%p1 mov.u32 %r1, 9;
        shfl.sync.idx.b32 %r20, %r1, {source}, 31, -1;
    """
    if source == 0:
        assert set(lanes(body).tolist()) == {9}
    else:
        with pytest.raises(PtxError, match="%r20 is read but was never written, or was made from"):
            lanes(body)


@pytest.mark.parametrize("chosen", ["%r1, %r2", "%r2, %r1"])
def test_a_selection_may_leave_what_was_never_written(chosen: str) -> None:
    body = f"mov.u32 %r1, 9; setp.lt.u32 %p1, %r10, 64; selp.u32 %r20, {chosen}, %p1;"
    if chosen.startswith("%r1"):
        assert set(lanes(body).tolist()) == {9}
    else:
        with pytest.raises(PtxError, match="%r20 is read but was never written, or was made from"):
            lanes(body)


def test_votes_and_reductions() -> None:
    ballot = "setp.lt.u32 %p1, %r10, 5; vote.sync.ballot.b32 %r20, %p1, -1;"
    assert set(lanes(ballot).tolist()) == {31}
    some = "setp.eq.u32 %p1, %r10, 3; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r20, 1, 0, %p2;"
    assert set(lanes(some).tolist()) == {1}
    leader = "elect.sync %r20|%p1, -1; selp.u32 %r20, 9, %r20, %p1;"
    assert lanes(leader).tolist() == [9] + [0] * 31


@pytest.mark.parametrize(
    "kind, operation",
    [
        ("add.u32", int.__add__),
        ("add.s32", int.__add__),
        ("min.u32", min),
        ("max.u32", max),
        ("min.s32", min),
        ("max.s32", max),
        ("and.b32", int.__and__),
        ("or.b32", int.__or__),
        ("xor.b32", int.__xor__),
    ],
)
def test_reductions_of_a_warp(kind: str, operation: Callable[[int, int], int]) -> None:
    values = torch.randint(-(2**31), 2**31, (LANES,), generator=torch.Generator().manual_seed(4))
    numbers = [int(v) if kind.endswith("s32") else int(v) % 2**32 for v in values]
    result = set(lanes(f"redux.sync.{kind} %r20, %r10, -1;", values).tolist())
    assert {v % 2**32 for v in result} == {reduce(operation, numbers) % 2**32}


def test_threads_that_part_meet_again() -> None:
    body = """
        and.b32 %r1, %r10, 1;
        setp.eq.u32 %p1, %r1, 0;
        mov.u32 %r20, 0;
    LOOP:
        add.u32 %r20, %r20, 1;
        setp.lt.u32 %p2, %r20, %r10;
        @%p2 bra LOOP;
        @%p1 bra EVEN;
        add.u32 %r20, %r20, 100;
    EVEN:
        shfl.sync.bfly.b32 %r20, %r20, 1, 31, -1;
    """
    steps = [max(lane, 1) + 100 * (lane % 2) for lane in range(LANES)]
    for seed in range(4):
        assert lanes(body, seed=seed).tolist() == [steps[lane ^ 1] for lane in range(LANES)]


def test_a_lane_may_wait_for_another_of_its_warp() -> None:
    """Threads have program counters of their own: a spinning lane does not stop the others."""
    body = """
        mov.u32 %r20, 0;
        ld.param.u64 %rd2, [p0];
        setp.eq.u32 %p1, %r10, 31;
        @%p1 bra GIVE;
    SPIN:
        ld.volatile.global.u32 %r1, [%rd2+252];
        setp.ne.u32 %p2, %r1, 77;
        @%p2 bra SPIN;
        mov.u32 %r20, 1;
        bra END;
    GIVE:
        mov.u32 %r2, 77;
        st.volatile.global.u32 [%rd2+252], %r2;
    END:
    """
    assert lanes(body).tolist() == [1] * 31 + [0]


# -- barriers --------------------------------------------------------------------------------------

SHARED = ".shared .align 8 .b8 memory[2048];"
FILLED = f"""
    {SHARED}
    mov.u32 %r1, memory;
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r10;
    bar.sync 0;
"""  # %r1: shared memory, that holds %r10 of each thread


@pytest.mark.parametrize("seed", range(3))
def test_shared_memory_is_complete_behind_a_barrier(seed: int) -> None:
    body = f"""
        {FILLED}
        mov.u32 %r4, 255;
        sub.u32 %r4, %r4, %r0;
        shl.b32 %r4, %r4, 2;
        add.u32 %r3, %r1, %r4;
        ld.shared.u32 %r20, [%r3];
    """
    result = lanes(body, block=256, seed=seed)
    assert result.tolist() == list(range(255, -1, -1))


def test_a_barrier_of_some_warps_and_a_reduction() -> None:
    body = """
        setp.ge.u32 %p1, %r0, 64;
        mov.u32 %r20, 7;
        @%p1 bra END;
        setp.lt.u32 %p2, %r10, 40;
        bar.red.popc.u32 %r20, 1, 64, %p2;
    END:
    """
    assert lanes(body, block=128).tolist() == [40] * 64 + [7] * 64


def test_a_deadlock_names_who_waits_where() -> None:
    body = "setp.lt.u32 %p1, %r0, 32; mov.u32 %r20, 0; @%p1 bar.sync 2, 64;"
    with pytest.raises(PtxError) as raised:
        lanes(body, block=64)
    text = str(raised.value)
    assert "deadlock" in text and "warp 0" in text and "bar.sync 2, 64" in text


def test_a_barrier_in_a_branch_of_a_warp_is_an_error() -> None:
    body = """
        setp.lt.u32 %p1, %r0, 16;
        mov.u32 %r20, 0;
        @%p1 bra LOW;
        bar.sync 0;
        bra END;
    LOW:
        bar.sync 1;
    END:
    """
    with pytest.raises(PtxError, match="deadlock"):
        lanes(body)


def test_an_endless_loop_ends_the_launch() -> None:
    with pytest.raises(PtxError, match="no end after 1000 statements"):
        lanes("mov.u32 %r20, 0; LOOP: bra LOOP;", max_statements=1000)


# -- memory ----------------------------------------------------------------------------------------


def test_accesses_outside_of_memory_are_errors() -> None:
    with pytest.raises(PtxError, match=r"8 bytes outside of global memory.*thread 0"):
        lanes("ld.global.u64 %rd2, [%rd1+256]; mov.u32 %r20, 0;")
    with pytest.raises(PtxError, match=r"not aligned to 8 bytes"):
        lanes("ld.global.u64 %rd2, [%rd1+4]; mov.u32 %r20, 0;")
    with pytest.raises(PtxError, match=r"of shared memory, which has"):
        lanes(f"{SHARED} mov.u32 %r1, 90000; ld.shared.u32 %r20, [%r1];")


def test_shared_memory_ends_where_it_was_asked_to() -> None:
    body = f"{SHARED} mov.u32 %r1, 2044; st.shared.u32 [%r1], 1; ld.shared.u32 %r20, [%r1]; "
    body = body.replace("ld.shared", "bar.warp.sync -1; ld.shared")
    lanes(body)
    with pytest.raises(PtxError, match="at 2048 of shared memory, which has 2048"):
        lanes(body.replace("2044", "2048"))


def test_vectors_extension_and_windows() -> None:
    body = f"""
        {SHARED}
        mov.u32 %r1, memory;
        cvta.shared.u64 %rd3, memory;
        mov.u32 %r2, -2;
        st.shared.v2.u32 [%r1], {{%r2, %r2}};
        bar.warp.sync -1;
        ld.v2.u32 {{%r3, %r4}}, [%rd3];
        ld.s16 %r5, [%rd3+4];
        add.u32 %r20, %r4, %r5;
    """
    assert set(lanes(body).tolist()) == {2**32 - 4}


def test_atomics_count_every_thread_of_every_block() -> None:
    text = kernel(
        """
        ld.param.u64 %rd1, [p0];
        atom.global.add.u32 %r1, [%rd1], 1;
        red.global.max.u32 [%rd1+4], %r0;
    AGAIN:
        ld.relaxed.gpu.global.u32 %r2, [%rd1+8];
        add.u32 %r3, %r2, 2;
        atom.global.cas.b32 %r4, [%rd1+8], %r2, %r3;
        setp.ne.u32 %p1, %r4, %r2;
        @%p1 bra AGAIN;
        """,
        1,
    )
    cells = torch.zeros(3, dtype=torch.int32)
    run(text, [cells], grid=(3, 2), block=96, multiprocessors=1, seed=5)
    assert cells.tolist() == [576, 95, 1152]


def test_an_asynchronous_copy_is_there_behind_its_wait_only() -> None:
    body = f"""
        {SHARED}
        mov.u32 %r1, memory;
        shl.b32 %r2, %r0, 3;
        add.u32 %r1, %r1, %r2;
        mov.u32 %r3, 5;
        st.shared.u32 [%r1], %r3;
        cp.async.ca.shared.global [%r1], [%rd1], 8;
        cp.async.commit_group;
        ld.shared.u32 %r4, [%r1];
        cp.async.wait_group 0;
        ld.shared.u32 %r5, [%r1];
        mad.lo.u32 %r20, %r4, 1000, %r5;
    """
    assert lanes(body, races=False).tolist() == [5000 + lane for lane in range(LANES)]


def test_dynamic_shared_memory_and_variables_of_a_module() -> None:
    outside = """
        .extern .shared .align 16 .b8 more[];
        .global .align 4 .u32 three = 3;
    """
    body = """
        mov.u32 %r1, more;
        mov.u64 %rd3, three;
        ld.global.u32 %r2, [%rd3];
        st.shared.u32 [%r1+60], %r2;
        bar.warp.sync -1;
        ld.shared.u32 %r20, [%r1+60];
    """
    assert set(lanes(body, outside=outside, dynamic_shared=64).tolist()) == {3}


def test_each_module_has_its_own_kernels_and_variables() -> None:
    """Also when an earlier one is gone, whose memory the next one may get."""
    device = Device()
    body = "ld.param.u64 %rd1, [p0]; mov.u64 %rd2, v; ld.global.u32 %r1, [%rd2];"
    for number in range(20):
        out = torch.zeros(1, dtype=torch.int32)
        outside = f".global .align 4 .u32 v[{number + 1}] = {{ {number} }};"
        text = kernel(f"{body} add.u32 %r1, %r1, {number}; st.global.u32 [%rd1], %r1;", 1, outside)
        device.launch(Module(text), "k", grid=1, block=1, args=[out])
        assert out.item() == 2 * number


def test_arguments_that_do_not_fit_are_refused() -> None:
    module = Module(kernel("", 2))
    with pytest.raises(ValueError, match=r"takes 2 arguments \(bytes: 8, 8\), got 1"):
        Device().launch(module, "k", grid=1, block=1, args=[1])
    with pytest.raises(ValueError, match="argument 1 of k has 8 bytes, got 3"):
        Device().launch(module, "k", grid=1, block=1, args=[1, b"abc"])
    with pytest.raises(ValueError, match="must be contiguous"):
        Device().launch(module, "k", grid=1, block=1, args=[1, torch.ones(4, 4).t()])
    with pytest.raises(PtxError, match="no kernel other"):
        Device().launch(module, "other", grid=1, block=1, args=[])
    with pytest.raises(PtxError, match="2048 threads"):
        Device().launch(module, "k", grid=1, block=2048, args=[1, 2])


@pytest.mark.parametrize(
    "statement, why",
    [
        (
            "setp.eq.s32 %p1, %r10, %r63;",
            "register %r63 is read but was never written, or was made from one that was not, by "
            "thread 0",
        ),
        ("@%p9 mov.u32 %r20, 0;", "predicate %p9 is read but was never written"),
        ("wiggle.u32 %r20, %r10;", "unknown instruction"),
        ("mov.u32 %r20, %nothing;", "unknown special register %nothing"),
        ("bra NOWHERE;", "unknown name NOWHERE"),
        ("trap;", "trap"),
    ],
)
def test_errors_name_kernel_line_and_text(statement: str, why: str) -> None:
    with pytest.raises(PtxError) as raised:
        lanes(f"\n{statement}\n")
    text = str(raised.value)
    assert why in text and "k, PTX line" in text and statement.split()[0] in text


def test_what_was_never_written_may_be_computed_with_but_not_used() -> None:
    """Compilers do that for values that a predicate leaves out in the end."""
    of_some = """
        setp.lt.u32 %p1, %r0, 7;
        @%p1 mov.u32 %r2, 5;
        mov.u32 %r3, %r2;
        add.s32 %r4, %r3, %r0;
        cvt.u64.u32 %rd20, %r4;
        {select}
        ld.param.u64 %rd1, [p0];
        add.s64 %rd1, %rd1, %rd0;
        @%p1 st.global.u64 [%rd1], %rd20;
        """
    out = torch.zeros(LANES, dtype=torch.int64)
    run(kernel(of_some.format(select=""), 1), [out])
    assert out.tolist() == [5 + lane if lane < 7 else 0 for lane in range(LANES)]
    with pytest.raises(PtxError, match=r"register %rd20 is read but .* made from .* by thread 7"):
        run(kernel(of_some.format(select="setp.ge.u32 %p1, %r0, 0;"), 1), [out])


# -- matrices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_warp_multiplies_matrices(dtype: torch.dtype) -> None:
    """ldmatrix and mma.sync, as kernels for sm_80 use them: D [16, 8] = A [16, 16] B [8, 16]^T."""
    name = "bf16" if dtype is torch.bfloat16 else "f16"
    body = f"""
        .shared .align 16 .b8 memory[1024];
        mov.u32 %r1, memory;
        ld.param.u64 %rd2, [p0];
        shl.b32 %r2, %r0, 4;
        cvt.u64.u32 %rd3, %r2;
        add.s64 %rd2, %rd2, %rd3;
        add.u32 %r1, %r1, %r2;
        cp.async.cg.shared.global [%r1], [%rd2], 16;
        cp.async.cg.shared.global [%r1+512], [%rd2+512], 16;
        cp.async.wait_all;
        bar.sync 0;
        mov.u32 %r1, memory;
        and.b32 %r3, %r0, 15;
        shr.u32 %r4, %r0, 4;
        shl.b32 %r3, %r3, 5;
        shl.b32 %r4, %r4, 4;
        add.u32 %r5, %r1, %r3;
        add.u32 %r5, %r5, %r4;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r5];
        and.b32 %r3, %r0, 7;
        shr.u32 %r4, %r0, 3;
        and.b32 %r4, %r4, 1;
        shl.b32 %r3, %r3, 5;
        shl.b32 %r4, %r4, 4;
        add.u32 %r5, %r1, %r3;
        add.u32 %r5, %r5, %r4;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r14, %r15}}, [%r5+512];
        mov.f32 %f0, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
            {{%f1, %f2, %f3, %f4}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}},
            {{%f0, %f0, %f0, %f0}};
        ld.param.u64 %rd4, [p1];
        shl.b32 %r6, %r0, 3;
        cvt.u64.u32 %rd5, %r6;
        add.s64 %rd4, %rd4, %rd5;
        st.global.v2.f32 [%rd4], {{%f1, %f2}};
        st.global.v2.f32 [%rd4+256], {{%f3, %f4}};
    """
    operands = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.zeros(16, 8)
    run(kernel(body, 2), [operands, out])
    a, b = operands[:16].double(), operands[16:24].double()
    torch.testing.assert_close(out.double(), a @ b.t() + 1, rtol=1e-5, atol=1e-5)


def test_ldmatrix_transposes() -> None:
    body = f"""
        {FILLED}
        and.b32 %r4, %r0, 7;
        shl.b32 %r4, %r4, 4;
        add.u32 %r3, %r1, %r4;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{%r20}}, [%r3];
    """
    matrix = torch.arange(64).view(8, 8)
    pairs = matrix.view(-1, 2)
    result = lanes(body, pairs[:, 0] + (pairs[:, 1] << 16))
    wanted = matrix.t().reshape(-1, 2)
    assert torch.equal(result, wanted[:, 0] + (wanted[:, 1] << 16))


def test_an_aligned_instruction_in_part_of_a_warp_is_an_error() -> None:
    body = f"""
        {SHARED}
        mov.u32 %r1, memory;
        mov.u32 %r20, 0;
        setp.lt.u32 %p1, %r0, 16;
        @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r20}}, [%r1];
    """
    with pytest.raises(PtxError, match=r"ldmatrix"):
        lanes(body)


# Two warps count, and look how far the other one is; %r7 is the largest lead.
RACE = """
    .shared .align 4 .b8 words[8];
    shr.u32 %r1, %r0, 5;
    mov.u32 %r2, words;
    shl.b32 %r3, %r1, 2;
    add.u32 %r3, %r2, %r3;
    xor.b32 %r4, %r3, 4;
    mov.u32 %r5, 0;
    mov.u32 %r7, 0;
    st.relaxed.cta.shared.u32 [%r3], %r5;
    bar.sync 0;
COUNT:
    add.u32 %r5, %r5, 1;
    st.relaxed.cta.shared.u32 [%r3], %r5;
    ld.relaxed.cta.shared.u32 %r6, [%r4];
    sub.s32 %r6, %r5, %r6;
    max.s32 %r7, %r7, %r6;
    setp.lt.u32 %p1, %r5, 2000;
    @%p1 bra COUNT;
    ld.param.u64 %rd1, [p0];
    atom.global.max.s32 %r8, [%rd1], %r7;
"""


def lead(seed: int) -> int:
    """Return by how many rounds of the loop one warp was ahead of the other."""
    result = torch.zeros(1, dtype=torch.int32)
    run(kernel(RACE, 1), [result], seed=seed, block=64)
    return int(result)


def test_seeds_hold_warps_back() -> None:
    """A warp gets some 37 rounds in a turn; one that is held back misses many turns."""
    assert lead(0) < 100
    assert max(lead(seed) for seed in range(1, 30)) > 500
    assert lead(7) == lead(7)
