"""The control pad of a process group: its ranks compare their next functional calls there.

A functional call has no op of its own yet, and building one is collective. Ranks whose arguments
differ would build different ops and wait for each other in different places. So they meet on this
pad first, with a digest of the call. If they disagree, all raise ValueError before anything is
built or moved.
"""

from __future__ import annotations

import zlib

import torch

from flux import _C
from flux.backends.cpu.backend import CpuBackend
from flux.core.knobs import Knobs, Op
from flux.core.spec import OpSpec
from flux.machine.host import memory_identity
from flux.select.choose import Fixed
from flux.transport.exchange import Exchange
from flux.transport.placement import Placement


class ControlPad(CpuBackend):
    """A signal pad without data. Construction is collective.

    Args:
        exchange: the ranks of the group, two at least.
        timeout_s: how long construction waits for a peer, in seconds.
    """

    def __init__(self, exchange: Exchange, timeout_s: float) -> None:
        placement = Placement(tuple(exchange.all_gather(memory_identity())))
        spec = OpSpec(Op.ag_gemm, 1, (1,), 1, torch.float32, False, "sum")
        knobs = Fixed(Knobs(path="unfused"))
        super().__init__(spec, exchange, knobs, placement.topology, placement, timeout_s)
        self._what = ""

    def compare(self, what: str, timeout_s: float) -> None:
        """Meet the peers, which come within ``timeout_s`` seconds.

        Args:
            what: the call, with everything that must be equal on all ranks.
            timeout_s: how long to wait for a peer, in seconds.

        Raises:
            ValueError: on all ranks, if they differ or one has called ``refuse``.
            PeerTimeoutError: a peer did not come.
        """
        self._what, self.timeout_s = what, timeout_s
        self.meet(None, zlib.crc32(what.encode()) & 0x7FFFFFFF)()

    def _mismatch_text(self, f: _C.FailureDict) -> str:
        if f["refusal"] or f["ran_ahead"]:
            return super()._mismatch_text(f)
        return (
            f"ranks disagree on shapes, dtype or options: rank {f['peer']} differs from rank "
            f"{self.rank}, which calls {self._what}"
        )
