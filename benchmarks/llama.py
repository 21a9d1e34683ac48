"""A small Llama: whole, or with tensor parallelism and in stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flux.layers import ColumnParallelLinear, RowParallelLinear
from flux.runtime.domino.layers import replace


@dataclass(frozen=True)
class Llama:
    """Sizes.

    Attributes:
        vocabulary: number of tokens that there are.
        hidden: width.
        intermediate: width of the MLP.
        heads: of attention.
        layers: how many there are.
        dtype: name of a torch dtype.
    """

    vocabulary: int = 64
    hidden: int = 32
    intermediate: int = 64
    heads: int = 4
    layers: int = 8
    dtype: str = "float64"


class Layer(nn.Module):
    """One layer on [sequence, batch, hidden]; without a group the whole layer is on each rank."""

    def __init__(self, sizes: Llama, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        dtype, hidden = getattr(torch, sizes.dtype), sizes.hidden
        options: dict[str, Any] = {"bias": False, "dtype": dtype}
        column: Any = nn.Linear
        row: Any = nn.Linear
        if group is not None:
            column, row = ColumnParallelLinear, RowParallelLinear
            options |= {"fused": False, "group": group}
        self.heads = sizes.heads // (1 if group is None else dist.get_world_size(group))
        self.norm1, self.norm2 = (nn.RMSNorm(hidden, dtype=dtype) for _ in range(2))
        self.qkv = column(hidden, 3 * hidden, **options)
        self.proj = row(hidden, hidden, **options)
        self.up = column(hidden, 2 * sizes.intermediate, **options)
        self.down = row(sizes.intermediate, hidden, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.proj(mixed.permute(2, 0, 1, 3).flatten(-2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [batch, heads, sequence, dim] with rotary embedding."""
    half = x.shape[-1] // 2
    speeds = 1e4 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * speeds
    a, b = x.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Stage(nn.Module):
    """Layers of one stage: the first takes tokens [batch, sequence], the last returns logits."""

    def __init__(self, sizes: Llama, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        dtype = getattr(torch, sizes.dtype)
        torch.manual_seed(99)
        embedding = nn.Embedding(sizes.vocabulary, sizes.hidden, dtype=dtype)
        head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False, dtype=dtype)
        self.embedding = embedding if first else None
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(sizes.hidden, dtype=dtype) if last else None
        self.head = head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        x = x.transpose(0, 1)
        return x if self.head is None else self.head(self.norm(x))


def layer_of(sizes: Llama, number: int, group: dist.ProcessGroup) -> nn.Module:
    """Return a layer whose weights depend on its number alone."""
    torch.manual_seed(number)
    return replace(Layer(sizes, group))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy; logits [batch, sequence, vocabulary]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
