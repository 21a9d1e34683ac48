"""What `flux bench model` measures: a transformer layer of a model, scaled down, in three phases.

train    forward and backward of batch sequences
prefill  forward of batch sequences, whose keys and values are kept
decode   forward of one more token for each of decode_batch sequences that have sequence tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flux.tune.shapes import Layer, layer_of

from .hosts import parse_hosts
from .problem import DTYPES, check_run, dtype_name

PHASES = ("train", "prefill", "decode")
DECODE_REPEATS = 8
"""Repeats of decoding for one of the other phases: it takes a hundredth of their time, and a rank
that is interrupted is a large part of that."""


def scaled(layer: Layer, scale: int, world: int) -> Layer:
    """The layer with its width, heads and hidden units divided by ``scale``.

    Heads keep their size, and every rank has as many: one at least, of keys and values too. Those
    serve about as many heads of queries as in the original.

    Raises:
        ValueError: width or hidden units cannot be divided by ``scale`` and ``world``.
    """
    if scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    for name in ("hidden", "intermediate"):
        size = getattr(layer, name)
        if size % (scale * world):
            raise ValueError(f"{name} = {size} cannot be divided by {scale} and {world} ranks")
    heads = max(1, layer.heads // (scale * world))  # of a rank
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
class ModelConfig:
    """Everything that one run depends on; goes to every rank by pickling.

    Attributes:
        model: a file of shapes with a [layer], or its name in tuning/shapes.
        scale: what its sizes are divided by.
        sequence: tokens of a sequence, and of a prompt.
        batch: sequences at once, in training and prefill; ``decode_batch`` in decoding.
        sequence_parallel: of training and prefill. Decoding has none, as a token cannot be split.
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
    repeats: int = 15
    warmup: int = 3
    threads: int = 1
    timeout_s: float = 60.0
    seed: int = 0
    hosts: str = "1"
    link_rate: str | None = None
    common_clock: bool = True

    def __post_init__(self) -> None:
        check_run(self)
        for name in ("sequence", "batch", "decode_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world < 2:
            raise ValueError("there is nothing to communicate on one rank: 2 at least")
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown or not self.phases:
            raise ValueError(f"phases must be some of {', '.join(PHASES)}, got {self.phases}")
        if dtype_name(self.dtype) not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.sequence_parallel and self.sequence % self.world:
            raise ValueError(f"sequence = {self.sequence} is not divisible by {self.world} ranks")
        _ = self.layer  # which complains as well

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return parse_hosts(self.hosts, self.world)

    @property
    def layer(self) -> Layer:
        """What is measured, scaled.

        Raises:
            ValueError: there is no such model, or it cannot be scaled so.
        """
        return scaled(layer_of(self.model), self.scale, self.world)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[dtype_name(self.dtype)]

    def repeats_of(self, phase: str) -> int:
        return self.repeats * (DECODE_REPEATS if phase == "decode" else 1)

    def sequence_parallel_in(self, phase: str) -> bool:
        return self.sequence_parallel and phase != "decode"
