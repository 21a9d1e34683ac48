"""A GPT of Megatron-core whose decoder runs slices of the batch: the same losses, step by step."""

from __future__ import annotations

import pytest
import torch

import megatron_cases as mc
from gpt_cases import LAYERS, STEPS, GPTCase, batches, build
from harness import more, run_ranks


def losses(rank: int, world: int, case: GPTCase, slices: int, columns: int) -> list[list[float]]:
    """Train with Megatron's layers, and with Domino's; return the losses of both."""
    from flux.bench.megatron_cpu import data_parallel, step
    from flux.runtime.domino.layers import replace
    from flux.runtime.domino.megatron import ColumnParallelLinear, RowParallelLinear, cut_batch

    found = []
    with mc.megatron(world):
        for domino in (False, True):
            model = build(case, world)
            if domino:
                cut_batch(replace(model), slices, columns)
                types = [type(module) for module in model.modules()]
                assert types.count(ColumnParallelLinear) == 2 * LAYERS + 1
                assert types.count(RowParallelLinear) == 2 * LAYERS
            ddp = data_parallel(model)
            optimizer = torch.optim.Adam(ddp.parameters(), 2e-3)
            found.append([])
            for tokens in batches(STEPS):
                found[-1].append(step(ddp, tokens))
                optimizer.step()
    return found


@pytest.mark.parametrize("slices, columns", [(2, 1), *more((1, 2), (2, 2))], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, *more(True)])
def test_losses_are_those_of_megatron(slices: int, columns: int, sequence_parallel: bool) -> None:
    case = GPTCase(sequence_parallel=sequence_parallel, swiglu=True)
    theirs, ours = run_ranks(2, losses, case, slices, columns)[0]
    assert theirs[-1] < theirs[0]  # it learns
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-4, atol=2e-4)
