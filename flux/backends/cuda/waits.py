"""Find out which wait of an op on GPUs has failed, and end waits that cannot give up."""

from __future__ import annotations

import math
import time
from weakref import WeakValueDictionary

import torch

from flux import _C
from flux.core.errors import PeerDiedError, PeerTimeoutError
from flux.transport.base import DeviceTransport, Peers
from flux.transport.watch import Watch

GRACE_S = 0.3
"""Seconds from noticing that a peer has died to giving up: it may have done its part before."""
TAIL_S = 1.0
"""Seconds from the timeout to the end of a call whose kernels have given up by themselves."""
ABANDONED = 4  # the codes of csrc/cuda/abi.h
_ROUTINGS = {
    8: "the router chose {observed} rows for ranks with part {signal} of the experts, more than "
    "max_rows = {tile}",
    9: "the router chose expert {signal} for token {tile}: there is none",
}
_WAITS = {
    1: "rows of x (AllGather signal {signal})",
    2: "the entry of rank {signal}, before writing to its memory",
    3: "partials of a peer (flag {signal})",
    5: "rank {signal} to reach the same place in the call",
    6: "the sum of node {node}",
    7: "rows of the result from rank {signal}",
}

_BY_OP: WeakValueDictionary[int, StreamWaits] = WeakValueDictionary()


class StreamWaits:
    """The streams that one rank's calls are on, and what their kernels wait for.

    Args:
        who: the op and the rank, for messages.
        transport: of the op's ranks.
        native: the op, whose kernels wait.
        peers: what the host does for the peers.
        watch: looks for peers that die; None where all ranks are in this process.
        report: what a kernel that has given up leaves: code, tile, signal, expected, observed.
        timeout_s: of each wait, in seconds.
    """

    def __init__(
        self,
        who: str,
        transport: DeviceTransport,
        native: _C.CudaOp,
        peers: Peers,
        watch: Watch | None,
        report: torch.Tensor,
        timeout_s: float,
    ) -> None:
        self._who = who
        self._node = transport.rank * transport.nodes // transport.world
        self._driver = transport.device.driver
        self._native = native
        self.peers = peers
        self._watch = watch
        self._report = report
        self._timeout_s = timeout_s
        self.streams: set[int] = set()
        self.ending = False  # a wait that is going on is to give up
        self._gave_up = False
        _BY_OP[native.key] = self

    def check(self, wait: bool) -> None:
        """Raise what waits of earlier calls have found: see ``CudaBackend.check``."""
        if wait:
            for stream in self.streams:
                self.drain(stream)
            self._native.look()
        done = not self._gave_up
        # Others that noticed it sooner give up, which makes waits of this rank fail.
        dead = self._dead() if self._native.failed or not done else None
        if dead is not None:
            raise dead
        if self._native.failed:
            code, tile, signal, expected, observed = self._report[:5].tolist()
            if code == ABANDONED:
                raise PeerTimeoutError(f"{self._who}: rank {signal} gave up in call {expected}")
            if code in _ROUTINGS:
                chosen = _ROUTINGS[code].format(tile=tile, signal=signal, observed=observed)
                raise RuntimeError(f"{self._who}: {chosen}; results of call {expected} are wrong")
            other = signal + (signal >= self._node)  # but for the own node
            what = _WAITS[code].format(signal=signal, node=other)
            raise PeerTimeoutError(
                f"{self._who} waited more than {self._timeout_s:g} s for {what}, tile {tile}, "
                f"call {expected}: the signal word had {observed}"
            )
        if not done and self.ending:
            raise RuntimeError(f"{self._who}: closed while waiting for call {self._native.epoch}")
        if not done:
            raise PeerTimeoutError(
                f"{self._who}: call {self._native.epoch} was not done after {self._timeout_s:g} s: "
                "a stream waited for a peer's signal"
            )

    def look(self) -> None:
        """Raise PeerDiedError if the process of a peer on this host has ended."""
        dead = self._dead()
        if dead is not None:
            raise dead

    def drain(self, stream: int, at_most_s: float = math.inf) -> bool:
        """Wait until a stream is done; return False if waits of this op had to be ended.

        Kernels give up by themselves within the timeout. A stream cannot: the host ends the waits
        of an op whose call has gone on for the timeout, or of which a kernel has given up.

        Args:
            stream: the stream.
            at_most_s: for work that belongs to no call, in seconds.
        """
        began = time.monotonic()
        deadline = began + at_most_s
        waiting = None  # a call of this op, or one that is in front of it on the streams
        while not self._driver.ready(stream):
            now = time.monotonic()
            call = self._native.waiting()
            if call != waiting:
                waiting, began = call, now
            owner = self if call is None else _BY_OP.get(call[0], self)
            if call is not None and now - began > owner._timeout_s + TAIL_S:
                owner.give_up()
            if self._native.failed:
                deadline = min(deadline, now + TAIL_S)
            if self._dead() is not None:
                deadline = min(deadline, now + GRACE_S)
            if now > deadline or self.ending:
                owner.give_up()
                self.give_up()
            time.sleep(0.0005)
        return not self._gave_up

    def give_up(self) -> None:
        """End the waits of this op, once."""
        if not self._gave_up:
            self._gave_up = True
            self.let_go()

    def let_go(self) -> None:
        """Tell the peers, and end all waits of this rank's streams."""
        self.peers.let_go(self._native.epoch)
        self._native.let_go()

    def _dead(self) -> PeerDiedError | None:
        """Return the error about a peer that has died, or None."""
        rank = None if self._watch is None else self._watch.dead()
        if self._watch is None or rank is None:
            return None
        who = f"{self._who}, after call {self._native.epoch}"
        return PeerDiedError(f"{who}: {self._watch.end_of(rank)}")
