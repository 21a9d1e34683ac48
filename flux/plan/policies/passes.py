"""Orders of forward and backward passes, which policies fill with operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from flux.plan.graph import Graph, Operator


class Action(NamedTuple):
    """A pass of one stage, as torch.distributed.pipelining names it.

    Attributes:
        stage: of the model, not the rank.
        kind: "F", "B" (whole backward), "I" (gradients of inputs) or "W" (of weights); "S": the end
            of the step.
        micro: number of the micro-batch.
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        """Return ``0F3``."""
        return f"{self.stage}{self.kind}{self.micro}"


Block = tuple[Action, ...]
"""One action, or several that run together."""


def row(blocks: Sequence[Block]) -> list[str]:
    """Return blocks as torch.distributed.pipelining has them: ``(0F4;7B0)OVERLAP_F_B``."""
    return [
        str(block[0]) if len(block) == 1 else f"({';'.join(map(str, block))})OVERLAP_F_B"
        for block in blocks
    ]


def one_f_one_b(stage: int, ahead: int, micro_batches: int) -> list[Block]:
    """Return a stage's passes: some forward, pairs of forward and backward, the rest backward.

    1F1B (PipeDream-Flush, arXiv 2006.09503) has as many ahead as there are stages after this one.
    Of four micro-batches, one ahead: F0 | F1 B0 | F2 B1 | F3 B2 | B3.
    """
    ahead = min(ahead, micro_batches)
    blocks: list[Block] = [(Action(stage, "F", micro),) for micro in range(ahead)]
    for micro in range(ahead, micro_batches):
        blocks.append((Action(stage, "F", micro), Action(stage, "B", micro - ahead)))
    rest = range(micro_batches - ahead, micro_batches)
    return blocks + [(Action(stage, "B", micro),) for micro in rest]


def by_pass(
    graph: Graph, stage_of: Callable[[Operator], int] = lambda op: op.stage
) -> dict[Action, list[int]]:
    """Return operators by pass, in topological order.

    Operators of the whole step are those of the pass "S" of their rank and micro-batch -1.
    """
    passes: dict[Action, list[int]] = {}
    for number in graph.order:
        op = graph.ops[number]
        if op.micro < 0:
            action = Action(op.stage, "S", -1)
        else:
            action = Action(stage_of(op), "F" if op.role == "fwd" else "B", op.micro)
        passes.setdefault(action, []).append(number)
    return passes


def sequences(
    graph: Graph, within: Callable[[str, Sequence[int]], Sequence[int]] | None = None
) -> list[list[int]]:
    """Return, for each stage, its operators: passes in the 1F1B order, then the optimizer.

    ``within`` gets "F", "B" or "S" and the numbers of a pass, and returns them in order; by default
    they stay in the order of the graph.
    """
    passes = by_pass(graph)
    out = []
    for stage in range(graph.stages):
        order: list[int] = []
        turns = one_f_one_b(stage, graph.stages - stage - 1, graph.micro_batches)
        for action in (*chain.from_iterable(turns), Action(stage, "S", -1)):
            numbers = passes.get(action, [])
            order += numbers if within is None else within(action.kind, numbers)
        out.append(order)
    return out


def pieces(op: Operator, at: int, count: int, letter: str) -> list[Operator]:
    """Return an operator cut into ``count`` pieces along dimension ``at`` of its shape."""
    ends = [op.shape[at] * piece // count for piece in range(count + 1)]
    shapes = [(*op.shape[:at], b - a, *op.shape[at + 1 :]) for a, b in pairwise(ends)]
    rest = op.group, op.allocates / count, op.frees / count
    # A large step has half a million pieces, and _replace would take three times as long.
    return [
        Operator(f"{op.name}.{letter}{piece}", *op[1:8], piece, count, op.strand, shape, *rest)
        for piece, shape in enumerate(shapes)
    ]
