"""The ops of a process group that calls without an op of their own share.

Layers and compiled graphs (``OpPool.op``): a model has many layers of few shapes and runs one of
them at a time, so layers of one shape share an op and its symmetric memory. M is known at the first
call only and may grow later: the op is then replaced by a larger one. An op lives as long as one of
its users.

Functional calls and backward passes of ops (``OpPool.recent``): they share the few ops that the
last calls needed. The op that was used least recently is closed first. One that is needed again
after that has come too early to its end: a model with more shapes would build all of its ops in
each step. So room for one more is made, unless FLUX_WORKSPACE_CACHE is set.

Building an op is collective, so all ranks must decide alike at the same call. All calls in a group,
of either sort, are made in the same order on all ranks. What a pool holds depends on these calls
alone, and the two sorts keep their ops apart.

* When a layer is garbage-collected depends on the rank. Such a layer is only *noted*. Its ops go
  when the ranks next meet to build one and find that it is gone everywhere. ``close()`` of a layer
  is a call like any other and takes effect at once.
* A rank that must grow an op of layers meets its peers on the old one first, with M. A rank that
  sees another M calls that op instead, and both raise ValueError before anything is built.
* A functional call may have other arguments on each rank, so the ranks compare it on a control pad
  (``ControlPad``) before any of them looks for an op. In the first such call they make the
  pad. Its existence depends on earlier functional calls alone, not on layers; and a call makes the
  pad before it checks its arguments, so a rank that refuses them comes to make it, too. That rank
  then raises in place of comparing, and its peers hear of it there. After a comparison all ranks
  ask for the same op, and find it or build it alike.

No comparison covers a rank that calls a layer while another makes a functional call: as with two
ops called in different orders, their waits end by timeouts.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.cpu.backend import CpuBackend
from flux.core.env import LAYER_TIMEOUT_S, WORKSPACE_CACHE
from flux.core.knobs import Knobs, Op
from flux.core.spec import OpSpec
from flux.core.tensors import reason_without_memory
from flux.machine.host import memory_identity
from flux.ops import torch_internals
from flux.ops.base import TensorParallelOp
from flux.ops.executor import places_of, reason_gpus_unsupported
from flux.select.choose import Fixed
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.placement import Placement

TIMEOUT_S = 600.0
"""Seconds that a functional call waits for a peer."""
MOST_DROPPED = 1024
"""Keys of closed ops that a pool remembers: a loop over ever new shapes stays bounded."""
O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741

_pools: dict[str, OpPool] = {}


class User:
    """A user of a pool's ops; a layer has one. Ops live as long as their users."""


class Alone:
    """Stands in for a pool in a group of one rank, where nothing is communicated."""

    world = 1


Gather = Callable[[torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


class EarlyGather:
    """The gather of one column layer's saved input, begun in the backward of the row layer behind.

    With sequence parallelism a column layer saves its own rows only, so its backward gathers the
    others once more. During its own products another transfer is on the wires already. The next
    layer of the model, a row layer, leaves the wires idle: its backward gathers first, and
    multiplies afterwards. So the gather begins there.

    backward   | row layer: dgrad | wgrad     | (attention, activation) | column: dgrad | wgrad |
    wires      | dz ...........   | x of the column layer ............  | dx .................  |

    The order of gathers follows from the calls of forward alone, so it is the same on all ranks.
    The rows are kept from the row layer's backward to the column layer's.

    Args:
        ctx: of the layer's autograd function, which saves the operands in forward. It is held
            weakly: else an abandoned graph would live on until the next forward.
        start: begins to gather what the layer has saved, (own rows, weight); its result waits.
    """

    def __init__(self, ctx: Any, start: Gather) -> None:
        self._start = start
        self._ctx: Callable[[], Any] = weakref.ref(ctx)
        self._saved: tuple[torch.Tensor, torch.Tensor] | None = None
        self._wait: Callable[[], torch.Tensor] | None = None

    def begin(self) -> None:
        """Begin the gather, in the backward of a later layer, if it can begin and has not."""
        ctx = self._ctx()
        if ctx is None or self._wait is not None or _capturing():
            return
        # Looked up once: what recomputes or fetches saved tensors may give them out only once.
        self._saved = x, weight = ctx.saved_tensors
        if reason_without_memory(x) is None:  # else its owner freed it, and will compute it again
            self._wait = self._start(x, weight)

    def take(
        self, ctx: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]:
        """Return the saved operands, and what waits for all rows if the gather has begun."""
        x, weight = ctx.saved_tensors if self._saved is None else self._saved
        wait = self._wait
        self._ctx, self._saved, self._wait = lambda: None, None, None
        return x, weight, wait


def _capturing() -> bool:
    """Return whether a CUDA graph is captured, which may end before the gather is waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass
class _Entry:
    op: TensorParallelOp
    users: set[int] = field(default_factory=set)


class ControlPad(CpuBackend):
    """A signal pad without data. Construction is collective.

    Args:
        exchange: the ranks of the group, two at least, with a limit on how long construction waits.
    """

    def __init__(self, exchange: Exchange) -> None:
        placement = Placement(tuple(exchange.all_gather(memory_identity())))
        spec = OpSpec(Op.ag_gemm, 1, (1,), 1, torch.float32, False, "sum")
        choice, timeout_s = Fixed(Knobs(path="unfused")), exchange.timeout_s or TIMEOUT_S
        super().__init__(spec, exchange, choice, placement.topology, placement, timeout_s)
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
        self._diagnosis.label = what.partition("(")[0]
        self.meet(None, zlib.crc32(what.encode()) & 0x7FFFFFFF)()

    def _mismatch_text(self, f: _C.FailureDict) -> str:
        if f["refusal"] or f["ran_ahead"]:
            return super()._mismatch_text(f)
        return (
            f"ranks disagree on shapes, dtype or options: rank {f['peer']} differs from rank "
            f"{self.rank}, which calls {self._what}"
        )


class OpPool:
    """The ops of one process group. Get it with ``pool_of``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.timeout_s = LAYER_TIMEOUT_S.get()
        self.exchange = Exchange(group, timeout_s=self.timeout_s)
        self.rank, self.world = self.exchange.rank, self.exchange.world
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._numbers: weakref.WeakKeyDictionary[User, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._gone: set[int] = set()  # users that this rank has garbage-collected
        # All compiled graphs together: the end of a graph is not announced. A graph knows its
        # group by name; with a user per layer, each layer would be compiled for itself.
        self.graphs = User()
        self.early_gather: EarlyGather | None = None  # of the last column layer, for the next row's
        self.recent_limit = WORKSPACE_CACHE.get()
        self._limit_grows = not os.environ.get(WORKSPACE_CACHE.name)
        self._dropped: set[tuple[object, ...]] = set()  # keys of recent ops that were closed
        self.recent_ops: OrderedDict[tuple[object, ...], TensorParallelOp] = OrderedDict()
        self._control: ControlPad | None = None

    @cached_property
    def reason_without_gpus(self) -> str | None:
        """Why ops do not serve the GPUs of the ranks, or None. Collective at the first use."""
        places = places_of(self.exchange, None)
        return reason_gpus_unsupported(Placement.of_op(places, "cuda", None, None))

    # -- ops of layers and graphs ------------------------------------------------------------------

    def op(
        self,
        kind: type[O],
        user: User,
        m: int,
        n: int | tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        *,
        transpose_weight: bool = False,
        fused: bool = True,
        stays: bool = False,
        **options: str,
    ) -> O:
        """Return an op of this kind for ``m`` rows. Collective if it has to be built or to grow.

        ``fused`` False: the library's collective and one product. ``stays``: a graph has the op as
        a constant, so it is for this m alone, and none takes its place. ``options``: more of the
        op's.
        """
        key = (kind, n, k, dtype, transpose_weight, fused, m if stays else 0, *options.values())
        entry = self._entries.get(key)
        if entry is None or entry.op.closed or entry.op.spec.max_m < m:
            max_m = m
            if entry is not None and not entry.op.closed:
                meet(entry.op, m)  # M is more than max_m, so this op has never run with it
                max_m = max(m, 2 * entry.op.spec.max_m)  # doubling: growing M rebuilds seldom
                entry.op.close()
            self._drop_unused()
            op = cast(Callable[..., O], kind)(
                self.exchange.group,
                max_m=max_m,
                n=n,
                k=k,
                dtype=dtype,
                transpose_weight=transpose_weight,
                tuning="cache" if fused else Knobs(path="unfused"),
                timeout_s=self.timeout_s,
                **options,
            )
            entry = self._entries[key] = _Entry(op, entry.users if entry is not None else set())
        number = self._numbers.get(user)
        if number is None:
            number = self._numbers[user] = next(self._count)
            weakref.finalize(user, self._gone.add, number)
        entry.users.add(number)
        return cast(O, entry.op)

    @property
    def ops(self) -> list[TensorParallelOp]:
        """The live ops of layers and graphs, in the order in which they were first needed."""
        return [entry.op for entry in self._entries.values() if not entry.op.closed]

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory that ``ops`` hold on this rank, in bytes."""
        return sum(op.workspace_bytes for op in self.ops)

    def _drop_unused(self) -> None:
        """Free ops whose users are garbage on every rank. Collective."""
        gone = set.intersection(*self.exchange.all_gather(set(self._gone)))
        self._gone -= gone
        for number in gone:
            self._release(number)

    def _release(self, number: int) -> None:
        for key, entry in list(self._entries.items()):
            if number in entry.users:
                entry.users.remove(number)
                if not entry.users:
                    del self._entries[key]
                    entry.op.close()

    def release(self, user: User) -> None:
        """Free the ops that only ``user`` has used. Call it on every rank alike."""
        number = self._numbers.get(user)
        if number is not None:
            self._release(number)

    # -- ops of functional calls and backward passes -----------------------------------------------

    def agree(self, describe: Callable[[], str], timeout_s: float = TIMEOUT_S) -> None:
        """Compare a functional call with those of the peers. Collective.

        Args:
            describe: checks the arguments; returns the call, with all that must be equal on all
                ranks.
            timeout_s: how long to wait for a peer, in seconds.

        Raises:
            ValueError: on all ranks, if they differ, or if ``describe`` raises that on one.
            TypeError: the same, on a rank whose ``describe`` raises it.
            PeerTimeoutError: a peer did not come.
            OSError: on all ranks, if there is not enough shared memory.
        """
        if self._control is None and self.world > 1:
            with torch_internals.outside_modes():
                self._control = ControlPad(Exchange(self.exchange.group, timeout_s=timeout_s))
        control = self._control
        try:
            what = describe()
        except (TypeError, ValueError) as error:
            if control is not None:
                control.refuse(str(error))
            raise
        if control is None:
            return
        refusals = control.refusals
        try:
            control.compare(what, timeout_s)
        except BaseException:
            if control.refusals == refusals:  # not refused on all ranks, whatever was raised
                self.close_recent()
            raise

    def recent(
        self,
        kind: type[O],
        m: int,
        n: int | tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        *,
        timeout_s: float = TIMEOUT_S,
        **options: object,
    ) -> O:
        """Return an op for ``m`` rows, after ``agree``. Collective if it has to be built.

        It stays open until ``recent_limit`` others have been used since.
        """
        key = (kind, n, k, dtype, timeout_s, *options.values())
        op = self.recent_ops.get(key)
        if op is not None and (op.closed or op.spec.max_m < m):
            op.close()
            del self.recent_ops[key]
            op = None
        if op is None and self._limit_grows and key in self._dropped:
            self._dropped.remove(key)
            self.recent_limit += 1
        while op is None and len(self.recent_ops) >= self.recent_limit:
            dropped, oldest = self.recent_ops.popitem(last=False)
            oldest.close()
            if len(self._dropped) < MOST_DROPPED:
                self._dropped.add(dropped)
        if op is None:
            max_m = 1 << (m - 1).bit_length()  # doubling: growing M rebuilds seldom
            sizes = {"max_m": max_m, "n": n, "k": k, "dtype": dtype}
            op = cast(Callable[..., O], kind)(
                self.exchange.group, **sizes, timeout_s=timeout_s, **options
            )
        self.recent_ops[key] = op
        self.recent_ops.move_to_end(key)
        return cast(O, op)

    # -- end ---------------------------------------------------------------------------------------

    def close_recent(self) -> None:
        """Free the ops and the control pad of functional calls. Call it on every rank alike."""
        while self.recent_ops:
            self.recent_ops.popitem()[1].close()
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def close(self) -> None:
        """Free all ops. Call it on every rank alike. A later call builds its op again."""
        for entry in self._entries.values():
            entry.op.close()
        self._entries.clear()
        self.close_recent()
        if _pools.get(self.exchange.group_name) is self:
            del _pools[self.exchange.group_name]


def meet(op: TensorParallelOp, m: int) -> None:
    """Meet the peers on an op, with an M that it cannot run: 0, or more than its max_m. Collective.

    On GPUs that takes FLUX_CHECK, as it does to find any other calls that do not fit together.

    Raises:
        ValueError: on all ranks, if a peer has another M.
    """
    if op._backend is None:
        return
    if op._comparison is not None:
        op._guarded(partial(op._compare, op._comparison, f"M = {m}"), begun=True)
        return
    digest = op.spec.digest(m, biased=False)
    backend, schedule = op._backend, op.schedule(1)
    op._guarded(lambda: backend.meet(schedule, digest)(), begun=True)


def pool_of(group: dist.ProcessGroup | str | None) -> OpPool:
    """Return the pool of a process group, given as itself, by name, or None for the default."""
    group = resolve_group(group)
    pool = _pools.get(group.group_name)
    # The name of a destroyed group may be used again.
    if pool is not None and not pool.exchange.is_over(group):
        pool.close()
        pool = None
    if pool is None:
        pool = _pools[group.group_name] = OpPool(group)
    return pool


def close_pools() -> None:
    """Free the symmetric memory of layers, compiled graphs and functional calls, on this rank.

    Call it on every rank. Later calls build their ops again.
    """
    for pool in list(_pools.values()):
        pool.close()


def clear_workspaces() -> None:
    """Free the symmetric memory of functional calls and backward passes of ops, on this rank.

    Call it on every rank. Layers and compiled graphs keep theirs: ``flux.layers.close_pools``.
    """
    for pool in list(_pools.values()):
        pool.close_recent()
