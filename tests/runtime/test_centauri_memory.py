"""Memory that ranks of a host share: sums, reuse while another rank still reads, and its end."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flux.runtime.centauri import memory as centauri_memory
from flux.runtime.centauri.memory import HostMemory, add_up
from flux.runtime.centauri.module import RuntimePlan, parallelize, sharded
from flux.transport import shm
from flux.transport.exchange import Exchange, resolve_group
from harness import run_ranks

HOSTS = 3  # columns that a rank sums for its twins; no other host is there


def meet() -> None:
    dist.barrier()


def parts_of(rank: int, world: int, share: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(HOSTS, world, share, generator=generator, dtype=torch.float64).to(dtype)


def adds(rank: int, world: int, late: int) -> None:
    """Many pieces through two small slots, with a rank that reads late."""
    centauri_memory.SLOT_BYTES = 1536
    memory = HostMemory(Exchange(resolve_group(None)), [64, 0, 40])

    def slowly(*given: Any) -> None:
        time.sleep(0.004 * (rank == late))
        add_up(*given)

    centauri_memory.add_up = slowly
    try:
        for dtype, share in ((torch.float64, 100), (torch.float32, 1), (torch.bfloat16, 301)):
            found = memory.sum_columns(parts_of(rank, world, share, dtype), meet)
            every = [parts_of(one, world, share, dtype)[:, rank] for one in range(world)]
            wanted = every[0].double()
            for one in every[1:]:
                wanted = wanted + one.double()
            torch.testing.assert_close(
                found, wanted.to(dtype), rtol=1e-2 * (share > 300), atol=1e-6
            )
            assert found.shape == (HOSTS, share)
        # Regions are the same pages on all ranks, do not overlap, and have storages of their own.
        first, empty, last = (memory.region(i, torch.float32) for i in range(3))
        assert (first.numel(), empty.numel(), last.numel()) == (16, 0, 10)
        assert first.untyped_storage()._cdata != last.untyped_storage()._cdata
        if rank == 0:
            first.fill_(3.0)
            last.fill_(4.0)
        meet()
        assert first.eq(3.0).all() and last.eq(4.0).all()
    finally:
        centauri_memory.add_up = add_up
        centauri_memory.SLOT_BYTES = 4 << 20


@pytest.mark.parametrize(("world", "late"), [(2, 0), (3, 1)])
def test_columns_are_added_while_a_rank_reads_late(world: int, late: int) -> None:
    run_ranks(world, adds, late)


class Scaled(nn.Module):
    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self.before = nn.Parameter(torch.ones(6, 4)), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        return x * self.weight.sum()


def reads_late(rank: int, world: int, folder: str) -> None:
    """Weights change when a fast rank is a pass ahead of a slow one, which must not see them."""

    def until_rank_0_is_ahead() -> None:
        deadline = time.monotonic() + 20.0
        while rank == 1 and not Path(folder, str(value + 1)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2 * rank)

    model = nn.Sequential(*(Scaled(until_rank_0_is_ahead) for _ in range(3)))
    plan = RuntimePlan(shared_memory=True, prefetch=3, timeout_s=30.0)
    parallelize(model, init_device_mesh("cpu", (1, world)), plan)
    assert sharded(model).routes.memory is not None
    for value in (1.0, 2.0, 3.0):
        if rank == 0:
            Path(folder, str(value)).touch()
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().fill_(value)
            assert float(model(torch.ones(()))) == (24.0 * value) ** 3, value
    if rank == 0:
        Path(folder, "4.0").touch()
    sharded(model).close()


def test_a_fast_rank_does_not_change_weights_that_another_reads(tmp_path: Path) -> None:
    run_ranks(2, reads_late, str(tmp_path))


def several_hosts(rank: int, world: int) -> None:
    """A row of the mesh on two hosts cannot share; that is an error, or a warning."""
    os.environ["FLUX_HOST"] = f"host {rank}"
    mesh = init_device_mesh("cpu", (world,))
    try:
        with pytest.raises(ValueError, match="shared_memory: ranks of one row of the mesh are on"):
            parallelize(nn.Linear(3, 4), mesh, RuntimePlan(shared_memory=True))
        with pytest.warns(UserWarning, match="no shared memory, so sockets carry all"):
            model = parallelize(nn.Linear(3, 4), mesh)
    finally:
        del os.environ["FLUX_HOST"]
    model(torch.ones(2, 3)).sum().backward()
    sharded(model).close()
    # Too little room: the same, and on all ranks.
    (centauri_memory.shm.create, kept) = (full, centauri_memory.shm.create)
    try:
        with pytest.raises(OSError, match="No space left"):
            parallelize(nn.Linear(3, 4), mesh, RuntimePlan(shared_memory=True))
    finally:
        centauri_memory.shm.create = kept
    dist.barrier()


def full(nbytes: int) -> shm.Segment:
    if dist.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return shm.Segment(0, os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), 0, 0)


def test_ranks_that_cannot_share_are_told() -> None:
    run_ranks(2, several_hosts)


def nothing_stays(rank: int, world: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    gc.collect()
    before = mapped()  # this process may have run other tests
    mesh = init_device_mesh("cpu", (1, world))
    for _ in range(3):
        model = parallelize(nn.Linear(30, 40), mesh)
        model(torch.ones(2, 30)).sum().backward()
        assert mapped() >= before + world
        sharded(model).close()
        del model
        gc.collect()  # hooks refer to the model
        counts.append((mapped(), descriptors()))
    assert counts[1:] == [(before, counts[1][1])] * 2, (before, counts)


def test_nothing_stays_in_shared_memory() -> None:
    names = set(os.listdir("/dev/shm"))
    run_ranks(2, nothing_stays)
    assert set(os.listdir("/dev/shm")) - names == set()
