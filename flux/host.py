"""What this machine and this Python are, in the words that reports use."""

from __future__ import annotations

import os
import platform
import re


def usable_cores() -> set[int]:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many they are."""
    return len(usable_cores())


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, here and in this container; None if unknown."""
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
            # What files have in memory counts as used, but is given up when it is wanted.
            stats = _text(f"{directory}/memory.stat")
            cached = re.search(rf"^{stat} (\d+)$", stats, re.MULTILINE)
            spare = int(cached.group(1)) if cached else 0
            limits.append(max(int(most) - int(now) + spare, 0))
    return min(limits, default=None)


def _text(path: str) -> str:
    """Contents of a file of the system; empty where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def cpu_model() -> str:
    """The CPU's name as its maker writes it, or the architecture where that is not to be had."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def device() -> str:
    """One line naming what ran: the CPU and how much of it this process may use."""
    cores = available_cores()
    return f"{cpu_model()}, {cores} core{'s' if cores != 1 else ''}"


def versions() -> dict[str, str]:
    """Versions that a measurement depends on."""
    import torch

    import flux

    return {
        "flux": flux.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
