"""Inference: prefills and decodes against closed forms, the command, and the Flux paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flux_paper
import pytest
from typer.testing import CliRunner

from flux.bench.model_files import model_of
from flux.bench.shapes import Layer
from flux.cli.app import app
from flux.core.knobs import Op as FusedOp
from flux.machine.cluster import load_cluster
from flux.plan.graph import Operator
from flux.plan.model import Parallel, ServingStep, serving_step, step_of
from flux.plan.policies import policy_of
from flux.plan.sample import StepLayout
from flux.plan.serve import Deployment, rows
from flux.select.cost import collective_ms

H800 = replace(load_cluster("flux-h800"), hosts=16)
CACHE_BYTES = {  # of a token in all layers, bfloat16
    "llama-3.1-8b": 2 * 8 * 128 * 2 * 32,
    "qwen2.5-7b": 2 * 4 * 128 * 2 * 28,
    "mixtral-8x7b": 2 * 8 * 128 * 2 * 32,
    "qwen3-30b-a3b": 2 * 4 * 128 * 2 * 48,
    "deepseek-v3": (512 + 64) * 2 * 61,
}
GB_PER_MS = 3.350 * 0.8
"""Of an H800, and the share of it that kernels reach."""


def step_with(model: str, *, decodes: bool, sequence: int = 2048, **changes: Any) -> ServingStep:
    own = {key: changes.pop(key) for key in list(changes) if key in Parallel.__annotations__}
    kv_dtype = changes.pop("kv_dtype", "")
    step = step_of(model, Parallel(**own), sequence=sequence, micro_batches=1, **changes)
    return serving_step(step, decodes=decodes, kv_dtype=kv_dtype)


def layout_of(step: ServingStep) -> StepLayout:
    return StepLayout(H800, step)


def weights_read(op: Operator) -> int:
    """Return elements of an operator's weights."""
    if op.kind == "gemm":
        return op.shape[1] * op.shape[2]
    return op.shape[1] * op.shape[2] * op.shape[3] if op.kind == "grouped_gemm" else 0


@pytest.mark.parametrize("model", CACHE_BYTES)
def test_a_decode_reads_all_weights_and_the_cache_once(model: str) -> None:
    batch, context = 512, 3000  # so many that each expert is read
    step = step_with(model, decodes=True, sequence=context, micro_batch=batch)
    ops, described = layout_of(step).graph.ops, model_of(model)
    read = sum(map(weights_read, ops))
    embedding = 0 if described.tied else step.table_weights
    assert read == pytest.approx(described.parameters - embedding, rel=1e-3)
    assert step.resident(0)["weights"] == pytest.approx(2 * (read + embedding), rel=1e-3)
    cached = sum(op.shape[0] * op.shape[2] * op.shape[4] for op in ops if "cached" in op.kind)
    assert cached == batch * context * CACHE_BYTES[model] == batch * step.cache_bytes(context)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_the_time_of_a_decode_is_bytes_over_bandwidth_and_launches(model: str) -> None:
    batch, context = 64, 2048
    layout = layout_of(step_with(model, decodes=True, sequence=context, micro_batch=batch))
    gb = 2e-9 * (model_of(model).parameters - layout.step.table_weights)
    gb += 1e-9 * batch * context * CACHE_BYTES[model]
    launches = 3e-3 * len(layout.graph.ops)
    time = layout.timeline(policy_of("serial")).iteration_ms
    assert time == pytest.approx(gb / GB_PER_MS + launches, rel=0.04)


@pytest.mark.parametrize("model", CACHE_BYTES)
def test_a_prefill_has_the_operations_of_its_weights_and_pairs(model: str) -> None:
    length = 4096
    step = step_with(model, decodes=False, sequence=length, micro_batch=2)
    done = 0.0
    for op in layout_of(step).graph.ops:
        if "gemm" in op.kind:
            done += 2.0 * op.shape[0] * op.shape[1] * op.shape[2]
        elif op.kind == "attention":
            batch, heads, queries, keys, width = op.shape
            done += 4.0 * batch * heads * queries * keys * width / 2
    assert done == pytest.approx(step.operations, rel=1e-3)
    if model == "llama-3.1-8b":
        layers = 32 * (4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336)
        pairs = 32 * 4 * 4096 * length / 2  # of a token
        assert done == pytest.approx(2 * length * (2 * layers + pairs) + 4 * 128256 * 4096)


def test_experts_that_no_token_goes_to_are_not_read() -> None:
    step = step_with("deepseek-v3", decodes=True, micro_batch=1)
    assert step.experts_read(1) == 8 and step.experts_read(4096) == 256
    shared = step_with("deepseek-v3", decodes=True, micro_batch=1, dp=16, ep=16)
    assert shared.experts_read(1) == round(16 * (1 - (1 - 8 / 256) ** 16))


def test_tensor_parallel_ranks_share_experts_heads_and_cache() -> None:
    whole = step_with("mixtral-8x7b", decodes=True, micro_batch=64)
    parts = step_with("mixtral-8x7b", decodes=True, micro_batch=64, tp=8)
    assert parts.resident(0)["weights"] == pytest.approx(whole.resident(0)["weights"] / 8, rel=1e-3)
    assert parts.cache_bytes(100) == whole.cache_bytes(100) / 8
    reads = [sum(map(weights_read, layout_of(step).graph.ops)) for step in (whole, parts)]
    assert reads[1] == pytest.approx(reads[0] / 8, rel=1e-3)  # routers are on each
    few = step_with("llama-3.1-8b", decodes=True, tp=8)  # as many ranks as heads of keys
    more = step_with("llama-3.1-8b", decodes=True, tp=16)  # the others have copies
    assert more.kv_bytes == few.kv_bytes
    latent = step_with("deepseek-v3", decodes=True, tp=8)
    assert latent.cache_bytes(1) == CACHE_BYTES["deepseek-v3"]


def test_windows_bound_the_cache_and_what_is_read() -> None:
    step = step_with("gemma-2-9b", decodes=True, sequence=8192)
    token = 2 * 8 * 256 * 2
    assert step.cache_bytes(8192) == 21 * token * (4096 + 8192)
    keys = [op.shape[2] for op in layout_of(step).graph.ops if op.kind == "cached_attention"]
    assert sorted(set(keys)) == [4096, 8192] and len(keys) == 42


def test_smaller_dtypes_of_weights_and_cache_are_smaller_and_faster() -> None:
    usual = step_with("llama-3.1-8b", decodes=True, micro_batch=64)
    small = step_with(
        "llama-3.1-8b",
        decodes=True,
        micro_batch=64,
        gemm_dtype="float8_e4m3fn",
        kv_dtype="float8_e4m3fn",
    )
    tables = 2 * 2 * 128256 * 4096
    weights = usual.resident(0)["weights"] - tables
    assert small.resident(0)["weights"] == pytest.approx(weights / 2 + tables)
    assert small.cache_bytes(7) == usual.cache_bytes(7) / 2
    times = [layout_of(s).timeline(policy_of("serial")).iteration_ms for s in (usual, small)]
    assert times[1] < times[0]


@pytest.mark.parametrize("sequence", [False, True], ids=["all_reduce", "sequence"])
def test_all_linears_of_inference_can_be_fused_and_are_faster(sequence: bool) -> None:
    layout = layout_of(
        serving_step(
            step_of("llama2-70b", Parallel(tp=8, sequence=sequence), sequence=2048, layers=4),
            decodes=False,
        )
    )
    assert {op.role for op in layout.graph.ops} == {"fwd"}
    which = "all" if sequence else "row"
    fused = layout.timeline(policy_of("serial", {"fused": which}))
    kinds = [op.kind for op in fused.schedule.graph.ops if op.group == "tp"]
    assert set(kinds) == ({"ag_gemm", "gemm_rs"} if sequence else {"gemm_ar"})
    assert fused.iteration_ms < layout.timeline(policy_of("serial")).iteration_ms


def test_small_messages_take_the_latency_of_their_protocol() -> None:
    """8 KiB over PCIe between 8 A800: github.com/vllm-project/vllm/issues/50576."""
    pcie = load_cluster("flux-a100-pcie")
    small = collective_ms(FusedOp.gemm_ar, 1024, 8, 8, pcie, low_latency=True)
    assert small == pytest.approx(0.057, rel=0.1)
    large = [
        collective_ms(FusedOp.gemm_ar, 1e8, 8, 8, pcie, low_latency=low) for low in (False, True)
    ]
    assert large[0] == large[1]


def deployed(model: str, batch: int = 64, **changes: Any) -> dict[str, Any]:
    own = {key: changes.pop(key) for key in list(changes) if key in Parallel.__annotations__}
    step = step_of(model, Parallel(**own), sequence=1024, **changes)
    (row,) = rows([("serial", {})], Deployment.of(step, batch, 128), H800)
    return row


def test_rates_follow_from_the_times_of_prefills_and_decodes() -> None:
    row = deployed("llama-3.1-8b")
    answers = 64 * row["first_token_ms"] + 128 * row["token_ms"]
    assert row["tokens_per_s_per_device"] == pytest.approx(1e3 * 64 * 128 / answers)
    memory = row["memory_bytes"]
    assert memory["cache"] == 64 * 1152 * CACHE_BYTES["llama-3.1-8b"]
    free = 76e9 - memory["weights"] - memory["activations"]
    assert row["most_sequences"] == int(free // (1152 * CACHE_BYTES["llama-3.1-8b"]))
    assert 0.3 < row["prefill_mfu"] < 1
    # Another replica changes nothing for the first one.
    assert deployed("llama-3.1-8b", dp=2) == row | {"dp": 2}


def test_a_pipeline_halves_memory_and_its_groups_take_turns() -> None:
    one, two = deployed("llama-3.1-8b"), deployed("llama-3.1-8b", pp=2)
    assert two["memory_bytes"]["weights"] == pytest.approx(one["memory_bytes"]["weights"] / 2)
    assert two["memory_bytes"]["cache"] == one["memory_bytes"]["cache"] / 2
    # Two groups of 32 in turn read all weights twice as often: no faster than one of 64.
    assert one["token_ms"] * 0.8 < two["token_ms"] < one["token_ms"] * 1.1
    assert two["first_token_ms"] >= one["first_token_ms"]


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ("--policy dhelix", 2, "dhelix schedules training; take one of serial, domino"),
        ("--kv-dtype int3", 2, "kv_dtype must be one of"),
        ("--pp 3", 2, "pp = 3 must divide batch = 64"),
        ("--output 0", 2, "output must be"),
        ("--hosts 0", 2, "hosts must be at least 1"),
        ("--model mixtral-8x7b --tp 16 --ep 3", 2, "ep = 3 must divide dp = 1"),
        ("--batch 700", 1, "holds 621 sequences; use a smaller batch"),
        ("--policy domino:slices=3", 1, "slices=3: 3 slices must divide a micro-batch of 1"),
        ("--policy serial:fused=column", 1, "communication beside columns' GEMMs"),
    ],
)
def test_the_command_says_what_cannot_be_served(arguments: str, status: int, message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "serve", *arguments.split()])
    assert result.exit_code == status, result.output
    assert message in " ".join(result.output.split())


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    target = tmp_path / "serve.json"
    arguments = ["plan", "serve", "--layers", "2", "--json", str(target)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    serial, fused = json.loads(target.read_text())
    assert f"{serial['token_ms']:.2f}" in result.output and "sequences of this" in result.output
    assert fused["policy"] == "serial fused=auto: row" and fused["token_ms"] < serial["token_ms"]


def test_widths_that_ranks_cannot_share_are_refused() -> None:
    layer = Layer(64, 256, 8, 8, 8, True)
    with pytest.raises(ValueError, match="tp = 16 must divide intermediate = 1000 of experts"):
        experts = replace(model_of("mixtral-8x7b").layer.moe, intermediate=1000)  # type: ignore
        step = step_with("mixtral-8x7b", decodes=True)
        replace(step, layer=replace(step.layer, moe=experts), parallel=Parallel(tp=16))
    assert layer.reach(0, 9) == 9
    with pytest.raises(ValueError, match="one token of each sequence, and cp = 2"):
        step_with("llama-3.1-8b", decodes=True, cp=2)


def test_the_papers_speedups_are_ours_or_have_a_cause() -> None:
    content = json.loads(flux_paper.RESULT.read_text())
    far = {key for key, _, off in flux_paper.compared(content) if abs(off) > 0.15}
    assert far <= flux_paper.CAUSES.keys()
    cluster, model = "flux-h800", "llama2-70b"
    _, (_, step), *_ = flux_paper.steps(cluster, model)
    again = flux_paper.entry(cluster, model, "prefill", step)
    kept = [e for e in content["rows"] if all(e[key] == again[key] for key in ("cluster", "model"))]
    (row,) = [e for e in kept if e["phase"] == "prefill"]
    assert row["ms"] == pytest.approx(again["ms"])
