"""Ops on several nodes by NVSHMEM: processes with an emulated device each.

Their GEMMs and the kernels of libflux_nvshmem run on the PTX machine; NVSHMEM is the emulated one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from emulated_nvshmem import load
from flux import Knobs, PeerTimeoutError, Topology
from flux.transport import nvshmem
from flux.transport.virtual import VirtualWorld
from harness import STRESS, fresh_ranks, more, nothing_left_in_shared_memory
from matrix import OPS
from ptx_device import PtxDevice, ptx_device
from reference import Inputs, Problem
from virtual_cases import check_same_bits, checked_calls

BF16 = torch.bfloat16
KNOBS = Knobs(comm_tile_rows=3)
CALLS = 5 * STRESS


def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on fresh ranks: a process stays in its NVSHMEM job."""
    with fresh_ranks(world) as ranks, nothing_left_in_shared_memory():
        return ranks.run(fn, *args, timeout=120.0)


class Emulated:
    """An emulated device and NVSHMEM for the ops of this process, on one host of several nodes."""

    def __init__(
        self, rank: int, world: int, kernels: Path, library: Path, arch: str, lanes: int
    ) -> None:
        os.environ["EMULATED_NVSHMEM_LANES"] = str(lanes)
        self.device = PtxDevice(kernels, arch)
        self.device.identity = f"emulated {rank}"
        self.device.cuda.seed = 1000 * rank + 1
        self.topology = Topology(world // lanes, 1, lanes)
        real = nvshmem.open_nvshmem
        nvshmem.open_nvshmem = lambda exchange, nodes: real(  # type: ignore[assignment]
            exchange, self.device, lambda: load(library), nodes
        )

    def build(self, p: Problem, **options: Any) -> Any:
        places = {"backend": "cuda", "transport": "nvshmem", "topology": self.topology}
        return p.build(**{"tuning": KNOBS, **places, **options})

    def close(self) -> None:
        """Close, and assert that all resources were released."""
        nvshmem.shutdown()
        self.device.check()
        assert not self.device.error()
        self.device.close()
        assert self.device.streams() == 0


def _problem(op: str, world: int) -> tuple[Problem, list[Inputs]]:
    rng = random.Random(6)
    p = Problem(op, 33, (8 * world,), 8 * world, BF16)
    return p, [Inputs(p, rng.randint(1, 33), world, seed=s) for s in range(CALLS)]


def _calls(
    rank: int, world: int, kernels: Path, library: Path, arch: str, lanes: int
) -> dict[str, list[torch.Tensor]]:
    """Back to back, M changing; by op, the results of every call."""
    here = Emulated(rank, world, kernels, library, arch, lanes)
    results = {}
    for op in OPS:
        p, everything = _problem(op, world)
        here.device.set_delay(500)
        with here.build(p) as made:
            assert made._backend.nodes == world // lanes
            assert (made._backend.layout.strips > 0) == (op != "ag_gemm")
            outs = [inputs.call(made, rank) for inputs in everything]
            made.wait()
        for inputs, got in zip(everything, outs, strict=True):
            inputs.check(got, rank, "two_levels")
        results[op] = outs
    here.close()
    return results


@pytest.mark.parametrize(
    ("nodes", "lanes", "arch"),
    [(2, 1, "80"), (2, 2, "90a"), *more((2, 1, "90a"), (2, 2, "80"))],
)
def test_processes_give_the_bits_of_virtual_nodes(
    ptx_kernels: Path, nvshmem_library: Path, nodes: int, lanes: int, arch: str
) -> None:
    """Those exchange sums on their streams: other code, the same sums."""
    world = nodes * lanes
    processes = run(world, _calls, ptx_kernels, nvshmem_library, arch, lanes)
    with ptx_device(ptx_kernels, arch) as device:
        for op in OPS:
            p, everything = _problem(op, world)
            ranks = VirtualWorld(world, device, nodes)
            outs = checked_calls(ranks, p, everything, "two_levels", tuning=KNOBS)
            check_same_bits(outs, zip(*(results[op] for results in processes), strict=True))


def _late(rank: int, world: int, kernels: Path, library: Path, op: str) -> None:
    """The ranks of node 0 call, those of node 1 do not."""
    here = Emulated(rank, world, kernels, library, "90a", 2)
    p = Problem(op, 16, (32,), 32, BF16)
    made = here.build(p, timeout_s=1.0)
    begin = time.monotonic()
    if rank < 2:
        Inputs(p, 16, world, seed=1).call(made, rank)
        message = rf"rank {rank} waited .* for (the sum of node 1|the entry of rank {rank + 2},)"
        gave_up = rf"|rank {1 - rank} gave up"
        with pytest.raises(PeerTimeoutError, match=message + gave_up):
            made.wait()
        made.close()
        assert time.monotonic() - begin < 30
    dist.barrier()
    if rank >= 2:
        # Of the ranks that have called, or of the own node, which has heard of it before.
        with pytest.raises(PeerTimeoutError, match=rf"rank {rank}: rank [0-3] gave up"):
            made.wait()
    made.close()
    with here.build(p, timeout_s=30) as again:
        Inputs(p, 16, world, seed=2).call_and_check(again, rank, "two_levels")
    here.close()


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_a_node_that_does_not_call_is_named(
    ptx_kernels: Path, nvshmem_library: Path, op: str
) -> None:
    run(4, _late, ptx_kernels, nvshmem_library, op)
