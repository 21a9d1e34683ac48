"""The two layers to swap in: a tensor-parallel MLP in plain PyTorch, trained for a few steps.

A model that exists is cut up layer by layer, by ``from_linear``; nothing else of it changes. It is
trained beside the whole model on every rank, and both must see the same losses.

    python examples/04_layers.py
    torchrun --standalone --nproc-per-node 4 examples/04_layers.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from _launch import run
from torch import nn

from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools

ROWS, D, F = 120, 96, 384  # tokens, model width, hidden width; the ranks divide all of them
STEPS = 6


class MLP(nn.Module):
    """An ordinary MLP, which knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def parallel(whole: MLP) -> MLP:
    """The same MLP on all ranks of the default group: the shape of the code stays as it was."""
    split = MLP()
    # With sequence_parallel, a rank keeps only its share of the rows outside of the MLP: up gathers
    # them and down scatters them again, both behind their GEMMs.
    split.up = ColumnParallelLinear.from_linear(whole.up, sequence_parallel=True)
    split.down = RowParallelLinear.from_linear(whole.down, sequence_parallel=True)
    return split


def main(rank: int, world: int) -> None:
    torch.manual_seed(0)  # the same on every rank
    teacher, whole = MLP().double(), MLP().double()
    split = parallel(whole)
    optimizers = [torch.optim.SGD(model.parameters(), lr=8.0) for model in (whole, split)]
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)

    for number in range(1, STEPS + 1):
        x = torch.randn(ROWS, D, dtype=torch.float64)
        target = teacher(x).detach()
        losses = []
        for model, optimizer, rows in zip(
            (whole, split), optimizers, (slice(None), mine), strict=True
        ):
            optimizer.zero_grad()
            # Each rank sums over its own rows; the mean is over those of all.
            loss = (model(x[rows]) - target[rows]).square().sum() / (ROWS * D)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1], losses[0])
        if rank == 0:
            print(f"step {number}: loss {losses[1]:.6f}, whole model {losses[0]:.6f}")
    torch.testing.assert_close(split.down.bias, whole.down.bias)
    dist.barrier()  # past this point, all ranks agree
    close_pools()
    if rank == 0:
        print(f"{world} ranks and one process's PyTorch agree on all {STEPS} losses")


if __name__ == "__main__":
    run(main)
