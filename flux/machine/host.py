"""Names, limits and versions of this machine and this Python, for reports."""

from __future__ import annotations

import os
import platform
import re
import socket

from flux.core.env import HOST


def usable_cores() -> set[int]:
    """Return the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(usable_cores())


def host_identity() -> str:
    """Return a string that processes share only if they share a host and its /dev/shm."""
    if HOST.get():
        return HOST.get()
    try:
        boot = open("/proc/sys/kernel/random/boot_id").read().strip()  # noqa: SIM115
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return socket.gethostname()
    return f"{boot}/{device}"


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
    """Return the bytes that this host and container can allocate unswapped; None if unknown."""
    limits = []
    meminfo = _text("/proc/meminfo")
    stated = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if stated:
        limits.append(int(stated.group(1)) * 1024)
    for directory, limit, used, stat in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        most, now = _text(f"{directory}/{limit}").strip(), _text(f"{directory}/{used}").strip()
        if most.isdigit() and now.isdigit():  # "max": no limit
            # The page cache counts as used, but the kernel reclaims it on demand.
            stats = _text(f"{directory}/memory.stat")
            cached = re.search(rf"^{stat} (\d+)$", stats, re.MULTILINE)
            spare = int(cached.group(1)) if cached else 0
            limits.append(max(int(most) - int(now) + spare, 0))
    return min(limits, default=None)


def _text(path: str) -> str:
    """Return the contents of a system file; empty if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the CPU's name as its vendor writes it, or the architecture if that is unknown."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
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
