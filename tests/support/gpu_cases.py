"""What the tests on a GPU share: the device, inputs on it, and sizes that kernels take."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from device_fixtures import ARCHS, with_flux_kernels
from emulated import EmulatedDevice
from emulated_cases import OnEmulated
from flux.kernels.legality import GemmProblem
from flux.transport.device import CudaDevice, Device
from reference import Problem
from virtual_cases import Transferred

CASES = int(os.environ.get("FLUX_TEST_CASES", "12"))
EMULATED_CASES = 1  # of the random ones that a PTX machine runs as each architecture


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=pytest.mark.gpu), *ARCHS])
def gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The current CUDA device, and the PTX machine as one of each architecture."""
    if request.param == "cuda":
        yield cuda_device()
        return
    with with_flux_kernels(request, request.param) as device:
        yield device


def finish(device: Device) -> None:
    """Wait until all results may be read."""
    if isinstance(device, EmulatedDevice):
        device.finish()
    else:
        torch.cuda.synchronize()


def inputs_on(device: Device) -> Callable[..., Transferred]:
    """A constructor of inputs on that device: see ``Inputs``."""

    def make(*arguments: Any, **options: Any) -> Transferred:
        if isinstance(device, EmulatedDevice):
            return OnEmulated(device, *arguments, **options)
        return OnDevice(*arguments, **options)

    return make


def cases_on(device: Device) -> int:
    """How many random cases a test runs."""
    return min(CASES, EMULATED_CASES) if isinstance(device, EmulatedDevice) else CASES


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


def random_problem(device: Device, rng: random.Random, op: str, world: int, most: int) -> Problem:
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
