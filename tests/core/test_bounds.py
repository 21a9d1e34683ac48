"""No schedule addresses anything outside of the memory that its op has, whatever made the schedule.

Thousands of drawn ops, topologies, knobs and M up to 2^24. Nothing runs: sizes are compared. What
does not fit all the same is refused before the call begins.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from flux import _C, Knobs, TileSchedule, Topology, make_schedule
from flux.backends.cpu.slabs import SegmentLayout
from flux.core.knobs import ClusterTile, Direction, Op, Order, check_legal
from flux.core.layout import Layout
from flux.core.problem import Problem, name_of
from flux.core.spec import FP8, OpSpec
from flux.machine.cluster import load_cluster
from flux.select.choose import Choice, Fixed, Tuned, _one_kernel, modelled
from flux.select.heuristic import Sizes, most_comm_tiles, resolve
from flux.select.winners import Entry, Key, Winner, tile_count
from harness import STRESS

MAX_M = 1 << 24
CASES = 2000 * STRESS
HOSTS = (
    "ab",
    "aab",
    "abb",
    "aaab",
    "aabb",
    "abab",
    "abc",
    "abcab",
    "aabbccdd",
    "aaaaaaab",
    "abaca",
)
TOPOLOGIES = (
    *(Topology.flat(world) for world in (2, 3, 4, 8, 24)),
    *(
        Topology(*mesh)
        for mesh in ((2, 1, 2), (1, 2, 2), (2, 2, 1), (3, 1, 2), (4, 2, 4), (16, 1, 8))
    ),
    *(Topology.of_hosts(hosts) for hosts in HOSTS),
)
KEY = Key("gemm_rs", "float32", 8, 8, "1x2", "0123456789abcdef", "cpu 0.1.0 r1", "torch 2.13")


def some_size(rng: random.Random, most: int) -> int:
    """A number up to ``most``; small ones, powers of two and their neighbours are as likely."""
    size = int(2 ** rng.uniform(0, (most + 1).bit_length() - 1))
    return min(most, max(1, rng.choice((size, 1 << size.bit_length())) + rng.choice((-1, 0, 1))))


def some_knobs(rng: random.Random, topology: Topology) -> Knobs:
    def maybe(*values: Any) -> Any:
        return rng.choice((None, *values))

    power = not topology.world & (topology.world - 1)
    return Knobs(
        path=rng.choice(("fused", "fused", "medium", "unfused")),
        tile=maybe((some_size(rng, MAX_M), 1 << 14), (some_size(rng, 4096), 1 << 14)),
        comm_tile_rows=maybe(some_size(rng, MAX_M), some_size(rng, 4096)),
        direction=maybe("push", "pull"),
        order=maybe(*(order.name for order in Order)),
        swizzle=maybe("none", "rank_shift", *(("xor",) if power else ())),
        store=maybe("direct", "staged"),
    )


def some_choice(rng: random.Random, spec: OpSpec, topology: Topology) -> Choice:
    kind = rng.choice(("fixed", "fixed", "default", "modelled", "tuned"))
    if kind in ("fixed", "default"):
        return Fixed(some_knobs(rng, topology) if kind == "fixed" else Knobs())
    if kind == "modelled":
        sizes = spec.max_m, sum(spec.n), spec.k, name_of(spec.dtype)
        experts, apart = rng.choice((1, 1, 4)), topology.nodes > 1
        problem = Problem(spec.op, *sizes, topology.world, topology.nodes, experts=experts)
        return modelled(problem, CPU, apart and rng.random() < 0.7)
    sizes = sorted({some_size(rng, MAX_M) for _ in range(3)})
    winners = tuple(Winner(m, some_knobs(rng, topology), 1.0) for m in sizes)
    # Knobs that no schedule is possible with are replaced by others: any may be such.
    return Tuned(Entry(KEY, {}, winners), spec, topology, False, lambda m, k: rng.random() < 0.6)


def some_spec(rng: random.Random) -> OpSpec:
    sizes = (some_size(rng, MAX_M), (some_size(rng, 1 << 14),), some_size(rng, 1 << 14))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64, FP8))
    scaling = rng.choice(("tensor", "row")) if dtype == FP8 else "none"
    return OpSpec(rng.choice(list(Op)), *sizes, dtype, False, "sum", scaling=scaling)


def some_ms(rng: random.Random, max_m: int) -> list[int]:
    return [max_m, max(1, max_m - 1), *(some_size(rng, max_m) for _ in range(4))]


CPU = load_cluster("cpu")


@pytest.mark.parametrize("part", range(4))
def test_memory_on_cpus_holds_the_schedule_of_every_m(part: int) -> None:
    rng = random.Random(f"bounds {part}")
    built = 0
    for _ in range(CASES // 4):
        topology, spec = rng.choice(TOPOLOGIES), some_spec(rng)
        choice = some_choice(rng, spec, topology)
        layout = SegmentLayout.serving(spec, topology, choice)
        for m in some_ms(rng, spec.max_m):
            knobs = choice.knobs(m)
            if knobs.path == "unfused":
                continue  # the ranks only meet
            what = (spec, topology, choice, m, knobs)
            signals, tiles, knobs = cpu_needs(spec, topology, m, knobs)
            if signals > _C.core.max_tiles:
                continue  # refused
            assert signals <= layout.signals, what
            if tiles + signals <= 600 and rng.random() < 0.2:
                built += check_schedule(spec, topology, layout, m, knobs, rng, what)
    assert built > 50 * STRESS


def cpu_needs(spec: OpSpec, topology: Topology, m: int, knobs: Knobs) -> tuple[int, int, Knobs]:
    """Signals and GEMM tiles of a call, and its knobs, without a schedule, which may be large."""
    world, n, k = topology.world, sum(spec.n), spec.k
    sizes = (_C.core.local_n(spec.op, n, world, 0), _C.core.local_k(spec.op, k, world, 0))
    knobs = resolve(Sizes(spec.op, m, sizes, world, spec.itemsize, topology.nodes), knobs)
    assert knobs.comm_tile_rows is not None and knobs.tile is not None
    regions = 1
    if spec.op.reduces:
        order, direction = Order[str(knobs.order)], Direction[str(knobs.direction)]
        mesh, hosts = topology.mesh, topology.uneven
        regions = _C.room_for(order=order, direction=direction, mesh=mesh, hosts=hosts)[1]
    per_region = world * tile_count(knobs.comm_tile_rows, -(-m // world))
    tiles = -(-m // knobs.tile[0]) * max(1, -(-sizes[0] // knobs.tile[1]))
    return per_region * (regions + spec.op.all_reduces), tiles, knobs


def check_schedule(
    spec: OpSpec,
    topology: Topology,
    layout: SegmentLayout,
    m: int,
    knobs: Knobs,
    rng: random.Random,
    what: object,
) -> bool:
    """Compare what a schedule addresses, and what it says that it needs, with the memory."""
    world = topology.world
    try:
        check_legal(knobs, topology)
        shape = (m, sum(spec.n), spec.k)
        schedule = make_schedule(
            spec.op.name,
            shape,
            world,
            rng.randrange(world),
            topology,
            knobs,
            itemsize=spec.itemsize,
        )
    except ValueError:
        return False  # no such schedule, such as one that stores tiles of two owners directly
    signals, blocks, block_rows, result_rows = schedule.native.needs
    used_signals, used_blocks = addressed(schedule)
    assert max(used_signals, default=-1) < signals <= layout.signals, what
    assert max(used_blocks, default=-1) < max(blocks, 1), what
    chunk = -(-m // world)
    if spec.op.gathers:
        assert (blocks, block_rows, result_rows) == (0, 0, m), what
        assert m * layout.row_bytes <= layout.data_bytes, what
        return True
    assert chunk <= block_rows and blocks <= layout.blocks, what
    assert block_rows * layout.row_bytes <= layout.slot_bytes, what
    assert blocks * layout.slot_bytes <= layout.result_offset, what
    results = layout.data_bytes - layout.result_offset
    assert result_rows * layout.row_bytes <= results, what
    rows_used = 0 if spec.op.scatters else chunk if knobs.direction == "pull" else m
    assert rows_used <= result_rows, what
    return True


def addressed(schedule: TileSchedule) -> tuple[set[int], set[int]]:
    """Return the signals and blocks that one rank's calls touch, on any rank."""
    native = schedule.native
    moves = (*schedule.transfers, *schedule.results, *native.receipts)
    signals = {t[7] for t in moves}
    signals |= {end - 1 for v in schedule.visits for end in v.waits[1:] if end}
    blocks = {block for _, block in schedule.homes}
    for _, _, _, _, shares, _, signal, block in native.reductions:
        if schedule.op == "gemm_ar" or block >= 0:
            signals.add(signal)
        signals |= {awaited for _, awaited, _ in shares}
        blocks |= {block, *(held for _, _, held in shares)}
    for peer in set(range(schedule.world)) - {schedule.rank}:
        for parcel in schedule.parcels_for(peer):
            signals.add(parcel.signal)
            blocks.add(parcel.block)
    return signals, blocks


def test_memory_on_gpus_holds_the_schedule_of_every_m() -> None:
    rng = random.Random("bounds on GPUs")
    for _ in range(CASES // 2):
        nodes, lanes = rng.choice(((1, 2), (1, 3), (1, 8), (2, 1), (2, 4), (3, 2), (4, 8)))
        world, topology, spec = nodes * lanes, Topology(nodes, 1, lanes), some_spec(rng)
        choice = some_choice(rng, spec, topology)
        if isinstance(choice, Tuned):
            choice = replace(choice, entry=_one_kernel(choice.entry, spec.max_m)[0])
        reduce = rng.choice(("local", "in_flight")) if nodes == 1 else "local"
        knobs = next((k for k in choice.variants if k.path != "unfused"), Knobs())
        knobs = replace(knobs, reduce=reduce)
        tile = (rng.choice((64, 128, 256)), rng.choice((64, 128, 256)))
        relays, guard = nodes > 1 and rng.random() < 0.5, rng.choice((0, _C.core.guard_rows))
        tiles = most_comm_tiles(spec.op, -(-spec.max_m // world), knobs, 1, choice.most_tiles)
        try:
            layout = Layout.of(spec, world, knobs, tile, tiles, nodes, relays, guard)
        except ValueError:
            continue  # more flags than there can be
        for m in some_ms(rng, spec.max_m):
            made = choice.knobs(m)
            if made.path != "unfused":
                what = (spec, topology, choice, m, made, layout)
                check_on_gpu(spec, nodes, lanes, layout, m, made, tile, relays, what)


def check_on_gpu(
    spec: OpSpec,
    nodes: int,
    lanes: int,
    layout: Layout,
    m: int,
    knobs: Knobs,
    tile: tuple[int, int],
    relays: bool,
    what: object,
) -> None:
    """What csrc/cuda_host/cuda_op*.cpp and gather_*.cpp address for one M."""
    world, n = nodes * lanes, sum(spec.n)
    sizes = (_C.core.local_n(spec.op, n, world, 0), _C.core.local_k(spec.op, spec.k, world, 0))
    local = Sizes(spec.op, m, sizes, world, spec.itemsize, nodes)
    knobs = resolve(local, knobs, ClusterTile(*tile))
    assert knobs.comm_tile_rows is not None
    chunk = -(-m // world)
    tiles, row = tile_count(knobs.comm_tile_rows, chunk), layout.row_bytes
    if world * tiles > _C.core.max_tiles:
        return  # refused
    if spec.op.gathers:
        assert world * tiles <= layout.signals, what
        assert knobs.direction != "pull" or world * tiles <= layout.offers, what
        assert nodes == 1 or world * tiles * (1 + spec.scales_travel) <= layout.boxes, what
        assert m * row <= layout.rest_offset, what
        scales = m * 4 if spec.scales_travel else 0
        assert layout.rest_offset + scales <= layout.data_bytes, what
        return
    tiling, most = (_C.core.ScatterTiling(size, n, world, *tile) for size in (m, spec.max_m))
    last = tiling.flag_rows() - 1 + tiling.tiles_of_owner(0)[0]
    flag = tiling.flag_index(world - 1, 0, last, tiling.flag_columns() - 1)
    assert (nodes - 1) * (layout.signals // nodes) + flag < layout.signals, what
    assert flag < layout.signals // nodes, what  # else it is a flag of another node's rows
    assert chunk * row <= layout.slot_bytes - layout.guard_bytes, what
    if layout.slots > 1:
        assert layout.slots == world + nodes - 1, what
    assert layout.slots * layout.slot_bytes <= layout.rest_offset, what
    assert not spec.op.all_reduces or layout.rest_offset + m * row <= layout.sums_offset, what
    sums = (nodes - 1) * layout.slot_bytes if relays else 0
    assert layout.sums_offset + sums <= layout.data_bytes, what
    if nodes > 1:
        strips = tiling.strip_count() if relays else tiles
        assert not relays or strips <= layout.strips <= most.strip_count(), what
        of_sums = nodes * (layout.strips if relays else tiles)
        assert of_sums + (nodes * tiles if spec.op.all_reduces else 0) <= layout.boxes, what


def engine(rank: int = 0, **changes: int) -> tuple[_C.Engine, torch.Tensor]:
    """An engine of one of two ranks, and its memory: 8 signals, a block of 4 rows, 8 of results."""
    memory = torch.zeros(_C.pad_bytes(8) + 12 * 4, dtype=torch.uint8)
    sizes = {"row_bytes": 4, "slot_bytes": 16, "result_offset": 16, "data_bytes": 48, "signals": 8}
    pads = [memory.data_ptr()] * 2
    options: dict[str, Any] = {"remote": [False] * 2, "dtype": 0, "memory": memory}
    return _C.Engine(rank=rank, pads=pads, data=pads, **options, **{**sizes, **changes}), memory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signals": 7}, "needs 8 signals, 1 blocks of 4 rows and 8 g.*has 7 signals, 1 blocks"),
        ({"slot_bytes": 17}, "has 8 signals, 0 blocks of 4 rows and 8 "),
        ({"slot_bytes": 15}, "has 8 signals, 1 blocks of 3 rows"),
        ({"data_bytes": 47}, "4 rows and 8 gathered.*4 rows and 7 gathered or result rows"),
        ({"rank": 1}, "the schedule is of rank 0 of 2, the op of rank 1 of 2"),
    ],
    ids=str,
)
def test_the_engine_refuses_what_does_not_fit(changes: dict[str, int], message: str) -> None:
    knobs = Knobs(tile=(2, 1), comm_tile_rows=2, direction="push")
    native = make_schedule("gemm_ar", (8, 1, 2), 2, 0, knobs=knobs).native
    assert native.needs == (8, 1, 4, 8)
    fits, _ = engine()
    fits.require_room(native)
    fits.begin(native, 0, False, 1.0)
    assert fits.epoch == 1
    small, memory = engine(**changes)
    for refuses in (
        lambda: small.require_room(native),
        lambda: small.begin(native, 0, False, 1.0),
    ):
        with pytest.raises(ValueError, match=message):
            refuses()
    assert small.epoch == 0, "a refused call has no number, and no peer sees it"
    assert not memory[_C.pad_bytes(8) :].any()


def test_maps_refuse_what_they_would_divide_by() -> None:
    core, order = _C.core, {"swizzle": 0, "order": 0, "direction": 0, "rank": 0}
    order |= {"op": 0, "m": 8, "n": 8, "tile_m": 4, "tile_n": 4, "raster": 1}
    made = core.TileOrder(mesh=(1, 1, 2), **order)
    bad: list[tuple[Any, ...]] = [
        *((f, 4, 0, *[0] * more) for f, more in ((core.chunk_rows, 0), (core.row_begin, 1))),
        *((f, 0, 4, 0, 0) for f in (core.local_n, core.local_k)),
        *((core.owner_of, *sizes) for sizes in ((0, 2, 1), (4, 0, 1))),
        *((core.tiles_per_chunk, *sizes) for sizes in ((0, 2, 1), (4, 0, 1), (4, 2, 0))),
        *((core.comm_tile_of, *sizes, 1) for sizes in ((0, 2, 1), (4, 0, 1), (4, 2, 0))),
        *((f, 3, (1, 1, 2), 0, 0, 5) for f in (core.recv_hop, core.send_hop)),
        *((core.step_of_chunk, 0, mesh, 0, 0, 0) for mesh in ((0, 1, 2), (1, 1, 1 << 20))),
        *((core.ScatterTiling, 8, 8, *sizes) for sizes in ((0, 4, 4), (2, 0, 4), (2, 4, 0))),
        *((made.tile_at, slot) for slot in (-1, 4)),
        (core.TileMap(made).tile_at, 4),
    ]
    for function, *arguments in bad:
        if function in (core.local_n, core.local_k):
            arguments[2] = 0  # the world
        with pytest.raises(ValueError, match=r"must be in \[-?\d+, -?\d+\], got"):
            function(*arguments)
    for change in ({"tile_m": 0}, {"tile_n": 0}, {"raster": 0}, {"m": 0}, {"mesh": (1, 0, 2)}):
        with pytest.raises(ValueError, match="must be in"):
            core.TileOrder(**{"mesh": (1, 1, 2), **order, **change})
    with pytest.raises(ValueError, match="itemsize must be at least 1 byte, got 0"):
        make_schedule("ag_gemm", (4, 4, 4), 2, 0, itemsize=0)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_large_worlds_are_built_or_refused_within_seconds(op: str) -> None:
    """It took 10 s with 1024 ranks, and hours with 65,536."""
    began = time.process_time()
    for topology in (Topology(128, 1, 8), Topology.of_hosts([r * 7 % 113 for r in range(1024)])):
        assert make_schedule(op, (4096, 1024, 1024), 1024, 3, topology).visits
    with pytest.raises(ValueError, match="world must be at most 1024, got 65536"):
        make_schedule(op, (65536, 8, 8), 65536, 0, Topology.of_hosts([0, 1] * 32768))
    assert time.process_time() - began < 3
