"""Plans for Megatron, torchtitan and DeepSpeed, and back: `flux plan export`, `--plan`."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.bench.scripts import options_in
from flux.bench.shapes import Latent, Layer, Moe
from flux.cli.app import app
from flux.plan.files import options_with, read_plan
from flux.plan.model import Parallel, TrainingStep, even_split, step_of
from flux.plan.options import StepOptions, step_with
from flux.plan.policies import policy_of
from flux.trainers.common import RELEASES, Planned
from flux.trainers.files import exported

DENSE = Layer(64, 256, 8, 4, 8, True)
EXPERTS = Layer(64, 256, 8, 8, 8, True, Moe(8, 2, 32, 32))
LATENT = Layer(64, 256, 8, 8, 12, True, Moe(8, 2, 32), Latent(16, 8, 4, 8), dropout=False)
TURNS = replace(EXPERTS, moe=Moe(8, 2, 32, 32, every=2))
WINDOW = Layer(64, 256, 8, 4, 16, False, window=16, full_every=2)
FACTS = Path(__file__).with_name("trainer_options.json")


def plans(trainer: str, count: int) -> Iterator[Planned]:
    """Yield plans of every kind of parallelism, ZeRO, recomputation, split and policy."""
    rng = random.Random(43)
    degrees = [{}, {"cp": 2, "dp": 4}, {"tp": 2, "cp": 2, "pp": 2}, {"pp": 4, "dp": 4}]
    choices = itertools.product(
        (*degrees, {"tp": 4, "dp": 2}, {"dp": 8, "ep": 4}),
        (0, 1, 2, 3),
        ("none", "selective", "ops", "full", "2"),
        ("serial", "interleaved", "zbv", "domino", "centauri", "dhelix", "fused", "overlap"),
        ("adam", "adam-bf16", "momentum", "sgd"),
        (False, True),
    )
    own = {"fused": {"fused": "auto"}, "overlap": {"wgrad_overlap": True}}
    known = step_of("llama3-8b", Parallel())
    for parts, zero, recompute, policy, optimizer, flag in rng.sample(list(choices), count):
        with_experts = (EXPERTS, TURNS) if trainer == "megatron" else (EXPERTS,)
        layers_of = (DENSE, LATENT, WINDOW, *with_experts) if "ep" not in parts else with_experts
        layer = rng.choice(layers_of)
        layers, split = rng.choice(((8, ()), (14, ()), (8, (1, 3, 3, 1))))
        parallel = Parallel(**parts, sequence=flag)
        dtype = "bfloat16" if trainer == "torchtitan" else rng.choice(("bfloat16", "float16"))
        sharded = zero == 3 and layer.moe is None and parallel.dp > 2
        step = TrainingStep(
            *("plan", layer, layers, dtype, parallel),
            *(rng.choice((64, 96)), rng.choice((1, 2, 3)), rng.choice((4, 8, 12)), zero),
            regather=flag and parallel.tp > 1,
            shard=parallel.dp // 2 if sharded else 0,
            vocabulary=512,
            tied=flag,
            dense_layers=1 if layer.moe and layer.moe.every == 1 else 0,
            recompute=recompute,
            split=split if len(split) == parallel.pp else (),
            optimizer=optimizer,
            fp32_gradients=not flag,
            unfused_attention=flag and trainer != "torchtitan",
            cp_kind="all_gather" if flag else "ring",
            gemm_dtype="float8_e4m3fn" if zero == 2 and trainer != "deepspeed" else "",
        )
        if trainer == "torchtitan" and layer.moe is None:
            step = replace(step, layer=known.layer, layers=32, split=(), tied=False, eager=flag)
            step = replace(step, vocabulary=known.vocabulary)
        yield Planned(step, "serial" if policy in own else policy, own.get(policy, {}))


def taken(trainer: str, plan: Planned, directory: Path) -> tuple[TrainingStep, Planned]:
    """Return the step and the plan that come back from a trainer's file."""
    file = directory / f"plan.{'json' if trainer == 'deepspeed' else 'sh'}"
    file.write_text(exported(trainer, plan).text)
    found = read_plan(str(file))
    options = found.options
    if trainer == "deepspeed":  # the model is not in its file
        model = directory / "model.sh"
        whole = replace(plan.step, zero=1, shard=0, recompute="none")
        model.write_text(exported("megatron", Planned(whole, "serial", {})).text)
        options = options | {"model": str(model)}
    step = step_with(replace(StepOptions(), **options))
    return step, Planned(step, found.policy[0], found.policy[1])


def possible(trainer: str, plan: Planned) -> TrainingStep:
    """Return the step as a trainer can run it: what its notes say, and no more."""
    step, p = plan.step, plan.step.parallel
    sequence = p.sequence and p.tp > 1 and trainer != "deepspeed"
    changes: dict[str, Any] = {
        "parallel": replace(p, sequence=sequence),
        "regather": sequence and (trainer == "megatron" or step.recompute == "ops"),
    }
    if step.stages == even_split(step.layers, p.pp) or plan.policy == "interleaved":
        changes["split"] = ()
    if trainer == "megatron" and step.recompute.isdecimal() and plan.policy == "interleaved":
        changes["recompute"] = str(-(-int(step.recompute) // plan.chunks) * plan.chunks)
    elif trainer == "torchtitan":
        changes |= {"fp32_gradients": True, "gemm_dtype": ""}
        kept = step.zero > 1 or (step.zero == 0 and p.cp == 1)
        changes["zero"] = (step.zero if kept else 2) if p.dp * p.cp > 1 else 1
        changes["shard"] = step.shard if p.dp > 1 else 0
        changes |= {} if step.recompute in ("none", "ops", "full") else {"recompute": "full"}
    elif trainer == "deepspeed":
        changes |= {"split": (), "unfused_attention": False, "shard": 0}
        changes |= {} if step.recompute == "full" else {"recompute": "none"}
    if trainer != "megatron" or (p.cp == 1 and not step.unfused_attention):
        compiled = trainer == "torchtitan" and p.cp > 1 and not step.eager
        changes["cp_kind"] = "torch" if compiled else "ring"
    return replace(step, **changes)


def hides(plan: Planned, option: str) -> bool:
    return plan.options.get(option, False) not in (False, "none")


@pytest.mark.parametrize("trainer", RELEASES)
def test_a_plan_comes_back_from_a_trainers_file(trainer: str, tmp_path: Path) -> None:
    back = 0
    for plan in plans(trainer, 150):
        if trainer == "torchtitan" and plan.step.layer.moe is not None:
            continue
        try:
            step, again = taken(trainer, plan, tmp_path)
        except ValueError as error:
            assert "cannot run" in str(error), plan
            continue
        back += 1
        wanted = possible(trainer, plan)
        assert replace(step, name="", layer=wanted.layer) == replace(wanted, name=""), plan
        assert replace(step.layer, dropout=wanted.layer.dropout) == wanted.layer
        policy_of(again.policy, again.options)
        if again.policy != "serial":
            assert (again.policy, again.chunks) == (plan.policy, plan.chunks)
        else:  # Megatron hides dgrads' collectives always, the others never; FSDP2 its own
            p = step.parallel
            assert p.tp == 1 or hides(again, "wgrad_overlap") == (trainer == "megatron"), plan
            always = trainer == "torchtitan"
            assert p.dp * p.cp == 1 or again.overlaps == (plan.overlaps or always), plan
            assert hides(again, "fused") <= (hides(plan, "fused") or plan.policy == "domino")
    assert back > 20


def options_of(trainer: str, text: str, directory: Path) -> dict[str, str]:
    """Return what an exported text sets, "" for flags, by the names of the table."""
    if trainer != "deepspeed":
        file = directory / "words.sh"
        file.write_text(text[text.index(".train" if trainer == "torchtitan" else "_gpt.py") :])
        return options_in(file)
    flat: dict[str, str] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = "" if isinstance(value, bool) else str(value)

    walk(json.loads(text), "")
    return flat


def test_a_compiled_plan_is_compiled_where_a_configuration_compiles_the_loss_alone(
    tmp_path: Path,
) -> None:
    step = step_of("deepseek_v3_16B", Parallel(dp=8, ep=8), sequence=4096, zero=3)
    for eager in (False, True):
        plan = Planned(replace(step, eager=eager), "serial", {})
        assert taken("torchtitan", plan, tmp_path)[0].eager is eager
        commas = "--compile.components model,loss" in exported("torchtitan", plan).text
        assert commas is not eager


def test_a_configuration_with_async_tp_runs_without_it_if_planned_so(tmp_path: Path) -> None:
    step = step_of("llama3_405B", Parallel(tp=8, dp=8, sequence=True), sequence=8192, zero=3)
    for eager, fused in ((True, "none"), (False, "none"), (False, "auto")):
        plan = Planned(replace(step, eager=eager), "serial", {"fused": fused})
        again = taken("torchtitan", plan, tmp_path)[1]
        assert hides(again, "fused") == hides(plan, "fused")


@pytest.mark.parametrize(
    "model, dtype, config",
    [
        ("qwen3_8B", "", "sft_qwen3_8b_math"),  # not the first one, which has NVFP4
        ("deepseek_v3_671B", "float8_e4m3fn", "deepseek_v3_671b_float8"),
        ("llama3_8B", "float8_e4m3fn", "llama3_8b"),
        ("llama3_405B", "", "llama3_405b"),
    ],
)
def test_a_configuration_of_torchtitan_multiplies_as_planned_or_a_note_says_it(
    model: str, dtype: str, config: str
) -> None:
    step = step_of(model, Parallel(dp=8), sequence=4096, zero=3, gemm_dtype=dtype)
    text, notes = exported("torchtitan", Planned(step, "serial", {}))
    assert f"--config {config} " in text
    note = any("float8" in note for note in notes)
    assert note == (config in ("llama3_8b", "llama3_405b"))


def test_megatron_takes_one_expert_by_another_softmax_and_only_heads_that_fit() -> None:
    step = step_of("llama-4-maverick", Parallel(dp=8, ep=8), sequence=4096)
    assert "--moe-router-pre-softmax" in exported("megatron", Planned(step, "serial", {})).text
    dense = step_of("llama3-8b", Parallel(tp=4))
    _, notes = exported("megatron", Planned(replace(dense, eager=True), "serial", {}))
    assert any(note.startswith("Megatron fuses norms") for note in notes)
    step = replace(dense, layer=replace(dense.layer, heads=40, kv_heads=10))
    with pytest.raises(ValueError, match="tp = 4: 10 heads of keys must be a multiple"):
        exported("megatron", Planned(step, "serial", {}))


@pytest.mark.parametrize("trainer", RELEASES)
def test_a_pipeline_with_stages_of_its_own_is_not_exported_with_others(trainer: str) -> None:
    step = step_of("llama3-8b", Parallel(pp=4), micro_batches=8, zero=0, split=(7, 8, 8, 9))
    with pytest.raises(ValueError, match="interleaved cannot run split: it cuts"):
        exported(trainer, Planned(step, "interleaved", {}))


@pytest.mark.parametrize("trainer", RELEASES)
def test_options_are_those_of_the_release(trainer: str, tmp_path: Path) -> None:
    known: dict[str, Any] = json.loads(FACTS.read_text())[trainer]
    assert RELEASES[trainer] in known.pop("release")
    if trainer != "deepspeed":
        known = {key.replace("_", "-"): kind for key, kind in known.items()}
    kinds = {"int": "[0-9]+", "float": r"[0-9]+\.[0-9]+", "flag": ""}
    used = set()
    for plan in plans(trainer, 400):
        with suppress(ValueError):
            for key, value in options_of(trainer, exported(trainer, plan).text, tmp_path).items():
                kind = known[key]
                pattern = kinds.get(kind, kind) if isinstance(kind, str) else "|".join(kind)
                assert re.fullmatch(pattern, value), (key, value)
                used.add(key)
    unused = {"fp16", "accumulate-allreduce-grads-in-fp32", "parallelism.context-parallel-degree"}
    assert set(known) - used <= unused


SHOWN = {
    "megatron": (
        "gpt3-175b --tp 8 --pp 8 --dp 2 --sequence-parallel --micro-batch 1 --micro-batches 64 "
        "--recompute full --policy interleaved:chunks=2"
    ),
    "torchtitan": (
        "llama3-8b --tp 2 --cp 2 --dp 8 --zero 3 --sequence-parallel --micro-batch 1 "
        "--micro-batches 2 --recompute ops --policy serial:wgrad_overlap=true"
    ),
    "deepspeed": (
        "llama3-8b --tp 1 --dp 16 --zero 3 --micro-batch 2 --micro-batches 2 --recompute full "
        "--policy serial:wgrad_overlap=true"
    ),
}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def shown(trainer: str) -> str:
    result = run("export", "--to", trainer, "--model", *SHOWN[trainer].split())
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def words_after(program: str, text: str) -> list[str]:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return words[words.index(program) + 1 :]


def test_megatrons_parser_takes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    words = words_after("pretrain_gpt.py", shown("megatron"))
    words += ["--mock-data", "--train-iters", "1", "--lr", "1", "--tokenizer-type", "NullTokenizer"]
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
    for name, value in {
        "WORLD_SIZE": "128",
        "RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    args = arguments.validate_args(arguments.parse_args())
    assert (args.data_parallel_size, args.global_batch_size) == (2, 128)
    assert args.virtual_pipeline_model_parallel_size == 2
    made = arguments.core_transformer_config_from_args(args)
    assert (made.recompute_granularity, made.sequence_parallel) == ("full", True)


def test_scales_of_float8_are_those_of_the_tensors_at_hand() -> None:
    """Megatron's default, delayed scaling, excludes that norms are computed again."""
    step = step_of("llama3-8b", Parallel(dp=8), gemm_dtype="float8_e4m3fn", recompute="ops")
    assert "--fp8-recipe tensorwise" in exported("megatron", Planned(step, "serial", {})).text


def test_torchtitans_parser_takes_a_plan() -> None:
    manager = pytest.importorskip("torchtitan.config.manager", exc_type=ImportError)
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", exc_type=ImportError)
    made = manager.ConfigManager().parse_args(words_after("torchtitan.train", shown("torchtitan")))
    degrees = dims.ParallelDims.from_config(made.parallelism, 32)
    assert (degrees.dp_shard, degrees.cp, degrees.tp, degrees.pp) == (8, 2, 2, 1)
    assert (made.training.local_batch_size, made.training.global_batch_size) == (1, 16)
    assert type(made.activation_checkpoint).__qualname__ == "SelectiveAC.Config"


def test_deepspeeds_parser_takes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: 16)
    made = config.DeepSpeedConfig(json.loads(shown("deepspeed")), mpu=ranks)
    assert (made.train_batch_size, made.gradient_accumulation_steps) == (64, 2)
    assert made.zero_config.stage == 3 and made.zero_config.overlap_comm


def test_commands_take_plans_of_a_search_and_of_trainers(tmp_path: Path) -> None:
    plan = {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 1, "micro_batch": 1, "micro_batches": 8}
    plan |= {"zero": 1, "sequence_parallel": True, "regather": True}
    other = plan | {"pp": 1, "dp": 4, "policy_options": {"name": "domino", "slices": 2}}
    plan["policy_options"] = {"name": "zbv"}
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"model": "llama3-8b", "sequence": 4096, "plans": [plan, other]}))
    first = run("export", "--to", "megatron", "--plan", str(file))
    assert "# Megatron has no zbv, and runs 1F1B without it" in first.stdout
    script = tmp_path / "train.sh"
    text = first.stdout.replace("tensor-model-parallel-size 2", "tensor-model-parallel-size ${TP}")
    script.write_text("TP=2\n" + text)
    priced = run("simulate", "--plan", str(script), "--cluster", "selene", "--json", "-")
    assert priced.exit_code == 0, priced.output
    rows = json.loads(priced.stdout)
    row = rows if isinstance(rows, dict) else rows[0]
    assert [row[key] for key in ("tp", "dp", "pp", "policy")] == [2, 2, 2, "serial"]
    second = run("export", "--to", "torchtitan", "--plan", str(file), "--row", "2")
    assert "docs/use/domino.md has the runtime for it" in second.stdout
    for words, problem in (
        (["--to", "megatron", "--plan", str(file), "--row", "3"], "row must be from 1 to 2, got 3"),
        (["--to", "nemo"], "--to must be one of megatron, torchtitan, deepspeed, got 'nemo'"),
        (
            ["--to", "deepspeed", "--pp", "2", "--tp", "1", "--zero", "2"],
            "pipelines take zero 0 and 1",
        ),
        (
            ["--to", "megatron", "--policy", "serial", "--policy", "zbv"],
            "export takes one --policy",
        ),
        (["--to", "megatron", "--plan", str(tmp_path / "train.py")], "a plan's file ends in .json"),
    ):
        refused = run("export", *words)
        assert refused.exit_code == 2 and problem in " ".join(refused.stderr.split())
    script.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64")
    refused = run("simulate", "--plan", str(script))
    assert "give --gpus" in refused.stderr
    script.write_text(script.read_text() + " --hybrid-layer-pattern M*M-")
    assert "do not know state-space layers" in run("simulate", "--plan", str(script)).stderr


@pytest.mark.parametrize(
    "ranks, flags, policy",
    [
        ((8, 16), "", {"wgrad_overlap": True, "overlap_grad_reduce": False}),
        ((8, 16), "--overlap-grad-reduce", {"wgrad_overlap": True}),
        ((8, 8), "", {"wgrad_overlap": True}),
        ((1, 8), "", {}),
        ((1, 8), "--overlap-grad-reduce", {"wgrad_overlap": True}),
        ((1, 1), "--overlap-grad-reduce", {}),
    ],
    ids=str,
)
def test_megatron_hides_collectives_of_dgrads_and_of_gradients_if_asked(
    ranks: tuple[int, int], flags: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --bf16 "
        f"--micro-batch-size 1 --tensor-model-parallel-size {ranks[0]} {flags}"
    )
    found = read_plan(str(script), gpus=ranks[1])
    assert found.policy == ("serial", policy)
    step = step_with(replace(StepOptions(), **found.options))
    again = read_plan(str(write(script, Planned(step, "serial", policy))))
    assert again.policy == found.policy and again.options["dp"] == found.options["dp"]


def write(script: Path, plan: Planned) -> Path:
    script.write_text(exported("megatron", plan).text)
    return script


def test_what_other_files_say_becomes_a_plan(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n'
        "[training]\nlocal_batch_size = 4\nseq_len = 4096\n"
        "[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n[activation_checkpoint]\nmode = "full"\n'
    )
    found = read_plan(str(job), gpus=32)
    names = ("model", "tp", "pp", "dp", "micro_batches", "zero", "recompute", "sequence", "eager")
    wanted = ["llama3_8B", 2, 4, 4, 4, 2, "full", 4096, True]
    assert [found.options[name] for name in names] == wanted
    assert found.policy == ("interleaved", {"chunks": 2})
    script = tmp_path / "train.sh"
    text = (
        "N=16; torchrun --nproc_per_node=$N pretrain_gpt.py --num-layers 14 --hidden-size 64 \\\n"
        "--num-attention-heads 4 --seq-length 64 --bf16 --use-torch-fsdp2 --micro-batch-size 2 "
        "--global-batch-size 64 --pipeline-model-parallel-size 4 --recompute-activations "
        '"--optimizer-cpu-offload" "--fp8-format hybrid" '
    )
    less = "--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split"
    script.write_text(text + less)
    found = read_plan(str(script))
    names = ("dp", "pp", "micro_batches", "zero", "recompute", "gemm_dtype", "split")
    wanted = [4, 4, 8, 3, "selective", "float8_e4m3fn", ""]
    assert [found.options[name] for name in names] == wanted
    script.write_text(text.replace("pretrain_gpt", "pretrain_bert"))
    with pytest.raises(ValueError, match="trains no GPT"):
        read_plan(str(script))
    assert found.notes == [
        "--optimizer-cpu-offload: the optimizer's steps on CPUs: not planned",
        "no --vocab-size: planned without embedding and head",
    ]
    for more in (
        "--decoder-first-pipeline-num-layers 2",
        "--pipeline-model-parallel-layout 'Ett|(t*4|)*2ttttL'",
    ):
        script.write_text(text + more)
        assert read_plan(str(script)).options["split"] == "2,4,4,4"
    # A stage of layers for several tokens, of which plans have none.
    script.write_text(text + "--pipeline-model-parallel-layout 'Ett|(ttt|)*4|m|L'")
    assert read_plan(str(script)).policy[0] == "interleaved"
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    with pytest.raises(ValueError, match="has no train_batch_size: give --gpus"):
        read_plan(str(config))
    found = read_plan(str(config), gpus=8)
    assert [found.options[name] for name in ("dp", "zero", "micro_batches")] == [8, 3, 1]
    assert found.policy == ("serial", {"wgrad_overlap": True})
    config.write_text('{"train_batch_size": 16}')
    with pytest.raises(ValueError, match="has no train_micro_batch_size_per_gpu: give --gpus"):
        read_plan(str(config))
    sizes = {"train_batch_size": 16}
    sizes |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config.write_text(json.dumps(sizes))
    with pytest.raises(ValueError, match="is a plan for 16 GPUs, and --gpus says 8"):
        read_plan(str(config), gpus=8)


SIZES = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16"
CLASSIC = f"""#!/bin/bash
GPUS_PER_NODE=8
NODES=4
RANKS="--nproc_per_node $GPUS_PER_NODE --nnodes $NODES"
echo "usage: --seq-length TOKENS"
ARGS="
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 2 {SIZES} \\
    --sequence-parallel
"
ARGS="$ARGS --micro-batch-size 2 --vocab-size 512"
ARGS+=" --global-batch-size $((GPUS_PER_NODE * $NODES))"
torchrun $RANKS pretrain_gpt.py $ARGS --distributed-backend nccl
"""


def test_a_script_may_quote_its_options_and_compute_a_product(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(CLASSIC)
    found = read_plan(str(script))
    names = ("tp", "pp", "dp", "micro_batch", "micro_batches", "sequence", "sequence_parallel")
    assert [found.options[name] for name in names] == [8, 2, 2, 2, 8, 64, True]
    assert not found.notes
    script.write_text(CLASSIC.replace("echo", "if $X; then NODES=2; fi\necho"))
    assert read_plan(str(script)).notes == [
        "NODES in the script: set several times, the last value counts"
    ]


def test_experts_of_megatron_may_be_spread_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    more = "--vocab-size 512 --num-experts 16 --moe-token-dispatcher-type alltoall --swiglu"
    more += " --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --sequence-parallel"
    script.write_text(f"pretrain_gpt.py {SIZES} {more} --tensor-model-parallel-size 4")
    found = read_plan(str(script), gpus=16)
    step = step_with(replace(StepOptions(), **found.options))
    assert (step.parallel.ep, step.parallel.dp, found.notes) == (16, 4, [])
    with pytest.raises(ValueError, match="DeepSpeed cannot run ep = 16: its experts are spread"):
        exported("deepspeed", Planned(step, "serial", {}))


@pytest.mark.parametrize(
    "more, note",
    [
        ("--optimizer muon", "--optimizer 'muon': planned as Adam"),
        ("--exp-avg-dtype fp8", "--exp-avg-dtype 'fp8': planned in bfloat16"),
        ("--fp4-format e2m1", "--fp4-format: products in 4 bits: not planned"),
        ("--cp-comm-type p2p a2a", "--cp-comm-type 'p2p a2a': planned as a ring"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "inputs of every 4 layers are kept: planned with those of each layer",
        ),
        (
            "--recompute-method block --recompute-num-layers 8",
            "--recompute-method without --recompute-granularity: nothing is recomputed",
        ),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
            "--num-distributed-optimizer-instances: planned with one",
        ),
        (
            "--rampup-batch-size 16 16 1000",
            "--rampup-batch-size: smaller batches at first: not planned",
        ),
        (
            "--num-experts 8 --expert-model-parallel-size 8",
            "--moe-token-dispatcher-type allgather: planned as AllToAll",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--decoder-first-pipeline-num-layers 4 --overlap-grad-reduce "
            "--decoder-last-pipeline-num-layers 4",
            "stages of (2, 4, 4, 2, 2, 4, 4, 2) layers: planned as even as possible",
        ),
    ],
    ids=lambda text: text[:30],
)
def test_what_a_plan_does_otherwise_than_megatron_is_noted(
    more: str, note: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"pretrain_gpt.py {SIZES} {more}")
    vocabulary = "no --vocab-size: planned without embedding and head"
    assert sorted(read_plan(str(script), gpus=8).notes) == sorted([note, vocabulary])


@pytest.mark.parametrize(
    "option",
    [
        *("model-parallel-size 8", "zero-stage 3", "linear-attention-freq 4", "moe-latent-size 8"),
        *("vision-model-type clip", "hybrid-override-pattern M-M*"),
    ],
)
def test_what_plans_do_not_know_of_megatron_is_refused(option: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"pretrain_gpt.py {SIZES} --{option}")
    with pytest.raises(ValueError, match=f"--{option.split()[0]}: plans do not know"):
        read_plan(str(script), gpus=8)


@pytest.mark.parametrize(
    "sizes, planned",  # batch, micro-batch, accumulation: of 8 GPUs
    [
        ((64, 4, None), (4, 2)), ((64, None, 4), (2, 4)), ((64, None, None), (8, 1)),
        ((None, 4, None), (4, 1)), ((None, 2, 4), (2, 4)), ((64, "auto", 2), (4, 2)),
        (("auto", "auto", "auto"), (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_deepspeed_computes_the_third_of_three_sizes(
    sizes: tuple[Any, ...], planned: tuple[int, int], tmp_path: Path
) -> None:
    file, names = tmp_path / "ds.json", ("train_batch_size", "train_micro_batch_size_per_gpu")
    given = zip((*names, "gradient_accumulation_steps"), sizes, strict=True)
    content = {key: size for key, size in given if size is not None}
    file.write_text(json.dumps({"bf16": {"enabled": "auto"}, **content}))
    found = read_plan(str(file), gpus=8)
    assert (found.options["micro_batch"], found.options["micro_batches"]) == planned
    assert found.options["dp"] == 8 and len(found.notes) == 1 + ("auto" in sizes)


def test_what_a_plan_does_otherwise_than_deepspeed_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "zero_quantized_weights": True, "offload_param": {"device": "none"}}
    content = {"zero_optimization": zero, "optimizer": {"type": "OneBitAdam"}}
    file.write_text(
        json.dumps({**content, "activation_checkpointing": {"cpu_checkpointing": True}})
    )
    assert read_plan(str(file), gpus=8).notes[1:] == [
        "zero_quantized_weights: not planned",
        "cpu_checkpointing: not planned",
        "neither bf16 nor fp16: planned in bfloat16, not float32",
        "optimizer onebitadam: planned as Adam",
    ]


JOB = """
[model]
name = "qwen3"
flavor = "4B"
converters = ["quantize.linear.float8"]
[training]
steps = 10
enable_cpu_offload = true
[parallelism]
tensor_parallel_degree = 2
[compile]
enable = true
components = ["loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def test_every_setting_of_a_torchtitan_job_is_planned_or_named(tmp_path: Path) -> None:
    job, script = tmp_path / "job.toml", tmp_path / "train.sh"
    job.write_text(JOB)
    found = read_plan(str(job), gpus=8)
    names = ("model", "dp", "micro_batch", "sequence", "eager", "gemm_dtype", "recompute")
    wanted = ["qwen3_4B", 4, 8, 2048, True, "float8_e4m3fn", "18"]  # every second layer of 36
    assert [found.options[name] for name in names] == wanted
    unplanned = "quantize.linear.float8.filter-fqns, training.enable-cpu-offload: not planned"
    assert found.notes == [unplanned]
    old = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\ncompile = true\n'
    old += 'mixed_precision_reduce = "bfloat16"\ntensor_parallel_degree = 2\n[float8]\n'
    for switch, dtype in (("true", "float8_e4m3fn"), ("false", "")):
        job.write_text(f"{old}enable_float8_linear = {switch}\n")
        found = read_plan(str(job), gpus=8)
        names = ("tp", "dp", "micro_batch", "eager", "gemm_dtype")
        assert [found.options[name] for name in names] == [2, 4, 1, False, dtype]
        assert found.notes == ["training.mixed-precision-reduce: not planned"]
    job.write_text(JOB.replace("4B", "5B"))
    with pytest.raises(ValueError, match="'qwen3_5B' is not known; give --model FILE"):
        read_plan(str(job), gpus=8)
    assert read_plan(str(job), gpus=8, model="gpt2").options["model"] == "gpt2"
    line = "torchrun --nproc-per-node 8 -m torchtitan.train --module {} --config {} {}"
    script.write_text(line.format("llama3", "llama3_70b", "--training.local_batch_size 1"))
    found = read_plan(str(script))
    names = ("model", "tp", "dp", "micro_batch", "sequence", "eager", "recompute")
    assert [found.options[name] for name in names] == ["llama3_70B", 8, 1, 1, 8192, True, "full"]
    assert not found.notes and not found.options["regather"]
    selective = line.format("llama3", "llama3_8b", "--parallelism.tensor_parallel_degree 2")
    script.write_text(f"{selective} activation-checkpoint:selective")
    assert read_plan(str(script)).options["regather"]  # torchtitan saves no AllGather
    more = "--compile.no-enable --parallelism.enable_fsdp_symm_mem"
    script.write_text(line.format("llama3", "llama3_405b", more))
    found = read_plan(str(script))
    assert found.options["eager"] and found.options["gemm_dtype"] == "float8_e4m3fn"
    assert found.notes == ["parallelism.enable-fsdp-symm-mem: not planned"]
    degrees = "data_parallel_{}_degree 2"
    more = " ".join(f"--parallelism.{degrees.format(word)}" for word in ("replicate", "shard"))
    script.write_text(line.format("llama3", "llama3_8b", more))
    with pytest.raises(ValueError, match="degrees are of 4 GPUs, and it starts 8"):
        read_plan(str(script))
    script.write_text(line.format("llama3", "llama3_8b", "activation-checkpoint:none"))
    assert read_plan(str(script)).options["recompute"] == "none"
    job.write_text(JOB.replace("tensor_parallel_degree", "data_parallel_degree"))
    assert read_plan(str(job), gpus=2).options["dp"] == 2
    script.write_text(line.format("mine", "my_job", "--training.seq_len 4096"))
    with pytest.raises(ValueError, match="'my_job' is not known; give --model FILE"):
        read_plan(str(script))
    asked = ("simulate", "--plan", str(script), "--model", "llama3_1B", "--dp", "4")
    priced = run(*asked, "--policy", "serial", "--layers", "1", "--json", "-")
    row = json.loads(priced.stdout)
    assert priced.exit_code == 0 and "'my_job' is not known: what it chooses" in priced.stderr
    assert [row[key] for key in ("model", "dp")] == ["llama3_1B", 4]
    job.write_text(JOB.replace("4B", "5B") + "[other]\nx = 1\n")
    options = StepOptions(model="gpt2", dp=2, given=frozenset({"model", "dp"}))
    plan, mixed = options_with(options, str(job), gpus=8)
    assert (mixed.model, mixed.dp, mixed.tp, plan.options["dp"]) == ("gpt2", 2, 2, 4)
    sizes = '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, '
    (tmp_path / "ds.json").write_text(sizes + '"train_batch_size": 16}')
    with pytest.raises(ValueError, match="does not say which model: give --model"):
        options_with(StepOptions(), str(tmp_path / "ds.json"))


@pytest.mark.parametrize(
    "text, options",
    [
        ("A=(--a 1 --b 2)\nrun x", {"a": "1", "b": "2"}),
        ("A=( --a 1\n --c\n)\nrun 3", {"a": "1", "c": ""}),
        ("A=(--a $(cat f) --b 2)\nrun 3", {"a": "$(cat", "b": "2"}),
        ('A+=(--a --lay "(tt|)*3L" --b v)\nrun 3', {"a": "", "lay": "(tt|)*3L", "b": "v"}),
        ('M="--a 1"\nA=(--b 2 $M)\nrun 3', {"a": "1", "b": "2"}),
        ("A=(--a)\nB=()\nrun 3 --b 4", {"a": "", "b": "4"}),
        ("A=(--a timeout=9 --b 2)\nrun 3", {"a": "timeout=9", "b": "2"}),
        ('A=(--a "(" x)\nN=2\nrun --b $N', {"a": "(", "b": "2"}),
    ],
)
def test_lists_of_a_script_may_be_on_one_line(
    text: str, options: dict[str, str], tmp_path: Path
) -> None:
    """The first value was lost, and the last one had a parenthesis."""
    (tmp_path / "train.sh").write_text(text)
    assert dict(options_in(tmp_path / "train.sh")) == options


@pytest.mark.parametrize(
    "trainer, parallel, options, problem",
    [
        ("torchtitan", {"pp": 8, "micro": 4}, "serial", "too few for 1F1B"),
        ("torchtitan", {"pp": 4, "micro": 9}, "interleaved", "multiple of the number of rounds"),
        ("torchtitan", {"pp": 4, "micro": 4}, "dualpipev", "4 micro-batches on 4 ranks"),
        ("megatron", {"pp": 8, "micro": 8, "chunks": 5}, "interleaved", "40 stages must divide 32"),
    ],
)
def test_pipelines_that_a_trainer_refuses_are_not_written(
    trainer: str, parallel: dict[str, int], options: str, problem: str
) -> None:
    sizes = dict(parallel)
    micro_batches, chunks = sizes.pop("micro"), sizes.pop("chunks", 2)
    step = step_of("llama3-8b", Parallel(dp=2, **sizes), micro_batches=micro_batches, zero=3)
    chosen = {"chunks": chunks} if options == "interleaved" else {}
    with pytest.raises(ValueError, match=f"(?i){trainer} cannot run .*{problem}"):
        exported(trainer, Planned(step, options, chosen))


def test_options_of_branches_are_named(tmp_path: Path) -> None:
    """No condition is evaluated: a script for bfloat16 was planned in float8 without a word."""
    file = tmp_path / "train.sh"
    lines = [
        "DTYPE=bf16",
        "ARGS=(--bf16)",
        'if [[ "$DTYPE" == fp8 ]]; then',
        '  ARGS+=("--fp8-format hybrid" "--fp8-param-gather")',
        "fi",
        '[ "$BIG" = 1 ] && MORE="--recompute-granularity full"',
        "python <<EOF",
        "if True: print()",
        "EOF",
        "torchrun pretrain_gpt.py ${ARGS[@]} $MORE --num-layers 4",
    ]
    file.write_text("\n".join(lines))
    options = options_in(file)
    branches = ("fp8-format", "fp8-param-gather", "recompute-granularity")
    assert options.conditional == branches
    assert options["num-layers"] == "4" and options["fp8-format"] == "hybrid"
