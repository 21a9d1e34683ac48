"""Detect whether the peers of a GPU op on this host live; their GPU memory does not show it.

Each rank has a pad of shared memory (transport/shm.py), in which it records that it has closed the
op. A peer whose process ended without that record has died.
"""

from __future__ import annotations

import time

from flux import _C
from flux.transport import shm
from flux.transport.exchange import Exchange
from flux.transport.placement import Placement

LOOK_S = 0.02
"""Seconds between two checks of the processes."""


class Watch:
    """The peers of one op on this host. Construction is collective.

    Args:
        exchange: the op's ranks.
        placement: of their processes.

    Raises:
        OSError: on every rank, if a pad could not be made or mapped on any rank.
    """

    def __init__(self, exchange: Exchange, placement: Placement) -> None:
        memory = shm.allocate(exchange, placement, 0, 0, exchange.label)
        self._pids = memory.processes.pids
        self._peers = [rank for rank, pid in enumerate(self._pids) if pid]
        self._engine = _C.Engine(
            rank=exchange.rank,
            pads=memory.pads,
            data=[],
            remote=[not here for here in placement.shared_with(exchange.rank)],
            row_bytes=0,
            slot_bytes=0,
            result_offset=0,
            data_bytes=0,
            dtype=0,
            signals=0,
            processes=memory.processes,
            memory=memory.segments,
        )
        self._memory: shm.SymmetricMemory | None = memory
        self._next_look = 0.0
        self._dead: int | None = None

    def dead(self) -> int | None:
        """Return a peer whose process has ended without closing the op, None if there is none.

        A call costs almost nothing if the last check was less than ``LOOK_S`` ago.
        """
        now = time.monotonic()
        if self._dead is None and self._memory is not None and now >= self._next_look:
            self._next_look = now + LOOK_S
            fates = (peer for peer in self._peers if self._engine.fate(peer)[0] == "peer_died")
            self._dead = next(fates, None)
        return self._dead

    def end_of(self, rank: int) -> str:
        """Return the error text for a peer that is dead."""
        return f"rank {rank} died (process {self._pids[rank]} ended)"

    def close(self, failed: bool) -> None:
        """Record that this rank has closed the op: its part of all calls is done. Idempotent."""
        if self._memory is not None:
            self._engine.close(failed)
            self._memory = None
