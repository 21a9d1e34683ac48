"""What kernels evaluate for themselves (core/tile_map.h, scatter.h), and what they are given."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from core_cases import (
    AG_GEMM,
    DIRECT,
    GEMM_AR,
    GEMM_RS,
    HIERARCHICAL,
    PULL,
    PUSH,
    RANK_SHIFT,
    STORE_STAGED,
    Case,
    cases,
    tile_order,
)
from flux import _C

core = _C.core


def case(op: int, m: int, world: int, tile_m: int, n: int = 1) -> Case:
    knobs = (tile_m, 1, 1, 1, PULL, DIRECT, RANK_SHIFT, STORE_STAGED)
    return Case(op, m, n, 1, (1, 1, world), *knobs)


# -- tile map --------------------------------------------------------------------------------------


@given(c=cases(max_world=16, max_m=150), data=st.data())
@example(c=case(AG_GEMM, 1, 8, 4), data=None)
@example(c=case(GEMM_RS, 5, 4, 3, n=3), data=None)
def test_tile_map_matches_the_tile_order(c: Case, data: st.DataObject | None) -> None:
    rank = 0 if data is None else data.draw(st.integers(0, c.world - 1))
    order = tile_order(c, rank)
    tile_map = core.TileMap(order)
    slots = range(order.tile_count())
    assert [tile_map.tile_at(s) for s in slots] == [order.tile_at(s) for s in slots]


def test_runs_are_joined_where_chunks_follow_each_other() -> None:
    order = tile_order(case(AG_GEMM, 8, 4, 1), 1)
    assert [order.tile_row_at(s) for s in range(8)] == [2, 3, 4, 5, 6, 7, 0, 1]
    assert core.TileMap(order).runs == [(2, 6), (0, 8)]


def test_a_world_beyond_the_map_has_no_runs() -> None:
    assert core.TileMap(tile_order(case(AG_GEMM, 200, core.max_runs, 1), 0)).runs != []
    assert core.TileMap(tile_order(case(AG_GEMM, 200, core.max_runs + 1, 1), 0)).runs == []


@given(
    nodes=st.integers(2, 4),
    lanes=st.integers(1, 5),
    m=st.integers(1, 300),
    tile_m=st.integers(1, 20),
    comm_rows=st.integers(1, 40),
    all_reduces=st.booleans(),
    data=st.data(),
)
@example(2, 2, 16, 1, 2, False, None)
@example(4, 5, 300, 2, 1, True, None)
def test_owners_of_another_node_take_turns(
    nodes: int,
    lanes: int,
    m: int,
    tile_m: int,
    comm_rows: int,
    all_reduces: bool,
    data: st.DataObject | None,
) -> None:
    world, op = nodes * lanes, GEMM_AR if all_reduces else GEMM_RS
    rank = 0 if data is None else data.draw(st.integers(0, world - 1))
    chunk, node = -(-m // world), rank // lanes
    owners = [
        (node + ahead) % nodes * lanes + (rank + i) % lanes
        for ahead in [*range(1, nodes), 0]
        for i in range(1, lanes + 1)
    ]
    tiles, most = -(-chunk // comm_rows), (core.max_runs - lanes) // (world - lanes)
    slice_rows = comm_rows * -(-tiles // min(tiles, most))
    visit = {}  # of each row: node, slice, owner; own node: owner
    for place, owner in enumerate(owners):
        for row in range(owner * chunk, min(m, (owner + 1) * chunk)):
            near = place >= world - lanes
            part = 0 if near else (row - owner * chunk) // slice_rows
            visit[row] = (place // lanes, part, place)

    def turn(tile: int) -> tuple[int, int, int]:
        rows = range(tile * tile_m, min(m, (tile + 1) * tile_m))
        place = min(visit[row][2] for row in rows)  # of straddled owners the first
        return min(visit[row] for row in rows if visit[row][2] == place)

    expected = sorted(range(-(-m // tile_m)), key=lambda tile: (turn(tile), tile))
    schedule = _C.build_schedule(
        op=op,
        m=m,
        n=1,
        k=world,
        rank=rank,
        mesh=(nodes, 1, lanes),
        tile_m=tile_m,
        tile_n=1,
        raster=1,
        comm_rows=min(comm_rows, chunk),
        direction=PUSH,
        order=HIERARCHICAL,
        swizzle=RANK_SHIFT,
        store=STORE_STAGED,
        spread=True,
    )
    assert [row_begin // tile_m for row_begin, *_ in schedule.visits] == expected
    args = _C.GemmArgs()
    args.m, args.n, order = m, 1, args.order
    order.world, order.rank, order.nodes, order.domains, order.lanes = world, rank, nodes, 1, lanes
    order.order, order.direction, order.swizzle = HIERARCHICAL, PUSH, RANK_SHIFT
    order.raster, order.comm_tile_rows = 1, min(comm_rows, chunk)
    args.set_sequence(owners)
    kernel = args.tile_map(op, tile_m, 1)
    assert [kernel.tile_at(slot)[0] for slot in range(len(expected))] == expected


@st.composite
def column_ranges(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Columns, and ranges that have each of them, in any order."""
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    ends = list(accumulate(sizes))
    assume(ends[-1] > 0)
    ranges = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return ends[-1], draw(st.permutations(ranges))


@given(
    given_ranges=column_ranges(),
    m=st.integers(1, 50),
    tile_m=st.integers(1, 20),
    tile_n=st.integers(1, 20),
    raster=st.integers(1, 5),
)
@example(given_ranges=(10, [(4, 7), (7, 10), (0, 4)]), m=1, tile_m=1, tile_n=3, raster=1)
def test_tiles_go_by_ranges_of_columns(
    given_ranges: tuple[int, list[tuple[int, int]]], m: int, tile_m: int, tile_n: int, raster: int
) -> None:
    n, ranges = given_ranges
    args = _C.GemmArgs()
    args.m, args.n, args.order.world, args.order.raster = m, n, 1, raster
    args.set_sequence([bound for r in ranges for bound in r])
    args.order.column_ranges = len(ranges)
    tiles = args.tile_map(GEMM_RS, tile_m, tile_n)
    rows, columns = -(-m // tile_m), -(-n // tile_n)
    visited = [tiles.tile_at(slot) for slot in range(rows * columns)]
    assert sorted(visited) == [(row, column) for row in range(rows) for column in range(columns)]
    expected: list[int] = []
    for begin, end in ranges:
        some = range(begin // tile_n, -(-end // tile_n)) if end > begin else range(0)
        expected += [column for column in some if column not in expected]
    assert list(dict.fromkeys(column for _, column in visited)) == [
        column for first in range(0, columns, raster) for column in expected[first : first + raster]
    ]
    # A band of `raster` columns is swept row by row.
    assert [row for row, _ in visited[: min(raster, columns) * rows]] == [
        row for row in range(rows) for _ in range(min(raster, columns))
    ]


# -- scatter ---------------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(m, n, world, tile_m, tile_n), ragged in every way."""
    sizes = st.integers(1, 60)
    return (
        draw(sizes),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 9)),
        draw(sizes),
        draw(st.integers(1, 14)),
    )


def rows_of(m: int, world: int, owner: int) -> set[int]:
    chunk = -(-m // world)
    return set(range(min(m, owner * chunk), min(m, (owner + 1) * chunk)))


@given(t=tilings())
@example(t=(8, 2, 2, 3, 1))
@example(t=(1, 1, 8, 128, 256))
def test_tiles_and_owners_agree(t: tuple[int, int, int, int, int]) -> None:
    m, _, world, tile_m, _ = t
    s = core.ScatterTiling(*t)
    for tile in range(-(-m // tile_m) + 2):  # rows of tiles that a cluster adds lie beyond M
        rows = set(range(tile * tile_m, min(m, (tile + 1) * tile_m)))
        owners = [o for o in range(world) if rows & rows_of(m, world, o)]
        assert list(range(*s.owners_of_tile(tile))) == owners
    for owner in range(world):
        tiles = sorted({row // tile_m for row in rows_of(m, world, owner)})
        assert list(range(*s.tiles_of_owner(owner))) == tiles
        assert len(tiles) <= s.flag_rows()


@given(t=tilings())
@example(t=(8, 2, 2, 3, 1))
def test_every_source_and_tile_has_a_flag_of_its_own(t: tuple[int, int, int, int, int]) -> None:
    _, _, world, _, _ = t
    s = core.ScatterTiling(*t)
    for owner in range(world):
        flags = [
            s.flag_index(source=source, owner=owner, tile_row=row, tile_column=column)
            for source in range(world)
            for row in range(*s.tiles_of_owner(owner))
            for column in range(s.flag_columns())
        ]
        assert len(set(flags)) == len(flags)
        assert all(0 <= flag < s.flag_count() for flag in flags)


@given(t=tilings())
@example(t=(64, 2, 2, 24, 1))
@example(t=(1, 1, 8, 128, 256))
def test_strips_hold_each_row_of_an_owner_once(t: tuple[int, int, int, int, int]) -> None:
    m, _, world, tile_m, _ = t
    s = core.ScatterTiling(*t)
    for owner in range(world):
        assert s.strips_of_owner(owner) <= s.strip_count()
        held: list[int] = []
        for index in range(s.strips_of_owner(owner)):
            tile_row, begin, end = s.strip_of_owner(owner, index)
            rows = list(range(begin, end))
            assert len(rows) <= core.strip_rows
            assert {row // tile_m for row in rows} <= {tile_row}
            held += rows
        assert held == sorted(rows_of(m, world, owner))


@given(t=tilings())
@example(t=(14, 2, 4, 64, 1))
@example(t=(1, 1, 8, 128, 256))
@example(t=(8, 2, 2, 2, 1))
def test_sums_and_copies_hold_each_element_once(t: tuple[int, int, int, int, int]) -> None:
    m, _, world, tile_m, _ = t
    s = core.ScatterTiling(*t)
    summed: list[tuple[int, int]] = []
    words: list[int] = []
    for owner in range(world):
        for index in range(s.sum_count(owner)):
            column, begin, end = s.sum_of_owner(owner, index)
            rows = range(begin, end)
            assert 0 < len(rows) <= core.sum_rows
            assert set(rows) <= rows_of(m, world, owner)
            if tile_m % core.sum_rows == 0 or tile_m < core.sum_rows:  # as of all kernels
                assert len({row // tile_m for row in rows}) == 1
            assert [s.begins_sum(row) for row in rows] == [True, *[False] * (len(rows) - 1)]
            words.append(s.sum_word(begin, column))
            summed += [(row, column) for row in rows]
    everything = [(row, column) for row in range(m) for column in range(s.flag_columns())]
    assert sorted(summed) == everything
    assert len(set(words)) == len(words)
    assert all(0 <= word < len(everything) for word in words)
    pieces = [s.copied_piece(index) for index in range(s.copy_count())]
    copied = [(row, column) for column, begin, end in pieces for row in range(begin, end)]
    assert sorted(copied) == everything
    assert all(end - begin <= 32 for _, begin, end in pieces)  # lanes of a warp


@given(t=tilings(), raster=st.integers(1, 9))
@example(t=(14, 2, 4, 64, 1), raster=2)
def test_own_strips_hold_each_element_once_tile_by_tile(
    t: tuple[int, int, int, int, int], raster: int
) -> None:
    """In the order in which a rank visits tiles: bands of rows of tiles, column by column."""
    m, _, world, tile_m, _ = t
    s = core.ScatterTiling(*t)
    columns = s.flag_columns()
    for owner in range(world):
        mine = rows_of(m, world, owner)
        strips = [s.own_sum(owner, raster, index) for index in range(s.own_sum_count(owner))]
        held = [(row, column) for column, begin, end in strips for row in range(begin, end)]
        assert sorted(held) == [(row, column) for row in sorted(mine) for column in range(columns)]
        assert all(end - begin <= core.strip_rows for _, begin, end in strips)
        tiles = list(dict.fromkeys((row // tile_m, column) for row, column in held))
        bands = [(tile - min(mine) // tile_m) // raster for tile, _ in tiles]
        order = [(band, column, tile) for band, (tile, column) in zip(bands, tiles, strict=True)]
        assert order == sorted(order)


# -- boxes of bulk stores --------------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(m, world, rows of a box, boxes of a tile)."""
    height = draw(st.one_of(st.integers(1, core.guard_rows), st.sampled_from([64, 128])))
    return draw(st.integers(1, 700)), draw(st.integers(1, 16)), height, draw(st.integers(1, 3))


@given(b=boxes())
@example(b=(8, 2, 3, 1))
@example(b=(700, 8, 128, 2))
@example(b=(1, 8, 128, 1))
@example(b=(129, 2, 128, 1))  # the second owner's first row is the second of its box's last
def test_boxes_begin_inside_maps_and_rows_land_where_they_belong(
    b: tuple[int, int, int, int],
) -> None:
    """What TMA does with each box: rows behind the end of a map are left out, all others stored."""
    m, world, height, per_tile = b
    s = core.ScatterTiling(m, 1, world, height * per_tile, 1)
    slots: list[dict[int, int]] = [{} for _ in range(world)]
    for first in range(0, m, height):  # what lies beyond M belongs to the last box
        for owner in range(world):
            if not rows_of(m, world, owner) & set(range(first, first + height)):
                continue
            at = s.map_row(owner, first)
            assert at >= 0
            for row in range(first, first + height):
                place = at + row - first
                if place >= s.map_rows(owner):
                    continue
                if place >= core.guard_rows:
                    assert place - core.guard_rows not in slots[owner]
                    slots[owner][place - core.guard_rows] = row
    for owner in range(world):
        rows = sorted(rows_of(m, world, owner))
        assert slots[owner] == dict(enumerate(rows))
        assert s.map_rows(owner) == core.guard_rows + max(len(rows), 1)


# -- arguments -------------------------------------------------------------------------------------


def gemm_args(c: Case, rank: int) -> _C.GemmArgs:
    args = _C.GemmArgs()
    args.m, args.n, args.k = c.m, c.local_n(rank), c.k
    order = args.order
    order.world, order.rank = c.world, rank
    order.order, order.direction, order.swizzle = c.order, c.direction, c.swizzle
    order.nodes, order.domains, order.lanes = c.mesh
    order.raster, order.comm_tile_rows = c.raster, c.comm_rows
    return args


@given(c=cases(max_world=8, max_m=80), data=st.data())
def test_kernels_visit_what_the_schedule_says(c: Case, data: st.DataObject) -> None:
    """Whole clusters in the schedule's order; the very tiles of the CPU backend."""
    assume(not c.has_sequence)
    rank = data.draw(st.integers(0, c.world - 1))
    tile_map = gemm_args(c, rank).tile_map(c.op, c.tile_m, c.tile_n)
    visits = c.build(rank).visits
    for slot, visit in enumerate(visits):
        m, n = tile_map.tile_at(slot)
        assert m * c.tile_m == visit.row_begin and n * c.tile_n == visit.col_begin


def test_kernels_follow_a_given_sequence_of_chunks() -> None:
    c = case(AG_GEMM, 12, 4, 1)
    args = gemm_args(c, 0)
    args.set_sequence([2, 0, 3, 1])
    tile_map = args.tile_map(AG_GEMM, 3, 1)
    assert [tile_map.tile_at(s)[0] for s in range(4)] == [2, 0, 3, 1]
    args.set_sequence([])
    assert args.tile_map(AG_GEMM, 3, 1).tile_at(0) == (0, 0)


def test_a_plain_launch_goes_row_by_row() -> None:
    args = _C.GemmArgs()
    args.m, args.n, args.k = 5, 4, 1
    tile_map = args.tile_map(GEMM_RS, 2, 2)
    assert [tile_map.tile_at(s) for s in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


@pytest.mark.parametrize(("rows", "expected"), [(0, 1), (3, 3), (100, 4)])
def test_communication_tiles_are_at_most_a_chunk(rows: int, expected: int) -> None:
    args = gemm_args(case(AG_GEMM, 14, 4, 1), 0)
    args.order.comm_tile_rows = rows
    assert args.comm_tiling() == (14, 4, expected)


def test_arguments_keep_addresses_and_refuse_too_many_ranks() -> None:
    args = _C.GemmArgs()
    args.a, args.sync.status, args.sync.epoch = 2**63 + 16, 4096, 2**32 - 1
    assert (args.a, args.sync.status, args.sync.epoch) == (2**63 + 16, 4096, 2**32 - 1)
    args.set_slots([16] * _C.MAX_KERNEL_WORLD)
    most = _C.MAX_KERNEL_WORLD
    with pytest.raises(ValueError, match=f"at most {most} ranks, got {most + 1}"):
        args.set_flags([16] * (_C.MAX_KERNEL_WORLD + 1))


def test_a_file_that_is_not_a_library_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cannot open /nowhere\.so"):
        _C.Kernel("/nowhere.so", "flux_kernel")
    with pytest.raises(RuntimeError, match="has no kernel flux_kernel"):
        _C.Kernel(_C.__file__, "flux_kernel")
