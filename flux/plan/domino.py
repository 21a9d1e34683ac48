"""Domino for real: slices of a batch whose tensor-parallel communication hides behind each other.

G. Wang et al., arXiv 2409.15241. ``flux.plan.policies.domino`` plans and predicts it; this module
runs it, under plain ``loss.backward()``.

Each slice runs the model's forward in a *greenlet*: code that can be left in the middle of a call
and continued there later. Linear layers let the next slice go on; when the turn comes back, they
wait for their collective. So models need no rewriting: any layers between the linear ones work, and
any number of slices. Greenlets are one thread, because autograd numbers its nodes by thread.

A slice goes through segments, again and again:

    A   wait for AllReduce, bias, dropout, residual, norm, ``in``
    B   column-parallel linear, attention or activation
    C   row-parallel linear, launch of its AllReduce

A column-parallel linear's backward launches AllReduce of its input's gradient between dgrad and
wgrad. The backward of the node ``in`` waits for it. Autograd runs the ready node that was made
last, so the order of forward decides what hides AllReduce in backward, too. Two slices, 0 and 1:

    staggered   B0 A1 C0 B1 A0 C1 ...   B of the other slice hides AllReduce in forward, its C in
                                        backward. The default; for further slices likewise.
    grouped     B0 C0 B1 C1 A0 A1 ...   between attention and MLP, B0 C0 A0 B1 C1 A1 ... elsewhere:
                                        the paper's order (figure 9). Nothing but norms hides the
                                        last slice's AllReduce of attention in forward.
    blocks      A0 B0 C0 A1 B1 C1 ...   B and C of the other slice hide AllReduce in forward; only
                                        the wgrad of the same linear does in backward.

The output of ``in`` feeds one linear only: gradients of several would be added before the wait.

A linear layer may be one of Flux's fused ops instead (``flux.plan.domino_layers.replace``). It
hides its own communication behind its own GEMM, in forward and backward; turns are taken at the
same places.

With sequence parallelism the same nodes gather and reduce-scatter: forward ``in`` gathers, behind a
row-parallel linear comes ReduceScatter; in backward the other way round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import greenlet
import torch
import torch.distributed as dist
from torch import nn

from flux.backends.unfused import all_gather, reduce_scatter
from flux.layers import autograd
from flux.layers.autograd import LinearConfig
from flux.plan.policies.domino import ORDERS

T = TypeVar("T")


@dataclass
class Record:
    """What ran, in order.

    Attributes:
        events: (phase, slice, number of the linear layer in its slice, what): what is "column",
            "row", "launch column", "launch row", "wait column" or "wait row"; of a fused op, in
            forward only, "fused column" or "fused row".
    """

    events: list[tuple[str, int, int, str]] = field(default_factory=list)


_record: Record | None = None
_slices: Slices | None = None
_before_wait: Callable[[], None] | None = None


def set_before_wait(call: Callable[[], None] | None) -> Callable[[], None] | None:
    """Set what is called before a linear layer waits for its collective; return what it was.

    ``flux.plan.strands`` lets another micro-batch go on there.
    """
    global _before_wait
    before, _before_wait = _before_wait, call
    return before


@contextmanager
def recorded() -> Iterator[Record]:
    """Record the order in which linear layers compute, launch and wait."""
    global _record
    before, _record = _record, Record()
    try:
        yield _record
    finally:
        _record = before


class Slices:
    """Runs slices by turns in the calling thread.

    Args:
        count: how many there are.
        size: samples of each.
        order: one of ORDERS.
        columns: pieces of the weights of row-parallel linears (column split).
    """

    def __init__(self, count: int, size: int, order: str, columns: int) -> None:
        self.count, self.size, self.order, self.columns = count, size, order, columns
        self.current = 0
        self.linears = [0] * count  # that a slice has begun
        self.rows = [0] * count  # row-parallel ones, of these

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a body for each slice; return their results.

        Raises:
            Exception: what a body raised; the others are ended where they are.
        """
        global _slices
        before, _slices = _slices, self
        results: list[Any] = [None] * self.count
        waiting = {number: greenlet.greenlet(body) for number, body in enumerate(bodies)}
        try:
            for turn in itertools.count():
                if not waiting:
                    break
                for number, one in list(waiting.items()):
                    if self.order == "staggered" and number > turn:
                        break  # a slice begins one segment behind the one before it
                    self.current = number
                    results[number] = one.switch()
                    if one.dead:
                        del waiting[number]
        finally:
            for one in waiting.values():
                if one and not one.dead:
                    one.throw(greenlet.GreenletExit)
            _slices = before
        return results

    def switch(self, place: str, *, gathers: bool = False) -> None:
        """Let the other slices go on, if they shall here; return when it is this one's turn again.

        Args:
            place: "entered": behind ``in``; "row": in front of a row-parallel linear; "launched":
                behind one.
            gathers: whether a gather has been started, which something should hide.
        """
        behind_attention = self.rows[self.current] % 2 == 1
        stays = {
            "staggered": False,
            "grouped": place == "row"
            or (place == "entered" and not behind_attention and not gathers),
            "blocks": place != "launched" and not gathers,
        }
        if self.count == 1 or stays[self.order]:
            return
        grad = torch.is_grad_enabled()
        casts = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
        greenlet.getcurrent().parent.switch(None)
        torch.set_grad_enabled(grad)
        for kind, on in casts.items():
            torch.set_autocast_enabled(kind, on)


def current_slice() -> int:
    """Return the number of the slice that is running; 0 outside of Domino."""
    return 0 if _slices is None else _slices.current


class Channel:
    """The collectives of one linear layer in one slice.

    Args:
        group: the tensor-parallel ranks.
        sequence_parallel: AllGather and ReduceScatter, in place of AllReduce.
        kind: "column" or "row".
    """

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, kind: str) -> None:
        self.group, self.sequence_parallel, self.kind = group, sequence_parallel, kind
        self.world = dist.get_world_size(group)
        self.slice = current_slice()
        self.number = 0
        if _slices is not None:
            self.number = _slices.linears[self.slice]
            _slices.linears[self.slice] += 1
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []

    def note(self, phase: str, what: str) -> None:
        """Record that something ran."""
        if _record is not None:
            _record.events.append((phase, self.slice, self.number, what))

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
        return self.launch(phase, _reduce_scatter, part, tensor)

    def gather(self, phase: str, part: torch.Tensor) -> torch.Tensor:
        """Start AllGather along the first dimension."""
        whole = part.new_empty(part.shape[0] * self.world, *part.shape[1:])
        return self.launch(phase, _all_gather, whole, part.contiguous())

    def wait(self, phase: str) -> list[torch.Tensor]:
        """Return the results of what was started, when they are there."""
        pending, self._pending = self._pending, []
        if _before_wait is not None and pending:
            _before_wait()
        for work, _ in pending:
            if work is not None:
                work.wait()
        self.note(phase, f"wait {self.kind}")
        return [tensor for _, tensor in pending]


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor, **how: Any) -> Any:
    return reduce_scatter(part, whole.contiguous(), **how)


def _all_gather(whole: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
    return all_gather(whole, part, **how)


# -- the nodes of autograd -------------------------------------------------------------------------


class _ColumnInput(torch.autograd.Function):
    """``in``: forward gathers with sequence parallelism; backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel.gather("forward", x) if channel.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (reduced,) = ctx.channel.wait("backward")
        return reduced, None


class _ColumnLinear(torch.autograd.Function):
    """x W^T + b; backward: dgrad, its collective, and beside that the gradients of W and b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        channel: Channel,
    ) -> torch.Tensor:
        if channel.sequence_parallel:
            channel.wait("forward")
        channel.note("forward", "column")
        ctx.channel = channel
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.channel.note("backward", "column")
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad.matmul(weight)
            ctx.channel.reduce("backward", dx)  # of dx's shape: what ``in`` waits for replaces it
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(grad, x)
        if ctx.needs_input_grad[2]:
            db = grad.flatten(0, -2).sum(0)
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
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.channel.sequence_parallel:
            (grad,) = ctx.channel.wait("backward")  # all columns, of which ``grads`` are parts
        else:
            grad = grads[0] if len(grads) == 1 else torch.cat(grads, -1)
        ctx.channel.note("backward", "row")
        dx = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class _RowOutput(torch.autograd.Function):
    """Forward waits for the sums; backward gathers with sequence parallelism, else is identity."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.channel, ctx.sizes = channel, [piece.shape[-1] for piece in pieces]
        sums = channel.wait("forward")
        return sums[0].view_as(sums[0]) if len(sums) == 1 else torch.cat(sums, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.channel.sequence_parallel:
            grad = ctx.channel.gather("backward", grad)
        return None, *grad.split(ctx.sizes, -1)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.flatten(0, -2).t().matmul(x.flatten(0, -2))


# -- for layers ------------------------------------------------------------------------------------


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    fused: LinearConfig | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b of this rank's columns.

    Args:
        x: [..., K]; with sequence parallelism this rank's part of the first dimension.
        weight: [N/W, K].
        group: the ranks; W of them.
        sequence_parallel: gather x, and reduce-scatter its gradient.
        fused: how Flux's fused ops do it, if they shall.
        bias: [N/W], of x's dtype, or None.

    Returns:
        [..., N/W].
    """
    channel = Channel(group, sequence_parallel, "column")
    entered = x if fused else cast(Any, _ColumnInput).apply(x, channel)
    if _slices is not None:
        _slices.switch("entered", gathers=sequence_parallel and fused is None)
    if fused is not None:
        channel.note("forward", "fused column")
        return autograd.column_linear(entered, weight, bias, fused)
    y: torch.Tensor = cast(Any, _ColumnLinear).apply(entered, weight, bias, channel)
    return y


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    fused: LinearConfig | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of x W^T.

    Args:
        x: [..., K/W].
        weight: [N, K/W].
        group: the ranks; W of them.
        sequence_parallel: keep this rank's part of the first dimension of the sum.
        fused: how Flux's fused ops do it, if they shall.

    Returns:
        [..., N], or with sequence parallelism [first/W, ..., N].

    Raises:
        ValueError: a fused op in a column split, which would cut it.
    """
    channel = Channel(group, sequence_parallel, "row")
    columns = 1 if _slices is None else _slices.columns
    if fused is not None and columns > 1:
        raise ValueError("a column split cuts what a fused op would compute: take one of them")
    if _slices is not None:
        _slices.switch("row")
    if fused is not None:
        channel.note("forward", "fused row")
        pieces = [autograd.row_linear(x, weight, fused)]
    else:
        pieces = cast(Any, _RowLinear).apply(x, weight, channel, columns)
    if _slices is not None:
        _slices.rows[channel.slice] += 1
        _slices.switch("launched")
    y: torch.Tensor = pieces[0] if fused else cast(Any, _RowOutput).apply(channel, *pieces)
    return y


class Dropout(nn.Module):
    """Dropout whose mask depends on the sample, and not on how the batch is cut.

    Each sample has a seed of its own, of the layer's seed, the number of the call and the sample's
    number in the batch. So a model gives the same result with any number of slices.

    Args:
        p: probability of zero.
        seed: of this layer; equal on ranks that must drop the same, other on others.
        batch_dim: dimension of the samples.
    """

    def __init__(self, p: float, seed: int, batch_dim: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must be in [0, 1), got {p}")
        self.p, self.seed, self.batch_dim = p, seed, batch_dim
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with elements set to zero, and the others scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        first = 0 if _slices is None else _slices.current * _slices.size
        if first == 0:
            self.calls += 1
        kept = []
        for sample in range(x.shape[self.batch_dim]):
            number = (self.seed * 1_000_003 + self.calls) * 1_000_003 + first + sample
            generator = torch.Generator(x.device).manual_seed(number % 2**63)
            shape = [size for dim, size in enumerate(x.shape) if dim != self.batch_dim]
            kept.append(torch.rand(shape, generator=generator, device=x.device) >= self.p)
        mask = torch.stack(kept, self.batch_dim).to(x.dtype)
        return x * mask / (1 - self.p)


class Domino(nn.Module):
    """Runs a module on slices of its batch.

    Args:
        module: whose linear layers are Domino's: see ``flux.plan.domino_layers``.
        slices: pieces of the batch; 1 with ``columns`` above 1 (column split alone).
        columns: pieces of the weights of row-parallel linears; above 1 with ``slices`` above 1 is
            the 2D split.
        order: "staggered", "grouped" or "blocks": how slices take turns (see the module).
        batch_dim: dimension of the samples, of the first argument and of the result.
        sliced: dimension of the samples of further arguments, by name or position (1 is the second
            one). Others go to every slice as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        slices: int = 2,
        columns: int = 1,
        *,
        order: str = "staggered",
        batch_dim: int = 0,
        sliced: dict[int | str, int] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("slices", slices), ("columns", columns)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.module, self.slices, self.columns, self.order = module, slices, columns, order
        self.batch_dim, self.sliced = batch_dim, dict(sliced or {})

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result for the whole batch.

        Raises:
            ValueError: the batch has fewer samples than there are slices, or does not divide.
        """
        if torch.compiler.is_compiling():
            return _outside_graphs(self._sliced)(x, *args, **kwargs)
        return self._sliced(x, *args, **kwargs)

    def _sliced(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = x.shape[self.batch_dim]
        if batch % self.slices:
            raise ValueError(
                f"a batch of {batch} samples cannot be cut into {self.slices} equal slices"
            )
        size = batch // self.slices

        def cut(value: Any, dim: int | None, number: int) -> Any:
            if dim is None or not isinstance(value, torch.Tensor):
                return value
            return value.narrow(dim, number * size, size)

        def body(number: int) -> Any:
            mine = [cut(v, self.sliced.get(at + 1), number) for at, v in enumerate(args)]
            named = {k: cut(v, self.sliced.get(k), number) for k, v in kwargs.items()}
            return self.module(cut(x, self.batch_dim, number), *mine, **named)

        runner = Slices(self.slices, size, self.order, self.columns)
        results = runner.run([partial(body, number) for number in range(self.slices)])
        return _joined(results, self.batch_dim)


def _outside_graphs(function: T) -> T:
    reason = "a graph cannot be left in the middle for the next slice"
    return cast(T, torch.compiler.disable(function, reason=reason))


def _joined(results: Sequence[Any], dim: int) -> Any:
    """Concatenate tensors, and the tensors of tuples; other values must be those of every slice."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return first if len(results) == 1 else torch.cat(list(results), dim)
    if isinstance(first, tuple):
        return tuple(_joined([r[at] for r in results], dim) for at in range(len(first)))
    return first
