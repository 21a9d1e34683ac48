"""Domino: slices of a batch, or of weights, hide each other's communication.

G. Wang et al., arXiv 2409.15241. *Row split*: the batch is cut. Slices never depend on each other,
so AllReduce of one hides behind the operators of another, also across layers (section 3.2).
*Column split*: the second weight of attention and of the MLP is cut by columns. AllReduce of one
part of the result hides behind the multiply of the next one. The parts join before the next
operator, so nothing hides across layers (section 3.3). *2D*: both (section 3.4).

Forward of a layer with two slices, in the order of figure 9 of the paper, and staggered:

    compute   attn 0 | attn 1 | bda+ln 0 | bda+ln 1 | mlp 0 | mlp 1 | bda, attn 0 of the next ...
    links            | AR 0   | AR 1                        | AR 0  | AR 1

    compute   proj 0 | qkv, attn 1 | bda+ln 0 | proj 1 | fc1 0 | bda+ln 1 | fc2 0 | fc1 1 | ...
    links            | AR 0                            | AR 1                     | AR 0
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.core.problem import check_choice, checked_integer
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import FUSED, RING, Graph, Operator, replaced
from flux.plan.policies.fuse import CHOICES, LINEARS, fastest, first_layers, fuse
from flux.plan.policies.passes import pieces, sequences
from flux.plan.schedule import StepSchedule, on_lanes
from flux.plan.simulate import simulate

ORDERS = ("staggered", "grouped", "blocks")
_TRIED = (2, 4)
"""Layers in which orders are compared: on the line through them lie those of the stage, of which
the ends of a pass are a smaller part."""
_ROW_PARALLEL = ("proj", "fc2")
_BEHIND_ROW = ("ar1", "ar2", "rs1", "rs2")
_MIDDLE = {"bda1", "ln2"}  # between attention and MLP: their collectives come before them


class DominoPolicy:
    """Domino's schedule of a step.

    Args:
        slices: pieces of the batch (row split); 1: it is not cut.
        columns: pieces of the second weights (column split); 1: they are not cut.
        fused: linear layers of slices that are Flux's fused ops (``flux.plan.policies.fuse``):
            "none", "column", "row", "all", or "auto": those with which a simulation is fastest.
        order: how slices take turns: "staggered"; "grouped": dropout, residual and norm of all
            slices next to each other between attention and MLP, as in the paper; "blocks": each
            before its slice's MLP (``flux.runtime.domino``); or "auto": that with which a
            simulation of the first layers is fastest. Collectives hide behind the other slice's
            GEMMs when staggered, and behind norms when grouped, which tensor parallelism does not
            make shorter.
    """

    name = "domino"

    def __init__(
        self, slices: int = 2, columns: int = 1, order: str = "auto", fused: str = "none"
    ) -> None:
        slices = checked_integer("domino: slices", slices, 1)
        columns = checked_integer("domino: columns", columns, 1)
        if slices == columns == 1:
            raise ValueError("domino: slices or columns must be at least 2, or nothing is cut")
        check_choice("domino: order", order, (*ORDERS, "auto"))
        check_choice("domino: fused", fused, CHOICES)
        if columns > 1 and fused != "none":
            raise ValueError("domino: columns cut what fused ops would compute: take one of them")
        self.slices, self.columns, self.asked, self.fused = slices, columns, order, fused
        self.turns = ORDERS[0] if order == "auto" else order

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph with its operators cut."""
        if fabric.parallel.tp == 1:
            raise ValueError("domino hides tensor-parallel communication, and tp is 1")
        for op in graph.ops:
            self._check(op)
        if self.slices > 1:
            graph = replaced(graph, self._rows)
        if self.columns > 1:
            graph = replaced(graph, self._columns)
        if self.asked == "auto" and self.slices > 1:
            layers = len({op.layer for op in graph.ops if op.stage == 0 and op.layer >= 0})
            short = [first_layers(graph, count) for count in _TRIED]
            times = {order: self._time(order, short, layers, cost) for order in ORDERS}
            self.turns = fastest(times, lambda o: self._time(o, [graph], layers, cost), graph)
        graph, fuses = self._fuse(graph, cost)
        self.chosen = {"fused": fuses} | ({"order": self.turns} if self.slices > 1 else {})
        return graph

    def _fuse(self, graph: Graph, cost: CostModel) -> tuple[Graph, str]:
        return fuse(graph, self.fused, lambda some: self.order(some, cost), cost)

    def _time(self, order: str, short: Sequence[Graph], layers: int, cost: CostModel) -> float:
        """Return the time of a pass of so many layers in this order, from two short graphs.

        Of one graph: its own.
        """
        self.turns = order
        near, *more = (
            simulate(self.order(self._fuse(graph, cost)[0], cost), cost).iteration_ms
            for graph in short
        )
        slope = (more[0] - near) / (_TRIED[1] - _TRIED[0]) if more else 0.0
        return near + slope * (layers - _TRIED[0])

    def _check(self, op: Operator) -> None:
        if op.micro < 0:
            return
        if op.moves_weights:
            raise ValueError("domino does not cut gathers of weights (zero=2 and 3); use centauri")
        if op.kind in ("attention", RING) and op.shape[0] % self.slices:
            raise ValueError(
                f"domino: {self.slices} slices must divide a micro-batch of {op.shape[0]} sequences"
            )
        if op.part in _ROW_PARALLEL and op.role == "fwd" and op.shape[1] % self.columns:
            raise ValueError(
                f"domino: {self.columns} columns must divide the {op.shape[1]} of {op.name}"
            )

    def _rows(self, op: Operator) -> Sequence[Operator]:
        """Cut an operator along the batch; a wgrad along what it sums over."""
        if op.micro < 0:
            return [op]
        at = 2 if op.kind == "gemm" and op.role == "wgrad" else 0
        return pieces(op, at, self.slices, "s")

    def _columns(self, op: Operator) -> Sequence[Operator]:
        """Cut the second linears of a block, forward, and the collectives after them."""
        if op.micro < 0 or op.role != "fwd" or op.part not in (*_ROW_PARALLEL, *_BEHIND_ROW):
            return [op]
        return [piece._replace(strand=op.piece) for piece in pieces(op, 1, self.columns, "c")]

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule.

        Backward is in the order in which autograd runs what was made in forward: the latest first
        (``flux.runtime.domino``).
        """
        places: dict[tuple[int, str, int], int] = {}  # in forward: by layer, part and slice

        def within(kind: str, numbers: Sequence[int]) -> Sequence[int]:
            if kind == "S":
                return numbers
            if kind == "B":
                return sorted(numbers, key=lambda n: _backward_key(graph.ops[n], places))
            order = self._forward(graph, numbers)
            for place, number in enumerate(order):
                op, slice_ = graph.ops[number], self._slice(graph.ops[number])
                places.setdefault((op.layer, op.part, slice_), place)
                if not op.is_outer:
                    places[op.layer, "", slice_] = place  # the end of the layer
            return order

        return on_lanes(graph, sequences(graph, within), self.name)

    def _forward(self, graph: Graph, numbers: Sequence[int]) -> list[int]:
        """Return a forward pass's operators by block, slice and dependencies."""
        if self.turns == "staggered" and self.slices > 1:
            return self._staggered(graph, numbers)
        places = {number: place for place, number in enumerate(numbers)}
        blocks = self._blocks(graph, numbers)
        return sorted(numbers, key=lambda n: (blocks[n], self._slice(graph.ops[n]), places[n]))

    def _staggered(self, graph: Graph, numbers: Sequence[int]) -> list[int]:
        """Return a forward pass's operators by segments of the slices, each one after the next.

        A segment begins with a column-parallel linear, with a row-parallel one, and after the
        collective of that.
        """
        ops = [graph.ops[number] for number in numbers]
        linears = {linear for linear in LINEARS if _communicates(ops, linear)}
        segments: list[list[list[int]]] = [[[]] for _ in range(self.slices)]
        heads = [""] * self.slices  # the linear that began a slice's segment
        for number in numbers:  # topological
            op = graph.ops[number]
            slice_ = self._slice(op)
            head = heads[slice_]
            if op.part in linears and op.kind in ("gemm", *FUSED):
                begins = op.part != head
            else:
                begins = head in _ROW_PARALLEL and op.part not in _BEHIND_ROW
            if begins:
                segments[slice_].append([])
                heads[slice_] = op.part if op.part in linears else ""
            segments[slice_][-1].append(number)
        turns = max(map(len, segments)) + self.slices
        return [
            number
            for turn in range(turns)
            for slice_, mine in enumerate(segments)
            if 0 <= turn - slice_ < len(mine)
            for number in mine[turn - slice_]
        ]

    def _slice(self, op: Operator) -> int:
        cut_by_columns = op.role == "fwd" and op.part in (*_ROW_PARALLEL, *_BEHIND_ROW)
        return op.strand if self.columns > 1 and cut_by_columns else op.piece

    def _blocks(self, graph: Graph, numbers: Sequence[int]) -> dict[int, int]:
        """Return, for each operator, the number of its block in the pass.

        Slices run a block one after the other. A block ends after a collective that the next one
        waits for. With the order "grouped", what is between attention and MLP is a block by itself.
        """
        blocks: dict[int, int] = {}
        for number in numbers:  # topological
            op, block = graph.ops[number], 0
            for dep in graph.deps[number]:
                if dep not in blocks:
                    continue
                before = graph.ops[dep]
                ends = before.group == "tp" and before.kind != "ag_gemm"
                block = max(block, blocks[dep] + (1 if ends else 0))
                leaves = before.part in _MIDDLE and op.part not in _MIDDLE
                if self.turns == "grouped" and leaves and not op.is_collective:
                    block = max(block, blocks[dep] + 1)
            blocks[number] = block
        return blocks


def _communicates(ops: Sequence[Operator], linear: str) -> bool:
    """Return whether a linear layer of a forward pass is tensor parallel: experts' are not."""
    block = ("ar1", "rs1") if linear in ("qkv", "proj") else ("ar2", "rs2")
    row = "proj" if linear in ("qkv", "proj") else "fc2"
    return any(op.part in block or (op.part == row and op.kind in FUSED) for op in ops)


_LAUNCHED_BY = {"ar_dx1": "qkv", "ag1": "qkv", "ar_dx2": "fc1", "ag2": "fc1"}
_LAUNCHED_BY |= {"rs1": "bda1", "rs2": "bda2", "ag_head": "head", "ar_dx_head": "head"}
"""The operator after whose dgrad a collective is launched in backward."""


def _backward_key(op: Operator, places: dict[tuple[int, str, int], int]) -> tuple[int, int]:
    """Return a sort key: the latest of forward first; gather, dgrad, collective, wgrad of one.

    What a layer computes again comes before its gradients, in the order of forward.
    """
    part = op.part
    if op.role == "recompute":
        return -places[op.layer, "", op.piece], -1
    if op.is_collective:
        part = _LAUNCHED_BY.get(part, part)
        compressed = part == "qkv" and (op.layer, "q_up", op.piece) in places
        part = "q_up" if compressed else part
    rank = 3 if op.role == "wgrad" else 2 if op.is_collective else 1
    if op.is_collective and op.role == "wgrad":
        rank = 0
    place = places.get((op.layer, part, op.piece))
    if place is None:  # what leads to the stage before: after all else
        return 1, rank
    return -place, rank
