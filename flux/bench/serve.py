"""Configuration of `flux bench serve`: a whole model that answers prompts, with random weights.

prefill  one prompt of P tokens: the time to the first token
decode   one more token for each of B sequences: the time per output token
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flux.bench.config import Run, dtype_name
from flux.bench.model import scaled
from flux.bench.shapes import layer_of
from flux.core.problem import DTYPES

PROGRAMS = ("transformers", "vllm")


@dataclass(frozen=True)
class ServeConfig(Run):
    """The complete configuration of one run of `flux bench serve`.

    Attributes:
        program: serves the model: one of ``PROGRAMS``.
        model: a folder with the config.json of a Hugging Face model, which is taken as it is; or a
            file of shapes with a [layer], or its name in tuning/shapes, which becomes a Llama.
        world: number of ranks.
        scale: divisor of the sizes of a file of shapes.
        layers: how many layers the model has; 0: as many as config.json says.
        vocabulary: tokens of a model that a file of shapes describes.
        prompts: lengths of prompts, in tokens; each is a phase.
        batches: sequences that are decoded at once; each is a phase.
        context: tokens of each sequence before decoding starts.
        tokens: decoded in one repeat.
        dtype: of the model.
        sequence_parallel: as of ``flux.layers.replace_linears``, for the program transformers.
        alone: whether one rank also serves the whole model by itself.
    """

    program: str
    model: str
    world: int
    scale: int = 8
    layers: int = 8
    vocabulary: int = 32000
    prompts: tuple[int, ...] = (512, 2048)
    batches: tuple[int, ...] = (1, 8)
    context: int = 64
    tokens: int = 8
    dtype: str = "float32"
    sequence_parallel: bool | str = "auto"
    alone: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program not in PROGRAMS:
            raise ValueError(f"program must be {' or '.join(PROGRAMS)}, got {self.program!r}")
        if self.world < 2:
            raise ValueError(f"world must be at least 2, got {self.world}")
        for name in ("scale", "vocabulary", "context", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.layers < 0 or (self.layers == 0 and not self.has_config):
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        if min([*self.prompts, *self.batches], default=0) < 1:
            raise ValueError("prompts and batches need integers of at least 1")
        if dtype_name(self.dtype) not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if not self.has_config:
            _ = self.llama  # raises for a bad model or scale
        if self.program == "vllm" and len(set(Counter(self.host_of).values())) > 1:
            raise ValueError(f"vllm needs equally many ranks on each host, got {self.hosts}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.world

    @property
    def has_config(self) -> bool:
        """Whether the model is a folder with a config.json."""
        return (Path(self.model) / "config.json").is_file()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[dtype_name(self.dtype)].torch

    @property
    def most_tokens(self) -> int:
        """Positions that the model needs, and tokens of the largest step."""
        return max(*self.prompts, max(self.batches) * self.context) + self.tokens + 1

    @property
    def llama(self) -> dict[str, Any]:
        """The config.json of the Llama that a file of shapes describes.

        Raises:
            ValueError: there is no such file, or its layer cannot be scaled or is no Llama's.
        """
        layer = scaled(layer_of(self.model), self.scale, self.world)
        if not layer.gated or layer.moe is not None:
            raise ValueError(
                f"{self.model} is no Llama (a gated MLP): pass a folder with its config.json"
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": layer.hidden,
            "intermediate_size": layer.intermediate,
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.most_tokens,
            "tie_word_embeddings": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
