"""Ops behind the functional forms and behind backward passes: built on demand, cached, bounded.

A functional call has no op object of its own, so each process group keeps the ops that its recent
calls needed, least recently used dropped first. Building one is collective, and ranks whose
arguments differ would build different ones and wait for each other in different places. Every
functional call therefore first meets its peers on a small *control* pad of the group, with a digest
of what it is about to do: ranks that disagree all raise ValueError before anything is built or
moved.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.cpu.backend import CpuBackend
from flux.choice.choose import Fixed
from flux.core.env import WORKSPACE_CACHE
from flux.core.knobs import Knobs, Op
from flux.core.schedule import make_schedule
from flux.core.spec import OpSpec
from flux.core.topology import Topology
from flux.machine.host import memory_identity
from flux.ops.ag_gemm import AGGemm
from flux.ops.base import TensorParallelOp
from flux.ops.gemm_rs import GemmRS
from flux.transport.exchange import Exchange, OfGroup, kept_for

TIMEOUT_S = 60.0
O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741

_workspaces: dict[str, Workspace] = {}


class _Control(CpuBackend):
    """A signal pad without data, on which the ranks of a group compare their next calls."""

    what = ""

    def _mismatch_text(self, f: _C.FailureDict) -> str:
        if f["refusal"] or f["ran_ahead"]:
            return super()._mismatch_text(f)
        return (
            f"ranks disagree on shapes, dtype or options: rank {f['peer']} differs from rank "
            f"{self.rank}, which calls {self.what}"
        )


class Workspace(OfGroup):
    """The ops of one process group that functional calls share. Construction is collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.exchange = Exchange(group, timeout_s=TIMEOUT_S)
        self.rank, self.world = self.exchange.rank, self.exchange.world
        self.limit = WORKSPACE_CACHE.get()
        self.ops: OrderedDict[tuple[object, ...], TensorParallelOp] = OrderedDict()
        self._control: _Control | None = None
        if self.world == 1:
            return
        hosts = self.exchange.all_gather(memory_identity())
        local = [host == hosts[self.rank] for host in hosts]
        spec = OpSpec(Op.ag_gemm, 1, (1,), 1, torch.float32, False, "sum")
        knobs, topology = Fixed(Knobs(path="unfused")), Topology.of_hosts(hosts)
        self._control = _Control(spec, self.exchange, knobs, topology, local, TIMEOUT_S)

    def refuse(self, why: str) -> None:
        """Tell the peers, who are about to make the same call, that this rank refused it."""
        if self._control is not None:
            self._control.refuse(why)

    def agree(self, what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the peers; ``what`` names the call and everything that must be equal on all ranks.

        Raises:
            ValueError: on all ranks, when they do not agree or one has refused its arguments.
            PeerTimeoutError: a peer did not come.
        """
        if self._control is None:
            return
        self._control.what = what
        self._control.timeout_s = timeout_s
        digest = zlib.crc32(what.encode()) & 0x7FFFFFFF
        schedule = make_schedule("ag_gemm", (1, 1, 1), self.world, self.rank)
        try:
            self._control.meet(schedule, digest)()
        except ValueError:
            raise
        except BaseException:
            self.close()
            raise

    def ag_gemm(
        self,
        m: int,
        n: tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        timeout_s: float = TIMEOUT_S,
    ) -> AGGemm:
        """Return an AGGemm on weights [K, N/W] that serves ``m`` rows; n and k are global."""
        return self._op(
            (AGGemm, n, k, dtype, timeout_s),
            m,
            lambda max_m: AGGemm(
                self.group,
                max_m=max_m,
                n=n,
                k=k,
                dtype=dtype,
                transpose_weight=True,
                timeout_s=timeout_s,
            ),
        )

    def gemm_rs(
        self,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        reduce: str,
        timeout_s: float = TIMEOUT_S,
    ) -> GemmRS:
        """Return a GemmRS on weights [K/W, N] that serves ``m`` rows; n and k are global."""
        return self._op(
            (GemmRS, n, k, dtype, reduce, timeout_s),
            m,
            lambda max_m: GemmRS(
                self.group,
                max_m=max_m,
                n=n,
                k=k,
                dtype=dtype,
                transpose_weight=True,
                reduce=reduce,
                timeout_s=timeout_s,
            ),
        )

    def _op(self, key: tuple[object, ...], m: int, build: Callable[[int], O]) -> O:
        op = self.ops.pop(key, None)
        if op is not None and (op.closed or op.spec.max_m < m):
            op.close()
            op = None
        while op is None and len(self.ops) >= self.limit:
            self.ops.popitem(last=False)[1].close()
        if op is None:
            op = build(1 << (m - 1).bit_length())  # doubling: growing M rebuilds seldom
        self.ops[key] = op
        return cast(O, op)

    def close(self) -> None:
        """Close every op and forget this workspace. Local."""
        for op in self.ops.values():
            op.close()
        self.ops.clear()
        if self._control is not None:
            self._control.close()
        if _workspaces.get(self.group_name) is self:
            del _workspaces[self.group_name]


def workspace_of(group: dist.ProcessGroup | str) -> Workspace:
    """Return the workspace of a group. The first use builds it, and is collective."""
    return kept_for(group, _workspaces, Workspace)


def clear_workspaces() -> None:
    """Free the symmetric memory that functional calls hold, on this rank. Call it on every rank."""
    for workspace in list(_workspaces.values()):
        workspace.close()
