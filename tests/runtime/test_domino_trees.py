"""Domino cuts arguments that are trees, and joins results of any structure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from flux.runtime.domino.module import Domino
from flux.runtime.slices import current_slice

X = torch.arange(8.0).view(4, 2)


@dataclasses.dataclass
class Plain:
    h: torch.Tensor
    aux: Any = None
    layers: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: torch.Tensor
    aux: Any = None


@dataclasses.dataclass
class Registered:
    h: torch.Tensor
    aux: Any = None


pytree.register_dataclass(Registered)


class Pair(NamedTuple):
    h: torch.Tensor
    aux: Any = None


class Node:
    def __init__(self, h: torch.Tensor, aux: Any = None) -> None:
        self.h, self.aux = h, aux


pytree.register_pytree_node(Node, lambda n: ([n.h, n.aux], None), lambda parts, _: Node(*parts))


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """Fields that are items, too, as in the outputs of transformers' models."""

    h: torch.Tensor
    aux: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Items(list):  # type: ignore[type-arg]
    pass


class Body(nn.Module):
    """Returns what a function makes of the slice's batch and this module."""

    def __init__(self, function: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(2))
        self.register_buffer("positions", torch.arange(2.0))

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.function(x, self)


def of_slice(*values: Any) -> Any:
    return values[current_slice()]


@pytest.mark.parametrize("kind", [Plain, Frozen, Registered, Pair, Node, Output])
def test_containers_are_joined_with_all_that_is_in_them(kind: Any) -> None:
    joined = Domino(Body(lambda x, _: kind(x, {"a": (x, None, "text"), "b": [x + 1]})))(X)
    assert type(joined) is kind
    assert torch.equal(joined.h, X) and torch.equal(joined.aux["b"][0], X + 1)
    assert joined.aux["a"][0] is joined.h and joined.aux["a"][1:] == (None, "text")
    if kind is Output:
        assert list(joined) == ["h", "aux"] and joined["h"] is joined.h
    assert Domino(Body(lambda x, _: kind(x)))(X).aux is None


class Views:
    """Makes its children anew each time it is taken apart."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


pytree.register_pytree_node(
    Views, lambda v: ([v.h[:, :1], v.h[:, 1:]], None), lambda parts, _: Views(torch.cat(parts, 1))
)


def test_children_may_be_made_anew() -> None:
    joined = Domino(Body(lambda x, _: [Views(x + at) for at in range(4)]))(X)
    for at, views in enumerate(joined):
        assert torch.equal(views.h, X + at)


@pytest.mark.parametrize("kind", [Items, lambda of: collections.deque(of, 5), list, tuple])
def test_sequences_are_joined(kind: Any) -> None:
    joined = Domino(Body(lambda x, _: kind([x, torch.Size([7])])))(X)
    assert type(joined) is type(kind([])) and joined[1] == torch.Size([7])
    assert torch.equal(joined[0], X)
    assert getattr(joined, "maxlen", 5) == 5


def test_what_torch_returns_is_joined() -> None:
    joined = Domino(Body(lambda x, _: x.max(1)), 4)(X)
    assert torch.equal(joined.values, X[:, 1])
    keys = Domino(Body(lambda x, _: of_slice({"a": x, "b": 1}, {"b": 1, "a": x})))(X)
    assert torch.equal(keys["a"], X)


def test_tensors_that_belong_to_no_slice_are_returned_as_they_are() -> None:
    mask = torch.ones(2, 2)  # as long as a slice has samples
    model = Body(lambda x, body: (x, body.weight, body.positions, mask, body.positions[None]))
    found = Domino(model)(X, mask)
    assert found[1] is model.weight and found[2] is model.positions and found[3] is mask
    assert found[4].shape == (1, 2)
    shared = Domino(Body(lambda x, body: body.weight.expand(len(x), -1)))(X)
    assert shared.shape == (4, 2)


def test_scalars_are_joined_as_the_caller_says() -> None:
    def body(x: torch.Tensor, _: Any) -> Any:
        return {"loss": (x**2).mean(), "count": torch.tensor(len(x)), "flat": x.reshape(-1)}

    joined: dict[str, int | str] = {"count": "sum", "flat": 0}
    for slices in (1, 2, 4):
        found = Domino(Body(body), slices, scalars="mean", joined=joined)(X)
        assert found["loss"] == (X**2).mean() and found["count"] == 4
        assert torch.equal(found["flat"], X.reshape(-1))
    x = X.clone().requires_grad_()
    Domino(Body(body), scalars="mean", joined=joined)(x)["loss"].backward()
    torch.testing.assert_close(x.grad, X / 4)


_kept: list[torch.Tensor] = []


def kept(x: torch.Tensor, _: Any) -> list[torch.Tensor]:
    _kept[:] = [x]
    return _kept


REFUSED: dict[str, tuple[Callable[[torch.Tensor, Any], Any], str]] = {
    "scalar": (lambda x, _: (x, {"loss": x.mean()}), "'1.loss' of the result is a scalar"),
    "number": (lambda x, _: Plain(x, x.mean().item()), "different values as 'aux'"),
    "object": (lambda x, _: [x, object()], "different values as '1' of the result, of type obj"),
    "array": (lambda x, _: x.numpy(), "different values as the result, of type ndarray"),
    "none": (lambda x, _: (of_slice(x, None),), "different types as '0' of the result"),
    "keys": (lambda x, _: {of_slice("a", "b"): x}, r"\['a'\] and \['b'\]"),
    "length": (lambda x, _: [x] * of_slice(1, 2), "differ in what the result has"),
    "mask": (lambda x, _: (x, torch.ones(1, 7)), r"'1' of the result has the shape \[1, 7\]"),
    "dtype": (lambda x, _: x.to(of_slice(torch.float, torch.double)), "float32 on cpu and torch.f"),
    "padding": (lambda x, _: x[:, : of_slice(1, 2)], r"along dimension 0: \[2, 1\], \[2, 2\]"),
    "kept": (kept, "every slice returns the same tensor as '0'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_joined_is_refused_by_its_path(what: str) -> None:
    function, message = REFUSED[what]
    with pytest.raises(TypeError, match=message):
        Domino(Body(function))(X)
    assert Domino(Body(lambda x, _: (X, 1)))(X)[0] is X


class Arguments(nn.Module):
    def forward(self, hidden: Any, mask: Any = 0, *, extra: Any = None) -> torch.Tensor:
        x = hidden if isinstance(hidden, torch.Tensor) else hidden["a"] + hidden["b"][0]
        assert len(x) == 2
        return x + mask + (0 if extra is None else extra.h)


def test_arguments_are_cut_however_they_are_passed() -> None:
    model = Domino(Arguments(), sliced={1: 0, "extra": 0})
    mask = torch.arange(4.0)[:, None]
    for found in (model(X, mask), model(X, mask=mask), model(mask=mask, hidden=X)):
        assert torch.equal(found, X + mask)
    assert torch.equal(Domino(Arguments(), sliced={"mask": 0})(X, mask), X + mask)
    assert torch.equal(model(X, extra=Plain(mask)), X + mask)
    assert torch.equal(model({"a": X, "b": [X, "text", torch.tensor(1)]}), 2 * X)
    assert torch.equal(model(X, torch.ones(1, 2)), X + 1)  # one for all samples
    for arguments, message in (
        ((X, torch.ones(3, 1)), "argument 1 has 3 samples in dimension 0, where the batch has 4"),
        ((X[:3],), "3 samples cannot be cut into 2 equal"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    for nothing in ((), (3,), (torch.tensor(1.0),)):
        with pytest.raises(TypeError, match="no argument has samples"):
            model(*nothing)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sliced": {"msk": 0}}, "Arguments has no argument 'msk'"),
        ({"sliced": {7: 0}}, "Arguments has no argument 7"),
        ({"scalars": "max"}, "scalars must be mean or sum"),
        ({"joined": {"loss": "max"}}, "'loss' needs a dimension or mean, sum, same"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Domino(Arguments(), **options)
