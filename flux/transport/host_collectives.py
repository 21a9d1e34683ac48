"""The collectives of csrc/cpu/collectives.h for the ranks of one exchange: memory and sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import IntEnum

from flux import _C
from flux.core.errors import PeerDiedError, PeerTimeoutError
from flux.core.knobs import SLOT_BYTES
from flux.core.tensors import address_of
from flux.transport import shm
from flux.transport.exchange import Exchange, spin_seconds
from flux.transport.placement import Placement
from flux.transport.sockets import connect

UNKNOWN = (-1, 0xFFFFFFFF)  # as a culprit


class Collective(IntEnum):
    """Collectives; values as in csrc/cpu/collectives.h."""

    all_reduce = 0
    reduce_scatter = 1
    all_gather = 2


class DisagreementError(ValueError):
    """Ranks make different calls, or one refuses its input; no rank has a result.

    Attributes:
        peer: the rank that differs; -1: unknown.
        text: why it refused; empty: it did not.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text or f"rank {peer} makes another call")
        self.peer = peer
        self.text = text


class HostCollectives:
    """Sums and gathers memory of the ranks of one exchange. Construction is collective.

    Args:
        exchange: the ranks.
        placement: which of them share memory.
        timeout_s: seconds that a peer may make no progress in a call.
        spin_s: seconds to poll before sleeping; None: found out here.
        most_bytes: of a whole vector, at most; None: any. Memory is no larger than that needs.

    Raises:
        OSError: memory or sockets are refused; on every rank.
        PeerTimeoutError: a peer did not connect.
    """

    def __init__(
        self,
        exchange: Exchange,
        placement: Placement,
        timeout_s: float,
        spin_s: float | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.label = exchange.label
        self.rank = exchange.rank
        self.world = exchange.world
        self.timeout_s = timeout_s
        self.spin_s = spin_s
        self._pid = os.getpid()
        self._native: _C.Collectives | None = None
        names = list(dict.fromkeys(placement.nodes))
        hosts = [names.index(node) for node in placement.nodes]
        local = placement.shared_with(self.rank)
        if spin_s is None:
            self.spin_s = spin_seconds(exchange, local)
        slot = SLOT_BYTES if most_bytes is None else min(SLOT_BYTES, most_bytes)
        slot = max(-(-slot // 64) * 64, 64 * self.world)
        # The same on all ranks, though a rank that is alone on its host needs no slots.
        shares = len(names) < self.world
        nbytes = _C.collective_bytes(slot, shares)
        memory = shm.allocate(exchange, placement, 0, nbytes, exchange.label)
        sockets = connect(exchange, _C.collective_partners(hosts, self.rank))
        self._processes = memory.processes
        self._shared_bytes = memory.nbytes
        self._native = _C.Collectives(
            rank=self.rank,
            hosts=hosts,
            pads=memory.pads,
            data=[address_of(data) for data in memory.data],
            descriptors=[sockets.get(rank, -1) for rank in range(self.world)],
            processes=memory.processes,
            memory=memory.segments,
            slot_bytes=slot,
        )

    @property
    def workspace_bytes(self) -> int:
        """Memory of this rank, in bytes; larger once a call needed more for what arrives."""
        return 0 if self._native is None else self._shared_bytes + self._native.private_bytes

    @property
    def native(self) -> _C.Collectives:
        """The native object.

        Raises:
            RuntimeError: it is closed.
        """
        if self._native is None:
            raise RuntimeError(f"{self.label} is closed")
        return self._native

    def run(
        self,
        kind: Collective,
        number: int,
        digest: int,
        input: int,
        out: int,
        offsets: Sequence[int],
        dtype: int = 0,
        *,
        bias: int = 0,
        columns: int = 0,
        scale: float = 1.0,
        round_bytes: int = 0,
        block_columns: int = 0,
        produce: Callable[[int, int], None] | None = None,
        consume: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
        engine: _C.Engine | None = None,
    ) -> None:
        """Make a call; the arguments are those of ``CollectiveCall`` in csrc/cpu/collectives.h.

        What the functions raise ends the call; this object must be closed then.

        Raises:
            DisagreementError: peers make another call, or none; this object stays usable.
            PeerTimeoutError: a peer is late, or has given up; it must be closed then.
            RuntimeError: ``end_call`` was called.
        """
        assert self.spin_s is not None
        native = self.native
        outcome = native.run(
            kind=kind,
            number=number,
            digest=digest,
            input=input,
            out=out,
            offsets=offsets,
            dtype=dtype,
            timeout_s=self.timeout_s,
            spin_s=self.spin_s,
            bias=bias,
            columns=columns,
            scale=scale,
            round_bytes=round_bytes,
            block_columns=block_columns,
            produce=produce,
            consume=consume,
            meanwhile=meanwhile,
            engine=engine,
        )
        if outcome == "done":
            return
        report = native.report()
        if outcome == "disagrees":
            raise DisagreementError(report["peer"], report["text"])
        if outcome == "ended":
            raise RuntimeError(f"{self.label}: closed during call {number}")
        raise self._lost(report, f"{self.label}: rank {self.rank}, call {number}")

    def _lost(self, report: _C.CollectiveReportDict, where: str) -> PeerTimeoutError:
        """Return the error about a failed call; its attribute ``culprit`` is the rank at fault."""
        peer, culprit, kind = report["peer"], report["culprit"], report["kind"]
        if culprit in UNKNOWN:
            culprit = peer
        broken = f" (connection to rank {peer} broke: {report['text']})" if report["text"] else ""
        error: PeerTimeoutError
        if kind == "timeout":
            what = f"rank {peer} did not deliver within {self.timeout_s:g} s"
            what += f" (part: expected {report['expected']}, observed {report['observed']})"
            error = PeerTimeoutError(f"{where}: {what}{broken}")
        elif kind == "peer_died":
            process = self._processes.pids[peer]
            error = PeerDiedError(f"{where}: rank {peer} died (process {process} ended)")
        elif kind == "peer_closed":
            error = PeerTimeoutError(f"{where}: rank {peer} has closed the op")
        else:
            what = f"rank {peer} gave up"
            if culprit != peer:
                what += f" on rank {culprit}"
            if culprit != self.rank and self._processes.ended(culprit):
                process = self._processes.pids[culprit]
                error = PeerDiedError(f"{where}: {what}, which died (process {process} ended)")
            else:
                error = PeerTimeoutError(f"{where}: {what}{broken}")
        error.culprit = culprit  # type: ignore[attr-defined]
        return error

    def end_call(self) -> None:
        """Make a call that is inside, in another thread, raise; and all later ones."""
        native = self._native
        if native is not None:
            native.end_call()

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Release sockets and shared memory, and tell the peers. Local and idempotent."""
        native, self._native = self._native, None
        if native is not None and self._pid == os.getpid():
            native.close(failed, culprit)
