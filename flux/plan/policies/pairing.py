"""Pair the operators of a layer's forward with those of a layer's backward.

H. Wang et al., arXiv 2411.15871, section 4.2. A *pairing* cuts an order of the forward operators
and an order of the backward operators into segments; two segments run side by side, and the next
two begin when both have ended. With T the least time for the operators before a segment:

    T(empty, empty) = 0
    T(f', b') = min over f, b of T(f, b) + barrier + P(f' - f, b' - b)

f and b are *down-sets*: sets of operators that contain all that their members depend on. The paper
enumerates the orders of each graph, and cuts each pair of orders. Each order's beginnings are
down-sets and each chain of down-sets is an order, so the recurrence over down-sets has the same
minimum. The backward of a layer has thousands of orders, but about a hundred down-sets, because
only gradients of weights can move.

P of two segments: the two operators that run at a time progress at 1 / (2 - OEF) each
(``flux.plan.cost``), or if they share a stream, the one that is ready first, forward's before
backward's; what is left of the longer side runs by itself. Within a segment all orders are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import networkx as nx

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.graph import Operator

Segment = tuple[Hashable, ...]
"""Operators of one strand, in order."""
SegmentCost = Callable[[Segment, Segment], float]
"""Time of two segments side by side, one of which may be empty, in ms."""
_Order = tuple[int, ...]
"""Numbers of operators of one strand, in order."""
_Segments = tuple[tuple[_Order, _Order], ...]
_Table = tuple[tuple[float, ...], ...]

EXACT = 1_000_000
"""Pairs of orders that are tried at most, where segments may have any length."""
_SHORTER = 1 - 1e-9
"""Times that differ by less are equal, and the first one counts: rounding must not choose."""
LONGEST = 4
"""Operators of a segment of graphs with more orders. The two orders found so, and those of the
graphs themselves, are then cut into segments of any length: under a collective that takes longer
than many operators, their order matters little."""


class Pairing(NamedTuple):
    """Segments of a forward and a backward that run side by side.

    Attributes:
        makespan: time of all segments and the barriers after them, in ms.
        segments: (forward, backward), in order; one of the two may be empty.
    """

    makespan: float
    segments: tuple[tuple[Segment, Segment], ...]

    @property
    def forward(self) -> Segment:
        """The order of the forward operators."""
        return tuple(node for segment, _ in self.segments for node in segment)

    @property
    def backward(self) -> Segment:
        """The order of the backward operators."""
        return tuple(node for _, segment in self.segments for node in segment)


def factor(cost: CostModel, a: Any, b: Any) -> float:
    """Return the OEF of two operators of different strands.

    Operators of one resource share a stream, and one waits for the other: minus infinity. Of nodes
    that are no ``Operator`` the cost model alone says it.
    """
    if not (isinstance(a, Operator) and isinstance(b, Operator)):
        return cost.oef(a, b)
    if a.resource == b.resource:
        return -math.inf
    return cost.oef(b, a) if a.is_collective and not b.is_collective else cost.oef(a, b)


def pair(
    forward_graph: nx.DiGraph,
    backward_graph: nx.DiGraph,
    cost: CostModel | SegmentCost,
    *,
    barrier: float = 0.0,
    longest: int | None = None,
) -> Pairing:
    """Return the pairing with the least makespan.

    Args:
        forward_graph: operators of a forward pass; edges lead to what depends on them. A node has
            the operator as attribute ``op``, or is one.
        backward_graph: likewise of a backward pass.
        cost: of operators, or a function that returns the time of two segments, of nodes.
        barrier: time of the barrier after each pair of segments, in ms.
        longest: most operators of a segment; by default there is no limit. If more than EXACT pairs
            of orders would have to be tried, orders are searched with segments of at most LONGEST.

    Raises:
        TypeError: graphs are no networkx.DiGraph, or cost is neither of the two.
        ValueError: a graph has a cycle; barrier, longest or a cost is out of range.
    """
    for graph in (forward_graph, backward_graph):
        if not isinstance(graph, nx.DiGraph):
            raise TypeError(f"a graph must be a networkx.DiGraph, got {type(graph).__name__}")
        if not nx.is_directed_acyclic_graph(graph):
            raise ValueError("operators of a pairing depend on each other in a cycle")
    if not callable(cost) and not (hasattr(cost, "solo") and hasattr(cost, "oef")):
        raise TypeError(
            "cost must have solo(op) and oef(a, b), or be a function of two segments, "
            f"got {type(cost).__name__}"
        )
    if not math.isfinite(barrier) or barrier < 0:
        raise ValueError(f"barrier must be a time of at least 0, got {barrier!r}")
    if longest is not None:
        longest = checked_integer("longest", longest, 1)
    forward, backward = _Strand(forward_graph), _Strand(backward_graph)
    needs = forward.needs, backward.needs
    if hasattr(cost, "solo"):
        model = cast(CostModel, cost)
        makespan, order = _searched(*needs, *_tables(forward, backward, model), barrier, longest)
    else:
        of_segments: SegmentCost = cost
        makespan, order = _best(
            *needs, lambda f, b: of_segments(forward.named(f), backward.named(b)), barrier, longest
        )
    return Pairing(makespan, tuple((forward.named(f), backward.named(b)) for f, b in order))


class _Strand:
    """The operators of a graph, numbered in topological order."""

    def __init__(self, graph: nx.DiGraph) -> None:
        self.nodes = list(nx.topological_sort(graph))
        self.ops: list[Any] = [graph.nodes[node].get("op", node) for node in self.nodes]
        place = {node: number for number, node in enumerate(self.nodes)}
        self.needs = tuple(
            sum(1 << place[p] for p in graph.predecessors(node)) for node in self.nodes
        )

    def named(self, order: _Order) -> Segment:
        return tuple(self.nodes[number] for number in order)


def _best(
    forward: Sequence[int],
    backward: Sequence[int],
    price: _Price,
    barrier: float,
    longest: int | None,
    times: Sequence[Sequence[float]] | None = None,
) -> tuple[float, _Segments]:
    """Return ``_shortest`` of two graphs, with segments as ``pair`` says."""

    def found(f: _Downsets, b: _Downsets) -> tuple[float, _Segments]:
        return _shortest(f, b, price, barrier, times)

    if longest is not None:
        return found(_Downsets(forward, longest), _Downsets(backward, longest))
    downsets = _Downsets(forward, len(forward), EXACT)
    other = _Downsets(backward, len(backward), EXACT // downsets.tried)
    if downsets.tried * other.tried <= EXACT:
        return found(downsets, other)
    best = found(_Downsets(forward, LONGEST), _Downsets(backward, LONGEST))
    for cut in (best[1], ((range(len(forward)), range(len(backward))),)):
        chains = (_chain([n for both in cut for n in both[side]]) for side in (0, 1))
        other_best = found(*(_Downsets(needs, len(needs)) for needs in chains))
        best = other_best if other_best[0] < best[0] * _SHORTER else best
    return best


def _chain(order: Sequence[int]) -> list[int]:
    """Return what operators need of which each depends on the one before it."""
    needs = [0] * len(order)
    for before, after in pairwise(order):
        needs[after] = 1 << before
    return needs


class _Downsets:
    """The down-sets of a graph as bit masks, and the segments that lead from one to another.

    Args:
        needs: of each operator, a bit mask of those that it depends on.
        longest: most operators of a segment.
        most: orders of segments; when there are more, the search ends and ``tried`` says so.
    """

    def __init__(self, needs: Sequence[int], longest: int, most: float = math.inf) -> None:
        self.needs = needs
        self.orders: dict[int, list[_Order]] = {0: [()]}
        self.tried, self.most = 1, most
        self.after: dict[int, list[int]] = {}
        pending = [0]
        while pending and self.tried <= most:
            mask = pending.pop()
            if mask not in self.after:
                self.after[mask] = self._reach(mask, longest)
                pending += [mask | segment for segment in self.after[mask]]

    def _reach(self, mask: int, longest: int) -> list[int]:
        """Return the segments that can follow a down-set, the empty one first."""
        reached, grown = {0: None}, [0]
        for _ in range(longest):
            wider: dict[int, None] = {}
            for segment in grown:
                for number, needs in enumerate(self.needs):
                    bit = 1 << number
                    held = mask | segment
                    if not held & bit and not needs & ~held:
                        wider[segment | bit] = None
            grown = list(wider)
            reached |= wider
            for segment in grown:
                self._order(segment)
                if self.tried > self.most:
                    return []
        return list(reached)

    def _order(self, segment: int) -> list[_Order]:
        """Return all orders of a segment's operators. They do not depend on what comes before."""
        known = self.orders.get(segment)
        if known is None:
            known = []
            for number in range(len(self.needs)):
                bit = 1 << number
                later = any(self.needs[n] & bit for n in _bits(segment & ~bit))
                if segment & bit and not later:  # the last one
                    known += [(*order, number) for order in self._order(segment & ~bit)]
            self.orders[segment] = known
            self.tried += len(known)
        return known


def _bits(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


_Price = Callable[[_Order, _Order], float]


def _tables(forward: _Strand, backward: _Strand, cost: CostModel) -> tuple[_Table, _Table]:
    """Return times of forward and of backward operators, and 2 - OEF of every two."""
    solo = tuple(tuple(float(cost.solo(op)) for op in side.ops) for side in (forward, backward))
    slowed = tuple(
        tuple(2.0 - float(factor(cost, f, b)) for b in backward.ops) for f in forward.ops
    )
    for side, times in zip((forward, backward), solo, strict=True):
        for node, time in zip(side.nodes, times, strict=True):
            if not 0 <= time < math.inf:
                raise ValueError(f"{node}: solo must be a time of at least 0, got {time!r}")
    for f, row in zip(forward.nodes, slowed, strict=True):
        for b, slow in zip(backward.nodes, row, strict=True):
            if not slow >= 1:
                raise ValueError(f"{f} beside {b}: oef must be at most 1, got {2.0 - slow!r}")
    return solo, slowed


@lru_cache(maxsize=256)
def _searched(
    forward: tuple[int, ...],
    backward: tuple[int, ...],
    solo: _Table,
    slowed: _Table,
    barrier: float,
    longest: int | None,
) -> tuple[float, _Segments]:
    """Return ``_shortest`` of two graphs given as numbers.

    Remembered: a search over plans asks for the same layer in steps of many lengths.
    """

    def price(f: _Order, b: _Order) -> float:
        return time_together(f, b, solo, slowed)

    return _best(forward, backward, price, barrier, longest, solo)


def time_together(
    f: Sequence[int],
    b: Sequence[int],
    solo: Sequence[Sequence[float]],
    slowed: Sequence[Sequence[float]],
    starts: list[tuple[float, int, int]] | None = None,
) -> float:
    """Return the time of two segments side by side.

    ``solo`` has times by side, ``slowed`` 2 - OEF of every two. ``starts`` gets (start, 0 for
    forward or 1 for backward, number) of each operator.
    """
    now, i, j = 0.0, 0, 0
    of_f, of_b = solo
    left_f = of_f[f[0]] if f else 0.0  # of the operator that runs
    left_b = of_b[b[0]] if b else 0.0
    ends_f, ends_b = len(f), len(b)
    ready_f = ready_b = 0.0
    began: list[list[float]] = [[0.0], [0.0]]
    while i < ends_f and j < ends_b:
        slow = slowed[f[i]][b[j]]
        if slow < math.inf:
            both = left_f if left_f < left_b else left_b
            now += both * slow
            left_f -= both
            left_b -= both
        elif ready_f <= ready_b:  # one stream: the other one waits, and has not begun
            now += left_f
            left_f = 0.0
            began[1][j] = now
        else:
            now += left_b
            left_b = 0.0
            began[0][i] = now
        if left_f <= 0.0:
            i += 1
            left_f = of_f[f[i]] if i < ends_f else 0.0
            ready_f = now
            began[0].append(now)
        if left_b <= 0.0:
            j += 1
            left_b = of_b[b[j]] if j < ends_b else 0.0
            ready_b = now
            began[1].append(now)
    for side, numbers, place, left in ((0, f, i, left_f), (1, b, j, left_b)):
        if place < len(numbers):
            now += left
            for number in numbers[place + 1 :]:
                began[side].append(now)
                now += solo[side][number]
    if starts is not None:
        for side, numbers in enumerate((f, b)):
            starts += [(began[side][at], side, number) for at, number in enumerate(numbers)]
    return now


def _shortest(
    forward: _Downsets,
    backward: _Downsets,
    price: _Price,
    barrier: float,
    times: Sequence[Sequence[float]] | None,
) -> tuple[float, _Segments]:
    """Return the makespan of the recurrence, and its segments.

    ``times`` of operators, by side: two segments take no less than either, and need no price where
    that is too long.
    """
    best: dict[tuple[int, int], tuple[float, _Order, _Order]] = {}

    def cheapest(f: int, b: int) -> tuple[float, _Order, _Order]:
        """Return the least time of two segments in any order, and these orders."""
        known = best.get((f, b))
        if known is None:
            known = (math.inf, (), ())
            for op in forward.orders[f]:
                for other in backward.orders[b]:
                    priced = price(op, other)
                    if priced < known[0] * _SHORTER:
                        known = priced, op, other
            best[f, b] = known
        return known

    def sizes(mask: int) -> tuple[int, int]:
        return mask.bit_count(), mask

    # A segment leads to a state with more operators, so states in this order are final.
    states = [
        (f, b) for f in sorted(forward.after, key=sizes) for b in sorted(backward.after, key=sizes)
    ]
    floors = [
        {s: sum(times[at][n] for n in _bits(s)) if times else -math.inf for s in side.orders}
        for at, side in enumerate((forward, backward))
    ]
    time = dict.fromkeys(states, math.inf)
    came: dict[tuple[int, int], tuple[int, int]] = {}
    time[0, 0] = 0.0
    for f, b in states:
        now = time[f, b] + barrier
        for f_segment in forward.after[f]:
            floor = now + floors[0][f_segment]
            for b_segment in backward.after[b]:
                if not f_segment and not b_segment:
                    continue
                state = f | f_segment, b | b_segment
                if floor >= time[state] or now + floors[1][b_segment] >= time[state]:
                    continue
                priced = best.get((f_segment, b_segment)) or cheapest(f_segment, b_segment)
                then = now + priced[0]
                if then < time[state] * _SHORTER:
                    time[state] = then
                    came[state] = f, b
    if not time[states[-1]] < math.inf:
        raise ValueError("cost: no pairing has a finite time")
    path = [states[-1]]
    while path[-1] in came:
        path.append(came[path[-1]])
    segments = []
    for after, before in pairwise(path):
        _, op, other = cheapest(after[0] & ~before[0], after[1] & ~before[1])
        segments.append((op, other))
    return time[states[-1]], tuple(reversed(segments))


def round_robin(forward: Sequence[Hashable], backward: Sequence[Hashable]) -> Pairing:
    """Return the pairing of Wavelet+: operators by turns, in their order (section 6.1).

    Its makespan is not known (nan): nothing was searched.
    """
    length = max(len(forward), len(backward))
    segments = [(tuple(forward[n : n + 1]), tuple(backward[n : n + 1])) for n in range(length)]
    return Pairing(math.nan, tuple(segments))
