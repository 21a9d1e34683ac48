"""Find sizes that the ranks do not divide, before DTensors become the parts of one rank.

The graphs that flux.compile rewrites have this rank's sizes alone. A depth of 50 may be half of
100, or the larger part of 99, whose other part is 49. In the second case a fused op would be built
for different sizes on each rank. Dynamo's graph still has DTensors with their whole sizes, so a
pass over it notes the parts of all sizes that are split unevenly, and ``may_be_uneven`` finds them
again. The notes are the same on all ranks, and so is the answer for a size of which all ranks have
an equal part.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from flux.compile.graph import same
from flux.ops import torch_internals

UNKNOWN = 0
"""Stands for the parts of a size that may be split unevenly when the graph runs."""
_parts: weakref.WeakKeyDictionary[FakeTensorMode, frozenset[int]] = weakref.WeakKeyDictionary()


def note_uneven(graph: fx.Graph) -> None:
    """Note the parts of all DTensors of Dynamo's graph, for the graphs that are made of it."""
    mode = _mode_of_compilation()
    if mode is None:
        return
    values = tree_leaves([node.meta.get("example_value") for node in graph.nodes])
    tensors = [v for v in values if isinstance(v, torch.Tensor) and torch_internals.is_dtensor(v)]
    noted = {part for tensor in tensors for part in _uneven_parts(tensor)}
    _parts[mode] = _parts.get(mode, frozenset()) | noted  # subgraphs come one by one


def noted_parts() -> tuple[int, ...]:
    """Return the parts noted for the current compilation, sorted; cache keys contain them."""
    mode = _mode_of_compilation()
    return () if mode is None else tuple(sorted(_parts.get(mode, ())))


def may_be_uneven(size: Any, mode: FakeTensorMode) -> bool:
    """Return whether ranks may have different sizes where this rank has ``size``.

    Multiples of a part count, too: dimensions may have been merged.
    """
    parts = _parts.get(mode, frozenset())
    if isinstance(size, int):
        return any(part and size % part == 0 for part in parts)
    return bool(parts)


def _mode_of_compilation() -> FakeTensorMode | None:
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def _uneven_parts(tensor: Any) -> Iterable[int]:
    """Return the sizes of the ranks' parts in each dimension where they differ."""
    spec = tensor._spec
    for dim, size in enumerate(tensor.shape):
        worlds = [
            spec.mesh.size(number)
            for number, placement in enumerate(spec.placements)
            if getattr(placement, "dim", None) in (dim, dim - tensor.dim())
        ]
        if not isinstance(size, int):
            if worlds and not same(size % math.prod(worlds), 0):
                yield UNKNOWN
            continue
        parts = {size}
        for world in worlds:
            parts = {part for whole in parts for part in _chunks(whole, world)}
        if len(parts) > 1:
            yield from parts - {0}


def _chunks(size: int, world: int) -> Iterable[int]:
    """Return the sizes of the parts that torch.chunk gives to ranks."""
    most = -(-size // world)
    return {max(0, min(most, size - rank * most)) for rank in range(world)}
