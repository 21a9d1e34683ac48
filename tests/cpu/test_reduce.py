"""The native reduction (csrc/cpu/reduce.cpp) against torch, bitwise: no rounding is left open."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flux import _C

# Codes as in csrc/cpu/reduce.h.
CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
HALVES = [torch.float16, torch.bfloat16]
BLOCK = 2048  # columns that the implementation sums at a time

dtypes = pytest.mark.parametrize("dtype", CODES, ids=lambda d: str(d).removeprefix("torch."))
halves = pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d).removeprefix("torch."))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduce(
    sources: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum [rows, columns] tensors with the native code."""
    first = sources[0]
    rows, columns = first.shape
    assert all(s.is_contiguous() and s.shape == first.shape for s in sources)
    if out is None:
        out = torch.full_like(first, float("nan"))
    _C.reduce(
        CODES[first.dtype],
        [s.data_ptr() for s in sources],
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        rows,
        columns,
        scale,
    )
    return out


def reference(
    sources: Sequence[torch.Tensor], bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Sum in rank order with torch's element-wise ops, which round as IEEE 754 says."""
    wide = accumulator(sources[0].dtype)
    total = sources[0].to(wide)
    for source in sources[1:]:
        total = total + source.to(wide)
    if scale != 1.0:
        total = total * torch.tensor(scale, dtype=wide)
    if bias is not None:
        total = total + bias.to(wide)
    return total.to(sources[0].dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal bit patterns; any NaN equals any NaN."""
    assert torch.equal(got.isnan(), expected.isnan())
    same = (bits(got) == bits(expected)) | expected.isnan()
    if not same.all():
        i = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{int((~same).sum())} differ, first at {i}: {got[i]}, {expected[i]}")


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return every bit pattern of a 16-bit type, as one row."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[None]


def random_blocks(
    dtype: torch.dtype, count: int, rows: int, columns: int, seed: int
) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, rows, columns, generator=gen, dtype=torch.float64)
    # Very different magnitudes, so that every other order of summation gives another result.
    wide *= torch.exp2(torch.randint(-8, 9, wide.shape, generator=gen).double())
    return list(wide.to(dtype))


# Conversions ------------------------------------------------------------------------------------


@halves
def test_every_bit_pattern_survives_a_round_trip(dtype: torch.dtype) -> None:
    """Subnormals, signed zeros and infinities included; a NaN stays a NaN of the same sign."""
    every = all_patterns(dtype)
    got = reduce([every])
    assert_same_bits(got, every)
    assert torch.equal(got.signbit(), every.signbit())


@halves
def test_every_bit_pattern_is_read_correctly(dtype: torch.dtype) -> None:
    """Products with a scale that is no power of two depend on the exact value read."""
    every = all_patterns(dtype)
    for scale in (0.5, 1 / 3, 0.7, 1.9, 2.0**-9, -(2.0**-12), 2.0**7):
        assert_same_bits(reduce([every], scale=scale), reference([every], scale=scale))


@halves
def test_rounding_at_and_beside_every_tie(dtype: torch.dtype) -> None:
    """a + ulp/2 lies half-way between two neighbours: to even, and either way beside it."""
    every = all_patterns(dtype)
    a = every[every.isfinite()][None]
    above = (bits(a) + 1).view(dtype)  # away from zero; infinity behind the largest number
    half_ulp = ((above.float() - a.float()) / 2).nan_to_num(posinf=16.0, neginf=-16.0)
    if dtype == torch.bfloat16:
        half_ulp = half_ulp.clamp(-(2.0**119), 2.0**119)
    h = half_ulp.to(dtype)  # zero below the subnormals: those ties come from scale = 0.5 above
    zero = torch.zeros_like(a)
    for nudge in (0.0, 2.0**-24, -(2.0**-24)):
        third = zero + nudge
        assert_same_bits(reduce([a, h, third]), reference([a, h, third]))
        assert_same_bits(reduce([third, h, a]), reference([third, h, a]))


@halves
def test_sums_beyond_the_largest_number_become_infinite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    half_ulp = (torch.tensor(info.max, dtype=torch.float64) * info.eps / 4).item()
    for extra in (0.25, 0.5, 0.99, 1.0, 1.01, 2.0):
        sources = [torch.tensor([[v, -v]], dtype=dtype) for v in (info.max, half_ulp * extra)]
        assert_same_bits(reduce(sources), reference(sources))
    assert reduce([torch.tensor([[info.max]], dtype=dtype)] * 2).isinf().all()


@dtypes
def test_special_values_propagate(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([[inf, inf, -inf, nan, 1.0, -0.0, 0.0, -0.0]], dtype=dtype)
    b = torch.tensor([[1.0, -inf, -inf, 1.0, nan, -0.0, -0.0, 0.0]], dtype=dtype)
    assert_same_bits(reduce([a, b]), reference([a, b]))


# Sums -------------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(list(CODES)),
    count=st.integers(1, 9),
    rows=st.integers(1, 4),
    columns=st.one_of(
        st.integers(1, 70), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
    ),
    with_bias=st.booleans(),
    scaled=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.float16, 3, 2, 2 * BLOCK + 1, True, True, 0)
@example(torch.bfloat16, 8, 1, 1, True, False, 1)
def test_sums_are_those_of_torch_in_rank_order(
    dtype: torch.dtype,
    count: int,
    rows: int,
    columns: int,
    with_bias: bool,
    scaled: bool,
    seed: int,
) -> None:
    blocks = random_blocks(dtype, count, rows, columns, seed)
    bias = random_blocks(dtype, 1, 1, columns, seed + 1)[0][0] if with_bias else None
    scale = 1 / count if scaled else 1.0
    kept = [b.clone() for b in blocks]
    got = reduce(blocks, bias, scale)
    assert_same_bits(got, reference(blocks, bias, scale))
    assert all(torch.equal(b, k) for b, k in zip(blocks, kept, strict=True))
    for i in {0, count // 2, count - 1}:  # into one of its own sources
        again = [k.clone() for k in kept]
        assert_same_bits(reduce(again, bias, scale, out=again[i]), got)
        assert all(torch.equal(again[j], kept[j]) for j in range(count) if j != i)


@dtypes
def test_the_order_of_summation_is_that_of_the_sources(dtype: torch.dtype) -> None:
    """(big + 1) - big = 0, (big - big) + 1 = 1: an order that drifted with arrival would show."""
    big = 2.0**54 if dtype == torch.float64 else 2.0**25
    if dtype == torch.float16:
        big, one = 2.0**15, 2.0**-10
    else:
        one = 1.0
    a, b, c = (torch.full((1, 33), v, dtype=dtype) for v in (big, one, -big))
    assert (reduce([a, b, c]) == 0).all()
    assert (reduce([a, c, b]) == one).all()


@halves
def test_accumulation_is_in_fp32(dtype: torch.dtype) -> None:
    """64 equal numbers: in the 16-bit type itself the sum would be rounded 63 times."""
    sources = [torch.full((1, 5), 1 + torch.finfo(dtype).eps, dtype=dtype)] * 64
    exact = 64 * (1 + torch.finfo(dtype).eps)
    assert (reduce(sources).double() == exact).all()


@dtypes
def test_error_against_float64(dtype: torch.dtype) -> None:
    count = 8
    blocks = random_blocks(dtype, count, 7, 301, seed=5)
    exact = torch.stack(blocks).double().sum(0)
    magnitude = torch.stack(blocks).double().abs().sum(0)
    # Rounding of count - 1 additions in the accumulator, and of one conversion.
    bound = (count - 1) * torch.finfo(accumulator(dtype)).eps * magnitude
    bound += torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).tiny
    assert ((reduce(blocks).double() - exact).abs() <= bound).all()


# Memory -----------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("columns", [1, 31, BLOCK + 3])
def test_only_the_output_is_written(dtype: torch.dtype, columns: int) -> None:
    """Blocks may begin at any element: no alignment is assumed, nothing beside is touched."""
    rows, margin = 3, 5
    blocks = random_blocks(dtype, 2, rows, columns, seed=9)
    arena = torch.full((rows * columns + 2 * margin,), -7.0, dtype=dtype)
    out = arena[margin:-margin].view(rows, columns)
    shifted = []
    for block in blocks:
        room = torch.empty(block.numel() + 1, dtype=dtype)
        room[1:] = block.flatten()
        shifted.append(room[1:].view_as(block))
    reduce(shifted, out=out)
    assert_same_bits(out, reference(blocks))
    assert (arena[:margin] == -7).all() and (arena[-margin:] == -7).all()


@dtypes
def test_empty_input_writes_no_output(dtype: torch.dtype) -> None:
    out = torch.full((1, 1), 3.0, dtype=dtype)
    address = [out.data_ptr()]
    for rows, columns in ((0, 5), (0, 0)):
        _C.reduce(CODES[dtype], address, out.data_ptr(), 0, rows, columns, 2.0)
    assert out.item() == 3.0
