"""Peers on CPU ranks: the adapters as they are, over stand-ins for the libraries that they adapt.

Only the GPU is taken out: what the adapters call has the names and parameters of the real ones, and
computes the right result with torch.distributed, or deliberately a wrong one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from peers.byte_flux import ByteFlux, WorkerMethod
from peers.cublasmp import CublasMp
from peers.transformer_engine import TransformerEngine

from flux.bench.config import BenchConfig
from flux.bench.methods import Method, UnfusedMethod
from flux.bench.peers.async_tp import AsyncTp
from flux.bench.peers.base import Guarded

calls: list[Any] = []


def gathered(x: torch.Tensor) -> torch.Tensor:
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards)


def scattered(partial_result: torch.Tensor) -> torch.Tensor:
    total = partial_result.float()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()].to(partial_result.dtype)


# -- PyTorch: its own ops, with its own fallback for what is not on GPUs ---------------------------


def fake_symm_mem(spoil: float = 0.0) -> None:
    """Give torch's async-TP ops a kernel for CPUs: schema and dispatcher are the real ones."""
    from torch.distributed import _symmetric_memory

    if "symm_mem" in _libraries:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    _libraries["symm_mem"] = library

    def scatter(*arguments: Any) -> torch.Tensor:
        return _symmetric_memory._fused_matmul_reduce_scatter_fallback(*arguments) + spoil

    gather = _symmetric_memory._fused_all_gather_matmul_fallback
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")


_libraries: dict[str, Any] = {}


# -- TransformerEngine -----------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """te.Linear, as far as the adapter uses it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert calls[-1][0] == "initialize_ub", "userbuffers come first"
        assert sequence_parallel and not bias and tp_size == dist.get_world_size(tp_group)
        self.column = parallel_mode == "column"
        assert (ub_overlap_ag, ub_overlap_rs) == (self.column, not self.column)
        assert ub_name == ("fc1" if self.column else "fc2")
        shape = (out_features // tp_size, in_features)
        if not self.column:
            shape = (out_features, in_features // tp_size)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.column:
            return gathered(x) @ self.weight.t()
        return scattered(x @ self.weight.t())


def fake_te() -> None:
    """Modules with the names of TransformerEngine's."""
    package = types.ModuleType("transformer_engine")
    package.__version__ = "2.20.2"  # type: ignore[attr-defined]
    te: Any = types.ModuleType("transformer_engine.pytorch")
    te.Linear = Linear
    te.UserBufferQuantizationMode = types.SimpleNamespace(NONE="none", FP8="fp8")
    te.initialize_ub = lambda *a, **options: calls.append(("initialize_ub", a, options))
    te.destroy_ub = lambda: calls.append(("destroy_ub",))
    native: Any = types.ModuleType("transformer_engine_torch")
    native.device_supports_multicast = lambda: True
    sys.modules |= {
        "transformer_engine": package,
        "transformer_engine.pytorch": te,
        "transformer_engine_torch": native,
    }


# -- nvmath: matrices by columns, distributed by rows or columns ----------------------------------


class Matmul:
    """nvmath.distributed.linalg.advanced.Matmul: D = A^T B, each operand one rank's part."""

    def __init__(self, a: Any, b: Any, /, *, distributions: Any, qualifiers: Any) -> None:
        for operand in (a, b):
            assert operand.stride(0) == 1, "operands are stored by columns"
        assert qualifiers[0]["is_transpose"] and not qualifiers[1]["is_transpose"]
        self.a, self.b, self.grids = a, b, [distribution.grid for distribution in distributions]
        self.epilog: Any = "not planned"

    def plan(self, *, epilog: Any = None) -> None:
        self.epilog = epilog

    def execute(self) -> torch.Tensor:
        world = dist.get_world_size()
        by_rows, by_columns = (world, 1), (1, world)
        if self.grids == [by_columns, by_columns, by_rows]:  # AllGather + GEMM
            assert self.epilog is None
            result = gathered(self.b.t().contiguous()) @ self.a
        else:
            assert self.grids == [by_rows, by_rows, by_columns]
            partial_result = self.b.t() @ self.a
            if self.epilog == "allreduce":
                dist.all_reduce(partial_result)
                result = partial_result
            else:
                assert self.epilog is None
                result = scattered(partial_result)
        return result.t()  # by columns, as all matrices

    def free(self) -> None:
        calls.append(("free",))


def fake_nvmath() -> None:
    """Modules with the names of nvmath's."""
    names = [
        "nvmath",
        "nvmath.distributed",
        "nvmath.distributed.process_group",
        "nvmath.distributed.distribution",
        "nvmath.distributed.linalg",
        "nvmath.distributed.linalg.advanced",
        "nvmath.bindings",
        "nvmath.bindings.cublasMp",
    ]
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    sys.modules |= modules
    modules["nvmath"].__version__ = "1.0.0"
    modules["nvmath.bindings.cublasMp"].get_version = lambda: 1000
    distributed = modules["nvmath.distributed"]
    distributed.initialize = lambda device, group, backends: calls.append(("initialize", backends))
    distributed.finalize = lambda: calls.append(("finalize",))
    groups = modules["nvmath.distributed.process_group"]
    groups.TorchProcessGroup = lambda *, device_id: device_id
    layouts = modules["nvmath.distributed.distribution"]
    layouts.ProcessGrid = lambda *, shape: shape
    layouts.BlockNonCyclic = lambda grid: types.SimpleNamespace(grid=grid)
    advanced = modules["nvmath.distributed.linalg.advanced"]
    advanced.Matmul = Matmul
    advanced.MatmulEpilog = types.SimpleNamespace(ALLREDUCE="allreduce")
    advanced.matrix_qualifiers_dtype = numpy.dtype([("is_transpose", "?"), ("is_conjugate", "?")])


# -- factories that ranks import -------------------------------------------------------------------


class CpuByteFlux(ByteFlux):
    """Its workers compute on CPUs."""

    def make(self, config: BenchConfig, rank: int) -> Method:
        return WorkerMethod(config, rank, self.python, "cpu")


FAKES: dict[str, tuple[Any, Callable[[], None]]] = {
    "async_tp": (AsyncTp(), fake_symm_mem),
    "wrong_async_tp": (AsyncTp(), partial(fake_symm_mem, 0.25)),
    "te_userbuffers": (TransformerEngine(), fake_te),
    "cublasmp": (CublasMp(), fake_nvmath),
}


def beside_unfused(config: BenchConfig, rank: int, name: str, python: str = "") -> list[Method]:
    """The unfused path and a peer; ``python`` is byte-flux's."""
    peer: Any = CpuByteFlux(python)
    if name in FAKES:
        peer, fake = FAKES[name]
        fake()
    return [UnfusedMethod(config.problem, rank), Guarded(peer, config, rank)]


class Stub:
    """A peer that is the unfused path under another name; `fault` is what becomes of rank 1."""

    about = "the tests'"

    def __init__(self, name: str = "stub", fault: str = "") -> None:
        self.name, self.fault = name, fault

    def available(self) -> str | None:
        return None

    def supports(self, config: BenchConfig) -> str | None:
        return "has no shape with an odd M" if config.problem.m % 2 else None

    def make(self, config: BenchConfig, rank: int) -> Method:
        method: Any = UnfusedMethod(config.problem, rank)
        method.name = self.name
        if self.fault == "kill" and rank == 1:
            import os

            os._exit(9)
        if self.fault == "raise":
            raise RuntimeError("the injected fault")
        return method  # type: ignore[no-any-return]
