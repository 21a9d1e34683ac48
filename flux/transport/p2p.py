"""Where ranks are, and which of their GPUs can address each other's memory (P2P)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flux.transport.shm import host_identity


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


def place_here(gpu: int | None) -> Place:
    """Where this rank is, on the GPU with this index if any."""
    if gpu is None:
        return Place(host_identity())
    identities = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    reaches = {
        identity: i == gpu or torch.cuda.can_device_access_peer(gpu, i)
        for i, identity in enumerate(identities)
    }
    return Place(host_identity(), identities[gpu], reaches)


def reach(a: Place, b: Place) -> bool | None:
    """Whether two GPUs of one host address each other; None where the ranks do not see them."""
    if a.gpu is None or b.gpu is None:
        raise ValueError("both ranks must have a GPU")
    if a.gpu == b.gpu:
        return True
    if b.gpu not in a.reaches or a.gpu not in b.reaches:
        return None
    return a.reaches[b.gpu] and b.reaches[a.gpu]


def sharing(places: Sequence[Place]) -> list[str]:
    """By rank, a name that two ranks share if they are to share memory.

    Those of a host, as far as is known. Where P2P is lacking between GPUs of a host, those between
    which there is P2P, as pairs joined by a bridge are; but if that does not make nodes of one size
    out of consecutive ranks, which is all that ops can do, nobody shares with anybody.
    """
    hosts = [place.host for place in places]
    if any(place.gpu is None for place in places):
        return hosts
    lacking = [
        (a, b)
        for a in range(len(places))
        for b in range(a)
        if hosts[a] == hosts[b] and reach(places[a], places[b]) is False
    ]
    if not lacking:
        return hosts
    alone = [str(rank) for rank in range(len(places))]
    names: list[int] = []  # each rank's first fellow, provided that all of them reach each other
    for rank, place in enumerate(places):
        apart = {b for a, b in lacking if a == rank}
        first = names[-1] if names and hosts[rank - 1] == place.host else rank
        names.append(rank if apart & set(range(first, rank)) else first)
    sizes = {names.count(name) for name in names}
    return [str(name) for name in names] if len(sizes) == 1 else alone
