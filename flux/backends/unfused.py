"""The library path: one collective of torch.distributed before or after one GEMM.

It is a candidate like any other ("never slower than not fusing"), and the baseline of the
benchmarks. It runs on any backend and any number of hosts that torch.distributed supports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.epilogue import Multiplier, pack, unpack
from flux.errors import PeerTimeoutError
from flux.ops.call import Call
from flux.ops.spec import FP8, OpSpec
from flux.trace.recorder import Work

# Newer releases of PyTorch have renamed the collectives on single tensors.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_EXCHANGE_TAG = 18008  # on the user's group; MPI takes tags up to 32767


class Stamps(Protocol):
    """Who wants to know when what went on."""

    def began(self) -> int:
        """Something begins; what ``ended`` wants to know."""
        ...

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """It was this."""
        ...


def nothing() -> None:
    """What a caller has to do meanwhile who has nothing to do."""


@dataclass(frozen=True)
class Beside:
    """What a caller does beside an AllGather: ``meanwhile`` rows of others are under way, and when
    the last of them have ``arrived`` and are to be multiplied. Each is called once."""

    meanwhile: Callable[[], None] = nothing
    arrived: Callable[[], None] = nothing

    def both(self) -> None:
        """Where there is no moment between the two."""
        self.meanwhile()
        self.arrived()


ALONE = Beside()


class UnfusedBackend:
    """Executor of the unfused path of one op on one rank."""

    def __init__(
        self,
        spec: OpSpec,
        group: dist.ProcessGroup | None,
        rank: int,
        world: int,
        timeout_s: float,
    ) -> None:
        self.spec = spec
        self.group = group
        self.rank = rank
        self.world = world
        self.timeout = timedelta(seconds=timeout_s)
        self._stamps: Stamps | None = None

    def trace(self, stamps: Stamps | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        self._stamps = stamps

    def _began(self) -> int:
        return 0 if self._stamps is None else self._stamps.began()

    def _ended(self, work: Work, began: int, nbytes: int = 0) -> None:
        if self._stamps is not None:
            self._stamps.ended(work, began, nbytes)

    def gather_rows(self, x: torch.Tensor, m: int) -> torch.Tensor:
        """[own rows, K] -> [M, K]. Short chunks are padded: collectives want equal sizes."""
        return self.start_gather(x, m)()

    def start_gather(
        self, x: torch.Tensor, m: int, both_ways: bool = False
    ) -> Callable[[], torch.Tensor]:
        """``gather_rows``, begun: what is returned waits for it and returns the result.

        ``both_ways``: of two ranks on different hosts each sends while it receives. In gloo's
        all_gather they take turns (transport/send_recv.py says why): it takes twice as long.
        """
        if self.world == 1:
            return lambda: x
        chunk = _C.core.chunk_rows(m, self.world)
        dtype = x.dtype
        if dtype == FP8:  # which collectives do not know
            x = x.contiguous().view(torch.uint8)
        shard = x.contiguous()
        if shard.shape[0] != chunk:
            shard = x.new_zeros(chunk, x.shape[1])
            shard[: x.shape[0]] = x
        full = x.new_empty(self.world * chunk, x.shape[1])
        if both_ways and self.world == 2:
            pending = self._start_exchange(full, shard)
        else:
            pending = [all_gather(full, shard, group=self.group, async_op=True)]

        def finish() -> torch.Tensor:
            for work in pending:
                self._wait(work)
            return full[:m].view(dtype)

        return finish

    def _start_exchange(self, full: torch.Tensor, shard: torch.Tensor) -> list[dist.Work | None]:
        """An all_gather of two ranks, as a send after a receive."""
        peer = 1 - self.rank
        parts = full.chunk(2)
        to: dict[str, Any] = {"group": self.group, "tag": _EXCHANGE_TAG}
        try:
            receive = dist.irecv(parts[peer], group_src=peer, **to)
            send = dist.isend(shard, group_dst=peer, **to)
        except RuntimeError as error:
            raise PeerTimeoutError(f"{self.spec.label}: rank {peer} is gone: {error}") from error
        parts[self.rank].copy_(shard)
        return [receive, send]

    def ag_gemm(
        self, call: Call, gather: bool, beside: Beside = ALONE
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """[own rows, K] x [K, N/W] each -> [M, N/W] each, and the gathered [M, K] if asked for."""
        spec = self.spec
        began = self._began()
        wait = self.start_gather(pack(spec, call), call.m)
        beside.meanwhile()
        rows = wait()
        beside.arrived()
        if self.world > 1:
            self._ended(Work.collective, began, rows.nbytes)
        began = self._began()
        full, scale = unpack(spec, rows)
        multiply = Multiplier(spec, call)
        outs = []
        for number, bias in enumerate(call.biases):
            out = call.x.new_empty(call.m, call.columns[number], dtype=spec.out_dtype)
            scale_x = call.scale_x if scale is None else scale
            multiply(full, out, weight=number, scale_x=scale_x, bias=bias)
            outs.append(out)
        self._ended(Work.gemm, began)
        if gather and self.world == 1:
            full = full.clone()  # an output must not alias the input
        return outs, (full if gather else None)

    def gemm_rs(
        self,
        call: Call,
        meanwhile: Callable[[], None] = nothing,
        met: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """[M, K/W] x [K/W, N] -> [own rows, N]; ``met`` is called before anything travels, after
        the GEMM, and ``meanwhile`` while the rows do."""
        began = self._began()
        partial = self._padded(call.x, call.m)
        Multiplier(self.spec, call)(call.x, partial[: call.m], scale_x=call.scale_x)
        self._ended(Work.gemm, began)
        met()
        return self._finish(self._scatter(partial, call.m, meanwhile), call.biases[0])

    def scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[M, columns] -> [own rows, columns], summed over ranks."""
        partial = self._padded(x, x.shape[0], x.shape[1])
        partial[: x.shape[0]] = x
        return self._scatter(partial, x.shape[0])

    def _padded(self, like: torch.Tensor, m: int, columns: int | None = None) -> torch.Tensor:
        """Room for M rows, rounded up to equal chunks; what is not used is zero."""
        rows = self.world * _C.core.chunk_rows(m, self.world)
        out = like.new_empty(rows, columns or self.spec.n[0], dtype=self.spec.out_dtype)
        out[m:] = 0
        return out

    def _scatter(
        self, partial: torch.Tensor, m: int, meanwhile: Callable[[], None] = nothing
    ) -> torch.Tensor:
        if self.world == 1:
            meanwhile()
            return partial
        began = self._began()
        out = partial.new_empty(partial.shape[0] // self.world, partial.shape[1])
        work = reduce_scatter(out, partial, group=self.group, async_op=True)
        meanwhile()
        self._wait(work)
        self._ended(Work.collective, began, partial.nbytes)
        return out[: _C.core.row_count(m, self.world, self.rank)]

    def gemm_ar(
        self,
        call: Call,
        meanwhile: Callable[[], None] = nothing,
        met: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """[M, K/W] x [K/W, N] -> [M, N]; ``met`` and ``meanwhile`` as in ``gemm_rs``."""
        began = self._began()
        out = call.x.new_empty(call.m, self.spec.n[0], dtype=self.spec.out_dtype)
        Multiplier(self.spec, call)(call.x, out, scale_x=call.scale_x)
        self._ended(Work.gemm, began)
        met()
        began = self._began()
        work = dist.all_reduce(out, group=self.group, async_op=True) if self.world > 1 else None
        meanwhile()
        if self.world > 1:
            self._wait(work)
            self._ended(Work.collective, began, out.nbytes)
        return self._finish(out, call.biases[0])

    def _finish(self, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.spec.reduce == "avg" and self.world > 1:
            out.div_(self.world)
        return out if bias is None else out.add_(bias)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            text = f"{self.spec.label}: rank {self.rank}: the collective of path=unfused failed"
            raise PeerTimeoutError(f"{text}: {error}") from error
