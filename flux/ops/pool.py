"""The ops of a process group that calls without an op of their own share.

Layers and compiled graphs (``OpPool.op``): a model has many layers of few shapes and runs one of
them at a time, so layers of one shape share an op and its symmetric memory. M is known at the first
call only and may grow later: the op is then replaced by a larger one. An op lives as long as one of
its users.

Functional calls and backward passes of ops (``OpPool.recent``): they share the few ops that the
last calls needed. The op that was used least recently is closed first.

Building an op is collective, so all ranks must decide alike at the same call. All calls in a group,
of either sort, are made in the same order on all ranks. What a pool holds depends on these calls
alone, and the two sorts keep their ops apart.

* When a layer is garbage-collected depends on the rank. Such a layer is only *noted*. Its ops go
  when the ranks next meet to build one and find that it is gone everywhere. ``close()`` of a layer
  is a call like any other and takes effect at once.
* A rank that must grow an op of layers meets its peers on the old one first, with M. A rank that
  sees another M calls that op instead, and both raise ValueError before anything is built.
* A functional call may have other arguments on each rank, so the ranks compare it on a control pad
  (flux/ops/control.py) before any of them looks for an op. In the first such call they make the
  pad. Its existence depends on earlier functional calls alone, not on layers; and a call makes the
  pad before it checks its arguments, so a rank that refuses them comes to make it, too. That rank
  then raises in place of comparing, and its peers hear of it there. After a comparison all ranks
  ask for the same op, and find it or build it alike.

No comparison covers a rank that calls a layer while another makes a functional call: as with two
ops called in different orders, their waits end by timeouts.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from flux.core.env import LAYER_TIMEOUT_S, WORKSPACE_CACHE
from flux.core.knobs import Knobs
from flux.ops import torch_internals
from flux.ops.base import TensorParallelOp
from flux.ops.executor import places_of, reason_gpus_unsupported
from flux.transport.exchange import Exchange, OfGroup, resolve_group
from flux.transport.placement import Placement

if TYPE_CHECKING:
    from flux.ops.control import ControlPad
    from flux.ops.early_gather import EarlyGather

TIMEOUT_S = 600.0
"""Seconds that a functional call waits for a peer."""
O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741

_pools: dict[str, OpPool] = {}


class User:
    """A user of a pool's ops; a layer has one. Ops live as long as their users."""


class Alone:
    """Stands in for a pool in a group of one rank, where nothing is communicated."""

    world = 1


@dataclass
class _Entry:
    op: TensorParallelOp
    users: set[int] = field(default_factory=set)


class OpPool(OfGroup):
    """The ops of one process group. Get it with ``pool_of``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.timeout_s = LAYER_TIMEOUT_S.get()
        self._exchange = Exchange(group)
        self.rank, self.world = self._exchange.rank, self._exchange.world
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._numbers: weakref.WeakKeyDictionary[User, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._gone: set[int] = set()  # users that this rank has garbage-collected
        # All compiled graphs together: the end of a graph is not announced. A graph knows its
        # group by name; with a user per layer, each layer would be compiled for itself.
        self.graphs = User()
        self.early_gather: EarlyGather | None = None  # of the last column layer, for the next row's
        self.recent_limit = WORKSPACE_CACHE.get()
        self.recent_ops: OrderedDict[tuple[object, ...], TensorParallelOp] = OrderedDict()
        self._control: ControlPad | None = None

    @cached_property
    def reason_without_gpus(self) -> str | None:
        """Why ops do not serve the GPUs of the ranks, or None. Collective at the first use."""
        places = places_of(self._exchange_within(self.timeout_s), None)
        return reason_gpus_unsupported(Placement.of_op(places, "cuda", None, None))

    def _exchange_within(self, timeout_s: float) -> Exchange:
        self._exchange.timeout_s = timeout_s
        return self._exchange

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
        **options: str,
    ) -> O:
        """Return an op of this kind for ``m`` rows. Collective if it has to be built or to grow.

        ``fused`` False: the library's collective and one product. ``options``: more of the op's.
        """
        key = (kind, n, k, dtype, transpose_weight, fused, *options.values())
        entry = self._entries.get(key)
        if entry is None or entry.op.closed or entry.op.spec.max_m < m:
            max_m = m
            if entry is not None and not entry.op.closed:
                meet(entry.op, m)  # M is more than max_m, so this op has never run with it
                max_m = max(m, 2 * entry.op.spec.max_m)  # doubling: growing M rebuilds seldom
                entry.op.close()
            self._drop_unused()
            op = cast(Callable[..., O], kind)(
                self.group,
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
        exchange = self._exchange_within(self.timeout_s)
        gone = set.intersection(*exchange.all_gather(set(self._gone)))
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
            from flux.ops.control import ControlPad

            with torch_internals.outside_modes():
                self._control = ControlPad(self._exchange_within(timeout_s), timeout_s)
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

        It stays open until FLUX_WORKSPACE_CACHE others have been used since.
        """
        key = (kind, n, k, dtype, timeout_s, *options.values())
        op = self.recent_ops.get(key)
        if op is not None and (op.closed or op.spec.max_m < m):
            op.close()
            del self.recent_ops[key]
            op = None
        while op is None and len(self.recent_ops) >= self.recent_limit:
            self.recent_ops.popitem(last=False)[1].close()
        if op is None:
            max_m = 1 << (m - 1).bit_length()  # doubling: growing M rebuilds seldom
            sizes = {"max_m": max_m, "n": n, "k": k, "dtype": dtype}
            op = cast(Callable[..., O], kind)(self.group, **sizes, timeout_s=timeout_s, **options)
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
        if _pools.get(self.group_name) is self:
            del _pools[self.group_name]


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
    if pool is not None and pool._group() is not group:  # the name of a destroyed group, reused
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
