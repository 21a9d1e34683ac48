"""Processes whose ops live on emulated devices: one host, or several with an emulated NCCL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from emulated import EmulatedDevice
from flux.transport import nodes, shm, symm_mem
from flux.transport.exchange import Exchange
from flux.transport.placement import Placement
from harness import run_ranks


def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On ranks that are not used again: an emulation changes the process, or joins it to a job."""
    return run_ranks(world, fn, *args, timeout=200.0, fresh=True)


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
    if kernels is None:
        device = EmulatedDevice(library)
    else:
        from ptx_device import PtxDevice  # needs the PTX machine, which only make test builds

        device = PtxDevice(kernels, arch)
    device.identity = f"emulated {rank}"
    symm_mem._map_everywhere = map_shared  # type: ignore[assignment]
    symm_mem.open_symm_mem = lambda exchange: symm_mem.SymmMem(exchange, device)  # type: ignore
    return device


class Emulated:
    """An emulated device and NCCL for the ops of this process, on a host of this number."""

    def __init__(self, rank: int, library: Path, host: int) -> None:
        self.device = EmulatedDevice(library)
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
