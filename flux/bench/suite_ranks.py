"""Where the ranks of a suite come from. Each of its measurements has new ones, so that a failure
costs one measurement and no more.

OwnRanks        processes of this one, on hosts of our own making if they are asked for
TorchrunRanks   a process for each of torchrun's, which supervises it: rank 0 has the document and
                decides, the others do as they are told until it says that this was all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from flux.trace import Trace

from . import launch
from .methods import Factory
from .op import Measurement, Progress, silent
from .peers import survey
from .problem import BenchConfig
from .spawn import STALL_S, Entry, RankFailedError
from .suite_trace import trace_rank
from .supervisors import Joined

T = TypeVar("T")


class SuiteRanks(Protocol):
    """Ranks that are there as often as they are asked for.

    Attributes:
        world: how many torchrun has started; None if it has not.
        leads: this is the process that decides, writes and speaks.
    """

    world: int | None
    leads: bool

    def placed(self, configs: Sequence[BenchConfig]) -> list[BenchConfig]:
        """The configurations, knowing the hosts of the ranks.

        Raises:
            ValueError: the ranks of a host are not numbered one after the other.
        """
        ...

    def agree(self, value: T) -> list[T]:
        """What all processes of the suite have here. Collective among them."""
        ...

    def survey(self) -> dict[str, str | None]:
        """Why each peer cannot be used, by name; None: it can, on all hosts. Collective."""
        ...

    def measure(
        self, config: BenchConfig, progress: Progress, factory: Factory | None = None
    ) -> Measurement:
        """One measurement; of the process that leads.

        Raises:
            RankFailedError, HostsUnavailableError: as launch.spawned.
        """
        ...

    def trace(self, config: BenchConfig) -> Trace:
        """The timeline of one call; of the process that leads. Raises as ``measure``."""
        ...

    def follow(self) -> None:
        """Do what the process that leads asks for, until it is done; of all others."""
        ...

    def done(self) -> None:
        """That was all; of the process that leads."""
        ...

    def close(self) -> None:
        """Leave the others."""
        ...


class OwnRanks:
    """All ranks are processes of this one."""

    world: int | None = None
    leads = True

    def placed(self, configs: Sequence[BenchConfig]) -> list[BenchConfig]:
        return list(configs)

    def agree(self, value: T) -> list[T]:
        return [value]

    def survey(self) -> dict[str, str | None]:
        return survey()

    def measure(
        self, config: BenchConfig, progress: Progress, factory: Factory | None = None
    ) -> Measurement:
        return launch.spawned(config, progress, factory)

    def trace(self, config: BenchConfig) -> Trace:
        count = launch.processes(config)
        found: Trace = launch.on_own_ranks(trace_rank, config, config, count, silent)
        return found

    def follow(self) -> None:
        """There is nobody else."""

    def done(self) -> None:
        """There is nobody else."""

    def close(self) -> None:
        """There is nothing to leave."""


class TorchrunRanks:
    """One rank for each process of torchrun's. Construction is collective among them."""

    def __init__(self) -> None:
        self._processes = Joined()
        self.world: int | None = self._processes.world
        self.leads = self._processes.leads

    def placed(self, configs: Sequence[BenchConfig]) -> list[BenchConfig]:
        return [launch.on_hosts(config, self._processes.hosts) for config in configs]

    def agree(self, value: T) -> list[T]:
        return self._processes.gather(value)

    def survey(self) -> dict[str, str | None]:
        everybody = self.agree(survey())
        return {
            name: next((of[name] for of in everybody if of[name] is not None), None)
            for name in everybody[0]
        }

    def measure(
        self, config: BenchConfig, progress: Progress, factory: Factory | None = None
    ) -> Measurement:
        found: Measurement = self._all_run(
            launch.supervised_rank, (config, factory), config, progress
        )
        return found

    def trace(self, config: BenchConfig) -> Trace:
        found: Trace = self._all_run(trace_rank, config, config, silent)
        return found

    def follow(self) -> None:
        nothing: Any = None
        while (order := self._processes.share(nothing)) is not None:
            try:
                entry, argument, config = order
                self._run(entry, argument, config, silent)
            except RankFailedError:
                continue  # which the process that leads hears, too

    def done(self) -> None:
        self._processes.share(None)

    def close(self) -> None:
        self._processes.close()

    def _all_run(self, entry: Entry, argument: Any, config: BenchConfig, progress: Progress) -> Any:
        share: Callable[[Any], Any] = self._processes.share
        share((entry, argument, config))
        return self._run(entry, argument, config, progress)

    def _run(self, entry: Entry, argument: Any, config: BenchConfig, progress: Progress) -> Any:
        result, failure = self._processes.run(
            entry,
            argument,
            progress,
            threads=config.threads,
            timeout_s=config.timeout_s,
            stall_s=2 * config.timeout_s + STALL_S,
            group=launch.group_of(config),
        )
        if failure:
            raise RankFailedError(failure)
        return result
