"""DeepSpeed's JSON configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flux.core.datafile import Table, load_json
from flux.plan.files import FilePlan
from flux.trainers.common import Exported, Planned, quotient, serial_policy

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"type": "AdamW"},
    "momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "sgd": {"type": "SGD", "params": {"momentum": 0.0}},
}


def exported(plan: Planned) -> Exported:
    """Return the configuration of a plan."""
    step, p = plan.step, plan.step.parallel
    _check(plan)
    plan, notes = plan.for_trainer("DeepSpeed", ("serial",))
    zero: dict[str, Any] = {"stage": step.zero, "overlap_comm": plan.overlaps}
    if step.shard:
        zero["zero_hpz_partition_size"] = step.shard * step.parallel.cp
    content: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": step.micro_batch,
        "gradient_accumulation_steps": step.micro_batches,
        "optimizer": _OPTIMIZERS[step.optimizer],
        "zero_optimization": zero,
        "bf16": {"enabled": step.dtype == "bfloat16"},
        "fp16": {"enabled": step.dtype == "float16"},
    }
    if step.fp32_gradients:
        content |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    if p.tp > 1:
        content["tensor_parallel"] = {"autotp_size": p.tp}
    if p.cp > 1:
        content |= {"sequence_parallel_size": p.cp, "data_parallel_size": p.dp}
    if p.ep > 1:
        content["expert_parallel"] = {"enabled": True, "autoep_size": p.ep}
    if p.pp > 1:
        interval = int(step.recompute == "full")
        content["pipeline"] = {"stages": p.pp, "activation_checkpoint_interval": interval}
    elif step.recompute == "full":
        content["activation_checkpointing"] = {"number_checkpoints": step.layers}
    return Exported(json.dumps(content, indent=2), notes + _differences(plan))


def _check(plan: Planned) -> None:
    step, p = plan.step, plan.step.parallel
    problem = ""
    if step.optimizer not in _OPTIMIZERS:
        problem = f"optimizer = {step.optimizer}: moments in bfloat16 need weights in bfloat16"
    elif step.shard * p.cp == 1:
        problem = "shard = 1: a group of one shares nothing"
    elif step.gemm_dtype:
        problem = f"gemm_dtype = {step.gemm_dtype}"
    elif sum(size > 1 for size in (p.tp, p.cp, p.pp)) > 1:
        problem = (
            f"tp = {p.tp}, cp = {p.cp}, pp = {p.pp}: its AutoTP, Ulysses and pipelines exclude "
        )
        problem += "each other"
    elif p.pp > 1 and step.zero > 1:
        problem = f"pp = {p.pp} with zero = {step.zero}: pipelines take zero 0 and 1"
    elif p.pp > 1 and plan.chunks > 1:
        problem = f"{plan.policy}: its pipelines have one stage on a rank"
    elif p.dp % p.ep:
        problem = f"ep = {p.ep}: its experts are spread over dp = {p.dp}"
    elif step.layer.heads % p.cp:
        problem = f"cp = {p.cp}: it splits heads, and cp must divide {step.layer.heads}"
    if problem:
        raise ValueError(f"DeepSpeed cannot run {problem}")


def _differences(plan: Planned) -> list[str]:
    step, p = plan.step, plan.step.parallel
    world = p.world
    start = (
        f"deepspeed --num_nodes {-(-world // plan.devices)} --num_gpus {min(world, plan.devices)}"
    )
    notes = [
        f"start: {start} YOUR_SCRIPT --deepspeed --deepspeed_config FILE",
        f"the script makes the model, with sequences of {step.sequence}",
    ]
    if step.layer.window and step.layer.window < step.sequence:
        kind = "chunks" if step.layer.chunked else "windows"
        notes.append(f"attention is planned in {kind} of {step.layer.window} tokens")
    if p.pp > 1:
        split = (
            f", and these layers of each stage: {step.stages}" if len(set(step.stages)) > 1 else ""
        )
        notes.append(f"the script calls deepspeed.pipe.PipelineModule(num_stages={p.pp}){split}")
    if p.sequence and p.tp > 1:
        notes.append("AutoTP has no sequence parallelism: more memory, AllReduce")
    if p.cp > 1:
        notes.append(
            "sequences are split outside of attention and heads inside (Ulysses), not keys"
        )
    if step.shard:
        notes.append(f"groups of {step.shard} share weights for backward alone (ZeRO++)")
    if step.recompute not in ("none", "full"):
        notes.append(f"recompute = {step.recompute} is up to the model's code")
    elif step.recompute == "full" and p.pp == 1:
        notes.append("the model's code calls deepspeed.checkpointing for each layer")
    if plan.policy == "serial" and not plan.overlaps and step.zero == 3:
        notes.append("ZeRO-3 gathers weights ahead: faster than planned")
    return notes


_BATCHES = (*("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),)
_IGNORED = (
    *("zero_quantized_weights", "zero_quantized_gradients", "zeropp_loco_param"),
    *("mics_shard_size", "zero_hpz_partition_size"),  # hpZ: a second copy of weights, for backward
)
"""Settings of ZeRO that a plan does not have."""
_CHECKPOINTS = ("partition_activations", "cpu_checkpointing")


def imported(file: Path, gpus: int | None) -> FilePlan:
    """Return what a configuration says of a plan; model and sequences are the script's."""
    where, notes = str(file), ["model and sequence: of --model and --sequence"]
    content, automatic = load_json(file), list[str]()
    top = Table.of_json(file, _given(content, "", automatic), "a configuration of DeepSpeed")
    if sizes := [key for key in _BATCHES if key in automatic]:
        notes.append(f"{', '.join(sizes)}: auto, the script's; --micro-batch says it")
    if "zero_optimization.stage" in automatic:
        notes.append("zero_optimization.stage: auto: planned as 0; --zero says it")

    def table(key: str) -> Table:
        return top.table(key) if key in top.keys else Table(top.file, {})

    zero, pipeline, states = table("zero_optimization"), table("pipeline"), table("optimizer")
    tp = table("tensor_parallel").integer("autotp_size", 1)
    cp = top.integer("sequence_parallel_size", 1)
    stages = pipeline.integer("stages", 1)
    taken: dict[str, Any] = {"tp": tp, "cp": cp, "pp": stages}
    taken["ep"] = table("expert_parallel").integer("autoep_size", 1)
    for key in ("offload_optimizer", "offload_param"):
        if key in zero.keys and zero.table(key).text("device", "cpu") != "none":
            notes.append(f"{key}: not planned")
    checkpoints = table("activation_checkpointing")
    for inside, keys in ((zero, _IGNORED), (checkpoints, _CHECKPOINTS)):
        notes += [f"{key}: not planned" for key in keys if key in inside.keys]
    kinds = [table(key) for key in ("bf16", "fp16") if key in top.keys]
    if not any(kind.flag("enabled") if "enabled" in kind.keys else True for kind in kinds):
        notes.append("neither bf16 nor fp16: planned in bfloat16, not float32")
    ranks = gpus and quotient(gpus, "GPUs", tp * cp * stages, "tp cp pp", where)
    taken |= _batches(top, ranks) | {"sequence_parallel": False}
    taken["zero"] = stage = zero.integer("stage", 0, least=0, most=3)
    overlaps = zero.flag("overlap_comm") if "overlap_comm" in zero.keys else stage == 3
    taken["fp32_gradients"] = table("data_types").text("grad_accum_dtype", "") == "fp32"
    whole = pipeline.integer("activation_checkpoint_interval", 0, least=0)
    whole = whole or "number_checkpoints" in checkpoints.keys
    taken["recompute"] = "full" if whole else "none"
    kind = states.text("type", "AdamW").lower()
    if kind == "sgd":
        params = states.table("params") if "params" in states.keys else states
        taken["optimizer"] = "momentum" if params.number("momentum", 0.0) else "sgd"
    elif kind not in ("adam", "adamw", "fusedadam"):
        notes.append(f"optimizer {kind}: planned as Adam")
    return FilePlan(taken, serial_policy(hides_tp=overlaps and tp == 1, hides_dp=overlaps), notes)


def _given(content: Any, prefix: str, automatic: list[str]) -> Any:
    """Return content without null and what Transformers fills in, whose names go into a list."""
    if not isinstance(content, dict):
        return content
    names = [key for key, value in content.items() if value == "auto"]
    automatic += [prefix + key for key in names]
    return {
        key: _given(value, f"{prefix}{key}.", automatic)
        for key, value in content.items()
        if key not in names and value is not None
    }


def _batches(top: Table, ranks: int | None) -> dict[str, int]:
    """Return data parallel ranks and micro-batches: of three sizes, DeepSpeed computes the third.

    Args:
        top: the configuration.
        ranks: data parallel ones; None: not known.
    """
    given = {key: top.integer(key) for key in _BATCHES if key in top.keys}
    batch, micro, count = map(given.get, _BATCHES)
    where = str(top.file)
    if batch and micro and count:
        ranks = quotient(batch, "train_batch_size", micro * count, "micro-batches", where)
    elif ranks is None:
        missing = next(key for key in _BATCHES if key not in given)
        raise ValueError(f"{where} has no {missing}: give --gpus")
    elif batch:
        each = ranks * (micro or count or 1)
        rest = quotient(batch, "train_batch_size", each, "dp and the other size", where)
        micro, count = (micro, rest) if micro else (rest, count)
    return {"dp": ranks, "micro_batch": micro or 1, "micro_batches": count or 1}
