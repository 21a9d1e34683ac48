"""Run a benchmark on torchrun's ranks if torchrun started this process, else on new ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flux.bench.config import ONE_GPU, BenchConfig, Run
from flux.bench.methods import Factory
from flux.bench.model import ModelConfig
from flux.bench.op import Measurement, measure
from flux.bench.places.gpu import problem_here
from flux.launch.hosts import Hosts
from flux.launch.progress import Progress, silent
from flux.launch.spawn import Entry, run_ranks

T = TypeVar("T")
Placeable = TypeVar("Placeable", BenchConfig, ModelConfig)


def torchrun_world() -> int | None:
    """Return the world size that torchrun set; None if it did not start this process."""
    try:
        return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    except KeyError:
        return None


def torchrun_rank() -> int:
    """Return the rank that torchrun set."""
    return int(os.environ["RANK"])


def processes(config: BenchConfig) -> int:
    """Return the number of processes that the ranks are in."""
    return 1 if config.transport in ONE_GPU else config.problem.world


def group_of(config: BenchConfig) -> str:
    """Return the backends of the process group: gloo, and NCCL for ranks with a GPU each."""
    own_gpus = config.backend == "cuda" and config.transport not in ONE_GPU
    return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"


def _one_rank(argument: Any, rank: int, progress: Progress) -> Measurement:
    config, factory = argument
    return measure(config, rank, progress if rank == 0 else silent, factory)


def supervised_rank(argument: Any, rank: int, progress: Progress) -> Measurement:
    """Run a rank with its own supervisor, which waits for its reports."""
    config, factory = argument
    return measure(config, rank, progress, factory)


def spawned(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Measurement:
    """Run the benchmark on ranks of our own.

    Raises:
        RankFailedError: a rank raised, died or stalled; none is left running.
        HostsUnavailableError: the configuration has several hosts, and this machine cannot make
            them.
    """
    argument, count = (config, factory), processes(config)
    result: Measurement = on_own_ranks(
        _one_rank, argument, config, count, progress, group_of(config)
    )
    return result


def on_own_ranks(
    entry: Entry,
    argument: Any,
    config: Run,
    count: int,
    progress: Progress,
    group: str = "gloo",
) -> Any:
    """Run ``entry`` in ``count`` new processes; return the result of rank 0.

    If the configuration has several hosts, the processes run on simulated hosts.

    Raises:
        RankFailedError: as ``spawned``.
        HostsUnavailableError: as ``spawned``.
    """
    many = len(set(config.host_of))
    with Hosts(many, config.link_rate) if many > 1 else nullcontext() as hosts:
        return run_ranks(
            entry,
            argument,
            count,
            threads=config.threads,
            timeout_s=config.timeout_s,
            progress=progress,
            places=hosts.placed(config.host_of) if hosts is not None else None,
            group=group,
        )


def on_hosts(config: Placeable, identities: Sequence[str]) -> Placeable:
    """Return the configuration for ranks on these hosts; ``identities``: the host of each rank.

    Raises:
        ValueError: ranks of one host are not consecutive.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(identities)]
    if len(sizes) != len(set(identities)):
        raise ValueError("ranks of one host must be numbered one after the other, as torchrun does")
    if len(sizes) == 1:
        return config
    return replace(config, hosts="+".join(map(str, sizes)), common_clock=False)


def check_gpus(config: BenchConfig) -> None:
    """Check on all ranks that each has a GPU, if needed. Collective.

    Raises:
        ValueError: a rank has none.
    """
    if config.backend != "cuda":
        return
    problems: list[Any] = [None] * config.problem.world
    dist.all_gather_object(problems, problem_here(config))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}")


def joined(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Measurement:
    """Run as one of torchrun's ranks, on one host or several; return the measurement on each."""

    def run(config: BenchConfig, rank: int) -> Measurement:
        check_gpus(config)
        return _one_rank((config, factory), rank, progress)

    return as_torchrun_rank(run, config, group_of(config))


def as_torchrun_rank(
    run: Callable[[Placeable, int], T], config: Placeable, group: str = "gloo"
) -> T:
    """Return ``run(config, rank)`` in torchrun's process group.

    ``config`` gets the hosts of the ranks.
    """
    from flux.machine.host import host_identity

    torch.set_num_threads(config.threads)
    dist.init_process_group(group, timeout=timedelta(seconds=config.timeout_s))
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host_identity())
        return run(on_hosts(config, hosts), torchrun_rank())
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()
