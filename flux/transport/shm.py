"""Symmetric memory between ranks of one host: POSIX shared memory from the standard library.

Every rank contributes one segment: its signal pad, then its data. All ranks map all segments. Names
are exchanged through the process group, and once everybody has attached, every segment is unlinked:
from then on nothing has a name that could be left behind, whatever kills the ranks. Before that
moment the standard library's resource tracker, a process of its own, removes the segments of a rank
that dies.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch

from flux import _C
from flux.env import HOST
from flux.transport.exchange import Exchange


@dataclass(frozen=True)
class SymmetricMemory:
    """The ranks' segments as this process sees them; private stand-ins for ranks on other hosts.

    Attributes:
        segments: each rank's segment, pad first, as a flat ``uint8`` tensor, by rank. The tensors
            keep the mapping alive; it goes when the last of them does.
        pad_bytes: bytes of the signal pad at the start of a segment.
    """

    segments: tuple[torch.Tensor, ...]
    pad_bytes: int

    @property
    def pads(self) -> list[int]:
        """Address of each rank's signal pad."""
        return [segment.data_ptr() for segment in self.segments]

    @property
    def data(self) -> list[torch.Tensor]:
        """Each rank's data, behind the pad."""
        return [segment[self.pad_bytes :] for segment in self.segments]

    @property
    def nbytes(self) -> int:
        """Bytes of one segment."""
        return self.segments[0].numel()


def host_identity() -> str:
    """A string that two processes share only if they can share memory by name."""
    if HOST.get():
        return HOST.get()
    try:
        boot = open("/proc/sys/kernel/random/boot_id").read().strip()  # noqa: SIM115
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return socket.gethostname()
    return f"{boot}/{device}"


def allocate(
    exchange: Exchange, local: Sequence[bool], signals: int, data_bytes: int, label: str
) -> SymmetricMemory:
    """Create, exchange and map one segment per rank. Collective.

    Args:
        exchange: the group's ranks.
        local: by rank, whether its segment can be mapped here; the others get stand-ins, whose
            pages cost memory only once they are written.
        signals: number of 32-bit signals in each pad.
        data_bytes: bytes of data behind each pad.
        label: what the memory is for; part of error messages.

    Raises:
        OSError: on every rank, when a segment could not be made or mapped on any of them; the
            message names the size that was asked for.
        ValueError: on every rank, when ranks ask for different sizes.
    """
    pad_bytes = _C.pad_bytes(signals)
    nbytes = pad_bytes + max(data_bytes, 1)
    own: SharedMemory | None = None
    failure: tuple[int, str] | None = None
    mappings: list[_C.SharedMapping | None] = []
    try:
        try:
            own = SharedMemory(create=True, size=nbytes)
            _C.reserve_shared(own.name.lstrip("/"), nbytes)
        except OSError as error:
            failure = _explain(error, nbytes)
        told = exchange.all_gather(
            (None if failure or own is None else own.name.lstrip("/"), nbytes)
        )
        names = [name for name, _ in told]
        check_sizes(label, [size for _, size in told])
        if all(names):
            try:
                mappings = [
                    _C.SharedMapping(str(name), nbytes) if here else None
                    for name, here in zip(names, local, strict=True)
                ]
            except OSError as error:
                failure = _explain(error, nbytes)
        failures = exchange.all_gather(failure)
    finally:
        if own is not None:
            own.close()
            own.unlink()
    for rank, failed in enumerate(failures):
        if failed is not None:
            code, why = failed
            raise OSError(code, f"{label}: rank {rank} {why}")
    return SymmetricMemory(
        tuple(_stand_in(nbytes, pad_bytes) if m is None else _tensor(m) for m in mappings),
        pad_bytes,
    )


def check_sizes(label: str, sizes: Sequence[int]) -> None:
    """Raise ValueError if segments, by rank, are not of one size: ranks would read what is not
    there."""
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"{label}: ranks disagree; rank {rank} has segments of {size} bytes (rank 0: "
                f"{sizes[0]})"
            )


def _tensor(mapping: _C.SharedMapping) -> torch.Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _stand_in(nbytes: int, pad_bytes: int) -> torch.Tensor:
    segment = torch.empty(nbytes, dtype=torch.uint8)
    segment[:pad_bytes] = 0
    return segment


def _explain(problem: OSError, nbytes: int) -> tuple[int, str]:
    why = os.strerror(problem.errno) if problem.errno else str(problem)
    hint = ""
    if problem.errno in (errno.ENOSPC, errno.ENOMEM):
        hint = "; enlarge /dev/shm (docker: --shm-size) or lower max_m"
    size = f"{nbytes} bytes ({nbytes / 2**20:.1f} MiB)"
    return problem.errno or errno.EIO, f"could not get {size} of shared memory: {why}{hint}"
