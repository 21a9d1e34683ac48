"""Symmetric memory between ranks of one host: unnamed files of /dev/shm.

Every rank contributes one segment: its signal pad, then its data. All ranks map all segments. A
segment is a file without a name (``O_TMPFILE``). It lives as long as a process holds it open or
mapped, so no file remains, however and whenever the ranks are killed. Ranks exchange process id and
descriptor through the process group, and open the peers' files through ``/proc/<process>/fd``. Once
all ranks have mapped all segments, the descriptors are closed.

A memfd has no name either, but it can grow until the host runs out of memory, and then a process is
killed. The size of /dev/shm is limited, and a full one is an OSError here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flux import _C
from flux.core.tensors import address_of
from flux.machine.host import available_memory, in_words
from flux.transport.exchange import Exchange
from flux.transport.placement import Placement

FOLDER = "/dev/shm"


@dataclass(frozen=True)
class Segment:
    """An open segment of a process of this host, as its peers find it.

    Attributes:
        process: id of the process.
        descriptor: of the file, in that process.
        device: of the file, so that no other file is mistaken for it.
        inode: of the file, for the same reason.
    """

    process: int
    descriptor: int
    device: int
    inode: int


@dataclass(frozen=True)
class SymmetricMemory:
    """The ranks' segments as this process sees them; private stand-ins for ranks on other hosts.

    Attributes:
        segments: each rank's segment, pad first, as a flat ``uint8`` tensor, by rank. The tensors
            keep the mapping alive; it is unmapped with the last of them.
        pads: address of each rank's signal pad.
        data: each rank's data, behind the pad.
        nbytes: bytes of one segment.
        processes: of the peers on this host.
    """

    segments: tuple[torch.Tensor, ...]
    pads: tuple[int, ...]
    data: tuple[torch.Tensor, ...]
    nbytes: int
    processes: _C.Processes


def create(nbytes: int) -> Segment:
    """Make a segment of ``nbytes`` zero bytes, whose descriptor this process has to close.

    All pages are reserved, so that a full /dev/shm is an error now and not a SIGBUS at a later
    store.

    Raises:
        OSError: there is not enough room, or /dev/shm has no unnamed files.
    """
    flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC  # O_EXCL: it cannot get a name
    try:
        descriptor = os.open(FOLDER, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # the latter before Linux 3.11
            why = f"{os.strerror(error.errno)}: {FOLDER} has no unnamed files (O_TMPFILE)"
            raise OSError(error.errno, f"{why}; mount a tmpfs there") from error
        raise
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        status = os.fstat(descriptor)
        return Segment(os.getpid(), descriptor, status.st_dev, status.st_ino)
    except BaseException:
        os.close(descriptor)
        raise


def attach(segment: Segment, nbytes: int) -> _C.SharedMapping:
    """Map the first ``nbytes`` bytes of a segment.

    Raises:
        OSError: its process has ended or may not be inspected; or the file is another one, belongs
            to another user, or is smaller: a page beyond its end would be a SIGBUS.
    """
    path = f"/proc/{segment.process}/fd/{segment.descriptor}"
    # Meanwhile the descriptor may be a pipe, and opening a pipe would block without O_NONBLOCK.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: {path}") from error
    try:
        status = os.fstat(descriptor)
        problem = None
        if (status.st_dev, status.st_ino) != (segment.device, segment.inode):
            problem = errno.ESTALE, f"{path} is not the file that the rank announced"
        elif status.st_uid != os.geteuid():
            problem = errno.EPERM, f"{path} belongs to user {status.st_uid}"
        elif not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            problem = errno.EINVAL, f"{path} has {status.st_size} bytes of {nbytes}"
        if problem is not None:
            raise OSError(*problem)
        return _C.SharedMapping(descriptor, nbytes)
    finally:
        os.close(descriptor)


def allocate(
    exchange: Exchange, placement: Placement, signals: int, data_bytes: int, label: str
) -> SymmetricMemory:
    """Create, exchange and map one segment per rank. Collective.

    Args:
        exchange: the group's ranks.
        placement: ranks that share memory map each other's segments. Other ranks get stand-ins,
            whose pages use memory only once they are written.
        signals: number of 32-bit signals in each pad.
        data_bytes: bytes of data behind each pad.
        label: purpose of the memory; part of error messages.

    Raises:
        OSError: on every rank, if a host has too little memory for the segments of its ranks, or a
            segment could not be made or mapped on any rank; the message names the requested size.
        ValueError: on every rank, if ranks ask for different sizes.
    """
    pad_bytes = _C.pad_bytes(signals)
    nbytes = pad_bytes + max(data_bytes, 1)
    local = placement.shared_with(exchange.rank)
    # 1. Check that each host has memory for the segments of its ranks. Beyond the limit of a
    # container /dev/shm takes pages all the same, and the kernel kills a rank. So all ranks look
    # before any of them allocates.
    requests = exchange.all_gather((nbytes, sum(local), available_memory()))
    _check_room(requests, label)
    # 2. Create this rank's segment, and map those of the peers.
    own: Segment | None = None
    failure: tuple[int, str] | None = None
    mappings: list[_C.SharedMapping | None] = []
    processes: _C.Processes | None = None
    try:
        try:
            own = create(nbytes)
        except OSError as error:
            failure = _explain(error, nbytes)
        segments_of_all = exchange.all_gather(own)
        segments = [segment for segment in segments_of_all if segment is not None]
        if len(segments) == len(segments_of_all):
            peers = [
                segment if here and rank != exchange.rank else None
                for rank, (segment, here) in enumerate(zip(segments, local, strict=True))
            ]
            # Created before the segments are opened. If a process then holds the right file open
            # under a descriptor, it is the peer: its process id was not reused in between.
            processes = _C.Processes([peer.process if peer else 0 for peer in peers])
            try:
                mappings = [attach(peer, nbytes) if peer else None for peer in peers]
                assert own is not None
                mappings[exchange.rank] = _C.SharedMapping(own.descriptor, nbytes)
            except OSError as error:
                failure = _explain(error, nbytes)
        failures = exchange.all_gather(failure)
    finally:
        if own is not None:
            os.close(own.descriptor)
    for rank, failed in enumerate(failures):
        if failed is not None:
            code, why = failed
            raise OSError(code, f"{label}: rank {rank} {why}")
    assert processes is not None
    memory = []
    for mapping in mappings:
        if mapping is not None:
            memory.append(torch.frombuffer(mapping, dtype=torch.uint8))
        else:  # on another host
            memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            memory[-1][:pad_bytes] = 0
    return SymmetricMemory(
        tuple(memory),
        tuple(address_of(segment) for segment in memory),
        tuple(segment[pad_bytes:] for segment in memory),
        nbytes,
        processes,
    )


def _check_room(requests: Sequence[tuple[int, int, int | None]], label: str) -> None:
    """Check what the ranks ask for: (bytes of a segment, ranks on its host, bytes available there).

    Raises:
        OSError: a host has too little memory.
        ValueError: ranks ask for different sizes, and would read beyond the end.
    """
    for rank, (size, ranks, available) in enumerate(requests):
        if size != requests[0][0]:
            raise ValueError(
                f"{label}: ranks disagree; rank {rank} has segments of {size} bytes (rank 0: "
                f"{requests[0][0]})"
            )
        if available is not None and size * ranks > available:
            raise OSError(
                errno.ENOMEM,
                f"{label}: rank {rank} cannot allocate {size} bytes ({in_words(size)}) of shared "
                f"memory: the {ranks} ranks of its host need {in_words(size * ranks)}, and "
                f"{in_words(available)} are available to it; raise the limit of the container, or "
                "lower max_m",
            )


def _explain(problem: OSError, nbytes: int) -> tuple[int, str]:
    why = problem.strerror or str(problem)
    hint = ""
    if problem.errno in (errno.ENOSPC, errno.ENOMEM):
        hint = "; enlarge /dev/shm (docker: --shm-size) or lower max_m"
    size = f"{nbytes} bytes ({nbytes / 2**20:.1f} MiB)"
    return problem.errno or errno.EIO, f"cannot allocate {size} of shared memory: {why}{hint}"
