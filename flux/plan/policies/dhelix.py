"""DHelix: forward of one micro-batch alongside backward of another.

H. Wang et al., arXiv 2411.15871. Micro-batches are two *strands*: while one runs forward, the other
one runs backward, and each hides the other's communication. Which operators run side by side is
searched for one layer (``pair``) and repeated for all. With pipeline parallelism the model is
*folded*, so that both strands move from rank to rank the same way (``w_blocks``).

Streams of a rank in an interleaved block:

    compute   qkv(3) | fc2.d(1) | attention(3) proj(3) | fc1.d(1) | ...      (3), (1): micro-batches
    intra            | ag1(3)   | rs2.d(1)             | rs1(3)   | ...
    inter                       | send ...
"""

from __future__ import annotations

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph
from flux.plan.policies.folding import (
    fold,
    placed,
    w_blocks,
)
from flux.plan.policies.interleave import by_layer, graph_of_layer, scheduled
from flux.plan.policies.pairing import Pairing, pair, round_robin
from flux.plan.policies.passes import one_f_one_b
from flux.plan.schedule import StepSchedule

EVENT_MS = 2e-3
"""Assumed time of the events between two segments: two streams wait for each other."""


class DHelix:
    """DHelix's schedule of a step.

    Args:
        events: a segment begins when the one before it has ended, as in the paper; else streams
            only keep their order, and operators wait for what they depend on.
        longest: most operators of a segment of one strand (see ``pair``); 0: the default.
    """

    name = "dhelix"

    def __init__(self, events: bool = True, longest: int = 0) -> None:
        self.events = events
        self.longest = checked_integer(f"{self.name}: longest", longest, 0)

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph; with pipeline parallelism the model is folded."""
        ranks = fabric.parallel.pp
        if graph.micro_batches <= ranks:
            raise ValueError(
                f"{self.name} interleaves what is more than {ranks} micro-batches (one for each "
                f"pipeline rank), and the step has {graph.micro_batches}"
            )
        if ranks == 1:
            return graph
        return placed(graph, 2 * ranks, lambda stage: fold(stage, ranks))

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule, with streams for compute, links inside a host, and ports."""
        ranks = graph.stages
        plan = self.pairing(graph, cost)
        # Without a pipeline nothing is folded: backward runs alongside the next forward.
        micros = graph.micro_batches
        blocks = w_blocks(ranks, micros) if ranks > 1 else [one_f_one_b(0, 1, micros)]
        return scheduled(
            graph,
            blocks,
            2 * ranks if ranks > 1 else 1,
            self.name,
            merge=by_layer(graph, plan, cost),
            events=self.events,
        )

    def pairing(self, graph: Graph, cost: CostModel) -> Pairing:
        """Return the pairing of a layer's forward and backward."""
        forward, backward = (graph_of_layer(graph, way) for way in ("forward", "backward"))
        barrier = EVENT_MS if self.events else 0.0
        return pair(forward, backward, cost, barrier=barrier, longest=self.longest or None)


class WaveletPlus(DHelix):
    """Wavelet's round robin on a folded model: operators of both strands by turns (section 6.1)."""

    name = "wavelet"

    def __init__(self, events: bool = True) -> None:
        super().__init__(events)

    def pairing(self, graph: Graph, cost: CostModel) -> Pairing:
        """Return the pairing in which strands take turns."""
        forward, backward = (graph_of_layer(graph, way) for way in ("forward", "backward"))
        return round_robin(list(forward), list(backward))
