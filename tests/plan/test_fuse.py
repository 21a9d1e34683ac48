"""Fused ops in place of a GEMM and its collective: the same work, and never slower if chosen."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flux.bench.shapes import Layer, Moe
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import FUSED, Graph
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import planned, policy_of
from flux.plan.policies.domino import ORDERS
from flux.plan.policies.fuse import WHICH, fused
from flux.plan.sample import StepLayout
from flux.plan.simulate import simulate
from flux.select.cost import library_ms

DENSE = Layer(4096, 16384, 32, 32, 128, False)
EXPERTS = Layer(4096, 0, 32, 32, 128, True, Moe(8, 2, 6400))
DEGREES: list[dict[str, Any]] = [
    {"tp": 8},
    {"tp": 8, "sequence": True},
    {"tp": 4, "pp": 2},
    {"tp": 16},
]


def step_of(layer: Layer = DENSE, regather: bool = True, **degrees: Any) -> TrainingStep:
    parallel = Parallel(**degrees)
    return TrainingStep(
        "test", layer, 4, "bfloat16", parallel, 2048, 4, 2, regather=regather and parallel.sequence
    )


WITH_EXPERTS: dict[str, Any] = {"tp": 1, "dp": 8, "ep": 8}


def fabric_of(step: TrainingStep, cluster: str = "flux-h800") -> Fabric:
    return Fabric(replace(load_cluster(cluster), hosts=2), step.parallel)


def work(graph: Graph) -> float:
    """Operations of all GEMMs, fused or not."""
    return sum(
        2.0 * op.shape[0] * op.shape[1] * op.shape[2]
        for op in graph.ops
        if op.kind in ("gemm", *FUSED)
    )


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("which", [name for name in WHICH if name != "none"])
def test_a_fused_graph_does_the_same_work(degrees: dict[str, Any], which: str) -> None:
    step = step_of(**degrees)
    graph = build_step(step, fabric_of(step))
    found = fused(graph, WHICH[which])
    assert work(found) == work(graph)
    ops = [op for op in found.ops if op.kind in FUSED]
    assert len(found.ops) + len(ops) == len(graph.ops)
    # A layer has two column- and two row-parallel linears. Row-parallel ones communicate in
    # forward, and in backward with sequence parallelism; column-parallel ones the other way round.
    passes = 2 if step.parallel.sequence else 1
    assert len(ops) == 2 * len(WHICH[which]) * passes * step.layers * step.micro_batches
    assert sum(op.allocates - op.frees for op in found.ops) == pytest.approx(
        sum(op.allocates - op.frees for op in graph.ops)
    )
    if which == "all":
        assert all(op.group != "tp" or op.kind in FUSED or op.role == "wgrad" for op in found.ops)
    # What came behind one of the two comes behind the fused op, in any topological order.
    names = {op.name: number for number, op in enumerate(found.ops)}
    place = {number: at for at, number in enumerate(found.order)}
    for number, op in enumerate(graph.ops):
        for dep in graph.deps[number]:
            before = graph.ops[dep]
            if op.name in names and before.name in names:
                assert place[names[before.name]] < place[names[op.name]]


@pytest.mark.parametrize("cluster", ["flux-h800", "flux-a100-pcie"])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("name", ["serial", "domino"])
def test_auto_is_as_fast_as_the_best_choice(
    name: str, degrees: dict[str, Any], cluster: str
) -> None:
    step = step_of(**degrees)
    fabric = fabric_of(step, cluster)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    graph = build_step(step, fabric)
    times = {}
    for which in (*WHICH, "auto"):
        policy = policy_of(name, {"fused": which})
        times[which] = simulate(planned(policy, graph, fabric, cost), cost).iteration_ms
    assert times["auto"] == times[policy.chosen["fused"]]  # type: ignore[attr-defined]
    assert times["auto"] == min(times.values())


def test_auto_fuses_what_is_best_in_the_whole_step() -> None:
    """Two layers and one micro-batch named another choice, 0.3% slower in all."""
    step = TrainingStep(
        "gpt-6.7b", DENSE, 4, "bfloat16", Parallel(tp=2, dp=2), 2048, 2, 2, 0, vocabulary=51200
    )
    layout = StepLayout(load_cluster("flux-a100-nvlink"), step)
    times = {
        which: layout.timeline(policy_of("domino", {"fused": which})).iteration_ms
        for which in (*WHICH, "auto")
    }
    assert times["auto"] == min(times.values())


def test_a_fused_op_is_between_its_gemm_and_the_unfused_call() -> None:
    for cluster, degrees in product(("flux-h800", "flux-a100-nvlink"), DEGREES):
        step = step_of(**degrees)
        fabric = fabric_of(step, cluster)
        cost = AnalyticCost(fabric, step.dtype, step.itemsize)
        for op in fused(build_step(step, fabric), WHICH["all"]).ops:
            if op.kind in FUSED:
                alone = cost.solo(op._replace(kind="gemm"))
                assert alone < cost.solo(op)
                apart = alone + library_ms(cost.problem_of(op), fabric.cluster)
                assert cost.solo(op) <= apart * (1 + 1e-9)
                assert 0 <= cost.oef(op, op._replace(kind="all_reduce", resource="intra")) <= 1


def test_experts_are_fused_with_their_all_to_alls() -> None:
    step = step_of(EXPERTS, **WITH_EXPERTS)
    fabric = fabric_of(step)
    graph, cost = build_step(step, fabric), AnalyticCost(fabric, step.dtype, step.itemsize)
    assert sum(op.kind == "all_to_all" for op in graph.ops) == 4 * step.layers * step.micro_batches
    both = fused(graph, WHICH["all"])
    assert not any(op.kind == "all_to_all" for op in both.ops) and work(both) == work(graph)
    ways = {(op.part, op.role): op for op in both.ops if op.kind == "expert_gemm"}
    dispatching = {key for key, op in ways.items() if op.dispatches}
    assert len(ways) == 4 and dispatching == {("fc1", "fwd"), ("fc2", "dgrad")}
    unfused = {op.role: cost.solo(op) for op in graph.ops if op.kind == "all_to_all"}
    for op in ways.values():
        alone = cost.solo(op._replace(kind="gemm"))
        assert alone < cost.solo(op) < alone + unfused[op.role], op
        problem = cost.problem_of(op)
        assert problem.m * problem.local[0] * problem.local[1] == math.prod(op.shape)
        sent = (problem.world - 1) * problem.chunk * problem.row_bytes
        assert sent == op.shape[0] * step.layer.hidden * step.itemsize * 7 / 8
    times = {}
    for which in ("none", "all", "auto"):
        policy = policy_of("serial", {"fused": which})
        times[which] = simulate(planned(policy, graph, fabric, cost), cost).iteration_ms
    assert times["auto"] == times["all"] < times["none"]
    hosts = Fabric(replace(load_cluster("cpu"), hosts=8), step.parallel)
    on_cpus = AnalyticCost(hosts, "float32", 4)
    assert all(on_cpus.solo(op) > 0 for op in ways.values())


@pytest.mark.parametrize(
    "step, name, options, message",
    [
        (step_of(dp=2), "serial", {"fused": "row"}, "no tensor-parallel or expert-parallel"),
        (step_of(tp=8), "serial", {"fused": "rows"}, "fused must be one of"),
        (step_of(tp=8), "domino", {"fused": "both"}, "fused must be one of"),
        (step_of(tp=8), "domino", {"fused": "row", "columns": 2}, "columns cut what fused ops"),
        (
            step_of(tp=8, sequence=True, regather=False),
            "domino",
            {"fused": "column"},
            "gather their input again in backward",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_fused_is_refused(
    step: TrainingStep, name: str, options: dict[str, Any], message: str
) -> None:
    fabric = fabric_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    with pytest.raises(ValueError, match=message):
        planned(policy_of(name, options), build_step(step, fabric), fabric, cost)


def test_auto_fuses_nothing_where_nothing_can_be() -> None:
    step = step_of(dp=2)
    fabric = fabric_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    policy: Any = policy_of("serial", {"fused": "auto"})
    planned(policy, build_step(step, fabric), fabric, cost)
    assert policy.chosen == {"fused": "none"}


@pytest.mark.parametrize(
    "name, layer, degrees, speeds",
    [
        ("centauri-a", Layer(4096, 16384, 32, 32, 128, False), {"tp": 8}, (1.25, 1.5)),
        ("centauri-b", Layer(12288, 49152, 96, 96, 128, False), {"tp": 4, "dp": 2}, (1.5, 2.0)),
    ],
    ids=str,
)
def test_domino_takes_the_order_that_is_best_in_the_whole_step(
    name: str, layer: Layer, degrees: dict[str, int], speeds: tuple[float, float]
) -> None:
    """A few layers named another order on the better link: 0.4 and 0.7% slower."""
    parallel = Parallel(**degrees, pp=2, sequence="dp" in degrees)
    step = TrainingStep("gpt", layer, 8, "bfloat16", parallel, 4096, 4, 6)
    step = replace(step, vocabulary=51200, tied=True)
    cluster, times = replace(load_cluster(name), hosts=4), []
    for speed in speeds:
        link = replace(cluster.link, gbs=cluster.link.gbs * speed)
        layout = StepLayout(replace(cluster, link=link), step)
        times.append(layout.timeline(policy_of("domino", {"slices": 4})).iteration_ms)
        best = min(
            layout.timeline(policy_of("domino", {"slices": 4, "order": order})).iteration_ms
            for order in ORDERS
        )
        assert times[-1] == best
    assert times[1] <= times[0]


def test_a_better_link_never_makes_a_plan_slower() -> None:
    """Of a seeded sample; a fused op counts all that its choice of path counts."""
    pick = random.Random(1)
    policies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("serial", {"fused": "auto"}),
        ("domino", {"slices": 2, "fused": "auto"}),
    )
    for _ in range(6):
        cluster = load_cluster(pick.choice(["centauri-a", "centauri-b", "flux-a100-nvlink"]))
        degrees = pick.choice([{"tp": 4, "dp": 2}, {"tp": 4, "pp": 2, "dp": 2}, {"tp": 8}])
        layer = pick.choice([DENSE, Layer(12288, 49152, 96, 96, 128, False)])
        step = replace(step_of(layer, sequence=True, **degrees), sequence=pick.choice([1024, 4096]))
        intra, inter = pick.choice([(1, 0), (0, 1), (1, 1)])
        before: list[float] = []
        for speed in (1.0, 1.25, 1.5, 2.0):
            link = replace(cluster.link, gbs=cluster.link.gbs * speed**intra)
            network = replace(cluster.network, gbits=cluster.network.gbits * speed**inter)
            layout = StepLayout(replace(cluster, link=link, network=network, hosts=8), step)
            times = [layout.timeline(policy_of(*policy)).iteration_ms for policy in policies]
            assert not before or all(
                now <= then * (1 + 1e-3) for now, then in zip(times, before, strict=True)
            ), (cluster.name, step, speed, before, times)
            before = times
