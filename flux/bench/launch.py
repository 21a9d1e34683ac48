"""Where the ranks of a benchmark come from: torchrun's, when it started us, else our own."""

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

from .gpu import problem_here
from .hosts import Hosts
from .methods import Factory
from .model import ModelConfig
from .op import Measurement, Progress, measure, silent
from .problem import ONE_GPU, BenchConfig, Run
from .spawn import Entry, run_ranks

T = TypeVar("T")
Placeable = TypeVar("Placeable", BenchConfig, ModelConfig)


def torchrun_world() -> int | None:
    """World size given by torchrun's environment, None when this process was not started by it."""
    try:
        return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    except KeyError:
        return None


def torchrun_rank() -> int:
    return int(os.environ["RANK"])


def processes(config: BenchConfig) -> int:
    """How many the ranks are in."""
    return 1 if config.transport in ONE_GPU else config.problem.world


def group_of(config: BenchConfig) -> str:
    """Backends of the process group: ranks with GPUs of their own talk over gloo beside NCCL."""
    own_gpus = config.backend == "cuda" and config.transport not in ONE_GPU
    return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"


def _one_rank(argument: Any, rank: int, progress: Progress) -> Measurement:
    config, factory = argument
    return measure(config, rank, progress if rank == 0 else silent, factory)


def supervised_rank(argument: Any, rank: int, progress: Progress) -> Measurement:
    """Entry of a rank that has a supervisor of its own, which waits for its reports."""
    config, factory = argument
    return measure(config, rank, progress, factory)


def spawned(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Measurement:
    """Run on ranks of our own.

    Raises:
        RankFailedError: a rank raised, died or stalled; none is left running.
        HostsUnavailableError: several hosts were asked for, and this machine cannot make them.
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
    """Run ``entry`` in ``count`` processes of our own, on hosts of our own if the configuration has
    several; the result of rank 0.

    Raises: as ``spawned``.
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
    """The configuration of ranks that turn out to be on these hosts, by rank."""
    sizes = [len(list(ranks)) for _, ranks in groupby(identities)]
    if len(sizes) != len(set(identities)):
        raise ValueError("ranks of one host must be numbered one after the other, as torchrun does")
    if len(sizes) == 1:
        return config
    return replace(config, hosts="+".join(map(str, sizes)), common_clock=False)


def check_gpus(config: BenchConfig) -> None:
    """Refuse, on all ranks, what one of them has no GPU for. Collective.

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
    """Run as one of torchrun's ranks, on one host or several; returns the measurement on each."""

    def run(config: BenchConfig, rank: int) -> Measurement:
        check_gpus(config)
        return _one_rank((config, factory), rank, progress)

    return as_torchrun_rank(run, config, group_of(config))


def as_torchrun_rank(
    run: Callable[[Placeable, int], T], config: Placeable, group: str = "gloo"
) -> T:
    """``run(config, rank)`` in the group of torchrun's ranks, ``config`` knowing their hosts."""
    from flux.transport.shm import host_identity

    torch.set_num_threads(config.threads)
    dist.init_process_group(group, timeout=timedelta(seconds=config.timeout_s))
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host_identity())
        return run(on_hosts(config, hosts), torchrun_rank())
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()
