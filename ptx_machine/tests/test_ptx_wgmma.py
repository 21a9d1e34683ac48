"""wgmma of the PTX machine: layouts and types against torch, asynchrony, and forbidden uses."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
from wgmma_text import DTYPES, Product, Tile, execute

FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def draw(rows: int, depth: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[kind]
    if kind in ("s8", "u8"):
        info = torch.iinfo(dtype)
        values = torch.randint(info.min, info.max + 1, (rows, depth), generator=generator)
        return values.to(dtype)
    values = torch.randn(rows, depth, generator=generator)
    if kind == "tf32":  # ten bits of fraction
        return (values.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return values.to(dtype)


def operands(p: Product, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = draw(64, p.k, p.a_type, seed), draw(p.n, p.k, p.b_type, seed + 1)
    d = draw(64, p.n, "tf32", seed + 2)
    if p.d_type == "s32":
        d = torch.randint(-(2**31), 2**31, d.shape).to(torch.int32)
    return a, b, d.half() if p.d_type == "f16" else d


def check(p: Product, seed: int = 0, **options: object) -> None:
    a, b, d = operands(p, seed)
    result = execute(p, a, b, d, **options)  # type: ignore[arg-type]
    sign = p.scales[0] * p.scales[1]
    wanted = sign * (a.double() @ b.double().t()) + d.double() * int(p.scale_d)
    if p.size == 1 and p.d_type != "s32":
        wanted = cut_sums(sign * a.double().unsqueeze(1) * b.double(), d.double() * int(p.scale_d))
    if p.d_type == "s32":
        exact = wanted.to(torch.int64)
        if p.saturates:
            exact = exact.clamp(-(2**31), 2**31 - 1)
        assert torch.equal(result, ((exact + 2**31) % 2**32 - 2**31).to(torch.int32))
        return
    tolerance = 2.0**-11 if p.d_type == "f16" else 1e-5
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


def cut_sums(products: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return d + sums of products [64, n, 32], of whose bits float8 keeps 13 below the largest."""
    terms = torch.cat([products, d.unsqueeze(-1)], dim=-1)
    _, exponents = torch.frexp(terms.abs().amax(dim=-1))  # of fractions from 0.5 to 1
    unit = torch.ldexp(torch.ones_like(d), exponents - 14)
    return torch.trunc(terms / unit.unsqueeze(-1)).sum(dim=-1) * unit


def test_float8_forgets_small_products_beside_a_large_sum() -> None:
    """As on an H100; not what is left of special values."""
    p = Product(8, "e4m3")
    a, b = torch.ones(64, 32).to(DTYPES["e4m3"]), torch.ones(8, 32).to(DTYPES["e4m3"])
    d = torch.full((64, 8), 8192.0)
    assert (execute(p, a, b, d) == 8192 + 32).all()
    assert (execute(p, a, b, 2 * d) == 16384).all()
    assert (execute(p, a, b, -2 * d) == -16384).all()
    assert execute(p, a, b, torch.full_like(d, float("inf"))).isinf().all()
    a[3, 5] = float("nan")
    assert execute(p, a, b, d).isnan().sum(dim=1).tolist() == [8 * (row == 3) for row in range(64)]


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    check(Product(n), seed=n)


TYPES = [
    *(("f16", "f16", d) for d in ("f32", "f16")),
    ("bf16", "bf16", "f32"),
    ("tf32", "tf32", "f32"),
    *((a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f32", "f16")),
    *((a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")),
]


@pytest.mark.parametrize("where", ["shared", "registers"])
@pytest.mark.parametrize("a, b, d", TYPES)
def test_every_type(a: str, b: str, d: str, where: str) -> None:
    check(Product(48, a, b, d, a=Tile(0) if where == "shared" else None))


def test_sums_of_integers_wrap_around_or_saturate() -> None:
    for saturates in (False, True):
        p = Product(16, "u8", "u8", "s32", saturates=saturates)
        a, b = (torch.full((rows, 32), 255, dtype=torch.uint8) for rows in (64, 16))
        d = torch.full((64, 16), 2**31 - 5, dtype=torch.int32)
        result = execute(p, a, b, d)
        total = 2**31 - 5 + 32 * 255 * 255
        assert set(result.flatten().tolist()) == {2**31 - 1 if saturates else total - 2**32}


def tiles(swizzle: int, is_mn_major: bool, start: int) -> Tile:
    """Return a tile whose strides are not those of dense rows, so that each of them is seen."""
    if is_mn_major:
        if swizzle == 0:
            return Tile(start, leading=128, stride=256 + 16, is_mn_major=True)
        return Tile(start, 16 * swizzle, 8 * swizzle, swizzle, is_mn_major=True)
    if swizzle == 0:
        return Tile(start, leading=128, stride=256 + 16)
    return Tile(start, 16, 8 * swizzle, swizzle)


@pytest.mark.parametrize("is_mn_major", [False, True], ids=["K-major", "MN-major"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_every_layout(swizzle: int, is_mn_major: bool) -> None:
    check(Product(64, a=tiles(swizzle, is_mn_major, 1024), b=Tile(16384)))
    check(Product(192, b=tiles(swizzle, is_mn_major, 8192)))
    check(Product(64, "f16", a=tiles(swizzle, is_mn_major, 0), b=tiles(128, True, 16384)))


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_layouts_of_other_types(kind: str, swizzle: int) -> None:
    a, b = tiles(swizzle, False, 0), tiles(swizzle, False, 16384)
    check(Product(64, kind, d_type="s32" if kind == "s8" else "f32", a=a, b=b))


def test_a_tile_may_begin_inside_of_the_pattern() -> None:
    """Kernels step along K by 32 bytes of a row of 128."""
    for step in range(4):
        start = 8192 + 32 * step
        check(Product(64, b=Tile(start, 16, 1024, 128)), seed=step)


def test_the_base_offset_says_where_the_pattern_begins() -> None:
    for rows in range(1, 8):
        check(Product(8, b=Tile(8192 + 128 * rows, 16, 1024, 128, base_offset=rows)), seed=rows)


@pytest.mark.parametrize("scales", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("scale_d", ["0", "1"])
def test_scales(scales: tuple[int, int], scale_d: str) -> None:
    check(Product(24, scales=scales, scale_d=scale_d))


def test_without_d_it_may_be_anything() -> None:
    p = Product(16)
    a, b, d = operands(p)
    statement = p.statement(first=64, scale_d="%p2")
    body = f"setp.ne.u32 %p2, 0, 0; {FENCE} {statement} {COMMIT} {WAIT}"
    moves = " ".join(f"mov.f32 %d{i}, %d{64 + i};" for i in range(p.registers))
    result = execute(p, a, b, d, body + moves)
    wanted = a.double() @ b.double().t()
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(PtxError, match=r"register %d64 is read but was never written"):
        execute(p, a, b, d, body.replace("ne.u32", "eq.u32") + moves)


@pytest.mark.parametrize("seed", range(4))
def test_products_accumulate_in_order(seed: int) -> None:
    """Groups overlap; two warpgroups and four blocks do the same."""
    p = Product(32)
    a, b, d = operands(p, seed)
    body = FENCE + (p.statement() * 2 + COMMIT) * 3 + "wgmma.wait_group.sync.aligned 1;"
    result = execute(p, a, b, d, body + WAIT, seed=seed)
    wanted = 6 * (a.double() @ b.double().t()) + d.double()
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-4)


def test_shared_memory_is_read_late_or_with_a_seed_at_any_time() -> None:
    """A kernel that writes to B too early gets another result."""
    p = Product(8)
    a, b, d = operands(p)
    clear = "".join(f"st.shared.b32 [%r6+{8192 + 512 * i}], 0;" for i in range(1))
    body = f"""
        {FENCE} {p.statement()} {COMMIT}
        bar.sync 0;
        shl.b32 %r6, %r0, 2;
        {"add.u32 %r7, %r6, 1;" * 20}
        {clear}
        bar.sync 0;
        {WAIT}
    """
    old = a.double() @ b.double().t() + d.double()
    late = execute(p, a, b, d, body, races=False)
    assert torch.equal(late, d)  # B was zero by then
    rows = [
        [torch.allclose(part.double(), want.double(), atol=1e-4)
         for part, want in zip(execute(p, a, b, d, body, seed=s, races=False).split(16),
                               old.split(16), strict=True)]
        for s in range(1, 6)
    ]  # fmt: skip
    performed_early = [early for of_seed in rows for early in of_seed]
    assert any(performed_early) and not all(performed_early)


# -- what must not be done -------------------------------------------------------------------------


def fails(body: str, why: str, p: Product | None = None, **options: object) -> str:
    p = p or Product(16)
    with pytest.raises(PtxError, match=why) as raised:
        execute(p, *operands(p), body, **options)  # type: ignore[arg-type]
    return str(raised.value)


ONE = Product(16).statement()


@pytest.mark.parametrize("touch", ["add.f32 %f1, %d3, %d3;", "mov.f32 %d3, 0f00000000;"])
def test_accumulators_in_flight_are_not_touched(touch: str) -> None:
    text = fails(
        f"{FENCE} {ONE} {COMMIT} {touch} {WAIT}",
        r"register %d3 is an accumulator of a product that has not been waited for \(k, PTX line",
    )
    assert touch.split()[0] in text and "wgmma.mma_async" in text


def test_an_older_group_may_be_read_only_after_its_own_wait() -> None:
    p = Product(16)
    two = f"{FENCE} {ONE} {COMMIT} {p.statement(first=64, scale_d='0')} {COMMIT}"
    read = "add.f32 %f1, %d3, %d3;"
    fails(f"{two} wgmma.wait_group.sync.aligned 2; {read} {WAIT}", "register %d3 is an accumulator")
    check(p, body=f"{two} wgmma.wait_group.sync.aligned 1; {read} {WAIT}")
    fails(
        f"{two} wgmma.wait_group.sync.aligned 1; {read} add.f32 %f2, %d64, %d64; {WAIT}",
        "register %d64 is an accumulator",
    )


def test_products_that_were_not_committed_are_not_waited_for() -> None:
    fails(f"{FENCE} {ONE} {WAIT}", "register %d0 is an accumulator")


def test_parts_of_a_in_flight_are_not_touched() -> None:
    p = Product(16, a=None)
    body = f"{FENCE} {p.statement()} {COMMIT} mov.b32 %a2, 0; {WAIT}"
    fails(body, "register %a2 is a part of A of a product that has not been waited for", p)


def test_fences() -> None:
    done = f"{COMMIT} {WAIT}"
    fails(f"{ONE} {done}", "there is no wgmma.fence before the first product")
    changed = "mov.f32 %d5, 0f3F800000;"
    why = r"register %d5 was accessed by another instruction since the last wgmma.fence"
    fails(f"{FENCE} {changed} {ONE} {done}", why)
    fails(f"{FENCE} {ONE} {done} {changed} {ONE} {done}", why)
    execute(
        Product(16), *operands(Product(16)), f"{FENCE} {ONE} {done} {changed} {FENCE} {ONE} {done}"
    )
    p = Product(16, a=None)
    fails(
        f"{FENCE} mov.b32 %a1, 0; {p.statement()} {done}",
        "register %a1 was accessed by another instruction since the last wgmma.fence",
        p,
    )


def test_products_of_another_shape_need_a_fence() -> None:
    narrow = Product(8).statement()
    done = f"{COMMIT} {WAIT}"
    fails(f"{FENCE} {ONE} {narrow} {done}", "an accumulator of a product of another shape")
    execute(Product(16), *operands(Product(16)), f"{FENCE} {ONE} {FENCE} {narrow} {done}")


def test_an_accumulator_in_flight_is_no_part_of_a() -> None:
    p = Product(16, a=None)
    second = p.statement(first=64, a="{%d0, %d1, %d2, %d3}", scale_d="0")
    fails(f"{FENCE} {p.statement()} {second} {COMMIT} {WAIT}", "register %d0 is an accumulator", p)


def test_all_warps_of_a_warpgroup_take_part() -> None:
    some = f"setp.lt.u32 %p2, %r0, 96; @!%p2 bra END; {FENCE} {ONE} {COMMIT} {WAIT} END:"
    text = fails(some, "has ended without this statement")
    assert "warp 3" in text and "wgmma.fence" in text
    other = f"""
        setp.lt.u32 %p2, %r0, 32;
        {FENCE}
        @%p2 bra FIRST;
        {ONE}
        bra BOTH;
    FIRST:
        {ONE}
    BOTH:
        {COMMIT} {WAIT}
    """
    fails(other, r"warp \d of the warpgroup executed instead: k, PTX line")
    done = f"{COMMIT} {WAIT}"
    shifted = f"setp.lt.u32 %p2, %r0, 32; @%p2 add.u64 %rd41, %rd41, 1; {FENCE} {ONE} {done}"
    fails(shifted, r"warp \d of the warpgroup had other descriptors")
    apart = f"setp.lt.u32 %p2, %r0, 32; {FENCE} {Product(16).statement(scale_d='%p2')}"
    fails(apart + done, r"warp \d of the warpgroup had another value of scale-d")
    fails(f"{FENCE}", "the block has no four warps from warp 0 on", block=96)


def test_all_lanes_of_a_warp_take_part() -> None:
    fails(f"setp.eq.u32 %p2, %r0, 3; @%p2 {FENCE}", "deadlock|not all lanes of the warp take part")
    different = f"setp.eq.u32 %p2, %r0, 3; @%p2 add.u64 %rd41, %rd41, 1; {FENCE} {ONE}"
    fails(different + COMMIT + WAIT, "lanes of the warp have different descriptors")
    different = f"setp.eq.u32 %p2, %r0, 3; {FENCE} {Product(16).statement(scale_d='%p2')}"
    fails(different + COMMIT + WAIT, "lanes of the warp have different values of scale-d")


def test_memory_of_a_product_is_free_after_a_wait() -> None:
    """Each warp reads 16 rows of A, and the whole of B."""
    p = Product(16)
    for address, readers in ((1024, "warp 2"), (8192, "warp 0")):
        write = f"setp.eq.u32 %p2, %r0, 96; mov.u32 %r6, {address}; @%p2 st.shared.u32 [%r6], %r0;"
        begin = f"{FENCE} {ONE} {COMMIT}"
        text = fails(f"{begin} bar.sync 1; {write} {WAIT}", "missing is wgmma.wait_group", p)
        assert f"the asynchronous read by {readers} of block" in text
        check(p, body=f"{begin} {WAIT} {write}")


def test_a_descriptor_stays_in_shared_memory() -> None:
    p = Product(64, b=Tile(16384 - 1024))
    body = f"mov.b64 %rd41, {Tile(32768 - 1024).descriptor()}; {FENCE} {p.statement()}"
    fails(f"{body} {COMMIT} {WAIT}", "leads to address 32768 of shared memory, which has 32768", p)


@pytest.mark.parametrize(
    "old, new",
    [
        ("m64n16k16", "m64n12k16"),
        ("m64n16k16", "m64n264k16"),
        ("m64n16k16", "m64n16k8"),
        ("m64n16k16", "m64n16k16.satfinite"),
        ("f32.bf16.bf16", "f16.bf16.bf16"),
        ("f32.bf16.bf16", "f32.bf16.f16"),
        ("f32.bf16.bf16", "f32.e4m3.bf16"),
        (".aligned", ""),
        ("%d7}", "%d7, %d8}"),
        (", 1, 1, 0, 0;", ", 1, 1;"),
        (", 1, 1, 0, 0;", ", 2, 1, 0, 0;"),
        (", 1, 1, 0, 0;", ", 1, 1, 0, 2;"),
        ("mma_async", "mma_async.sp"),
    ],
)
def test_what_is_not_a_statement_of_wgmma_is_not_known(old: str, new: str) -> None:
    assert old in ONE
    fails(FENCE + ONE.replace(old, new), "unknown instruction")
