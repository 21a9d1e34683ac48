"""torchtitan's fused linears, and steps of its debug model, on CPU ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
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
from flux.moe.ops import GroupedOp
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


def _llama(backend: str) -> Any:
    """Configuration of Llama's debug model. ``backend``: torchtitan's ``tp_gemm_backend``."""
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", tp_gemm_backend=backend)
    return config


def _qwen(*imports: str) -> Any:
    """Configuration of Qwen3's debug model of experts, with overrides."""
    from torchtitan.config.override import OverrideConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    config.parallelism.expert_parallel_degree = 2
    config.activation_checkpoint = SelectiveAC.Config()
    config.override = OverrideConfig(imports=[f"flux.integrations.torchtitan.{i}" for i in imports])
    return config


def _losses(config: Any, world: int, steps: int) -> list[float]:
    """Losses of two layers of a model, in torchtitan's tensor and sequence parallelism.

    torchtitan's default attention needs generated code.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.protocols.module import Module

    config.parallelism.spmd_backend = "spmd_types"
    config.parallelism.tensor_parallel_degree = world
    of_model = config.model_spec.model
    del of_model.layers[2:]
    for layer in of_model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_spmd_backend("spmd_types")
    ep = config.parallelism.expert_parallel_degree
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": world, "pp": 1, "ep": ep}
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
        dims = ParallelDims(**degrees, world_size=world, spmd_backend="spmd_types")
        dims.build_mesh()
    of_model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = of_model.build()
    model.parallelize(dims)
    if config.override.imports or ep > 1:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    model.to_empty(device="cpu")
    # torchtitan draws a fused QKV weight as a whole, on GPUs of any rank; only buffers here.
    with mock.patch.object(Module, "_init_self_parameters"), torch.no_grad():
        model.init_weights(buffer_device=None)
        generator = torch.Generator().manual_seed(0)  # equal shards on all ranks
        for name, parameter in model.named_parameters():
            own = torch.Generator().manual_seed(dist.get_rank()) if "experts" in name else None
            parameter.normal_(0.0, 0.1, generator=own or generator)
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
    stock = _losses(_llama("default"), world, 3)
    with symm_mem.enable():
        return stock, _losses(_llama("dist_gemm"), world, 3)


@pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan's models import triton")
def test_steps_of_the_debug_model_have_equal_losses() -> None:
    for stock, fused in run_ranks(2, _steps):
        assert stock[2] < stock[0]
        assert fused == pytest.approx(stock, rel=1e-5)


def _steps_of_experts(rank: int, world: int) -> tuple[list[float], list[float], list[int]]:
    # gloo has no uneven all_to_all of lists, which torchtitan makes of these shards.
    of_dispatcher = "torchtitan.models.common.token_dispatcher.get_spmd_backend"
    with mock.patch(of_dispatcher, lambda: "partial_dtensor"):
        stock = _losses(_qwen(), world, 3)
    fused, counts, execute = [], [0, 0], GroupedOp.execute

    def counted(op: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        counts[-1] += 1
        return execute(op, *args, **kwargs)

    for imports in (("experts",), ("experts", "selective_ac")):
        counts[:] = counts[-1], 0
        with mock.patch.object(GroupedOp, "execute", counted):
            fused = _losses(_qwen(*imports), world, 3)
    return stock, fused, counts


@pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan's models import triton")
def test_steps_of_experts_have_equal_losses() -> None:
    for stock, fused, counts in run_ranks(2, _steps_of_experts):
        assert stock[2] < stock[0]
        assert fused == pytest.approx(stock, rel=1e-3)  # products are in bfloat16
        # 3 steps of 2 layers: both products, again for torchtitan's checkpoint, and their backward.
        assert counts == [36, 24]


def _routed_experts(mesh: Any, fused: bool, gpt_oss: bool) -> Any:
    """Build RoutedExperts with weights of this rank's half of 8 experts."""
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from flux.integrations.torchtitan import experts

    sizes: Any = {"dim": 32, "hidden_dim": 24, "num_experts": 8, "param_init": {}}
    config = make_routed_experts_config(**sizes, top_k=2, comm_backend="standard")
    if gpt_oss:
        config.inner_experts = GptOssGroupedExperts.Config(**sizes)
    module = (experts(config) if fused else config).build()
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    generator, inner = torch.Generator().manual_seed(1), module.inner_experts
    for name, parameter in list(inner.named_parameters()):
        whole = 0.3 * torch.randn(parameter.shape, generator=generator)
        setattr(inner, name, torch.nn.Parameter(_part(whole, 0, mesh.get_local_rank(), 2)))
    return module


def _experts_alone(rank: int, world: int, gpt_oss: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(2 + rank)
    x, scores = torch.randn(2, 5, 32, generator=generator), torch.rand(2, 5, 2, generator=generator)
    ids = torch.rand(2, 5, 8, generator=generator).topk(2).indices
    x = x.to(torch.bfloat16) if gpt_oss else x  # its experts return bfloat16
    results = []
    for fused in (False, True):
        module = _routed_experts(mesh, fused, gpt_oss)
        leaves = [t.clone().requires_grad_() for t in (x, scores)]
        y = module(*leaves, ids, torch.bincount(ids.flatten(), minlength=8))
        y.square().sum().backward()
        results.append([y, *(t.grad for t in (*leaves, *module.parameters()))])
    for actual, expected in zip(*reversed(results), strict=True):
        bound = 0.02 * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=bound)
    copies: list[Any] = []
    own = type(module)._copied_again

    def noted(self: Any, weight: torch.Tensor, make: Any) -> Any:
        copies.append(weakref.ref(weight))
        return own(self, weight, make)

    with mock.patch.object(type(module), "_copied_again", noted):
        y = module(x, scores, ids, None)
    if not gpt_oss:  # whose weight is the parameter
        assert copies[0]() is None
    with torch.no_grad():
        next(module.inner_experts.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        y.sum().backward()
    module.close()


@pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan's models import triton")
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_experts_equal_torchtitans(gpt_oss: bool) -> None:
    run_ranks(2, _experts_alone, gpt_oss)


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
from flux.moe.ops import GroupedOp

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


@pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan's models import triton")
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
