"""The ops that layers share: one per shape and process group, grown as M grows, freed when unused.

A model has many layers of few shapes, and runs one of them at a time, so layers of one shape share
an op and its symmetric memory. M is known at the first call only, and may grow later: the op is
then replaced by a larger one.

Building an op is collective, so all ranks must come to the same decision at the same call:

* What a pool holds depends on calls alone, which are the same on all ranks of a group. When a layer
  is garbage-collected depends on the rank. Such a layer is therefore only *noted*, and its ops go
  when the ranks next meet to build one and find that it is gone everywhere. ``close()`` of a layer
  is a call like any other and takes effect at once.
* A rank that must grow an op meets its peers on the old one first, with M. A rank that sees another
  M calls that op instead, and both hear that they disagree (ValueError) before anything is built.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from flux.core.env import LAYER_TIMEOUT_S
from flux.core.knobs import Knobs
from flux.ops.base import TensorParallelOp
from flux.ops.early_gather import EarlyGather
from flux.ops.executor import places_of, reason_gpus_unsupported
from flux.transport.exchange import Exchange, OfGroup, kept_for
from flux.transport.placement import sharing

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
    """The ops of one process group. Get it with ``pool_of``; construction is collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.timeout_s = LAYER_TIMEOUT_S.get()
        self.exchange = Exchange(group, "flux.layers", self.timeout_s)
        self.rank, self.world = self.exchange.rank, self.exchange.world
        self.why_not_gpus = reason_gpus_unsupported(sharing(places_of(self.exchange, None)))
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._numbers: weakref.WeakKeyDictionary[User, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._gone: set[int] = set()  # users that this rank has garbage-collected
        # All compiled graphs together, as nobody says when one of them is gone. A graph knows its
        # group by name; with a user per layer, each layer would be compiled for itself.
        self.graphs = User()
        self.early_gather: EarlyGather | None = None  # of the last column layer, for the next row's

    # -- ops ---------------------------------------------------------------------------------------

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
                _meet_to_grow(entry.op, m)
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
        entry.users.add(self._number(user))
        return cast(O, entry.op)

    def _number(self, user: User) -> int:
        number = self._numbers.get(user)
        if number is None:
            number = self._numbers[user] = next(self._count)
            weakref.finalize(user, self._gone.add, number)
        return number

    @property
    def ops(self) -> list[TensorParallelOp]:
        """The live ops, in the order in which they were first needed."""
        return [entry.op for entry in self._entries.values() if not entry.op.closed]

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory that the pool holds on this rank, in bytes."""
        return sum(op.workspace_bytes for op in self.ops)

    # -- end ---------------------------------------------------------------------------------------

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

    def close(self) -> None:
        """Free all ops. Call it on every rank alike. A later call builds its op again."""
        for entry in self._entries.values():
            entry.op.close()
        self._entries.clear()
        if _pools.get(self.group_name) is self:
            del _pools[self.group_name]


def _meet_to_grow(op: TensorParallelOp, m: int) -> None:
    """Meet the peers on the old op; raise ValueError if a peer calls it instead of growing it.

    On GPUs that takes FLUX_CHECK, as it does to find any other calls that do not fit together.
    """
    if op._backend is None:
        return
    if op._comparison is not None:
        op._guarded(partial(op._comparison.compare, f"M = {m}"))
        return
    # As in a call with M, which this op has never seen: it is more than max_m.
    digest = op.spec.digest(m, biased=False)
    backend, schedule = op._backend, op.schedule(1)
    op._guarded(lambda: backend.meet(schedule, digest)())


def pool_of(group: dist.ProcessGroup | str | None) -> OpPool:
    """Return the pool of a group. The first use makes it, and is collective."""
    return kept_for(group, _pools, OpPool)


def close_pools() -> None:
    """Free the symmetric memory of all layers, on this rank. Call it on every rank."""
    for pool in list(_pools.values()):
        pool.close()
