"""Properties of GemmAR alone: the same bits on every rank. test_every_op.py has the others."""

from __future__ import annotations

import pytest
import torch

from flux import GemmAR, Knobs
from harness import WORLDS, run_ranks
from reference import Inputs, Problem


def results(rank: int, world: int, knobs: Knobs, dtype: torch.dtype) -> list[bytes]:
    problem = Problem("gemm_ar", max_m=50, n=(9,), k=40, dtype=dtype)
    out = []
    with problem.build(tuning=knobs) as op:
        for m in (1, 6, 49, 50):
            y = Inputs(problem, m, world, seed=m).call(op, rank)[0]
            out.append(y.view(torch.uint8).numpy().tobytes())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_hold_the_same_bits(world: int, dtype: torch.dtype) -> None:
    """Bits are equal for each transport path of the result."""
    tile = (1, 9)
    ways = [
        run_ranks(world, results, knobs, dtype)
        for knobs in (
            Knobs(tile=tile, direction="pull", store="direct", copy_streams=0),
            Knobs(tile=tile, direction="push", store="direct", copy_streams=1),
            Knobs(tile=tile, direction="pull", store="staged", copy_streams=1, comm_tile_rows=3),
            Knobs(tile=tile, direction="push", store="staged", copy_streams=0),
        )
    ]
    assert all(of_rank == ways[0][0] for way in ways for of_rank in way)


def is_an_op_of_its_own(rank: int, world: int) -> None:
    with GemmAR(max_m=5, n=2, k=world) as op:
        y = op(torch.ones(5, 1), torch.ones(2, 1), torch.tensor([0.0, 1.0]))
        assert torch.equal(y, torch.tensor([[world, world + 1.0]]).expand(5, 2))
        assert repr(op).startswith("GemmAR(")


@pytest.mark.parametrize("world", WORLDS)
def test_the_bias_is_added_once(world: int) -> None:
    run_ranks(world, is_an_op_of_its_own)
