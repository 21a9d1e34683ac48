"""Estimate times with nvidia-matmul-heuristics, if installed, instead of our cycle model.

The package (`pip install flux-overlap[heuristics]`, NVIDIA's licence) models GPUs by their data
sheets and runs without one. It knows tile, cluster and tile order, but neither stream-K nor tiles
of 256 x 192. It is used if FLUX_KERNEL_CHOICE=nvidia.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem
from flux.select.cycles import cost

MODULE = "nvMatmulHeuristics"
GPUS = {132: "H100_SXM", 114: "H100_PCIE", 78: "H20_SXM"}
"""The package's names for GPUs of compute capability 9.0, by multiprocessors. An H200 differs from
an H100 only in its memory."""

_PRECISIONS = {"bf16": "TST", "fp16": "HSH", "e4m3": "QQTST"}
_LAYOUTS = {"nk": "TN_ROW_MAJOR", "kn": "NN_ROW_MAJOR"}
_ORDERS = (0, 1)  # tile orders: by rows, by columns
BANDS = (1, 2, 4, 8)
"""Rows of tiles per sweep; schedules have such bands too (Knobs.raster)."""


class Estimator:
    """The package's model of one GPU.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(self, gpu: str) -> None:
        self._api: Any = importlib.import_module(MODULE)
        self._gpu = gpu
        self._models: dict[str, tuple[Any, Any]] = {}

    def _model(self, precision: str) -> tuple[Any, Any]:
        if precision not in self._models:
            target = self._api.NvMatmulHeuristicsTarget.CUTLASS3
            # 0.1.0.27 crashes with SIGSEGV when this object is destroyed, so it never is.
            kept = type("Kept", (self._api.NvMatmulHeuristicsInterface,), {"__del__": _nothing})
            model = kept(target, precision=precision)
            gpu = model.createHardwareDescriptor()
            model.setHardwarePredefinedGpu(gpu, self._api.NvMatmulHeuristicsNvidiaGpu[self._gpu])
            self._models[precision] = model, gpu
        return self._models[precision]

    def seconds(
        self, config: GemmConfig, problem: GemmProblem, bands: Sequence[int] = BANDS
    ) -> float | None:
        """Return the estimated time of the kernel without stream-K, for the best of these bands.

        Returns:
            Seconds; None if the package has no estimate.
        """
        if config.arch != "90a":
            return None
        precision = _PRECISIONS[config.dtype]
        model, gpu = self._model(precision)
        layout = self._api.NvMatmulHeuristicsMatmulLayout[_LAYOUTS[config.weight]]
        asked = model.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
        estimates = []
        for order, swizzle in product(_ORDERS, bands):
            kernel = model.nvmmhKernelConfiguration()
            kernel.cta[:], kernel.cluster[:] = config.tile, config.cluster
            # Warps and stages do not change the estimate, but the package needs values.
            kernel.warp[:] = 64, 32, config.tile[2]
            kernel.instr[:] = 64, 8, 32 // config.itemsize
            kernel.splitK, kernel.loadStages = 1, 4
            kernel.gridSwizzle, kernel.ctaOrder = swizzle, order
            estimates.append(
                model.nvMatmulHeuristicsEstimateRuntime(
                    model.handle,
                    precision.encode("ascii"),
                    ctypes.c_int(model.target),
                    ctypes.byref(asked),
                    ctypes.byref(kernel),
                    gpu,
                )
            )
        known = [seconds for seconds in estimates if seconds > 0]
        return min(known, default=None)


def _nothing(_: object) -> None:
    pass


@lru_cache(maxsize=4)
def estimator(gpu: str) -> Estimator | None:
    """Return the model of a GPU; None if the package is not installed."""
    try:
        return Estimator(gpu)
    except (ImportError, OSError):
        return None


def time_of(model: Estimator, config: GemmConfig, problem: GemmProblem, sm_count: int) -> float:
    """Return the estimated seconds; infinity if the package has no estimate.

    For stream-K: the estimate for the same tile run whole, times the change that our model predicts
    for sharing.
    """
    seconds = model.seconds(config, problem)
    if seconds is None:
        return float("inf")
    if config.schedule != "stream_k":
        return seconds
    whole = replace(config, schedule="cooperative")
    ratio = cost(config, problem, sm_count) / cost(whole, problem, sm_count)
    return seconds * ratio


def ranking(
    configs: Sequence[GemmConfig],
    problem: GemmProblem,
    sm_count: int,
    capability: tuple[int, int],
) -> Callable[[GemmConfig], float] | None:
    """Return a function from config to time for ranking; None if our own model must be used.

    Args:
        configs: the candidates.
        problem: the GEMM.
        sm_count: of the device.
        capability: its compute capability.
    """
    gpu = GPUS.get(sm_count) if capability == (9, 0) else None
    model = estimator(gpu) if gpu is not None else None
    if model is None:
        return None
    times = {config: time_of(model, config, problem, sm_count) for config in configs}
    if all(seconds == float("inf") for seconds in times.values()):
        return None
    return times.__getitem__
