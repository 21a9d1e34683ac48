"""Models of Hugging Face Transformers with fused linear layers equal the whole model.

Every model has two layers of width 64. References are in float64, on one rank.
"""

from __future__ import annotations

import copy
import os
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import harness
from flux.layers import close_pools, eligible, replace_linears
from flux.layers.dtensor import ColwiseLinear, RowwiseLinear
from flux.layers.huggingface_experts import ExpertsForward
from harness import more, run_ranks, stress_only
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
    "glm4_moe": ("Glm4Moe", HEADS | ROUTED | LATENT | {"use_qk_norm": True}),
    "apertus": ("Apertus", GROUPED),
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


FUSED_EXPERTS = ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v2", "deepseek_v3")


def _major() -> int:
    return int(transformers.__version__.partition(".")[0])


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
    if name in FUSED_EXPERTS:
        assert bool(_experts(model)) == (_major() >= 5)
        assert not any("Transformers' own path" in text for text in eligible._said)
    check(results(model, tokens), results(expected, tokens))
    prompt = tokens[:, :5]
    assert torch.equal(tokens_of(model, prompt), tokens_of(expected, prompt))
    close_pools()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("world", [2, *more(4)])
def test_model_equals_the_whole_one(world: int, name: str) -> None:
    run_ranks(world, _equal, name)


# -- models that Transformers has sharded, and what users do with a model --------------------------


def sharded(rank: int, name: str, path: str, **options: Any) -> Any:
    """Return a model that from_pretrained has sharded over the ranks.

    ``options``: of Transformers 5's configuration.
    """
    if rank == 0:
        build(name).save_pretrained(path)
    dist.barrier()
    kind = type(build(name))
    if hasattr(kind, "is_distributed_loading_by_transformers"):
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=dist.get_world_size(), **options)
        options = {"distributed_config": config}
    else:
        options = {"tp_plan": "auto"}
    model = kind.from_pretrained(path, attn_implementation="eager", **options)
    dist.barrier()
    return model.eval()


def _sharded(rank: int, world: int, path: str) -> None:
    for name in ("tied", "glm4_moe", "apertus", "phi3", "deepseek_v2"):
        torch.manual_seed(1)
        tokens = torch.randint(101, (2, 12))
        expected = reference(name)
        model = sharded(rank, name, f"{path}/{name}")
        with pytest.raises(ValueError, match="over 2 ranks"):
            replace_linears(model, mesh=DeviceMesh("cpu", [rank]))
        norm = model.model.norm.weight
        grid = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("fsdp", "tp"))
        model.model.norm.weight = torch.nn.Parameter(distribute_tensor(norm.detach(), grid))
        with pytest.raises(ValueError, match="then fully_shard it"):
            replace_linears(model)
        model.model.norm.weight = norm
        assert replace_linears(model) is model
        assert any(isinstance(m, ColwiseLinear) for m in model.modules())
        assert _major() < 5 or bool(_experts(model)) == (name in FUSED_EXPERTS)
        assert not any(type(m) is RowwiseLinear and "forward" in vars(m) for m in model.modules())
        check(results(model, tokens), results(expected, tokens))
        assert torch.equal(tokens_of(model, tokens), tokens_of(expected, tokens))
        with pytest.raises(ValueError, match="no linear layer to replace"):
            replace_linears(model)
        with pytest.raises(NotImplementedError, match="load it once more"):
            copy.deepcopy(model)
    close_pools()


def test_model_that_transformers_sharded_equals_the_whole_one(tmp_path: Path) -> None:
    run_ranks(2, _sharded, str(tmp_path))


def _experts(model: Any) -> list[ExpertsForward]:
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [forward for forward in forwards if isinstance(forward, ExpertsForward)]


def _split_experts(rank: int, world: int, path: str) -> None:
    for name in ("gpt_oss", "qwen3_moe", "deepseek_v3"):
        tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
        model = replace_linears(sharded(rank, name, f"{path}/{name}", ep_size=world))
        assert _experts(model)
        check(results(model, tokens), results(reference(name), tokens))
        assert torch.equal(tokens_of(model, tokens), tokens_of(reference(name), tokens))
    assert not any("Transformers' own path" in text for text in eligible._said)
    close_pools()


def test_experts_that_transformers_gave_to_the_ranks(tmp_path: Path) -> None:
    """Expert parallelism: each rank has whole experts (GPT-OSS has no other plan for them)."""
    pytest.importorskip("transformers.distributed.expert_parallel", reason="Transformers 5.24")
    run_ranks(2, _split_experts, str(tmp_path))


def _note_shape(shapes: list[torch.Size], module: Any, args: Any, out: torch.Tensor) -> None:
    shapes.append(out.shape)


def _trained_experts(rank: int, world: int) -> None:
    """Experts beside checkpointing, autocast, frozen weights and hooks."""
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    seen: list[list[torch.Size]] = [[], []]
    models = [build("mixtral").train(), replace_linears(build("mixtral"), mesh=dist.group.WORLD)]
    for shapes, model in zip(seen, models, strict=True):
        model.train().config._experts_implementation = "eager"
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.requires_grad_(False)
            layer.mlp.experts.register_forward_hook(partial(_note_shape, shapes))
    assert len(_experts(models[1])) == 2
    for dtype, bound in ((torch.float32, 3e-5), (torch.bfloat16, 0.06)):
        values = []
        for model in models:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                out = model(input_ids=tokens, labels=tokens, use_cache=False)
            out.loss.backward()
            grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
            values.append({"logits": whole(out.logits).detach(), **grads})
        want, got = values
        for key, value in want.items():
            error = (got[key] - value).abs().max()
            assert error <= bound * value.abs().max() + 1e-8, (dtype, key, error)
    assert seen[0] == seen[1] and set(seen[1]) == {torch.Size((24, 64))}
    assert not any("Transformers' own path" in text for text in eligible._said)
    close_pools()


def test_experts_train() -> None:
    run_ranks(2, _trained_experts)


def _copied(rank: int, world: int) -> None:
    """A deep copy, such as a model to compare with in training, has parameters of its own."""
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    for name in ("tied", "qwen3_moe"):
        model = replace_linears(build(name), mesh=dist.group.WORLD)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        check(results(twin, tokens), results(reference(name), tokens))
    close_pools()


def test_copy_is_independent() -> None:
    run_ranks(2, _copied)


def _caches(rank: int, world: int) -> None:
    torch.manual_seed(1)
    prompt = torch.randint(101, (2, 9))
    for name in ("qwen3", "mistral"):  # of which Mistral attends to six tokens
        expected, model = build(name), replace_linears(build(name), mesh=dist.group.WORLD)
        for cache in ("dynamic", "static"):
            options = {"cache_implementation": cache, "disable_compile": True}
            want = tokens_of(expected, prompt, **options)
            assert torch.equal(tokens_of(model, prompt, **options), want), (name, cache)
    close_pools()


def test_generate_with_every_cache() -> None:
    run_ranks(2, _caches)


def _saved(rank: int, world: int, path: str) -> None:
    for name in ("tied", "qwen3_moe"):
        model = replace_linears(build(name), mesh=dist.group.WORLD)
        model.save_pretrained(f"{path}/{name}")
        dist.barrier()
        again = type(model).from_pretrained(f"{path}/{name}").state_dict()
        for key, value in build(name).state_dict().items():
            assert torch.equal(again[key], value), key
        sharded = replace_linears(
            type(model).from_pretrained(f"{path}/{name}"), mesh=dist.group.WORLD
        )
        tokens = torch.arange(10)[None]
        torch.testing.assert_close(sharded.eval()(tokens).logits, model(tokens).logits)
    close_pools()


def test_saved_model_is_whole(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path))


def _checkpointed(rank: int, world: int) -> None:
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = reference("qwen3")
    model = replace_linears(build("qwen3"), mesh=dist.group.WORLD).train()
    model.gradient_checkpointing_enable()
    check(results(model, tokens), results(expected.train(), tokens))
    close_pools()


def test_gradient_checkpointing() -> None:
    run_ranks(2, _checkpointed)


def _compiled(rank: int, world: int) -> None:
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = results(reference("qwen3"), tokens)
    model = replace_linears(build("qwen3"), mesh=dist.group.WORLD)
    got = results(torch.compile(model, backend="aot_eager"), tokens)
    check({name.removeprefix("_orig_mod."): value for name, value in got.items()}, expected)
    close_pools()


@stress_only  # it takes half a minute
def test_compiled_model_equals_the_whole_one() -> None:
    run_ranks(2, _compiled)


def _later(rank: int, world: int) -> None:
    """A style that only Transformers knows is applied by Transformers."""
    from transformers.integrations import tensor_parallel

    class Later(tensor_parallel.ColwiseParallel):
        pass

    layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    tensor_parallel.ALL_PARALLEL_STYLES.register("later", Later(**layouts))
    model = build("llama")
    replace_linears(model, model.tp_plan | {"lm_head": "later"}, mesh=dist.group.WORLD)
    assert type(model.lm_head) is torch.nn.Linear and isinstance(model.lm_head.weight, DTensor)
    assert "style 'later' of lm_head: applied by Transformers itself" in eligible._said
    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    check(results(model, tokens), results(reference("llama"), tokens))
    close_pools()


def test_style_of_a_later_transformers() -> None:
    run_ranks(2, _later)


def _adapted(rank: int, world: int) -> None:
    import peft

    def adapt(model: Any) -> Any:
        torch.manual_seed(2)
        layers = ["q_proj", "o_proj", "up_proj", "down_proj"]
        settings = peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        return peft.get_peft_model(model, settings).eval()

    def trained(model: Any) -> dict[str, torch.Tensor]:
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        return {"logits": whole(out.logits).detach(), **grads}

    tokens = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = adapt(build("llama"))
    with pytest.raises(ValueError, match="then wrap the model with PEFT"):
        replace_linears(expected, mesh=dist.group.WORLD)
    want = trained(expected)
    got = trained(adapt(replace_linears(build("llama"), mesh=dist.group.WORLD)))
    check(got, want)
    close_pools()


def test_adapters_on_fused_layers() -> None:
    pytest.importorskip("peft", minversion="0.21", reason="needs peft: make clients")
    run_ranks(2, _adapted)


def _refused(rank: int, world: int) -> None:
    group = dist.group.WORLD
    model = build("llama")
    with pytest.raises(ValueError, match="has 4 heads, which 3 ranks cannot share"):
        replace_linears(model, {"model.layers.*.self_attn.k_proj": "colwise"}, mesh=group)
    tokens = torch.arange(12)[None]
    expected = model(tokens).logits.detach()
    plan = {"lm_head": "colwise_rep", "model.norm": "folded", "model.embed_tokens": "folded"}
    replace_linears(model, plan, mesh=group)
    assert type(model.model.embed_tokens) is torch.nn.Embedding
    torch.testing.assert_close(whole(model(tokens).logits).detach(), expected)
    for name in ("model.norm", "model.embed_tokens"):
        assert any(f"{name} stays whole" in text and "'folded'" in text for text in eligible._said)
    close_pools()


def test_plan_that_cannot_be_applied_raises() -> None:
    run_ranks(3, _refused)


def documented(start: str) -> str:
    """Return the page's piece of Python that starts so."""
    page = (ROOT / "docs" / "use" / "transformers.md").read_text(encoding="utf-8")
    pieces = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return next(piece for piece in pieces if piece.startswith(start))


def _trained(rank: int, world: int, path: str) -> list[list[float]]:
    """Return losses and norms of gradients of Transformers' Trainer, and of the saved weights."""
    import accelerate
    from accelerate.state import AcceleratorState

    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 2,
        "optim": "sgd",
        "gradient_checkpointing": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    trainers = []

    def trainer(*args: Any, **kwargs: Any) -> Any:
        trainers.append(transformers.Trainer(*args, **kwargs))
        return trainers[0]

    rng = torch.Generator().manual_seed(3)
    rows = [{"input_ids": torch.randint(1, 101, (9,), generator=rng)} for _ in range(16)]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
        row["labels"][: len(rows) // 4] = -100
    quick = partial(transformers.TrainingArguments, **settings)
    names = {"accelerate": accelerate, "TrainingArguments": quick, "Trainer": trainer, "rows": rows}
    processes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    histories = []
    for kind in ("own", "sharded")[:world]:
        folder = f"{path}/{kind}{world}"
        if world == 1:
            model, environment = build("tied"), {}
        else:
            model = build("tied") if kind == "own" else sharded(rank, "tied", f"{folder}w")
            replace_linears(model, mesh=dist.group.WORLD)
            environment = {name: str(value) for name, value in processes.items()}
        recipe = documented("class Parallelism").replace("tp_size=2", f"tp_size={world}")
        with mock.patch.dict(os.environ, environment):
            try:
                # Global, because the Trainer pickles the class.
                globals().update(names, model=model, folder=folder)
                exec(recipe, globals())
            finally:
                AcceleratorState._reset_state(True)
        logs = [log for log in trainers.pop().state.log_history if "grad_norm" in log]
        dist.barrier()
        saved = type(model).from_pretrained(f"{folder}/checkpoint-2").parameters()
        norms = [float(parameter.norm()) for parameter in saved]
        histories.append([v for log in logs for v in (log["loss"], log["grad_norm"])] + norms)
        assert len(logs) == 2
    close_pools()
    return histories


def test_trainer_equals_that_of_the_whole_model(tmp_path: Path) -> None:
    """With accumulation, checkpointing, clipped gradients and saved weights."""
    pytest.importorskip("accelerate", minversion="1.12", reason="needs accelerate: make clients")
    whole = run_ranks(1, _trained, str(tmp_path))[0][0]
    for histories in run_ranks(2, _trained, str(tmp_path)):
        assert len(histories) == 2
        for history in histories:
            assert history == pytest.approx(whole, rel=1e-4)


def test_quickstart_runs(tmp_path: Path) -> None:
    quickstart = documented("import torch")
    assert len(quickstart.splitlines()) <= 12
    path = tmp_path / "quickstart.py"
    path.write_text(quickstart, encoding="utf-8")
    first, second = run_script(path, ranks=2).splitlines()
    assert first == second and first.count(",") == 10
