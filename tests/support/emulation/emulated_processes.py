"""Processes whose ops live on emulated devices: one host, or several with an emulated NCCL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from emulated import EmulatedDevice
from flux.backends.cuda.backend import CudaBackend
from flux.ops import executor
from flux.transport import nodes, shm, symm_mem
from flux.transport.exchange import Exchange
from flux.transport.placement import Placement
from harness import run_ranks


def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On ranks that are not used again: an emulation changes the process, or joins it to a job."""
    return run_ranks(world, fn, *args, timeout=200.0, fresh=True)


def ptx_device_of(kernels: Path, arch: str = "80") -> EmulatedDevice:
    """Return a device with kernels of flux."""
    from ptx_device import PtxDevice  # needs the PTX machine, which only make test builds

    return PtxDevice(kernels, arch)


def map_shared(
    exchange: Exchange, device: EmulatedDevice, size: int
) -> tuple[Any, list[torch.Tensor]]:
    """Memory of the host in place of torch's."""
    memory = shm.allocate(exchange, Placement.together(exchange.world), 0, size, "device")
    device.know(*memory.data)
    return memory, [data[:size] for data in memory.data]


def emulate(
    rank: int, library: Path, kernels: Path | None = None, arch: str = "80"
) -> EmulatedDevice:
    """Place ops of this process on an emulated device; ``kernels``: with these, of flux."""
    device = EmulatedDevice(library) if kernels is None else ptx_device_of(kernels, arch)
    device.identity = f"emulated {rank}"
    symm_mem._map_everywhere = map_shared  # type: ignore[assignment]
    symm_mem.open_symm_mem = lambda exchange: symm_mem.SymmMem(exchange, device)  # type: ignore
    return device


class Emulated:
    """An emulated device and NCCL for the ops of this process, on a host of this number.

    ``kernels``: of flux, for sm_80; ``library`` is then the emulated GPU's own.
    """

    def __init__(self, rank: int, library: Path, host: int, kernels: Path | None = None) -> None:
        self.device = EmulatedDevice(library) if kernels is None else ptx_device_of(kernels)
        self.device.identity = f"emulated {rank}"
        self.nccl = ctypes.CDLL(str(library))
        os.environ["FLUX_HOST"] = f"host {host}"
        symm_mem._map_everywhere = map_shared  # type: ignore[assignment]
        nodes.NCCL = str(library)
        nodes.open_nodes = lambda exchange, count, timeout_s: nodes.Nodes(  # type: ignore
            exchange, self.device, count, timeout_s
        )

    def close(self) -> None:
        """Close, and assert that all resources were released."""
        self.device.set_delay(0)
        self.device.close()
        assert self.device.streams() == 0
        assert self.nccl.emulated_nccl_alive() == 0


def apart_from_cpus(
    rank: int,
    world: int,
    library: Path,
    kernels: Path | None,
    lanes: int,
    train: Callable[..., list[torch.Tensor]],
    *options: object,
) -> list[float]:
    """How far results and gradients on emulated GPUs, ``lanes`` of a host, are from those on CPUs.

    torch's own kernels run at once there, not on streams, so each call is waited for.
    """
    right = train(rank, world, *options)
    hosts = Emulated(rank, library, rank // lanes, kernels) if lanes < world else None
    device = hosts.device if hosts is not None else emulate(rank, library, kernels)
    call = CudaBackend.run

    def run_to_end(self: Any, *args: Any, hooks: Any = None) -> Any:
        outs = call(self, *args)
        device.finish()
        if hooks is not None:
            hooks.both()
        return outs

    CudaBackend.run = run_to_end  # type: ignore[method-assign]
    executor.default_backend = lambda exchange: "cuda"
    got = train(rank, world, *options)
    assert not device.error()
    device.close() if hosts is None else hosts.close()
    norms = [
        (float((a - b).float().norm()), float(b.float().norm()))
        for a, b in zip(got, right, strict=True)
    ]
    return [away / (norm or 1.0) for away, norm in norms]
