"""Turn each rank's blocks into the order of operators, with two strands interleaved in a block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import networkx as nx

from flux.plan.cost import CostModel
from flux.plan.graph import Graph, Operator
from flux.plan.policies.folding import layers_of, stage_of
from flux.plan.policies.pairing import Pairing, factor, time_together
from flux.plan.policies.passes import Action, Block, by_pass, row
from flux.plan.schedule import StepSchedule, on_lanes

Segments = list[list[int]]
"""Numbers of operators; a segment's run side by side, one segment after the other."""
Merge = Callable[[Sequence[int], Sequence[int]], Segments]
"""Returns the segments of an interleaved block: of a forward's and a backward's operators."""


def node_of(op: Operator) -> str:
    """Return the name of an operator in the graph of its layer: ``qkv``, ``qkv.d``, ``qkv.w``."""
    return op.part + {"dgrad": ".d", "wgrad": ".w", "recompute": ".r"}.get(op.role, "")


def graphs_of_layer(graph: Graph) -> tuple[nx.DiGraph, nx.DiGraph]:
    """Return forward and backward of layer 0, micro-batch 0; nodes are named by ``node_of``."""
    passes = nx.DiGraph(), nx.DiGraph()
    for number in graph.order:
        op = graph.ops[number]
        inside = op.kind != "send" and not op.is_outer
        if op.layer == 0 and op.micro == 0 and inside:
            digraph = passes[op.role != "fwd"]
            digraph.add_node(node_of(op), op=op)
            before = [graph.ops[dep] for dep in graph.deps[number]]
            edges = [(node_of(dep), node_of(op)) for dep in before if node_of(dep) in digraph]
            digraph.add_edges_from(edges)
    return passes


def one_after_the_other(forward: Sequence[int], backward: Sequence[int]) -> Segments:
    """Return forward, then backward: nothing is interleaved."""
    return [[*forward, *backward]]


def by_layer(graph: Graph, plan: Pairing, cost: CostModel) -> Merge:
    """Return a merge that pairs the first layer of a forward with the first one of a backward.

    ``plan`` has nodes named by ``node_of``; ``cost`` orders operators of one segment that share a
    stream. Gradients that not every backward reduces come last.
    """

    def is_late(op: Operator) -> bool:
        return op.moves_weights and op.role == "wgrad" and node_of(op) not in plan.backward

    def merge(forward: Sequence[int], backward: Sequence[int]) -> Segments:
        late = [number for number in backward if is_late(graph.ops[number])]
        backward = [number for number in backward if number not in late] if late else backward
        layers = [_layers(graph, numbers) for numbers in (forward, backward)]
        nodes = {*plan.forward}, {*plan.backward}
        for known, of_pass in zip(nodes, layers, strict=True):
            if len(layers[0]) != len(layers[1]) or any(of.keys() != known for of in of_pass):
                raise ValueError("pairs layers of forward and backward, and layers here differ")
        before, after = _outer(graph, forward, backward)
        segments: Segments = [before] if before else []
        for f_layer, b_layer in zip(*layers, strict=True):
            for f_nodes, b_nodes in plan.segments:
                f, b = (
                    [of[n] for n in nodes] for of, nodes in ((f_layer, f_nodes), (b_layer, b_nodes))
                )
                segments.append(_started(graph, f, b, cost))
        return [*segments, [*after, *late]] if after or late else segments

    return merge


def _outer(graph: Graph, *passes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the operators of passes that are of no layer: those before the layers, and after.

    After the layers are sends, and what follows the first operator of a layer.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for numbers in passes:
        inside = 0
        for number in numbers:
            op = graph.ops[number]
            if op.is_outer or op.kind == "send":
                sides[inside or op.kind == "send"].append(number)
            elif not op.moves_weights:
                inside = 1
    return sides


def _layers(graph: Graph, numbers: Iterable[int]) -> list[dict[Hashable, int]]:
    """Return a pass's operators by layer and node, without sends, embedding and head."""
    places: dict[int, dict[Hashable, int]] = {}
    for number in numbers:
        op = graph.ops[number]
        if op.kind != "send" and not op.is_outer:
            places.setdefault(op.layer, {})[node_of(op)] = number
    return list(places.values())


def _started(graph: Graph, f: Sequence[int], b: Sequence[int], cost: CostModel) -> list[int]:
    """Return the operators of two segments in the order in which they start."""
    ops = [[graph.ops[number] for number in side] for side in (f, b)]
    solo = [[cost.solo(op) for op in side] for side in ops]
    slowed = [[2.0 - factor(cost, first, other) for other in ops[1]] for first in ops[0]]
    starts: list[tuple[float, int, int]] = []
    time_together(range(len(f)), range(len(b)), solo, slowed, starts)
    return [(f, b)[side][place] for _, side, place in sorted(starts)]


def scheduled(
    graph: Graph,
    blocks: Sequence[Sequence[Block]],
    stages: int,
    policy: str,
    *,
    merge: Merge = one_after_the_other,
    events: bool = False,
    stream: Callable[[Operator], str] = lambda op: op.resource,
    occupied: Callable[[Operator], Sequence[str]] | None = None,
) -> StepSchedule:
    """Return the schedule in which each rank runs its blocks, then the optimizer.

    ``blocks`` are of each rank, ``merge`` interleaves the two passes of a block. ``events``: a
    segment of such a block begins when the one before it has ended. ``occupied`` by an operator, by
    default its stream: two with anything in common do not overlap.
    """
    layers = layers_of(graph)
    passes = by_pass(graph, lambda op: stage_of(op, layers, stages))
    deps = list(graph.deps)
    sequences: list[list[int]] = []
    for rank, of_rank in enumerate(blocks):
        order: list[int] = []
        for block in of_rank:
            parts = [_operators(passes, graph, action) for action in block]
            if len(block) == 1:
                order += parts[0]
                continue
            segments = merge(parts[0], parts[1])
            if events:
                _add_events(graph, deps, segments, stream)
            order += [number for segment in segments for number in segment]
        order += passes.get(Action(rank, "S", -1), [])
        if occupied is not None:
            _keep_apart(graph, deps, order, occupied)
        sequences.append(order)
    made = on_lanes(replace(graph, deps=tuple(deps)), sequences, policy, stream)
    return replace(made, actions=tuple(tuple(row(of_rank)) for of_rank in blocks))


def _operators(passes: dict[Action, list[int]], graph: Graph, action: Action) -> list[int]:
    """Return a pass's operators, in topological order."""
    if action.kind in "FB":
        return passes[action]
    weights = action.kind == "W"
    backward = passes[action._replace(kind="B")]
    return [number for number in backward if (graph.ops[number].role == "wgrad") == weights]


def _keep_apart(
    graph: Graph,
    deps: list[tuple[int, ...]],
    order: Iterable[int],
    occupied: Callable[[Operator], Sequence[str]],
) -> None:
    """Let operators that occupy the same run one after the other, on different streams too."""
    last: dict[str, int] = {}
    for number in order:
        taken = occupied(graph.ops[number])
        before = [last[one] for one in taken if one in last]
        deps[number] = tuple(dict.fromkeys((*deps[number], *before)))
        last |= dict.fromkeys(taken, number)


def _add_events(
    graph: Graph, deps: list[tuple[int, ...]], segments: Segments, stream: Callable[[Operator], str]
) -> None:
    """Let the first operator of each stream in a segment wait for the segment before."""
    before: list[int] = []
    for segment in segments:
        seen: set[str] = set()
        for number in segment:
            lane = stream(graph.ops[number])
            if lane not in seen:
                seen.add(lane)
                deps[number] = tuple(dict.fromkeys((*deps[number], *before)))
        before = segment
