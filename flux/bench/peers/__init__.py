"""The peers: other libraries' overlapped ops, each in an adapter of its own.

PyTorch's own is here. Adapters for further libraries are in a package of their own, which exports
them as ``PEERS`` (benchmarks/peers).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, default_methods
from flux.bench.peers.async_tp import AsyncTp
from flux.bench.peers.base import Guarded, Peer, PeerError, blame

__all__ = ["PEERS", "Peer", "PeerError", "blame", "load", "peers_and_flux", "survey", "unsupported"]

PEERS: tuple[Peer, ...] = (AsyncTp(),)


def load(package: Path | None) -> tuple[Peer, ...]:
    """Return PyTorch's adapter, and those of a package.

    Ranks import the package again: its parent directory is put on the import path.

    Args:
        package: the directory of a Python package with a sequence ``PEERS``; None: no further ones.

    Raises:
        ValueError: there is no such package, it cannot be imported, or names of peers are equal.
    """
    if package is None:
        return PEERS
    if not (package / "__init__.py").is_file():
        raise ValueError(f"--peers {package}: not a Python package (a directory with __init__.py)")
    folder = package.resolve()
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    try:
        module = importlib.import_module(folder.name)
        adapters = PEERS + tuple(module.PEERS)
        names = [peer.name for peer in adapters]
    except Exception as error:
        raise ValueError(f"--peers {package}: {type(error).__name__}: {error}") from error
    if Path(str(module.__file__)).parent != folder:
        raise ValueError(
            f"--peers {package}: the name is taken by another package: {module.__file__}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"--peers {package}: peers need different names, got {', '.join(names)}")
    return adapters


def survey(peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Return why each peer cannot be used on this machine, by name; None: it can."""
    return {peer.name: peer.available() for peer in peers}


def unsupported(config: BenchConfig, peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
    """Return why each peer cannot compute this problem, by name; None: it can."""
    if config.problem.sparse:
        return {peer.name: "adapters are for dense ops" for peer in peers}
    if len(set(config.host_of)) > 1:  # all peers need GPUs that can reach each other's memory
        return {peer.name: "runs on one host only" for peer in peers}
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
