"""Attention whose ranks share the sequence outside, and the heads inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from flux.ulysses import AllToAllGemm, GemmAllToAll

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class UlyssesOps(NamedTuple):
    """The ops of a layer. Layers of one shape may share them: they run one after the other."""

    project: GemmAllToAll
    output: AllToAllGemm

    def close(self) -> None:
        """Free the ops' memory. Call it on every rank."""
        self.project.close()
        self.output.close()


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention; k and v may have fewer heads than q."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class UlyssesAttention(nn.Module):
    """Multi-head attention with sequence parallelism by heads (DeepSpeed-Ulysses).

    The projection to queries, keys and values sends heads to their ranks as it computes them, and
    the output projection multiplies heads as they come back. Parameters are whole on every rank;
    their gradients are those of the own tokens, to be summed over the ranks.

    Args:
        hidden: columns of x.
        heads: query heads, a multiple of the ranks.
        kv_heads: key and value heads, a multiple or a divisor of the ranks; None: ``heads``.
        head_dim: elements of a head; None: hidden / heads.
        max_tokens: batch times the whole sequence of the largest call.
        bias: of both projections.
        attention: takes q, k, v [batch, own heads, whole sequence, head_dim]; rotary embeddings
            belong here. None: causal attention.
        ops: of another layer with the same sizes, which share its memory.
        group: process group, its name, or None for the default group.
        dtype: of the parameters, and of the products, also under autocast.
        timeout_s: how long a call waits for a peer, in seconds.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        max_tokens: int,
        bias: bool = False,
        attention: Attention | None = None,
        ops: UlyssesOps | None = None,
        group: dist.ProcessGroup | str | None = None,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        head_dim = hidden // heads if head_dim is None else head_dim
        kv_heads = heads if kv_heads is None else kv_heads
        packed = (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(hidden, sum(packed) * head_dim, bias, dtype=dtype)
        self.out = nn.Linear(heads * head_dim, hidden, bias, dtype=dtype)
        self.attention = causal if attention is None else attention
        if ops is None:
            more: dict[str, Any] = {"max_m": max_tokens, "head_dim": head_dim}
            more |= {"dtype": dtype, "timeout_s": timeout_s}
            ops = UlyssesOps(
                GemmAllToAll(group, k=hidden, heads=packed, **more),
                AllToAllGemm(group, n=hidden, heads=heads, **more),
            )
        self.ops = ops

    def forward(self, x: torch.Tensor, seq_lens: list[int] | None = None) -> torch.Tensor:
        """Apply the layer: x [batch, own part of the sequence, hidden] -> the same. Collective.

        ``seq_lens``: as for ``flux.ulysses.GemmAllToAll``.
        """
        qkv, out = self.qkv, self.out
        q, k, v = self.ops.project(x.to(qkv.weight.dtype), qkv.weight, qkv.bias, seq_lens)
        heads = self.attention(q, k, v).to(out.weight.dtype)
        return self.ops.output(heads, out.weight, out.bias, seq_lens)

    def close(self) -> None:
        """Free the ops' memory. Call it on every rank."""
        self.ops.close()
