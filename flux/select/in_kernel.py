"""Path in_kernel of an AllGather on GPUs: where it exists, and for which M it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flux.core.knobs import Knobs
from flux.core.problem import Problem
from flux.core.spec import OpSpec
from flux.machine.cluster import Cluster
from flux.select.heuristic import IN_KERNEL_ROWS, reason_not_pushed, untuned
from flux.select.predict import predict

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig


GAIN = (0.95, 0.9)
"""Ratios to the times of paths fused and unfused up to which a prediction is trusted. With them
calls take 0.6% (AllGather) and 1.0% (AllReduce) longer than on the fastest simulated path, in the
mean of 479 random calls."""


def reason_not_in_kernel(spec: OpSpec, world: int, nodes: int) -> str | None:
    """Return why no kernel moves the rows of an op of up to IN_KERNEL_ROWS; None if kernels can."""
    if spec.experts:
        return "rows of experts are gathered from memory that copies fill"
    columns = min(spec.local_n(world, world - 1))
    reason = reason_not_pushed(spec.op, world, nodes, spec.n, columns)
    return "rows of x travel with their scales" if reason is None and spec.scales_travel else reason


@dataclass(frozen=True)
class FewRows:
    """The choice of the cost model for calls of few rows; larger ones have the same knobs.

    Attributes:
        problem: the op at its largest M.
        cluster: devices and links.
        config: a kernel like the op's own, by which calls are predicted.
    """

    problem: Problem
    cluster: Cluster
    config: GemmConfig
    kernel: GemmConfig | None = None
    most_tiles: int = 0

    def knobs(self, m: int) -> Knobs:
        """Return the path of least predicted time; in_kernel if it is clearly the fastest."""
        fused, unfused, in_kernel = self.variants
        if m > IN_KERNEL_ROWS:
            return fused
        problem = replace(self.problem, m=m)
        times = [sum(predict(problem, self.cluster, k, self.config)) for k in self.variants]
        if all(times[2] <= gain * time for gain, time in zip(GAIN, times, strict=False)):
            return in_kernel
        return fused if times[0] <= times[1] else unfused

    @property
    def variants(self) -> tuple[Knobs, ...]:
        """The knobs that the model chooses from."""
        fused = untuned(self.problem, self.cluster)
        return (fused, Knobs(path="unfused"), Knobs(path="in_kernel"))
