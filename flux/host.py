"""What this machine and this Python are, in the words that reports use."""

from __future__ import annotations

import os
import platform


def usable_cores() -> set[int]:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many they are."""
    return len(usable_cores())


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
