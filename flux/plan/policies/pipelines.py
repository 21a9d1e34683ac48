"""Other pipelines, to compare DHelix with.

``interleaved``, ``zbv`` and ``dualpipev`` are torch.distributed.pipelining's schedules.
``combined`` is Megatron-core's combined 1F1B, which hides AllToAll of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.policies.folding import fold, layers_of, placed
from flux.plan.policies.interleave import (
    Merge,
    by_layer,
    graph_of_layer,
    one_after_the_other,
    scheduled,
)
from flux.plan.policies.pairing import Pairing, pair
from flux.plan.policies.passes import one_f_one_b
from flux.plan.policies.torch_rows import blocks_of
from flux.plan.schedule import StepSchedule


def _beside_sends(op: Operator) -> str:
    """Return the stream of an operator of a pipeline that hides nothing but its sends."""
    return op.resource if op.kind == "send" else "comp"


class _TorchPipeline:
    """A schedule of torch.distributed.pipelining."""

    name = ""
    schedule = ""
    uneven = False

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

    def _merge(self, graph: Graph, cost: CostModel) -> Merge:
        return one_after_the_other

    def _stream(self, op: Operator) -> str:
        return _beside_sends(op)

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule."""
        stages = self._stages(graph, graph.stages)
        blocks = blocks_of(self.schedule, graph.stages, stages, graph.micro_batches)
        merge = self._merge(graph, cost)
        return scheduled(graph, blocks, stages, self.name, merge=merge, stream=self._stream)


class Interleaved1F1B(_TorchPipeline):
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): each rank has several stages."""

    name = "interleaved"
    schedule = "Interleaved1F1B"
    uneven = True

    def __init__(self, chunks: int = 2) -> None:
        self.chunks = checked_integer("interleaved: chunks", chunks, 2)

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

    def _merge(self, graph: Graph, cost: CostModel) -> Merge:
        if not self.paired:
            return one_after_the_other
        forward, backward = (graph_of_layer(graph, way) for way in ("forward", "backward"))
        return by_layer(graph, pair(forward, backward, cost), cost)

    def _stream(self, op: Operator) -> str:
        return op.resource if self.paired else _beside_sends(op)


class Combined1F1B:
    """Megatron-core's combined 1F1B: the experts of one micro-batch hide AllToAll of another.

    A block runs forward of a micro-batch and backward of an earlier one by turns:

        compute   attention(f) | experts(b)  | experts(f)  | attention(b)
        links     combine(b)   | dispatch(f) | dispatch(b) | combine(f)

    Forward is one micro-batch further ahead than in 1F1B, and with a pipeline twice as far: blocks
    of neighbouring ranks move opposite ways. Other communication is not hidden.
    """

    name = "combined"

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph as it is, but for the names of sends."""
        if not any(op.kind == "all_to_all" for op in graph.ops):
            raise ValueError("combined hides AllToAll of experts, and ep is 1")
        if any(op.kind == "all_to_all" and op.role == "recompute" for op in graph.ops):
            raise ValueError("combined does not send the tokens of experts again: recompute less")
        if graph.micro_batches < 2:
            raise ValueError("combined needs at least 2 micro-batches, and the step has 1")
        return placed(graph, fabric.parallel.pp, lambda stage: stage, uneven=True)

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule."""

        def stream(op: Operator) -> str:
            return op.resource if op.kind in ("all_to_all", "send") else "comp"

        ranks = graph.stages
        blocks = [
            one_f_one_b(rank, 2 * (ranks - 1 - rank) + 1, graph.micro_batches)
            for rank in range(ranks)
        ]
        merge = by_layer(graph, self._pairing(graph), cost)
        return scheduled(graph, blocks, ranks, self.name, merge=merge, stream=stream)

    def _pairing(self, graph: Graph) -> Pairing:
        layer = layers_of(graph) - 1
        parts: list[list[list[str]]] = []
        for way in ("forward", "backward"):
            parts.append([[]])
            for node, op in graph_of_layer(graph, way, layer).nodes(data="op"):
                alone = op.kind == "all_to_all"
                if alone:
                    parts[-1].append([])
                parts[-1][-1].append(node)
                if alone:
                    parts[-1].append([])
        (attention, dispatch, experts, combine, end), backward = parts
        start, combine_b, experts_b, dispatch_b, attention_b = backward
        pairs = [
            ([], start),
            (attention, combine_b),
            (dispatch, experts_b),
            (experts, dispatch_b),
            (combine, attention_b),
            (end, []),
        ]
        return Pairing(math.nan, tuple((tuple(f), tuple(b)) for f, b in pairs))
