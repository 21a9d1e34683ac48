"""The configuration of one `flux bench op` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Run(Protocol):
    """The common settings of all benchmarks on ranks."""

    @property
    def repeats(self) -> int:
        """Number of timed repeats."""
        ...

    @property
    def warmup(self) -> int:
        """Number of repeats before those."""
        ...

    @property
    def threads(self) -> int:
        """GEMM threads of each rank."""
        ...

    @property
    def timeout_s(self) -> float:
        """Limit of the ops' waits."""
        ...

    @property
    def link_rate(self) -> str | None:
        """Rate of the links between simulated hosts; None: no limit."""
        ...

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        ...


def check_run(run: Run) -> None:
    """Raise if a number is out of range.

    Raises:
        ValueError: the message names the number.
    """
    for name in ("repeats", "threads"):
        if getattr(run, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(run, name)}")
    if run.warmup < 0:
        raise ValueError(f"warmup must not be negative, got {run.warmup}")
    if run.timeout_s <= 0:
        raise ValueError(f"timeout must be above 0 s, got {run.timeout_s}")
    hosts = len(set(run.host_of))
    if run.link_rate is not None:
        parse_rate(run.link_rate)
        if hosts < 2:
            raise ValueError("a link rate needs at least 2 hosts")


@dataclass(frozen=True)
class BenchConfig:
    """The complete configuration of one run; pickled and sent to every rank."""

    problem: Problem
    repeats: int = 15
    warmup: int = 3
    threads: int = 1
    backend: str | None = None
    transport: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    seed: int = 0
    hosts: str = "1"
    link_rate: str | None = None
    common_clock: bool = True  # of all ranks; simulated hosts share one too

    def __post_init__(self) -> None:
        check_run(self)
        dtype_name(self.problem.dtype)

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return parse_hosts(self.hosts, self.problem.world)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks could read each other's memory, on a host that supports it."""
        return len(set(self.host_of)) == 1 and self.transport != "send_recv"
