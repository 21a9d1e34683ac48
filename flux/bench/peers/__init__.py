"""The peers: other libraries' overlapped ops, each in an adapter of its own.

To add one, write a class with the interface of ``base.Peer`` and list it here. It must import its
library inside its functions, never at the top: most machines have none of these libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.bench.methods import Method, default_methods
from flux.bench.peers.async_tp import AsyncTp
from flux.bench.peers.base import Guarded, Peer, PeerError, blame
from flux.bench.peers.byte_flux import ByteFlux
from flux.bench.peers.cublasmp import CublasMp
from flux.bench.peers.transformer_engine import TransformerEngine
from flux.bench.problem import BenchConfig

__all__ = ["PEERS", "Peer", "PeerError", "blame", "peers_and_flux", "survey", "unsupported"]

PEERS: tuple[Peer, ...] = (AsyncTp(), TransformerEngine(), ByteFlux(), CublasMp())


def survey(peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Return why each peer cannot be used on this machine, by name; None: it can."""
    return {peer.name: peer.available() for peer in peers}


def unsupported(config: BenchConfig, peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Return why each peer cannot compute this problem, by name; None: it can."""
    if len(set(config.host_of)) > 1:  # all peers need GPUs that can reach each other's memory
        return {peer.name: "is measured on one host only" for peer in peers}
    return {peer.name: peer.supports(config) for peer in peers}


def peers_and_flux(
    config: BenchConfig, rank: int, names: Sequence[str] = (), peers: Sequence[Peer] = PEERS
) -> list[Method]:
    """Return flux's methods and those of the peers with these names. Collective.

    Raises:
        PeerError: a peer cannot be built; all methods built so far are closed.
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
