"""Models of Hugging Face Transformers with fused linear layers equal the whole model.

Every model has two layers of width 64. References are in float64, on one rank.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import harness
from flux.layers import close_pools, replace_linears
from harness import more, run_ranks
from scripts import ROOT, run_script

if find_spec("transformers") is None:
    pytestmark = pytest.mark.skip(reason="needs transformers: make clients")
else:
    import transformers

    harness.PRELOAD += ["transformers.models.auto.modeling_auto", "transformers.generation.utils"]

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,  # which neither 2 nor 4 ranks divide
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = BASE | {"num_key_value_heads": 4}
HEADS = GROUPED | {"head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
SLIDING = {"sliding_window": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "tied": (
        "Llama",
        GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", HEADS),
    "qwen3_moe": ("Qwen3Moe", HEADS | ROUTED | {"num_experts": 4, "decoder_sparse_step": 2}),
    "mistral": ("Mistral", HEADS | SLIDING),
    "mixtral": ("Mixtral", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", GROUPED),
    "gpt_neox": ("GPTNeoX", BASE),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", HEADS | SLIDING | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3Text", HEADS | SLIDING | {"query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "GptOss",
        HEADS
        | SLIDING
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek_v2": ("DeepseekV2", GROUPED | ROUTED | LATENT),
    "deepseek_v3": ("DeepseekV3", GROUPED | ROUTED | LATENT),
    "llama4": (
        "Llama4Text",
        HEADS
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 8, "no_rope_layers": [1, 0]}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
}


def build(name: str) -> Any:
    """Return a model with the same random values on every rank, biases and norms included."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits, and gradients of two backwards that accumulate."""
    model.zero_grad(set_to_none=True)
    for part in tokens.chunk(2):
        out = model(input_ids=part, labels=part, use_cache=False)
        out.loss.backward()
    values = {"logits": whole(out.logits).detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        values[name] = whole(parameter.grad)
    return values


def tokens_of(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)


def reference(name: str) -> Any:
    """Return the whole model in float64, where grouped products have no kernel."""
    model = build(name).double()
    model.config._experts_implementation = "eager"
    return model


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        error = (got[key] - value).abs().max()
        assert error <= 3e-5 * value.abs().max() + 1e-8, (key, error, value.abs().max())


def _equal(rank: int, world: int, name: str) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(101, (2, 12))
    expected = reference(name)
    model = replace_linears(build(name), mesh=dist.group.WORLD)
    check(results(model, tokens), results(expected, tokens))
    prompt = tokens[:, :5]
    assert torch.equal(tokens_of(model, prompt), tokens_of(expected, prompt))
    close_pools()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("world", [2, *more(4)])
def test_model_equals_the_whole_one(world: int, name: str) -> None:
    run_ranks(world, _equal, name)


def test_quickstart_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "use" / "transformers.md").read_text(encoding="utf-8")
    quickstart = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    assert len(quickstart.splitlines()) <= 12
    path = tmp_path / "quickstart.py"
    path.write_text(quickstart, encoding="utf-8")
    first, second = run_script(path, ranks=2).splitlines()
    assert first == second and first.count(",") == 10
