"""torchtitan's fused linears, and steps of its debug model, on CPU ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

import harness
from flux.integrations import symm_mem
from harness import run_ranks
from scripts import ROOT, run_script

if find_spec("torchtitan") is None:
    pytestmark = pytest.mark.skip(reason="needs torchtitan: pip install torchtitan")
else:
    harness.PRELOAD += ["torchtitan.models.llama3.config_registry"]

M, N, K = 24, 20, 12
_MODULES = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss", "kimi_k2_7")


def _part(t: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """This rank's share of a tensor that all ranks have, as a leaf."""
    return t.detach().chunk(world, dim)[rank].clone().requires_grad_()


def _fused_linears(rank: int, world: int, dtype: torch.dtype) -> None:
    """Results and gradients of the three functions equal those of whole layers."""
    from torchtitan.distributed.linear import (
        AllGatherLinear,
        AllGatherLinearMulti,
        LinearReduceScatter,
    )

    torch.manual_seed(0)
    group = dist.group.WORLD
    to = {"dtype": dtype}
    x, w, v, bias = (torch.randn(s, **to) for s in ((M, K), (N, K), (N, K), (N,)))
    dy = torch.randn(M, N, **to)
    bound = 1e-5 if dtype == torch.float32 else 2e-2

    def check(*pairs: tuple[Any, torch.Tensor]) -> None:
        for actual, expected in pairs:
            torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)

    def whole(*weights: torch.Tensor, add: torch.Tensor | None) -> list[Any]:
        leaves = [t.double().requires_grad_() for t in (x, *weights)]
        offset = None if add is None else add.double().requires_grad_()
        products = [linear(leaves[0], weight, offset) for weight in leaves[1:]]
        torch.autograd.backward(products, [dy.double()] * len(products))
        gradients = [leaf.grad for leaf in leaves]
        return [*products, *gradients, None if offset is None else offset.grad]

    def share(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.detach().chunk(world, dim)[rank]

    with symm_mem.enable(float32_partials=True):
        y, dx, dw, db = whole(w, add=bias)
        leaves = _part(x, 0, rank, world), _part(w, 0, rank, world), _part(bias, 0, rank, world)
        out = AllGatherLinear.apply(*leaves, group, group.group_name)
        out.backward(share(dy, 1))
        check((out, share(y, 1)), (leaves[0].grad, share(dx, 0)), (leaves[1].grad, share(dw, 0)))
        check((leaves[2].grad, share(db, 0)))

        y, z, dx, dw, dv, _ = whole(w, v, add=None)
        leaves = _part(x, 0, rank, world), _part(w, 0, rank, world), _part(v, 0, rank, world)
        outs = AllGatherLinearMulti.apply(*leaves, group, group.group_name)
        torch.autograd.backward(outs, [share(dy, 1)] * 2)
        check((outs[0], share(y, 1)), (outs[1], share(z, 1)), (leaves[0].grad, share(dx, 0)))
        check((leaves[1].grad, share(dw, 0)), (leaves[2].grad, share(dv, 0)))

        y, dx, dw, db = whole(w, add=bias)
        leaves = _part(x, 1, rank, world), _part(w, 1, rank, world)
        offset = bias.detach().clone().requires_grad_()
        out = LinearReduceScatter.apply(*leaves, offset, group, group.group_name)
        out.backward(share(dy, 0))
        check((out, share(y, 0)), (leaves[0].grad, share(dx, 1)), (leaves[1].grad, share(dw, 1)))
        check((offset.grad, db))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_linears_equal_whole_layers(dtype: torch.dtype) -> None:
    run_ranks(2, _fused_linears, dtype)


def _losses(rank: int, world: int, backend: str, steps: int) -> list[float]:
    """Losses of the debug model with two layers, in torchtitan's tensor and sequence parallelism.

    ``backend``: torchtitan's ``tp_gemm_backend``. Its default attention needs generated code.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.protocols.module import Module

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", tp_gemm_backend=backend)
    config.parallelism.spmd_backend = "spmd_types"
    config.parallelism.tensor_parallel_degree = world
    of_model = config.model_spec.model
    del of_model.layers[2:]
    for layer in of_model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_spmd_backend("spmd_types")
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": world, "pp": 1, "ep": 1}
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
        dims = ParallelDims(**degrees, world_size=world, spmd_backend="spmd_types")
        dims.build_mesh()
    of_model.update_from_config(config=config)
    with torch.device("meta"):
        model = of_model.build()
    model.parallelize(dims)
    model.to_empty(device="cpu")
    # torchtitan draws a fused QKV weight as a whole, on GPUs of any rank; only buffers here.
    with mock.patch.object(Module, "_init_self_parameters"), torch.no_grad():
        model.init_weights(buffer_device=None)
        generator = torch.Generator().manual_seed(0)  # equal shards on all ranks
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=2048).build(compile_config=config.compile)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(2048, (2, 17), generator=generator)
    losses = []
    for _ in range(steps):
        inputs, labels, options = annotate_input_spmd_types(
            dims, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), {}
        )
        with get_spmd_context(parallel_dims=dims)():
            loss, _ = loss_of(model(inputs, **options), labels, torch.tensor(labels.numel()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _steps(rank: int, world: int) -> tuple[list[float], list[float]]:
    stock = _losses(rank, world, "default", 3)
    with symm_mem.enable():
        return stock, _losses(rank, world, "dist_gemm", 3)


@pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan's models import triton")
def test_steps_of_the_debug_model_have_equal_losses() -> None:
    for stock, fused in run_ranks(2, _steps):
        assert stock[2] < stock[0]
        assert fused == pytest.approx(stock, rel=1e-5)


def test_quickstart_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "use" / "torchtitan.md").read_text(encoding="utf-8")
    quickstart = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    assert len(quickstart.splitlines()) <= 12
    path = tmp_path / "quickstart.py"
    path.write_text(quickstart, encoding="utf-8")
    assert float(run_script(path, ranks=2)) > 0


SPAWNING = """
import multiprocessing, sys
from flux.integrations import symm_mem

def report(pipe):
    try:
        symm_mem.enable(float32_partials=False)
    except ValueError as error:
        pipe.send((symm_mem.enabled(), sys.argv[1:], str(error)))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=report, args=(theirs,))
    process.start()
    print(ours.recv() if ours.poll(60) else "nothing")
    process.join()
"""


def test_processes_that_a_program_spawns_have_the_ops(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    program = ["flux.integrations.symm_mem", "--float32-partials", "spawning", "argument"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("(('cpu',), ['argument'], 'enabled with float32"), done


def test_plans_know_the_sizes_and_settings_of_its_configurations() -> None:
    from importlib import import_module

    from flux.bench.model_files import torchtitan_configs, torchtitan_model, torchtitan_models

    for content in torchtitan_models().values():
        name = content["_name_or_path"]
        module = next(m for m in _MODULES if name.startswith(f"{m}_"))
        if module == "llama4" or "kimi" in module:
            continue  # of release 0.2.2; needs torchvision
        built = import_module(f"torchtitan.models.{module}").model_registry(name[len(module) + 1 :])
        with torch.device("meta"):
            model = built.model.build()
        assert sum(p.numel() for p in model.parameters()) == content["parameters"], name
        assert len(model.layers) == torchtitan_model(name, name).layers
    for name, chosen in torchtitan_configs().items():
        if "model.converters" in chosen:
            continue  # looks for a GPU
        registry = import_module(f"torchtitan.models.{chosen['module']}.config_registry")
        made = getattr(registry, name)()
        batch = int(chosen.get("training.local-batch-size", 8))
        wanted = (chosen["flavor"], batch, int(chosen.get("training.seq-len", 2048)))
        sizes = made.training.local_batch_size, made.training.seq_len
        assert (made.model_spec.flavor, *sizes) == wanted, name
        kinds = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}
        kind = type(made.activation_checkpoint).__qualname__
        assert kind == kinds[chosen["activation-checkpoint"]], name
        assert made.compile.enable == ("compile.enable" in chosen), name
        degrees = made.parallelism
        for word in ("tensor", "expert"):
            degree = int(chosen.get(f"parallelism.{word}-parallel-degree", 1))
            assert getattr(degrees, f"{word}_parallel_degree") == degree, name
