"""TMA on the PTX machine: boxes of tensors between global and shared memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, await_phase, kernel

SEEDS = range(3)
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
LOADED = "shared::cluster.global.tile.mbarrier::complete_tx::bytes"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
BYTES = 16384  # of shared memory for data
# %rd10, %rd11: the tensor maps; %r1: shared memory: an mbarrier for one arrival, and data from 1024
# on; %r2: rank in the cluster. Only the first thread of a block goes on.
BEGIN = f"""
    .shared .align 1024 .b8 memory[{1024 + BYTES}];
    mov.u32 %r1, memory;
    mov.u32 %r2, %cluster_ctarank;
    ld.param.u64 %rd1, [p0];
    mov.b64 %rd10, m0;
    cvta.param.u64 %rd10, %rd10;
    mov.b64 %rd11, m1;
    cvta.param.u64 %rd11, %rd11;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    prefetch.tensormap [%rd10];
    mbarrier.init.shared::cta.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
READY:
    {SYNC}
    @%p1 bra END;
"""


def launch(body: str, first: object, second: object, raw: torch.Tensor, **options: object) -> None:
    """Run ``body`` with tensor maps, given as tuples (tensor, keywords of ``tensor_map``)."""
    device = Device()
    maps = [m if isinstance(m, bytes) else device.tensor_map(m[0], **m[1]) for m in (first, second)]
    # Shared memory is looked at as a whole, with what was never written.
    settings: dict[str, object] = {"grid": 1, "block": LANES, "races": False, **options}
    text = f"{BEGIN} {body} END: {SYNC}"
    device.launch(Module(kernel(text, 1, maps=2)), "k", args=[raw, *maps], **settings)


def at(coordinates: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(c) for c in coordinates) + "}"


def load(box: tuple[int, ...], width: int, coordinates: tuple[int, ...]) -> str:
    """Return a load of a box, given in the tensor's order, and the wait for it."""
    size = torch.Size(box).numel() * width
    rank = len(box)
    return f"""
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {size};
        cp.async.bulk.tensor.{rank}d.{LOADED} [%r1+1024], [%rd10, {at(coordinates[::-1])}], [%r1];
        {await_phase("%r1", 0, "FULL")}
    """


RAW = f"""
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1+1024], {BYTES};
    {DONE}
"""  # the data of shared memory as it is


def boxed(
    tensor: torch.Tensor, box: tuple[int, ...], coordinates: tuple[int, ...], outside: float = 0
) -> torch.Tensor:
    """Return a box of a tensor, element by element."""
    result = torch.full(box, outside, dtype=tensor.dtype)
    for index in itertools.product(*(range(size) for size in box)):
        place = [c + i for c, i in zip(coordinates, index, strict=True)]
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            result[index] = tensor[tuple(place)]
    return result


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of which no two elements nearby are the same."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 37 + 5) % 127).to(dtype).view(shape)


SHAPES = [
    ((70,), (32,), (13,)),
    ((20, 24), (8, 16), (4, 8)),
    ((3, 20, 16), (2, 8, 8), (1, 16, 4)),
    ((2, 3, 7, 16), (2, 2, 3, 8), (0, 2, 5, 12)),
    ((2, 2, 3, 5, 16), (1, 2, 2, 3, 8), (1, 0, 2, 3, -4)),
]  # tensor, box, coordinates; the last boxes reach beyond their tensors


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape, box, coordinates", SHAPES, ids=["1d", "2d", "3d", "4d", "5d"])
def test_boxes_are_loaded(
    shape: tuple[int, ...], box: tuple[int, ...], coordinates: tuple[int, ...], seed: int
) -> None:
    tensor = filled(shape, torch.float32)
    raw = torch.zeros(BYTES // 4)
    inputs = (tensor, {"box": box})
    launch(load(box, 4, coordinates) + RAW, inputs, inputs, raw, seed=seed)
    count = torch.Size(box).numel()
    assert torch.equal(raw[:count].view(box), boxed(tensor, box, coordinates))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape, box, coordinates", SHAPES, ids=["1d", "2d", "3d", "4d", "5d"])
def test_boxes_are_stored(
    shape: tuple[int, ...], box: tuple[int, ...], coordinates: tuple[int, ...], seed: int
) -> None:
    """A box that was loaded is stored elsewhere in another tensor; nothing else changes there."""
    source, target = filled(shape, torch.float32), -filled(shape, torch.float32) - 1
    # Beyond the end of the outermost dimension.
    expected, corner = (
        target.clone(),
        tuple(shape[0] - 1 if i == 0 else 0 for i in range(len(shape))),
    )
    loaded = boxed(source, box, coordinates)
    for index in itertools.product(*(range(size) for size in box)):
        place = tuple(c + i for c, i in zip(corner, index, strict=True))
        if all(0 <= p < size for p, size in zip(place, shape, strict=True)):
            expected[place] = loaded[index]
    body = f"""
        {load(box, 4, coordinates)}
        cp.async.bulk.tensor.{len(shape)}d.global.shared::cta.tile.bulk_group
            [%rd11, {at(corner[::-1])}], [%r1+1024];
        {DONE}
    """
    maps = [(t, {"box": box}) for t in (source, target)]
    launch(body, *maps, torch.zeros(BYTES // 4), seed=seed)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("corner", [(-1, 0), (0, -1)])
@pytest.mark.parametrize("how", ["cp.async", "cp.reduce.async"])
def test_a_store_has_no_negative_corner(corner: tuple[int, int], how: str) -> None:
    """Loads may have one: what lies outside is zero."""
    add = "" if how == "cp.async" else ".add"
    tensor, box = filled((8, 8), torch.float32), (4, 4)
    body = f"""
        {load(box, 4, corner)}
        {how}.bulk.tensor.2d.global.shared::cta{add}.tile.bulk_group
            [%rd11, {at(corner[::-1])}], [%r1+1024];
        {DONE}
    """
    maps = [(t, {"box": box}) for t in (tensor, tensor.clone())]
    with pytest.raises(PtxError, match="a store begins at the negative coordinate -1 of dimension"):
        launch(body, *maps, torch.zeros(BYTES // 4))


def swizzled(packed: torch.Tensor, span: int) -> torch.Tensor:
    """Return bytes as a swizzle lays them.

    In a line of 128 bytes, line l, chunk c of 16 bytes is at c ^ (l modulo the chunks of a span).
    """
    chunks = packed.view(-1, 8, 16)  # [line, chunk, byte]
    result = torch.empty_like(chunks)
    for line in range(chunks.shape[0]):
        for chunk in range(8):
            result[line, chunk ^ (line % (span // 16))] = chunks[line, chunk]
    return result.view(-1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_swizzles(span: int, dtype: torch.dtype, seed: int) -> None:
    width = dtype.itemsize
    row = (span or 64) // width
    tensor = filled((40, 3 * row), dtype)
    target, raw = torch.zeros_like(tensor), torch.zeros(BYTES, dtype=torch.uint8)
    box = (24, row)
    body = f"""
        {load(box, width, (5, row))}
        {RAW}
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd11, {{{row}, 5}}], [%r1+1024];
        {DONE}
    """
    launch(body, *((t, {"box": box, "swizzle": span}) for t in (tensor, target)), raw, seed=seed)
    packed = tensor[5:29, row : 2 * row].contiguous().view(torch.uint8).flatten()
    expected = swizzled(packed, span) if span else packed
    assert torch.equal(raw[: packed.numel()], expected)
    assert torch.equal(target[5:29, row : 2 * row], tensor[5:29, row : 2 * row])
    assert target.count_nonzero() == tensor[5:29, row : 2 * row].count_nonzero()


@pytest.mark.parametrize("seed", SEEDS)
def test_boxes_go_to_all_blocks_of_a_cluster(seed: int) -> None:
    """Each of two blocks loads half of a tile for both."""
    tensor = filled((16, 64), torch.float16)
    target = torch.zeros(32, 64, dtype=torch.float16)
    body = f"""
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 2048;
        mov.u16 %h1, 3;
        mov.u64 %rd5, 0;
        shl.b32 %r3, %r2, 3;
        shl.b32 %r4, %r2, 10;
        add.u32 %r4, %r4, %r1;
        cp.async.bulk.tensor.2d.{LOADED}.multicast::cluster.L2::cache_hint
            [%r4+1024], [%rd10, {{0, %r3}}], [%r1], %h1, %rd5;
        {await_phase("%r1", 0, "FULL")}
        shl.b32 %r3, %r2, 4;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd11, {{0, %r3}}], [%r1+1024];
        add.u32 %r3, %r3, 8;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint
            [%rd11, {{0, %r3}}], [%r1+2048], %rd5;
        {DONE}
    """
    maps = [(t, {"box": (8, 64), "swizzle": 128}) for t in (tensor, target)]
    launch(body, *maps, torch.zeros(8), grid=2, cluster=2, seed=seed)
    assert torch.equal(target, torch.cat([tensor, tensor]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "action, dtype, name",
    [
        ("add", torch.float32, None),
        ("add", torch.bfloat16, None),
        ("add", torch.int32, None),
        ("min", torch.float16, None),
        ("max", torch.int64, None),
        ("inc", torch.int32, "uint32"),
        ("dec", torch.int32, "uint32"),
        ("and", torch.int32, "uint32"),
        ("or", torch.int32, "uint32"),
        ("xor", torch.int64, "uint64"),
    ],
)
def test_boxes_are_reduced(action: str, dtype: torch.dtype, name: str | None, seed: int) -> None:
    """The last two columns and rows of the box are outside of the tensor."""
    source, target = filled((8, 16), dtype), filled((10, 14 + 2), dtype).flip(0).contiguous()
    before = target.clone()
    view = target[:, :14]
    body = f"""
        {load((8, 16), dtype.itemsize, (0, 0))}
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.{action}.bulk_group
            [%rd11, {{0, 4}}], [%r1+1024];
        {DONE}
    """
    options = {"box": (8, 16), **({"element": name} if name else {})}
    launch(body, (source, options), (view, options), torch.zeros(8), seed=seed)
    old, by = before[4:10, :14], source[:6, :14]
    expected = {
        "add": lambda: old + by,
        "min": lambda: torch.minimum(old, by),
        "max": lambda: torch.maximum(old, by),
        "and": lambda: old & by,
        "or": lambda: old | by,
        "xor": lambda: old ^ by,
        "inc": lambda: torch.where(old >= by, 0, old + 1),
        "dec": lambda: torch.where((old == 0) | (old > by), by, old - 1),
    }
    before[4:10, :14] = expected[action]().to(dtype)
    assert torch.equal(target, before)


def test_elements_are_skipped_and_outside_is_nan() -> None:
    """Every second row and every third plane of a box are copied; what is outside becomes NaN."""
    tensor = filled((7, 9, 8), torch.float32)
    raw = torch.zeros(BYTES // 4)
    inputs = (tensor, {"box": (6, 8, 8), "steps": (3, 2, 1), "fill_nan": True})
    launch(load((2, 4, 8), 4, (4, 3, 2)) + RAW, inputs, inputs, raw)
    whole = boxed(tensor, (6, 8, 8), (4, 3, 2), outside=float("nan"))
    expected = whole[::3, ::2]
    assert torch.equal(raw[: 2 * 4 * 8].view(2, 4, 8).isnan(), expected.isnan())
    assert torch.equal(raw[: 2 * 4 * 8].view(2, 4, 8).nan_to_num(), expected.nan_to_num())
    assert expected.isnan().any()


# -- errors ----------------------------------------------------------------------------------------

TENSOR = filled((16, 32), torch.float32)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"box": (8, 6)}, "24 bytes, no multiple of 16"),
        ({"box": (8, 16), "swizzle": 32}, "64 bytes, more than the swizzle's 32"),
        ({"box": (257, 8)}, "box 257 of dimension 1"),
        ({"box": (0, 8)}, "box 0 of dimension 1"),
        ({"box": (8, 8), "steps": (9, 1)}, "element stride 9 of dimension 1"),
        ({"box": (8, 8), "swizzle": 7}, "swizzle 7"),
        ({"box": (8, 8), "interleave": 1}, "interleave with less than three dimensions"),
        ({"box": (8, 8), "swizzle": 128}, "shorter than the swizzle"),
    ],
)
def test_maps_that_the_driver_refuses(options: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Device().tensor_map(TENSOR, **options)


def test_memory_that_the_driver_refuses() -> None:
    with pytest.raises(ValueError, match="global address is not aligned to 16"):
        Device().tensor_map(TENSOR[:, 1:], box=(8, 8))
    with pytest.raises(ValueError, match="stride 36 of dimension 1"):
        Device().tensor_map(torch.zeros(4, 9), box=(4, 4))
    with pytest.raises(ValueError, match="NaN fill"):
        Device().tensor_map(torch.zeros(4, 8, dtype=torch.int32), box=(4, 4), fill_nan=True)
    with pytest.raises(ValueError, match="interleave"):
        Device().tensor_map(torch.zeros(2, 4, 8), box=(1, 4, 4), interleave=1)


LOAD = f"cp.async.bulk.tensor.2d.{LOADED}"
WAIT = await_phase("%r1", 0, "W")


@pytest.mark.parametrize(
    "body, error",
    [
        (f"{LOAD} [%r1+1040], [%rd10, {{0, 0}}], [%r1];", "not aligned to 128 bytes"),
        (f"{LOAD} [%r1+1024], [%rd1, {{0, 0}}], [%r1];", "no tensor map has been encoded"),
        (
            f"add.s64 %rd10, %rd10, 8; {LOAD} [%r1+1024], [%rd10, {{0, 0}}], [%r1];",
            "not aligned to 64",
        ),
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%r1+1024], [%rd10, {0, 0, 0}], [%r1];",
            "a tensor map of 2 dimensions for a copy of 3",
        ),
        (
            f"{LOAD} [%r1+{1024 + BYTES - 128}], [%rd10, {{0, 0}}], [%r1];",
            "of shared memory, which has",
        ),
        (f"{LOAD} [%r1+1024], [%rd10, {{0, 0}}], [%r1]; {WAIT}", "deadlock"),
        (
            f"{LOAD} [%r1+1024], [%rd10, {{0, 0}}], [%r1];",
            "ended while its shared memory is still written",
        ),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {0, 0}], [%r1+1024];",
            "ended while its shared memory is still read",
        ),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.and.bulk_group"
            " [%rd10, {0, 0}], [%r1+1024];",
            "no such reduction of the type",
        ),
        (f"{LOAD}.cta_group::2 [%r1+1024], [%rd10, {{0, 0}}], [%r1];", "unknown instruction"),
        (f"{LOAD} [%r1+1024], [%rd10, {{0, 0, 0}}], [%r1];", "unknown instruction"),
        (LOAD.replace("tile", "im2col") + " [%r1+1024], [%rd10, {0, 0}], [%r1];", "unknown instr"),
    ],
)
def test_misuse_of_tensor_copies_fails(body: str, error: str) -> None:
    inputs = (TENSOR, {"box": (8, 16)})
    with pytest.raises(PtxError, match=error):
        launch(body, inputs, inputs, torch.zeros(64))


def test_a_map_may_not_be_changed_and_its_tensor_not_be_gone() -> None:
    device = Device()
    tensor = torch.zeros(16, 32)
    made = bytearray(device.tensor_map(tensor, box=(8, 16)))
    body = f"{LOAD} [%r1+1024], [%rd10, {{0, 0}}], [%r1]; {WAIT}"
    with pytest.raises(PtxError, match=r"outside of global memory(.|\n)*started"):
        launch(body, bytes(made), bytes(made), torch.zeros(64))  # by a device that does not know it
    made[20] ^= 1
    with pytest.raises(PtxError, match="changed since it was encoded"):
        launch(body, bytes(made), bytes(made), torch.zeros(64))
