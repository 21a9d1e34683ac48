"""Methods with one fault each, for tests of the benchmark; ranks import them by name."""

from __future__ import annotations

import os
import signal
import time

import torch

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, UnfusedMethod, default_methods
from flux.bench.reference import Inputs


class Faulty(UnfusedMethod):
    """The unfused path under the name of flux, to be spoilt."""

    name = "flux"

    def __init__(self, config: BenchConfig, rank: int) -> None:
        super().__init__(config.problem, rank)
        self.rank = rank
        self.calls = 0

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        self.calls += 1
        return self.spoil(super().__call__(inputs))

    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        return result


class OffByALittle(Faulty):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            result[3, 2] += 0.01
        return result


class StaleLater(Faulty):
    """Right in the first call of each op, then always returns that result."""

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        if self.calls == 0:
            self.first = super().__call__(inputs).clone()
        return self.first


class Unwritten(Faulty):
    """Forgets one row of an output that, more often than not, holds the right answer already."""

    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(result)
        out[1:] = result[1:]
        return out


class WrongShape(Faulty):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        return result[:-1]


class Killed(Faulty):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class Raising(Faulty):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            raise RuntimeError("the injected fault")
        return result


class Stuck(Faulty):
    def spoil(self, result: torch.Tensor) -> torch.Tensor:
        time.sleep(3600)
        return result


def off_by_a_little(config: BenchConfig, rank: int) -> list[Method]:
    return [UnfusedMethod(config.problem, rank), OffByALittle(config, rank)]


def stale_later(config: BenchConfig, rank: int) -> list[Method]:
    return [UnfusedMethod(config.problem, rank), StaleLater(config, rank)]


def unwritten(config: BenchConfig, rank: int) -> list[Method]:
    return [UnfusedMethod(config.problem, rank), Unwritten(config, rank)]


def wrong_shape(config: BenchConfig, rank: int) -> list[Method]:
    return [UnfusedMethod(config.problem, rank), WrongShape(config, rank)]


def killed(config: BenchConfig, rank: int) -> list[Method]:
    return [*default_methods(config, rank)[:2], Killed(config, rank)]


def raising(config: BenchConfig, rank: int) -> list[Method]:
    return [*default_methods(config, rank)[:2], Raising(config, rank)]


def stuck(config: BenchConfig, rank: int) -> list[Method]:
    return [Stuck(config, rank)]
