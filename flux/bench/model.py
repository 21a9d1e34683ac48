"""Configuration of `flux bench model`: a model's transformer layer, scaled down, in three phases.

train    forward and backward of batch sequences
prefill  forward of batch sequences, whose keys and values are kept
decode   forward of one more token for each of decode_batch sequences that have sequence tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flux.bench.config import Run, dtype_name
from flux.bench.shapes import Layer, layer_of
from flux.core.problem import DTYPES

PHASES = ("train", "prefill", "decode")
DECODE_REPEATS = 8
"""Repeats of decoding per repeat of another phase. Decoding takes a hundredth of their time, and an
interruption of a rank is a large part of that."""


def scaled(layer: Layer, scale: int, world: int) -> Layer:
    """Return the layer with its width, heads and hidden units divided by ``scale``.

    Heads keep their size, and every rank has equally many, at least one, also of keys and values.
    Each of these serves about as many heads of queries as in the original.

    Raises:
        ValueError: width or hidden units cannot be divided by ``scale`` and ``world``.
    """
    if scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    if layer.delta is not None:
        raise ValueError("linear attention is planned, and does not run")
    for name in ("hidden", "intermediate"):
        size = getattr(layer, name)
        if size % (scale * world):
            raise ValueError(f"{name} = {size} must be divisible by {scale} x {world} ranks")
    heads = max(1, layer.heads // (scale * world))  # per rank
    most = max(1, heads * layer.kv_heads // layer.heads)
    kv_heads = max(count for count in range(1, most + 1) if heads % count == 0)
    return replace(
        layer,
        hidden=layer.hidden // scale,
        intermediate=layer.intermediate // scale,
        heads=heads * world,
        kv_heads=kv_heads * world,
    )


@dataclass(frozen=True)
class ModelConfig(Run):
    """The complete configuration of one run of `flux bench model`.

    Attributes:
        model: a file of shapes with a [layer], or its name in tuning/shapes.
        world: number of ranks.
        scale: divisor of the model's sizes.
        sequence: tokens of a sequence, and of a prompt.
        batch: sequences at once, in training and prefill; ``decode_batch`` in decoding.
        decode_batch: sequences at once in decoding.
        phases: phases to measure.
        dtype: of the layer.
        sequence_parallel: in training and prefill. Never in decoding, as a token cannot be split.
        repeats: of training and prefill; ``DECODE_REPEATS`` times as many of decoding.
    """

    model: str
    world: int
    scale: int = 16
    sequence: int = 512
    batch: int = 1
    decode_batch: int = 8
    phases: tuple[str, ...] = PHASES
    dtype: str = "float32"
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequence", "batch", "decode_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world < 2:
            raise ValueError(f"world must be at least 2, got {self.world}")
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown or not self.phases:
            raise ValueError(f"phases must be some of {', '.join(PHASES)}, got {self.phases}")
        if dtype_name(self.dtype) not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.sequence_parallel and self.sequence % self.world:
            raise ValueError(f"sequence = {self.sequence} is not divisible by {self.world} ranks")
        _ = self.layer  # raises for a bad model or scale

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.world

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights of both layers, and of one activation on every rank."""
        layer, size = self.layer, self.torch_dtype.itemsize
        weights = sum(n * k for _, n, k in layer.gemms(decodes=False))
        rows = max(self.batch * self.sequence, self.decode_batch)
        return size * (2 * weights + rows * layer.hidden)

    @property
    def layer(self) -> Layer:
        """The layer to measure, scaled.

        Raises:
            ValueError: there is no such model, or it cannot be scaled by this factor.
        """
        return scaled(layer_of(self.model), self.scale, self.world)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[dtype_name(self.dtype)].torch

    def repeats_of(self, phase: str) -> int:
        """Return the number of repeats of a phase."""
        return self.repeats * (DECODE_REPEATS if phase == "decode" else 1)

    def sequence_parallel_in(self, phase: str) -> bool:
        """Return whether a phase uses sequence parallelism."""
        return self.sequence_parallel and phase != "decode"
