"""FLUX_VLLM_CHECK=1: compare every result with vLLM's own path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch


class CheckError(RuntimeError):
    """A result of Flux's differs from that of vLLM's own path."""


class RankGroup(Protocol):
    """A communicator of vLLM's, with its own way to sum."""

    world_size: int
    rank_in_group: int

    def own_all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks by vLLM's own path."""
        ...


def compare_sum(
    peers: RankGroup,
    what: str,
    summand: torch.Tensor,
    got: torch.Tensor,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
) -> None:
    """Compare a sum over ranks with what vLLM's own path makes of it. Collective.

    A summand is rounded once and each addition once more, so an element may differ by roundings of
    the magnitudes that are added. A product of a slab may add in another order than that of all
    rows: some roundings of float32, relative to the largest element of the row. A tile that is
    missing, stale or added twice differs by whole summands.

    Args:
        peers: the communicator of the ranks.
        what: names the call.
        summand: of this rank; lost.
        got: the sum, or this rank's part of it.
        part: takes this rank's part of the sum.

    Raises:
        CheckError: they differ; the message names rank, call, shape and error.
    """
    magnitude = part(peers.own_all_reduce(summand.abs().float().contiguous()))
    right = part(peers.own_all_reduce(summand.contiguous())).float()
    roundings = torch.finfo(got.dtype).eps * (peers.world_size + 2) * magnitude
    sums = torch.finfo(torch.float32).eps * 64 * math.sqrt(magnitude.shape[-1])
    bound = roundings + sums * magnitude.amax(dim=-1, keepdim=True)
    error = (got.float() - right).abs()
    wrong = ~(error <= bound) & ~(got.isnan() & right.isnan())  # NaN in one of them is wrong
    if wrong.any():
        raise CheckError(
            f"FLUX_VLLM_CHECK: rank {peers.rank_in_group}, {what}, shape {list(got.shape)}: "
            f"{int(wrong.sum())} elements differ from vLLM's own path, the first at "
            f"{wrong.nonzero()[0].tolist()}; the largest error is {float(error.max()):.3g}"
        )


def compare_equal(peers: RankGroup, what: str, right: torch.Tensor, got: torch.Tensor) -> None:
    """Compare rows that were moved and not computed, bit for bit.

    Raises:
        CheckError: they differ.
    """
    same = got.shape == right.shape and got.dtype == right.dtype
    if not same or not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
        raise CheckError(
            f"FLUX_VLLM_CHECK: rank {peers.rank_in_group}, {what}, shape "
            f"{list(got.shape)}: not what vLLM's own path returns"
        )
