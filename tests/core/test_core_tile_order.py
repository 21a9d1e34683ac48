"""Tile orders (csrc/core/tile_order.h): which output tile is computed when."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core_cases import (
    AG_GEMM,
    DIRECT,
    DIRECTIONS,
    GEMM_AR,
    GEMM_RS,
    HIERARCHICAL,
    NONE,
    ORDERS,
    PULL,
    PUSH,
    RANK_SHIFT,
    STORE_STAGED,
    SWIZZLES,
    XOR,
    Case,
    Mesh,
    cases,
    tile_order,
)
from flux import _C

core = _C.core


def case(op: int, m: int, mesh: Mesh, tile_m: int, **knobs: int) -> Case:
    defaults = {
        "tile_n": 1,
        "raster": 1,
        "comm_rows": 1,
        "direction": PULL,
        "order": DIRECT,
        "swizzle": RANK_SHIFT,
        "store": STORE_STAGED,
    }
    n = knobs.pop("n", 1)
    return Case(op=op, m=m, n=n, k=1, mesh=mesh, tile_m=tile_m, **{**defaults, **knobs})


def step_of(c: Case, rank: int, chunk: int) -> int:
    """Step at which ``chunk`` is at ``rank``; -1 for the own one."""
    return core.step_of_chunk(c.order, c.mesh, c.direction, rank, chunk)


def chunks_of_tile(c: Case, tile: int) -> range:
    last = min(c.m, (tile + 1) * c.tile_m) - 1
    return range(c.owner(tile * c.tile_m), c.owner(last) + 1)


@given(c=cases(max_world=16, max_m=200, max_n=12), data=st.data())
@example(c=case(AG_GEMM, 1, (1, 1, 8), 4), data=None)
@example(c=case(GEMM_RS, 7, (2, 1, 2), 2, raster=3, n=5, tile_n=2, order=HIERARCHICAL), data=None)
def test_tile_order_is_a_bijection(c: Case, data: st.DataObject | None) -> None:
    for rank in {0, c.world - 1} if data is None else {data.draw(st.integers(0, c.world - 1))}:
        t = tile_order(c, rank)
        assert t.tiles_m() == -(-c.m // c.tile_m)
        # A rank whose share of a ragged N is empty still visits every row, without columns.
        assert t.tiles_n() == max(1, -(-c.local_n(rank) // c.tile_n))
        assert t.tile_count() == t.tiles_m() * t.tiles_n()
        rows = [t.tile_row_at(slot) for slot in range(t.tiles_m())]
        assert sorted(rows) == list(range(t.tiles_m()))
        tiles = [t.tile_at(slot) for slot in range(t.tile_count())]
        assert sorted(tiles) == [(i, j) for i in range(t.tiles_m()) for j in range(t.tiles_n())]


@given(c=cases(max_world=16, max_m=100), data=st.data())
def test_raster_sweeps_bands_column_by_column(c: Case, data: st.DataObject) -> None:
    t = tile_order(c, data.draw(st.integers(0, c.world - 1)))
    rows = [t.tile_row_at(slot) for slot in range(t.tiles_m())]
    expected = [
        (row, column)
        for band in range(0, len(rows), c.raster)
        for column in range(t.tiles_n())
        for row in rows[band : band + c.raster]
    ]
    assert [t.tile_at(slot) for slot in range(t.tile_count())] == expected


def test_knobs_beyond_the_problem_do_not_overflow() -> None:
    huge = 2**31 - 1
    exact = tile_order(case(AG_GEMM, 12, (1, 1, 4), 2, raster=6, n=20, tile_n=2), 1)
    large = tile_order(case(AG_GEMM, 12, (1, 1, 4), 2, raster=huge, n=20, tile_n=2), 1)
    slots = range(exact.tile_count())
    assert [large.tile_at(s) for s in slots] == [exact.tile_at(s) for s in slots]
    one = tile_order(case(GEMM_RS, 12, (1, 1, 4), huge, n=20, tile_n=huge, raster=huge), 1)
    assert (one.tile_count(), one.tile_at(0)) == (1, (0, 0))


@given(c=cases(max_world=16, max_m=100))
def test_chunks_are_visited_in_a_permutation(c: Case) -> None:
    for rank in range(c.world):
        t = tile_order(c, rank)
        assert sorted(t.chunk_at(p) for p in range(c.world)) == list(range(c.world))


@given(c=cases(max_world=12, max_m=100))
def test_slots_follow_the_positions(c: Case) -> None:
    """Tile rows with a lower position come first, and a tile has one of its chunks' positions."""
    for rank in range(c.world):
        t = tile_order(c, rank)
        position = {t.chunk_at(p): p for p in range(c.world)}
        along = []
        for slot in range(t.tiles_m()):
            tile = t.tile_row_at(slot)
            of_chunks = [position[chunk] for chunk in chunks_of_tile(c, tile)]
            # AllGather needs all that it reads; a reduction gets rid of rows as early as it can.
            expected = max(of_chunks) if c.op == AG_GEMM else min(of_chunks)
            assert t.position_of_tile(tile) == expected
            along.append(expected)
        assert along == sorted(along)


@given(c=cases(ops=(AG_GEMM,), max_world=12, max_m=100))
def test_all_gather_order_is_aligned_with_arrival(c: Case) -> None:
    """In the hierarchical order chunks of other nodes set out first, and arrive after one's own."""
    c = c._replace(swizzle=RANK_SHIFT)
    node = c.mesh[1] * c.mesh[2]
    for rank in range(c.world):
        t = tile_order(c, rank)
        assert t.chunk_at(0) == rank
        arrives = {
            chunk: (
                c.order == HIERARCHICAL and chunk // node != rank // node,
                step_of(c, rank, chunk),
            )
            for chunk in range(c.world)
        }
        position = {chunk: p for p, chunk in enumerate(sorted(arrives, key=arrives.__getitem__))}
        visited = []
        for slot in range(t.tiles_m()):
            tile = t.tile_row_at(slot)
            # Never before the last chunk the tile reads has arrived, and not later either.
            latest = max(position[chunk] for chunk in chunks_of_tile(c, tile))
            assert t.position_of_tile(tile) == latest
            visited.append(latest)
        assert visited == sorted(visited)


@given(c=cases(ops=(GEMM_RS, GEMM_AR), max_world=16))
def test_no_two_ranks_write_to_one_owner_at_one_position(c: Case) -> None:
    orders = [tile_order(c, rank) for rank in range(c.world)]
    for position in range(c.world):
        owners = [t.chunk_at(position) for t in orders]
        if c.swizzle == NONE:
            assert set(owners) == {position}
        else:
            assert sorted(owners) == list(range(c.world))


@given(c=cases(ops=(GEMM_RS, GEMM_AR), max_world=16))
def test_own_rows_come_last_and_far_ones_first(c: Case) -> None:
    if c.swizzle == NONE:
        c = c._replace(swizzle=RANK_SHIFT)
    _, domains, lanes = c.mesh
    for rank in range(c.world):
        t = tile_order(c, rank)
        owners = [t.chunk_at(p) for p in range(c.world)]
        assert owners[-1] == rank
        if c.swizzle == RANK_SHIFT and c.order in (HIERARCHICAL, ORDERS[-1]):
            remote = [owner // (domains * lanes) != rank // (domains * lanes) for owner in owners]
            assert remote == sorted(remote, reverse=True)
        if c.swizzle == RANK_SHIFT and c.order == ORDERS[-1]:
            elsewhere = [owner // lanes != rank // lanes for owner in owners]
            assert elsewhere == sorted(elsewhere, reverse=True)


@given(c=cases(max_world=16))
def test_xor_order_pairs_ranks_at_each_position(c: Case) -> None:
    """At each position, ranks visit each other in pairs."""
    if c.world & (c.world - 1):
        return
    c = c._replace(swizzle=XOR)
    orders = [tile_order(c, rank) for rank in range(c.world)]
    for position in range(c.world):
        for rank, t in enumerate(orders):
            assert orders[t.chunk_at(position)].chunk_at(position) == rank


def test_the_picture_in_the_header_matches_the_code() -> None:
    """M = 8 tiles, 4 ranks: what rank r visits, for AllGather (direct pull) and ReduceScatter."""
    for rank in range(4):
        t = tile_order(case(AG_GEMM, 8, (1, 1, 4), 1), rank)
        assert [t.tile_row_at(s) for s in range(8)] == [(2 * rank + i) % 8 for i in range(8)]
        t = tile_order(case(GEMM_RS, 8, (1, 1, 4), 1), rank)
        assert [t.tile_row_at(s) for s in range(8)] == [(2 * rank + 2 + i) % 8 for i in range(8)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_straddling_picture_in_the_header_matches_the_code(direction: int) -> None:
    t = tile_order(case(AG_GEMM, 8, (1, 1, 4), 3, direction=direction), 0)
    expected = {PULL: [1, 2, 3], PUSH: [3, 3, 1]}
    assert [t.position_of_tile(tile) for tile in range(3)] == expected[direction]


@pytest.mark.parametrize(
    ("swizzle", "mesh", "order", "owners"),
    [
        (RANK_SHIFT, (1, 1, 4), DIRECT, [2, 3, 0, 1]),
        (XOR, (1, 1, 4), DIRECT, [0, 3, 2, 1]),
        (NONE, (1, 1, 4), DIRECT, [0, 1, 2, 3]),
        (RANK_SHIFT, (2, 1, 2), HIERARCHICAL, [3, 2, 0, 1]),
    ],
)
def test_the_owner_pictures_match_the_code(
    swizzle: int, mesh: Mesh, order: int, owners: list[int]
) -> None:
    t = tile_order(case(GEMM_RS, 4, mesh, 1, swizzle=swizzle, order=order), 1)
    assert [t.chunk_at(p) for p in range(4)] == owners


def test_small_problems_exhaustively() -> None:
    """Every M up to 9 on up to 4 ranks with every tile height: no slot is lost at ragged edges."""
    for op in (AG_GEMM, GEMM_RS):
        for world in range(1, 5):
            for swizzle in SWIZZLES if world != 3 else (NONE, RANK_SHIFT):
                for m in range(1, 10):
                    for tile_m in range(1, m + 1):
                        c = case(op, m, (1, 1, world), tile_m, swizzle=swizzle)
                        for rank in range(world):
                            t = tile_order(c, rank)
                            count = t.tiles_m()
                            rows = [t.tile_row_at(slot) for slot in range(count)]
                            assert sorted(rows) == list(range(count)), (c, rank)
