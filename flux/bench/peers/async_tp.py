"""Adapter for PyTorch's async tensor parallelism: torch.ops.symm_mem.fused_*.

Written against torch 2.13.0, torch/distributed/_symmetric_memory/__init__.py:
    fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *,
                            bool return_A = True) -> (Tensor?, Tensor[])
    fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim,
                                str group_name) -> Tensor
which are the same in torch 2.9.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flux.bench.config import BenchConfig
from flux.bench.methods import LibraryMethod, Method
from flux.bench.peers.base import no_gpu, reason_ranks
from flux.bench.reference import Inputs
from flux.core.problem import SCALED


class AsyncTp:
    """The adapter."""

    name = "async_tp"
    about = "PyTorch, torch.ops.symm_mem.fused_*"

    def available(self) -> str | None:
        """Return why torch's async-TP ops cannot be used; None if they can."""
        problem = no_gpu()
        if problem is not None:
            return problem
        try:
            import torch.distributed._symmetric_memory
        except ImportError as error:  # a torch built without it
            return f"torch {torch.__version__} has no symmetric memory: {error}"
        try:
            _ = torch.ops.symm_mem.fused_all_gather_matmul
            _ = torch.ops.symm_mem.fused_matmul_reduce_scatter
        except AttributeError as error:
            return f"torch {torch.__version__} has no async-TP ops: {error}"
        return None

    def supports(self, config: BenchConfig) -> str | None:
        """Return why the ops do not support this problem; None if they do."""
        if config.problem.op.all_reduces:
            return "has no GEMM with AllReduce"
        if config.problem.dtype == SCALED:
            return "the adapter calls the ops without scales"
        return reason_ranks(config)

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Return the method."""
        return _AsyncTpMethod(config)


class _AsyncTpMethod(LibraryMethod):
    """Calls on the default group. torch keeps the workspace, per group."""

    name = AsyncTp.name

    def __init__(self, config: BenchConfig) -> None:
        import torch.distributed._symmetric_memory  # registers the ops  # noqa: F401

        self._gathers = config.problem.op.gathers
        group = dist.group.WORLD
        assert group is not None
        self._group: str = group.group_name

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        ops = torch.ops.symm_mem
        transposed = inputs.weight.t()
        result: torch.Tensor
        if self._gathers:
            # Without the gathered input torch may choose a kernel that never stores it. The flux op
            # does not return it either.
            _, (result,) = ops.fused_all_gather_matmul(
                inputs.x, [transposed], 0, self._group, return_A=False
            )
        else:
            result = ops.fused_matmul_reduce_scatter(inputs.x, transposed, "sum", 0, self._group)
        return result

    def knobs(self) -> dict[str, Any]:
        """Return path and version."""
        return {"path": "symm_mem", "torch": str(torch.__version__)}
