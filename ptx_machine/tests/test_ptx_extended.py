"""Rarer instructions of a thread: carries, set, slct, dot products, min and max of magnitudes."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import LANES, apply, kernel, run
from test_ptx_scalar import draw, signed, tensor


def unsigned(values: torch.Tensor, bits: int) -> list[int]:
    return [v % 2**bits for v in values.tolist()]


# -- carries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("bits", [32, 64])
def test_carries_join_registers(bits: int, sign: str) -> None:
    """Sums, differences and products of numbers of two registers each."""
    t = f"{sign}{bits}"
    x = draw(bits, 4, bits)
    names = "%r" if bits == 32 else "%rd"
    low, high = f"{names}30", f"{names}31"

    def both(first: str, second: str) -> list[int]:
        """The result's registers, low in front."""
        inputs = [tensor(v) for v in x]
        begin = f"{first} {second}"
        return [
            a + (b << bits)
            for a, b in zip(
                unsigned(apply(f"{begin} mov.b{bits} {{d}}, {low};", inputs, bits, bits), bits),
                unsigned(apply(f"{begin} mov.b{bits} {{d}}, {high};", inputs, bits, bits), bits),
                strict=True,
            )
        ]

    pairs = [(a + (b << bits), c + (d << bits)) for a, b, c, d in zip(*x, strict=True)]
    most = 2 ** (2 * bits)
    results = both(f"add.cc.{t} {low}, {{0}}, {{2}};", f"addc.{t} {high}, {{1}}, {{3}};")
    assert results == [(a + b) % most for a, b in pairs]
    results = both(f"sub.cc.{t} {low}, {{0}}, {{2}};", f"subc.{t} {high}, {{1}}, {{3}};")
    assert results == [(a - b) % most for a, b in pairs]
    results = both(
        f"mad.lo.cc.{t} {low}, {{0}}, {{1}}, {{2}};", f"madc.hi.{t} {high}, {{0}}, {{1}}, {{3}};"
    )
    wanted = []
    for a, b, c, d in zip(*x, strict=True):
        if sign == "s":
            a, b = signed(a, bits), signed(b, bits)
        wanted.append((a * b + c + (d << bits)) % most)
    assert results == wanted


def test_a_carry_is_kept_until_the_next_one() -> None:
    statement = (
        "add.cc.u32 %r30, {0}, {1}; add.u32 %r31, {0}, 7; addc.cc.u32 %r32, 0xFFFFFFFF, 0;"
        "mad.lo.u32 %r31, {0}, 7, 5; addc.u32 {d}, 10, 0;"
    )
    a, b = draw(32, 2, 8)
    results = apply(statement, [tensor(a), tensor(b)], 32, 32).tolist()
    assert results == [10 + (p + q >= 2**32) for p, q in zip(a, b, strict=True)]


def test_a_carry_that_nobody_made_is_an_error() -> None:
    with pytest.raises(PtxError, match="the carry is read but was never written, by thread 3"):
        body = "setp.lt.u32 %p1, %r0, 3; @%p1 add.cc.u32 %r1, %r0, 1; addc.u32 %r2, 1, 1;"
        run(kernel(body, 0), [])


# -- dot products ----------------------------------------------------------------------------------


def parts(value: int, bits: int, is_signed: bool) -> list[int]:
    results = [value >> at & ((1 << bits) - 1) for at in range(0, 32, bits)]
    return [signed(p, bits) for p in results] if is_signed else results


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_products(a_type: str, b_type: str) -> None:
    x = draw(32, 3, 11)
    inputs = [tensor(v) for v in x]
    signs = a_type == "s32", b_type == "s32"
    for name, width, begin in (("dp4a", 8, 0), ("dp2a.lo", 16, 0), ("dp2a.hi", 16, 2)):
        results = apply(f"{name}.{a_type}.{b_type} {{d}}, {{0}}, {{1}}, {{2}};", inputs, 32, 32)
        wanted = [
            sum(
                p * q
                for p, q in zip(
                    parts(a, width, signs[0]), parts(b, 8, signs[1])[begin:], strict=False
                )
            )
            + c
            for a, b, c in zip(*x, strict=True)
        ]
        assert unsigned(results, 32) == [w % 2**32 for w in wanted]


# -- choices ---------------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b and not math.isnan(a) and not math.isnan(b),
    "lt": lambda a, b: a < b,
    "geu": lambda a, b: not a < b,
}
FLOATS = [0.0, -0.0, 1.0, -1.5, 3.25, math.inf, -math.inf, math.nan]


def floats(seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.choice(FLOATS) for _ in range(LANES)]


def bits_of(values: list[float], kind: str = "f") -> torch.Tensor:
    sizes = {"f": "I", "e": "H"}
    return tensor([struct.unpack(sizes[kind], struct.pack(kind, v))[0] for v in values])


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize(
    "target, yes", [("u32", 2**32 - 1), ("s32", 2**32 - 1), ("f32", 0x3F800000)]
)
def test_set_of_floats(order: str, target: str, yes: int) -> None:
    a, b = floats(1), floats(2)
    statement = f"set.{order}.{target}.f32 {{d}}, {{0}}, {{1}};"
    results = apply(statement, [bits_of(a), bits_of(b)], 32, 32)
    wanted = [yes if ORDERS[order](p, q) else 0 for p, q in zip(a, b, strict=True)]
    assert unsigned(results, 32) == wanted
    statement = f"setp.lt.u32 %p4, %r0, 9; set.{order}.or.{target}.f32 {{d}}, {{0}}, {{1}}, !%p4;"
    results = apply(statement, [bits_of(a), bits_of(b)], 32, 32)
    assert unsigned(results, 32) == [w if lane < 9 else yes for lane, w in enumerate(wanted)]


def test_set_of_integers_and_halves() -> None:
    a, b = draw(32, 2, 3)
    results = apply("set.lt.u32.s32 {d}, {0}, {1};", [tensor(a), tensor(b)], 32, 32)
    wanted = [signed(p, 32) < signed(q, 32) for p, q in zip(a, b, strict=True)]
    assert unsigned(results, 32) == [2**32 - 1 if w else 0 for w in wanted]
    x, y, z, w = floats(3), floats(4), floats(5), floats(6)
    halves = [bits_of(v, "e") for v in (x, y, z, w)]
    inputs = [halves[0] | halves[1] << 16, halves[2] | halves[3] << 16]
    low = [p < q for p, q in zip(x, z, strict=True)]
    high = [p < q for p, q in zip(y, w, strict=True)]
    for target, yes in (("f16x2", 0x3C00), ("u32", 0xFFFF)):
        results = apply(f"set.lt.{target}.f16x2 {{d}}, {{0}}, {{1}};", inputs, 32, 32)
        wanted = [yes * p + (yes << 16) * q for p, q in zip(low, high, strict=True)]
        assert unsigned(results, 32) == wanted
    results = apply("set.lt.f16.f16 {d}, {0}, {1};", [halves[0], halves[2]], 16, 16)
    assert unsigned(results, 16) == [0x3C00 * p for p in low]


def test_slct_chooses_by_the_sign() -> None:
    a, b, c = draw(32, 3, 5)
    results = apply("slct.u32.s32 {d}, {0}, {1}, {2};", [tensor(v) for v in (a, b, c)], 32, 32)
    wanted = [p if signed(s, 32) >= 0 else q for p, q, s in zip(a, b, c, strict=True)]
    assert unsigned(results, 32) == wanted
    for ftz, tiny_is_zero in (("", False), (".ftz", True)):
        values = [-1e-40, *floats(7)[1:]]
        statement = f"slct{ftz}.b32.f32 {{d}}, {{0}}, {{1}}, {{2}};"
        results = apply(statement, [tensor(a), tensor(b), bits_of(values)], 32, 32)
        wanted = [p if v >= 0 else q for p, q, v in zip(a, b, values, strict=True)]
        wanted[0] = a[0] if tiny_is_zero else b[0]
        assert unsigned(results, 32) == wanted


@pytest.mark.parametrize("operation", ["and", "or"])
def test_lop3_tells_whether_anything_is_left(operation: str) -> None:
    x = [[v & 3 for v in values] for values in draw(32, 3, 9)]
    statement = (
        f"setp.lt.u32 %p4, %r0, 16; lop3.{operation}.b32 {{d}}|%p5, {{0}}, {{1}}, {{2}}, 0x80, %p4;"
        " @%p5 add.u32 {d}, {d}, 256;"
    )
    results = unsigned(apply(statement, [tensor(v) for v in x], 32, 32), 32)
    for lane, (a, b, c) in enumerate(zip(*x, strict=True)):
        value, below = a & b & c, lane < 16
        told = value != 0 and below if operation == "and" else value != 0 or below
        assert results[lane] == value + 256 * told


@pytest.mark.parametrize("bits", [32, 64])
def test_the_highest_bit(bits: int) -> None:
    (a,) = draw(bits, 1, 21)
    for sign in ("u", "s"):
        results = apply(f"bfind.{sign}{bits} {{d}}, {{0}};", [tensor(a)], bits, 32)
        away = apply(f"bfind.shiftamt.{sign}{bits} {{d}}, {{0}};", [tensor(a)], bits, 32)
        for value, got, shift in zip(a, unsigned(results, 32), unsigned(away, 32), strict=True):
            number = signed(value, bits) if sign == "s" else value
            last = (number if number >= 0 else ~number).bit_length() - 1
            assert got == last % 2**32
            assert shift == (2**32 - 1 if last < 0 else bits - 1 - last)


def test_masks_and_extensions() -> None:
    inputs = [tensor([chance % 45 for chance in values]) for values in draw(32, 2, 23)]
    begins, counts = (values.tolist() for values in inputs)
    for mode, clamps in (("clamp", True), ("wrap", False)):
        results = unsigned(apply(f"bmsk.{mode}.b32 {{d}}, {{0}}, {{1}};", inputs, 32, 32), 32)
        for got, begin, count in zip(results, begins, counts, strict=True):
            first, many = (begin, count) if clamps else (begin % 32, count % 32)
            assert got == sum(1 << bit for bit in range(32) if first <= bit < first + many)
        (a,) = draw(32, 1, 29)
        for sign in ("u32", "s32"):
            statement = f"szext.{mode}.{sign} {{d}}, {{0}}, {{1}};"
            results = unsigned(apply(statement, [tensor(a), inputs[1]], 32, 32), 32)
            for got, value, count in zip(results, a, counts, strict=True):
                many = min(count, 32) if clamps else count % 32
                kept = value % 2**many
                if sign == "s32" and many > 0:
                    kept = signed(kept, many) % 2**32
                assert got == kept


def test_a_difference_leaves_a_carry_where_nothing_is_borrowed() -> None:
    a, b = draw(32, 2, 40)
    statement = "sub.cc.u32 %r30, {0}, {1}; addc.u32 {d}, 0, 0;"
    results = apply(statement, [tensor(a), tensor(b)], 32, 32)
    assert results.tolist() == [int(p >= q) for p, q in zip(a, b, strict=True)]


def test_products_of_24_bits_and_logical_negation() -> None:
    a, b, c = draw(32, 3, 41)
    inputs = [tensor(values) for values in (a, b, c)]
    for sign in ("u32", "s32"):
        parts = [[v % 2**24 for v in values] for values in (a, b)]
        if sign == "s32":
            parts = [[signed(v, 24) for v in values] for values in parts]
        products = [p * q for p, q in zip(*parts, strict=True)]
        for part, shift in (("lo", 0), ("hi", 16)):
            results = apply(f"mul24.{part}.{sign} {{d}}, {{0}}, {{1}};", inputs[:2], 32, 32)
            assert unsigned(results, 32) == [(v >> shift) % 2**32 for v in products]
            results = apply(f"mad24.{part}.{sign} {{d}}, {{0}}, {{1}}, {{2}};", inputs, 32, 32)
            sums = [(v >> shift) + e for v, e in zip(products, c, strict=True)]
            assert unsigned(results, 32) == [v % 2**32 for v in sums]
    for bits in (16, 32, 64):
        (a,) = draw(bits, 1, 42)
        results = apply(f"cnot.b{bits} {{d}}, {{0}};", [tensor(a)], bits, bits)
        assert unsigned(results, bits) == [int(v == 0) for v in a]


def test_the_nth_bit_is_found() -> None:
    chance = random.Random(43)
    words = [chance.choice([0, 1, 2**32 - 1, chance.getrandbits(32)]) for _ in range(LANES)]
    bases = [chance.randrange(34) for _ in words]
    offsets = [chance.randint(-6, 6) for _ in words]
    inputs = [tensor(words), tensor(bases), tensor([v % 2**32 for v in offsets])]
    results = unsigned(apply("fns.b32 {d}, {0}, {1}, {2};", inputs, 32, 32), 32)
    for got, word, base, offset in zip(results, words, bases, offsets, strict=True):
        ones = [bit for bit in range(32) if word >> bit & 1]
        if offset == 0:
            ones = [bit for bit in ones if bit == base]
        elif offset > 0:
            ones = [bit for bit in ones if bit >= base][offset - 1 : offset]
        else:
            inside = base < 32  # a search that begins outside ends at once
            ones = [bit for bit in reversed(ones) if inside and bit <= base][-offset - 1 : -offset]
        assert got == (ones[0] if ones else 2**32 - 1)


@pytest.mark.parametrize(
    "mode, picks",
    [
        ("f4e", ["3210", "4321", "5432", "6543"]),
        ("b4e", ["5670", "6701", "7012", "0123"]),
        ("rc8", ["0000", "1111", "2222", "3333"]),
        ("ecl", ["3210", "3211", "3222", "3333"]),
        ("ecr", ["0000", "1110", "2210", "3210"]),
        ("rc16", ["1010", "3232", "1010", "3232"]),
    ],
)
def test_bytes_are_permuted_by_modes(mode: str, picks: list[str]) -> None:
    a, b, c = draw(32, 3, 44)
    inputs = [tensor(values) for values in (a, b, c)]
    results = unsigned(apply(f"prmt.b32.{mode} {{d}}, {{0}}, {{1}}, {{2}};", inputs, 32, 32), 32)
    for got, low, high, select in zip(results, a, b, c, strict=True):
        both = low + (high << 32)
        wanted = [both >> (8 * int(byte)) & 0xFF for byte in picks[select % 4]]  # highest first
        assert got == int.from_bytes(wanted, "big")


@pytest.mark.parametrize("name, power", [("rcp", -1.0), ("rsqrt", -0.5)])
def test_approximations_of_doubles_look_at_the_upper_half(name: str, power: float) -> None:
    chance = random.Random(45)
    values = [math.ldexp(chance.uniform(1, 2), chance.randint(-900, 900)) for _ in range(LANES)]
    values[:5] = [0.0, math.inf, 1e-310, 1.7e308, -0.0]
    bits = tensor([struct.unpack("Q", struct.pack("d", value))[0] for value in values])
    results = unsigned(apply(f"{name}.approx.ftz.f64 {{d}}, {{0}};", [bits], 64, 64), 64)
    for got, value in zip(results, values, strict=True):
        assert got % 2**32 == 0
        result = struct.unpack("d", struct.pack("Q", got))[0]
        if value in (0.0, 1e-310):  # subnormal numbers are zeros, before and after
            assert math.isinf(result) and (math.copysign(1, result) == math.copysign(1, value))
        elif name == "rcp" and value in (math.inf, 1.7e308):
            assert result == 0.0
        else:
            assert result == pytest.approx(value**power, rel=2**-18)


def test_directives_may_be_written_together() -> None:
    """As in the assembler text of CUDA's own headers."""
    results = apply("{{.reg.b32 x;\n mov.b32 x, {0};\n add.u32 {d}, x, x;}}", [tensor([4])], 32, 32)
    assert results.tolist() == [8]


@pytest.mark.parametrize("bits", [32, 64])
def test_lanes_with_equal_values_find_each_other(bits: int) -> None:
    values = [lane * lane % 5 + (lane % 3 << bits - 3) for lane in range(LANES)]
    register = "%r" if bits == 32 else "%rd"
    some = 0x0FFFFFF0
    statement = f"""
        mov.u32 %r50, 0;
        shr.u32 %r51, {some}, %r0; and.b32 %r51, %r51, 1; setp.eq.u32 %p4, %r51, 1;
        @%p4 match.any.sync.b{bits} %r50, {{0}}, {some};
        mov.b{bits} {register}52, 7; match.all.sync.b{bits} %r53|%p5, {register}52, 0xFFFFFFFF;
        @%p5 add.u32 %r50, %r50, 1;
        match.all.sync.b{bits} %r54, {{0}}, 0xFFFFFFFF;
        add.u32 %r50, %r50, %r54; sub.u32 %r53, %r53, 0xFFFFFFFF; add.u32 {{d}}, %r50, %r53;
    """
    results = unsigned(apply(statement, [tensor(values)], bits, 32), 32)
    for lane, got in enumerate(results):
        members = [other for other in range(LANES) if some >> other & 1]
        same = sum(1 << other for other in members if values[other] == values[lane])
        assert got == 1 + (same if lane in members else 0)


@pytest.mark.parametrize("name, pick", [("min", min), ("max", max)])
def test_extremes_of_magnitudes(name: str, pick: Callable[..., float]) -> None:
    a, b = floats(11), floats(12)
    for nan in ("", ".NaN"):
        statement = f"{name}{nan}.xorsign.abs.f32 {{d}}, {{0}}, {{1}};"
        results = unsigned(apply(statement, [bits_of(a), bits_of(b)], 32, 32), 32)
        for got, p, q in zip(results, a, b, strict=True):
            value = struct.unpack("f", struct.pack("I", got))[0]
            known = [abs(v) for v in (p, q) if not math.isnan(v)]
            if not known or (nan and len(known) < 2):
                assert math.isnan(value)
                continue
            negative = math.copysign(1, p) * math.copysign(1, q) < 0
            assert value == pick(known) * (-1 if negative else 1)
            assert (math.copysign(1, value) < 0) == negative


@pytest.mark.parametrize(
    "statement",
    [
        "add.cc.u16 %h1, %h1, %h1;",
        "addc.sat.u32 %r1, %r0, %r0;",
        "mad.wide.cc.u32 %rd1, %r0, %r0, %rd0;",
        "dp4a.u32 %r1, %r0, %r0, %r0;",
        "dp2a.u32.u32 %r1, %r0, %r0, %r0;",
        "min.f32 %f1, %f1, %f1, %f1;",
        "min.xorsign.f32 %f1, %f1, %f1;",
        "max.xorsign.abs.f64 %fd1, %fd1, %fd1;",
        "lop3.xor.b32 %r1|%p1, %r0, %r0, %r0, 0x80, %p0;",
        "set.lt.u64.s32 %rd1, %r0, %r0;",
        "slct.u32.u32 %r1, %r0, %r0, %r0;",
        "bmsk.b32 %r1, %r0, %r0;",
        "szext.clamp.u64 %rd1, %rd0, %r0;",
        "bfind.b32 %r1, %r0;",
        "match.any.sync.b32 %r1|%p1, %r0, 0xFFFFFFFF;",
    ],
)
def test_what_is_not_known_is_an_error(statement: str) -> None:
    with pytest.raises(PtxError, match=r"unknown instruction|set does not know|slct needs"):
        run(kernel(statement, 0), [])
