"""Tile schedules (csrc/schedule/schedule.cpp): transfers, visits and waits of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core_cases import (
    AG_GEMM,
    DIRECT,
    GATHER,
    GEMM_AR,
    GEMM_RS,
    HIERARCHICAL,
    ORDERS,
    PULL,
    PUSH,
    RANK_SHIFT,
    RECEIVE,
    REDUCE,
    RESULT,
    RING1D,
    SEND,
    STORE_DIRECT,
    STORE_STAGED,
    XOR,
    Case,
    Schedule,
    Transfer,
    cases,
    tile_order,
)

ag_cases = cases(ops=(AG_GEMM,))
rs_cases = cases(ops=(GEMM_RS, GEMM_AR))


def comm_tiles(c: Case, chunk: int) -> list[range]:
    """Rows of the communication tiles of a chunk, by definition."""
    own = c.own_rows(chunk)
    return [own[i : i + c.comm_rows] for i in range(0, len(own), c.comm_rows)]


def assert_well_formed(c: Case, transfers: Iterable[Transfer]) -> None:
    for t in transfers:
        assert t.rows == comm_tiles(c, t.chunk)[t.tile]


def waited(schedule: Schedule) -> set[int]:
    return {signal for v in schedule.visits for signal in range(*v.waits)}


@given(c=cases(), data=st.data())
def test_visits_cover_the_output_exactly_once(c: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, c.world - 1))
    schedule = c.build(rank)
    t = tile_order(c, rank)
    assert len(schedule.visits) == t.tile_count()
    covered: Counter[tuple[int, int]] = Counter()
    rows_seen = set()
    for slot, v in enumerate(schedule.visits):
        if not c.has_sequence:
            assert (v.row_begin // c.tile_m, v.col_begin // c.tile_n) == t.tile_at(slot)
        covered.update((row, col) for row in v.rows for col in v.cols)
        rows_seen.update(v.rows)
        owners = {c.owner(row) for row in v.rows}
        assert v.owner == (owners.pop() if len(owners) == 1 else -1)
    columns = range(c.local_n(rank))
    assert covered == Counter((row, col) for row in range(c.m) for col in columns)
    # Also where a rank has no columns: it must not leave the call before its rows are there.
    assert rows_seen == set(range(c.m))


@given(c=ag_cases)
def test_a_visit_waits_for_exactly_the_signals_of_its_rows(c: Case) -> None:
    for rank, schedule in enumerate(c.build_all()):
        mixed = False
        for v in schedule.visits:
            if v.owner == rank:
                assert len(range(*v.waits)) == 0
                continue
            assert set(range(*v.waits)) == {c.signal_of_row(row) for row in v.rows}
            mixed |= rank in {c.owner(row) for row in v.rows}
        assert schedule.publishes_own == (c.world > 1 and (c.direction == PULL or mixed))


@given(c=ag_cases)
@example(c=Case(AG_GEMM, 7, 4, 4, (1, 1, 4), 3, 1, 1, 1, PUSH, RING1D, RANK_SHIFT, STORE_STAGED))
def test_every_gathered_tile_is_moved_exactly_once(c: Case) -> None:
    schedules = c.build_all()
    moved: Counter[tuple[int, int, int]] = Counter()  # (chunk, tile, destination)
    for rank, schedule in enumerate(schedules):
        assert_well_formed(c, schedule.transfers)
        remote = [t for t in schedule.transfers if t.src != t.dst]
        local = [t for t in schedule.transfers if t.src == t.dst]
        assert all((t.dst if c.direction == PULL else t.src) == rank for t in remote)
        assert [t.step for t in remote] == sorted(t.step for t in remote)
        for t in schedule.transfers:
            assert t.forwarded == (t.src != t.chunk)
            assert t.signal == c.signal_of_row(t.row_begin)
            moved[t.chunk, t.tile, t.dst] += 1
        # Own tiles: first for peers that pull them; behind what peers wait for if only this rank
        # reads them, and before what waits for peers itself.
        published = [(t.chunk, t.tile, t.dst) for t in local]
        own = [(rank, tile, rank) for tile in range(len(comm_tiles(c, rank)))]
        assert published == (own if schedule.publishes_own else [])
        forwarded = [t.forwarded for t in remote]
        first = 0 if c.direction == PULL else [*forwarded, True].index(True)
        assert schedule.transfers == [*remote[:first], *local, *remote[first:]]
        if c.world > 1:
            assert schedule.program == [(GATHER, i) for i in range(len(schedule.transfers))]
    expected = Counter(
        (chunk, tile, dst)
        for chunk in range(c.world)
        for tile in range(len(comm_tiles(c, chunk)))
        for dst in range(c.world)
        if dst != chunk or schedules[dst].publishes_own
    )
    assert moved == expected
    raised = {
        dst: {t.signal for s in schedules for t in s.transfers if t.dst == dst}
        for dst in range(c.world)
    }
    for rank, schedule in enumerate(schedules):
        assert waited(schedule) <= raised[rank]
        for t in schedule.transfers:
            if t.forwarded or (c.direction == PULL and t.src != t.dst):
                assert t.signal in raised[t.src]


@given(c=rs_cases)
def test_every_partial_tile_leaves_exactly_once_and_when_it_is_complete(c: Case) -> None:
    for rank, schedule in enumerate(c.build_all()):
        assert_well_formed(c, schedule.transfers)
        assert sorted((t.chunk, t.tile) for t in schedule.transfers) == [
            (owner, tile) for owner in range(c.world) for tile in range(len(comm_tiles(c, owner)))
        ]
        assert all((t.src, t.dst) == (rank, c.holder(t.chunk, rank)) for t in schedule.transfers)
        if not c.has_sequence:
            position = {tile_order(c, rank).chunk_at(p): p for p in range(c.world)}
            assert all(t.step == position[t.chunk] for t in schedule.transfers)
        # In the order of the transfers, so that progress is a single number, each exactly once.
        assert [i for v in schedule.visits for i in range(*v.completes)] == list(
            range(len(schedule.transfers))
        )
        last_visit = {row: i for i, v in enumerate(schedule.visits) for row in v.rows}
        for slot, v in enumerate(schedule.visits):
            for i in range(*v.completes):
                # Not before all of its rows are computed, and at once when they are.
                assert slot == max(last_visit[row] for row in schedule.transfers[i].rows)


@pytest.mark.parametrize("names", ["ab", "aabb", "aaaabbbb", "aabbcc", "abab", "aaab", "aabbb"])
@pytest.mark.parametrize("spread", [False, True])
def test_ranks_of_a_host_store_to_as_many_ranks_at_a_time_as_they_can(
    names: str, spread: bool
) -> None:
    """Between hosts; without ``spread`` to one rank, whose sum then leaves early."""
    world, hosts = len(names), tuple("abc".index(name) for name in names)
    c = LEGAL._replace(m=3 * world, mesh=(1, 1, world), order=HIERARCHICAL, hosts=hosts)
    c = c._replace(spread=spread)
    visited = [[v.owner for v in schedule.visits] for schedule in c.build_all()]
    for rank, owners in enumerate(visited):
        here = c.members(rank)
        assert sorted(owners) == list(range(world)) and owners[-1] == rank
        assert set(owners[-len(here) :]) == set(here)
        far = world - len(here)
        # Owners of one host after the other, as many at a time as there are ranks here.
        for other in set(hosts) - {hosts[rank]}:
            there = [r for r in range(world) if hosts[r] == other]
            begin = min(owners.index(owner) for owner in there)
            assert set(owners[begin : begin + len(there)]) == set(there)
            for at in range(len(there)):
                holders = {c.holder(visited[r][begin + at], r) for r in here}
                whole = at < len(there) // len(here) * len(here)  # as many owners as ranks here
                if whole or not spread:
                    assert len(holders) == (len(here) if spread else 1)
        near = [{visited[r][at] for r in here} for at in range(far, world)]
        assert all(len(at_once) == len(here) for at_once in near)


@given(c=cases())
def test_no_signal_is_raised_twice_in_a_call(c: Case) -> None:
    """Otherwise the second raise could meet the next call, or the first one be too early."""
    schedules = c.build_all()
    raised: Counter[tuple[int, int]] = Counter()  # (pad, signal)
    for rank, schedule in enumerate(schedules):
        raised.update((t.dst, t.signal) for t in schedule.transfers)
        if c.op == GEMM_AR and c.direction == PUSH:
            raised.update((t.dst, t.signal) for t in schedule.results)
        elif c.op == GEMM_AR:
            # The owner announces each reduced tile once, in its own pad; the peers wait there.
            raised.update(
                {(t.src, t.signal) for s in schedules for t in s.results if t.src == rank}
            )
        raised.update((r.target, r.signal) for r in schedule.reductions if r.target != rank)
        if not c.two_levels:
            assert schedule.signals == c.signal_count * (2 if c.op == GEMM_AR else 1)
    assert set(raised.values()) <= {1}
    assert all(signal < schedules[0].signals for _, signal in raised)


@given(c=cases(ops=(GEMM_AR,)))
def test_every_result_tile_reaches_every_rank_exactly_once(c: Case) -> None:
    schedules = c.build_all()
    everyone = Counter(
        (owner, dst, tile)
        for owner in range(c.world)
        for tile in range(len(comm_tiles(c, owner)))
        for dst in range(c.world)
        if owner != dst
    )
    results = [t for s in schedules for t in s.results]
    assert_well_formed(c, results)
    assert Counter((t.chunk, t.dst, t.tile) for t in results) == everyone
    assert all(t.forwarded == (t.chunk != t.src) for t in results)
    assert c.two_levels or not any(t.forwarded for t in results)
    # A region of signals of its own, behind those for partials of the same call.
    first = schedules[0].signals - c.signal_count
    assert all(t.signal == first + c.signal_of_row(t.row_begin) for t in results)
    receipts = [t for s in schedules for t in s.receipts]
    assert sorted(receipts) == (sorted(results) if c.direction == PUSH else [])
    for rank, schedule in enumerate(schedules):
        mover = "src" if c.direction == PUSH else "dst"
        assert all(getattr(t, mover) == rank for t in schedule.results)
        assert all(t.dst == rank for t in schedule.receipts)


@given(c=rs_cases)
def test_reduction_programs_are_complete_and_ordered(c: Case) -> None:
    for rank, schedule in enumerate(c.build_all()):
        program = schedule.program
        by_kind = {kind: [i for k, i in program if k == kind] for kind in range(5)}
        staged = c.store == STORE_STAGED
        assert by_kind[GATHER] == []
        assert by_kind[SEND] == (list(range(len(schedule.transfers))) if staged else [])
        assert by_kind[REDUCE] == list(range(len(schedule.reductions)))
        own = [r.tile for r in schedule.reductions if r.target == rank]
        assert own == list(range(len(comm_tiles(c, rank))))
        combined = [(r.owner, r.tile) for r in schedule.reductions if r.target != rank]
        assert combined == [
            (t.chunk, t.tile) for t in schedule.transfers if t.dst == rank != t.chunk
        ]
        assert by_kind[RESULT] == list(range(len(schedule.results)))
        assert by_kind[RECEIVE] == list(range(len(schedule.receipts)))
        # Sends wait for nobody, so they come first, but for sums that leave at once, which all
        # ranks of a host come to in one order if they are not spread; taking results in waits for
        # everybody.
        kinds = [kind for kind, _ in program]
        if not c.has_sequence or c.spread:
            assert kinds[: len(by_kind[SEND])] == [SEND] * len(by_kind[SEND])
        elif staged:
            for i, r in enumerate(schedule.reductions):
                sent = [t.chunk == r.owner and t.tile == r.tile for t in schedule.transfers]
                assert program.index((SEND, sent.index(True))) < program.index((REDUCE, i))
        assert kinds[len(kinds) - len(by_kind[RECEIVE]) :] == [RECEIVE] * len(by_kind[RECEIVE])
        for kind, i in program:
            if kind == RESULT and schedule.results[i].chunk == rank:
                tile = schedule.results[i].tile
                targets = [(r.target, r.tile) for r in schedule.reductions]
                reduced = program.index((REDUCE, targets.index((rank, tile))))
                assert reduced < program.index((RESULT, i))


@given(c=cases())
def test_parcels_are_what_two_ranks_exchange_in_the_senders_order(c: Case) -> None:
    """Across hosts nothing else moves: every signal a peer awaits from here, exactly once."""
    schedules = c.build_all()
    for rank, schedule in enumerate(schedules):
        for peer in range(c.world):
            if peer == rank or c.direction == PULL:
                continue
            sent = [signal for _, _, _, _, signal, _ in schedule.parcels_for(peer)]
            moved = [*schedule.transfers, *schedule.results]
            expected = [t.signal for t in moved if t.dst == peer]
            expected += [r.signal for r in schedule.reductions if r.target == peer]
            assert sorted(sent) == sorted(expected) and len(set(sent)) == len(sent)


@given(c=cases())
def test_hierarchical_sends_every_row_to_each_other_host_once(c: Case) -> None:
    """The least that can be sent: one copy of each row, or one sum per host; both: AllReduce."""
    if c.order != HIERARCHICAL or c.direction == PULL:
        return
    hosts = len(set(c.host_of))
    crossing = 0
    for rank, schedule in enumerate(c.build_all()):
        for peer in range(c.world):
            if c.host_of[peer] != c.host_of[rank]:
                crossing += sum(p[3] - p[2] for p in schedule.parcels_for(peer))
    assert crossing == (hosts - 1) * c.m * (2 if c.op == GEMM_AR else 1)


@given(c=cases(ops=(AG_GEMM,), max_m=30), data=st.data())
def test_schedules_of_different_calls_share_no_state(c: Case, data: st.DataObject) -> None:
    """Building is a pure function: twice the same, whatever was built in between."""
    rank = data.draw(st.integers(0, c.world - 1))
    first = c.build(rank)
    c._replace(m=c.m + 1, tile_m=c.tile_m + 1).build(rank)
    again = c.build(rank)
    assert (first.visits, first.transfers, first.program) == (
        again.visits,
        again.transfers,
        again.program,
    )


LEGAL = Case(
    op=GEMM_RS,
    m=8,
    n=6,
    k=5,
    mesh=(1, 1, 3),
    tile_m=3,
    tile_n=6,
    raster=1,
    comm_rows=1,
    direction=PUSH,
    order=DIRECT,
    swizzle=RANK_SHIFT,
    store=STORE_DIRECT,
)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"m": 0}, ["(0, 6, 5)"]),
        ({"m": -4}, ["(-4, 6, 5)"]),
        ({"n": 0}, ["(8, 0, 5)"]),
        ({"k": -1}, ["(8, 6, -1)"]),
        ({"op": 3}, ["all-to-all", "rows of each rank", "got 0"]),
        ({"op": 5}, ["op", "5"]),
        ({"op": -1}, ["op", "-1"]),
        ({"order": len(ORDERS)}, ["order", str(len(ORDERS))]),
        ({"direction": 2}, ["direction", "2"]),
        ({"swizzle": 3}, ["swizzle", "3"]),
        ({"store": 2}, ["store", "2"]),
        ({"mesh": (0, 1, 1)}, ["(0, 1, 1)"]),
        ({"mesh": (-1, -1, 3)}, ["(-1, -1, 3)"]),
        ({"mesh": (1, -2, 3)}, ["(1, -2, 3)"]),
        ({"tile_m": 0}, ["(0, 6)"]),
        ({"tile_n": -3}, ["(3, -3)"]),
        ({"raster": 0}, ["raster", "0"]),
        ({"comm_rows": 0}, ["comm_tile_rows", "0"]),
        ({"swizzle": XOR}, ["xor", "3"]),
        ({"tile_m": 2}, ["tile_m 2", "3 rows", "staged"]),
        ({"tile_m": 8}, ["tile_m 8", "3 rows", "staged"]),
    ],
    ids=str,
)
def test_illegal_specifications_are_refused_with_their_values(
    change: dict[str, int], values: list[str]
) -> None:
    LEGAL.build(0)
    with pytest.raises(ValueError) as refused:
        LEGAL._replace(**change).build(0)
    for value in values:
        assert value in str(refused.value)


@pytest.mark.parametrize("rank", [-1, 3, 2**31 - 1])
def test_ranks_outside_the_world_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 3\).*{rank}"):
        LEGAL.build(rank)
