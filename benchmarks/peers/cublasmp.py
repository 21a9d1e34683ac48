"""Adapter for cuBLASMp, by nvmath-python: distributed matmul with overlapped communication.

Written against nvmath-python 1.0.0: `initialize` and `finalize` of nvmath/distributed/__init__.py,
`TorchProcessGroup` of process_group.py, `BlockNonCyclic` and `ProcessGrid` of distribution/,
`Matmul` of linalg/advanced/matmulmod.py (and version 0.10 of the library, nvidia-cublasmp).

The library is column-major, so it computes the transposed result from transposed views, which are
free. D, A and B are distributed over W ranks by rows (R) or columns (C):

    op        D  [N, M] =  A^T, A [K, N]   @   B [K, M]
    ag_gemm   R            C                   C          D^T: [M, N/W] of each rank
    gemm_rs   C            R                   R          D^T: [M/W, N]
    gemm_ar   C, whole     R                   R          epilog ALLREDUCE: [M, N]
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from flux.bench.config import BenchConfig
from flux.bench.methods import LibraryMethod, Method
from flux.bench.peers.base import no_gpu, reason_ranks
from flux.bench.reference import Inputs

_PACKAGE = "nvmath"


class CublasMp:
    """The adapter."""

    name = "cublasmp"
    about = "cuBLASMp, through nvmath-python"

    def available(self) -> str | None:
        """Return why cuBLASMp cannot be used; None if it can."""
        if importlib.util.find_spec(_PACKAGE) is None:
            return "nvmath-python is not installed"
        problem = no_gpu()
        if problem is not None:
            return problem
        try:
            importlib.import_module("nvmath.distributed.linalg.advanced")
            version = int(importlib.import_module("nvmath.bindings.cublasMp").get_version())
        except Exception as error:  # it loads several CUDA libraries, any of which may be missing
            return f"cuBLASMp cannot be loaded: {type(error).__name__}: {error}"
        return None if version >= 600 else f"cuBLASMp must be 0.6 or newer, got {version}"

    def supports(self, config: BenchConfig) -> str | None:
        """Return why the library does not support this problem; None if it does."""
        return reason_ranks(config)

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Return the method."""
        return _MatmulMethod(config)


class _MatmulMethod(LibraryMethod):
    """A Matmul planned for the tensors of the latest call; planned again for other tensors."""

    name = CublasMp.name

    def __init__(self, config: BenchConfig) -> None:
        self._op, self._world = config.problem.op, config.problem.world
        self._distributed = importlib.import_module("nvmath.distributed")
        self._advanced = importlib.import_module("nvmath.distributed.linalg.advanced")
        self._matmul: Any = None
        self._of: tuple[torch.Tensor, torch.Tensor] | None = None
        groups = importlib.import_module("nvmath.distributed.process_group")
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        # Set-up uses the group's CPU backend; calls use NCCL.
        self._distributed.initialize(
            device, groups.TorchProcessGroup(device_id="cpu"), backends=["nccl"]
        )

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        if self._of is None or self._of[0] is not inputs.x or self._of[1] is not inputs.weight:
            self._plan(inputs)
        result: torch.Tensor = self._matmul.execute().t()
        return result

    def _plan(self, inputs: Inputs) -> None:
        import numpy

        self._free()
        layouts = importlib.import_module("nvmath.distributed.distribution")
        rows = layouts.BlockNonCyclic(layouts.ProcessGrid(shape=(self._world, 1)))
        columns = layouts.BlockNonCyclic(layouts.ProcessGrid(shape=(1, self._world)))
        gathers = self._op.gathers
        operand, result = (columns, rows) if gathers else (rows, columns)
        qualifiers = numpy.zeros((3,), dtype=self._advanced.matrix_qualifiers_dtype)
        qualifiers[0]["is_transpose"] = True
        self._matmul = self._advanced.Matmul(
            inputs.weight.t(),
            inputs.x.t(),
            distributions=[operand, operand, result],
            qualifiers=qualifiers,
        )
        reduces = self._op.all_reduces
        self._matmul.plan(epilog=self._advanced.MatmulEpilog.ALLREDUCE if reduces else None)
        self._of = (inputs.x, inputs.weight)

    def knobs(self) -> dict[str, Any]:
        """Return path and version."""
        nvmath = importlib.import_module(_PACKAGE)
        return {"path": "cublasmp", "nvmath": str(getattr(nvmath, "__version__", "unknown"))}

    def _free(self) -> None:
        matmul, self._matmul, self._of = self._matmul, None, None
        if matmul is not None:
            matmul.free()

    def close(self) -> None:
        """Free the plan and finalize the library."""
        self._free()
        self._distributed.finalize()
