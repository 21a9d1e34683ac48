"""The time of an operator by itself, and of two at a time.

Analytic times:

    GEMM         the larger of operations / (peak * share) and bytes / memory bandwidth, where the
                 last wave of tiles counts as a full one
    attention    operations at a lower share; causal, so half of the pairs
    others       bytes / memory bandwidth
    fused ops    the GEMM, and what flux/select/cost.py says that its communication adds to it
    all of them  and the time to launch one
    collectives  alpha-beta; AllGather, ReduceScatter and AllReduce by flux/select/cost.py, which
                 rates the fused ops too, so that the two are compared by one model

Two operators on one device at a time progress at a rate of 1 / (2 - OEF) each. OEF is 1 if the
shorter one is hidden altogether, and 0 if one after the other is as fast (DHelix, arXiv
2411.15871, section 3.2).

Profiled costs replace analytic ones where `flux plan profile` has measured an operator of the same
kind and shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from flux.core.integers import ceil_div
from flux.core.knobs import Op as FusedOp
from flux.core.problem import Problem
from flux.plan.fabric import Fabric, GroupSpan
from flux.plan.graph import FUSED, Operator
from flux.select.cost import (
    GEMM_SHARE,
    LIBRARY_SHARE,
    choose,
    collective_ms,
    library_ms,
    predict,
)

ATTENTION_SHARE = {"cuda": 0.5, "cpu": 0.6}
"""Share of the peak that attention reaches. FlashAttention-2 reaches 50 to 73% on an A100, the
lower end with a causal mask (arXiv 2307.08691, section 4.1)."""
BACKWARD_ATTENTION = 2.5
"""Operations of its backward over its forward: five products in place of two."""
MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that elementwise kernels reach."""
LAUNCH_US = {"cuda": 3.0, "cpu": 10.0}
"""From the end of one operator to the start of the next one."""
TILE = (128, 256)
"""Rows and columns of a GEMM's tile on a GPU."""
OEF = {"cuda": {"intra": 0.85, "inter": 0.95}, "cpu": {"intra": 0.0, "inter": 0.7}}
"""Assumed, where nothing was measured. On a GPU, collectives take some multiprocessors and memory
bandwidth. On a CPU, ranks of a host copy with the cores that multiply."""


_LIBRARY = {
    "all_gather": FusedOp.ag_gemm,
    "reduce_scatter": FusedOp.gemm_rs,
    "all_reduce": FusedOp.gemm_ar,
}
"""The op whose collective it is."""


class CostModel(Protocol):
    """What the simulator and the policies ask for."""

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""
        ...

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators, at most 1.

        They occupy different resources; the first one may be a collective, too.
        """
        ...


@dataclass
class AnalyticCost:
    """Times from data sheets.

    Attributes:
        fabric: cluster and placement of the ranks.
        dtype: of the operators.
        itemsize: bytes of an element.
        start_us: time to start a collective; None: the library's (flux/select/cost.py).
    """

    fabric: Fabric
    dtype: str
    itemsize: int
    start_us: float | None = None
    _times: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    def solo(self, op: Operator) -> float:
        """Return the time of an operator by itself, in ms."""
        key = (op.kind, op.shape, op.group, op.role == "dgrad")
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._time(op)
        return found

    def oef(self, comp: Operator, comm: Operator) -> float:
        """Return the overlap effectiveness factor of two operators.

        A fused op leaves of the links what its own communication does not take. Collectives inside
        hosts and between them use different links: 1.
        """
        if comp.is_collective:
            return 1.0
        assumed = OEF[self.fabric.cluster.device.kind][comm.resource]
        if comp.kind not in FUSED or comm.resource != self.fabric.resource(comp.group):
            return assumed
        busy = library_ms(self._problem(comp), self.fabric.cluster) / self.solo(comp)
        return assumed * max(0.0, 1.0 - busy)

    def _time(self, op: Operator) -> float:
        if op.is_collective:
            return self._collective(op)
        launch = 1e-3 * LAUNCH_US[self.fabric.cluster.device.kind]
        if op.kind == "gemm":
            return launch + self._gemm(*op.shape)
        if op.kind in FUSED:
            return launch + self._gemm(*op.shape) + self._fused_ms(op)
        if op.kind == "attention":
            return launch + self._attention(op)
        rows, width, tensors = op.shape
        itemsize = 4 if op.kind == "optimizer" else self.itemsize
        return launch + self._memory_ms(rows * width * tensors * itemsize)

    def _peak(self) -> float:
        """Return operations per ms."""
        tflops = self.fabric.cluster.device.tflops
        return 1e9 * (tflops.get(self.dtype) or min(tflops.values()))

    def _memory_ms(self, moved: float) -> float:
        return moved / (self.fabric.cluster.device.memory_gbs * 1e6 * MEMORY_SHARE)

    def _gemm(self, m: int, n: int, k: int) -> float:
        device = self.fabric.cluster.device
        waves = 1.0
        if device.kind == "cuda":
            tiles = ceil_div(m, TILE[0]) * ceil_div(n, TILE[1])
            full = m * n / (TILE[0] * TILE[1] * device.units)
            waves = max(1.0, ceil_div(tiles, device.units) / full) if full else 1.0
        operations = 2.0 * m * n * k * waves / (self._peak() * GEMM_SHARE[device.kind])
        return max(operations, self._memory_ms(self.itemsize * (m * k + n * k + m * n)))

    def _fused_ms(self, op: Operator) -> float:
        """Return what a fused op takes beyond its GEMM, with the knobs that the op would choose."""
        problem = self._problem(op)
        cluster = self.fabric.cluster
        return predict(problem, cluster, choose(problem, cluster)).exposed_ms

    def _problem(self, op: Operator) -> Problem:
        span, (m, n, k) = self.fabric.span(op.group), op.shape
        kind = FusedOp.named(op.kind)
        n, k = (n * span.size, k) if kind.gathers else (n, k * span.size)
        return Problem(kind, m, n, k, self.dtype, span.size, span.hosts)

    def _attention(self, op: Operator) -> float:
        batch, heads, queries, keys, dim = op.shape
        operations = 4.0 * batch * heads * queries * keys * dim / 2
        if op.role == "dgrad":
            operations *= BACKWARD_ATTENTION
        return operations / (self._peak() * ATTENTION_SHARE[self.fabric.cluster.device.kind])

    def _collective(self, op: Operator) -> float:
        span = self.fabric.span(op.group)
        payload = float(op.shape[0]) * op.shape[1] * self.itemsize
        inside, ports = self._speeds(span)
        cluster, size = self.fabric.cluster, span.size
        if op.kind == "send":
            crosses = span.hosts > 1
            gbs = self.fabric.port_gbs if crosses else cluster.link.gbs
            latency = cluster.network.latency_us if crosses else cluster.link.latency_us
            return payload / (gbs * 1e6) + latency * 1e-3
        if op.kind == "all_to_all":
            near = payload * (span.per_host - 1) / size / inside
            far = payload * (size - span.per_host) / size / ports * span.per_host
            return max(near, far) + self._latency_ms(span)
        ports_gbs = self.fabric.port_gbs * span.per_host
        kind = _LIBRARY[op.kind]
        shard, lanes = payload / size, span.per_host
        return collective_ms(kind, shard, size, lanes, cluster, ports_gbs, self.start_us)

    def _speeds(self, span: GroupSpan) -> tuple[float, float]:
        """Return bytes per ms of a rank's link, and of the ports that a group has on a host."""
        cluster = self.fabric.cluster
        share = LIBRARY_SHARE[cluster.device.kind][FusedOp.gemm_rs]
        ports = self.fabric.port_gbs * span.per_host * 1e6
        if cluster.device.kind == "cuda":
            ports *= share
        return max(cluster.link.gbs, 1e-6) * 1e6 * share, max(ports, 1e-6)

    def _latency_ms(self, span: GroupSpan) -> float:
        cluster = self.fabric.cluster
        inside = (span.per_host - 1) * cluster.link.latency_us
        across = (span.hosts - 1) * cluster.network.latency_us
        return (inside + across) * 1e-3
