"""Files of plans for the fuzzer: good ones, and checks of what is accepted (see fuzz_files.py)."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace

from flux.bench.shapes import Model
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.machine.cluster import Cluster, load_cluster
from flux.opsim import simulator as op_simulator
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.files import FilePlan
from flux.plan.model import Parallel, step_of
from flux.plan.options import StepOptions, step_with
from flux.plan.policies import planned, policy_of
from flux.trainers.common import Planned
from flux.trainers.files import exported

SIZE = 2**30  # no M, N or K is larger
SHAPE = Problem(Op.ag_gemm, 64, 256, 128, "bfloat16", 2, 1)
STEP = step_of(
    "gpt-6.7b", Parallel(tp=2, pp=2), layers=2, sequence=64, micro_batch=2, micro_batches=1
)
FABRIC = Fabric(replace(load_cluster("cpu"), devices=4), STEP.parallel)
COST = AnalyticCost(FABRIC, STEP.dtype, STEP.itemsize)
GRAPH = build_step(STEP, FABRIC)


def plans_text() -> bytes:
    row = {"tp": 2, "cp": 1, "dp": 1, "pp": 2, "ep": 1, "micro_batch": 1, "micro_batches": 2}
    row |= {"zero": 1, "sequence_parallel": False, "regather": False, "iteration_ms": 12.5}
    row |= {"policy_options": {"name": "domino", "order": "blocks", "slices": 2}}
    document = {"model": "gpt-6.7b", "gpus": 4, "batch": 2, "sequence": 64, "plans": [row]}
    return (json.dumps(document, indent=1) + "\n").encode()


CONFIG = json.dumps(
    {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "sliding_window_pattern": "LLLG",
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
).encode()
JOB = b"""
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 64
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "full"
"""


def trainer_text(trainer: str) -> bytes:
    step = replace(STEP, micro_batches=4, layers=3, split=(1, 2), recompute="full")
    if trainer == "torchtitan":
        step = step_of("llama3-8b", step.parallel, sequence=64, micro_batches=4)
    return exported(trainer, Planned(step, "serial", {})).text.encode()


def deepspeed_text() -> bytes:
    step = replace(STEP, parallel=Parallel(tp=2, dp=2), fp32_gradients=True)
    return exported("deepspeed", Planned(step, "serial", {})).text.encode()


def check_taken(plan: FilePlan) -> None:
    """Its step can be planned, or there is an error in words, as for options in the command."""
    try:
        step = step_with(replace(StepOptions(), **plan.options))
        policy = policy_of(*plan.policy)
        assert all(note.isprintable() for note in plan.notes)
        if step.parallel.world * step.micro_batches <= 16:
            fabric = Fabric(replace(FABRIC.cluster, hosts=64), step.parallel)
            small = replace(step, layers=step.parallel.pp, split=(), dense_layers=0)
            planned(policy, build_step(small, fabric), fabric, COST)
    except ValueError as error:
        assert str(error).isprintable()


def check_model(model: Model) -> None:
    assert model.layer.intermediate or model.layer.moe
    assert 1 <= model.layers <= SIZE and 1 <= model.sequence <= SIZE and model.name.isprintable()
    layer = replace(model.layer)
    step = replace(STEP, layer=layer, layers=2, parallel=Parallel(), dtype=model.dtype)
    graph = build_step(step, replace(FABRIC, parallel=Parallel()))
    assert math.isfinite(sum(map(COST.solo, graph.ops)))


def check_planned(cluster: Cluster) -> None:
    """Steps and calls have finite times on it, or there is an error in words."""
    with suppress(ValueError):
        fabric = Fabric(cluster, STEP.parallel)
        cost = AnalyticCost(fabric, STEP.dtype, STEP.itemsize)
        assert math.isfinite(sum(map(cost.solo, build_step(STEP, fabric).ops)))
    with suppress(ValueError):
        assert math.isfinite(op_simulator.unfused(SHAPE, cluster, None).total_ms)
        assert math.isfinite(op_simulator.simulate(SHAPE, cluster, Knobs()).total_ms)
