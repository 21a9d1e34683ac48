"""Options of torchtitan: since 0.3 on its command line, before in TOML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flux.bench.model_files import (
    model_of,
    torchtitan_configs,
    torchtitan_model,
    torchtitan_models,
)
from flux.bench.scripts import CommandOptions
from flux.core.datafile import Table, shown
from flux.plan.files import FilePlan
from flux.plan.model import TrainingStep
from flux.plan.policies.torch_rows import blocks_of
from flux.trainers.common import Exported, Planned, gpus_in, quotient, serial_policy, split_of

_DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_SCHEDULES = {
    "serial": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_RECOMPUTE = {"act": "none", "none": "none", "ops": "selective", "full": "full"}
_RENAMED = {
    "training.batch-size": "training.local-batch-size",
    "training.compile": "compile.enable",
    "parallelism.data-parallel-degree": "parallelism.data-parallel-shard-degree",
    "activation-checkpoint.mode": "activation-checkpoint",
    "parallelism.enable-async-tensor-parallel": "compile.enable-async-tensor-parallel",
    "experimental.enable-async-tensor-parallel": "compile.enable-async-tensor-parallel",
    "float8.enable-float8-linear": "model.converters",
}
"""Settings of older releases, and what they are called in 0.3; degrees were in other sections."""
_PLANNED = (
    *("module", "config", "model.name", "model.flavor", "model.converters", "compile.components"),
    *("training.global-batch-size", "training.local-batch-size", "training.seq-len"),
    *(f"compile.{no}enable-async-tensor-parallel" for no in ("", "no-")),
    *("compile.enable", "optimizer.implementation"),
    *("activation-checkpoint", "activation-checkpoint.selective-ac-option"),
    *(f"parallelism.{word}-parallel-degree" for word in _DEGREES.values()),
    *(f"parallelism.data-parallel-{word}-degree" for word in ("shard", "replicate")),
    *("parallelism.no-enable-sequence-parallel", "parallelism.enable-sequence-parallel"),
    *("parallelism.fsdp-reshard-after-forward", "parallelism.module-fqns-per-model-part"),
    *(f"parallelism.pipeline-parallel-{end}-stage-less-layers" for end in ("first", "last")),
    *(f"parallelism.pipeline-parallel-{word}" for word in ("schedule", "microbatch-size")),
    "parallelism.pipeline-parallel-layers-per-stage",
)
"""Settings that make a plan."""
_TIMELESS = (
    *("job", "profiling", "profiler", "metrics", "checkpoint", "lr-scheduler", "validation"),
    *("validator", "comm", "debug", "dataloader", "tokenizer", "memory-estimation"),
    *(f"training.{word}" for word in ("dataset", "dataset-path", "steps", "gc-freq", "gc-debug")),
    *(f"training.{word}" for word in ("max-norm", "seed", "deterministic", "warmup-steps")),
    "training.disable-cuda-graphs",
    *(f"optimizer.{word}" for word in ("lr", "eps", "beta1", "beta2", "weight-decay")),
    *("model.tokenizer-path", "model.hf-assets-path", "model.norm-type", "compile.backend"),
    *("model.print-after-conversion", "activation-checkpoint.early-stop"),
)
"""Settings, and whole sections, that do not change a step's time and memory."""
_DEFAULTS = {
    *(("optimizer.name", "AdamW"), ("optimizer.name", "Adam"), ("training.dtype", "float32")),
    *(("training.mixed-precision-param", "bfloat16"), ("parallelism.spmd-backend", "default")),
    *(("training.mixed-precision-reduce", "float32"),),
    *(("parallelism.expert-tensor-parallel-degree", "1"), ("optimizer.implementation", "fused")),
    *(("parallelism.context-parallel-rotate-method", "allgather"),),
    *(("parallelism.context-parallel-load-balancer", "headtail"),),
    *(("parallelism.pipeline-parallel-schedule-csv", ""),),
}
"""Settings that plans do not know, with the values that they are planned for."""


def exported(plan: Planned) -> Exported:
    """Return the command line of a plan."""
    step, p = plan.step, plan.step.parallel
    _check(plan)
    plan, notes = plan.for_trainer("torchtitan", _SCHEDULES)
    config, chosen = _config_of(step)
    if config is None:
        flavor = next((name for name in torchtitan_models() if _same(name, step)), None)
        sizes = "these sizes" if flavor is None else torchtitan_models()[flavor]["_name_or_path"]
        notes.append(
            f"torchtitan has no configuration of {sizes}: write one; add --module and --config"
        )
    shard = (step.shard or p.dp) if step.zero else 1
    options: dict[str, Any] = {
        "training.seq_len": step.sequence,
        "training.local_batch_size": step.micro_batch * (step.micro_batches if p.pp > 1 else 1),
        "training.global_batch_size": plan.batch,
        "parallelism.data_parallel_replicate_degree": p.dp // shard,
        "parallelism.data_parallel_shard_degree": shard,
    }
    options |= {f"parallelism.{_DEGREES[key]}_parallel_degree": getattr(p, key) for key in _DEGREES}
    if shard * p.cp > 1:
        reshards = "always" if step.zero == 3 else "never"
        options["parallelism.fsdp_reshard_after_forward"] = reshards
    if p.pp > 1:
        options["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[plan.policy]
        options["parallelism.pipeline_parallel_microbatch_size"] = step.micro_batch
        options |= _split(plan)
    words = [f"--{name} {value}" for name, value in options.items()]
    words += ["--parallelism.no-enable_sequence_parallel"] if p.tp > 1 and not p.sequence else []
    fused = plan.options.get("fused", "none") != "none" and p.sequence and p.tp > 1
    if fused and not step.eager:
        words.append("--compile.enable_async_tensor_parallel")
    elif "compile.enable-async-tensor-parallel" in chosen:
        words.append("--compile.no-enable_async_tensor_parallel")
    words += ["--training.disable_cuda_graphs"] if p.pp > 1 or p.ep > 1 else []
    words.append(f"--compile.{'no-' if step.eager else ''}enable")
    if not step.eager and "model" not in chosen.get("compile.components", "model"):
        words.append("--compile.components model,loss")
    if step.optimizer == "adam-bf16":
        words.append("--optimizer.implementation fused_opt_states_bf16")
    words.append(f"activation-checkpoint:{_RECOMPUTE.get(step.recompute, 'full')}")
    if config is not None:
        words.insert(0, f"--module {chosen['module']} --config {config}")
    notes += _differences(plan, config, chosen.get("model.converters", ""))
    return Exported(" \\\n  ".join([plan.launch("-m torchtitan.train"), *words]), notes)


def _config_of(step: TrainingStep) -> tuple[str | None, dict[str, str]]:
    """Return torchtitan's configuration of these sizes, and what it chooses.

    Of several, the first one that multiplies as planned, else in bfloat16.
    """
    sizes = {name for name in torchtitan_models() if _same(name, step)}
    order = [*dict.fromkeys((_converter(step), ""))]
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for config, chosen in torchtitan_configs().items():
        if f"{chosen['module']}_{chosen['flavor']}".lower() in sizes:
            found.setdefault(chosen.get("model.converters", ""), (config, chosen))
    best = [*(converter for converter in order if converter in found), *found]
    return found[best[0]] if found else (None, {})


def _converter(step: TrainingStep) -> str:
    return "float8" if step.gemm_dtype else ""


def _same(name: str, step: TrainingStep) -> bool:
    model = torchtitan_model(name, name)
    same = replace(model.layer, dropout=step.layer.dropout) == step.layer
    return same and model.layers == step.layers and step.vocabulary in (0, model.vocabulary)


def _check(plan: Planned) -> None:
    step, p = plan.step, plan.step.parallel
    problem = ""
    if step.dtype != "bfloat16":
        problem = f"dtype = {step.dtype}: it computes in bfloat16"
    elif p.cp > 1 and step.sequence % (2 * p.cp):
        problem = f"sequence = {step.sequence}: 2 cp = {2 * p.cp} must divide it"
    elif step.optimizer in ("momentum", "sgd"):
        problem = f"optimizer = {step.optimizer}: it has Adam"
    elif step.unfused_attention:
        problem = "unfused_attention"
    elif p.ep > 1 and not step.zero and p.cp * p.tp % p.ep:
        problem = f"ep = {p.ep} with zero = 0: it spreads experts over ranks that share weights"
    elif plan.chunks == 1 and step.micro_batches < p.pp:
        problem = f"micro_batches = {step.micro_batches} on pp = {p.pp} stages: too few for 1F1B"
    elif plan.chunks > 1 and p.pp > 1:
        try:
            blocks_of(_SCHEDULES[plan.policy], p.pp, plan.chunks * p.pp, step.micro_batches)
        except ValueError as error:
            problem = str(error)
    if problem:
        raise ValueError(f"torchtitan cannot run {problem}")


def _differences(plan: Planned, config: str | None, converter: str) -> list[str]:
    step, p = plan.step, plan.step.parallel
    notes = []
    if step.zero == 0 and p.cp > 1:
        notes.append("context parallel ranks share weights (FSDP): less memory")
    if p.cp > 1 and step.cp_kind != "torch" and not step.eager:
        notes.append("torch's ring, compiled, waits for keys and values: slower than planned")
    if step.zero in (1, 2) and p.dp * p.cp > 1:
        notes.append(
            f"torchtitan has no ZeRO-{step.zero}: this is FSDP that gathers weights once in each "
            "micro-batch"
        )
    if step.recompute not in _RECOMPUTE:
        notes.append(
            f"torchtitan has no recompute = {step.recompute}: whole layers are computed again"
        )
    if step.recompute == "act":
        notes.append("torchtitan keeps the activation's output: more memory")
    if p.sequence and p.tp > 1 and step.regather != _regathers(step.recompute):
        kept = "stay in memory: more than planned" if step.regather else "are gathered again"
        notes.append(f"inputs of column-parallel layers {kept}")
    if not step.fp32_gradients:
        notes.append("gradients are summed and reduced in float32: more memory and traffic")
    if converter != _converter(step):
        kind = f"{config} multiplies in {converter}" if converter else "float8 is chosen in code"
        notes.append(
            f"{kind}: model_registry(..., converters=) in a configuration of your own changes it"
        )
    if p.tp > 1 and plan.options.get("wgrad_overlap"):
        notes.append("tensor parallel collectives hide behind no wgrads")
    if plan.policy == "serial" and p.dp * p.cp > 1 and not plan.overlaps:
        notes.append("FSDP overlaps its collectives: faster than planned")
    return notes


def _regathers(recompute: str) -> bool:
    """Return whether backward gathers inputs again: selective checkpoints save no AllGather."""
    return recompute == "ops"


def _spread(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Return layers of stages where embedding and head count as so many layers."""
    each, more = divmod(layers + first + last, stages)
    counts = [each + (place < more) for place in range(stages)]
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    return tuple(counts)


_LESS = "parallelism.pipeline_parallel_{}_stage_less_layers"


def _split(plan: Planned) -> dict[str, Any]:
    layers, stages = plan.step.layers, plan.stages
    for first, last in ((0, 0), (1, 1), (1, 0), (0, 1)):
        if _spread(layers, len(stages), first, last) == stages:
            chosen = {_LESS.format("first"): first, _LESS.format("last"): last}
            each = -(-(layers + first + last) // len(stages))
            if -(-(layers + first + last) // each) == len(stages):
                return chosen | {"parallelism.pipeline_parallel_layers_per_stage": each}
    names = [f"layers.{number}" for number in range(layers)]
    parts, at = [], 0
    for count in stages:
        parts.append(names[at : at + count])
        at += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return {"parallelism.module_fqns_per_model_part": " ".join(",".join(part) for part in parts)}


def from_toml(file: Path) -> CommandOptions:
    """Return the options of a job configuration, as on the command line."""
    options = CommandOptions(str(file))
    for name, value in Table.load(file).flat().items():
        name = _renamed(name.replace("_", "-"))
        if name == "model.converters" and value in ("true", "false"):  # it was a switch
            options[name] = "float8" if value == "true" else ""
        elif value != "false":
            options[name] = "" if value == "true" else value
        elif name == "parallelism.enable-sequence-parallel":
            options["parallelism.no-enable-sequence-parallel"] = ""
    options.setdefault("activation-checkpoint", "selective")
    options.setdefault("activation-checkpoint.selective-ac-option", "2")
    return options


def _renamed(name: str) -> str:
    section, _, word = name.partition(".")
    if section in ("training", "experimental") and word.endswith("-degree"):
        name = f"parallelism.{word}"
    return _RENAMED.get(name, name)


def _chosen(options: CommandOptions, notes: list[str], model: str | None) -> CommandOptions:
    """Return the options with those that torchtitan's configuration chooses."""
    config = options.get("config", "")
    if "model.name" in options:  # of TOML, which has all options
        return options
    known = torchtitan_configs().get(config)
    if known is None and model is None:
        names = ", ".join(torchtitan_configs())
        what = f"{shown(config)} is not known" if config else "no --config"
        raise ValueError(f"{options.where}: {what}; give --model FILE, or one of {names}")
    merged = CommandOptions(options.where)
    merged |= {key: value for key, value in (known or {}).items() if "." in key or "-" in key}
    merged |= options
    for name in options:
        section, dot, word = name.partition(".")
        opposite = word[3:] if word.startswith("no-") else f"no-{word}"
        merged.pop(f"{section}.{opposite}" if dot else "", None)
    if known is None:
        notes.append(f"{shown(config)} is not known: what it chooses is planned as the defaults")
    else:
        merged |= {"model.name": known["module"], "model.flavor": known["flavor"]}
    return merged


def _unplanned(options: CommandOptions) -> list[str]:
    """Return the settings of a job that plans do not know."""
    known = {*_PLANNED, *_TIMELESS, "compile.no-enable"}
    if not options.get("model.converters"):
        known |= {"float8", "mx", "quantize"}  # settings of converters that do not run
    return sorted(
        name if name.isprintable() and len(name) < 80 else shown(name)
        for name, value in options.items()
        if "." in name
        and not known & {name, name.partition(".")[0]}
        and (name, value) not in _DEFAULTS
    )


def imported(options: CommandOptions, gpus: int | None, model: str | None = None) -> FilePlan:
    """Return the plan of a command line, or of a job configuration.

    Args:
        options: of the command line.
        gpus: ranks of the step, if the options do not say it.
        model: name or file, in place of torchtitan's.
    """
    where, notes = options.where, list[str]()
    options = _chosen(options, notes, model)

    def degree(name: str, default: int = 1) -> int:
        return options.size(f"parallelism.{name}", default)

    taken: dict[str, Any] = {
        key: degree(f"{word}-parallel-degree") for key, word in _DEGREES.items()
    }
    tp, pp, cp = taken["tp"], taken["pp"], taken["cp"]
    replicas = degree("data-parallel-replicate-degree")
    others = replicas * tp * pp * cp
    if options.get("parallelism.data-parallel-shard-degree", "-1") == "-1":
        shard = quotient(gpus_in(options, gpus, where), "GPUs", others, "degrees", where)
    else:
        shard = degree("data-parallel-shard-degree")
        world = others * shard
        if "nproc-per-node" in options and world != gpus_in(options, gpus, where):
            started = gpus_in(options, gpus, where)
            raise ValueError(f"{where}: degrees are of {world} GPUs, and it starts {started}")
    if model is None:
        flavor = f"{options['model.name']}_{options.get('model.flavor', '')}"
        model = torchtitan_model(flavor, where).name
    taken["model"] = model
    dp = taken["dp"] = replicas * shard
    size, local = options.size, options.size("training.local-batch-size", 8)
    whole = size("training.global-batch-size", local * dp)
    if options.get("training.global-batch-size") == "-1":
        whole = local * dp
    each = degree("pipeline-parallel-microbatch-size") if pp > 1 else local
    passes = quotient(whole, "global_batch_size", local * dp, "local_batch_size dp", where)
    if pp > 1 and passes > 1:
        raise ValueError(f"{where}: plans know one pass through a pipeline in a step, got {passes}")
    taken["micro_batch"] = each
    taken["micro_batches"] = passes * quotient(
        local, "local_batch_size", each, "microbatch_size", where
    )
    taken["sequence"] = size("training.seq-len", 2048)
    taken["sequence_parallel"] = tp > 1 and "parallelism.no-enable-sequence-parallel" not in options
    taken["zero"] = _zero(options, shard * cp, pp) if dp * cp > 1 else 1
    taken["shard"] = shard if replicas > 1 and taken["zero"] == 3 else 0
    taken["fp32_gradients"] = True
    parts = options.get("compile.components", "model").replace(",", " ").split()
    taken["eager"] = "compile.enable" not in options or "model" not in parts
    taken["cp_kind"] = "ring" if cp == 1 or taken["eager"] else "torch"
    states = options.get("optimizer.implementation")
    taken["optimizer"] = "adam-bf16" if states == "fused_opt_states_bf16" else "adam"
    taken["gemm_dtype"] = _gemm_dtype(options.get("model.converters", "").split(), notes)
    taken["recompute"] = _recomputed(options, model_of(model).layers // pp, notes)
    taken["regather"] = taken["sequence_parallel"] and _regathers(taken["recompute"])
    if unplanned := _unplanned(options):
        notes.append(f"{', '.join(unplanned)}: not planned")
    return _pipeline(options, taken, notes)


def _gemm_dtype(converters: list[str], notes: list[str]) -> str:
    """Return the type of layers' GEMMs."""
    floats = [word for word in converters if "float8" in word or "mx" in word]
    others = [word for word in converters if "float8" not in word]
    if others:
        how = "float8_e4m3fn" if floats else "bfloat16"
        notes.append(f"{', '.join(map(shown, others))} of model.converters: planned in {how}")
    return "float8_e4m3fn" if floats else ""


def _recomputed(options: CommandOptions, layers: int, notes: list[str]) -> str:
    """Return what backward computes again, of a stage with so many layers."""
    chosen = options.get("activation-checkpoint", "selective")
    every = options.get("activation-checkpoint.selective-ac-option", "op")
    if chosen == "selective" and every.isdecimal() and int(every):
        return str(layers // int(every)) if layers >= int(every) else "none"
    if chosen not in _RECOMPUTE.values():
        notes.append(f"activation checkpoints {shown(chosen)}: planned as full")
    return {word: name for name, word in _RECOMPUTE.items()}.get(chosen, "full")


def _zero(options: CommandOptions, shard: int, pp: int) -> int:
    if shard == 1:
        return 0
    reshards = options.get("parallelism.fsdp-reshard-after-forward", "default")
    return 2 if reshards == "never" or (reshards == "default" and pp > 1) else 3


def _pipeline(options: CommandOptions, taken: dict[str, Any], notes: list[str]) -> FilePlan:
    pp, where = taken["pp"], options.where
    hides = taken["dp"] * taken["cp"] > 1
    _, policy = serial_policy(hides_tp=hides and taken["tp"] == 1, hides_dp=hides)
    if any(name.endswith(".enable-async-tensor-parallel") for name in options):
        policy["fused"] = "auto"
    if pp == 1:
        return FilePlan(taken, ("serial", policy), notes)
    schedule = options.get("parallelism.pipeline-parallel-schedule", "1F1B")
    names = {word.lower(): name for name, word in _SCHEDULES.items()}
    if schedule.lower() not in names:
        raise ValueError(
            f"{where}: {shown(schedule)} is not planned; {', '.join(_SCHEDULES.values())} are"
        )
    name = names[schedule.lower()]
    layers = model_of(taken["model"]).layers
    less = [options.size(_LESS.format(end).replace("_", "-"), 1, 0) for end in ("first", "last")]
    stages = pp if name == "serial" else 2 * pp
    each = options.size("parallelism.pipeline-parallel-layers-per-stage", 0)
    if each:
        stages = -(-(layers + sum(less)) // each)
    parts = options.get("parallelism.module-fqns-per-model-part")
    if parts is None:
        counts = _spread(layers, stages, *less)
    else:
        counts = tuple(part.count("layers.") for part in parts.split())
    chunks = quotient(len(counts), "stages", pp, "pp", where)
    if name == "serial":
        taken["split"] = split_of(counts)
        return FilePlan(taken, (name, policy), notes)
    if split_of(counts):
        notes.append(f"stages of {counts} layers: planned as even as possible")
    return FilePlan(taken, (name, {"chunks": chunks} if name == "interleaved" else {}), notes)
