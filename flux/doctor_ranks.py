"""What would move tiles between each two ranks of a job, and why: `flux doctor` under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from flux.transport.shm import host_identity

LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        host: the same for ranks that can share memory.
        gpu: identity of its GPU; None if it has none.
        reaches: of every GPU that the rank sees, by identity, whether its own can address it.
    """

    host: str
    gpu: str | None = None
    reaches: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """`transport` None: there is none that ops on these two ranks could use for GPU tensors."""

    transport: str | None
    why: str


def between(a: Place, b: Place) -> Verdict:
    """What moves tiles between two ranks: for tensors on their GPUs where both have one."""
    gpus = a.gpu is not None and b.gpu is not None
    if a.host != b.host:
        if gpus:
            return Verdict(None, "different hosts: symm_mem serves one; on the CPU send_recv")
        return Verdict("send_recv", "different hosts")
    if a.gpu is None or b.gpu is None:
        both = "no GPU" if a.gpu is b.gpu else "a GPU on one side only"
        return Verdict("shm", f"one host, {both}: tensors on the CPU")
    if a.gpu == b.gpu:
        return Verdict(
            "symm_mem", "the same GPU, on which they take turns: a test, not a deployment"
        )
    unseen = b.gpu not in a.reaches or a.gpu not in b.reaches
    if unseen:
        return Verdict("symm_mem", "one host; they do not see each other's GPU, so P2P is not sure")
    if a.reaches[b.gpu] and b.reaches[a.gpu]:
        return Verdict("symm_mem", "one host, each GPU addresses the other (P2P)")
    return Verdict(None, "one host, but no P2P between the GPUs; on the CPU shm")


def verdicts(places: Sequence[Place]) -> dict[Verdict, list[tuple[int, int]]]:
    """All pairs of ranks, by what is to be said about them."""
    found: dict[Verdict, list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(places)), 2):
        found.setdefault(between(places[a], places[b]), []).append((a, b))
    return found


def place_here() -> Place:
    """Where this rank is, with the GPU that torchrun's local rank means."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if count == 0:
        return Place(host_identity())
    own = index % count
    identities = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    reaches = {
        identities[i]: i == own or torch.cuda.can_device_access_peer(own, i) for i in range(count)
    }
    return Place(host_identity(), identities[own], reaches)


def places_of_all() -> list[Place]:
    """Where every rank is. Collective, in the default group or (under torchrun) one for this."""
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", timeout=LIMIT)
    try:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place_here())
    finally:
        if made:
            dist.destroy_process_group()
    return places
