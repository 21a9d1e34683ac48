"""What an adapter of another library is: whether it can run here, and the method it makes.

A peer is measured exactly as flux's own methods are: in the same rounds, on the same inputs, and
checked against the same float64 reference. Where it cannot run, it says why, and is listed so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from flux.bench.methods import Method
from flux.bench.problem import ONE_GPU, BenchConfig


class Peer(Protocol):
    """Another library with overlapped ops.

    Attributes:
        name: of the method, in tables and JSON.
        about: whose it is, for the report.
    """

    name: str
    about: str

    def available(self) -> str | None:
        """Why it cannot be used on this machine; None if it can."""
        ...

    def supports(self, config: BenchConfig) -> str | None:
        """Why it cannot compute this problem; None if it can."""
        ...

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Its op. Collective; only where it is available and supports the problem."""
        ...


class PeerError(RuntimeError):
    """A peer raised. The message begins with `blame(name)`, by which the suite knows whom to leave
    out; it crosses processes as text."""


def blame(name: str) -> str:
    return f"peer {name}:"


def no_gpu() -> str | None:
    """Why a library that needs GPUs cannot run."""
    return None if torch.cuda.is_available() else "needs a CUDA device, and torch sees none"


def unlike_gpu_ranks(config: BenchConfig) -> str | None:
    """Why a library that needs a GPU for each rank cannot run with this configuration."""
    if config.backend != "cuda":
        return "runs on GPUs only (--backend cuda)"
    if config.transport in ONE_GPU:
        return f"needs a GPU for each rank, unlike --transport {config.transport}"
    return None


def uneven(config: BenchConfig, *names: str) -> str | None:
    """Why a library that divides these sizes by the ranks cannot take the problem."""
    problem = config.problem
    for name in names:
        size = getattr(problem, name)
        if size % problem.world:
            return f"needs {name} divisible by the {problem.world} ranks, got {name}={size}"
    return None


class Guarded:
    """A peer's method whose errors name it."""

    def __init__(self, peer: Peer, config: BenchConfig, rank: int) -> None:
        self.name = peer.name
        self._method: Method = self._run(lambda: peer.make(config, rank))

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise PeerError(f"{blame(self.name)} {type(error).__name__}: {error}") from error

    def __call__(self, inputs: Any) -> Any:
        return self._run(lambda: self._method(inputs))

    def knobs(self) -> dict[str, Any]:
        return self._method.knobs()

    def comm_only(self, inputs: Any) -> Callable[[], object] | None:
        return self._method.comm_only(inputs)

    def wait(self) -> None:
        self._run(self._method.wait)

    def close(self) -> None:
        self._run(self._method.close)


class PeerMethod:
    """What most peers' methods have in common: nothing to wait for, no transport of their own."""

    def comm_only(self, inputs: Any) -> Callable[[], object] | None:
        return None

    def wait(self) -> None:
        """Nothing: torch sees to what is on its streams."""

    def close(self) -> None:
        """Nothing is kept between calls."""
