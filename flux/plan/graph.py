"""The operators of one training step, and what each depends on.

A graph holds one *representative* rank of each pipeline stage: all ranks of a stage (its tensor,
context, expert and data parallel ranks) run the same operators at the same time. A collective is
one operator, which occupies the links of the representative rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx

from flux import _C
from flux.plan.mesh import parse_group

FUSED = ("ag_gemm", "gemm_rs", "gemm_ar", "expert_gemm")
"""A GEMM and the collective before or after it, as one op of Flux; of experts, with AllToAll."""
RING = "ring_attention"
"""Attention in chunks of keys and values that travel round the context parallel ranks meanwhile."""
SERVING = ("grouped_gemm", "cached_attention")
"""Operators of inference alone: of experts whose weights are read, and of queries and a cache."""
COMPUTE = ("gemm", "attention", RING, "norm", "elementwise", "optimizer", *FUSED, *SERVING)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
RESOURCES = ("comp", "intra", "inter")
"""Resources that an operator occupies: multiprocessors, links inside a host, network ports."""
ROLES = ("fwd", "recompute", "dgrad", "wgrad", "step")
OUTER = frozenset(
    (
        *("embed", "rs_embed", "ar_embed", "ln_f", "ag_head", "ar_dx_head", "head", "loss"),
        *("ag_logits", "sample"),
        *("weights_embed", "weights_head", "grads_embed", "grads_head"),
        *("optimizer_embed", "optimizer_head", "send_embed", "send_head"),
    )
)
"""Parts of embedding and head, whose operators have the number of the first and last layer."""
GROUPS = ("tp", "cp", "ep", "dp", "edp", "pp")


class Operator(NamedTuple):
    """One operator of one pipeline stage.

    Attributes:
        name: unique in its graph.
        role: ``fwd``, ``recompute`` (forward again, in backward), ``dgrad`` (gradient of an input),
            ``wgrad`` (of a weight), or ``step``.
        stage: the pipeline stage whose ranks run it.
        part: what it is in its layer, as in "qkv"; equal for all layers, micro-batches and pieces.
        layer: number of the layer in the model; -1: of none.
        micro: number of the micro-batch; -1: of the whole step.
        piece: number among the pieces that a policy has cut an operator into.
        pieces: how many of them there are.
        strand: number of the strand that a policy has put it on.
        shape: gemm and fused ops: (m, n, k) of this rank. grouped_gemm: (m, n, k, experts read).
            attention: (batch, heads, queries, keys, head_dim); ring_attention has besides elements
            of a token's keys and values. cached_attention: (batch, heads,
            keys, width of a head's keys and values, bytes of a cached token). norm, elementwise and
            optimizer: (rows, width, tensors read and written).
            Collectives: (rows, width) of the whole tensor; all_to_all and send: of one rank's.
        group: of a collective, fused op or ring: one of GROUPS, or a part (flux/plan/mesh.py).
        allocates: bytes that it allocates when it starts.
        frees: bytes that are free when it has ended.
    """

    name: str
    kind: str
    resource: str
    role: str
    stage: int
    part: str
    layer: int = -1
    micro: int = -1
    piece: int = 0
    pieces: int = 1
    strand: int = 0
    shape: tuple[int, ...] = ()
    group: str = ""
    allocates: float = 0.0
    frees: float = 0.0

    @property
    def is_collective(self) -> bool:
        """Whether the operator moves data between ranks, and computes nothing."""
        return self.kind in COLLECTIVES

    @property
    def dispatches(self) -> bool:
        """Whether the AllToAll of an expert_gemm is before its GEMM, and not after it."""
        return (self.part == "fc1") == (self.role != "dgrad")

    @property
    def moves_weights(self) -> bool:
        """Whether the operator moves weights or their gradients, and not activations."""
        return self.is_collective and self.part.startswith(("weights", "grads"))

    @property
    def is_outer(self) -> bool:
        """Whether the operator is of the embedding or of the head."""
        return self.part in OUTER

    @property
    def place(self) -> int:
        """Where ``Graph.resident`` has the bytes of the operator's weights."""
        if not self.is_outer:
            return 1 + self.layer
        return 0 if self.part.endswith("embed") else -1


class GraphError(ValueError):
    """A graph, or a schedule of it, that cannot be run."""


@dataclass(frozen=True)
class Graph:
    """Operators and their dependencies.

    Attributes:
        deps: for each operator, the numbers of those that must have ended before it starts.
        resident: bytes of weights, gradients and optimizer states: of the embedding, of each layer,
            and of the head.
        memo: what policies have made of the graph alone.

    Raises:
        GraphError: unknown kinds, numbers out of range, equal names, or a cycle.
    """

    ops: tuple[Operator, ...]
    deps: tuple[tuple[int, ...], ...]
    itemsize: int = 2
    resident: tuple[float, ...] = field(default=())
    memo: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.ops) != len(self.deps):
            raise GraphError(f"{len(self.ops)} operators have {len(self.deps)} lists of deps")
        kinds = {(op.kind, op.resource, op.role, op.group, op.stage): op for op in self.ops}
        for op in kinds.values():
            _check_op(op)
        count = len(self.ops)
        names = [op.name for op in self.ops]
        if len(set(names)) < count:
            twice = next(name for name, times in Counter(names).items() if times > 1)
            raise GraphError(f"two operators are named {twice!r}")
        for op, deps in zip(self.ops, self.deps, strict=True):
            for dep in deps:
                if not 0 <= dep < count:
                    raise GraphError(f"{op.name} depends on operator {dep} of {count}")
        _ = self.order  # raises for a cycle

    def __reduce__(self) -> tuple[object, ...]:
        return Graph, (self.ops, self.deps, self.itemsize, self.resident)

    @cached_property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return max((op.stage for op in self.ops), default=-1) + 1

    @cached_property
    def resident_by_stage(self) -> list[float]:
        """Bytes of weights, gradients and optimizer states of a stage's rank."""
        held, stage_of = [0.0] * self.stages, {}
        for op in self.ops if self.resident else ():
            if op.role == "fwd" and op.micro == 0 and op.layer >= 0 and op.kind != "send":
                stage_of[op.place] = op.stage
        for place, stage in stage_of.items():
            held[stage] += self.resident[place]
        return held

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return max((op.micro for op in self.ops), default=-1) + 1

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order of the operators' numbers, of equals the lower number first."""
        return topological(self.ops, self.deps)

    @cached_property
    def communicates(self) -> list[bool]:
        """For each operator, whether it is a collective. Not to be changed."""
        return [op.kind in COLLECTIVES for op in self.ops]

    @cached_property
    def after(self) -> list[list[int]]:
        """For each operator, the numbers of those that depend on it. Not to be changed."""
        return _after(self.deps)

    @cached_property
    def kinds(self) -> list[int]:
        """For each operator, the number of its kind: those of one kind differ in place alone."""
        known: dict[tuple[object, ...], int] = {}
        return [
            known.setdefault((o.kind, o.resource, o.role, o.part, o.shape, o.group), len(known))
            for o in self.ops
        ]

    @cached_property
    def examples(self) -> list[Operator]:
        """The last operator of each kind. Not to be changed."""
        last = dict(zip(self.kinds, self.ops, strict=True))
        return [last[kind] for kind in range(len(last))]

    @cached_property
    def native(self) -> _C.StepGraph:
        """What runs the operators in virtual time."""
        stage = [op.stage for op in self.ops]
        return _C.StepGraph(
            self.after, [len(deps) for deps in self.deps], stage, self.communicates, self.stages
        )


def _check_op(op: Operator) -> None:
    try:
        base = parse_group(op.group).base
    except ValueError as error:
        raise GraphError(f"{op.name}: {error}") from error
    collective = op.kind in COLLECTIVES
    grouped = collective or op.kind in (*FUSED, RING)
    for name, value, known in (
        ("kind", op.kind, (*COMPUTE, *COLLECTIVES)),
        ("resource", op.resource, RESOURCES),
        ("role", op.role, ROLES),
        ("group", base, GROUPS if grouped else (base,)),
    ):
        if value not in known:
            raise GraphError(f"{op.name}: {name} must be one of {', '.join(known)}, got {value!r}")
    if op.stage < 0:
        raise GraphError(f"{op.name}: stage must be at least 0, got {op.stage}")
    if collective == (op.resource == "comp"):
        raise GraphError(f"{op.name}: {op.kind} cannot occupy {op.resource}")


def _after(deps: Sequence[Sequence[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in deps]
    for number, before in enumerate(deps):
        for dep in before:
            after[dep].append(number)
    return after


def topological(ops: Sequence[Operator], deps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return a topological order of operators.

    Kahn's algorithm: networkx's is ten times slower, and graphs of a large cluster's step have half
    a million operators. networkx finds the cycle that the error names.
    """
    if all(dep < number for number, before in enumerate(deps) for dep in before):
        return tuple(range(len(ops)))  # as builders number them
    after, missing = _after(deps), [len(before) for before in deps]
    order = [number for number, count in enumerate(missing) if count == 0]
    for number in order:
        for later in after[number]:
            missing[later] -= 1
            if missing[later] == 0:
                order.append(later)
    if len(order) == len(ops):
        return tuple(order)
    cyclic = nx.DiGraph((d, n) for n, before in enumerate(deps) for d in before)
    cycle = [ops[edge[0]].name for edge in nx.find_cycle(cyclic)]
    raise GraphError(f"a cycle of dependencies: {' -> '.join([*cycle, cycle[0]])}")


def part_of(graph: Graph, kept: Sequence[int], resident: Sequence[float] = ()) -> Graph:
    """Return the graph of some operators, in the order given, and what they need of each other."""
    place = {number: index for index, number in enumerate(kept)}
    deps = [tuple(place[dep] for dep in graph.deps[n] if dep in place) for n in kept]
    ops = tuple(graph.ops[number] for number in kept)
    return Graph(ops, tuple(deps), graph.itemsize, tuple(resident))


class Builder:
    """Collects operators and dependencies by name."""

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize
        self.ops: list[Operator] = []
        self.deps: list[tuple[int, ...]] = []

    def add(self, op: Operator, deps: Iterable[int]) -> int:
        """Add an operator after others; return its number."""
        self.ops.append(op)
        before = tuple(deps)
        self.deps.append(before if len(before) < 2 else tuple(dict.fromkeys(before)))
        return len(self.ops) - 1

    def build(self, resident: Sequence[float] = ()) -> Graph:
        """Return the graph."""
        return Graph(tuple(self.ops), tuple(self.deps), self.itemsize, tuple(resident))


def replaced(graph: Graph, cut: Callable[[Operator], Sequence[Operator]]) -> Graph:
    """Return a graph in which each operator is replaced by pieces, which ``cut`` returns.

    A piece needs the piece of its own number of what it depends on; all pieces where numbers of
    pieces differ.
    """
    builder = Builder(graph.itemsize)
    pieces: list[list[int]] = [[]] * len(graph.ops)
    for number in graph.order:
        op, made = graph.ops[number], []
        for piece in cut(op):
            deps: list[int] = []
            for dep in graph.deps[number]:
                before = pieces[dep]
                if len(before) != piece.pieces:
                    deps += before
                else:
                    deps.append(before[piece.piece])
            made.append(builder.add(piece, deps))
        pieces[number] = made
    return builder.build(graph.resident)
