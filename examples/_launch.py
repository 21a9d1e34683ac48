"""Ranks for the examples, by torch.distributed alone: torchrun's, or two of our own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Main = Callable[[int, int], None]


def run(main: Main, world: int = 2) -> None:
    """Call ``main(rank, world)`` on every rank of a gloo group; ``main`` is found by its name."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # torchrun puts rank and address into the environment
        _finish(main)
        return
    # They meet in a folder that only this user can enter. A port would be open to all users.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, args=(main, world, f"{folder}/store"), nprocs=world)


def _spawned(rank: int, main: Main, world: int, meeting: str) -> None:
    # By default every rank would start as many threads as there are cores, and get in each
    # other's way. torchrun does the same through OMP_NUM_THREADS.
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    _finish(main)


def _finish(main: Main) -> None:
    try:
        main(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def all_rows(own: torch.Tensor, m: int) -> torch.Tensor:
    """Every rank's rows one below the other, [m, columns], by torch.distributed alone.

    Its collectives want equal shards, so short ones are padded and the padding is cut off.
    """
    world = dist.get_world_size()
    chunk = -(-m // world)
    padded = torch.zeros(chunk, own.shape[1], dtype=own.dtype)
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[:m]


def check_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest error of ``y`` as ``x @ weight.T`` on any rank; more than rounding explains raises.

    A sum of K products is off by at most K roundings, each relative to the sum of magnitudes.
    """
    expected = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    error = (y.double() - expected).abs()
    unit = torch.finfo(y.dtype).eps / 2
    assert (error <= weight.shape[1] * unit * magnitude).all(), f"off by {error.max():.2e}"
    worst = error.max() if error.numel() else torch.tensor(0.0, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)
