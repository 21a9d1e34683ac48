"""Names, limits and versions of this machine and this Python, for reports."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from flux.core.env import HOST


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def machine_identity() -> str:
    """Return a string that processes share if they share a kernel, and so its cores."""
    return system_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()


def host_identity() -> str:
    """Return a string that processes share only if they share a host and its /dev/shm."""
    if HOST.get():
        return HOST.get()
    try:
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return socket.gethostname()
    return f"{machine_identity()}/{device}"


def memory_identity() -> str:
    """Return a string that two processes share only if they can map each other's segments.

    Such processes are on one host and know each other by the same process ids. Of containers, this
    holds for those that share the PID namespace. A value in ``FLUX_HOST`` is used without a check.
    """
    if HOST.get():
        return HOST.get()
    try:
        number, namespace = os.readlink("/proc/self"), os.readlink("/proc/self/ns/pid")
    except OSError:
        number = namespace = ""
    if number != str(os.getpid()):  # no /proc, or that of another PID namespace
        namespace = f"process {os.getpid()} of {socket.gethostname()}"
    return f"{host_identity()}/{namespace}"


def available_memory() -> int | None:
    """Return the bytes that this host and container can allocate unswapped; None if unknown.

    The limits of this process's memory cgroup and of all cgroups around it count, of both versions.
    What shared memory takes counts as used; the page cache does not: the kernel reclaims it.
    """
    limits = []
    stated = re.search(r"^MemAvailable:\s+(\d+) kB$", system_text("/proc/meminfo"), re.MULTILINE)
    if stated:
        limits.append(int(stated.group(1)) * 1024)
    for folder, limit, used, prefix in _memory_groups():
        most, now = system_text(f"{folder}/{limit}"), system_text(f"{folder}/{used}")
        if most.isdigit() and now.isdigit():  # "max": no limit
            cached = re.findall(
                rf"^{prefix}(?:in)?active_file (\d+)$",
                system_text(f"{folder}/memory.stat"),
                re.MULTILINE,
            )
            limits.append(max(int(most) - int(now) + sum(map(int, cached)), 0))
    return min(limits, default=None)


def _memory_groups() -> Iterator[tuple[str, str, str, str]]:
    """Yield (folder, file of the limit, file of what is used, prefix in memory.stat) of cgroups.

    Inside a container's own namespace the path of the process is "/"; without one, what the path
    names may be mounted at the root, so that is looked at in any case.
    """
    lines = [line.split(":", 2) for line in system_text("/proc/self/cgroup").splitlines()]
    of_version = {
        2: next((path for number, _, path in lines if number == "0"), "/"),
        1: next((path for _, names, path in lines if "memory" in names.split(",")), "/"),
    }
    for version, path in of_version.items():
        root = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
        files = ("memory.max", "memory.current", "")
        if version == 1:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield (f"{root}{folder}".rstrip("/"), *files)


def reason_too_large(needed: int) -> str | None:
    """Return why this host cannot allocate so many bytes more, in words; None if it can."""
    available = available_memory()
    if available is None or needed <= available:
        return None
    return f"{in_words(needed)} of memory are needed, and {in_words(available)} are available"


def in_words(count: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


def system_text(path: str | Path) -> str:
    """Return the contents of a system file, stripped; empty if it is missing or unreadable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the CPU's name as its vendor writes it, or the architecture if that is unknown."""
    for line in system_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown CPU"


def device() -> str:
    """Return one line about the CPU: its model and the cores that this process may use."""
    cores = available_cores()
    return f"{cpu_model()}, {cores} core{'s' if cores != 1 else ''}"


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    import torch

    from flux.core.version import __version__

    return {
        "flux": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
