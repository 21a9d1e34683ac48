"""flux.layers under torch.compile: no graph breaks, no recompilation, results of eager."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

import harness
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools, replace_linears
from flux.ops.pool import pool_of
from harness import more, run_ranks, stress_only

harness.PRELOAD += [
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
]

D, F = 8, 24
KW: dict[str, Any] = {"dtype": torch.float64}


def _layers(sp: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    whole = nn.Linear(D, F, **KW), nn.Linear(F, D, **KW)
    return nn.ModuleList(
        kind.from_linear(linear, sequence_parallel=sp)
        for kind, linear in zip((ColumnParallelLinear, RowParallelLinear), whole, strict=True)
    )


def _results(run: Any, layers: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    layers.zero_grad()
    x = x.detach().requires_grad_()
    z = run(x)
    z.square().sum().backward()
    assert x.grad is not None
    return [z.detach(), x.grad, *(p.grad for p in layers.parameters())]


def _equal(run: Any, compiled: Any, layers: nn.Module, x: torch.Tensor) -> None:
    names = ["z", "dx", *(name for name, _ in layers.named_parameters())]
    both = _results(run, layers, x), _results(compiled, layers, x)
    for name, want, got in zip(names, *both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, msg=name)


def _compiled(rank: int, world: int, backend: str, sp: bool, recompute: bool) -> None:
    layers = _layers(sp)

    def block(x: torch.Tensor) -> torch.Tensor:
        return layers[1](torch.tanh(layers[0](x)))

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if recompute else block(x)

    torch._dynamo.reset()
    torch.manual_seed(1 if not sp else rank)
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 6, 14):
            _equal(run, compiled, layers, torch.randn(rows, 2, D, **KW))
    assert len(pool_of(None).ops) == (4 if sp else 2)  # forward's and backward's
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            x = torch.randn(4, 2, D, **KW)
            torch.testing.assert_close(compiled(x), run(x))
    close_pools()


@pytest.mark.parametrize("sp", [False, *more(True)], ids=["replicated", *more("sequence_parallel")])
def test_layers_with_aot_eager_match_eager(sp: bool) -> None:
    run_ranks(2, _compiled, "aot_eager", sp, False)


def test_layers_with_activation_checkpointing_match_eager() -> None:
    run_ranks(2, _compiled, "aot_eager", True, True)


@stress_only
@pytest.mark.timeout(300)
def test_layers_with_inductor_match_eager() -> None:
    run_ranks(2, _compiled, "inductor", True, False, timeout=280.0)


def _cast(rank: int, world: int) -> None:
    """autocast inside of the graph, whole features, and a layer of the same shape once more."""
    torch._dynamo.reset()
    torch.manual_seed(2)
    first = ColumnParallelLinear(D, F, gather_output=True)
    second = RowParallelLinear(F, D, input_is_parallel=False)
    both = nn.ModuleList([first, second])

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return second(first(x))

    x = torch.randn(6, D)
    dist.broadcast(x, 0)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    both_results = _results(run, both, x), _results(compiled, both, x)
    for want, got in zip(*both_results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    close_pools()


def test_autocast_and_whole_features_match_eager() -> None:
    run_ranks(2, _cast)


def _one_graph_for_all_layers(rank: int, world: int) -> None:
    torch._dynamo.reset()
    blocks = [_layers(True) for _ in range(10)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return layers[1](torch.tanh(layers[0](x)))

    x = torch.randn(4, D, **KW)
    block(blocks[0], x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layers in blocks:
            block(layers, x)
    close_pools()


def test_blocks_of_a_model_share_their_code() -> None:
    run_ranks(2, _one_graph_for_all_layers)


def _styles(rank: int, world: int) -> None:
    torch._dynamo.reset()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)).double()
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    replace_linears(model, plan, mesh=mesh)
    x = torch.randn(2, 4, D, **KW)
    want = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)
    want.sum().backward()
    expected = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    compiled(x).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.to_local(), grad)
    close_pools()


def test_planned_models_match_eager() -> None:
    run_ranks(2, _styles)


# -- opcheck and gradcheck -------------------------------------------------------------------------


def _opcheck(rank: int, world: int) -> None:
    check = torch.library.opcheck
    importlib.import_module("flux.compile")
    ops, name = torch.ops.flux, dist.group.WORLD.group_name

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True, **KW)

    for sp in (True, False):
        how = (name, sp, True, True, True)
        x, w, b = leaf(4, 2, D), leaf(F, D), leaf(F)
        check(ops.column_linear.default, (x, w, b, *how))
        dy = torch.randn(4 * (world if sp else 1), 2, F, **KW)
        args = (dy, x.detach(), w.detach(), True, True, *how)
        check(ops.column_linear_grad.default, args)
        check(ops.row_linear.default, (x, w, *how))
        dz = torch.randn(4 // (world if sp else 1), 2, F, **KW)
        args = (dz, x.detach(), w.detach(), True, True, *how)
        check(ops.row_linear_grad.default, args)
    for op in (ops.gather_features, ops.cut_features, ops.sum_grad):
        check(op.default, (leaf(4, 2 * world), name))
    a, bs = torch.randn(2, 4, D, **KW), [torch.randn(D, 6, **KW), torch.randn(6, D, **KW).t()]
    for dim in (0, 1):
        for gathered in (True, False):
            args = (a, bs, [torch.randn(6, **KW)], [False, True], dim, name, gathered)
            check(ops.graph_all_gather_matmul.default, args)
    for dim in range(3):
        check(ops.graph_matmul_reduce_scatter.default, (a, bs[1], "avg", dim, name))
    check(ops.graph_matmul_all_reduce.default, (a[0], bs[0], "sum", name))
    close_pools()


@pytest.mark.timeout(240)
def test_layer_ops_pass_opcheck() -> None:
    run_ranks(2, _opcheck, timeout=200.0)
