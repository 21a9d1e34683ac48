"""Domino for real: slices of a batch whose tensor-parallel communication hides behind each other.

G. Wang et al., arXiv 2409.15241. ``flux.plan.policies.domino`` plans and predicts it; this module
runs it, under plain ``loss.backward()``.

Each slice runs the model's forward in a greenlet (``flux.runtime.slices``). Linear layers let the
next slice go on; when the turn comes back, they wait for their collective. So models need no
rewriting: any layers between the linear ones work, and any number of slices.

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

A linear layer may be one of Flux's fused ops instead (``flux.runtime.domino.layers.replace``). It
hides its own communication behind its own GEMM, in forward and backward; turns are taken at the
same places.

With sequence parallelism the same nodes gather and reduce-scatter: forward ``in`` gathers, and
a row-parallel linear is followed by ReduceScatter; in backward the other way round.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import nn

from flux.core.problem import check_choice, checked_integer
from flux.plan.policies.domino import ORDERS
from flux.runtime.domino.trees import HOWS, Joiner, leaves, mapped
from flux.runtime.slices import Slices, running

T = TypeVar("T")

CALLS = 1 << 17
"""How many calls of Dropout can be repeated: those of a step of hundreds of layers."""

_calls: OrderedDict[tuple[int, int, int], tuple[int, int]] = OrderedDict()
"""The numbers of calls, and of their first samples, by layer and state of torch's generator."""


class Dropout(nn.Module):
    """Dropout whose mask depends on the sample, and not on how the batch is cut.

    Each sample has a seed of its own, of the layer's seed, the number of the call and the sample's
    number in the batch. So a model gives the same result with any number of slices.

    A call takes one number from torch's generator of the CPU. Where the generator is where it was
    in an earlier call, that call is repeated, mask and all: a checkpoint puts it there before it
    computes a part of the model again, and so does ``torch.manual_seed``.

    Args:
        p: probability of zero.
        seed: of this layer; equal on ranks that must drop the same, other on others.
        batch_dim: dimension of the samples.

    Attributes:
        calls: how many there have been. It is no part of ``state_dict``: a run that is resumed sets
            it to go on with other masks than it began with.
    """

    def __init__(self, p: float, seed: int, batch_dim: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must be in [0, 1), got {p}")
        self.p, self.seed, self.batch_dim = p, seed, batch_dim
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with elements set to zero, and the others scaled by 1 / (1 - p).

        Raises:
            RuntimeError: a checkpoint computes this again without torch's state of random numbers.
        """
        if not self.training or self.p == 0:
            return x
        if torch.compiler.is_compiling():
            return _outside_graphs(self._dropped)(x)
        return self._dropped(x)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        call, first = self._call()
        dim = self.batch_dim % x.ndim
        shape = [*x.shape[:dim], *x.shape[dim + 1 :]]
        mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for sample in range(x.shape[dim]):
            number = (self.seed * 1_000_003 + call) * 1_000_003 + first + sample
            generator = torch.Generator(x.device).manual_seed(number % 2**63)
            # The dtype is said: the default one may be another when this is computed again.
            drawn = torch.rand(shape, generator=generator, device=x.device, dtype=torch.float32)
            mask.select(dim, sample).copy_(drawn >= self.p)
        return x * mask / (1 - self.p)

    def _call(self) -> tuple[int, int]:
        """Return the number of this call, or of the one that is repeated, and the first sample."""
        drawn = torch.randint(
            2**62, (), generator=torch.default_generator, device="cpu", dtype=torch.int64
        )
        state = (self.seed, torch.initial_seed(), int(drawn))
        earlier = _calls.get(state)

        def new() -> int:
            if earlier is not None:
                return earlier[0]
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "Dropout is computed again in backward, but torch's generator is where it was "
                    "in none of the calls before: a checkpoint needs preserve_rng_state=True (and "
                    f"at most {CALLS} calls in between)"
                )
            self.calls += 1
            return self.calls

        slices = running()
        if slices is not None:
            _calls[state] = slices.number_call(self, new), slices.first
        elif earlier is None:
            _calls[state] = new(), 0
        call = _calls[state]
        while len(_calls) > CALLS:
            _calls.popitem(last=False)
        return call


class Domino(nn.Module):
    """Runs a module on slices of its batch.

    Results are joined again, as the trees that they are: tuples, dicts, dataclasses and all that
    torch.utils._pytree knows. Tensors are concatenated along ``batch_dim``, which must be as long
    there as the slice has samples. Other values must be equal in all slices. A tensor that was
    an argument of every slice, or is a parameter or buffer, is returned as it is.

    Args:
        module: whose linear layers are Domino's: see ``flux.runtime.domino.layers``.
        slices: pieces of the batch; 1 with ``columns`` above 1 (column split alone).
        columns: pieces of the weights of row-parallel linears; above 1 with ``slices`` above 1 is
            the 2D split.
        order: "staggered", "grouped" or "blocks": how slices take turns (see the module).
        batch_dim: dimension of the samples, of the first argument and of the result.
        sliced: dimension of the samples of further arguments, by name or position (1 is the second
            one), however they are passed. With one sample they go to every slice, as others do that
            are not named. An argument may be a tree of tensors.
        scalars: "mean" or "sum" of the slices, for tensors without dimensions in the result, such
            as a loss; None: they raise.
        joined: how other parts of the result are joined, by their path such as "loss" or
            "0.router": the dimension of their samples, "mean", "sum", or "same" in all slices.
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
        scalars: str | None = None,
        joined: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("slices", slices), ("columns", columns)):
            checked_integer(name, value, 1)
        check_choice("order", order, ORDERS)
        if scalars not in (None, "mean", "sum"):
            raise ValueError(f"scalars must be mean or sum, got {scalars!r}")
        for path, how in (joined or {}).items():
            if type(how) is not int and how not in HOWS:
                raise ValueError(
                    f"joined: {path!r} needs a dimension or {', '.join(HOWS)}, got {how!r}"
                )
        self.module, self.slices, self.columns, self.order = module, slices, columns, order
        self.batch_dim, self.sliced = batch_dim, dict(sliced or {})
        self.scalars, self.joined = scalars, dict(joined or {})
        placed, names, is_open = _arguments(module)
        for key in self.sliced:
            if not is_open and key not in names and key not in range(len(placed)):
                raise ValueError(f"sliced: {type(module).__name__} has no argument {key!r}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result for the whole batch.

        Raises:
            ValueError: the batch does not divide into the slices, or arguments have different
                numbers of samples.
            TypeError: no argument can be cut, or a result cannot be joined.
        """
        if torch.compiler.is_compiling():
            return _outside_graphs(self._sliced)(*args, **kwargs)
        return self._sliced(*args, **kwargs)

    def _sliced(self, *args: Any, **kwargs: Any) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        dims = self._dims(arguments)
        batch = _samples({key: arguments[key] for key in dims}, dims)
        if batch % self.slices:
            raise ValueError(
                f"a batch of {batch} samples cannot be cut into {self.slices} equal slices"
            )
        size = batch // self.slices

        def body(number: int) -> Any:
            def cut(key: int | str, value: Any) -> Any:
                if key not in dims:
                    return value
                return mapped(value, lambda leaf: part(leaf, dims[key]))

            def part(leaf: Any, dim: int) -> Any:
                if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                    return leaf
                whole = leaf.shape[dim] == 1 and batch > 1
                return leaf if whole else leaf.narrow(dim, number * size, size)

            mine = [cut(at, value) for at, value in enumerate(args)]
            return self.module(*mine, **{key: cut(key, value) for key, value in kwargs.items()})

        runner = Slices(self.slices, size, self.order, self.columns)
        results = runner.run([partial(body, number) for number in range(self.slices)])
        if self.slices == 1:
            return results[0]

        def given() -> set[int]:
            own = chain(leaves(arguments), self.module.parameters(), self.module.buffers())
            return {id(tensor) for tensor in own}

        return Joiner(self.batch_dim, size, self.joined, self.scalars, given).join(results)

    def _dims(self, arguments: Mapping[int | str, Any]) -> dict[int | str, int]:
        """Return the dimensions of the arguments that are cut, by position or name as passed."""
        names, _, _ = _arguments(self.module)
        positions = {name: at for at, name in enumerate(names)}
        dims = {}
        for key in arguments:
            at = positions.get(key, key) if isinstance(key, str) else key
            name = names[at] if isinstance(at, int) and at < len(names) else key
            dim = self.sliced.get(at, self.sliced.get(name, self.batch_dim if at == 0 else None))
            tensors = (leaf for leaf in leaves(arguments[key]) if isinstance(leaf, torch.Tensor))
            if dim is not None and any(tensor.ndim for tensor in tensors):
                dims[key] = dim
        if not dims:
            raise TypeError(
                "no argument has samples to cut: Domino cuts tensors of the module's first "
                "argument, and of those that sliced names"
            )
        return dims


def _arguments(module: nn.Module) -> tuple[list[str], list[str], bool]:
    """Return the names of arguments that have a position, all names, and whether there are more."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError:  # a method of TorchScript has none
        return [], [], True
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    by_name, more = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
    is_open = more in kinds.values() or inspect.Parameter.VAR_KEYWORD in kinds.values()
    names = [name for name, kind in kinds.items() if not kind.name.startswith("VAR")]
    return [n for n in names if kinds[n] != by_name or more not in kinds.values()], names, is_open


def _samples(arguments: Mapping[int | str, Any], dims: Mapping[int | str, int]) -> int:
    """Return how many samples the arguments have."""
    sizes: dict[int | str, set[int]] = {}
    for key, value in arguments.items():
        for leaf in leaves(value):
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                continue
            if not -leaf.ndim <= dims[key] < leaf.ndim:
                raise ValueError(
                    f"argument {key!r} has no dimension {dims[key]} of samples: its shape is "
                    f"{list(leaf.shape)}"
                )
            sizes.setdefault(key, set()).add(leaf.shape[dims[key]])
    batch = max(set().union(*sizes.values()))
    for key, counts in sizes.items():
        if counts - {batch, 1}:
            raise ValueError(
                f"argument {key!r} has {min(counts - {batch, 1})} samples in dimension "
                f"{dims[key]}, where the batch has {batch}"
            )
    return batch


def _outside_graphs(function: T) -> T:
    reason = "a graph cannot be left in the middle for the next slice"
    return cast(T, torch.compiler.disable(function, reason=reason))
