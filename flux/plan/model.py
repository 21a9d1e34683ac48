"""What a step is made of: the model, the batch, and how ranks share the work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from flux.bench.model_files import model_of
from flux.bench.shapes import Layer, Model
from flux.core.datafile import MOST_SIZE, shown
from flux.core.problem import DTYPES, ceil_div, check_choice, checked_integer


def check_sizes(sizes: object, names: Iterable[str]) -> None:
    """Raise ValueError unless these attributes are integers from 1 to MOST_SIZE."""
    for name in names:
        value = getattr(sizes, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if value > MOST_SIZE:
            raise ValueError(f"{name} must be at most {MOST_SIZE}, got {shown(value)}")


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism. Ranks are numbered with tp fastest, then cp, dp, and pp slowest.

    Attributes:
        cp: context parallel: ranks share the tokens of a sequence; gradients are summed up over
            them and over data parallel ranks, and ZeRO's shares are those of both.
        ep: expert parallel: ranks that share the experts of a layer, each of which is whole
            (Megatron: expert-tensor-parallel-size 1). They are neighbours, over tp, cp and dp, as
            in Megatron and torchtitan; over dp alone if tensor parallel ranks have the same tokens.
        sequence: sequence parallelism: AllGather and ReduceScatter in place of AllReduce.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, [degree.name for degree in fields(self) if degree.name != "sequence"])
        ranks = self.dp * (self.tp * self.cp if self.expert_ranks[0] == 1 else 1)
        if ranks % self.ep:
            what = "dp" if ranks == self.dp else "tp cp dp"
            raise ValueError(f"ep = {self.ep} must divide {what} = {ranks}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """Distance of ranks that share experts, and how many have the same ones, and other tokens.

        The distance is 1 if all ranks of a stage have other tokens.
        """
        if self.sequence or self.tp == 1:
            return 1, self.dp * self.cp * self.tp // self.ep
        return self.tp * self.cp, self.dp // self.ep * self.cp


class Optimizer(NamedTuple):
    """An optimizer's states, and what its step reads and writes.

    Attributes:
        state_bytes: of an element: a float32 copy of the weight, and moments.
        tensors: read and written, in units of float32: gradient, and each state twice.
    """

    state_bytes: float
    tensors: int


OPTIMIZERS = {
    "adam": Optimizer(12.0, 7),
    "adam-bf16": Optimizer(8.0, 5),  # moments in bfloat16
    "momentum": Optimizer(8.0, 5),
    "sgd": Optimizer(4.0, 3),
}
CP_KINDS = ("ring", "all_gather", "torch")
RECOMPUTED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"attention", "softmax"}),
    "ops": frozenset({"ln1", "proj", "ln2", "fc1", "act"}),
    "act": frozenset({"act", "act_shared"}),
}
"""Parts of a layer that backward computes again: Megatron's ``selective``; torchtitan's selective
checkpoints of operators, which keep every second product (of qkv and a gated fc1, half); the
activation, as xformers' SwiGLU does. ``full`` and a number of layers compute whole layers again."""


@dataclass(frozen=True)
class TrainingStep:
    """One training step of a model.

    Attributes:
        micro_batch: sequences of a micro-batch, on each data parallel rank.
        micro_batches: micro-batches of a step, on each data parallel rank.
        zero: 0: gradients are all-reduced; 1: they are reduce-scattered, the optimizer steps on a
            share, and weights are gathered again (ZeRO-1); 2: gradients are reduce-scattered after
            backward of ``reduce_every`` micro-batches (ZeRO-2); 3: weights are sharded, too, each
            layer's are gathered before its forward and before its backward (ZeRO-3, FSDP).
        regather: with sequence parallelism: the input of a column-parallel linear is gathered again
            in backward, in place of kept (as in Megatron-core).
        shard: with zero=3: consecutive data parallel ranks that share the weights; 0: all. Others
            replicate them, and their gradients are all-reduced at the end of the step.
        vocabulary: rows of embedding and head; 0: the layers alone.
        tied: whether the head has the embedding's weights.
        dense_layers: leading layers without experts, of a model with experts.
        recompute: what backward computes again in place of keeping it: a name in RECOMPUTED,
            ``full`` (whole layers, of which the input is kept), or a number: so many layers of each
            stage, whole (or all that it has).
        split: layers of each stage; (): as even as possible, less on the first and last ones.
        optimizer: a name in OPTIMIZERS.
        fp32_gradients: gradients are summed and reduced in float32, as Megatron does by default.
        eager: norms, activations and positions run as PyTorch without a compiler runs them: a
            kernel for each operation, some of them in float32.
        unfused_attention: scores are written to memory, all pairs of them, as before
            FlashAttention.
        gemm_dtype: of the layers' GEMMs, "" for that of activations; float8: with casts.
        cp_kind: how context parallel ranks get keys and values: "ring": in chunks, each beside
            attention with the one before it, as Megatron does by default; "all_gather": all of them
            before attention; "torch": those of all query heads before attention and its backward,
            which sends float32 gradients, as torch.distributed's ring does if compiled.
        reduce_every: with zero=2: consecutive micro-batches whose gradients a stage sums up, whole,
            before it reduces them. Those in which an interleaved pipeline stays with a stage, as
            for Llama 3 (arXiv 2407.21783, section 3.3.2), cost no more memory than one.
    """

    name: str
    layer: Layer
    layers: int
    dtype: str
    parallel: Parallel
    sequence: int
    micro_batch: int
    micro_batches: int
    zero: int = 1
    regather: bool = False
    shard: int = 0
    vocabulary: int = 0
    tied: bool = False
    dense_layers: int = 0
    recompute: str = "none"
    split: tuple[int, ...] = ()
    optimizer: str = "adam"
    fp32_gradients: bool = False
    eager: bool = False
    unfused_attention: bool = False
    gemm_dtype: str = ""
    cp_kind: str = "ring"
    reduce_every: int = 1
    serves = False  # see ServingStep

    def __post_init__(self) -> None:
        layer, parallel = self.layer, self.parallel
        check_sizes(self, ("layers", "sequence", "micro_batch", "micro_batches", "reduce_every"))
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.recompute not in (*RECOMPUTED, "full") and not self.recompute.isdecimal():
            names = ", ".join((*RECOMPUTED, "full"))
            raise ValueError(
                f"recompute must be one of {names}, or layers of a stage, got {self.recompute!r}"
            )
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("gemm_dtype", self.gemm_dtype or self.dtype, DTYPES)
        check_choice("cp_kind", self.cp_kind, CP_KINDS)
        if self.unfused_attention and self.parallel.cp > 1 and self.cp_kind != "all_gather":
            raise ValueError("a ring needs fused attention: take cp_kind = all_gather")
        stages = self.parallel.pp
        if self.layers < stages:
            raise ValueError(f"pp = {stages} must be at most layers = {self.layers}")
        if self.split and (len(self.split) != stages or sum(self.split) != self.layers):
            raise ValueError(
                f"split must have {stages} stages with {self.layers} layers in all, got "
                f"{len(self.split)} with {sum(self.split)}"
            )
        if self.split and min(self.split) < 1:
            raise ValueError("split must have at least one layer in each stage")
        if self.dense_layers and (self.layer.moe is None or not self.layer.intermediate):
            raise ValueError("dense_layers are of models with experts and an intermediate size")
        checked_integer("shard", self.shard, 0)
        if self.shard and self.zero != 3:
            raise ValueError(f"shard = {self.shard} needs zero = 3, got zero = {self.zero}")
        if self.shard and layer.moe is not None:
            raise ValueError(f"shard = {self.shard} needs a model without experts")
        if self.reduce_every > 1 and self.zero != 2:
            raise ValueError(
                f"reduce_every = {self.reduce_every} needs zero = 2, got zero = {self.zero}"
            )
        sizes = [
            ("heads", layer.heads, "tp", parallel.tp),
            ("sequence", self.sequence, "cp", parallel.cp),
            ("dp", parallel.dp, "shard", self.shard or 1),
        ]
        if layer.delta is not None:
            heads = layer.delta.key_heads
            sizes.append(("linear attention's heads", heads, "tp", parallel.tp))
            if parallel.cp > 1 or self.serves:
                what = "inference" if self.serves else f"cp = {parallel.cp}"
                raise ValueError(f"linear attention is not planned with {what}")
        if layer.moe is None or self.dense_layers or layer.moe.every > 1:
            sizes.append(("intermediate", layer.intermediate, "tp", parallel.tp))
        if layer.moe is not None:
            sizes.append(("experts", layer.moe.experts, "ep", parallel.ep))
        if parallel.sequence:
            sizes.append(("tokens of a micro-batch", self.tokens, "tp", parallel.tp))
        for name, size, degree, by in sizes:
            if size % by:
                raise ValueError(f"{degree} = {by} must divide {name} = {size}")
        if parallel.ep > 1 and layer.moe is None:
            raise ValueError(f"ep = {parallel.ep} needs a model with experts; {self.name} has none")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context parallel rank."""
        return self.micro_batch * self.sequence // self.parallel.cp

    @property
    def batch_tokens(self) -> int:
        """Tokens of the step on all ranks."""
        return self.parallel.dp * self.micro_batches * self.micro_batch * self.sequence

    @property
    def model(self) -> Model:
        """The model that the step trains."""
        head = self.vocabulary, self.tied, self.dense_layers
        return Model(self.name, self.dtype, self.layer, self.layers, self.sequence, *head)

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return self.split or even_split(self.layers, self.parallel.pp)

    @property
    def attention_weights(self) -> float:
        """Elements of attention's weights on one rank; each has down-projections and a KV head."""
        sizes, tp, latent = self.layer, self.parallel.tp, self.layer.latent
        if latent is not None:
            whole = sizes.hidden * (latent.query_rank + latent.kv_rank + latent.rope_dim)
            return (sizes.attention_weights - whole) / tp + whole
        more = (ceil_div(sizes.kv_heads, tp) - sizes.kv_heads / tp) * sizes.hidden
        return sizes.attention_weights / tp + more * (sizes.head_dim + sizes.value_dim)

    def weights_of(self, layer: int) -> float:
        """Return elements of a layer's weights on one rank, without embedding, head and router."""
        sizes, tp = self.layer, self.parallel.tp
        delta = sizes.delta_of(layer)
        attention = delta.weights(sizes.hidden) / tp if delta else self.attention_weights
        moe = sizes.moe_of(layer, self.dense_layers)
        if moe is None:
            return attention + sizes.mlp_weights(sizes.intermediate) / tp
        width = moe.experts / self.parallel.ep * moe.intermediate + moe.shared
        # Inference splits experts over tensor parallel ranks, too.
        return attention + sizes.mlp_weights(1) * width / (tp if self.serves else 1)

    def expert_weights_of(self, layer: int) -> float:
        """Return those of them that belong to experts with tokens of other ranks."""
        moe = self.layer.moe_of(layer, self.dense_layers)
        if moe is None:
            return 0.0
        return moe.experts / self.parallel.ep * self.layer.mlp_weights(moe.intermediate)

    @property
    def table_weights(self) -> float:
        """Elements of the embedding, or of the head, on one rank."""
        return self.vocabulary * self.layer.hidden / self.parallel.tp

    def resident(self, stage: int) -> dict[str, float]:
        """Return bytes of weights, gradients and optimizer's states of a stage's rank.

        With ZeRO-3 weights, and with ZeRO-2 gradients, are in memory whole only while they are
        used: operators allocate them. Of tied weights, each of two stages has its copy.
        """
        stages, first = self.stages, sum(self.stages[:stage])
        both = stage == 0 and stage == len(stages) - 1
        tables = (stage == 0) + (stage == len(stages) - 1 and not (both and self.tied))
        return self._held(range(first, first + stages[stage]), tables)

    def resident_parts(self) -> list[float]:
        """Return the bytes of ``resident`` of the embedding, of each layer, and of the head."""
        layers = [self._held((number,), 0) for number in range(self.layers)]
        head = self._held((), 0 if self.tied and self.parallel.pp == 1 else 1)
        parts = [self._held((), 1), *layers, head]
        return [sum(part.values()) for part in parts]

    def _held(self, layers: Sequence[int], tables: int) -> dict[str, float]:
        """Return bytes, by kind, of a rank that has these layers and so many tables."""
        whole = sum(map(self.weights_of, layers)) + self.table_weights * tables
        experts, p = sum(map(self.expert_weights_of, layers)), self.parallel
        # An expert's states are on fewer ranks than other weights'.
        shared = (whole - experts) / (self.shard or p.dp) / p.cp + experts / p.expert_ranks[1]
        gradient = 4.0 if self.fp32_gradients else self.itemsize
        copy = 4.0 if self.itemsize >= 4 else 0.0  # weights that need none
        states = OPTIMIZERS[self.optimizer].state_bytes - copy
        return {
            "weights": (shared if self.zero == 3 else whole) * self.itemsize,
            "gradients": (shared if self.zero >= 2 else whole) * gradient,
            "optimizer": (shared if self.zero else whole) * states,
        }

    @property
    def operations(self) -> float:
        """Operations that the step needs on all ranks: 2 for each multiplication and addition.

        Those of matrix products: forward, and twice as many backward; nothing that is computed
        again. Attention counts the pairs of a causal mask. Experts count for the tokens that are
        routed to them. Inference has forward alone, and logits of last tokens.
        """
        layer, of_token = self.layer, 0.0
        for number in range(self.layers):
            moe = layer.moe_of(number, self.dense_layers)
            if moe is None:
                weights = layer.mlp_weights(layer.intermediate)
            else:
                weights = layer.mlp_weights(moe.top_k * moe.intermediate + moe.shared)
                weights += layer.hidden * moe.experts  # the router
            delta = layer.delta_of(number)
            if delta is None:
                weights += layer.attention_weights
                scores = layer.heads * (layer.head_dim + layer.value_dim) * self.keys(number)
            else:
                weights += delta.weights(layer.hidden) - delta.kernel * delta.convolved
                scores = delta.operations
            of_token += 2.0 * (weights + scores)
        logits = self.micro_batch * self.parallel.dp if self.serves else self.batch_tokens
        head = 2.0 * self.vocabulary * layer.hidden * logits
        return (1.0 if self.serves else 3.0) * (of_token * self.batch_tokens + head)

    def keys(self, layer: int) -> float:
        """Return keys that attention of a layer computes for a token, in the mean."""
        return self.layer.visible(layer, self.sequence) / self.sequence


@dataclass(frozen=True)
class ServingStep(TrainingStep):
    """One forward of ``micro_batch`` sequences on each data parallel rank: a prefill or a decode.

    A training step's forward, with the differences of inference engines. Experts are split over
    tensor parallel ranks, too. A decode of compressed attention reads the compressed cache: keys'
    and values' projections move to queries and outputs. Layers' weights are stored in
    ``gemm_dtype``. The head has each sequence's last token alone.

    Attributes:
        decodes: one token of each sequence, which attends to ``sequence`` tokens of the cache; else
            prompts of ``sequence`` tokens.
        kv_dtype: of the cache; "" for that of activations.
    """

    decodes: bool = False
    kv_dtype: str = ""
    serves = True

    def __post_init__(self) -> None:
        super().__post_init__()
        moe, parallel = self.layer.moe, self.parallel
        if parallel.ep > 1 and parallel.sequence and parallel.tp > 1:
            raise ValueError(
                f"ep = {parallel.ep} with sequence parallelism is not planned in inference: tensor "
                "parallel ranks have a part of each expert"
            )
        check_choice("kv_dtype", self.kv_dtype or self.dtype, DTYPES)
        if self.decodes and parallel.cp > 1:
            raise ValueError(f"a decode has one token of each sequence, and cp = {parallel.cp}")
        if moe is not None:
            for name, width in (("intermediate", moe.intermediate), ("shared", moe.shared)):
                if width % parallel.tp:
                    raise ValueError(f"tp = {parallel.tp} must divide {name} = {width} of experts")

    @property
    def tokens(self) -> int:
        """Tokens of a forward on one context parallel rank."""
        return self.micro_batch if self.decodes else super().tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of a forward on all ranks."""
        return self.parallel.dp * self.tokens * self.parallel.cp

    def keys(self, layer: int) -> float:
        """Return keys that attention of a layer computes for a token, in the mean."""
        if not self.decodes:
            return super().keys(layer)
        reach = self.layer.reach(layer, self.sequence)
        # Of chunks, a token sees what is before it in its own.
        inside = self.layer.chunked and reach < self.sequence
        return (self.sequence - 1) % reach + 1 if inside else reach

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in a rank's cache of one layer; compressed ones are on all ranks."""
        layer, latent = self.layer, self.layer.latent
        heads = ceil_div(layer.kv_heads, self.parallel.tp)
        elements = heads * (layer.head_dim + layer.value_dim)
        if latent is not None:
            elements = latent.kv_rank + latent.rope_dim
        return elements * DTYPES[self.kv_dtype or self.dtype].itemsize

    def cache_bytes(self, tokens: int) -> float:
        """Return bytes of a sequence of this length in the cache of the rank with most layers.

        Layers with a window hold no more than it.
        """
        stages, firsts = self.stages, [sum(self.stages[:n]) for n in range(len(self.stages))]
        held = [
            sum(self.layer.reach(number, tokens) for number in range(first, first + count))
            for first, count in zip(firsts, stages, strict=True)
        ]
        return max(held) * self.kv_bytes / self.parallel.cp

    def _held(self, layers: Sequence[int], tables: int) -> dict[str, float]:
        """Return bytes of weights."""
        moes = sum(self.layer.moe_of(n, self.dense_layers) is not None for n in layers)
        routers = moes * self.layer.hidden * (self.layer.moe.experts if self.layer.moe else 0)
        others = tables * self.table_weights + routers
        itemsize = DTYPES[self.gemm_dtype or self.dtype].itemsize  # of the layers' weights
        weights = sum(map(self.weights_of, layers)) * itemsize
        return {"weights": weights + others * self.itemsize}

    def experts_read(self, rows: int) -> int:
        """Return experts of a rank that any of the group's tokens goes to, with even routing."""
        moe, ep = self.layer.moe, self.parallel.ep
        assert moe is not None
        some = 1.0 - (1.0 - moe.top_k / moe.experts) ** (rows * ep)
        return max(1, round(moe.experts / ep * some))


def serving_step(step: TrainingStep, *, decodes: bool, kv_dtype: str = "") -> ServingStep:
    """Return the prefill, or the decode, of the model and sizes of a step."""
    return ServingStep(**vars(step), decodes=decodes, kv_dtype=kv_dtype)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return layers of each stage, as even as possible.

    Stages that lack a layer are the last and the first, which have head and embedding, then those
    next to them: 126 layers on 16 stages are 7, 14 times 8, and 7 (Llama 3, arXiv 2407.21783,
    section 3.3.2).
    """
    most = -(-layers // stages)
    short = stages * most - layers
    first = short // 2
    return tuple(
        most - (place < first or place >= stages - (short - first)) for place in range(stages)
    )


def step_of(
    model: str | Path | Model,
    parallel: Parallel,
    *,
    sequence: int | None = None,
    micro_batch: int = 1,
    micro_batches: int | None = None,
    layers: int | None = None,
    dtype: str | None = None,
    regather: bool | None = None,
    head: bool | None = None,
    **choices: Any,
) -> TrainingStep:
    """Return a step of a model.

    Args:
        model: name or path; see ``flux.bench.shapes.model_of``.
        parallel: how ranks share the work.
        sequence: tokens of a sequence; by default those of the model's workload "training".
        micro_batch: sequences of a micro-batch.
        micro_batches: of a step; by default 1, or four per pipeline stage.
        layers: by default all of the model.
        dtype: by default the model's.
        regather: see ``TrainingStep``; by default with sequence parallelism.
        head: embedding, head and loss, too; by default if ``layers`` is not given: beside a few
            layers they would be out of proportion.
        choices: further fields of ``TrainingStep``.
    """
    described = model if isinstance(model, Model) else model_of(model)
    if micro_batches is None:
        micro_batches = 1 if parallel.pp == 1 else 4 * parallel.pp
    return TrainingStep(
        name=described.name,
        layer=described.layer,
        layers=described.layers if layers is None else layers,
        dtype=dtype or described.dtype,
        parallel=parallel,
        sequence=described.sequence if sequence is None else sequence,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        regather=parallel.sequence and parallel.tp > 1 if regather is None else regather,
        vocabulary=described.vocabulary if (layers is None if head is None else head) else 0,
        tied=described.tied,
        dense_layers=min(described.dense_layers, described.layers if layers is None else layers),
        **choices,
    )
