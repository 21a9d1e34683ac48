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

import math
from dataclasses import replace
from itertools import pairwise

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import GROUPS, Graph, Operator
from flux.plan.mesh import parse_group
from flux.plan.policies.folding import fold, layers_of, placed, stage_of, w_blocks
from flux.plan.policies.interleave import by_layer, graphs_of_layer, scheduled
from flux.plan.policies.pairing import Pairing, pair, round_robin
from flux.plan.policies.passes import by_pass, one_f_one_b
from flux.plan.schedule import StepSchedule

EVENT_MS = 2e-3
"""Assumed time of the events between two segments: two streams wait for each other."""


class DHelix:
    """DHelix's schedule of a step.

    The last three options switch its parts off, as in the paper's section 6.4. Without all three
    nothing runs side by side, and the step takes what ``serial`` takes.

    Args:
        events: a segment begins when the one before it has ended, as in the paper; else streams
            only keep their order, and operators wait for what they depend on.
        longest: most operators of a segment of one strand (see ``pair``); 0: the default.
        hides: groups whose communication runs alongside computation: "all", "none", or "tp+cp".
        links: communication inside hosts runs alongside communication between them.
        wgrad: gradients of weights move; else backward runs one operator after the other.
    """

    name = "dhelix"
    cuts_stages = True

    def __init__(
        self,
        events: bool = True,
        longest: int = 0,
        hides: str = "all",
        links: bool = True,
        wgrad: bool = True,
    ) -> None:
        self.events, self.links, self.wgrad = events, links, wgrad
        self.longest = checked_integer(f"{self.name}: longest", longest, 0)
        named = {"all": GROUPS, "none": ()}
        self.hidden = named[hides] if hides in named else tuple(str(hides).split("+"))
        if not {*self.hidden} <= {*GROUPS}:
            raise ValueError(
                f"{self.name}: hides must be all, none or groups of {', '.join(GROUPS)} joined by "
                f"+, as in tp+cp, got {hides!r}"
            )

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph; with pipeline parallelism the model is folded."""
        ranks = fabric.parallel.pp
        if graph.micro_batches <= ranks:
            raise ValueError(
                f"{self.name} interleaves what is more than {ranks} micro-batches (one for each "
                f"pipeline rank), and the step has {graph.micro_batches}"
            )
        if ranks > 1:
            graph = placed(graph, 2 * ranks, lambda stage: fold(stage, ranks))
        return graph if self.wgrad else _in_order(graph, 2 * ranks if ranks > 1 else 1)

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
            merge=by_layer(graph, plan, self._priced(cost)),
            events=self.events,
            occupied=None if self._whole else self.occupied,
        )

    @property
    def _whole(self) -> bool:
        return self.links and {*self.hidden} == {*GROUPS}

    def _priced(self, cost: CostModel) -> CostModel:
        return cost if self._whole else _Occupied(cost, self)

    def occupied(self, op: Operator) -> tuple[str, ...]:
        """Return what an operator occupies: operators with anything in common do not overlap."""
        if not op.is_collective:
            return (op.resource, "beside intra", "beside inter")
        links = (op.resource, *(() if self.links else ("intra", "inter")))
        hidden = parse_group(op.group).base in self.hidden
        return links if hidden else (*links, f"beside {op.resource}")

    def pairing(self, graph: Graph, cost: CostModel) -> Pairing:
        """Return the pairing of a layer's forward and backward."""
        barrier, longest = EVENT_MS if self.events else 0.0, self.longest or None
        graphs = graphs_of_layer(graph)
        return pair(*graphs, self._priced(cost), barrier=barrier, longest=longest)


class _Occupied:
    """Costs in which operators that occupy the same wait for each other."""

    def __init__(self, cost: CostModel, policy: DHelix) -> None:
        self.solo, self._cost, self._occupied = cost.solo, cost, policy.occupied

    def oef(self, comp: Operator, comm: Operator) -> float:
        shared = {*self._occupied(comp)} & {*self._occupied(comm)}
        return -math.inf if shared else self._cost.oef(comp, comm)


def _in_order(graph: Graph, stages: int) -> Graph:
    """Return a graph whose backward passes run one operator after the other."""
    layers, deps = layers_of(graph), list(graph.deps)
    for action, numbers in by_pass(graph, lambda op: stage_of(op, layers, stages)).items():
        if action.kind == "B":
            for before, after in pairwise(numbers):
                deps[after] = tuple(dict.fromkeys((*deps[after], before)))
    return replace(graph, deps=tuple(deps))


class WaveletPlus(DHelix):
    """Wavelet's round robin on a folded model: operators of both strands by turns (section 6.1)."""

    name = "wavelet"

    def __init__(self, events: bool = True) -> None:
        super().__init__(events)

    def pairing(self, graph: Graph, cost: CostModel) -> Pairing:
        """Return the pairing in which strands take turns."""
        return round_robin(*map(list, graphs_of_layer(graph)))
