"""The configuration of one `flux bench op` run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flux.core.env import MOST_SECONDS
from flux.core.knobs import Op
from flux.core.problem import BY_SHORT, DTYPES, SCALED, Problem
from flux.core.sparse_problem import DISPATCHING
from flux.launch.hosts import parse_hosts, parse_rate
from flux.machine.host import reason_too_large

MOST_RANKS = 1024
"""That can be started: each is a process, and its peers have a connection to it."""
_RANGES = {
    "repeats": (1, 1_000_000),
    "warmup": (0, 1_000_000),
    "threads": (1, max(256, os.cpu_count() or 1)),  # a library that cannot start them crashes
    "seed": (-(2**63), 2**64 - 1),  # what torch.Generator takes
}
"""Smallest and largest values of settings."""

MOST_SKEW = 100.0
"""Where one expert has every token already."""

ONE_GPU = ("virtual", "loopback")  # transports of ranks that share a GPU and a process


def dtype_name(text: str) -> str:
    """Return the canonical name of a dtype that is measured, given that or the short one.

    Raises:
        ValueError: it is not measured; the message has the choices.
    """
    name = BY_SHORT[text].name if text in BY_SHORT else text
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return name


def link_bytes_minimum(problem: Problem, hosts: Sequence[int]) -> int:
    """Return the bytes that must leave the hosts in one call, over all hosts, without headers.

    Every host except the owner's needs every row, or contributes to it: one copy of it, or one sum
    per host, crosses between hosts. All-reduce needs both. 0: it depends on the routing.
    """
    if problem.op.exchanges:
        hosts = list(hosts)
        pairs = sum(problem.world - hosts.count(host) for host in hosts)
        return int(problem.m / problem.world * problem.row_bytes * pairs)
    if problem.name in DISPATCHING:
        return 0
    crossings = len(set(hosts)) - 1
    twice = 2 if problem.op.all_reduces else 1
    return int(twice * crossings * problem.m * problem.row_bytes)


def check_numbers(of: object) -> None:
    """Check the numbers that say how a run goes, as far as ``of`` has them.

    Raises:
        ValueError: one is out of range; the message says which range.
    """
    for name, (least, most) in _RANGES.items():
        value = getattr(of, name, least)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    times = {"timeout": "timeout_s", "--candidate-timeout": "candidate_timeout_s"}
    for shown, name in times.items():
        value = getattr(of, name, 1.0)
        if not 0 < value <= MOST_SECONDS:  # longer than any clock can tell
            raise ValueError(f"{shown} must be above 0 and at most {MOST_SECONDS:g} s, got {value}")


def check_ranks(count: int) -> None:
    """Check that so many ranks can be started.

    Raises:
        ValueError: they cannot.
    """
    if count > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS} ranks can be started, got {count}")


def memory_of(problem: Problem) -> int:
    """Return the bytes that measuring a problem takes at least: on all ranks, on CPUs.

    Inputs, one result of the three methods, and reference and bound in float64.
    """
    weights, problem, size = problem.weight_elements, problem.dense, DTYPES[problem.dtype].itemsize
    size += 8 * (problem.dtype == SCALED)  # operands of float8 in float64, too
    m, n, k = problem.m, problem.n, problem.k
    results = m * n * (1 if problem.op is Op.gemm_rs or problem.op.gathers else problem.world)
    return size * (m * k + weights) + (size + 16) * results


def check_memory(needed: int) -> None:
    """Check that this host has so many bytes of memory; without it, the kernel ends a rank.

    Raises:
        ValueError: it has not; the message says how many it has.
    """
    problem = reason_too_large(needed)
    if problem is not None:
        raise ValueError(f"{problem}: lower the sizes, or the number of ranks")


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
        check_numbers(self)
        check_ranks(self.ranks)
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
    def memory_bytes(self) -> int:
        """Bytes of the host's memory that all ranks together need, at least; 0: unknown."""
        return 0

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
        skews: of the routings of an op of experts, all of which a call runs
            (``flux.bench.sparse_reference.draw_choices``).
    """

    problem: Problem
    backend: str | None = None
    transport: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    skews: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype_name(self.problem.dtype)
        if self.problem.sparse and self.transport == "loopback":
            raise ValueError(f"{self.problem.name} has no transport loopback")
        if self.problem.dtype == SCALED and self.transport == "loopback":
            raise ValueError("transport loopback draws no scales: it does not measure float8")
        if not all(0 <= skew <= MOST_SKEW for skew in self.skews):
            raise ValueError(f"skew must be in [0, {MOST_SKEW:g}], got {self.skews}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.problem.world

    @property
    def memory_bytes(self) -> int:
        """Bytes of the inputs, the results and their references in float64, on CPUs."""
        return 0 if self.backend == "cuda" else memory_of(self.problem)

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
