"""Where the layers of a model are, and the W-shaped pipeline of a model that is folded.

H. Wang et al., arXiv 2411.15871, section 4.1. A model of 2p stages is folded over p ranks, so that
forward of one micro-batch and backward of another run from rank to rank the same way:

    rank      0  1  2  3
    stages    0  1  2  3        forward down, then up; backward begins at stage 7 on rank 0
              7  6  5  4

Slots of p = 2, m = 4; ``03`` is forward of stage 0 for micro-batch 3, ``/30`` backward of stage 3
for micro-batch 0 alongside it:

    rank 0    00     01 30 02/30 31 03/31 ...
    rank 1       10 20  11 ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

from flux.core.problem import checked_integer
from flux.plan.graph import Builder, Graph, Operator
from flux.plan.model import even_split
from flux.plan.policies.passes import Action, Block


def fold(stage: int, p: int) -> int:
    """Return the rank that holds a stage of a model folded over p ranks."""
    p = checked_integer("p", p, 1)
    stage = checked_integer("stage", stage, 0, 2 * p)
    return min(stage, 2 * p - 1 - stage)


def w_blocks(p: int, m: int) -> list[list[Block]]:
    """Return the blocks of each rank.

    Stage s runs forward of micro-batch i in slot 2i + s, and backward in slot
    2 (i + p) + 2p - 1 - s. In a slot a rank has one action, or forward of stage s and backward
    of stage 2p - 1 - s for the micro-batch p before.
    """
    p, m = checked_integer("p", p, 1), checked_integer("m", m, 1)
    slots: list[dict[int, list[Action]]] = [{} for _ in range(p)]
    for kind in "FB":  # forward comes first in a block
        for micro in range(m):
            for stage in range(2 * p):
                at = 2 * micro + stage if kind == "F" else 2 * (micro + p) + 2 * p - 1 - stage
                slots[fold(stage, p)].setdefault(at, []).append(Action(stage, kind, micro))
    return [[tuple(of[slot]) for slot in sorted(of)] for of in slots]


class UnevenStages(ValueError):
    """Stages of a model that would have unequal numbers of layers."""

    def __init__(self, stages: int, layers: int) -> None:
        super().__init__(stages, layers)
        self.stages, self.layers = stages, layers

    def __str__(self) -> str:
        """Return both numbers."""
        return f"{self.stages} stages must divide {self.layers} layers"


@lru_cache(maxsize=64)
def _stages_of(layers: int, stages: int) -> tuple[int, ...]:
    """Return the stage of each layer."""
    counts = even_split(layers, stages)
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def stage_of(op: Operator, layers: int, stages: int) -> int:
    """Return the stage of the model that an operator of a layer, embedding or head belongs to."""
    if layers < stages and op.is_outer:
        return 0 if op.place == 0 else stages - 1
    return _stages_of(layers, stages)[op.layer]


def layers_of(graph: Graph) -> int:
    """Return the number of layers of a step."""
    return 1 + max((op.layer for op in graph.ops), default=-1)


def placed(
    graph: Graph, stages: int, rank_of: Callable[[int], int], *, uneven: bool = False
) -> Graph:
    """Return a step whose layers are cut into other stages, on other ranks.

    Sends are made anew where consecutive stages are on different ranks; each has the layer of the
    operator whose result it sends.

    An operator's ``stage`` is its pipeline rank. Raise UnevenStages unless stages have equal
    numbers of layers, or ``uneven``: then the last one, and the first, may have head and embedding
    alone, whose weights are not gathered beside those of a layer.
    """
    layers, ranks = layers_of(graph), tuple(map(rank_of, range(stages)))
    known = "placed", ranks
    too_few = layers < stages and (stages > layers + 2 or not _has_outer_stages(graph))
    if too_few or (layers % stages and not uneven):
        raise UnevenStages(stages, layers)
    if known in graph.memo:  # several policies cut a model alike
        return cast(Graph, graph.memo[known])
    templates = {op.role: op for op in graph.ops if op.kind == "send"}
    builder = Builder(graph.itemsize)
    at = [0] * len(graph.ops)  # the number of each operator in the new graph
    sends: dict[int, int] = {}

    def sent(number: int) -> int:
        """Return the send of an operator's result."""
        if number not in sends:
            op = builder.ops[number]
            template = templates["fwd" if op.role == "fwd" else "dgrad"]
            part = ("send_embed", "send_head")[op.place] if op.is_outer else template.part
            name, where = f"L{op.layer}.{part}.m{op.micro}", (op.stage, part, op.layer, op.micro)
            made = Operator._make((name, *template[1:4], *where, *template[8:]))
            sends[number] = builder.add(made, [number])
        return sends[number]

    for number in graph.order:
        op, before = graph.ops[number], graph.deps[number]
        if op.kind == "send":
            at[number] = at[before[0]]
            continue
        rank = ranks[stage_of(op, layers, stages)]
        deps = [at[dep] for dep in before]
        deps = [dep if builder.ops[dep].stage == rank else sent(dep) for dep in deps]
        at[number] = builder.add(Operator._make((*op[:4], rank, *op[5:])), deps)
    made = graph.memo[known] = builder.build(graph.resident)
    return made


def _has_outer_stages(graph: Graph) -> bool:
    """Return whether embedding and head can be stages: ZeRO-3 gathers them beside a layer."""
    gathers = any(op.moves_weights and op.role == "fwd" for op in graph.ops)
    return any(op.is_outer for op in graph.ops) and not gathers
