"""DHelix's plans: folding, the W-shaped schedule and pairing, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from torch.distributed.pipelining import schedules

from flux.bench.shapes import Layer, Moe
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import planned, policy_of
from flux.plan.policies.folding import fold, w_blocks
from flux.plan.policies.passes import Action, one_f_one_b, row
from flux.plan.policies.torch_rows import blocks_of
from flux.plan.schedule import on_lanes
from flux.plan.simulate import Timeline, simulate

DENSE = Layer(64, 256, 8, 4, 8, True)
EXPERTS = Layer(64, 0, 8, 8, 8, True, Moe(8, 2, 32))


# -- folding and the W-shaped schedule -------------------------------------------------------------


def test_stages_are_folded_as_in_the_paper() -> None:
    """Figure 7: of 32 layers in 8 stages, rank 0 of 4 has the first four and the last four."""
    assert [fold(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    for p in range(1, 60):
        down = list(range(p))
        assert [fold(stage, p) for stage in range(2 * p)] == down + down[::-1]
    assert fold(np.int64(5), p=np.int32(4)) == 2  # type: ignore[arg-type]
    for stage, p in ((-1, 2), (4, 2), (0, 0), (1.0, 2), (True, 2), (np.int64(4), 2)):
        with pytest.raises(ValueError, match="must be an integer"):
            fold(stage, p)  # type: ignore[arg-type]


def longest_path(p: int, m: int, f: float, b: float, s: float) -> tuple[float, list[int]]:
    """Return makespan and interleaved blocks of each rank: the longest path through all blocks.

    Blocks are built here from the paper's rule alone: forward of micro-batch i + p meets backward
    of micro-batch i where both are at the same time.
    """
    block_of: dict[tuple[str, int, int], str] = {}
    times: dict[str, float] = {}
    pairs = [0] * p
    for stage, micro in itertools.product(range(2 * p), range(m)):
        mirror = 2 * p - 1 - stage
        name = block_of["F", stage, micro] = f"{stage} {micro}"
        if micro >= p:
            block_of["B", mirror, micro - p] = name
            pairs[min(stage, mirror)] += 1
        times[name] = s if micro >= p else f
    for stage, micro in itertools.product(range(2 * p), range(m)):
        if ("B", stage, micro) not in block_of:
            name = block_of["B", stage, micro] = f"B {stage} {micro}"
            times[name] = b
    graph = nx.DiGraph()
    graph.add_nodes_from(times)
    for (kind, stage, micro), name in block_of.items():
        if kind == "F" and stage:
            graph.add_edge(block_of["F", stage - 1, micro], name)
        if kind == "B":
            before = ("B", stage + 1, micro) if stage < 2 * p - 1 else ("F", stage, micro)
            graph.add_edge(block_of[before], name)
    # Each rank runs its blocks one after the other, in the order of their slots.
    slots: dict[int, dict[int, str]] = {rank: {} for rank in range(p)}
    for (kind, stage, micro), name in block_of.items():
        slot = 2 * micro + stage if kind == "F" else 2 * (micro + p) + 2 * p - 1 - stage
        assert slots[min(stage, 2 * p - 1 - stage)].setdefault(slot, name) == name
    for of in slots.values():
        graph.add_edges_from(itertools.pairwise([of[slot] for slot in sorted(of)]))
    ends: dict[str, float] = {}
    for name in nx.topological_sort(graph):
        ends[name] = times[name] + max((ends[d] for d in graph.predecessors(name)), default=0.0)
    return max(ends.values()), pairs


def makespan(p: int, m: int, f: float, b: float, s: float) -> float:
    """Return the simulated time of the blocks: of one pass, or of two that are interleaved."""
    flat = [(rank, block) for rank, of in enumerate(w_blocks(p, m)) for block in of]
    at = {action: number for number, (_, block) in enumerate(flat) for action in block}
    ops, deps = [], []
    for number, (rank, block) in enumerate(flat):
        part = "s" if len(block) == 2 else block[0].kind
        ops.append(Operator(str(number), "gemm", "comp", "fwd", rank, part))
        deps.append(())
        for stage, kind, micro in block:
            last = stage == 2 * p - 1
            before = Action(stage, "F", micro) if last else Action(stage + 1, "B", micro)
            before = Action(stage - 1, "F", micro) if kind == "F" else before
            deps[-1] += (at[before],) if before.stage >= 0 else ()  # type: ignore[assignment]
    ranks = [[n for n, op in enumerate(ops) if op.stage == rank] for rank in range(p)]
    schedule = on_lanes(Graph(tuple(ops), tuple(deps)), ranks, "dhelix")
    times = {"F": f, "B": b, "s": s}
    cost: Any = SimpleNamespace(solo=lambda op: times[op.part], oef=lambda *_: 1.0)
    return simulate(schedule, cost).iteration_ms


def test_the_blocks_take_what_the_paper_says() -> None:
    rng = random.Random(0)
    for _ in range(600):
        p, m = rng.randint(1, 5), rng.randint(1, 9)
        f, b = rng.uniform(0.5, 2), rng.uniform(0.5, 4)
        s = rng.choice((rng.uniform(max(f, b), f + b), rng.uniform(0.0, f + b)))
        found = makespan(p, m, f, b, s)
        wanted, pairs = longest_path(p, m, f, b, s)
        assert found == pytest.approx(wanted, rel=1e-12)
        assert [sum(len(block) == 2 for block in of) for of in w_blocks(p, m)] == pairs
        assert pairs == [max(0, 2 * (m - p))] * p
        if m > p and s >= max(f, b):
            assert found == pytest.approx(2 * p * (f + b) + 2 * (m - 1) * s, rel=1e-12)


def test_without_gain_the_folded_pipeline_takes_what_1f1b_does() -> None:
    """Figure 8 has 4 ranks and 12 micro-batches; the share of bubbles is that of 1F1B."""
    assert makespan(4, 12, 1.0, 2.0, 3.0) == (4 - 1 + 12) * (2 + 4)
    assert row(w_blocks(4, 12)[0])[4:6] == ["7F0", "(0F4;7B0)OVERLAP_F_B"]


@pytest.mark.parametrize("p, m", [(0, 4), (2, 0)])
def test_bad_schedules_are_refused(p: int, m: int) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1, got 0"):
        w_blocks(p, m)


# -- policies --------------------------------------------------------------------------------------

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("dhelix", {}),
    ("dhelix", {"events": False, "longest": 2}),
    ("wavelet", {}),
    ("intra_batch", {}),
    ("interleaved", {}),
    ("zbv", {}),
    ("dualpipev", {}),
    ("dualpipev", {"paired": False}),
]


def step_with(layer: Layer = DENSE, **degrees: Any) -> TrainingStep:
    pp = degrees.get("pp", 1)
    micro_batches = degrees.pop("micro_batches", 4 * pp)
    return TrainingStep("test", layer, 8, "bfloat16", Parallel(**degrees), 64, 4, micro_batches)


def timeline_of(step: TrainingStep, name: str, **options: Any) -> Timeline:
    fabric = Fabric(load_cluster("dhelix-a40"), step.parallel)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    graph = build_step(step, fabric)
    return simulate(planned(policy_of(name, options), graph, fabric, cost), cost)


def amounts(graph: Graph) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for op in graph.ops:
        if op.kind != "send":
            size = op.shape[0] * op.shape[1]
            found[op.part, op.role] = found.get((op.part, op.role), 0) + size
    return found


@pytest.mark.parametrize("name, options", POLICIES, ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["ar", "sp"])
@pytest.mark.parametrize("pp", [1, 2])
def test_policies_do_the_work_of_the_step(
    name: str, options: dict[str, Any], sequence: bool, pp: int
) -> None:
    step = step_with(tp=2, dp=2, pp=pp, sequence=sequence)
    if pp == 1 and name in ("interleaved", "zbv", "dualpipev"):
        with pytest.raises(ValueError, match="is a pipeline, and pp is 1"):
            timeline_of(step, name, **options)
        return
    timeline, serial = timeline_of(step, name, **options), timeline_of(step, "serial")
    graph = timeline.schedule.graph
    assert amounts(graph) == amounts(serial.schedule.graph)
    assert sum(op.allocates - op.frees for op in graph.ops) == pytest.approx(0.0, abs=1e-3)
    for number, deps in enumerate(graph.deps):
        assert all(timeline.end[dep] <= timeline.start[number] + 1e-9 for dep in deps)
    sends = [op for op in graph.ops if op.kind == "send"]
    boundaries = {"dhelix": 2 * pp - 2, "wavelet": 2 * pp - 2, "intra_batch": pp - 1}
    times = boundaries.get(name, 2 * pp - (1 if name == "interleaved" else 2))
    assert len(sends) == (2 * step.micro_batches * times if pp > 1 else 0)


def test_rows_of_a_folded_model_name_its_stages() -> None:
    schedule = timeline_of(step_with(tp=2, pp=2, micro_batches=3), "dhelix").schedule
    assert schedule.rows()[1] == [
        *("1F0", "2F0", "1F1", "2F1", "(1F2;2B0)OVERLAP_F_B", "(2F2;1B0)OVERLAP_F_B"),
        *("2B1", "1B1", "2B2", "1B2"),
    ]
    assert schedule.rows() == [row(of) for of in w_blocks(2, 3)]


@pytest.mark.parametrize(
    "name", ["serial", "centauri", "dhelix", "wavelet", "interleaved", "zbv", "dualpipev"]
)
def test_rows_are_a_schedule_of_torch(name: str) -> None:
    """torch's own parser and checks, and its simulation of sends, which must not hang."""
    timeline = timeline_of(step_with(tp=2, pp=2, micro_batches=4), name)
    rows = [[schedules._Action.from_str(cell) for cell in row] for row in timeline.schedule.rows()]
    assert [[str(action) for action in row] for row in rows] == timeline.schedule.rows()
    parts = [[part for a in row for part in a.sub_actions or (a,)] for row in rows]
    ranks = {part.stage_index: rank for rank, row in enumerate(parts) for part in row}
    order = dict(enumerate(rows))
    schedules._validate_schedule(order, 2, len(ranks), 4)
    lowered = schedules._add_send_recv(order, ranks.__getitem__, len(ranks))
    sends = [action for row in lowered.values() for action in row if "SEND" in str(action)]
    crossed = sum(ranks[stage] != ranks[stage + 1] for stage in range(len(ranks) - 1))
    assert len(sends) == 2 * 4 * crossed


class Free:
    """Costs of another model in which sends take no time."""

    def __init__(self, cost: AnalyticCost) -> None:
        self.cost = cost

    def solo(self, op: Operator) -> float:
        return 0.0 if op.kind == "send" or op.role == "step" else self.cost.solo(op)

    def oef(self, comp: Operator, comm: Operator) -> float:
        return self.cost.oef(comp, comm)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_simulated_step_is_the_w_schedule_of_its_passes(pp: int) -> None:
    """Where sends are free: 2p (f + b) + 2 (m - 1) s, with s of the pairing."""
    step = step_with(tp=4, pp=pp, sequence=True, micro_batches=2 * pp + 1)
    fabric = Fabric(load_cluster("dhelix-a40"), step.parallel)
    cost = Free(AnalyticCost(fabric, step.dtype, step.itemsize))
    policy = policy_of("dhelix", {"events": False})
    graph = policy.rewrite(build_step(step, fabric), fabric, cost)
    timeline = simulate(policy.order(graph, cost), cost)
    plan = policy.pairing(graph, cost)  # type: ignore[attr-defined]
    passes = [
        sum(cost.solo(op) for op in graph.ops if (op.role == "fwd") == forward)
        / (2 * pp * step.micro_batches)
        for forward in (True, False)
    ]
    layers = step.layers / (2 * pp)
    expected = 2 * pp * sum(passes) + 2 * (step.micro_batches - 1) * layers * plan.makespan
    # Streams need no barrier, so segments may overlap a little more than was searched for.
    assert 0.9 * expected < timeline.iteration_ms <= expected * (1 + 1e-9)


OFF = {"hides": "none", "links": False, "wgrad": False}


@pytest.mark.parametrize("pp", [1, 2])
def test_with_all_parts_off_the_step_takes_what_1f1b_does(pp: int) -> None:
    step = replace(step_with(tp=8, cp=2, pp=pp, sequence=True), cp_kind="all_gather")
    fabric = Fabric(load_cluster("dhelix-a40"), step.parallel)
    cost = Free(AnalyticCost(fabric, step.dtype, step.itemsize))
    graph = build_step(step, fabric)
    times = [
        simulate(planned(policy_of(name, options), graph, fabric, cost), cost).iteration_ms
        for name, options in (("serial", {}), ("dhelix", OFF), ("dhelix", {**OFF, "hides": "tp"}))
    ]
    assert times[1] == pytest.approx(times[0], rel=1e-9) and times[2] < 0.99 * times[0]


def side_by_side(timeline: Timeline) -> set[str]:
    """Return which kinds of operators of one rank run at the same time.

    ``tp`` and ``cp``: collectives of that group beside computation; ``links``: two collectives;
    ``strand``: two operators of one backward pass.
    """
    found: set[str] = set()
    graph = timeline.schedule.graph
    for rank in range(graph.stages):
        of_rank = [n for n, op in enumerate(graph.ops) if op.stage == rank]
        running: list[int] = []
        for number in sorted(of_rank, key=lambda n: timeline.start[n]):
            op, now = graph.ops[number], timeline.start[number]
            running = [n for n in running if timeline.end[n] > now + 1e-12]
            for other in (graph.ops[n] for n in running):
                found |= {a.group for a, b in ((op, other), (other, op)) if b.resource == "comp"}
                if op.is_collective and other.is_collective:
                    found.add("links")
                if op.micro == other.micro and "fwd" not in (op.role, other.role):
                    found.add("strand")
            running.append(number)
    return found - {""}


@pytest.mark.parametrize(
    "options, never, still",
    [
        ({}, "", "tp cp pp links strand"),
        ({"hides": "cp"}, "tp pp", "cp links"),
        ({"hides": "tp"}, "cp pp", "tp links"),
        ({"hides": "tp+cp"}, "pp", "tp cp"),
        ({"links": False}, "links", "tp cp pp"),
        ({"wgrad": False}, "strand", "tp cp links"),
        ({**OFF, "links": True}, "tp cp pp strand", "links"),
        (OFF, "tp cp pp links strand", ""),
        ({"links": False, "events": False}, "links", "tp cp"),
    ],
    ids=str,
)
def test_a_part_that_is_off_overlaps_nothing(
    options: dict[str, Any], never: str, still: str
) -> None:
    layer = Layer(4096, 14336, 32, 32, 128, True)
    step = step_with(layer, tp=8, cp=2, pp=2, sequence=True, micro_batches=4)
    step = replace(step, cp_kind="all_gather")
    step = replace(step, layers=4, sequence=16384, micro_batch=1)
    found = side_by_side(timeline_of(step, "dhelix", **options))
    assert found.isdisjoint(never.split()) and found.issuperset(still.split())


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("layer", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_peak_memory_is_within_a_layer_of_1f1b(pp: int, layer: Layer) -> None:
    degrees: dict[str, Any] = (
        {"tp": 2, "sequence": True} if layer.moe is None else {"dp": 8, "ep": 8}
    )
    step = step_with(layer, pp=pp, micro_batches=3 * pp, **degrees)
    serial, found = timeline_of(step, "serial"), timeline_of(step, "dhelix")
    ops = serial.schedule.graph.ops
    a_layer = sum(op.allocates for op in ops if op.layer == 0 and op.micro == 0)
    assert found.peak_memory_bytes <= serial.peak_memory_bytes + a_layer


def test_dhelix_gains_where_the_paper_says() -> None:
    step = step_with(Layer(8192, 28672, 64, 8, 128, True), tp=8, sequence=True, micro_batches=8)
    step = replace(step, sequence=8192, micro_batch=1)
    times = {name: timeline_of(step, name).iteration_ms for name in ("serial", "wavelet", "dhelix")}
    assert times["dhelix"] < 0.8 * times["serial"] and times["dhelix"] < 0.9 * times["wavelet"]


@pytest.mark.parametrize(
    "name, options, degrees, message",
    [
        ("dhelix", {}, {"pp": 2, "micro_batches": 2}, "more than 2 micro-batches"),
        ("dhelix", {}, {"micro_batches": 1}, "more than 1 micro-batches"),
        ("dhelix", {}, {"pp": 8}, "16 stages must divide 8 layers"),
        ("dhelix", {"events": 3}, {}, "events must be true or false, got 3"),
        ("dhelix", {"longest": -1}, {}, "longest must be an integer of at least 0, got -1"),
        ("dhelix", {"hides": "tp+xp"}, {}, "groups of tp, cp, .* joined by .*, got 'tp.xp'"),
        ("dhelix", {"hides": True}, {}, "as in tp.cp, got True"),
        ("dhelix", {"wgrad": "late"}, {}, "wgrad must be true or false, got 'late'"),
        ("wavelet", {"longest": 2}, {}, "no option 'longest'"),
        ("intra_batch", {}, {}, "tp is 1"),
        ("intra_batch", {"chunks": 1}, {}, "chunks must be an integer of at least 2"),
        ("interleaved", {"chunks": 1}, {}, r"chunks must be an integer in \[2, 65\)"),
        ("dualpipev", {"paired": 1}, {"pp": 2}, "paired must be true or false, got 1"),
        ("dualpipev", {}, {"pp": 2, "micro_batches": 2}, "DualPipeV: 2 micro-batches on 2 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(
    name: str, options: dict[str, Any], degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_of(step_with(**degrees), name, **options)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_torchs_schedules_have_every_pass_once(name: str) -> None:
    rows = blocks_of(name, 2, 4, 6)
    actions = [action for row in rows for block in row for action in block]
    for stage, micro in itertools.product(range(4), range(6)):
        kinds = sorted(a.kind for a in actions if a.stage == stage and a.micro == micro)
        assert kinds in (["B", "F"], ["F", "I", "W"])
    with pytest.raises(ValueError, match="no pipeline schedule Other"):
        blocks_of("Other", 2, 4, 6)


def test_strands_without_a_pipeline_are_whole_passes() -> None:
    schedule = timeline_of(step_with(tp=2, micro_batches=2), "dhelix").schedule
    assert schedule.rows() == [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]
    first, second, third = one_f_one_b(0, 1, 2)
    assert (first, third) == ((Action(0, "F", 0),), (Action(0, "B", 1),)) and len(second) == 2


def test_recomputed_layers_of_a_stage_are_spread_over_the_ranks_of_its_chunks() -> None:
    """All were on rank 0: twice as many took more time, and no less memory."""
    step = replace(step_with(pp=2), recompute="2")
    fabric = Fabric(load_cluster("dhelix-a40"), step.parallel)
    cost, graph = AnalyticCost(fabric, step.dtype, step.itemsize), build_step(step, fabric)
    for name in ("serial", "interleaved", "zbv"):
        placed = policy_of(name).rewrite(graph, fabric, cost)
        ranks = [op.stage for op in placed.ops if op.role == "recompute"]
        assert ranks.count(0) == ranks.count(1) > 0, name
