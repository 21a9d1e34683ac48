"""TCP connections between ranks of different hosts, for csrc/cpu/link.h.

They are bound to the address that gloo would use: that of the first interface in
GLOO_SOCKET_IFNAME, else the host's name. Ranks exchange addresses through their process group, and
with each address a random token. Both ends of a connection show the other's token first, so a
program that only knows the port gets no further.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Mapping

from flux import _C
from flux.transport.exchange import LEAST_S, Exchange

TOKEN_BYTES = 32
_RANK_BYTES = 4
_LOOPBACK = "127.0.0.1"


def own_address() -> tuple[int, str]:
    """Return (family, address) of the interface that connections are bound to.

    Raises:
        OSError: the interface in GLOO_SOCKET_IFNAME has no address.
    """
    names = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    if names[0]:
        address = _C.interface_address(names[0])
        if not address:
            raise OSError(f"the interface {names[0]!r} of GLOO_SOCKET_IFNAME has no address")
        return (socket.AF_INET6 if ":" in address else socket.AF_INET), address
    for family, address in _addresses_of(socket.gethostname()):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((address, 0))
        except OSError:  # of another host
            continue
        return family, address
    return socket.AF_INET, _LOOPBACK


def _addresses_of(name: str) -> list[tuple[int, str]]:
    """Return (family, address) of a host's name; none if nothing resolves it."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    families = (socket.AF_INET, socket.AF_INET6)
    return [(family, str(where[0])) for family, _, _, _, where in entries if family in families]


def connect(exchange: Exchange, peers: Iterable[int]) -> dict[int, int]:
    """Connect this rank to each of ``peers``, who connect to it; return their sockets. Collective.

    Returns:
        By rank, the descriptor of a connected, non-blocking socket, which the caller owns.

    Raises:
        OSError: on every rank, if one cannot listen.
        PeerTimeoutError: a peer did not connect in time.
    """
    peers = sorted(peers)
    listener: socket.socket | None = None
    problem = ""
    where: tuple[int, tuple[str, int], bytes] | None = None
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        if peers:
            try:
                family, address = own_address()
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.bind((address, 0))
                listener.listen(len(peers))
                where = (family, (address, listener.getsockname()[1]), token)
            except OSError as error:
                problem = f"rank {exchange.rank} cannot listen for connections: {error}"
        entries = exchange.all_gather((problem, where))
        for text, _ in entries:
            if text:
                raise OSError(f"{exchange.label}: {text}")
        if listener is None:
            exchange.within("connect", lambda: None)
            return {}
        places = {peer: entry for peer in peers if (entry := entries[peer][1]) is not None}
        assert listener is not None
        limit = LEAST_S if exchange.timeout_s is None else max(exchange.timeout_s, LEAST_S)
        sockets = _Sockets(exchange.rank, token, listener, places, time.monotonic() + limit)
        return exchange.within("connect", sockets.open)
    finally:
        if listener is not None:
            listener.close()


class _Sockets:
    """The connections of one rank while they are made: to lower ranks, and from higher ones."""

    def __init__(
        self,
        rank: int,
        token: bytes,
        listener: socket.socket,
        places: Mapping[int, tuple[int, tuple[str, int], bytes]],
        deadline: float,
    ) -> None:
        self._rank = rank
        self._token = token
        self._listener = listener
        self._places = places
        self._deadline = deadline

    def open(self) -> dict[int, int]:
        """Return the descriptors by peer.

        Raises:
            RuntimeError: a peer cannot be reached, or did not come in time.
        """
        made: dict[int, socket.socket] = {}
        try:
            for peer in self._places:
                if peer < self._rank:
                    made[peer] = self._call(peer)
            expected = {peer for peer in self._places if peer > self._rank}
            while expected:
                incoming = self._accept(expected)
                if incoming is not None:
                    peer, connection = incoming
                    made[peer] = connection
                    expected.discard(peer)
            for connection in made.values():
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return {peer: connection.detach() for peer, connection in made.items()}
        except OSError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            for connection in made.values():
                connection.close()

    @property
    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("a rank on another host did not connect in time")
        return left

    def _call(self, peer: int) -> socket.socket:
        family, address, their_token = self._places[peer]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.bind((self._listener.getsockname()[0], 0))
            connection.settimeout(self._left_s)
            connection.connect(address)
            connection.sendall(their_token + self._rank.to_bytes(_RANK_BYTES, "big"))
            if not secrets.compare_digest(self._read(connection, TOKEN_BYTES), self._token):
                raise ConnectionError(f"{address} is not rank {peer}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self, expected: set[int]) -> tuple[int, socket.socket] | None:
        """Return the next peer and its connection; None for a stranger, who is hung up on."""
        if not select.select([self._listener], [], [], min(self._left_s, 1.0))[0]:
            return None
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(min(self._left_s, 2.0))
            shown = self._read(connection, TOKEN_BYTES + _RANK_BYTES)
            peer = int.from_bytes(shown[TOKEN_BYTES:], "big")
            if secrets.compare_digest(shown[:TOKEN_BYTES], self._token) and peer in expected:
                connection.sendall(self._places[peer][2])
                return peer, connection
        except OSError:
            connection.close()  # it said nothing, or left
            return None
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    def _read(self, connection: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the connection was closed before it was made")
            data += part
        return data
