"""mma.sync and wmma of the PTX machine for every type, against torch."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
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
    inputs = [fragments(a, True), fragments(b, False)]
    lane, element = torch.arange(LANES).view(-1, 1), torch.arange(4).view(1, -1)
    row, column = lane // 4 + element // 2 * 8, lane % 4 * 2 + element % 2
    d = c[row, column].contiguous()
    words = d.view(torch.int32).shape[1]
    lines, names = [], []
    for number, (prefix, count) in enumerate(
        [("%r1", inputs[0].shape[1]), ("%r2", inputs[1].shape[1]), ("%r3", words)]
    ):
        lines += [
            f"ld.param.u64 %rd1, [p{number}]; mul.wide.u32 %rd2, %r0, {4 * count};",
            "add.u64 %rd1, %rd1, %rd2;",
        ]
        lines += [f"ld.global.b32 {prefix}{i}, [%rd1+{4 * i}];" for i in range(count)]
        names.append("{" + ", ".join(f"{prefix}{i}" for i in range(count)) + "}")
    lines.append(f"{name} {names[2]}, {names[0]}, {names[1]}, {names[2]};")
    lines += [f"st.global.b32 [%rd1+{4 * i}], %r3{i};" for i in range(words)]
    run(kernel("\n".join(lines), 3), [*inputs, d])
    result = torch.empty_like(c)
    result[row, column] = d
    return result


@pytest.mark.parametrize("a_type, b_type, d_type, depths", CASES)
def test_every_type(a_type: str, b_type: str, d_type: str, depths: tuple[int, ...]) -> None:
    for depth in depths:
        a, b = draw(16, depth, a_type, 1), draw(8, depth, b_type, 2)
        c = draw(16, 8, "tf32", 3)
        if d_type == "s32":
            c = torch.randint(-1000, 1000, (16, 8)).to(torch.int32)
        c = c.half() if d_type == "f16" else c
        name = f"mma.sync.aligned.m16n8k{depth}.row.col.{d_type}.{a_type}.{b_type}.{d_type}"
        result = multiply(name, a, b, c)
        wanted = a.double() @ b.double().t() + c.double()
        tolerance = {"f32": 1e-5, "f16": 2.0**-11, "s32": 0}[d_type]
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


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


# -- wmma ------------------------------------------------------------------------------------------

SHAPES = {
    "m16n16k16": (16, 16, 16),
    "m8n32k16": (8, 32, 16),
    "m32n8k16": (32, 8, 16),
    "m16n16k8": (16, 16, 8),
}
WMMA = [
    *(("f16", d, c, shape) for d in ("f32", "f16") for c in ("f32", "f16") for shape in SHAPES),
    *((kind, "f32", "f32", shape) for kind in ("bf16", "tf32") for shape in SHAPES),
    *((kind, "s32", "s32", shape) for kind in ("s8", "u8") for shape in SHAPES),
]
WMMA = [case for case in WMMA if (case[0] == "tf32") == (case[3] == "m16n16k8")]


def names_of(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{number}" for number in range(count)) + "}"


def wmma(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, types: tuple[str, ...],
    layouts: tuple[str, str, str], satfinite: bool = False,
) -> None:  # fmt: skip
    """Multiply on one warp; rows in memory are longer than those of the matrices."""
    kind, d_type, c_type, shape = types
    m, n, k = SHAPES[shape]
    registers = {
        "a": 8 if kind == "f16" else m * k * a.element_size() // 128,
        "b": 8 if kind == "f16" else k * n * b.element_size() // 128,
        "c": m * n * c.element_size() // 128,
        "d": m * n * d.element_size() // 128,
    }
    names = {part: names_of(f"%r{at}", registers[part]) for at, part in enumerate("abcd", 1)}
    lines, stored = [], []
    begin = "sync.aligned"
    parts = (("a", a, kind, layouts[0]), ("b", b, kind, layouts[1]), ("c", c, c_type, layouts[2]))
    for number, (part, matrix, type_, layout) in enumerate(parts):
        stored.append(padded(matrix if layout == "row" else matrix.t()))
        stride = stored[-1].shape[1]
        lines += [
            f"ld.param.u64 %rd1, [p{number}]; mov.u32 %r1, {stride};",
            f"wmma.load.{part}.{begin}.{layout}.{shape}.global.{type_} {names[part]}, [%rd1], %r1;",
        ]
    middle = (d_type, c_type) if kind == "f16" else (d_type, kind, kind, c_type)
    end = ".satfinite" if satfinite else ""
    lines += [
        f"wmma.mma.{begin}.{layouts[0]}.{layouts[1]}.{shape}.{'.'.join(middle)}{end} "
        f"{names['d']}, {names['a']}, {names['b']}, {names['c']};",
        "ld.param.u64 %rd1, [p3];",
        f"wmma.store.d.{begin}.row.{shape}.global.{d_type} [%rd1], {names['d']};",
    ]
    run(kernel("\n".join(lines), 4), [*stored, d])


def padded(matrix: torch.Tensor) -> torch.Tensor:
    room = 16 // matrix.element_size()
    out = torch.zeros(matrix.shape[0], (matrix.shape[1] // room + 2) * room, dtype=matrix.dtype)
    out[:, : matrix.shape[1]] = matrix
    return out


@pytest.mark.parametrize("types", WMMA, ids="-".join)
def test_fragments_of_every_type_and_shape(types: tuple[str, str, str, str]) -> None:
    kind, d_type, c_type, shape = types
    m, n, k = SHAPES[shape]
    a, b = draw(m, k, kind, 4), draw(k, n, kind, 5)
    sums = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}
    c = (100 * draw(m, n, "tf32", 6)).to(sums[c_type])
    wanted = a.double() @ b.double() + c.double()
    tolerance = {"f32": 1e-5, "f16": 2.0**-10, "s32": 0}[d_type]
    for layouts in (("row", "col", "row"), ("col", "row", "col"), ("col", "col", "row")):
        d = torch.zeros(m, n, dtype=sums[d_type])
        wmma(a, b, c, d, types, layouts)
        torch.testing.assert_close(d.double(), wanted, rtol=tolerance, atol=tolerance)


def test_integers_of_fragments_wrap_around_or_saturate() -> None:
    a, b = (torch.full((16, 16), 255, dtype=torch.uint8) for _ in range(2))
    c = torch.full((16, 16), 2**31 - 1, dtype=torch.int32)
    types = ("u8", "s32", "s32", "m16n16k16")
    for saturates, wanted in ((False, 16 * 255 * 255 - 1 - 2**31), (True, 2**31 - 1)):
        d = torch.zeros(16, 16, dtype=torch.int32)
        wmma(a, b, c, d, types, ("row", "col", "row"), saturates)
        assert (d == wanted).all()


LOAD = "wmma.load.a.sync.aligned.row.m16n16k16.f16"


@pytest.mark.parametrize(
    "lines, message",
    [
        (f"add.u64 %rd1, %rd1, 16; {LOAD} {{r}}, [%rd1], 16;", "is not aligned to 32 bytes"),
        (f"{LOAD} {{r}}, [%rd1], 12;", "a stride of 12 is not a multiple of 16 bytes"),
        (f"{LOAD} {{r}}, [%rd1], 24;", "outside of global memory"),
        (f"add.u32 %r1, %r0, 16; {LOAD} {{r}}, [%rd1], %r1;", "not the same stride"),
        ("wmma.load.a.sync.aligned.row.m16n16k8.f16 {r}, [%rd1], 16;", "unknown instruction"),
        ("wmma.load.d.sync.aligned.row.m16n16k16.f16 {r}, [%rd1], 16;", "unknown instruction"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.bf16 {r}, [%rd1], 16;", "unknown instruction"),
        (
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.s8.s8.f32 {r}, {r}, {r}, {r};",
            "unknown instruction",
        ),
        (f"setp.lt.u32 %p0, %r0, 9; @%p0 exit; {LOAD} {{r}}, [%rd1], 16;", "not all lanes"),
    ],
)
def test_fragments_that_cannot_be_are_refused(lines: str, message: str) -> None:
    text = "ld.param.u64 %rd1, [p0];" + lines.replace("{r}", names_of("%r2", 8))
    with pytest.raises(PtxError, match=message):
        run(kernel(text, 1), [torch.zeros(16, 16).half()])
