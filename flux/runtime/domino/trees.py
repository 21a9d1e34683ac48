"""Trees of tensors: arguments that are cut along the batch, and results of slices that are joined.

A tree is what torch.utils._pytree knows (tuples, lists, dicts, named tuples, whatever is registered
there), and besides dataclasses, mappings, and subclasses of list and tuple that are not registered.

Joining goes by types and shapes only, never by the values of tensors: so all ranks decide alike.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

HOWS = ("mean", "sum", "same")


class _Node(NamedTuple):
    """A container, taken apart."""

    kind: Any
    children: dict[Any, Any]
    build: Callable[[Sequence[Any]], Any]


def _node(value: Any) -> _Node | None:
    """Return a container taken apart; None for a leaf."""
    if isinstance(value, (torch.Tensor, torch.Size, type)):
        return None
    if type(value) in (dict, OrderedDict, defaultdict):  # whose keys may come in any order
        return _items_and_fields(value)
    if not pytree.tree_is_leaf(value):
        return _registered(value)
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return _items_and_fields(value)
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    return None


def _registered(value: Any) -> _Node:
    def is_child(part: Any) -> bool:
        return part is not value

    parts, spec = pytree.tree_flatten(value, is_leaf=is_child)
    names: list[Any] = list(range(len(parts)))
    try:
        keys = [path[-1] for path, _ in pytree.tree_flatten_with_path(value, is_leaf=is_child)[0]]
        names = [_name(key) for key in keys]
    except ValueError:  # registered without names
        pass
    return _Node(
        spec, dict(zip(names, parts, strict=True)), lambda parts: pytree.tree_unflatten(parts, spec)
    )


def _name(key: Any) -> Any:
    """Return the name in a key of torch.utils._pytree."""
    return next((getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)), str(key))


def _items_and_fields(value: Any) -> _Node:
    """Take apart a mapping, a dataclass, or both in one, such as a model's output."""
    items = dict(value) if isinstance(value, Mapping) else {}
    is_dataclass = dataclasses.is_dataclass(value)
    fields = [f.name for f in dataclasses.fields(value)] if is_dataclass else []
    attributes = {name: getattr(value, name) for name in fields if hasattr(value, name)}

    def build(parts: Sequence[Any]) -> Any:
        built = copy.copy(value) if not items else _copied_mapping(value)
        for key, part in zip(items, parts, strict=False):
            built[key] = part
        for name, part in zip(attributes, parts[len(items) :], strict=True):
            object.__setattr__(built, name, part)  # frozen ones, too
        return built

    children = {**items, **{_Field(name): part for name, part in attributes.items()}}
    return _Node(type(value), children, build)


class _Field(str):
    """The name of a field, which differs from an item's of the same name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Field) and str.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(("field", str(self)))


def _copied_mapping(value: Any) -> Any:
    """Return a copy of a mapping, made without its constructor, which may want arguments."""
    if not isinstance(value, dict):
        return copy.copy(value)
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    built: Any = type(value).__new__(type(value))
    if isinstance(value, defaultdict):
        built.default_factory = value.default_factory
    if hasattr(value, "__dict__"):
        vars(built).update(vars(value))
    for key, part in value.items():
        base.__setitem__(built, key, part)
    return built


def _sequence(value: Any) -> _Node:
    def build(parts: Sequence[Any]) -> Any:
        if isinstance(value, tuple):
            built = tuple.__new__(type(value), parts)
            if hasattr(value, "__dict__"):
                vars(built).update(vars(value))
            return built
        copied: Any = copy.copy(value)
        copied[:] = parts
        return copied

    return _Node(type(value), dict(enumerate(value)), build)


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with what a function returns in place of each leaf."""
    node = _node(tree)
    if node is None:
        return function(tree)
    return node.build([mapped(child, function) for child in node.children.values()])


def leaves(tree: Any) -> Iterator[Any]:
    """Return the leaves of a tree."""
    node = _node(tree)
    if node is None:
        yield tree
    else:
        for child in node.children.values():
            yield from leaves(child)


_Path = tuple[str, ...]


class Joiner:
    """Joins the results of slices.

    Args:
        hows: for parts of a result, by their path such as "loss" or "0.aux": the dimension of their
            samples, "mean", "sum", or "same" (that of the first slice).
        scalars: "mean" or "sum": for tensors without dimensions; None: they need an entry in hows.
        shared: returns the ids of tensors that belong to no slice, such as parameters.
    """

    def __init__(
        self,
        dim: int,
        size: int,
        hows: Mapping[str, int | str],
        scalars: str | None,
        shared: Callable[[], Collection[int]],
    ) -> None:
        self.dim, self.size, self.hows, self.scalars, self.shared = dim, size, hows, scalars, shared
        self._joined: dict[tuple[Any, ...], tuple[Sequence[Any], Any]] = {}

    def join(self, results: Sequence[Any], path: _Path = ()) -> Any:
        """Return one result for those of all slices."""
        place = (path if self._how(path) is not None else (), *map(id, results))
        if place not in self._joined:  # equal objects stay one object in the result
            # With the results, which then live as long as their ids are used.
            self._joined[place] = results, self._join(results, path)
        return self._joined[place][1]

    def _how(self, path: _Path) -> int | str | None:
        """Return how the caller wants a part joined, or the container of the part."""
        for length in range(len(path), -1, -1):
            how = self.hows.get(".".join(path[:length]))
            if how is not None:
                return how
        return None

    def _join(self, results: Sequence[Any], path: _Path) -> Any:
        first = results[0]
        if self._how(path) == "same":
            return first
        nodes = [node for node in map(_node, results) if node is not None]
        if len({type(result) for result in results}) > 1 and not all(
            isinstance(result, torch.Tensor) for result in results
        ):
            types = ", ".join(type(result).__name__ for result in results)
            raise TypeError(f"slices return different types as {_text(path)}: {types}")
        if nodes:
            return self._join_nodes(nodes, path)
        if isinstance(first, torch.Tensor):
            return self._join_tensors(results, path)
        if all(result is first or _agree(result, first) for result in results):
            return first
        raise TypeError(
            f"slices return different values as {_text(path)}, of type {type(first).__name__}: "
            "only tensors are joined; register a container of tensors with torch.utils._pytree, "
            f'or say joined={{"{".".join(path)}": "same"}} to take the first'
        )

    def _join_nodes(self, nodes: Sequence[_Node], path: _Path) -> Any:
        first = nodes[0]
        for node in nodes:
            if node.kind != first.kind or node.children.keys() != first.children.keys():
                here, there = (list(map(str, n.children)) for n in (first, node))
                raise TypeError(f"slices differ in what {_text(path)} has: {here} and {there}")
        parts = [
            self.join([node.children[key] for node in nodes], (*path, str(key)))
            for key in first.children
        ]
        return first.build(parts)

    def _join_tensors(self, tensors: Sequence[torch.Tensor], path: _Path) -> torch.Tensor:
        first, how = tensors[0], self._how(path)
        if how is None and all(tensor is first for tensor in tensors):
            return self._one_tensor(first, path)
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise TypeError(
                    f"slices return {_text(path)} as {first.dtype} on {first.device} and "
                    f"{tensor.dtype} on {tensor.device}"
                )
        if how is None and first.ndim == 0:
            how = self.scalars
        if how in ("mean", "sum"):
            return _reduced(tensors, str(how), path)
        if how is None and first.ndim == 0:
            raise TypeError(
                f"{_text(path)} is a scalar of each slice: say how they are joined, such as "
                f'Domino(..., scalars="mean") or joined={{"{".".join(path)}": "sum"}}'
            )
        if how is None and not self._has_samples(first):
            if all(_same_memory(tensor, first) for tensor in tensors):
                return first  # views of one tensor, which was not cut
            raise TypeError(
                f"{_text(path)} has the shape {list(first.shape)} in a slice of {self.size} "
                f"samples, which are not its dimension {self.dim}: {_hint(path)}"
            )
        dim = self.dim if how is None else int(how)
        shapes = [list(tensor.shape) for tensor in tensors]
        for shape in shapes:
            if not -len(shape) <= dim < len(shape):
                raise TypeError(f"{_text(path)} has no dimension {dim}: its shape is {shape}")
            del shape[dim]
        if any(shape != shapes[0] for shape in shapes):
            raise TypeError(
                f"slices return {_text(path)} of shapes that cannot be joined along dimension "
                f"{dim}: {', '.join(str(list(tensor.shape)) for tensor in tensors)}"
            )
        return torch.cat(list(tensors), dim)

    def _has_samples(self, tensor: torch.Tensor) -> bool:
        inside = -tensor.ndim <= self.dim < tensor.ndim
        return inside and tensor.shape[self.dim] == self.size

    def _one_tensor(self, tensor: torch.Tensor, path: _Path) -> torch.Tensor:
        """Return a tensor that every slice returns, if it cannot be one that a slice has filled."""
        if self._has_samples(tensor) and id(tensor) not in self.shared():
            raise TypeError(
                f"every slice returns the same tensor as {_text(path)}, as long as a slice has "
                f"samples, which is neither an argument nor a parameter: {_hint(path)}"
            )
        return tensor


def _agree(a: Any, b: Any) -> bool:
    """Return whether two values that are not tensors are equal; NaNs are."""
    if type(a) is float and type(b) is float and a != a and b != b:
        return True
    same = a == b
    return getattr(same, "shape", ()) == () and bool(same)  # an array is not one answer


def _reduced(tensors: Sequence[torch.Tensor], how: str, path: _Path) -> torch.Tensor:
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise TypeError(f"slices return {_text(path)} of different shapes: no {how}")
    if how == "mean" and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise TypeError(f"{_text(path)} is of {tensors[0].dtype}, which has no mean")
    total = sum(tensors[1:], start=tensors[0])
    return total / len(tensors) if how == "mean" else total


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or a.shape != b.shape or a.stride() != b.stride():
        return False
    same: bool = a.data_ptr() == b.data_ptr() and a.numel() > 0
    return same


def _text(path: _Path) -> str:
    return f"{'.'.join(path)!r} of the result" if path else "the result"


def _hint(path: _Path) -> str:
    return (
        f'say joined={{"{".".join(path)}": ...}}: the dimension of its samples, "mean", "sum", or '
        '"same" if it is the same for all'
    )
