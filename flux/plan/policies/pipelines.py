"""The pipelines of torch.distributed.pipelining: interleaved 1F1B and the zero-bubble family."""

from __future__ import annotations

from collections.abc import Callable

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.policies import interleave
from flux.plan.policies.folding import fold, placed
from flux.plan.policies.pairing import pair
from flux.plan.policies.torch_rows import blocks_of
from flux.plan.schedule import StepSchedule


class _TorchPipeline:
    """A schedule of torch.distributed.pipelining."""

    name = ""
    schedule = ""
    uneven = False
    cuts_stages = True

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph with the layers on the ranks of this pipeline."""
        ranks = fabric.parallel.pp
        if ranks == 1:
            raise ValueError(f"{self.name} is a pipeline, and pp is 1")
        stages = self._stages(graph, ranks)
        blocks_of(self.schedule, ranks, stages, graph.micro_batches)  # raises, if there are none
        return placed(graph, stages, self._rank_of(ranks), uneven=self.uneven)

    def _stages(self, graph: Graph, ranks: int) -> int:
        return 2 * ranks

    def _rank_of(self, ranks: int) -> Callable[[int], int]:
        return lambda stage: fold(stage, ranks)

    def _merge(self, graph: Graph, cost: CostModel) -> interleave.Merge:
        return interleave.one_after_the_other

    def _stream(self, op: Operator) -> str:
        """Return the stream of an operator of a pipeline that hides its sends, and what FSDP does.

        FSDP has a stream of its own for weights and gradients that passes gather and reduce.
        """
        if op.moves_weights and op.role != "step":
            return "fsdp"
        return op.resource if op.kind == "send" else "comp"

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule."""
        stages = self._stages(graph, graph.stages)
        blocks = blocks_of(self.schedule, graph.stages, stages, graph.micro_batches)
        merge = self._merge(graph, cost)
        return interleave.scheduled(
            graph, blocks, stages, self.name, merge=merge, stream=self._stream
        )


class Interleaved1F1B(_TorchPipeline):
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): each rank has several stages."""

    name = "interleaved"
    schedule = "Interleaved1F1B"
    uneven = True

    def __init__(self, chunks: int = 2) -> None:
        self.chunks = checked_integer("interleaved: chunks", chunks, 2, 65)

    def _stages(self, graph: Graph, ranks: int) -> int:
        return self.chunks * ranks

    def _rank_of(self, ranks: int) -> Callable[[int], int]:
        return lambda stage: stage % ranks


class ZBV(_TorchPipeline):
    """Zero-bubble pipeline of a folded model (arXiv 2401.10241, section 6): W fills bubbles."""

    name = "zbv"
    schedule = "ZBVZeroBubble"


class DualPipeV(_TorchPipeline):
    """DualPipe of a folded model, as torch has it: forward and backward of two micro-batches.

    Args:
        paired: interleave the operators of a block as DHelix's search says; else they run one after
            the other, which is what torch does unless a model brings a function of its own.
    """

    name = "dualpipev"
    schedule = "DualPipeV"

    def __init__(self, paired: bool = True) -> None:
        self.paired = paired

    def _merge(self, graph: Graph, cost: CostModel) -> interleave.Merge:
        if not self.paired:
            return interleave.one_after_the_other
        return interleave.by_layer(graph, pair(*interleave.graphs_of_layer(graph), cost), cost)

    def _stream(self, op: Operator) -> str:
        return op.resource if self.paired else super()._stream(op)
