"""Tensor-parallel linear layers for plain PyTorch models."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from flux.core.tensors import check_memory
from flux.layers.autograd import LinearConfig, column_linear, once, row_linear
from flux.ops import torch_internals
from flux.ops.autocast import cast_once, compute_dtype
from flux.ops.pool import User, pool_of
from flux.ops.transforms import call
from flux.transport.exchange import resolve_group


class ParallelLinear(nn.Module):
    """The common part of ``ColumnParallelLinear`` and ``RowParallelLinear``."""

    split_dim: int  # of the weight
    bias_is_split: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | str | None = None,
        sequence_parallel: bool = False,
        fused: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.fused = fused
        ranks = resolve_group(group)
        self.group_name = ranks.group_name  # can be copied and pickled, unlike the group
        self.rank, self.world = dist.get_rank(ranks), dist.get_world_size(ranks)
        split = (out_features, in_features)[self.split_dim]
        if split % self.world:
            raise ValueError(
                f"{type(self).__name__}: {split} features cannot be split evenly over the "
                f"{self.world} ranks of the group"
            )
        self._user = User()
        self._take(nn.Linear(in_features, out_features, bias, device, dtype))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that the layer is split over."""
        return resolve_group(self.group_name)

    def _take(self, whole: nn.Linear) -> None:
        """Set the parameters to this rank's share of a whole layer, which is equal on all ranks."""

        def share(whole: torch.Tensor, split: bool) -> nn.Parameter:
            part = whole.detach()
            if split:
                dim = self.split_dim if part.dim() == 2 else 0
                part = part.chunk(self.world, dim)[self.rank]
            return nn.Parameter(part.clone(), requires_grad=whole.requires_grad)

        self.weight = share(whole.weight, True)
        bias: torch.Tensor | None = whole.bias
        self.bias = None if bias is None else share(bias, self.bias_is_split)

    @classmethod
    def from_linear(cls, whole: nn.Linear, **options: Any) -> Self:
        """Return the tensor-parallel form of ``whole``, whose values must be equal on all ranks.

        Args:
            whole: the layer to split.
            **options: keyword arguments of the constructor.
        """
        sizes = (whole.in_features, whole.out_features, whole.bias is not None)
        layer = cls(*sizes, device="meta", dtype=whole.weight.dtype, **options)
        layer._take(whole)
        return layer.train(whole.training)

    def _config(self) -> LinearConfig:
        fused = self.fused
        return LinearConfig(
            self.group_name, self.sequence_parallel, fuse_ag=fused, fuse_rs=fused, user=self._user
        )

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank; the layer stays usable."""
        pool_of(self.group).release(self._user)

    def extra_repr(self) -> str:
        """Return the layer's settings for ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sequence_parallel={self.sequence_parallel}, "
            f"rank={self.rank}, world={self.world}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``y = x @ weight.T + bias`` with the output features split over ranks.

    Initial values are those of ``torch.nn.Linear``, split: seed all ranks alike beforehand.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; must be divisible by the number of ranks.
        bias: add one; a rank holds its part, [out_features/W].
        group: process group, its name, or None for the default group.
        sequence_parallel: x is this rank's share of the rows, gathered along the first dimension
            (AGGemm). Otherwise every rank has the same x, and its gradient is summed (GemmAR).
        gather_output: return all output features on every rank.
        fused: False uses the library's collectives before or after the GEMM.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: the features are not divisible by the ranks, or there is no such group.
    """

    split_dim = 0
    bias_is_split = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: x [s(/W), ..., in_features] -> [s, ..., out_features(/W)].

        Collective.
        """
        bias: torch.Tensor | None = self.bias
        dtype = compute_dtype(x)
        if bias is not None and bias.dtype != dtype:
            bias = cast_once(bias, dtype)
        y = column_linear(x, self.weight, bias, self._config())
        if self.gather_output and self.world > 1:
            y = call("gather_features", y, self.group_name)
        return y


class RowParallelLinear(ParallelLinear):
    """``z = x @ weight.T + bias`` with the input features split over ranks.

    The gradient of the bias is complete on every rank, also with sequence parallelism.

    Args:
        in_features: of the whole layer; must be divisible by the number of ranks.
        out_features: of the whole layer.
        bias: add one, after the reduction; every rank holds all of it.
        group: process group, its name, or None for the default group.
        sequence_parallel: return this rank's share of the rows, scattered along the first dimension
            (GemmRS), which must be divisible by the number of ranks. Otherwise every rank gets all
            rows (GemmAR).
        input_is_parallel: x has only this rank's features; otherwise it has all, and is split.
        fused: as for ColumnParallelLinear.
        device: as for ColumnParallelLinear.
        dtype: as for ColumnParallelLinear.

    Raises:
        ValueError: the features are not divisible by the ranks, or there is no such group.
    """

    split_dim = 1
    bias_is_split = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: x [s, ..., in_features(/W)] -> [s(/W), ..., out_features].

        Collective.
        """
        check_memory(type(self).__name__, bias=self.bias)
        if not self.input_is_parallel and self.world > 1:
            x = call("cut_features", x, self.group_name)
        z = row_linear(x, self.weight, self._config())
        if self.bias is None:
            return z
        bias: torch.Tensor = cast_once(self.bias, compute_dtype(x))
        if self.sequence_parallel and self.world > 1:
            bias = sum_grad(bias, self.group_name)
        return z + bias


def sum_grad(parameter: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return a parameter whose gradients are summed over ranks. Collective in backward.

    For a parameter that every rank applies to its own rows.
    """
    if torch_internals.is_traced(parameter):
        copied: torch.Tensor = call("sum_grad", parameter, group_name)
        return copied
    out: torch.Tensor = cast(Any, _SumGrad).apply(parameter, group_name)
    return out


class _SumGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return parameter.view_as(parameter)

    @staticmethod
    @once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=resolve_group(ctx.group_name))
        return total, None
