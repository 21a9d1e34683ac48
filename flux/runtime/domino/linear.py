"""Linear layers of ``flux.runtime.domino``: their collectives, and their nodes of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist

from flux.backends.unfused import all_gather, reduce_scatter
from flux.core.tensors import check_memory
from flux.layers import autograd
from flux.layers.autograd import LinearConfig
from flux.ops.autocast import autocast_off, cast_once, compute_dtype
from flux.ops.gradients import as_rows, weight_grad
from flux.ops.transforms import check_no_transforms
from flux.runtime.slices import before_wait, current_slice, note, running


class Channel:
    """The collectives of one linear layer in one slice."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, kind: str) -> None:
        self.group, self.sequence_parallel, self.kind = group, sequence_parallel, kind
        self.world = dist.get_world_size(group)
        self.slice = current_slice()
        self.number = 0
        if (slices := running()) is not None:
            self.number = slices.linears[self.slice]
            slices.linears[self.slice] += 1
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []

    def note(self, phase: str, what: str) -> None:
        """Record that something ran."""
        note(phase, self.slice, self.number, what)

    def launch(self, phase: str, call: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
        """Start a collective; the first tensor is its result when ``wait`` has returned."""
        self.note(phase, f"launch {self.kind}")
        self._pending.append((call(*tensors, group=self.group, async_op=True), tensors[0]))
        return tensors[0]

    def reduce(self, phase: str, tensor: torch.Tensor) -> torch.Tensor:
        """Start AllReduce in place, or ReduceScatter along the first dimension."""
        if not self.sequence_parallel:
            return self.launch(phase, dist.all_reduce, tensor)
        part = tensor.new_empty(tensor.shape[0] // self.world, *tensor.shape[1:])
        return self.launch(phase, reduce_scatter, part, tensor.contiguous())

    def gather(self, phase: str, part: torch.Tensor) -> torch.Tensor:
        """Start AllGather along the first dimension."""
        whole = part.new_empty(part.shape[0] * self.world, *part.shape[1:])
        return self.launch(phase, all_gather, whole, part.contiguous())

    def wait(self, phase: str) -> list[torch.Tensor]:
        """Wait for the collectives that were started; return their results."""
        pending, self._pending = self._pending, []
        if pending:
            before_wait()
        for work, _ in pending:
            if work is not None:
                work.wait()
        self.note(phase, f"wait {self.kind}")
        return [tensor for _, tensor in pending]


def _not_twice(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward so that it raises where autograd would record it, to differentiate it again.

    Sums in place that are under way when it returns have no place in a graph.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "layers under Domino cannot be differentiated twice: their backward communicates, "
                "and there is no backward of that. Do not use create_graph=True with them"
            )
        return backward(ctx, *grads)

    return run


class _ColumnInput(torch.autograd.Function):
    """``in``: forward gathers with sequence parallelism; backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel.gather("forward", x) if channel.sequence_parallel else x.view_as(x)

    @staticmethod
    @_not_twice
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (reduced,) = ctx.channel.wait("backward")
        return reduced, None


class _ColumnLinear(torch.autograd.Function):
    """x W^T + b; backward: dgrad, its collective, and meanwhile the gradients of W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channel: Channel
    ) -> torch.Tensor:
        if channel.sequence_parallel:
            channel.wait("forward")
        channel.note("forward", "column")
        ctx.channel = channel
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @_not_twice
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        check_memory("backward of a column layer", dy=grad, x=x, weight=weight)
        ctx.channel.note("backward", "column")
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad.matmul(weight)
            ctx.channel.reduce("backward", dx)  # of dx's shape: what ``in`` waits for replaces it
        if ctx.needs_input_grad[1]:
            dw = weight_grad(as_rows(grad), as_rows(x))
        if ctx.needs_input_grad[2]:
            db = as_rows(grad).sum(0)
        return dx, dw, db, None


class _RowLinear(torch.autograd.Function):
    """x W^T in pieces of columns, each of which is reduced while the next one is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, channel: Channel, columns: int
    ) -> tuple[torch.Tensor, ...]:
        channel.note("forward", "row")
        ctx.channel = channel
        ctx.save_for_backward(x, weight)
        pieces = []
        for piece in weight.chunk(columns):
            pieces.append(torch.nn.functional.linear(x, piece))
            channel.reduce("forward", pieces[-1])
        return tuple(pieces)

    @staticmethod
    @_not_twice
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        check_memory("backward of a row layer", x=x, weight=weight)
        if ctx.channel.sequence_parallel:
            (grad,) = ctx.channel.wait("backward")  # all columns, of which ``grads`` are parts
        else:
            grad = grads[0] if len(grads) == 1 else torch.cat(grads, -1)
        ctx.channel.note("backward", "row")
        dx = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        dw = weight_grad(as_rows(grad), as_rows(x)) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class _RowOutput(torch.autograd.Function):
    """Forward waits for the sums; backward gathers with sequence parallelism, else is identity."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.channel, ctx.sizes = channel, [piece.shape[-1] for piece in pieces]
        sums = channel.wait("forward")
        return sums[0].view_as(sums[0]) if len(sums) == 1 else torch.cat(sums, -1)

    @staticmethod
    @_not_twice
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.channel.sequence_parallel:
            grad = ctx.channel.gather("backward", grad)
        return None, *grad.split(ctx.sizes, -1)


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    config: LinearConfig | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b of this rank's columns.

    x is [..., K], with sequence parallelism this rank's part of the first dimension; weight [N/W,
    K]; the result [..., N/W]. Autocast casts x and the weight. ``config`` is that of Flux's fused
    ops; None: collectives of the library.
    """
    check_no_transforms("a layer under Domino")
    check_memory("column layer", x=x, weight=weight, bias=bias)
    channel = Channel(group, sequence_parallel, "column")
    if config is None:  # fused ops cast what autocast would; the nodes here want one dtype
        x, weight = x.to(compute_dtype(x)), cast_once(weight, compute_dtype(x))
    entered = x if config is not None else cast(Any, _ColumnInput).apply(x, channel)
    if (slices := running()) is not None:
        slices.switch("entered", gathers=sequence_parallel and config is None)
    if config is not None:
        channel.note("forward", "fused column")
        return autograd.column_linear(entered, weight, bias, config)
    own_bias = bias if bias is not None and bias.dtype == weight.dtype else None
    with autocast_off(x):
        y: torch.Tensor = cast(Any, _ColumnLinear).apply(entered, weight, own_bias, channel)
        return y if bias is None or own_bias is not None else y + bias


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of x W^T.

    x is [..., K/W], weight [N, K/W], the result [..., N], or with sequence parallelism [first/W,
    ..., N]. ``config`` as in ``column_linear``.
    """
    check_no_transforms("a layer under Domino")
    check_memory("row layer", x=x, weight=weight)
    channel = Channel(group, sequence_parallel, "row")
    slices = running()
    columns = 1 if slices is None else slices.columns
    if config is not None and columns > 1:
        raise ValueError("a column split cuts what a fused op would compute: take one of them")
    if slices is not None:
        slices.switch("row")
    if config is not None:
        channel.note("forward", "fused row")
        pieces = [autograd.row_linear(x, weight, config)]
    else:
        x, weight = x.to(compute_dtype(x)), cast_once(weight, compute_dtype(x))
        with autocast_off(x):
            pieces = cast(Any, _RowLinear).apply(x, weight, channel, columns)
    if slices is not None:
        slices.rows[channel.slice] += 1
        slices.switch("launched")
    if config is not None:
        return pieces[0]
    y: torch.Tensor = cast(Any, _RowOutput).apply(channel, *pieces)
    return y
