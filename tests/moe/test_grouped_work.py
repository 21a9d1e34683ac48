"""Maps of grouped kernels (csrc/schedule/grouped.h), against brute force."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from flux import _C, Knobs, Topology
from flux.core.knobs import ClusterTile, Direction, Order, Swizzle
from flux.core.schedule import TileSchedule
from flux.moe import Routing
from flux.select.heuristic import make_schedule
from harness import STRESS
from moe_cases import ROUTINGS, MoeCase, owner_of, routing_of
from virtual_cases import knobs_of, topology_of


def _maps(work: _C.GroupedWork) -> list[list[int]]:
    """Items, experts, rows, tokens, sources, counts, pushes, pushed and shares."""
    room = torch.empty(sum(work.sizes), dtype=torch.int32)
    work.fill(room.data_ptr())
    return [part.tolist() for part in room.split(work.sizes)]


def _case(seed: int, op: str) -> tuple[Routing, TileSchedule, int]:
    """A routing, a schedule, and a tile's rows."""
    rng = random.Random(f"{op} {seed}")
    world = rng.choice([1, 2, 3, 4, 8])
    m = rng.choice([1, world, rng.randint(2, 60), rng.randint(60, 300)])
    experts = rng.choice([1, 2, 5, 13])
    rank, tile_m = rng.randrange(world), rng.choice([1, 3, 16, 64])
    case = MoeCase("gather", m, 8, 8, experts, topk=rng.randint(1, experts))
    choices = routing_of(case, m, rng.choice(ROUTINGS), seed)
    first = rng.randrange(experts)
    routing = Routing(choices, experts, first, rng.randint(0, experts - first), world)
    knobs = Knobs() if world == 1 else knobs_of(rng, world)
    topology = Topology(1, 1, 1) if world == 1 else topology_of(rng, world)
    cluster = ClusterTile(tile_m, 32)
    options = {"itemsize": 2, "cluster": cluster}
    schedule = make_schedule(op, (m, 64, 8), world, rank, topology, knobs, **options)
    return routing, schedule, tile_m


def _chunks(schedule: TileSchedule) -> list[int]:
    """Owners in the order in which their rows arrive."""
    knobs = schedule.knobs
    order = _C.core.TileOrder(
        op=0,
        m=schedule.shape[0],
        n=8,
        tile_m=1,
        tile_n=8,
        raster=1,
        swizzle=Swizzle[knobs.swizzle or "rank_shift"],
        order=Order[knobs.order or "direct"],
        direction=Direction[knobs.direction or "push"],
        mesh=schedule.topology.mesh,
        rank=schedule.rank,
    )
    return [order.chunk_at(p) for p in range(schedule.world)]


def _check_rows(routing: Routing, tile_m: int, maps: list[list[int]]) -> None:
    """Check that each routed row is in one tile, beside rows of its expert alone."""
    _, experts, rows, tokens, *_ = maps
    assert len(rows) == len(tokens) == tile_m * len(experts)
    assert sorted(r for r in rows if r >= 0) == list(range(routing.rows))
    expert_of = {
        r: e for e, b, end in routing.groups(0, len(routing.positions)) for r in range(b, end)
    }
    for at, row in enumerate(rows):
        tile = at // tile_m
        if row < 0:
            assert at % tile_m and tokens[at] == tokens[tile * tile_m]
            continue
        assert expert_of[row] == experts[tile]
        assert tokens[at] == routing.tokens[row]
    filled = Counter(at // tile_m for at, row in enumerate(rows) if row >= 0)
    partial = Counter(experts[tile] for tile, count in filled.items() if count < tile_m)
    assert all(count == 1 for count in partial.values()), "only an expert's last tile has room"


@pytest.mark.parametrize("seed", range(60 * STRESS))
def test_tiles_come_as_their_last_token_arrives(seed: int) -> None:
    routing, schedule, tile_m = _case(seed, "ag_gemm")
    m, world, columns = schedule.shape[0], schedule.world, seed % 3 + 1
    maps = _maps(routing.native.gather_work(schedule.native, tile_m, columns))
    items, experts, rows, tokens, *others = maps
    _check_rows(routing, tile_m, maps)
    assert not any(others)
    assert items[-1] == -1, "the last item awaits all rows"
    assert sorted(items[:-1]) == list(range(len(experts) * columns))
    chunks = _chunks(schedule)
    arrival = {t: (chunks.index(owner_of(m, world, t)), t) for t in range(m)}
    of_expert: dict[int, list[tuple[int, int]]] = {}
    for at, row in enumerate(rows):
        if row >= 0:
            of_expert.setdefault(experts[at // tile_m], []).append(arrival[tokens[at]])
    assert all(arrivals == sorted(arrivals) for arrivals in of_expert.values())
    of_tiles = [tokens[i * tile_m : (i + 1) * tile_m] for i in range(len(experts))]
    last = [max(arrival[t][0] for t in of_tile) for of_tile in of_tiles]
    visited = [last[item // columns] for item in items[:-1]]
    assert visited == sorted(visited)


@pytest.mark.parametrize("seed", range(60 * STRESS))
def test_a_sum_is_claimed_behind_its_products(seed: int) -> None:
    routing, schedule, tile_m = _case(seed, "gemm_rs")
    m, ahead = schedule.shape[0], seed % 4
    maps = _maps(routing.native.sum_work(schedule.native, tile_m, 32, ahead))
    items, experts, rows, tokens, sources, counts, *others = maps
    _check_rows(routing, tile_m, maps)
    assert not any(others)
    assert all(s == (r if r >= 0 else s) for r, s in zip(rows, sources, strict=True))
    columns, tile_rows = 2, -(-m // tile_m)
    sums = [-1 - item for item in items if item < 0]
    assert sorted(sums) == list(range(tile_rows * columns))
    assert sorted(i for i in items if i >= 0) == list(range(len(experts) * columns))
    assert counts == [
        sum(t // tile_m == tile for t in routing.tokens.tolist()) for tile in range(tile_rows)
    ]
    products = [at for at, item in enumerate(items) if item >= 0]
    for at, item in enumerate(items):
        if item >= 0:
            continue
        tile, column = divmod(-1 - item, columns)
        needed = {
            place // tile_m
            for place, row in enumerate(rows)
            if row >= 0 and tokens[place] // tile_m == tile
        }
        before = {i for i in items[:at] if i >= 0}
        assert {t * columns + column for t in needed} <= before
        behind = [p for p in products if items[p] // columns in needed]
        between = [p for p in products if behind and behind[-1] < p < at]
        rest = [p for p in products if p > at]
        assert len(between) >= ahead or not rest or not needed


def _takers(routing: Routing, world: int, ep: int) -> list[set[int]]:
    """Ranks with an expert of each token."""
    parts = world // ep
    return [
        {
            owner_of(routing.total, ep, e) * parts + part
            for e in of_token
            if e >= 0
            for part in range(parts)
        }
        for of_token in routing.experts.tolist()
    ]


def _parallel(seed: int, op: str) -> tuple[Routing, TileSchedule, int, int]:
    """A routing, a schedule, a tile's rows, and parts of the experts."""
    routing, schedule, tile_m = _case(seed, op)
    world = schedule.world
    ep = random.Random(seed).choice([d for d in range(1, world + 1) if world % d == 0])
    return routing, schedule, tile_m, ep


@pytest.mark.parametrize("seed", range(60 * STRESS))
def test_rows_are_pushed_where_an_expert_has_them(seed: int) -> None:
    routing, schedule, tile_m, ep = _parallel(seed, "ag_gemm")
    world, rank = schedule.world, schedule.rank
    work = routing.native.gather_work(schedule.native, tile_m, 2)
    tiles, *_ = _maps(work)
    work.dispatch(schedule.native, routing.experts.data_ptr(), routing.topk, routing.total, ep)
    items, *_, pushes, pushed, shares = _maps(work)
    assert not shares
    count = len(pushes) // 4
    assert items == [*range(-2, -2 - count, -1), *tiles], "pushes are claimed before tiles"
    takers = _takers(routing, world, ep)
    m, comm = schedule.shape[0], schedule.knobs.comm_tile_rows
    assert comm is not None
    expected = {}
    for peer in set(range(world)) - {rank}:
        for tile in range(-(-_C.core.chunk_rows(m, world) // comm)):
            begin, end = _C.core.comm_tile_rows(m, world, comm, rank, tile)
            if begin < end:
                signal = _C.core.signal_index(m, world, comm, rank, tile)
                expected[peer, signal] = [t for t in range(begin, end) if peer in takers[t]]
    found = [pushes[at : at + 4] for at in range(0, 4 * count, 4)]
    assert len(found) == len(expected)
    assert {(peer, signal): pushed[b:e] for peer, signal, b, e in found} == expected


@pytest.mark.parametrize("seed", range(60 * STRESS))
def test_a_sum_knows_whose_partials_are_there(seed: int) -> None:
    routing, schedule, tile_m, ep = _parallel(seed, "gemm_rs")
    world, rank = schedule.world, schedule.rank
    work = routing.native.sum_work(schedule.native, tile_m, 32, 1)
    work.combine(schedule.native, routing.experts.data_ptr(), routing.topk, routing.total, ep)
    *_, pushes, pushed, shares = _maps(work)
    takers = _takers(routing, world, ep)
    own = [takers[t] for t in range(len(takers)) if owner_of(len(takers), world, t) == rank]
    assert not pushes and not pushed
    assert [{r for r in range(world) if bits >> r & 1} for bits in shares] == own
