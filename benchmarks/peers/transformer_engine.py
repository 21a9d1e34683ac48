"""Adapter for TransformerEngine's userbuffers: te.Linear with overlapped AllGather/ReduceScatter.

Written against transformer-engine 2.20.2: `initialize_ub` and `destroy_ub` of
pytorch/module/base.py, `Linear` of pytorch/module/linear.py. The names fc1 and fc2 are among those
that userbuffers support, by default with a ring exchange for AllGather and a pipeline for
ReduceScatter.

Its documentation tells users to set CUDA_DEVICE_MAX_CONNECTIONS=1. That changes the scheduling of
all methods' streams, so the user's value is kept and reported among the method's knobs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.config import BenchConfig
from flux.bench.methods import LibraryMethod, Method
from flux.bench.peers.base import no_gpu, reason_ranks
from flux.bench.reference import Inputs

_PACKAGE = "transformer_engine"
_DTYPES = ("bfloat16", "float16")


def _te() -> Any:
    return importlib.import_module(f"{_PACKAGE}.pytorch")


class TransformerEngine:
    """The adapter."""

    name = "te_userbuffers"
    about = "TransformerEngine, te.Linear with userbuffers"

    def available(self) -> str | None:
        """Return why TransformerEngine cannot be used; None if it can."""
        if importlib.util.find_spec(_PACKAGE) is None:
            return "transformer-engine is not installed"
        problem = no_gpu()
        if problem is not None:
            return problem
        try:
            te = _te()
        except Exception as error:  # it loads CUDA libraries, which may fail in many ways
            return f"transformer-engine cannot be imported: {type(error).__name__}: {error}"
        missing = [
            name for name in ("Linear", "initialize_ub", "destroy_ub") if not hasattr(te, name)
        ]
        return f"this transformer-engine has no {', '.join(missing)}" if missing else None

    def supports(self, config: BenchConfig) -> str | None:
        """Return why TransformerEngine does not support this problem; None if it does."""
        problem = config.problem
        if problem.op.all_reduces:
            return "has no GEMM with AllReduce of its own"
        if problem.dtype not in _DTYPES:
            return f"is measured with {' and '.join(_DTYPES)}, not {problem.dtype}"
        return reason_ranks(config)

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Return the method."""
        return _UserbuffersMethod(config)


class _UserbuffersMethod(LibraryMethod):
    """One layer; each call sets its weight."""

    name = TransformerEngine.name

    def __init__(self, config: BenchConfig) -> None:
        problem = config.problem
        te = self._te = _te()
        if not self._multicast():
            # Uses CUDA IPC instead, as its error message suggests.
            os.environ.setdefault("UB_SKIPMC", "1")
        columns = problem.k if problem.op.gathers else problem.n
        options: dict[str, Any] = {"dtype": problem.torch_dtype, "bootstrap_backend": "gloo"}
        modes = getattr(te, "UserBufferQuantizationMode", None)
        if modes is not None:  # older versions have only this mode
            options["quantization_modes"] = [modes.NONE]
        te.initialize_ub([problem.m, columns], problem.world, **options)
        try:
            self._layer = te.Linear(
                problem.k,
                problem.n,
                sequence_parallel=True,
                tp_group=dist.group.WORLD,
                tp_size=problem.world,
                bias=False,
                params_dtype=problem.torch_dtype,
                parallel_mode="column" if problem.op.gathers else "row",
                ub_overlap_ag=problem.op.gathers,
                ub_overlap_rs=not problem.op.gathers,
                ub_name="fc1" if problem.op.gathers else "fc2",
            )
        except BaseException:
            te.destroy_ub()
            raise
        self._layer.weight.requires_grad_(False)

    def _multicast(self) -> bool:
        extensions = importlib.import_module("transformer_engine_torch")
        return bool(extensions.device_supports_multicast())

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        self._layer.weight.data = inputs.weight
        with torch.no_grad():
            result: torch.Tensor = self._layer(inputs.x)
        return result

    def knobs(self) -> dict[str, Any]:
        """Return path, version and the number of device queues."""
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
        package = importlib.import_module(_PACKAGE)
        return {
            "path": "userbuffers",
            "transformer_engine": str(getattr(package, "__version__", "unknown")),
            "CUDA_DEVICE_MAX_CONNECTIONS": connections,
        }

    def close(self) -> None:
        """Release the userbuffers."""
        self._te.destroy_ub()
