"""The benchmark's problem: its local shapes, and the options of one `flux bench op` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from flux.core.knobs import Op
from flux.launch.hosts import parse_hosts, parse_rate

OPS = tuple(op.name for op in Op)
ONE_GPU = ("virtual", "loopback")  # transports of ranks that share a GPU and a process

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def dtype_name(text: str) -> str:
    """Return the canonical name of a dtype; raise ValueError with the choices if it is unknown."""
    name = DTYPE_ALIASES.get(text, text)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return name


@dataclass(frozen=True)
class Problem:
    """One op at one global shape on `world` ranks; shapes below are of one rank.

    op       x            weight     result
    ag_gemm  [own, K]     [N/W, K]   [M, N/W]
    gemm_rs  [M, K/W]     [N, K/W]   [own, N]
    gemm_ar  [M, K/W]     [N, K/W]   [M, N]

    Every extent S that is divided by W is divided as rows are: rank r has [r*ceil(S/W), min(S,
    (r+1)*ceil(S/W))).
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world: int

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        for name in ("m", "n", "k", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        dtype_name(self.dtype)

    @property
    def kind(self) -> Op:
        """The op's row in the table of ops."""
        return Op[self.op]

    @property
    def gathers(self) -> bool:
        """Whether the op gathers x."""
        return self.kind.gathers

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype]

    @property
    def chunk(self) -> int:
        """Rows of the largest shard, ceil(M/W)."""
        return -(-self.m // self.world)

    def share(self, size: int, rank: int) -> tuple[int, int]:
        """Return [begin, end) of `size` that belongs to `rank`; may be empty."""
        chunk = -(-size // self.world)
        begin = min(size, rank * chunk)
        return begin, min(size, begin + chunk)

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the rows [begin, end) that `rank` owns; may be empty."""
        return self.share(self.m, rank)

    def x_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of x on `rank`."""
        if self.gathers:
            begin, end = self.rows(rank)
            return (end - begin, self.k)
        begin, end = self.share(self.k, rank)
        return (self.m, end - begin)

    def weight_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the weight on `rank`."""
        if self.gathers:
            begin, end = self.share(self.n, rank)
            return (end - begin, self.k)
        begin, end = self.share(self.k, rank)
        return (self.n, end - begin)

    def result_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the result on `rank`."""
        begin, end = self.rows(rank)
        rows = end - begin if self.kind.scatters else self.m
        return (rows, self.weight_shape(rank)[0])

    def link_bytes_minimum(self, hosts: Sequence[int]) -> int:
        """Return the bytes that must leave the hosts in one call, over all hosts, without headers.

        Every host except the owner's needs every row, or contributes to it: one copy of it, or one
        sum per host, crosses between hosts. All-reduce needs both.
        """
        crossings = len(set(hosts)) - 1
        columns = self.k if self.gathers else self.n
        twice = 2 if self.kind.all_reduces else 1
        return twice * crossings * self.m * columns * self.torch_dtype.itemsize


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

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return parse_hosts(self.hosts, self.problem.world)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks could read each other's memory, on a host that supports it."""
        return len(set(self.host_of)) == 1 and self.transport != "send_recv"
