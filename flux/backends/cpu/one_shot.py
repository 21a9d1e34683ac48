"""Path one_shot: one GEMM, and before or after it one collective (transport/host_collectives.py).

With few rows a call between hosts takes as long as its messages: headers, a message per tile and
direction, and the threads that wake for each. Here each rank sends its part once, and the calling
thread itself sends and receives. What ranks must agree on travels with the data.

A call counts in the engine, too, without an entry in the pads. A rank that finds out that another
one makes a different call, or refuses this one, enters it there, as the others do then: see
``Engine::is_entered``. So errors are those of the other paths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.backends.epilogue import Multiplier, pack, unpack
from flux.core.backend import OverlapHooks
from flux.core.call import Call
from flux.core.errors import PeerTimeoutError
from flux.core.recorder import GEMM_LANE, HostStamps, Recorder, Work
from flux.core.schedule import TileSchedule
from flux.core.spec import DTYPES, OpSpec
from flux.core.tensors import address_of
from flux.transport.exchange import Exchange
from flux.transport.host_collectives import Collective, DisagreementError, HostCollectives
from flux.transport.placement import Placement

if TYPE_CHECKING:
    from flux.transport.network import Network

NOTICE_S = 0.3
"""Seconds to wait for the network to notice what a connection of ours has noticed."""


class Owner(Protocol):
    """The backend of the op."""

    recorder: Recorder | None
    network: Network | None

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """Return memory for a result."""
        ...

    def meet(self, schedule: TileSchedule, digest: int) -> Callable[[], None]:
        """Begin to meet the peers: see ``Backend.meet``."""
        ...

    def close(self, failed: bool = False, culprit: int = -1) -> None:
        """Release everything, and tell the peers."""
        ...


class OneShot:
    """The one-shot calls of one op on one rank. Construction is collective.

    Args:
        spec: the op.
        exchange: its ranks.
        placement: which of them share memory.
        engine: of the op, which counts its calls.
        timeout_s: how long a call waits for a peer, in seconds.
        spin_s: how long it polls before it sleeps, in seconds.
    """

    def __init__(
        self,
        spec: OpSpec,
        exchange: Exchange,
        placement: Placement,
        engine: _C.Engine,
        timeout_s: float,
        spin_s: float,
    ) -> None:
        self._spec = spec
        self._rank, self._world = exchange.rank, exchange.world
        self._engine = engine
        self._number = 0  # of the last call; the engine's has 32 bits
        row, self._wire = spec.travelling_row
        self._row_bytes = row * self._wire.itemsize
        native = DTYPES[spec.out_dtype].native
        assert native is not None  # results are never float8
        self._dtype = native
        self.stamps: HostStamps | None = None
        self.collectives = HostCollectives(
            exchange, placement, timeout_s, spin_s, most_bytes=spec.max_m * self._row_bytes
        )

    def trace(self, recorder: Recorder | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        self.stamps = None if recorder is None else HostStamps(recorder.lane(GEMM_LANE))

    def call(
        self,
        backend: Owner,
        schedule: TileSchedule,
        call: Call,
        gather: bool,
        hooks: OverlapHooks,
    ) -> list[torch.Tensor]:
        """Execute a call: see ``Backend.run``; ``backend``: its own one."""
        spec = self._spec
        if backend.recorder is not None:
            backend.recorder.begin(schedule)
        try:
            if spec.op.gathers:
                outs = [backend.empty(call.m, columns) for columns in call.columns]
                if gather:
                    outs.append(call.x.new_empty(call.m, spec.k, dtype=spec.dtype))
                self.gather(call, outs, gather, hooks)
                return outs
            partial = backend.empty(call.m, spec.n[0])
            own = _C.core.row_count(call.m, self._world, self._rank)
            out = partial if spec.op.all_reduces else backend.empty(own, spec.n[0])
            self.reduce(call, partial, out)
            hooks.meanwhile()
            return [out]
        except DisagreementError:
            # The ranks meet in the engine instead, where they find out what differs.
            self._engine.epoch -= 1
            biased = spec.op.reduces and call.biases[0] is not None
            backend.meet(schedule, spec.digest(call.m, biased))()
            raise RuntimeError(f"{spec.label}: ranks chose different paths") from None
        except PeerTimeoutError as error:
            culprit = getattr(error, "culprit", self._rank)
            text = f"{error}{problem_with(backend.network, culprit)}"
            backend.close(failed=True, culprit=culprit)
            raise type(error)(text) from None

    def reduce(self, call: Call, partial: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply into ``partial`` [M, N], and sum it over the ranks into ``out``.

        Args:
            call: the arguments.
            partial: memory for this rank's partial results; for GemmAR it may be ``out``.
            out: the result: [M, N], or of GemmRS the own rows.
        """
        spec, bias = self._spec, call.biases[0]
        began = self._began()
        Multiplier(spec, call)(call.x, partial, scale_x=call.scale_x)
        self._ended(Work.gemm, began, 0)
        kind = Collective.all_reduce if spec.op.all_reduces else Collective.reduce_scatter
        self._run(
            kind,
            spec.digest(call.m, bias is not None),
            partial,
            out,
            call.m,
            bias=0 if bias is None else address_of(bias),
            scale=1.0 / self._world if spec.reduce == "avg" else 1.0,
        )

    def gather(
        self, call: Call, outs: list[torch.Tensor], gather: bool, hooks: OverlapHooks
    ) -> None:
        """Gather the rows of x, and multiply them.

        Args:
            call: the arguments.
            outs: memory for the result of each weight, [M, columns]; then, with ``gather``, for the
                gathered input, [M, K].
            gather: see ``outs``.
            hooks: of the caller.
        """
        spec = self._spec
        x_full = outs[-1] if gather else None
        x = (pack(call) if spec.scales_travel else call.x).contiguous()
        gathered = x.new_empty(call.m, x.shape[1])
        if x_full is not None and not spec.scales_travel:
            gathered = x_full
        self._run(Collective.all_gather, spec.digest(call.m, biased=False), x, gathered, call.m)
        hooks.both()
        began = self._began()
        rows, scale = unpack(spec, gathered) if spec.scales_travel else (gathered, call.scale_x)
        if x_full is not None and gathered is not x_full:
            x_full.copy_(rows)
        multiply = Multiplier(spec, call)
        for weight, (bias, out) in enumerate(zip(call.biases, outs, strict=False)):
            multiply(rows, out, weight=weight, scale_x=scale, bias=bias)
        self._ended(Work.gemm, began, 0)

    def _run(
        self,
        kind: Collective,
        digest: int,
        source: torch.Tensor,
        out: torch.Tensor,
        m: int,
        bias: int = 0,
        scale: float = 1.0,
    ) -> None:
        row, world = self._row_bytes, self._world
        if kind == Collective.all_reduce:
            offsets = [0] + [m * row] * world
        else:
            offsets = [_C.core.row_begin(m, world, rank) * row for rank in range(world)] + [m * row]
        self._engine.skip()
        self._number += (self._engine.epoch - self._number) & 0xFFFFFFFF
        began = self._began()
        self.collectives.run(
            kind,
            self._number,
            digest,
            address_of(source),
            address_of(out),
            offsets,
            self._dtype,
            bias=bias,
            columns=self._spec.n[0],
            scale=scale,
            engine=self._engine,
        )
        self._ended(Work.collective, began, m * row)

    def _began(self) -> int:
        return 0 if self.stamps is None else self.stamps.began()

    def _ended(self, work: Work, began: int, nbytes: int) -> None:
        if self.stamps is not None:
            self.stamps.ended(work, began, nbytes)


def problem_with(network: Network | None, culprit: int) -> str:
    """Return what the network says about the connection to a rank that is lost, in parentheses."""
    if network is None or culprit not in network.bytes_sent:
        return ""
    deadline = time.monotonic() + NOTICE_S
    while not network.problem_with(culprit) and time.monotonic() < deadline:
        time.sleep(0.005)
    problem = network.problem_with(culprit)
    return f" ({problem})" if problem else ""
