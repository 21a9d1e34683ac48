"""Candidates on emulated GPUs, for tests of the tuner. Rank processes get the emulation with the
job that they are started with: it comes wherever a ``Maker`` is unpickled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import bench_gpus
from emulated import EmulatedDevice, EmulatedRegistry
from emulated_processes import emulate
from flux.bench.config import BenchConfig
from flux.bench.methods import Method
from flux.bench.places import gpu
from flux.kernels.config import GemmConfig
from flux.kernels.registry import BuiltKernel
from flux.machine.cluster import load_cluster
from flux.select.space import Candidate
from flux.transport.placement import RankPlace
from flux.tune import kernels, machine
from flux.tune.worker import make_method

STAGES = (2, 3, 4, 5)
MISSING = 5  # the number of stages of kernels that are "compiled", and not there all the same


def config_of(op: str, stages: int, scaling: str = "none") -> GemmConfig:
    """A kernel of the tests' space; with scaling of float8."""
    kind = "ag_gemm" if op == "ag_gemm" else "gemm_rs"
    config = GemmConfig(kind, "90a", "bf16", (64, 64, 64), "pingpong", stages=stages)
    if scaling == "none":
        return config
    return replace(config, dtype="e4m3", tile=(64, 64, 128), scaling=scaling, promoted=True)


def open_gpu(library: Path, of_flux: Path | None = None, arch: str = "80") -> EmulatedDevice:
    """An emulated GPU of this process, for ops and for the tuner; with the kernels of the space, or
    with those of flux for ``arch`` in this directory."""
    device = emulate(os.getpid(), library, of_flux, arch)
    gpu.open_machine = lambda index: bench_gpus.EmulatedMachine(device)  # type: ignore
    if of_flux is not None:
        return device
    there = dict(device.registry.kernels)
    for kernel in list(there.values()):
        plain = (kernel.config.weight, kernel.config.activation, kernel.config.reduce)
        if plain != ("nk", "none", "local"):
            continue
        for stages in STAGES:
            if stages != MISSING:
                config = config_of(kernel.config.op, stages, kernel.config.scaling)
                there[config.name] = BuiltKernel(config, library, kernel.symbol, kernel.usage)
    device.registry = EmulatedRegistry((), there, (), (), ())
    return device


def pretend(put: Callable[[Any, str, Any], object], missing: Sequence[str] = ()) -> None:
    """Two GPUs, as far as supervisors can see, and all kernels built but those that are missing;
    ``put`` is setattr, or undoes it later."""
    sight = (load_cluster("flux-h800"), RankPlace("here"))
    failed = dict.fromkeys(missing, "nvcc failed")
    put(machine, "look", lambda backend, gpus, threads: [sight] * len(gpus))
    put(gpu, "gpus_here", lambda: (2, None))
    put(BenchConfig, "group", "gloo")
    put(kernels, "build_kernels", lambda configs, root: failed)


@dataclass
class Maker:
    """Builds candidates as the tuner does, with a fault in some.

    Attributes:
        library: of the emulator.
        fault: what is wrong with candidates of 3 stages.
        nap_ms: by stages, what calls take beside their work.
        of_flux, arch: see ``open_gpu``.
        others_ms: of the fixed candidates, far apart: other programs may take the cores meanwhile.
    """

    library: Path
    fault: str = ""
    nap_ms: tuple[tuple[int, float], ...] = ((2, 25.0), (3, 25.0), (4, 0.0))
    of_flux: Path | None = None
    others_ms: float = 50.0
    arch: str = "80"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        open_gpu(self.library, self.of_flux, self.arch)

    def __call__(self, config: BenchConfig, candidate: Candidate, rank: int) -> Method:
        method = make_method(config, candidate, rank)
        stages = 0 if candidate.kernel is None else candidate.kernel.stages
        if candidate.name in ("unfused", "medium", "default"):
            return Slow(method, self.others_ms)
        if stages == 3 and self.fault:
            return FAULTS[self.fault](method, rank)
        return Slow(method, dict(self.nap_ms)[stages])


class Slow:
    """A method followed by a sleep, so that the order of candidates is known."""

    def __init__(self, method: Method, nap_ms: float) -> None:
        self.method, self.nap_s = method, nap_ms * 1e-3
        self.name, self.knobs = method.name, method.knobs
        self.comm_only, self.wait, self.close = method.comm_only, method.wait, method.close

    def __call__(self, inputs: Any) -> Any:
        result = self.method(inputs)
        time.sleep(self.nap_s)
        return result


class Fault(Slow):
    """A fault on rank 1, from the second call on."""

    def __init__(self, method: Method, rank: int) -> None:
        super().__init__(method, 0.0)
        self.rank, self.calls = rank, 0

    def __call__(self, inputs: Any) -> Any:
        self.calls += 1
        if self.rank == 1 and self.calls > 1:
            return self.fail(inputs)
        return self.method(inputs)

    def fail(self, inputs: Any) -> Any:
        raise NotImplementedError


class Wrong(Fault):
    def fail(self, inputs: Any) -> Any:
        result = self.method(inputs)
        self.method.wait()
        result[0, 0] += 1
        return result


class Stale(Fault):
    """Leaves what was there before: the last round's result, or what a poisoned allocation has."""

    before: Any = None

    def __call__(self, inputs: Any) -> Any:
        result = self.method(inputs)
        if self.before is None:
            self.method.wait()
            self.before = result.clone()
        return self.before if self.rank == 1 else result


class Hangs(Fault):
    """Hang on one rank; its peers wait in their kernels."""

    def fail(self, inputs: Any) -> Any:
        return torch.empty(1)


_sticky: list[str] = []


class Faults(Fault):
    """As an illegal address: this call fails, and all that its process asks of the GPU later."""

    def fail(self, inputs: Any) -> Any:
        _sticky.append("CUDA error: an illegal memory access was encountered")
        bench_gpus.EmulatedMachine.synchronize = _stuck  # type: ignore[method-assign]
        _stuck(None)


def _stuck(machine: object) -> None:
    raise RuntimeError(_sticky[0])


class Dies(Fault):
    def fail(self, inputs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)


FAULTS: dict[str, type[Fault]] = {
    "wrong": Wrong,
    "stale": Stale,
    "hangs": Hangs,
    "faults": Faults,
    "dies": Dies,
}


@dataclass
class Counting(Maker):
    """The GPU has memory for a few candidates: each takes a part of it while it is open."""

    most: int = 3
    error: str = "more than there is room for"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.open = 0
        bench_gpus.EmulatedMachine.free_bytes = lambda machine: self.free()  # type: ignore

    def free(self) -> int:
        """Bytes; a result of the test's problem and what judging takes are far below 1 MB."""
        return ((self.most - self.open) << 30) + (1 << 20)

    def __call__(self, config: BenchConfig, candidate: Candidate, rank: int) -> Method:
        method = Slow(make_method(config, candidate, rank), 0.0)
        self.open += 1
        if self.open > self.most:
            raise RuntimeError(self.error)

        def close(close: Any = method.close) -> None:
            close()
            self.open -= 1

        method.close = close
        return method


@dataclass
class Greedy(Counting):
    """As Counting, but the driver reports all memory as free."""

    error: str = "CUDA out of memory. Tried to allocate 1024 MiB"

    def free(self) -> int:
        return 1 << 40
