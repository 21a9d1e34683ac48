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


class LayerOps:
    """The ops of a layer with a configuration, as flux/ops/gradients.py takes them.

    The pool is looked up once, for a forward and its backward.
    """

    __slots__ = ("config", "pool", "world")

    def __init__(self, config: LinearConfig) -> None:
        name = config.group_name
        self.config = config
        self.pool = cast(OpPool, Alone()) if name is None else pool_of(name)
        self.world = self.pool.world

    @property
    def reduces_dx(self) -> type[GemmRS] | None:
        """The op that sums a column layer's dx."""
        if self.config.sequence_parallel:
            return GemmRS if self.world > 1 else None
        return GemmAR if self.world > 1 and self.config.reduce_dx else None

    @property
    def gathers_dz(self) -> bool:
        """Whether a row layer's dz is a shard of rows."""
        return self.config.sequence_parallel

    @property
    def splits_wgrad(self) -> bool:
        """Whether a weight gradient may be a sum of products: main_grad takes a single one."""
        return not self.config.wgrad.accumulate

    def whole(self, own: int) -> int:
        """Return the features of the whole layer, of which this rank has ``own``."""
        features = self.config.features
        return own * self.world if features is None else features

    def op(
        self,
        kind: type[O],
        m: int,
        n: int | tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> O:
        """Return an op for ``m`` rows, one at least. Collective if it has to be built."""
        pool, config = self.pool, self.config
        fused = config.fuse_ag if kind is AGGemm else config.fuse_rs
        user = pool.graphs if config.user is None else config.user
        return pool.op(kind, user, max(m, 1), n, k, dtype, fused=fused, **options)
