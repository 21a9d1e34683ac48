"""Profile a step's operators on ranks, predict each policy, and run it: `flux plan run`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from flux.bench.config import Run
from flux.launch.hosts import parse_rate
from flux.launch.progress import Progress
from flux.machine.cluster import Cluster, NetworkSpec, load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost, CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import FUSED, Graph
from flux.plan.model import TrainingStep
from flux.plan.policies import Policies, label_of, planned, policy_of
from flux.plan.policies.fuse import fusable
from flux.plan.schedule import StepSchedule
from flux.plan.simulate import Timeline, simulate
from flux.runtime.execute import Executor, OperatorWork, coordinates, measured
from flux.runtime.profile import Profile, ProfiledCost, Profiler, key_of

_Step = tuple[float, dict[int, tuple[float, float]]]
"""The end of a step on a rank, and begin and end of its operators by number, in ms."""
ROUNDS = 4
"""In which policies choose, and what they chose is measured."""


@dataclass(frozen=True)
class PlanRun(Run):
    """The complete configuration of one run of `flux plan run`."""

    step: TrainingStep
    policies: Policies = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.step.parallel.world

    @property
    def cluster(self) -> Cluster:
        """The hosts that the ranks are on: CPUs, and links of the given rate."""
        cpu = load_cluster("cpu")
        hosts = self.host_of
        network = cpu.network
        if self.link_rate is not None:
            gbits = parse_rate(self.link_rate) / 1e9
            network = NetworkSpec("ethernet", 1, gbits, network.latency_us)
        per_host = max(map(hosts.count, hosts))
        return replace(cpu, devices=per_host, hosts=len(set(hosts)), network=network)


@dataclass(frozen=True)
class Ran:
    """What a policy did."""

    label: str
    predicted: Timeline
    run: Timeline
    times_ms: tuple[float, ...]


def _cost(config: PlanRun, fabric: Fabric, profile: Profile | None = None) -> CostModel:
    cost = AnalyticCost(fabric, config.step.dtype, config.step.itemsize)
    return cost if profile is None else ProfiledCost(profile, cost)


def schedules_of(config: PlanRun, profile: Profile | None = None) -> dict[str, StepSchedule]:
    """Return the schedule of each policy, by label."""
    fabric = Fabric(config.cluster, config.step.parallel)
    graph, cost = build_step(config.step, fabric), _cost(config, fabric, profile)
    schedules = {}
    for name, options in config.policies:
        policy = policy_of(name, options)
        schedule = planned(policy, graph, fabric, cost)
        label = label_of(name, options, policy)
        while label in schedules:  # such as serial, beside a plan that is serial
            label += ", again"
        schedules[label] = schedule
    return schedules


def memory_of(config: PlanRun, schedules: Mapping[str, StepSchedule]) -> int:
    """Return the bytes that the ranks need at least to run the schedules: of GEMMs and collectives.

    Operators of one shape share their tensors, as in ``execute.Work``.
    """
    sizes: dict[tuple[object, ...], int] = {}
    for schedule in schedules.values():
        for op in schedule.graph.ops:
            if op.kind in ("gemm", *FUSED):
                m, n, k = op.shape
                sizes[op.stage, "b", n, k] = n * k
                if op.kind == "gemm":
                    sizes[op.stage, "a", m, k] = m * k
            elif op.is_collective:
                count = op.shape[0] * op.shape[1]
                sizes[op.stage, "whole", count] = count
    ranks = config.ranks // config.step.parallel.pp
    return ranks * config.step.itemsize * sum(sizes.values())


def _graphs_to_profile(config: PlanRun) -> list[Graph]:
    """Return graphs with every operator that a policy may use."""
    fabric = Fabric(config.cluster, config.step.parallel)
    graph = build_step(config.step, fabric)
    cost = _cost(config, fabric)
    graphs = []
    for name, options in config.policies:
        choices = [options]
        if options.get("fused") == "auto":
            choices = [{**options, "fused": kind} for kind in ("none", *sorted(fusable(graph)))]
        graphs += [planned(policy_of(name, c), graph, fabric, cost).graph for c in choices]
    return graphs or [graph]


def run_entry(job: tuple[PlanRun, None], rank: int, progress: Progress) -> list[Ran]:
    """Run one rank of `flux plan run`, as an entry of flux.bench.launch.on_ranks."""
    config, _ = job
    with closing(OperatorWork(config.step.dtype, config.seed, config.timeout_s)) as work:
        return _run(config, work, progress)


def _run(config: PlanRun, work: OperatorWork, progress: Progress) -> list[Ran]:
    profiler = Profiler(config.step.parallel, work, max(3, config.repeats))
    profile = profiler.measure(_graphs_to_profile(config), partial(progress, "profile"))
    profile, schedules = _chosen(config, profiler, profile, progress)
    cost = _cost(config, Fabric(config.cluster, config.step.parallel), profile)
    predicted = {label: simulate(schedule, cost) for label, schedule in schedules.items()}
    executors = {
        label: Executor(schedule, config.step.parallel, work, config.timeout_s)
        for label, schedule in schedules.items()
    }
    results: dict[str, list[_Step]] = {label: [] for label in executors}
    rounds = config.warmup + config.repeats
    for index in range(rounds):
        for label, executor in executors.items():  # interleaved: drift meets all alike
            times = executor.run()
            if index >= config.warmup:
                results[label].append((max(end for _, end in times.values()), times))
        progress("steps", index + 1, rounds)
    return [_gathered(label, predicted[label], config, runs) for label, runs in results.items()]


def _chosen(
    config: PlanRun, profiler: Profiler, profile: Profile, progress: Progress
) -> tuple[Profile, dict[str, StepSchedule]]:
    """Return the schedules that policies choose by a profile, which has all of their operators.

    A choice may have operators that were not measured. So these are measured, and policies choose
    again; after ROUNDS the choice stays. Collective: all ranks have the same profile, and choose
    alike.
    """
    for _ in range(ROUNDS):
        schedules = schedules_of(config, profile)
        graphs = [schedule.graph for schedule in schedules.values()]
        if {key_of(op) for graph in graphs for op in graph.ops} <= set(profile.solo):
            break
        profile = profiler.measure(graphs, partial(progress, "profile"), known=profile)
    return profile, schedules


def _gathered(label: str, predicted: Timeline, config: PlanRun, runs: list[_Step]) -> Ran:
    """Return what all ranks did; of a stage, the timeline is that of its first rank. Collective."""
    everywhere: list[Any] = [None] * config.ranks
    dist.all_gather_object(everywhere, runs)
    slowest = [max(of[index][0] for of in everywhere) for index in range(len(runs))]
    median = sorted(range(len(runs)), key=lambda index: slowest[index])[len(runs) // 2]
    times: dict[int, tuple[float, float]] = {}
    for rank in range(config.ranks):
        at = coordinates(config.step.parallel, rank)
        if at["tp"] == at["cp"] == at["dp"] == 0:
            times |= everywhere[rank][median][1]
    run = measured(predicted.schedule, times, predicted.solo)
    return Ran(label, predicted, run, tuple(slowest))
