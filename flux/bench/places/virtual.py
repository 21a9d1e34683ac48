"""Run all ranks on one GPU in one process: checks results, with the kernels of many GPUs.

Ranks take turns on the multiprocessors and copies never leave the GPU, so times say nothing about
ranks with a GPU each. The report leaves out all comparisons of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import flux
from flux.bench.config import BenchConfig
from flux.bench.methods import (
    Fused,
    LibraryMethod,
    Method,
    bytes_of,
    gemm_of,
    scaled_product,
    whole_gemms,
)
from flux.bench.places import gpu
from flux.bench.places.base import Call, Timing
from flux.bench.places.gpu import GpuMachine
from flux.bench.reference import (
    Inputs,
    Reference,
    Verdict,
    judge,
    make_inputs,
    negate,
    reference_of_all,
)
from flux.core.problem import Problem
from flux.transport.virtual import VirtualWorld

T = TypeVar("T")


class OfAllRanks:
    """A flux op of every rank, called one after the other."""

    def __init__(
        self,
        name: str,
        config: BenchConfig,
        tuning: object | None,
        ranks: VirtualWorld,
        make: Callable[..., Fused] = Fused,
    ) -> None:
        self.name = name
        self._ranks = ranks
        self._of = [
            make(name, config, tuning, ranks.rank(rank)) for rank in range(config.problem.world)
        ]

    @property
    def ops(self) -> list[Any]:
        """The ops of all ranks."""
        return [of.op for of in self._of]

    def __call__(self, inputs: Any) -> Any:
        """Call every rank's op."""
        return self._ranks.run(lambda rank: self._of[rank](inputs[rank]))

    def knobs(self) -> dict[str, Any]:
        """Return the settings of rank 0's op."""
        return self._of[0].knobs()

    def comm_only(self, inputs: Any) -> Call | None:
        """Return None: there is no transport without the GEMM."""
        return None

    def wait(self) -> None:
        """Wait until all ranks' calls are done."""
        for method in self._of:
            method.wait()

    def close(self) -> None:
        """Close all ranks' ops."""
        for method in self._of:
            method.close()


class VirtualUnfused(LibraryMethod):
    """The collective's result, and the GEMMs of all ranks, by torch."""

    name = "unfused"

    def __init__(self, problem: Problem, machine: GpuMachine) -> None:
        self._problem, self._machine = problem, machine

    def __call__(self, inputs: Any) -> Any:
        """Compute all ranks' results."""
        results: list[torch.Tensor] = []
        self._machine.device.enqueue(lambda: results.extend(self._compute(inputs)))
        return results

    def _compute(self, inputs: Sequence[Inputs]) -> Sequence[torch.Tensor]:
        problem = self._problem
        if problem.op.gathers:
            x = torch.cat([bytes_of(own.x) for own in inputs]).view(problem.torch_dtype)
            scales = [own.scale_x for own in inputs if own.scale_x is not None]
            scale = torch.cat(scales) if problem.scaling == "row" else None
            return [self._product(x, own, scale) for own in inputs]
        total = self._product(inputs[0].x, inputs[0])
        for own in inputs[1:]:
            total += self._product(own.x, own)
        if problem.op.all_reduces:
            return [total] * problem.world
        return [total[slice(*problem.rows(rank))] for rank in range(problem.world)]

    def _product(
        self, x: torch.Tensor, own: Inputs, scale_x: torch.Tensor | None = None
    ) -> torch.Tensor:
        if own.scale_x is None or own.scale_weight is None:
            return torch.mm(x, own.weight.t())
        scales = own.scale_x if scale_x is None else scale_x, own.scale_weight
        return scaled_product(x, own.weight, *scales, self._problem.fast_accum)

    def knobs(self) -> dict[str, Any]:
        """Return the description of collective and GEMM."""
        gemm = gemm_of(self._problem, gpus=True)
        return {"path": "unfused", "collective": "torch on one GPU", "gemm": gemm}


class Ranks:
    """The place: all ranks."""

    comparable = False

    def __init__(self, config: BenchConfig, rank: int) -> None:
        self.problem = config.problem
        self.machine = gpu.open_shared_machine()
        self.device: str | None = self.machine.name
        self._world = VirtualWorld(config.problem.world, self.machine.device)

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OfAllRanks:
        """Return a flux op of every rank."""
        return OfAllRanks(name, config, knobs, self._world)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods."""
        chosen = flux.Knobs(**config.knobs) if config.knobs else None
        return [
            VirtualUnfused(config.problem, self.machine),
            self.fused("medium", config, flux.Knobs(path="medium")),
            self.fused("flux", config, chosen),
        ]

    def share(self, value: T) -> list[T]:
        """Return the value of the one process."""
        return [value]

    def inputs(self, seed: int) -> list[Inputs]:
        """Return fresh inputs of all ranks."""
        ranks = range(self.problem.world)
        return [self.machine.put(make_inputs(self.problem, rank, seed)) for rank in ranks]

    def renew(self, inputs: list[Inputs]) -> None:
        """Negate every rank's x in place."""
        for own in inputs:
            negate(own.x)

    def give(self, inputs: list[Inputs], methods: Sequence[Method]) -> None:
        """Do nothing: all ranks are real."""

    def reference(self, inputs: list[Inputs]) -> list[Reference]:
        """Return the right results of all ranks."""
        return reference_of_all(self.problem, inputs)

    def judge(self, method: Method, got: Any, reference: list[Reference]) -> Verdict:
        """Compare the results of all ranks; return the worst verdict."""
        method.wait()
        self.machine.synchronize()
        worst = Verdict(True, 0.0)
        for rank, (result, right) in enumerate(zip(got, reference, strict=True)):
            verdict = self.verdict(rank, result, right)
            complaint = worst.complaint
            if not complaint and not verdict.ok:
                complaint = f"as rank {rank}: {verdict.complaint}"
            error = max(worst.max_abs_err, verdict.max_abs_err)
            worst = Verdict(worst.ok and verdict.ok, error, complaint)
        return worst

    def verdict(self, rank: int, result: Any, reference: Any) -> Verdict:
        """Compare the results of one rank."""
        return judge(self.problem, rank, result, reference)

    def gemms(self, inputs: list[Inputs]) -> dict[str, Call]:
        """Return ways to run rank 0's whole GEMM."""
        return whole_gemms(self.problem, inputs[0])

    def collective(self, inputs: list[Inputs]) -> Call:
        """Return the communication alone, by torch on one GPU."""
        problem = self.problem
        if problem.op.gathers:
            return lambda: torch.cat([bytes_of(own.x) for own in inputs])
        empty = torch.zeros(problem.m, problem.n, dtype=problem.result_dtype)
        partials = [empty.to(own.x.device) for own in inputs]
        return lambda: torch.stack(partials).sum(0)

    def time(self, call: Callable[[], T]) -> tuple[T, Timing]:
        """Time a call on the GPU."""
        result, elapsed = self.machine.time(call)
        return result, Timing(elapsed)

    def close(self) -> None:
        """Close the world."""
        self._world.close()
