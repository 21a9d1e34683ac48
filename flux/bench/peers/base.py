"""The interface of adapters for other libraries.

A peer is measured exactly like flux's own methods: in the same rounds, on the same inputs, and
checked against the same float64 reference. If it cannot run, it returns the reason, which is
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from flux.bench.config import ONE_GPU, BenchConfig
from flux.bench.methods import Method


class Peer(Protocol):
    """Another library with overlapped ops.

    Attributes:
        name: of the method, in tables and JSON.
        about: its origin, for the report.
    """

    name: str
    about: str

    def available(self) -> str | None:
        """Return why it cannot be used on this machine; None if it can."""
        ...

    def supports(self, config: BenchConfig) -> str | None:
        """Return why it cannot compute this problem; None if it can."""
        ...

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Return its op. Collective; only if it is available and supports the problem."""
        ...


class PeerError(RuntimeError):
    """A peer raised.

    The message begins with `blame(name)`, by which the suite identifies the peer to leave out. It
    crosses processes as text.
    """


def blame(name: str) -> str:
    """Return the prefix of error messages that names the peer."""
    return f"peer {name}:"


def no_gpu() -> str | None:
    """Return why a library that needs GPUs cannot run; None if it can."""
    return None if torch.cuda.is_available() else "needs a CUDA device, and torch sees none"


def reason_ranks(config: BenchConfig) -> str | None:
    """Return why a library cannot run that needs a GPU per rank and equal shards; None if it can.

    The shards are those of rows, and of N or K.
    """
    if config.backend != "cuda":
        return "runs on GPUs only (--backend cuda)"
    if config.transport in ONE_GPU:
        return f"needs a GPU for each rank, unlike --transport {config.transport}"
    problem = config.problem
    for name in ("m", "n" if problem.op.gathers else "k"):
        size = getattr(problem, name)
        if size % problem.world:
            return f"needs {name} divisible by the {problem.world} ranks, got {name}={size}"
    return None


class Guarded:
    """A peer's method whose errors name the peer."""

    def __init__(self, peer: Peer, config: BenchConfig, rank: int) -> None:
        self.name = peer.name
        self._method: Method = self._run(lambda: peer.make(config, rank))

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise PeerError(f"{blame(self.name)} {type(error).__name__}: {error}") from error

    def __call__(self, inputs: Any) -> Any:
        """Call the method."""
        return self._run(lambda: self._method(inputs))

    def knobs(self) -> dict[str, Any]:
        """Return the method's settings."""
        return self._method.knobs()

    def comm_only(self, inputs: Any) -> Callable[[], object] | None:
        """Return the method's communication alone, if it has one."""
        return self._method.comm_only(inputs)

    def wait(self) -> None:
        """Wait until the method's calls are done."""
        self._run(self._method.wait)

    def close(self) -> None:
        """Close the method."""
        self._run(self._method.close)
