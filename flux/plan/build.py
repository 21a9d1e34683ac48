"""Build the operators of a training step of a transformer, dense or with experts; or its inference.

Of one layer, with sequence parallelism. Without it, AllReduce takes the place of ReduceScatter, and
there is no AllGather; without tensor parallelism there is neither. DHelix (arXiv 2411.15871,
section 4.2) counts 14 operators forward and 18 backward:

    forward     ln1 ag1 qkv attention proj rs1 bda1  ln2 ag2 fc1 act fc2 rs2 bda2
    backward    the same in reverse, where each of the four GEMMs is two: dgrad and wgrad

bda is bias, dropout and addition of the residual. With experts, ln2 is followed by

    router [fc1_shared act_shared fc2_shared] dispatch fc1 act fc2 combine bda2

where dispatch and combine are AllToAll. Compressed attention has ``down`` before the gather, and
``q_up`` after it. With context parallelism attention is a ring, in which keys and values travel; or
they are gathered before attention, and their gradients reduce-scattered after it. Linear attention
has ``conv`` before its rule, which is called attention, too, and ``gate`` after it.

The first layer comes after ``embed``, and the last one before ``ln_f head loss``, which have the
numbers of these layers. Not counted: what two stages do to sum the gradients of tied weights.

What is computed again has the role ``recompute``, and comes before the layer's backward.

With ZeRO-3 a layer's weights are gathered before its forward and again before its backward. Its
gradients are reduce-scattered after each backward. How early a gather begins is up to the policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from flux.core.collector import paused_collector
from flux.plan.fabric import Fabric
from flux.plan.graph import COLLECTIVES, Builder, Graph, Operator
from flux.plan.layer_ops import LayerOp, Layers
from flux.plan.mesh import SubGroup
from flux.plan.model import OPTIMIZERS, RECOMPUTED, TrainingStep

_MOST_PASSES = 1 << 18
"""Of a layer, by micro-batch. Each has some 40 operators, of some 500 bytes."""
_DUAL = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}
"""What backward of a collective is."""


def build_step(step: TrainingStep, fabric: Fabric) -> Graph:
    """Return the operators of a step: all layers, micro-batches and stages, and the optimizer."""
    passes = step.micro_batches * (step.layers + step.parallel.pp)
    if passes > _MOST_PASSES:
        raise ValueError(
            f"{step.layers} layers x {step.micro_batches} micro-batches are too many operators to "
            f"plan: at most {_MOST_PASSES} passes of a layer"
        )
    with paused_collector():
        return _Step(step, fabric).build()


class _Step:
    """Places the operators of layers in a step."""

    def __init__(self, step: TrainingStep, fabric: Fabric) -> None:
        self.step, self.fabric = step, fabric
        self.builder = Builder(step.itemsize)
        self.layers = Layers(step)
        self.stage = self.layer = self.micro = -1
        self.last: int | None = None  # the operator that the next one comes after
        self.wgrads: dict[int, list[int]] = {}  # by layer: of the last micro-batch
        self.norms: dict[tuple[int, int, str], int] = {}  # whose output is gathered, for a GEMM
        self.parameters: dict[str, int] = {}  # ZeRO-3: the gather before a GEMM of this layer
        self.reductions: dict[int, list[int]] = {}  # ZeRO-2 and 3: by layer
        self.gradient = (4 / step.itemsize) if step.fp32_gradients else 1.0  # of an element
        self.starts = [sum(step.stages[:stage]) for stage in range(step.parallel.pp)]

    def build(self) -> Graph:
        step = self.step
        ends: list[list[int | None]] = []  # of forward passes: by micro-batch, by stage
        for micro in range(step.micro_batches):
            ends.append([])
            self.micro, self.last = micro, None
            for stage in range(step.parallel.pp):
                self._forward(stage)
                ends[-1].append(self.last)
        for micro in range(0 if step.serves else step.micro_batches):
            self.micro, self.last = micro, ends[micro][-1]
            for stage in reversed(range(step.parallel.pp)):
                self._backward(stage)
        if not step.serves:
            self._optimize()
        return self.builder.build(step.resident_parts())

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
        """Add an operator after the last one, or after others."""
        before = behind if behind is not None else [] if self.last is None else [self.last]
        suffix = {"fwd": "", "dgrad": ".d", "wgrad": ".w", "step": "", "recompute": ".r"}[role]
        where = f"L{self.layer}." if self.layer >= 0 else f"S{self.stage}."
        number = f".m{self.micro}" if self.micro >= 0 else ""
        itemsize = self.step.itemsize
        op = Operator(
            name=f"{where}{part}{suffix}{number}",
            kind=kind,
            resource=self.fabric.resource(group) if kind in COLLECTIVES else "comp",
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

    def _behind(self, part: str) -> list[int]:
        """Return what a GEMM waits for: the last operator, and its gathered weights."""
        before = [] if self.last is None else [self.last]
        return before + ([self.parameters[part]] if part in self.parameters else [])

    def _run(self, op: LayerOp, keeps: float, role: str = "fwd") -> None:
        """Add what forward does, or what backward does again."""
        added = self._add(
            *(op.part, op.kind, op.shape),
            role=role,
            group=op.group,
            keeps=0.0 if self.step.serves else keeps,
            behind=self._behind(op.part) if op.kind == "gemm" else None,
        )
        if op.kind == "norm":
            gemm = {"ln1": "qkv", "ln2": "fc1", "ln_f": "head"}[op.part]
            self.norms[self.layer, self.micro, gemm] = added

    def _run_backward(self, op: LayerOp) -> None:
        if op.kind == "gemm":
            self._gemm_backward(op)
        elif op.back:
            kind = _DUAL.get(op.kind, op.kind)
            self._add(op.part, kind, op.back, role="dgrad", group=op.group, frees=op.keeps)

    def _gemm_backward(self, op: LayerOp) -> None:
        """Add both gradients of a GEMM [rows, k] x [k, n]; the next operator follows dgrad."""
        part, (rows, n, k) = op.part, op.shape
        before = [] if self.last is None else [self.last]
        behind = self._behind(part)
        gathers = self.layers.gathered.get(part)
        moe = self.step.layer.moe_of(self.layer, self.step.dense_layers)
        if gathers and (part != "fc1" or moe is None):
            again = self._add(
                gathers,
                "all_gather",
                (rows, k),
                role="wgrad",
                group="tp",
                behind=[self.norms[self.layer, self.micro, part], *before],
                leads=False,
            )
            before.append(again)
        self._add(part, "gemm", (rows, k, n), role="dgrad", behind=behind)
        wgrad = self._add(
            part, "gemm", (n, k, rows), role="wgrad", frees=op.keeps, behind=before, leads=False
        )
        self._record(wgrad)

    def _record(self, wgrad: int) -> None:
        """Note a gradient of a weight, which the reduction of its layer waits for."""
        if self.step.zero >= 2 or self.micro == self.step.micro_batches - 1:
            self.wgrads.setdefault(self.layer, []).append(wgrad)

    def _send(self, part: str, role: str) -> None:
        self.layer = -1
        self._add(part, "send", (self.layers.own, self.step.layer.hidden), role=role, group="pp")

    # -- passes ------------------------------------------------------------------------------------

    def _forward(self, stage: int) -> None:
        self.stage = stage
        for index in range(self.step.stages[stage]):
            self.layer = self.starts[stage] + index
            if self.step.zero == 3:
                self._gather_weights("fwd")
            if self.layer == 0 and self.step.vocabulary:
                self._embed()
            ops = self.layers.of(self.layer)
            dropped = self._dropped(index, ops) if self.step.recompute != "none" else {}
            for place, op in enumerate(ops):
                if op.forward:
                    self._run(op, op.keeps - dropped.get(place, (0, 0.0))[1])
            if self.layer == self.step.layers - 1 and self.step.vocabulary:
                self._head()
            if self.step.zero == 3:
                self._free_weights()
        if stage < self.step.parallel.pp - 1:
            self._send("send_act", "fwd")

    def _backward(self, stage: int) -> None:
        self.stage = stage
        for index in reversed(range(self.step.stages[stage])):
            self.layer = self.starts[stage] + index
            first = len(self.builder.ops)
            if self.step.zero == 3:
                self._gather_weights("dgrad")
            if self.layer == self.step.layers - 1 and self.step.vocabulary:
                self._head_backward()
            ops = self.layers.of(self.layer)
            if self.step.recompute != "none":
                self._recompute(index, ops)
            for op in reversed(ops):
                self._run_backward(op)
            if self.layer == 0 and self.step.vocabulary:
                self._embed_backward()
            if self.step.zero >= 2:
                self._scatter_gradients(first)
        if stage > 0:
            self._send("send_grad", "dgrad")

    # -- what is computed again --------------------------------------------------------------------

    def _whole(self, index: int) -> bool:
        """Return whether a stage's layer of this index is computed again as a whole.

        Some of a stage's layers are spread over it: folds and chunks give them to several ranks.
        """
        asked, layers = self.step.recompute, self.step.stages[self.stage]
        share = min(int(asked), layers) if asked.isdecimal() else 0
        return asked == "full" or index * share // layers < (index + 1) * share // layers

    def _dropped(self, index: int, ops: Sequence[LayerOp]) -> dict[int, tuple[int, float]]:
        """Return, by place, the place of the operator whose output is not kept, and elements.

        A whole layer keeps its input alone. Else it is the inputs that other parts compute again.
        """
        if self._whole(index):
            return {place: (place, op.keeps) for place, op in enumerate(ops) if place}
        parts = RECOMPUTED.get(self.step.recompute, frozenset())
        dropped = {}
        for place, op in enumerate(ops):
            before = next((p for p in reversed(range(place)) if ops[p].group != "tp"), None)
            if before is None or ops[before].part not in parts or op.part.startswith("bda"):
                continue
            if self.step.recompute == "selective" and op.part not in parts:
                continue  # Megatron's checkpoint keeps what attention returns
            dropped[place] = before, op.keeps * self._share(ops[before])
        return dropped

    def _share(self, op: LayerOp) -> float:
        """Return the share of a GEMM that is computed again: of a gated MLP's two, one."""
        return 0.5 if op.part == "fc1" and self.layers.up == 2 else 1.0

    def _recompute(self, index: int, ops: Sequence[LayerOp]) -> None:
        """Add what backward of a layer computes again."""
        whole = self._whole(index)
        parts = RECOMPUTED.get(self.step.recompute, frozenset())
        keeps = dict(self._dropped(index, ops).values())
        for place, op in enumerate(ops):
            if whole and op.forward:
                self._run(op, keeps.get(place, 0.0), "recompute")
            elif op.part in parts:
                rows, width, *rest = op.shape
                size = int(width * self._share(op))
                self._run(
                    op._replace(shape=(rows, size, *rest)), keeps.get(place, 0.0), "recompute"
                )

    # -- embedding and head ------------------------------------------------------------------------

    def _embed(self) -> None:
        layers, hidden = self.layers, self.step.layer.hidden
        self._add("embed", "elementwise", (layers.rows, hidden, 2))
        for op in layers.row("_embed"):
            self._run(op, 0.0)

    def _embed_backward(self) -> None:
        for op in self.layers.row("_embed"):
            self._run_backward(op)
        shape = self.layers.rows, self.step.layer.hidden, 3
        self._record(self._add("embed", "elementwise", shape, role="wgrad", leads=False))

    def _head_ops(self) -> list[LayerOp]:
        """Return the operators after the last layer. The loss keeps logits in float32.

        In inference, of each sequence's last token.
        """
        layers, hidden = self.layers, self.step.layer.hidden
        width = self.step.vocabulary // layers.tp
        logits = layers.rows * width
        if self.step.serves:
            sequences, whole = self.step.micro_batch, self.step.vocabulary
            gathers = [LayerOp("ag_logits", "all_gather", (sequences, whole), group="tp")]
            return [
                layers.norm("ln_f"),
                layers.gemm("head", sequences, width, hidden),
                *(gathers if layers.tp > 1 else []),
                layers.elementwise("sample", sequences, whole, 0.0, 1, 1),
            ]
        return [
            layers.norm("ln_f"),
            *layers.column("_head", hidden),
            layers.gemm("head", layers.rows, width, hidden),
            layers.elementwise("loss", layers.rows, width, 4.0 * logits / self.step.itemsize),
        ]

    def _head(self) -> None:
        """Add the head; the loss frees the logits that the head has made, and keeps its own."""
        for op in self._head_ops():
            self._run(op, op.keeps + (op.shape[0] * op.shape[1] if op.part == "head" else 0.0))
        if not self.step.serves:
            self._change(self.last, frees=op.shape[0] * op.shape[1])

    def _head_backward(self) -> None:
        """Add backward of the head; the loss makes gradients of logits, which the head frees."""
        *others, head, loss = self._head_ops()
        logits = loss.shape[0] * loss.shape[1]
        self._add("loss", loss.kind, loss.back, role="dgrad", keeps=logits, frees=loss.keeps)
        self._gemm_backward(head._replace(keeps=head.keeps + logits))
        for op in reversed(others):
            self._run_backward(op)

    def _change(self, number: int | None, *, allocates: float = 0.0, frees: float = 0.0) -> None:
        """Let an operator allocate and free further elements."""
        assert number is not None
        op, size = self.builder.ops[number], self.step.itemsize
        self.builder.ops[number] = op._replace(
            allocates=op.allocates + allocates * size, frees=op.frees + frees * size
        )

    # -- ZeRO-2 and 3 ------------------------------------------------------------------------------

    def _weights(self, layer: int, *, used: bool = False) -> list[tuple[str, str, float]]:
        """Return (suffix, group that reduces gradients, elements) of a layer's weights.

        ``used`` counts weights that it only reads: those of the embedding, in a tied head.
        """
        step, whole = self.step, self.step.weights_of(layer)
        experts = step.expert_weights_of(layer)
        parts = [("", "dp", whole - experts)]
        parts += [("_experts", "edp", experts)] if experts else []
        if not step.vocabulary:
            return parts
        if layer == 0:
            parts.append(("_embed", "dp", step.table_weights))
        if layer == step.layers - 1 and (used or not step.tied or step.parallel.pp > 1):
            parts.append(("_head", "dp", step.table_weights))
        return parts

    def _sharded_weights(self, *, used: bool = False) -> list[tuple[str, str, float]]:
        """Return (suffix, group, elements) of a layer's weights whose gradients are scattered."""
        step = self.step
        parts = self._weights(self.layer, used=used)
        if step.shard:
            mesh = (step.parallel.dp // step.shard, step.shard * step.parallel.cp)
            parts = [(suffix, SubGroup(g, mesh, 1).name, weights) for suffix, g, weights in parts]
        return [part for part in parts if self.fabric.span(part[1]).size > 1]

    def _uses(self, suffix: str) -> tuple[str, ...]:
        """Return the operators whose weights one gather brings."""
        if suffix == "_experts":
            return "fc1", "fc2"
        if suffix:
            return (suffix[1:],)
        shared = ("fc1_shared", "fc2_shared")
        both = ("down", "q_up", "qkv", "proj")
        moe = self.step.layer.moe_of(self.layer, self.step.dense_layers)
        return (*both, "fc1", "fc2") if moe is None else (*both, "router", *shared)

    def _gather_weights(self, role: str) -> None:
        """Add the gathers before a layer; backward allocates its gradients as well."""
        self.parameters = {}
        gradients = self.gradient if role == "dgrad" else 0.0
        for suffix, group, weights in self._sharded_weights(used=True):
            added = self._add(
                f"weights{suffix}",
                "all_gather",
                (1, int(weights)),
                role=role,
                group=group,
                keeps=int(weights) * (1 + gradients),
                behind=[],
                leads=False,
            )
            self.parameters |= dict.fromkeys(self._uses(suffix), added)

    def _free_weights(self) -> None:
        """Let the last operator of a layer's forward free the weights gathered for it."""
        held = sum(int(weights) for _, _, weights in self._sharded_weights(used=True))
        if held:
            self._change(self.last, frees=held)

    def _scatter_gradients(self, first: int) -> None:
        """Add, after a layer's backward, ReduceScatter of its gradients, if their sum is whole."""
        whole, reduced = self.step.zero == 3, []
        if not whole and self.micro % self.step.reduce_every == 0:
            self._allocate_gradients(first)
        if (self.micro + 1) % self.step.reduce_every and self.micro + 1 < self.step.micro_batches:
            return
        gathered = self._sharded_weights(used=True) if whole else []
        held = {suffix: int(weights) for suffix, _, weights in gathered}
        wgrads = self.wgrads.pop(self.layer)
        for suffix, group, weights in self._sharded_weights():
            uses, freed = self._uses(suffix), int(weights) * self.gradient
            added = self._add(
                f"grads{suffix}",
                "reduce_scatter",
                (1, int(weights * self.gradient)),
                role="wgrad",
                group=group,
                frees=freed + held.pop(suffix, 0),
                behind=[n for n in wgrads if self.builder.ops[n].part in uses],
                leads=False,
            )
            reduced.append(added)
        for weights in held.values():  # tied: the embedding's gradient is reduced, later
            self._change(wgrads[0], frees=weights * (1 + self.gradient))
        self.reductions[self.layer] = reduced or wgrads  # of the last micro-batch in the end

    def _allocate_gradients(self, first: int) -> None:
        """Let a layer's backward, from ``first`` on, allocate its gradients where they are."""
        for suffix, _, weights in self._sharded_weights():
            part = "" if suffix == "_experts" else suffix
            users = self._of(part, range(first, len(self.builder.ops)))
            self._change(users[0], allocates=int(weights) * self.gradient)

    # -- the end of a step -------------------------------------------------------------------------

    def _optimize(self) -> None:
        """Add what a step ends with, from the last layer to the first."""
        self.micro = -1
        for layer in reversed(range(self.step.layers)):
            self.stage, self.layer = bisect_right(self.starts, layer) - 1, layer
            weights = self._weights(layer)
            inner = [part for part in weights if part[0] in ("", "_experts")]
            self._optimize_weights("", inner)
            for part in weights[len(inner) :]:
                self._optimize_weights(part[0], [part])

    def _optimize_weights(self, suffix: str, parts: Sequence[tuple[str, str, float]]) -> None:
        """Add, of a layer, embedding or head: reduction, optimizer, and gathers (ZeRO-1 and 2)."""
        step, share = self.step, 0.0
        wgrads = self._of(suffix, self.wgrads.get(self.layer, ()))
        reduced = self._of(suffix, self.reductions.get(self.layer, ()))
        for name, group, weights in parts:
            size = self.fabric.span(group).size
            kind = "reduce_scatter" if step.zero else "all_reduce"
            if step.zero == 3:
                kind, shard = "all_reduce", step.shard * step.parallel.cp or size
                weights /= shard
                group = SubGroup(group, (size // shard, shard), 0).name
                size //= shard
            share += weights / (size if step.zero in (1, 2) else 1)
            if size > 1 and step.zero != 2:
                before = reduced if step.zero == 3 else wgrads
                part, shape = f"grads{name}", (1, int(weights * self.gradient))
                added = self._add(part, kind, shape, role="step", group=group, behind=before)
                reduced = [*reduced, added]
        last = self._add(
            f"optimizer{suffix}",
            "optimizer",
            (1, int(share), OPTIMIZERS[step.optimizer].tensors),
            role="step",
            behind=[*reduced, *wgrads],
        )
        for name, group, weights in parts:
            if step.zero in (1, 2) and self.fabric.span(group).size > 1:
                part, shape = f"weights{name}", (1, int(weights))
                self._add(part, "all_gather", shape, role="step", group=group, behind=[last])

    def _of(self, suffix: str, numbers: Iterable[int]) -> list[int]:
        """Return operators that are of the embedding, of the head, or of neither."""
        ops, parts = self.builder.ops, (suffix[1:], f"grads{suffix}")
        return [n for n in numbers if (ops[n].part in parts if suffix else not ops[n].is_outer)]
