"""torch's tensor-parallel styles for linear layers, with fused communication.

``ColwiseParallel`` and ``RowwiseParallel`` replace those of torch.distributed.tensor.parallel in a
plan for ``parallelize_module``. Parameters become the same DTensors, so state dicts, optimizers and
distributed checkpoints work unchanged. Layouts of inputs and outputs have the same meaning.

    style     layout given -> layout wanted        fused
    colwise   Shard(d) -> Shard(-1)                AGGemm, and GemmRS backward
    colwise   Replicate -> Shard(-1)               GemmAR backward
    rowwise   Shard(-1) -> Shard(d)                GemmRS, and AGGemm backward
    rowwise   Shard(-1) -> Replicate               GemmAR

d is any dimension except the last. Other layouts are converted before and after by torch's own
code. Ranks have the features that torch.chunk gives them, not always the same number. A layer uses
torch's own path if its input fits none of these, or if some ranks have none of its features; the
log ("flux.layers") records the reason once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_module as _distribute_module
from torch.distributed.tensor import parallel as torch_styles

from flux.layers.autograd import LinearConfig, column_linear, row_linear
from flux.layers.eligible import reason_unsupported, say_once
from flux.layers.linear import sum_grad
from flux.ops.autocast import cast_once, compute_dtype
from flux.ops.pool import User, pool_of

REPLICATE = Replicate()


class StyledLinear(nn.Linear):
    """A linear layer with DTensor parameters; the styles' ``_apply`` turns nn.Linear into it."""

    style: Any
    mesh: DeviceMesh
    user: User
    group_name: str

    def local(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a parameter, in the dtype of a product with x."""
        parameter: Any = getattr(self, name)
        if parameter is None:
            return None
        part: torch.Tensor = cast(Any, cast_once(parameter, compute_dtype(x))).to_local()
        return part

    def column(
        self, x: torch.Tensor, sequence_parallel: bool, reduce_dx: bool = True
    ) -> torch.Tensor:
        """Return a column-parallel product, with its bias."""
        weight, bias = self.local("weight", x), self.local("bias", x)
        assert weight is not None
        config = LinearConfig(
            self.group_name,
            sequence_parallel,
            reduce_dx,
            features=self.weight.shape[0],
            user=self.user,
        )
        return column_linear(x, weight, bias, config)

    def row(self, x: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
        """Return a row-parallel product, without its bias."""
        weight, features = self.local("weight", x), self.weight.shape[1]
        assert weight is not None
        config = LinearConfig(self.group_name, sequence_parallel, features=features, user=self.user)
        return row_linear(x, weight, config)

    def reason_unsupported(self, x: torch.Tensor, split_dim: int) -> str | None:
        """Return why a call is not fused, or None. ``split_dim``: of the weight."""
        weight: Any = self.weight
        features, world = weight.shape[split_dim], self.mesh.size()
        if -(-features // world) * (world - 1) >= features:  # known to all ranks, unlike emptiness
            return f"{features} features leave some of the {world} ranks without any"
        if torch.compiler.is_compiling():
            inside = x.to_local() if isinstance(x, DTensor) else x
            return reason_unsupported(self.group_name, inside, weight.to_local())
        inside = x._local_tensor if isinstance(x, DTensor) else x
        return reason_unsupported(self.group_name, inside, weight._local_tensor)

    def torchs_own(self, x: torch.Tensor, reason: str) -> torch.Tensor:
        """Compute on torch's unfused path, on DTensors."""
        say_once(f"{type(self).__name__}: torch's own path, because {reason}")
        style = self.style
        if not isinstance(x, DTensor):
            x = self.whole(x, style.input_layouts[0], self.weight.shape[1])
        x = style._prepare_input_fn(
            style.input_layouts, style.desired_input_layouts, self, (x,), self.mesh
        )
        return self.deliver(super().forward(x))

    def whole(self, x: torch.Tensor, placement: Placement, features: int) -> DTensor:
        """Return the DTensor [..., features] of this rank's part, which others may have more of."""
        own, world = x.shape[-1], self.mesh.size()
        sizes: dict[str, Any] = {}  # none: DTensor takes the parts for equal ones
        split = _dim(placement, x) == x.dim() - 1 and features % world
        if split and own == _part(features, world, self.mesh.get_local_rank()):
            # Dense: strides must be the same on all ranks, and those of an empty part say nothing.
            x, shape = x.contiguous(), torch.Size((*x.shape[:-1], features))
            sizes = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(x, self.mesh, [placement], run_check=False, **sizes)

    def deliver(self, y: Any) -> torch.Tensor:
        """Convert a DTensor to the layout of the style."""
        style = self.style
        out: torch.Tensor = style._prepare_output_fn(
            style.output_layouts, style.use_local_output, self, y, self.mesh
        )
        return out

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank."""
        pool_of(self.group_name).release(self.user)


def _dim(placement: Placement, x: torch.Tensor) -> int | None:
    """Return the dimension of x that is sharded: None for none."""
    return placement.dim % x.dim() if isinstance(placement, Shard) else None


def _part(features: int, world: int, rank: int) -> int:
    """Return a rank's number of features, as torch.chunk splits them."""
    most = -(-features // world)
    return max(0, min(most, features - rank * most))


class ColwiseLinear(StyledLinear):
    """A linear layer under the style ``ColwiseParallel``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in_features] in the style's layout. Collective."""
        x, given = input, self.style.input_layouts[0]
        reduce_dx = True
        if isinstance(x, DTensor):
            given = x.placements[0]
            # The gradient of a replicated DTensor may stay a pending sum: the op that made the
            # input, for example a gather, reduces once for all of the input's readers.
            reduce_dx = False
        dim = _dim(given, x)
        reason = self.reason_unsupported(x, 0)
        if dim is None and given != REPLICATE:
            reason = f"the input is {given}"
        elif dim == x.dim() - 1:
            reason = "features of the input are sharded"
        elif dim is not None and isinstance(x, DTensor) and x.shape[dim] % self.mesh.size():
            reason = "rows of the input are sharded unevenly"
        if reason is not None:
            return self.torchs_own(x, reason)
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()] if dim is None else None)
        if dim is None:
            y = self.column(x, False, reduce_dx)
        else:
            y = self.column(x.movedim(dim, 0), True).movedim(0, dim)
        return self.finish(y)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Convert this rank's output features to the layout of the style."""
        if self.style.use_local_output and self.style.output_layouts[0] in (
            Shard(-1),
            Shard(y.dim() - 1),
        ):
            return y
        return self.deliver(self.whole(y, Shard(y.dim() - 1), self.weight.shape[0]))


class RowwiseLinear(StyledLinear):
    """A linear layer under the style ``RowwiseParallel``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in_features] in the style's layout. Collective."""
        x, wanted = input, self.style.output_layouts[0]
        dim = _dim(wanted, x)
        reason = self.reason_unsupported(x, 1)
        if dim is None and wanted != REPLICATE:
            reason = f"the style wants the output {wanted}"
        elif dim == x.dim() - 1:
            reason = "the style shards features of the output"
        elif dim is not None and x.shape[dim] % self.mesh.size():
            reason = "the style shards rows of the output unevenly"
        if reason is not None:
            return self.torchs_own(x, reason)
        x = self.own_features(x)
        bias = self.local("bias", x)
        if dim is None:
            z = self.row(x, False)
        else:
            z = self.row(x.movedim(dim, 0), True).movedim(0, dim)
        if bias is not None:
            z = z + (bias if dim is None else sum_grad(bias, self.group_name))
        if self.style.use_local_output:
            return z
        return DTensor.from_local(z, self.mesh, [wanted], run_check=False)

    def own_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's features of an input in the style's layout."""
        features, given = Shard(x.dim() - 1), self.style.input_layouts[0]
        if not isinstance(x, DTensor):
            if _dim(given, x) == features.dim:
                return x
            x = self.whole(x, given, self.weight.shape[1])
        part: torch.Tensor = x.redistribute(placements=[features]).to_local()
        return part


def fuse_sharded(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn nn.Linear into ours, in place; its parameters are sharded as the style shards them."""
    colwise = isinstance(style, torch_styles.ColwiseParallel)
    module.__class__ = ColwiseLinear if colwise else RowwiseLinear
    styled = cast(StyledLinear, module)
    # A copy: torch's styles change when they are applied to an embedding.
    styled.style, styled.mesh, styled.user = copy.copy(style), mesh, User()
    if not colwise:
        styled.style.desired_input_layouts = (Shard(-1),)
    styled.group_name = mesh.get_group().group_name


def _fuse(style: Any, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.ndim != 1:
        raise ValueError(f"a tensor-parallel plan needs a mesh of one dimension, got {mesh}")
    distribute_module: Any = _distribute_module
    distribute_module(module, mesh, style._partition_linear_fn)
    fuse_sharded(style, module, mesh)
    return module


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's style of the same name; linear layers hide their communication."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            return super()._apply(module, device_mesh)
        return _fuse(self, module, device_mesh)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's style of the same name; linear layers hide their communication."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            return super()._apply(module, device_mesh)
        return _fuse(self, module, device_mesh)


# The names in tp_plan of Hugging Face models.
NAMED: dict[str, Callable[[], Any]] = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": lambda: torch_styles.SequenceParallel(),
    "replicate": lambda: None,
}


def fused_style(style: Any) -> Any:
    """Return our form of a style, given as torch's object or by Hugging Face's name.

    Returns:
        A style; one without a fused form unchanged; None for layers that stay as they are.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a style nor a name.
    """
    if isinstance(style, str):
        if style not in NAMED:
            raise ValueError(f"unknown tensor-parallel style {style!r}; known: {sorted(NAMED)}")
        return NAMED[style]()
    if not isinstance(style, torch_styles.ParallelStyle):
        raise TypeError(f"a plan holds ParallelStyle objects or their names, got {style!r}")
    for theirs, ours in (
        (torch_styles.ColwiseParallel, ColwiseParallel),
        (torch_styles.RowwiseParallel, RowwiseParallel),
    ):
        if type(style) is theirs:
            plain = cast(Any, style)
            return ours(
                input_layouts=plain.input_layouts[0],
                output_layouts=plain.output_layouts[0],
                use_local_output=plain.use_local_output,
            )
    return style
