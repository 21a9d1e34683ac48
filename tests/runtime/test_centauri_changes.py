"""Centauri's FSDP when a model changes after parallelize, and when ranks run different parts."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from centauri_cases import VOCABULARY, WIDTH, Block, Net, adam, batch, net, ours, theirs, train
from flux.runtime.centauri.module import RuntimePlan, parallelize, sharded
from harness import PRELOAD, more, run_ranks

PRELOAD += ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"]


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def backward(model: Any, rank: int, number: int, **options: Any) -> None:
    tokens, wanted = batch(rank, number)
    loss_of(model(tokens, **options), wanted).backward()


def means(model: nn.Module, world: int) -> dict[str, torch.Tensor | None]:
    """Return gradients of a plain model as FSDP has them: none where no rank has one."""
    found = {}
    for name, p in model.named_parameters():
        total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        ranks = torch.tensor(float(p.grad is not None))
        dist.all_reduce(total)
        dist.all_reduce(ranks)
        found[name] = total / world if ranks else None
    return found


def check_gradients(model: nn.Module, wanted: dict[str, torch.Tensor | None], what: str) -> None:
    for name, p in model.named_parameters():
        right = wanted[name]
        assert (p.grad is None) == (right is None), (what, name)
        if right is not None:
            grad: Any = p.grad
            torch.testing.assert_close(grad.full_tensor(), right, rtol=1e-9, atol=1e-12)


# -- requires_grad -------------------------------------------------------------------------------


def unfreezes(rank: int, world: int, options: dict[str, Any]) -> None:
    """Freeze and unfreeze between steps: gradients and weights are those of FSDP2."""
    models = (theirs(net()), ours(world, net(), **options))
    optimizers = [adam(model) for model in models]
    changes: list[tuple[str, Callable[[Any], object]]] = [
        ("none", lambda m: m.requires_grad_(False)),
        ("the head", lambda m: m.head.requires_grad_(True)),
        ("a layer", lambda m: m.layers[2].requires_grad_(True)),
        ("all", lambda m: m.requires_grad_(True)),
        ("biases", lambda m: [p.requires_grad_(p.dim() == 1) for p in m.parameters()]),
        ("an embedding", lambda m: m.embed.weight.requires_grad_(True)),
    ]
    for number, (what, change) in enumerate(changes):
        for model, optimizer in zip(models, optimizers, strict=True):
            change(model)
            optimizer.zero_grad()
            if what != "none":
                backward(model, rank, number)
                optimizer.step()
        for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
            assert (a.grad is None) == (b.grad is None) == (not a.requires_grad), (what, name)
            torch.testing.assert_close(b.to_local(), a.to_local(), rtol=1e-9, atol=1e-12)
    # On some ranks only it is refused on all of them, and nothing is lost.
    model = models[1]
    if rank == 1:
        model.embed.requires_grad_(False)
    with pytest.raises(ValueError, match=r"ranks differ in requires_grad, .* embed\.weight"):
        model(batch(rank, 0)[0])
    model.embed.requires_grad_(True)
    sharded(model).set_requires_gradient_sync(rank == 0)
    with pytest.raises(ValueError, match="ranks differ in set_requires_gradient_sync"):
        model(batch(rank, 0)[0])
    sharded(model).set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match="ranks differ in the part of the model"):
        (model.embed if rank else model)(batch(rank, 0)[0])
    model.late = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"late\.weight came after parallelize"):
        model(batch(rank, 0)[0])
    del model.late
    train(rank, model, adam(model), 0, 1)
    sharded(model).close()


@pytest.mark.parametrize("shared", [True, *more(False)])
def test_freezing_after_parallelize_is_that_of_fsdp2(shared: bool) -> None:
    run_ranks(2, unfreezes, {"shared_memory": shared})


# -- weights -------------------------------------------------------------------------------------


def plain(model: Any) -> Net:
    """Return an ordinary model with the weights that the shards have now."""
    made = net()
    made.load_state_dict({n: p.detach().full_tensor() for n, p in model.named_parameters()})
    return made


def check_outputs(model: Any, tokens: torch.Tensor) -> None:
    """Compare the model, and parts that are called alone."""
    right = plain(model)
    torch.testing.assert_close(model(tokens), right(tokens), rtol=1e-11, atol=1e-12)
    x = right.embed(tokens).detach()
    torch.testing.assert_close(model.embed(tokens).detach(), x)
    torch.testing.assert_close(model.layers[1](x), right.layers[1](x), rtol=1e-11, atol=1e-12)


def recomputed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Run a forward that reads a weight outside of its unit, and recomputes others in backward."""
    x = model.embed(tokens) * model.scale.sum()
    x = checkpoint(model.layers[1], x, use_reentrant=False)
    x = checkpoint(model.layers[2], x, use_reentrant=True)
    y: torch.Tensor = model.head(x + model.embed.weight[tokens])
    return y


def changes_weights(rank: int, world: int, options: dict[str, Any]) -> None:
    model = ours(world, net(), **options)
    optimizer = adam(model)
    tokens = batch(rank, 0)[0]

    def step(part: Any) -> None:
        part(tokens)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    def in_place(change: Callable[[Any], object]) -> None:
        with torch.no_grad():
            for p in model.parameters():
                change(p)

    def scaled(factor: float) -> dict[str, Any]:
        return {name: value * factor for name, value in model.state_dict().items()}

    for change in (
        lambda: step(model),  # no backward in between
        lambda: step(model.embed),
        lambda: in_place(lambda p: p.mul_(0.5)),
        lambda: in_place(lambda p: nn.init.normal_(p, std=0.1)),
        lambda: in_place(lambda p: p.data.add_(0.01)),
        lambda: model._apply(lambda t: t * 2 if t.is_floating_point() else t),
        lambda: model.load_state_dict(scaled(0.9)),
        lambda: model.load_state_dict(scaled(0.8), assign=True),
        lambda: train(rank, model, adam(model), 0, 1),
    ):
        change()
        check_outputs(model, tokens)
    head: Any = model.head.weight
    for convert, back, message in (
        (model.float, model.double, "its dtype was torch.float64 .* and is torch.float32"),
        (lambda: model.head.half() if rank else 0, model.double, "torch.float16|ranks differ in"),
        (lambda: setattr(head, "data", head.detach() * 0), model.double, r"\.data was assigned"),
    ):
        convert()
        with pytest.raises(ValueError, match=message):
            model(tokens)
        back()
        check_outputs(model, tokens)
    for refused in (
        lambda: nn.utils.parametrizations.weight_norm(model.head),
        lambda: delattr(model.layers[0].up, "weight"),
        lambda: torch.func.functional_call(model, {"head.weight": torch.ones(1)}, (tokens,)),
        lambda: setattr(model.head, "weight", nn.Parameter(torch.ones(1))),
    ):
        with pytest.raises(RuntimeError, match="is sharded and cannot be re"):
            refused()
        check_outputs(model, tokens)
    written = pytest.raises(RuntimeError, match=r"head\.weight was written inside summon")
    with written, sharded(model).summon(), torch.no_grad():
        model.head.weight.mul_(2)
    # Backward with other weights than forward, as torch; and the step behind it.
    loss = model(tokens).sum()
    in_place(lambda p: p.mul_(1.0))
    with pytest.raises(RuntimeError, match="was changed after the forward"):
        loss.backward()
    right = plain(model)
    for one in (model, right):
        one.zero_grad()
        backward(one, rank, 3)
    check_gradients(model, means(right, world), "after a backward that raised")
    # Hooks of shards, which are no part of the graph; weights that are read elsewhere; graphs of a
    # backward; and checkpoints, which recompute.
    seen: list[Any] = []
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    model.scale.register_hook(lambda grad: 3 * grad)
    for one in (model, right):
        one.zero_grad()
        x = right.embed(tokens).detach().requires_grad_()
        calls: list[int] = []
        handle = one.layers[1].norm.register_forward_hook(lambda *_, of=calls: of.append(1))
        (grad,) = torch.autograd.grad(one.layers[0](x).square().sum(), x, create_graph=True)
        one.forward = lambda t, of=one: recomputed(of, t)
        (one(tokens).square().mean() + grad.square().mean()).backward()
        del one.forward
        assert len(calls) == 2
        handle.remove()
    wanted = means(right, world)
    assert wanted["scale"] is not None and seen == [(VOCABULARY, WIDTH)]
    wanted["scale"] *= 3
    check_gradients(model, wanted, "graphs")
    for thing in (model, model.layers, model.layers[0], model.head, sharded(model)):
        for save in (copy.deepcopy, pickle.dumps, lambda of: torch.save(of, io.BytesIO())):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                save(thing)
    assert torch.equal(copy.deepcopy(model.head.weight).to_local(), model.head.weight.to_local())
    assert isinstance(copy.copy(model).head.weight, DTensor)
    check_outputs(model, tokens)
    sharded(model).close()


@pytest.mark.parametrize("shared", [False, *more(True)])
def test_forward_has_the_weights_of_now_or_says_why_not(shared: bool) -> None:
    run_ranks(2, changes_weights, {"shared_memory": shared})


# -- what only some ranks run --------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        y = self.norm(x)
        for number in chosen:
            x = x + self.experts[number](y) * self.router(y)[..., number : number + 1]
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.branch, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, seed: int, how: str) -> torch.Tensor:
        chance = random.Random(seed)
        x = self.embed(tokens)
        if chance.random() < 0.5:
            x = x * self.scale.sum()
        for number in chance.sample(range(3), chance.choice((1, 2, 3))):
            chosen = [e for e in chance.sample(range(3), 3) if chance.random() < 0.4]
            chosen += chosen[:1] if how == "twice" else []
            if how == "checkpoint":
                x = checkpoint(self.layers[number], x, chosen, use_reentrant=False)
            else:
                x = self.layers[number](x, chosen)
        if chance.random() < 0.5:
            x = x + self.branch(x)
        y: torch.Tensor = self.head(x)
        return y


def different_parts(rank: int, world: int, how: str, options: dict[str, Any]) -> None:
    """Experts without tokens, branches, units that nobody runs, in another order on each rank."""
    torch.manual_seed(5)
    right = Branches().double()
    model = copy.deepcopy(right)
    parallelize(
        model,
        init_device_mesh("cpu", (world // 2, 2)),
        RuntimePlan(timeout_s=20.0, chunk_bytes=4096, **options),
    )
    for number in range(2):
        model.zero_grad()
        right.zero_grad()
        for micro in range(2):
            sharded(model).set_requires_gradient_sync(micro == 1)
            for one in (model, right):
                backward(one, rank, micro, seed=100 * number + 10 * micro + rank, how=how)
        check_gradients(model, means(right, world), f"step {number}")
    sharded(model).close()


@pytest.mark.parametrize(
    ("world", "how", "options"),
    [
        (2, "twice", {}),
        (2, "checkpoint", {"shared_memory": False, "overlap": False}),
        *more((4, "twice", {}), (2, "once", {"shared_memory": False})),
    ],
    ids=str,
)
def test_ranks_that_run_different_parts_meet(world: int, how: str, options: dict[str, Any]) -> None:
    run_ranks(world, different_parts, how, options, timeout=60.0)


def again_on_one_rank(rank: int, world: int) -> None:
    """Private weights that are freed behind a unit cannot come again for one rank alone."""
    model = ours(world, net(), shared_memory=False)
    tokens = batch(rank, 0)[0]
    with torch.no_grad(), pytest.raises(ValueError, match="other ranks gather another unit now"):
        model.forward = lambda x: model.layers[1](
            model.layers[0](model.layers[0](model.embed(x)))
            if rank
            else model.layers[0](model.embed(x))
        )
        model(tokens)
        model(tokens)


def test_a_unit_that_one_rank_runs_again_is_an_error_on_all() -> None:
    run_ranks(2, again_on_one_rank)


# -- pipelines -----------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, whole: Net, numbers: list[int]) -> None:
        super().__init__()
        self.embed = whole.embed if 0 in numbers else None
        self.layers = nn.ModuleList(whole.layers[number] for number in numbers)
        self.head = whole.head if 3 in numbers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def deep() -> Net:
    model = net()
    model.layers.append(Block().double())
    for p in model.layers[3].parameters():
        nn.init.constant_(p, 0.05)
    model.register_parameter("scale", None)
    return model


def pipelined(
    rank: int, world: int, kind: Any, ranks: list[list[list[int]]], options: dict[str, Any]
) -> None:
    """Losses and gradients of stages, which are sharded each by itself, are the plain model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, numbers = mesh.get_local_rank("data"), ranks[mesh.get_local_rank("pipeline")]
    whole = Part(deep(), [0, 1, 2, 3])
    parts = [Part(deep(), some) for some in numbers]
    for part in parts:
        parallelize(part, mesh["data"], RuntimePlan(timeout_s=30.0, **options))
    group, count = mesh.get_group("pipeline"), sum(map(len, ranks))
    stages = [
        PipelineStage(part, some[0] * count // 4, count, torch.device("cpu"), group=group)
        for part, some in zip(parts, numbers, strict=True)
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], 4, loss_of)
    for step in range(2):
        pairs = [[batch(data, 4 * step + number) for number in range(4)] for data in range(2)]
        whole.zero_grad()
        losses = [loss_of(whole(tokens), wanted) for of in pairs for tokens, wanted in of]
        torch.stack(losses).mean().backward()
        tokens, wanted = (torch.cat(of) for of in zip(*pairs[place], strict=True))
        kept: list[torch.Tensor] = []
        first, last = (any(end in some for some in numbers) for end in (0, 3))
        for part in parts:
            part.zero_grad()
        schedule.step(
            *([tokens] if first else []),
            **({"target": wanted, "losses": kept} if last else {}),
        )
        if last:
            mine = losses[4 * place : 4 * place + 4]
            torch.testing.assert_close(torch.stack(kept), torch.stack(mine), rtol=1e-12, atol=0.0)
        for part, some in zip(parts, numbers, strict=True):
            for name, p in part.named_parameters():
                grad: Any = p.grad
                if name.startswith("layers."):
                    name = f"layers.{some[int(name[7])]}{name[8:]}"
                right = whole.get_parameter(name).grad
                assert grad is not None, name
                torch.testing.assert_close(grad.full_tensor(), right, rtol=1e-11, atol=1e-14)
    for part in parts:
        sharded(part).close()


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        (Schedule1F1B, [[[0, 1]], [[2, 3]]], {"chunk_bytes": 4096}),
        (ScheduleDualPipeV, [[[0], [3]], [[1], [2]]], {"units": (Block,)}),
        *more((ScheduleZBVZeroBubble, [[[0], [3]], [[1], [2]]], {"units": (Block,)})),
    ],
    ids=["1F1B", "DualPipeV", *more("ZBV")],
)
def test_stages_of_pipelines_have_all_gradients(kind: Any, ranks: Any, options: Any) -> None:
    run_ranks(4, pipelined, kind, ranks, options)
