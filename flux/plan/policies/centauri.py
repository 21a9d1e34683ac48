"""Centauri: communication in parts, scheduled in three tiers.

C. Chen et al., *Centauri: Enabling Efficient Scheduling for Communication-Computation Overlap in
Large Model Training via Communication Partitioning*, ASPLOS 2024.

Collectives are taken apart by primitive (an AllReduce of gradients is a ReduceScatter under
backward and an AllGather under the next forward), by group (between hosts and inside them) and by
workload (chunks, each with its part of the dependent operators). Three tiers choose: the *operation
tier* how each collective is partitioned; the *layer tier* which gradients go first in backward; the
*model tier* how many micro-batches run together at both ends of the step. Where the paper has
closed forms, those are candidates among others, and the simulator takes the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import ceil, inf
from typing import NamedTuple, cast

from flux.core.problem import checked_integer
from flux.plan.cost import CostModel, solo_times
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.policies.centauri_graph import (
    Key,
    Partition,
    is_substituted,
    limited,
    partitioned,
    substituted,
    window,
)
from flux.plan.policies.centauri_order import OCTAVES, ListSchedule, blocks, chunks_of, other_links
from flux.plan.policies.centauri_space import (
    CommPiece,
    even,
    even_by_group,
    meshes,
    uneven_by_group,
)
from flux.plan.policies.folding import layers_of, placed
from flux.plan.policies.passes import Block
from flux.plan.schedule import StepSchedule
from flux.plan.simulate import Timeline, run_in_order, simulate

_MOST_OPS = 20_000
"""Operators of a step that is simulated for each candidate. Of larger ones a part is: the first
layers, and two micro-batches."""
_TOGETHER = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64)
"""Micro-batches that run together at both ends of the step. Eq. 2 asks for fewer the faster links
are, so with its numbers a better link could make a plan slower; candidates are all alike for it."""
_CROSSED, _FINER = 2, 4
"""Plans that try the partitions of others; plans that are ordered for many pairs of links."""
_WORSE = 2
"""Numbers of these that are tried after the best one."""

Options = tuple[bool, int]
"""Whether gradients of weights go first, and micro-batches that run together."""
_Variant = tuple[int, bool, int, Options]
"""Stages of a rank, whether gathers are substituted, number of the links, options of the order."""
Rating = tuple[float, float, float]
"""Bytes that a plan needs, or the memory of a device if they fit; time; bytes."""
_How = dict[Key, Partition]
_Order = tuple[CostModel, list[list[int]]]
_Known = dict[frozenset[tuple[Key, Partition]], tuple[Graph, dict[Options, list[_Order]]]]
_Links = Sequence[CostModel]
"""Partitions; links and their lanes; graphs cut so, with such orders; links, real ones first."""


class _Plan(NamedTuple):
    """A schedule: its rating, options and links of the order, and partitions of its graph."""

    rating: Rating
    options: Options
    links: CostModel
    schedule: StepSchedule
    base: Graph  # before collectives are partitioned
    how: _How


class Centauri:
    """Centauri's schedule of a step.

    Args:
        operation: partition collectives (operation tier); else they stay whole.
        layer: ``t1``: in backward gradients of activations first; ``t2``: of weights first;
            ``auto``: what is faster.
        model: run several micro-batches together at both ends of the step (model tier) where that
            is faster.
        substitute: AllReduce of gradients becomes ReduceScatter and AllGather, and AllGathers of
            weights run under the next step's forward, where that is faster; else they end the step.
        max_chunks: of a collective.
        prefetch: with ZeRO-3, layers whose weights are gathered ahead; 0: each when it is needed.
        chunks: with pipeline parallelism, stages of each rank: gradients of one are reduced while
            another one computes. ``auto``: what is faster of 1 to 4, and fits into memory.
        memory_gb: of a device, for the model tier; 0: what the cluster's device has.
    """

    name = "centauri"

    def __init__(
        self,
        operation: bool = True,
        layer: str = "auto",
        model: bool = True,
        substitute: bool = True,
        max_chunks: int = 8,
        prefetch: int = 1,
        memory_gb: float = 0.0,
        chunks: int | str = 1,
    ) -> None:
        self.max_chunks = checked_integer("centauri: max_chunks", max_chunks, 1)
        self.prefetch = checked_integer("centauri: prefetch", prefetch, 0)
        if chunks != "auto":
            checked_integer("centauri: chunks", chunks, 1)
        self.chunks, self.cuts_stages = chunks, chunks != 1
        if layer not in ("auto", "t1", "t2"):
            raise ValueError(f"centauri: layer must be auto, t1 or t2, got {layer!r}")
        if type(memory_gb) not in (int, float) or not memory_gb >= 0:
            raise ValueError(f"centauri: memory_gb must be at least 0, got {memory_gb!r}")
        self.operation, self.layer, self.model = operation, layer, model
        self._modes = (False, True) if layer == "auto" else (layer == "t2",)
        self.substitute, self.memory_gb = substitute, memory_gb
        self._known: StepSchedule | None = None  # the best one that rewrite compared
        self._tiers: dict[_Variant, tuple[object, list[dict[Key, Partition]]]] = {}
        self.share = 1.0

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph of the fastest plan that fits, with collectives in parts."""
        counts = [self.chunks] if isinstance(self.chunks, int) else [1, 2, 3, 4]
        if self.chunks == "auto":
            layers = layers_of(graph) // graph.stages
            counts = [n for n in counts if layers % n == 0] if graph.stages > 1 else [1]
        plans = []
        for chunks in counts:
            rating, schedule = self._plan(graph, chunks, fabric, cost)
            if len(counts) > 1 and self._is_large(graph):  # what _plan rates is a part
                rating = self._rating(simulate(schedule, cost), cost)
            plans.append((rating, chunks, schedule))
        _, chunks, best = min(plans, key=lambda plan: plan[:2])
        self.chosen = {"chunks": chunks}
        self._known = best
        return best.graph

    def _plan(
        self, graph: Graph, chunks: int, fabric: Fabric, cost: CostModel
    ) -> tuple[Rating, StepSchedule]:
        """Return the best plan with so many stages on a rank.

        Substitution and partitions are compared with none: gathers at the beginning of the step
        delay a pipeline, and what is best for the first layers may not be so for all. Partitions
        are chosen under the order that is best without them, too (else steps were up to 3% slower),
        and for slower links (13%).
        """
        ranks, large = graph.stages, self._is_large(graph)
        if chunks > 1:
            if ranks == 1:
                raise ValueError(f"centauri: chunks = {chunks} needs a pipeline, and pp is 1")
            graph = placed(graph, chunks * ranks, lambda stage: stage % ranks)
        links, finer = other_links(window(graph), cost)
        plans: list[_Plan] = []
        substitutes = self.substitute and any(map(is_substituted, graph.ops))
        for less in (True, False) if substitutes else (False,):
            whole = substituted(graph, fabric, cost) if less else graph
            base, part = self._limited(whole), self._limited(window(whole))
            known: _Known = {}
            shown, tiers = part if large else base, self.model and not large
            plans.append(self._best(shown, base, {}, links, tiers))
            (first, together), tried = plans[-1].options, [plans[-1].how]
            orders = sorted({(self.layer == "t2", 1), (first, min(together, 2))})  # windows have 2
            for options, at in product(orders, OCTAVES if self.operation else ()):
                variant = chunks, less, at, options
                for how in self._operation_tier(part, variant, fabric, known, links):
                    if how not in tried:
                        tried.append(how)
                        parts = partitioned(shown, how, fabric)
                        plans.append(self._best(parts, base, how, links, tiers))
        plans.sort(key=lambda plan: plan.rating)
        best = plans[0]
        if large:
            parts = partitioned(best.base, best.how, fabric)
            return best.rating, self._ordered(parts, best.links, best.options)
        best = self._crossed(plans, fabric, links)
        for plan in [best, *plans[: _FINER - 1]]:
            for mode in self._modes:
                options = mode, plan.options[1]
                best = self._better(best, plan.schedule.graph, plan.how, options, finer)
        return best.rating, best.schedule

    def _crossed(self, plans: Sequence[_Plan], fabric: Fabric, links: _Links) -> _Plan:
        """Return the best of the first plans with partitions of all, one by one, where faster.

        On the whole step: windows know no other stages and few micro-batches. Without it steps were
        up to 2% slower, some of them on the better one of two links; up to 4% with the best alone.
        """
        found, tried = [], set()
        for best in plans[:_CROSSED]:
            moved = {(op.part, op.role) for op in best.base.ops if op.moves_weights}
            keys, before = {key for plan in plans for key in plan.how}, None
            seen = {(key, plan.how.get(key, Partition())) for plan, key in product(plans, keys)}
            alike = {Partition(of.pieces) for key, of in best.how.items() if key in moved}
            seen |= {*product(moved, (of for of in alike if of.pieces == even(len(of.pieces))))}
            seen |= {(key, replace(of, by_gemm=not of.by_gemm)) for key, of in seen if key in moved}
            while best is not before:
                before = best
                for key, candidate in sorted(seen, key=str):
                    how, together = {**best.how, key: candidate}, best.options[1]
                    if (this := (id(best.base), together, frozenset(how.items()))) not in tried:
                        tried.add(this)
                        parts = partitioned(best.base, how, fabric)
                        for mode in self._modes:
                            best = self._better(best, parts, how, (mode, together), links)
            found.append(best)
        return min(found, key=lambda plan: plan.rating)

    def _limited(self, graph: Graph) -> Graph:
        """Return the graph whose ZeRO-3 gathers are as far ahead as they may be under 1F1B."""
        passes = [list(chain.from_iterable(of)) for of in _blocks(graph, 1)]
        return limited(graph, passes, graph.stages * chunks_of(graph), self.prefetch)

    def _operation_tier(
        self, graph: Graph, variant: _Variant, fabric: Fabric, known: _Known, links: _Links
    ) -> list[_How]:
        """Return how a window's collectives are partitioned: one by one, each the best way.

        First to last and last to first: a choice may shut out better ones behind it. Steps with the
        first way alone were up to 10% slower, some of them on the better one of two links.
        Steps of one layout that differ in their number of micro-batches have equal windows.
        """
        asked, (*_, at, options) = ([op[1:] for op in graph.ops], graph.deps), variant
        if variant in self._tiers and self._tiers[variant][0] == asked:
            return self._tiers[variant][1]

        def time_of(how: _How) -> float:
            parts = frozenset(how.items())
            if parts not in known:
                known[parts] = partitioned(graph, how, fabric), {}
            cut, orders = known[parts]
            if options not in orders:
                orders[options] = list(self._orders(cut, options, links))
            solo = solo_times(cut, links[at])
            runs = (run_in_order(cut, lanes, links[at], solo) for _, lanes in orders[options])
            return min(max(times.end) for times in runs)

        chosen: dict[Key, Partition] = {}
        least = time_of(chosen)
        examples: dict[Key, int] = {}
        for number in graph.order:
            op = graph.ops[number]
            if op.is_collective and op.kind != "send":
                examples.setdefault((op.part, op.role), number)
        choices = {
            key: list(self._candidates(graph, number, fabric, links[at]))
            for key, number in examples.items()
        }
        # All alike first: one that is better only along with others is not found one by one.
        for grouped, by_gemm in ((False, True), (True, False), (True, True)):
            alike = {
                key: candidate
                for key, candidates in choices.items()
                for candidate in candidates
                if candidate.by_gemm == by_gemm and candidate.is_single(grouped)
            }
            time = time_of(alike)
            if time < least * (1 - 1e-6):
                least, chosen = time, alike
        changes = [(key, candidate) for key, several in choices.items() for candidate in several]
        hows = [chosen.copy(), chosen]
        for how, forth in zip(hows, (1, -1), strict=True):
            best = least
            for key, candidate in changes[::forth]:
                if candidate == how.get(key, Partition()):
                    continue
                time = time_of({**how, key: candidate})
                if time < best * (1 - 1e-6):
                    best, how[key] = time, candidate
        self._tiers[variant] = asked, hows
        return hows

    def _is_large(self, graph: Graph) -> bool:
        return len(graph.ops) > _MOST_OPS * self.share

    def _orders(self, graph: Graph, options: Options, links: _Links) -> Iterator[_Order]:
        """Yield links, and the order of a step for them, unless it is that of others."""
        known, tried = self._list(graph, options), []
        for link in links:
            lanes = known.lanes(graph, link)
            if lanes not in tried:
                tried.append(lanes)
                yield link, lanes

    def _candidates(
        self, graph: Graph, number: int, fabric: Fabric, cost: CostModel
    ) -> Iterator[Partition]:
        """Yield partitions of a collective."""
        op = graph.ops[number]
        comm = cost.solo(op)
        weights = op.moves_weights
        chain = _chain(graph, number, cost)
        inner = _independent(graph, number, cost)
        counts = {2, 4, self.max_chunks, even_chunks(inner, comm, self.max_chunks)}
        chunks = sorted(n for n in counts if 1 < n <= self.max_chunks)
        shapes: list[tuple[tuple[CommPiece, ...], int]] = [(even(1), 0)]
        if chain:
            shapes += [(even(n), chain) for n in chunks]
        elif weights:
            shapes += [(even(n), 0) for n in chunks]
        span = fabric.span(op.group)
        mesh = meshes(span.size, span.per_host)
        if mesh and op.kind in ("all_gather", "reduce_scatter"):
            hosts, intra = mesh[0]
            shapes += [(even_by_group(op.kind, n, intra), chain) for n in (1, *chunks)]
            if op.kind == "all_gather":
                shapes += [
                    (uneven_by_group(len_of, first, hosts, intra), chain)
                    for len_of, first in ((2, True), (2, False), (3, False))
                ]
        for pieces, cut in shapes:
            for by_gemm in (False, True) if weights else (False,):
                yield Partition(pieces, by_gemm, cut)

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule."""
        assert self._known is not None and self._known.graph is graph
        return self._known

    def _best(self, graph: Graph, base: Graph, how: _How, links: _Links, model: bool) -> _Plan:
        """Return the plan with the best order of both tiers."""
        worst, worse = (inf, inf, inf), 0
        best = _Plan(worst, (False, 1), links[0], StepSchedule(graph), base, how)
        for together in self._together(graph, links[0]) if model else (1,):
            before = best
            for mode in self._modes:
                best = self._better(best, graph, how, (mode, together), links)
            worse = 0 if best is not before else worse + 1
            if worse == _WORSE:
                break
        return best

    def _better(
        self, best: _Plan, graph: Graph, how: _How, options: Options, links: _Links
    ) -> _Plan:
        """Return the best plan, or a better one: another graph, ordered for any of the links."""
        cost, known, solo = links[0], self._list(graph, options), solo_times(graph, links[0])
        for link, lanes in self._orders(graph, options, links):
            times = run_in_order(graph, lanes, cost, solo)
            # Of a slower one, peak memory takes longer to find than all else.
            if best.rating[0] > 1e9 * self._memory_gb(cost) or max(times.end) <= best.rating[1]:
                schedule = known.schedule(graph, lanes, self.name)
                rating = self._rating(Timeline(schedule, times.start, times.end, ()), cost)
                if rating < best.rating:
                    best = _Plan(rating, options, link, schedule, best.base, how)
        return best

    def _rating(self, timeline: Timeline, cost: CostModel) -> Rating:
        """Return a sort key: of plans that fit into memory the fastest first."""
        peak = timeline.peak_memory_bytes
        return max(peak, 1e9 * self._memory_gb(cost)), timeline.iteration_ms, peak

    def _ordered(self, graph: Graph, cost: CostModel, options: Options) -> StepSchedule:
        known = self._list(graph, options)
        return known.schedule(graph, known.lanes(graph, cost), self.name)

    def _list(self, graph: Graph, options: Options) -> ListSchedule:
        weights_first, together = options
        if options not in graph.memo:
            graph.memo[options] = ListSchedule(graph, _blocks(graph, together), weights_first)
        return cast(ListSchedule, graph.memo[options])

    def _memory_gb(self, cost: CostModel) -> float:
        """Return the memory of a device; infinite if it is not known."""
        fabric = getattr(cost, "fabric", None)
        known = fabric.cluster.device.memory_gb if fabric is not None else 0.0
        return self.memory_gb or known or inf

    def _together(self, graph: Graph, cost: CostModel) -> list[int]:
        """Return how many micro-batches may run together: as the first stage's memory holds.

        One with ZeRO-3: each pass gathers for itself, so that passes together hide no more.
        """
        if any(op.micro >= 0 and op.moves_weights for op in graph.ops):
            return [1]
        held = sum(
            op.allocates
            for op in graph.ops
            if op.stage == 0 and op.micro == 0 and op.role == "fwd" and not op.is_collective
        )
        free = 1e9 * self._memory_gb(cost) - graph.resident_by_stage[0]
        most = min(graph.micro_batches, free / held if held else inf)
        plans = {str(_blocks(graph, n)): n for n in reversed(_TOGETHER) if n <= most}
        return sorted({1, *plans.values()})


def even_chunks(inner: float, comm: float, most: int) -> int:
    """Return into how many even chunks Algorithm 1 cuts a collective, of a cost ``comm``.

    ``inner`` is the cost of independent operators that run alongside it in any case.
    """
    if inner >= comm:
        return 1
    return most if inner == 0 else ceil(min(comm / inner, most))


def _blocks(graph: Graph, together: int) -> list[list[Block]]:
    """Return the blocks of each pipeline rank (see ``blocks``)."""
    ranks, micros, chunks = graph.stages, graph.micro_batches, chunks_of(graph)
    return [blocks(rank, ranks, micros, together, together, chunks) for rank in range(ranks)]


def _chain(graph: Graph, number: int, cost: CostModel) -> int:
    """Return how many operators alongside a collective are cut like it.

    In forward alone (section 3.2.1): backward has enough that does not wait. After an AllGather
    from its GEMM on; before a ReduceScatter the GEMM.
    """
    op = graph.ops[number]
    if op.role != "fwd" or op.kind == "all_to_all":
        return 0
    if op.kind != "all_gather":
        return int(sum(graph.ops[dep].kind == "gemm" for dep in graph.deps[number]) == 1)
    comm, independent = cost.solo(op), _independent(graph, number, cost)
    here, length, total = number, 0, 0.0
    # The shortest chain that hides the collective, or else the longest one (section 3.1.3).
    while length == 0 or total + independent < comm:
        nexts = [n for n in graph.after[here] if graph.ops[n].role == "fwd"]
        if length == 0:
            nexts = [n for n in nexts if graph.ops[n].kind == "gemm"][:1]
        if len(nexts) != 1 or graph.ops[nexts[0]].kind not in ("gemm", "elementwise"):
            break
        here = nexts[0]
        if op.moves_weights and length and not _takes_columns(graph.ops[here]):
            break
        length += 1
        total += cost.solo(graph.ops[here])
    return length


def _takes_columns(op: Operator) -> bool:
    """Return whether columns of an operator's input make columns of its output (Table 3).

    A product leaves sums over its contraction, and a gated activation needs whole rows.
    """
    return op.kind == "elementwise" and not (op.part == "act" and op.shape[2] > 2)


def _independent(graph: Graph, number: int, cost: CostModel) -> float:
    """Return the cost of operators that run alongside a collective in any case.

    Of a gather of weights: the layer before. Others follow what they depend on at once.
    """
    op = graph.ops[number]
    if not (op.moves_weights and op.kind == "all_gather"):
        return 0.0
    before = op.layer + (-1 if op.role != "dgrad" else 1)
    micro = max(op.micro, 0)
    roles = ("fwd",) if op.role in ("fwd", "step") else ("dgrad", "wgrad")
    return sum(
        cost.solo(other)
        for other in graph.ops
        if other.layer == before
        and other.micro == micro
        and other.role in roles
        and not other.is_collective
    )
