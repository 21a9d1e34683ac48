"""Run the benchmark many times in sequence: the shapes of a file, and sweeps of one knob.

    plan     shapes and sweeps -> entries, all pending (results.py has their form)
    each     `flux bench op`'s measurement on new ranks, with flux's methods and the available
             peers, interleaved; the document is saved after it
    failed   if a peer breaks it, it is measured again without that peer; else the entry records
             the error, and the next one is measured

Every run starts new processes, so a failure of a rank ends only the run of its shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flux.bench import launch, report
from flux.bench.config import ONE_GPU, BenchConfig
from flux.bench.methods import Factory, Fused, Method, UnfusedMethod
from flux.bench.op import Measurement
from flux.bench.peers import PEERS, Peer, blame, peers_and_flux, unsupported
from flux.bench.results import DONE, FAILED, SHAPE, SKIPPED, SuiteDocument, SuiteEntry
from flux.core.problem import Problem
from flux.core.sparse_problem import make_problem
from flux.launch.progress import Progress
from flux.launch.spawn import RankFailedError
from flux.machine import host

_LEAST_TILE_ROWS = 16
_MOST_TILE_SIZES = 6

Run = Callable[[BenchConfig, Progress, Factory | None], Measurement]


@dataclass(frozen=True)
class Sweep:
    """One knob's values at one shape."""

    knob: str
    problem: Problem

    def variants(self) -> dict[str, dict[str, Any]]:
        """Return knobs by the name of the method that uses them.

        Tile sizes are those of the Flux paper, section 4.3: M/W, halved repeatedly, down to 16
        rows, and 6 sizes at most.
        """
        if self.knob == "direction":
            return {value: {"direction": value} for value in ("push", "pull")}
        sizes = [self.problem.chunk]
        while len(sizes) < _MOST_TILE_SIZES and sizes[-1] // 2 >= _LEAST_TILE_ROWS:
            sizes.append(sizes[-1] // 2)
        return {str(size): {"comm_tile_rows": size} for size in sizes}


def sweep_methods(
    config: BenchConfig, rank: int, variants: Mapping[str, Mapping[str, Any]]
) -> list[Method]:
    """Return the unfused path, and the fused one with each of these knobs. Collective."""
    import flux

    return [
        UnfusedMethod(config.problem, rank),
        *(
            Fused(name, config, flux.Knobs(path="fused", **knobs))
            for name, knobs in variants.items()
        ),
    ]


def sweeps_of(
    problems: Sequence[Problem], m: int | None = None, *, pulls: bool = True
) -> list[Sweep]:
    """Return both sweeps for each op, at its shape with this M, or else with its largest M.

    Pulling needs memory that peers can read; without ``pulls``, return only the sweep of the tile
    size.

    Raises:
        ValueError: no op has a shape with this M.
    """
    chosen: dict[str, Problem] = {}
    for problem in sorted(problems, key=lambda problem: problem.m):
        if not problem.sparse and m in (None, problem.m):
            chosen[problem.name] = problem  # the last one of each op stays
    if problems and not chosen:
        raise ValueError(f"no shape has M = {m}, the M of the sweeps")
    knobs = ("comm_tile_rows", "direction") if pulls else ("comm_tile_rows",)
    return [Sweep(knob, problem) for problem in chosen.values() for knob in knobs]


def new_document(
    configs: Sequence[BenchConfig],
    sweeps: Sequence[Sweep],
    settings: dict[str, Any],
    peers: Mapping[str, str | None],
    command: Sequence[str],
    about: Mapping[str, str | None] | None = None,
) -> SuiteDocument:
    """Return a document whose entries are all pending.

    Args:
        configs: of the shapes.
        sweeps: measured after them.
        settings: shown, and compared by ``resume``.
        peers: why each cannot take part, by name; None: it can.
        command: the command line.
        about: the origin of each peer, for the page.
    """
    runs = [(SHAPE, config.problem) for config in configs]
    runs += [(sweep.knob, sweep.problem) for sweep in sweeps]
    return SuiteDocument(
        command=list(command),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=host.device(),
        device=host.device(),  # until a measurement names another device
        versions=host.versions(),
        settings=settings,
        peers=dict(peers),
        about=dict(about or {}),
        entries=[_entry(kind, problem) for kind, problem in runs],
    )


def _entry(kind: str, problem: Problem) -> SuiteEntry:
    sizes = {n: list(v) if isinstance(v, tuple) else v for n, v in problem.sizes.items()}
    shape = (problem.name, problem.m, problem.n, problem.k)
    return SuiteEntry(kind, *shape, sizes=sizes or None)


def resume(document: SuiteDocument, earlier: SuiteDocument) -> int:
    """Copy the measured entries of an earlier run; return their number.

    Raises:
        ValueError: that run had other settings, versions or peers, or another machine.
    """
    for name in ("settings", "host", "versions"):
        ours, theirs = getattr(document, name), getattr(earlier, name)
        if ours != theirs:
            differs = _difference(ours, theirs) if isinstance(ours, dict) else f"{theirs!r}"
            raise ValueError(
                f"cannot resume the earlier run: its {name} differ ({differs}); use the same "
                "arguments, or omit --resume to start over"
            )
    available = [
        {name: reason is None for name, reason in each.peers.items()}
        for each in (document, earlier)
    ]
    if available[0] != available[1]:
        raise ValueError(
            "cannot resume the earlier run: the available peers differ "
            f"({_difference(*available)}); omit --resume to start over"
        )
    measured = {entry.key: entry for entry in earlier.entries if entry.status == DONE}
    document.entries = [measured.get(entry.key, entry) for entry in document.entries]
    document.started = earlier.started
    document.timeline = earlier.timeline
    return sum(entry.status == DONE for entry in document.entries)


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name)!r}, now {ours.get(name)!r}" for name in names)


class Watcher:
    """Receives the progress of a suite."""

    def started(self, entry: SuiteEntry, number: int, total: int) -> None:
        """Handle the start of an entry; ``number`` counts from 1."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Handle the start of a step of the entry's measurement."""

    def ended(self, entry: SuiteEntry) -> None:
        """Handle the end of an entry, measured or failed."""

    def remark(self, text: str) -> None:
        """Handle a message for the user."""


class Suite:
    """Measures the pending entries of a document.

    Args:
        document: changed in place.
        base: the configuration, except the problem.
        save: called after each entry.
        watcher: receives the progress.
        budget_s: seconds after which no further entry is begun; None: no limit.
        peers: the other libraries.
        run: measures on new ranks; launch.measured except in tests.
    """

    def __init__(
        self,
        document: SuiteDocument,
        base: BenchConfig,
        save: Callable[[], None],
        watcher: Watcher,
        budget_s: float | None = None,
        peers: Sequence[Peer] = PEERS,
        run: Run | None = None,
    ) -> None:
        self._document = document
        self._base = base
        self._save = save
        self._watcher = watcher
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._peers = peers
        self._run = run or launch.measured
        self._broken: dict[str, str] = {}  # peers that are left out from now on

    def run(self) -> None:
        """Measure all pending entries; raise only KeyboardInterrupt and errors of saving."""
        entries = self._document.entries
        self._save()
        for number, entry in enumerate(entries, 1):
            if entry.status == DONE:
                continue
            entry.error = None
            if self._deadline is not None and time.monotonic() >= self._deadline:
                entry.status, entry.error = SKIPPED, "not started: --budget was used up"
                continue
            self._watcher.started(entry, number, len(entries))
            self._measure(entry)
            self._save()
            self._watcher.ended(entry)
        self._save()

    def _measure(self, entry: SuiteEntry) -> None:
        begin = time.monotonic()
        entry.status = FAILED
        try:
            base = self._base.problem
            shape = (entry.op, entry.m, entry.n, entry.k, base.dtype, base.world)
            problem = make_problem(*shape, entry.sizes, base.nodes)
            config = replace(self._base, problem=problem)
            measurement = self._attempts(entry, config)
            result = report.document(config, measurement, self._document.command)
            # All outputs are made from the values in the JSON.
            entry.result = report.rounded(result)
            self._document.device = result["device"]
            entry.status = DONE
            if measurement.complaints:
                entry.error = "; ".join(measurement.complaints)
        except (RankFailedError, ValueError, TypeError, OSError, RuntimeError) as error:
            entry.error = f"{type(error).__name__}: {error}"
        entry.seconds = time.monotonic() - begin

    def _attempts(self, entry: SuiteEntry, config: BenchConfig) -> Measurement:
        """Measure; if a peer breaks the run, measure again without that peer."""
        if entry.kind != SHAPE:
            variants = Sweep(entry.kind, config.problem).variants()
            return self._run_ranks(config, partial(sweep_methods, variants=variants))
        if config.transport in ONE_GPU or config.problem.sparse:  # has methods of its own
            entry.peers = self._reasons(config)
            return self._run_ranks(config, None)
        while True:
            entry.peers = reasons = self._reasons(config) | entry.peers
            names = tuple(name for name, reason in reasons.items() if reason is None)
            # Its parts must be picklable: ranks import the function by name.
            factory = partial(peers_and_flux, names=names, peers=tuple(self._peers))
            try:
                return self._run_ranks(config, factory if names else None)
            except RankFailedError as error:
                if not names:
                    raise
                self._leave_out(entry, names, str(error))

    def _reasons(self, config: BenchConfig) -> dict[str, str | None]:
        absent = self._document.peers
        return {
            name: absent.get(name, "not detected") or self._broken.get(name) or reason
            for name, reason in unsupported(config, self._peers).items()
        }

    def _leave_out(self, entry: SuiteEntry, names: Sequence[str], error: str) -> None:
        """Exclude the peers that the error names, from this shape.

        If the error names no peer, exclude all of this shape's peers from all later shapes too.
        """
        line = error.splitlines()[0]
        blamed = [name for name in names if blame(name) in error]
        for name in blamed or names:
            entry.peers[name] = f"failed: {line}"
            if not blamed:  # a rank died or hung, and no peer could be identified
                self._broken[name] = f"excluded after a failure with peers at {entry.label}: {line}"
            self._watcher.remark(f"{entry.label}: without {name}, which {entry.peers[name]}")

    def _run_ranks(self, config: BenchConfig, factory: Factory | None) -> Measurement:
        return self._run(config, self._watcher.progress, factory)


def failures(document: SuiteDocument) -> list[str]:
    """Return a line for each failure: entries that failed, and methods with wrong results."""
    return [
        f"{entry.label}: {entry.error}"
        for entry in document.entries
        if entry.error and entry.status in (DONE, FAILED)
    ]
