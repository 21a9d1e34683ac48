"""What the tests on a GPU share: the device, inputs on it, and sizes that kernels take."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from flux.backends.device import CudaDevice
from flux.kernels.legality import GemmProblem
from reference import Inputs, Problem

CASES = int(os.environ.get("FLUX_TEST_CASES", "12"))


def cuda_device() -> CudaDevice:
    """The current device; skips the test where it, or kernels, are missing."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = CudaDevice()
    if not found.registry.kernels:
        pytest.skip("no kernels are built for these sources: make kernels")
    return found


def on_gpu(part: Any) -> Any:
    if isinstance(part, list):
        return [on_gpu(p) for p in part]
    return None if part is None else part.cuda()


class OnDevice(Inputs):
    """Inputs on the GPU; results are judged on the CPU."""

    def local(self, rank: int, layout: str = "dense", padded: bool = False) -> tuple[Any, Any, Any]:
        host = self.x, self.weights, self.biases
        self.x, self.weights, self.biases = map(on_gpu, host)
        try:  # laid out there: a copy to the device would close the gaps
            return super().local(rank, layout, padded)
        finally:
            self.x, self.weights, self.biases = host

    def scales(self, rank: int, rows: int) -> dict[str, Any]:
        return {name: on_gpu(scale) for name, scale in super().scales(rank, rows).items()}

    def check(self, got: list[torch.Tensor], rank: int, path: str = "fused") -> None:
        super().check([g.cpu() for g in got], rank, path)


def aligned(rng: random.Random, world: int, most: int) -> int:
    """A size of which every rank has a share that is a multiple of 8."""
    return 8 * world * rng.randint(1, max(1, most // (8 * world)))


def random_problem(
    device: CudaDevice, rng: random.Random, op: str, world: int, most: int
) -> Problem:
    """A problem with sizes up to ``most``, in a dtype that a kernel is built for."""
    sizes = (rng.randint(1, most), aligned(rng, world, most), aligned(rng, world, most))
    dtype = rng.choice([torch.bfloat16, torch.float16] if CASES > 1 else [torch.bfloat16])
    if not device.registry.candidates(
        "ag_gemm" if op == "ag_gemm" else "gemm_rs",
        "bf16" if dtype == torch.bfloat16 else "fp16",
        device.capability,
        GemmProblem(*sizes, world),
    ):
        dtype = torch.bfloat16
    reduce = "sum" if op == "ag_gemm" else rng.choice(["sum", "avg"])
    return Problem(op, sizes[0], (sizes[1],), sizes[2], dtype, reduce=reduce)
