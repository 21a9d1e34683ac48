"""One rank's part of the search for one shape: check candidates, time them, exclude wrong ones.

    rank 0 decides the next step, and all ranks perform it
    check   each candidate of a batch that got to the last rung: run it on memory full of NaN and
            compare with float64                                  -> wrong: excluded
    rounds  all of the batch and the unfused path, interleaved    -> each reported as it ends
    check   the last result of each, whose inputs differ from the round before  -> wrong: excluded

Ranks are separate processes, because a candidate may crash its process. The supervisor (tuner.py)
has all results reported until then. The *blackboard*, a file in shared memory, tells it which
candidate was running: rank 0 writes the number of each candidate as it starts.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.config import BenchConfig
from flux.bench.methods import Fused, Method, poisoned_methods
from flux.bench.places import open_place
from flux.bench.places.base import Timing
from flux.bench.places.cpu import CpuRanks
from flux.bench.reference import Verdict
from flux.bench.rounds import Rounds
from flux.bench.sparse import FusedSparse
from flux.core.collector import paused_collector
from flux.core.problem import Problem
from flux.launch.supervisors import all_gather
from flux.select.choose import Fixed
from flux.select.kernel import is_variant
from flux.select.space import Candidate
from flux.tune.halving import Halving, HalvingStep

ANCHOR = "unfused"
NOBODY = -1

Maker = Callable[[BenchConfig, Candidate, int], Method]
Report = Callable[[Any, int, int], None]


@dataclass(frozen=True)
class TuningJob:
    """The arguments that ranks are started with; pickled.

    Attributes:
        config: the problem; its timeout is the candidates'.
        candidates: all of them, excluded ones too.
        halving: the rules.
        blackboard: path of a file of 4 bytes.
        seconds: time after which rank 0 stops.
        batch: most candidates at once; on a GPU also limited by its memory.
        warm_up: call a candidate once before its first round.
        samples: times measured so far.
        excluded: names of candidates excluded so far.
        checked: names of candidates checked so far.
        make: builds a candidate; importable.
    """

    config: BenchConfig
    candidates: tuple[Candidate, ...]
    halving: Halving
    blackboard: str
    seconds: float
    batch: int = 64
    warm_up: bool = True
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    make: Maker | None = None


class Blackboard:
    """The number of the running candidate, in shared memory, readable after a crash."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4)

    def write(self, number: int) -> None:
        """Write a number. Other processes see it at once; it costs no system call."""
        struct.pack_into("=i", self._memory, 0, number)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    @staticmethod
    def create(path: Path) -> None:
        """Create a file that names no candidate."""
        path.write_bytes(struct.pack("=i", NOBODY))

    @staticmethod
    def read(path: Path) -> int:
        """Return the number of the running candidate; NOBODY if it was never written."""
        data = path.read_bytes()
        return int(struct.unpack("=i", data)[0]) if len(data) == 4 else NOBODY


def make_method(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Return the op with a candidate's knobs and kernel. Collective.

    Raises:
        ValueError: the op rejects them, or would run another kernel, whose time would be attributed
            to the candidate; on all ranks.
    """
    of = FusedSparse if config.problem.sparse else Fused
    if config.backend != "cuda":
        return of(candidate.name, config, candidate.knobs)
    method = of(candidate.name, config, Fixed(candidate.knobs, candidate.kernel))
    for of_rank, problem in enumerate(all_gather(_other_kernel(method, candidate))):
        if problem is not None:
            method.close()
            raise ValueError(f"on rank {of_rank} {problem}")
    return method


def _other_kernel(method: Fused, candidate: Candidate) -> str | None:
    """Return what is wrong with the op's kernel; None if it is the candidate's."""
    if candidate.knobs.path == "unfused":
        return None  # runs the library's kernel
    if candidate.kernel is None:
        return "no kernel of the space supports this shape"
    for config in method.op._backend.configs:
        if not is_variant(config, candidate.kernel):
            return f"its kernel cannot run, and {config.name} would run instead"
    return None


class Room:
    """Checks whether devices have memory for one more candidate while all built ones are kept.

    The memory of an op is not known in advance. So the estimate for the next one is that of the
    largest so far, plus the result that each leaves behind. The same amount again is kept free for
    a candidate that is checked beside them.

    Args:
        problem: of the candidates.
        free: returns the free bytes on the fullest device; None: no limit. Collective.
    """

    def __init__(self, problem: Problem, free: Callable[[], int | None]) -> None:
        self._ask = free
        self._free = free()
        self._largest = 0
        rows, columns = problem.result_shape(0)
        self._result = rows * columns * problem.itemsize
        # Gathered rows, or partials, of all M. The check uses about six float64 arrays.
        self._working = problem.m * problem.row_bytes + rows * columns * 48

    def for_another(self, built: int) -> bool:
        """Return whether to build one more in addition to ``built``; the first always.

        Collective.
        """
        if self._free is None:
            return True
        self._free = self._ask()
        assert self._free is not None
        needed = 2 * self._largest + (built + 1) * self._result + self._working
        return built == 0 or self._free >= needed

    def taken(self) -> None:
        """Record that one more is built. Collective."""
        left = None if self._free is None else self._ask()
        if self._free is not None and left is not None:
            self._largest = max(self._largest, self._free - left)
            self._free = left


@dataclass(frozen=True)
class _CandidateCall:
    """A call of a candidate, and the wait for its end on a device."""

    run: Callable[[], object]
    wait: Callable[[], None]

    def __call__(self) -> object:
        return self.run()


class _Patient:
    """Times candidates that may hang on their device: the wait ends with the op's timeout."""

    def __init__(self, place: CpuRanks) -> None:
        self._place = place

    def time(self, call: Any) -> tuple[Any, Timing]:
        """Return the result and the time of a call."""
        return self._place.time(call, call.wait)


def tune_rank(job: TuningJob, rank: int, report: Report) -> None:
    """Run the search on this rank. Collective."""
    with contextlib.closing(Blackboard(job.blackboard)) as blackboard:
        _Worker(job, rank, report, blackboard).run()


class _Worker:
    def __init__(self, job: TuningJob, rank: int, report: Report, blackboard: Blackboard) -> None:
        self._job = job
        self._rank = rank
        self._send = report
        self._blackboard = blackboard
        self._deadline = time.monotonic() + job.seconds
        self._config = job.config
        self._problem = job.config.problem
        self._make = job.make or make_method
        self._numbers = {candidate.name: number for number, candidate in enumerate(job.candidates)}
        self._samples = {name: list(taken) for name, taken in job.samples.items()}
        self._excluded = set(job.excluded)
        self._checked = set(job.checked)
        self._methods: dict[str, Method] = {}  # of the latest batch, whose best are measured again
        self._alive()
        place = open_place(self._config, rank)
        assert isinstance(place, CpuRanks)  # ranks that share one GPU have no winners
        self._place = place
        self._alive()
        self._inputs = place.inputs(self._config.seed)
        self._reference = place.reference(self._inputs)
        self._room = Room(self._problem, self._free_bytes)
        self._alive()

    def run(self) -> None:
        """Measure until the rules need nothing more or the time is over."""
        while (step := self._shared(self._next() if self._rank == 0 else None)) is not None:
            for name in step.names if step.last_rung else ():
                # The last results of every rung are checked anyway; most candidates do not reach
                # the last rung.
                if name not in self._checked:
                    self._check(name)
            self._measure([name for name in step.names if name not in self._excluded], step)
        # Not after a failure: closing would wait for a device that may hang, and the process ends
        # anyway.
        self._keep([])

    def _next(self) -> HalvingStep | None:
        """Return the next step of all ranks. Called on rank 0."""
        step = self._job.halving.next_step(self._samples, self._excluded)
        if step is None or time.monotonic() > self._deadline:
            return None
        return replace(step, names=step.names[: self._job.batch])

    def _shared(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    # -- telling -----------------------------------------------------------------------------------

    def _alive(self) -> None:
        """Report that this rank is alive, so that the supervisor does not treat it as stuck."""
        self._send(None, 0, 0)

    def _event(self, **content: Any) -> None:
        if self._rank == 0:
            self._send(content, 0, 0)
        else:
            self._alive()

    def _running(self, name: str) -> None:
        if self._rank == 0:
            self._blackboard.write(self._numbers[name])

    def _idle(self) -> None:
        if self._rank == 0:
            self._blackboard.write(NOBODY)

    def _exclude(self, name: str, reason: str) -> None:
        self._excluded.add(name)
        self._event(event="excluded", name=name, reason=reason)

    # -- checking ----------------------------------------------------------------------------------

    def _candidate(self, name: str) -> Candidate:
        return self._job.candidates[self._numbers[name]]

    def _check(self, name: str) -> None:
        """Run a candidate once on memory full of NaN; exclude it if it is rejected or wrong."""
        self._event(event="checking", name=name)
        self._running(name)
        candidate = self._candidate(name)
        verdict = Verdict(True, 0.0)
        try:
            with poisoned_methods(self._factory(candidate), self._config, self._rank) as methods:
                result = methods[0](self._inputs)
                verdict = self._place.judge(methods[0], result, self._reference)
        except (ValueError, TypeError) as error:  # rejected, on all ranks alike
            verdict = Verdict(False, 0.0, f"refused: {error}")
        if self._agreed(name, verdict):
            self._checked.add(name)
            self._event(event="checked", name=name)
        self._idle()

    def _factory(self, candidate: Candidate) -> Callable[[BenchConfig, int], list[Method]]:
        return lambda config, rank: [self._make(config, candidate, rank)]

    def _agreed(self, name: str, verdict: Verdict) -> bool:
        """Return whether the result was right on all ranks; else exclude the candidate on all."""
        for rank, other in enumerate(self._place.share(verdict)):
            if not other.ok:
                how = "" if other.complaint.startswith("refused") else "wrong result: "
                self._exclude(name, f"{how}{other.complaint} (rank {rank})")
                return False
        return True

    # -- timing ------------------------------------------------------------------------------------

    def _measure(self, names: list[str], step: HalvingStep) -> None:
        if not names:
            return
        anchors = [] if ANCHOR in names or ANCHOR in self._excluded else [ANCHOR]
        self._keep([*names, *anchors])
        new = [name for name in (*anchors, *names) if name not in self._methods]
        for name in new:
            built = [other for other in names if other in self._methods]
            if name != ANCHOR and not self._room.for_another(len(built)):
                break  # the others are built after these are closed
            self._running(name)
            self._build(name)
            self._room.taken()
        names = [name for name in names if name in self._methods]
        if names:
            # The first call of all is not timed: libraries initialise themselves.
            warm_up = new if self._job.warm_up else [name for name in new if name == ANCHOR]
            self._rounds(names, [name for name in warm_up if name in self._methods], step.rounds)
        self._idle()  # not after a failure, so that the blackboard names the candidate

    def _free_bytes(self) -> int | None:
        """Return the free bytes of the fullest device; None if they do not matter. Collective."""
        mine = self._place.free_bytes()
        if mine is None:
            return None
        least = torch.tensor([mine])
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def _keep(self, names: Collection[str]) -> None:
        """Close all built candidates except these."""
        for name in [name for name in self._methods if name not in names]:
            self._methods.pop(name).close()

    def _build(self, name: str) -> None:
        """Build a candidate; if it is rejected, which happens on all ranks alike, exclude it."""
        try:
            self._methods[name] = self._make(self._config, self._candidate(name), self._rank)
            verdict = Verdict(True, 0.0)
        except (ValueError, TypeError) as error:
            verdict = Verdict(False, 0.0, f"refused: {error}")
        if not self._agreed(name, verdict) and name in self._methods:
            self._methods.pop(name).close()

    def _rounds(self, names: list[str], warm_up: list[str], rounds: int) -> None:
        calls = {name: self._call(name, method) for name, method in self._methods.items()}
        timer = _Patient(self._place)
        timing = Rounds(calls, timer)
        with torch.no_grad(), paused_collector(collect=True):
            if warm_up:
                self._flip()
                Rounds({name: calls[name] for name in warm_up}, timer).run(0)
            index = 0
            while any(len(self._samples.get(name, ())) < rounds for name in names):
                index += 1
                self._flip()
                times, over = self._slowest(timing.run(index))
                self._record(names, times, rounds)
                if over:
                    break
        for name in names:
            self._running(name)
            verdict = self._place.judge(self._methods[name], timing.last[name], self._reference)
            self._agreed(name, verdict)

    def _call(self, name: str, method: Method) -> _CandidateCall:
        def call() -> object:
            self._running(name)  # one store to memory, far below the clock's resolution
            return method(self._inputs)

        return _CandidateCall(call, method.wait)

    def _flip(self) -> None:
        """Change the inputs and the expected results.

        So a result left over from the last round is detected as wrong.
        """
        self._place.renew(self._inputs)
        self._reference.expected.neg_()

    def _slowest(self, samples: dict[str, Any]) -> tuple[dict[str, float], bool]:
        """Return the time of an op's call on the slowest rank, and whether time is over (rank 0).

        What is timed calls an op of experts once for each routing.
        """
        over = self._rank == 0 and time.monotonic() > self._deadline
        names = list(self._numbers)
        calls = len(self._config.skews)
        mine = [samples[name].wall_ms / calls if name in samples else 0.0 for name in names]
        vector = torch.tensor([*mine, float(over)], dtype=torch.float64)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        slowest = vector.tolist()
        return {n: t for n, t in zip(names, slowest, strict=False) if n in samples}, slowest[-1] > 0

    def _record(self, names: list[str], times: dict[str, float], rounds: int) -> None:
        anchor = times.get(ANCHOR)
        taken = {}
        for name in names:
            kept = self._samples.setdefault(name, [])
            if len(kept) < rounds:
                # If the anchor is excluded because it is wrong here, times are compared directly.
                taken[name] = (times[name], 1.0 if anchor is None else anchor)
                kept.append(taken[name])
        self._event(event="round", times=taken)
