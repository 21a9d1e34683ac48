"""Domino: gradients of the unsliced model, in the planned order."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flux.bench.shapes import Layer
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools
from flux.layers.linear import ParallelLinear
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import COLLECTIVES
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import planned
from flux.plan.policies.domino import DominoPolicy
from flux.plan.policies.fuse import WHICH
from flux.runtime.domino.layers import replace
from flux.runtime.domino.module import ORDERS, Domino, Dropout
from flux.runtime.slices import current_slice, recorded
from harness import STRESS, more, run_ranks

HIDDEN, HEADS, SEQUENCE = 16, 4, 6


class Block(nn.Module):
    """A layer of a transformer on [sequence, batch, hidden]."""

    def __init__(self, number: int, rank: int, sequence_parallel: bool, p: float) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "dtype": torch.float64,
            "fused": False,
        }
        self.ln1, self.ln2 = (nn.LayerNorm(HIDDEN, dtype=torch.float64) for _ in range(2))
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, **options)
        self.proj = RowParallelLinear(HIDDEN, HIDDEN, **options)
        self.fc1 = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **options)
        self.fc2 = RowParallelLinear(4 * HIDDEN, HIDDEN, **options)
        seed = 10 * number + (100 * rank if sequence_parallel else 0)
        self.drop1, self.drop2 = Dropout(p, seed, 1), Dropout(p, seed + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        heads = HEADS // self.qkv.world
        q, k, v = (t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop1(self.proj(mixed.permute(2, 0, 1, 3).flatten(-2)))
        hidden = nn.functional.gelu(self.fc1(self.ln2(x)))
        return x + self.drop2(self.fc2(hidden))


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the loss and all gradients of a step with plain autograd."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = (model(x) ** 2).sum()
    loss.backward()
    return loss.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())


def run_both(
    rank: int,
    world: int,
    slices: int,
    columns: int,
    order: str,
    sequence_parallel: bool,
    fused: str = "none",
) -> list[tuple[str, int, int, str]]:
    """Compare two steps with those of the layers as they are; return what ran in the last one."""
    torch.manual_seed(1)
    layers = nn.Sequential(*(Block(n, rank, sequence_parallel, 0.1) for n in range(2)))
    for layer in layers.modules():
        if isinstance(layer, ParallelLinear):
            layer.fused = fused != "none"
    rows = SEQUENCE * world // (world if sequence_parallel else 1)
    x = torch.randn(SEQUENCE * world, 12, HIDDEN, dtype=torch.float64)
    x = x[rank * rows : (rank + 1) * rows] if sequence_parallel else x
    expected = [step(layers, x) for _ in range(2)]
    for block in layers:
        for drop in (block.drop1, block.drop2):
            drop.calls = 0
    model = Domino(replace(layers, fused), slices, columns, order=order, batch_dim=1)
    events = []
    for wanted in expected:
        with recorded() as record:
            found = step(model, x)
        events = record.events
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    close_pools()
    return events


PARTS = ("qkv", "proj", "fc1", "fc2")
LAUNCHED = {
    "fwd": {"ag": "column", "ar": "row", "rs": "row"},
    "dgrad": {"ag": "column", "ar": "column", "rs": "row"},
}


def planned_events(
    world: int, slices: int, columns: int, order: str, sequence_parallel: bool
) -> dict[str, list[tuple[str, int, str, int]]]:
    """Return (role, layer, part, slice) of GEMMs, and of collectives, in the order of the plan."""
    parallel = Parallel(tp=world, sequence=sequence_parallel)
    layer = Layer(HIDDEN, 4 * HIDDEN, HEADS, HEADS, HIDDEN // HEADS, False)
    step = TrainingStep("test", layer, 2, "float64", parallel, SEQUENCE * world, 12, 1)
    fabric = Fabric(replaced(load_cluster("cpu"), devices=world), parallel)
    cost = AnalyticCost(fabric, "float64", 8)
    policy = DominoPolicy(slices, columns, order)
    schedule = planned(policy, build_step(step, fabric), fabric, cost)
    found: dict[str, list[tuple[str, int, str, int]]] = {"gemm": [], "launch": []}
    for numbers in schedule.lanes.values():
        for number in numbers:
            op = schedule.graph.ops[number]
            if op.micro < 0 or op.role == "wgrad" or op.kind not in ("gemm", *COLLECTIVES):
                continue
            part = op.part
            if op.is_collective:
                linear = LAUNCHED[op.role][part[:2]]
                part = {"column": ("qkv", "fc1"), "row": ("proj", "fc2")}[linear][int(part[-1]) - 1]
            cut = columns > 1 and op.role == "fwd" and part in ("proj", "fc2")
            piece = op.strand if cut else op.piece
            found["gemm" if op.kind == "gemm" else "launch"].append(
                (op.role, op.layer, part, piece)
            )
    return found


@pytest.mark.parametrize(
    "slices, columns, order",
    [
        (3, 1, "blocks"),
        (2, 2, "grouped"),
        (3, 2, "staggered"),
        *more((2, 1, "staggered"), (4, 1, "staggered"), (2, 1, "grouped"), (1, 4, "staggered")),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["ar", "sp"])
def test_the_order_that_ran_is_the_planned_one(
    slices: int, columns: int, order: str, sequence_parallel: bool
) -> None:
    events = run_ranks(2, run_both, slices, columns, order, sequence_parallel)[0]
    roles = {"forward": "fwd", "backward": "dgrad"}
    ran: dict[str, list[tuple[str, int, str, int]]] = {"gemm": [], "launch": []}
    for phase, piece, number, what in events:
        if what.startswith("wait"):
            continue
        part, layer = PARTS[number % 4], number // 4
        kind = "launch" if what.startswith("launch") else "gemm"
        times = columns if kind == "gemm" and phase == "forward" and what == "row" else 1
        ran[kind] += [(roles[phase], layer, part, piece)] * times
    assert ran == planned_events(2, slices, columns, order, sequence_parallel)


@pytest.mark.parametrize(
    "world, slices, columns",
    [
        *((2, *cut) for cut in ((2, 1), (3, 1), (1, 4), (2, 2))),
        *more((2, 1, 2), (2, 4, 1), (4, 2, 1), (4, 3, 1), (4, 1, 2), (4, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["ar", "sp"])
def test_gradients_are_those_of_the_unsliced_model(
    world: int, slices: int, columns: int, sequence_parallel: bool
) -> None:
    for order in ORDERS if world == 2 and (STRESS > 1 or slices == 3) else ORDERS[:1]:
        events = run_ranks(world, run_both, slices, columns, order, sequence_parallel)
        assert all(of == events[0] for of in events)  # one order of collectives on all ranks


@pytest.mark.parametrize("fused", ["column", "row", "all"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["ar", "sp"])
def test_slices_of_fused_ops(fused: str, sequence_parallel: bool) -> None:
    events = run_ranks(2, run_both, 2, 1, "grouped", sequence_parallel, fused)[0]
    kinds = {what for _, _, _, what in events if what.startswith("fused")}
    assert kinds == {f"fused {kind}" for kind in WHICH[fused]}
    order = [
        (piece, number) for phase, piece, number, what in events if what in ("row", "fused row")
    ]
    blocks = [(piece, number) for number in (1, 3, 5, 7) for piece in (0, 1)]
    assert order[: len(blocks)] == blocks  # forward: slices take turns


class Wrapped(nn.Module):
    """A layer that is not torch's own, which torch.compile would leave alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def compiled(rank: int, world: int) -> None:
    """Compare slices whose norms are compiled, and which are compiled, with eager ones."""
    torch.manual_seed(1)
    layers = replace(nn.Sequential(*(Block(n, rank, False, 0.0) for n in range(2))))
    x = torch.randn(SEQUENCE, 4, HIDDEN, dtype=torch.float64)
    model = Domino(layers, batch_dim=1)
    expected = step(model, x)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in layers:
        block.ln1 = Wrapped(block.ln1)
        block.ln1.compile(backend=backend)
    found = step(model, x)
    assert graphs
    whole = step(torch.compile(model, backend=backend), x)
    for a, b, wanted in zip(found, whole, expected, strict=True):
        torch.testing.assert_close(a, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(b, wanted, rtol=1e-12, atol=1e-12)


def test_parts_of_a_model_can_be_compiled() -> None:
    run_ranks(2, compiled)


# -- checkpoints and autocast ----------------------------------------------------------------------


class Checkpoint(nn.Module):
    """Computes a module again in backward, and casts in it if it shall."""

    def __init__(self, inner: nn.Module, reentrant: bool | None, casts: bool) -> None:
        super().__init__()
        self.inner, self.reentrant, self.casts = inner, reentrant, casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            if self.reentrant is None:
                return self.inner(x)
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def run_checkpoints(rank: int, world: int, sequence_parallel: bool) -> None:
    """Compare slices with the layers as they are, where each is a checkpoint, and all of them."""
    torch.manual_seed(1)
    blocks = [Block(n, rank, sequence_parallel, 0.1) for n in range(2)]
    x = torch.randn(SEQUENCE, 4, HIDDEN, dtype=torch.float64)
    for casts in (False, True):
        if casts:
            blocks, x = [block.float() for block in blocks], x.float()
        bound = 0.05 if casts else 1e-12
        plain = nn.Sequential(*(Checkpoint(block, None, casts) for block in blocks))
        torch.manual_seed(2)
        expected = step(plain, x)
        for inner, outer in ((True, None), (False, None), (None, True), (True, False)):
            layers = nn.Sequential(*(Checkpoint(block, inner, casts) for block in blocks))
            model = Checkpoint(Domino(replace(layers), batch_dim=1), outer, casts)
            torch.manual_seed(2)
            for found, wanted in zip(step(model, x), expected, strict=True):
                size = wanted.abs().max().item()
                torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * max(size, 1))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["ar", "sp"])
def test_checkpoints_and_autocast_in_slices(sequence_parallel: bool) -> None:
    run_ranks(2, run_checkpoints, sequence_parallel)


# -- failures, inference, frozen parameters --------------------------------------------------------


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("backward of slice 1 fails")


class Failing(nn.Module):
    """The identity, which can be told to fail in slice 1."""

    phase = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if current_slice() == 1 and self.phase == "forward":
            raise RuntimeError("forward of slice 1 fails")
        if current_slice() == 1 and self.phase == "backward":
            return _FailingBackward.apply(x)
        return x


def two_blocks(rank: int, world: int, sequence_parallel: bool) -> tuple[nn.Sequential, Any]:
    """Return two layers with a Failing between them, and their input."""
    torch.manual_seed(1)
    blocks = [Block(n, rank, sequence_parallel, 0.0) for n in range(2)]
    x = torch.randn(SEQUENCE * world, 4, HIDDEN, dtype=torch.float64)
    rows = slice(rank * SEQUENCE, (rank + 1) * SEQUENCE) if sequence_parallel else slice(None)
    return nn.Sequential(blocks[0], Failing(), blocks[1]), x[rows]


def run_failing(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    """Fail in either phase, and take a step after each failure; return what was raised."""
    layers, x = two_blocks(rank, world, sequence_parallel)
    expected = step(layers, x)
    model = Domino(replace(layers), 2, batch_dim=1)
    raised = []
    for phase in ("forward", "backward"):
        layers[1].phase = phase
        try:
            step(model, x)
        except RuntimeError as error:
            raised.append(str(error))
        assert current_slice() == 0
        layers[1].phase = ""
        for found, wanted in zip(step(model, x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    return raised


SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["ar", "sp"])


@SEQUENCE_PARALLEL
def test_a_slice_that_fails_raises_and_the_next_step_works(sequence_parallel: bool) -> None:
    for raised in run_ranks(2, run_failing, sequence_parallel):
        assert raised == ["forward of slice 1 fails", "backward of slice 1 fails"]


def run_without_gradients(rank: int, world: int, sequence_parallel: bool) -> list[tuple[str, int]]:
    """Compare outputs under torch.no_grad(); return (what, slice) in the order in which it ran."""
    layers, x = two_blocks(rank, world, sequence_parallel)
    expected = layers(x)
    model = Domino(replace(layers), 2, batch_dim=1)
    with torch.no_grad(), recorded() as record:
        found = model(x)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    return [(what, piece) for _, piece, _, what in record.events]


@SEQUENCE_PARALLEL
def test_without_gradients_slices_still_take_turns(sequence_parallel: bool) -> None:
    events, others = run_ranks(2, run_without_gradients, sequence_parallel)
    assert events == others
    rows = [piece for what, piece in events if what == "row"]
    assert rows == [0, 1] * 4  # attention and MLP of two layers, slice by slice
    # The first slice's collective is waited for after the second slice has computed.
    assert events.index(("column", 1)) < events.index(("wait row", 0))


FROZEN = {
    "some": ("0.ln1.weight", "0.qkv.weight", "0.fc2.weight", "2.proj.weight", "2.fc1.weight"),
    "first layer": ("0.",),
    "linears": ("0.qkv", "0.proj", "0.fc", "2.qkv", "2.proj", "2.fc"),
}


def run_frozen(rank: int, world: int, sequence_parallel: bool, frozen: tuple[str, ...]) -> None:
    """Compare gradients with those of the layers as they are; the input needs none."""
    layers, x = two_blocks(rank, world, sequence_parallel)
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    gradients = []
    for slices in (1, 2):
        model = layers if slices == 1 else Domino(replace(layers), slices, batch_dim=1)
        model.zero_grad()
        (model(x) ** 2).sum().backward()
        gradients.append({name: p.grad for name, p in layers.named_parameters()})
    for name, wanted in gradients[0].items():
        found = gradients[1][name]
        assert (found is None) == (wanted is None) == name.startswith(frozen), name
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_get_no_gradient_and_others_theirs(
    frozen: str, sequence_parallel: bool
) -> None:
    run_ranks(2, run_frozen, sequence_parallel, FROZEN[frozen])
