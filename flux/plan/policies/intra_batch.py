"""Chunks of one micro-batch: a collective in pieces alongside the GEMM that it belongs to.

The baseline *Intra-batch* of DHelix (arXiv 2411.15871, section 6.1), after MegaScale (arXiv
2402.15627, section 3.2): AllGather and the column-parallel GEMM after it, and a row-parallel GEMM
and the ReduceScatter or AllReduce after it, are cut along the tokens. Pieces follow each other:

    links     AG 0 | AG 1    | AG 2    |                  links            | RS 0    | RS 1 | ...
    compute        | GEMM 0  | GEMM 1  | GEMM 2           compute   GEMM 0 | GEMM 1  | ...
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator, replaced
from flux.plan.policies.passes import pieces, sequences
from flux.plan.schedule import StepSchedule, on_lanes

_GATHERED = {("fwd", "qkv"), ("fwd", "fc1"), ("dgrad", "proj"), ("dgrad", "fc2")}
"""GEMMs after an AllGather, with sequence parallelism."""
_REDUCED = {("fwd", "proj"), ("fwd", "fc2"), ("dgrad", "qkv"), ("dgrad", "fc1")}
"""GEMMs before a ReduceScatter or AllReduce."""


class IntraBatch:
    """GEMMs and their tensor-parallel collectives in chunks."""

    name = "intra_batch"

    def __init__(self, chunks: int = 4) -> None:
        self.chunks = checked_integer("intra_batch: chunks", chunks, 2)

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph with GEMMs and collectives cut."""
        if fabric.parallel.tp == 1:
            raise ValueError("intra_batch hides tensor-parallel communication, and tp is 1")
        experts = any(op.part == "router" for op in graph.ops)

        def cut(op: Operator) -> Sequence[Operator]:
            if not _is_cut(op, experts):
                return [op]
            if op.shape[0] < self.chunks:
                raise ValueError(f"intra_batch: {op.name} has fewer rows than {self.chunks} chunks")
            return pieces(op, 0, self.chunks, "c")

        return replaced(graph, cut)

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule: 1F1B, with a stream for collectives."""
        return on_lanes(graph, sequences(graph), self.name)


def _is_cut(op: Operator, experts: bool) -> bool:
    """Return whether an operator is cut; experts have no tensor-parallel collectives."""
    if op.is_collective:
        return op.group == "tp" and op.role in ("fwd", "dgrad") and op.part != "ag_logits"
    of_experts = experts and op.part in ("fc1", "fc2")
    return op.kind == "gemm" and not of_experts and (op.role, op.part) in _GATHERED | _REDUCED
