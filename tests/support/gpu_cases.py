"""What the tests on a GPU share, which run on the PTX machine too: the device, inputs on it, its
streams and graphs, rank processes, and sizes that kernels take."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from device_fixtures import ARCHS, with_flux_kernels
from emulated import EmulatedDevice
from emulated_cases import OnEmulated
from emulated_processes import emulate
from flux.kernels.legality import GemmProblem
from flux.transport.device import CudaDevice, Device
from harness import more
from ptx_machine.gpu import LIBRARY
from reference import Problem
from virtual_cases import Transferred

CASES = int(os.environ.get("FLUX_TEST_CASES", "12"))
EMULATED_CASES = 1  # of the random ones that a PTX machine runs as each architecture

ON_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
T = TypeVar("T")


def open_gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The current CUDA device, or the PTX machine as one of the architecture in the parameter."""
    if request.param == "cuda":
        yield cuda_device()
        return
    with with_flux_kernels(request, request.param) as device:
        yield device


gpu = pytest.fixture(scope="module", params=[ON_CUDA, *ARCHS], name="gpu")(open_gpu)
ONE_ARCH = ["90a", *more("80")]
"""For tests of the host code, which is the same for all architectures; see ``gpu_of_one_arch``."""


def gpu_of_one_arch() -> Any:
    """The fixture ``gpu`` for a module: the PTX machine as one architecture in ``make test``."""
    return pytest.fixture(scope="module", params=[ON_CUDA, *ONE_ARCH], name="gpu")(open_gpu)


def inputs_on(device: Device) -> Callable[..., Transferred]:
    """A constructor of inputs on that device: see ``Inputs``."""

    def make(*arguments: Any, **options: Any) -> Transferred:
        if isinstance(device, EmulatedDevice):
            return OnEmulated(device, *arguments, **options)
        return OnDevice(*arguments, **options)

    return make


def cases_on(device: Device) -> int:
    """How many random cases a test runs."""
    return of(device, CASES, min(CASES, EMULATED_CASES))


def of(device: Device, on_gpu: T, on_machine: T) -> T:
    """One of two values: a size or a count for a GPU, or a smaller one for the PTX machine."""
    return on_machine if isinstance(device, EmulatedDevice) else on_gpu


def room_for(device: Device, world: int) -> AbstractContextManager[None]:
    """Let the PTX machine have multiprocessors for kernels of ``world`` ranks; a GPU has them."""
    if not isinstance(device, EmulatedDevice):
        return nullcontext()
    from ptx_device import MachineDevice  # needs the machine, which only make test builds

    assert isinstance(device, MachineDevice)
    return device.room_for(world)


def gpu_and_world(
    on_gpu: list[int], on_machine: list[int], archs: Sequence[str] = ONE_ARCH
) -> list[Any]:
    """Parameters of the fixture ``gpu`` and of a world."""
    cuda = [pytest.param("cuda", world, marks=pytest.mark.gpu) for world in on_gpu]
    return [*cuda, *((arch, world) for arch in archs for world in on_machine)]


@contextmanager
def streams_on(
    device: Device, count: int
) -> Iterator[list[Callable[[], AbstractContextManager[Any]]]]:
    """Streams of the caller, which are torch's on a GPU. Each is made current by a call of it."""
    if not isinstance(device, EmulatedDevice):
        yield [partial(torch.cuda.stream, torch.cuda.Stream()) for _ in range(count)]
        return
    streams = [device.driver.create_stream() for _ in range(count)]
    yield [partial(device.on_stream, stream) for stream in streams]
    for stream in streams:
        device.driver.synchronize(stream)
        device.driver.destroy_stream(stream)


@contextmanager
def captured(device: Device, body: Callable[[], T]) -> Iterator[tuple[Callable[[], None], T]]:
    """Capture a graph of what ``body`` puts on streams: its replay, and what ``body`` returned."""
    if not isinstance(device, EmulatedDevice):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = body()
        yield graph.replay, made
        return
    with device.capture() as emulated:
        made = body()
    yield emulated.replay, made
    emulated.close()


@dataclass(frozen=True)
class RankGpus:
    """GPUs of rank processes: CUDA devices in turn, or a PTX machine of each process.

    Attributes:
        kernels, arch: of the PTX machines.
    """

    kernels: Path | None = None
    arch: str = ""

    @contextmanager
    def open(self, rank: int) -> Iterator[Device]:
        """The GPU of this process, which ops are placed on."""
        if self.kernels is None:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            yield CudaDevice(queues=None)
            return
        device = emulate(rank, LIBRARY, self.kernels, self.arch)
        yield device
        device.finish()
        assert not device.error()
        device.close()
        assert device.streams() == 0


@pytest.fixture
def rank_gpus(
    gpu: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> RankGpus:
    """What rank processes have in place of the fixture ``gpu``."""
    # Ranks share a GPU where there are fewer.
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    if not isinstance(gpu, EmulatedDevice):
        return RankGpus()
    number = "".join(map(str, gpu.capability))
    (arch,) = (arch for arch in ARCHS if arch.startswith(number))
    return RankGpus(request.getfixturevalue("ptx_kernels"), arch)


def cuda_device() -> CudaDevice:
    """The current device; skips the test where it, or kernels, are missing."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = CudaDevice()
    if not device.registry.kernels:
        pytest.skip("no kernels are built for these sources: make kernels")
    return device


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
