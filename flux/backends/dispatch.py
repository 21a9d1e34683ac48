"""All-to-all of the tokens that ranks need, by the library: expert parallelism on path unfused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flux import _C
from flux.core.call import Call


def tokens_by_rank(
    call: Call, world: int, rank: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tokens of each owner that this rank needs, and the own ones that each rank needs.

    Tokens count from the first of all ranks. They are on the CPU, which sizes the all-to-all.
    """
    assert call.needed is not None
    begins = [_C.core.row_begin(call.m, world, owner) for owner in range(1, world)]
    bounds = torch.tensor(begins, dtype=torch.int64, device="cpu")
    by_owner = [
        torch.tensor_split(tokens, torch.searchsorted(tokens, bounds))
        for tokens in map(call.needed.of_rank, range(world))
    ]
    return list(by_owner[rank]), [of_rank[rank] for of_rank in by_owner]


def start_all_to_all(
    rows: torch.Tensor,
    out: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin an all-to-all of packed rows; return the rows that arrive, and the operation.

    Args:
        rows: packed, by destination.
        out: the tokens for each destination.
        into: the tokens from each source.
        group: the ranks.
    """
    sent, received = ([len(tokens) for tokens in of_ranks] for of_ranks in (out, into))
    arrived = rows.new_empty(sum(received), rows.shape[1])
    work = dist.all_to_all_single(arrived, rows, received, sent, group=group, async_op=True)
    return arrived, work


def sum_of_rows(
    arrived: torch.Tensor, into: Sequence[torch.Tensor], first: int, count: int
) -> torch.Tensor:
    """Return the sums of packed rows [count, columns] of tokens from ``first``, in rank order.

    Sums are at least float32, and rounded once.
    """
    wide = torch.float64 if arrived.dtype == torch.float64 else torch.float32
    total = arrived.new_zeros(count, arrived.shape[1], dtype=wide)
    lengths = [len(tokens) for tokens in into]
    places = (torch.cat(list(into)) - first).to(arrived.device)
    for at, rows in zip(places.split(lengths), arrived.split(lengths), strict=True):
        total.index_add_(0, at, rows.to(wide))
    return total.to(arrived.dtype)
