"""Statements that few kernels have: literals, policies, hints, a stack, products of other types,
maps that kernels change."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, await_phase, kernel, run

EACH = "ld.param.u64 %rd1, [p0]; add.u64 %rd1, %rd1, %rd0;"


def stored(body: str, dtype: torch.dtype = torch.int64, rows: int = LANES) -> torch.Tensor:
    """Run ``body``, where %rd1 is the address of the thread's 8 bytes; return what is there."""
    data = torch.zeros(rows * 8 // dtype.itemsize, dtype=dtype)
    run(kernel(EACH + body, 1), [data])
    return data


@pytest.mark.parametrize("literal", ["1.5", "-0.25", "2.", "1e-3", "3.5e+2", "0f3FC00000"])
def test_decimal_literals(literal: str) -> None:
    value = 1.5 if literal.startswith("0f") else float(literal)
    data = stored(f"mov.f32 %f1, {literal}; st.global.f32 [%rd1], %f1;", torch.float32)
    assert data[0] == torch.tensor(value, dtype=torch.float32)
    if not literal.startswith("0f"):
        data = stored(f"mov.f64 %fd1, {literal}; st.global.f64 [%rd1], %fd1;", torch.float64)
        assert data[0] == value


@pytest.mark.parametrize(
    "statements",
    [
        "createpolicy.fractional.L2::evict_last.b64 %rd2, 1.0;",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd2, 0.5;",
        "pmevent 7;",
        "applypriority.global.L2::evict_normal [%rd5], 128;",
        "fence.acquire.sync_restrict::shared::cluster.cluster;",
        "fence.release.sync_restrict::shared::cta.cluster;",
        "fence.proxy.tensormap::generic.release.gpu;",
        "fence.proxy.tensormap::generic.acquire.gpu [%rd5], 128;",
        "@%p2 brkpt;",
    ],
)
def test_hints_change_nothing(statements: str) -> None:
    data = torch.full((64,), 7, dtype=torch.int64)
    start = 16 - (data.data_ptr() // 8) % 16  # of a line of 128 bytes
    body = f"ld.param.u64 %rd5, [p0]; add.u64 %rd5, %rd5, {start * 8};"
    run(kernel(f"{body} setp.ne.u32 %p2, 0, 0; {statements}", 1), [data])
    assert (data == 7).all()


def test_a_breakpoint_ends_the_kernel() -> None:
    with pytest.raises(PtxError, match="a breakpoint, which ends a kernel"):
        stored("brkpt;")


def test_what_was_discarded_is_lost() -> None:
    data = torch.full((64,), 7, dtype=torch.int64)
    start = 16 - (data.data_ptr() // 8) % 16
    body = f"ld.param.u64 %rd5, [p0]; add.u64 %rd5, %rd5, {start * 8};"
    one = "setp.ne.u32 %p1, %r0, 0;"
    run(kernel(f"{body} {one} @!%p1 discard.global.L2 [%rd5], 128;", 1), [data])
    assert (data[start : start + 16] != 7).all() and int((data != 7).sum()) == 16
    with pytest.raises(PtxError, match="is not aligned to 128 bytes"):
        run(kernel(f"{body} {one} @!%p1 discard.global.L2 [%rd5+8], 128;", 1), [data])


def test_a_stack_of_the_threads_own() -> None:
    body = """
        stacksave.u64 %rd10;
        alloca.u64 %rd11, 24, 8;
        alloca.u64 %rd12, 16, 16;
        st.local.u64 [%rd11], %rd0;
        st.local.u64 [%rd12], 9;
        ld.local.u64 %rd13, [%rd11];
        ld.local.u64 %rd14, [%rd12];
        stackrestore.u64 %rd10;
        alloca.u64 %rd15, 8, 8;
        setp.eq.u64 %p1, %rd15, %rd11;
        @%p1 add.u64 %rd13, %rd13, %rd14;
        st.global.u64 [%rd1], %rd13;
    """
    assert stored(body).tolist() == [8 * lane + 9 for lane in range(LANES)]
    with pytest.raises(PtxError, match="alloca of 20000 bytes"):
        stored("alloca.u64 %rd11, 20000;")


@pytest.mark.parametrize(
    "form, dtype", [("noftz.v4.bf16x2", torch.bfloat16), ("v4.f32", torch.float32)]
)
def test_reductions_of_vectors(form: str, dtype: torch.dtype) -> None:
    one = torch.tensor([1.5, 1.5] if dtype == torch.bfloat16 else [1.5], dtype=dtype)
    bits, name = int(one.view(torch.int32)[0]), "%f1" if dtype == torch.float32 else "%r1"
    data = torch.ones(16 // dtype.itemsize + 1, dtype=dtype)
    body = f"""
        ld.param.u64 %rd1, [p0];
        mov.b32 %r1, {bits};
        mov.b32 %f1, %r1;
        red.relaxed.gpu.global.add.{form} [%rd1], {{{", ".join(4 * [name])}}};
    """
    run(kernel(body, 1), [data])
    assert (data[:-1] == 1 + 1.5 * LANES).all() and data[-1] == 1


def test_movmatrix_transposes() -> None:
    body = """
        cvt.u32.u64 %r1, %rd0;
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
        st.global.u32 [%rd1], %r2;
    """
    a = torch.zeros(8, 8, dtype=torch.int32)
    for lane in range(LANES):
        a[lane // 4, 2 * (lane % 4)] = 8 * lane  # the low half; the high one is zero
    result = stored(body, torch.int32)[::2]
    for lane in range(LANES):
        low, high = a.T[lane // 4, 2 * (lane % 4)], a.T[lane // 4, 2 * (lane % 4) + 1]
        assert int(result[lane]) == int(low) | int(high) << 16


def fragments(text: str, inputs: list[torch.Tensor], outputs: int, width: int) -> torch.Tensor:
    """Execute a product; each input is [registers, lanes] of bits.

    Returns:
        [outputs, lanes] of bits.
    """
    name = "%rd" if width == 64 else "%r"
    data = torch.zeros(sum(len(i) for i in inputs) + outputs, LANES, dtype=torch.int64)
    body = [EACH]
    row = 0
    for operand in inputs:
        data[row : row + len(operand)] = operand
        for _ in operand:
            body.append(f"ld.global.b{width} {name}{10 + row}, [%rd1+{row * LANES * 8}];")
            row += 1
    body.append(text)
    for i in range(outputs):
        body.append(f"st.global.b{width} [%rd1+{(row + i) * LANES * 8}], {name}{40 + i};")
    run(kernel("\n".join(body), 1), [data])
    return data[row:]


def registers(width: int, first: int, count: int) -> str:
    name = "%rd" if width == 64 else "%r"
    return "{" + ", ".join(f"{name}{first + i}" for i in range(count)) + "}"


@pytest.mark.parametrize("shape, rows, depth", [("m8n8k4", 8, 4), ("m16n8k16", 16, 16)])
def test_products_of_doubles(shape: str, rows: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    a = torch.randn(rows, depth, generator=generator, dtype=torch.float64)
    b = torch.randn(depth, 8, generator=generator, dtype=torch.float64)
    high, count_a, count_b = rows // 8, rows * depth // 32, depth // 4
    lane = torch.arange(LANES)
    in_a = torch.stack(
        [a[lane // 4 + 8 * (r % high), lane % 4 + 4 * (r // high)] for r in range(count_a)]
    )
    in_b = torch.stack([b[lane % 4 + 4 * r, lane // 4] for r in range(count_b)])
    in_c = torch.zeros(2 * high, LANES, dtype=torch.int64)
    text = (
        f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {registers(64, 40, 2 * high)}, "
        f"{registers(64, 10, count_a)}, {registers(64, 10 + count_a, count_b)}, "
        f"{registers(64, 10 + count_a + count_b, 2 * high)};"
    )
    inputs = [in_a.view(torch.int64), in_b.view(torch.int64), in_c]
    out = fragments(text, inputs, 2 * high, 64).view(torch.float64)
    expected = a @ b
    for r in range(2 * high):
        wanted = expected[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2]
        torch.testing.assert_close(out[r], wanted)


@pytest.mark.parametrize("action", ["and", "xor"])
def test_products_of_bits(action: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(0, 2, (16, 256), generator=generator)
    b = torch.randint(0, 2, (256, 8), generator=generator)
    weights = 1 << torch.arange(32)
    lane = torch.arange(LANES)

    def word(bits: torch.Tensor) -> torch.Tensor:
        return (bits * weights).sum(-1)

    words_a = word(a.view(16, 8, 32))  # [row, place]
    words_b = word(b.T.reshape(8, 8, 32))  # [column, place]
    in_a = torch.stack(
        [words_a[lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)] for r in range(4)]
    )
    in_b = torch.stack([words_b[lane // 4, lane % 4 + 4 * r] for r in range(2)])
    text = (
        f"mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.{action}.popc {registers(32, 40, 4)}, "
        f"{registers(32, 10, 4)}, {registers(32, 14, 2)}, {registers(32, 16, 4)};"
    )
    out = fragments(text, [in_a, in_b, torch.zeros(4, LANES, dtype=torch.int64)], 4, 32)
    pairs = a[:, :, None] & b[None] if action == "and" else a[:, :, None] ^ b[None]
    expected = pairs.sum(1)
    for r in range(4):
        assert torch.equal(out[r], expected[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2])


@pytest.mark.parametrize("selector", [0, 1])
def test_products_of_sparse_halves(selector: int) -> None:
    """m16n8k32 of f16: two of four elements of a row are kept."""
    generator = torch.Generator().manual_seed(selector)
    kept = torch.randn(16, 16, generator=generator).half()
    b = torch.randn(32, 8, generator=generator).half()
    a = torch.zeros(16, 32)
    words = torch.zeros(LANES, dtype=torch.int64)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    drawn = torch.randint(0, 6, (16, 8), generator=generator)
    for row in range(16):
        for group in range(8):
            low, high = pairs[int(drawn[row, group])]
            a[row, 4 * group + low] = kept[row, 2 * group]
            a[row, 4 * group + high] = kept[row, 2 * group + 1]
            lane = row % 8 * 4 + 2 * selector + group // 4
            words[lane] |= (low | high << 2) << (16 * (row // 8) + 4 * (group % 4))
    bits = kept.view(torch.int16).long() & 0xFFFF
    of_b = b.view(torch.int16).long() & 0xFFFF
    lane = torch.arange(LANES)

    def pair(row: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return bits[row, k] | bits[row, k + 1] << 16

    in_a = torch.stack(
        [pair(lane // 4 + 8 * (r % 2), 2 * (lane % 4) + 8 * (r // 2)) for r in range(4)]
    )
    places = [2 * (lane % 4) + 8 * r for r in range(4)]
    in_b = torch.stack([of_b[k, lane // 4] | of_b[k + 1, lane // 4] << 16 for k in places])
    text = (
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        f"{registers(32, 40, 4)}, {registers(32, 10, 4)}, {registers(32, 14, 4)}, "
        f"{registers(32, 18, 4)}, %r22, {selector};"
    )
    inputs = [in_a, in_b, torch.zeros(4, LANES, dtype=torch.int64), words[None]]
    out = fragments(text, inputs, 4, 32).to(torch.int32).view(torch.float32)
    expected = a @ b.float()
    for r in range(4):
        wanted = expected[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2]
        torch.testing.assert_close(out[r], wanted, rtol=1e-4, atol=1e-4)


# -- tensor maps -----------------------------------------------------------------------------------

LOAD = f"""
    .shared .align 128 .b8 memory[1024];
    mov.u32 %r1, memory;
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    add.u64 %rd3, %rd1, %rd0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    {{change}}
    mbarrier.init.shared::cta.b64 [%r1+512], 1;
    fence.proxy.async;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+512], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd2, {{{{0, 0}}}}], [%r1+512];
    {await_phase("%r1+512", 0, "WAIT")}
    ld.shared.v4.u32 {{{{%r2, %r3, %r4, %r5}}}}, [%r1];
    st.global.v4.u32 [%rd1], {{{{%r2, %r3, %r4, %r5}}}};
END:
"""

MAP_FENCES = """
    fence.proxy.tensormap::generic.release.gpu;
    fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
"""


def loaded(matrix: torch.Tensor, change: str = "", spoil: int = 0) -> torch.Tensor:
    """Load a box of 8 x 4 by a map that lies in global memory; return its first row."""
    device = Device()
    text = bytearray(device.tensor_map(matrix, box=[8, 4]))
    text[10] ^= spoil
    placed = torch.zeros(256, dtype=torch.uint8)
    start = -placed.data_ptr() % 64
    placed[start : start + 128] = torch.frombuffer(text, dtype=torch.uint8)
    out = torch.zeros(64, dtype=torch.float32)
    device.register(placed)
    module = Module(kernel(LOAD.format(change=change), 2))
    device.launch(module, "k", grid=1, block=32, args=[out, placed.data_ptr() + start])
    return out[:4]


def test_a_bit_that_is_the_drivers() -> None:
    """CUTLASS clears bit 21 of the second word of a map for older drivers."""
    matrix = torch.arange(64, dtype=torch.float32).view(16, 4)
    assert loaded(matrix, spoil=0x20).tolist() == [0, 1, 2, 3]
    with pytest.raises(PtxError, match="changed since it was encoded"):
        loaded(matrix, "st.global.u8 [%rd2+9], 7;")


def test_a_map_that_a_kernel_changes() -> None:
    matrix, other = (torch.arange(64, dtype=torch.float32).view(16, 4) + i for i in (0, 100))
    change = f"""
        mov.u64 %rd4, {other.data_ptr()};
        tensormap.replace.tile.global_address.global.b1024.b64 [%rd2], %rd4;
        tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 1, 2;
        {MAP_FENCES}
    """
    with pytest.raises(PtxError, match="outside of global memory"):
        loaded(matrix, change)
    with pytest.raises(PtxError, match=r"tensormap.replace: box 0"):
        loaded(matrix, "tensormap.replace.tile.box_dim.global.b1024.b32 [%rd2], 0, 0;")
    change = "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 0, 2;"
    assert loaded(matrix, change + MAP_FENCES).tolist() == [0, 1, 0, 0]


def test_tf32_maps_round() -> None:
    matrix = torch.full((16, 4), 1 + 2**-11)  # half of a unit of TF32: away from zero
    change = "tensormap.replace.tile.elemtype.global.b1024.b32 [%rd2], 11;"
    assert loaded(matrix).tolist() == [1 + 2**-11] * 4
    assert loaded(matrix, change + MAP_FENCES).tolist() == [1 + 2**-10] * 4
