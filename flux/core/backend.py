"""The contract between an op and the backend that executes its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flux.core.call import Call
from flux.core.knobs import ClusterTile
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import DeviceChoices, MadeMaps


def nothing() -> None:
    """Do nothing: the default of hooks."""


@dataclass(frozen=True)
class OverlapHooks:
    """Work of the caller that a call overlaps with its communication. Each hook is called once.

    Attributes:
        meanwhile: called while rows are under way: of an AllGather when the own rows are
            multiplied, of a ReduceScatter or AllReduce when the GEMM is through.
        arrived: called when the last rows of an AllGather have arrived, before they are multiplied.
    """

    meanwhile: Callable[[], None] = nothing
    arrived: Callable[[], None] = nothing

    def both(self) -> None:
        """Call both, where there is no moment between the two."""
        self.meanwhile()
        self.arrived()


class Backend(Protocol):
    """Executor of one op on one rank. Construction is collective; calls are serial.

    Attributes:
        asynchronous: calls return before they are done; ``check`` raises what they meet.
        waits_for_hosts: the calling thread waits for rows of other hosts during a call.
        refusals: how many calls ended in a ValueError and left nothing under way: all ranks refused
            them, or they were refused before the peers could hear of them.
        cluster: what schedules have to know of the kernels, the same on all ranks; None on the CPU.
    """

    asynchronous: bool
    waits_for_hosts: bool
    refusals: int
    cluster: ClusterTile | None

    @property
    def transport(self) -> object:
        """What moves rows between GPUs; None on the CPU."""

    @property
    def workspace_bytes(self) -> int:
        """Memory of this rank for calls, in bytes."""

    @property
    def remote_peers(self) -> Sequence[int]:
        """Ranks on other hosts, with which the CPU backend exchanges rows by messages."""

    def require_room(self, schedule: TileSchedule) -> None:
        """Raise ValueError, on every rank alike, if the op's memory is too small for a schedule."""

    def input_slot(self, m: int) -> torch.Tensor | None:
        """Return this rank's rows among the gathered ones of the next call, or None.

        None: a call copies its rows from anywhere, or what it fills memory with would spoil them.
        """

    def meet(self, schedule: TileSchedule | None, digest: int) -> Callable[[], None]:
        """Begin to meet the peers without moving rows, for a call of the unfused path.

        Args:
            schedule: of the call, for tracing, if it has one.
            digest: ``OpSpec.digest`` of the call, the same on all ranks.

        Returns:
            What waits for the peers, and raises ValueError if their digests differ.
        """

    def run(
        self,
        schedule: TileSchedule,
        call: Call,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Execute a call.

        Args:
            schedule: this rank's.
            call: its checked arguments.
            gather: return the gathered x as well, [M, K], behind the results.
            hooks: the caller's work beside the call, if any.

        Returns:
            The result of each weight: [M, N/W] (AGGemm), [own rows, N] (GemmRS), [M, N] (GemmAR).

        Raises:
            PeerTimeoutError: a peer died or stalled.
            ValueError: ranks made different calls.
        """

    def again(
        self, x: torch.Tensor, weight: object, bias: object, m: int | None
    ) -> Callable[[], list[torch.Tensor]] | None:
        """Return what repeats the last call, if these arguments differ from its only in contents.

        Its result is that of ``run``. Returns None where the backend keeps no calls, or the
        arguments need a check.
        """

    def capturing(self) -> bool:
        """Return whether a call would become part of a CUDA graph."""

    def refuse(self, why: str) -> None:
        """Tell the peers, who are about to make the same call, that this rank's input is bad."""

    def check(self) -> None:
        """Wait for asynchronous calls; raise PeerTimeoutError if one of them failed."""

    def look(self) -> None:
        """Look once, without waiting, whether a peer died or gave up; raise PeerTimeoutError then.

        From any thread, while a collective of the library is waited for.
        """

    def silent_peer(self) -> int:
        """Return the peer that a collective of the library waits for; -1 if unknown."""

    def reason_untraceable(self, fused: bool) -> str | None:
        """Return why calls cannot be traced, None if they can.

        Args:
            fused: some call of the op takes the fused path.
        """

    def end_call(self) -> None:
        """Make a call end that is inside, in another thread or further up the stack."""

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Give everything back. Idempotent.

        Args:
            failed: a call failed; peers that wait for this rank are told.
            culprit: the rank that caused it.
        """


class RoutingBackend(Backend, Protocol):
    """Executor whose kernels can make the maps of routed rows."""

    def make_maps(self, schedule: TileSchedule, choices: DeviceChoices, columns: int) -> MadeMaps:
        """Have a kernel begin to make the maps of the next call.

        Args:
            schedule: of the call.
            choices: of its router.
            columns: of an expert's product on this rank.

        Raises:
            ValueError: the call is impossible, as of a CUDA graph: the host waits for the maps.
        """
