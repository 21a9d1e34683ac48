"""Run a function on the ranks of a benchmark: torchrun's if it started this process, or new ones.

Both call ``entry((config, extra), rank, progress)`` on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

import torch

from flux.bench.config import BenchConfig, Run, check_memory
from flux.bench.methods import Factory
from flux.bench.op import Measurement, measure
from flux.bench.places.gpu import problem_here
from flux.launch.hosts import Hosts
from flux.launch.progress import Progress, silent
from flux.launch.spawn import run_ranks
from flux.launch.supervisors import (
    all_gather,
    hosts_of_ranks,
    torchrun_group,
    torchrun_rank,
    torchrun_world,
)
from flux.machine.host import reason_too_large

Settings = TypeVar("Settings", bound=Run)
Entry = Callable[[tuple[Any, Any], int, Progress], Any]
"""The function of a rank: ((config, extra), rank, progress) -> result, importable by name."""


def measure_rank(
    job: tuple[BenchConfig, Factory | None], rank: int, progress: Progress
) -> Measurement:
    """Run one rank of `flux bench op`, as an entry."""
    config, factory = job
    return measure(config, rank, progress, factory)


def measured(config: BenchConfig, progress: Progress, factory: Factory | None = None) -> Any:
    """Return the measurement; under torchrun on every rank. Raises as ``on_ranks``."""
    return on_ranks(measure_rank, config, factory, progress)


def on_ranks(entry: Entry, config: Run, extra: Any, progress: Progress) -> Any:
    """Return the result of rank 0; under torchrun each process returns its own rank's.

    If the configuration has several hosts, new ranks run on simulated hosts.

    Args:
        entry: the function of each rank.
        config: of the benchmark. Under torchrun, ``entry`` gets it with the hosts of the ranks.
        extra: anything else that ``entry`` needs.
        progress: receives the reports of rank 0.

    Raises:
        RankFailedError: a new rank raised, died or stalled; none is left running.
        HostsUnavailableError: the configuration has several hosts, and this machine cannot make
            them.
        ValueError: there is too little memory; ranks of torchrun's lack a GPU, or those of a host
            are not consecutive.
    """
    if torchrun_world() is None:
        return _on_new_ranks(entry, config, extra, progress)
    torch.set_num_threads(config.threads)
    with torchrun_group(config.timeout_s, config.group):
        placed = on_hosts(config, hosts_of_ranks())
        check_hosts_memory(placed)
        check_gpus(placed)
        return _quiet((entry, (placed, extra)), torchrun_rank(), progress)


def _on_new_ranks(entry: Entry, config: Run, extra: Any, progress: Progress) -> Any:
    check_memory(config.memory_bytes)
    many = len(set(config.host_of))
    with Hosts(many, config.link_rate) if many > 1 else nullcontext() as hosts:
        return run_ranks(
            _quiet,
            (entry, (config, extra)),
            config.processes,
            threads=config.threads,
            timeout_s=config.timeout_s,
            progress=progress,
            places=hosts.placed(config.host_of) if hosts is not None else None,
            group=config.group,
        )


def _quiet(argument: Any, rank: int, progress: Progress) -> Any:
    """Run an entry of which rank 0 alone reports."""
    entry, job = argument
    return entry(job, rank, progress if rank == 0 else silent)


def on_hosts(config: Settings, identities: Sequence[str]) -> Settings:
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


def check_hosts_memory(config: Run) -> None:
    """Check that the hosts of all ranks have memory for their ranks. Collective.

    Raises:
        ValueError: one has too little.
    """
    own = hosts_of_ranks()
    share = config.memory_bytes * own.count(own[torchrun_rank()]) // len(own)
    for rank, problem in enumerate(all_gather(reason_too_large(share))):
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}: lower the sizes")


def check_gpus(config: Run) -> None:
    """Check on all ranks that each has a GPU, if needed. Collective.

    Raises:
        ValueError: a rank has none.
    """
    if not isinstance(config, BenchConfig) or config.backend != "cuda":
        return
    for rank, problem in enumerate(all_gather(problem_here(config))):
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}")
