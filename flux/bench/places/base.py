"""The interface of a benchmark's place: start calls on all ranks together, and time them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, OpMethod
from flux.bench.reference import Verdict

T = TypeVar("T")
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        wall_ms: duration.
        cpu_ms: CPU time of the process; None: not measured.
        late_ms: delay of the start after the common start; None: unknown.
    """

    wall_ms: float
    cpu_ms: float | None = None
    late_ms: float | None = None


class Timer(Protocol):
    """Starts calls together and times them."""

    def time(self, call: Callable[[], T]) -> tuple[T, Timing]:
        """Run a call that starts on all ranks together. Collective."""
        ...


class BenchPlace(Timer, Protocol):
    """The parts of a benchmark (op.py) that depend on where its ranks run.

    Attributes:
        device: the device, for the report; None: this machine's CPU.
        comparable: whether times are meaningful for ranks with a device each.
    """

    device: str | None
    comparable: bool

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods. Collective."""
        ...

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OpMethod:
        """Return an op of flux with this name; ``knobs`` None: the op chooses. Collective."""
        ...

    def share(self, value: T) -> list[T]:
        """Return the values of all processes. Collective."""
        ...

    def inputs(self, seed: int) -> Any:
        """Return fresh inputs of this process, in the form that methods take."""
        ...

    def renew(self, inputs: Any) -> None:
        """Change inputs in place, so that no earlier result is right."""
        ...

    def give(self, inputs: Any, methods: Sequence[Method]) -> None:
        """Pass data to methods that their calls do not take as arguments."""
        ...

    def reference(self, inputs: Any) -> Any:
        """Return the right results, in float64. Collective."""
        ...

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare the result of a call once it is complete."""
        ...

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Return ways to run a rank's whole GEMM on data in place."""
        ...

    def collective(self, inputs: Any) -> Call:
        """Return the communication alone, as fast as without flux."""
        ...

    def close(self) -> None:
        """Release its resources, after the methods are closed."""
        ...
