"""Supervise ranks that may die: processes of this one, or one per rank of torchrun.

Code that may crash a rank, such as the tuner's candidates or other libraries, never runs in the
supervising process. Under torchrun each of its ranks is a supervisor with one worker. The
supervisors have their own group, which workers do not use, so it stays intact when workers die.

    torchrun rank 0  supervisor ---- gloo ---- supervisor  torchrun rank 1
                         |                         |
                      worker 0 ---- gloo, shm ---- worker 1       replaced as often as needed
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flux.launch.progress import Progress
from flux.launch.spawn import Entry, Part, RankFailedError, run_ranks
from flux.launch.torchrun import all_gather, hosts_of_ranks, torchrun_group

T = TypeVar("T")

MEETING_S = 24 * 3600.0
"""Limit of supervisors' waits for one another: they wait for the slowest to compile."""


class Launcher(Protocol):
    """Starts workers, and keeps supervisors in agreement.

    Attributes:
        world: number of ranks.
        hosts: the host of each rank.
        ranks: ranks whose workers this supervisor starts.
        leads: whether this supervisor decides, writes and prints.
        compiles: whether this supervisor compiles for its host.
    """

    world: int
    hosts: list[str]
    ranks: tuple[int, ...]
    leads: bool
    compiles: bool

    def share(self, value: T) -> T:
        """Return the leader's value. Collective among supervisors."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return every supervisor's value. Collective among supervisors."""
        ...

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        """Run workers. Collective among supervisors.

        Args:
            entry: the function of each worker.
            job: its argument.
            progress: receives the reports of this supervisor's workers, which must all report
                regularly.
            stall_s: limit on how long they may report nothing.
            **options: further options of ``run_ranks``.

        Returns:
            (rank 0's result on the supervisor that started rank 0, errors with the cause first or
            "").
        """
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
        """Return the value."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the one value."""
        return [value]

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        """Run workers in new processes."""
        return _run(entry, job, self.world, progress, stall_s=stall_s, **options)


class Joined:
    """One worker for each of torchrun's ranks; joins their group. ``close`` leaves it."""

    def __init__(self) -> None:
        self._group = ExitStack()
        self._group.enter_context(torchrun_group(MEETING_S))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks: tuple[int, ...] = (self.rank,)
        self.hosts = hosts_of_ranks()
        here = [rank for rank in range(self.world) if self.hosts[rank] == self.hosts[self.rank]]
        self._slot = (here.index(self.rank), len(here))
        self.leads = self.rank == 0
        self.compiles = self.rank == here[0]

    def gather(self, value: T) -> list[T]:
        """Return every supervisor's value."""
        return all_gather(value)

    def share(self, value: T) -> T:
        """Return rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def run(
        self, entry: Entry, job: Any, progress: Progress, *, stall_s: float, **options: Any
    ) -> tuple[Any, str]:
        """Run one worker per supervisor; combine their errors."""
        # A new meeting point for each run: keys of dead workers must not affect new ones.
        with self._meeting() as meeting:
            part = Part((self.rank,), self.share(meeting), self._slot)
            result, failure = _run(
                entry, job, self.world, progress, stall_s=stall_s, part=part, **options
            )
            failures = self.gather((failure, time.time()))
        # A worker that died silently is the cause of the others' errors; then the earliest.
        ordered = sorted(failures, key=lambda failure: (_told(failure[0]), failure[1]))
        return result, "\n".join(text for text, _ in ordered if text)

    @contextmanager
    def _meeting(self) -> Iterator[tuple[str, int, str] | str]:
        """Return where workers meet, as the leader chooses it.

        On one host it is a file. Between hosts it is the TCP store that joined the supervisors,
        with a new prefix for each run.
        """
        if not self.leads:
            yield ""
        elif len(set(self.hosts)) == 1:
            with tempfile.TemporaryDirectory(prefix="flux-ranks-") as folder:
                yield f"{folder}/store"
        else:
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            yield *where, f"flux/{uuid.uuid4().hex}"

    def close(self) -> None:
        """Leave the group of supervisors."""
        self._group.close()


def _told(failure: str) -> bool:
    """Return whether the worker itself reported the error."""
    return "killed by" not in failure and "exited with" not in failure


def _run(entry: Entry, job: Any, world: int, progress: Progress, **options: Any) -> tuple[Any, str]:
    try:
        return run_ranks(entry, job, world, progress=progress, **options), ""
    except RankFailedError as error:
        return None, str(error)
