"""The order of Centauri's operators: a list schedule with priorities.

On each lane the ready operator of the highest priority runs next. Compute keeps to blocks of
passes, in a 1F1B order; within a block it takes what is ready. A collective is as urgent as the
first operator that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import ceil, log2

from flux.plan.cost import CostModel, solo_times
from flux.plan.graph import RESOURCES, Graph, GraphError, Operator
from flux.plan.policies.folding import layers_of, stage_of
from flux.plan.policies.passes import Action, Block, one_f_one_b
from flux.plan.schedule import StepSchedule

OCTAVES = range(4)
"""Numbers of the links (``other_links``) for which partitions are chosen."""
_NEAR = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25)
"""Times on links that hardly differ, in those on the links."""


def blocks(
    rank: int, ranks: int, micro_batches: int, forward: int = 1, backward: int = 1, chunks: int = 1
) -> list[Block]:
    """Return the blocks of a pipeline rank.

    With one stage on each rank: 1F1B, but the first and the last micro-batches run together, as one
    block. With several: interleaved 1F1B, in which so many micro-batches go through a stage before
    the rank's next stage has its turn (figure 7 of the paper). ``forward`` and ``backward`` are
    passes that run together: L1 and L2 of Eq. 2. ``chunks`` are stages of each rank.
    """
    if chunks > 1:
        return list(_interleaved(rank, ranks, micro_batches, forward, backward, chunks))
    ahead = min(max(ranks - rank, forward, backward), micro_batches) - 1
    order = list(chain.from_iterable(one_f_one_b(rank, ahead, micro_batches)))
    first, last = min(forward, micro_batches), min(backward, micro_batches)
    middle: list[Block] = [(action,) for action in order[first : len(order) - last]]
    return [tuple(order[:first]), *middle, tuple(order[len(order) - last :])]


def _interleaved(
    rank: int, ranks: int, micro_batches: int, forward: int, backward: int, chunks: int
) -> Iterator[Block]:
    """Yield the blocks of a rank with several stages; groups are not smaller than the pipeline."""
    order: dict[str, list[Action]] = {}
    for kind, together in (("F", forward), ("B", backward)):
        groups = max(1, micro_batches // max(together, ranks))
        ends = [micro_batches * group // groups for group in range(groups + 1)]
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        order[kind] = [
            Action(stage, kind, micro)
            for group in range(groups)
            for stage in (stages if kind == "F" else stages[::-1])
            for micro in range(ends[group], ends[group + 1])
        ]
    place = {(action.stage, action.micro): at for at, action in enumerate(order["F"])}
    # Backward number k comes after its own forward, and the last rank's comes first.
    lags = [place[action.stage, action.micro] - at for at, action in enumerate(order["B"])]
    ahead = min(max(lags) + 2 * (ranks - 1 - rank), len(place))
    for action in order["F"][:ahead]:
        yield (action,)
    for at, action in enumerate(order["B"]):
        if ahead + at < len(place):
            yield (order["F"][ahead + at],)
        yield (action,)


def chunks_of(graph: Graph) -> int:
    """Return how many stages of the model each pipeline rank has, from the layers of rank 0."""
    layers = {op.layer for op in graph.ops if op.stage == 0 and op.layer >= 0}
    return sum(layer - 1 not in layers for layer in layers) if graph.stages > 1 else 1


class ListSchedule:
    """Lanes run the most urgent operator that is ready; nothing slows another one down.

    Args:
        graph: whose operators are scheduled.
        passes: the blocks of each pipeline rank.
        weights_first: in backward, gradients of weights have priority over those of activations (T2
            of Eq. 1); else the other way round (T1).
    """

    def __init__(
        self, graph: Graph, passes: Sequence[Sequence[Block]], weights_first: bool
    ) -> None:
        self.ops = graph.ops  # not the graph, whose memo has this: a circle outlives its last user
        count = len(graph.ops)
        lanes = len(RESOURCES)
        self.lane_of = [op.stage * lanes + RESOURCES.index(op.resource) for op in graph.ops]
        self.block = [0] * count  # of compute operators, the number of their block
        self.stages = graph.stages * chunks_of(graph)  # of the model
        self.layers = layers_of(graph)
        keys = self._compute_keys(graph, passes, weights_first)
        self.priority: list[float] = [0.0] * count
        for place, number in enumerate(sorted(keys, key=keys.__getitem__)):
            self.priority[number] = float(place)
        self._collectives_urgency(graph)
        self.left: list[list[int]] = [[0] * (len(of) + 1) for of in passes]
        for number in keys:
            self.left[self.ops[number].stage][self.block[number]] += 1
        self.rows = tuple(tuple(str(action) for block in of for action in block) for of in passes)

    def _compute_keys(
        self, graph: Graph, passes: Sequence[Sequence[Block]], weights_first: bool
    ) -> dict[int, tuple[int, ...]]:
        """Return a sort key of each compute operator: its place in the stage's order."""
        where: dict[tuple[int, str, int], int] = {}
        for of_rank in passes:
            for index, block in enumerate(of_rank):
                where |= dict.fromkeys(block, index)
        several = self.stages > graph.stages
        keys: dict[int, tuple[int, ...]] = {}
        for place, number in enumerate(graph.order):
            if graph.communicates[number]:
                continue
            op = self.ops[number]
            stage = stage_of(op, self.layers, self.stages) if several else op.stage
            kind, layer, micro = "F" if op.role == "fwd" else "B", op.layer, op.micro
            self.block[number] = index = where.get((stage, kind, micro), len(passes[op.stage]))
            # Forward: a micro-batch as fast as it comes, others where it waits. Backward: layer by
            # layer through all micro-batches, so that a layer's gradients are complete early.
            if kind == "F":
                keys[number] = index, micro, layer, 0, place
            else:
                keys[number] = index, -layer, micro, (op.role == "wgrad") != weights_first, place
        return keys

    def _collectives_urgency(self, graph: Graph) -> None:
        ops, after = self.ops, graph.after
        for number in reversed(graph.order):
            if not graph.communicates[number]:
                continue
            op = ops[number]
            same = [later for later in after[number] if ops[later].stage == op.stage]
            if op.kind == "send":
                same = [d for d in graph.deps[number] if ops[d].stage == op.stage]
            urgent = min((self.priority[other] for other in same), default=float(len(ops)))
            self.priority[number] = urgent

    def schedule(self, graph: Graph, lanes: list[list[int]], policy: str) -> StepSchedule:
        """Return the schedule of the graph with these lanes."""
        names = [(stage, name) for stage in range(graph.stages) for name in RESOURCES]
        filled = {name: tuple(of) for name, of in sorted(zip(names, lanes, strict=True)) if of}
        rows = self.rows if self.stages > graph.stages else ()
        return StepSchedule(graph, filled, policy, rows)

    def lanes(self, graph: Graph, cost: CostModel) -> list[list[int]]:
        """Return the operators of each stage's lanes, in order."""
        times, order = graph.native.run_most_urgent(
            solo_times(graph, cost), self.lane_of, self.priority, self.block, self.left
        )
        if waiting := len(self.ops) - times.ended:
            raise GraphError(f"{waiting} operators wait for passes that come later")
        return order


@dataclass
class OtherLinks:
    """Times on links on which everything takes ``longer``, by resource, and ``late_ms`` besides."""

    cost: CostModel
    longer: Mapping[str, float]
    late_ms: float = 0.0

    def __post_init__(self) -> None:
        self.oef, self.by_kind = self.cost.oef, getattr(self.cost, "by_kind", False)

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself."""
        time, longer = self.cost.solo(op), self.longer.get(op.resource, 1.0)
        return float(time if op.resource == "comp" else time * longer + self.late_ms)


def other_links(graph: Graph, cost: CostModel) -> tuple[list[CostModel], list[CostModel]]:
    """Return the links and others: for partitions, and for the order of the best plans.

    Links so slow that communication takes 2**k of the time of compute, up to 4 times it: plans for
    them are equal for all links between two of them. With times of the links themselves, partitions
    for a better link could make a slower step. Some have a long latency. For the order also one
    kind slower than the other, and links that hardly differ: small changes make other orders.
    """
    sums = dict.fromkeys(RESOURCES, 0.0)
    for op in graph.ops:
        sums[op.resource] += cost.solo(op)
    compute = sums.pop("comp")
    shares = {name: time / compute for name, time in sums.items() if compute and time}
    each = compute / max(1, sum(graph.communicates))
    least = min((ceil(log2(share)) for share in shares.values()), default=0)
    most = min(max(OCTAVES[-1] - 1, 2 - least), 6)

    def slower(*by: float | None, late: float = 0.0) -> OtherLinks:
        """Return links that are slower by octaves; those of None stay as they are.

        ``late``: latencies of all that the graph moves, in times of its compute.
        """
        longer = {
            name: 2.0 ** (ceil(log2(shares[name])) + octave) / shares[name]
            for name, octave in zip(("intra", "inter"), by, strict=True)
            if octave is not None and name in shares
        }
        return OtherLinks(cost, longer, late * each)

    pairs: list[tuple[float | None, ...]] = [*product(range(most + 1), repeat=2)]
    for by in (half / 2 for half in range(2 * most + 1)):
        pairs += [(by, by), (by, None), (None, by)]
    unlike = {str(link.longer): link for link in map(slower, *zip(*pairs, strict=True))}
    alike = [slower(by, by) for by in range(most + 1)]
    alike += [slower(0, 0, late=1.0), slower(most, most, late=4.0)]
    near = [
        OtherLinks(cost, dict.fromkeys(shares, longer), late * each)
        for longer, late in product(_NEAR, (0.0, 1 / 64, 1 / 16))
    ]
    return [cost, *alike], [cost, *unlike.values(), *near]
