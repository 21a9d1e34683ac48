"""Shards of the sequence: the tokens of activations that one rank has.

Shards need no state, because their shape tells them apart from whole activations, and contains
what is needed to gather them: [ceil(S/W), B, 1, 1, ..., 1, features], with two 1s, and one more
for each token of padding. So a layer can be computed again at any time (activation checkpointing).
Padding follows the last tokens, is zero at first and never returned.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from flux.backends.unfused import all_gather
from flux.layers.autograd import once
from flux.transport.exchange import resolve_group

MOST_PADDING = 32
"""Tokens of padding, each a dimension: tensors have at most 64."""


def is_shard(x: object) -> bool:
    """Return whether a tensor is a shard: [ceil(S/W), B, 1, 1, ..., 1, features]."""
    return isinstance(x, torch.Tensor) and x.dim() > 4 and all(n == 1 for n in x.shape[2:-1])


def padding_of(shard: torch.Tensor) -> int:
    """Return how many tokens of padding the ranks' shards have together."""
    return shard.dim() - 5


def as_shard(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """Return rows [ceil(S/W), B, features] with their padding in the shape."""
    return rows.view(*rows.shape[:2], *[1] * (2 + padding), rows.shape[-1])


def own_tokens(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return this rank's shard of x [B, S, features]."""
    group = resolve_group(group_name)
    world, length = group.size(), x.shape[1]
    most = -(-length // world)
    own = x[:, group.rank() * most : (group.rank() + 1) * most].transpose(0, 1)
    rows = x.new_zeros(most, *own.shape[1:])
    rows[: own.shape[0]] = own
    return as_shard(rows, world * most - length)


def _whole(shard: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return x [B, S, features] of all ranks' shards."""
    group = resolve_group(group_name)
    rows = shard.new_empty(shard.shape[0] * group.size(), shard.shape[1], shard.shape[-1])
    all_gather(rows, shard.reshape(-1, *rows.shape[1:]), group=group)
    return rows[: rows.shape[0] - padding_of(shard)].transpose(0, 1).contiguous()


def last_owner(shard: torch.Tensor, world: int, count: int) -> int | None:
    """Return the rank whose shard has the last ``count`` tokens, or None if several have them."""
    most = shard.shape[0]
    length = most * world - padding_of(shard)
    owner = (length - 1) // most
    return owner if count <= length - owner * most else None


def last_tokens(shard: torch.Tensor, group_name: str, owner: int, count: int) -> torch.Tensor:
    """Return x [B, S, features] with the last ``count`` tokens, which owner has; others are NaN."""
    group = resolve_group(group_name)
    most, batch, features = shard.shape[0], shard.shape[1], shard.shape[-1]
    length = most * group.size() - padding_of(shard)
    if group.rank() == owner:
        end = length - owner * most
        rows = shard[end - count : end].reshape(count, batch, features).contiguous()
    else:
        rows = shard.new_empty(count, batch, features)
    dist.broadcast(rows, group=group, group_src=owner)
    x = shard.new_full((batch, length, features), torch.nan)
    x[:, length - count :] = rows.transpose(0, 1)
    return x


class _Move(torch.autograd.Function):
    """Gather the tokens, or take the own ones of what all ranks have; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str, gathers: bool) -> torch.Tensor:
        ctx.group_name, ctx.gathers = group_name, gathers
        return _whole(x, group_name) if gathers else own_tokens(x, group_name)

    @staticmethod
    @once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = own_tokens if ctx.gathers else _whole
        return back(grad, ctx.group_name), None, None


def shard_tokens(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return this rank's shard of x [B, S, features], which all ranks have."""
    return cast(torch.Tensor, cast(Any, _Move).apply(x, group_name, False))


def gather_tokens(shard: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return x [B, S, features] of all ranks' shards. Collective."""
    return cast(torch.Tensor, cast(Any, _Move).apply(shard, group_name, True))
