"""Calls that the CUDA backend refuses before anything of them is on a stream."""

from __future__ import annotations

from typing import Protocol

from flux import _C
from flux.core.recorder import CallRecorder
from flux.core.schedule import TileSchedule
from flux.core.spec import OpSpec
from flux.transport.base import Peers

CAPTURED = "calls that are traced cannot be captured into a CUDA graph"


class _Backend(Protocol):
    spec: OpSpec
    nodes: int
    peers: Peers
    recorder: CallRecorder | None
    kernels: list[_C.Kernel]

    def capturing(self) -> bool: ...


def check_possible(backend: _Backend, schedule: TileSchedule, awaits_maps: bool) -> None:
    """Raise if a backend cannot make a call, in which the host may wait for maps of experts.

    Raises:
        ValueError: it is traced or captured, and cannot be.
    """
    reason = reason_not_grouped(backend, awaits_maps) if backend.spec.experts else None
    if backend.spec.op.exchanges and not backend.peers.idle:
        reason = "heads need peers with a GPU of their own, not loopback"
    if reason is not None:
        raise ValueError(f"{backend.spec.label}: {reason}")
    if backend.recorder is not None and backend.capturing():
        reason = CAPTURED
    elif backend.recorder is not None and _sends_copies(backend, schedule):
        reason = "calls whose partials copy engines send cannot be traced; use path = fused"
    elif backend.nodes > 1 and backend.capturing():
        reason = "calls cannot be captured into a CUDA graph where ranks are on several nodes"
    elif not backend.peers.idle and backend.capturing():
        reason = (
            "calls cannot be captured into a CUDA graph where the host acts for the peers, as in "
            "loopback"
        )
    if reason is not None:
        raise ValueError(f"{backend.spec.label}: {reason}")
    if not backend.peers.idle:
        backend.peers.check(schedule.shape[0])


def reason_not_grouped(backend: _Backend, awaits_maps: bool) -> str | None:
    """Return why a call of an op of experts is impossible, None if it is possible."""
    if backend.capturing() and awaits_maps:
        return (
            "calls without max_rows cannot be captured into a CUDA graph: the host reads how many "
            "rows there are"
        )
    if not backend.peers.idle:
        return "experts need peers with a GPU of their own, not loopback"
    return None


def reason_untraceable(backend: _Backend, fused: bool) -> str | None:
    """Return why calls cannot be traced: a capture, or kernels of no trace build."""
    if backend.capturing():
        return f"{backend.spec.label}: {CAPTURED}"
    if fused and not all(kernel.traces for kernel in backend.kernels):
        return (
            f"{backend.spec.label}: its kernels are not from a trace build: run `flux compile "
            "--trace`, then create the op with FLUX_TRACE=1"
        )
    return None


def _sends_copies(backend: _Backend, schedule: TileSchedule) -> bool:
    knobs = schedule.knobs
    copied = knobs.sends == "copies" or (knobs.path == "medium" and backend.nodes == 1)
    return backend.spec.op.reduces and copied
