"""The peers: other libraries' overlapped ops, each in an adapter of its own.

To add one, write a class with the interface of ``base.Peer`` and list it here. It imports its
library inside its functions, never at the top: most machines have none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.bench.methods import Method, default_methods
from flux.bench.problem import BenchConfig

from .async_tp import AsyncTp
from .base import Guarded, Peer, PeerError, blame
from .byte_flux import ByteFlux
from .cublasmp import CublasMp
from .transformer_engine import TransformerEngine

__all__ = ["PEERS", "Peer", "PeerError", "blame", "peers_and_flux", "survey", "unsupported"]

PEERS: tuple[Peer, ...] = (AsyncTp(), TransformerEngine(), ByteFlux(), CublasMp())


def survey(peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Why each peer cannot be used on this machine, by name; None: it can."""
    return {peer.name: peer.available() for peer in peers}


def unsupported(config: BenchConfig, peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Why each peer cannot compute this problem, by name; None: it can."""
    if len(set(config.host_of)) > 1:  # all of them are for GPUs that reach each other's memory
        return {peer.name: "is measured on one host only" for peer in peers}
    return {peer.name: peer.supports(config) for peer in peers}


def peers_and_flux(
    config: BenchConfig, rank: int, names: Sequence[str] = (), peers: Sequence[Peer] = PEERS
) -> list[Method]:
    """flux's methods and those of the peers with these names. Collective.

    Raises:
        PeerError: a peer cannot be built; nothing is left open.
    """
    methods: list[Method] = []
    try:
        methods += default_methods(config, rank)
        methods += [Guarded(peer, config, rank) for peer in peers if peer.name in names]
    except BaseException:
        for method in methods:
            method.close()
        raise
    return methods
