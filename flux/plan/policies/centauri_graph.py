"""Rewrite a step's graph for Centauri: substituted primitives, sub-groups, chunks.

A *partition* says what takes the place of a collective (pieces), whether it is first divided by the
GEMMs whose weights it moves, and how many operators after it are cut into chunks, so that each
chunk waits for its pieces alone. All collectives of one part and role are partitioned alike,
because layers repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Builder, Graph, Operator, part_of
from flux.plan.mesh import parse_group
from flux.plan.policies.centauri_space import WHOLE, CommPiece, meshes
from flux.plan.policies.folding import layers_of, stage_of
from flux.plan.policies.passes import Action

Key = tuple[str, str]
"""(part, role) of a collective."""


@dataclass(frozen=True)
class Partition:
    """What takes the place of a collective.

    Attributes:
        pieces: of it, or of each GEMM's share.
        by_gemm: divide it by the GEMMs whose weights, or gradients of weights, it moves.
        chain: operators after it (of a ReduceScatter: before it) that are cut like it.
    """

    pieces: tuple[CommPiece, ...] = WHOLE
    by_gemm: bool = False
    chain: int = 0

    @property
    def fractions(self) -> tuple[float, ...]:
        """Fractions of the result that come one after the other."""
        return tuple(piece.brings for piece in self.pieces if piece.brings > 0)

    def is_single(self, grouped: bool) -> bool:
        """Return whether it is one collective, or one between hosts and one inside."""
        where = [piece.where for piece in self.pieces]
        return where == ["whole"] or (grouped and len(where) == 2 and "whole" not in where)


def substituted(graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
    """Return the graph in which gradients are reduce-scattered, and weights gathered.

    An AllReduce of gradients becomes ReduceScatter, optimizer on a share, and AllGather of weights;
    it stays one where both take longer than the AllReduce.
    These AllGathers move to the beginning of the step: forward of the first micro-batch waits for
    its layer's. So the step is one of many, each of which begins with what the last one left.
    """
    builder = Builder(graph.itemsize)
    users = _first_users(graph)
    # Adam reads a gradient, and reads and writes three states.
    states = max((op.shape[2] - 1) / 2 for op in graph.ops if op.kind == "optimizer")
    resident = list(graph.resident)
    place: dict[int, int] = {}
    waits: dict[int, list[int]] = {}  # for old operators, gathers at the beginning of the step
    whole = {number for number, op in enumerate(graph.ops) if not _splits(op, cost)}
    for number, op in enumerate(graph.ops):
        if not is_substituted(op) or number in whole:
            continue
        if op.kind == "all_reduce":
            part = op.part.replace("grads", "weights")
            op = op._replace(name=f"L{op.layer}.{part}", part=part, kind="all_gather")
        gather = builder.add(op, [])
        if graph.ops[number].kind == "all_gather":
            place[number] = gather
        for user in users.get((op.layer, op.part.endswith("experts")), []):
            waits.setdefault(user, []).append(gather)
    for number in graph.order:
        op = graph.ops[number]
        if number in place:
            continue
        if op.kind == "all_reduce" and op.role == "step" and number not in whole:
            op = op._replace(kind="reduce_scatter")
            if resident:  # each rank keeps the optimizer's states of its share
                others = 1 - 1 / fabric.span(op.group).size
                resident[op.place] -= 4.0 * states * op.shape[1] * others
        if op.kind == "optimizer":
            for dep in graph.deps[number]:
                before = graph.ops[dep]
                if before.kind == "all_reduce" and dep not in whole:
                    share = op.shape[1] / fabric.span(before.group).size
                    op = op._replace(shape=(1, max(1, int(share)), op.shape[2]))
        behind = [place[dep] for dep in graph.deps[number]]
        place[number] = builder.add(op, [*behind, *waits.get(number, [])])
    return builder.build(resident)


def is_substituted(op: Operator) -> bool:
    """Return whether an operator is of the step's end, and may move or change."""
    return op.role == "step" and op.is_collective and op.kind != "reduce_scatter"


def _splits(op: Operator, cost: CostModel) -> bool:
    """Return whether ReduceScatter and AllGather may take the place of an AllReduce.

    Of the paper's Table 2 it is the substitution in which no root sends or receives everything.
    Where it takes longer than the AllReduce, it is left out (section 3.1.1). gloo's ReduceScatter
    does: it is an AllReduce inside.
    """
    if op.kind != "all_reduce":
        return True
    parts = [cost.solo(op._replace(kind=kind)) for kind in ("reduce_scatter", "all_gather")]
    return sum(parts) <= cost.solo(op) * (1 + 1e-9)


def _first_users(graph: Graph) -> dict[tuple[int, bool], list[int]]:
    """Return what reads a layer's weights first in a step, by (layer, whether of experts).

    GEMMs of the first micro-batch's forward; with ZeRO-3 the gather before them.
    """
    has_experts = any(op.part == "router" for op in graph.ops)
    gemms: dict[tuple[int, bool], list[int]] = {}
    gathers: dict[tuple[int, bool], list[int]] = {}
    for number, op in enumerate(graph.ops):
        if op.role != "fwd" or op.micro != 0:
            continue
        if op.kind == "gemm" or op.part == "embed":
            experts = has_experts and op.part in ("fc1", "fc2")
            gemms.setdefault((op.layer, experts), []).append(number)
        elif op.moves_weights:
            gathers.setdefault((op.layer, op.part.endswith("experts")), []).append(number)
    return gemms | gathers


def limited(graph: Graph, passes: Sequence[Sequence[Action]], stages: int, prefetch: int) -> Graph:
    """Return the graph in which ZeRO-3 gathers are at most so many layers ahead."""
    if not any(op.kind == "all_gather" and op.micro >= 0 and op.moves_weights for op in graph.ops):
        return graph
    last: dict[tuple[str, int, int], int] = {}  # of a visit to a layer, its last operator
    for number in graph.order:
        op = graph.ops[number]
        if op.layer >= 0 and op.micro >= 0 and op.role in ("fwd", "dgrad") and not op.is_collective:
            last["F" if op.role == "fwd" else "B", op.micro, op.layer] = number
    count = layers_of(graph)
    layers: dict[int, dict[int, None]] = {}  # by stage of the model
    for op in graph.ops:
        if op.layer >= 0:
            layers.setdefault(stage_of(op, count, stages), {})[op.layer] = None
    behind: dict[tuple[str, int, int], int] = {}
    for order in passes:
        visits = [
            (kind, micro, layer)
            for stage, kind, micro in order
            for layer in sorted(layers.get(stage, ()), reverse=kind == "B")
        ]
        for index, visit in enumerate(visits):
            if index > prefetch:
                behind[visit] = last[visits[index - prefetch - 1]]
    deps = list(graph.deps)
    for number, op in enumerate(graph.ops):
        if op.kind == "all_gather" and op.micro >= 0 and op.moves_weights:
            visit = ("F" if op.role == "fwd" else "B", op.micro, op.layer)
            if visit in behind:
                deps[number] = (*deps[number], behind[visit])
    return replace(graph, deps=tuple(deps))


def window(graph: Graph, layers: int = 4) -> Graph:
    """Return what the first layers of the first stage do in the first and the last micro-batch."""
    micros = {0, graph.micro_batches - 1}
    chosen = sorted({op.layer for op in graph.ops if op.stage == 0 and op.layer >= 0})[:layers]
    kept = [
        number
        for number, op in enumerate(graph.ops)
        if op.stage == 0 and op.layer in chosen and (op.micro < 0 or op.micro in micros)
    ]
    if len(kept) == len(graph.ops):
        return graph
    resident = [0.0, *graph.resident_by_stage[:1], *[0.0] * (layers_of(graph))]
    part = part_of(graph, kept, resident)
    renamed = {micro: index for index, micro in enumerate(sorted(micros))}
    ops = tuple(op._replace(micro=renamed.get(op.micro, op.micro)) for op in part.ops)
    return replace(part, ops=ops)


def partitioned(graph: Graph, how: Mapping[Key, Partition], fabric: Fabric) -> Graph:
    """Return the graph with collectives in pieces, and chunks of the operators alongside them."""
    return _Rewriter(graph, how, fabric).build() if how else graph


class _Rewriter:
    def __init__(self, graph: Graph, how: Mapping[Key, Partition], fabric: Fabric) -> None:
        self.graph, self.how, self.fabric = graph, how, fabric
        self.builder = Builder(graph.itemsize)
        self.after = graph.after
        self.cuts: dict[int, tuple[float, ...]] = {}  # operators that are cut, into what fractions
        self.axis: dict[int, int] = {}  # the dimension of their shape that is cut
        self.aligned: set[tuple[int, int]] = set()  # (before, after): chunk i needs chunk i alone
        self.outs: dict[int, list[list[int]]] = {}  # for each operator, what makes its chunks
        self.outs_for: dict[tuple[int, int], list[list[int]]] = {}  # of one consumer alone

    def build(self) -> Graph:
        ops, how, moves = self.graph.ops, self.how, self.graph.communicates
        keys = ((number, (op.part, op.role)) for number, op in enumerate(ops) if moves[number])
        cut = {number: how[key] for number, key in keys if key in how}
        for number, partition in cut.items():
            self._cut_chain(number, ops[number], partition)
        for number in self.graph.order:
            if number in cut:
                self._add_collective(number, ops[number], cut[number])
            else:
                self._add_compute(number, ops[number])
        return self.builder.build(self.graph.resident)

    def _cut_chain(self, number: int, op: Operator, partition: Partition) -> None:
        if len(partition.fractions) < 2:
            return
        reduces = op.kind in ("reduce_scatter", "all_reduce")
        beside = self.graph.deps[number] if reduces else self.after[number]
        for start in (n for n in beside if self.graph.ops[n].kind == "gemm"):
            self._cut_from(number, start, op.moves_weights, partition)

    def _cut_from(self, number: int, start: int, columns: bool, partition: Partition) -> None:
        """Cut a chain that begins, or of a ReduceScatter ends, with a GEMM."""
        before, here = number, start
        backwards = number in self.after[start]
        for _ in range(partition.chain):
            if here in self.cuts:
                return
            self.cuts[here] = partition.fractions
            self.axis[here] = 1 if columns else 0
            self.aligned.add((here, before) if backwards else (before, here))
            following = self.graph.deps[here] if backwards else self.after[here]
            nexts = [n for n in following if self._continues(here, n)]
            if len(nexts) != 1:
                return
            before, here = here, nexts[0]

    def _continues(self, here: int, other: int) -> bool:
        a, b = self.graph.ops[here], self.graph.ops[other]
        same = (a.layer, a.micro, a.role) == (b.layer, b.micro, b.role)
        return same and not b.is_collective and b.kind in ("gemm", "elementwise")

    def _needs(self, number: int, chunk: int | None) -> list[int]:
        """Return new operators that a chunk of an old one, or all of it, waits for."""
        needed: list[int] = []
        for dep in self.graph.deps[number]:
            outs = (self.outs_for and self.outs_for.get((dep, number))) or self.outs[dep]
            if chunk is not None and (dep, number) in self.aligned and len(outs) > chunk:
                needed += outs[chunk]
            else:
                needed += [new for out in outs for new in out]
        return needed

    def _add_compute(self, number: int, op: Operator) -> None:
        fractions = self.cuts.get(number)
        if fractions is None:
            self.outs[number] = [[self.builder.add(op, self._needs(number, None))]]
            return
        at, count = self.axis[number], len(fractions)
        outs = []
        for chunk, fraction in enumerate(fractions):
            begin, end = sum(fractions[:chunk]), sum(fractions[: chunk + 1])
            size = round(op.shape[at] * end) - round(op.shape[at] * begin)
            piece = op._replace(
                name=f"{op.name}.k{chunk}",
                piece=chunk,
                pieces=count,
                shape=(*op.shape[:at], size, *op.shape[at + 1 :]),
                allocates=op.allocates * fraction,
                frees=op.frees * fraction,
            )
            outs.append([self.builder.add(piece, self._needs(number, chunk))])
        self.outs[number] = outs

    def _add_collective(self, number: int, op: Operator, partition: Partition) -> None:
        gathers = op.kind == "all_gather"
        beside = self.after[number] if gathers else self.graph.deps[number]
        gemms = [n for n in beside if self.graph.ops[n].kind == "gemm"]
        if not partition.by_gemm or not gemms or len(gemms) < len(beside):
            self.outs[number] = self._add_pieces(number, op, partition, "", 1.0, None)
            return
        # In backward a gather's GEMMs come in another order than forward's: that of the graph.
        sizes: dict[str, float] = {}
        for n in gemms:
            shape, role = self.graph.ops[n].shape, self.graph.ops[n].role
            sizes[self.graph.ops[n].part] = (
                shape[0] * shape[1] if role == "wgrad" else shape[1] * shape[2]
            )
        total = sum(sizes.values())
        every: list[list[int]] = []
        for part, size in sizes.items():
            users = [n for n in gemms if self.graph.ops[n].part == part]
            behind = None if gathers else users
            outs = self._add_pieces(number, op, partition, f".{part}", size / total, behind)
            every += outs
            if gathers:
                for user in users:
                    self.outs_for[number, user] = outs
        self.outs[number] = every

    def _add_pieces(
        self,
        number: int,
        op: Operator,
        partition: Partition,
        suffix: str,
        share: float,
        behind: Sequence[int] | None,
    ) -> list[list[int]]:
        """Add the pieces of a collective, or of a GEMM's share of it; return what they bring.

        ``behind`` are the GEMMs that this share needs; None: all that the collective depends on.
        """
        added: list[int] = []
        outs: list[list[int]] = []
        gathers = op.kind == "all_gather"
        chunk = 0
        for index, piece in enumerate(partition.pieces):
            needs = [added[other] for other in piece.behind]
            if gathers:
                needs += self._needs(number, None)
            elif piece.brings > 0 and behind is None:
                needs += self._needs(number, chunk)
            elif piece.brings > 0:
                needs += [new for b in behind or () for out in self.outs[b] for new in out]
            new = self._piece(op, piece, f"{suffix}.p{index}", share, len(partition.pieces))
            added.append(self.builder.add(new, needs))
            if gathers and piece.brings > 0:
                outs.append([added[-1]])
            chunk += piece.brings > 0
        if gathers:
            return outs
        ends = set(range(len(added))) - {b for piece in partition.pieces for b in piece.behind}
        return [[added[end]] for end in sorted(ends)]

    def _piece(
        self, op: Operator, piece: CommPiece, suffix: str, share: float, count: int
    ) -> Operator:
        group = op.group
        if piece.where != "whole":
            span = self.fabric.span(op.group)
            parts = parse_group(op.group).split(meshes(span.size, span.per_host)[0])
            group = parts[0 if piece.where == "inter" else 1].name
        along = 1 if op.moves_weights else 0
        size = max(1, round(op.shape[along] * share * piece.volume))
        shape = (op.shape[0], size) if along else (size, op.shape[1])
        name, held, freed = op.name, op.allocates * share / count, op.frees * share / count
        if count > 1 or share < 1:
            name += suffix
        resource, at, strand = self.fabric.resource(group), op[3:8], op.strand
        return Operator(
            name, op.kind, resource, *at, 0, op.pieces, strand, shape, group, held, freed
        )
