"""Options of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

import re
import shlex
from typing import Any

from flux.bench.model_files import model_of
from flux.bench.scripts import LISTS, CommandOptions
from flux.core.datafile import shown
from flux.plan.files import FilePlan
from flux.plan.model import TrainingStep
from flux.trainers.common import Exported, Planned, gpus_in, quotient, serial_policy, split_of

_SIZES = {
    "micro_batch": "micro-batch-size",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}
_FSDP = {2: "optim_grads", 3: "optim_grads_params"}
_OPTIMIZERS: dict[str, dict[str, str]] = {
    "adam": {},
    "adam-bf16": {
        "use-precision-aware-optimizer": "",
        "exp-avg-dtype": "bf16",
        "exp-avg-sq-dtype": "bf16",
    },
    "momentum": {"optimizer": "sgd"},
    "sgd": {"optimizer": "sgd", "sgd-momentum": "0.0"},
}
_MODULES = {"selective": "core_attn", "ops": "layernorm mlp", "act": "moe_act"}
"""The modules that come nearest to ``recompute = ops``."""
_REFUSED = {
    **dict.fromkeys(("hybrid-layer-pattern", "hybrid-override-pattern"), "state-space layers"),
    **dict.fromkeys(
        ("linear-attention-freq", "experimental-attention-variant"),
        "Megatron's linear attention, and attention to keys that an indexer chooses",
    ),
    "moe-latent-size": "experts narrower than the model",
    "enable-mhc-connections": "several residual streams",
    **dict.fromkeys(("vision-model-type", "language-model-type"), "towers for pictures"),
    **dict.fromkeys(
        ("deepspeed-config", "zero-stage"), "DeepSpeed's engine: give its configuration as --plan"
    ),
    **dict.fromkeys(
        ("model-parallel-size", "batch-size", "checkpoint-activations"),
        "options that Megatron-LM has no longer",
    ),
    "encoder-num-layers": "an encoder",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "heterogeneous-layers-config-encoded-json": "layers of several kinds",
    "yaml-cfg": "options in another file",
}
_IGNORED = {
    "rampup-batch-size": "smaller batches at first",
    "mtp-num-layers": "layers for multi-token prediction",
    "cpu-offloading-num-layers": "offloading of activations",
    "fine-grained-activation-offloading": "offloading of activations",
    "optimizer-cpu-offload": "the optimizer's steps on CPUs",
    "distribute-saved-activations": "kept inputs shared by tensor parallel ranks",
    "hierarchical-context-parallel-sizes": "context parallelism in two levels",
    "moe-expert-capacity-factor": "dropped tokens",
    "delay-wgrad-compute": "weight gradients that are delayed",
    "overlap-moe-expert-parallel-comm": "AllToAll of experts beside another micro-batch",
    "moe-shared-expert-overlap": "shared experts beside AllToAll",
    "fp4-format": "products in 4 bits",
    "fp8-param-gather": "weights that are gathered in float8",
    "fp32-residual-connection": "a residual in float32",
    "use-tp-pp-dp-mapping": "ranks that are numbered by stage before replicas",
}


def exported(plan: Planned) -> Exported:
    """Return the command line of a plan."""
    step, p = plan.step, plan.step.parallel
    _check(plan)
    plan, notes = plan.for_trainer("Megatron", ("serial", "interleaved"))
    flags = _model(step)
    sizes = {name: getattr(p, key, step.micro_batch) for key, name in _SIZES.items()}
    flags |= {name: str(size) for name, size in sizes.items() if size > 1 or "micro" in name}
    flags["global-batch-size"] = str(plan.batch)
    if p.sequence and p.tp > 1:
        flags["sequence-parallel"] = ""
        if not step.regather:
            notes.append("Megatron gathers inputs of column-parallel layers again: less memory")
    if step.eager:
        notes.append("Megatron fuses norms, activations and the loss: faster than planned")
    if step.layer.chunked:
        notes.append(f"one chunk has {step.sequence} tokens: attention is planned without chunks")
    flags |= _data_parallel(plan) | _recompute(plan, notes) | _pipeline(plan)
    flags |= _OPTIMIZERS[step.optimizer]
    # Scales of the tensors at hand, as planned; delayed ones exclude recomputing norms.
    flags |= {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"} if step.gemm_dtype else {}
    flags |= {"attention-backend": "unfused"} if step.unfused_attention else {}
    if plan.options.get("fused", "none") != "none" and p.sequence and p.tp > 1:
        flags["tp-comm-overlap"] = ""
    elif p.tp > 1 and plan.policy == "serial" and not plan.options.get("wgrad_overlap"):
        notes.append("Megatron runs a dgrad's collective beside the wgrad: faster than planned")
    if p.cp > 1 and step.cp_kind != "ring":
        flags["cp-comm-type"] = step.cp_kind
    notes.append("data, tokenizer, learning rate, positions, norms and biases are up to you")
    parts = (
        (name, value.split() if name in LISTS else [value] * bool(value))
        for name, value in flags.items()
    )
    words = [shlex.join((f"--{name}", *values)) for name, values in parts]
    start = plan.launch("pretrain_gpt.py")
    if (p.tp > 1 or p.cp > 1) and step.zero < 2:
        start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {start}"
    return Exported(" \\\n  ".join([start, *words]), notes)


def _check(plan: Planned) -> None:
    step, p, heads = plan.step, plan.step.parallel, plan.step.layer.kv_heads
    problem = ""
    if step.layer.chunked and step.sequence > step.layer.window:
        problem = f"attention in chunks: sequence must be at most {step.layer.window}"
    elif step.layer.delta or step.layer.gate:
        problem = "linear attention and gates of attention: no options of a release's are known"
    elif heads % p.tp and p.tp % heads:
        problem = f"tp = {p.tp}: {heads} heads of keys must be a multiple or a divisor"
    elif step.dtype not in ("bfloat16", "float16"):
        problem = f"dtype = {step.dtype}: it trains in bfloat16 and float16"
    elif p.cp > 1 and step.sequence % (2 * p.cp):
        problem = f"sequence = {step.sequence}: 2 cp = {2 * p.cp} must divide it"
    elif p.cp > 1 and step.cp_kind == "torch":
        problem = "cp_kind = torch: it has ring and all_gather"
    elif plan.policy == "interleaved" and step.micro_batches % p.pp:
        problem = f"interleaved: pp = {p.pp} must divide micro_batches = {step.micro_batches}"
    elif step.optimizer == "adam-bf16" and not step.zero:
        problem = "optimizer = adam-bf16: it needs zero of at least 1"
    if problem:
        raise ValueError(f"Megatron cannot run {problem}")


def _model(step: TrainingStep) -> dict[str, str]:
    layer, latent, moe = step.layer, step.layer.latent, step.layer.moe
    sizes = {
        "num-layers": step.layers,
        "hidden-size": layer.hidden,
        "num-attention-heads": layer.heads,
        "ffn-hidden-size": layer.intermediate or (moe.intermediate if moe else 0),
        "seq-length": step.sequence,
        "max-position-embeddings": step.sequence,
        "vocab-size": step.vocabulary,
    }
    names = [] if step.tied else ["untie-embeddings-and-output-weights"]
    names += ["swiglu"] if layer.gated else []
    names.append("bf16" if step.dtype == "bfloat16" else "fp16")
    texts = {} if layer.dropout else {"hidden-dropout": "0.0", "attention-dropout": "0.0"}
    if latent is not None:
        names.append("multi-latent-attention")
        sizes |= {
            "q-lora-rank": latent.query_rank,
            "kv-lora-rank": latent.kv_rank,
            "qk-head-dim": layer.head_dim - latent.rope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
        }
    else:
        if layer.kv_heads != layer.heads:
            names.append("group-query-attention")
            sizes["num-query-groups"] = layer.kv_heads
        if layer.head_dim * layer.heads != layer.hidden:
            sizes["kv-channels"] = layer.head_dim
    if layer.window and not layer.chunked:  # in a sequence of one chunk attention sees all
        texts["window-size"] = f"{layer.window},0"
        sizes["window-attn-skip-freq"] = layer.full_every
    if moe is not None:
        names.append("moe-grouped-gemm")
        names += ["moe-router-pre-softmax"] if moe.top_k == 1 else []  # it takes no other
        texts |= {"moe-token-dispatcher-type": "alltoall", "expert-tensor-parallel-size": "1"}
        sizes |= {
            "num-experts": moe.experts,
            "moe-router-topk": moe.top_k,
            "moe-ffn-hidden-size": moe.intermediate,
            "moe-shared-expert-intermediate-size": moe.shared,
        }
        if step.dense_layers or moe.every > 1:
            texts["moe-layer-freq"] = _moe_layer_freq(step, moe.every)
    given = {name: str(size) for name, size in sizes.items() if size}
    return given | dict.fromkeys(names, "") | texts


def _moe_layer_freq(step: TrainingStep, every: int) -> str:
    if every == 1:
        rest = step.layers - step.dense_layers
        return f"([0]*{step.dense_layers}+[1]*{rest})"
    of_layers = (step.layer.moe_of(n, step.dense_layers) for n in range(step.layers))
    return f"[{','.join('01'[moe is not None] for moe in of_layers)}]"


def _data_parallel(plan: Planned) -> dict[str, str]:
    step = plan.step
    flags: dict[str, str] = {}
    if step.zero == 1:
        flags["use-distributed-optimizer"] = ""
    elif step.zero:
        flags |= {"use-megatron-fsdp": "", "data-parallel-sharding-strategy": _FSDP[step.zero]}
        flags |= {"ckpt-format": "fsdp_dtensor", "no-gradient-accumulation-fusion": ""}
        if step.shard:
            flags["num-distributed-optimizer-instances"] = str(step.parallel.dp // step.shard)
    if plan.overlaps and step.parallel.dp * step.parallel.cp > 1:
        flags["overlap-grad-reduce"] = ""
        flags |= {"overlap-param-gather": ""} if step.zero else {}
    if step.dtype == "bfloat16" and not step.fp32_gradients:
        flags["grad-reduce-in-bf16"] = ""
    if step.dtype == "float16" and step.fp32_gradients:
        flags["accumulate-allreduce-grads-in-fp32"] = ""
    return flags


def _recompute(plan: Planned, notes: list[str]) -> dict[str, str]:
    asked = plan.step.recompute
    if asked == "none":
        return {}
    if asked == "act" and plan.step.layer.moe is None:
        notes.append("Megatron keeps the activation's output in dense layers: more memory")
        return {}
    if asked in _MODULES:
        if asked == "ops":
            notes.append(
                f"Megatron cannot keep every second product: modules {_MODULES[asked]} come "
                "nearest, and multiply fc2 again"
            )
        return {"recompute-granularity": "selective", "recompute-modules": _MODULES[asked]}
    method, count = ("uniform", 1) if asked == "full" else ("block", -(-int(asked) // plan.chunks))
    if asked != "full" and count * plan.chunks != int(asked):
        notes.append(f"{count} layers of each virtual stage are computed again, not {asked} in all")
    return {
        "recompute-granularity": "full",
        "recompute-method": method,
        "recompute-num-layers": str(count),
    }


def _pipeline(plan: Planned) -> dict[str, str]:
    if len(set(plan.stages)) > 1:
        parts = [f"t*{count}" if count else "" for count in plan.stages]
        return {"pipeline-model-parallel-layout": f"E{'|'.join(parts)}L"}
    return {"num-virtual-stages-per-pipeline-rank": str(plan.chunks)} if plan.chunks > 1 else {}


def imported(options: CommandOptions, model: str, gpus: int | None) -> FilePlan:
    """Return the plan of a command line; the model is read by ``model_of``."""
    where, size = options.where, options.size
    if re.search("(bert|t5|mamba|hybrid|vlm|vision|retro|ict)[^/]*$", options.program):
        raise ValueError(f"{where}: {shown(options.program)} trains no GPT")
    for name, what in _REFUSED.items():
        if name in options:
            raise ValueError(f"{where}: --{name}: plans do not know {what}")
    notes = [f"--{name}: {what}: not planned" for name, what in _IGNORED.items() if name in options]
    taken: dict[str, Any] = {key: size(name, 1) for key, name in _SIZES.items()}
    ranks = taken["tp"] * taken["pp"] * taken["cp"]
    world = gpus_in(options, gpus, where)
    dp = taken["dp"] = quotient(world, "GPUs", ranks, "tp pp cp", where)
    each = taken["micro_batch"] * dp
    batch = size("global-batch-size", each)
    taken["micro_batches"] = quotient(
        batch, "global-batch-size", each, "micro-batch-size dp", where
    )
    taken["sequence_parallel"] = "sequence-parallel" in options and taken["tp"] > 1
    taken["unfused_attention"] = options.get("attention-backend") == "unfused"
    kind = options.get("cp-comm-type", "p2p").replace("_", "")
    gathers = kind == "allgather" or taken["unfused_attention"]
    taken["cp_kind"] = "all_gather" if gathers else "ring"
    if kind not in ("p2p", "allgather"):
        notes.append(f"--cp-comm-type {shown(kind)}: planned as a ring")
    taken["gemm_dtype"] = "float8_e4m3fn" if "fp8-format" in options else ""
    bf16, whole = "bf16" in options, "accumulate-allreduce-grads-in-fp32" in options
    taken["fp32_gradients"] = whole or (bf16 and "grad-reduce-in-bf16" not in options)
    if not bf16 and "fp16" not in options:
        notes.append("neither --bf16 nor --fp16: planned in bfloat16, not float32")
    if "num-experts" in options and size("expert-tensor-parallel-size", taken["tp"]) > 1:
        notes.append("experts are split over tensor parallel ranks: planned whole")
    taken |= _sharding(options, dp, where, notes)
    taken["optimizer"] = _optimizer(options, notes)
    described = model_of(model)
    if not described.vocabulary:
        notes.append("no --vocab-size: planned without embedding and head")
    if options.changing:
        names = ", ".join(options.changing)
        notes.append(f"{names} in the script: set several times, the last value counts")
    if options.conditional:
        names = ", ".join(f"--{name}" for name in options.conditional)
        notes.append(f"{names}: taken, as if the condition in the script held")
    if taken["ep"] > 1 and options.get("moe-token-dispatcher-type", "allgather") == "allgather":
        notes.append("--moe-token-dispatcher-type allgather: planned as AllToAll")
    taken |= {"model": model, "sequence": described.sequence}
    chunks, counts = _stages(options, described.layers, taken["pp"])
    taken["split"] = split_of(counts) if chunks == 1 else ""
    taken["recompute"] = _recomputed(options, chunks, notes)
    summed = dp * taken["cp"] > 1
    waits = summed and "overlap-grad-reduce" not in options
    # Collectives of dgrads run beside wgrads in any case.
    hides_tp = taken["tp"] > 1 or (summed and not waits)
    policy = serial_policy(hides_tp=hides_tp, hides_dp=hides_tp and not waits)
    policy[1].update({"fused": "auto"} if "tp-comm-overlap" in options else {})
    if chunks > 1:
        if split_of(counts):
            notes.append(f"stages of {counts} layers: planned as even as possible")
        notes += ["no --overlap-grad-reduce: planned with it"] if waits else []
        return FilePlan(taken, ("interleaved", {"chunks": chunks}), notes)
    return FilePlan(taken, policy, notes)


def _sharding(options: CommandOptions, dp: int, where: str, notes: list[str]) -> dict[str, int]:
    zero = 1 if "use-distributed-optimizer" in options else 0
    if "use-torch-fsdp2" in options:
        zero = 2 if "torch-fsdp2-no-reshard-after-forward" in options else 3
    if "use-megatron-fsdp" in options:
        strategies = {"no_shard": 0, "optim": 1} | {name: zero for zero, name in _FSDP.items()}
        zero = strategies.get(options.get("data-parallel-sharding-strategy", _FSDP[3]), 3)
    instances = options.size("num-distributed-optimizer-instances", 1)
    if instances > 1 and zero != 3:
        notes.append("--num-distributed-optimizer-instances: planned with one")
        instances = 1
    shard = quotient(dp, "dp", instances, "num-distributed-optimizer-instances", where)
    return {"zero": zero, "shard": shard if instances > 1 else 0}


def _optimizer(options: CommandOptions, notes: list[str]) -> str:
    kind, moments = options.get("optimizer", "adam"), options.get("exp-avg-dtype", "fp32")
    if kind == "sgd":
        return "sgd" if options.get("sgd-momentum") in ("0", "0.0") else "momentum"
    if kind != "adam":
        notes.append(f"--optimizer {shown(kind)}: planned as Adam")
    if moments not in ("fp32", "bf16"):
        notes.append(f"--exp-avg-dtype {shown(moments)}: planned in bfloat16")
    return "adam" if moments == "fp32" else "adam-bf16"


def _recomputed(options: CommandOptions, chunks: int, notes: list[str]) -> str:
    granularity = options.get("recompute-granularity", "none")
    if "recompute-activations" in options:
        granularity = "selective"
    if granularity == "selective":
        modules = options.get("recompute-modules", "core_attn")
        for name, known in _MODULES.items():
            if set(modules.split()) == set(known.split()):
                return name
        notes.append(f"--recompute-modules {shown(modules)}: planned as recompute = ops")
        return "ops"
    each = options.size("recompute-num-layers", 1)
    if granularity == "none" and "recompute-method" in options:
        notes.append("--recompute-method without --recompute-granularity: nothing is recomputed")
        return granularity
    if options.get("recompute-method") == "block":
        return str(options.size("recompute-num-layers") * chunks)
    if granularity == "full" and each > 1:
        notes.append(f"inputs of every {each} layers are kept: planned with those of each layer")
    return granularity


def _stages(options: CommandOptions, layers: int, pp: int) -> tuple[int, tuple[int, ...]]:
    """Return virtual stages of each rank, and layers of each stage."""
    where, size = options.where, options.size
    layout = options.get("pipeline-model-parallel-layout")
    if layout is not None:
        text = re.sub(r"\(([^()]*)\)\*(\d{1,4})", _repeated, layout[:1000].replace(",", ""))
        counts = [
            sum(int(count or 1) for count in re.findall(r"t(?:\*(\d{1,4}))?", part))
            for part in text.split("|")
        ]
        if sum(counts) != layers:
            raise ValueError(
                f"{where}: --pipeline-model-parallel-layout: {shown(layout)} is not known"
            )
        return quotient(len(counts), "stages", pp, "pp", where), tuple(counts)
    chunks = size("num-virtual-stages-per-pipeline-rank", 1)
    less = [int(f"account-for-{end}-in-pipeline-split" in options) for end in ("embedding", "loss")]
    if "num-layers-per-virtual-pipeline-stage" in options:
        each = size("num-layers-per-virtual-pipeline-stage") * pp
        whole = layers + sum(less)
        chunks = quotient(whole, "num-layers", each, "layers of virtual stages", where)
    first, last = (size(f"decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last"))
    stages = chunks * pp
    if pp > 1 and (first or last):
        middle = pp - bool(first) - bool(last)
        each = quotient(layers - first - last, "layers between", middle, "stages", where)
        ranks = (*([first] if first else []), *[each] * middle, *([last] if last else []))
        parts = [quotient(n, "layers of a rank", chunks, "virtual stages", where) for n in ranks]
        return chunks, tuple(parts * chunks)
    each = quotient(layers + sum(less), "layers", stages, "stages", where)
    counts = [each] * stages
    counts[0], counts[-1] = counts[0] - less[0], counts[-1] - less[1]
    return chunks, tuple(counts)


def _repeated(found: re.Match[str]) -> str:
    return found[1] * int(found[2])
