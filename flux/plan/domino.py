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

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from flux.plan.policies.domino import ORDERS
from flux.plan.slices import Slices, running

T = TypeVar("T")


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
        slices = running()
        first = 0 if slices is None else slices.current * slices.size
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
