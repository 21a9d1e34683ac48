"""All ranks on one GPU in one process: whether results are right, with the kernels of many GPUs.

Ranks take turns on the multiprocessors and copies never leave the GPU, so times say nothing about
ranks that have a GPU each. The report leaves out what would compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import flux
from flux.transport.virtual import VirtualWorld

from . import gpu
from .gpu import Machine
from .methods import Fused, Method, whole_gemms
from .place import Call, Taken
from .problem import BenchConfig, Problem
from .reference import Inputs, Reference, Verdict, judge, make_inputs, reference_of_all

T = TypeVar("T")


class OfAllRanks:
    """A flux op of every rank, called one after the other."""

    def __init__(
        self, name: str, config: BenchConfig, tuning: object | None, ranks: VirtualWorld
    ) -> None:
        self.name = name
        self._ranks = ranks
        self._of = [
            Fused(name, config, tuning, ranks.rank(rank)) for rank in range(config.problem.world)
        ]

    @property
    def ops(self) -> list[Any]:
        return [of.op for of in self._of]

    def __call__(self, inputs: Any) -> Any:
        return self._ranks.run(lambda rank: self._of[rank](inputs[rank]))

    def knobs(self) -> dict[str, Any]:
        return self._of[0].knobs()

    def comm_only(self, inputs: Any) -> Call | None:
        return None

    def wait(self) -> None:
        for method in self._of:
            method.wait()

    def close(self) -> None:
        for method in self._of:
            method.close()


class Unfused:
    """What the collective would bring together, and the GEMMs of all ranks, by torch."""

    name = "unfused"

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem, self._machine = problem, machine

    def __call__(self, inputs: Any) -> Any:
        results: list[torch.Tensor] = []
        self._machine.device.enqueue(lambda: results.extend(self._compute(inputs)))
        return results

    def _compute(self, inputs: Sequence[Inputs]) -> Sequence[torch.Tensor]:
        problem = self._problem
        if problem.gathers:
            x = torch.cat([own.x for own in inputs])
            return [torch.mm(x, own.weight.t()) for own in inputs]
        total = torch.mm(inputs[0].x, inputs[0].weight.t())
        for own in inputs[1:]:
            total += torch.mm(own.x, own.weight.t())
        if problem.op == "gemm_ar":
            return [total] * problem.world
        return [total[slice(*problem.rows(rank))] for rank in range(problem.world)]

    def knobs(self) -> dict[str, Any]:
        return {"path": "unfused", "collective": "torch on one GPU", "gemm": "torch.mm"}

    def comm_only(self, inputs: Any) -> Call | None:
        return None

    def wait(self) -> None:
        """Nothing: torch sees to what it has been told."""

    def close(self) -> None:
        """Nothing is kept between calls."""


class Ranks:
    """The place."""

    comparable = False

    def __init__(self, config: BenchConfig, rank: int) -> None:
        self.problem = config.problem
        self.machine = gpu.open_shared_machine()
        self.device: str | None = self.machine.name
        self._world = VirtualWorld(config.problem.world, self.machine.device)

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OfAllRanks:
        return OfAllRanks(name, config, knobs, self._world)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        chosen = flux.Knobs(**config.knobs) if config.knobs else None
        return [
            Unfused(config.problem, self.machine),
            self.fused("medium", config, flux.Knobs(path="medium")),
            self.fused("flux", config, chosen),
        ]

    def share(self, value: T) -> list[T]:
        return [value]

    def inputs(self, seed: int) -> list[Inputs]:
        ranks = range(self.problem.world)
        return [self.machine.put(make_inputs(self.problem, rank, seed)) for rank in ranks]

    def renew(self, inputs: list[Inputs]) -> None:
        for own in inputs:
            own.x.neg_()

    def give(self, inputs: list[Inputs], methods: Sequence[Method]) -> None:
        """Nothing: all ranks are here."""

    def reference(self, inputs: list[Inputs]) -> list[Reference]:
        return reference_of_all(self.problem, inputs)

    def judge(self, method: Method, got: Any, reference: list[Reference]) -> Verdict:
        method.wait()
        self.machine.synchronize()
        worst = Verdict(True, 0.0)
        for rank, (result, right) in enumerate(zip(got, reference, strict=True)):
            found = judge(self.problem, rank, result, right)
            complaint = worst.complaint or (f"as rank {rank}: {found.complaint}" * (not found.ok))
            error = max(worst.max_abs_err, found.max_abs_err)
            worst = Verdict(worst.ok and found.ok, error, complaint)
        return worst

    def gemms(self, inputs: list[Inputs]) -> dict[str, Call]:
        return whole_gemms(self.problem, inputs[0])

    def collective(self, inputs: list[Inputs]) -> Call:
        problem = self.problem
        if problem.gathers:
            return lambda: torch.cat([own.x for own in inputs])
        partials = [inputs[0].x.new_zeros(problem.m, problem.n) for _ in inputs]
        return lambda: torch.stack(partials).sum(0)

    def time(self, call: Callable[[], T]) -> tuple[T, Taken]:
        result, elapsed = self.machine.time(call)
        return result, Taken(elapsed)

    def close(self) -> None:
        self._world.close()
