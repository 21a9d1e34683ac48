"""Collectives without a GEMM, for groups whose ranks are on several hosts."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from flux import _C
from flux.core.env import MOST_SECONDS
from flux.core.problem import DTYPES, ceil_div
from flux.core.tensors import address_of, reason_without_memory, settled
from flux.ops.executor import built_together
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.host_collectives import Collective, DisagreementError, HostCollectives
from flux.transport.placement import Placement, place_here
from flux.transport.threads import end_at_exit

T = TypeVar("T")

SUMMED: dict[torch.dtype, int] = {
    **{dtype.torch: dtype.native for dtype in DTYPES.values() if dtype.native is not None},
    torch.int8: 4,
    torch.uint8: 4,
    torch.int32: 5,
    torch.int64: 6,
}
"""Dtypes that can be summed, with their codes in csrc/cpu/reduce.h."""
MAX_PLANS = 4096
_CPU = torch.device("cpu")


class _Plan(NamedTuple):
    """What calls with equal arguments have in common."""

    what: str
    digest: int
    offsets: list[int]  # bytes, by rank, and the end
    sizes: list[int]  # extents along the first dimension, by rank


class Collectives:
    """all_reduce, all_gather and reduce_scatter over a process group on the CPU.

    Inside a host ranks meet in shared memory. Between hosts every byte travels once, over TCP
    connections of this object, bound to the interface that gloo uses. All ranks get the same bits:
    sums are made in the order of ranks inside a host, then in the order of hosts, in float32 at
    least, rounded to the dtype in between.

    Construction and calls are collective: all ranks make the same calls in the same order, with
    equal shapes and dtypes. Ranks that disagree, and ranks whose peers refuse their input, raise
    ValueError or TypeError, and the object stays usable. After a PeerTimeoutError it is closed.

    Args:
        group: a process group, its name, or None for the default group.
        timeout_s: seconds that a call waits for a peer that makes no progress; an exchange of this
            constructor, two at least.

    Raises:
        ValueError: ``timeout_s`` is no positive number; the group is unknown.
        OSError: shared memory or sockets are refused; on every rank.
        PeerTimeoutError: a peer died, or was silent for ``timeout_s``.
    """

    def __init__(
        self, group: dist.ProcessGroup | str | None = None, *, timeout_s: float = 600.0
    ) -> None:
        self._closed = True
        self._ending = False
        self._pid = os.getpid()
        self._broken = ""
        self._inside = _C.Exclusive()
        self._calls = 0
        self._plans: dict[object, _Plan] = {}
        self._host: HostCollectives | None = None
        exchange = Exchange(resolve_group(group), "Collectives")
        with built_together(exchange, timeout_s, self._give_up):
            problem: Exception | None = None
            if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MOST_SECONDS):
                problem = ValueError(
                    f"Collectives: timeout_s must be a positive number up to {MOST_SECONDS:g}, "
                    f"got {timeout_s!r}"
                )
            exchange.agree(problem, {"timeout_s": timeout_s})
            self.rank = exchange.rank
            self.world = exchange.world
            self.timeout_s = timeout_s
            places = exchange.all_gather(place_here(None))
            placement = Placement(tuple(place.memory for place in places))
            self.hosts = placement.topology.nodes
            self._host = HostCollectives(exchange, placement, timeout_s)
        self._closed = False
        end_at_exit(self)

    # -- calls -------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks.

        Args:
            x: any shape; a dtype of ``SUMMED``, or complex. Equal shape and dtype on all ranks.
            out: where to write the sum: contiguous, of the shape and dtype of ``x``, which it may
                be; None: a new tensor.

        Raises:
            ValueError: a tensor does not fit, here or on another rank.
            TypeError: an argument is no tensor.
            PeerTimeoutError: a peer died, left, or was silent for ``timeout_s``.
        """

        def check() -> None:
            self._check(x, SUMMED)
            if out is None:
                return
            self._check(out, None)
            same = address_of(out) == address_of(x) and x.is_contiguous()
            if out.untyped_storage()._cdata == x.untyped_storage()._cdata and not same:
                raise ValueError("Collectives: out overlaps x, and is not x itself")
            if out.is_neg() or out.is_conj():
                raise ValueError("Collectives: out must not be lazy: negated or conjugated")
            if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
                raise ValueError(
                    f"Collectives: out must be contiguous {tuple(x.shape)} {x.dtype}, got "
                    f"{tuple(out.shape)} {out.dtype}"
                )

        def call(number: int) -> torch.Tensor:
            source, dtype = _real(x)
            result = torch.empty_like(source) if out is None else out.detach()
            target = torch.view_as_real(result) if result.is_complex() else result
            plan = self._plan(("all_reduce", x.dtype, x.shape), target.nbytes)
            self._run(Collective.all_reduce, number, plan, source, target, SUMMED[dtype])
            if out is not None:
                return out
            return torch.view_as_complex(result) if x.is_complex() else result

        return self._guarded(check, call)

    def all_gather(
        self, x: torch.Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the tensors of all ranks, joined along ``dim`` in rank order.

        Args:
            x: any shape with at least one dimension; any dtype.
            dim: the dimension; negative counts from the end.
            sizes: the extent of each rank's tensor along ``dim``; None: all are equal.

        Raises:
            ValueError, TypeError, PeerTimeoutError: as ``all_reduce``.
        """

        def check() -> None:
            self._check(x, None)
            self._check_sizes(x, dim, sizes)
            own = x.shape[dim]
            if sizes is not None and own != sizes[self.rank]:
                raise ValueError(f"Collectives: sizes say {sizes[self.rank]} here, x has {own}")

        def call(number: int) -> torch.Tensor:
            source = settled(x.detach()).movedim(dim, 0).contiguous()
            parts = [source.shape[0]] * self.world if sizes is None else list(sizes)
            rest = source.shape[1:]
            out = source.new_empty(sum(parts), *rest)
            key = ("all_gather", x.dtype, rest, dim % x.ndim, tuple(parts))
            plan = self._plan(key, prod(rest) * x.itemsize, parts)
            self._run(Collective.all_gather, number, plan, source, out, 0)
            return out.movedim(0, dim).contiguous()

        return self._guarded(check, call)

    def reduce_scatter(
        self, x: torch.Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return this rank's part, along ``dim``, of the sum of ``x`` over all ranks.

        Args:
            x: as for ``all_reduce``, with at least one dimension.
            dim: the dimension; negative counts from the end.
            sizes: the extent of each rank's part; None: rank r gets
                ``[r*ceil(n/W), (r+1)*ceil(n/W))`` of n, cut at the end, as in the fused ops.

        Raises:
            ValueError, TypeError, PeerTimeoutError: as ``all_reduce``.
        """

        def check() -> None:
            self._check(x, SUMMED)
            self._check_sizes(x, dim, sizes)
            if sizes is not None and sum(sizes) != x.shape[dim]:
                raise ValueError(
                    f"Collectives: sizes sum to {sum(sizes)}, x has {x.shape[dim]} along {dim}"
                )

        def call(number: int) -> torch.Tensor:
            source, dtype = _real(x.movedim(dim, 0))
            n, rest = source.shape[0], source.shape[1:]
            each = ceil_div(n, self.world)
            parts = (
                [max(0, min(each, n - rank * each)) for rank in range(self.world)]
                if sizes is None
                else list(sizes)
            )
            out = source.new_empty(parts[self.rank], *rest)
            key = ("reduce_scatter", x.dtype, rest, dim % x.ndim, tuple(parts))
            plan = self._plan(key, prod(rest) * source.itemsize, parts)
            self._run(Collective.reduce_scatter, number, plan, source, out, SUMMED[dtype])
            result = torch.view_as_complex(out) if x.is_complex() else out
            return result.movedim(0, dim).contiguous()

        return self._guarded(check, call)

    # -- pieces ------------------------------------------------------------------------------------

    def _check(self, tensor: object, dtypes: dict[torch.dtype, int] | None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Collectives: expected a tensor, got {type(tensor).__name__}")
        if tensor.device != _CPU or tensor.layout != torch.strided:
            raise ValueError(
                f"Collectives: tensors must be dense and on the CPU, got {tensor.layout} on "
                f"{tensor.device}"
            )
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"Collectives: expected a plain tensor, got {type(tensor).__name__}")
        reason = reason_without_memory(tensor)
        if reason is not None:
            raise ValueError(f"Collectives: a tensor must be in memory, but {reason}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError("Collectives: there is no backward: call them under torch.no_grad")
        if dtypes is not None and tensor.dtype not in dtypes and not tensor.is_complex():
            raise ValueError(f"Collectives: cannot sum {tensor.dtype}")

    def _check_sizes(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None) -> None:
        if type(dim) is not int or not -x.ndim <= dim < x.ndim:
            raise ValueError(f"Collectives: dim must be a dimension of {tuple(x.shape)}, got {dim}")
        if sizes is None:
            return
        if len(sizes) != self.world or not all(type(n) is int and n >= 0 for n in sizes):
            raise ValueError(
                f"Collectives: sizes must be {self.world} counts, one for each rank, got {sizes}"
            )

    def _plan(self, key: tuple[object, ...], unit: int, parts: list[int] | None = None) -> _Plan:
        """Return the plan of a call: ``unit`` bytes each in parts of these sizes; None: of one."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            what = f"{key[0]} of {', '.join(map(str, key[1:]))}"
            sizes = [1] + [0] * (self.world - 1) if parts is None else parts
            offsets = [0, *accumulate(size * unit for size in sizes)]
            plan = self._plans[key] = _Plan(what, zlib.crc32(what.encode()), offsets, sizes)
        return plan

    def _run(
        self,
        kind: Collective,
        number: int,
        plan: _Plan,
        source: torch.Tensor,
        out: torch.Tensor,
        dtype: int,
    ) -> None:
        source = source.contiguous()
        assert self._host is not None
        try:
            self._host.run(
                kind,
                number,
                plan.digest,
                address_of(source),
                address_of(out),
                plan.offsets,
                dtype,
            )
        except DisagreementError as error:
            # Peers without a connection to the one that differs are waiting: they are told, too.
            text = error.text or (
                f"Collectives: ranks disagree: rank {self.rank} calls {plan.what}, rank "
                f"{error.peer} something else"
            )
            self._host.native.refuse(number, text)
            raise ValueError(text) from None

    def _guarded(self, check: Callable[[], None], call: Callable[[int], T]) -> T:
        """Make a call: one at a time, in the process that built this, never after a failure."""
        if self._pid != os.getpid():
            raise RuntimeError("Collectives cannot be used in a forked child")
        try:
            refusal = "Collectives: another thread is inside a call"
            return self._inside.call(refusal, self._run_inside, check, call)
        finally:
            if self._ending:
                self._end_if_asked()

    def _run_inside(self, check: Callable[[], None], call: Callable[[int], T]) -> T:
        if self._closed or self._host is None:
            raise RuntimeError(f"Collectives is closed{self._broken}")
        self._calls += 1
        number = self._calls
        try:
            check()
        except (TypeError, ValueError) as error:
            text = f"Collectives: rank {self.rank} refused its input: {error}"
            self._host.native.refuse(number, text)
            raise
        try:
            return call(number)
        except ValueError:  # all ranks raise it
            raise
        except BaseException as error:
            self._broken = f": an earlier call failed ({error})"
            self._release(True, getattr(error, "culprit", self.rank))
            raise

    # -- end ---------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close()`` and after a failure."""
        return self._closed

    def _release(self, failed: bool, culprit: int = -1) -> None:
        self._closed = True
        host = self._host
        if host is not None:
            host.close(failed, culprit)
        self._host = None

    def _give_up(self) -> None:
        self._release(True, getattr(self, "rank", -1))

    def _end_if_asked(self) -> None:
        if self._ending:
            self._inside.try_call(self._release, False)

    def close(self) -> None:
        """Release sockets and shared memory. Local and idempotent; later calls raise RuntimeError.

        A call that is inside, in another thread or further up the stack, raises, and memory goes
        when it has left.
        """
        if self._pid != os.getpid():
            return
        self._ending = True
        self._end_if_asked()
        host = self._host
        if host is not None:
            host.end_call()
            self._end_if_asked()

    def end(self) -> None:
        """Close at the program's end, also where a daemon thread is inside a call."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_host", None) is not None:
            self.close()


def _real(x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """Return a contiguous tensor of real numbers with the elements of ``x``, and its dtype."""
    x = settled(x.detach()).contiguous()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x, x.dtype
