"""Decide at compile time what flux can compute, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flux.launch.supervisors import hosts_of_ranks
from flux.ops import executor, torch_internals
from flux.transport.exchange import resolve_group
from flux.transport.placement import Placement

_hosts: list[str] = []  # of all ranks, by global rank, at the last enable(); with GPUs only


def learn_hosts() -> None:
    """Exchange the host of each rank, if there are GPUs. Then it is collective."""
    if torch.cuda.is_available() and dist.is_initialized():
        _hosts[:] = hosts_of_ranks()


def reason_unsupported(group_name: str, tensors: Sequence[torch.Tensor]) -> str | None:
    """Return why flux cannot compute with these operands over a group, or None.

    Equal on all ranks.
    """
    first = tensors[0]
    device = first.device.type
    if any(t.dtype != first.dtype for t in tensors):
        return "operands are of different dtypes"
    reason = executor.reason_unsupported(tensors)
    if reason is not None:
        return reason
    if any(isinstance(s, int) and s == 0 for t in tensors for s in t.shape):
        return "an operand is empty"
    if any(torch_internals.decided_when_run(s) for t in tensors for s in t.shape):
        return "a size is known only when the graph runs"
    try:
        group = resolve_group(group_name)
    except (TypeError, ValueError) as error:
        return str(error)
    if group.size() == 1:
        return "the group has one rank"
    reason = executor.group_unsupported(group, device)
    return _reason_gpus_unsupported(group) if reason is None and device == "cuda" else reason


def _reason_gpus_unsupported(group: dist.ProcessGroup) -> str | None:
    if not _hosts:
        return "enable() was called before init_process_group, so the hosts of ranks are unknown"
    hosts = (_hosts[rank] for rank in dist.get_process_group_ranks(group))
    return executor.reason_gpus_unsupported(Placement(tuple(hosts)))
