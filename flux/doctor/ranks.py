"""Find the transport between each pair of a job's ranks, and why: `flux doctor` under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist

from flux.launch.supervisors import all_gather, torchrun_group
from flux.transport.placement import RankPlace, place_here, reach

LIMIT_S = 60.0


@dataclass(frozen=True)
class TransportVerdict:
    """The transport between two ranks, and why.

    `slow`: slower than with other hardware or settings.
    """

    transport: str
    why: str
    slow: bool = False


def between(a: RankPlace, b: RankPlace) -> TransportVerdict:
    """Return the transport between two ranks: for tensors on their GPUs if both have one."""
    if a.gpu is None or b.gpu is None:
        if a.host != b.host:
            return TransportVerdict("send_recv", "different hosts")
        both = "no GPU" if a.gpu is b.gpu else "a GPU on one side only"
        return TransportVerdict("shm", f"one host, {both}: tensors on the CPU")
    if a.host != b.host:
        return TransportVerdict("send_recv", "different hosts: NCCL, or nvshmem where asked for")
    if a.gpu == b.gpu:
        return TransportVerdict(
            "symm_mem", "the same GPU, on which they take turns: a test, not a deployment"
        )
    reached = reach(a, b)
    if reached is None:
        return TransportVerdict(
            "symm_mem", "one host; they do not see each other's GPU, so P2P is not sure"
        )
    if reached:
        return TransportVerdict("symm_mem", "one host, each GPU addresses the other (P2P)")
    return TransportVerdict("send_recv", "one host, but no P2P between the GPUs: NCCL", slow=True)


def verdicts(places: Sequence[RankPlace]) -> dict[TransportVerdict, list[tuple[int, int]]]:
    """Return all pairs of ranks, by verdict."""
    pairs: dict[TransportVerdict, list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(places)), 2):
        pairs.setdefault(between(places[a], places[b]), []).append((a, b))
    return pairs


def _own_gpu() -> int | None:
    """Return the GPU of torchrun's local rank."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


def places_of_all() -> list[RankPlace]:
    """Return every rank's placement.

    Collective, in the default group or (under torchrun) a new one.
    """
    with nullcontext() if dist.is_initialized() else torchrun_group(LIMIT_S):
        return all_gather(place_here(_own_gpu()))
