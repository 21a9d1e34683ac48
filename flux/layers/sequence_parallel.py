"""Run a decoder on shards of the sequence: between its blocks each rank has its own tokens.

    hidden states      shard ---- norm ----> block -----------------------------> + ---- norm ---->
    of one layer         |                   AGGemm q, k, v | attention | GemmRS  |
                         +--------------------------------------------------------+

A block is a module whose column-parallel layers share its input: one AGGemm multiplies all of their
weights with one gathered input, before the block runs. Inside it they return these products. The
block gets an input of the whole shape, which only they may read: it holds NaN. The block's
row-parallel layer is a GemmRS.

The first layer shards if the shape suits. Sequences shorter than W, compiled graphs, modules that
were replaced and hooks of users keep activations whole. Ranks compare this choice, and what else
decides which ops a call runs, before any of them: otherwise they would wait for one another in
different ops.

The last layer's result is gathered. A model of Transformers that computes the logits of the last
tokens alone (logits_to_keep, without gradients) gets these tokens from the rank that has them, and
NaN for the others.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules import module as internals

from flux.core.env import LAYER_TIMEOUT_S
from flux.core.problem import DTYPES, name_of
from flux.layers import dtensor
from flux.layers.autograd import LayerOps, LinearConfig, once
from flux.layers.eligible import say_once
from flux.layers.huggingface import is_pretrained
from flux.layers.linear import sum_grad
from flux.layers.sequence_plan import SequencePlan
from flux.layers.sequence_shards import (
    MOST_PADDING,
    as_shard,
    gather_tokens,
    is_shard,
    last_owner,
    last_tokens,
    own_tokens,
    padding_of,
    shard_tokens,
)
from flux.machine.detection import detect
from flux.machine.host import memory_identity
from flux.ops import AGGemm, torch_internals
from flux.ops.gradients import Grad, as_rows, column_grads, fresh, weight_grad
from flux.ops.pool import pool_of
from flux.select.choose import with_measured_speeds
from flux.select.sequence import BlockSizes, SequenceChoice
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.placement import Placement

# -- products of one gathered input ----------------------------------------------------------------


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ops: LayerOps, count: int, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights: Any = parameters[:count]
        ctx.ops, ctx.count, ctx.shape = ops, count, x.shape
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3 : 3 + count]) else None, *weights)
        rows, world = as_rows(x), ops.world
        features = tuple(weight.shape[0] * world for weight in weights)
        op = ops.op(AGGemm, len(rows) * world, features, rows.shape[1], x.dtype)
        products = op(rows, weights, parameters[count:])
        return tuple(fresh(y, x.shape[0] * world, x.shape[1], y.shape[1]) for y in products)

    @staticmethod
    @once
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        ops: LayerOps = ctx.ops
        x, *weights = ctx.saved_tensors
        need_x, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        dy, weight = torch.cat([as_rows(dy) for dy in dys], 1), torch.cat(weights)
        sizes = [w.shape[0] for w in weights]
        wait = None
        if x is not None:
            features = tuple(size * ops.world for size in sizes)
            op = ops.op(AGGemm, len(dy), features, weight.shape[1], dy.dtype)
            wait = op.start_gather(as_rows(x), len(dy))

        def deliver() -> Grad:
            return None if wait is None else weight_grad(dy, wait())

        dx, dw = column_grads(ops, dy, weight, need_x, deliver)
        dx = None if dx is None else dx.view(ctx.shape)
        dws = [None] * ctx.count if dw is None else dw.split(sizes)
        dbs = dy.sum(0).split(sizes) if any(needed[ctx.count :]) else dws
        grads = [g if n else None for g, n in zip((*dws, *dbs), needed, strict=True)]
        return dx, None, None, *grads


# -- modules ---------------------------------------------------------------------------------------


class SequenceColwise(dtensor.ColwiseLinear):
    """A column-parallel layer of a block."""

    block: Block

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product that the block made before; on whole activations, as without one."""
        product = self.block.product_of(self, input)
        return super().forward(input) if product is None else self.finish(product)


class SequenceRowwise(dtensor.RowwiseLinear):
    """The row-parallel layer of a block."""

    block: Block

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer: x [B, S, in_features/W] -> a shard, or whole activations."""
        padding = self.block.padding
        if padding is None:
            return super().forward(input)
        if self.block.unfused:
            return shard_tokens(super().forward(input), self.group_name)
        x = self.own_features(input).transpose(0, 1)
        if padding:
            x = functional.pad(x, (0, 0, 0, 0, 0, padding))
        z = as_shard(self.row(x, True), padding)
        bias = self.local("bias", x)
        return z if bias is None else z + sum_grad(bias, self.group_name)


class Block:
    """The column and row layers of a block, and hooks that run before and after it."""

    def __init__(
        self, columns: list[SequenceColwise], row: SequenceRowwise, keyword: str | None
    ) -> None:
        self.columns, self.row, self._keyword = columns, row, keyword
        self.group_name = row.group_name
        for layer in (*columns, row):
            vars(layer)["block"] = self
        self._end()

    def _end(self) -> None:
        self.padding: int | None = None  # of the sequence, while the block runs on shards
        self.unfused = False
        self._input: torch.Tensor | None = None
        self._products: dict[int, torch.Tensor] = {}

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Multiply the column layers' weights with a shard, and give the block a whole shape."""
        x = args[0] if self._keyword is None else kwargs[self._keyword]
        if not is_shard(x):
            return None
        whole = self._multiply(x)
        if self._keyword is None:
            return (whole, *args[1:]), kwargs
        return args, {**kwargs, self._keyword: whole}

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the products."""
        self._end()

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        self.padding = padding_of(x)
        reason = self.row.reason_unsupported(x, 1) or self.columns[0].reason_unsupported(x, 0)
        if reason is not None:
            say_once(f"{type(self).__name__}: torch's own path, because {reason}")
            self.unfused = True
            return gather_tokens(x, self.group_name)
        weights = [column.local("weight", x) for column in self.columns]
        biases = [column.local("bias", x) for column in self.columns]
        first = weights[0]
        assert first is not None
        ops = LayerOps(LinearConfig(self.group_name, True, user=self.row.user))
        rows = x.reshape(*x.shape[:2], x.shape[-1]).to(first.dtype)
        products = cast(Any, _Columns).apply(rows, ops, len(weights), *weights, *biases)
        length, batch = rows.shape[0] * ops.world - self.padding, rows.shape[1]
        for column, y in zip(self.columns, products, strict=True):
            self._products[id(column)] = y[:length].transpose(0, 1)
        self._input = x.new_full((), torch.nan).expand(batch, length, x.shape[-1])
        return self._input

    def product_of(self, column: SequenceColwise, x: torch.Tensor) -> torch.Tensor | None:
        """Return a column layer's product; None: it reads whole activations."""
        if self._input is None:
            return None
        if x is not self._input:
            raise RuntimeError(
                "a column-parallel layer reads something other than its block's input, which the "
                "sequence-parallel plan was made for; use replace_linears(sequence_parallel=False)"
            )
        return self._products[id(column)]


class SequenceDropout(nn.Dropout):
    """Dropout that gives each token what it would get in whole activations."""

    group_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply it to a shard or to whole activations."""
        if not (is_shard(input) and self.training and self.p):
            return super().forward(input)
        length = input.shape[0] * resolve_group(self.group_name).size() - padding_of(input)
        ones = input.new_ones(input.shape[1], length, input.shape[-1])
        return input * own_tokens(functional.dropout(ones, self.p), self.group_name)


class ReplicatedParameters:
    """Hooks of a module whose parameters are the same on all ranks, around its forward.

    On a shard, each rank's gradient is that of its own tokens: they are summed.
    """

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Let the module read parameters whose gradients are summed over ranks."""
        if not torch.is_grad_enabled() or not any(map(is_shard, (*args, *kwargs.values()))):
            return
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                vars(module)[name] = sum_grad(parameter, self.group_name)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let it read its own again."""
        for name in module._parameters:
            vars(module).pop(name, None)


class Stack:
    """The layers of a decoder: hooks that shard activations before them and gather them after."""

    def __init__(self, model: nn.Module, plan: SequencePlan, choice: SequenceChoice | None) -> None:
        modules = dict(model.named_modules())
        self._model, self.features, self._choice = model, plan.features, choice
        self._kept = 0  # how many of the last tokens the model reads of its decoder; 0: all
        row = modules[plan.blocks[0].row]
        assert isinstance(row, SequenceRowwise)
        self._row, self.group_name = row, row.group_name
        self.world = resolve_group(self.group_name).size()
        names = [name for block in plan.blocks for name in (block.name, *block.columns, block.row)]
        self._placed = [
            (modules[name.rpartition(".")[0]], name.rpartition(".")[2], modules[name])
            for name in (*names, *plan.layers, *plan.replicated)
        ]
        insides = tuple(f"{block.name}." for block in plan.blocks)
        self._observable = [(name, modules[name]) for name in (*names, *plan.dropouts)]
        self._observable += [
            (name, module)
            for name, module in modules.items()
            if f"{name}.".startswith(tuple(f"{layer}." for layer in plan.layers))
            and not f"{name}.".startswith(insides)
        ]

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """Note how many tokens' logits a call of the model computes."""
        kept, states = kwargs.get("logits_to_keep"), kwargs.get("output_hidden_states")
        if states is None:
            states = getattr(module.config, "output_hidden_states", False)
        all_read = states or torch.is_grad_enabled() or type(kept) is not int
        self._kept = 0 if all_read else max(kept, 0)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget it."""
        self._kept = 0

    def shard(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Shard the first layer's input, if that is possible and pays."""
        x = args[0]
        if not self._suits(x):
            return None
        return (shard_tokens(x, self.group_name), *args[1:]), kwargs

    def _suits(self, x: Any) -> bool:
        """Return whether to work on shards of x; the same on all ranks."""
        if (
            not isinstance(x, torch.Tensor)
            or torch_internals.is_traced(x)
            or isinstance(x, DTensor)
        ):
            return False
        if x.dim() != 3 or x.shape[2] != self.features or not x.shape[0]:
            return False
        length = x.shape[1]
        if length < self.world or -length % self.world > MOST_PADDING:
            return False
        if self._choice is not None and not self._choice.pays(x.shape[0] * length, not self._kept):
            return False
        reason = self._row.reason_unsupported(x, 1)
        if any(parent._modules.get(name) is not module for parent, name, module in self._placed):
            reason = "modules of the sequence-parallel plan were replaced"
        reason = reason or _reason_observed(self._observable)
        pool = pool_of(resolve_group(self.group_name))
        pool.agree(lambda: self._described(x, reason is None), pool.timeout_s)
        if reason is not None:
            say_once(f"sequence parallelism: activations stay whole, because {reason}")
        return reason is None

    def _described(self, x: torch.Tensor, shards: bool) -> str:
        """Return a call of the decoder, with all that decides which collectives it makes."""
        kept = f"the last {self._kept}" if self._kept else "all"
        text = f"a decoder on {'shards of' if shards else 'whole'} {list(x.shape)} {x.dtype}, "
        text += f"results for {kept} tokens, "
        text += _count("modules in training", (m.training for m in self._model.modules()))
        if torch.is_grad_enabled():
            needed = (p.requires_grad for p in self._model.parameters())
            text += f", {_count('gradients', needed)}, input gradient: {x.requires_grad}"
        return text

    def gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather the last layer's result, or the tokens of it that are read."""
        x = output[0] if isinstance(output, tuple) else output
        owner = last_owner(x, self.world, self._kept) if self._kept and is_shard(x) else None
        if owner is None:
            whole = self.gathered(x)
        else:
            whole = last_tokens(x, self.group_name, owner, self._kept)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def gather_all(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather results of layers that the decoder returns (output_hidden_states)."""
        if isinstance(output, dict):
            for key, value in output.items():
                if isinstance(value, tuple):
                    output[key] = tuple(self.gathered(x) for x in value)
            return output
        if isinstance(output, tuple):
            return tuple(
                tuple(self.gathered(x) for x in value) if isinstance(value, tuple) else value
                for value in output
            )
        return output

    def gathered(self, x: Any) -> Any:
        """Return whole activations for a shard, and anything else as it is."""
        if is_shard(x) and x.shape[-1] == self.features:
            return gather_tokens(x, self.group_name)
        return x


def _count(what: str, flags: Iterable[bool]) -> str:
    """Return how many flags are set, and a digest of which."""
    values = bytes(flags)
    return f"{sum(values)} {what} ({zlib.crc32(values):08x})"


def _reason_observed(modules: list[tuple[str, nn.Module]]) -> str | None:
    """Return which module has a hook or a forward that is neither ours nor Transformers'.

    It may read or change activations, and would take a shard for all of them.
    """
    if internals._global_forward_hooks or internals._global_forward_pre_hooks:
        return "hooks of all modules are registered"
    for name, module in modules:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks += [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
        hooks += [vars(module)["forward"]] if "forward" in vars(module) else []
        origins = [str(getattr(hook, "__module__", "")) for hook in hooks]
        if not all(origin.startswith(("flux.", "transformers.")) for origin in origins):
            return f"{name} has a hook"
    return None


def insert(model: nn.Module, plan: SequencePlan, choice: SequenceChoice | None) -> None:
    """Let a model work on shards of the sequence, in place, after its tensor-parallel plan.

    Args:
        model: whose linear layers have the styles of flux.layers.dtensor.
        plan: of this model.
        choice: None: activations are sharded wherever their shape suits.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for block in plan.blocks:
        for name in block.columns:
            modules[name].__class__ = SequenceColwise
        modules[block.row].__class__ = SequenceRowwise
        columns = [modules[name] for name in block.columns]
        hooks = Block(columns, modules[block.row], block.keyword)
        modules[block.name].register_forward_pre_hook(hooks.before, with_kwargs=True)
        modules[block.name].register_forward_hook(hooks.after, always_call=True)
    stack = Stack(model, plan, choice)
    for name in plan.dropouts:
        modules[name].__class__ = SequenceDropout
        modules[name].group_name = stack.group_name
    for name in plan.replicated:
        around = ReplicatedParameters(stack.group_name)
        modules[name].register_forward_pre_hook(around.before, with_kwargs=True)
        modules[name].register_forward_hook(around.after, always_call=True)
    modules[plan.layers[0]].register_forward_pre_hook(stack.shard, with_kwargs=True)
    modules[plan.layers[-1]].register_forward_hook(stack.gather)
    modules[plan.decoder].register_forward_hook(stack.gather_all)
    options = inspect.signature(type(model).forward).parameters
    if is_pretrained(model) and plan.decoder and "logits_to_keep" in options:
        model.register_forward_pre_hook(stack.begin, with_kwargs=True)
        model.register_forward_hook(stack.end, always_call=True)


def modelled_choice(
    model: nn.Module, plan: SequencePlan, group: dist.ProcessGroup
) -> SequenceChoice | None:
    """Return a choice by the cost model, with rank 0's view of its host. Collective.

    Returns None for a dtype or a device without fused ops, where activations stay whole anyway.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    row = modules[plan.blocks[0].row].weight
    blocks = [
        BlockSizes(
            plan.features,
            sum(modules[name].out_features for name in block.columns),
            modules[block.row].in_features,
        )
        for block in plan.blocks
    ]
    dtype, kind = name_of(row.dtype), row.device.type
    exchange = Exchange(group)
    exchange.timeout_s = LAYER_TIMEOUT_S.get()
    known = dtype in DTYPES and kind in ("cpu", "cuda")
    ranks = exchange.all_gather((memory_identity(), detect(kind) if known else None))
    placement, cluster = Placement(tuple(memory for memory, _ in ranks)), ranks[0][1]
    if cluster is None:
        return None
    if kind == "cpu" and placement.topology.nodes > 1:
        cluster = with_measured_speeds(cluster, exchange, placement, dtype)
    return SequenceChoice(blocks, dtype, exchange.world, placement.topology.nodes, cluster)


def check_world(model: nn.Module, plan: SequencePlan, world: int) -> None:
    """Raise ValueError if this many ranks do not divide the features of the plan's layers."""
    modules: dict[str, Any] = dict(model.named_modules())
    for block in plan.blocks:
        sizes = {name: modules[name].out_features for name in block.columns}
        sizes[block.row] = modules[block.row].in_features
        for name, features in sizes.items():
            if features % world:
                raise ValueError(
                    f"no sequence-parallel plan: {name} has {features} features, which "
                    f"{world} ranks do not divide"
                )
