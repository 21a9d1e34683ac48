"""Graphs of a step, schedules, and the simulator: properties, closed forms, and bad input."""

from __future__ import annotations

import inspect
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flux.bench.shapes import Layer, Moe
from flux.cli.app import app
from flux.core.knobs import Op as FusedOp
from flux.core.problem import Problem
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, GraphError, Operator
from flux.plan.model import Parallel, TrainingStep, step_of
from flux.plan.options import parse_policy
from flux.plan.page import SHORTENED, halved, slower
from flux.plan.policies import label_of, planned, policy_names, policy_of
from flux.plan.policies.domino import ORDERS, DominoPolicy
from flux.plan.policies.passes import one_f_one_b
from flux.plan.sample import StepLayout
from flux.plan.schedule import StepSchedule
from flux.plan.simulate import Timeline, simulate
from flux.runtime.profile import Profile, ProfiledCost, key_of
from flux.select.cost import library_ms
from flux.select.hardware import LAUNCH_US, OVERLAP
from flux.trainers.common import Planned
from flux.trainers.files import exported
from harness import STRESS

DENSE = Layer(64, 256, 8, 4, 8, True)
EXPERTS = Layer(64, 0, 8, 8, 8, True, Moe(8, 2, 32))
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("serial", {}),
    ("serial", {"wgrad_overlap": True}),
    ("domino", {}),
    ("domino", {"slices": 4, "order": "blocks"}),
    ("domino", {"slices": 1, "columns": 2}),
    ("domino", {"slices": 2, "columns": 2}),
]


def step_with(
    layer: Layer = DENSE, layers: int = 4, micro_batches: int = 1, **degrees: Any
) -> TrainingStep:
    return TrainingStep(
        "test", layer, layers, "bfloat16", Parallel(**degrees), 64, 4, micro_batches
    )


def fabric_of(step: TrainingStep, cluster: str = "flux-h800") -> Fabric:
    return Fabric(load_cluster(cluster), step.parallel)


def plan(
    step: TrainingStep, name: str, cluster: str = "flux-h800", **options: Any
) -> tuple[StepSchedule, AnalyticCost]:
    fabric = fabric_of(step, cluster)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    return planned(policy_of(name, options), build_step(step, fabric), fabric, cost), cost


class Given:
    """Costs that a test gives."""

    def __init__(self, times: dict[str, float], oef: float = 1.0) -> None:
        self.times, self.factor = times, oef

    def solo(self, op: Operator) -> float:
        return self.times[op.name]

    def oef(self, comp: Operator, comm: Operator) -> float:
        return self.factor


def tiny(*rows: tuple[str, str, tuple[int, ...]]) -> Graph:
    """A graph of (name, resource, deps) on one stage."""
    ops = [
        Operator(name, "gemm" if resource == "comp" else "all_reduce", resource, "fwd", 0, name,
           shape=(1, 1, 1), group="" if resource == "comp" else "tp")
        for name, resource, _ in rows
    ]  # fmt: skip
    return Graph(tuple(ops), tuple(deps for _, _, deps in rows))


def lanes_of(graph: Graph) -> StepSchedule:
    lanes: dict[tuple[int, str], list[int]] = {}
    for number in graph.order:
        lanes.setdefault((0, graph.ops[number].resource), []).append(number)
    return StepSchedule(graph, {lane: tuple(numbers) for lane, numbers in lanes.items()})


# -- graphs ----------------------------------------------------------------------------------------


def test_a_layer_has_14_operators_forward_and_18_backward() -> None:
    """The counts of DHelix, section 4.2."""
    step = step_with(layers=1, tp=8, sequence=True)
    ops = [op for op in build_step(step, fabric_of(step)).ops if op.role != "step"]
    assert sum(op.role == "fwd" for op in ops) == 14
    assert sum(op.role != "fwd" for op in ops) == 18


@pytest.mark.parametrize(
    "degrees, layer",
    [
        ({"tp": 2}, DENSE),
        ({"tp": 4, "sequence": True, "dp": 2}, DENSE),
        ({"tp": 2, "cp": 2, "pp": 2}, DENSE),
        ({"dp": 4, "ep": 4, "tp": 2}, EXPERTS),
        ({"pp": 4, "dp": 2}, DENSE),
    ],
    ids=str,
)
def test_work_is_that_of_the_model(degrees: dict[str, Any], layer: Layer) -> None:
    """GEMMs of all ranks: six operations per weight and token, of experts per routed token."""
    step = step_with(layer, micro_batches=3, **degrees)
    graph = build_step(step, fabric_of(step))
    flops = sum(
        2.0 * op.shape[0] * op.shape[1] * op.shape[2] for op in graph.ops if op.kind == "gemm"
    )
    p = step.parallel
    tokens = step.micro_batch * step.sequence * step.micro_batches * p.dp
    inner = layer.heads * layer.head_dim
    kv = layer.kv_heads * layer.head_dim
    weights = layer.hidden * (2 * inner + 2 * kv)
    if layer.moe is None:
        weights += 3 * layer.hidden * layer.intermediate
    else:
        # Without sequence parallelism every tensor parallel rank runs the experts.
        routed = p.tp * (layer.moe.experts + 3 * layer.moe.top_k * layer.moe.intermediate)
        weights += layer.hidden * routed
    ranks = p.world / p.pp  # of a stage
    assert flops * ranks == pytest.approx(6.0 * weights * step.layers * tokens, rel=1e-12)


def test_memory_is_free_at_the_end() -> None:
    for layer, degrees in ((DENSE, {"tp": 2, "pp": 2}), (EXPERTS, {"dp": 2, "ep": 2})):
        step = step_with(layer, micro_batches=4, **degrees)
        graph = build_step(step, fabric_of(step))
        assert sum(op.allocates - op.frees for op in graph.ops) == pytest.approx(0.0, abs=1e-6)


def test_a_cycle_is_named() -> None:
    ops = tiny(("a", "comp", ()), ("b", "comp", (0,)), ("c", "comp", (1,))).ops
    with pytest.raises(GraphError, match=r"a cycle of dependencies: .*b -> .*"):
        Graph(ops, ((), (0, 2), (1,)))
    with pytest.raises(GraphError, match="two operators are named 'a'"):
        Graph((ops[0], ops[0]), ((), ()))
    with pytest.raises(GraphError, match="a depends on operator 7 of 1"):
        Graph((ops[0],), ((7,),))
    with pytest.raises(GraphError, match=r"kind must be one of .*, got 'magic'"):
        Graph((ops[0]._replace(kind="magic"),), ((),))


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", POLICIES, ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["ar", "sp"])
@pytest.mark.parametrize("pp", [1, 2])
def test_policies_give_valid_schedules(
    name: str, options: dict[str, Any], sequence: bool, pp: int
) -> None:
    """Every operator once; collectives of equal kind and volume; passes as many as before."""
    step = step_with(tp=2, dp=2, pp=pp, sequence=sequence, micro_batches=2 * pp)
    schedule, cost = plan(step, name, **options)
    plain = build_step(step, fabric_of(step))

    def volume(graph: Graph) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for op in graph.ops:
            size = op.shape[0] * op.shape[1] if op.is_collective else 0
            found[op.part, op.role] = found.get((op.part, op.role), 0) + size
        return found

    assert volume(schedule.graph) == volume(plain)
    timeline = simulate(schedule, cost)
    for number, deps in enumerate(schedule.graph.deps):
        assert all(timeline.end[dep] <= timeline.start[number] + 1e-9 for dep in deps)
    for numbers in schedule.lanes.values():
        assert sorted(numbers, key=lambda n: timeline.start[n]) == list(numbers)
    assert timeline.iteration_ms <= sum(timeline.solo) + 1e-6
    assert timeline.iteration_ms >= timeline.compute_ms - 1e-6


def test_policies_never_lose_to_serial_by_much_and_hide_what_they_should() -> None:
    step = step_of("gpt3-175b", Parallel(tp=8), layers=4, micro_batch=4)
    serial = simulate(*plan(step, "serial"))
    domino = simulate(*plan(step, "domino"))
    assert serial.exposed_comm_ms == pytest.approx(serial.comm_ms)
    assert domino.exposed_comm_ms < 0.35 * domino.comm_ms
    assert domino.iteration_ms < 0.9 * serial.iteration_ms


@pytest.mark.parametrize("tp, slices, expected", [(32, 2, "grouped"), (8, 4, "staggered")])
def test_domino_takes_the_order_that_is_fastest(tp: int, slices: int, expected: str) -> None:
    """On four hosts GEMMs are short, and norms, which are not split, hide what GEMMs do not."""
    layer = Layer(4096, 11008, 32, 32, 128, True)
    step = TrainingStep("test", layer, 8, "bfloat16", Parallel(tp=tp), 512, 64, 1)
    fabric = fabric_of(step, "domino-dgx-h100")
    cost, times = AnalyticCost(fabric, step.dtype, step.itemsize), {}
    for order in (*ORDERS, "auto"):
        policy = DominoPolicy(slices, order=order)
        schedule = planned(policy, build_step(step, fabric), fabric, cost)
        times[order] = simulate(schedule, cost).iteration_ms
    others = [times[order] for order in ORDERS if order != expected]
    assert times["auto"] == times[expected] < 0.985 * min(others), times
    assert label_of("domino", {"slices": slices}, policy) == (
        f"domino slices={slices} order={expected}"
    )


def test_schedules_that_cannot_run_are_refused() -> None:
    graph = tiny(("a", "comp", ()), ("r", "intra", (0,)), ("b", "comp", (1,)))
    comp, intra = (0, "comp"), (0, "intra")
    for lanes, message in (
        ({comp: (0, 2)}, "r is not scheduled"),
        ({comp: (0, 2, 0), intra: (1,)}, "a is scheduled twice"),
        ({comp: (2, 0), intra: (1,)}, "the lanes contradict the dependencies: a cycle"),
        ({(1, "comp"): (0, 2), intra: (1,)}, "is on a lane of stage 1"),
        ({comp: (0, 2, 9), intra: (1,)}, "no operator has number 9"),
    ):
        with pytest.raises(GraphError, match=message):
            StepSchedule(graph, lanes).validate()


@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (2, 1), (4, 8), (4, 2)])
def test_one_f_one_b_holds_no_more_than_its_stages(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        held = most = 0
        blocks = one_f_one_b(stage, stages - stage - 1, micro_batches)
        order = [(kind, micro) for block in blocks for _, kind, micro in block]
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert sorted(order) == sorted((k, m) for k in "FB" for m in range(micro_batches))
        assert held == 0 and most == min(stages - stage, micro_batches)


def test_rows_are_those_of_pipelining() -> None:
    schedule, _ = plan(step_with(tp=2, pp=2, micro_batches=3), "domino")
    assert schedule.rows() == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


# -- the simulator ---------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_without_interference_the_end_is_the_longest_path(seed: int) -> None:
    """One operator a lane, so only dependencies matter."""
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    deps = [tuple(d for d in range(n) if rng.random() < 0.3) for n in range(count)]
    graph = tiny(*((f"o{n}", "comp", deps[n]) for n in range(count)))
    times = {f"o{n}": rng.random() for n in range(count)}
    schedule = StepSchedule(graph, {(0, f"lane {n}"): (n,) for n in range(count)})
    ends: list[float] = []
    for n in range(count):
        ends.append(times[f"o{n}"] + max((ends[d] for d in deps[n]), default=0.0))
    assert simulate(schedule, Given(times)).end == pytest.approx(ends)


@pytest.mark.parametrize("oef", [1.0, 0.5, 0.0, -0.5])
def test_two_at_a_time_take_what_their_oef_says(oef: float) -> None:
    """P = T_i + T_j - OEF * min(T_i, T_j)."""
    graph = tiny(("a", "comp", ()), ("r", "intra", ()))
    for a, r in ((3.0, 3.0), (2.0, 5.0), (5.0, 2.0)):
        found = simulate(lanes_of(graph), Given({"a": a, "r": r}, oef)).iteration_ms
        assert found == pytest.approx(a + r - oef * min(a, r))


def by_steps(
    graph: Graph, lanes: dict[tuple[int, str], tuple[int, ...]], cost: RandomCost
) -> list[float]:
    """Return ends of operators: all that can run do, until the first one of them has ended."""
    ops, now, places = graph.ops, 0.0, dict.fromkeys(lanes, 0)
    left = [cost.solo(op) for op in ops]
    ends: dict[int, float] = {}
    while len(ends) < len(ops):
        heads = [lanes[lane][place] for lane, place in places.items() if place < len(lanes[lane])]
        running = [n for n in heads if all(dep in ends for dep in graph.deps[n])]
        rates = {}
        for n in running:
            others = [m for m in running if ops[m].is_collective != ops[n].is_collective]
            pairs = [(m, n) if ops[n].is_collective else (n, m) for m in others]
            rates[n] = 1 / (1 + sum(1 - cost.oef(ops[a], ops[b]) for a, b in pairs))
        step = min(left[n] / rates[n] for n in running)
        now += step
        for n in running:
            left[n] -= step * rates[n]
            if left[n] <= 1e-12:
                ends[n] = now
        places = {lane: sum(n in ends for n in numbers) for lane, numbers in lanes.items()}
    return [ends[n] for n in range(len(ops))]


class RandomCost:
    """Random times, and an OEF for each pair."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.known: dict[tuple[str, ...], float] = {}

    def solo(self, op: Operator) -> float:
        return self.known.setdefault((op.name,), self.rng.choice((1.0, 2.0, self.rng.random())))

    def oef(self, comp: Operator, comm: Operator) -> float:
        return self.known.setdefault((comp.name, comm.name), self.rng.uniform(-1.0, 1.0))


@given(st.integers(0, 2**32))
def test_any_number_at_a_time_slow_each_other_down(seed: int) -> None:
    """Up to three lanes: compute, links inside a host, ports."""
    rng = random.Random(seed)
    rows = [
        (f"o{n}", rng.choice(("comp", "intra", "inter")),
         tuple(d for d in range(n) if rng.random() < 0.25))
        for n in range(rng.randint(1, 9))
    ]  # fmt: skip
    schedule, cost = lanes_of(tiny(*rows)), RandomCost(rng)
    wanted = by_steps(schedule.graph, dict(schedule.lanes), cost)
    assert simulate(schedule, cost).end == pytest.approx(wanted, abs=1e-9)


def test_exposed_communication_is_what_no_compute_covers() -> None:
    graph = tiny(
        ("a", "comp", ()), ("r", "intra", (0,)), ("b", "comp", (0,)), ("c", "comp", (1, 2))
    )
    found = simulate(lanes_of(graph), Given({"a": 1.0, "r": 3.0, "b": 2.0, "c": 1.0}))
    assert (found.iteration_ms, found.exposed_comm_ms) == pytest.approx((5.0, 1.0))
    assert (found.compute_ms, found.comm_ms) == (4.0, 3.0)


def test_gain_is_within_its_bounds() -> None:
    """With a share a of communication, hiding it gains at most min(1 / a, 1 / (1 - a))."""
    for cluster, tp in (
        ("flux-h800", 8),
        ("flux-a100-pcie", 8),
        ("dhelix-a40", 8),
        ("flux-h800", 2),
    ):
        step = step_of("gpt3-175b", Parallel(tp=tp), layers=2, micro_batch=4)
        serial = simulate(*plan(step, "serial", cluster))
        share = serial.comm_ms / serial.iteration_ms
        for options in ({"slices": 2}, {"slices": 4}, {"slices": 2, "columns": 2}):
            gain = (
                serial.iteration_ms
                / simulate(*plan(step, "domino", cluster, **options)).iteration_ms
            )
            assert gain <= min(1 / share, 1 / (1 - share)) + 1e-9


def test_peak_memory_of_a_pipeline_grows_towards_its_first_stage() -> None:
    step = step_with(tp=1, pp=4, micro_batches=8)
    timeline = simulate(*plan(step, "serial"))
    held = timeline.schedule.graph.resident_by_stage
    peaks = [peak - resident for peak, resident in zip(timeline.peak, held, strict=True)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] == pytest.approx(4 * peaks[3], rel=0.2)


@pytest.mark.alone
def test_small_plans_take_milliseconds_and_large_ones_seconds() -> None:
    """Of this process's time: tests run beside each other, which makes it up to twice as long.

    Alone, the large one takes 8 seconds (docs/use/scale.md); a quarter of it 2, in make test.
    """
    step = step_of("gpt3-13b", Parallel(tp=4), layers=3, micro_batch=2)
    schedule, cost = plan(step, "domino")
    begin = time.process_time()
    simulate(schedule, cost)
    assert time.process_time() - begin < 0.1
    layers, limit_s = (128, 20) if STRESS > 1 else (32, 6)
    large = step_of("llama3-405b", Parallel(tp=8, dp=128, pp=16), layers=layers, micro_batch=2)
    cluster = replace(load_cluster("dhelix-h100"), hosts=16384 // 8)
    begin = time.process_time()
    fabric = Fabric(cluster, large.parallel)
    cost = AnalyticCost(fabric, large.dtype, large.itemsize)
    graph = build_step(large, fabric)
    timeline = simulate(planned(policy_of("domino"), graph, fabric, cost), cost)
    assert time.process_time() - begin < limit_s and timeline.iteration_ms > 0


# -- bad input, files, commands --------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tp": 3}, "tp = 3 must divide heads = 8"),
        ({"pp": 5}, "pp = 5 must be at most layers = 4"),
        ({"dp": 3, "ep": 2}, "ep = 2 must divide dp = 3"),
        ({"dp": 2, "ep": 2}, "ep = 2 needs a model with experts"),
        ({"tp": 0}, "tp must be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_with(**change)


def test_clusters_that_are_too_small_or_unknown_are_refused() -> None:
    step = step_with(tp=8, dp=32)
    cluster = load_cluster("flux-h800")
    with pytest.raises(ValueError, match=r"has 128 devices .*, and tp \* cp \* dp \* pp = 256"):
        Fabric(cluster, step.parallel)
    unknown = replace(cluster, hosts=32, network=replace(cluster.network, gbits=0.0))
    with pytest.raises(ValueError, match="the network's speed is not known, and dp = 32 crosses"):
        Fabric(unknown, step.parallel)
    without = replace(cluster, hosts=32, link=replace(cluster.link, gbs=0.0))
    with pytest.raises(ValueError, match=r"link\.gbs is not known, and tp needs it"):
        Fabric(without, step.parallel)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slices": 3}, "3 slices must divide a micro-batch of 4"),
        ({"slices": 1}, "slices or columns must be at least 2"),
        ({"slices": 0}, "slices must be an integer of at least 1, got 0"),
        ({"magic": 1}, "policy domino: .*magic"),
    ],
    ids=str,
)
def test_options_of_domino_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(step_with(tp=2), "domino", **options)


def test_policies_are_found_by_name() -> None:
    assert {"serial", "zbv", "domino"} <= set(policy_names())
    for name in policy_names():
        assert policy_of(name).name == name
    with pytest.raises(ValueError, match=r"policy must be one of .*domino.*, got 'magic'"):
        policy_of("magic")


def test_times_that_were_not_measured_are_estimated_from_those_that_were() -> None:
    schedule, cost = plan(step_with(tp=2), "serial")
    ops = schedule.graph.ops
    profile = Profile({key_of(op): cost.solo(op) for op in ops}, {("gemm", "intra"): 0.25})
    timeline: Timeline = simulate(schedule, ProfiledCost(profile, cost))
    assert timeline.iteration_ms == pytest.approx(simulate(schedule, cost).iteration_ms)
    # An estimate is scaled as the measured operators of its kind and group say, or of its kind.
    slow = Profile({key: (3 if key[0] == "gemm" else 5) * ms for key, ms in profile.solo.items()})
    estimated = ProfiledCost(slow, cost)
    other, _ = plan(step_with(tp=4), "serial")
    for op in (*ops, *other.graph.ops):
        assert estimated.solo(op) == pytest.approx((3 if op.kind == "gemm" else 5) * cost.solo(op))
    comp, comm = (
        next(op for op in ops if (op.kind == "gemm", op.is_collective) == of)
        for of in ((True, False), (False, True))
    )
    assert estimated.oef(comp, comm) == cost.oef(comp, comm)
    assert ProfiledCost(profile, cost).oef(comp, comm) == 0.25


def test_the_command_prints_json_and_says_what_is_wrong(tmp_path: Path) -> None:
    run = CliRunner().invoke
    base = ["plan", "simulate", "--layers", "2", "--micro-batch", "4"]
    both = ["--policy", "serial", "--policy", "domino:slices=4,order=blocks"]
    trace = tmp_path / "trace.json"
    drawn = tmp_path / "page.html"
    files = ["--trace", str(trace), "--html", str(drawn)]
    result = run(app, [*base, *both, "--json", "-", *files])
    assert result.exit_code == 0, result.output
    serial, domino = json.loads(result.output)
    assert set(serial) == {
        *("policy", "model", "cluster", "tp", "dp", "pp", "iteration_ms", "compute_ms"),
        *("comm_ms", "exposed_comm_ms", "peak_memory_bytes", "idle_ms", "tokens_per_s"),
        *("tokens_per_s_per_device", "mfu", "memory_bytes"),
    }
    assert domino["policy"] == "domino slices=4 order=blocks"
    assert domino["iteration_ms"] < serial["iteration_ms"]
    lanes = {
        e["args"]["name"]
        for e in json.loads(trace.read_text())["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert "serial: comp" in lanes and "domino slices=4 order=blocks: intra" in lanes
    page = drawn.read_text()
    assert page.count("<rect") > 100 and "<title>L0.qkv.m0.s3 (gemm " in page
    addresses = set(re.findall(r"https?://[^'\" ]+|(?:src|href)=", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # nothing is fetched
    _, candidates, at_half, _ = page.split("<h2>")
    assert f"{100 * domino['mfu']:.1f}%" in candidates and "activations " in candidates
    cluster = load_cluster("flux-h800")
    half = replace(cluster, link=replace(cluster.link, gbs=cluster.link.gbs / 2))
    step = step_of("gpt3-175b", Parallel(tp=8), layers=2, micro_batch=4)
    then = StepLayout(half, step).timeline(policy_of("domino", {"slices": 4, "order": "blocks"}))
    change = 100 * (then.iteration_ms / domino["iteration_ms"] - 1)
    cells = [f"{domino['iteration_ms']:.1f} ms", f"{then.iteration_ms:.1f} ms", f"{change:+.1f}%"]
    assert change > 5 and "".join(f"<td>{cell}</td>" for cell in cells) in at_half
    assert "domino slices=4 order=blocks: " in page
    vector = tmp_path / "picture.svg"
    assert run(app, [*base, *both, "--html", str(vector)]).exit_code == 0
    root = ElementTree.parse(vector).getroot()
    drawn_bars = sum(e.get("d", "").count("M") for e in root.iter())
    assert drawn_bars == page.count("<title>L") + page.count("<title>S")
    for words, message in (
        (["--html", str(vector), "--micro-batches", "500", "--memory-gb", "1e6"], "is too large"),
        (["--tp", "7"], "tp = 7 must divide heads = 96"),
        (["--policy", "magic"], "policy must be one of"),
        (["--policy", "domino:slices"], "expected option=value, got 'slices'"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--memory-gb", "1"], "a device needs"),
        (["--memory-gb", "nan"], "memory must be above 0 GB, got nan"),
        (["--memory-gb", "0"], "memory must be above 0 GB, got 0"),
        (["--dp", "4000"], "more hosts can be assumed"),
    ):
        result = run(app, [*base, *words])
        assert result.exit_code == 2 and message in result.output, result.output
    with mock.patch("flux.plan.picture.MOST_OPS", 200):
        words = ["--layers", "8", "--html", str(drawn), "--policy", "serial"]
        assert run(app, [*base, *words]).exit_code == 0 and SHORTENED in drawn.read_text()
    result = run(app, ["plan", "explain", "--layers", "2", "--policy", "serial"])
    assert result.exit_code == 0 and "has most exposed communication" in result.output


@pytest.mark.parametrize("hosts_of_ring", [1, 4])
def test_chunks_of_a_ring_travel_beside_attention(hosts_of_ring: int) -> None:
    degrees = {"cp": 4} if hosts_of_ring == 1 else {"tp": 8, "cp": 4}
    times = {}
    for kind in ("ring", "all_gather"):
        step = step_of(
            *("llama3-8b", Parallel(**degrees)),
            sequence=16384,
            layers=2,
            recompute="selective",
            cp_kind=kind,
        )
        fabric = Fabric(replace(load_cluster("flux-h800"), hosts=hosts_of_ring), step.parallel)
        cost, graph = AnalyticCost(fabric, step.dtype, 2), build_step(step, fabric)
        times[kind] = simulate(planned(policy_of("serial"), graph, fabric, cost), cost)
        rings = [op for op in graph.ops if op.kind == "ring_attention"]
        assert any(op.part == "ag_kv" for op in graph.ops) == (not rings)
        if not rings:
            continue
        assert [op.role for op in rings] == ["fwd", "fwd"] + ["recompute", "dgrad"] * 2
        forward, backward = rings[0], rings[-1]
        batch, _, queries, _, _, width = forward.shape
        whole = forward._replace(kind="attention", shape=forward.shape[:5], group="")
        launch = 1e-3 * LAUNCH_US["cuda"]
        gbs = fabric.cluster.link.gbs if hosts_of_ring == 1 else 50.0
        delay = (fabric.cluster.link if hosts_of_ring == 1 else fabric.cluster.network).latency_us
        hop = 2 * batch * queries * width / (gbs * 1e6) + 1e-3 * delay
        oef = OVERLAP["cuda"][min(hosts_of_ring, 2)]
        for op, moves, last in ((forward, 1, 0.0), (backward, 2, hop)):
            chunk = launch + (cost.solo(whole._replace(role=op.role)) - launch) / 4
            beside = chunk + moves * hop - oef * min(chunk, moves * hop)
            assert cost.solo(op) == pytest.approx(chunk + 3 * beside + last)
        comm = next((op for op in graph.ops if op.group == "tp"), None)
        assert comm is None or cost.oef(forward, comm) == OVERLAP["cuda"][1]
    assert times["ring"].iteration_ms < times["all_gather"].iteration_ms
    with pytest.raises(ValueError, match="a ring needs fused attention"):
        replace(step, unfused_attention=True, cp_kind="ring")
    with pytest.raises(ValueError, match="one of ring, all_gather, torch, got 'mesh'"):
        replace(step, cp_kind="mesh")


def test_a_compiled_ring_gathers_all_query_heads_and_sends_their_gradients_in_float32() -> None:
    step = step_of(
        *("llama3-8b", Parallel(cp=4)), sequence=16384, layers=1, recompute="full", cp_kind="torch"
    )
    fabric = Fabric(load_cluster("flux-h800"), step.parallel)
    cost = AnalyticCost(fabric, step.dtype, 2)
    times = {(op.part, op.role): cost.solo(op) for op in build_step(step, fabric).ops}
    # Keys and values of a rank's 4,096 tokens in bfloat16, 32 heads of 128, at 0.8 of 200 GB/s.
    chunk = 2 * 2 * 4096 * 32 * 128 / (0.8 * 200e6)
    for role in ("fwd", "recompute"):
        assert times["ag_kv", role] == pytest.approx(3 * chunk, rel=0.02)
    assert times["ag_kv", "dgrad"] == pytest.approx((3 + 2 * 4) * chunk, rel=0.02)
    assert times["sums", "dgrad"] > 2 * times["sums", "fwd"] > 0
    with pytest.raises(ValueError, match="cp_kind = torch"):
        exported("megatron", Planned(step, "serial", {}))


@pytest.mark.parametrize(
    ("cluster", "tp", "oef"),
    [
        ("dhelix-h100", 8, 0.5787),  # table 7 of DHelix's paper
        ("dhelix-h100", 16, 0.6673),
        ("dhelix-h100", 24, 0.6673),
        ("dhelix-h100", 32, 0.5172),
        ("dhelix-a40", 8, 0.83),
        ("flux-h800", 8, OVERLAP["cuda"][1]),
        ("flux-h800", 32, OVERLAP["cuda"][2]),
    ],
)
def test_overlap_is_that_of_the_clusters_file(cluster: str, tp: int, oef: float) -> None:
    cost = AnalyticCost(Fabric(load_cluster(cluster), Parallel(tp=tp)), "bfloat16", 2)
    gemm = Operator("g", "gemm", "comp", "fwd", 0, "g", shape=(8, 8, 8))
    comm = Operator("c", "all_gather", "inter", "fwd", 0, "c", shape=(8, 8), group="tp")
    assert cost.oef(gemm, comm) == oef


def test_collectives_of_gradients_wait_or_run_beside_computation_by_an_option_of_their_own() -> (
    None
):
    step = step_with(Layer(512, 2048, 8, 8, 64, True), tp=2, dp=8)

    def streams(**options: Any) -> dict[str, set[str]]:
        schedule, _ = plan(step, "serial", **options)
        ops, found = schedule.graph.ops, dict[str, set[str]]()
        for (_, stream), numbers in schedule.lanes.items():
            for number in numbers:
                found.setdefault(ops[number].group, set()).add(stream)
        return found

    beside = streams(wgrad_overlap=True)
    assert "comp" not in beside["tp"] | beside["dp"]
    only_tp = streams(wgrad_overlap=True, overlap_grad_reduce=False)
    assert only_tp == beside | {"dp": {"comp"}}
    assert streams(overlap_grad_reduce=True) == beside | {"tp": {"comp"}}
    with pytest.raises(ValueError, match="overlap_grad_reduce must be true or false, got 2"):
        policy_of("serial", {"overlap_grad_reduce": 2})


def test_a_page_says_whether_another_plan_wins_with_a_slower_link() -> None:
    def row(policy: str, ms: float) -> dict[str, Any]:
        return {"policy": policy, "iteration_ms": ms, "exposed_comm_ms": 1.0, "mfu": None} | {
            "tokens_per_s_per_device": 1e3 / ms
        }

    rows = [row("a", 10.0), row("b", 11.0), row("c", 9.0) | {"error": "too large"}]
    others = [row("a", 14.0), row("b", 12.0), row("c", 9.0)]
    changed = slower(rows, others, "the network")
    assert "a is no longer the fastest of these plans: b is faster than it by 16.7%." in changed
    assert "<td>+40.0%</td>" in changed and "<td class=text>c</td>" not in changed
    others[1] |= {"error": "too large"}
    assert "a is the fastest of these plans at both speeds." in slower(rows, others, "the network")
    several = halved(load_cluster("flux-h800"), 9)[0], halved(load_cluster("flux-h800"), 8)[0]
    assert [cluster.network.gbs for cluster in several] == [200.0, 400.0]
    assert several[0].link.gbs == 2 * several[1].link.gbs


# -- policies that fail ----------------------------------------------------------------------------


def test_a_policy_that_fails_is_a_row_beside_the_others() -> None:
    run = CliRunner().invoke
    base = ["plan", "simulate", "--layers", "2", "--micro-batch", "2"]
    names = ["zbv", "serial", "domino:slices=4", "domino"]
    words = [*base, *(word for name in names for word in ("--policy", name))]
    shown = run(app, words)
    assert shown.exit_code == 1 and "│ serial " in shown.stdout and "│ domino " in shown.stdout
    for reason in ("zbv is a pipeline, and pp is 1", "4 slices must divide"):
        assert reason in shown.stderr and reason.split()[-1] in shown.stdout
    rows = json.loads(run(app, [*words, "--json", "-"]).stdout)
    labels = ["zbv", "serial", "domino slices=4", "domino order=staggered"]
    assert [row["policy"] for row in rows] == labels
    assert ["error" in row for row in rows] == [True, False, True, False]
    assert rows[0]["error"] == "zbv is a pipeline, and pp is 1" and rows[1]["iteration_ms"] > 0
    # One that lacks memory has its figures, too.
    pipeline = ["plan", "simulate", "--layers", "4", "--tp", "4", "--pp", "2", "--json", "-"]
    both = json.loads(run(app, [*pipeline, "--policy", "serial", "--policy", "wavelet"]).stdout)
    low, high = sorted(row["peak_memory_bytes"] for row in both)
    limit = ["--memory-gb", str((low + high) / 2e9)]
    lacking = run(app, [*pipeline, *limit, "--policy", "serial", "--policy", "wavelet"])
    assert lacking.exit_code == 1
    reasons = [row.get("error", "") for row in json.loads(lacking.stdout)]
    assert sum("a device needs" in reason for reason in reasons) == 1
    explained = run(app, ["plan", "explain", *words[2:]])
    assert explained.exit_code == 1 and "has most exposed communication" in explained.stdout


@pytest.mark.parametrize("name", policy_names())
def test_a_wrong_option_gets_one_line_with_the_right_ones(name: str) -> None:
    known = inspect.signature(type(policy_of(name))).parameters
    wrong: list[dict[str, Any]] = [{"slice": 2}]
    wrong += [{key: value} for key in known for value in ("nonsense", 1.5, -3)]
    for options in wrong:
        if name == "centauri" and options == {"memory_gb": 1.5}:
            continue
        with pytest.raises(ValueError, match=f"^(policy )?{name}") as caught:
            policy_of(name, options)
        message = str(caught.value)
        listed = message.partition("its options: ")[2]
        assert all(f"{key}=" in listed for key in known) and (known or listed == "none")
        assert "\n" not in message and "__init__" not in message and "argument" not in message


def test_options_of_a_policy_are_given_once_and_may_be_fractions() -> None:
    assert parse_policy("centauri:memory_gb=1.5,model=false") == (
        "centauri",
        {"memory_gb": 1.5, "model": False},
    )
    with pytest.raises(ValueError, match="slices is given twice"):
        parse_policy("domino:slices=2,slices=4")


# -- one model of collectives ----------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["flux-a100-nvlink", "dhelix-a40", "flux-l20-pcie", "cpu"])
@pytest.mark.parametrize("kind", ["ag_gemm", "gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_collective_takes_as_long_as_beside_a_fused_op(
    cluster: str, kind: str, hosts: int
) -> None:
    """``fused=auto`` compares the two."""
    found = replace(load_cluster(cluster), hosts=2)
    ranks = hosts * found.devices
    if found.network.gbs <= 0 and hosts > 1:
        pytest.skip("the network's speed is not known")
    problem = Problem(FusedOp.named(kind), 8192, 49152, 49152, "bfloat16", ranks, hosts)
    fabric = Fabric(found, Parallel(tp=ranks))
    moved = {"ag_gemm": "all_gather", "gemm_rs": "reduce_scatter", "gemm_ar": "all_reduce"}[kind]
    op = Operator(
        "it", moved, fabric.resource("tp"), "fwd", 0, "it", shape=(8192, 49152), group="tp"
    )
    assert AnalyticCost(fabric, "bfloat16", 2).solo(op) == pytest.approx(library_ms(problem, found))
