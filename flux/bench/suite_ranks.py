"""Start the ranks of a suite. Each measurement has new ones, so a failure affects only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flux.bench import launch
from flux.bench.config import BenchConfig
from flux.bench.methods import Factory
from flux.bench.op import Measurement
from flux.bench.peers import PEERS, Peer, survey
from flux.bench.suite_trace import trace_rank
from flux.launch.progress import Progress, silent
from flux.launch.spawn import STALL_S, RankFailedError
from flux.launch.supervisors import Joined
from flux.trace import Trace

T = TypeVar("T")


class SuiteRanks:
    """Ranks that are processes started by this one, on simulated hosts if requested.

    Attributes:
        world: number of ranks that torchrun has started; None if it did not start us.
        leads: whether this process decides, writes and prints.
    """

    world: int | None = None
    leads = True

    def placed(self, configs: Sequence[BenchConfig]) -> list[BenchConfig]:
        """Return the configurations with the hosts of the ranks.

        Raises:
            ValueError: the ranks of a host are not consecutive.
        """
        return list(configs)

    def agree(self, value: T) -> list[T]:
        """Return the values of all processes of the suite. Collective among them."""
        return [value]

    def survey(self, peers: Sequence[Peer] = PEERS) -> dict[str, str | None]:
        """Return why each peer cannot be used, by name; None: it can, on all hosts. Collective."""
        everybody = self.agree(survey(peers))
        return {
            name: next((of[name] for of in everybody if of[name] is not None), None)
            for name in everybody[0]
        }

    def measure(
        self, config: BenchConfig, progress: Progress, factory: Factory | None = None
    ) -> Measurement:
        """Run one measurement. Called by the leading process.

        Raises:
            RankFailedError: as launch.on_ranks.
            HostsUnavailableError: as launch.on_ranks.
        """
        measurement: Measurement = launch.measured(config, progress, factory)
        return measurement

    def trace(self, config: BenchConfig) -> Trace:
        """Return the timeline of one call. Called by the leading process. Raises as ``measure``."""
        trace: Trace = launch.on_ranks(trace_rank, config, None, silent)
        return trace

    def follow(self) -> None:
        """Run the leading process's measurements until it ends. Called by all other processes."""

    def done(self) -> None:
        """End the suite for the other processes. Called by the leading process."""

    def close(self) -> None:
        """Release the connection to the other processes."""


class TorchrunRanks(SuiteRanks):
    """Ranks that are processes of torchrun's processes, each of which supervises one.

    Rank 0 has the document and decides; the others follow until it ends the suite. Construction is
    collective among them.
    """

    def __init__(self) -> None:
        self._processes = Joined()
        self.world = self._processes.world
        self.leads = self._processes.leads

    def placed(self, configs: Sequence[BenchConfig]) -> list[BenchConfig]:
        """Return the configurations with the hosts of torchrun's ranks."""
        return [launch.on_hosts(config, self._processes.hosts) for config in configs]

    def agree(self, value: T) -> list[T]:
        """Return the values of all processes."""
        return self._processes.gather(value)

    def measure(
        self, config: BenchConfig, progress: Progress, factory: Factory | None = None
    ) -> Measurement:
        """Run one measurement on all hosts."""
        measurement: Measurement = self._all_run(launch.measure_rank, config, factory, progress)
        return measurement

    def trace(self, config: BenchConfig) -> Trace:
        """Return the timeline of one call."""
        trace: Trace = self._all_run(trace_rank, config, None, silent)
        return trace

    def follow(self) -> None:
        """Run the leading process's measurements until it ends."""
        nothing: Any = None
        while (order := self._processes.share(nothing)) is not None:
            try:
                entry, config, extra = order
                self._run(entry, config, extra, silent)
            except RankFailedError:
                continue  # the leading process receives the same error

    def done(self) -> None:
        """End the suite for the other processes."""
        self._processes.share(None)

    def close(self) -> None:
        """Leave the group."""
        self._processes.close()

    def _all_run(
        self, entry: launch.Entry, config: BenchConfig, extra: Any, progress: Progress
    ) -> Any:
        share: Callable[[Any], Any] = self._processes.share
        share((entry, config, extra))
        return self._run(entry, config, extra, progress)

    def _run(self, entry: launch.Entry, config: BenchConfig, extra: Any, progress: Progress) -> Any:
        result, failure = self._processes.run(
            entry,
            (config, extra),
            progress,
            threads=config.threads,
            timeout_s=config.timeout_s,
            stall_s=2 * config.timeout_s + STALL_S,
            group=config.group,
        )
        if failure:
            raise RankFailedError(failure)
        return result
