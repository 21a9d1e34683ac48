"""flux.make_schedule: pure, cached, printable; invalid arguments raise."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from flux import Knobs, TileSchedule, Topology, make_schedule
from flux.backends.cpu.slabs import merge_visits
from flux.core.knobs import ClusterTile
from flux.select.heuristic import _make

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
SHAPE = (16, 12, 8)
KNOBS = Knobs(tile=(4, 12), comm_tile_rows=2)


def of_rank(rank: int, op: str = "ag_gemm", **options: Any) -> TileSchedule:
    return make_schedule(op, SHAPE, 4, rank, **{"knobs": KNOBS, **options})


# -- a value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_equal_arguments_give_equal_schedules(op: str) -> None:
    first, again = of_rank(1, op), of_rank(1, op, knobs=Knobs(tile=(4, 12), comm_tile_rows=2))
    assert first is again  # cached
    assert first == again and hash(first) == hash(again)
    copy = dataclasses.replace(first)
    assert copy is not first and copy == first and hash(copy) == hash(first)
    assert copy.visits == first.visits and copy.transfers == first.transfers
    assert len({first, again, copy}) == 1


def test_every_argument_counts() -> None:
    base = of_rank(1)
    others = [
        of_rank(2),
        of_rank(1, "gemm_rs"),
        of_rank(1, topology=Topology(2, 1, 2)),
        of_rank(1, knobs=Knobs(tile=(4, 12), comm_tile_rows=3)),
        make_schedule("ag_gemm", (17, 12, 8), 4, 1, knobs=KNOBS),
        make_schedule("ag_gemm", SHAPE, 2, 1, knobs=KNOBS),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_a_schedule_cannot_be_changed() -> None:
    schedule = of_rank(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.rank = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        schedule.visits[0].owner = 3  # type: ignore[misc]


def test_the_cache_is_bounded() -> None:
    for m in range(1, 3000):
        make_schedule("ag_gemm", (m, 1, 1), 2, 0)
    info = _make.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize


# -- what the heuristic fills in -------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", ["fused", "medium", "unfused"])
def test_all_knobs_are_set_and_equal_on_all_ranks(op: str, path: str) -> None:
    for m in (1, 3, 100, 4096):
        schedules = [make_schedule(op, (m, 7, 5), 4, r, knobs=Knobs(path=path)) for r in range(4)]
        assert len({s.knobs for s in schedules}) == 1
        knobs = schedules[0].knobs
        unset = {f.name for f in dataclasses.fields(knobs) if getattr(knobs, f.name) is None}
        of_gpus = {"sm_margin", "tile_scheduler", "buffers", "sends"}
        assert unset <= of_gpus | ({"store"} if op == "ag_gemm" else set())
        assert knobs.path == path
        assert 1 <= knobs.comm_tile_rows <= -(-m // 4)


@pytest.mark.parametrize("op", OPS)
def test_communication_tiles_are_of_a_size_in_bytes(op: str) -> None:
    for itemsize, rows in ((8, 128), (4, 256), (2, 512)):
        schedule = make_schedule(op, (4096, 1024, 1024), 2, 0, itemsize=itemsize)
        assert schedule.knobs.comm_tile_rows == rows, "1 MiB of rows of 1024 elements"


@pytest.mark.parametrize("op", OPS)
def test_fixed_knobs_are_kept(op: str) -> None:
    fixed = Knobs(
        tile=(2, 2),
        raster=2,
        comm_tile_rows=3,
        direction="pull",
        order="ring1d",
        swizzle="xor",
        store="staged",
        reduce="local",
        copy_streams=1,
    )
    assert make_schedule(op, SHAPE, 4, 0, knobs=fixed).knobs == fixed


def test_medium_moves_one_chunk_per_rank_round_a_ring() -> None:
    schedule = make_schedule("ag_gemm", SHAPE, 4, 1, knobs=Knobs(path="medium"))
    assert [t.chunk for t in schedule.transfers] == [1, 0, 3]
    assert [t.forwarded for t in schedule.transfers] == [False, True, True]
    assert {(t.src, t.dst) for t in schedule.transfers} == {(1, 2)}


# -- what is multiplied at once -------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("hosts", ["aa", "ab", "aabb", "aaab", "abab"])
def test_slabs_are_the_tiles_in_order_and_own_rows_are_one(op: str, hosts: str) -> None:
    topology = Topology.of_hosts(hosts)
    world, tile = len(hosts), 4
    for rank, m in itertools.product(range(world), (16 * world, 16 * world - 3, 5)):
        knobs = Knobs(tile=(tile, 100), store=None if op == "ag_gemm" else "staged")
        schedule = make_schedule(op, (m, 8, 8), world, rank, topology, knobs)
        slabs = merge_visits(schedule)
        assert [i for first, last, _ in slabs for i in range(first, last)] == list(
            range(len(schedule.visits))
        )
        for first, last, v in slabs:
            visits = schedule.visits[first:last]
            rows = sorted(row for u in visits for row in range(u.row_begin, u.row_end))
            assert rows == list(range(v.row_begin, v.row_end))
        if m == 16 * world:
            sizes = {
                owner: [last - first for first, last, v in slabs if v.owner == owner]
                for owner in range(world)
            }
            far = [owner for owner in range(world) if hosts[owner] != hosts[rank]]
            assert sizes[rank] == [16 // tile]
            for owner in set(range(world)) - {rank}:
                cut = [1] * (16 // tile)
                if op == "ag_gemm" and far:
                    cut = [16 // tile - 1, 1] if owner in far else [16 // tile]
                assert sizes[owner] == cut


TURNS = [(64, 80), (32, 48), (80, 96), (48, 64)]


@pytest.mark.parametrize(
    ("hosts", "rank", "dense", "grouped"),
    [
        ("aabb", 1, [(16, 32), (0, 16), (32, 64)], [(0, 32), (32, 64)]),
        ("aabb", 3, [(48, 64), (32, 48), (0, 32)], [(32, 64), (0, 32)]),
        ("abbb", 0, [(0, 16), (16, 64)], [(0, 16), (16, 64)]),
        ("abab", 0, [(0, 16), (32, 48), (16, 32), (48, 64)], None),
        # Chunks of two other hosts take turns.
        ("aabbcc", 0, [(0, 16), (16, 32), *TURNS], [(0, 32), *TURNS]),
        ("ab", 0, [(0, 16), (16, 32)], None),
        ("aaaa", 1, [(16, 32), (0, 16), (48, 64), (32, 48)], None),
    ],
)
def test_chunks_that_come_together_are_multiplied_at_once(
    hosts: str,
    rank: int,
    dense: list[tuple[int, int]],
    grouped: list[tuple[int, int]] | None,
) -> None:
    """A grouped product has own rows in place, so that those of its host are one slab."""
    world = len(hosts)
    shape = (16 * world, 8, 8)
    topology = Topology.of_hosts(hosts)
    schedule = make_schedule("ag_gemm", shape, world, rank, topology, Knobs(tile=(16, 8)))
    for in_place, slabs in ((False, dense), (True, grouped or dense)):
        merged = merge_visits(schedule, in_place)
        assert [(v.row_begin, v.row_end) for _, _, v in merged] == slabs
        assert [i for first, last, _ in merged for i in range(first, last)] == list(range(world))


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_ranks_of_a_host_share_the_order_of_far_rows_on_cpus_and_not_on_gpus(op: str) -> None:
    """Two hosts of two ranks: on a CPU the first sum can leave after a quarter of the multiply."""
    orders, mesh = [], Topology(2, 1, 2)
    for cluster in (None, ClusterTile(16, 64)):
        schedules = [
            make_schedule(op, (64, 64, 64), 4, rank, mesh, Knobs(tile=(16, 64)), cluster=cluster)
            for rank in range(4)
        ]
        orders.append([list(dict.fromkeys(v.owner for v in s.visits)) for s in schedules])
        assert all(s.of_rank(s.rank) == s and s.of_rank(0).native for s in schedules)
    assert orders[0] == [[2, 3, 1, 0], [2, 3, 0, 1], [0, 1, 3, 2], [0, 1, 2, 3]]
    assert orders[1] == [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 2], [0, 1, 2, 3]]


# -- printed form ----------------------------------------------------------------------------------


def test_printed_all_gather_shows_arrival_order_and_waits() -> None:
    lines = str(of_rank(1)).splitlines()
    assert lines[0] == "ag_gemm m=16 n=12 k=8, rank 1 of 4 (1 node(s) x 1 domain(s) x 4 rank(s))"
    assert "tile=4x3" in lines[1] and "direction=push" in lines[1]
    # Own rows first, then the others in the order in which they arrive.
    assert [line.split("rows ")[1].split(")")[0] for line in lines[3:7]] == [
        "[4, 8",
        "[0, 4",
        "[12, 16",
        "[8, 12",
    ]
    assert "own rows, no wait" in lines[3]
    assert "waits for signals [0, 2)" in lines[4]
    assert lines[7] == "transfers (6, push, direct):"
    moves = [" ".join(line.split()) for line in lines[8:]]
    assert moves == [
        f"{i} step {i // 2} rank 1 -> {peer} rows [{row}, {row + 2}) chunk 1 tile {i % 2} "
        f"raises signal {2 + i % 2}"
        for i, (peer, row) in enumerate([(2, 4), (2, 6), (3, 4), (3, 6), (0, 4), (0, 6)])
    ]


def test_printed_reduce_scatter_shows_the_owner_order() -> None:
    text = str(of_rank(1, "gemm_rs"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 rows [8, 12) columns [0, 12) owner 2 then transfers [0, 2) leave" in lines
    assert "3 rows [4, 8) columns [0, 12) owner 1 then transfers [6, 8) leave" in lines
    assert "transfers (8, push, store direct):" in lines
    assert "6 step 3 stays at 1 rows [4, 6) chunk 1 tile 0 raises signal 2" in lines
    # Ranks begin with different owners, so that no two write to one at the same time.
    first = [of_rank(rank, "gemm_rs").visits[0].owner for rank in range(4)]
    assert first == [1, 2, 3, 0]


def test_printed_all_reduce_shows_transfers_of_the_result() -> None:
    text = str(of_rank(1, "gemm_ar"))
    assert "transfers of the result (6, pull, store direct):" in text
    assert "rank 2 -> 1  rows [8, 10)  chunk 2 tile 0" in text
    assert "rank 1 -> 2" in str(of_rank(1, "gemm_ar", knobs=Knobs(direction="push")))


def test_printed_schedule_shows_ragged_and_forwarded_tiles() -> None:
    schedule = make_schedule(
        "ag_gemm",
        (7, 12, 8),
        4,
        3,
        topology=Topology(2, 1, 2),
        knobs=Knobs(tile=(4, 12), comm_tile_rows=2, order="hierarchical", direction="pull"),
    )
    text = str(schedule)
    assert "rank 3 of 4 (2 node(s) x 1 domain(s) x 2 rank(s))" in text
    assert "rows [6, 7)" in text and "stays at 3" in text and "(forwarded)" in text


# -- invalid arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemm", SHAPE, 4, 0), "op must be one of ag_gemm, gemm_rs, gemm_ar, got 'gemm'"),
        (("ag_gemm", (0, 12, 8), 4, 0), r"must be positive, got \(0, 12, 8\)"),
        (("ag_gemm", (16, -1, 8), 4, 0), r"must be positive, got \(16, -1, 8\)"),
        (("gemm_rs", (16, 12, 0), 4, 0), r"must be positive, got \(16, 12, 0\)"),
        (("ag_gemm", SHAPE, 4, 4), r"rank must be in \[0, 4\), got 4"),
        (("ag_gemm", SHAPE, 4, -1), r"rank must be in \[0, 4\), got -1"),
        (("ag_gemm", SHAPE, 0, 0), "got 0"),
        (("ag_gemm", SHAPE, 4, 0, Topology(2, 1, 1)), "topology has 2 ranks, world is 4"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule(*arguments)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"path": "quick"},
            "Knobs.path must be one of fused, medium, unfused, one_shot, in_kernel, got 'quick'",
        ),
        ({"direction": "both"}, "Knobs.direction must be one of push, pull, got 'both'"),
        ({"order": "ring"}, "Knobs.order must be one of direct, ring1d.*got 'ring'"),
        ({"swizzle": "morton"}, "Knobs.swizzle must be one of.*got 'morton'"),
        ({"store": "tma"}, "Knobs.store must be one of direct, staged, got 'tma'"),
        ({"reduce": "ring"}, "Knobs.reduce must be one of local, in_flight, in_kernel, got 'ring'"),
        ({"tile": (0, 4)}, r"two positive integers, got \(0, 4\)"),
        ({"tile": (4,)}, r"two positive integers, got \(4,\)"),
        ({"tile": 4}, "two positive integers, got 4"),
        ({"tile": (4.0, 4)}, r"two positive integers, got \(4.0, 4\)"),
        ({"raster": 0}, "Knobs.raster must be a positive integer, got 0"),
        ({"raster": 1.5}, "Knobs.raster must be a positive integer, got 1.5"),
        ({"comm_tile_rows": -2}, "Knobs.comm_tile_rows must be a positive integer, got -2"),
        ({"comm_tile_rows": "8"}, "Knobs.comm_tile_rows must be a positive integer, got '8'"),
        ({"copy_streams": 2}, "Knobs.copy_streams must be 0 or 1, got 2"),
    ],
    ids=str,
)
def test_illegal_knobs_raise(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Knobs(**knobs)


@pytest.mark.parametrize("world", [3, 6])
@pytest.mark.parametrize("op", OPS)
def test_xor_needs_a_power_of_two(op: str, world: int) -> None:
    with pytest.raises(ValueError, match=f"swizzle xor needs a power-of-two world, got {world}"):
        make_schedule(op, SHAPE, world, 0, knobs=Knobs(swizzle="xor"))


@pytest.mark.parametrize(
    ("op", "m", "knobs", "words"),
    [
        ("gemm_rs", 16, {}, "is for ag_gemm and gemm_ar with M up to 512, got gemm_rs with M = 16"),
        ("gemm_ar", 513, {}, "M up to 512, got gemm_ar with M = 513"),
        ("gemm_ar", 16, {"direction": "pull"}, "direction push and order direct"),
        ("gemm_ar", 16, {"reduce": "in_kernel"}, "sums behind its tiles, .* got reduce in_kernel"),
    ],
    ids=str,
)
def test_path_in_kernel_is_for_few_rows(op: str, m: int, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule(op, (m, 12, 8), 4, 0, knobs=Knobs(path="in_kernel", **knobs))


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_store_direct_needs_tiles_inside_one_owner(op: str) -> None:
    words = "tile_m 3 straddles the chunks of 4 rows; use store staged"
    with pytest.raises(ValueError, match=words):
        make_schedule(op, SHAPE, 4, 0, knobs=Knobs(store="direct", tile=(3, 4)))
    # Left to itself, the heuristic takes a tile that fits.
    for m in (1, 5, 16, 4097):
        schedule = make_schedule(op, (m, 12, 8), 4, 0, knobs=Knobs(store="direct"))
        assert schedule.knobs.store == "direct"
        assert all(v.owner >= 0 for v in schedule.visits)


def test_invalid_topologies_raise() -> None:
    for bad in ({"nodes": 0}, {"domains": -1}, {"lanes": 0}):
        (name, value), *_ = bad.items()
        with pytest.raises(ValueError, match=rf"Topology.{name} must be at least 1, got {value}"):
            Topology(**bad)


LARGEST = 2**30


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "knobs", "words"),
    [
        ((65536, 65536, 8), {"tile": (1, 1)}, r"tiles of 1 x 1 cut \[65536, \d+\] into \d{10}, at"),
        (
            (2**20, 2**20, 8),
            {"tile": (8, 8)},
            r"cut \[1048576, \d+\] into \d{10,}, at most",
        ),
        ((LARGEST, 8, 8), {"comm_tile_rows": 1}, r"so many that \d{10} signals are needed"),
        (
            (2 * LARGEST - 1, 8, 8),
            {},
            rf"must be at most {LARGEST}, got \(2147483647, 8, 8",
        ),
        ((8, 2 * LARGEST - 1, 8), {}, rf"m, n, k must be at most {LARGEST}, got \(8, 2147483647"),
        ((16, 16, 8), {"raster": 2**31 - 1, "comm_tile_rows": 2**31 - 1}, ""),
    ],
    ids=str,
)
def test_counts_beyond_32_bits_raise_or_are_clipped(
    op: str, shape: tuple[int, int, int], knobs: dict[str, Any], words: str
) -> None:
    """A count of 2**31 tiles was taken for 0: the call returned uninitialised memory."""
    if not words:  # sizes of tiles are cut down to what there is
        assert make_schedule(op, shape, 2, 0, knobs=Knobs(**knobs)).visits
        return
    with pytest.raises(ValueError, match=words):
        make_schedule(op, shape, 2, 0, knobs=Knobs(**knobs))


@pytest.mark.parametrize("op", OPS)
def test_largest_extents_do_not_overflow(op: str) -> None:
    """No sum or product of them leaves 32 bits."""
    m = LARGEST
    knobs = Knobs(tile=(LARGEST // 2 - 1, 8), comm_tile_rows=LARGEST // 3)
    schedule = make_schedule(op, (m, 8, 8), 7, 6, knobs=knobs)
    rows = sorted((v.row_begin, v.row_end) for v in schedule.visits)
    assert rows[0][0] == 0 and rows[-1][1] == m
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(rows))
    chunk = -(-m // 7)
    for t in schedule.transfers:
        assert t.chunk * chunk <= t.row_begin < t.row_end <= min(m, (t.chunk + 1) * chunk)
