"""Calls of all ranks of a VirtualWorld, on the emulated device and on a real one."""

from __future__ import annotations

import random
from typing import Any

import torch

from flux import Knobs, Topology
from flux.transport.virtual import VirtualWorld
from reference import Inputs


def knobs_of(rng: random.Random, world: int) -> Knobs:
    """Any knobs that the CUDA backend looks at."""
    swizzles = ["none", "rank_shift"] + (["xor"] if world & (world - 1) == 0 else [])
    orders = ["direct", "ring1d", "ring2d", "hierarchical", "numa"]
    return Knobs(
        comm_tile_rows=rng.choice([None, 1, 2, 5]),
        direction=rng.choice(["push", "pull"]),
        order=rng.choice(orders),
        swizzle=rng.choice(swizzles),
        raster=rng.choice([None, 1, 2, 3]),
    )


def topology_of(rng: random.Random, world: int) -> Topology:
    """Any mesh of that many ranks."""
    meshes = [
        Topology(a, b, world // (a * b))
        for a in range(1, world + 1)
        for b in range(1, world + 1)
        if world % (a * b) == 0
    ]
    return rng.choice(meshes)


def call_all(
    ranks: VirtualWorld, ops: list[Any], inputs: Inputs, gather: bool = False
) -> list[list[torch.Tensor]]:
    """One call of every rank, not waited for."""
    return ranks.run(lambda r: inputs.call(ops[r], r, gather=gather))


def call_on_and_on(
    ranks: VirtualWorld, ops: list[Any], everything: list[Inputs]
) -> list[list[list[torch.Tensor]]]:
    """Calls of every rank, none of which waits for another rank's; results by call and rank."""
    by_rank = ranks.run(lambda r: [inputs.call(ops[r], r) for inputs in everything])
    return [list(of_call) for of_call in zip(*by_rank, strict=True)]
