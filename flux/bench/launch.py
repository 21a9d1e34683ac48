"""Where the ranks of a benchmark come from: torchrun's, when it started us, else our own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from .hosts import Hosts
from .methods import Factory
from .op import Measurement, Progress, measure
from .problem import BenchConfig
from .spawn import run_ranks


def torchrun_world() -> int | None:
    """World size given by torchrun's environment, None when this process was not started by it."""
    try:
        return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    except KeyError:
        return None


def torchrun_rank() -> int:
    return int(os.environ["RANK"])


def _one_rank(argument: Any, rank: int, progress: Progress) -> Measurement:
    config, factory = argument
    return measure(config, rank, progress, factory)


def spawned(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Measurement:
    """Run on ranks of our own.

    Raises:
        RankFailedError: a rank raised, died or stalled; none is left running.
        HostsUnavailableError: several hosts were asked for, and this machine cannot make them.
    """
    count = len(set(config.host_of))
    with Hosts(count, config.link_rate) if count > 1 else nullcontext() as hosts:
        result: Measurement = run_ranks(
            _one_rank,
            (config, factory),
            config.problem.world,
            threads=config.threads,
            timeout_s=config.timeout_s,
            progress=progress,
            places=hosts.placed(config.host_of) if hosts is not None else None,
        )
    return result


def on_hosts(config: BenchConfig, identities: Sequence[str]) -> BenchConfig:
    """The configuration of ranks that turn out to be on these hosts, by rank."""
    sizes = [len(list(ranks)) for _, ranks in groupby(identities)]
    if len(sizes) != len(set(identities)):
        raise ValueError("ranks of one host must be numbered one after the other, as torchrun does")
    if len(sizes) == 1:
        return config
    return replace(config, hosts="+".join(map(str, sizes)), common_clock=False)


def joined(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Measurement:
    """Run as one of torchrun's ranks, on one host or several; returns the measurement on each."""
    from flux.transport.shm import host_identity

    torch.set_num_threads(config.threads)
    rank = torchrun_rank()
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_s))
    try:
        hosts: list[Any] = [None] * config.problem.world
        dist.all_gather_object(hosts, host_identity())
        config = on_hosts(config, hosts)
        return _one_rank((config, factory), rank, progress)
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()
