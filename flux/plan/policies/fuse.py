"""Substitute Flux's fused ops for a GEMM and the collective of its group alongside it.

    forward, column-parallel    AllGather | GEMM       ag_gemm     (sequence parallelism)
    forward, row-parallel       GEMM | ReduceScatter   gemm_rs     or AllReduce: gemm_ar
    backward, column-parallel   dgrad | ReduceScatter  gemm_rs     or AllReduce: gemm_ar
    backward, row-parallel      AllGather | dgrad      ag_gemm     (sequence parallelism)
    experts, fc1 and fc2        AllToAll | GEMM | AllToAll    expert_gemm, in backward too

A fused op hides its communication with its own GEMM. So nothing is left for a policy to hide, but
no other operator helps. Which is better depends on the step, so policies take ``auto``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from flux.plan.cost import CostModel
from flux.plan.graph import Builder, Graph, Operator, part_of
from flux.plan.schedule import StepSchedule
from flux.plan.simulate import simulate

LINEARS = {"qkv": "column", "fc1": "column", "proj": "row", "fc2": "row"}
"""How the weight of each linear layer is split over ranks."""
WHICH = {"none": (), "column": ("column",), "row": ("row",), "all": ("column", "row")}
"""The kinds of linear layers that a choice fuses."""
CHOICES = (*WHICH, "auto")
_KINDS = {"all_reduce": "gemm_ar", "reduce_scatter": "gemm_rs", "all_gather": "ag_gemm"}
_KINDS["all_to_all"] = "expert_gemm"
_BEFORE = (("all_gather", "tp"), ("all_to_all", "ep"))
_BEHIND = (("all_reduce", "tp"), ("reduce_scatter", "tp"), ("all_to_all", "ep"))
"""Kind and group of collectives before and behind the GEMM that they are fused with."""
_CLOSE = 1.03
"""Choices that take at most so many times the fastest one's time in few layers are compared in the
whole step: with a better link, another one may be the fastest in few layers and slower in all."""
MOST_OPS = 20_000
"""Operators of a step in which choices are compared; of larger ones a part decides."""


def fuse(
    graph: Graph, choice: str, order: Callable[[Graph], StepSchedule], cost: CostModel
) -> tuple[Graph, str]:
    """Return the graph with fused ops, and which linear layers have them.

    ``choice`` is one of CHOICES; "auto" takes the linear layers whose schedule is the fastest in a
    simulation. ``order`` schedules a graph as the policy does.
    """
    if choice == "none":
        return graph, choice
    usable = fusable(graph)
    if choice != "auto":
        for kind in WHICH[choice]:
            if kind not in usable:
                raise ValueError(f"fused = {choice}: {_reason(graph, kind)}")
        return fused(graph, WHICH[choice]), choice
    small = first_layers(graph)

    def time(of: Graph, name: str) -> float:
        return simulate(order(fused(of, WHICH[name])), cost).iteration_ms

    times = {name: time(small, name) for name in WHICH if usable.issuperset(WHICH[name])}
    best = fastest(times, lambda name: time(graph, name), graph)
    return fused(graph, WHICH[best]), best


def fastest(few: Mapping[str, float], whole: Callable[[str], float], graph: Graph) -> str:
    """Return the fastest choice of a step, from times in few layers and in the whole step."""
    close = [name for name, time in few.items() if time <= _CLOSE * min(few.values())]
    if len(close) > 1 and len(graph.ops) <= MOST_OPS:
        few = {name: whole(name) for name in close}
    return min(few, key=few.__getitem__)


def fused(graph: Graph, linears: Collection[str]) -> Graph:
    """Return the graph in which these linear layers and their collectives are fused ops."""
    partner = _pairs(graph, linears)
    absorbed = {collective: gemm for gemm, collective in partner.items()}
    kept = [number for number in range(len(graph.ops)) if number not in absorbed]
    numbers = {number: place for place, number in enumerate(kept)}
    builder = Builder(graph.itemsize)
    for number in kept:
        op, deps = graph.ops[number], graph.deps[number]
        if number in partner:
            other = graph.ops[partner[number]]
            deps += graph.deps[partner[number]]
            kind, group = _KINDS[other.kind], other.group
            allocates, frees = op.allocates + other.allocates, op.frees + other.frees
            op = op._replace(kind=kind, group=group, allocates=allocates, frees=frees)
        before = [absorbed.get(dep, dep) for dep in deps]
        builder.add(op, [numbers[dep] for dep in before if dep != number])
    return builder.build(graph.resident)


def _pairs(graph: Graph, linears: Collection[str]) -> dict[int, int]:
    """Return the collective that each GEMM is fused with."""
    pairs: dict[int, int] = {}
    for number in graph.order:
        op = graph.ops[number]
        for dep in graph.deps[number]:
            before = graph.ops[dep]
            gathers = (before.kind, before.group) in _BEFORE and before.role != "wgrad"
            reduces = (op.kind, op.group) in _BEHIND and len(graph.deps[number]) == 1
            if gathers and _is_linear(op, linears):
                pairs[number] = dep
            elif reduces and _is_linear(before, linears):
                pairs[dep] = number
    return pairs


def _is_linear(op: Operator, linears: Collection[str]) -> bool:
    in_pass = op.kind == "gemm" and op.role in ("fwd", "recompute", "dgrad")
    return in_pass and LINEARS.get(op.part) in linears


def fusable(graph: Graph) -> set[str]:
    """Return which kinds of linear layers can be fused: of "column" and "row"."""
    partner = _pairs(graph, ("column", "row"))
    kinds = {LINEARS[graph.ops[gemm].part] for gemm in partner}
    trains = any(op.role == "dgrad" for op in graph.ops)
    gathers = trains and any(op.kind == "all_gather" and op.role == "fwd" for op in graph.ops)
    if gathers and not any(op.kind == "all_gather" and op.role == "wgrad" for op in graph.ops):
        kinds.discard("column")
    return kinds


def _reason(graph: Graph, kind: str) -> str:
    if kind == "column" and _pairs(graph, ("column",)):
        return (
            "Flux's column-parallel layers gather their input again in backward, and this step "
            "keeps it; add regather"
        )
    return f"the step has no tensor-parallel or expert-parallel communication beside {kind}s' GEMMs"


def first_layers(graph: Graph, count: int = 2) -> Graph:
    """Return the operators of the first layers and the first micro-batch of the first stage."""
    layers = sorted({op.layer for op in graph.ops if op.layer >= 0 and op.stage == 0})[:count]
    small = [
        number
        for number in graph.order
        if (op := graph.ops[number]).stage == 0 and op.micro == 0 and op.layer in layers
    ]
    return part_of(graph, small)
