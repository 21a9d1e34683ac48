"""Candidates with one fault each, for tests of the tuner; ranks import them by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, UnfusedMethod
from flux.bench.reference import Inputs
from flux.select.space import Candidate


class Slept(UnfusedMethod):
    """The library path followed by a sleep, so that times of candidates are known."""

    def __init__(self, config: BenchConfig, candidate: Candidate, rank: int, ms: float) -> None:
        super().__init__(config.problem, rank)
        self.name, self.ms, self.rank, self.calls = candidate.name, ms, rank, 0

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        self.calls += 1
        result = super().__call__(inputs)
        time.sleep(self.ms * 1e-3)
        return self.spoil(result)

    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        return result


class Wrong(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            result[0, 0] += 1
        return result


class WrongLater(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.calls > 1:
            result[0, 0] += 1
        return result


class Dies(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        return result


class DiesLater(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.calls > 2 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return result


class Hangs(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            time.sleep(600)
        return result


def times(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """The fewer rows, the faster, by more than a busy machine adds."""
    known = {"unfused": 60.0, "medium": 80.0, "default": 90.0}
    rows = candidate.knobs.comm_tile_rows or 0
    return Slept(config, candidate, rank, known.get(candidate.name, 5.0 * rows))


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


FAULTS: dict[int, Any] = {1: Wrong, 2: WrongLater, 4: Dies, 8: DiesLater}


def faulty(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Candidates with 1, 2, 4, and 8 rows have faults, and would be the fastest."""
    if candidate.name in ("unfused", "medium", "default"):
        known = {"unfused": 40.0, "medium": 60.0, "default": 5.0}
        return Slept(config, candidate, rank, known[candidate.name])
    method: Method = FAULTS[candidate.knobs.comm_tile_rows or 0](config, candidate, rank, 0.0)
    return method


def hanging(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """The candidate with 4 rows never returns on rank 0."""
    rows = candidate.knobs.comm_tile_rows
    always = candidate.name in ("unfused", "medium", "default")
    return (Hangs if rows == 4 and not always else Slept)(config, candidate, rank, 0.5)


def refusing(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Reject every candidate except the library path."""
    if candidate.name != "unfused":
        raise ValueError(f"no {candidate.name}")
    return Slept(config, candidate, rank, 0.5)


def all_wrong(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """Make candidates whose results are all wrong."""
    return Wrong(config, candidate, rank, 0.0)


class Ended(Slept):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return result


def ended(config: BenchConfig, candidate: Candidate, rank: int) -> Method:
    """A rank is told to end, as a batch system does when a job's time is over."""
    return Ended(config, candidate, rank, 0.0)
