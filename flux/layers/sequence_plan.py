"""Derive which modules of a decoder can work on shards of the sequence, from its plan and a trace.

A plan that keeps activations whole names column- and row-parallel linear layers. Sequence
parallelism needs more: that between these layers each token is handled by itself. So the decoder
runs once, on three tokens, without its weights: its linear layers return zeros, and its input is
NaN where a result must not depend on it.

    block     its column layers read its input, and nothing else does: NaN there, and none reaches
              the row layer; the row layer's result is the block's
    layer     with its blocks left out, a token that is NaN makes no other token NaN
    decoder   each layer reads what the layer before it returned

    layer | h --+-- norm --> [ attention: q, k, v -> ... -> o ] --+--> h -- norm --> [ mlp ] ...
                +-------------------------------------------------+
            own tokens           all tokens, own features             own tokens
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flux.layers.planned import steps_of, twins_of

TOKENS = 3


@dataclass(frozen=True)
class SequenceBlock:
    """A module whose column layers share its input, and whose row layer makes its result.

    Attributes:
        name: of the module.
        columns: names of its column-parallel layers.
        row: name of its row-parallel layer.
        keyword: name of its input, if it is not passed by position.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    keyword: str | None


@dataclass(frozen=True)
class SequencePlan:
    """The modules of a decoder that can work on shards of the sequence, by name.

    Attributes:
        decoder: holds the layers.
        layers: in the order in which they run.
        blocks: between these, each rank has its own tokens.
        replicated: modules outside of blocks that have parameters: each rank applies them to its
            own tokens.
        dropouts: modules of dropout that see own tokens.
        features: of a token.
    """

    decoder: str
    layers: tuple[str, ...]
    blocks: tuple[SequenceBlock, ...]
    replicated: tuple[str, ...]
    dropouts: tuple[str, ...]
    features: int


def _refuse(reason: str) -> NoReturn:
    raise ValueError(f"no sequence-parallel plan: {reason}")


def derive(model: nn.Module, styles: Mapping[str, Any]) -> SequencePlan:
    """Return the plan for a model. The model is not changed, and may be on the meta device.

    Args:
        model: of which a module holds a list of layers.
        styles: its tensor-parallel plan: styles by module name.

    Raises:
        ValueError: there is none, with the reason.
    """
    names = {module: name for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # applying the styles warns of names without a module
        styled = {names[module]: style for module, style in steps_of(model, styles)}
    modules = {name: module for module, name in names.items()}
    rows = [name for name in styled if _is(modules[name], styled[name], RowwiseParallel)]
    columns = [name for name in styled if _is(modules[name], styled[name], ColwiseParallel)]
    stack = _stack_of(rows, modules)
    layers = tuple(f"{stack}.{key}" for key in modules[stack]._modules)
    parts = [_LayerParts.of(name, modules, styled, columns, rows) for name in layers]
    features = {modules[row].out_features for part in parts for *_, row in part.blocks}
    if len(features) != 1:
        _refuse(f"row-parallel layers return different numbers of features: {sorted(features)}")
    decoder = stack.rpartition(".")[0]
    trace = _Trace(model, decoder, parts)
    trace.run()
    blocks = [block for part in parts for block in trace.blocks_of(part)]
    for part in parts:
        trace.check_tokens_apart(part, features.copy().pop())
    return SequencePlan(
        decoder,
        layers,
        tuple(blocks),
        tuple(name for part in parts for name in part.replicated),
        tuple(name for part in parts for name in (*part.dropouts, *trace.late_dropouts(part))),
        features.pop(),
    )


def _is(module: nn.Module, style: Any, kind: type) -> bool:
    return isinstance(module, nn.Linear) and isinstance(style, kind)


def _stack_of(rows: list[str], modules: dict[str, nn.Module]) -> str:
    """Return the name of the list of layers that has all row-parallel layers."""
    stacks = set()
    for row in rows:
        parts = row.split(".")
        prefixes = [".".join(parts[:end]) for end in range(len(parts))]
        lists = [name for name in prefixes if isinstance(modules[name], nn.ModuleList)]
        if not lists:
            _refuse(f"{row} is in no list of layers")
        stacks.add(lists[0])
    if not stacks:
        _refuse("the tensor-parallel plan has no row-parallel linear layer")
    if len(stacks) != 1:
        _refuse(f"row-parallel layers are in {len(stacks)} lists of layers: {sorted(stacks)}")
    return stacks.pop()


# -- structure -------------------------------------------------------------------------------------


@dataclass
class _LayerParts:
    """The parts of one layer, by name; ``blocks``: (block, columns, row)."""

    name: str
    blocks: list[tuple[str, list[str], str]]
    replicated: list[str]
    dropouts: list[str]
    inner_dropouts: list[str]

    @classmethod
    def of(
        cls,
        name: str,
        modules: dict[str, nn.Module],
        styled: dict[str, Any],
        columns: list[str],
        rows: list[str],
    ) -> _LayerParts:
        parts = cls(name, [], [], [], [])
        if modules[name]._parameters:
            _refuse(f"{name} has parameters of its own: {sorted(modules[name]._parameters)}")
        for child in modules[name]._modules:
            parts._add(f"{name}.{child}", modules, styled, columns, rows)
        if not parts.blocks:
            _refuse(f"{name} has no row-parallel layer")
        return parts

    def _add(
        self,
        name: str,
        modules: dict[str, nn.Module],
        styled: dict[str, Any],
        columns: list[str],
        rows: list[str],
    ) -> None:
        inside = [n for n in modules if n == name or n.startswith(f"{name}.")]
        own_columns = [n for n in inside if n in columns]
        own_rows = [n for n in inside if n in rows]
        dropouts = [n for n in inside if isinstance(modules[n], nn.Dropout)]
        if not own_columns and not own_rows:
            for n in inside:
                if styled.get(n) is not None:
                    _refuse(f"{n} has the style {styled[n]}")
                if any(p is not None for p in modules[n]._parameters.values()):
                    self.replicated.append(n)
            self.dropouts += dropouts
            return
        if not own_columns or len(own_rows) != 1 or name in (*own_columns, *own_rows):
            _refuse(
                f"{name} must be a module with column-parallel layers and one row-parallel layer, "
                f"has {own_columns} and {own_rows}"
            )
        for n in own_columns:
            _check_layout(n, styled[n].input_layouts, "input")
        _check_layout(own_rows[0], styled[own_rows[0]].output_layouts, "output")
        for n in inside:
            for key, parameter in modules[n]._parameters.items():
                if (
                    n not in (*own_columns, *own_rows)
                    and parameter is not None
                    and parameter.dim() > 1
                ):
                    _refuse(f"{n}.{key} is in {name}, and is not split by columns or rows")
        self.blocks.append((name, own_columns, own_rows[0]))
        self.inner_dropouts += dropouts


def _check_layout(name: str, layouts: Any, what: str) -> None:
    if tuple(layouts) != (Replicate(),):
        _refuse(f"the style of {name} has an {what} that is not whole: {layouts}")


# -- trace -----------------------------------------------------------------------------------------


@dataclass
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None  # of the input, if it is not the first argument
    output: Any = None

    @property
    def input(self) -> Any:
        return self.args[0] if self.keyword is None else self.kwargs.get(self.keyword)

    @property
    def result(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple) else self.output


class _Trace:
    """One run of a decoder without its weights, and what its modules read and returned."""

    def __init__(self, model: nn.Module, decoder: str, parts: list[_LayerParts]) -> None:
        twins = twins_of(model, _stand_in)
        for twin in twins.values():
            # As in training, so that dropout by a function shows; nn.Dropout is dealt with.
            vars(twin)["training"] = not isinstance(twin, nn.Dropout)
            if hasattr(twin, "gradient_checkpointing"):
                vars(twin)["gradient_checkpointing"] = False
        self._twins = {name: twins[module] for name, module in model.named_modules()}
        self._parts, self._decoder = parts, decoder
        self._calls: dict[str, list[_Call]] = {}

    def run(self) -> None:
        for part in self._parts:
            self._record(part.name)
            for block, columns, row in part.blocks:
                for linear in (*columns, row):
                    vars(self._twins[linear])["forward"] = _zeros(self._twins[linear])
                for name in (block, *columns, row):
                    self._record(name)
            for name in (*part.inner_dropouts, *part.replicated):
                self._record(name)
        first = self._parts[0].name
        nan = self._twins[first].register_forward_pre_hook(
            _nan_input, with_kwargs=True, prepend=True
        )
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self._twins[self._decoder](tokens)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(
                f"no sequence-parallel plan: a trace of {_name(self._decoder)} failed: {text}"
            ) from error
        nan.remove()
        before = None
        for part in self._parts:
            call = self._only_call(part.name)
            x = call.input
            if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[1] != TOKENS:
                _refuse(f"{part.name} does not read [batch, sequence, features] as first argument")
            if before is not None and x is not before.result:
                _refuse(f"{part.name} does not read what the layer before it returns")
            before = call
            for name in part.replicated:
                if not self._calls[name]:  # else nothing sums the gradients of its parameters
                    _refuse(f"{name} has parameters, and is not called")

    def _record(self, name: str) -> None:
        module = self._twins[name]
        calls = self._calls.setdefault(name, [])
        parameters = list(inspect.signature(type(module).forward).parameters)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append(_Call(args, kwargs, None if args else parameters[1]))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            calls[-1].output = output

        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end)

    def _only_call(self, name: str) -> _Call:
        calls = self._calls[name]
        if len(calls) != 1:
            _refuse(f"{name} is called {len(calls)} times in one forward")
        return calls[0]

    def blocks_of(self, part: _LayerParts) -> list[SequenceBlock]:
        """Return the blocks of a layer; raise if they read or return something else."""
        blocks = []
        for name, columns, row in part.blocks:
            call = self._only_call(name)
            for column in columns:
                if self._only_call(column).input is not call.input:
                    _refuse(f"{column} does not read the input of {name}")
            last = self._only_call(row)
            if bool(last.input.isnan().any()):
                _refuse(f"{name} reads its input outside of {columns}")
            if call.result is not last.output:
                _refuse(f"{name} does not return the result of {row}")
            blocks.append(SequenceBlock(name, tuple(columns), row, call.keyword))
        return blocks

    def late_dropouts(self, part: _LayerParts) -> list[str]:
        """Return the dropouts in blocks that come after the row layer."""
        results = [self._only_call(row).output for *_, row in part.blocks]
        return [
            name
            for name in part.inner_dropouts
            if any(call.input is result for call in self._calls[name] for result in results)
        ]

    def check_tokens_apart(self, part: _LayerParts, features: int) -> None:
        """Raise if a layer, without its blocks, does more than handle each token by itself."""
        layer, call = self._twins[part.name], self._only_call(part.name)
        assert call.keyword is None
        for name, *_ in part.blocks:
            block = self._calls[name][0]
            vars(self._twins[name])["forward"] = _skipping(block)
        tokens = torch.ones(TOKENS, 1, 1, 1, features, dtype=call.input.dtype)  # as a shard is
        tokens[1] = torch.nan
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                output = layer(tokens, *call.args[1:], **call.kwargs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(
                f"no sequence-parallel plan: {part.name} fails on single tokens: {text}"
            ) from error
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            _refuse(f"{part.name} draws random numbers outside of nn.Dropout")
        result = output[0] if isinstance(output, tuple) else output
        if not isinstance(result, torch.Tensor) or result.shape != tokens.shape:
            _refuse(f"{part.name} does not return as many tokens as it reads")
        if bool(result[::2].isnan().any()):
            _refuse(f"{part.name} mixes tokens outside of its blocks")


def _name(module: str) -> str:
    return module or "the model"


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape on the CPU: a parameter of one element of memory."""
    if isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return tensor.detach().cpu()


def _zeros(linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_zeros(*x.shape[:-1], linear.out_features)


def _skipping(block: _Call) -> Callable[..., Any]:
    """Return a forward that returns its input where the block returned its result."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if block.keyword is None else kwargs[block.keyword]
        return (x, *block.output[1:]) if isinstance(block.output, tuple) else x

    return forward


def _nan_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    return (torch.full_like(args[0], torch.nan), *args[1:]), kwargs
