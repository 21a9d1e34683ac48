"""Ownership of rows, communication tiles, signals and epochs (csrc/core/ownership.h, signal.h)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core_cases import AG_GEMM, GEMM_AR, GEMM_RS
from flux import _C

core = _C.core

LIMIT = 2**31 - 1


@given(m=st.integers(1, 10**6), world=st.integers(1, 256))
@example(m=1, world=8)
@example(m=5, world=4)
@example(m=7, world=4)
@example(m=9, world=8)
def test_chunks_partition_the_rows(m: int, world: int) -> None:
    share = -(-m // world)
    assert core.chunk_rows(m, world) == share
    at = 0
    for rank in range(world):
        begin, end = core.row_begin(m, world, rank), core.row_end(m, world, rank)
        assert begin == at <= end
        assert core.row_count(m, world, rank) == end - begin <= share
        # Only the last non-empty chunk may be short: signal ranges have no hole because of it.
        assert end - begin == share or end == m
        for row in {begin, (begin + end) // 2, end - 1} if begin < end else ():
            assert core.owner_of(m, world, row) == rank
        at = end
    assert at == m


@given(
    op=st.sampled_from([AG_GEMM, GEMM_RS, GEMM_AR]),
    size=st.integers(1, 10**6),
    world=st.integers(1, 256),
)
def test_local_extents_add_up_to_the_global_ones(op: int, size: int, world: int) -> None:
    split, whole = (core.local_n, core.local_k) if op == AG_GEMM else (core.local_k, core.local_n)
    assert sum(split(op, size, world, rank) for rank in range(world)) == size
    assert {whole(op, size, world, rank) for rank in range(world)} == {size}
    # The knobs are chosen from rank 0's share, which must therefore never be the smaller one.
    assert max(split(op, size, world, rank) for rank in range(world)) == split(op, size, world, 0)


tilings = st.tuples(st.integers(1, 150), st.integers(1, 16)).flatmap(
    lambda mw: st.tuples(st.just(mw[0]), st.just(mw[1]), st.integers(1, -(-mw[0] // mw[1]) + 2))
)


@given(tiling=tilings)
@example(tiling=(16, 4, 3))
@example(tiling=(7, 4, 1))
@example(tiling=(1, 8, 1))
def test_every_row_is_in_exactly_one_comm_tile(tiling: tuple[int, int, int]) -> None:
    m, world, comm_rows = tiling
    tiles = core.tiles_per_chunk(m, world, comm_rows)
    seen: dict[int, tuple[int, int]] = {}
    signals: set[int] = set()
    for chunk in range(world):
        for tile in range(tiles):
            begin, end = core.comm_tile_rows(m, world, comm_rows, chunk, tile)
            assert 0 <= begin <= end <= m and end - begin <= comm_rows
            signal = core.signal_index(m, world, comm_rows, chunk, tile)
            assert signal not in signals
            signals.add(signal)
            for row in range(begin, end):
                assert row not in seen
                seen[row] = (chunk, tile)
    assert sorted(seen) == list(range(m))
    assert signals == set(range(world * tiles))
    for row, (chunk, tile) in seen.items():
        assert core.owner_of(m, world, row) == chunk
        assert core.comm_tile_of(m, world, comm_rows, row) == tile


@given(tiling=tilings, data=st.data())
def test_signals_of_rows_is_exactly_the_signals_of_its_rows(
    tiling: tuple[int, int, int], data: st.DataObject
) -> None:
    m, world, comm_rows = tiling
    begin = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(begin + 1, m))
    expected = {
        core.signal_index(
            m,
            world,
            comm_rows,
            core.owner_of(m, world, row),
            core.comm_tile_of(m, world, comm_rows, row),
        )
        for row in range(begin, end)
    }
    first, last = core.signals_of_rows(m, world, comm_rows, begin, end)
    # Set equality also says that no signal of an empty tail tile, which nobody raises, is inside.
    assert set(range(first, last)) == expected


def test_signal_ranges_exhaustively_for_small_problems() -> None:
    for m in range(1, 14):
        for world in range(1, 6):
            chunk = -(-m // world)
            for comm_rows in range(1, chunk + 1):
                tiles = -(-chunk // comm_rows)
                signal = [r // chunk * tiles + r % chunk // comm_rows for r in range(m)]
                for begin in range(m):
                    for end in range(begin + 1, m + 1):
                        first, last = core.signals_of_rows(m, world, comm_rows, begin, end)
                        assert list(range(first, last)) == sorted(set(signal[begin:end]))


@pytest.mark.parametrize(("m", "world"), [(1, 1), (7, 4), (1000, 3)])
def test_a_comm_tile_larger_than_any_chunk_is_the_chunk(m: int, world: int) -> None:
    for rows in (core.chunk_rows(m, world), LIMIT - 1, LIMIT):
        assert core.tiles_per_chunk(m, world, rows) == 1
        for rank in range(world):
            assert core.comm_tile_rows(m, world, rows, rank, 0) == (
                core.row_begin(m, world, rank),
                core.row_end(m, world, rank),
            )


@given(expected=st.integers(0, 2**32 - 1), ahead=st.integers(0, 2**31 - 1))
@example(expected=2**32 - 1, ahead=1)
@example(expected=0, ahead=0)
@example(expected=2**31, ahead=2**31 - 1)
def test_epochs_compare_correctly_across_the_wrap_around(expected: int, ahead: int) -> None:
    """Reached means 0 to 2^31 - 1 calls ahead, modulo 2^32; the other half lies behind."""
    assert core.epoch_reached((expected + ahead) % 2**32, expected)
    assert not core.epoch_reached((expected - ahead - 1) % 2**32, expected)
