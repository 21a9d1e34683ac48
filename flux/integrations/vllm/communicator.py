"""vLLM's communicator for CPUs, with Flux where vLLM's own has no shared memory.

vLLM's own uses shared memory for groups of one host. Where ranks are on several hosts it takes
blocking collectives of gloo for all of them, which are replaced: ranks of a host meet in shared
memory, and each byte travels once between hosts. The other collectives stay vLLM's.
"""

from __future__ import annotations

import logging
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from vllm.distributed.device_communicators.cpu_communicator import (
    CpuCommunicator,
    _CPUSHMDistributed,
)

from flux.core.env import LAYER_TIMEOUT_S, VLLM_CHECK
from flux.core.errors import PeerTimeoutError
from flux.integrations.vllm.check import compare_equal, compare_sum
from flux.integrations.vllm.watch import watch_host, watch_hosts
from flux.ops.collectives import SUMMED, Collectives
from flux.ops.transforms import define

logger = logging.getLogger("vllm.flux")
T = TypeVar("T")

_communicators: weakref.WeakValueDictionary[str, FluxCommunicator] = weakref.WeakValueDictionary()


class FluxCommunicator(CpuCommunicator):  # type: ignore[misc]  # vLLM has no types here
    """The communicator of one group of ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replaced = self.world_size > 1 and self.dist_module is torch.distributed
        if isinstance(self.dist_module, _CPUSHMDistributed):
            # All ranks have joined it: without its name a kill leaves no shared memory behind.
            segment = Path("/dev/shm") / f"{self.dist_module.group_name}_{self.rank}"
            segment.unlink(missing_ok=True)
            watch_host(self.device_group, self.unique_name)
        elif self.replaced:
            watch_hosts(self.cpu_group, self.unique_name)
        self._check = VLLM_CHECK.get()
        self._collectives: Collectives | None = None
        _communicators[self.unique_name] = self

    @property
    def collectives(self) -> Collectives:
        """Flux's collectives of this group. Collective at its first use."""
        if self._collectives is None:
            self._collectives = self.watched(
                lambda: Collectives(self.device_group, timeout_s=LAYER_TIMEOUT_S.get())
            )
            logger.info(
                "flux: collectives of %s, %d ranks on %d host(s)",
                self.unique_name,
                self.world_size,
                self._collectives.hosts,
            )
        return self._collectives

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks; ``input_`` is lost."""
        if not self.replaced or input_.dtype not in SUMMED:
            return self.own_all_reduce(input_)
        if torch.compiler.is_compiling():
            total: torch.Tensor = torch.ops.flux.vllm_all_reduce(input_, self.unique_name)
            return total
        summand = input_.clone() if self._check else input_
        out = input_ if input_.is_contiguous() else None
        result = self.watched(lambda: self.collectives.all_reduce(input_, out))
        if self._check:
            compare_sum(self, f"all_reduce of {self.unique_name}", summand, result)
        return result

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the tensors of all ranks, joined along ``dim``."""
        if not self.replaced:
            own: torch.Tensor = super().all_gather(input_, dim)
            return own
        if torch.compiler.is_compiling():
            name, world = self.unique_name, self.world_size
            out: torch.Tensor = torch.ops.flux.vllm_all_gather(input_, dim, world, name)
            return out
        result = self.watched(lambda: self.collectives.all_gather(input_, dim))
        if self._check:
            right = super().all_gather(input_, dim)
            compare_equal(self, f"all_gather of {self.unique_name}", right, result)
        return result

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's part, along ``dim``, of the sum over ranks."""
        even = input_.shape[dim] % self.world_size == 0
        if not self.replaced or input_.dtype not in SUMMED or not even:
            own: torch.Tensor = super().reduce_scatter(input_, dim)
            return own
        if torch.compiler.is_compiling():
            name, world = self.unique_name, self.world_size
            out: torch.Tensor = torch.ops.flux.vllm_reduce_scatter(input_, dim, world, name)
            return out
        result = self.watched(lambda: self.collectives.reduce_scatter(input_, dim))
        if self._check:

            def part(whole: torch.Tensor) -> torch.Tensor:
                return whole.chunk(self.world_size, dim)[self.rank_in_group]

            compare_sum(self, f"reduce_scatter of {self.unique_name}", input_, result, part)
        return result

    def own_all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        """Return the sum by vLLM's own path; ``summand`` is lost."""
        total: torch.Tensor = super().all_reduce(summand)
        return total

    def watched(self, call: Callable[[], T]) -> T:
        """Make a call of Flux's; where a rank is gone, let vLLM end on this host."""
        try:
            return call()
        except PeerTimeoutError as error:
            leave(error, self.rank_in_group)


def leave(error: PeerTimeoutError, rank: int) -> NoReturn:
    """Raise for a rank that is gone, so that vLLM ends on this host.

    vLLM's executor hears of exceptions of rank 0 alone, and of the end of any worker.

    Raises:
        PeerTimeoutError: on rank 0, and outside of vLLM's worker processes.
        SystemExit: on other ranks.
    """
    if rank == 0 or multiprocessing.parent_process() is None:
        raise error
    logger.error("flux: %s", error)
    raise SystemExit(1) from error


def _of(name: str) -> FluxCommunicator:
    communicator = _communicators.get(name)
    if communicator is None:
        raise RuntimeError(f"flux: the group {name} of a compiled model no longer exists")
    return communicator


def _gathered(x: torch.Tensor, dim: int, world: int, name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * world
    return x.new_empty(shape)


def _scattered(x: torch.Tensor, dim: int, world: int, name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // world
    return x.new_empty(shape)


# What compiled models call. An op of torch may not return its argument.
define(
    "vllm_all_reduce(Tensor x, str group) -> Tensor",
    lambda x, group: _of(group).all_reduce(x.clone(memory_format=torch.contiguous_format)),
    lambda x, group: x.new_empty(x.shape),
    ordered=True,
)
define(
    "vllm_all_gather(Tensor x, int dim, int world, str group) -> Tensor",
    lambda x, dim, world, group: _of(group).all_gather(x, dim),
    _gathered,
    ordered=True,
)
define(
    "vllm_reduce_scatter(Tensor x, int dim, int world, str group) -> Tensor",
    lambda x, dim, world, group: _of(group).reduce_scatter(x, dim),
    _scattered,
    ordered=True,
)


def use_for(platform: Any) -> None:
    """Make groups of ranks that are built from now on take this communicator."""
    name = f"{FluxCommunicator.__module__}.{FluxCommunicator.__qualname__}"
    platform.get_device_communicator_cls = classmethod(lambda cls: name)
