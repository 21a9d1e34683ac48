"""Tiles to and from ranks on other hosts, as point-to-point operations of torch.distributed.

A peer on another host has a *stand-in* in this process: a pad and a data region in private memory,
laid out like its own. The engine writes and raises there as if the peer were next door. For every
peer two threads of this module make it true:

    sender     header --- wait for the signal of a tile in the stand-in --- isend --- next tile
    receiver   header of the peer, published in its stand-in --- irecv into the own memory, in the
               peer's order --- raise the own signal --- next tile

Both ends derive the list of tiles from the sender's schedule, so nothing but data is sent, after
one header per call: its number, a digest of what all ranks must agree on, or why the input was
refused. Works on any backend with send and recv for CPU tensors (gloo, MPI). Operations between two
ranks are posted in the same order at both ends, so backends without tags do too.

A rank sends no large tile of a call before it has posted its receives, as many as fit the window.
gloo's sender waits for a word that the receive has been posted, and that word takes the connection
that the other direction's tiles take: behind those it would arrive when they are through, and the
two directions, which a wire carries at the same time, would take turns.

Memory ordering and buffer reuse. A receive is posted for call e only after this rank has begun e
and has seen every rank enter e (``await_agreement``): on this host nobody reads the target for e-1
any more, for the same reason as in csrc/host/signal_pad.h. A sender cannot overtake that:
point-to-point data lands in posted receives only. The signal is raised after the receive has
completed, by the thread that saw it complete. A sent tile is read until its send completes, and
``finish`` returns no earlier, so inputs, partials and stand-ins may be overwritten afterwards.

Ends. Threads wait for their operations without a deadline, since only the engine decides when a
peer is late. Closing breaks the connections, which ends every pending operation of both sides at
once. It also discards what the kernel has yet to deliver, so a clean close says so in a header
first, and waits for the answer: the peer gives it when it has received everything before it.
"""

from __future__ import annotations

import atexit
import os
import queue
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux import _C
from flux.errors import PeerTimeoutError
from flux.forked import abandon_in_children
from flux.trace.recorder import Recorder, Work, incoming_lane, outgoing_lane, sender_lane
from flux.transport.exchange import Exchange

T = TypeVar("T")

HEADER_BYTES = 256
_HEADER = struct.Struct("<III")  # kind, call, digest; then text
HEADER_TAG, DATA_TAG, ABORT_TAG = 1, 2, 3
FOREVER = timedelta(days=365)
LARGE_BYTES = 64 << 10
"""Of a tile that keeps the wire for longer than waking a thread takes: 0.5 ms at 1 Gbit/s."""
JOIN_S = 10.0
LINGER_S = 5.0
"""How long a clean close waits for peers to receive what was sent before."""


class _Kind(IntEnum):
    enter = 0
    refuse = 1
    close = 2
    closed = 3  # the answer


@dataclass
class Piece:
    """One tile to send or receive: its memory, and the signal that stands for it, if any.

    A piece to send without a signal is ready from the start.
    """

    tensor: torch.Tensor
    signal: int | None


@dataclass
class _Job:
    """What one thread does in one call."""

    epoch: int
    pieces: Iterable[Piece] = ()
    header: Any = None  # the pending send of the header
    posted: threading.Event = field(default_factory=threading.Event)  # the first of its operations
    done: threading.Event = field(default_factory=threading.Event)


class _Gone(Exception):
    """The peer said goodbye, or the engine has given up."""


def open_channel(exchange: Exchange, timeout_s: float) -> Any:
    """A process group of the op's own, with connections of its own. Collective.

    The user's group stays out of it: its operations are not mixed with ours, and a connection that
    we have to break is none of the user's.
    """
    timeout = timedelta(seconds=timeout_s)
    name = str(exchange.all_gather(uuid.uuid4().hex)[0])
    if _cpu_backend(exchange.group) == "gloo":
        store = dist.PrefixStore(f"flux/{name}", cast(Any, distributed_c10d)._get_default_store())
        try:
            return _in_batch_thread(
                lambda: dist.ProcessGroupGloo(store, exchange.rank, exchange.world, timeout)
            )
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"{exchange.label}: rank {exchange.rank} could not connect to its peers: {error}"
            ) from error
    ranks = dist.get_process_group_ranks(exchange.group)
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def _in_batch_thread(make: Callable[[], T]) -> T:
    """Make something on a thread whose threads yield to computation.

    gloo's thread wakes for every segment that arrives. With the batch policy, which threads inherit
    and which needs no rights, a wake-up does not interrupt the GEMM that runs on the core: bytes
    collect in the socket's buffer meanwhile, and fewer, larger reads take them. That halves the CPU
    time of communication (benchmarks/README.md).
    """

    def run() -> T:
        if hasattr(os, "SCHED_BATCH"):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread alone
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _cpu_backend(group: dist.ProcessGroup) -> str:
    return str(cast(Any, group)._get_backend(torch.device("cpu")).name())


class Network:
    """This rank's connections to the ranks on other hosts, for one op."""

    def __init__(
        self,
        exchange: Exchange,
        remote: Sequence[int],
        engine: _C.Engine,
        timeout_s: float,
        window_bytes: int,
    ) -> None:
        self.rank = exchange.rank
        self.timeout_s = timeout_s
        self.bytes_sent = dict.fromkeys(remote, 0)
        self._engine = engine
        self._channel: Any = open_channel(exchange, timeout_s)
        self._closing = False
        self._jobs: list[tuple[_Link, _Job]] = []
        self._links = [_Link(self, peer, window_bytes) for peer in remote]
        _open.add(self)
        abandon_in_children(self)

    # -- calls -------------------------------------------------------------------------------------

    def begin(
        self,
        epoch: int,
        digest: int,
        outgoing: Callable[[int], Iterable[Piece]],
        incoming: Callable[[int], Iterable[Piece]],
    ) -> None:
        """Tell the peers that this rank has entered a call, and move its tiles."""
        for link in self._links:
            header = self._send_header(link.peer, _Kind.enter, epoch, digest)
            link.start(_Job(epoch, outgoing(link.peer), header), _Job(epoch, incoming(link.peer)))

    def refuse(self, epoch: int, why: str) -> None:
        """Tell the peers that this rank's input was refused."""
        self.settle()
        for link in self._links:
            header = self._send_header(link.peer, _Kind.refuse, epoch, 0, why)
            link.start(_Job(epoch, (), header), _Job(epoch))

    def finish(self) -> str | None:
        """Wait until every tile has left and arrived; says what went wrong, if anything did."""
        for link in self._links:
            why = link.wait(self.timeout_s)
            if why is not None:
                return why
        return None

    def settle(self) -> None:
        """Wait until the threads have let go of a call that has failed."""
        for link in self._links:
            link.wait(self.timeout_s)
            link.forget()

    def trace(self, recorder: Recorder | None) -> None:
        """Record what the connections do from now on; None: no more. Between calls."""
        for link in self._links:
            link.recorder = recorder

    def problem_with(self, peer: int) -> str:
        """What the connection to ``peer`` broke with, or an empty string."""
        return next((link.problem for link in self._links if link.peer == peer), "")

    def _send_header(self, peer: int, kind: _Kind, epoch: int, digest: int, text: str = "") -> Any:
        raw = _HEADER.pack(kind, epoch, digest) + text.encode()
        raw = raw[: HEADER_BYTES - 1].ljust(HEADER_BYTES, b"\0")
        header = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        try:
            return self._channel.send([header], peer, HEADER_TAG)
        except RuntimeError:
            return None  # the receiver thread of the link hears of it too, and says so

    # -- end ---------------------------------------------------------------------------------------

    def close(self, failed: bool) -> None:
        """Break the connections and end the threads. The engine must be closed. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if not failed:
            deadline = time.monotonic() + LINGER_S
            headers = [self._send_header(link.peer, _Kind.close, 0, 0) for link in self._links]
            for link, header in zip(self._links, headers, strict=True):
                link.part(header, deadline)
        self._abort()
        for link in self._links:
            link.join()
        self._channel = None

    def abandon(self) -> Iterable[object]:
        """Leave the connections to the parent of this forked child."""
        self._closing = True
        return () if self._channel is None else (self._channel,)

    def _abort(self) -> None:
        """End every pending operation.

        gloo has no call for it, but a wait that times out closes all connections of its group.
        """
        if not isinstance(self._channel, dist.ProcessGroupGloo):
            self._channel.abort()
            return
        channel = cast(Any, self._channel)
        for link in self._links:
            token = torch.empty(1, dtype=torch.uint8)
            try:
                channel.recv([token], link.peer, ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                link.problem = link.problem or str(error)  # as intended, or broken already


_open: weakref.WeakSet[Network] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A process may end without closing its ops, but not with threads inside of gloo.

    Nothing happens to what a forked child has of its parent: see ``Network.abandon``.
    """
    for network in list(_open):
        network.close(failed=False)


class _Link:
    """The two threads that serve one peer."""

    def __init__(self, network: Network, peer: int, window_bytes: int) -> None:
        self.peer = peer
        self.problem = ""
        self.recorder: Recorder | None = None
        self._network = network
        self._engine = network._engine
        self._channel = network._channel
        self._window = window_bytes
        self._progress = time.monotonic()
        self._current: tuple[_Job, ...] = ()
        self._outbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"flux-{network.rank}-{peer}"
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=f"{name}-{what}", daemon=True)
            for what, body in (("send", self._send_calls), ("recv", self._receive_calls))
        ]
        for thread in self._threads:
            thread.start()

    # -- for the calling thread --------------------------------------------------------------------

    def start(self, out: _Job, into: _Job) -> None:
        self._progress = time.monotonic()
        self._current = (out, into)
        self._outbox.put(out)
        self._inbox.put(into)

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the current call's jobs; returns what went wrong, if anything did."""
        for job, thread in zip(self._current, self._threads, strict=False):
            while not job.done.wait(0.05):
                if not thread.is_alive():
                    return self.problem or f"rank {self.peer} has closed the op"
                if time.monotonic() - self._progress > timeout_s:
                    return f"rank {self.peer} took or delivered nothing for {timeout_s:g} s"
        return self.problem or None

    def forget(self) -> None:
        """Let go of what a call that did not happen was about to send."""
        self._current = ()

    def part(self, goodbye: Any, deadline: float) -> None:
        """Wait until the peer has answered our goodbye, said its own, or broken the connection."""
        self._inbox.put(None)  # a peer that goes on to a call of its own gets no answer
        if goodbye is not None:
            self._threads[1].join(max(0.0, deadline - time.monotonic()))

    def join(self) -> None:
        self._outbox.put(None)
        self._inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    # -- threads -----------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        """Whatever ends a thread while the op is open is the peer's failure, as far as we know."""
        try:
            body()
        except _Gone:
            return
        except Exception as error:
            if not self._network._closing:
                self.problem = self.problem or f"connection to rank {self.peer} broke: {error}"
                self._engine.peer_left(self.peer, failed=True, culprit=self.peer)

    def _send_calls(self) -> None:
        while (job := self._outbox.get()) is not None:
            if job.header is not None:
                job.header.wait(FOREVER)
            if self._engine.await_agreement(job.epoch):
                self._flow(job, Work.send, self._post_send, lambda piece, epoch: None)
            job.done.set()

    def _await_receives(self) -> None:
        """Wait until this call's receives are posted."""
        receives = self._current[1]
        while not receives.posted.wait(0.05):
            if not self._threads[1].is_alive():
                raise _Gone

    def _receive_calls(self) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        while True:
            self._channel.recv([header], self.peer, HEADER_TAG).wait(FOREVER)
            self._publish(bytes(header.numpy()))
            job = self._inbox.get()
            if job is None:
                return
            if self._engine.await_agreement(job.epoch):
                self._flow(job, Work.receive, self._post_receive, self._announce)
            job.done.set()

    def _publish(self, raw: bytes) -> None:
        kind, epoch, digest = _HEADER.unpack_from(raw)
        if kind == _Kind.close:
            self._engine.peer_left(self.peer, failed=False)
            # A rank that is closing too has said so, and its own goodbye is the answer: the peer
            # listens for one only.
            if not self._network._closing:
                answer = self._network._send_header(self.peer, _Kind.closed, 0, 0)
                if answer is not None:
                    answer.wait(FOREVER)
            raise _Gone
        if kind == _Kind.closed:
            raise _Gone
        if kind == _Kind.refuse:
            text = raw[_HEADER.size :].rstrip(b"\0").decode(errors="replace")
            self._engine.peer_refused(self.peer, epoch, text)
        else:
            self._engine.peer_entered(self.peer, epoch, digest)

    def _post_send(self, piece: Piece, epoch: int, number: int) -> tuple[Any, int]:
        began = self._stamp()
        ready = piece.signal is None or self._engine.await_parcel(self.peer, piece.signal, epoch)
        if not ready:
            raise _Gone
        if piece.tensor.nbytes >= LARGE_BYTES:
            self._await_receives()
        if self.recorder is not None and piece.signal is not None:
            self.recorder.lane(sender_lane(self.peer)).add(Work.wait, began, number, peer=self.peer)
        self._network.bytes_sent[self.peer] += piece.tensor.nbytes
        posted_ns = self._stamp()
        return self._channel.send([piece.tensor], self.peer, DATA_TAG), posted_ns

    def _post_receive(self, piece: Piece, epoch: int, number: int) -> tuple[Any, int]:
        posted_ns = self._stamp()
        return self._channel.recv([piece.tensor], self.peer, DATA_TAG), posted_ns

    def _stamp(self) -> int:
        """Now, for a trace; 0 while nobody traces."""
        return 0 if self.recorder is None else _C.Lane.now()

    def _announce(self, piece: Piece, epoch: int) -> None:
        assert piece.signal is not None
        self._engine.announce(piece.signal, epoch)

    def _flow(
        self,
        job: _Job,
        work: Work,
        post: Callable[[Piece, int, int], tuple[Any, int]],
        complete: Callable[[Piece, int], None],
    ) -> None:
        """Keep up to ``window`` bytes, but at least two pieces, posted."""
        posted: deque[tuple[Any, Piece, int]] = deque()
        size = completed = 0
        lane = None
        if self.recorder is not None:
            name = outgoing_lane if work is Work.send else incoming_lane
            lane = self.recorder.lane(name(self.peer))

        def complete_oldest() -> None:
            nonlocal size, completed
            pending, piece, posted_ns = posted.popleft()
            pending.wait(FOREVER)
            size -= piece.tensor.nbytes
            self._progress = time.monotonic()
            complete(piece, job.epoch)
            if lane is not None and work is Work.receive:
                lane.add_after_last(work, posted_ns, completed, self.peer, piece.tensor.nbytes)
            elif lane is not None:  # is looked after late: this thread waits for tiles meanwhile
                until = posted[0][2] if posted else 0
                nbytes = piece.tensor.nbytes
                lane.add(work, posted_ns, completed, completed + 1, self.peer, nbytes, until)
            completed += 1

        for number, piece in enumerate(job.pieces):
            while len(posted) >= 2 and size + piece.tensor.nbytes > self._window:
                job.posted.set()
                complete_oldest()
            pending, posted_ns = post(piece, job.epoch, number)
            posted.append((pending, piece, posted_ns))
            size += piece.tensor.nbytes
        job.posted.set()
        while posted:
            complete_oldest()
