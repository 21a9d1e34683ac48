"""What the tests on a GPU share: the device, inputs on it, and sizes that kernels take."""

from __future__ import annotations

import os
import random

import pytest
import torch

from flux.kernels.legality import GemmProblem
from flux.transport.device import CudaDevice
from reference import Problem
from virtual_cases import Transferred

CASES = int(os.environ.get("FLUX_TEST_CASES", "12"))


def cuda_device() -> CudaDevice:
    """The current device; skips the test where it, or kernels, are missing."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = CudaDevice()
    if not found.registry.kernels:
        pytest.skip("no kernels are built for these sources: make kernels")
    return found


class OnDevice(Transferred):
    """Inputs on the GPU."""

    def transfer(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()


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
