"""Predict one of the W GEMMs of path = medium on a GPU, which has the rows of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flux.core.problem import Problem
from flux.machine.cluster import DeviceSpec
from flux.select.cycles import UNALIGNED, busiest_depth, bytes_per_k, cycles
from flux.select.hardware import CYCLES_PER_MS, L2_TO_MEMORY, UNHIDDEN

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig


def chunk_gemm_ms(
    problem: Problem,
    device: DeviceSpec,
    kernel: GemmConfig,
    whole: tuple[float, GemmConfig],
    units: int,
) -> float:
    """Return the time of a GEMM of M/W rows with all of the local weight, alone.

    It is the longest of three, and a share of the second longest:

    * The busiest block multiplies, as fast as the busiest block of the whole GEMM. So a last wave
      that is partly filled costs as much as a full one, in every one of the W GEMMs. The rows take
      no less than their share of the whole GEMM, which has the kernel that suits it best.
    * L2 delivers the tiles of all blocks.
    * Memory delivers the weight, W times in a call.

    Args:
        problem: op and sizes of the whole call.
        device: of one rank.
        kernel: of this GEMM.
        whole: time of the whole GEMM, in ms, on all multiprocessors, and its kernel.
        units: multiprocessors that this one has.
    """
    from flux.kernels.legality import GemmProblem

    gemm = GemmProblem.of(problem)
    part = replace(gemm, m=problem.chunk)
    whole_ms, whole_kernel = whole
    depth = busiest_depth(kernel, part, units)
    of_whole = busiest_depth(whole_kernel, gemm, device.units) * _area(whole_kernel)
    speed = device.memory_gbs * 1e6
    from_l2 = depth * bytes_per_k(kernel, part) * units / (L2_TO_MEMORY * speed)
    if kernel.arch == "80" and kernel.alignment_elements * kernel.itemsize < 16:
        from_l2 *= UNALIGNED
    share = max(depth * _area(kernel) / of_whole, part.m / gemm.m)
    busy = max(whole_ms * share, from_l2)
    moved = kernel.itemsize * (part.m + part.n) * part.k + kernel.output_itemsize * part.m * part.n
    memory = moved / speed
    fixup = cycles(kernel, part, units).fixup / CYCLES_PER_MS
    return max(busy, memory) + UNHIDDEN * min(busy, memory) + fixup


def _area(kernel: GemmConfig) -> int:
    return kernel.tile[0] * kernel.tile[1]
