"""Connections of one op to ranks on other hosts, and the messages that travel on them.

gloo never ends the wait for a message of which a part has been received: not when its connections
are closed, and not when the peer dies. So a tensor travels as two messages, all but its last
element and the last element, and a thread waits for the second one. A connection delivers in order:
when the second one is complete, so is the first. A second message that has not begun to arrive is
ended with its connection.
"""

from __future__ import annotations

import os
import struct
import threading
import uuid
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux.transport.exchange import Exchange

HEADER_TAG, DATA_TAG, ABORT_TAG, FAILURE_TAG = 1, 2, 3, 4
HEADER_BYTES = 256
_HEADER = struct.Struct("<III")  # kind, call, digest; then text
FOREVER = timedelta(days=365)
WHOLE_BYTES = 1024
"""Size up to which a tensor travels as one message: it fits a packet, which arrives whole."""
FAILURE_S = 0.1
"""Seconds to tell all peers of a failure before the connections are broken."""


class HeaderKind(IntEnum):
    """What a header says."""

    enter = 0
    refuse = 1
    close = 2
    closed = 3  # the answer


class Header(NamedTuple):
    """The first message of a call, or of the end of an op."""

    kind: int
    epoch: int = 0
    digest: int = 0
    text: str = ""


class Message:
    """A tensor that is being sent or received."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def wait(self, limit: timedelta = FOREVER) -> None:
        """Wait until the tensor has been sent, or received.

        Raises:
            RuntimeError: the connection broke, or the limit passed, which breaks all connections.
        """
        for part in reversed(self._parts):
            part.wait(limit)


class OpChannel:
    """A process group for one op, with connections of its own. Construction is collective.

    The user's group is not used, so its operations do not mix with ours, and breaking a connection
    does not affect it. ``group`` is None once the connections are released.
    """

    def __init__(self, exchange: Exchange, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        name = str(exchange.all_gather(uuid.uuid4().hex)[0])
        backend = cast(Any, exchange.group)._get_backend(torch.device("cpu")).name()
        self.is_gloo = str(backend) == "gloo"
        default_store = cast(Any, distributed_c10d)._get_default_store()
        ranks = dist.get_process_group_ranks(exchange.group)

        def connect() -> Any:
            if not self.is_gloo:
                return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
            _yield_to_computation()
            store = dist.PrefixStore(f"flux/{name}", default_store)
            return dist.ProcessGroupGloo(store, exchange.rank, exchange.world, timeout)

        self._group: Any = exchange.within("connect", connect)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = DATA_TAG) -> Message:
        """Begin to send a contiguous tensor, which must not change until it has been sent."""
        return Message([self._group.send([part], peer, tag) for part in _parts(tensor)])

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = DATA_TAG) -> Message:
        """Begin to receive into a contiguous tensor."""
        return Message([self._group.recv([part], peer, tag) for part in _parts(tensor)])

    def send_header(self, peer: int, header: Header) -> Message | None:
        """Begin to send a header; return None if the connection is broken.

        The link's receiving thread sees that error too, and reports it.
        """
        raw = _HEADER.pack(*header[:3]) + header.text.encode()
        raw = raw[: HEADER_BYTES - 1].ljust(HEADER_BYTES, b"\0")
        try:
            return self.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer, HEADER_TAG)
        except RuntimeError:
            return None

    def receive_header(self, peer: int) -> Header:
        """Wait for a header.

        Raises:
            RuntimeError: the connection broke.
        """
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self.receive(buffer, peer, HEADER_TAG).wait()
        raw = bytes(buffer.numpy())
        text = raw[_HEADER.size :].rstrip(b"\0").decode(errors="replace")
        kind, epoch, digest = _HEADER.unpack_from(raw)
        return Header(kind, epoch, digest, text)

    def send_failure(self, peers: Iterable[int], culprit: int) -> None:
        """Tell peers on which rank this one gave up, as far as they receive it within FAILURE_S.

        Others learn of it by the end of their connections. The culprit is told last: a wait that
        reaches its limit breaks all connections.
        """
        if not self.is_gloo:
            return
        number = torch.tensor([culprit], dtype=torch.int64, device="cpu")
        try:
            for peer in sorted(peers, key=lambda peer: peer == culprit):
                self.send(number, peer, FAILURE_TAG).wait(timedelta(seconds=FAILURE_S))
        except RuntimeError:  # a broken connection: the caller breaks the others
            return

    def abort(self, peer: int) -> str:
        """End every pending operation of all peers; return the error of the one to ``peer``.

        gloo has no call for it, but a wait that times out closes all connections of its group.
        """
        if not self.is_gloo:
            self._group.abort()
            return ""
        token = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self.receive(token, peer, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:  # the intended timeout, or an earlier break
            return str(error)
        return ""


class FailureNotice:
    """Receives the rank that a peer gave up on, which it sends before it breaks its connections."""

    def __init__(self, channel: OpChannel, peer: int) -> None:
        self._peer = peer
        self._reading = threading.Lock()
        self._culprit: int | None = None if channel.is_gloo else peer
        self._number = torch.full((1,), peer, dtype=torch.int64, device="cpu")
        self._message = (
            channel.receive(self._number, peer, FAILURE_TAG) if channel.is_gloo else None
        )

    def culprit(self) -> int:
        """Return that rank, or the peer itself. Call it once the connection is broken."""
        with self._reading:
            if self._culprit is None:
                assert self._message is not None
                try:
                    self._message.wait(timedelta(seconds=1))
                    self._culprit = int(self._number)
                except RuntimeError:  # it broke without a notice: the peer has died, or the link
                    self._culprit = self._peer
        return self._culprit


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the contents of the messages that a contiguous tensor travels in."""
    if tensor.nbytes <= WHOLE_BYTES:
        return [tensor]
    flat = tensor.view(-1)
    return [flat[:-1], flat[-1:]]


def _yield_to_computation() -> None:
    """Let this thread, and the threads that it starts, yield to computation.

    gloo's thread wakes for every segment that arrives. With the batch policy, which threads inherit
    and which needs no privileges, a wake-up does not interrupt the GEMM that runs on the core.
    Bytes collect in the socket's buffer meanwhile, and fewer, larger reads take them. That halves
    the CPU time of communication (docs/contribute/results/hosts.md).
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
