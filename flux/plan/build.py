"""Build the operators of a training step of a transformer, dense or with experts.

Of one layer, with sequence parallelism. Without it, AllReduce takes the place of ReduceScatter, and
there is no AllGather; without tensor parallelism there is neither. DHelix (arXiv 2411.15871,
section 4.2) counts 14 operators forward and 18 backward:

    forward     ln1 ag1 qkv attention proj rs1 bda1  ln2 ag2 fc1 act fc2 rs2 bda2
    backward    the same in reverse, where each of the four GEMMs is two: dgrad and wgrad

bda is bias, dropout and addition of the residual. With experts, ln2 is followed by

    router dispatch fc1 act fc2 combine bda2          dispatch and combine are AllToAll

With context parallelism keys and values are gathered before attention, and their gradients
reduce-scattered after it. Embedding and loss are left out: a layer is what repeats.

With ZeRO-3 a layer's weights are gathered before its forward and again before its backward. Its
gradients are reduce-scattered after each backward. How early a gather begins is up to the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from flux.core.collector import paused_collector
from flux.core.problem import ceil_div
from flux.plan.fabric import Fabric
from flux.plan.graph import Builder, Graph, Operator
from flux.plan.mesh import SubGroup
from flux.plan.model import TrainingStep

_ADAM = 7
"""Tensors in float32: Adam reads gradient, weight and two moments, and writes the last three."""
_MOST_PASSES = 1 << 18
"""Of a layer, by micro-batch. Each has some 40 operators, of some 500 bytes."""
OPTIMIZER_BYTES = 12.0
"""Float32 copy of the weight and two moments."""


def build_step(step: TrainingStep, fabric: Fabric) -> Graph:
    """Return the operators of a step: all layers, micro-batches and stages, and the optimizer.

    Raises:
        ValueError: there are more than memory can hold.
    """
    passes = step.micro_batches * (step.layers + step.parallel.pp)
    if passes > _MOST_PASSES:
        raise ValueError(
            f"{step.layers} layers x {step.micro_batches} micro-batches are too many operators to "
            f"plan: at most {_MOST_PASSES} passes of a layer"
        )
    with paused_collector():
        return _Layers(step, fabric).build()


class _Layers:
    def __init__(self, step: TrainingStep, fabric: Fabric) -> None:
        self.step, self.fabric = step, fabric
        self.builder = Builder(step.itemsize)
        parallel, layer = step.parallel, step.layer
        self.tp, self.cp = parallel.tp, parallel.cp
        self.rows = step.tokens  # of the operators between AllGather and ReduceScatter
        self.sharded = parallel.sequence and self.tp > 1
        self.own = self.rows // self.tp if self.sharded else self.rows  # of the others
        self.hidden = layer.hidden
        self.inner = layer.heads * layer.head_dim // self.tp
        self.kv = 2 * ceil_div(layer.kv_heads, self.tp) * layer.head_dim
        heads, queries = layer.heads // self.tp, step.sequence // self.cp
        self.attention = (step.micro_batch, heads, queries, step.sequence, layer.head_dim)
        self.mlp = layer.intermediate // self.tp
        self.up = 2 if layer.gated else 1
        self.gathered = {}  # GEMMs whose input is gathered again, and by what
        if self.sharded and step.regather:
            self.gathered = {"qkv": "ag1"} | ({} if layer.moe else {"fc1": "ag2"})
        self.per_stage = step.layers // parallel.pp
        self.stage = self.layer = self.micro = -1
        self.last: int | None = None  # the operator that the next one comes after
        self.wgrads: dict[int, list[int]] = {}  # by layer: of the last micro-batch
        self.norms: dict[tuple[int, int, str], int] = {}  # whose output is gathered, for a GEMM
        self.parameters: dict[str, int] = {}  # ZeRO-3: the gather before a GEMM of this layer
        self.reductions: dict[int, list[int]] = {}  # ZeRO-3: by layer

    def build(self) -> Graph:
        step = self.step
        ends: list[list[int | None]] = []  # of forward passes: by micro-batch, by stage
        for micro in range(step.micro_batches):
            ends.append([])
            self.micro, self.last = micro, None
            for stage in range(step.parallel.pp):
                self._forward(stage)
                ends[-1].append(self.last)
        for micro in range(step.micro_batches):
            self.micro, self.last = micro, ends[micro][-1]
            for stage in reversed(range(step.parallel.pp)):
                self._backward(stage)
        self._optimize()
        return self.builder.build(self._resident())

    def _resident(self) -> list[float]:
        """Return bytes of weights, gradients and optimizer states of a stage's rank."""
        step = self.step
        share = (step.shard or step.parallel.dp) if step.zero else 1
        weight = 2.0 * step.itemsize + OPTIMIZER_BYTES / share
        if step.zero == 3:  # what is gathered is allocated by the gathers
            weight = (2.0 * step.itemsize + OPTIMIZER_BYTES) / share
        return [self.per_stage * step.layer_weights * weight] * step.parallel.pp

    # -- operators ---------------------------------------------------------------------------------

    def _add(
        self,
        part: str,
        kind: str,
        shape: tuple[int, ...],
        *,
        role: str = "fwd",
        group: str = "",
        keeps: float = 0.0,
        frees: float = 0.0,
        behind: Sequence[int] | None = None,
        leads: bool = True,
    ) -> int:
        """Add an operator after the last one, or after others.

        Args:
            part: see ``Operator``.
            kind: likewise.
            shape: likewise.
            role: likewise.
            group: likewise.
            keeps: elements that stay allocated until backward frees them.
            frees: elements that are free after it.
            behind: operators that it depends on, in place of the last one.
            leads: whether the next operator comes after this one.
        """
        before = behind if behind is not None else [] if self.last is None else [self.last]
        suffix = {"fwd": "", "dgrad": ".d", "wgrad": ".w", "step": ""}[role]
        where = f"L{self.layer}." if self.layer >= 0 else f"S{self.stage}."
        number = f".m{self.micro}" if self.micro >= 0 else ""
        itemsize = self.step.itemsize
        op = Operator(
            name=f"{where}{part}{suffix}{number}",
            kind=kind,
            resource=self.fabric.resource(group) if group else "comp",
            role=role,
            stage=self.stage,
            part=part,
            layer=self.layer,
            micro=self.micro,
            shape=shape,
            group=group,
            allocates=keeps * itemsize,
            frees=frees * itemsize,
        )
        added = self.builder.add(op, before)
        if leads:
            self.last = added
        return added

    def _gemm(self, part: str, rows: int, n: int, k: int) -> None:
        """Add a forward GEMM, which keeps its input for the gradient of its weight."""
        self._add(
            part,
            "gemm",
            (rows, n, k),
            keeps=self._kept(part, rows) * k,
            behind=self._behind(part),
        )

    def _behind(self, part: str) -> list[int]:
        """Return what a GEMM waits for: the last operator, and its gathered weights."""
        before = [] if self.last is None else [self.last]
        return before + ([self.parameters[part]] if part in self.parameters else [])

    def _kept(self, part: str, rows: int) -> int:
        """Return rows of a GEMM's input that are kept until backward."""
        return self.own if part in self.gathered else rows

    def _gemm_backward(self, part: str, rows: int, n: int, k: int) -> None:
        """Add both gradients of a GEMM [rows, k] x [k, n]; the next operator follows dgrad."""
        before = [] if self.last is None else [self.last]
        behind = self._behind(part)
        if part in self.gathered:
            again = self._add(
                self.gathered[part],
                "all_gather",
                (rows, k),
                role="wgrad",
                group="tp",
                behind=[self.norms[self.layer, self.micro, part], *before],
                leads=False,
            )
            before.append(again)
        self._add(part, "gemm", (rows, k, n), role="dgrad", behind=behind)
        frees = self._kept(part, rows) * k
        wgrad = self._add(
            part, "gemm", (n, k, rows), role="wgrad", frees=frees, behind=before, leads=False
        )
        if self.step.zero == 3 or self.micro == self.step.micro_batches - 1:
            self.wgrads.setdefault(self.layer, []).append(wgrad)

    def _tensor_parallel(self, part: str, kind: str, role: str = "fwd") -> None:
        if self.tp > 1:
            self._add(part, kind, (self.rows, self.hidden), role=role, group="tp")

    def _send(self, part: str, role: str) -> None:
        self.layer = -1
        self._add(part, "send", (self.own, self.hidden), role=role, group="pp")

    # -- passes ------------------------------------------------------------------------------------

    def _forward(self, stage: int) -> None:
        self.stage = stage
        for index in range(self.per_stage):
            self.layer = stage * self.per_stage + index
            self._gather_weights("fwd")
            self._attention()
            if self.step.layer.moe is None:
                self._mlp()
            else:
                self._experts()
            self._free_weights()
        if stage < self.step.parallel.pp - 1:
            self._send("send_act", "fwd")

    def _attention(self) -> None:
        own, hidden = self.own, self.hidden
        norm = self._add("ln1", "norm", (own, hidden, 2), keeps=own * hidden)
        self.norms[self.layer, self.micro, "qkv"] = norm
        if self.sharded:
            self._tensor_parallel("ag1", "all_gather")
        self._gemm("qkv", self.rows, self.inner + self.kv, hidden)
        if self.cp > 1:
            self._add("ag_kv", "all_gather", (self.rows * self.cp, self.kv), group="cp")
        shape = self.attention
        self._add("attention", "attention", shape, keeps=self.rows * (self.inner + self.kv))
        self._gemm("proj", self.rows, hidden, self.inner)
        self._row_forward("1")
        self._add("bda1", "elementwise", (own, hidden, 3), keeps=own * hidden / 2)

    def _mlp(self) -> None:
        own, hidden = self.own, self.hidden
        norm = self._add("ln2", "norm", (own, hidden, 2), keeps=own * hidden)
        self.norms[self.layer, self.micro, "fc1"] = norm
        if self.sharded:
            self._tensor_parallel("ag2", "all_gather")
        self._gemm("fc1", self.rows, self.up * self.mlp, hidden)
        act = (self.rows, self.mlp, self.up + 1)
        self._add("act", "elementwise", act, keeps=self.rows * self.up * self.mlp)
        self._gemm("fc2", self.rows, hidden, self.mlp)
        self._row_forward("2")
        self._add("bda2", "elementwise", (own, hidden, 3), keeps=own * hidden / 2)

    def _experts(self) -> None:
        moe, own, hidden = self.step.layer.moe, self.own, self.hidden
        assert moe is not None
        routed = own * moe.top_k
        self._add("ln2", "norm", (own, hidden, 2), keeps=own * hidden)
        self._gemm("router", own, moe.experts, hidden)
        if self.step.parallel.ep > 1:
            self._add("dispatch", "all_to_all", (routed, hidden), group="ep")
        self._gemm("fc1", routed, self.up * moe.intermediate, hidden)
        act = (routed, moe.intermediate, self.up + 1)
        self._add("act", "elementwise", act, keeps=routed * self.up * moe.intermediate)
        self._gemm("fc2", routed, hidden, moe.intermediate)
        if self.step.parallel.ep > 1:
            self._add("combine", "all_to_all", (routed, hidden), group="ep")
        self._add("bda2", "elementwise", (own, hidden, 2 + moe.top_k), keeps=own * hidden / 2)

    def _backward(self, stage: int) -> None:
        self.stage = stage
        for index in reversed(range(self.per_stage)):
            self.layer = stage * self.per_stage + index
            self._gather_weights("dgrad")
            if self.step.layer.moe is None:
                self._mlp_backward()
            else:
                self._experts_backward()
            self._attention_backward()
            self._scatter_gradients()
        if stage > 0:
            self._send("send_grad", "dgrad")

    def _mlp_backward(self) -> None:
        own, hidden = self.own, self.hidden
        self._add("bda2", "elementwise", (own, hidden, 2), role="dgrad", frees=own * hidden / 2)
        if self.sharded:
            self._tensor_parallel("rs2", "all_gather", "dgrad")
        self._gemm_backward("fc2", self.rows, hidden, self.mlp)
        act = (self.rows, self.mlp, 2 * self.up + 1)
        self._add("act", "elementwise", act, role="dgrad", frees=self.rows * self.up * self.mlp)
        self._gemm_backward("fc1", self.rows, self.up * self.mlp, hidden)
        self._column_backward("2")
        self._add("ln2", "norm", (own, hidden, 4), role="dgrad", frees=own * hidden)

    def _row_forward(self, number: str) -> None:
        """Add the collective after a row-parallel linear."""
        if self.sharded:
            self._tensor_parallel(f"rs{number}", "reduce_scatter")
        else:
            self._tensor_parallel(f"ar{number}", "all_reduce")

    def _column_backward(self, number: str) -> None:
        """Add the collective after the dgrad of a column-parallel linear."""
        if self.sharded:
            self._tensor_parallel(f"ag{number}", "reduce_scatter", "dgrad")
        else:
            self._tensor_parallel(f"ar_dx{number}", "all_reduce", "dgrad")

    def _experts_backward(self) -> None:
        moe, own, hidden = self.step.layer.moe, self.own, self.hidden
        assert moe is not None
        routed = own * moe.top_k
        self._add("bda2", "elementwise", (own, hidden, 2), role="dgrad", frees=own * hidden / 2)
        if self.step.parallel.ep > 1:
            self._add("combine", "all_to_all", (routed, hidden), role="dgrad", group="ep")
        self._gemm_backward("fc2", routed, hidden, moe.intermediate)
        kept = routed * self.up * moe.intermediate
        act = (routed, moe.intermediate, 2 * self.up + 1)
        self._add("act", "elementwise", act, role="dgrad", frees=kept)
        self._gemm_backward("fc1", routed, self.up * moe.intermediate, hidden)
        if self.step.parallel.ep > 1:
            self._add("dispatch", "all_to_all", (routed, hidden), role="dgrad", group="ep")
        self._gemm_backward("router", own, moe.experts, hidden)
        self._add("ln2", "norm", (own, hidden, 4), role="dgrad", frees=own * hidden)

    def _attention_backward(self) -> None:
        own, hidden = self.own, self.hidden
        self._add("bda1", "elementwise", (own, hidden, 2), role="dgrad", frees=own * hidden / 2)
        if self.sharded:
            self._tensor_parallel("rs1", "all_gather", "dgrad")
        self._gemm_backward("proj", self.rows, hidden, self.inner)
        self._add(
            "attention",
            "attention",
            self.attention,
            role="dgrad",
            frees=self.rows * (self.inner + self.kv),
        )
        if self.cp > 1:
            shape = (self.rows * self.cp, self.kv)
            self._add("ag_kv", "reduce_scatter", shape, role="dgrad", group="cp")
        self._gemm_backward("qkv", self.rows, self.inner + self.kv, hidden)
        self._column_backward("1")
        self._add("ln1", "norm", (own, hidden, 4), role="dgrad", frees=own * hidden)

    # -- ZeRO-3 ------------------------------------------------------------------------------------

    def _sharded_weights(self) -> list[tuple[str, str, float]]:
        """Return (suffix, group, elements) of a layer's weights that are gathered."""
        step = self.step
        if step.zero != 3:
            return []
        parts = [
            ("" if group == "dp" else "_experts", group, weights)
            for group, weights in self._weights()
        ]
        if step.shard:
            mesh = (step.parallel.dp // step.shard, step.shard)
            parts = [(suffix, SubGroup(g, mesh, 1).name, weights) for suffix, g, weights in parts]
        return [part for part in parts if self.fabric.span(part[1]).size > 1]

    def _uses(self, suffix: str) -> tuple[str, ...]:
        """Return the GEMMs whose weights one gather brings."""
        if suffix:
            return "fc1", "fc2"
        if self.step.layer.moe is not None:
            return "qkv", "proj", "router"
        return "qkv", "proj", "fc1", "fc2"

    def _gather_weights(self, role: str) -> None:
        """Add the gathers before a layer; backward allocates its gradients as well."""
        self.parameters = {}
        for suffix, group, weights in self._sharded_weights():
            added = self._add(
                f"weights{suffix}",
                "all_gather",
                (1, int(weights)),
                role=role,
                group=group,
                keeps=int(weights) * (1 if role == "fwd" else 2),
                behind=[],
                leads=False,
            )
            self.parameters |= dict.fromkeys(self._uses(suffix), added)

    def _free_weights(self) -> None:
        """Let the last operator of a layer's forward free the weights gathered for it."""
        held = sum(int(weights) for _, _, weights in self._sharded_weights())
        if held:
            assert self.last is not None
            op = self.builder.ops[self.last]
            self.builder.ops[self.last] = op._replace(frees=op.frees + held * self.step.itemsize)

    def _scatter_gradients(self) -> None:
        """Add, after a layer's backward, ReduceScatter of its gradients."""
        if self.step.zero != 3:
            return
        wgrads, reduced = self.wgrads.pop(self.layer), []
        for suffix, group, weights in self._sharded_weights():
            uses = self._uses(suffix)
            added = self._add(
                f"grads{suffix}",
                "reduce_scatter",
                (1, int(weights)),
                role="wgrad",
                group=group,
                frees=2 * int(weights),
                behind=[n for n in wgrads if self.builder.ops[n].part in uses],
                leads=False,
            )
            reduced.append(added)
        self.reductions[self.layer] = reduced or wgrads  # of the last micro-batch in the end

    # -- the end of a step -------------------------------------------------------------------------

    def _optimize(self) -> None:
        """Add, per layer: reduction of gradients, optimizer, and the gather of weights (ZeRO-1)."""
        step = self.step
        self.micro = -1
        for layer in reversed(range(step.layers)):
            self.stage, self.layer = layer // self.per_stage, layer
            reduced, share = self._reduce(layer)
            optimizer = self._add(
                "optimizer",
                "optimizer",
                (1, int(share), _ADAM),
                role="step",
                behind=[*reduced, *self.wgrads.get(layer, [])],
            )
            for group, weights in self._weights():
                if step.zero == 1 and self.fabric.span(group).size > 1:
                    name = "weights" if group == "dp" else "weights_experts"
                    self._add(
                        name,
                        "all_gather",
                        (1, int(weights)),
                        role="step",
                        group=group,
                        behind=[optimizer],
                    )

    def _reduce(self, layer: int) -> tuple[list[int], float]:
        """Add the reductions of a layer; return them, and the elements that the optimizer has."""
        step, reduced, share = self.step, list(self.reductions.get(layer, [])), 0.0
        for group, weights in self._weights():
            size = self.fabric.span(group).size
            kind = "reduce_scatter" if step.zero else "all_reduce"
            if step.zero == 3:
                kind, shard = "all_reduce", step.shard or size
                weights /= shard
                group = SubGroup(group, (size // shard, shard), 0).name
                size //= shard
            share += weights / (size if step.zero == 1 else 1)
            if size > 1:
                behind = reduced if step.zero == 3 else self.wgrads[layer]
                name = "grads_experts" if group.startswith("edp") else "grads"
                shape = (1, int(weights))
                added = self._add(name, kind, shape, role="step", group=group, behind=behind)
                reduced = [*reduced, added]
        return reduced, share

    def _weights(self) -> list[tuple[str, float]]:
        """Return elements of a layer's weights by the group that reduces their gradients."""
        whole = self.step.layer_weights
        if self.step.layer.moe is None:
            return [("dp", whole)]
        moe = self.step.layer.moe
        experts = moe.experts / self.step.parallel.ep * (self.up + 1) * self.hidden
        experts *= moe.intermediate
        return [("dp", whole - experts), ("edp", experts)]
