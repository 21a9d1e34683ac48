"""What a step is made of: the model, the batch, and how ranks share the work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from flux.bench.shapes import Layer, model_of
from flux.core.datafile import MOST_SIZE, shown
from flux.core.problem import DTYPES


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism. Ranks are numbered with tp fastest, then cp, dp, and pp slowest.

    Attributes:
        tp: tensor parallel.
        cp: context parallel: ranks share the tokens of a sequence.
        dp: data parallel.
        pp: pipeline parallel.
        ep: expert parallel: data parallel ranks that share the experts of a layer.
        sequence: sequence parallelism: AllGather and ReduceScatter in place of AllReduce.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        for degree in fields(self):
            value = getattr(self, degree.name)
            if degree.name != "sequence" and (type(value) is not int or value < 1):
                raise ValueError(f"{degree.name} must be an integer of at least 1, got {value!r}")
            if value > MOST_SIZE:
                raise ValueError(f"{degree.name} must be at most {MOST_SIZE}, got {shown(value)}")
        if self.dp % self.ep:
            raise ValueError(f"ep = {self.ep} must divide dp = {self.dp}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class TrainingStep:
    """One training step of a model.

    Attributes:
        name: of the model, for display.
        layer: sizes of each of its layers.
        layers: how many there are.
        dtype: of activations and weights.
        parallel: how ranks share the work.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch, on each data parallel rank.
        micro_batches: micro-batches of a step, on each data parallel rank.
        zero: 0: gradients are all-reduced; 1: they are reduce-scattered, the optimizer steps on a
            share, and weights are gathered again (ZeRO-1); 3: weights are sharded, each layer's are
            gathered before its forward and before its backward, and gradients are reduce-scattered
            after each backward (ZeRO-3, FSDP).
        regather: with sequence parallelism: the input of a column-parallel linear is gathered again
            in backward, in place of kept (as in Megatron-core).
        shard: with zero=3: consecutive data parallel ranks that share the weights; 0: all. Others
            replicate them, and their gradients are all-reduced at the end of the step.
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

    def __post_init__(self) -> None:
        layer, parallel = self.layer, self.parallel
        for name in ("layers", "sequence", "micro_batch", "micro_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if value > MOST_SIZE:
                raise ValueError(f"{name} must be at most {MOST_SIZE}, got {shown(value)}")
        if self.zero not in (0, 1, 3):
            raise ValueError(f"zero must be 0, 1 or 3, got {self.zero!r}")
        if type(self.shard) is not int or self.shard < 0:
            raise ValueError(f"shard must be an integer of at least 0, got {self.shard!r}")
        if self.shard and self.zero != 3:
            raise ValueError(f"shard = {self.shard} needs zero = 3, got zero = {self.zero}")
        if self.shard and layer.moe is not None:
            raise ValueError(f"shard = {self.shard} needs a model without experts")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        sizes = [
            ("heads", layer.heads, "tp", parallel.tp),
            ("sequence", self.sequence, "cp", parallel.cp),
            ("layers", self.layers, "pp", parallel.pp),
            ("dp", parallel.dp, "shard", self.shard or 1),
        ]
        if layer.moe is None:
            sizes.append(("intermediate", layer.intermediate, "tp", parallel.tp))
        else:
            sizes.append(("experts", layer.moe.experts, "ep", parallel.ep))
        if parallel.sequence:
            tokens = self.micro_batch * self.sequence // parallel.cp
            sizes.append(("tokens of a micro-batch", tokens, "tp", parallel.tp))
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
    def layer_weights(self) -> float:
        """Elements of a layer's weights on one rank."""
        layer, parallel = self.layer, self.parallel
        attention = self._attention_weights / parallel.tp
        if layer.moe is None:
            return attention + self._mlp_weights(layer.intermediate) / parallel.tp
        experts = layer.moe.experts / parallel.ep
        return attention + experts * self._mlp_weights(layer.moe.intermediate)

    @property
    def operations(self) -> float:
        """Operations that the step needs on all ranks: 2 for each multiplication and addition.

        Those of the layers' matrix products: forward, and twice as many backward. Attention counts
        the pairs of a causal mask. Experts count for the tokens that are routed to them.
        """
        layer = self.layer
        if layer.moe is None:
            weights = self._mlp_weights(layer.intermediate)
        else:
            weights = layer.moe.top_k * self._mlp_weights(layer.moe.intermediate)
            weights += layer.hidden * layer.moe.experts  # the router
        causal = layer.heads * layer.head_dim * self.sequence
        of_token = 2.0 * (self._attention_weights + weights + causal)
        return 3.0 * of_token * self.batch_tokens * self.layers

    @property
    def _attention_weights(self) -> int:
        layer = self.layer
        return layer.hidden * layer.head_dim * 2 * (layer.heads + layer.kv_heads)

    def _mlp_weights(self, intermediate: int) -> int:
        return (3 if self.layer.gated else 2) * self.layer.hidden * intermediate


def step_of(
    model: str | Path,
    parallel: Parallel,
    *,
    sequence: int | None = None,
    micro_batch: int = 1,
    micro_batches: int | None = None,
    layers: int | None = None,
    dtype: str | None = None,
    zero: int = 1,
    regather: bool = False,
    shard: int = 0,
) -> TrainingStep:
    """Return a step of a model in `tuning/shapes`, or of a file of that form.

    Args:
        model: name or path.
        parallel: how ranks share the work.
        sequence: tokens of a sequence; by default those of the model's workload "training".
        micro_batch: sequences of a micro-batch.
        micro_batches: of a step; by default 1, or four per pipeline stage.
        layers: by default all of the model.
        dtype: by default the model's.
        zero: see ``TrainingStep``.
        regather: see ``TrainingStep``.
        shard: see ``TrainingStep``.

    Raises:
        ValueError: no such model, or sizes that do not divide; the message names both.
    """
    described = model_of(model)
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
        zero=zero,
        regather=regather,
        shard=shard,
    )
