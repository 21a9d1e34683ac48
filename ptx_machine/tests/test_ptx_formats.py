"""Number formats of the PTX machine: small floats, rounding, saturation, subnormal numbers."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import apply

INFINITE = None  # in place of a Fraction: the result overflows


@dataclass(frozen=True)
class Form:
    """A binary format: bits of a significand, exponent of the smallest normal, largest value."""

    digits: int
    lowest: int
    largest: Fraction


F16 = Form(11, -14, Fraction(65504))
BF16 = Form(8, -126, Fraction(2**128 - 2**120))
TF32 = Form(11, -126, Fraction(2**128 - 2**117))
F32 = Form(24, -126, Fraction(2**128 - 2**104))
F64 = Form(53, -1022, Fraction(2**1024 - 2**971))
FORMS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
MODES = ["rn", "rz", "rm", "rp"]


def round_exact(x: Fraction, form: Form, mode: str) -> Fraction | None:
    """Return the value of a format that x is rounded to; None for infinity."""
    if x == 0:
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    exponent = max(exponent, form.lowest)
    step = Fraction(2) ** (exponent - form.digits + 1)
    below = math.floor(x / step)
    rest = x / step - below
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1),
        "rna": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and x > 0),
        "rz": x < 0 and rest > 0,
        "rm": False,
        "rp": rest > 0,
    }[mode]
    results = (below + int(up)) * step
    if abs(results) <= form.largest:
        return results
    towards_zero = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
    return form.largest * (1 if x > 0 else -1) if towards_zero else INFINITE


def bits_of(values: list[float], kind: str) -> torch.Tensor:
    """Return the bits of values in a format, as int64."""
    codes = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<q")}
    if kind == "bf16":
        words = torch.tensor(values).bfloat16().view(torch.int16).long()
        return words & 0xFFFF
    to, back = codes[kind]
    return torch.tensor([struct.unpack(back, struct.pack(to, v))[0] for v in values])


def values_of(bits: torch.Tensor, kind: str) -> list[float]:
    if kind == "f64":
        return list(bits.view(torch.float64).tolist())
    if kind == "f32":
        return list(bits.to(torch.int32).view(torch.float32).tolist())
    words = bits.to(torch.int32).to(torch.int16)
    return list(words.view(torch.float16 if kind == "f16" else torch.bfloat16).tolist())


def compare(results: list[float], exact: list[Fraction], form: Form, mode: str) -> None:
    for got, x in zip(results, exact, strict=True):
        wanted = round_exact(x, form, mode)
        if wanted is INFINITE:
            assert got == math.copysign(math.inf, x), (x, got)
        else:
            assert math.isfinite(got) and Fraction(got) == wanted, (float(x), got, float(wanted))


def numbers(kind: str, count: int, seed: int) -> list[float]:
    """Draw values of a format: of near sizes, far ones, subnormal ones, and ties."""
    chance = random.Random(seed)
    form = FORMS[kind]
    results = []
    for i in range(count):
        digits = chance.choice([1, 3, form.digits])
        exponent = chance.randint(-6, 6) if i % 3 else chance.randint(form.lowest - 8, 12)
        x = Fraction(chance.getrandbits(digits) * chance.choice([-1, 1])) * Fraction(2) ** exponent
        results.append(float(round_exact(x, form, "rz") or 0))
    return results


# -- e4m3 and e5m2 ---------------------------------------------------------------------------------

BYTES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize("kind", BYTES)
def test_all_bytes_become_halves(kind: str) -> None:
    dtype, _ = BYTES[kind]
    words = torch.arange(256) << 8 | torch.arange(256).flip(0)
    for relu in (False, True):
        name = f"cvt.rn{'.relu' if relu else ''}.f16x2.{kind}x2"
        pairs = apply(f"{name} {{d}}, {{0}};", [words], 16, 32)
        for shift in (8, 0):
            byte = (words >> shift & 255).to(torch.uint8)
            wanted = byte.view(dtype).to(torch.float16)
            if relu:
                wanted = torch.where(wanted.isnan(), wanted, wanted.clamp(min=0))
            half = (pairs >> 2 * shift & 0xFFFF).to(torch.int32).to(torch.int16)
            torch.testing.assert_close(
                half.view(torch.float16), wanted, rtol=0, atol=0, equal_nan=True
            )


def all_halves() -> list[torch.Tensor]:
    return list(torch.arange(65536).split(1024))


@pytest.mark.parametrize("kind", BYTES)
def test_all_halves_become_bytes(kind: str) -> None:
    """Also as f32, half of them in the upper place, and with values between those of f16."""
    dtype, largest = BYTES[kind]
    for words in all_halves()[::5]:
        half = words.to(torch.int32).to(torch.int16).view(torch.float16)
        inputs = half.float()
        wanted = inputs.clamp(-largest, largest).to(dtype).view(torch.uint8).long()
        wanted = torch.where(inputs.isnan(), 0x7F, wanted)
        pair = words | words.flip(0) << 16
        results = apply(f"cvt.rn.satfinite.{kind}x2.f16x2 {{d}}, {{0}};", [pair], 32, 16)
        assert torch.equal(results & 255, wanted) and torch.equal(results >> 8, wanted.flip(0))
        near = inputs * (1 + 2.0**-20)
        bits = near.view(torch.int32).long()
        name = f"cvt.rn.satfinite.relu.{kind}x2.f32"
        results = apply(f"{name} {{d}}, {{0}}, {{1}};", [bits, bits.flip(0)], 32, 16)
        wanted = near.clamp(0, largest).to(dtype).view(torch.uint8).long()
        wanted = torch.where(near.isnan(), 0x7F, wanted)
        assert torch.equal(results >> 8, wanted) and torch.equal(results & 255, wanted.flip(0))


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", MODES)
def test_arithmetic_rounds_as_it_is_told(kind: str, mode: str) -> None:
    width, form = (32, F32) if kind == "f32" else (64, F64)
    a, b, c = (numbers(kind, 256, seed) for seed in range(3))
    b = [x or 1.0 for x in b]
    exact = [[Fraction(x) for x in v] for v in (a, b, c)]
    bits = [bits_of(v, kind) for v in (a, b, c)]
    cases: dict[str, tuple[int, Callable[..., Fraction]]] = {
        "add": (2, lambda x, y: x + y),
        "sub": (2, lambda x, y: x - y),
        "mul": (2, lambda x, y: x * y),
        "div": (2, lambda x, y: x / y),
        "fma": (3, lambda x, y, z: x * y + z),
    }
    for name, (count, function) in cases.items():
        places = ", ".join(f"{{{i}}}" for i in range(count))
        statement = f"{name}.{mode}.{kind} {{d}}, {places};"
        results = values_of(apply(statement, bits[:count], width, width), kind)
        compare(results, [function(*v) for v in zip(*exact[:count], strict=True)], form, mode)
    results = values_of(apply(f"rcp.{mode}.{kind} {{d}}, {{0}};", [bits[1]], width, width), kind)
    compare(results, [1 / x for x in exact[1]], form, mode)


@pytest.mark.parametrize("mode", MODES)
def test_conversions_round_as_they_are_told(mode: str) -> None:
    wide = [x * (1 + y * 2.0**-30) for x, y in zip(numbers("f64", 256, 7), range(256), strict=True)]
    exact = [Fraction(x) for x in wide]
    results = apply(f"cvt.{mode}.f32.f64 {{d}}, {{0}};", [bits_of(wide, "f64")], 64, 32)
    compare(values_of(results, "f32"), exact, F32, mode)
    single = [*numbers("f32", 250, 8), 65519.0, 65520.0, -65519.0, 7e4, 3e38, 3.4e38]
    single = values_of(bits_of(single, "f32"), "f32")
    exact = [Fraction(x) for x in single]
    for kind in ("f16", "bf16"):
        inputs = bits_of(single, "f32")
        results = apply(f"cvt.{mode}.{kind}.f32 {{d}}, {{0}};", [inputs], 32, 16)
        compare(values_of(results, kind), exact, FORMS[kind], mode)
        if mode in ("rn", "rz"):
            pair = apply(f"cvt.{mode}.{kind}x2.f32 {{d}}, {{0}}, {{0}};", [inputs], 32, 32)
            assert torch.equal(pair & 0xFFFF, results) and torch.equal(pair >> 16 & 0xFFFF, results)
    integers = torch.randint(-(2**63), 2**63 - 1, (256,))
    exact = [Fraction(int(x)) for x in integers]
    results = apply(f"cvt.{mode}.f32.s64 {{d}}, {{0}};", [integers], 64, 32)
    compare(values_of(results, "f32"), exact, F32, mode)
    results = apply(f"cvt.{mode}.bf16.s64 {{d}}, {{0}};", [integers], 64, 16)
    compare(values_of(results, "bf16"), exact, BF16, mode)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode: str) -> None:
    inputs = [
        *numbers("f32", 250, 9),
        1 + 2.0**-11,
        -1 - 2.0**-11,
        1 + 3 * 2.0**-11,
        3e38,
        0.5,
        1.0,
    ]
    inputs = values_of(bits_of(inputs, "f32"), "f32")
    results = apply(f"cvt.{mode}.tf32.f32 {{d}}, {{0}};", [bits_of(inputs, "f32")], 32, 32)
    assert not (results & 0x1FFF).any()
    compare(values_of(results, "f32"), [Fraction(x) for x in inputs], TF32, mode)
    huge = bits_of([math.inf, -math.inf, 3.4028e38], "f32")
    results = apply("cvt.rna.satfinite.tf32.f32 {d}, {0};", [huge], 32, 32)
    largest = float(TF32.largest)
    assert values_of(results, "f32") == [largest, -largest, largest]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_product_and_a_sum_of_halves_are_rounded_once(kind: str) -> None:
    a, b, c = (numbers(kind, 1024, seed) for seed in (1, 2, 3))
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a, b, c, strict=True)]
    bits = [bits_of(v, kind) for v in (a, b, c)]
    results = apply(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", bits, 16, 16)
    compare(values_of(results, kind), exact, FORMS[kind], "rn")
    relu = apply(f"fma.rn.relu.{kind} {{d}}, {{0}}, {{1}}, {{2}};", bits, 16, 16)
    compare(values_of(relu, kind), [max(x, Fraction(0)) for x in exact], FORMS[kind], "rn")


def test_floats_are_rounded_to_whole_numbers() -> None:
    inputs = [0.5, 1.5, -0.5, -1.5, 2.5, -2.7, 1e10, 0.3]
    wanted = {
        "rni": [0, 2, 0, -2, 2, -3, 1e10, 0],
        "rzi": [0, 1, 0, -1, 2, -2, 1e10, 0],
        "rmi": [0, 1, -1, -2, 2, -3, 1e10, 0],
        "rpi": [1, 2, 0, -1, 3, -2, 1e10, 1],
    }
    for mode, values in wanted.items():
        results = apply(f"cvt.{mode}.f32.f32 {{d}}, {{0}};", [bits_of(inputs, "f32")], 32, 32)
        assert values_of(results, "f32") == values
        results = apply(f"cvt.{mode}.s64.f32 {{d}}, {{0}};", [bits_of(inputs, "f32")], 32, 64)
        assert results.tolist() == values


# -- saturation and subnormal numbers --------------------------------------------------------------

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 0.25, 2.0, -3.0]


def single(statement: str, *operands: list[float]) -> list[float]:
    return values_of(apply(statement, [bits_of(v, "f32") for v in operands], 32, 32), "f32")


def test_results_are_clamped_to_zero_and_one() -> None:
    results = single("add.sat.f32 {d}, {0}, {1};", SPECIAL, [0.0] * 10)
    assert results[:3] == [0, 1, 0] and results[7:] == [0.25, 1, 0]
    assert single("cvt.sat.f32.f32 {d}, {0};", SPECIAL)[7:] == [0.25, 1, 0]
    half = apply("cvt.sat.f16.f16 {d}, {0};", [bits_of([-1.0, 0.25, 7.0], "f16")], 16, 16)
    assert values_of(half, "f16") == [0, 0.25, 1]
    results = single("fma.rn.ftz.sat.f32 {d}, {0}, {0}, {0};", SPECIAL)
    assert results[0] == 0 and results[5:] == [0, 0, 0.3125, 1, 1]


def test_subnormal_floats_are_flushed() -> None:
    tiny, normal = 1e-39, 2.0**-126
    inputs, ones = [tiny, -tiny, normal], [1.0] * 3
    assert single("mul.ftz.f32 {d}, {0}, {1};", inputs, ones) == [0, 0, normal]
    assert [math.copysign(1, x) for x in single("mul.ftz.f32 {d}, {0}, {1};", inputs, ones)] == [
        1, -1, 1]  # fmt: skip
    assert single("mul.ftz.f32 {d}, {0}, {1};", inputs, [0.5] * 3) == [0, 0, 0]
    assert single("mul.f32 {d}, {0}, {1};", [normal] * 3, [0.5] * 3) == [2.0**-127] * 3
    assert single("rcp.approx.ftz.f32 {d}, {0};", [tiny, -tiny, 2.0**127]) == [
        math.inf, -math.inf, 0]  # fmt: skip
    assert single("ex2.approx.ftz.f32 {d}, {0};", [-127.0, -126.0, tiny]) == [0, normal, 1]
    assert single("abs.ftz.f32 {d}, {0};", inputs) == [0, 0, normal]
    wide = apply("cvt.ftz.f64.f32 {d}, {0};", [bits_of(inputs, "f32")], 32, 64)
    assert values_of(wide, "f64") == [0, 0, normal]
    statement = "setp{}.gt.f32 %p1, {{0}}, 0f00000000; selp.b32 {{d}}, 1, 0, %p1;"
    for flush, wanted in (("", [1, 0, 1]), (".gt.ftz", [0, 0, 1])):
        text = statement.format("").replace(".gt", flush or ".gt")
        assert apply(text, [bits_of(inputs, "f32")], 32, 32).tolist() == wanted
    half = bits_of([2.0**-15, 2.0**-14], "f16")
    results = apply("add.ftz.f16 {d}, {0}, {0};", [half], 16, 16)
    assert values_of(results, "f16") == [0, 2.0**-13]


def test_minimum_and_maximum_know_nan_and_zeros() -> None:
    a, b = [math.nan, 1.0, math.nan, 0.0, -0.0], [1.0, math.nan, math.nan, -0.0, 0.0]
    low, high = (single(f"{n}.f32 {{d}}, {{0}}, {{1}};", a, b) for n in ("min", "max"))
    assert low[:2] == high[:2] == [1, 1] and math.isnan(low[2]) and math.isnan(high[2])
    assert [math.copysign(1, x) for x in low[3:] + high[3:]] == [-1, -1, 1, 1]
    for name in ("min", "max"):
        results = single(f"{name}.NaN.f32 {{d}}, {{0}}, {{1}};", a, b)
        assert [math.isnan(x) for x in results] == [True, True, True, False, False]


def test_large_halves_stay_finite_with_satfinite() -> None:
    inputs = [1e6, -math.inf, 1.0, math.nan]
    results = apply("cvt.rn.satfinite.f16.f32 {d}, {0};", [bits_of(inputs, "f32")], 32, 16)
    values = values_of(results, "f16")
    assert values[:3] == [65504, -65504, 1] and math.isnan(values[3])
    pair = "cvt.rn.satfinite.relu.bf16x2.f32 {d}, {0}, {0};"
    results = apply(pair, [bits_of(inputs, "f32")], 32, 32)
    assert values_of(results & 0xFFFF, "bf16")[1:3] == [0, 1]


def test_integers_are_clamped() -> None:
    inputs = torch.tensor([-(2**31), -129, -1, 0, 127, 128, 255, 256, 70000, 2**31 - 1])
    for kind, width in (("s8", 8), ("u8", 8), ("s16", 16), ("u16", 16), ("u32", 32)):
        low = -(2 ** (width - 1)) if kind[0] == "s" else 0
        high = 2 ** (width - 1) - 1 if kind[0] == "s" else 2**width - 1
        wanted = inputs.clamp(low, high) % 2**32
        out = max(width, 16)
        results = apply(f"cvt.sat.{kind}.s32 {{d}}, {{0}};", [inputs], 32, out) % 2**width
        assert torch.equal(results, wanted % 2**width), kind
    low8 = inputs.clamp(-128, 127) % 256
    results = apply(
        "cvt.pack.sat.s8.s32.b32 {d}, {0}, {1}, 4660;", [inputs, inputs.flip(0)], 32, 32
    )
    assert torch.equal(results % 2**32, 4660 << 16 | low8 << 8 | low8.flip(0))
    results = apply("cvt.pack.sat.u16.s32 {d}, {0}, {1};", [inputs, inputs.flip(0)], 32, 32)
    high16 = inputs.clamp(0, 65535)
    assert torch.equal(results % 2**32, high16 << 16 | high16.flip(0))
    results = apply("add.sat.s32 {d}, {0}, {1};", [inputs, inputs], 32, 32)
    assert torch.equal(results % 2**32, (2 * inputs).clamp(-(2**31), 2**31 - 1) % 2**32)


def test_pairs_of_halves_are_compared() -> None:
    a, b = bits_of([1.0, 2.0, math.nan], "f16"), bits_of([1.0, 3.0, 1.0], "f16")
    pair = [a | b << 16, b | a << 16]
    text = "setp.lt.f16x2 %p1|%p2, {0}, {1}; selp.b32 %r1, 1, 0, %p1; selp.b32 {d}, 2, 0, %p2;"
    assert apply(text + "add.u32 {d}, {d}, %r1;", pair, 32, 32).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "statement",
    [
        "add.rz.bf16 {d}, {0}, {0};",
        "ex2.rn.f32 {d}, {0};",
        "fma.rn.relu.f32 {d}, {0}, {0}, {0};",
        "add.sat.u32 {d}, {0}, {0};",
        "prmt.b32.f5e {d}, {0}, {0}, {0};",
        "cvt.s32.f32 {d}, {0};",
        "cvt.f16.f32 {d}, {0};",
        "cvt.rs.f16x2.f32 {d}, {0}, {0}, {0};",
        "cvt.rn.e4m3x2.f32 {d}, {0}, {0};",
        "cvt.rz.satfinite.e5m2x2.f32 {d}, {0}, {0};",
        "cvt.rm.tf32.f32 {d}, {0};",
        "setp.maybe.f32 %p1, {0}, {0};",
    ],
)
def test_what_is_not_known_is_an_error(statement: str) -> None:
    with pytest.raises(PtxError, match="unknown instruction"):
        apply(statement, [torch.zeros(1, dtype=torch.int64)], 32, 32)
