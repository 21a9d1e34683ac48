"""What tests of the emulated device's rules share: launches of its kernels, and inputs that are
transferred to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from emulated import EmulatedDevice
from flux import _C
from reference import Problem
from virtual_cases import Transferred

BF16 = torch.bfloat16
GUARD = 128  # rows, kGuardRows of csrc/core/scatter.h


class OnEmulated(Transferred):
    """Inputs whose transfers wait for the current stream, as pageable copies to a GPU do."""

    def __init__(self, device: EmulatedDevice, problem: Problem, *arguments: Any, **options: Any):
        self.device = device
        super().__init__(problem, *arguments, **options)

    def transfer(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.upload(tensor)


class Launches:
    """Kernels of an emulated device with arguments of their own, all of whose memory is kept."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.kept: list[Any] = []
        self.status = self.words(_C.STATUS_WORDS, torch.int64)
        self.report = self.words(_C.STATUS_WORDS, torch.int64)

    def words(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros."""
        self.kept.append(torch.zeros(count, dtype=dtype))
        return self.kept[-1]

    def kernel(self, name: str, prepared: bool = True) -> Any:
        """``flux_emulated_{name}``."""
        built = self.device.registry.kernels[f"flux_emulated_{name}"]
        kernel = _C.Kernel(str(built.library), built.symbol)
        if prepared:
            kernel.prepare(0)
        return kernel

    def sync(self, timeout_s: float) -> Any:
        """Of call 1, with status and report."""
        sync = _C.GemmArgs().sync
        sync.epoch, sync.timeout_ns = 1, int(timeout_s * 1e9)
        sync.status, sync.report = self.status.data_ptr(), self.report.data_ptr()
        return sync

    def gemm(
        self, m: int, n: int, *, world: int = 1, sm_count: int = 0, timeout_s: float = 10.0
    ) -> Any:
        """Arguments of a product of ones, with K = 1."""
        args = _C.GemmArgs()
        ones = torch.ones(max(m, n), dtype=BF16)
        out = torch.zeros(m, n, dtype=BF16)
        self.kept += [args, ones, out]
        args.m, args.n, args.k, args.alpha = m, n, 1, 1.0
        args.a = args.b = ones.data_ptr()
        args.lda = args.ldb = 1
        args.d, args.ldd = out.data_ptr(), n
        order = args.order
        order.world, order.nodes, order.domains, order.lanes = world, 1, 1, world
        order.comm_tile_rows = m
        args.sync, args.sm_count = self.sync(timeout_s), sm_count
        return args

    def spin(self, stream: int, blocks: int, timeout_s: float = 10.0) -> torch.Tensor:
        """An AllGather GEMM of as many blocks, all of which wait for the word returned."""
        args = self.gemm(4 * blocks, 8, timeout_s=timeout_s)
        signal = self.words(1)
        args.signals = signal.data_ptr()
        self.kernel("ag_gemm_nk").launch(args, stream)
        return signal

    def scatter(
        self, m: int, n: int, world: int, guard: int, stream: int = 0
    ) -> list[torch.Tensor]:
        """A GEMM + ReduceScatter of rank 0; each owner's guard rows and slot."""
        args = self.gemm(m, n, world=world)
        rows = -(-m // world)
        slots = [torch.zeros(GUARD + rows, n, dtype=BF16) for _ in range(world)]
        flags = [self.words(1000) for _ in range(world)]
        args.set_slots([slot[GUARD:].data_ptr() for slot in slots])
        args.set_flags([flag.data_ptr() for flag in flags])
        args.slot_ld, args.guard_rows = n, guard
        self.kept += slots
        self.kernel("gemm_rs_nk").launch(args, stream)
        return slots

    def reduction(
        self, rows: int, *, flags: torch.Tensor | None = None, blocks: int = 0, early: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """Arguments of a sum of ones over one rank, 8 columns wide, and its result."""
        args = _C.ReduceArgs()
        ones, out = torch.ones(rows, 8, dtype=BF16), torch.zeros(rows, 8, dtype=BF16)
        self.kept += [args, ones, out]
        args.rows = args.m = rows
        args.n, args.tile_m, args.tile_n, args.world = 8, 4, 8, 1
        args.set_slots([ones.data_ptr()])
        args.set_outs([out.data_ptr()])
        args.slot_ld = args.out_ld = 8
        args.scale, args.source_count = 1.0, 1
        args.flags = 0 if flags is None else flags.data_ptr()
        args.most_blocks, args.early, args.sync = blocks, int(early), self.sync(10.0)
        return args, out


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return whether the condition becomes true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def never(condition: Callable[[], bool], seconds: float = 0.05) -> bool:
    """Return whether the condition stays false for this time."""
    return not eventually(condition, seconds)
