"""Models from the files of others: Transformers' config.json, torchtitan's and Megatron's options.

Only sizes are read. What a plan cannot have is refused in words: encoders, towers for pictures and
sound, state-space layers, convolutions. Attention is causal, and norms, biases and positions
are not counted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from flux.bench.shapes import Delta, Latent, Layer, Model, Moe, model_in
from flux.core.datafile import Table, data_root, find, load_json, one_line, shown

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo"),
    *("olmo2", "granite", "cohere", "cohere2", "stablelm", "smollm3", "glm", "glm4", "seed_oss"),
    *("ernie4_5", "hunyuan_v1_dense", "olmo3", "exaone4", "helium", "hyperclovax", "vaultgemma"),
    *("ministral", "minicpm3", "youtu", "qwen3_5_text", "internlm2", "baichuan"),
)
"""Kinds of config.json whose layers have attention and a gated MLP."""
_DROPOUT = ("gpt2", "gpt_neox", "gpt_bigcode", "starcoder2", "phi", "opt", "bloom", "gptj")
_DROPPED = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout")
UNGATED = (*_DROPOUT, "nemotron", "apertus", "arcee", "falcon", "mpt")
"""Those with a plain MLP; the first ones train with dropout, unless the file has 0 for it."""
_WIDE_EXPERTS = (
    *("mixtral", "phimoe", "gpt_oss", "olmoe", "granitemoe", "granitemoeshared", "minimax_m2"),
    *("llama4_text", "flex_olmo", "dbrx"),
)
"""Kinds whose intermediate_size is that of an expert."""
EXPERTS = (
    *(*_WIDE_EXPERTS, "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("kimi_k2", "ernie4_5_moe", "dots1", "solar_open", "glm4_moe_lite", "exaone_moe"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
"""Those with experts."""
_PARTS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Language models of others, which have the layers of a kind above."""
TIED = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "opt", "bloom", "gpt_bigcode", "cohere"),
    *("cohere2", "smollm3", "starcoder2", "ernie4_5_moe", "ernie4_5", "vaultgemma", "minicpm3"),
    *("youtu", "falcon", "mpt"),
)
"""Those whose head is the embedding if the file does not say it."""
ALTERNATING = {
    **dict.fromkeys(("gpt_oss", "gemma2", "vaultgemma"), 2),
    "gemma3_text": 6,
    **dict.fromkeys(("cohere2", "llama4_text", "olmo3", "exaone4", "exaone_moe"), 4),
}
"""Of so many layers one has no window, if the file does not say it."""
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3", "youtu")
_KV_HEADS = {
    2: ("glm", "glm4", "starcoder2", "ernie4_5"),
    4: ("gemma2", "gemma3_text", "smollm3", "qwen3_moe", "ernie4_5_moe", "vaultgemma"),
    8: (
        *("mistral", "mixtral", "phimoe", "gpt_oss", "glm4_moe", "seed_oss", "llama4_text"),
        *("ministral", "solar_open"),
    ),
    16: ("gemma", "qwen2_moe"),
    20: ("helium",),
    32: ("qwen2", "qwen3", "stablelm", "exaone4", "exaone_moe"),
}
_HEAD_DIM = {
    64: ("gpt_oss",),
    128: ("qwen3", "glm", "glm4", "seed_oss", "llama4_text", "ernie4_5", "helium", "solar_open"),
    256: ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_attention_heads": 8, "vocab_size": 262208, "sliding_window": 4096},
    "llama4_text": {"attention_chunk_size": 8192, "n_shared_experts": 1},
    "gemma2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128},
    **{
        kind: {"use_sliding_window": False}
        for kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
    },
    **{kind: {"sliding_window": 4096} for kind in ("mistral", "ministral", "olmo3", "vaultgemma")},
    "gpt_bigcode": {"multi_query": True},
}
"""What Transformers takes for keys that a file leaves out, as its saved parts of models do; with
heads of keys, and their width, where these are neither those of queries nor their share."""
_ALIASES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "num_experts_per_token", "moe_topk", "moe_top_k"),
    "n_shared_experts": ("moe_num_shared_experts", "num_shared_experts"),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "dtype": ("torch_dtype",),
}
_REFUSED = {
    "vision_config": "a tower for pictures; plan the language model: a file with its text_config",
    "audio_config": "a tower for sound; plan the language model: a file with its text_config",
    "text_config": "parts besides the language model; plan a file with its text_config",
    "img_processor": "a tower for pictures, and plans know language models",
    **dict.fromkeys(
        ("is_encoder_decoder", "type_vocab_size"), "an encoder, and plans know decoders"
    ),
    **dict.fromkeys(
        (
            *("state_size", "ssm_cfg", "attn_layer_period", "mamba_d_state", "ssm_state_size"),
            *("hybrid_override_pattern", "block_types"),
        ),
        "state-space layers or recurrent ones, and plans know attention",
    ),
    "conv_L_cache": "convolutions, and plans know attention",
    "index_topk": "attention to keys that an indexer chooses, and plans know windows",
}
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Kinds with linear attention, and gates in the other layers."""
_ATTENTION = ("full_attention", "chunked_attention", "sliding_attention")
SCRIPTS = (".sh", ".txt", ".args")
"""Endings of files with Megatron's options."""
_SEQUENCE = 8192
"""Tokens of a sequence that is trained on, at most, if the file gives only positions."""


def model_of(name: str | Path) -> Model:
    """Return a model.

    Args:
        name: of a file in `tuning/shapes` or `tuning/hub`, or of a flavor of torchtitan, such as
            llama3_8B; or a file: with a [layer] as there, a config.json of Transformers or the
            folder that it is in, a configuration of torchtitan, or Megatron's options.

    Raises:
        ValueError: no such file, wrong contents, or something that plans do not know; the message
            says what.
    """
    hub, flavor = data_root() / "hub", str(name).lower()
    of_hub = sorted(file.stem for file in hub.glob("*.json"))
    shipped = str(name) in of_hub
    known = shipped or str(name) in {file.stem for file in (hub.parent / "shapes").glob("*.toml")}
    if not known and flavor in torchtitan_models():
        return torchtitan_model(flavor, str(name))
    saved = Path(name) / "config.json"
    try:
        if not known and saved.is_file():  # a folder of Transformers
            file = saved
        else:
            file = hub / f"{name}.json" if shipped else find("shapes", name)
    except OSError as error:
        raise ValueError(f"{one_line(str(name))}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{error}; models of the hub: {', '.join(of_hub)}") from None
    if file.suffix == ".json":
        return from_config(file)
    if file.suffix in SCRIPTS:
        return from_megatron(file)
    top = Table.load(file)
    if "training" in top.keys and "layer" not in top.keys:
        return from_torchtitan(file)
    return model_in(file)


def from_config(file: Path) -> Model:
    """Return the model of a config.json of Transformers.

    Raises:
        ValueError: as ``model_of``.
    """
    try:
        content = load_json(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return _from_keys(content, file)


def _from_keys(content: Any, file: Path) -> Model:
    """Return the model that keys of Transformers describe."""
    what = "a config.json of Transformers"
    if isinstance(content, dict):
        for part in (content.get("attn_config"), content.get("ffn_config")):  # of MPT and DBRX
            content = (part if isinstance(part, dict) else {}) | content
        for key, others in _ALIASES.items():
            used = [other for other in others if other in content]
            if key not in content and used:
                content[key] = content[used[0]]
        if isinstance(kind := content.get("model_type"), str):
            content["model_type"] = _PARTS.get(kind, kind)
        content = _defaults(content.get("model_type")) | content
        if content.get("model_type") == "falcon" and content.get("multi_query", True):
            content |= {} if content.get("new_decoder_architecture") else {"num_key_value_heads": 1}
        content = {key: value for key, value in content.items() if value is not None}
    top = Table.of_json(file, content, what)
    for key, problem in _REFUSED.items():
        if content.get(key):
            top.fail(key, f"the model has {problem}")
    kind = top.text("model_type")
    if kind not in (*DENSE, *UNGATED, *EXPERTS):
        known = ", ".join(sorted((*DENSE, *UNGATED, *EXPERTS)))
        top.fail("model_type", f"{kind!r} is not known; known are {known}")
    layers = top.integer("num_hidden_layers")
    layer, dense_layers = _layer_of(top, content, kind, layers)
    dtype = top.text("dtype", "bfloat16")
    positions = top.integer("max_position_embeddings", _SEQUENCE)
    return Model(
        name=_name(content, file),
        dtype="bfloat16" if dtype == "float32" else dtype,
        layer=layer,
        layers=layers,
        sequence=min(positions, _SEQUENCE),
        vocabulary=top.integer("vocab_size"),
        tied=top.flag("tie_word_embeddings") if "tie_word_embeddings" in content else kind in TIED,
        dense_layers=dense_layers,
    )


def _defaults(kind: object) -> dict[str, Any]:
    """Return what Transformers takes for keys that a file of this kind leaves out."""
    sizes = (("num_key_value_heads", _KV_HEADS), ("head_dim", _HEAD_DIM))
    found = {key: size for key, of in sizes for size, kinds in of.items() if kind in kinds}
    return found | (_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {})


def _name(content: dict[str, Any], file: Path) -> str:
    name = content.get("_name_or_path")
    if isinstance(name, str) and name and name.isprintable():
        return name
    return (file.name == "config.json" and file.resolve().parent.name) or file.stem


def _layer_of(top: Table, content: dict[str, Any], kind: str, layers: int) -> tuple[Layer, int]:
    """Return the layer, and how many leading layers have no experts."""
    hidden, heads = top.integer("hidden_size"), top.integer("num_attention_heads")
    if top.integer("word_embed_proj_dim", hidden) != hidden:
        top.fail("word_embed_proj_dim", f"an embedding must be as wide as hidden_size = {hidden}")
    latent = _latent(top) if "kv_lora_rank" in content or kind in _LATENT else None
    if latent is not None:
        head_dim, kv_heads = top.integer("qk_nope_head_dim") + latent.rope_dim, heads
    else:
        kv_heads = top.integer("num_key_value_heads", 1 if content.get("multi_query") else heads)
        if "head_dim" not in content and hidden % heads:
            top.fail("num_attention_heads", f"must divide hidden_size = {hidden}, got {heads}")
        head_dim = top.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        top.fail("num_key_value_heads", f"must divide {heads} heads, got {kv_heads}")
    moe, dense_layers = _moe(top, content, kind, layers)
    plain = hidden * top.integer("expansion_ratio", 4) if kind in UNGATED else None
    intermediate = 0
    if moe is None or dense_layers or moe.every > 1:
        name = "intermediate_size_mlp" if kind == "llama4_text" else "intermediate_size"
        intermediate = top.integer(name, plain)
    window, full_every = _window(top, content, kind, layers)
    return (
        Layer(
            *(hidden, intermediate, heads, kv_heads, head_dim, kind not in UNGATED),
            *(moe, latent, window, full_every),
            dropout=kind in _DROPOUT and all(content.get(key) != 0 for key in _DROPPED),
            chunked="attention_chunk_size" in content and bool(window),
            delta=_delta(top) if kind in _DELTA else None,
            gate=kind in _DELTA,
        ),
        dense_layers,
    )


def _delta(top: Table) -> Delta:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = [top.integer(f"linear_{name}") for name in (*names, "conv_kernel_dim")]
    if sizes[1] % sizes[0]:
        top.fail("linear_num_value_heads", f"{sizes[0]} heads of keys must divide {sizes[1]}")
    return Delta(*sizes)


def _latent(top: Table) -> Latent:
    return Latent(
        query_rank=top.integer("q_lora_rank", 0, least=0),
        kv_rank=top.integer("kv_lora_rank"),
        rope_dim=top.integer("qk_rope_head_dim"),
        value_dim=top.integer("v_head_dim"),
    )


def _moe(top: Table, content: dict[str, Any], kind: str, layers: int) -> tuple[Moe | None, int]:
    """Return the experts, and how many leading layers have none."""
    if kind not in EXPERTS:
        return None, 0
    experts, top_k = top.integer("num_local_experts"), top.integer("num_experts_per_tok")
    if top_k > experts:
        top.fail("num_experts_per_tok", f"must be at most {experts} experts, got {top_k}")
    for key in ("moe_layer_freq", "moe_layer_interval"):
        if top.integer(key, 1) != 1:
            top.fail(key, "expected 1: the first of so many layers with experts is not known")
    every = top.integer("decoder_sparse_step", top.integer("interleave_moe_layer_step", 1))
    without = top.values("mlp_only_layers", empty=True) if "mlp_only_layers" in content else []
    if "mlp_layer_types" in content:
        types = top.values("mlp_layer_types")
        without = [number for number, kind in enumerate(types) if kind == "dense"]
    if without != list(range(len(without))):
        top.fail("mlp_only_layers", f"expected leading layers alone, got {without}")
    dense = top.integer("first_k_dense_replace", len(without), least=0)
    if content.get("moe_layer_end_index", -1) not in (-1, layers - 1):
        top.fail("moe_layer_end_index", f"expected {layers - 1}: experts in the last layer, too")
    usual = [*range(every - 1, layers, every)]
    if "moe_layers" in content and top.values("moe_layers") != usual:
        top.fail("moe_layers", f"expected the last of every {every} layers")
    wide = content.get("intermediate_size") if kind in _WIDE_EXPERTS else None
    width = top.integer("moe_intermediate_size", wide)
    shared = top.integer("shared_expert_intermediate_size", 0, least=0)
    shared += top.integer("n_shared_experts", 0, least=0) * width
    return Moe(experts, top_k, width, shared, every), dense


def _window(top: Table, content: dict[str, Any], kind: str, count: int) -> tuple[int, int]:
    """Return tokens of the window, and of how many layers one has none; 0 and 0: no window."""
    layers = top.values("layer_types", empty=True) if "layer_types" in content else None
    if kind in _DELTA:
        every = top.integer("full_attention_interval", 4)
        wanted = [
            "full_attention" if (n + 1) % every == 0 else "linear_attention"
            for n in range(len(layers or ()))
        ]
        if layers is not None and layers != wanted:
            top.fail("layer_types", f"expected full attention in the last of every {every} layers")
        return 0, every
    others = [kind for kind in layers or () if kind not in _ATTENTION]
    if others:
        known = ", ".join(_ATTENTION)
        top.fail("layer_types", f"the model has {shown(others[0])}, and plans know {known}")
    if layers is not None and len(layers) != count:
        top.fail("layer_types", f"expected {count}, one for each layer, got {len(layers)}")
    key = "attention_chunk_size" if "attention_chunk_size" in content else "sliding_window"
    window = top.integer(key, 0, least=0)
    if not window or content.get("use_sliding_window") is False:
        return 0, 0
    if layers is None and kind == "llama4_text" and content.get("no_rope_layers"):
        layers = [_ATTENTION[bool(rotates)] for rotates in top.values("no_rope_layers")]
    pattern = content.get("sliding_window_pattern")
    if isinstance(pattern, str):  # such as LLLG: local three times, then global
        if not re.fullmatch("L*G?", pattern):
            top.fail("sliding_window_pattern", f"expected a pattern as LLLG, got {shown(pattern)}")
        every = len(pattern) if pattern.endswith("G") else 0
    else:
        every = top.integer("sliding_window_pattern", ALTERNATING.get(kind, 0), least=0)
    if layers is not None:
        whole = [n for n, name in enumerate(layers) if name == "full_attention"]
        if len(whole) == len(layers):
            return 0, 0
        every = whole[0] + 1 if whole else 0
        if whole != ([n for n in range(len(layers)) if (n + 1) % every == 0] if whole else []):
            top.fail("layer_types", "expected one layer with full attention in every so many")
    elif top.integer("max_window_layers", 0, least=0) and content.get("use_sliding_window"):
        top.fail("max_window_layers", "expected 0: leading layers without a window are not known")
    return window, every


def from_torchtitan(file: Path) -> Model:
    """Return the model of a job configuration of torchtitan up to 0.2.

    Raises:
        ValueError: as ``model_of``.
    """
    top = Table.load(file)
    table = top.table("model")
    name, flavor = table.text("name"), table.text("flavor")
    model = torchtitan_model(f"{name}_{flavor}", str(file))
    length = top.flat().get("training.seq_len", "")
    return replace(model, sequence=int(length)) if length.isdecimal() else model


@cache
def torchtitan_models() -> dict[str, dict[str, Any]]:
    """Return torchtitan's flavors, such as llama3_8b, as keys of Transformers."""
    table = Table.load(data_root() / "torchtitan.toml").table("models")
    return {
        f"{module}_{flavor}".lower(): content | {"_name_or_path": f"{module}_{flavor}"}
        for module in table.keys
        for flavor, content in table.objects(module).items()
    }


@cache
def torchtitan_configs() -> dict[str, dict[str, str]]:
    """Return what torchtitan's configurations choose, as texts of options, by name."""
    return Table.load(data_root() / "torchtitan.toml").objects("configs")


def torchtitan_model(flavor: str, where: str) -> Model:
    """Return the model of a flavor of torchtitan, such as llama3_8B.

    Raises:
        ValueError: it is not known.
    """
    models = torchtitan_models()
    content = models.get(flavor.lower())
    if content is None:
        known = ", ".join(content["_name_or_path"] for content in models.values())
        raise ValueError(
            f"{where}: {shown(flavor)} is not known; give --model FILE, or one of {known}"
        )
    return _from_keys(content, Path(flavor))


def from_megatron(file: Path) -> Model:
    """Return the model of a text with Megatron's options, such as a script that starts it.

    Raises:
        ValueError: a size is missing, or no number.
    """
    from flux.bench.scripts import options_in  # of scripts alone

    options = options_in(file)
    size = options.size
    hidden, heads = size("hidden-size"), size("num-attention-heads")
    grouped = "group-query-attention" in options
    latent = None
    head_dim = size("kv-channels", hidden // heads)
    if "kv-channels" not in options and hidden % heads:
        raise ValueError(f"{file}: --num-attention-heads: must divide {hidden}, got {heads}")
    if "multi-latent-attention" in options:
        latent = Latent(
            query_rank=size("q-lora-rank", 0),
            kv_rank=size("kv-lora-rank", 32),
            rope_dim=size("qk-pos-emb-head-dim", 64),
            value_dim=size("v-head-dim", 128),
        )
        head_dim = size("qk-head-dim", 128) + latent.rope_dim
    gated = "swiglu" in options or "quick-geglu" in options
    default = 4 * hidden * 2 // 3 // 64 * 64 if "swiglu" in options else 4 * hidden
    intermediate = size("ffn-hidden-size", default)
    moe, dense = None, 0
    if "num-experts" in options:
        width = size("moe-ffn-hidden-size", intermediate)
        shared = size("moe-shared-expert-intermediate-size", 0)
        layers, pattern = size("num-layers"), options.get("moe-layer-freq", "1")
        dense, every = _expert_layers(pattern, layers, str(file))
        moe = Moe(size("num-experts"), size("moe-router-topk", 2), width, shared, every)
        intermediate = intermediate if dense or every > 1 else 0
    if "window-size" in options:
        options["window-size"] = options["window-size"].strip("()").partition(",")[0]
    layer = Layer(
        *(hidden, intermediate, heads, size("num-query-groups", heads) if grouped else heads),
        *(head_dim, gated, moe, latent),
        window=size("window-size", 0),
        full_every=size("window-attn-skip-freq", 0) if "window-size" in options else 0,
        dropout=options.get("hidden-dropout", "0.1") not in ("0", "0.0"),
    )
    return Model(
        name=file.stem,
        dtype="float16" if "fp16" in options else "bfloat16",
        layer=layer,
        layers=size("num-layers"),
        sequence=size("seq-length"),
        vocabulary=size("vocab-size", 0) or size("padded-vocab-size", 0),
        tied="untie-embeddings-and-output-weights" not in options,
        dense_layers=dense,
    )


def _expert_layers(text: str, layers: int, where: str) -> tuple[int, int]:
    """Return leading layers without experts, and of how many others the last one has experts.

    Args:
        text: of ``--moe-layer-freq``: a number N, of so many layers the first one has experts; or a
            list such as ([0]*3+[1]*58), ([0]*1+[1]*1)*24 or [0,1,0,1].
        layers: how many there are.
        where: it is from, for errors.
    """
    text = text.replace(" ", "")
    if text == "1":
        return 0, 1
    kinds = re.sub(r"\[([01,]*)\](?:\*(\d{1,4}))?", _repeated, text[:1000])
    kinds = re.sub(r"\(([01+]*)\)(?:\*(\d{1,4}))?", _repeated, kinds).replace("+", "")
    first = kinds.find("1")
    if first >= 0 and len(kinds) == layers and "[" in text:
        for dense, every in ((first, 1), (0, first + 1)):
            wanted = (n >= dense and (n + 1) % every == 0 for n in range(layers))
            if kinds == "".join("01"[kind] for kind in wanted):
                return dense, every
    raise ValueError(
        f"{where}: --moe-layer-freq: expected ([0]*LAYERS+[1]*LAYERS), or a list in which the last "
        f"of every so many of {layers} layers has experts, got {shown(text)}"
    )


def _repeated(part: re.Match[str]) -> str:
    kinds, most = re.sub("[,+]", "", part[1]), 1 << 16
    return kinds * min(int(part[2] or 1), most // max(1, len(kinds)))
