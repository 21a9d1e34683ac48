"""DHelix's pairing of a layer's operators, against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest

from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Operator
from flux.plan.model import Parallel, step_of
from flux.plan.policies import pairing
from flux.plan.policies.interleave import graphs_of_layer
from flux.plan.policies.pairing import pair, time_together


class Random:
    """Random costs of random operators: an OEF for each pair."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.times: dict[str, float] = {}
        self.factors: dict[frozenset[str], float] = {}

    def graph(self, count: int, letter: str, density: float) -> nx.DiGraph:
        graph = nx.DiGraph()
        for number in range(count):
            resource = self.rng.choice(("comp", "comp", "intra", "inter"))
            kind, group = ("gemm", "") if resource == "comp" else ("all_gather", "tp")
            op = Operator(f"{letter}{number}", kind, resource, "fwd", 0, "x", group=group)
            self.times[op.name] = self.rng.choice((1.0, 2.0, self.rng.uniform(0.2, 3)))
            graph.add_node(op.name, op=op)
            before = [f"{letter}{n}" for n in range(number) if self.rng.random() < density]
            graph.add_edges_from((dep, op.name) for dep in before)
        return graph

    def solo(self, op: Operator) -> float:
        return self.times[op.name]

    def oef(self, comp: Operator, comm: Operator) -> float:
        key = frozenset((comp.name, comm.name))
        return self.factors.setdefault(key, self.rng.uniform(-0.5, 1.0))

    def together(
        self, f: Sequence[Operator], b: Sequence[Operator], waited: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """The time of two segments, by small steps of work: each operator is a list of atoms.

        ``waited``: for how long the first of each has been the first.
        """
        if not f or not b:
            return sum(self.solo(op) for op in (*f, *b))
        one, other = f[0], b[0]
        left, right = self.times[one.name], self.times[other.name]
        if one.resource == other.resource:
            side = int(waited[0] < waited[1])
            time = (left, right)[side]
            waits = (0.0, waited[1] + time) if side == 0 else (waited[0] + time, 0.0)
            return time + self.together(f[side == 0 :], b[side == 1 :], waits)
        work = min(left, right)
        comp, comm = (other, one) if one.is_collective else (one, other)
        time = work * (2 - self.oef(comp, comm))
        before = dict(self.times)
        self.times[one.name], self.times[other.name] = left - work, right - work
        ends = work == left, work == right
        waits = tuple(0.0 if end else w + time for end, w in zip(ends, waited, strict=True))
        rest = self.together(f[ends[0] :], b[ends[1] :], waits)  # type: ignore[arg-type]
        self.times = before
        return time + rest


def cuts(f: int, b: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every way to cut two orders of f and b operators into pairs of segments."""
    if f == b == 0:
        yield []
    for i, j in itertools.product(range(f + 1), range(b + 1)):
        if (i, j) != (0, 0):
            for rest in cuts(f - i, b - j):
                yield [(i, j), *rest]


def least(f: nx.DiGraph, b: nx.DiGraph, cost: Random, barrier: float) -> float:
    """Return the least makespan over every order of both graphs and every way to cut them."""
    found = float("inf")
    for f_order in nx.all_topological_sorts(f):
        for b_order in nx.all_topological_sorts(b):
            f_ops, b_ops = ([g.nodes[n]["op"] for n in o] for g, o in ((f, f_order), (b, b_order)))
            known: dict[tuple[int, int, int, int], float] = {}
            for way in cuts(len(f_ops), len(b_ops)):
                i = j = 0
                total = 0.0
                for di, dj in way:
                    key = (i, i + di, j, j + dj)
                    if key not in known:
                        known[key] = cost.together(f_ops[i : i + di], b_ops[j : j + dj])
                    total += barrier + known[key]
                    i, j = i + di, j + dj
                found = min(found, total)
    return found


def test_pairing_is_the_best_over_every_order_and_every_cut() -> None:
    rng = random.Random(1)
    for case in range(1500):
        cost = Random(rng)
        sizes = (3, 3) if case % 50 == 0 else (rng.randint(0, 2), rng.randint(0, 3))
        density = rng.choice((0.2, 0.6, 1.0))
        f, b = cost.graph(sizes[0], "f", density), cost.graph(sizes[1], "b", density)
        barrier = rng.choice((0.0, 0.1, 1.0))
        found = pair(f, b, cost, barrier=barrier)
        assert found.makespan == pytest.approx(least(f, b, cost, barrier), rel=1e-9, abs=1e-12)
        total = 0.0
        for f_segment, b_segment in found.segments:
            ops = ([g.nodes[n]["op"] for n in s] for g, s in ((f, f_segment), (b, b_segment)))
            total += barrier + cost.together(*ops)
        assert total == pytest.approx(found.makespan, rel=1e-9, abs=1e-12)
        for graph, order in ((f, found.forward), (b, found.backward)):
            places = {node: place for place, node in enumerate(order)}
            assert sorted(places) == sorted(graph)
            assert all(places[u] < places[v] for u, v in graph.edges)


def by_orders(
    f: nx.DiGraph,
    b: nx.DiGraph,
    price: Callable[[tuple[Any, ...], tuple[Any, ...]], float],
    barrier: float = 0.0,
) -> float:
    """Return the paper's way: its recurrence for each pair of orders."""
    found = float("inf")
    for f_order, b_order in itertools.product(*map(nx.all_topological_sorts, (f, b))):
        one, other = tuple(f_order), tuple(b_order)
        table = {(0, 0): 0.0}
        for i, j in itertools.product(range(len(one) + 1), range(len(other) + 1)):
            if (i, j) != (0, 0):
                table[i, j] = min(
                    table[x, y] + barrier + price(one[x:i], other[y:j])
                    for x in range(i + 1)
                    for y in range(j + 1)
                    if (x, y) != (i, j)
                )
        found = min(found, table[len(one), len(other)])
    return found


def test_pairing_over_down_sets_finds_what_the_papers_enumeration_finds() -> None:
    rng = random.Random(2)
    for _ in range(60):
        cost = Random(rng)
        f, b = cost.graph(4, "f", 0.9), cost.graph(5, "b", 0.6)
        ops = {node: op for graph in (f, b) for node, op in graph.nodes(data="op")}

        def price(x: Any, y: Any, cost: Random = cost, ops: Any = ops) -> float:
            return cost.together([ops[node] for node in x], [ops[node] for node in y])

        wanted = by_orders(f, b, price)
        assert pair(f, b, cost).makespan == pytest.approx(wanted, rel=1e-9)


class Named:
    """Costs of nodes that are no operators of ours: names alone."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.times, self.factors = rng, {}, {}  # type: ignore[var-annotated]

    def solo(self, node: str) -> float:
        return float(self.times.setdefault(node, self.rng.choice((0.0, 1.0, self.rng.random()))))

    def oef(self, a: str, b: str) -> float:
        assert (a[0], b[0]) == ("f", "b")
        return float(self.factors.setdefault((a, b), self.rng.uniform(-1.0, 1.0)))

    def together(self, f: tuple[str, ...], b: tuple[str, ...]) -> float:
        """Both sides do equal work at a time, so each piece of work ends where an operator does."""
        ends = [list(itertools.accumulate(map(self.solo, side))) for side in (f, b)]
        total = begin = 0.0
        for end in sorted({*ends[0], *ends[1]}):
            run = [next((n for n, at in zip(s, e, strict=True) if at > begin), None)
                   for s, e in zip((f, b), ends, strict=True)]  # fmt: skip
            slow = 1.0 if None in run else 2.0 - self.oef(run[0] or "", run[1] or "")
            total += (end - begin) * slow
            begin = end
        return total


def test_pairing_of_graphs_of_names_is_that_of_every_order() -> None:
    """Costs as a model and as a table of segments; empty and disconnected graphs too."""
    rng = random.Random(3)
    for _ in range(400):
        graphs = []
        for letter in "fb":
            names = [f"{letter}{n}" for n in range(rng.randint(0, 3))]
            graphs.append(nx.DiGraph())
            graphs[-1].add_nodes_from(rng.sample(names, len(names)))
            edges = [e for e in itertools.combinations(names, 2) if rng.random() < 0.4]
            graphs[-1].add_edges_from(edges)
        barrier, cost = rng.choice((0.0, 0.3)), Named(rng)
        found = pair(*graphs, cost, barrier=barrier).makespan  # type: ignore[arg-type]
        wanted = by_orders(*graphs, cost.together, barrier)
        assert found == pytest.approx(wanted, abs=1e-9)
        table: dict[Any, float] = {}

        def given(x: Any, y: Any, table: dict[Any, float] = table) -> float:
            return table.setdefault((x, y), rng.uniform(0, 5) * (len(x) + len(y)))

        wanted = by_orders(*graphs, given)
        makespan, segments = pair(*graphs, given)
        assert makespan == pytest.approx(wanted, abs=1e-9)
        assert sum(given(*both) for both in segments) == pytest.approx(makespan, abs=1e-9)


def test_rounding_does_not_choose_among_equal_pairings() -> None:
    """On one stream all orders take as long; sums of other times were another order.

    A ring's link that was 1% better made a step under ``dhelix`` 0.5% slower.
    """
    graphs = [nx.DiGraph(), nx.DiGraph()]
    for graph, letter in zip(graphs, "fb", strict=True):
        for number in range(5):
            graph.add_node(number, op=Operator(f"{letter}{number}", "gemm", "comp", "fwd", 0, "x"))
            graph.add_edges_from([(number - 1, number)] if number else [])
    segments = set()
    for seed in range(5):
        cost = Random(random.Random(seed))
        cost.times = {f"{letter}{n}": cost.rng.uniform(0.2, 3) for letter in "fb" for n in range(5)}
        segments.add(pair(*graphs, cost).segments)
    assert len(segments) == 1


def test_segments_of_chains_may_have_any_length() -> None:
    f, b = (nx.path_graph(count, nx.DiGraph) for count in (14, 18))
    assert pair(f, b, lambda x, y: 1.0).makespan == 1.0

    def price(x: tuple[int, ...], y: tuple[int, ...]) -> float:
        return 2.0 + max(sum(x), 3 * len(y))

    assert pair(f, b, price).makespan == by_orders(f, b, price)


@pytest.mark.parametrize(
    "cost, error, message",
    [
        ({"a": 1.0}, TypeError, "cost must have solo.*got dict"),
        ((float("nan"), 0.5), ValueError, "a: solo must be a time of at least 0, got nan"),
        ((-1.0, 0.5), ValueError, "a: solo must be a time"),
        ((1.0, 1.2), ValueError, "a beside a: oef must be at most 1, got 1.2"),
        (lambda x, y: float("nan"), ValueError, "no pairing has a finite time"),
    ],
    ids=["a dict", "not a number", "below 0", "oef above 1", "never finite"],
)
def test_costs_of_a_pairing_are_checked(cost: Any, error: type[Exception], message: str) -> None:
    graph = nx.DiGraph()
    graph.add_node("a")
    if isinstance(cost, tuple):
        time, factor = cost
        cost = SimpleNamespace(solo=lambda node: time, oef=lambda a, b: factor)
    with pytest.raises(error, match=message):
        pair(graph, graph, cost)
    with pytest.raises(TypeError, match=r"must be a networkx\.DiGraph, got Graph"):
        pair(nx.Graph(), graph, cost)


def test_pairing_takes_a_function_of_segments_and_limits() -> None:
    f, b = nx.path_graph(3, nx.DiGraph), nx.path_graph(3, nx.DiGraph)
    found = pair(f, b, lambda one, other: float(max(len(one), len(other))) ** 2)
    assert found.makespan == 3 and len(found.segments) == 3
    found = pair(f, b, lambda one, other: 1.0)
    assert found.segments == (((0, 1, 2), (0, 1, 2)),)
    assert len(pair(f, b, lambda one, other: 1.0, longest=2).segments) == 2
    cycle = nx.DiGraph([(0, 1), (1, 0)])
    for arguments, options, message in (
        ((cycle, b), {}, "in a cycle"),
        ((f, b), {"barrier": -1.0}, "barrier must be a time of at least 0"),
        ((f, b), {"longest": 0}, "longest must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pair(*arguments, lambda one, other: 1.0, **options)  # type: ignore[arg-type]


def layer_graph(
    direction: str, *, experts: bool = False, context_parallel: bool = False
) -> nx.DiGraph:
    """A layer of Llama 25B on 8 tensor-parallel ranks, or of Phi-MoE on 2, of the A40 cluster."""
    cp = 2 if context_parallel else 1
    if experts:
        parallel = Parallel(tp=2, cp=cp, dp=8, ep=8, sequence=True)
    else:
        parallel = Parallel(tp=8, cp=cp, sequence=True)
    model = "phi-moe" if experts else "llama-25b"
    step = step_of(model, parallel, layers=1, micro_batches=1, regather=False, cp_kind="all_gather")
    fabric = Fabric(load_cluster("dhelix-a40"), parallel)
    return graphs_of_layer(build_step(step, fabric))[direction == "backward"]


@pytest.mark.parametrize(
    "options, forward, backward",
    [
        ({}, 14, 18),
        ({"context_parallel": True}, 15, 19),
        ({"experts": True}, 15, 20),
        ({"experts": True, "context_parallel": True}, 16, 21),
    ],
    ids=str,
)
def test_graphs_of_a_layer(options: dict[str, bool], forward: int, backward: int) -> None:
    f, b = (layer_graph(way, **options) for way in ("forward", "backward"))
    assert (len(f), len(b)) == (forward, backward)
    assert nx.is_directed_acyclic_graph(b) and nx.dag_longest_path_length(f) == forward - 1
    weights = [node for node, op in b.nodes(data="op") if op.role == "wgrad"]
    assert len(weights) == (5 if "experts" in options else 4)
    assert all(b.out_degree(node) == 0 for node in weights)
    assert ("dispatch" in f) == options.get("experts", False)


def test_a_long_collective_is_hidden_under_more_operators_than_orders_are_tried_of() -> None:
    """Of a layer's shape: gathers of keys and values that take longer than half of the layer."""
    f, b = nx.path_graph(["f0", "f1"], nx.DiGraph), nx.DiGraph()
    nx.add_path(b, [f"b{n}" for n in range(14)])
    b.add_edges_from((f"b{n}", f"w{n}") for n in (0, 3, 6, 9, 12))
    cost = SimpleNamespace(solo=lambda node: 9.5 if node[0] == "f" else 1.0, oef=lambda a, b: 1.0)
    assert pair(f, b, cost, barrier=0.1).makespan == pytest.approx(19.1)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("context_parallel", [False, True])
def test_a_layer_is_searched_with_prices_of_less_than_a_second(
    experts: bool, context_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts what takes nearly all of the time: a core of 2020 prices 300,000 pairs a second."""
    priced = 0

    def counted(*args: Any) -> float:
        nonlocal priced
        priced += 1
        return time_together(*args)

    monkeypatch.setattr(pairing, "time_together", counted)
    parallel = Parallel(tp=2, dp=8, ep=8 if experts else 1, sequence=True)
    cost = AnalyticCost(Fabric(load_cluster("dhelix-a40"), parallel), "bfloat16", 2)
    f, b = (
        layer_graph(way, experts=experts, context_parallel=context_parallel)
        for way in ("forward", "backward")
    )
    pairing._searched.cache_clear()
    found = pair(f, b, cost)
    assert 10_000 < priced < 250_000
    serial = sum(cost.solo(op) for g in (f, b) for _, op in g.nodes(data="op"))
    assert found.makespan < 0.9 * serial
