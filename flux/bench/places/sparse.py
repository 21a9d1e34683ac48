"""Run ops of experts and heads: processes on CPUs, or with a GPU each, or all ranks on one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flux.bench import sparse
from flux.bench.config import BenchConfig
from flux.bench.methods import Method, OpMethod
from flux.bench.places import gpu, virtual
from flux.bench.places.base import Call
from flux.bench.places.cpu import CpuRanks
from flux.bench.reference import Verdict, judge_values, negate
from flux.bench.sparse_reference import AllInputsHere, SparseShare, make_reference
from flux.core.knobs import Knobs
from flux.core.sparse_problem import SparseProblem


class SparseRanks(CpuRanks):
    """One of several processes in torch.distributed's default group."""

    def __init__(self, config: BenchConfig, rank: int) -> None:
        super().__init__(config, rank)
        assert isinstance(config.problem, SparseProblem)
        self._layout = SparseShare(config.problem, rank, config.backend == "cuda")

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
            negate(x)

    def reference(self, inputs: Any) -> Any:
        """Return this rank's right results."""
        return make_reference(self._layout, inputs)

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare results with their references."""
        return judged(got, reference, self._layout.problem)

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Return the product alone."""
        return sparse.whole_products(self._layout, inputs)

    def collective(self, inputs: Any) -> Call:
        """Return the library's communication alone."""
        return sparse.collective(self._layout, inputs)


class SparseGpuRanks(SparseRanks, gpu.GpuRanks):
    """One of several processes with a GPU each."""

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods; kernels of experts have no path medium."""
        chosen = Knobs(**config.knobs) if config.knobs else None
        unfused = sparse.UnfusedSparse(config, rank)
        return [unfused, *(self._fused(config, chosen, most) for most in _most(config))]

    def _fused(self, config: BenchConfig, knobs: Any, most: bool) -> OpMethod:
        return sparse.FusedSparse("max_rows" if most else "flux", config, knobs, most=most)

    def inputs(self, seed: int) -> Any:
        """Return fresh inputs on the GPU."""
        return super().inputs(seed).to(self.machine.device.torch_device)

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare results once the GPU has finished them."""
        method.wait()
        self.machine.synchronize()
        return super().judge(method, got, reference)


class _OfAllRanks(virtual.OfAllRanks):
    """An op of every rank. The host of a rank waits for what all ranks have to begin before it."""

    def __call__(self, inputs: Any) -> Any:
        """Call every rank's op for one routing after the other."""
        if not inputs[0].routings:
            return super().__call__(inputs)

        def one(number: int) -> list[torch.Tensor]:
            ops: Any = self._of
            return self._ranks.run(lambda r: ops[r].routed(inputs[r], inputs[r].routings[number]))

        each = [one(number) for number in range(len(inputs[0].routings))]
        return list(zip(*each, strict=True))


class SparseOnOneGpu(virtual.Ranks):
    """All ranks, on one GPU: see ``virtual``. There is no path without flux."""

    problem: SparseProblem

    def __init__(self, config: BenchConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._skews = config.skews
        ranks = range(self.problem.world)
        self._layouts = [SparseShare(self.problem, rank, gpus=True) for rank in ranks]

    def fused(self, name: str, config: BenchConfig, knobs: Any) -> virtual.OfAllRanks:
        """Return an op of every rank."""
        make = partial(sparse.FusedSparse, most=name == "max_rows")
        return _OfAllRanks(name, config, knobs, self._world, make)

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        """Return the default methods."""
        chosen = Knobs(**config.knobs) if config.knobs else None
        names = ("max_rows" if most else "flux" for most in _most(config))
        return [self.fused(name, config, chosen) for name in names]

    def inputs(self, seed: int) -> Any:
        """Return fresh inputs of all ranks."""
        device = self.machine.device.torch_device
        return [layout.inputs(seed, self._skews).to(device) for layout in self._layouts]

    def renew(self, inputs: Any) -> None:
        """Negate every rank's x in place."""
        for own in inputs:
            for x in own.tensors:
                negate(x)

    def reference(self, inputs: Any) -> Any:
        """Return the right results of all ranks."""
        peers = AllInputsHere(self._layouts, inputs)
        pairs = zip(self._layouts, inputs, strict=True)
        return [make_reference(layout, own, peers) for layout, own in pairs]

    def verdict(self, rank: int, result: Any, reference: Any) -> Verdict:
        """Compare the results of one rank."""
        return judged(result, reference, self.problem)

    def gemms(self, inputs: Any) -> dict[str, Call]:
        """Return rank 0's product alone."""
        return sparse.whole_products(self._layouts[0], inputs[0])

    def collective(self, inputs: Any) -> Call:
        """Return copies of what all ranks send, in place of communication."""
        return lambda: [x.clone() for own in inputs for x in own.tensors]


def _most(config: BenchConfig) -> tuple[bool, ...]:
    """Return whether calls say how many rows there are at most, of each method of flux."""
    return (False,) if config.problem.op.exchanges else (False, True)


def judged(got: Any, reference: Any, problem: SparseProblem) -> Verdict:
    """Compare the results of one rank."""
    result = sparse.flat(got, problem)
    if result.shape != reference.expected.shape or result.dtype != problem.result_dtype:
        text = f"returned {list(result.shape)} {result.dtype}, expected "
        text += f"{list(reference.expected.shape)} {problem.result_dtype}"
        return Verdict(False, float("inf"), text)
    return judge_values(result, reference)
