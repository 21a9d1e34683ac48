"""Rewrite functional collectives next to matrix products to ops of flux.

    all_gather -> wait (-> split, cat) -> views -> mm, addmm ...   graph_all_gather_matmul
    mm (+ mm ...) -> views (-> split, cat) -> reduce_scatter -> wait   graph_matmul_reduce_scatter
    mm (+ mm ...) -> views -> all_reduce -> wait                   graph_matmul_all_reduce

All products of one gathered tensor become one op, which also returns the gathered tensor if other
nodes read it. A sum of products becomes one product of concatenated operands: it occurs in the
backward of a gathered tensor that several layers read. A bias in front of a reduction is reduced
separately.

Decisions depend only on the graph, the size of the group and its devices. So they are equal on all
ranks, although some ranks may take their code from a cache and not run this pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from flux.compile import reporting
from flux.compile.graph import (
    FLAT,
    Writer,
    argument,
    aten,
    bias_vector,
    c10d,
    depends_on,
    erase,
    flat_descendants,
    is_product,
    operands,
    same,
    shape_arguments,
    shards_of,
    value,
    view_with,
)
from flux.compile.served import reason_unsupported
from flux.compile.uneven import may_be_uneven
from flux.ops import functional as functional  # defines the ops

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_KINDS = {
    c10d.all_gather_into_tensor.default: GATHER,
    c10d.reduce_scatter_tensor.default: SCATTER,
    c10d.all_reduce.default: REDUCE,
}


class Leave(Exception):
    """Raised to leave a collective as it is; the text is the reason."""


def fuse(graph: fx.Graph) -> int:
    """Rewrite all eligible collectives; return how many are now part of our ops."""
    fused, collectives = 0, 0
    for node in list(graph.nodes):
        kind = _KINDS.get(node.target) if node.op == "call_function" else None
        if kind is None:
            continue
        collectives += 1
        reporting.note_found(kind)
        try:
            what = _FUSE[kind](node)
        except Leave as reason:
            reporting.note_left(kind, str(reason))
        else:
            fused += 1
            reporting.note_fused(what)
    reporting.note_graph(fused, collectives)
    return fused


def _wait_of(collective: fx.Node) -> fx.Node:
    waits = [user for user in collective.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1:
        raise Leave("its result must have exactly one wait")
    if any(user is not waits[0] and user.op != "output" for user in collective.users):
        raise Leave("its result is read without waiting")
    return waits[0]


def _mode(node: fx.Node) -> FakeTensorMode:
    mode = getattr(value(node), "fake_mode", None)
    if not isinstance(mode, FakeTensorMode):
        raise Leave("the graph has no shapes for its tensors")
    return mode


def _writer(before: fx.Node) -> Writer:
    return Writer(before, _mode(before))


def _check(group_name: Any, *tensors: fx.Node) -> None:
    reason = reason_unsupported(group_name, [value(tensor) for tensor in tensors])
    if reason is not None:
        raise Leave(reason)


def _check_even(before: fx.Node, sizes: Iterable[Any]) -> None:
    """Raise Leave unless all ranks have these sizes, of which an op would have W times as much."""
    mode = _mode(before)
    if any(may_be_uneven(size, mode) for size in sizes):
        raise Leave("the ranks do not divide a size of its products")


def _check_reduced(group_name: Any, wait: fx.Node, products: list[fx.Node]) -> None:
    """Raise Leave unless an op can compute a reduced sum of these products."""
    _check(group_name, *(node for p in products for node in operands(p)[1:]))
    _check_even(wait, (value(operands(product)[1]).shape[1] for product in products))


# -- all_gather -> products ------------------------------------------------------------------------


def _fuse_gather(gather: fx.Node) -> str:
    shard, group_name = gather.args[0], argument(gather, 2, "group_name")
    assert isinstance(shard, fx.Node)
    wait = _wait_of(gather)
    whole, dim, products = _readers(wait)
    _check(group_name, shard, *(operands(product)[2] for product in products))
    _check_even(wait, (value(product).shape[1] for product in products))
    reach = flat_descendants(whole)
    inside = {*reach, *products}
    others = [user for node in reach for user in node.users if user not in inside]
    others += [product for product in products if operands(product)[2] in reach]

    writer = _writer(min(products))
    pairs = [(operands(product)[0], product) for product in products]
    biases = [b and bias_vector(b, product, writer) for b, product in pairs]
    weights = [operands(product)[2] for product in products]
    call = writer.call(
        torch.ops.flux.graph_all_gather_matmul.default,
        shard,
        weights,
        [bias for bias in biases if bias is not None],
        [bias is not None for bias in biases],
        dim,
        group_name,
        bool(others),
    )
    for number, product in enumerate(products):
        _replace_product(product, writer.item(call, number), writer)
    if others:
        gathered = writer.item(call, len(products))
        for user in list(whole.users):
            view_with(user, whole, gathered)
    pieces = [node for piece in whole.all_input_nodes for node in piece.all_input_nodes]
    erase([*products, *reach, *whole.all_input_nodes, *pieces, wait, gather])
    return f"{GATHER} -> matmul"


def _readers(wait: fx.Node) -> tuple[fx.Node, int, list[fx.Node]]:
    """Return (gathered tensor, its gathered dimension, the products of its rows)."""
    wholes = [(wait, 0)]
    for cat in {c for user in wait.users for piece in user.users for c in (piece, *piece.users)}:
        shards = shards_of(cat, wait)
        if shards is not None and shards[1] == 0:
            wholes.append((cat, argument(cat, 1, "dim", 0) % value(cat).dim()))
    best: tuple[fx.Node, int, list[fx.Node]] = (wait, 0, [])
    reason = "no matrix product reads its rows"
    for whole, dim in wholes:
        products = _products_of(whole, wait)
        if not products:
            continue
        if dim == value(whole).dim() - 1:
            reason = (
                "the gathered dimension is the depth K of the product: all of it is needed at once"
            )
        elif whole is not wait and not _only_for(wait, whole):
            reason = "it is read both as gathered and concatenated along another dimension"
        elif len(products) > len(best[2]):
            best = (whole, dim, products)
    if not best[2]:
        raise Leave(reason)
    return best


def _only_for(wait: fx.Node, cat: fx.Node) -> bool:
    """Return whether the gathered tensor is split only for this concatenation.

    It must have no other readers.
    """
    pieces: Any = cat.args[0]
    between = {*pieces, *(node for piece in pieces for node in piece.all_input_nodes)}
    return all(user in between for user in wait.users)


def _products_of(whole: fx.Node, wait: fx.Node) -> list[fx.Node]:
    """Return products whose left operand is ``whole`` as rows.

    Their other operands must not depend on it.
    """
    depth = value(whole).shape[-1]
    products = []
    for node in flat_descendants(whole):
        if value(node).dim() != 2 or not same(value(node).shape[1], depth):
            continue
        for user in node.users:
            if not is_product(user):
                continue
            bias, a, b = operands(user)
            rest = [b] if bias is None else [bias, b]
            if a is node and not depends_on(rest, wait):
                products.append(user)
    return sorted(products)


def _replace_product(product: fx.Node, result: fx.Node, writer: Writer) -> None:
    """Let the readers of a product [M, N] read a result [..., N] of more dimensions."""
    for user in list(product.users):
        if value(result).dim() > 2 and user.target in (aten.reshape.default, aten.view.default):
            view_with(user, product, result)
    if not product.users:
        return
    if value(result).dim() > 2:
        columns = value(product).shape[1]
        result = writer.call(aten.reshape.default, result, [-1, columns])
    product.replace_all_uses_with(result)


# -- products -> reduce_scatter, all_reduce --------------------------------------------------------


def _sum_of_products(node: fx.Node, reader: fx.Node) -> list[fx.Node]:
    """Return the products whose sum is ``node``, in another shape.

    ``reader`` is its only reader.
    """
    if any(user is not reader for user in node.users):
        raise Leave("the product has other readers")
    if is_product(node):
        return [node]
    if node.target in FLAT and isinstance(node.args[0], fx.Node):
        return _sum_of_products(node.args[0], node)
    if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        parts = node.args[:2]
        if all(isinstance(p, fx.Node) and value(p).shape == value(node).shape for p in parts):
            return [p for part in parts for p in _sum_of_products(cast(fx.Node, part), node)]
    if node.op == "call_function":
        raise Leave(f"what is reduced is no matrix product, but {node.target}")
    raise Leave("what is reduced is no matrix product of this graph")


def _one_product(products: list[fx.Node], writer: Writer) -> tuple[fx.Node, fx.Node]:
    """Return (A, B) whose product is the sum of all products."""
    pairs = [operands(product)[1:] for product in products]
    if len(pairs) == 1:
        return pairs[0]
    a = writer.call(aten.cat.default, [a for a, _ in pairs], 1)
    return a, writer.call(aten.cat.default, [b for _, b in pairs], 0)


def _add_biases(
    result: fx.Node, products: list[fx.Node], op: str, group_name: str, writer: Writer
) -> fx.Node:
    """Add the reduced biases: each rank's sum may have had its own bias."""
    for product in products:
        bias = operands(product)[0]
        if bias is not None:
            total = writer.call(c10d.all_reduce.default, bias, op, group_name)
            total = writer.call(c10d.wait_tensor.default, total)
            result = writer.call(aten.add.Tensor, result, total)
    return result


def _reduced(collective: fx.Node, name_at: int) -> tuple[fx.Node, str, str, fx.Node]:
    source, op = cast(fx.Node, collective.args[0]), str(argument(collective, 1, "reduce_op"))
    group_name = str(argument(collective, name_at, "group_name"))
    if op not in ("sum", "avg"):
        raise Leave(f"it reduces by {op!r}, and flux by 'sum' and 'avg'")
    return source, op, group_name, _wait_of(collective)


def _finish(collective: fx.Node, wait: fx.Node, result: fx.Node, products: list[fx.Node]) -> None:
    wait.replace_all_uses_with(result)
    collective.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wait)
    chain: list[fx.Node] = [wait, collective]
    stop = set(products)
    for node in chain:  # grows: all nodes between the products and the collective
        if node not in stop:
            chain += [n for n in node.all_input_nodes if n not in chain and n.op != "placeholder"]
    erase(chain)


def _fuse_scatter(scatter: fx.Node) -> str:
    source, op, group_name, wait = _reduced(scatter, 3)
    cut = shards_of(source)
    whole, dim, reader = source, 0, scatter
    if cut is not None and argument(source, 1, "dim", 0) == 0 and len(source.users) == 1:
        whole, dim = cut
        reader = next(iter(whole.users))
        if any(u is not reader for u in whole.users) and reader.target is not aten.slice.Tensor:
            raise Leave("the product has other readers")
    products = _sum_of_products_of(whole, reader, source)
    shape = shape_arguments(whole)
    columns = value(products[0]).shape[1]
    if shape is None or not same(value(whole).shape[-1], columns):
        raise Leave("its rows are not the rows of the product")
    last = dim == value(whole).dim() - 1
    if last and any(operands(product)[0] is not None for product in products):
        raise Leave("a bias of columns that are scattered is added before")
    _check_reduced(group_name, wait, products)
    writer = _writer(wait)
    a, b = _one_product(products, writer)
    if value(whole).dim() != 2:
        a = writer.call(aten.reshape.default, a, [*shape[:-1], value(a).shape[1]])
    run = torch.ops.flux.graph_matmul_reduce_scatter.default
    result = writer.call(run, a, b, op, dim, group_name)
    result = _add_biases(result, products, op, group_name, writer)
    _finish(scatter, wait, result, products)
    return f"matmul -> {SCATTER}"


def _sum_of_products_of(whole: fx.Node, reader: fx.Node, source: fx.Node) -> list[fx.Node]:
    """Return ``_sum_of_products`` of a node read once, or by the slices of one concatenation."""
    if whole is not source and reader.target is aten.slice.Tensor:
        if any(source not in user.users for user in whole.users):
            raise Leave("the product has other readers")
        if is_product(whole):
            return [whole]
        if whole.target in FLAT and isinstance(whole.args[0], fx.Node):
            return _sum_of_products(whole.args[0], whole)
        raise Leave(f"what is reduced is no matrix product, but {whole.target}")
    return _sum_of_products(whole, reader)


def _fuse_reduce(reduce: fx.Node) -> str:
    source, op, group_name, wait = _reduced(reduce, 2)
    products = _sum_of_products(source, reduce)
    shape = shape_arguments(source)
    if shape is None:
        raise Leave("its shape is not known")
    _check_reduced(group_name, wait, products)
    writer = _writer(wait)
    a, b = _one_product(products, writer)
    result = writer.call(torch.ops.flux.graph_matmul_all_reduce.default, a, b, op, group_name)
    result = _add_biases(result, products, op, group_name, writer)
    if value(source).dim() != 2:
        result = writer.call(aten.reshape.default, result, shape)
    _finish(reduce, wait, result, products)
    return f"matmul -> {REDUCE}"


_FUSE: dict[str, Callable[[fx.Node], str]] = {
    GATHER: _fuse_gather,
    SCATTER: _fuse_scatter,
    REDUCE: _fuse_reduce,
}
