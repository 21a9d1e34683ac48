"""A GPT of the real Megatron-core, trained with its linear layers and with ours."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt_cases
import megatron_cases as mc
from gpt_cases import GPTCase, build, check_training
from harness import more, run_ranks
from scripts import ROOT, run_script

# World, sequence parallelism, tied embeddings.
EVERY = list(itertools.product((2, 4), (False, True), (False, True)))


@pytest.mark.parametrize(("world", "sp", "tied"), EVERY if gpt_cases.ALL else EVERY[:4:3])
def test_same_losses_as_megatron(world: int, sp: bool, tied: bool) -> None:
    """`make stress` has all combinations, 4 layers instead of 2, and 30 steps instead of 6."""
    results = run_ranks(world, check_training, GPTCase(sp, tied), "replace", timeout=200)
    first, last = results[0]
    assert last < (0.8 if gpt_cases.ALL else 0.98) * first, "it has learnt something"


@pytest.mark.parametrize(
    "case",
    [
        GPTCase(False, True, recompute="full"),
        *more(GPTCase(True, True, accumulate=True), GPTCase(False, False, accumulate=True)),
        *more(GPTCase(True, False, recompute="full")),
        # Without biases: Megatron's recomputation of an MLP that returns one does not end.
        GPTCase(True, False, recompute="core_attn,mlp", accumulate=True, swiglu=True),
    ],
    ids=str,
)
def test_losses_match_with_accumulation_and_recomputation(case: GPTCase) -> None:
    run_ranks(2, check_training, case, "replace", timeout=200)


def test_specification_replaces_the_layers() -> None:
    run_ranks(2, check_training, GPTCase(True, swiglu=True), "spec", timeout=200)


@pytest.mark.skipif(not mc.has_hybrid_model(), reason="needs megatron-core 0.17 or newer")
@pytest.mark.parametrize("sp", [False, True])
def test_hybrid_model_has_the_same_losses(sp: bool) -> None:
    run_ranks(2, check_training, GPTCase(sp, hybrid=True), "replace", timeout=200)


def _classes(rank: int, world: int) -> None:
    from megatron.core.models.backends import BackendSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

    from flux.layers import (
        FluxSpecProvider,
        MegatronColumnParallelLinear,
        MegatronRowParallelLinear,
        replace_linears,
    )

    def parts(spec: Any) -> Any:  # of a ModuleSpec, or of the partial that newer releases have
        return getattr(spec, "keywords", {}).get("submodules") or getattr(spec, "submodules", None)

    provider: Any = FluxSpecProvider()
    assert BackendSpecProvider in type(provider).__mro__
    for num_experts in (None, 4):
        spec = get_mlp_module_spec_for_backend(
            provider, num_experts=num_experts, moe_grouped_gemm=False
        )
        for _ in range(3):  # down to the MLP, or an expert's
            spec = getattr(parts(spec), "experts", spec) if num_experts else spec
            if not hasattr(parts(spec), "experts"):
                break
        assert parts(spec).linear_fc1 is MegatronColumnParallelLinear
        assert parts(spec).linear_fc2 is MegatronRowParallelLinear
    with mc.megatron(world):
        model = build(GPTCase(), world)
        parameters = dict(model.named_parameters())
        assert replace_linears([model], overlap=False) == [model]
        assert all(p is parameters[name] for name, p in model.named_parameters())
        layers = [m for m in model.modules() if isinstance(m, MegatronColumnParallelLinear)]
        assert {layer.tp_comm_buffer_name for layer in layers} == {"qkv", "fc1", "output_layer"}
        assert not any(layer.overlap for layer in layers)
        replace_linears(model, overlap=True)
        assert all(layer.overlap for layer in layers)


def test_provider_and_replacement() -> None:
    run_ranks(2, _classes)


@pytest.mark.parametrize("tied", [True, *more(False)], ids=["tied", *more("untied")])
def test_checkpoints_cross_layers_and_tp_sizes(tmp_path: Path, tied: bool) -> None:
    case = GPTCase(True, tied)
    folders = [tmp_path / name for name in ("megatron2", "flux4", "megatron2_again")]
    for folder in folders:
        folder.mkdir()
    (saved, _) = run_ranks(2, gpt_cases.save, case, "", folders[0])
    loaded = run_ranks(4, gpt_cases.reload, case, "replace", folders[0], folders[1])
    back = run_ranks(2, gpt_cases.reload, case, "", folders[1], folders[2])
    mine = run_ranks(2, gpt_cases.reload, case, "replace", folders[0], folders[2])
    assert torch.equal(back[0], saved), "the same values on the same ranks, bit by bit"
    for logits in (*loaded, *mine):
        torch.testing.assert_close(logits, saved, rtol=1e-5, atol=1e-5)


def _example(rank: int, world: int, layers: str) -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import megatron_gpt
    finally:
        sys.path.remove(str(ROOT / "examples"))
    options = megatron_gpt.parse(["--layers", layers, "--steps", "6", "--hidden", "32"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        megatron_gpt.main(rank, world, options)
    return printed.getvalue()


def test_the_example_prints_the_same_losses() -> None:
    """On ranks that have imported Megatron-core already, which a script takes long for."""
    curves = []
    for layers in ("megatron", "flux"):
        printed, nothing = run_ranks(2, _example, layers)
        lines = printed.splitlines()
        assert nothing == "" and [line.split()[0] for line in lines] == [layers] * 3
        assert [line.split()[3] for line in lines] == ["1:", "5:", "6:"]
        curves.append([float(line.split()[-1]) for line in lines])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert "--layers" in run_script(ROOT / "examples" / "megatron_gpt.py", arguments=["--help"])
