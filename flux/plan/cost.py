"""The time of an operator by itself, and of two at a time.

Analytic times:

    GEMM, attention   operations at a share of the peak (flux/select/cost.py)
    other operators   bytes / memory bandwidth
    fused ops         the GEMM, and what its communication adds (flux/select/cost.py)
    all of them       and the time to launch one
    ring attention    steps of attention, each beside a message to the next rank
    collectives       flux/select/cost.py, which rates the fused ops' too

Two operators on one device at a time progress at a rate of 1 / (2 - OEF) each. OEF is 1 if the
shorter one is hidden altogether, and 0 if one after the other is as fast (DHelix, arXiv
2411.15871, section 3.2).

A calibration (flux/machine/calibration.py) has measured times of all but collectives. `flux plan
run` measures all operators on its ranks (flux/runtime/profile.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from flux.core.knobs import Op as FusedOp
from flux.core.problem import Problem
from flux.plan.fabric import Fabric
from flux.plan.graph import FUSED, RING, Graph, Operator
from flux.plan.model import OPTIMIZERS
from flux.select.cost import (
    all_to_all_ms,
    attention_ms,
    collective_ms,
    gemm_ms,
    kernel_ms,
    library_ms,
    send_ms,
    sliced_gemm_ms,
)
from flux.select.hardware import LAUNCH_US

LIBRARY = {
    "all_gather": FusedOp.ag_gemm,
    "reduce_scatter": FusedOp.gemm_rs,
    "all_reduce": FusedOp.gemm_ar,
}
"""The op whose collective it is."""


class CostModel(Protocol):
    """What the simulator and the policies ask for.

    One with an attribute ``by_kind`` that is true has equal times and factors for operators of one
    kind (``Graph.kinds``).
    """

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators, at most 1.

        They occupy different resources; the first one may be a collective, too.
        """


def solo_times(graph: Graph, cost: CostModel) -> list[float]:
    """Return the time of each operator by itself."""
    if not getattr(cost, "by_kind", False):
        return [cost.solo(op) for op in graph.ops]
    times = [cost.solo(op) for op in graph.examples]
    return [times[kind] for kind in graph.kinds]


@dataclass
class AnalyticCost:
    """Times from data sheets.

    Attributes:
        gemm_dtype: of the layers' GEMMs; "": that of operators. Operands are cast for each GEMM.
        functions: of torch that run norms, the optimizer and others, by part or kind; the rest are
            kernels that stream bytes.
        serves: inference: weights are stored in ``gemm_dtype``, GEMMs whose tiles do not fill the
            device are cut along K, and small messages have the library's protocol for them.
    """

    fabric: Fabric
    dtype: str
    itemsize: int
    gemm_dtype: str = ""
    functions: Mapping[str, str] = field(default_factory=dict)
    serves: bool = False
    by_kind: ClassVar[bool] = True
    _times: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _overlap: dict[str, float] = field(default_factory=dict, repr=False)

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""
        key = op.kind, op.role, op.part, op.shape, op.group
        time = self._times.get(key)
        if time is None:
            time = self._times[key] = self._time(op)
        return time

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators.

        A fused op leaves of the links what its own communication does not take. Collectives inside
        hosts and between them use different links: 1.
        """
        if comp.is_collective:
            return 1.0
        assumed = self._overlap.get(comm.group)
        if assumed is None:
            assumed = self._overlap[comm.group] = self.fabric.overlap(comm.group)
        if comp.kind not in (*FUSED, RING) or comm.resource != self.fabric.resource(comp.group):
            return assumed
        if comp.kind == RING:
            busy = (self.fabric.span(comp.group).size - 1) * self._hop_ms(comp)
        else:
            busy = library_ms(self.problem_of(comp), self.fabric.cluster)
        return assumed * max(0.0, 1.0 - busy / self.solo(comp))

    def _time(self, op: Operator) -> float:
        if op.is_collective:
            return self._collective_ms(op)
        device, backward = self.fabric.cluster.device, op.role == "dgrad"
        kind = "gemm" if "gemm" in op.kind else "attention" if op.kind == RING else op.kind
        included = device.measured is not None and device.measured.knows(kind)
        launch = 0.0 if included else 1e-3 * LAUNCH_US[device.kind]
        if op.kind == "attention":
            return launch + attention_ms(op.shape, self.dtype, device, backward=backward)
        if op.kind == RING:
            whole = attention_ms(op.shape[:5], self.dtype, device, backward=backward)
            return self._ring_ms(op, whole, launch)
        if op.kind == "cached_attention":
            batch, heads, keys, width, nbytes = op.shape
            shape, read = (batch, heads, 1, keys, width), float(batch) * keys * nbytes
            return launch + attention_ms(shape, self.dtype, device, read=read)
        if "gemm" in op.kind:
            m, n, k = op.shape[:3]
            # Operands of router and head stay as they are.
            cast = bool(self.gemm_dtype) and op.part not in ("head", "router")
            dtype = self.gemm_dtype if cast else self.dtype
            gemm = launch + sliced_gemm_ms(
                op.shape, dtype, self.itemsize, device, op.role, serves=self.serves
            )
            if cast:  # a pass over both operands for the scale, one that reads and writes them
                moved = (m * k + (0 if self.serves else k * n)) * (2 * self.itemsize + 1)
                gemm += 2 * launch + kernel_ms(device, moved)
            return gemm + self._exposed_ms(op) if op.kind in FUSED else gemm
        rows, width, tensors = op.shape
        named, size, itemsize = op.part, 1.0 * rows * width, self.itemsize
        if op.kind == "optimizer":
            named, itemsize, size = op.kind, 4, size * tensors / OPTIMIZERS["adam"].tensors
        moved = rows * width * tensors * itemsize
        function = self.functions.get(named, "")
        return launch + kernel_ms(device, moved, function, size, backward=backward)

    def _ring_ms(self, op: Operator, whole: float, launch: float) -> float:
        """Return the time of a ring: a chunk moves beside attention with the one before it.

        Each rank has as many pairs of each chunk (Megatron's order of tokens). In backward
        gradients of keys and values move, too, and to their owner when the last chunk is done.
        """
        size, hop = self.fabric.span(op.group).size, self._hop_ms(op)
        chunk = launch + whole / size
        beside = chunk + hop - self.fabric.overlap(op.group) * min(chunk, hop)
        return chunk + (size - 1) * beside + (hop / 2 if op.role == "dgrad" else 0.0)

    def _hop_ms(self, op: Operator) -> float:
        """Return the time of a chunk from one rank of a ring to the next one."""
        span, (batch, _, queries, _, _, width) = self.fabric.span(op.group), op.shape
        payload = float(batch) * queries * width * self.itemsize
        port = self.fabric.port_gbs if span.hosts > 1 else None
        return send_ms(payload, self.fabric.cluster, port) * (2 if op.role == "dgrad" else 1)

    def _exposed_ms(self, op: Operator) -> float:
        """Return what a fused op takes beyond its GEMM, with the knobs that the op would choose.

        Of a fused kernel also what its GEMM loses to communication: ``choose`` counts it, and with
        another sum a faster link could make the op that it chooses slower.
        """
        problem, cluster = self.problem_of(op), self.fabric.cluster
        if op.kind == "expert_gemm" and cluster.device.kind == "cuda" and problem.world > 1:
            from flux.opsim.simulator import simulated_part  # steps without experts do not need it

            times, part = simulated_part(problem, cluster)
            return times * part.ect_ms
        from flux.select.predict import choose, predict  # most plans have no fused ops

        return sum(predict(problem, cluster, choose(problem, cluster))) - gemm_ms(problem, cluster)

    def problem_of(self, op: Operator) -> Problem:
        """Return the problem that a fused op solves."""
        span, (m, n, k) = self.fabric.span(op.group), op.shape
        if op.kind == "expert_gemm":
            # Tokens of all ranks, of which each rank has a part of the columns: as many operations
            # and bytes as with experts of its own, for it receives 1 / size of each row.
            gathers = FusedOp.ag_gemm if op.dispatches else FusedOp.gemm_rs
            sizes = (m * span.size, n, k, self.dtype, span.size, span.hosts)
            return Problem(gathers, *sizes, experts=span.size, topk=span.size)
        kind = FusedOp.named(op.kind)
        n, k = (n * span.size, k) if kind.gathers else (n, k * span.size)
        return Problem(kind, m, n, k, self.dtype, span.size, span.hosts)

    def _collective_ms(self, op: Operator) -> float:
        span, cluster = self.fabric.span(op.group), self.fabric.cluster
        payload = float(op.shape[0]) * op.shape[1] * self.itemsize
        if op.kind == "send":
            return send_ms(payload, cluster, self.fabric.port_gbs if span.hosts > 1 else None)
        ports_gbs = self.fabric.port_gbs * span.per_host
        if op.kind == "all_to_all":
            return all_to_all_ms(payload, span.size, span.per_host, cluster, ports_gbs)
        kind, shard = LIBRARY[op.kind], payload / span.size
        return collective_ms(
            *(kind, shard, span.size, span.per_host, cluster, ports_gbs), low_latency=self.serves
        )
