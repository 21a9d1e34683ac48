"""Models, plans and a backend for the tests of flux.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from harness import STRESS

B, S, D, HEADS = 2, 8, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (D // HEADS, D // HEADS)
        q, k, v = (
            p(x).unflatten(-1, (-1, heads[0])).transpose(1, 2) for p in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(D, 2 * D, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(2 * D, D, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A transformer block of the Llama kind; biases in the feed-forward part, for their sake."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.attention, self.feed_forward = Attention(), FeedForward(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(x + self.attention(self.attention_norm(x)))

    def half(self, x: torch.Tensor) -> torch.Tensor:
        """The block without attention."""
        return x + self.feed_forward(self.ffn_norm(x))


def plan(sequence: bool) -> dict[str, Any]:
    """As torchtitan writes it: with sequence parallelism, or with replicated activations."""
    down = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    styles: dict[str, Any] = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
    styles |= {f"feed_forward.w{name}": ColwiseParallel() for name in "13"}
    styles |= {"attention.wo": down, "feed_forward.w2": down}
    if sequence:
        whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        for name in ("attention", "feed_forward"):
            styles[name] = PrepareModuleInput(**whole)
        styles |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    return styles


@contextmanager
def quick_inductor() -> Iterator[None]:
    """Inductor that generates no loops, if this torch can: each operator is called as it is.

    The C++ compiler takes 2 to 4 s of a core for each loop. Ours are calls in any case; passes,
    schedules and buffers are those of Inductor. `make stress` generates the loops.
    """
    from torch._inductor import config

    if STRESS > 1 or not hasattr(config, "fallback_by_default"):  # torch 2.9
        with config.patch(fx_graph_cache=False):  # passes do not run for a graph from the cache
            yield
        return
    with config.patch(fallback_by_default=True):
        yield


def passes_only(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """Inductor up to its passes over graphs, which then run eagerly: no code is generated."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx, view_to_reshape
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def inner(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        view_to_reshape(gm)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(gm, is_inference=bool(options.get("is_inference")))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(gm, inputs, inner_compile=inner)
