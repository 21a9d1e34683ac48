"""Candidates with one fault each, for tests of the tuner; ranks import them by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, UnfusedMethod
from flux.bench.reference import Inputs
from flux.select.space import Candidate

Fault = Callable[["Slept", torch.Tensor], None]


class Slept(UnfusedMethod):
    """The library path followed by a sleep, so that times are known, and by a fault."""

    def __init__(
        self,
        config: BenchConfig,
        candidate: Candidate,
        rank: int,
        ms: float = 0.0,
        fault: Fault | None = None,
    ) -> None:
        super().__init__(config.problem, rank)
        self.name, self.ms, self.rank, self.calls = candidate.name, ms, rank, 0
        self.fault = fault

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        self.calls += 1
        result = super().__call__(inputs)
        time.sleep(self.ms * 1e-3)
        if self.fault is not None:
            self.fault(self, result)
        return result


def wrong(method: Slept, result: torch.Tensor) -> None:
    if method.rank == 1:
        result[0, 0] += 1


def wrong_later(method: Slept, result: torch.Tensor) -> None:
    if method.calls > 1:
        result[0, 0] += 1


def killed_by(number: signal.Signals, after: int = 0) -> Fault:
    """Return a fault that sends rank 1 a signal in a call."""

    def kill(method: Slept, result: torch.Tensor) -> None:
        if method.calls > after and method.rank == 1:
            os.kill(os.getpid(), number)
            time.sleep(60)

    return kill


def hang(method: Slept, result: torch.Tensor) -> None:
    if method.rank == 0:
        time.sleep(600)


def times(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """The fewer rows, the faster, by more than a busy machine adds."""
    known = {"unfused": 60.0, "medium": 80.0, "default": 90.0}
    rows = candidate.knobs.comm_tile_rows or 0
    apart = 15.0 * rows.bit_length() - 10.0  # 1, 2, 4, 8, 16 rows: 5, 20, 35, 50, 65
    return Slept(config, candidate, rank, known.get(candidate.name, apart))


def made_by(process: int) -> Path:
    """Where ``counted`` says what ranks of a process have built. Ranks do not have its environment:
    the server that they are forked from may be older, and of another worker."""
    return Path("/tmp", f"flux-test-made-{process}")


def counted(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """As ``times``, in hundredths of it; each that is built leaves its name in a file."""
    parent = multiprocessing.parent_process()
    if rank == 0 and parent is not None:
        with made_by(parent.pid or 0).open("a") as file:
            file.write(f"{candidate.name}\n")
    return Slept(config, candidate, rank, (candidate.knobs.comm_tile_rows or 0) * 0.05)


FAULTS: dict[int, Fault] = {
    1: wrong,
    2: wrong_later,
    4: killed_by(signal.SIGSEGV),
    8: killed_by(signal.SIGKILL, after=2),
}


def faulty(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Candidates with 1, 2, 4, and 8 rows have faults, and would be the fastest."""
    if candidate.name in ("unfused", "medium", "default"):
        known = {"unfused": 40.0, "medium": 60.0, "default": 5.0}
        return Slept(config, candidate, rank, known[candidate.name])
    fault = FAULTS[candidate.knobs.comm_tile_rows or 0]
    return Slept(config, candidate, rank, fault=fault)


def hanging(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """The candidate with 4 rows never returns on rank 0."""
    rows = candidate.knobs.comm_tile_rows
    always = candidate.name in ("unfused", "medium", "default")
    return Slept(config, candidate, rank, 0.5, hang if rows == 4 and not always else None)


def refusing(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Reject every candidate except the library path."""
    if candidate.name != "unfused":
        raise ValueError(f"no {candidate.name}")
    return Slept(config, candidate, rank, 0.5)


def all_wrong(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Make candidates whose results are all wrong."""
    return Slept(config, candidate, rank, fault=wrong)


def ended(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """A rank is told to end, as a batch system does when a job's time is over."""
    return Slept(config, candidate, rank, fault=killed_by(signal.SIGTERM))
