"""The configuration of a tensor-parallel linear layer: all except the tensors of a call."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import torch

from flux.ops import AGGemm, GemmAR, GemmRS
from flux.ops.base import TensorParallelOp
from flux.ops.gradients import WeightGrad
from flux.ops.pool import Alone, OpPool, User, pool_of

O = TypeVar("O", bound=TensorParallelOp)  # noqa: E741  as in flux/ops/pool.py

GRAPH_SETTINGS = 6
"""The first fields of LinearConfig, which ops of graphs take as arguments."""


class LinearConfig(NamedTuple):
    """How a layer communicates, where its ops come from, and what becomes of its weight gradient.

    A graph holds ``in_graph()``: tensors, numbers and names, but no user and no buffers.

    Attributes:
        group_name: of the ranks that the layer is split over; None: this rank is alone.
        sequence_parallel: whether activations outside of the layer are shards of rows.
        reduce_dx: sum the gradient of a column layer's input over the ranks (without SP).
        fuse_ag: fuse gathers; else use the library's collective.
        fuse_rs: fuse reductions; else use the library's collective.
        features: of the whole layer, in the dimension of the weight that ranks split, as
            torch.chunk splits it; None: the rank's own times W.
        user: the layer, as the pool of ops knows it; None: all compiled graphs together.
        wgrad: handling of the weight gradient.
    """

    group_name: str | None
    sequence_parallel: bool
    reduce_dx: bool = True
    fuse_ag: bool = True
    fuse_rs: bool = True
    features: int | None = None
    user: User | None = None
    wgrad: WeightGrad = WeightGrad()

    def in_graph(self) -> tuple[Any, ...]:
        """Return the settings that ops of graphs take as arguments: those before ``user``."""
        return self[:GRAPH_SETTINGS]

    @property
    def pool(self) -> OpPool:
        """The ops of the group."""
        return cast(OpPool, Alone()) if self.group_name is None else pool_of(self.group_name)

    # -- as flux/ops/gradients.py sees it ----------------------------------------------------------

    @property
    def reduces_dx(self) -> type[GemmRS] | None:
        """The op that sums a column layer's dx."""
        if self.pool.world == 1 or not (self.sequence_parallel or self.reduce_dx):
            return None
        return GemmRS if self.sequence_parallel else GemmAR

    @property
    def gathers_dz(self) -> bool:
        """Whether a row layer's dz is a shard of rows."""
        return self.sequence_parallel

    @property
    def splits_wgrad(self) -> bool:
        """Whether a weight gradient may be a sum of products: main_grad takes a single one."""
        return not self.wgrad.accumulate

    def whole(self, own: int) -> int:
        """Return the features of the whole layer, of which this rank has ``own``."""
        return own * self.pool.world if self.features is None else self.features

    def op(self, kind: type[O], m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> O:
        """Return an op for ``m`` rows, one at least. Collective if it has to be built."""
        pool = self.pool
        fused = self.fuse_ag if kind is AGGemm else self.fuse_rs
        user = pool.graphs if self.user is None else self.user
        return pool.op(kind, user, max(m, 1), n, k, dtype, fused=fused, **options)
