"""What Flux's layers do: a column-parallel linear's input is gathered again early in backward.

The gather begins with the backward of the row-parallel linear after it, whose multiplies hide it
(flux/ops/early_gather.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.policies.passes import sequences
from flux.plan.schedule import StepSchedule, on_lanes

_ROW_OF = {"ag1": "proj", "ag2": "fc2"}
"""The row-parallel linear after each gathered column-parallel one."""


class EarlyGatherPolicy:
    """Streams for collectives; gathers for weight gradients begin early."""

    name = "early_gather"

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph, in which gathers for weight gradients wait for no gradient."""
        if not any(_gathers_again(op) for op in graph.ops):
            raise ValueError(
                "early_gather needs sequence parallelism in which inputs are gathered again "
                "(regather): this step has no such gather"
            )
        deps = tuple(
            tuple(d for d in before if graph.ops[d].kind == "norm")
            if _gathers_again(op)
            else before
            for op, before in zip(graph.ops, graph.deps, strict=True)
        )
        return replace(graph, deps=deps)

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule."""

        def within(kind: str, numbers: Sequence[int]) -> Sequence[int]:
            if kind != "B":
                return numbers
            gathers = {
                (graph.ops[n].layer, _ROW_OF[graph.ops[n].part]): n
                for n in numbers
                if _gathers_again(graph.ops[n])
            }
            early = set(gathers.values())
            out: list[int] = []
            for number in numbers:
                op = graph.ops[number]
                if op.kind == "gemm" and op.role == "dgrad" and (op.layer, op.part) in gathers:
                    out.append(gathers[op.layer, op.part])
                if number not in early:
                    out.append(number)
            return out

        return on_lanes(graph, sequences(graph, within), self.name)


def _gathers_again(op: Operator) -> bool:
    return op.kind == "all_gather" and op.role == "wgrad" and op.part in _ROW_OF
