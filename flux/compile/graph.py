"""Inspect and extend graphs of aten operators and functional collectives."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Ops that keep elements in order: [b, s, K] as [b * s, K], and back.
FLAT = frozenset(
    (
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.clone.default,
    )
)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_WITH_SHAPE = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    val: torch.Tensor = node.meta["val"]
    return val


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to be equal, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def argument(node: fx.Node, number: int, name: str, default: Any = None) -> Any:
    """Return an argument, given by position or by name."""
    return node.args[number] if len(node.args) > number else node.kwargs.get(name, default)


def is_product(node: fx.Node) -> bool:
    """Return whether a node is A @ B, or bias + A @ B unscaled with one bias per column.

    A bias that addmm spreads over all columns, [1] or [], is one per column, too. One with several
    rows is not, [M, N] or [M, 1].
    """
    if node.target is aten.mm.default:
        return True
    if node.target is not aten.addmm.default:
        return False
    plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
    *rows, columns = (1, 1, *value(node.args[0]).shape)  # type: ignore[arg-type]
    n = value(node).shape[1]
    spread = same(columns, n) or (same(columns, 1) and isinstance(n, int))
    return bool(plain) and spread and all(same(size, 1) for size in rows)


def operands(product: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """Return (bias or None, A, B) of ``is_product``."""
    if product.target is aten.mm.default:
        return None, *product.args  # type: ignore[return-value]
    return product.args  # type: ignore[return-value]


def shards_of(cat: fx.Node, whole: fx.Node | None = None) -> tuple[fx.Node, int] | None:
    """Return the tensor that a concatenation splits and joins again, and the split dimension.

    All pieces must be in order, of equal size, and without other uses. ``whole``: only of that
    tensor.
    """
    if cat.target is not aten.cat.default:
        return None
    pieces: Any = cat.args[0]
    if not pieces or not all(isinstance(p, fx.Node) and len(p.users) == 1 for p in pieces):
        return None
    first = pieces[0]
    source: fx.Node
    if all(p.target is operator.getitem for p in pieces):
        split = first.args[0]
        if split.target not in SPLITS or any(p.args != (split, i) for i, p in enumerate(pieces)):
            return None
        if len(split.users) != len(pieces):
            return None
        source, dim = split.args[0], argument(split, 2, "dim", 0)
    elif all(p.target is aten.slice.Tensor for p in pieces):
        source, dim = first.args[0], argument(first, 1, "dim", 0)
        size = value(first).shape[dim]
        for i, piece in enumerate(pieces):
            if piece.args[0] is not source or argument(piece, 1, "dim", 0) != dim:
                return None
            if not same(argument(piece, 2, "start", 0) or 0, i * size):
                return None
            if argument(piece, 4, "step", 1) != 1:
                return None
    else:
        return None
    if whole is not None and source is not whole:
        return None
    dim = dim % value(source).dim()
    sizes = [value(p).shape[dim] for p in pieces]
    if not all(same(s, sizes[0]) for s in sizes):
        return None
    if not same(sizes[0] * len(pieces), value(source).shape[dim]):
        return None
    return source, dim


def flat_descendants(node: fx.Node) -> list[fx.Node]:
    """Return the node, and all nodes with the same elements in the same order in another shape."""
    nodes = [node]
    for each in nodes:
        nodes += [user for user in each.users if user.target in FLAT and user.args[0] is each]
    return nodes


def depends_on(nodes: Iterable[fx.Node], origin: fx.Node) -> bool:
    """Return whether any of the nodes is, or is computed from, ``origin``."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is origin:
            return True
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def shape_arguments(node: fx.Node) -> list[Any] | None:
    """Return a node's shape as arguments of a reshape: numbers, or nodes for symbolic sizes."""
    shape = value(node).shape
    if all(isinstance(size, int) for size in shape):
        return list(shape)
    if node.target in _WITH_SHAPE:
        return list(node.args[1])  # type: ignore[arg-type]
    part = node.args[0] if node.target is aten.add.Tensor else None
    if isinstance(part, fx.Node) and part.target in _WITH_SHAPE:
        return list(part.args[1])  # type: ignore[arg-type]
    return None


def bias_vector(bias: fx.Node, product: fx.Node, writer: Writer) -> fx.Node:
    """Return the bias of ``is_product`` in the shape [N]."""
    shape, n = value(bias).shape, value(product).shape[1]
    if len(shape) == 1 and same(shape[0], n):
        return bias
    flat = writer.call(aten.reshape.default, bias, [-1])
    return flat if same(value(flat).shape[0], n) else writer.call(aten.expand.default, flat, [n])


class Writer:
    """Adds nodes with fake values to a graph, before a given node."""

    def __init__(self, before: fx.Node, mode: FakeTensorMode) -> None:
        self.graph = before.graph
        self.before = before
        self.mode = mode

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Add a call of an operator."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def item(self, several: fx.Node, number: int) -> fx.Node:
        """Add a node for one of the results of a call."""
        return self.call(operator.getitem, several, number)


def view_with(user: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Let a view read its elements from another node, whose strides may differ."""
    user.replace_input_with(old, new)
    if user.target is aten.view.default:
        user.target = aten.reshape.default


def erase(nodes: Sequence[fx.Node]) -> None:
    """Remove nodes that have no users left, including collectives, which other passes keep."""
    left = list(dict.fromkeys(nodes))
    while True:
        dead = [node for node in left if not node.users]
        if not dead:
            return
        for node in dead:
            node.graph.erase_node(node)
            left.remove(node)
