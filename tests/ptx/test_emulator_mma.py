"""mma.sync of the PTX machine for every type, against torch."""

from __future__ import annotations

import pytest
import torch

from emulator import PtxError
from ptx_text import LANES, kernel, run
from wgmma_text import DTYPES

CASES = [
    ("f16", "f16", "f32", (8, 16)),
    ("f16", "f16", "f16", (8, 16)),
    ("bf16", "bf16", "f32", (8, 16)),
    ("tf32", "tf32", "f32", (4, 8)),
    *((a, b, "f32", (32,)) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((a, b, "s32", (16, 32)) for a in ("s8", "u8") for b in ("s8", "u8")),
]


def draw(rows: int, depth: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[kind]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, (rows, depth), generator=generator).to(dtype)
    values = torch.randn(rows, depth, generator=generator)
    if kind == "tf32":
        return (values.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return values.to(dtype)


def fragments(matrix: torch.Tensor, is_a: bool) -> torch.Tensor:
    """Return [32, registers] int32 of A [16, k] or B [8, k], as the PTX ISA distributes them."""
    size, count = matrix.element_size(), 4 // matrix.element_size()
    registers = matrix.numel() * size // 128
    lane = torch.arange(LANES).view(-1, 1, 1)
    register = torch.arange(registers).view(1, -1, 1)
    part = torch.arange(count).view(1, 1, -1)
    row = lane // 4 + (register % 2 * 8 if is_a else 0)
    step = register // 2 if is_a else register
    column = lane % 4 * count + step * 4 * count + part
    raw = matrix.contiguous().view(torch.uint8).view(*matrix.shape, size)[row, column]
    return raw.reshape(LANES, registers * 4).contiguous().view(torch.int32)


def multiply(name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    given = [fragments(a, True), fragments(b, False)]
    lane, element = torch.arange(LANES).view(-1, 1), torch.arange(4).view(1, -1)
    row, column = lane // 4 + element // 2 * 8, lane % 4 * 2 + element % 2
    d = c[row, column].contiguous()
    words = d.view(torch.int32).shape[1]
    lines, names = [], []
    for number, (prefix, count) in enumerate(
        [("%r1", given[0].shape[1]), ("%r2", given[1].shape[1]), ("%r3", words)]
    ):
        lines += [
            f"ld.param.u64 %rd1, [p{number}]; mul.wide.u32 %rd2, %r0, {4 * count};",
            "add.u64 %rd1, %rd1, %rd2;",
        ]
        lines += [f"ld.global.b32 {prefix}{i}, [%rd1+{4 * i}];" for i in range(count)]
        names.append("{" + ", ".join(f"{prefix}{i}" for i in range(count)) + "}")
    lines.append(f"{name} {names[2]}, {names[0]}, {names[1]}, {names[2]};")
    lines += [f"st.global.b32 [%rd1+{4 * i}], %r3{i};" for i in range(words)]
    run(kernel("\n".join(lines), 3), [*given, d])
    found = torch.empty_like(c)
    found[row, column] = d
    return found


@pytest.mark.parametrize("a_type, b_type, d_type, depths", CASES)
def test_every_type(a_type: str, b_type: str, d_type: str, depths: tuple[int, ...]) -> None:
    for depth in depths:
        a, b = draw(16, depth, a_type, 1), draw(8, depth, b_type, 2)
        c = draw(16, 8, "tf32", 3)
        if d_type == "s32":
            c = torch.randint(-1000, 1000, (16, 8)).to(torch.int32)
        c = c.half() if d_type == "f16" else c
        name = f"mma.sync.aligned.m16n8k{depth}.row.col.{d_type}.{a_type}.{b_type}.{d_type}"
        found = multiply(name, a, b, c)
        wanted = a.double() @ b.double().t() + c.double()
        tolerance = {"f32": 1e-5, "f16": 2.0**-11, "s32": 0}[d_type]
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_integers_wrap_around_or_saturate() -> None:
    a, b = (torch.full((rows, 32), 255, dtype=torch.uint8) for rows in (16, 8))
    c = torch.full((16, 8), 2**31 - 1, dtype=torch.int32)
    wrapped, types = 32 * 255 * 255 - 1 - 2**31, ".s32.u8.u8.s32"
    # The PTX ISA has the modifier in front of the types, CUTLASS behind them.
    for rest, wanted in (
        (types, wrapped),
        (f".satfinite{types}", 2**31 - 1),
        (f"{types}.satfinite", 2**31 - 1),
    ):
        name = f"mma.sync.aligned.m16n8k32.row.col{rest}"
        assert set(multiply(name, a, b, c).flatten().tolist()) == {wanted}


@pytest.mark.parametrize(
    "kind",
    [
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k16.row.col.bf16.bf16.bf16.bf16",
        "m16n8k32.row.col.f32.f16.f16.f32",
        "m16n8k16.col.row.f32.f16.f16.f32",
        "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "m16n8k16.row.col.f16.f16.f16.f32",
        "m8n8k4.row.col.f32.f16.f16.f32",
    ],
)
def test_what_is_not_known_is_an_error(kind: str) -> None:
    a, b = (torch.zeros(rows, 16).half() for rows in (16, 8))
    with pytest.raises(PtxError, match="unknown instruction"):
        multiply(f"mma.sync.aligned.{kind}", a, b, torch.zeros(16, 8))
