"""Run ranks with a GPU each: check that there are enough, and time calls with the GPU's clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flux.bench.config import ONE_GPU, BenchConfig
from flux.bench.methods import Method
from flux.bench.places.base import Call, Timing
from flux.bench.places.cpu import CpuRanks
from flux.bench.reference import Inputs, Verdict, make_inputs
from flux.transport.device import CudaDevice, Device
from flux.transport.one_gpu import most_ranks

T = TypeVar("T")

TRANSPORTS = ("symm_mem", *ONE_GPU)
SLEEP_CYCLES = 20_000_000  # about 10 ms, in which the host enqueues a call
_ON_ONE = (
    "on one GPU use --transport virtual (all ranks on it: results, no times) or --transport "
    "loopback (one rank on it, its peers' memory behind PCIe)"
)


def reason_too_few_gpus(world: int, gpus: int, ranks_here: int | None) -> str | None:
    """Return an error if some rank of this host has no GPU, None if each has one.

    Args:
        world: number of ranks.
        gpus: CUDA devices that torch sees.
        ranks_here: ranks that torchrun has started on this host; None: torchrun did not start us.
    """
    if gpus == 0:
        return "--backend cuda needs a CUDA device that torch can see; there is none"
    needed = world if ranks_here is None else ranks_here
    if needed <= gpus:
        return None
    return f"{needed} ranks need a GPU each, and torch sees {gpus}"


def reason_unsupported(config: BenchConfig, gpus: int, ranks_here: int | None) -> str | None:
    """Return why this machine cannot run a benchmark on GPUs; None if it can.

    Args:
        config: of the run.
        gpus: CUDA devices that torch sees.
        ranks_here: ranks that torchrun has started on this host; None: torchrun did not start us.
    """
    world, transport = config.problem.world, config.transport
    if transport not in (None, *TRANSPORTS):
        return f"--backend cuda has the transports {', '.join(TRANSPORTS)}, got {transport!r}"
    if config.hosts != "1" and ranks_here is None:
        return "--hosts creates hosts without GPUs: omit it with --backend cuda"
    if transport in ONE_GPU and gpus:
        least = 1 if transport == "virtual" else 2
        if ranks_here is not None:
            return (
                f"--transport {transport} runs all ranks in one process: start it without torchrun"
            )
        if not least <= world <= most_ranks():
            return f"--transport {transport} takes --nproc {least} to {most_ranks()}, got {world}"
        return None
    problem = reason_too_few_gpus(world, gpus, ranks_here)
    return f"{problem}: lower --nproc, or {_ON_ONE}" if problem and gpus else problem


def gpus_here() -> tuple[int, int | None]:
    """Return (CUDA devices that torch sees, ranks that torchrun started here or None).

    Asks the driver for the number, and makes no context.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = os.environ.get("LOCAL_WORLD_SIZE") if "RANK" in os.environ else None
    return gpus, None if here is None else int(here)


def problem_here(config: BenchConfig) -> str | None:
    """Return ``reason_unsupported`` of this process on this machine."""
    return reason_unsupported(config, *gpus_here())


def gpu_of(rank: int) -> int:
    """Return the number of a rank's GPU: torchrun's local rank, else the rank."""
    local = os.environ.get("LOCAL_RANK") if "RANK" in os.environ else None
    return rank if local is None else int(local)


class GpuMachine:
    """A GPU: the device of tensors, and the clock."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return torch.cuda.get_device_name(self.device.index)

    def put(self, inputs: Inputs) -> Inputs:
        """Return the same inputs on the GPU."""
        device, scales = self.device.torch_device, inputs.scales
        scales = {name: scale.to(device) for name, scale in scales.items()}
        return Inputs(inputs.x.to(device), inputs.weight.to(device), **scales)

    def synchronize(self) -> None:
        """Wait until all work on the GPU is done."""
        torch.cuda.synchronize(self.device.torch_device)

    def free_bytes(self) -> int:
        """Return the memory that is still available: free on the device, or cached by torch."""
        device = self.device.torch_device
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    def time(
        self, run: Callable[[], T], line_up: Call = lambda: None, wait: Call = lambda: None
    ) -> tuple[T, float]:
        """Return the result, and ms between start and end on the current stream of an idle GPU.

        A sleep kernel hides enqueue time from the measurement; ``line_up`` is enqueued behind it.
        ``wait`` has a timeout, which waiting for the device has not.
        """
        self.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        line_up()
        begin.record()
        result = run()
        end.record()
        wait()
        self.synchronize()
        return result, begin.elapsed_time(end)


def open_machine(index: int) -> GpuMachine:
    """Return this process's own GPU."""
    torch.cuda.set_device(index)
    return GpuMachine(CudaDevice(queues=None))


def open_shared_machine() -> GpuMachine:
    """Return the current GPU, for all ranks of this process."""
    return GpuMachine(CudaDevice())


class GpuRanks(CpuRanks):
    """One of several processes with a GPU each, in a group of gloo and NCCL.

    GPUs start together behind a collective on their streams.
    """

    def __init__(self, config: BenchConfig, rank: int) -> None:
        super().__init__(config, rank)
        self.machine = open_machine(gpu_of(rank))
        self.device = self.machine.name
        self._together = torch.zeros(1, device=self.machine.device.torch_device)

    def inputs(self, seed: int) -> Inputs:
        """Return fresh inputs on the GPU."""
        return self.machine.put(make_inputs(self.problem, self.rank, seed))

    def free_bytes(self) -> int | None:
        """Return the memory that methods may still use."""
        return self.machine.free_bytes()

    def judge(self, method: Method, got: object, reference: Any) -> Verdict:
        """Compare a result once the GPU has finished it."""
        method.wait()
        self.machine.synchronize()
        return super().judge(method, got, reference)

    def time(self, call: Callable[[], T], wait: Call = lambda: None) -> tuple[T, Timing]:
        """Time a call on the GPU, behind a collective."""
        result, elapsed = self.machine.time(call, lambda: dist.all_reduce(self._together), wait)
        return result, Timing(elapsed)
