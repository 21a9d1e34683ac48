"""Ranks that may die: processes of this one, or under torchrun one of each of its ranks.

What may take a rank down, candidates of the tuner or other libraries, never runs in the process
that supervises it. Under torchrun each of its ranks is a supervisor with one worker, and the
supervisors' own group, which no worker touches, keeps them together when workers die.

    torchrun rank 0  supervisor ---- gloo ---- supervisor  torchrun rank 1
                         |                         |
                      worker 0 ---- gloo, shm ---- worker 1       replaced as often as needed
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flux.transport.shm import host_identity

from .op import Progress
from .spawn import Entry, Part, RankFailedError, run_ranks

T = TypeVar("T")

MEETING_S = 24 * 3600.0
"""How long supervisors wait for one another: as long as the slowest of them compiles."""


class Launcher(Protocol):
    """Starts workers, and keeps supervisors of one mind.

    Attributes:
        world: ranks.
        hosts: the host of each.
        ranks: those whose workers this supervisor starts.
        leads: this is the supervisor that decides, writes and speaks.
        compiles: this is the supervisor that compiles for its host.
    """

    world: int
    hosts: list[str]
    ranks: tuple[int, ...]
    leads: bool
    compiles: bool

    def share(self, value: T) -> T:
        """The leader's value. Collective among supervisors."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every supervisor's value. Collective among supervisors."""
        ...

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        """Run workers, with these options of ``run_ranks``: rank 0's result, where that was
        started, and why they failed, the cause first, or nothing. Collective; ``progress`` hears
        the workers of this supervisor, all of which must report now and then."""
        ...


class Spawned:
    """All workers are processes of this one."""

    leads = True
    compiles = True

    def __init__(self, world: int) -> None:
        self.world = world
        self.hosts = ["here"] * world
        self.ranks = tuple(range(world))

    def share(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        return _run(entry, job, self.world, progress, stall_s=stall_s, **options)


class Joined:
    """One worker for each of torchrun's ranks; joins their group. ``close`` leaves it."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEETING_S))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks: tuple[int, ...] = (self.rank,)
        self.hosts = self.gather(host_identity())
        here = [rank for rank in range(self.world) if self.hosts[rank] == self.hosts[self.rank]]
        self._slot = (here.index(self.rank), len(here))
        self.leads = self.rank == 0
        self.compiles = self.rank == here[0]

    def gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def share(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        # A store for each run: keys of dead workers must not meet new ones.
        with self._meeting() as meeting:
            part = Part((self.rank,), self.share(meeting), self._slot)
            result, failure = _run(
                entry, job, self.world, progress, stall_s=stall_s, part=part, **options
            )
            failures = self.gather((failure, time.time()))
        # A worker that died without a word is the cause of what the others report; then the first.
        told = sorted(failures, key=lambda one: (_told(one[0]), one[1]))
        return result, "\n".join(text for text, _ in told if text)

    @contextmanager
    def _meeting(self) -> Iterator[tuple[str, int] | str]:
        """Where workers meet, which the leader makes: a file, or between hosts a store on TCP, that
        lives as long."""
        if not self.leads:
            yield ""
        elif len(set(self.hosts)) == 1:
            with tempfile.TemporaryDirectory(prefix="flux-ranks-") as folder:
                yield f"{folder}/store"
        else:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            yield os.environ.get("MASTER_ADDR", socket.gethostname()), store.port

    def close(self) -> None:
        """Leave the group of supervisors."""
        dist.destroy_process_group()


def _told(failure: str) -> bool:
    """Whether a worker could say what went wrong."""
    return "killed by" not in failure and "exited with" not in failure


def _run(entry: Entry, job: Any, world: int, progress: Progress, **options: Any) -> tuple[Any, str]:
    try:
        return run_ranks(entry, job, world, progress=progress, **options), ""
    except RankFailedError as error:
        return None, str(error)
