"""DHelix: forward of one micro-batch alongside backward of another.

H. Wang et al., arXiv 2411.15871. Micro-batches are two *strands*: while one runs forward, the other
one runs backward, and each hides the other's communication. Which operators run side by side is
searched for one layer (``pair``) and repeated for all. With pipeline parallelism the model is
*folded*, so that both strands move from rank to rank the same way (``w_schedule``).

Streams of a rank in an interleaved block:

    compute   qkv(3) | fc2.d(1) | attention(3) proj(3) | fc1.d(1) | ...      (3), (1): micro-batches
    intra            | ag1(3)   | rs2.d(1)             | rs1(3)   | ...
    inter                       | send ...
"""

from __future__ import annotations

import networkx as nx

from flux.core.problem import checked_integer
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph
from flux.plan.model import Parallel, step_of
from flux.plan.policies.folding import (
    WSchedule,
    fold,
    placed,
    w_blocks,
    w_schedule,
)
from flux.plan.policies.interleave import by_layer, graph_of_layer, scheduled
from flux.plan.policies.pairing import Pairing, pair, round_robin
from flux.plan.policies.passes import one_f_one_b
from flux.plan.schedule import StepSchedule

__all__ = ["DHelix", "WSchedule", "WaveletPlus", "fold", "layer_graph", "pair", "w_schedule"]

EVENT_MS = 2e-3
"""Assumed time of the events between two segments: two streams wait for each other."""


def layer_graph(
    direction: str, *, experts: bool = False, context_parallel: bool = False
) -> nx.DiGraph:
    """Return the operators of a layer, as DHelix pairs them.

    With tensor and sequence parallelism a dense layer has 14 operators forward and 18 backward
    (section 4.2). Nodes are names (``qkv``; backward ``qkv.d`` for the gradient of the input,
    ``qkv.w`` for that of the weight), and have the operator as attribute ``op``. Sizes are those of
    Llama 25B with 8 tensor-parallel ranks, or of Phi-MoE with 2, on the paper's A40 cluster. Of
    another step: ``flux.plan.policies.interleave.graph_of_layer``.
    """
    cp = 2 if context_parallel else 1
    if experts:
        parallel = Parallel(tp=2, cp=cp, dp=8, ep=8, sequence=True)
    else:
        parallel = Parallel(tp=8, cp=cp, sequence=True)
    model = "phi-moe" if experts else "llama-25b"
    step = step_of(model, parallel, layers=1, micro_batches=1, regather=False)
    fabric = Fabric(load_cluster("dhelix-a40"), parallel)
    return graph_of_layer(build_step(step, fabric), direction)


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
