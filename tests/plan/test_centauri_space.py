"""Centauri's partition space and tiers: closed forms against brute force."""

from __future__ import annotations

import itertools
import random
from math import prod
from typing import Any

import numpy as np
import pytest

from flux.bench.shapes import Layer, Moe
from flux.machine.cluster import load_cluster
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, GraphError, Operator
from flux.plan.mesh import SubGroup, group_partition, parse_group
from flux.plan.model import Parallel
from flux.plan.policies.centauri import even_chunks
from flux.plan.policies.centauri_order import blocks
from flux.plan.policies.centauri_space import (
    even,
    even_by_group,
    meshes,
    uneven_by_group,
)
from flux.plan.policies.passes import Action
from flux.plan.policies.torch_rows import blocks_of
from flux.runtime.execute import members

DENSE = Layer(64, 256, 8, 4, 8, True)
EXPERTS = Layer(64, 0, 8, 8, 8, True, Moe(8, 2, 32))


# -- tiers -----------------------------------------------------------------------------------------


def test_chunks_are_as_many_as_independent_operators_leave() -> None:
    """Algorithm 1, section 3.2.1: whole where these hide the collective, else even chunks."""
    assert [even_chunks(*of) for of in ((5.0, 5.0, 4), (2.0, 5.0, 8), (0.0, 5.0, 4))] == [1, 3, 4]
    assert even_chunks(5e-324, 1e300, 6) == 6


# -- groups ----------------------------------------------------------------------------------------


def test_sub_groups_are_those_that_differ_in_one_index() -> None:
    """By the definition of section 3.1.2, over all ranks of many meshes."""
    rng = random.Random(2)
    assert group_partition([2, 4], 5) == [[1, 5], [4, 5, 6, 7]]
    assert group_partition([2, 8], 0) == [[0, 8], list(range(8))]
    assert group_partition(mesh=np.array([2, 4]), rank=np.int64(5)) == [[1, 5], [4, 5, 6, 7]]
    for _ in range(150):
        mesh = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        index = list(itertools.product(*map(range, mesh)))  # of ranks, in their order
        for rank in range(prod(mesh)):
            found = group_partition(mesh, rank)
            for dim in range(len(mesh)):
                same = [
                    q
                    for q in range(prod(mesh))
                    if all(index[q][j] == index[rank][j] for j in range(len(mesh)) if j != dim)
                ]
                assert found[dim] == same
    bad: list[tuple[Any, Any]] = [([], 0), ([2, 0], 0), ([2, 2], 4), ([2, 2], -1), ([2, True], 0)]
    for mesh, rank in (*bad, ([2, 2.0], 0), ([2, 2], 1.0)):
        with pytest.raises(ValueError, match="must be"):
            group_partition(mesh, rank)


def test_names_of_sub_groups() -> None:
    assert parse_group("dp") == SubGroup("dp")
    assert parse_group("dp:2x4.1") == SubGroup("dp", (2, 4), 1)
    hosts, inside = SubGroup("dp", (3, 16), 1).split((2, 8))
    assert (hosts.name, inside.name) == ("dp:3x2x8.1", "dp:3x2x8.2")
    assert members(Parallel(tp=2, dp=4), "dp:2x2.0") == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert members(Parallel(tp=2, dp=4), "dp:2x2.1") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    for name in ("dp:", "dp:2x4", "dp:2x.0", "dp:2x4.2", "dp:0x4.0", "dp:ax4.0"):
        with pytest.raises(ValueError, match="must look like"):
            parse_group(name)
    op = Operator("r", "all_reduce", "intra", "fwd", 0, "r", shape=(1, 1), group="dp:2")
    with pytest.raises(GraphError, match="r: a part of a group must look like"):
        Graph((op,), ((),))


def test_sub_groups_have_the_links_of_their_ranks() -> None:
    fabric = Fabric(load_cluster("centauri-a"), Parallel(tp=2, dp=8))  # dp: 4 of a host
    assert fabric.resource("dp") == fabric.resource("dp:2x4.0") == "inter"
    assert fabric.resource("dp:2x4.1") == "intra"
    assert fabric.span("dp:2x4.0").per_host == 1 and fabric.span("dp:2x4.1").hosts == 1
    assert meshes(8, 4) == [(2, 4)] and meshes(8, 8) == meshes(8, 1) == meshes(12, 8) == []
    cost = AnalyticCost(fabric, "bfloat16", 2)

    def time(group: str, size: int) -> float:
        op = Operator("g", "all_gather", fabric.resource(group), "fwd", 0, "g", shape=(1, size))
        return cost.solo(op._replace(group=group))

    size = 1 << 28  # by groups a half crosses between the hosts, of a ring 7 of 8 parts
    assert time("dp:2x4.0", size // 4) == pytest.approx(4 / 7 * time("dp", size), rel=1e-3)
    assert time("dp:2x4.1", size) < 0.2 * time("dp", size)


# -- pieces ---------------------------------------------------------------------------------------


def test_pieces_bring_the_whole() -> None:
    for inter, intra in itertools.product((2, 3, 6), (2, 4, 8)):
        shapes = [even(3), even_by_group("all_gather", 3, intra)]
        shapes += [even_by_group("reduce_scatter", 3, intra)]
        for count, first in ((2, True), (2, False), (3, False)):
            pieces = uneven_by_group(count, first, inter, intra)
            shapes.append(pieces)
            world = inter * intra  # fractions of Algorithm 1
            own, twins = (inter if first else intra) / world, (inter - 1) / world
            given = [own, 1 - own] if count == 2 else [own, twins, 1 - own - twins]
            assert [piece.brings for piece in pieces] == pytest.approx(given)
        for pieces in shapes:
            assert sum(piece.brings for piece in pieces) == pytest.approx(1.0)
        crossing = [sum(p.volume for p in pieces if p.where == "inter") for pieces in shapes[3:]]
        assert crossing == pytest.approx([1 / intra, 1.0, 1 / intra])


@pytest.mark.parametrize("stages, micros", [(1, 1), (1, 6), (4, 8), (4, 2)])
@pytest.mark.parametrize("forward, backward", [(1, 1), (4, 1), (1, 4), (8, 8)])
def test_blocks_hold_every_pass_once(stages: int, micros: int, forward: int, backward: int) -> None:
    for stage in range(stages):
        found = blocks(stage, stages, micros, forward, backward)
        flat = [one for block in found for one in block]
        passes = {kind: [Action(stage, kind, micro) for micro in range(micros)] for kind in "FB"}
        assert sorted(flat) == sorted(passes["F"] + passes["B"])
        assert all(map(int.__lt__, map(flat.index, passes["F"]), map(flat.index, passes["B"])))
        assert found[0] == tuple(passes["F"][:forward])
        assert found[-1] == tuple(passes["B"][-min(backward, micros) :])


def test_interleaved_blocks_run_to_their_end_and_are_megatrons_where_groups_are_small() -> None:
    """All ranks by their orders alone: each pass once, and none waits for a later one."""
    rng = random.Random(7)
    for _ in range(400):
        ranks, chunks, micros = rng.randint(2, 5), rng.randint(2, 4), rng.randint(1, 12)
        sizes = [rng.choice((1, ranks, rng.randint(1, 14))) for _ in "FB"]
        rows = [
            [one for block in blocks(rank, ranks, micros, *sizes, chunks) for one in block]
            for rank in range(ranks)
        ]
        last, done, moved = ranks * chunks - 1, set(), True
        places = [0] * ranks
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while places[rank] < len(row):
                    stage, kind, micro = action = row[places[rank]]
                    assert stage % ranks == rank and action not in done
                    before = Action(stage - 1, "F", micro) if stage else None
                    if kind == "B":
                        ends = stage == last
                        before = Action(stage + (not ends), "F" if ends else "B", micro)
                    if before is not None and before not in done:
                        break
                    done.add(action)
                    places[rank], moved = places[rank] + 1, True
        assert len(done) == 2 * micros * ranks * chunks, (ranks, chunks, micros, sizes)
        # A stage's last backward has gradients of its weights complete: stages end in turn.
        ends = [[row.index(Action(c * ranks + r, "B", micros - 1)) for c in range(chunks)]
                for r, row in enumerate(rows)]  # fmt: skip
        assert all(of == sorted(of, reverse=True) for of in ends)
    for ranks, micros in ((2, 4), (3, 6), (4, 8)):
        torchs = blocks_of("Interleaved1F1B", ranks, 2 * ranks, micros)
        assert [tuple(blocks(r, ranks, micros, 1, 1, 2)) for r in range(ranks)] == list(torchs)
