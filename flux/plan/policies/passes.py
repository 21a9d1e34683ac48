"""Orders of forward and backward passes, which policies fill with operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flux.plan.graph import Graph, Operator

Pass = tuple[str, int]
"""("F" or "B", micro-batch)"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of a stage in the 1F1B order (PipeDream-Flush, arXiv 2006.09503).

    Of stage 1 of 3, four micro-batches: F0 F1 B0 F2 B1 F3 B2 B3. With one stage, all forward passes
    alternate with backward passes.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for micro in range(ahead):
        yield "F", micro
    for micro in range(ahead, micro_batches):
        yield "F", micro
        yield "B", micro - ahead
    for micro in range(micro_batches - ahead, micro_batches):
        yield "B", micro


def by_pass(graph: Graph) -> dict[tuple[int, str, int], list[int]]:
    """Return operators by (stage, pass, micro-batch), in topological order.

    Operators of the whole step are those of the pass "S" of micro-batch -1.
    """
    passes: dict[tuple[int, str, int], list[int]] = {}
    for number in graph.order:
        op = graph.ops[number]
        kind = "S" if op.micro < 0 else "F" if op.role == "fwd" else "B"
        passes.setdefault((op.stage, kind, op.micro), []).append(number)
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
        turns = one_f_one_b(stage, graph.stages, graph.micro_batches)
        for kind, micro in (*turns, ("S", -1)):
            numbers = passes.get((stage, kind, micro), [])
            order += numbers if within is None else within(kind, numbers)
        out.append(order)
    return out


def pieces(op: Operator, at: int, count: int, letter: str) -> list[Operator]:
    """Return an operator cut into ``count`` pieces along dimension ``at`` of its shape."""
    size, memory, free = op.shape[at], op.allocates / count, op.frees / count
    before, after = op.shape[:at], op.shape[at + 1 :]
    name, kind, resource, role, stage, part, layer, micro = op[:8]
    # A large step has half a million pieces, and _replace would take three times as long.
    return [
        Operator(
            f"{name}.{letter}{piece}",
            kind,
            resource,
            role,
            stage,
            part,
            layer,
            micro,
            piece,
            count,
            op.strand,
            (*before, size * (piece + 1) // count - size * piece // count, *after),
            op.group,
            memory,
            free,
        )
        for piece in range(count)
    ]
