"""The configuration of one `flux bench op` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flux.core.dtypes import BY_SHORT, DTYPES
from flux.core.problem import Problem
from flux.launch.hosts import parse_hosts, parse_rate

ONE_GPU = ("virtual", "loopback")  # transports of ranks that share a GPU and a process

MEASURED_DTYPES = tuple(dtype.name for dtype in DTYPES.values() if dtype.native is not None)
"""Dtypes that are measured: float8 needs scales, which the inputs here do not have."""


def dtype_name(text: str) -> str:
    """Return the canonical name of a dtype that is measured, given that or the short one.

    Raises:
        ValueError: it is not measured; the message has the choices.
    """
    name = BY_SHORT[text].name if text in BY_SHORT else text
    if name not in MEASURED_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(MEASURED_DTYPES)}, got {text!r}")
    return name


def link_bytes_minimum(problem: Problem, hosts: Sequence[int]) -> int:
    """Return the bytes that must leave the hosts in one call, over all hosts, without headers.

    Every host except the owner's needs every row, or contributes to it: one copy of it, or one sum
    per host, crosses between hosts. All-reduce needs both.
    """
    crossings = len(set(hosts)) - 1
    twice = 2 if problem.op.all_reduces else 1
    return twice * crossings * problem.m * problem.row_bytes


@dataclass(frozen=True, kw_only=True)
class Run:
    """The common settings of all benchmarks on ranks; pickled and sent to every rank.

    Attributes:
        repeats: number of timed repeats.
        warmup: number of repeats before those.
        threads: GEMM threads of each rank.
        timeout_s: limit of the ops' waits.
        seed: of the random inputs.
        hosts: number of hosts, or ranks per host: "2" or "3+1".
        link_rate: of the links between simulated hosts; None: no limit.
        common_clock: whether all ranks share a clock; simulated hosts do too.
    """

    repeats: int = 15
    warmup: int = 3
    threads: int = 1
    timeout_s: float = 60.0
    seed: int = 0
    hosts: str = "1"
    link_rate: str | None = None
    common_clock: bool = True

    def __post_init__(self) -> None:
        for name in ("repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout must be above 0 s, got {self.timeout_s}")
        hosts = len(set(self.host_of))
        if self.link_rate is not None:
            parse_rate(self.link_rate)
            if hosts < 2:
                raise ValueError("a link rate needs at least 2 hosts")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        raise NotImplementedError

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return parse_hosts(self.hosts, self.ranks)

    @property
    def processes(self) -> int:
        """Number of processes that the ranks are in."""
        return self.ranks

    @property
    def group(self) -> str:
        """Backends of the process group."""
        return "gloo"


@dataclass(frozen=True)
class BenchConfig(Run):
    """The complete configuration of one run of `flux bench op`.

    Attributes:
        problem: what is measured.
        backend: cpu, cuda, or None: cpu.
        transport: None: the backend's default.
        knobs: set by the user; others are chosen.
    """

    problem: Problem
    backend: str | None = None
    transport: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype_name(self.problem.dtype)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.problem.world

    @property
    def processes(self) -> int:
        """Number of processes that the ranks are in: one if they share a GPU."""
        return 1 if self.transport in ONE_GPU else self.ranks

    @property
    def group(self) -> str:
        """Backends of the process group: gloo, and NCCL for ranks with a GPU each."""
        own_gpus = self.backend == "cuda" and self.transport not in ONE_GPU
        return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"

    @property
    def shares_memory(self) -> bool:
        """Whether ranks could read each other's memory, on a host that supports it."""
        return len(set(self.host_of)) == 1 and self.transport != "send_recv"
