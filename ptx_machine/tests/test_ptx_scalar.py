"""Instructions that a thread of the PTX machine executes for itself, against torch and Python."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import pytest
import torch

from ptx_text import LANES, apply

EDGES = {
    16: [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF],
    32: [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF],
    64: [0, 1, 2, 63, 64, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF],
}


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def draw(bits: int, count: int, seed: int) -> list[list[int]]:
    """Draw operands for every lane: edges first, then anything."""
    chance = random.Random(seed)
    pick = EDGES[bits]
    return [
        [chance.choice(pick) if lane < 20 else chance.getrandbits(bits) for lane in range(LANES)]
        for _ in range(count)
    ]


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor([signed(v, 64) for v in values], dtype=torch.int64)


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# By statement: bits of operands, of the result, whether they are signed, and the result in Python.
Case = tuple[str, int, int, bool, Callable[..., int]]
INTEGERS: list[Case] = []
for w in (16, 32, 64):
    for s in (False, True):
        t = f"{'s' if s else 'u'}{w}"
        INTEGERS += [
            (f"add.{t} {{d}}, {{0}}, {{1}};", w, w, s, lambda a, b: a + b),
            (f"sub.{t} {{d}}, {{0}}, {{1}};", w, w, s, lambda a, b: a - b),
            (f"mul.lo.{t} {{d}}, {{0}}, {{1}};", w, w, s, lambda a, b: a * b),
            (f"mul.hi.{t} {{d}}, {{0}}, {{1}};", w, w, s, lambda a, b, w=w: (a * b) >> w),
            (f"mad.lo.{t} {{d}}, {{0}}, {{1}}, {{2}};", w, w, s, lambda a, b, c: a * b + c),
            (f"mad.hi.{t} {{d}}, {{0}}, {{1}}, {{2}};", w, w, s,
             lambda a, b, c, w=w: ((a * b) >> w) + c),
            (f"sad.{t} {{d}}, {{0}}, {{1}}, {{2}};", w, w, s, lambda a, b, c: abs(a - b) + c),
            (f"min.{t} {{d}}, {{0}}, {{1}};", w, w, s, min),
            (f"max.{t} {{d}}, {{0}}, {{1}};", w, w, s, max),
            (f"div.{t} {{d}}, {{0}}, {{1}};", w, w, s, lambda a, b: trunc_div(a, b) if b else -1),
            (f"rem.{t} {{d}}, {{0}}, {{1}};", w, w, s,
             lambda a, b: a - b * trunc_div(a, b) if b else a),
        ]  # fmt: skip
        if w < 64:
            INTEGERS += [
                (f"mul.wide.{t} {{d}}, {{0}}, {{1}};", w, 2 * w, s, lambda a, b: a * b),
            ]
    INTEGERS += [
        (f"and.b{w} {{d}}, {{0}}, {{1}};", w, w, False, lambda a, b: a & b),
        (f"or.b{w} {{d}}, {{0}}, {{1}};", w, w, False, lambda a, b: a | b),
        (f"xor.b{w} {{d}}, {{0}}, {{1}};", w, w, False, lambda a, b: a ^ b),
        (f"not.b{w} {{d}}, {{0}};", w, w, False, lambda a: ~a),
        (f"neg.s{w} {{d}}, {{0}};", w, w, True, lambda a: -a),
        (f"abs.s{w} {{d}}, {{0}};", w, w, True, abs),
        (f"mov.b{w} {{d}}, {{0}};", w, w, False, lambda a: a),
    ]
for w in (32, 64):
    INTEGERS += [
        (f"popc.b{w} {{d}}, {{0}};", w, 32, False, lambda a: a.bit_count()),
        (f"clz.b{w} {{d}}, {{0}};", w, 32, False, lambda a, w=w: w - a.bit_length()),
        (f"brev.b{w} {{d}}, {{0}};", w, w, False, lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2)),
    ]


def field(a: int, b: int, begin: int, count: int) -> int:
    ones = ((1 << min(count & 255, 32)) - 1) << min(begin & 255, 32)
    return (b & ~ones) | ((a << min(begin & 255, 32)) & ones)


def pick_bytes(a: int, b: int, selector: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    out = []
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = both[choice & 7]
        out.append((0xFF if byte & 0x80 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def table(a: int, b: int, c: int) -> int:
    return (a & ~b) ^ c


INTEGERS += [
    ("bfi.b32 {d}, {0}, {1}, {2}, {3};", 32, 32, False, field),
    ("prmt.b32 {d}, {0}, {1}, {2};", 32, 32, False, pick_bytes),
    (f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table(0xF0, 0xCC, 0xAA)};", 32, 32, False, table),
    ("bfe.u32 {d}, {0}, 4, 7;", 32, 32, False, lambda a: a >> 4 & 127),
    ("bfe.s32 {d}, {0}, 4, 7;", 32, 32, False, lambda a: signed(a >> 4 & 127, 7)),
    ("shf.l.wrap.b32 {d}, {0}, {1}, {2};", 32, 32, False,
     lambda a, b, s: ((b << 32 | a) << (s & 31)) >> 32),
    ("shf.r.clamp.b32 {d}, {0}, {1}, {2};", 32, 32, False,
     lambda a, b, s: (b << 32 | a) >> min(s, 32)),
    ("cvt.s64.s32 {d}, {0};", 32, 64, True, lambda a: a),
    ("cvt.u64.u32 {d}, {0};", 32, 64, False, lambda a: a),
    ("cvt.u32.u64 {d}, {0};", 64, 32, False, lambda a: a),
    ("cvt.u32.u16 {d}, {0};", 16, 32, False, lambda a: a),
    ("cvt.s32.s16 {d}, {0};", 16, 32, True, lambda a: a),
]  # fmt: skip


@pytest.mark.parametrize("case", INTEGERS, ids=lambda case: case[0].split()[0])
def test_integers(case: Case) -> None:
    statement, width, out, is_signed, expect = case
    count = statement.count("{") - 1
    lanes = draw(width, count, seed=len(statement))
    result = apply(statement, [tensor(v) for v in lanes], width, out)
    for lane in range(LANES):
        values = [v[lane] for v in lanes]
        inputs = [signed(v, width) if is_signed else v for v in values]
        wanted = expect(*inputs) % (1 << out)
        assert int(result[lane]) % (1 << out) == wanted, (statement, values)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("kind", ["shl.b", "shr.u", "shr.s", "shr.b"])
def test_a_shift_by_the_width_or_more_leaves_zero_or_the_sign(kind: str, width: int) -> None:
    (a,) = draw(width, 1, seed=1)
    by = list(range(width - 12, width - 12 + LANES))
    statement = f"cvt.u32.u{width} %r40, {{1}}; {kind}{width} {{d}}, {{0}}, %r40;"
    result = apply(statement, [tensor(a), tensor(by)], width, width)
    for lane, (value, shift) in enumerate(zip(a, by, strict=True)):
        number = signed(value, width) if kind.endswith("s") else value
        wanted = number << shift if kind.startswith("shl") else number >> shift
        assert int(result[lane]) % 2**width == wanted % 2**width, (value, shift)


COMPARISONS = {
    "eq": "__eq__",
    "ne": "__ne__",
    "lt": "__lt__",
    "le": "__le__",
    "gt": "__gt__",
    "ge": "__ge__",
}
COMPARED = [(name, kind) for kind in "us" for name in COMPARISONS] + [("eq", "b"), ("ne", "b")]
UNSIGNED = {"lo": "__lt__", "ls": "__le__", "hi": "__gt__", "hs": "__ge__"}


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("name, kind", [*COMPARED, *((name, "u") for name in UNSIGNED)])
def test_comparisons_of_integers(name: str, kind: str, width: int) -> None:
    a, b = draw(width, 2, seed=width)
    b[:8] = a[:8]
    statement = f"setp.{name}.{kind}{width} %p1|%p2, {{0}}, {{1}}; selp.b32 %r40, 1, 0, %p1;"
    statement += " selp.b32 %r41, 2, 0, %p2; or.b32 {d}, %r40, %r41;"
    result = apply(statement, [tensor(a), tensor(b)], width, 32)
    for lane, (x, y) in enumerate(zip(a, b, strict=True)):
        left, right = (signed(v, width) if kind == "s" else v for v in (x, y))
        wanted = getattr(left, {**COMPARISONS, **UNSIGNED}[name])(right)
        assert int(result[lane]) == (1 if wanted else 2), (x, y)


def test_predicates_are_combined() -> None:
    """%p3 to %p6 are and, or, xor and not of lane bits 0 and 1."""
    statement = """
        and.b32 %r40, {0}, 1; setp.ne.s32 %p1, %r40, 0;
        and.b32 %r40, {0}, 2; setp.ne.s32 %p2, %r40, 0;
        and.pred %p3, %p1, %p2; or.pred %p4, %p1, %p2; xor.pred %p5, %p1, %p2; not.pred %p6, %p1;
        mov.pred %p7, %p2;
        selp.u32 %r41, 1, 0, %p3; selp.s32 %r42, 2, 0, %p4; selp.b32 %r43, 4, 0, %p5;
        selp.b32 %r44, 8, 0, %p6; selp.b32 %r45, 16, 0, %p7;
        or.b32 %r41, %r41, %r42; or.b32 %r43, %r43, %r44; or.b32 %r41, %r41, %r43;
        or.b32 {d}, %r41, %r45;"""
    result = apply(statement, [torch.arange(LANES)], 32, 32)
    for lane in range(LANES):
        x, y = lane & 1, lane >> 1 & 1
        assert int(result[lane]) == (x & y) | (x | y) << 1 | (x ^ y) << 2 | (1 - x) << 3 | y << 4


@pytest.mark.parametrize(
    "kind", ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"]
)
def test_moves_and_selections_keep_all_bits(kind: str) -> None:
    width = int(kind[1:])
    a, b = draw(width, 2, seed=3)
    statement = "and.b32 %r40, %r0, 1; setp.eq.b32 %p1, %r40, 0;"
    statement += f" mov.{kind} {{d}}, {{0}};"
    statement += f" selp.{kind} {{d}}, {{d}}, {{1}}, %p1;"
    result = apply(statement, [tensor(a), tensor(b)], width, width)
    for lane in range(LANES):
        assert int(result[lane]) % 2**width == (a[lane] if lane % 2 == 0 else b[lane])


def bits32(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64)


def floats(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(LANES, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (LANES,), generator=generator
    )
    values[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40])
    return values


FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "min.f32": torch.fmin,
    "max.f32": torch.fmax,
    "fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    count = 3 if name.startswith("fma") else 2
    inputs = [floats(seed) for seed in range(count)]
    places = ", ".join(f"{{{number}}}" for number in range(count))
    # A register of bits takes any type.
    result = apply(f"{name} {{d}}, {places};", [bits32(v) for v in inputs], 32, 32)
    got, wanted = result.to(torch.int32).view(torch.float32), FLOATS[name](*inputs)
    assert torch.equal(got.isnan(), wanted.isnan())
    # fma: two roundings of the reference may differ from one in the last place.
    torch.testing.assert_close(
        got, wanted, rtol=2.0**-23 if count == 3 else 0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_are_rounded_to_halves_and_back(dtype: torch.dtype) -> None:
    name = "bf16" if dtype is torch.bfloat16 else "f16"
    low, high = floats(3), floats(4)
    pair = apply(f"cvt.rn.{name}x2.f32 {{d}}, {{0}}, {{1}};", [bits32(high), bits32(low)], 32, 32)
    for shift, inputs in ((0, low), (16, high)):
        half = (pair >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype)
        torch.testing.assert_close(half, inputs.to(dtype), rtol=0, atol=0, equal_nan=True)
        back = apply(f"cvt.f32.{name} {{d}}, {{0}};", [pair >> shift & 0xFFFF], 16, 32)
        values = back.to(torch.int32).view(torch.float32)
        torch.testing.assert_close(values, half.float(), rtol=0, atol=0, equal_nan=True)


def test_a_float_out_of_range_becomes_the_nearest_integer() -> None:
    inputs = torch.tensor([1.5, -1.5, 2.5, 3e9, -3e9, math.nan, math.inf, 1e20] * 4)
    wanted = {
        "cvt.rzi.s32.f32": [1, -1, 2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 2**31 - 1],
        "cvt.rni.s32.f32": [2, -2, 2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 2**31 - 1],
        "cvt.rzi.u32.f32": [1, 0, 2, 3 * 10**9, 0, 0, 2**32 - 1, 2**32 - 1],
    }
    for name, values in wanted.items():
        result = apply(f"{name} {{d}}, {{0}};", [bits32(inputs)], 32, 32)
        assert [int(v) % 2**32 for v in result[:8]] == [v % 2**32 for v in values], name


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "ltu", "neu"])
def test_comparisons_of_floats_know_nan(name: str) -> None:
    a, b = floats(5), floats(6)
    b[10:20] = a[10:20]
    statement = f"setp.{name}.f32 %p1|%p2, {{0}}, {{1}}; selp.b32 {{d}}, 1, 0, %p1;"
    result = apply(statement, [bits32(a), bits32(b)], 32, 32)
    base = {"eq": "eq", "ne": "ne", "neu": "ne", "ltu": "lt"}.get(name, name)
    wanted = getattr(torch, base)(a, b)
    unordered = a.isnan() | b.isnan()
    wanted = wanted | unordered if name.endswith("u") else wanted & ~unordered
    assert torch.equal(result.bool(), wanted)


def test_numbers_of_two_parts_are_packed_and_unpacked() -> None:
    a, b = draw(32, 2, seed=9)
    both = apply("mov.b64 {d}, {{{0}, {1}}};", [tensor(a), tensor(b)], 32, 64)
    assert [int(v) % 2**64 for v in both] == [x | y << 32 for x, y in zip(a, b, strict=True)]
    upper = apply("mov.b64 {{%r30, {d}}}, {0};", [both], 64, 32)
    assert [int(v) % 2**32 for v in upper] == b


def test_literals_of_floats() -> None:
    result = apply("add.f32 {d}, {0}, 0f3FC00000;", [bits32(torch.ones(LANES))], 32, 32)
    assert struct.pack("<I", int(result[0]) % 2**32) == struct.pack("<f", 2.5)
