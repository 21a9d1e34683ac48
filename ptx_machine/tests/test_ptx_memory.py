"""Loads and stores of every width and kind on the PTX machine."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import LANES, kernel, run

SINGLES = ("b8", "u8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
VECTORS = ("v2.b8", "v4.b8", "v2.u16", "v4.u16", "v2.u32", "v4.u32", "v2.f32", "v4.f32", "v2.u64")
# By space: how a load, and a store, may be modified there. Strong accesses have one element.
WEAK = {
    "global": ["ld st", "ld.volatile st.volatile", "ld.weak st.weak"],
    "shared": ["ld st", "ld.volatile st.volatile"],
    "local": ["ld st", "ld.volatile st.volatile"],
    "": ["ld st", "ld.volatile st.volatile"],
}
STRONG = {
    "global": ["ld.relaxed.gpu st.relaxed.gpu", "ld.acquire.sys st.release.sys"],
    "shared": ["ld.acquire.cta st.release.cta"],
    "": ["ld.acquire.gpu st.release.gpu"],
}
CACHED = ["ca wb", "cg cg", "cs cs", "L2::128B wb", "nc cg"]


def in_space(pairs: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """Return (space, load, store)."""
    return [
        (space, *(f"{word}.{space}".rstrip(".") for word in pair.split()))  # type: ignore[misc]
        for space, all_of in pairs.items()
        for pair in all_of
    ]


CASES = [(*case, (*SINGLES, *VECTORS)) for case in in_space(WEAK)]
CASES += [(*case, SINGLES) for case in in_space(STRONG)]
CASES += [
    ("global", f"ld.global.{load}", f"st.global.{store}", (*SINGLES, *VECTORS))
    for load, store in (pair.split() for pair in CACHED)
]
# %rd6 is where a thread's 16 bytes are in a space; in global memory, where they are given.
PLACES = {
    "shared": "mov.u32 %r4, held; mad.lo.u32 %r3, %r0, 16, %r4; cvt.u64.u32 %rd6, %r3;",
    "local": "mov.b64 %rd6, own;",
}


def check_kind(space: str, load: str, store: str, kind: str) -> None:
    count, element = (int(kind[1]), kind[3:]) if kind[0] == "v" else (1, kind)
    size = int(element[1:]) // 8
    letter = {1: "%h", 2: "%h", 4: "%r", 8: "%rd"}[size]
    if element[0] == "f":
        letter = {4: "%f", 8: "%fd"}[size]
    registers = ", ".join(f"{letter}{8 + i}" for i in range(count))
    registers = f"{{{registers}}}" if count > 1 else registers
    moves = []
    for at in range(0, 16, count * size):
        target = f"{store}.{kind} [%rd7+{at}]"
        if space in PLACES:
            target = f"st.global.{kind} [%rd7+{at}]"
            moves.append(f"ld.global.{kind} {registers}, [%rd1+{at}];")
            moves.append(f"{store}.{kind} [%rd6+{at}], {registers};")
        moves.append(f"{load}.{kind} {registers}, [%rd6+{at}]; {target}, {registers};")
    body = f"""
        .shared .align 16 .b8 held[512];
        .local .align 16 .b8 own[16];
        shl.b64 %rd2, %rd0, 1;
        ld.param.u64 %rd1, [p0];
        add.s64 %rd1, %rd1, %rd2;
        ld.param.u64 %rd7, [p1];
        add.s64 %rd7, %rd7, %rd2;
        {PLACES.get(space, "mov.b64 %rd6, %rd1;")}
        {" ".join(moves)}
    """
    inputs = torch.randint(0, 256, (LANES, 16), dtype=torch.uint8)
    result = torch.zeros_like(inputs)
    run(kernel(body, 2), [inputs, result])
    assert torch.equal(result, inputs), kind


@pytest.mark.parametrize(
    "space, load, store, kinds", CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_loads_and_stores_move_all_bytes(
    space: str, load: str, store: str, kinds: tuple[str, ...]
) -> None:
    """In shared and local memory: inputs are stored there first, by the store's kind."""
    for kind in kinds:
        check_kind(space, load, store, kind)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("space", ["global", ""])
def test_a_compare_and_swap_is_of_one_thread(width: int, space: str) -> None:
    """Each thread raises the word by two; a thread that loses tries again."""
    name = f"atom.{space}.cas.b{width}".replace("..", ".")
    a, b, c = (f"{'%r' if width == 32 else '%rd'}{n}" for n in (10, 11, 12))
    body = f"""
        ld.param.u64 %rd1, [p0];
    AGAIN:
        ld.relaxed.gpu.b{width} {a}, [%rd1];
        add.u{width} {b}, {a}, 2;
        {name} {c}, [%rd1], {a}, {b};
        setp.ne.b{width} %p1, {c}, {a};
        @%p1 bra AGAIN;
    """
    word = torch.tensor([1], dtype=torch.int32 if width == 32 else torch.int64)
    run(kernel(body, 1), [word], grid=3, block=64, seed=2)
    assert int(word) == 1 + 2 * 192


# -- 128 bits --------------------------------------------------------------------------------------

WIDE = ".reg .b128 %q<4>; ld.param.u64 %rd1, [p0];"


@pytest.mark.parametrize("order", ["", ".relaxed.gpu"])
def test_words_of_128_bits(order: str) -> None:
    body = f"""
        {WIDE}
        .shared .align 16 .b8 held[512];
        shl.b64 %rd2, %rd0, 1;
        add.s64 %rd1, %rd1, %rd2;
        cvt.u32.u64 %r1, %rd2;
        ld{order}.global.b128 %q0, [%rd1];
        st.shared.b128 [%r1], %q0;
        ld.shared.b128 %q1, [%r1];
        mov.b128 {{%rd10, %rd11}}, %q1;
        mov.b128 %q2, {{%rd11, %rd10}};
        mov.b128 %q3, %q2;
        st{order}.global.b128 [%rd1], %q3;
    """
    data = torch.arange(2 * LANES).view(LANES, 2)
    run(kernel(body, 1), [data])
    assert torch.equal(data, torch.arange(2 * LANES).view(LANES, 2).flip(1))


def test_atomics_of_128_bits() -> None:
    """Each thread raises both words; the last one that comes takes them away."""
    body = f"""
        {WIDE}
        ld.relaxed.gpu.global.b128 %q0, [%rd1];
    AGAIN:
        mov.b128 {{%rd10, %rd11}}, %q0;
        add.u64 %rd12, %rd10, 1;
        add.u64 %rd13, %rd11, 2;
        mov.b128 %q1, {{%rd12, %rd13}};
        atom.relaxed.gpu.global.cas.b128 %q0, [%rd1], %q0, %q1;
        mov.b128 {{%rd14, %rd15}}, %q0;
        setp.ne.u64 %p1, %rd14, %rd10;
        @%p1 bra AGAIN;
        setp.ne.u64 %p1, %rd12, 128;
        @%p1 bra END;
        mov.b128 %q2, {{%rd0, %rd0}};
        atom.exch.b128 %q3, [%rd1+16], %q2;
    END:
    """
    words = torch.tensor([0, 0, 3, 4])
    run(kernel(body, 1), [words], grid=2, block=64, seed=3)
    assert words[:2].tolist() == [128, 256]
    assert words[2] == words[3] and int(words[2]) % 8 == 0


def test_words_of_128_bits_do_not_tear() -> None:
    """Block 0 stores pairs (i, i); block 1 adds up how far those that it loads are apart."""
    body = f"""
        {WIDE}
        mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %p1, %r1, 0;
        mov.u64 %rd10, 0;
        mov.u64 %rd14, 0;
    NEXT:
        add.u64 %rd10, %rd10, 1;
        mov.b128 %q0, {{%rd10, %rd10}};
        @!%p1 st.relaxed.gpu.global.b128 [%rd1], %q0;
        @%p1 ld.relaxed.gpu.global.b128 %q0, [%rd1];
        mov.b128 {{%rd11, %rd12}}, %q0;
        sub.u64 %rd13, %rd11, %rd12;
        or.b64 %rd14, %rd14, %rd13;
        setp.lt.u64 %p3, %rd10, 40;
        @%p3 bra NEXT;
        @%p1 st.global.u64 [%rd1+64], %rd14;
    """
    for seed in range(1, 11):
        data = torch.zeros(16, dtype=torch.int64)
        run(kernel(body, 1), [data], grid=2, block=1, seed=seed)
        assert data[8] == 0


@pytest.mark.parametrize(
    "statement",
    [
        "ld.global.b128 %rd10, [%rd1];",
        "st.global.b128 [%rd1], %rd10;",
        "ld.global.v2.b128 {%q0, %q1}, [%rd1];",
        "mov.b128 %q0, %rd10;",
        "atom.global.add.b128 %q0, [%rd1], %q1;",
        "red.global.exch.b128 [%rd1], %q1;",
    ],
)
def test_what_128_bits_do_not_have(statement: str) -> None:
    with pytest.raises(PtxError, match="unknown instruction"):
        run(kernel(f"{WIDE} {statement}", 1), [torch.zeros(4)])
