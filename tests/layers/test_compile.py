"""flux.compile: graphs of models with DTensor plans call our ops, with the results of eager."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flux
import harness
from compile_cases import Block, D, S, passes_only, plan, quick_inductor
from flux.layers import close_pools
from flux.ops.pool import OpPool
from harness import STRESS, more, run_ranks

harness.PRELOAD += [
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
]


def _calls(run: Any) -> dict[str, int]:
    """How often graphs take an op of each kind from their pool while ``run`` runs."""
    counts: Counter[str] = Counter()
    original = OpPool.op

    def counting(self: OpPool, kind: Any, *args: Any, **options: Any) -> Any:
        counts[kind.__name__] += 1
        return original(self, kind, *args, **options)

    with mock.patch.object(OpPool, "op", counting):
        run()
    return dict(counts)


def _results(run: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [y.detach(), x.grad, *local]


def _block(rank: int, world: int, sequence: bool, real: bool) -> None:
    """``real``: half of the block, with Inductor's code instead of its passes alone."""
    torch._dynamo.reset()
    flux.compile.clear_report()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch.manual_seed(0)
    model = Block().double()
    parallelize_module(model, mesh, plan(sequence))
    torch.manual_seed(rank if sequence else 1)
    x = torch.randn(2, S // world if sequence else S, D, dtype=torch.float64)
    whole = model.half if real else model
    want = _results(whole, model, x)
    with flux.compile.enable(), quick_inductor():
        compiled = torch.compile(whole, fullgraph=True, backend="inductor" if real else passes_only)
        _results(compiled, model, x)
    assert not flux.compile.enabled()
    for a, b in zip(_results(compiled, model, x), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    report = flux.compile.report()
    assert report.graphs == 2 and sum(report.found.values()) == sum(report.fused.values())
    calls = _calls(lambda: _results(compiled, model, x))
    if sequence:  # of each half one of each forward, and one backward
        halves = 1 if real else 2
        assert calls == {"AGGemm": 2 * halves, "GemmRS": 2 * halves}
    else:
        assert calls == {"GemmAR": report.found["all_reduce"]}
    close_pools()


LARGER = [(4, True)] if STRESS > 1 else []


@pytest.mark.parametrize(("world", "sequence"), [(2, True), (2, False), *LARGER])
def test_planned_block_matches_eager(world: int, sequence: bool) -> None:
    run_ranks(world, _block, sequence, False)


@pytest.mark.timeout(400)
def test_half_a_block_with_inductor_matches_eager() -> None:
    run_ranks(2, _block, True, True, timeout=380.0)


def _cases(world: int) -> dict[str, tuple[Any, Any, int]]:
    """By name: function of (x, weights), x, how many collectives become our ops."""
    group = dist.group.WORLD.group_name
    w, v = torch.randn(6, 4 * world).double(), torch.randn(4 * world, 6).double()
    x3, b = torch.randn(2, 2 * world, 6).double(), torch.randn(4 * world).double()

    def gather(dim: int) -> Any:
        return lambda x: funcol.all_gather_tensor(x, dim, group)

    def scatter(x: torch.Tensor, dim: int, op: str = "sum") -> torch.Tensor:
        return funcol.reduce_scatter_tensor(x, op, dim, group)

    def reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return funcol.all_reduce(x, op, group)

    def shared(x: torch.Tensor) -> Any:
        full = gather(1)(x)
        return full @ w, full @ v.t(), full.sum(0)

    def kept(x: torch.Tensor) -> Any:
        product = x @ w
        return scatter(product, 0), product

    return {
        "gather 0": (lambda x: gather(0)(x) @ w, x3, 1),
        "gather 1": (lambda x: gather(1)(x) @ v.t(), x3, 1),
        "gather of one batch": (lambda x: gather(1)(x) @ w, x3[:1], 1),
        "gather 2": (lambda x: gather(2)(x) @ torch.cat([w] * world), x3, 0),
        "gather rows": (lambda x: torch.addmm(b, gather(0)(x), w), x3[0], 1),
        "shared": (shared, x3, 1),
        "weight": (lambda x: x3[0] @ gather(0)(x).t(), x3[0], 0),
        "scatter 0": (lambda x: scatter(x @ w, 0), torch.cat([x3] * world), 1),
        "scatter 1": (lambda x: scatter(x @ w, 1, "avg"), x3, 1),
        "scatter 2": (lambda x: scatter(x @ w, 2), x3, 1),
        "scatter max": (lambda x: scatter(x @ w, 1, "max"), x3, 0),
        "sum": (lambda x: scatter(x @ w + (2 * x) @ v.t(), 1), x3, 1),
        "bias": (lambda x: scatter(torch.addmm(b, x, w), 0), x3[0], 1),
        "kept": (kept, x3[0], 0),
        "reduce": (lambda x: reduce(x @ w), x3, 1),
        "reduce avg": (lambda x: reduce(torch.addmm(b, x, w), "avg"), x3[0], 1),
        "reduce no product": (lambda x: reduce(x.relu()), x3, 0),
    }


def _biases(rank: int, world: int) -> None:
    """Every shape of a bias that addmm takes, behind a gather and in front of reductions."""
    torch._dynamo.reset()
    flux.compile.clear_report()
    torch.manual_seed(rank)
    group, m, n = dist.group.WORLD.group_name, 2 * world, 4 * world
    w, x = torch.randn(6, n).double(), torch.randn(m, 6).double()
    # Strides that are not those of a dense tensor.
    columns = [torch.randn(*s, 2).double()[..., 0] for s in ((n,), (), (1,), (1, n), (1, 1))]
    rows = [torch.randn(*s, 2).double()[..., 0] for s in ((m, n), (m, 1))]
    scaled: dict[str, Any] = {"alpha": 0.5, "beta": 2}
    left = [(rows[0], {}), (rows[1], {}), (columns[2], scaled), (rows[1], scaled)]

    def run(x: torch.Tensor, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        results = []
        full = funcol.all_gather_tensor(x[: m // world], 0, group)
        cases = [*((2 * bias, {}) for bias in columns), *left]  # some that the graph computes
        for bias, scales in cases:
            products = [torch.addmm(bias, a, w, **scales) for a in (full, x, x)]
            scattered = funcol.reduce_scatter_tensor(products[1], "sum", 0, group)
            results += [products[0], scattered, funcol.all_reduce(products[2], "avg", group)]
        return results

    with flux.compile.enable(), torch.no_grad():
        got = torch.compile(run, fullgraph=True, backend=passes_only)(x, columns)
    for number, (a, b) in enumerate(zip(got, run(x, columns), strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=f"{number}")
    report = flux.compile.report()
    assert sum(report.fused.values()) == 1 + 2 * len(columns), str(report)
    assert sum(report.left.values()) == 2 * len(left), str(report)
    close_pools()


def test_every_shape_of_a_bias_gives_eager_results() -> None:
    run_ranks(2, _biases, timeout=120.0)


def _each_case(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    cases = _cases(world)
    if world > 2:  # what an uneven world changes is where rows are cut
        cases = {name: cases[name] for name in cases if name[-1].isdigit() or name == "sum"}
    for name, (run, x, fused) in cases.items():
        torch._dynamo.reset()
        flux.compile.clear_report()
        if name == "weight":
            dist.broadcast(x, 0)
        with flux.compile.enable(), torch.no_grad():
            got = torch.compile(run, fullgraph=True, backend=passes_only)(x)
        report = flux.compile.report()
        assert sum(report.fused.values()) == fused, (name, str(report))
        assert sum(report.left.values()) == 1 - fused, (name, str(report))
        torch.testing.assert_close(got, run(x), rtol=1e-11, atol=1e-11, msg=name)
    close_pools()


@pytest.mark.parametrize("world", [2, *more(3)])
def test_each_pattern_becomes_a_flux_op(world: int) -> None:
    run_ranks(world, _each_case, timeout=120.0)


class _Layers(torch.nn.Module):
    """An MLP, and a head behind it."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, 6)
        self.head = torch.nn.Linear(6, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def _uneven(rank: int, world: int) -> None:
    """Sizes that the ranks do not divide, in a graph with layers that stay fused."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    whole, rows = Replicate(), Shard(0)
    up, down = ColwiseParallel(use_local_output=False), RowwiseParallel()
    up_rows = ColwiseParallel(input_layouts=rows, use_local_output=False)
    down_rows = RowwiseParallel(output_layouts=rows)
    head = ColwiseParallel(output_layouts=whole)
    head_rows = ColwiseParallel(input_layouts=rows, output_layouts=whole)
    plain = {"up": up, "down": down, "head": head}
    sharded = {"up": up_rows, "down": down_rows, "head": head_rows}
    cut = RowwiseParallel(input_layouts=whole)  # 5 features over the ranks
    for hidden, vocabulary, styles, dynamic, fused in (
        (8, 99, plain, False, 2),  # all_reduce: forward of down, backward of up
        (8, 99, sharded, True, 2),  # all_gather of the same layers
        (99, 8, plain, False, 1),  # backward of head
        (5, 8, {"down": cut}, False, 0),
    ):
        torch._dynamo.reset()
        flux.compile.clear_report()
        torch.manual_seed(4)
        model = _Layers(hidden, vocabulary).double()
        x = torch.randn(2 * world, 6, dtype=torch.float64)
        x = x.chunk(world)[rank] if styles is sharded else x
        parallelize_module(model, mesh, styles)
        with flux.compile.enable():
            compiled = torch.compile(model, fullgraph=True, backend=passes_only, dynamic=dynamic)
            got = _results(compiled, model, x)
        name = f"{hidden} features, vocabulary {vocabulary}"
        for a, b in zip(got, _results(model, model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=name)
        report = flux.compile.report()
        assert sum(report.fused.values()) == fused, (name, str(report))
    close_pools()


@pytest.mark.parametrize("world", [2, *more(4)])
def test_sizes_that_ranks_do_not_divide_match_eager(world: int) -> None:
    run_ranks(world, _uneven, timeout=120.0)


def test_disable_restores_the_previous_pass() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen: list[int] = []

    def theirs(graph: torch.fx.Graph) -> None:
        seen.append(1)

    places = "pre_grad_custom_pass", "post_grad_custom_pre_pass"
    for place in places:
        setattr(config, place, theirs)
    try:
        flux.compile.enable()
        with flux.compile.enable():
            assert flux.compile.enabled()
            for place in places:
                installed = getattr(config, place)
                assert isinstance(installed, CustomGraphPass)
                installed(torch.fx.Graph())
                assert installed.uuid() is None  # theirs has no identity: nothing may be cached
            assert seen == [1, 1]
        assert all(getattr(config, place) is theirs for place in places)
        assert not flux.compile.enabled()
        flux.compile.disable()
    finally:
        for place in places:
            setattr(config, place, None)
    with flux.compile.enable():
        assert all(getattr(config, place).uuid() for place in places)
