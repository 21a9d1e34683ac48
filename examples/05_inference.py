"""Serving: a prompt is read at once, then every step decodes a token of each running request.

M, the rows that a GEMM sees, is the length of a prompt in one call and the number of requests in
the next, and falls as requests end. The layers see it from their input. Activations are whole on
every rank here, so down projections use GemmAR and up projections have nothing to communicate.

    python examples/05_inference.py
    torchrun --standalone --nproc-per-node 4 examples/05_inference.py
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from _launch import run
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools

VOCABULARY, WIDTH, HEADS, HIDDEN, BLOCKS = 128, 96, 12, 192, 2
HEAD = WIDTH // HEADS
# Each request: the length of its prompt, and how many tokens it wants.
REQUESTS = ((37, 9), (5, 12), (64, 4))

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of a request, by block


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm. Built whole; ``split`` cuts it up."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def split(self) -> None:
        """Keep this rank's heads and hidden units."""
        for name in ("q", "k", "v", "gate", "up"):
            setattr(self, name, ColumnParallelLinear.from_linear(getattr(self, name)))
        for name in ("out", "down"):
            setattr(self, name, RowParallelLinear.from_linear(getattr(self, name)))

    def forward(
        self, x: torch.Tensor, lengths: list[int], caches: list[Cache], number: int
    ) -> torch.Tensor:
        """x [M, WIDTH]: of each request in turn ``lengths[i]`` rows, its past in ``caches[i]``."""
        normed = self.norms[0](x)
        parts = [
            layer(normed).unflatten(1, (-1, HEAD)).transpose(0, 1).split(lengths, dim=1)
            for layer in (self.q, self.k, self.v)
        ]
        attended = [
            self._attend(q, k, v, cache, number)
            for q, k, v, cache in zip(*parts, caches, strict=True)
        ]
        x = x + self.out(torch.cat(attended))
        normed = self.norms[1](x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, number: int
    ) -> torch.Tensor:
        """[heads, rows, HEAD] of one request to [rows, heads * HEAD]; its cache grows."""
        if len(cache) > number:
            k, v = (torch.cat(pair, 1) for pair in zip(cache[number], (k, v), strict=True))
            cache[number] = (k, v)
        else:
            cache.append((k, v))
        # Several rows are a prompt, of which no row sees a later one; a single row sees everything.
        attended = scaled_dot_product_attention(q, k, v, is_causal=q.shape[1] > 1)
        return attended.transpose(0, 1).flatten(1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: list[torch.Tensor], caches: list[Cache]) -> torch.Tensor:
        """Return the next token of every request; ``tokens`` are those not in its cache yet."""
        lengths = [len(of_request) for of_request in tokens]
        x = self.embedding(torch.cat(tokens))
        for number, block in enumerate(self.blocks):
            x = block(x, lengths, caches, number)
        last = torch.tensor(lengths).cumsum(0) - 1
        return self.head(x[last]).argmax(1)


def serve(model: Decoder, prompts: list[torch.Tensor]) -> tuple[list[list[int]], list[int]]:
    """What each request gets, and M of every call."""
    answers: list[list[int]] = [[] for _ in prompts]
    caches: list[Cache] = [[] for _ in prompts]
    sizes = []
    for request, prompt in enumerate(prompts):  # prefill, a prompt at a time
        sizes.append(len(prompt))
        answers[request] += model([prompt], [caches[request]]).tolist()
    while True:  # decode, all that still run at once
        running = [r for r, (_, wanted) in enumerate(REQUESTS) if len(answers[r]) < wanted]
        if not running:
            return answers, sizes
        sizes.append(len(running))
        latest = [torch.tensor(answers[r][-1:]) for r in running]
        chosen = model(latest, [caches[r] for r in running])
        for request, token in zip(running, chosen.tolist(), strict=True):
            answers[request].append(token)


@torch.inference_mode()
def main(rank: int, world: int) -> None:
    torch.manual_seed(0)  # the same on every rank
    whole = Decoder().double()  # so that no two tokens are ever as good as each other
    split = copy.deepcopy(whole)
    for block in split.blocks:
        block.split()
    prompts = [torch.randint(VOCABULARY, (length,)) for length, _ in REQUESTS]
    answers, sizes = serve(split, prompts)
    expected, _ = serve(whole, prompts)
    assert answers == expected, (answers, expected)
    dist.barrier()  # past this point, all ranks agree
    close_pools()
    if rank == 0:
        print(f"M of every call: {sizes}")
        for request, answer in enumerate(answers):
            print(f"request {request}: {answer}")
        print(f"{world} ranks and one process's PyTorch decode the same tokens")


if __name__ == "__main__":
    run(main)
