"""Adapters for other libraries with overlapped ops: `flux bench suite --peers benchmarks/peers`.

To add one, write a class with the interface of ``flux.bench.peers.base.Peer`` and list it here. It
must import its library inside its functions, never at the top: most machines have none of them.
"""

from __future__ import annotations

from flux.bench.peers import Peer
from peers.byte_flux import ByteFlux
from peers.cublasmp import CublasMp
from peers.transformer_engine import TransformerEngine

PEERS: tuple[Peer, ...] = (TransformerEngine(), ByteFlux(), CublasMp())
