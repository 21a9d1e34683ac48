"""Models of Hugging Face Transformers on shards of the sequence equal the whole model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux.layers import close_pools, replace_linears, sequence_parallel_plan, sequence_shards
from flux.ops.pool import pool_of
from harness import more, run_ranks
from sequence_cases import shards_seen
from test_transformers import MODELS, build, check, reference, results, tokens_of

if find_spec("transformers") is None:
    pytestmark = pytest.mark.skip(reason="needs transformers: make clients")

WITHOUT = {
    "qwen3_moe": "layers.1.mlp",
    "mixtral": "layers.0",
    "gpt_oss": "no row-parallel linear layer",
    "deepseek_v2": "layers.0.self_attn",
    "glm4_moe": "layers.1.mlp.experts",
    "deepseek_v3": "experts",
    "llama4": "layers.",
}
"""Models without a plan, and what the reason names."""


def _equal(rank: int, world: int, name: str) -> None:
    torch.manual_seed(1)
    expected, model = reference(name), build(name)
    replace_linears(model, mesh=dist.group.WORLD, sequence_parallel=True)
    seen = shards_seen(model.get_submodule(sequence_parallel_names(name)[-1]))
    tokens = torch.randint(101, (2, 13))  # a length that no world divides
    check(results(model, tokens), results(expected, tokens))
    assert seen == [True, True]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    check(results(model, tokens), results(expected, tokens))
    model.gradient_checkpointing_disable()
    model.eval()
    del seen[:]
    with torch.no_grad():
        options = {"output_hidden_states": True, "output_attentions": True}
        got, want = model(tokens, **options), expected(tokens, **options)
    assert len(got.hidden_states) == len(want.hidden_states) == 3
    for x, y in zip(got.hidden_states, want.hidden_states, strict=True):
        assert (x - y).abs().max() <= 3e-5 * y.abs().max()
    for cache in ({}, {"cache_implementation": "static"}):
        with torch.no_grad():
            got, want = (tokens_of(m, tokens, **cache) for m in (model, expected))
        assert torch.equal(got, want)
    assert seen == [True, True, *[False] * 7, True, *[False] * 7]  # a prompt, and single tokens
    assert {op.spec.label for op in pool_of(None).ops} == {"AGGemm", "GemmRS", "GemmAR"}
    close_pools()


def _last_tokens(rank: int, world: int) -> None:
    expected, model = reference("llama"), build("llama")
    replace_linears(model, mesh=dist.group.WORLD, sequence_parallel=True)
    tokens = torch.randint(101, (2, 13), generator=torch.Generator().manual_seed(1))
    gathered: list[int] = []

    def gather(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append(out.shape[0])
        return all_gather(out, *args, **kwargs)

    all_gather, sequence_shards.all_gather = sequence_shards.all_gather, gather
    try:
        for count in (1, 6, 7, 13, 0, torch.tensor([0, 12])):  # the last rank has six
            for options in ({}, {"output_hidden_states": True}):
                with torch.no_grad():
                    got = model(tokens, logits_to_keep=count, **options)
                    want = expected(tokens, logits_to_keep=count, **options)
                pairs = [(got.logits, want.logits)]
                pairs += zip(got.hidden_states or (), want.hidden_states or (), strict=True)
                for x, y in pairs:
                    assert (x - y).abs().max() <= 3e-5 * y.abs().max(), (count, options)
                few = type(count) is int and 0 < count <= 6 and not options
                assert (len(gathered) == 0) == few, (count, options, gathered)
                del gathered[:]
        got = model(tokens, logits_to_keep=1).logits.sum()  # a backward needs all tokens
        got.backward()
        assert gathered == [14, 14] and not model.model.norm.weight.grad.isnan().any()
        seen: list[torch.Tensor] = []
        model.model.norm.register_forward_hook(lambda _, args, y: seen.append(y))
        tokens_of(model, tokens, max_new_tokens=1)
        assert seen[0][:, :-1].isnan().all() and not seen[0][:, -1].isnan().any()
    finally:
        sequence_shards.all_gather = all_gather
    close_pools()


def test_last_tokens_are_read_from_the_rank_that_has_them() -> None:
    run_ranks(2, _last_tokens)


def sequence_parallel_names(name: str) -> tuple[str, ...]:
    return sequence_parallel_plan(build(name)).layers


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT])
@pytest.mark.parametrize("world", [2, *more(4)])
def test_shards_equal_the_whole_model(world: int, name: str) -> None:
    run_ranks(world, _equal, name)


@pytest.mark.parametrize(("name", "part"), WITHOUT.items())
def test_other_models_have_no_plan(name: str, part: str) -> None:
    model: Any = build(name)
    with pytest.raises(ValueError, match=f"no sequence-parallel plan: .*{part}"):
        sequence_parallel_plan(model)
