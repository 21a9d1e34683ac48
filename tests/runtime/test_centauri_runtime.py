"""Centauri's FSDP on ranks: losses of FSDP2, its checkpoints, and what happens to bad input."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from centauri_cases import VOCABULARY, WIDTH, Net, adam, batch, net, ours, theirs, train
from flux.core.errors import PeerTimeoutError
from flux.layers import ColumnParallelLinear, RowParallelLinear
from flux.runtime.centauri.module import RuntimePlan, parallelize, sharded
from harness import BUSY, PRELOAD, fresh_ranks, more, run_ranks

PRELOAD += ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"]

STEPS = 3


def tied(model: Net) -> Net:
    """Share a weight between the first unit and the last one."""
    model.head.weight = model.embed.weight
    return model


def both(rank: int, world: int, options: dict[str, Any]) -> None:
    reference, model = theirs(net()), ours(world, net(), **options)
    found = train(rank, model, adam(model), 0, STEPS, micro=2)
    assert found == pytest.approx(train(rank, reference, adam(reference), 0, STEPS, 2), rel=1e-11)
    assert len(set(found)) == STEPS
    for (name, one), (_, two) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert isinstance(one, DTensor) and one.placements == two.placements, name
        torch.testing.assert_close(one.to_local(), two.to_local(), rtol=1e-9, atol=1e-12)
    sharded(model).close()


@pytest.mark.parametrize(
    "world, options",
    [
        (4, {"shared_memory": True}),
        (2, {"by_group": False, "prefetch": 0, "shared_memory": False, "overlap": False}),
        (2, {"reshard_after_forward": False, "prefetch": 3}),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_fsdp2(world: int, options: dict[str, Any]) -> None:
    run_ranks(world, both, options)


def replicated(rank: int, world: int, sizes: tuple[int, ...], folder: str) -> None:
    """FSDP inside of replicas, beside torch's on a mesh of two dimensions; and its checkpoints."""
    names = ("replicate", "shard")
    pair = init_device_mesh("cpu", (sizes[0], world // sizes[0]), mesh_dim_names=names)
    mesh = init_device_mesh("cpu", sizes)
    plan = RuntimePlan(replicate=True, chunk_bytes=4096, timeout_s=30.0)

    def sharded_by_torch(model: Net) -> Net:
        for layer in (model.embed, *model.layers, model.head, model):
            fully_shard(layer, mesh=pair)
        return model

    reference, model = sharded_by_torch(net()), parallelize(net(), mesh, plan)
    one, two = adam(model), adam(reference)
    found = train(rank, model, one, 0, STEPS)
    assert found == pytest.approx(train(rank, reference, two, 0, STEPS), rel=1e-12)
    for (name, a), (_, b) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert a.placements == b.placements and len(a.placements) == 2, name
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-12, atol=1e-13)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": {n: torch.zeros_like(v) for n, v in reference.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder)
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name].to_local(), value.to_local()), name
    sharded(model).close()


@pytest.mark.parametrize("sizes", [(2, 2), *more((2, 2, 1))], ids=str)
def test_replicas_are_those_of_hsdp(sizes: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(4, replicated, sizes, str(tmp_path))


class TensorParallel(nn.Module):
    """Blocks whose linear layers are divided among tensor-parallel ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "dtype": torch.float64, "bias": False}
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, **options)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens % WIDTH, WIDTH).double()
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        y: torch.Tensor = self.head(x)
        return y


def beside_tensor_parallelism(rank: int, world: int, sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (*sizes, 2), mesh_dim_names=("hosts", "data", "tensor"))
    place = rank // 2  # of the data-parallel rank

    def made() -> TensorParallel:
        torch.manual_seed(3 + mesh.get_local_rank("tensor"))
        model = TensorParallel(mesh.get_group("tensor"))
        for replicated in (model.norm, model.head):
            for p in replicated.parameters():
                dist.broadcast(p.data, 0)
        return model

    def trained(model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens, wanted = batch(place, step)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    reference = fully_shard(made(), mesh=mesh["hosts", "data"]._flatten("shards"))
    model = made()
    parallelize(model, mesh["hosts", "data"], RuntimePlan(timeout_s=30.0, chunk_bytes=512))
    assert trained(model) == pytest.approx(trained(reference), rel=1e-11)
    for (name, one), (_, two) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert isinstance(one, DTensor) and isinstance(two, DTensor)
        assert one.device_mesh.size() == 2, name
        torch.testing.assert_close(one.full_tensor(), two.full_tensor(), rtol=1e-9, atol=1e-12)
    sharded(model).close()


@pytest.mark.parametrize("sizes", [(1, 2), *more((2, 1))], ids=str)
def test_a_part_of_a_mesh_beside_tensor_parallelism(sizes: tuple[int, int]) -> None:
    run_ranks(4, beside_tensor_parallelism, sizes)


def disagree(rank: int, world: int) -> None:
    meshes = [init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))]
    with pytest.raises(ValueError, match=r"rank \d has \[.* as its mesh, and rank \d has"):
        parallelize(net(), meshes[rank == 3])
    dist.barrier()


def test_ranks_that_disagree_on_their_mesh_are_refused() -> None:
    run_ranks(4, disagree)


def features(rank: int, world: int) -> None:
    """What else FSDP2 can: see each assertion."""
    # Gradients that add up without reduction; parameters without a gradient; evaluation between.
    reference, model = theirs(net(unused=True)), ours(world, net(unused=True))
    for m, sync in (
        (reference, reference.set_requires_gradient_sync),
        (model, sharded(model).set_requires_gradient_sync),
    ):
        for part in range(3):
            sync(part == 2)
            tokens, wanted = batch(rank, part)
            with torch.no_grad():
                m(tokens)
            nn.functional.cross_entropy(m(tokens).flatten(0, 1), wanted.flatten()).backward()
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, one), (_, two) in pairs:
        assert (one.grad is None) == (two.grad is None) == ("spare" in name), name
        if one.grad is not None:
            torch.testing.assert_close(
                one.grad.to_local(), two.grad.to_local(), rtol=1e-10, atol=1e-13
            )
    # Weights that change outside of training are seen by the next forward; summon shows them.
    with torch.no_grad():
        model.scale.to_local().fill_(2.0)
        model.head.weight.to_local().zero_()
    assert float(model(batch(rank, 0)[0]).abs().sum()) == 0.0
    with sharded(model).summon():
        assert model.scale.shape == (3,) and float(model.scale.sum()) == 6.0
        assert model.head.weight.shape == (VOCABULARY, WIDTH)
    # Activation checkpointing recomputes in backward, where weights come again.
    plain, model = net(), ours(world, net())
    grads = []
    for m in (plain, model):
        x = m.embed(batch(0, 0)[0]).detach().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(m.layers[0], x, use_reentrant=False)
        y.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
    # A weight of two units is the model's own. FSDP2 is not told of these units.
    reference, model = tied(net()), ours(world, tied(net()))
    for layer in reference.layers:
        fully_shard(layer)
    fully_shard(reference)
    for _ in range(2):
        found = train(rank, model, adam(model), 0, 2)
        assert found == pytest.approx(train(rank, reference, adam(reference), 0, 2), rel=1e-11)
    # Inference mode, of which no tensor may be written outside of it.
    model = ours(world, net(), shared_memory=False)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(0, 0)[0]), net()(batch(0, 0)[0]))
    train(rank, model, adam(model), 0, 1)
    # Lower precision of weights, higher of sums; and a frozen part.
    model = net().float()
    model.embed.weight.requires_grad_(False)
    model = ours(world, model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loss = model(batch(rank, 0)[0])
    assert loss.dtype == torch.bfloat16
    loss.sum().backward()
    assert model.embed.weight.grad is None and model.head.weight.grad.dtype == torch.float32
    # An error in forward leaves nothing behind.
    with pytest.raises(IndexError):
        model(torch.full((1, 1), VOCABULARY))
    assert model(batch(rank, 0)[0]).isfinite().all()


def test_accumulation_evaluation_checkpointing_and_dtypes() -> None:
    run_ranks(2, features)


def goes_on(rank: int, world: int, folder: str) -> None:
    """Train, save, train on; load into a new model, FSDP2's and ours, and train on from there."""
    model = ours(world, net())
    optimizer = adam(model)
    train(rank, model, optimizer, 0, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    after = train(rank, model, optimizer, 2, 2)
    for make in (lambda m: ours(world, m), theirs):
        torch.manual_seed(99)
        again = make(Net().double())
        optimizer = adam(again)
        train(rank, again, optimizer, 50, 1)  # other weights, and states to load into
        state = {"model": again.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert train(rank, again, optimizer, 2, 2) == pytest.approx(after, rel=1e-12)


@pytest.mark.parametrize("world", [2, *more(4)])
def test_training_goes_on_from_a_checkpoint_of_either(world: int, tmp_path: Path) -> None:
    run_ranks(world, goes_on, str(tmp_path))


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    scalar = net()
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    recurrent = nn.Sequential(nn.LSTM(3, 3))
    cases: list[tuple[Any, Any, Any, str]] = [
        (3, mesh, None, r"model must be a torch\.nn\.Module, got int"),
        (net(), 4, None, r"mesh must be a DeviceMesh .*, got int"),
        (net(), DeviceMesh("cpu", [[1, 0]]), None, r"must ascend, .* got \[\[1, 0\]\]"),
        (net(), mesh, {"prefetch": 1}, "plan must be a RuntimePlan, got dict"),
        (net(), mesh, RuntimePlan(replicate=True), "one of replicas in front of them, got 1"),
        (nn.ReLU(), mesh, None, "the model has no parameters"),
        (net().to("meta"), mesh, None, "is on meta, and the mesh on cpu; materialize"),
        (scalar, mesh, None, "temperature has no dimensions"),
        (recurrent, mesh, None, "LSTM keeps its weights"),
        (theirs(net()), mesh, None, "is a DTensor already"),
    ]
    for model, where, plan, message in cases:
        with pytest.raises(ValueError, match=message):
            parallelize(model, where, plan)
    for options, message in (
        ({"prefetch": -1}, "prefetch must be an integer of at least 0"),
        ({"by_group": 1}, "by_group must be True or False"),
        ({"param_dtype": torch.int8}, "param_dtype must be a floating-point dtype"),
        ({"shared_memory": 1}, "shared_memory must be True, False or None"),
        ({"replicate": None}, "replicate must be True or False"),
        ({"timeout_s": 0}, "timeout_s must be a positive time"),
        ({"units": [nn.Linear]}, "units must be a tuple of module classes"),
    ):
        with pytest.raises(ValueError, match=message):
            RuntimePlan(**options)  # type: ignore[arg-type]
    model = ours(world, net())
    with pytest.raises(ValueError, match="is a DTensor already"):
        parallelize(model, mesh)
    with pytest.raises(RuntimeError, match=r"embed\.weight is sharded and cannot be replaced"):
        model.embed.weight = nn.Parameter(torch.zeros(1))
    sharded(model).close()
    with pytest.raises(RuntimeError, match="was closed"):
        model(batch(rank, 0)[0])
    with pytest.raises(ValueError, match="was not parallelized"):
        sharded(net())
    dist.barrier()  # nobody has begun a collective that others did not


def test_bad_input_is_refused_before_any_communication() -> None:
    run_ranks(2, refused)


def loses_a_rank(rank: int, world: int, how: str, lost: int) -> str:
    """Train until a rank is killed, or stalls until the others have raised."""
    model = ours(world, net(), timeout_s=BUSY)
    optimizer = adam(model)
    train(rank, model, optimizer, 0, 1)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == lost and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == lost and how == "stall":
        others = [f"raised/{peer}" for peer in range(world) if peer != lost]
        store.wait(others, timedelta(seconds=20 * BUSY))
        sharded(model).close()
        return "woke"
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError) as raised:
        train(rank, model, optimizer, 1, 2)
    assert time.monotonic() - began < 4.0 * BUSY
    with pytest.raises(PeerTimeoutError, match="has failed before"):
        model(batch(rank, 0)[0])
    store.set(f"raised/{rank}", "")
    sharded(model).close()
    return str(raised.value)


def test_survivors_raise_when_a_rank_is_lost() -> None:
    """A rank stalls; with a new model the same ranks train again, and then it is killed."""
    with fresh_ranks(4) as ranks:
        ranks.run(train_plain, timeout=30.0 * BUSY)
        for how in ("stall", "kill"):
            ranks.start(loses_a_rank, how, 3)
            outcomes = ranks.collect(30.0 * BUSY)
            for outcome in outcomes[:3]:
                assert outcome is not None and outcome.ok, (how, outcome)
                assert "agreement on a call of Net" in outcome.value
        assert outcomes[3] is not None and outcomes[3].signal == signal.SIGKILL


def train_plain(rank: int, world: int) -> None:
    """Do what takes long the first time."""
    model = net()
    train(rank, model, adam(model), 0, 1)


def ends_clean(rank: int, world: int) -> None:
    before = threading.active_count()
    for _ in range(2):
        model = ours(world, net())
        train(rank, model, adam(model), 0, 1)
        assert threading.active_count() == before + 4
        sharded(model).close()
        sharded(model).close()
        deadline = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == before


def test_close_ends_threads() -> None:
    run_ranks(2, ends_clean)
