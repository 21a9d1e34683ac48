"""multimem of the PTX machine: one address for the memory of several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, kernel

ADDRESS = 1 << 40  # of nothing else in this process
MEMBERS = 3


def run(body: str, members: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Run ``body``; %rd2 is the multicast address of the thread's 16 bytes, %rd4 that of out."""
    out = torch.zeros(LANES, 4, dtype=torch.int32) if out is None else out
    device = Device()
    device.add_multicast(ADDRESS, members)
    text = kernel(
        f"""
        ld.param.u64 %rd2, [p0];
        mul.wide.u32 %rd3, %r0, 16;
        add.u64 %rd2, %rd2, %rd3;
        ld.param.u64 %rd4, [p1];
        add.u64 %rd4, %rd4, %rd3;
        {body}
        """,
        2,
    )
    device.launch(Module(text), "k", grid=1, block=LANES, args=[ADDRESS, out])
    return out


def draw(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Return 16 bytes for each thread, for each member."""
    count = LANES * 16 // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(count, generator=generator).to(dtype) for _ in range(MEMBERS)]
    return [
        torch.randint(-(2**31), 2**31, (count,), generator=generator).to(dtype)
        for _ in range(MEMBERS)
    ]


KEEP = "st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};"
FOUR = "{%r10, %r11, %r12, %r13}"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("wide", [True, False], ids=["acc::f32", "16 bits"])
@pytest.mark.parametrize("order", ["relaxed.sys.global", "acquire.gpu", "weak"])
def test_sums_of_halves(kind: str, wide: bool, order: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    members = draw(dtype)
    accumulator = ".acc::f32" if wide else ""
    name = f"multimem.ld_reduce.{order}.add{accumulator}.v4.{kind}x2"
    result = run(f"{name} {FOUR}, [%rd2]; {KEEP}", members).view(dtype).flatten()
    a, b, c = (m.float() for m in members)
    total = a + b + c if wide else (a + b).to(dtype).float() + c
    assert torch.equal(result, total.to(dtype))
    assert not torch.equal(total.to(dtype), (a + b + c).to(dtype)) or wide


@pytest.mark.parametrize("vector", [1, 2, 4])
def test_vectors_of_floats(vector: int) -> None:
    members = draw(torch.float32)
    names = [f"%f{i}" for i in range(vector)]
    target = names[0] if vector == 1 else "{" + ", ".join(names) + "}"
    suffix = "" if vector == 1 else f".v{vector}"
    stores = " ".join(f"st.global.f32 [%rd4+{4 * i}], {n};" for i, n in enumerate(names))
    body = f"multimem.ld_reduce.relaxed.sys.global.add{suffix}.f32 {target}, [%rd2]; {stores}"
    result = run(body, members, torch.zeros(LANES, 4))
    wanted = (members[0] + members[1] + members[2]).view(LANES, 4)
    assert torch.equal(result[:, :vector], wanted[:, :vector])
    assert not result[:, vector:].any()


@pytest.mark.parametrize("operation", ["min", "max"])
def test_extremes(operation: str) -> None:
    members = draw(torch.bfloat16)
    stack = torch.stack(members)
    wanted = stack.amin(0) if operation == "min" else stack.amax(0)
    eight = "{%h0, %h1, %h2, %h3, %h4, %h5, %h6, %h7}"
    body = f"multimem.ld_reduce.weak.global.{operation}.v8.bf16 {eight}, [%rd2];"
    body += " ".join(f"st.global.b16 [%rd4+{2 * i}], %h{i};" for i in range(8))
    assert torch.equal(run(body, members).view(torch.bfloat16).flatten(), wanted)
    ints = draw(torch.int32)
    wanted = getattr(torch.stack(ints), f"a{operation}")(0)
    body = f"multimem.ld_reduce.relaxed.sys.{operation}.s32 %r10, [%rd2+4];"
    body += "st.global.b32 [%rd4], %r10;"
    assert torch.equal(run(body, ints)[:, 0], wanted.view(LANES, 4)[:, 1])


@pytest.mark.parametrize("operation", ["add", "and", "or", "xor"])
def test_integers(operation: str) -> None:
    members = draw(torch.int32)
    a, b, c = members
    wanted = {"add": a + b + c, "and": a & b & c, "or": a | b | c, "xor": a ^ b ^ c}[operation]
    kind = "u32" if operation == "add" else "b32"
    load = f"multimem.ld_reduce.relaxed.sys.global.{operation}.{kind} %r10, [%rd2];"
    assert torch.equal(
        run(f"{load} st.global.b32 [%rd4], %r10;", members)[:, 0], wanted.view(LANES, 4)[:, 0]
    )
    before = [m.clone() for m in members]
    run(f"multimem.red.release.sys.global.{operation}.{kind} [%rd2], 12345;", members)
    by = torch.zeros(LANES, 4, dtype=torch.int32)
    by[:, 0] = 12345
    for now, old in zip(members, before, strict=True):
        changed = {"add": old + 12345, "and": old & 12345, "or": old | 12345, "xor": old ^ 12345}
        wanted = torch.where(by.flatten() != 0, changed[operation], old)
        assert torch.equal(now, wanted)


def test_stores_reach_every_member() -> None:
    members = draw(torch.float32)
    load = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd4];"
    inputs = torch.randn(LANES, 4)
    run(
        f"{load} multimem.st.relaxed.sys.global.v4.f32 [%rd2], {{%f1, %f2, %f3, %f4}};",
        members,
        inputs,
    )
    assert all(torch.equal(m.view(LANES, 4), inputs) for m in members)


def test_reductions_of_floats_are_added_by_every_thread() -> None:
    members = [torch.zeros(4), torch.ones(4)]
    first = "ld.param.u64 %rd2, [p0];"
    body = "multimem.red.relaxed.sys.global.add.v2.f32 [%rd2], {0f3F800000, 0f40000000};"
    run(first + body, members)
    assert [m.tolist() for m in members] == [[32, 64, 0, 0], [33, 65, 1, 1]]
    halves = [torch.zeros(8, dtype=torch.float16)]
    run(first + "mov.b32 %r1, 0x40003C00; multimem.red.relaxed.sys.add.f16x2 [%rd2], %r1;", halves)
    assert halves[0].tolist() == [32, 64, 0, 0, 0, 0, 0, 0]


def fails(body: str, why: str) -> None:
    with pytest.raises(PtxError, match=why):
        run(body, draw(torch.float32))


def test_addresses() -> None:
    load = "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, "
    fails("ld.global.u32 %r1, [%rd2];", "a multicast address, which only multimem may access")
    fails("st.u32 [%rd2], 0;", "a multicast address, which only multimem may access")
    fails(f"{load} [%rd4];", "4 bytes at an address that is not multicast")
    fails(f"{load} [%rd2+16];", "4 bytes at an address that is not multicast, by thread 31")
    fails(f"{load} [%rd2+2];", "not aligned to 4 bytes")
    fails("multimem.st.weak.global.v2.f32 [%rd2+4], {%f1, %f2};", "not aligned to 8 bytes")
    with pytest.raises(ValueError, match="must have the same size"):
        Device().add_multicast(ADDRESS, [torch.zeros(1), torch.zeros(2)])


def test_a_member_that_is_gone_is_an_error() -> None:
    device, kept, gone = Device(), torch.zeros(4), torch.zeros(4)
    device.add_multicast(ADDRESS, [kept, gone])
    device.release(gone)
    body = "ld.param.u64 %rd2, [p0]; multimem.st.weak.global.f32 [%rd2], 0f3F800000;"
    with pytest.raises(PtxError, match=r"use after free: .* member 1, which was freed"):
        device.launch(Module(kernel(body, 1)), "k", grid=1, block=1, args=[ADDRESS])


@pytest.mark.parametrize(
    "statement",
    [
        "multimem.ld_reduce.release.sys.global.add.f32 %f1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.max.f32 %f1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.f32 %f1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f64.f16x2 %r1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.add.f16 %h1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f1, %f2}, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.min.acc::f32.v2.f16x2 {%r1, %r2}, [%rd2];",
        "multimem.ld_reduce.sys.global.add.f32 %f1, [%rd2];",
        "multimem.ld_reduce.weak.sys.global.add.f32 %f1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.shared.add.f32 %f1, [%rd2];",
        "multimem.ld_reduce.relaxed.sys.global.f32 %f1, [%rd2];",
        "multimem.red.relaxed.sys.global.max.f16x2 [%rd2], %r1;",
        "multimem.red.acquire.sys.global.add.f32 [%rd2], %f1;",
        "multimem.st.relaxed.sys.global.v2.u32 [%rd2], {%r1, %r2};",
        "multimem.prefetch.global.f32 [%rd2];",
    ],
)
def test_what_is_not_known_is_an_error(statement: str) -> None:
    fails(statement, "unknown instruction")


# %rd5: where another thread's 16 bytes are in a member.
OTHER = "ld.param.u64 %rd5, [p1]; xor.b64 %rd3, %rd3, 16; add.u64 %rd5, %rd5, %rd3;"


@pytest.mark.parametrize(
    "first, then",
    [
        ("st.global.u32 [%rd5], 7;", "multimem.ld_reduce.relaxed.sys.global.add.u32 %r10, [%rd2];"),
        ("st.global.u32 [%rd5], 7;", "multimem.red.relaxed.sys.global.add.u32 [%rd2], 1;"),
        ("multimem.st.relaxed.sys.global.u32 [%rd2], 7;", "ld.global.u32 %r10, [%rd5];"),
        ("multimem.st.relaxed.sys.global.u32 [%rd2], 7;", "st.global.u32 [%rd5], 8;"),
    ],
)
@pytest.mark.parametrize(
    "order, error",
    [
        ("bar.warp.sync -1; fence.proxy.alias;", None),
        ("fence.proxy.alias;", "race: .* missing is a bar.warp.sync"),
        ("bar.warp.sync -1;", "race: .* missing is a fence.proxy.alias between them"),
        ("bar.warp.sync -1; fence.proxy.async;", "race: .* missing is a fence.proxy.alias"),
    ],
)
def test_a_fence_lies_between_two_addresses(
    first: str, then: str, order: str, error: str | None
) -> None:
    """PTX ISA, memory consistency model: different addresses of the same memory are proxies."""
    members = draw(torch.int32)
    if error is None:
        run(f"{OTHER} {first} {order} {then}", members, members[1])
        return
    with pytest.raises(PtxError, match=error):
        run(f"{OTHER} {first} {order} {then}", members, members[1])


# Thread 0 writes data by the multicast address and raises a flag of each member by it; thread 32,
# of another warp, awaits the flag at a member.
SIGNAL = """
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd5, [p1];
    and.b32 %r1, %r0, 31;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra WAIT;
    multimem.st.weak.global.u32 [%rd1+64], 7;
    {signal}
    bra END;
WAIT:
    {wait}.sys.global.u32 %r2, [%rd5];
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra WAIT;
    {behind}
    ld.global.u32 %r3, [%rd5+64];
END:
"""
ALIAS = "fence.proxy.alias;"


@pytest.mark.parametrize(
    "signal, wait, behind, error",
    [
        ("multimem.red.release.sys.global.add.u32 [%rd1], 1;", "ld.acquire", ALIAS, None),
        ("multimem.st.release.sys.global.u32 [%rd1], 1;", "ld.acquire", ALIAS, None),
        (
            "fence.acq_rel.sys; multimem.red.relaxed.sys.global.add.u32 [%rd1], 1;",
            "ld.acquire",
            ALIAS,
            None,
        ),
        (
            "multimem.red.relaxed.sys.global.add.u32 [%rd1], 1;",
            "ld.acquire",
            ALIAS,
            "race: this read .* missing is a barrier",
        ),
        (
            "multimem.st.release.sys.global.u32 [%rd1], 1;",
            "ld.relaxed",
            ALIAS,
            "race: this read .* missing is a barrier",
        ),
        (
            "multimem.st.release.sys.global.u32 [%rd1], 1;",
            "ld.acquire",
            "",
            "missing is a fence.proxy.alias",
        ),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_signal_to_every_member(
    signal: str, wait: str, behind: str, error: str | None, seed: int
) -> None:
    device, members = Device(), [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    device.add_multicast(ADDRESS, members)
    module = Module(kernel(SIGNAL.format(signal=signal, wait=wait, behind=behind), 2))
    launch: dict[str, Any] = {"grid": 1, "block": 64, "args": [ADDRESS, members[1]], "seed": seed}
    if error is None:
        device.launch(module, "k", **launch)
        assert [int(member[16]) for member in members] == [7, 7]
        return
    with pytest.raises(PtxError, match=error):
        device.launch(module, "k", **launch)


BULK = """
    .shared .align 16 .b8 memory[64];
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, memory;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    st.shared.v4.u32 [%r1], {1, 2, 3, 4};
    fence.proxy.async.shared::cta;
    cp{reduce}.async.bulk.global.shared::cta.bulk_group{action} [%rd1], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
"""


@pytest.mark.parametrize("reduce, action", [("", ""), (".reduce", ".add.u32")])
def test_bulk_stores_reach_every_member(reduce: str, action: str) -> None:
    """TMA writes to a multicast address as to any other; it reads from none."""
    device, members = Device(), [torch.ones(16, dtype=torch.int32) for _ in range(2)]
    device.add_multicast(ADDRESS, members)
    text = BULK.replace("{reduce}", reduce).replace("{action}", action)
    device.launch(Module(kernel(text, 1)), "k", grid=1, block=32, args=[ADDRESS])
    expected = [2, 3, 4, 5] if reduce else [1, 2, 3, 4]
    assert [member[:5].tolist() for member in members] == [[*expected, 1]] * 2
