"""Send tiles to and from ranks on other hosts, by point-to-point calls of torch.distributed.

A peer on another host has a *stand-in* in this process: a pad and a data region in private memory
with the peer's layout. The engine writes and raises signals there as for a peer on this host. For
every peer two threads of this module transfer the content:

    sender     header --- wait for the signal of a tile in the stand-in --- isend --- next tile
    receiver   header of the peer, published in its stand-in --- irecv into the own memory, in the
               peer's order --- raise the own signal --- next tile

Both ends derive the list of tiles from the sender's schedule. So only data is sent, after one
header per call. The header holds the call's number and a digest of all that ranks must agree on, or
the reason why the input was rejected. This works on any backend with send and recv for CPU tensors
(gloo, MPI). Operations between two ranks are posted in the same order at both ends, so backends
without tags work too.

A rank sends no large tile of a call before it has posted its receives, as many as fit the window.
gloo's sender waits for a message that the receive has been posted. That message shares a connection
with the tiles of the other direction: behind those it would arrive only after them. The two
directions, which a wire carries at the same time, would then take turns.

Memory ordering and buffer reuse. A receive is posted for call e only after this rank has begun e
and has seen every rank enter e (``await_agreement``): no rank on this host still reads the target
for e-1, for the same reason as in csrc/cpu/signal_pad.h. A sender cannot overtake that, because
point-to-point data lands only in posted receives. The signal is raised after the receive has
completed, by the thread that saw it complete. A sent tile is read until its send completes, and
``finish`` returns no earlier, so inputs, partials and stand-ins may be overwritten afterwards.

Shutdown. Threads wait for their operations without a deadline, because only the engine decides when
a peer is late, and its clock does not count time in which this process was stopped. Closing breaks
the connections, which ends every pending operation of both sides at once. It also discards data
that the kernel has yet to deliver. So a clean close first sends a header and waits for the answer,
which the peer sends when it has received everything before it. No thread may be inside gloo when
the interpreter exits: see flux/transport/threads.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from flux import _C
from flux.core.forked import abandon_in_children
from flux.core.recorder import Recorder, Work, incoming_lane, outgoing_lane, sender_lane
from flux.transport.channel import FailureNotice, Header, HeaderKind, Message, OpChannel
from flux.transport.exchange import Exchange
from flux.transport.network_piece import NetworkPiece, Posted
from flux.transport.threads import Patience, end_at_exit

LARGE_BYTES = 64 << 10
"""Size from which sending a tile takes longer than waking a thread: 0.5 ms at 1 Gbit/s."""
JOIN_S = 10.0
"""Seconds that closing waits for threads to end."""
FAILED_JOIN_S = 0.3
"""The same after a failure, which is raised first. Threads that are left end a little later."""
LINGER_S = 5.0
"""Limit in seconds of a clean close, which waits for peers to receive what was sent before."""


@dataclass
class _Job:
    """The work of one thread in one call."""

    epoch: int
    pieces: Iterable[NetworkPiece] = ()
    header: Message | None = None  # being sent
    # Set when the first operation is posted.
    posted: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class _Gone(Exception):
    """The peer has closed the op, or the engine has given up."""


class Network:
    """This rank's connections to the ranks on other hosts, for one op."""

    def __init__(
        self,
        exchange: Exchange,
        remote: Sequence[int],
        engine: _C.Engine,
        timeout_s: float,
        window_bytes: int,
        memory: object,
    ) -> None:
        """Connect to the remote ranks.

        Args:
            exchange: the op's ranks.
            remote: ranks on other hosts.
            engine: the op's engine.
            timeout_s: seconds that a peer may make no progress.
            window_bytes: most bytes in flight to, and from, each peer.
            memory: the memory that the engine works on; kept alive as long as a thread may use it.
        """
        self.rank = exchange.rank
        self.timeout_s = timeout_s
        self.bytes_sent = dict.fromkeys(remote, 0)
        self.first_broken = -1
        """The rank whose connection broke first; ranks that give up on it break theirs later."""
        self._engine = engine
        self._memory: object = memory
        self._channel: OpChannel | None = OpChannel(exchange, timeout_s)
        self._closing = False
        self._inside = _C.Exclusive()  # of close
        self._join_s = JOIN_S
        self._jobs: list[tuple[_Link, _Job]] = []
        self._links = [_Link(self, self._channel, peer, window_bytes) for peer in remote]
        abandon_in_children(self)
        end_at_exit(self)

    def open(self) -> None:
        """Start the threads, which only ``close`` ends: the caller must have this object by now."""
        for link in self._links:
            link.open()

    # -- calls -------------------------------------------------------------------------------------

    def begin(
        self,
        epoch: int,
        digest: int,
        outgoing: Callable[[int], Iterable[NetworkPiece]],
        incoming: Callable[[int], Iterable[NetworkPiece]],
    ) -> None:
        """Tell the peers that this rank has entered a call, and move its tiles."""
        for link in self._links:
            header = link.send_header(Header(HeaderKind.enter, epoch, digest))
            link.start(_Job(epoch, outgoing(link.peer), header), _Job(epoch, incoming(link.peer)))

    def refuse(self, epoch: int, why: str) -> None:
        """Tell the peers that this rank's input was rejected."""
        self.settle()
        for link in self._links:
            header = link.send_header(Header(HeaderKind.refuse, epoch, text=why))
            link.start(_Job(epoch, (), header), _Job(epoch))

    def finish(self) -> tuple[int, str] | None:
        """Wait until every tile has been sent and received; return who failed and how, or None."""
        for link in self._links:
            why = link.wait(self.timeout_s)
            if why is not None:
                return link.peer, why
        return None

    def settle(self) -> None:
        """Wait until the threads no longer use a call that has failed."""
        for link in self._links:
            link.wait(self.timeout_s)
            link.forget()

    def trace(self, recorder: Recorder | None) -> None:
        """Record the connections' work from now on; None: stop. Call it only between calls."""
        for link in self._links:
            link.recorder = recorder

    def problem_with(self, peer: int) -> str:
        """Return the error of the connection to ``peer``, or an empty string."""
        return next((link.problem for link in self._links if link.peer == peer), "")

    # -- end ---------------------------------------------------------------------------------------

    def close(self, failed: bool, culprit: int = -1) -> None:
        """Break the connections and end the threads. The engine must be closed. Idempotent.

        A call that a signal handler interrupts can be repeated: it breaks off what is left.

        Args:
            failed: whether a call has failed; else peers get all that was sent to them before.
            culprit: the rank that this one has given up on; peers are told; -1: this rank.
        """
        self._inside.try_call(self._close, failed, culprit)  # another thread that is inside does it

    def _close(self, failed: bool, culprit: int) -> None:
        if not self._closing:
            self._closing = True
            self._join_s = FAILED_JOIN_S if failed else JOIN_S
            if self._channel is None:
                return
            if failed:
                peers = [link.peer for link in self._links]
                self._channel.send_failure(peers, self.rank if culprit == -1 else culprit)
            else:
                self._part()
        if self._channel is not None:
            self._break_off()

    def _part(self) -> None:
        """Tell the peers that this rank closes, and wait for their answers.

        A function of its own, so that the sends are gone before ``close`` leaves: ``end`` waits for
        that, and torch releases the GIL to drop a send.
        """
        deadline = time.monotonic() + LINGER_S
        headers = [link.send_header(Header(HeaderKind.close)) for link in self._links]
        for link, header in zip(self._links, headers, strict=True):
            link.part(header, deadline)

    def end(self) -> None:
        """End the threads at the program's end, also those left by an interrupted ``close``."""
        self._engine.close()
        self.close(failed=False)
        while self._inside.taken:  # by another thread
            time.sleep(0.01)
        if self._channel is not None:
            self._join_s = JOIN_S
            self._break_off()

    def _break_off(self) -> None:
        assert self._channel is not None
        for link in self._links:
            link.problem = link.problem or self._channel.abort(link.peer)
        deadline = time.monotonic() + self._join_s
        for link in self._links:
            link.join(deadline)
        self.release_unless_used()

    def release_unless_used(self) -> None:
        """Let go of connections and memory unless a thread still uses them, which calls this."""
        if not any(link.is_alive() for link in self._links):
            self._channel = self._memory = None
            for link in self._links:
                link.drop_channel()

    def abandon(self) -> Iterable[object]:
        """Leave the connections to the parent of this forked child.

        An operation of a call keeps them too, also when the network is closed. So all of this
        object stays.
        """
        self._closing = True
        return (self,)


class _Link:
    """The two threads of the connection to one peer."""

    def __init__(self, network: Network, channel: OpChannel, peer: int, window_bytes: int) -> None:
        self.peer = peer
        self.problem = ""
        self.recorder: Recorder | None = None
        self._network = network
        self._engine = network._engine
        self._channel: OpChannel | None = channel
        self._notice: FailureNotice | None = FailureNotice(channel, peer)
        self._window = window_bytes
        self._progress = 0  # pieces sent and received
        self._current: tuple[_Job, ...] = ()
        self._outbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"flux-{network.rank}-{peer}"
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=f"{name}-{what}", daemon=True)
            for what, body in (("send", self._send_calls), ("recv", self._receive_calls))
        ]

    def open(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def channel(self) -> OpChannel:
        """The connections; this side has not dropped them."""
        assert self._channel is not None
        return self._channel

    # -- for the calling thread --------------------------------------------------------------------

    def send_header(self, header: Header) -> Message | None:
        """Begin to send a header; return None if the connection is broken."""
        return self.channel.send_header(self.peer, header)

    def start(self, out: _Job, into: _Job) -> None:
        """Start the jobs of a call: one to send, one to receive."""
        self._current = (out, into)
        self._outbox.put(out)
        self._inbox.put(into)

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the current call's jobs; return what went wrong, or None.

        A connection that breaks when both jobs are done is none of this call's: the peer has failed
        in its next one, or closed the op.
        """
        patience, progress = Patience(timeout_s), self._progress
        for job, thread in zip(self._current, self._threads, strict=False):
            while not job.done.wait(0.05):
                if not thread.is_alive() and not job.done.is_set():
                    return self.problem or f"rank {self.peer} has closed the op"
                if self._progress != progress:
                    patience, progress = Patience(timeout_s), self._progress
                if patience.left_s <= 0:
                    return f"rank {self.peer} received or delivered nothing for {timeout_s:g} s"
        return None

    def forget(self) -> None:
        """Release the tiles of a call that did not happen."""
        self._current = ()

    def part(self, goodbye: Message | None, deadline: float) -> None:
        """Wait until the peer has answered our close, sent its own, or broken the connection."""
        self._inbox.put(None)  # a peer that starts another call gets no answer
        if goodbye is not None:
            self._threads[1].join(max(0.0, deadline - time.monotonic()))

    def join(self, deadline: float) -> None:
        """Stop the threads, and wait for them until ``deadline`` (``time.monotonic``)."""
        self._outbox.put(None)
        self._inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def drop_channel(self) -> None:
        """Let go of the connections, which operations keep too. The threads have ended."""
        self._channel = self._notice = None
        self.forget()
        self._outbox, self._inbox = queue.SimpleQueue(), queue.SimpleQueue()

    def is_alive(self) -> bool:
        """Return whether a thread other than the caller's is still running."""
        this = threading.current_thread()
        return any(thread.is_alive() for thread in self._threads if thread is not this)

    # -- threads -----------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a thread's body; report any error while the op is open as the peer's failure."""
        try:
            body()
        except _Gone:
            return
        except Exception as error:
            if not self._network._closing:
                self.problem = self.problem or f"connection to rank {self.peer} broke: {error}"
                assert self._notice is not None
                culprit = self._notice.culprit()
                if self._network.first_broken == -1:
                    self._network.first_broken = culprit
                self._engine.peer_left(self.peer, failed=True, culprit=culprit)
        finally:
            if self._network._closing:
                self._network.release_unless_used()

    def _send_calls(self) -> None:
        while (job := self._outbox.get()) is not None:
            if job.header is not None:
                job.header.wait()
            if self._engine.await_agreement(job.epoch):
                self._flow(job, Work.send, self._post_send, lambda piece, sent, epoch: None)
            job.done.set()

    def _await_receives(self) -> None:
        """Wait until this call's receives are posted."""
        receives = self._current[1]
        while not receives.posted.wait(0.05):
            if not self._threads[1].is_alive():
                raise _Gone

    def _receive_calls(self) -> None:
        while True:
            self._publish(self.channel.receive_header(self.peer))
            job = self._inbox.get()
            if job is None:
                return
            if self._engine.await_agreement(job.epoch):
                self._flow(job, Work.receive, self._post_receive, self._announce)
            job.done.set()

    def _publish(self, header: Header) -> None:
        """Tell the engine what a header says.

        Raises:
            _Gone: the peer has closed the op.
        """
        if header.kind == HeaderKind.enter:
            self._engine.peer_entered(self.peer, header.epoch, header.digest)
        elif header.kind == HeaderKind.refuse:
            self._engine.peer_refused(self.peer, header.epoch, header.text)
        else:
            # A rank that is closing too has sent its own close header. The peer takes that as the
            # answer and listens for one only.
            if header.kind == HeaderKind.close:
                self._engine.peer_left(self.peer, failed=False)
                if not self._network._closing:
                    answer = self.send_header(Header(HeaderKind.closed))
                    if answer is not None:
                        answer.wait()
            raise _Gone

    def _post_send(self, piece: NetworkPiece, epoch: int, number: int) -> Posted:
        began = self._stamp()
        ready = piece.signal is None or self._engine.await_parcel(self.peer, piece.signal, epoch)
        if not ready:
            raise _Gone
        if piece.nbytes >= LARGE_BYTES:
            self._await_receives()
        if self.recorder is not None and piece.signal is not None:
            self.recorder.lane(sender_lane(self.peer)).add(Work.wait, began, number, peer=self.peer)
        self._network.bytes_sent[self.peer] += piece.nbytes
        packed, posted_ns = piece.packed(), self._stamp()
        message = self.channel.send(packed, self.peer) if piece.nbytes else None
        return Posted(message, piece, packed, posted_ns)

    def _post_receive(self, piece: NetworkPiece, epoch: int, number: int) -> Posted:
        room, posted_ns = piece.room(), self._stamp()
        message = self.channel.receive(room, self.peer) if piece.nbytes else None
        return Posted(message, piece, room, posted_ns)

    def _stamp(self) -> int:
        """Return the current time, for a trace; 0 if tracing is off."""
        return 0 if self.recorder is None else _C.Lane.now()

    def _announce(self, piece: NetworkPiece, received: torch.Tensor, epoch: int) -> None:
        assert piece.signal is not None
        piece.unpack(received)
        self._engine.announce(piece.signal, epoch)

    def _flow(
        self,
        job: _Job,
        work: Work,
        post: Callable[[NetworkPiece, int, int], Posted],
        complete: Callable[[NetworkPiece, torch.Tensor, int], None],
    ) -> None:
        """Keep up to ``window`` bytes, but at least two pieces, posted."""
        posted: deque[Posted] = deque()
        size = completed = 0
        lane = None
        if self.recorder is not None:
            name = outgoing_lane if work is Work.send else incoming_lane
            lane = self.recorder.lane(name(self.peer))

        def complete_oldest() -> None:
            nonlocal size, completed
            message, piece, memory, posted_ns = posted.popleft()
            if message is not None:
                message.wait()
            size -= piece.nbytes
            self._progress += 1
            complete(piece, memory, job.epoch)
            if lane is not None and work is Work.receive:
                lane.add_after_last(work, posted_ns, completed, self.peer, piece.nbytes)
            elif lane is not None:
                # This thread waits for tiles meanwhile, so it may notice the end late.
                until = posted[0].posted_ns if posted else 0
                lane.add(work, posted_ns, completed, completed + 1, self.peer, piece.nbytes, until)
            completed += 1

        for number, piece in enumerate(job.pieces):
            while len(posted) >= 2 and size + piece.nbytes > self._window:
                job.posted.set()
                complete_oldest()
            posted.append(post(piece, job.epoch, number))
            size += piece.nbytes
        job.posted.set()
        while posted:
            complete_oldest()
