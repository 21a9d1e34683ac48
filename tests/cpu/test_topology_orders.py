"""Meshed communication orders, executed for real by ops that are given a topology."""

from __future__ import annotations

import pytest
import torch

import flux
from harness import more, run_ranks

MESHES = [flux.Topology(2, 1, 2), flux.Topology(1, 2, 2)]
MESHES += more(flux.Topology(2, 2, 1), flux.Topology(4, 1, 2), flux.Topology(2, 2, 2))


def _orders(rank: int, world: int, mesh: flux.Topology) -> None:
    torch.manual_seed(1)
    kw = {"dtype": torch.float64}
    m, n, k = 29, 3 * world, 2 * world
    x, w = torch.randn(m, k, **kw), torch.randn(n, k, **kw)
    right = x @ w.t()
    chunk = -(-m // world)
    own = slice(min(m, rank * chunk), min(m, (rank + 1) * chunk))
    columns = slice(3 * rank, 3 * rank + 3)
    depth = slice(2 * rank, 2 * rank + 2)
    seen = set()
    for order in ("ring2d", "hierarchical", "numa"):
        for direction in ("push", "pull"):
            knobs = flux.Knobs(
                order=order, direction=direction, comm_tile_rows=2, tile=(chunk, n), copy_streams=1
            )
            options = {"max_m": m, "n": n, "k": k, "tuning": knobs, "topology": mesh, **kw}
            with flux.AGGemm(**options) as op:
                seen.add(tuple((t.src, t.dst, t.chunk) for t in op.schedule(m).transfers))
                for _ in range(2):
                    y, full = op(x[own], w[columns], m=m, return_gathered=True)
                    assert torch.equal(full, x)
                    torch.testing.assert_close(y, right[:, columns])
            with flux.GemmRS(**options) as op:
                z = op(x[:, depth].contiguous(), w[:, depth].contiguous())
                torch.testing.assert_close(z, right[own])
    assert len(seen) > 2  # the mesh matters: these are not all the flat order


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_order_on_a_mesh_matches_float64(mesh: flux.Topology) -> None:
    run_ranks(mesh.world, _orders, mesh)


def _refused(rank: int, world: int) -> str:
    with pytest.raises(ValueError) as caught:
        mesh = flux.Topology(1, 1, 3) if rank == 0 else flux.Topology.flat(world)
        flux.AGGemm(max_m=4, n=2, k=2, topology=mesh)
    return str(caught.value)


def test_a_topology_of_another_size_is_refused_everywhere() -> None:
    texts = run_ranks(2, _refused)
    assert "topology has 3 ranks" in texts[0]
    assert "rank 0 refused its arguments" in texts[1]
