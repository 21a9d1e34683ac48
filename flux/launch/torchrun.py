"""Join the ranks that torchrun has started: their number, their group, their hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from flux.machine.host import host_identity

T = TypeVar("T")


def torchrun_world() -> int | None:
    """Return the world size that torchrun set; None if it did not start this process."""
    try:
        return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    except KeyError:
        return None


def torchrun_rank() -> int:
    """Return the rank that torchrun set."""
    return int(os.environ["RANK"])


@contextmanager
def torchrun_group(timeout_s: float, backends: str = "gloo") -> Iterator[None]:
    """Make torchrun's ranks the default process group, and leave it in the end. Collective.

    Args:
        timeout_s: limit on every rendezvous and collective.
        backends: of the group.
    """
    dist.init_process_group(backends, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()


def all_gather(value: T) -> list[T]:
    """Return every rank's value. Collective in the default group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def hosts_of_ranks() -> list[str]:
    """Return the host of each rank. Collective in the default group."""
    return all_gather(host_identity())
