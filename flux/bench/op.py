"""One rank's part of `flux bench op`: check, time all methods interleaved, check again.

    check    fresh inputs, poisoned memory, float64 reference     -> wrong methods are not timed
    repeat   [GEMM variants | collective | unfused | medium | flux] in an order that rotates, each
             started by all ranks at one instant                  -> warm-up repeats are dropped
    check    the last timed result of every method, which used other inputs than the call before it

The reason for interleaved, rotating rounds is in rounds.py. All ranks make the same sequence of
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flux.bench import metrics
from flux.bench.config import BenchConfig
from flux.bench.methods import Factory, Method, OwnTime, poisoned_methods
from flux.bench.places import open_place
from flux.bench.places.base import BenchPlace, Timing
from flux.bench.reference import Verdict
from flux.bench.rounds import Rounds
from flux.core.collector import paused_collector
from flux.core.problem import Problem
from flux.launch.progress import Progress, silent

_GEMM, _COMM, _METHOD = "gemm/", "comm/", "method/"
_LIBRARY = _COMM + "library"


@dataclass(frozen=True)
class MethodResult:
    """One method's results on rank 0; times are absent if a result was wrong."""

    name: str
    metrics: metrics.Metrics | None
    max_abs_err: float
    repeats_ms: list[float]
    knobs: dict[str, Any]
    complaints: list[str]
    comm_cpu_ms: float | None = None
    link_bytes: float | None = None
    efficiency_interval: tuple[float, float] | None = None


@dataclass
class _OpSamples:
    """One rank's measurements of one timed call, by repeat."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of all threads of the rank
    sent: list[float] = field(default_factory=list)  # bytes that left the rank's host

    def add(self, taken: Timing) -> None:
        """Append the measurements of one repeat."""
        self.wall_ms.append(taken.wall_ms)
        self.cpu_ms += [] if taken.cpu_ms is None else [taken.cpu_ms]


@dataclass(frozen=True)
class Measurement:
    """The outcome of a run, complete on every rank.

    Attributes:
        methods: the results of each method.
        parts_ms: medians of the GEMM variants and of the collective.
        parts_repeats_ms: the times behind those medians.
        start_skew_ms: median, over all timed calls, of the delay of the last rank's start; None if
            unknown.
        device: the device that ran, None for the CPU.
        comparable: False if times say nothing about ranks with a device each.
    """

    methods: list[MethodResult]
    parts_ms: dict[str, float]
    parts_repeats_ms: dict[str, list[float]]
    start_skew_ms: float | None
    device: str | None = None
    comparable: bool = True

    @property
    def complaints(self) -> list[str]:
        """The complaints about all methods."""
        return [text for method in self.methods for text in method.complaints]


def measure(
    config: BenchConfig,
    rank: int,
    progress: Progress = silent,
    factory: Factory | None = None,
    place: BenchPlace | None = None,
) -> Measurement:
    """Run the benchmark, on an initialised default process group if ranks have processes.

    Collective.

    Args:
        config: of the run.
        rank: this rank.
        progress: receives the steps.
        factory: makes the methods; by default those of the place.
        place: of the ranks; by default the configured one. It is closed at the end.
    """
    place = place or open_place(config, rank)
    try:
        return _Run(config, rank, progress, place, factory or place.factory).measure()
    finally:
        place.close()


def _comm_cpu_ms(
    of_ranks: dict[str, list[_OpSamples]], gemms: list[str], method: str
) -> float | None:
    """Return the CPU time of a method beyond that of the GEMM; None if it was not measured."""

    def median(name: str) -> float:
        return metrics.median(metrics.slowest_rank([rank.cpu_ms for rank in of_ranks[name]]))

    if not of_ranks[_METHOD + method][0].cpu_ms:
        return None
    return median(_METHOD + method) - min(median(name) for name in gemms)


class _Run:
    def __init__(
        self,
        config: BenchConfig,
        rank: int,
        progress: Progress,
        place: BenchPlace,
        factory: Factory,
    ) -> None:
        self._config = config
        self._problem: Problem = config.problem
        self._rank = rank
        self._place = place
        self._factory = factory
        self._progress = progress
        self._done = 0
        self._errors: dict[str, float] = {}
        self._complaints: dict[str, list[str]] = {}

    def measure(self) -> Measurement:
        self._check_poisoned()
        methods = self._factory(self._config, self._rank)
        try:
            return self._time(methods)
        finally:
            for method in methods:
                method.close()

    def _step(self, what: str) -> None:
        self._progress(what, self._done, self._config.warmup + self._config.repeats + 2)
        self._done += 1

    def _check_poisoned(self) -> None:
        self._step("checking results")
        inputs = self._place.inputs(self._config.seed)
        reference = self._place.reference(inputs)
        with poisoned_methods(self._factory, self._config, self._rank) as methods:
            self._place.give(inputs, methods)
            for method in methods:
                result = method(inputs)
                if isinstance(result, OwnTime):
                    result = result.result
                verdict = self._place.judge(method, result, reference)
                self._record(method.name, verdict, "before timing")

    def _record(self, name: str, verdict: Verdict, when: str) -> None:
        """Share one method's verdict, so that all ranks agree on which methods are still timed."""
        verdicts = self._place.share(verdict)
        complaints = self._complaints.setdefault(name, [])
        for rank, other in enumerate(verdicts):
            self._errors[name] = max(self._errors.get(name, 0.0), other.max_abs_err)
            if not other.ok:
                complaints.append(f"{name}: rank {rank}, checked {when}: {other.complaint}")

    def _time(self, methods: list[Method]) -> Measurement:
        inputs = self._place.inputs(self._config.seed + 1)
        right = [method for method in methods if not self._complaints[method.name]]
        calls = self._calls(right, inputs)
        samples, skews, last = self._rounds(calls, inputs, right)

        self._step("checking results")
        reference = self._place.reference(inputs)
        for method in right:
            verdict = self._place.judge(method, last[_METHOD + method.name], reference)
            self._record(method.name, verdict, "after timing")

        everybody = self._place.share((samples, skews))
        of_ranks = {name: [rank_samples[name] for rank_samples, _ in everybody] for name in calls}
        late = metrics.slowest_rank([rank_skews for _, rank_skews in everybody])
        skew = metrics.median(late) if late else None
        return self._results(methods, of_ranks, skew)

    def _calls(self, methods: list[Method], inputs: Any) -> dict[str, Callable[[], object]]:
        calls = {_GEMM + name: call for name, call in self._place.gemms(inputs).items()}
        calls[_LIBRARY] = self._place.collective(inputs)
        for method in methods:
            own_comm = method.comm_only(inputs)
            if own_comm is not None:
                calls[_COMM + method.name] = own_comm
        for method in methods:
            calls[_METHOD + method.name] = lambda method=method: method(inputs)  # type: ignore[misc]
        return calls

    def _rounds(
        self, calls: dict[str, Callable[[], object]], inputs: Any, methods: list[Method]
    ) -> tuple[dict[str, _OpSamples], list[float], dict[str, object]]:
        config = self._config
        samples = {name: _OpSamples() for name in calls}
        rounds = Rounds(calls, self._place, across=len(set(config.host_of)) > 1)
        skews: list[float] = []
        with torch.no_grad(), paused_collector(collect=True):
            for index in range(-config.warmup, config.repeats):
                self._step("warming up" if index < 0 else "measuring")
                # The result changes with every repeat. So a leftover from the repeat before, or a
                # shard of it, is detected as wrong.
                self._place.renew(inputs)
                self._place.give(inputs, methods)
                times = rounds.run(index)
                if index < 0:
                    continue
                for name, taken in times.items():
                    samples[name].add(taken)
                    skews += [] if taken.late_ms is None else [taken.late_ms]
                for name, sent in rounds.sent.items():
                    samples[name].sent.append(sent)
        return samples, skews, rounds.last

    def _results(
        self, methods: list[Method], of_ranks: dict[str, list[_OpSamples]], skew_ms: float | None
    ) -> Measurement:
        slowest = {
            name: metrics.slowest_rank([rank.wall_ms for rank in ranks])
            for name, ranks in of_ranks.items()
        }
        medians = {name: metrics.median(times) for name, times in slowest.items()}
        gemms = [name for name in medians if name.startswith(_GEMM)]
        gemm_ms = min(medians[name] for name in gemms)
        wrong = {name for name, complaints in self._complaints.items() if complaints}
        unfused_ms = None if "unfused" in wrong else medians.get(_METHOD + "unfused")
        if not self._place.comparable:
            unfused_ms = None  # no ratio would be meaningful
        results = []
        for method in methods:
            name, figures, repeats, interval = method.name, None, [], None
            if name not in wrong:
                repeats = slowest[_METHOD + name]
                comm_ms = medians.get(_COMM + name, medians[_LIBRARY])
                figures = metrics.evaluate(medians[_METHOD + name], gemm_ms, comm_ms, unfused_ms)
                if unfused_ms is not None:
                    interval = metrics.overlap_efficiency_interval(
                        repeats, [slowest[gemm] for gemm in gemms], slowest[_METHOD + "unfused"]
                    )
            results.append(
                MethodResult(
                    name,
                    figures,
                    self._errors[name],
                    repeats,
                    method.knobs(),
                    self._complaints[name],
                    None if name in wrong else _comm_cpu_ms(of_ranks, gemms, name),
                    None if name in wrong else self._sent(of_ranks[_METHOD + name]),
                    interval,
                )
            )
        parts = [name for name in medians if not name.startswith(_METHOD)]
        return Measurement(
            results,
            {name: medians[name] for name in parts},
            {name: slowest[name] for name in parts},
            skew_ms,
            self._place.device,
            self._place.comparable,
        )

    def _sent(self, ranks: list[_OpSamples]) -> float | None:
        """Return the bytes of one call that left any host.

        The first rank of each host reports them for its host.
        """
        hosts = self._config.host_of
        if len(set(hosts)) == 1:
            return None
        if not self._config.common_clock:
            return None  # real hosts: their links carry other traffic too
        speakers = [hosts.index(host) for host in sorted(set(hosts))]
        return metrics.median(
            [sum(at) for at in zip(*(ranks[r].sent for r in speakers), strict=True)]
        )
