"""Properties of AGGemm alone; test_every_op.py has those of all ops."""

from __future__ import annotations

import pytest
import torch

from flux import AGGemm, Knobs
from harness import WORLDS, run_ranks
from reference import Inputs, Problem


def several_weights(rank: int, world: int) -> None:
    problem = Problem("ag_gemm", max_m=21, n=(2 * world, world, 5 * world), k=12)
    for knobs in (Knobs(), Knobs(tile=(4, 3)), Knobs(path="medium"), Knobs(path="unfused")):
        with problem.build(tuning=knobs) as op:
            inputs = Inputs(problem, 21, world, seed=5)
            inputs.biases[1] = None  # a bias on some of them only
            inputs.call_and_check(op, rank, gather=True)
            x, weights, _ = inputs.local(rank)
            got = op(x, tuple(weights), m=21)
            assert isinstance(got, list) and len(got) == 3
            assert op(x, weights, [None] * 3, m=21)[2].shape == (21, 5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_several_weights_share_one_gather(world: int) -> None:
    run_ranks(world, several_weights)


def rows_times_world(rank: int, world: int) -> None:
    with AGGemm(max_m=8 * world, n=world, k=3) as op:
        x = torch.full((5, 3), float(rank + 1))
        y, x_full = op(x, torch.ones(1, 3), return_gathered=True)
        expected = torch.arange(1, world + 1).repeat_interleave(5).float()
        assert torch.equal(y, 3 * expected[:, None])
        assert torch.equal(x_full, expected[:, None].expand(-1, 3))


@pytest.mark.parametrize("world", WORLDS)
def test_m_is_rows_times_world_unless_given(world: int) -> None:
    run_ranks(world, rows_times_world)
