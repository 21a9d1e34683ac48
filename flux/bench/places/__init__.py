"""Where the ranks of a benchmark run, how their calls start together, and how they are timed.

CpuRanks             a process per rank, gloo, the wall clock
sparse               the same three for ops of experts and heads: but for loopback, places below
gpu.GpuRanks         a process and a GPU per rank, NCCL, the GPU's clock
virtual.Ranks        all ranks on one GPU in one process: for results, not for times
loopback.RealRank    one rank on the GPU, simulated peers with memory on the host
"""

from __future__ import annotations

from flux.bench.config import BenchConfig
from flux.bench.places.base import BenchPlace
from flux.bench.places.cpu import CpuRanks


def open_place(config: BenchConfig, rank: int) -> BenchPlace:
    """Return the place of a run with this configuration. Collective."""
    if config.problem.sparse:
        from flux.bench.places import sparse

        if config.backend != "cuda":
            return sparse.SparseRanks(config, rank)
        one = config.transport == "virtual"
        return (sparse.SparseOnOneGpu if one else sparse.SparseGpuRanks)(config, rank)
    if config.backend != "cuda":
        return CpuRanks(config, rank)
    from flux.bench.places import gpu, loopback, virtual

    if config.transport == "virtual":
        return virtual.Ranks(config, rank)
    if config.transport == "loopback":
        return loopback.RealRank(config, rank)
    return gpu.GpuRanks(config, rank)
