"""What a layer of a transformer does: the operators of forward, and what they are in backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flux.bench.shapes import Delta
from flux.core.problem import ceil_div
from flux.plan.graph import RING
from flux.plan.model import ServingStep, TrainingStep

_FUSED = {"norm": (2, 4), "bda": (3, 2), "loss": (5, 3)}
_EAGER = {"norm": (18, 36), "bda": (3, 3), "loss": (7, 11), "rope": (10, 10)}
"""Tensors that elementwise operators read and write, forward and backward, in units of activations.
Eager: RMSNorm, positions and loss in float32, a kernel for each cast, product and sum."""
FUNCTIONS = {
    gated: {"optimizer": "adamw", **dict.fromkeys(("ln1", "ln2", "ln_f"), norm)}
    for gated, norm in ((True, "rms_norm"), (False, "layer_norm"))
}
"""Functions of torch whose measured times operators take, by part, for gated MLPs and others."""
EAGER_FUNCTIONS = {
    gated: {"act": act, "act_shared": act, "rope": "rotary", "loss": "cross_entropy"}
    for gated, act in ((True, "silu_mul"), (False, "gelu"))
}
"""Further ones of eager steps; otherwise a compiler fuses these kernels."""


class LayerOp(NamedTuple):
    """An operator of a layer's forward, and what it is in backward.

    Attributes:
        keeps: elements that stay allocated from forward until backward.
        back: shape in backward; (): there is none. GEMMs have two in its place.
        forward: whether forward has it.
    """

    part: str
    kind: str
    shape: tuple[int, ...]
    keeps: float = 0.0
    back: tuple[int, ...] = ()
    group: str = ""
    forward: bool = True


class Layers:
    """The operators of each layer of a step, without places in it."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        parallel, layer = step.parallel, step.layer
        self.tp, self.cp = parallel.tp, parallel.cp
        self.rows = step.tokens  # of the operators between AllGather and ReduceScatter
        self.sharded = parallel.sequence and self.tp > 1
        self.own = self.rows // self.tp if self.sharded else self.rows  # of the others
        self.inner = layer.heads * layer.head_dim // self.tp
        self.kv = ceil_div(layer.kv_heads, self.tp) * (layer.head_dim + layer.value_dim)
        self.up = 2 if layer.gated else 1
        self.tensors = _EAGER if step.eager else _FUSED
        # GEMMs whose input is gathered again, and by what.
        self.gathered: dict[str, str] = {}
        if self.sharded and step.regather:
            self.gathered = {"qkv": "ag1", "fc1": "ag2", "head": "ag_head"}
            if layer.latent is not None:
                del self.gathered["qkv"]
        self._made: dict[tuple[bool, float], list[LayerOp]] = {}

    def of(self, number: int) -> list[LayerOp]:
        """Return the operators of a layer, in the order of forward."""
        delta = self.step.layer.delta_of(number)
        keys = 0.0 if delta else self.step.keys(number)
        key = self.step.layer.moe_of(number, self.step.dense_layers) is None, keys
        if key not in self._made:
            mlp = self._mlp() if key[0] else self._experts()
            attention = self._delta(delta) if delta else self._attention(keys)
            self._made[key] = [*attention, *mlp]
        return self._made[key]

    def gemm(self, part: str, rows: int, n: int, k: int) -> LayerOp:
        """Return a GEMM, which keeps its input for the gradient of its weight."""
        kept = self.own if part in self.gathered else rows
        return LayerOp(part, "gemm", (rows, n, k), kept * k, (rows, n, k))

    def elementwise(self, part: str, rows: int, width: int, keeps: float, *counts: int) -> LayerOp:
        """Return an operator that reads and writes so many tensors, forward and backward."""
        kind = "norm" if part.startswith("ln") else "elementwise"
        forward, backward = counts or self.tensors["norm" if kind == "norm" else part]
        return LayerOp(part, kind, (rows, width, forward), keeps, (rows, width, backward))

    def norm(self, part: str) -> LayerOp:
        """Return a norm of a rank's own rows."""
        hidden = self.step.layer.hidden
        return self.elementwise(part, self.own, hidden, self.own * hidden)

    def column(self, number: str, width: int, part: str = "") -> list[LayerOp]:
        """Return the collectives before a column-parallel linear: forward's, and backward's."""
        if self.tp == 1:
            return []
        shape = self.rows, width
        if self.sharded:
            return [LayerOp(part or f"ag{number}", "all_gather", shape, 0, shape, "tp")]
        return [LayerOp(part or f"ar_dx{number}", "all_reduce", shape, 0, shape, "tp", False)]

    def row(self, number: str) -> list[LayerOp]:
        """Return the collective after a row-parallel linear."""
        shape = self.rows, self.step.layer.hidden
        if self.tp == 1:
            return []
        if self.sharded:
            return [LayerOp(f"rs{number}", "reduce_scatter", shape, 0, shape, "tp")]
        return [LayerOp(f"ar{number}", "all_reduce", shape, 0, (), "tp")]

    def _bda(self, number: str, more: int = 0) -> LayerOp:
        forward, backward = self.tensors["bda"]
        own, hidden = self.own, self.step.layer.hidden
        mask = own * hidden / 2 if self.step.layer.dropout else 0.0
        return self.elementwise(f"bda{number}", own, hidden, mask, forward + more, backward)

    def _attention(self, keys: float) -> Iterator[LayerOp]:
        step, layer, rows = self.step, self.step.layer, self.rows
        latent = layer.latent
        yield self.norm("ln1")
        if latent is None:
            yield from self.column("1", layer.hidden)
            gates = layer.heads * layer.value_dim // self.tp if layer.gate else 0
            yield self.gemm("qkv", rows, self.inner + self.kv + gates, layer.hidden)
        else:
            down = latent.query_rank + latent.kv_rank + latent.rope_dim
            yield self.gemm("down", self.own, down, layer.hidden)
            yield from self.column("1", layer.compressed)
            yield self.gemm("q_up", rows, self.inner, latent.query_rank or layer.hidden)
            up = layer.heads // self.tp * (layer.head_dim - latent.rope_dim + latent.value_dim)
            yield self.gemm("qkv", rows, up, latent.kv_rank)
        if step.eager:
            yield self.elementwise("rope", rows, self.inner + self.kv // 2, 0.0)
        ring = self.cp > 1 and step.cp_kind == "ring"
        if self.cp > 1 and not ring:
            width = back = self.kv
            if step.cp_kind == "torch":
                width = layer.heads // self.tp * (layer.head_dim + layer.value_dim)
                back = width * (3 * self.cp - 1) // (self.cp - 1)  # again, and float32 sent on
            tokens = rows * self.cp
            yield LayerOp("ag_kv", "all_gather", (tokens, width), 0, (tokens, back), "cp")
        if isinstance(step, ServingStep) and step.decodes:
            yield self._cached_attention(step, keys)
        else:
            shape5 = (
                *(step.micro_batch, layer.heads // self.tp, step.sequence // self.cp),
                *(round(2 * keys), (layer.head_dim + layer.value_dim) // 2),
            )
            if step.unfused_attention:  # of twice as many keys, half the pairs are all
                shape5 = (*shape5[:3], 2 * step.sequence, shape5[4])
            kind, group, more = (RING, "cp", (self.kv,)) if ring else ("attention", "", ())
            shape = (*shape5, *more)
            yield LayerOp("attention", kind, shape, rows * (self.inner + self.kv), shape, group)
            if step.unfused_attention:
                scores = shape5[0] * shape5[1] * shape5[2], step.sequence
                # Softmax, dropout with its mask, and what the two products write and read.
                kept = 2.5 * scores[0] * scores[1]
                yield self.elementwise("softmax", *scores, kept, 6, 10)
        width = layer.heads * layer.value_dim // self.tp
        if self.cp > 1 and step.cp_kind == "torch":  # sums of chunks in float32
            yield self.elementwise("sums", rows, width, 0.0, 5 * self.cp, 15 * self.cp)
        if layer.gate:
            yield self.elementwise("gate", rows, width, 2 * rows * width, 3, 5)
        yield self.gemm("proj", rows, layer.hidden, width)
        yield from self.row("1")
        yield self._bda("1")

    def _delta(self, delta: Delta) -> Iterator[LayerOp]:
        """Yield linear attention; its rule counts as attention with as many operations."""
        step, hidden, rows, tp = self.step, self.step.layer.hidden, self.rows, self.tp
        convolved, heads = delta.convolved // tp, delta.value_heads // tp
        width = heads * delta.value_dim
        yield self.norm("ln1")
        yield from self.column("1", hidden)
        yield self.gemm("qkv", rows, delta.projected // tp, hidden)
        yield self.elementwise("conv", rows, convolved, rows * convolved, 2, 3)
        both = delta.key_dim + delta.value_dim
        shape = step.micro_batch, heads, step.sequence, delta.keys, both // 2
        # For backward: its inputs, and of each head a row of the inverse, strength and decay.
        keeps = rows * (convolved + heads * (delta.chunk + 2))
        yield LayerOp("attention", "attention", shape, keeps, shape)
        yield self.elementwise("gate", rows, width, 2 * rows * width, 3, 5)
        yield self.gemm("proj", rows, hidden, width)
        yield from self.row("1")
        yield self._bda("1")

    def _cached_attention(self, step: ServingStep, keys: float) -> LayerOp:
        layer, width = step.layer, step.layer.head_dim + step.layer.value_dim
        if layer.latent is not None:  # keys are also values, of all heads
            width = 2 * layer.latent.kv_rank + layer.latent.rope_dim
        shape = step.micro_batch, layer.heads // self.tp, int(keys), width, step.kv_bytes
        return LayerOp("attention", "cached_attention", shape)

    def _act(self, part: str, rows: int, width: int) -> LayerOp:
        counts = (self.up + 1, 2 * self.up + 1)
        if self.step.eager and self.up == 2:
            counts = (5, 9)
        return self.elementwise(part, rows, width, rows * self.up * width, *counts)

    def _mlp(self) -> Iterator[LayerOp]:
        hidden, width = self.step.layer.hidden, self.step.layer.intermediate // self.tp
        yield self.norm("ln2")
        yield from self.column("2", hidden)
        yield self.gemm("fc1", self.rows, self.up * width, hidden)
        yield self._act("act", self.rows, width)
        yield self.gemm("fc2", self.rows, hidden, width)
        yield from self.row("2")
        yield self._bda("2")

    def _experts(self) -> Iterator[LayerOp]:
        moe, hidden, ep = self.step.layer.moe, self.step.layer.hidden, self.step.parallel.ep
        assert moe is not None
        serves = self.step.serves  # experts are tensor parallel
        own, split = (self.rows, self.tp) if serves else (self.own, 1)
        routed, shared, width = own * moe.top_k, moe.shared // split, moe.intermediate // split
        tokens = LayerOp("", "all_to_all", (routed, hidden), 0, (routed, hidden), "ep")
        yield self.norm("ln2")
        yield from self.column("2", hidden) if serves else ()
        yield self.gemm("router", own, moe.experts, hidden)
        if shared:
            yield self.gemm("fc1_shared", own, self.up * shared, hidden)
            yield self._act("act_shared", own, shared)
            yield self.gemm("fc2_shared", own, hidden, shared)
        if ep > 1:
            yield tokens._replace(part="dispatch")
        fc1 = self._grouped("fc1", routed, self.up * width, hidden)
        yield fc1._replace(keeps=routed * hidden)  # tokens of others, which nothing gathers again
        yield self._act("act", routed, width)
        yield self._grouped("fc2", routed, hidden, width)
        if ep > 1:
            yield tokens._replace(part="combine")
        yield from self.row("2") if serves else ()
        yield self._bda("2", moe.top_k - 1)

    def _grouped(self, part: str, rows: int, n: int, k: int) -> LayerOp:
        """Return a GEMM of experts. Training reads all experts' weights for many rows each."""
        op, step = self.gemm(part, rows, n, k), self.step
        if not isinstance(step, ServingStep):
            return op
        return LayerOp(part, "grouped_gemm", (*op.shape, step.experts_read(self.rows)))
