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
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flux.launch.progress import Progress
from flux.launch.spawn import Entry, Part, RankFailedError, run_ranks
from flux.machine.host import host_identity

T = TypeVar("T")

MEETING_S = 24 * 3600.0
"""Limit of supervisors' waits for one another: they wait for the slowest to compile."""


def torchrun_world() -> int | None:
    """Return the world size that torchrun set; None if it did not start this process."""
    try:
        return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    except KeyError:
        return None


def torchrun_rank() -> int:
    """Return the rank that torchrun set."""
    return int(os.environ["RANK"])


@contextmanager
def torchrun_group(timeout_s: float, backends: str = "gloo") -> Iterator[None]:
    """Make torchrun's ranks the default process group, and leave it in the end. Collective.

    Args:
        timeout_s: limit on every rendezvous and collective.
        backends: of the group.
    """
    dist.init_process_group(backends, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()


def all_gather(value: T) -> list[T]:
    """Return every rank's value. Collective in the default group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def hosts_of_ranks() -> list[str]:
    """Return the host of each rank. Collective in the default group."""
    return all_gather(host_identity())


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
        self.ranks: tuple[int, ...] = tuple(range(world))

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
        options |= {"progress": progress, "stall_s": stall_s}
        try:
            return run_ranks(entry, job, self.world, **options), ""
        except RankFailedError as error:
            return None, str(error)


class Joined(Spawned):
    """One worker for each of torchrun's ranks; joins their group. ``close`` leaves it."""

    def __init__(self) -> None:
        self._group = ExitStack()
        self._group.enter_context(torchrun_group(MEETING_S))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks = (self.rank,)
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
            run = super().run
            result, failure = run(entry, job, progress, stall_s=stall_s, part=part, **options)
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
