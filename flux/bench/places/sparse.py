"""Run ops of experts and heads as processes on CPUs."""

from __future__ import annotations

from typing import Any

from flux.bench import sparse
from flux.bench.config import BenchConfig
from flux.bench.methods import Method, OpMethod
from flux.bench.places.base import Call
from flux.bench.places.cpu import CpuRanks
from flux.bench.reference import Verdict, judge_values
from flux.bench.sparse_reference import make_reference
from flux.core.knobs import Knobs
from flux.core.sparse_problem import SparseProblem


class SparseRanks(CpuRanks):
    """One of several processes in torch.distributed's default group."""

    def __init__(self, config: BenchConfig, rank: int) -> None:
        super().__init__(config, rank)
        assert isinstance(config.problem, SparseProblem)
        self._layout = sparse.SparseShare(config.problem, rank)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods; an all-to-all has no path medium."""
        chosen = Knobs(**config.knobs) if config.knobs else None
        medium = (
            [] if self.problem.op.exchanges else [self.fused("medium", config, Knobs("medium"))]
        )
        unfused = sparse.UnfusedSparse(config, rank)
        return [unfused, *medium, self.fused("flux", config, chosen)]

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> OpMethod:
        """Return an op of flux."""
        return sparse.FusedSparse(name, config, knobs)

    def inputs(self, seed: int) -> Any:
        """Return fresh inputs of this rank."""
        return self._layout.inputs(seed, self.config.skews)

    def renew(self, inputs: Any) -> None:
        """Negate x in place."""
        for x in inputs.tensors:
            x.neg_()

    def reference(self, inputs: Any) -> Any:
        """Return this rank's right results."""
        return make_reference(self._layout, inputs)

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare results with their references."""
        result = sparse.flat(got, self._layout.problem)
        if result.shape != reference.expected.shape or result.dtype != self.problem.torch_dtype:
            text = f"returned {list(result.shape)} {result.dtype}, expected "
            text += f"{list(reference.expected.shape)} {self.problem.torch_dtype}"
            return Verdict(False, float("inf"), text)
        return judge_values(result, reference)

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Return the product alone."""
        return sparse.whole_products(self._layout, inputs)

    def collective(self, inputs: Any) -> Call:
        """Return the library's communication alone."""
        return sparse.collective(self._layout, inputs)
