"""Find the placement of ranks, and which GPUs can address each other's memory (P2P)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flux.core.knobs import Topology
from flux.machine.host import host_identity, memory_identity

TRANSPORTS = {"cpu": ("shm", "send_recv"), "cuda": ("symm_mem", "send_recv", "nvshmem")}
"""Transports between ranks of a process group, by backend."""


@dataclass(frozen=True)
class RankPlace:
    """The placement of a rank.

    Attributes:
        host: the same for ranks of one host.
        gpu: identity of its GPU; None if it has none.
        reaches: for every GPU that the rank sees, by identity: whether the rank's GPU can address
            it.
        memory: the same for ranks that can map each other's segments (transport/shm.py).
    """

    host: str
    gpu: str | None = None
    reaches: dict[str, bool] = field(default_factory=dict)
    memory: str = ""


def place_here(gpu: int | None) -> RankPlace:
    """Return the placement of this rank; ``gpu``: index of its GPU, if any."""
    if gpu is None:
        return RankPlace(host_identity(), memory=memory_identity())
    identities = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    reaches = {
        identity: i == gpu or torch.cuda.can_device_access_peer(gpu, i)
        for i, identity in enumerate(identities)
    }
    return RankPlace(host_identity(), identities[gpu], reaches, memory_identity())


def reach(a: RankPlace, b: RankPlace) -> bool | None:
    """Return whether two GPUs of one host address each other; None if the ranks do not see them."""
    if a.gpu is None or b.gpu is None:
        raise ValueError("both ranks must have a GPU")
    if a.gpu == b.gpu:
        return True
    if b.gpu not in a.reaches or a.gpu not in b.reaches:
        return None
    return a.reaches[b.gpu] and b.reaches[a.gpu]


@dataclass(frozen=True)
class Placement:
    """Which ranks share memory.

    Attributes:
        nodes: a name per rank; ranks that share memory have the same name. Of processes it is what
            ``memory_identity()`` returns on each rank.
    """

    nodes: tuple[str, ...]

    @classmethod
    def of_op(
        cls,
        places: Sequence[RankPlace],
        backend: str,
        transport: str | None,
        topology: Topology | None,
    ) -> Placement:
        """Return the placement of an op's ranks with these options.

        With ``send_recv`` no ranks share memory. There is one exception: on GPUs, where there are
        several hosts or the topology has several nodes, ``send_recv`` or ``nvshmem`` moves rows
        between those, and the ranks of each share memory. GPUs without P2P share memory only if
        ``symm_mem`` is asked for.
        """
        hosts = [place.memory if backend == "cpu" else place.host for place in places]
        if backend == "cuda" and transport != "symm_mem":
            hosts = _with_mutual_p2p(places)
        together = cls(tuple(hosts))
        if transport not in ("send_recv", "nvshmem"):
            return together
        if backend == "cuda" and isinstance(topology, Topology) and topology.world == len(hosts):
            if topology.nodes > 1 and not topology.uneven:
                pairs = zip(hosts, topology.hosts, strict=True)
                return cls(tuple(f"{host}/{node}" for host, node in pairs))
        elif backend == "cuda" and (transport == "nvshmem" or together.topology.nodes > 1):
            return together
        return cls(tuple(str(rank) for rank in range(len(hosts))))

    @classmethod
    def together(cls, world: int) -> Placement:
        """Return the placement of ranks that all share memory."""
        return cls(("",) * world)

    @property
    def topology(self) -> Topology:
        """The mesh of ranks with one node for each set of ranks that share memory."""
        return Topology.of_hosts(self.nodes)

    def shared_with(self, rank: int) -> list[bool]:
        """Return, by rank, whether it shares memory with ``rank``."""
        return [node == self.nodes[rank] for node in self.nodes]


def _with_mutual_p2p(places: Sequence[RankPlace]) -> list[str]:
    """Return a name per rank; ranks that share memory have the same name.

    By default the ranks of a host share memory. If GPUs of a host lack P2P, only ranks with P2P
    among them share, for example pairs joined by a bridge. Ops need nodes of one size out of
    consecutive ranks; if P2P does not give such nodes, no ranks share memory.
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
    names: list[int] = []  # each rank's first fellow, if all of them reach each other
    for rank, place in enumerate(places):
        apart = {b for a, b in lacking if a == rank}
        first = names[-1] if names and hosts[rank - 1] == place.host else rank
        names.append(rank if apart & set(range(first, rank)) else first)
    sizes = {names.count(name) for name in names}
    return [str(name) for name in names] if len(sizes) == 1 else alone
