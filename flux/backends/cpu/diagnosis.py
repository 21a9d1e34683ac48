"""Find out which rank a failed call has failed on, and say so in its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flux import _C
from flux.core.errors import PeerDiedError, PeerTimeoutError
from flux.core.spec import OpSpec

if TYPE_CHECKING:
    from flux.transport.network import Network

REFUSED = 0xFFFFFFFF  # as a digest
UNKNOWN = (-1, 0xFFFFFFFF)  # as a culprit: from the engine, and in a pad


def mismatch_text(spec: OpSpec, rank: int, f: _C.FailureDict) -> str:
    """Return the error text for a call that ranks make with different arguments, or refuse."""
    label, peer = spec.label, f["peer"]
    if f["ran_ahead"]:
        return f"{label}: rank {peer} is ahead of rank {rank}: ranks made different calls"
    if f["observed"] == REFUSED:
        return f"{label}: rank {peer} refused its input: {f['refusal']}"
    if spec.op.exchanges:
        text = f"rank {peer} and rank {rank} passed different batches or lengths of sequences"
        return f"{label}: ranks disagree: {text}"
    shared = spec.op.gathers and spec.scaling == "tensor"
    if spec.experts or shared:
        what = "tokens, routing, probs or biases" if spec.experts else "M"
        what += " or scale_x" if shared else ""
        text = f"rank {peer} and rank {rank} passed different {what}"
        return f"{label}: ranks disagree: {text}"
    digests = (f["observed"], f["expected"])
    if spec.op.gathers:
        theirs, mine = (f"M = {digest}" for digest in digests)
    else:
        theirs, mine = (
            f"M = {digest // 2} {'with' if digest % 2 else 'without'} bias" for digest in digests
        )
    return f"{label}: ranks disagree: rank {peer} has {theirs}, rank {rank} {mine}"


class Diagnosis:
    """The state of one op's peers, and the errors that follow from it.

    Args:
        spec: the op.
        rank: this rank.
        engine: of this rank.
        pids: by rank: the process of a rank on this host, else 0.
        network: the connections to ranks on other hosts, if there are any.

    Attributes:
        label: what errors begin with, the op's name.
    """

    def __init__(
        self,
        spec: OpSpec,
        rank: int,
        engine: _C.Engine,
        pids: Sequence[int],
        network: Network | None,
    ) -> None:
        self.label = spec.label
        self._engine = engine
        self._rank = rank
        self._pids = pids
        self._peers = [rank for rank in range(len(pids)) if rank != self._rank]
        self._network = network

    def of_wait(self, f: _C.FailureDict, timeout_s: float) -> tuple[PeerTimeoutError, int]:
        """Return the error for a wait of the engine that failed, and the rank that caused it."""
        peer = f["peer"]
        tile = f"tile {f['tile']} of chunk {f['chunk']}" if f["tile"] >= 0 else "the call to begin"
        where = f"{self.label}: rank {self._rank}, call {self._engine.epoch}, waiting for {tile}"
        if f["kind"] != "timeout":
            return self._lost(where, f["kind"], peer, f["culprit"])
        what = f"rank {peer} did not deliver within {timeout_s:g} s"
        if f["tile"] >= 0:
            what += f" (signal: expected {f['expected']}, observed {f['observed']})"
        return PeerTimeoutError(f"{where}: {what}{self._problem_with(peer)}"), peer

    def of_collective(self) -> PeerTimeoutError | None:
        """Return the error of a collective of the library if a peer has died or given up.

        Call it regularly while the collective is waited for: peers on this host see in the pad that
        this rank does. The memory must stay mapped until it returns.
        """
        self._engine.look()
        first = -1 if self._network is None else self._network.first_broken
        # Others give up because of the first one, and ranks may have given up on a dead one.
        peers = sorted(self._peers, key=lambda peer: peer != first)
        fates = [(*self._engine.fate(peer), peer) for peer in peers]
        for kind in ("peer_died", "peer_failed"):
            for fate, culprit, peer in fates:
                if fate == kind:
                    where = f"{self.label}: rank {self._rank}, in a collective of path=unfused"
                    if culprit in (*UNKNOWN, peer, self._rank):
                        culprit = self.silent_peer()
                    return self._lost(where, fate, peer, culprit)[0]
        return None

    def silent_peer(self) -> int:
        """Return the one peer that has neither left nor looked at its peers lately; -1 if unknown.

        In a collective of the library all other ranks wait for this one. Of ranks on other hosts
        it is known only whether they have left. The memory must stay mapped until this returns.
        """
        here = [peer for peer in self._peers if self._pids[peer]]
        silent = [peer for peer in self._peers if self._engine.fate(peer)[0] == "none"]
        silent = [peer for peer in silent if peer not in here or not self._engine.looks(peer)]
        suspects = [peer for peer in silent if peer in here] or silent
        return suspects[0] if len(suspects) == 1 else -1

    def _lost(self, where: str, fate: str, peer: int, culprit: int) -> tuple[PeerTimeoutError, int]:
        """Return the error about a peer that is gone, and the rank that caused it.

        Of a chain of ranks that gave up one after the other, that is the first.
        """
        what, dead = f"rank {peer} has closed the op", None
        if fate == "peer_died":
            what, dead = f"rank {peer} died", peer
        elif fate == "peer_failed":
            what = f"rank {peer} gave up"
            if culprit in (*UNKNOWN, peer) and self._network is not None:
                culprit = self._network.first_broken
            if culprit not in (*UNKNOWN, peer):
                what += f" on rank {culprit}"
                peer = culprit
                if self._engine.fate(culprit)[0] == "peer_died":
                    what, dead = f"{what}, which died", culprit
        if dead is not None:
            text = f"{where}: {what} (process {self._pids[dead]} ended)"
            return PeerDiedError(text), dead
        return PeerTimeoutError(f"{where}: {what}{self._problem_with(peer)}"), peer

    def _problem_with(self, peer: int) -> str:
        problem = "" if self._network is None else self._network.problem_with(peer)
        return f" ({problem})" if problem else ""
