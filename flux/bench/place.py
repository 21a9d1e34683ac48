"""Where the ranks of a benchmark are, how their calls start together, and how they are timed.

CpuRanks             a process per rank, gloo, the wall clock
gpu.GpuRanks         a process and a GPU per rank, NCCL, the GPU's clock
virtual.Ranks        all ranks on one GPU in one process: for results, not for times
loopback.RealRank    one rank on the GPU, its peers played, their memory in the host
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from .methods import (
    Fused,
    Method,
    OpMethod,
    default_methods,
    library_collective,
    whole_gemms,
)
from .problem import BenchConfig
from .reference import Verdict, judge, make_inputs, make_reference
from .timing import StartLine, timed

T = TypeVar("T")
Call = Callable[[], object]


@dataclass(frozen=True)
class Taken:
    """What one call took: in all, of the process's CPUs (None: not looked at), and how long after
    the common start it began (None: not known)."""

    wall_ms: float
    cpu_ms: float | None = None
    late_ms: float | None = None


class Timer(Protocol):
    """What starts calls together and times them."""

    def time(self, call: Callable[[], T]) -> tuple[T, Taken]:
        """Run a call that starts on all ranks together. Collective."""
        ...


class Place(Timer, Protocol):
    """All that the course of a benchmark (op.py) does not want to know.

    Attributes:
        device: what ran, for the report; None: this machine's CPU.
        comparable: whether times say something about ranks with a device each.
    """

    device: str | None
    comparable: bool

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """The methods, if no others are asked for. Collective."""
        ...

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OpMethod:
        """An op of flux, under this name; ``knobs`` None leaves them to the op. Collective."""
        ...

    def share(self, value: T) -> list[T]:
        """Everybody's value, by process. Collective."""
        ...

    def inputs(self, seed: int) -> Any:
        """Fresh inputs of this process, as its methods take them."""
        ...

    def renew(self, inputs: Any) -> None:
        """Other inputs of the same size, in place, so that no earlier result is right."""
        ...

    def give(self, inputs: Any, methods: Sequence[Method]) -> None:
        """Let the methods' next calls have what only the inputs know, beside what calls take."""
        ...

    def reference(self, inputs: Any) -> Any:
        """What is right, in float64. Collective."""
        ...

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare the result of a call, once it is there."""
        ...

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Ways to run a rank's whole GEMM on data that is already there."""
        ...

    def collective(self, inputs: Any) -> Call:
        """The communication alone, as fast as without flux."""
        ...

    def close(self) -> None:
        """Give back what it holds, after the methods."""
        ...


class ProcessTimer:
    """Times ranks that are processes, by the wall clock.

    Args: as of StartLine.
    """

    def __init__(self, world: int, threads: int, common_clock: bool) -> None:
        self._line = StartLine(world, threads, common_clock=common_clock)

    def time(self, call: Callable[[], T], wait: Call = lambda: None) -> tuple[T, Taken]:
        """Run a call that starts on all ranks together. Collective.

        ``wait`` returns when what the call has put on a device is done, or raises what has become
        of it. On the CPU nothing is left to wait for.
        """
        self._line.wait()
        cpu = time.process_time_ns()
        result, elapsed = timed(call)
        cpu = time.process_time_ns() - cpu
        return result, Taken(elapsed, cpu * 1e-6, self._line.late_ns * 1e-6)


class CpuRanks(ProcessTimer):
    """One of several processes in torch.distributed's default group."""

    device: str | None = None
    comparable = True

    def __init__(self, config: BenchConfig, rank: int) -> None:
        self.config, self.problem, self.rank = config, config.problem, rank
        super().__init__(self.problem.world, config.threads, config.common_clock)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        return default_methods(config, rank)

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OpMethod:
        return Fused(name, config, knobs)

    def share(self, value: T) -> list[T]:
        everybody: list[Any] = [None] * self.problem.world
        dist.all_gather_object(everybody, value)
        return everybody

    def inputs(self, seed: int) -> Any:
        return make_inputs(self.problem, self.rank, seed)

    def renew(self, inputs: Any) -> None:
        inputs.x.neg_()

    def give(self, inputs: Any, methods: Sequence[Method]) -> None:
        """Nothing: peers are as real as this rank."""

    def reference(self, inputs: Any) -> Any:
        return make_reference(self.problem, self.rank, inputs)

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        return judge(self.problem, self.rank, got, reference)

    def free_bytes(self) -> int | None:
        """Memory that methods may still take; None: there is nothing to be careful about."""
        return None

    def gemms(self, inputs: Any) -> dict[str, Call]:
        return whole_gemms(self.problem, inputs)

    def collective(self, inputs: Any) -> Call:
        return library_collective(self.problem, inputs.x.device)

    def close(self) -> None:
        """The group is whoever's that made it."""


def open_place(config: BenchConfig, rank: int) -> Place:
    """Where a run with this configuration takes place. Collective."""
    if config.backend != "cuda":
        return CpuRanks(config, rank)
    from . import gpu, loopback, virtual  # which load the rest of flux

    if config.transport == "virtual":
        return virtual.Ranks(config, rank)
    if config.transport == "loopback":
        return loopback.RealRank(config, rank)
    return gpu.GpuRanks(config, rank)
