"""Calls of the real rank of a LoopbackWorld: what its peers have, and what they were sent."""

from __future__ import annotations

from typing import Any

import torch

from flux.transport.loopback import LoopbackWorld
from reference import Inputs, share


def partial(inputs: Inputs, source: int, owner: int) -> torch.Tensor:
    """Return the partial of ``source`` for the rows of ``owner``, in float64."""
    depth = share(inputs.problem.k, inputs.world, source)
    x = inputs.x[share(inputs.m, inputs.world, owner), depth]
    return x.double() @ inputs.weights[0][:, depth].double().t()


def provide(ranks: LoopbackWorld, op: Any, inputs: Inputs) -> None:
    """Provide the inputs of the simulated peers for a call."""
    p, m, world = inputs.problem, inputs.m, inputs.world
    others = range(1, world)
    if p.gathers:
        ranks.provide(op, m, [inputs.x[share(m, world, peer)] for peer in others])
        return
    partials = [partial(inputs, peer, 0).to(p.dtype) for peer in others]
    results = None
    if p.op == "gemm_ar":
        right = inputs.expected(0)[0][0].to(p.dtype)
        results = [right[share(m, world, peer)] for peer in others]
    ranks.provide(op, m, partials, results)


def call(ranks: LoopbackWorld, op: Any, inputs: Inputs, gather: bool = False) -> list[torch.Tensor]:
    """One call of rank 0, not waited for."""
    provide(ranks, op, inputs)
    return inputs.call(op, 0, gather=gather)


def check_call(ranks: LoopbackWorld, op: Any, inputs: Inputs, gather: bool = False) -> None:
    """Make one call, and check its results and what the peers were sent."""
    out = call(ranks, op, inputs, gather)
    op.wait()
    inputs.check(out, 0)
    ranks.finish(ranks.agents.values())
    _check_peers(op, inputs, out)


def _check_peers(op: Any, inputs: Inputs, got: list[torch.Tensor]) -> None:
    """Compare what lies in the peers' memory after a call with what they should have received."""
    peers = op._backend.peers
    layout, p, world = peers.layout, inputs.problem, inputs.world
    width = layout.row_bytes // p.dtype.itemsize
    for peer in range(1, world):
        memory = peers.memory.data[peer].view(p.dtype)
        if p.gathers:
            rows = memory[: inputs.x.numel()].view(-1, width)
            for begin, end in rows_moved(op, inputs.m, peer):
                assert torch.equal(rows[begin:end], inputs.x[begin:end]), f"rows of rank {peer}"
            continue
        right = partial(inputs, 0, peer)
        begin = layout.slot_offset(0) // p.dtype.itemsize
        slot = memory[begin : begin + right.numel()].view(right.shape).double()
        scale = right.abs().max() if right.numel() else 0.0
        assert bool(((slot - right).abs() <= 0.02 * scale).all()), f"partial for rank {peer}"
        if p.op == "gemm_ar":
            result = memory[layout.rest_offset // p.dtype.itemsize :][: got[0].numel()]
            result = result.view(-1, width)
            own = share(inputs.m, world, 0)
            assert torch.equal(result[own], got[0][own].cpu()), f"result of rank {peer}"


def rows_moved(op: Any, m: int, peer: int) -> list[tuple[int, int]]:
    """Rows that rank 0 pushes to a peer, or that the peer pulls from it."""
    schedule = op.schedule(m)
    if schedule.knobs.direction == "pull":
        schedule = schedule.of_rank(peer)
    return [(t.row_begin, t.row_end) for t in schedule.transfers if (t.src, t.dst) == (0, peer)]
