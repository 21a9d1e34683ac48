"""A small mixture of experts trains: router -> AGGroupedGemm -> silu -> GroupedGemmRS.

Tokens outside the layer are split by rows. Inside, every rank has a part of each expert (``ep=1``),
or whole experts (``ep`` = number of ranks):

    x [M/W, D] --AGGroupedGemm--> h [R, F/tp] --silu--> [R, F/tp] --GroupedGemmRS--> y [M/W, D]

    python examples/06_mixture_of_experts.py
    torchrun --standalone --nproc-per-node 4 examples/06_mixture_of_experts.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from _launch import run
from torch import nn
from torch.nn.functional import silu

import flux
from flux.moe import AGGroupedGemm, GroupedGemmRS

M, D, F, EXPERTS, TOPK, STEPS = 512, 64, 128, 8, 2, 60


class MixtureOfExperts(nn.Module):
    """One rank's part of a layer, with the router that every rank has whole."""

    def __init__(self, rank: int, ep: int) -> None:
        super().__init__()
        sizes = {"max_m": M, "experts": EXPERTS, "topk": TOPK, "ep": ep}
        self.up = AGGroupedGemm(n=F, k=D, **sizes)
        self.down = GroupedGemmRS(n=D, k=F, **sizes)
        self.router = nn.Linear(D, EXPERTS, bias=False)  # the same on every rank
        torch.manual_seed(rank + 1)
        experts, part = len(self.up.local_experts), self.up.local_part
        self.w1 = nn.Parameter(torch.randn(experts, part.stop - part.start, D) / D**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, D, part.stop - part.start) / F**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, experts = self.router(x).softmax(-1).topk(TOPK)
        experts, probs = self.up.gather_choices(experts, probs, M)
        hidden = silu(self.up(x, self.w1, experts))
        return self.down(hidden, self.w2, experts, probs)


def main(rank: int, world: int) -> None:
    torch.manual_seed(0)
    chunk = -(-M // world)
    own = slice(rank * chunk, (rank + 1) * chunk)
    x, teacher = torch.randn(M, D)[own], torch.randn(D, D)
    wanted = torch.tanh(x @ teacher)
    for ep in (1, world):
        torch.manual_seed(0)
        layer = MixtureOfExperts(rank, ep)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            error = (layer(x) - wanted).square().sum() / (M * D)
            error.backward()
            # Tokens are split, so the gradients of what ranks share are summed.
            dist.all_reduce(layer.router.weight.grad)
            optimizer.step()
            total = error.detach()
            dist.all_reduce(total)
            losses.append(total.item())
        assert losses[-1] < 0.5 * losses[0], losses
        if rank == 0:
            print(f"ep = {ep} of {world} ranks: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        layer.up.close()
        layer.down.close()
    flux.ops.clear_workspaces()  # what the backward pass built for itself


if __name__ == "__main__":
    run(main)
