"""Communication orders (csrc/core/comm_order.h): source and step of each chunk, per rank."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core_cases import (
    DIRECT,
    DIRECTIONS,
    HIERARCHICAL,
    NONE,
    NUMA,
    ORDERS,
    PULL,
    PUSH,
    RANK_SHIFT,
    RING1D,
    RING2D,
    XOR,
    Mesh,
    meshes,
)
from flux import _C

core = _C.core

orders = st.sampled_from(ORDERS)
directions = st.sampled_from(DIRECTIONS)
any_mesh = meshes(24)


def world_of(mesh: Mesh) -> int:
    return mesh[0] * mesh[1] * mesh[2]


def node_of(mesh: Mesh, rank: int) -> int:
    return rank // (mesh[1] * mesh[2])


def domain_of(mesh: Mesh, rank: int) -> int:
    """Domains are numbered through all nodes."""
    return rank // mesh[2]


def receives(order: int, mesh: Mesh, direction: int, rank: int) -> list[tuple[int, int]]:
    """Return (chunk, peer) of every step."""
    return [core.recv_hop(order, mesh, direction, rank, s) for s in range(world_of(mesh) - 1)]


@given(order=orders, mesh=any_mesh, direction=directions)
@example(order=NUMA, mesh=(2, 2, 2), direction=PULL)
@example(order=HIERARCHICAL, mesh=(3, 1, 4), direction=PUSH)
@example(order=RING2D, mesh=(1, 3, 5), direction=PUSH)
def test_every_remote_chunk_arrives_exactly_once(order: int, mesh: Mesh, direction: int) -> None:
    world = world_of(mesh)
    for rank in range(world):
        chunks = [chunk for chunk, _ in receives(order, mesh, direction, rank)]
        assert sorted([rank, *chunks]) == list(range(world))
        assert core.step_of_chunk(order, mesh, direction, rank, rank) == -1
        for step, chunk in enumerate(chunks):
            assert core.step_of_chunk(order, mesh, direction, rank, chunk) == step


@given(order=orders, mesh=any_mesh, direction=directions)
def test_send_hop_is_the_inverse_of_recv_hop(order: int, mesh: Mesh, direction: int) -> None:
    world = world_of(mesh)
    for step in range(world - 1):
        received = {}  # (source, destination) -> chunk
        sent = {}
        for rank in range(world):
            chunk, source = core.recv_hop(order, mesh, direction, rank, step)
            received[source, rank] = chunk
            chunk, destination = core.send_hop(order, mesh, direction, rank, step)
            sent[rank, destination] = chunk
        assert sent == received


@given(order=orders, mesh=any_mesh, direction=directions)
def test_each_step_is_a_permutation_without_fixed_points(
    order: int, mesh: Mesh, direction: int
) -> None:
    world = world_of(mesh)
    for step in range(world - 1):
        destinations = [core.send_hop(order, mesh, direction, r, step)[1] for r in range(world)]
        sources = [core.recv_hop(order, mesh, direction, r, step)[1] for r in range(world)]
        assert sorted(destinations) == sorted(sources) == list(range(world))
        assert all(d != r for r, d in enumerate(destinations))


@given(order=orders, mesh=any_mesh, direction=directions)
def test_a_forwarded_chunk_has_arrived_at_an_earlier_step(
    order: int, mesh: Mesh, direction: int
) -> None:
    for rank in range(world_of(mesh)):
        for step, (chunk, peer) in enumerate(receives(order, mesh, direction, rank)):
            assert core.step_of_chunk(order, mesh, direction, peer, chunk) < step
            assert (peer == chunk) == (core.step_of_chunk(order, mesh, direction, peer, chunk) < 0)


@given(mesh=any_mesh, direction=directions)
def test_direct_takes_every_chunk_from_its_owner(mesh: Mesh, direction: int) -> None:
    world = world_of(mesh)
    for rank in range(world):
        assert all(chunk == peer for chunk, peer in receives(DIRECT, mesh, direction, rank))
        sent = [core.send_hop(DIRECT, mesh, direction, rank, s) for s in range(world - 1)]
        assert all(chunk == rank for chunk, _ in sent)


@given(mesh=any_mesh, direction=directions)
def test_rings_exchange_with_neighbours_only(mesh: Mesh, direction: int) -> None:
    world, lanes = world_of(mesh), mesh[2]
    for rank in range(world):
        left = (rank - 1) % world
        assert all(peer == left for _, peer in receives(RING1D, mesh, direction, rank))
        row, column = divmod(rank, lanes)
        neighbours = {row * lanes + (column - 1) % lanes, (rank - lanes) % world}
        assert {peer for _, peer in receives(RING2D, mesh, direction, rank)} <= neighbours


@given(order=st.sampled_from([HIERARCHICAL, NUMA]), mesh=any_mesh, direction=directions)
@example(order=HIERARCHICAL, mesh=(4, 1, 4), direction=PULL)
@example(order=NUMA, mesh=(3, 2, 2), direction=PUSH)
def test_a_chunk_crosses_into_each_node_exactly_once(
    order: int, mesh: Mesh, direction: int
) -> None:
    crossings: dict[tuple[int, int], int] = {}
    for rank in range(world_of(mesh)):
        for chunk, peer in receives(order, mesh, direction, rank):
            if node_of(mesh, peer) != node_of(mesh, rank):
                key = chunk, node_of(mesh, rank)
                crossings[key] = crossings.get(key, 0) + 1
    assert crossings == {
        (chunk, node): 1
        for chunk in range(world_of(mesh))
        for node in range(mesh[0])
        if node != node_of(mesh, chunk)
    }


@given(mesh=any_mesh, direction=directions)
def test_numa_brings_a_chunk_into_each_domain_exactly_once(mesh: Mesh, direction: int) -> None:
    crossings: dict[tuple[int, int], int] = {}
    for rank in range(world_of(mesh)):
        for chunk, peer in receives(NUMA, mesh, direction, rank):
            if domain_of(mesh, peer) != domain_of(mesh, rank):
                key = chunk, domain_of(mesh, rank)
                crossings[key] = crossings.get(key, 0) + 1
    assert set(crossings.values()) <= {1}
    assert len(crossings) == world_of(mesh) * (mesh[0] * mesh[1] - 1)


@given(mesh=any_mesh, direction=directions)
@example(mesh=(2, 2, 2), direction=PULL)
@example(mesh=(3, 3, 2), direction=PUSH)
def test_numa_goes_between_domains_before_it_goes_between_nodes(mesh: Mesh, direction: int) -> None:
    for rank in range(world_of(mesh)):
        between_domains, between_nodes = [], []
        for step, (chunk, peer) in enumerate(receives(NUMA, mesh, direction, rank)):
            if node_of(mesh, peer) != node_of(mesh, rank):
                between_nodes.append(step)
            elif domain_of(mesh, peer) != domain_of(mesh, rank) and chunk == peer:
                between_domains.append(step)
        assert len(between_domains) == mesh[1] - 1
        assert len(between_nodes) == mesh[0] - 1
        # Both kinds load the CPU's links, so they must not run at the same time.
        assert max(between_domains, default=-1) < min(between_nodes, default=world_of(mesh))


@given(mesh=any_mesh, direction=directions)
def test_hierarchical_goes_between_nodes_first(mesh: Mesh, direction: int) -> None:
    for rank in range(world_of(mesh)):
        far = [
            step
            for step, (_, peer) in enumerate(receives(HIERARCHICAL, mesh, direction, rank))
            if node_of(mesh, peer) != node_of(mesh, rank)
        ]
        assert far == list(range(mesh[0] - 1))


def test_pull_order_is_that_of_the_flux_paper() -> None:
    """Flux paper, 4.3: rank 5 of 8 pulls from ranks 6, 7, 0, 1, 2, 3, 4."""
    hops = receives(DIRECT, (1, 1, 8), PULL, 5)
    assert [chunk for chunk, _ in hops] == [6, 7, 0, 1, 2, 3, 4]


# The pictures of the header comment: "chunk <- peer" as seen by rank 1 of 4.
PICTURES = [
    (DIRECT, (1, 1, 4), PULL, [(2, 2), (3, 3), (0, 0)]),
    (DIRECT, (1, 1, 4), PUSH, [(0, 0), (3, 3), (2, 2)]),
    (RING1D, (1, 1, 4), PUSH, [(0, 0), (3, 0), (2, 0)]),
    (RING2D, (2, 1, 2), PUSH, [(0, 0), (3, 3), (2, 0)]),
    (HIERARCHICAL, (2, 1, 2), PULL, [(3, 3), (0, 0), (2, 0)]),
    (NUMA, (1, 2, 2), PULL, [(3, 3), (0, 0), (2, 0)]),
]


@pytest.mark.parametrize(("order", "mesh", "direction", "hops"), PICTURES)
def test_the_pictures_in_the_header_match_the_code(
    order: int, mesh: Mesh, direction: int, hops: list[tuple[int, int]]
) -> None:
    assert receives(order, mesh, direction, 1) == hops


def test_a_single_rank_receives_nothing() -> None:
    for order in ORDERS:
        for direction in DIRECTIONS:
            assert core.step_of_chunk(order, (1, 1, 1), direction, 0, 0) == -1


@given(mesh=any_mesh)
def test_only_xor_restricts_the_world(mesh: Mesh) -> None:
    assert core.swizzle_is_legal(NONE, mesh)
    assert core.swizzle_is_legal(RANK_SHIFT, mesh)
    assert core.swizzle_is_legal(XOR, mesh) == (world_of(mesh).bit_count() == 1)
