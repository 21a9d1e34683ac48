"""Models as they are: files of other programs, embedding and head, recomputation, ZeRO, stages."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_runs
import pytest

from flux.bench.model_files import model_of, torchtitan_configs, torchtitan_models
from flux.bench.shapes import Delta, Latent, Layer, Moe
from flux.core.datafile import data_root
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.command import title_of
from flux.plan.compare import compared
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric, GroupSpan
from flux.plan.graph import Graph
from flux.plan.model import Parallel, TrainingStep, even_split, serving_step, step_of
from flux.plan.picture import page
from flux.plan.policies import planned, policy_of
from flux.plan.report import document
from flux.plan.sample import StepLayout
from flux.plan.simulate import simulate

PARAMETERS = {
    "llama-3.1-8b": 8.03e9,
    "qwen2.5-7b": 7.62e9,
    "qwen3-30b-a3b": 30.5e9,
    "mistral-7b": 7.24e9,
    "mixtral-8x7b": 46.7e9,
    "gemma-2-9b": 9.24e9,
    "phi-3-mini": 3.82e9,
    "deepseek-v3": 671e9,
    "gpt-oss-20b": 20.9e9,
    "olmo-2-7b": 7.30e9,
    "gpt2": 0.124e9,
    "gemma-3-27b": 27.01e9,  # of its text_config: without its 0.42 for pictures
    "glm-4.5-air": 106.9e9,
    "llama-4-maverick": 400.7e9,  # of its text_config
}
"""As the models' pages say."""
ACTIVE = {"deepseek-v3": 37e9, "gpt-oss-20b": 3.61e9, "glm-4.5-air": 12.8e9, "mixtral-8x7b": 12.8e9}
DENSE = Layer(64, 256, 8, 4, 8, True)
EXPERTS = Layer(64, 256, 8, 8, 8, True, Moe(8, 2, 32, 32))
LATENT = Layer(64, 256, 8, 8, 12, True, Moe(8, 2, 32), Latent(16, 8, 4, 8))
WINDOW = Layer(64, 256, 8, 4, 8, False, window=16, full_every=2)
DELTA = Layer(64, 256, 8, 4, 8, True, full_every=2, delta=Delta(4, 8, 8, 16, 4), gate=True)
TURNS = replace(EXPERTS, moe=Moe(8, 2, 32, 32, every=2), window=24, full_every=4, chunked=True)


def step_with(layer: Layer = DENSE, layers: int = 4, **changes: Any) -> TrainingStep:
    own = {key: changes.pop(key) for key in list(changes) if key in Parallel.__annotations__}
    sequence_parallel = own.pop("sequence", False)
    step = TrainingStep(
        *("test", layer, layers, "bfloat16", Parallel(**own, sequence=sequence_parallel)),
        *(64, 4, 3),
        vocabulary=512,
    )
    return replace(step, **changes)


def graph_of(step: TrainingStep) -> tuple[Graph, Fabric]:
    fabric = Fabric(load_cluster("flux-h800"), step.parallel)
    return build_step(step, fabric), fabric


# -- files of other programs -----------------------------------------------------------------------


def test_every_shipped_config_is_tested() -> None:
    assert {file.stem for file in (data_root() / "hub").glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_config_has_the_parameters_of_its_model_and_is_planned(name: str) -> None:
    model = model_of(name)
    assert model.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    assert model.active == pytest.approx(ACTIVE.get(name, model.active), rel=0.015)
    ep = 8 if model.layer.moe else 1
    step = step_of(name, Parallel(dp=8, ep=ep), sequence=512, zero=3, recompute="full")
    cluster = load_cluster("flux-h800")
    assert f"{name}, {model.size}, {model.layers} layers" in title_of(step, cluster.name)
    ((_, timeline, _),) = compared([("serial", {})], step, cluster)
    assert timeline is not None
    row = document("serial", step, cluster, timeline)
    assert 0 < row["mfu"] < 1 and row["tokens_per_s"] > 0 and row["idle_ms"] >= 0
    assert sum(row["memory_bytes"].values()) == pytest.approx(row["peak_memory_bytes"])


def test_weights_in_float32_have_no_copy() -> None:
    whole, half = (step_with(dtype=dtype).resident(0) for dtype in ("float32", "bfloat16"))
    assert whole["weights"] == 2 * half["weights"]
    assert whole["optimizer"] == 2 * whole["weights"] == half["optimizer"] * 2 / 3


def test_a_title_says_parameters_and_active_ones() -> None:
    assert model_of("deepseek-v3").size == "671B parameters (36.6B active)"
    assert model_of("gpt2").size == "0.124B parameters"


def config(tmp_path: Path, **changes: Any) -> str:
    content = json.loads((data_root() / "hub" / "llama-3.1-8b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content | changes))
    return str(path)


def test_a_model_may_be_the_folder_of_its_config(tmp_path: Path) -> None:
    of_file = model_of(config(tmp_path, _name_or_path=None))
    assert model_of(tmp_path) == of_file and of_file.name == tmp_path.name
    with pytest.raises(ValueError, match=r"no file nothing; shapes .*; models of the hub: .*gpt2"):
        model_of("nothing")
    with pytest.raises(ValueError, match=r"^a{300}: File name too long$"):
        model_of("a" * 300)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vision_config": {"depth": 2}}, "a tower for pictures; plan the language model"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder"),
        ({"model_type": "mamba", "state_size": 16}, "state-space layers"),
        ({"conv_L_cache": 3}, "convolutions"), ({"index_topk": 8}, "an indexer chooses"),
        ({"model_type": "bert", "type_vocab_size": 2}, "an encoder, and plans know decoders"),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, "state-space layers or recurrent"),
        ({"model_type": "phi3_v", "img_processor": {"name": "clip"}}, "a tower for pictures"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, "expected 32, one for"),
        (
            {"model_type": "ernie4_5_moe", "num_experts": 8, "num_experts_per_tok": 2,
             "moe_layer_end_index": 9}, "moe_layer_end_index: expected 31",
        ),
        (
            {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2,
             "moe_layers": [1, 3]}, "moe_layers: expected the last of every 1 layers",
        ),
        ({"model_type": "youtu"}, "kv_lora_rank: missing"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
            "moe_intermediate_size: missing",
        ),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"sliding_window": 8, "sliding_window_pattern": "GL"}, "expected a pattern as LLLG"),
        ({"model_type": "nobody"}, "'nobody' is not known; known are apertus"),
        ({"num_key_value_heads": 5}, "must divide 32 heads, got 5"),
        ({"hidden_size": "wide"}, "hidden_size: expected an integer"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9}, "at most 8"),
        (
            {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2,
             "mlp_only_layers": [3]}, "expected leading layers alone",
        ),
        ({"layer_types": ["linear_attention"]}, "the model has 'linear_attention'"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, "expected 0"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "as wide as hidden_size = 4096"),
        (
            {"model_type": "dots1", "num_experts": 8, "num_experts_per_tok": 2,
             "moe_layer_freq": 2}, "moe_layer_freq: expected 1",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_plan_cannot_have_is_refused_in_words(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(config(tmp_path, **changes))


QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    "parameters, content",
    [
        (3.880e9, {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                   "num_hidden_layers": 34, "sliding_window": 1024}),
        (6.65e9, {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
                  "expansion_ratio": 4, "vocab_size": 50432, "attn_config": {"alibi": True}}),
        (131.6e9, {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
                   "vocab_size": 100352, "attn_config": {"kv_n_heads": 8}, "ffn_config": {
                       "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}),
        (3.075e9, {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
                   "num_attention_heads": 16, "num_hidden_layers": 36, "vocab_size": 128256}),
        (7.242e9, {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                   "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}),
        (21.83e9, {"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
                   "num_attention_heads": 20, "num_hidden_layers": 28, "vocab_size": 103424,
                   "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
                   "moe_intermediate_size": 1536, "moe_k": 6}),
        (6.922e9, {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                   "num_attention_heads": 71, "vocab_size": 65024}),
        (32.00e9, {"model_type": "exaone4", "hidden_size": 5120, "intermediate_size": 27392,
                   "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
                   "vocab_size": 102400, "sliding_window": 4096,
                   "sliding_window_pattern": "LLLG"}),
        (29.94e9, {"model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
                   "num_hidden_layers": 47, "num_attention_heads": 20, "vocab_size": 154880,
                   "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
                   "qk_rope_head_dim": 64, "v_head_dim": 256, "num_shared_experts": 1,
                   "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
                   "mlp_layer_types": ["dense"] + ["sparse"] * 46}),
        (79.67e9, QWEN3_NEXT),
        (30.53e9, {"model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "head_dim": 128,
                   "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                   "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                   "intermediate_size": 6144, "vocab_size": 151936, "mlp_only_layers": []}),
        (7.616e9, {"model_type": "qwen2_5_vl_text", "hidden_size": 3584, "vocab_size": 152064,
                   "intermediate_size": 18944, "num_hidden_layers": 28, "sliding_window": 32768,
                   "num_attention_heads": 28, "num_key_value_heads": 4}),
        (176.2e9, {"model_type": "bloom", "n_embed": 14336, "num_attention_heads": 112,
                   "n_layer": 70, "vocab_size": 250880}),
        (4.460e9, {"model_type": "falcon", "hidden_size": 4096, "ffn_hidden_size": 12288,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_keys_that_a_config_leaves_out_are_those_of_transformers(
    parameters: float, content: dict[str, Any], tmp_path: Path
) -> None:
    """Parts of a saved model, such as text_config, have only what differs from its class."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    assert model_of(file).parameters == pytest.approx(parameters, rel=0.001)


def test_windows_and_dropout_are_those_of_transformers_if_a_file_leaves_them_out(
    tmp_path: Path,
) -> None:
    for kind in ("qwen2", "qwen3"):  # use_sliding_window is false by default
        assert not model_of(config(tmp_path, model_type=kind, sliding_window=1024)).layer.window
    asked = config(tmp_path, model_type="qwen2", sliding_window=1024, use_sliding_window=True)
    assert model_of(asked).layer.window == 1024
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    layer = model_of(config(tmp_path, model_type="gpt_oss", **experts)).layer
    assert (layer.window, layer.full_every) == (128, 2)
    for dropout in (0.0, 0.1):
        made = model_of(config(tmp_path, model_type="bloom", hidden_dropout=dropout))
        assert made.layer.dropout == bool(dropout)


def test_linear_attention_takes_as_long_however_long_a_sequence_is(tmp_path: Path) -> None:
    """The rule's multiplications: those of a loop over chunks, as flash-linear-attention has it."""
    chunk, keys, values = 64, 128, 128
    inside = chunk * (3 * keys + 2 * values)  # K K', Q K', T K, T V, A V
    state = 3 * keys * values  # W S, Q S, K' V
    delta = Delta(16, 32, keys, values, 4)
    assert delta.operations == 32 * (inside + state)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_NEXT))
    steps = [
        step_of(file, Parallel(dp=8, ep=8), layers=3, sequence=length, micro_batch=65536 // length)
        for length in (4096, 65536)
    ]
    assert steps[0].operations == steps[1].operations
    whole = step_of(file, Parallel(dp=8, ep=8), zero=3)
    ((_, timeline, _),) = compared([("serial", {})], whole, load_cluster("llama3-h100"))
    assert timeline is not None and timeline.iteration_ms > 0
    for change, problem in (({"tp": 8}, "linear attention's heads = 4"), ({"cp": 2}, "cp = 2")):
        with pytest.raises(ValueError, match=problem):
            step_with(DELTA, **change)
    with pytest.raises(ValueError, match="linear attention is not planned with inference"):
        serving_step(whole, decodes=True)


def test_a_cache_holds_windows_and_chunks() -> None:
    for name, full, others, window, width in (
        *(("gemma-3-27b", 10, 52, 1024, 2 * 16 * 128), ("glm-4.5-air", 46, 0, 1, 2 * 8 * 128)),
        ("llama-4-maverick", 12, 36, 8192, 2 * 8 * 128),
    ):
        serving = serving_step(step_of(name, Parallel(tp=2)), decodes=True)
        for tokens in (100, 1024, 20000):
            kept = full * tokens + others * min(window, tokens)
            assert serving.cache_bytes(tokens) == kept * width  # two bytes, halves of two ranks
        sees = {tokens: replace(serving, sequence=tokens).keys(0) for tokens in (8192, 8193)}
        if name.startswith("llama-4"):
            assert sees == {8192: 8192, 8193: 1}


def test_chunks_see_what_is_before_a_token_in_its_own() -> None:
    for sequence in (1, 23, 24, 25, 64, 96):
        pairs = sum(token % 24 + 1 for token in range(sequence))
        assert TURNS.visible(0, sequence) == pytest.approx(pairs - sequence / 2)
        assert TURNS.visible(3, sequence) == sequence**2 / 2


def test_windows_alternate_as_the_config_says(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"]
    made = model_of(config(tmp_path, sliding_window=1024, layer_types=types * 8))
    assert (made.layer.window, made.layer.full_every) == (1024, 4)
    assert made.layer.visible(0, 8192) == 8192 * 1024 - 1024**2 / 2
    assert made.layer.visible(3, 8192) == 8192**2 / 2


def test_options_of_megatron_and_torchtitan_are_models(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "MODEL=(\n  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 \\\n"
        "  --num-attention-heads 128 --swiglu --seq-length 4096 --vocab-size 129280\n"
        "  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512\n"
        "  --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8\n"
        "  --moe-shared-expert-intermediate-size 2048 --moe-layer-freq '([0]*3+[1]*58)'\n"
        "  --untie-embeddings-and-output-weights # as published\n)\n"
    )
    made, known = model_of(script), model_of("deepseek-v3")
    assert made.parameters == known.parameters and made.layers == known.layers
    assert replace(made.layer, dropout=False) == known.layer
    for pattern, turns in (("([0]*1+[1]*1)*2", (0, 2)), ("[0,1,1,1]", (1, 1)), ("([1]*4)", (0, 1))):
        script.write_text(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
            f"--num-experts 4 --moe-layer-freq '{pattern}'"
        )
        made = model_of(script)
        assert made.layer.moe and (made.dense_layers, made.layer.moe.every) == turns
    for pattern in ("2", "[1,0]*2", "([0]*2+[1]*1)", "(" + "[1]*9999+" * 99 + "[1])*9999"):
        script.write_text(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
            f"--num-experts 4 --moe-layer-freq '{pattern}'"
        )
        with pytest.raises(ValueError, match="the last of every so many of 4 layers"):
            model_of(script)
    script.write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --quick-geglu"
    )
    assert model_of(script).layer == Layer(64, 256, 4, 4, 16, True)
    script.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 5 --seq-length 8")
    with pytest.raises(ValueError, match="--num-attention-heads: must divide 64, got 5"):
        model_of(script)
    script.write_text("--num-layers 4 --hidden-size x --num-attention-heads 4 --seq-length 8")
    with pytest.raises(ValueError, match="--hidden-size: expected a size, got 'x'"):
        model_of(script)
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\n')
    assert model_of(job) == replace(model_of("llama3_8B"), sequence=2048)
    job.write_text('[model]\nname = "llama3"\nflavor = "9B"\n[training]\n')
    with pytest.raises(
        ValueError, match="'llama3_9B' is not known; give --model FILE, or one of ll"
    ):
        model_of(job)


def test_flavors_of_torchtitan_have_its_parameters() -> None:
    """tests/clients compares them with torchtitan, where it is installed."""
    flavors = torchtitan_models()
    for name, content in flavors.items():
        if "parameters" in content:
            bound = 0.003 if "debug" in name else 0.0006  # biases and norms are not counted
            assert model_of(name).parameters == pytest.approx(content["parameters"], rel=bound)
    for config in torchtitan_configs().values():
        assert f"{config['module']}_{config['flavor']}".lower() in flavors
    maverick, scout = model_of("llama4_17bx128e_irope"), model_of("llama4_17bx16e")
    known = model_of("llama-4-maverick")
    assert replace(maverick, name="", sequence=0) == replace(known, name="", sequence=0)
    assert scout.parameters == pytest.approx(107.77e9, rel=0.001) and not scout.layer.window


# -- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [DENSE, EXPERTS, LATENT, WINDOW, TURNS, DELTA], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operators_do_the_work_that_mfu_counts(layer: Layer, recompute: str) -> None:
    dense = 1 if layer.moe else 0
    tensor = 1 if layer.moe else 2
    step = step_with(layer, tp=tensor, pp=2, dp=2, dense_layers=dense, recompute=recompute)
    work = again = 0.0
    for op in graph_of(step)[0].ops:
        flops = 0.0
        if op.kind == "gemm":
            flops = 2.0 * op.shape[0] * op.shape[1] * op.shape[2]
        elif op.kind == "attention":
            batch, heads, queries, keys, dim = op.shape
            flops = 2.0 * batch * heads * queries * keys * dim * (2 if op.role == "dgrad" else 1)
        if op.role == "recompute":
            again += flops
        else:
            work += flops
    ranks = step.parallel.world / step.parallel.pp
    assert work * ranks == pytest.approx(step.operations, rel=1e-9)
    head = 6.0 * step.vocabulary * layer.hidden * step.batch_tokens
    layers = (step.operations - head) / 3
    assert again * ranks == pytest.approx(layers if recompute == "full" else 0.0, rel=1e-9)


def draws(count: int) -> list[TrainingStep]:
    rng = random.Random(43)
    choices = list(
        itertools.product(
            (DENSE, EXPERTS, LATENT, WINDOW, DELTA),
            ({}, {"tp": 4, "dp": 2}, {"tp": 2, "cp": 2, "pp": 2}, {"pp": 2, "dp": 4, "ep": 4}),
            (False, True),
            (0, 1, 2, 3),
            ("none", "selective", "ops", "act", "full", "1"),
            (False, True),
        )
    )
    steps = []
    for layer, degrees, sequence, zero, recompute, flag in rng.sample(choices, len(choices)):
        if (layer.moe is None and "ep" in degrees) or (layer.delta and "cp" in degrees):
            continue
        steps.append(
            step_with(
                layer,
                **degrees,
                sequence=sequence,
                zero=zero,
                reduce_every=1 + (zero == 2 and flag),
                recompute=recompute,
                tied=flag,
                eager=flag,
                fp32_gradients=flag,
                regather=sequence,
                unfused_attention=not flag,
                cp_kind="ring" if flag else "all_gather",
            )
        )
        if len(steps) == count:
            break
    return steps


def test_what_is_allocated_is_freed() -> None:
    for step in draws(120):
        ops = graph_of(step)[0].ops
        total = sum(op.allocates for op in ops)
        assert sum(op.allocates - op.frees for op in ops) == pytest.approx(0, abs=1e-6 * total)


@pytest.mark.parametrize(
    "name, options",
    [
        *(("serial", {}), ("domino", {"slices": 2}), ("wavelet", {}), ("zbv", {})),
        ("centauri", {"operation": False}),
    ],
    ids=str,
)
def test_policies_schedule_head_and_recomputation(name: str, options: dict[str, Any]) -> None:
    refused = ("tp is 1", "gathers of weights", "layers here differ", "is a pipeline", "at least")
    planned_steps = 0
    for step in draws(16):
        graph, fabric = graph_of(step)
        cost = AnalyticCost(fabric, step.dtype, step.itemsize)
        try:
            timeline = simulate(planned(policy_of(name, options), graph, fabric, cost), cost)
        except ValueError as error:
            assert any(words in str(error) for words in refused), (step, error)
            continue
        planned_steps += 1
        assert timeline.iteration_ms >= timeline.compute_ms - 1e-6
    assert planned_steps >= 2


def test_what_is_computed_again_is_there_before_it_is_gathered_and_drawn() -> None:
    step = step_with(layers=1, tp=4, sequence=True, regather=True, recompute="full")
    graph, fabric = graph_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    schedule = planned(policy_of("serial"), graph, fabric, cost)
    names = {
        op.name: [schedule.graph.ops[dep].name for dep in deps]
        for op, deps in zip(schedule.graph.ops, schedule.graph.deps, strict=True)
    }
    for norm, gather in (("ln1", "ag1"), ("ln2", "ag2")):
        before = names[f"L0.{gather}.w.m0"]
        assert f"L0.{norm}.r.m0" in before and f"L0.{norm}.m0" not in before
    assert "GEMM, again" in page("a step", [("serial", simulate(schedule, cost))])


def peak_gb(step: TrainingStep) -> float:
    graph, fabric = graph_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    return simulate(planned(policy_of("serial"), graph, fabric, cost), cost).peak_memory_bytes


def test_recomputation_and_zero_save_memory() -> None:
    base = step_with(tp=2, dp=4, sequence=True, regather=True)
    kinds = ["none", "selective", "act", "ops", "full"]
    peaks = [peak_gb(replace(base, recompute=kind)) for kind in kinds]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    assert peaks[0] == peaks[1]  # flash attention keeps nothing that Megatron computes again
    assert peak_gb(replace(base, recompute="2")) == pytest.approx(
        (peaks[0] + peaks[-1]) / 2, rel=0.1
    )
    of_zero = [sum(replace(base, zero=zero).resident(0).values()) for zero in (0, 1, 2, 3)]
    assert of_zero == sorted(of_zero, reverse=True) and len(set(of_zero)) == 4


def test_selective_recomputation_keeps_what_its_paper_says() -> None:
    """34 s b h / t bytes of a layer (arXiv 2205.05198, section 5): attention's output stays."""
    sizes: dict[str, Any] = {"sequence": 2048, "micro_batch": 2, "unfused_attention": True}
    parallel = Parallel(tp=8, sequence=True)
    few, more = (
        step_of("gpt3-175b", parallel, layers=layers, recompute="selective", **sizes)
        for layers in (4, 8)
    )
    grown = [peak_gb(step) - sum(step.resident(0).values()) for step in (few, more)]
    assert (grown[1] - grown[0]) / 4 == pytest.approx(34 * 2048 * 2 * 12288 / 8, rel=1e-3)


def test_kinds_of_memory_are_those_of_a_folded_pipeline() -> None:
    """With one data parallel rank ZeRO changes nothing; Adam's states are six times weights."""
    cluster, kinds = load_cluster("flux-h800"), []
    for zero in (0, 1):
        step = step_of("llama3-8b", Parallel(pp=4), layers=8, sequence=512, zero=zero, head=True)
        timeline = StepLayout(cluster, step).timeline(policy_of("zbv"))
        kinds.append(document("zbv", step, cluster, timeline)["memory_bytes"])
    assert kinds[0] == pytest.approx(kinds[1])
    assert kinds[0]["optimizer"] == pytest.approx(6 * kinds[0]["weights"])


def test_gradients_of_consecutive_micro_batches_are_reduced_together() -> None:
    step = step_with(layers=4, dp=4, micro_batches=5, zero=2, reduce_every=2)
    graph, _ = graph_of(step)
    sums = [n for n, op in enumerate(graph.ops) if op.name.startswith("L3.grads.w")]
    of = [{graph.ops[dep].micro for dep in graph.deps[number]} for number in sums]
    assert of == [{0, 1}, {2, 3}, {4}]
    each = replace(step, reduce_every=1)
    more = peak_gb(step) - peak_gb(each)  # of the other layers: all have been summed up once
    held = 2 * (4 * step.weights_of(0) + 2 * step.table_weights)
    assert 0.5 * held < more <= held
    folded = replace(step, parallel=replace(step.parallel, pp=2))
    graph, fabric = graph_of(folded)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    for name in ("dhelix", "dualpipev"):  # whose backward passes are not all alike
        assert simulate(planned(policy_of(name), graph, fabric, cost), cost).iteration_ms > 0
    with pytest.raises(ValueError, match="reduce_every = 2 needs zero = 2, got zero = 1"):
        replace(step, zero=1)


def test_a_pipeline_may_have_embedding_and_head_on_stages_of_their_own() -> None:
    """Llama 3's first and last stage (arXiv 2407.21783, section 3.3.2)."""
    step = step_with(layers=14, pp=4, dp=2, micro_batches=8, zero=2, reduce_every=4)
    graph, fabric = graph_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    schedule = planned(policy_of("interleaved", {"chunks": 4}), graph, fabric, cost)
    made = schedule.graph
    for op in made.ops:
        if op.is_outer:
            assert op.stage == (0 if op.place == 0 else 3), op.name
        elif op.kind != "send":
            assert op.stage == (op.layer + 1) % 4, op.name
    for rank in range(4):
        of_rank = [op.allocates - op.frees for op in made.ops if op.stage == rank]
        assert sum(of_rank) == pytest.approx(0, abs=1)
    assert schedule.rows()[0][:2] == ["0F0", "0F1"] and "15B0" in schedule.rows()[3]
    assert simulate(schedule, cost).iteration_ms > 0
    for other, words in (
        (replace(step, zero=3, reduce_every=1), "16 stages must divide 14"),
        (replace(step, vocabulary=0), "16 stages must divide 14"),
        (replace(step, layers=13), "16 stages must divide 13"),
    ):
        with pytest.raises(ValueError, match=words):
            planned(policy_of("interleaved", {"chunks": 4}), graph_of(other)[0], fabric, cost)


def test_the_first_rank_of_a_folded_pipeline_has_embedding_and_head() -> None:
    step = step_with(layers=8, pp=4, micro_batches=8)
    graph, fabric = graph_of(step)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    inner = sum(step.resident(1).values())
    table = sum(step.resident(0).values()) - inner
    folded = planned(policy_of("zbv"), graph, fabric, cost).graph
    assert folded.resident_by_stage == pytest.approx([inner + 2 * table, *[inner] * 3])
    assert graph.resident_by_stage == pytest.approx([inner + table, inner, inner, inner + table])


@pytest.mark.parametrize(("model", "tp"), [("deepseek-v3", 8), ("llama3-8b", 16), ("gpt-6.7b", 8)])
def test_a_rank_holds_the_weights_that_its_gemms_read(model: str, tp: int) -> None:
    """Each rank has the down-projections of compressed attention whole, and a KV head."""
    step = step_of(model, Parallel(tp=tp), layers=1)
    cluster = replace(load_cluster("llama3-h100"), hosts=2)
    graph = build_step(step, Fabric(cluster, step.parallel))
    gemms = (op for op in graph.ops if op.kind == "gemm" and op.role == "fwd")
    assert sum(op.shape[1] * op.shape[2] for op in gemms) == step.weights_of(0)
    assert step.resident(0)["weights"] == 2 * step.weights_of(0)


def test_experts_are_shared_by_fewer_ranks_than_other_weights() -> None:
    """Each of mixtral-8x7b's 8 experts is on dp / ep = 2 ranks, which share its states."""
    step = step_of("mixtral-8x7b", Parallel(dp=16, ep=8), layers=1)
    experts = 3 * 4096 * 14336
    others = step.weights_of(0) - experts
    shared = others / 16 + experts / 2
    assert step.resident(0)["optimizer"] == pytest.approx(12 * shared)
    sharded = replace(step, zero=3).resident(0)
    assert sharded["weights"] == pytest.approx(2 * shared)
    assert sharded["gradients"] == pytest.approx(2 * shared)
    alone = step_of("mixtral-8x7b", Parallel(dp=8, ep=8), layers=1).resident(0)
    assert alone["optimizer"] == pytest.approx(12 * (others / 8 + experts))
    for sequence, ranks in ((False, 1), (True, 2)):  # tensor parallel ranks with other tokens
        both = Parallel(tp=2, dp=8, ep=8, sequence=sequence)
        step = step_of("mixtral-8x7b", both, layers=1)
        others = step.weights_of(0) - experts
        assert step.resident(0)["optimizer"] == pytest.approx(12 * (others / 8 + experts / ranks))
        graph, _ = graph_of(step)
        sums = [op for op in graph.ops if op.part == "grads_experts"]
        assert len(sums) == sequence


def test_experts_are_spread_over_neighbours_as_in_megatron() -> None:
    """With other tokens on each tensor parallel rank AllToAll of 8 ranks stays in a host of 8."""
    near = Parallel(tp=4, dp=4, ep=8, sequence=True)
    fabric = Fabric(replace(load_cluster("llama3-h100"), hosts=2), near)
    assert fabric.span("ep") == GroupSpan(8, 8, 1) and fabric.span("edp") == GroupSpan(2, 1, 2)
    step = step_of("mixtral-8x7b", near, layers=1, sequence=4096)
    (tokens, *_) = (op for op in build_step(step, fabric).ops if op.part == "dispatch")
    assert tokens.resource == "intra" and tokens.shape == (4096 // 4 * 2, 4096)
    assert step.expert_weights_of(0) == 3 * 4096 * 14336
    far = Fabric(load_cluster("llama3-h100"), Parallel(tp=4, dp=8, ep=8))
    assert far.span("ep") == GroupSpan(8, 2, 4)
    for parallel in ({"sequence": True, "ep": 16}, {"ep": 8}):
        with pytest.raises(ValueError, match=r"must divide (tp cp dp = 8|dp = 2)"):
            Parallel(tp=4, dp=2, **parallel)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_context_parallel_ranks_sum_up_gradients_and_share_states(zero: int) -> None:
    """As much as data parallel ones: they have the same weights, and other tokens."""
    steps = [step_with(dp=dp, cp=cp, layers=2, zero=zero) for dp, cp in ((1, 4), (4, 1), (2, 2))]
    moved = []
    for step in steps:
        graph, fabric = graph_of(step)
        assert fabric.span("dp").size == 4
        ops = [op for op in graph.ops if op.moves_weights]
        moved.append([(op.name, op.kind, op.group, op.shape) for op in ops])
    assert moved[0] == moved[1] == moved[2] != []
    assert steps[0].resident(0) == steps[1].resident(0) == steps[2].resident(0)


def test_stages_are_as_even_as_possible() -> None:
    assert even_split(126, 16) == (7, *(8,) * 14, 7)
    assert even_split(8, 4) == (2,) * 4 and even_split(7, 4) == (2, 2, 2, 1)
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            split = even_split(layers, stages)
            assert sum(split) == layers and max(split) - min(split) <= 1 <= min(split)
    step = step_with(layers=6, pp=4, split=(1, 2, 2, 1))
    graph, _ = graph_of(step)
    assert [len({op.layer for op in graph.ops if op.stage == n and op.layer >= 0})
            for n in range(4)] == [1, 2, 2, 1]  # fmt: skip
    with pytest.raises(ValueError, match="split must have 4 stages with 6 layers"):
        step_with(layers=6, pp=4, split=(1, 2, 2))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recompute": "some"}, "recompute must be one of none, selective, ops, act, full"),
        ({"optimizer": "magic"}, "optimizer must be one of adam"),
        ({"gemm_dtype": "int4"}, "gemm_dtype must be one of"),
        ({"dense_layers": 1}, "dense_layers are of models with experts"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_with(**changes)


def test_float8_speeds_gemms_of_layers_and_costs_casts() -> None:
    step = step_of("llama3-8b", Parallel(dp=8), zero=3)
    graph, fabric = graph_of(replace(step, layers=1))
    half, small = AnalyticCost(fabric, "bfloat16", 2), None
    small = AnalyticCost(fabric, "bfloat16", 2, gemm_dtype="float8_e4m3fn")
    for op in graph.ops:
        ratio = small.solo(op) / half.solo(op)
        if op.kind == "gemm" and op.part != "head":
            assert 0.5 < ratio < 1, op
        else:
            assert ratio == 1, op


def test_float8_is_refused_on_devices_without_it() -> None:
    """It had the speed of float64: a step of an A100 took 19 times as long, without a word."""
    step = replace(step_of("llama3-8b", Parallel(tp=8)), gemm_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="states no speed of float8_e4m3fn"):
        StepLayout(load_cluster("selene"), step)


# -- published runs --------------------------------------------------------------------------------

CONTENT: dict[str, Any] = json.loads(published_runs.RESULT.read_text(encoding="utf-8"))


def test_published_runs_are_within_15_per_cent_or_have_a_cause() -> None:
    assert [entry["name"] for entry in CONTENT["runs"]] == [r.name for r in published_runs.RUNS]
    for entry in CONTENT["runs"]:
        far = abs(entry["off_with_causes"]) > 0.15
        assert far == bool(entry["unexplained"]), (entry["name"], entry["off_with_causes"])
        assert far or abs(entry["off"]) <= 0.26, (entry["name"], entry["off"])
        assert (entry["off"] != entry["off_with_causes"]) == bool(entry["besides"])
        assert entry["fits"] and entry["peak_gb"] < 80, entry["name"]
    assert sum(bool(entry["unexplained"]) for entry in CONTENT["runs"]) == 4


@pytest.mark.parametrize("place", [0, 6, -2], ids=lambda place: published_runs.RUNS[place].name)
def test_committed_predictions_are_those_of_today(place: int) -> None:
    entry = published_runs.entry_of(published_runs.RUNS[place])
    assert entry["ours"] == pytest.approx(CONTENT["runs"][place]["ours"], rel=1e-6)
