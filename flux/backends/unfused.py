"""The library path: one collective of torch.distributed before or after one GEMM.

It is a candidate like any other ("never slower than not fusing"), and the baseline of the
benchmarks. It runs on any backend and any number of hosts that torch.distributed supports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.dispatch import start_all_to_all, start_exchange, sums_of_own
from flux.backends.epilogue import Multiplier, pack, unpack
from flux.core.backend import OverlapHooks, nothing
from flux.core.call import Call
from flux.core.errors import PeerTimeoutError
from flux.core.knobs import AllToAllOp
from flux.core.recorder import Work
from flux.core.sparse_call import Blocks, Exchanged
from flux.core.spec import FP8, OpSpec
from flux.core.tensors import reason_without_memory, settled
from flux.transport.exchange import Exchange, leave_unfinished
from flux.transport.threads import Abandonable, Patience, Threads

if TYPE_CHECKING:
    from flux.backends.cpu.backend import CpuBackend

# Newer releases of PyTorch have renamed the collectives on single tensors.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

all_to_all = dist.all_to_all_single

T = TypeVar("T")
FOREVER = timedelta(days=365)
LOOK_S = 0.05
"""Seconds between two looks at the peers while a collective is waited for."""
GRACE_S = 0.3
"""Seconds between noticing that a peer is gone and raising: what it sent before may be under way.
Also how long the end of a process may come after that of its connections."""


class Stamps(Protocol):
    """Receives start and end of library calls, for tracing."""

    def began(self) -> int:
        """Note the start of some work; return a token for ``ended``."""
        ...

    def ended(self, work: Work, began: int, nbytes: int) -> None:
        """Note the end of the work that ``began`` returned a token for."""
        ...


@dataclass(eq=False)
class UnfusedBackend:
    """Executor of the unfused path of one op on one rank.

    Attributes:
        watched: asked, while a collective is waited for, whether a peer is gone or has left a call.
            gloo reports only the end of a process, and that only to ranks that exchange data with
            it.
        culprit: the rank that a call has timed out on; -1: none, or unknown.
    """

    spec: OpSpec
    exchange: Exchange | None
    rank: int
    world: int
    timeout_s: float
    watched: CpuBackend | None = None
    culprit: int = -1
    _stamps: Stamps | None = None
    _threads: Threads = field(default_factory=Threads)
    _unfinished: bool = False  # a collective of the call has begun, and not ended

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks' process group; None for ranks that are threads of one process.

        Raises:
            RuntimeError: it has been destroyed.
        """
        return None if self.exchange is None else self.exchange.group

    def close(self) -> None:
        """End the thread that waits for collectives. Idempotent.

        Later ones, of the backward of an earlier call, are waited for here.
        """
        self.watched = None
        self._threads.close()

    def trace(self, stamps: Stamps | None) -> None:
        """Record calls from now on; None: no more. Between calls."""
        self._stamps = stamps

    def _began(self) -> int:
        return 0 if self._stamps is None else self._stamps.began()

    def _ended(self, work: Work, began: int, nbytes: int = 0) -> None:
        if self._stamps is not None:
            self._stamps.ended(work, began, nbytes)

    def gather_rows(self, x: torch.Tensor, m: int) -> torch.Tensor:
        """Gather [own rows, K] into [M, K]. Short chunks are padded to equal sizes."""
        return self.start_gather(x, m)()

    def start_gather(
        self, x: torch.Tensor, m: int, both_ways: bool = False
    ) -> Callable[[], torch.Tensor]:
        """Begin ``gather_rows``; return a function that waits for it and returns the result.

        ``both_ways``: of two ranks on different hosts each sends while it receives. In gloo's
        all_gather they take turns (transport/network.py says why): it takes twice as long.

        Raises:
            ValueError: the rows are not in memory.
        """
        reason = reason_without_memory(x)
        if reason is not None:
            raise ValueError(f"{self.spec.label}: rows to gather must be in memory, but {reason}")
        x = settled(x)
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
            pending = start_exchange(full, shard, self.rank, self.group, self.spec.label)
        else:
            pending = [all_gather(full, shard, group=self.group, async_op=True)]

        def finish() -> torch.Tensor:
            for work in pending:
                self._wait(work, in_steps=len(pending) == 1)  # an all_gather
            return full[:m].view(dtype)

        return finish

    def run(
        self,
        call: Call,
        gather: bool = False,
        hooks: OverlapHooks | None = None,
        met: Callable[[], None] = nothing,
    ) -> list[torch.Tensor]:
        """Execute a call: arguments and results are those of ``Backend.run``.

        Args:
            call: its checked arguments.
            gather: return the gathered x as well.
            hooks: the caller's work beside the call, if any.
            met: waits for the peers, before anything travels.
        """
        hooks = hooks or OverlapHooks()
        if self.world == 1 and call.blocks is None:
            return self._alone(call, gather, hooks)

        def begin() -> None:
            met()
            self._unfinished = True

        try:
            if call.blocks is not None:
                return self._all_to_all(call.blocks, hooks, begin)
            if self.spec.op.gathers:
                begin()
                return self._ag_gemm(call, gather, hooks)
            if self.spec.op.scatters:
                return [self._gemm_rs(call, hooks.meanwhile, begin)]
            return [self._gemm_ar(call, hooks.meanwhile, begin)]
        except BaseException:
            if self._unfinished and self.group is not None:
                leave_unfinished(self.group)  # of which a peer may be in the middle
            self._unfinished = False
            raise

    def _alone(self, call: Call, gather: bool, hooks: OverlapHooks) -> list[torch.Tensor]:
        """Make the call of a group of one, which has all rows."""
        spec = self.spec
        began = self._began()
        multiply = Multiplier(spec, call)
        outs = []
        for number, bias in enumerate(call.biases):
            rows = call.out_rows if spec.op.gathers else call.m
            out = call.x.new_empty(rows, call.columns[number], dtype=spec.out_dtype)
            of_product = bias if spec.op.gathers else None
            multiply(call.x, out, weight=number, scale_x=call.scale_x, bias=of_product)
            if bias is not None and of_product is None:
                out.add_(bias)  # to the rounded sum, as with more ranks
            outs.append(out)
        self._ended(Work.gemm, began)
        hooks.both()
        # An output must not alias the input.
        return [*outs, call.x.clone(memory_format=torch.contiguous_format)] if gather else outs

    def _ag_gemm(self, call: Call, gather: bool, hooks: OverlapHooks) -> list[torch.Tensor]:
        spec = self.spec
        began = self._began()
        exchanged = self._exchanged(call)
        if exchanged is not None:
            wait = self._start_dispatch(call, exchanged)
        else:
            wait = self.start_gather(pack(call) if spec.scales_travel else call.x, call.m)
        rows = self._beside(hooks.meanwhile, wait)
        hooks.arrived()
        self._ended(Work.collective, began, rows.nbytes)
        began = self._began()
        full, scale = unpack(spec, rows)
        multiply, needed = Multiplier(spec, call), exchanged.needed if exchanged else None
        outs = []
        for number, bias in enumerate(call.biases):
            out = call.x.new_empty(call.out_rows, call.columns[number], dtype=spec.out_dtype)
            scale_x = call.scale_x if scale is None else scale
            multiply(full, out, weight=number, scale_x=scale_x, bias=bias, needed=needed)
            outs.append(out)
        self._ended(Work.gemm, began)
        return [*outs, full] if gather else outs

    def _gemm_rs(
        self, call: Call, meanwhile: Callable[[], None], met: Callable[[], None]
    ) -> torch.Tensor:
        began = self._began()
        exchanged, multiply = self._exchanged(call), Multiplier(self.spec, call)
        if exchanged is None:
            partial = self._padded(call.x, call.m)
            multiply(call.x, partial[: call.m], scale_x=call.scale_x)
        else:
            shape = len(exchanged.needed), self.spec.n[0]
            partial = call.x.new_empty(shape, dtype=self.spec.out_dtype)
            multiply(call.x, partial, scale_x=call.scale_x, needed=exchanged.needed)
        self._ended(Work.gemm, began)
        met()
        if exchanged is not None:
            return self._combine(partial, exchanged, meanwhile)
        return self._finish(self._scatter(partial, call.m, meanwhile), call.biases[0])

    def _exchanged(self, call: Call) -> Exchanged | None:
        """Return the tokens that this rank exchanges; None: all of them."""
        return None if call.needed is None else call.needed.exchanged(self.rank)

    def _start_dispatch(self, call: Call, exchanged: Exchanged) -> Callable[[], torch.Tensor]:
        """Begin to send own tokens to the ranks that need them; see ``start_gather``.

        Sources come in the order of their tokens, so what arrives is sorted by token.
        """
        x = pack(call) if self.spec.scales_travel else call.x
        dtype, x = x.dtype, x.view(torch.uint8) if x.dtype == FP8 else x  # which gloo knows
        rows = x.index_select(0, exchanged.tokens.to(x.device))
        arrived, work = start_all_to_all(rows, exchanged.own, exchanged.foreign, self.group)

        def finish() -> torch.Tensor:
            self._wait(work)
            return arrived.view(dtype)

        return finish

    def _combine(
        self, partial: torch.Tensor, exchanged: Exchanged, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        """Sum rows over the ranks that have some of own tokens, in rank order.

        ``partial``: of the tokens that this rank needs, in their order, which is that of owners.
        """
        began = self._began()
        arrived, work = start_all_to_all(partial, exchanged.foreign, exchanged.own, self.group)
        self._beside(meanwhile, lambda: self._wait(work))
        total = sums_of_own(arrived, exchanged)
        self._ended(Work.collective, began, arrived.nbytes)
        return total

    def scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Sum [M, columns] over ranks and return the own rows."""
        partial = self._padded(x, x.shape[0], x.shape[1])
        partial[: x.shape[0]] = x
        return self._scatter(partial, x.shape[0])

    def start_sum(self, values: torch.Tensor) -> Callable[[], None]:
        """Begin to add up a tensor over the ranks, in place; return a function that waits."""
        if self.world == 1:
            return nothing
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return lambda: self._wait(work, in_steps=True)

    def _padded(self, like: torch.Tensor, m: int, columns: int | None = None) -> torch.Tensor:
        """Return room for M rows, rounded up to equal chunks, with padding rows of zeros."""
        rows = self.world * _C.core.chunk_rows(m, self.world)
        out = like.new_empty(rows, columns or self.spec.n[0], dtype=self.spec.out_dtype)
        out[m:] = 0
        return out

    def _scatter(
        self, partial: torch.Tensor, m: int, meanwhile: Callable[[], None] = nothing
    ) -> torch.Tensor:
        if self.world == 1:
            return partial
        began = self._began()
        out = partial.new_empty(partial.shape[0] // self.world, partial.shape[1])
        work = reduce_scatter(out, partial, group=self.group, async_op=True)
        self._beside(meanwhile, lambda: self._wait(work))
        self._ended(Work.collective, began, partial.nbytes)
        return out[: _C.core.row_count(m, self.world, self.rank)]

    def _gemm_ar(
        self, call: Call, meanwhile: Callable[[], None], met: Callable[[], None]
    ) -> torch.Tensor:
        began = self._began()
        out = call.x.new_empty(call.m, self.spec.n[0], dtype=self.spec.out_dtype)
        Multiplier(self.spec, call)(call.x, out, scale_x=call.scale_x)
        self._ended(Work.gemm, began)
        met()
        began = self._began()
        work = dist.all_reduce(out, group=self.group, async_op=True)
        self._beside(meanwhile, lambda: self._wait(work, in_steps=True))
        self._ended(Work.collective, began, out.nbytes)
        return self._finish(out, call.biases[0])

    def _all_to_all(
        self, blocks: Blocks, hooks: OverlapHooks, begin: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Make all blocks, exchange them, and take them; the own one stays."""
        blocks.begin()
        columns, _ = self.spec.travelling(self.world)
        coming, going = list(blocks.rows), [blocks.rows[self.rank]] * self.world
        if self.spec.op is AllToAllOp.all_to_all_gemm:
            coming, going = going, coming
        own = blocks.tensors[0].new_empty(going[self.rank], columns)
        coming[self.rank] = going[self.rank] = 0
        sent, received = (own.new_empty(sum(rows), columns) for rows in (going, coming))
        began = self._began()
        of_peers = list(sent.split(going))
        of_peers[self.rank] = own
        for peer, block in enumerate(of_peers):
            if block.shape[0] > 0:
                blocks.send(peer, 0, block.shape[0], block)
        self._ended(Work.gemm, began)
        if self.world > 1:
            begin()
            began = self._began()
            sizes = coming, going
            work = all_to_all(received, sent, *sizes, group=self.group, async_op=True)
            self._beside(hooks.both, lambda: self._wait(work))
            self._ended(Work.collective, began, sent.nbytes)
        else:
            hooks.both()
        began = self._began()
        for peer, block in ((self.rank, own), *enumerate(received.split(coming))):
            if block.shape[0] > 0:
                blocks.receive(peer, 0, block.shape[0], block)
        self._ended(Work.gemm, began)
        return blocks.results()

    def _finish(self, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.spec.reduce == "avg":
            out.div_(self.world)
        return out if bias is None else out.add_(bias)

    def _beside(self, meanwhile: Callable[[], None], wait: Callable[[], T]) -> T:
        """Do the caller's work while a collective is under way; return what ``wait`` returns.

        When the work raises, the collective is waited for all the same: the peers take part in it,
        and the process group stays in step.
        """
        try:
            meanwhile()
        except Exception:
            wait()
            self._unfinished = False
            raise
        result = wait()
        self._unfinished = False
        return result

    def _wait(self, work: dist.Work | None, in_steps: bool = False) -> None:
        """Wait for an operation of the library, and look at peers that are watched meanwhile.

        Others than those that can be waited for ``in_steps`` may not obey a timeout, and a wait
        inside them runs no signal handler. So a thread waits for them. If a peer is gone the thread
        stays behind, with a collective that never ends, until the process group goes.

        Raises:
            PeerTimeoutError: it failed or took too long, or a peer is gone.
        """
        assert work is not None
        watched = self.watched
        if watched is None:
            self._wait_here(work)
            return
        inference = torch.is_inference_mode_enabled()

        def wait() -> None:
            with torch.inference_mode(inference):  # reduce_scatter copies its result here
                work.wait(FOREVER)

        call: _Steps | Abandonable[None] = (
            _Steps(work) if in_steps else Abandonable(wait, self._threads)
        )
        patience = Patience(self.timeout_s)
        while not call.wait(LOOK_S):
            try:
                watched.look()
            except PeerTimeoutError:
                if not call.wait(GRACE_S):
                    raise
            if patience.left_s <= 0:
                why = f"not done after {self.timeout_s:g} s"
                self.culprit = watched.silent_peer()
                if self.culprit >= 0:
                    why += f": rank {self.culprit} has not been heard from"
                raise self._failed(why, None)
        if not isinstance(call.error, RuntimeError):  # else the library's: see Abandonable.error
            return call.result() if isinstance(call, Abandonable) else None
        named = Patience(GRACE_S)
        while named.left_s > 0:
            watched.look()
            time.sleep(0.01)
        raise self._failed(str(call.error), call.error)

    def waits_on_streams(self) -> bool:
        """Return whether streams wait for collectives on GPUs: NCCL's. Graphs can contain those."""
        group, gpu = self.group, torch.device("cuda")
        if group is None or gpu not in group._device_types:
            return False
        return bool(group._get_backend(gpu).name() == "nccl")

    def _wait_here(self, work: dist.Work) -> None:
        """Wait in this thread: on a GPU it is this thread's stream that has to wait.

        NCCL's wait with a timeout holds the host until the collective has ended, and a capture
        fails. Without one its watchdog ends collectives that take too long.
        """
        try:
            work.wait(*([] if self.waits_on_streams() else [timedelta(seconds=self.timeout_s)]))
        except RuntimeError as error:
            if not _raised_here(error):
                raise
            raise self._failed(str(error), error) from error

    def _failed(self, why: str, cause: BaseException | None) -> PeerTimeoutError:
        text = f"{self.spec.label}: rank {self.rank}: the collective of path=unfused failed: {why}"
        error = PeerTimeoutError(text)
        error.__cause__ = cause
        return error


@dataclass
class _Steps:
    """A collective whose wait ends at its timeout and can be repeated, as gloo's all_reduce's.

    The calling thread waits for it, step by step: waking another thread takes longer. It is used
    like an ``Abandonable``.
    """

    work: dist.Work
    error: BaseException | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for so long; return whether it has ended."""
        began = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if not _raised_here(error):
                raise
            # One that has failed raises at once in the next step.
            if time.monotonic() - began >= timeout_s / 2:
                return False
            self.error = error
        return True


def _raised_here(error: BaseException) -> bool:
    """Return whether the function that handles an error, or native code called by it, raised it.

    A signal handler, which may run as such a call returns, has a frame of its own.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_next is None
