"""A small model for Centauri's FSDP, beside torch's: sharded by either, and trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flux.runtime.centauri.module import RuntimePlan, parallelize

WIDTH, VOCABULARY = 24, 37


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    """Sizes that the number of ranks does not divide; an output tied to nothing."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if unused:
            self.layers[1].spare = nn.Linear(WIDTH, WIDTH)
            self.spare = nn.Parameter(torch.ones(3))  # of the unit that backward reaches last

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale.sum()
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def net(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 5, 2), generator=generator)
    return tokens[..., 0], tokens[..., 1]


def ours(world: int, model: Net, **options: Any) -> Net:
    hosts = 2 if world == 4 else 1
    mesh = init_device_mesh("cpu", (hosts, world // hosts))
    options = {"timeout_s": 30.0, "chunk_bytes": 4096, **options}
    assert parallelize(model, mesh, RuntimePlan(**options)) is model
    return model


def theirs(model: Net) -> Net:
    for layer in (model.embed, *model.layers, model.head):
        fully_shard(layer)
    fully_shard(model)
    return model


def train(
    rank: int, model: Net, optimizer: Any, first: int, count: int, micro: int = 1
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        total = 0.0
        for part in range(micro):
            tokens, wanted = batch(rank, step * micro + part)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.9)
        optimizer.step()
        losses.append(total)
    return losses


def adam(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)
