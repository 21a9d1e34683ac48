"""Plans for ranks: what the simulator takes, and that ranks do what was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flux.machine.cluster import Cluster, load_cluster
from flux.runtime.centauri.module import RuntimePlan, parallelize, sharded
from flux.runtime.centauri.planner import CHUNK_BYTES, PREFETCH, plan_run
from harness import more, run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def on(gbits: float, latency_us: float = 1.0) -> Cluster:
    found = load_cluster("cpu")
    return replace(found, network=replace(found.network, gbits=gbits, latency_us=latency_us))


def test_the_fastest_plan_is_taken_and_all_were_tried() -> None:
    found = plan_run(Net(), (2, 2), tokens=512, cluster=on(1.0))
    assert len(found.tried) == 2 * len(CHUNK_BYTES) * (PREFETCH + 1)
    assert len({plan for plan, _ in found.tried}) == len(found.tried)
    assert found.step_ms == pytest.approx(min(ms for _, ms in found.tried))
    assert (found.plan, found.step_ms) == found.tried[0]
    # Between hosts a byte crosses once by groups, and as often as a host has ranks without.
    assert found.plan.by_group and found.plan.prefetch >= 1
    slowest = max(ms for plan, ms in found.tried if plan.by_group)
    assert slowest < min(ms for plan, ms in found.tried if not plan.by_group)


@pytest.mark.parametrize("shared", [True, False])
def test_what_nothing_hides_is_the_bytes_over_the_link(shared: bool) -> None:
    """Over a slow link a step takes what crosses it: each byte once per host, of two hosts a half.

    Gradients are reduced; weights are gathered, and in backward again unless the host shares them.
    """
    model, fixed = Net(), RuntimePlan(shared_memory=shared)
    found = plan_run(model, (2, 2), tokens=1, cluster=on(0.01, 0.0), fixed=fixed)
    whole = {n: p.numel() * 4 for n, p in model.named_parameters()}
    again = sum(size for n, size in whole.items() if n != "head.weight")  # the last unit stays
    crossing = (2 * sum(whole.values()) + (0 if shared else again)) / 2
    assert found.step_ms == pytest.approx(crossing / (0.01e9 / 8) * 1e3, rel=0.02)


def test_chunks_trade_latency_for_overlap() -> None:
    """Where each message is slow, parameters travel together; where none is, by themselves."""
    slow = plan_run(Net(), (2, 2), tokens=512, cluster=on(100.0, 5000.0))
    quick = plan_run(Net(), (2, 2), tokens=4096, cluster=on(0.5, 0.0))
    assert slow.plan.chunk_bytes > quick.plan.chunk_bytes
    assert len(slow.order) < len(quick.order)


def test_what_is_fixed_stays_and_replicas_reduce_between_them() -> None:
    fixed = RuntimePlan(replicate=True, reshard_after_forward=False, timeout_s=7.0)
    found = plan_run(Net(), (2, 2, 2), tokens=64, cluster=on(1.0), fixed=fixed)
    assert found.plan == replace(
        fixed,
        prefetch=found.plan.prefetch,
        chunk_bytes=found.plan.chunk_bytes,
        by_group=found.plan.by_group,
    )
    kinds = [op.kind for op in found.timeline.schedule.graph.ops]
    reductions = sum(kind == "ReduceScatter" for kind, _ in found.order)
    assert kinds.count("all_reduce") == reductions
    # Nothing is gathered again.
    assert sum(kind == "AllGather" for kind, _ in found.order) == reductions


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 0}, "tokens must be an integer of at least 1"),
        ({"mesh": (2, 0)}, "mesh must be one or two sizes"),
        ({"mesh": (2, 2, 2)}, "mesh must be one or two sizes"),
        ({"cluster": "nowhere"}, "nowhere"),
        ({"model": nn.ReLU()}, "the model has no parameters"),
    ],
    ids=str,
)
def test_bad_input_is_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": Net(), "mesh": (2, 2), "tokens": 8, "cluster": "cpu"}
    given |= changed
    with pytest.raises(ValueError, match=message):
        plan_run(given.pop("model"), given.pop("mesh"), **given)


def runs_as_planned(rank: int, world: int, fixed: RuntimePlan) -> None:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2, world // 2))
    for gbits in (0.5, 100.0):
        model = Net()
        found = plan_run(model, mesh, tokens=64, cluster=on(gbits, 100 * gbits), fixed=fixed)
        parallelize(model, mesh, found.plan)
        for _ in range(2):
            with sharded(model).recorded() as order:
                model(torch.arange(64)).square().sum().backward()
            found.check(order)
        with pytest.raises(ValueError, match=r"collective 2 is AllGather of .* was planned"):
            found.check([*order[:2], order[3], order[2], *order[4:]])
        with pytest.raises(ValueError, match="is nothing"):
            found.check(order[:-1])
        with pytest.raises(ValueError, match="was not planned"):
            found.check([*order, order[0]])
        sharded(model).close()


@pytest.mark.parametrize("shared", [True, *more(False)])
def test_ranks_begin_collectives_in_the_planned_order(shared: bool) -> None:
    run_ranks(4, runs_as_planned, RuntimePlan(shared_memory=shared, timeout_s=30.0))
