"""Run ranks as processes on CPUs, with gloo and the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flux.bench.config import BenchConfig
from flux.bench.methods import (
    Fused,
    Method,
    OpMethod,
    default_methods,
    library_collective,
    whole_gemms,
)
from flux.bench.places.base import Call, Timing
from flux.bench.reference import Verdict, judge, make_inputs, make_reference, negate
from flux.bench.timing import StartLine, timed
from flux.launch.supervisors import all_gather

T = TypeVar("T")


class ProcessTimer:
    """Times ranks that are processes, by the wall clock. Arguments as of StartLine."""

    def __init__(self, world: int, threads: int, common_clock: bool) -> None:
        self._line = StartLine(world, threads, common_clock=common_clock)

    def time(self, call: Callable[[], T], wait: Call = lambda: None) -> tuple[T, Timing]:
        """Run a call that starts on all ranks together. Collective.

        ``wait`` returns when the call's work on a device is done, or raises its error. On the CPU
        no such work exists.
        """
        self._line.wait()
        cpu = time.process_time_ns()
        result, elapsed = timed(call)
        cpu = time.process_time_ns() - cpu
        return result, Timing(elapsed, cpu * 1e-6, self._line.late_ns * 1e-6)


class CpuRanks(ProcessTimer):
    """One of several processes in torch.distributed's default group."""

    device: str | None = None
    comparable = True

    def __init__(self, config: BenchConfig, rank: int) -> None:
        self.config, self.problem, self.rank = config, config.problem, rank
        super().__init__(self.problem.world, config.threads, config.common_clock)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods."""
        return default_methods(config, rank)

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OpMethod:
        """Return an op of flux."""
        return Fused(name, config, knobs)

    def share(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return all_gather(value)

    def inputs(self, seed: int) -> Any:
        """Return fresh inputs of this rank."""
        return make_inputs(self.problem, self.rank, seed)

    def renew(self, inputs: Any) -> None:
        """Negate x in place."""
        negate(inputs.x)

    def give(self, inputs: Any, methods: Sequence[Method]) -> None:
        """Do nothing: the peers are real ranks."""

    def reference(self, inputs: Any) -> Any:
        """Return this rank's right result."""
        return make_reference(self.problem, self.rank, inputs)

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare a result with its reference."""
        return judge(self.problem, self.rank, got, reference)

    def free_bytes(self) -> int | None:
        """Return the memory that methods may still use; None: no limit."""
        return None

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Return ways to run this rank's whole GEMM."""
        return whole_gemms(self.problem, inputs)

    def collective(self, inputs: Any) -> Call:
        """Return the library collective alone."""
        return library_collective(self.problem, inputs.x.device)

    def close(self) -> None:
        """Do nothing: the group belongs to its creator."""
