"""Megatron-core on the CPU, for tests: its layers beside ours, on gloo ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import harness
from flux.bench.megatron_cpu import megatron_on_cpu

if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec("megatron.core"):
    pytest.skip("needs megatron-core: pip install flux-overlap[megatron]", allow_module_level=True)

# Importing it takes seconds: once, in the server that ranks are forked from.
harness.PRELOAD += ["megatron.core.models.gpt", "megatron.core.distributed"]
harness.PRELOAD += ["megatron.core.dist_checkpointing", "torch.distributed.checkpoint"]


def has_hybrid_model() -> bool:
    """Whether this Megatron-core has HybridModel; imports nothing of it."""
    package = importlib.util.find_spec("megatron")
    folders = package.submodule_search_locations if package else None
    return any((Path(folder) / "core/models/hybrid").is_dir() for folder in folders or ())


@contextlib.contextmanager
def megatron(world: int, **options: Any) -> Iterator[None]:
    """Megatron-core's parallel state, all ranks one tensor-parallel group. Collective.

    Its small fused functions are not compiled: that takes each rank longer than all of a test.
    """
    with megatron_on_cpu(world, **options), torch.compiler.set_stance("force_eager"):
        yield


def emulated_apex() -> types.ModuleType:
    """APEX's CUDA extension for gradient accumulation fusion, as plain PyTorch."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        wide = torch.promote_types(main_grad.dtype, torch.float32)
        main_grad += (dy.to(wide).t() @ x.to(wide)).to(main_grad.dtype)

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def apex() -> Iterator[None]:
    """Megatron-core with that extension."""
    from megatron.core.tensor_parallel import layers

    module = emulated_apex()
    with (
        mock.patch.dict(sys.modules, {module.__name__: module}),
        mock.patch.object(layers, module.__name__, module, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield


def config(world: int, **options: Any) -> Any:
    """A TransformerConfig of a small model, overlap switched on."""
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    settings: dict[str, Any] = {
        **sizes,
        "tensor_model_parallel_size": world,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tp_comm_overlap": True,
        **options,
    }
    return TransformerConfig(**settings)


def normal(std: float = 0.1) -> Any:
    """An init_method."""
    return lambda weight: torch.nn.init.normal_(weight, 0.0, std)


def both() -> tuple[Any, Any]:
    """The modules with Megatron's layers and with ours."""
    from megatron.core.tensor_parallel import layers as megatron_layers

    from flux.layers import megatron as flux_layers

    return megatron_layers, flux_layers


# -- one layer beside Megatron's -------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCase:
    """A layer, and how it is called. ``settings`` go to the configuration, ``options`` to both
    constructors; sizes are global."""

    kind: str
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    sequence: int = 8
    batch: int = 3
    k: int = 32
    n: int = 48
    settings: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    frozen: bool = False
    input_needs_grad: bool = True

    def make(self, module: Any, world: int) -> Any:
        """The layer, of ``module``'s class; its values depend on the case alone."""
        settings = {"sequence_parallel": self.sequence_parallel, **dict(self.settings)}
        options = {"bias": True, "skip_bias_add": False, **dict(self.options)}
        if self.kind == "row":
            options.setdefault("input_is_parallel", True)
        torch.manual_seed(17)
        layer = getattr(module, f"{self.kind.capitalize()}ParallelLinear")(
            self.k,
            self.n,
            config=config(world, params_dtype=self.dtype, **settings),
            init_method=normal(),
            **options,
        )
        if layer.bias is not None:
            torch.manual_seed(18 + (dist.get_rank() if self.kind == "column" else 0))
            torch.nn.init.normal_(layer.bias)
        for parameter in layer.parameters():
            parameter.requires_grad_(not self.frozen)
        return layer

    def input(self, rank: int, world: int) -> torch.Tensor:
        """What ``rank`` calls it with."""
        column, sp = self.kind == "column", self.sequence_parallel
        whole = column or not dict(self.options).get("input_is_parallel", True)
        torch.manual_seed(19 + (rank if sp or not whole else 0))
        rows = self.sequence // world if column and sp else self.sequence
        x = torch.randn(rows, self.batch, self.k if whole else self.k // world)
        return x.to(self.dtype)


def run_layer(
    case: LayerCase, layer: Any, x: torch.Tensor, rank: int, positive: bool = False
) -> dict[str, torch.Tensor]:
    """Forward and backward; results by name. ``positive`` makes every number its magnitude."""
    x = (x.abs() if positive else x.clone()).requires_grad_(case.input_needs_grad)
    y, bias = layer(x)
    gathered = dict(case.options).get("gather_output", False)
    split = case.sequence_parallel if case.kind == "row" else not gathered
    torch.manual_seed(23 + (rank if split else 0))
    dy = torch.randn(y.shape).to(y.dtype)
    if y.requires_grad:
        y.backward(dy.abs() if positive else dy)
    results = {"y": y.detach(), "dx": x.grad}
    if bias is not None:
        results["bias"] = bias.detach().clone()
    for name, parameter in layer.named_parameters():
        results[f"d{name}"] = parameter.grad
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def check_layer(case: LayerCase, rank: int, world: int, ours: Any = None) -> Any:
    """Compare our layer with Megatron's in float64, element by element, and return it.

    A sum of K products is off by at most K roundings, each relative to the sum of magnitudes, which
    Megatron's layer computes too, from the magnitudes of all operands.
    """
    megatron_layers, flux_layers = both()
    ours = ours if ours is not None else case.make(flux_layers, world)
    x = case.input(rank, world)
    got = run_layer(case, ours, x, rank)
    theirs = case.make(megatron_layers, world).double()
    truth = run_layer(case, theirs, x.double(), rank)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.grad = None
            parameter.abs_()
    magnitude = run_layer(case, theirs, x.double(), rank, positive=True)
    assert got.keys() == truth.keys(), (case, got.keys(), truth.keys())
    rows = case.sequence * case.batch
    depth = {"y": case.k + world + 2, "dx": case.n + world, "dweight": rows, "dbias": rows}
    unit = torch.finfo(torch.float32 if case.dtype == torch.float32 else case.dtype).eps / 2
    for name, right in truth.items():
        assert got[name].shape == right.shape, f"{case}: {name} is {list(got[name].shape)}"
        roundings = depth.get(name, 0)
        if case.dtype in (torch.bfloat16, torch.float16):
            roundings = world + 3  # sums are in float32; partial results are rounded
        error = (got[name].double() - right).abs()
        over = error - roundings * unit * magnitude[name]
        assert over.max() <= 0, f"{case}, rank {rank}: {name} is off by {error.max():.2e}"
    return ours
