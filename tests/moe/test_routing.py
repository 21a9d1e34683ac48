"""Routed rows: the native maps against plain loops, for thousands of random splits."""

from __future__ import annotations

import random
import weakref
from unittest import mock

import pytest
import torch

from flux import _C, Knobs
from flux.backends import dispatch
from flux.backends.unfused import UnfusedBackend
from flux.core.call import Call
from flux.core.knobs import Op
from flux.core.spec import OpSpec
from flux.moe import Routing
from flux.moe.routing import KEPT, Needed, routing_of
from flux.select.heuristic import make_schedule
from harness import STRESS
from moe_cases import brute_force, owner_of
from op_cases import meshes


def draw(rng: random.Random) -> tuple[torch.Tensor, int]:
    total, m = rng.randint(1, 9), rng.randint(1, 24)
    topk = rng.randint(1, 4)
    least = rng.choice((-1, 0, total - 1))
    experts = [[rng.randint(least, total - 1) for _ in range(topk)] for _ in range(m)]
    return torch.tensor(experts), total


def test_maps_equal_plain_loops() -> None:
    rng = random.Random(42)
    for _ in range(2000 * STRESS):
        experts, total = draw(rng)
        m, world = experts.shape[0], rng.randint(1, 9)
        first = rng.randint(0, total - 1)
        count = rng.randint(0, total - first)
        routing = Routing(experts, total, first, count, world)
        tokens, choices, rows = brute_force(experts, first, count)
        assert routing.rows == len(tokens)
        assert routing.tokens.tolist() == tokens
        assert routing.choices.tolist() == choices
        assert routing.positions.tolist() == rows
        begin = rng.randint(0, m)
        end = rng.randint(begin, m)
        groups = routing.groups(begin, end)
        inside = [row for row, token in enumerate(tokens) if begin <= token < end]
        assert [row for _, b, e in groups for row in range(b, e)] == inside
        assert all(b < e for _, b, e in groups)
        chosen = experts.reshape(-1)
        assert all(int(chosen[choices[b]]) == first + expert for expert, b, _ in groups)


def test_runs_of_owners_follow_each_other() -> None:
    """Offsets by expert and owner: the rows of a chunk are found without a search."""
    rng = random.Random(7)
    for _ in range(500):
        experts, total = draw(rng)
        m, world = experts.shape[0], rng.randint(1, 9)
        routing = Routing(experts, total, world=world)
        offsets = routing.native.offsets
        assert len(offsets) == total * world + 1
        for owner in range(world):
            begin, end = _C.core.row_begin(m, world, owner), _C.core.row_end(m, world, owner)
            runs = [
                (e, offsets[e * world + owner], offsets[e * world + owner + 1])
                for e in range(total)
            ]
            assert [run for run in runs if run[1] < run[2]] == routing.groups(begin, end)
            for _, first, last in runs:
                owners = [owner_of(m, world, int(t)) for t in routing.tokens[first:last]]
                assert owners == [owner] * (last - first)


def test_equal_choices_have_equal_checksums() -> None:
    rng = random.Random(3)
    seen: dict[int, list[list[int]]] = {}
    for _ in range(3000):
        experts, total = draw(rng)
        checksum = Routing(experts, total).checksum
        assert checksum == Routing(experts.to(torch.int32), total, 0, 0, 3).checksum
        assert seen.setdefault(checksum, experts.tolist()) == experts.tolist()


@pytest.mark.parametrize(
    ("experts", "error", "text"),
    [
        (torch.zeros(3), TypeError, "must be integers"),
        (torch.ones(3, 5, dtype=torch.bool), TypeError, "must be integers"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"must be \[M, topk\]"),
        (torch.zeros(0, 2, dtype=torch.int64), ValueError, r"got \[0, 2\]"),
        (torch.tensor([[0, 1], [5, 4]]), ValueError, "below 5, got 5 for token 1"),
    ],
)
def test_bad_experts_are_named(experts: torch.Tensor, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Routing(experts, 5)


def _behind(sources: dict[int, int], rank: int) -> set[int]:
    """The ranks that get a chunk through ``rank``, itself included."""
    further = [_behind(sources, to) for to, source in sources.items() if source == rank]
    return {rank}.union(*further)


def test_hops_carry_what_ranks_behind_them_need() -> None:
    """Every order and mesh: a transfer has the rows that ranks behind it need, and no other."""
    rng = random.Random(5)
    for _ in range(60 * STRESS):
        world = rng.choice((2, 3, 4, 6, 8))
        ep = rng.choice([d for d in range(2, world + 1) if world % d == 0])
        total, m = rng.randint(ep, 9), rng.randint(1, 24)
        experts = torch.randint(-1, total, (m, rng.randint(1, 3)))
        needs = [
            set(Needed(Routing(experts, total), ep, world).of_rank(r).tolist())
            for r in range(world)
        ]
        order = rng.choice(("direct", "ring1d", "ring2d", "hierarchical"))
        knobs = Knobs(order=order, direction=rng.choice(("push", "pull")), comm_tile_rows=2)
        topology = rng.choice(meshes(world))
        schedules = [
            make_schedule("ag_gemm", (m, 8, 8), world, rank, topology, knobs)
            for rank in range(world)
        ]
        moves = [t for s in schedules for t in s.transfers if t.src != t.dst]
        for schedule in schedules:
            hops = _C.Hops(schedule.native, ep)
            selection = Needed(Routing(experts, total), ep, world).selection(hops)
            rows = torch.empty(m, dtype=torch.int64)
            for t in schedule.transfers:
                sources = {move.dst: move.src for move in moves if move.chunk == t.chunk}
                wanted = set().union(*(needs[r] for r in _behind(sources, t.dst)))
                range_ = (t.row_begin, t.row_end)
                count = selection.gathered(t.chunk, t.dst, *range_, rows.data_ptr())
                carried = {t.row_begin + int(row) for row in rows[:count]}
                assert carried == wanted & set(range(*range_)), (schedule, t)


def test_a_routing_is_made_once_for_equal_experts() -> None:
    """Ops of a layer share it. It does not change with the caller's tensor, nor by inference."""
    experts = torch.tensor([[0, 1], [2, 3], [1, 2]])
    of_caller, sizes = experts.clone(), (4, 0, 2, 2)
    with torch.inference_mode():
        made = routing_of(of_caller, *sizes)
    of_caller.fill_(3)
    assert routing_of(experts, *sizes) is made and torch.equal(made.experts, experts)
    assert torch.equal(routing_of(of_caller, *sizes).experts, of_caller)
    for other in ((5, 0, 2, 2), (4, 1, 2, 2), (4, 0, 1, 2), (4, 0, 2, 1)):
        assert routing_of(experts, *other) is not made
    with torch.inference_mode():
        needed = made.needed(2, 2)
        assert needed is made.needed(2, 2) is not made.needed(1, 2)
        tensors = [made.tokens, *made.bags, needed.of_rank(0), needed.exchanged(0).order]
    assert not any(tensor.is_inference() for tensor in tensors)
    last = weakref.ref(made)
    del made, needed
    for total in range(5, 5 + KEPT):
        routing_of(experts, total, 0, 2, 2)
    assert last() is None  # without garbage collection, which counts objects, not bytes


def test_tokens_of_a_gpu_are_taken_there() -> None:
    """The library's path has no tensor of another device in a kernel: on meta as on a GPU."""
    m, world, rank, k = 10, 2, 1, 3
    spec = OpSpec(Op.ag_gemm, m, (4,), k, torch.float32, False, "sum", experts=4, topk=2, ep=2)
    routing = Routing(torch.arange(2 * m).view(m, 2) % 4, 4, 2, 2, world)
    needed = Needed(routing, 2, world)
    call = Call(m, torch.empty(5, k, device="meta"), (), (4,), (None,), needed=needed)
    backend = UnfusedBackend(spec, None, rank, world, 1.0)
    exchanged, kept = needed.exchanged(rank), dispatch.sums_of_bags
    with (
        mock.patch.object(dispatch.dist, "all_to_all_single"),
        mock.patch.object(dispatch, "sums_of_bags", wraps=kept) as sums,
    ):
        gathered = backend._start_dispatch(call, exchanged)()
        summed = backend._combine(torch.empty(5, 4, device="meta"), exchanged, lambda: None)
    assert (gathered.device.type, *gathered.shape) == ("meta", 5, k)
    assert (summed.device.type, *summed.shape) == ("meta", 5, 4)
    assert {tensor.device.type for tensor in sums.call_args.args} == {"meta"}
