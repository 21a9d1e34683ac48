"""Supervise a tuning run: for each shape, start worker ranks that search, and restart dead ones.

    for each shape    candidates -> workers search -> winner -> cache
    workers died      the blackboard names the running candidate: it is excluded, and new workers
                      continue from the journal
    supervisor died   the journal has every round; the next run with the same arguments continues

Winners are stored as they are found, so an interrupted run keeps its completed shapes.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from flux.bench.config import BenchConfig
from flux.core.datafile import one_line, shown
from flux.core.problem import Problem
from flux.launch.supervisors import Launcher
from flux.machine.cluster import Cluster
from flux.select.cache import Cache
from flux.select.cost import gemm_ms
from flux.select.space import ALWAYS, Candidate, Pruned, Space, candidates
from flux.select.winners import MOST_MS, Entry, Key, Winner, versions
from flux.transport.placement import Placement
from flux.tune.halving import SHORT_MS, Halving, median_ms, rounds_for
from flux.tune.journal import Journal
from flux.tune.machine import TuningMachine
from flux.tune.worker import NOBODY, Blackboard, Maker, TuningJob, tune_rank

CANDIDATE_TIMEOUT_S = 20.0
_FEWEST_STALL_S = 30.0
_MEMORY_BYTES = 2 << 30
"""Symmetric memory for the candidates of a batch, over all ranks of a host."""
_STARTS_IN_VAIN = 2
"""Limit of failed starts of workers without a running candidate; then the search for a shape
ends."""
_GPU_START_S = 20.0
"""Time that GPUs and NCCL may need to start, in addition to a rank's own start."""
_MOST_AT_ONCE = 64
SKEWS = (0.0, 1.0)
"""Ops of experts are measured with the routing of a balanced and of a skewed mixture: the time of
both calls counts (``flux.bench.sparse_reference.draw_choices``)."""


@dataclass(frozen=True)
class Options:
    """Options of the search.

    Attributes:
        threads: GEMM threads of each rank.
        budget_s: for all shapes together; None: no limit.
        candidate_timeout_s: limit of a call of a candidate.
        seed: of the random inputs.
        transport: of the op; None: the op chooses.
        rounds: of each candidate by the end of each rung; if empty, chosen by the length of calls.
        exhaustive: all rounds for all candidates, as a reference for halving.
        make: builds candidates; importable. Tests use it to build bad ones.
    """

    threads: int = 1
    budget_s: float | None = None
    candidate_timeout_s: float = CANDIDATE_TIMEOUT_S
    seed: int = 0
    transport: str | None = None
    rounds: tuple[int, ...] = ()
    exhaustive: bool = False
    make: Maker | None = None


@dataclass
class Search:
    """The search for one shape: its candidates and its measurements."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    pruned: list[Pruned]
    halving: Halving
    warm_up: bool = True
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    winner: Winner | None = None
    settled: bool = False
    problem_text: str = ""

    @property
    def label(self) -> str:
        """The shape, for display."""
        p = self.problem
        return f"{p.name} {p.m}x{p.n}x{p.k} {p.variant} {p.dtype}".replace("  ", " ")

    @property
    def rounds_done(self) -> int:
        """Number of timed calls so far."""
        return sum(len(taken) for taken in self.samples.values())

    @property
    def done(self) -> bool:
        """Whether the rules need no further measurement."""
        return self.halving.next_step(self.samples, self.excluded) is None

    def best(self) -> str | None:
        """Return the name of the best candidate so far."""
        return self.halving.best(self.samples, self.excluded)

    def ms(self, name: str) -> float | None:
        """Return the median time of a candidate; None if it has no time or is excluded."""
        taken = self.samples.get(name)
        return median_ms(taken) if taken and name not in self.excluded else None

    def take(self, event: dict[str, Any]) -> None:
        """Apply an event of a worker, or one of the journal that ``check`` accepts."""
        kind = event["event"]
        if kind == "round":
            for name, (own, anchor) in event["times"].items():
                self.samples.setdefault(name, []).append((float(own), float(anchor)))
        elif kind == "excluded":
            self.excluded[event["name"]] = event["reason"]
        elif kind == "checked":
            self.checked.add(event["name"])
        elif kind == "winner":
            self.winner, self.settled = Winner.from_dict(event["winner"]), True

    def check(self, event: dict[str, Any]) -> None:
        """Raise ValueError if an event of a journal file is not one that a run writes."""
        kind, name = event["event"], event.get("name")
        good = False
        if kind == "round":
            times = event.get("times")
            good = isinstance(times, dict) and all(map(_is_time_pair, times.values()))
        elif kind == "excluded":
            good = isinstance(name, str) and isinstance(event.get("reason"), str)
        elif kind == "checked":
            good = isinstance(name, str)
        elif kind == "winner":
            try:
                good = Winner.from_dict(event["winner"]).m == self.problem.m
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(one_line(f"{type(error).__name__}: {error}")) from error
        if not good:
            raise ValueError(f"expected an event of a search, got {shown(event)}")


def _is_time_pair(value: object) -> bool:
    """Return whether the value is [ms of a candidate, ms of the anchor]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(ms) in (int, float) and 0 < ms <= MOST_MS for ms in value)
    )


class TuningObserver:
    """Receives the progress of a run; the command displays it."""

    def started(self, search: Search, number: int, total: int) -> None:
        """Handle the start, or resumption, of the search for a shape."""

    def compiling(self, search: Search, count: int) -> None:
        """Handle the start of a build of ``count`` kernels, which takes minutes."""

    def event(self, search: Search, event: dict[str, Any]) -> None:
        """Handle an event: a candidate is being checked or was excluded, or a round has ended."""

    def ended(self, search: Search) -> None:
        """Handle the end of a search: a shape has its winner, or the time is over."""


def make_search(
    problem: Problem, space: Space, cluster: Cluster, placement: Placement, options: Options
) -> Search:
    """Return the search for a problem. Pure, except that it reads files.

    Args:
        problem: the op and its sizes.
        space: values of knobs.
        cluster: device and links of the ranks.
        placement: which ranks share memory.
        options: of the search.
    """
    topology = placement.topology
    problem = replace(problem, nodes=topology.nodes)
    kept, pruned = candidates(space, problem, topology, cluster)
    names = tuple(candidate.name for candidate in kept)
    least_ms = min(candidate.predicted_ms for candidate in kept)
    halving = Halving(names, ALWAYS, options.rounds or rounds_for(least_ms))
    if options.exhaustive:
        halving = replace(halving, rounds=halving.rounds[-1:])
    # The first call of an op on a GPU loads kernels and allocates memory.
    warm_up = least_ms < SHORT_MS or space.backend == "cuda"
    return Search(problem, tuple(kept), pruned, halving, warm_up)


class Tuner:
    """Tunes shapes on the ranks of a launcher. Every supervisor has one; one of them leads.

    Args:
        searches: the shapes to tune.
        launcher: starts workers.
        machine: the hardware of the workers.
        cache: stores winners.
        journal: of the leader; None on the others.
        options: of the search.
        observer: receives the progress.
    """

    def __init__(
        self,
        searches: Sequence[Search],
        launcher: Launcher,
        machine: TuningMachine,
        cache: Cache,
        journal: Journal | None,
        options: Options,
        observer: TuningObserver | None = None,
    ) -> None:
        self._searches = searches
        self._launcher = launcher
        self._machine = machine
        self._cache = cache
        self._journal = journal
        self._options = options
        self._observer = observer or TuningObserver()
        self._deadline = None if options.budget_s is None else time.monotonic() + options.budget_s
        if journal is not None and journal.resumed:
            self._resume(journal)

    def _resume(self, journal: Journal) -> None:
        """Apply the events of an earlier run; damaged ones are measured again."""
        for number, event in enumerate(journal.events):
            for search in self._searches:
                if event.get("shape") != search.label:
                    continue
                try:
                    search.check(event)
                except ValueError as error:
                    warnings.warn(
                        f"damaged journal {journal.path}: event {number} is ignored: {error}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                else:
                    search.take(event)

    def run(self) -> None:
        """Search for every shape that has no winner yet. Collective among supervisors."""
        with tempfile.TemporaryDirectory(prefix="flux-tune-") as folder:
            for number, search in enumerate(self._searches):
                seconds = 1e9  # for this shape: an equal share of the time that is left
                if self._deadline is not None:
                    left_s = max(0.0, self._deadline - time.monotonic())
                    seconds = left_s / (len(self._searches) - number)
                self._observer.started(search, number, len(self._searches))
                if self._launcher.share(not search.settled):
                    self._search(search, Path(folder) / "blackboard", seconds)
                self._observer.ended(search)
        if self._journal is not None and all(s.settled or s.problem_text for s in self._searches):
            self._journal.finish()

    # -- one shape ---------------------------------------------------------------------------------

    def _search(self, search: Search, blackboard: Path, seconds: float) -> None:
        leads, in_vain = self._launcher.leads, 0
        until = time.monotonic() + seconds
        at_once = _MOST_AT_ONCE
        if self._machine.backend == "cuda":
            self._compile(search)
        while True:
            job: TuningJob | None = None
            if leads and not search.done and time.monotonic() < until and not search.problem_text:
                Blackboard.create(blackboard)
                job = self._job(search, blackboard, until - time.monotonic(), at_once)
            job = self._launcher.share(job)
            if job is None:
                break
            if not leads:  # its own file: another host's is not visible
                Blackboard.create(blackboard)
                job = replace(job, blackboard=str(blackboard))
            failure = self._run(search, job)
            if not leads or not failure:
                continue
            # SIGTERM ends the whole job; it is not a failure of the candidate
            if "SIGTERM" in failure:
                raise KeyboardInterrupt(failure)
            if "out of memory" in failure and at_once > 1:
                at_once = 1  # the memory is used by other candidates too, so retry one at a time
                continue
            number = Blackboard.read(blackboard)
            if number == NOBODY:
                in_vain += 1
                if in_vain >= _STARTS_IN_VAIN:
                    search.problem_text = failure
                continue
            self._note(
                search,
                {
                    "event": "excluded",
                    "name": search.candidates[number].name,
                    "reason": f"its ranks failed: {failure}",
                },
            )
        if leads and search.done and not search.problem_text:
            self._crown(search, settled=True)
        elif leads and self._deadline is not None and time.monotonic() >= until:
            self._crown(search, settled=False)

    def _compile(self, search: Search) -> None:
        """Build the kernels of all candidates, in parallel, on one rank of each host."""
        from flux.kernels.registry import cache_root
        from flux.tune import kernels  # which CPUs do not need

        alive = [
            candidate for candidate in search.candidates if candidate.name not in search.excluded
        ]
        wanted = {candidate.name: kernels.needed(candidate) for candidate in alive}
        configs = self._launcher.share([config for of in wanted.values() for config in of])
        if not configs:
            return
        failed: dict[str, str] = {}
        if self._launcher.compiles:
            self._observer.compiling(search, len(kernels.missing(configs, cache_root())))
            failed = kernels.build_kernels(configs, cache_root())
        versions.cache_clear()  # versions depend on the kernels that exist
        everybody = self._launcher.gather(failed)
        if not self._launcher.leads:
            return
        errors = {name: text for of_host in everybody for name, text in of_host.items()}
        for name, of_candidate in wanted.items():
            bad = [config.name for config in of_candidate if config.name in errors]
            if bad:
                reason = f"does not compile: {errors[bad[0]]}"
                self._note(search, {"event": "excluded", "name": name, "reason": reason})

    def _run(self, search: Search, job: TuningJob) -> str:
        timeout = self._options.candidate_timeout_s
        # The float64 reference takes about ten times as long as the GEMM in float32 at peak.
        reference_s = gemm_ms(search.problem.dense, self._machine.cluster) * 40e-3
        start_s = _GPU_START_S if self._machine.backend == "cuda" else 0.0
        _, failure = self._launcher.run(
            tune_rank,
            job,
            partial(self._note, search),
            threads=self._options.threads,
            timeout_s=timeout + reference_s + start_s,
            stall_s=max(_FEWEST_STALL_S, 2 * timeout) + 2 * reference_s + start_s,
            group=job.config.group,
        )
        return failure.partition("\n")[0]

    def _job(self, search: Search, blackboard: Path, seconds: float, at_once: int) -> TuningJob:
        options, problem = self._options, search.problem
        if self._machine.backend == "cpu":  # the host has memory for a part of them at once
            per_rank = int(problem.m * problem.row_bytes) * (2 if problem.op.all_reduces else 1)
            at_once = min(at_once, max(2, _MEMORY_BYTES // (problem.world * per_rank + 1)))
        config = BenchConfig(
            problem=problem,
            threads=options.threads,
            backend=self._machine.backend,
            transport=options.transport,
            timeout_s=options.candidate_timeout_s,
            seed=options.seed,
            common_clock=len(set(self._launcher.hosts)) == 1,
            skews=SKEWS if problem.topk > 1 else (0.0,),
        )
        return TuningJob(
            config=config,
            candidates=search.candidates,
            halving=search.halving,
            blackboard=str(blackboard),
            seconds=seconds,
            batch=at_once,
            warm_up=search.warm_up,
            samples=search.samples,
            excluded=tuple(search.excluded),
            checked=tuple(search.checked),
            make=options.make,
        )

    def _note(self, search: Search, event: Any, *_: object) -> None:
        """Write an event to the journal, then apply it: decisions depend only on saved events.

        ``event`` is None if a rank reports only that it is alive.
        """
        if event is None:
            return
        if event["event"] != "checking" and self._journal is not None:
            rest = {name: value for name, value in event.items() if name != "event"}
            self._journal.add(event["event"], shape=search.label, **rest)
        search.take(event)
        self._observer.event(search, event)

    # -- the winner --------------------------------------------------------------------------------

    def _crown(self, search: Search, *, settled: bool) -> None:
        """Store the best candidate, if there is one.

        If the time is over before the search is settled, the journal keeps the measurements, so
        that a later run can continue with more time.
        """
        best = search.best()
        if best is None:
            if settled:
                reasons = "; ".join(f"{name}: {why}" for name, why in search.excluded.items())
                search.problem_text = f"no candidate is left: {reasons}"
            return
        candidate = next(candidate for candidate in search.candidates if candidate.name == best)
        ms = search.ms(best)
        assert ms is not None
        winner = Winner(
            m=search.problem.m,
            knobs=candidate.knobs,
            ms=ms,
            unfused_ms=search.ms("unfused"),
            medium_ms=search.ms("medium"),
            rounds=len(search.samples[best]),
            tuned_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            kernel=candidate.kernel,
        )
        here = self._machine
        key = Key.of(search.problem, here.shape, here.parts, here.backend)
        self._cache.store(Entry(key, here.parts, (winner,)))
        if settled:
            self._note(search, {"event": "winner", "winner": winner.as_dict()})
        else:
            search.winner = winner


def describe(
    searches: Sequence[Search], machine: TuningMachine, options: Options
) -> dict[str, Any]:
    """Return the description of a run; runs with equal descriptions share a journal."""
    key = Key.of(searches[0].problem, machine.shape, machine.parts, machine.backend).as_dict()
    if machine.backend == "cuda":  # the versions list built kernels, and a run adds to those
        from flux.tune import kernels

        key["toolchain"] = kernels.compiler()
    return {
        "machine": machine.parts,
        "versions": key,
        "threads": options.threads,
        "transport": options.transport,
        "seed": options.seed,
        "shapes": {
            search.label: {
                "candidates": [candidate.name for candidate in search.candidates],
                "rounds": list(search.halving.rounds),
            }
            for search in searches
        },
    }
