"""No overlap: each operator of a stage after the one before it."""

from __future__ import annotations

from flux.core.problem import check_choice
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.policies.fuse import CHOICES, fuse
from flux.plan.policies.passes import sequences
from flux.plan.schedule import StepSchedule, on_lanes


class Serial:
    """Megatron without overlap: the baseline. Pipeline stages run 1F1B.

    Args:
        wgrad_overlap: start the collective after a dgrad alongside the wgrad of the same linear, as
            Megatron does by default; with it, collectives have streams of their own.
        overlap_grad_reduce: the same for collectives of data parallelism; None: as
            ``wgrad_overlap``.
        fused: linear layers that are Flux's fused ops (``flux.plan.policies.fuse``): "none",
            "column", "row", "all", or "auto": those with which a simulation is fastest.
    """

    name = "serial"

    def __init__(
        self,
        wgrad_overlap: bool = False,
        fused: str = "none",
        overlap_grad_reduce: bool | None = None,
    ) -> None:
        check_choice("serial: fused", fused, CHOICES)
        if type(overlap_grad_reduce) not in (bool, type(None)):
            raise ValueError(
                f"serial: overlap_grad_reduce must be true or false, got {overlap_grad_reduce!r}"
            )
        self.wgrad_overlap, self.fused = wgrad_overlap, fused
        self.overlap_grad_reduce = (
            wgrad_overlap if overlap_grad_reduce is None else overlap_grad_reduce
        )

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph, with fused ops if they are asked for."""
        graph, fuses = fuse(graph, self.fused, lambda some: self.order(some, cost), cost)
        self.chosen = {"fused": fuses}
        return graph

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return a schedule with one stream for each stage, or with streams for collectives."""

        def stream(op: Operator) -> str:
            of_data = op.group.startswith(("dp", "edp"))
            apart = self.overlap_grad_reduce if of_data else self.wgrad_overlap
            return op.resource if apart else "comp"

        return on_lanes(graph, sequences(graph), self.name, stream)
