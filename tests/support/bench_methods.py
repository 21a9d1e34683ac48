"""Methods with one fault each, for tests of the benchmark; ranks import them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, UnfusedMethod
from flux.bench.reference import Inputs


class Faulty(UnfusedMethod):
    """The unfused path under the name of flux; ``fault`` spoils its results."""

    name = "flux"

    def __init__(self, config: BenchConfig, rank: int, fault: Fault) -> None:
        super().__init__(config.problem, rank)
        self.rank, self.fault = rank, fault
        self.first: torch.Tensor | None = None

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        return self.fault(self, super().__call__(inputs))


Fault = Callable[[Faulty, torch.Tensor], torch.Tensor]


def beside_unfused(config: BenchConfig, rank: int, fault: Fault) -> list[Method]:
    return [UnfusedMethod(config.problem, rank), Faulty(config, rank, fault)]


def off_by_a_little(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    if method.rank == 1:
        result[3, 2] += 0.01
    return result


def stale_later(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    """Right in the first call of each op, then always returns that result."""
    if method.first is None:
        method.first = result.clone()
    return method.first


def unwritten(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    """Forgets one row of an output that, more often than not, holds the right answer already."""
    out = torch.empty_like(result)
    out[1:] = result[1:]
    return out


def wrong_shape(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    return result[:-1]


def killed(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    if method.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def raising(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    if method.rank == 1:
        raise RuntimeError("the injected fault")
    return result


def stuck(method: Faulty, result: torch.Tensor) -> torch.Tensor:
    time.sleep(3600)
    return result
