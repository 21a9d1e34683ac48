"""End a worker that waits for a worker of its host that has died.

vLLM's collectives in shared memory wait without a limit, in native code that no signal handler
interrupts: its executor ends such a worker with SIGKILL, after nine seconds.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch.distributed as dist

logger = logging.getLogger("vllm.flux")

STUCK_S = 0.4
"""Seconds in one call of the main thread, after a peer has ended, that mean that it waits for it.
A worker that does not wait hears of it from vLLM's executor, and ends in order."""
_STEPS = frozenset({"execute_model", "sample_tokens", "_dummy_run"})
"""Methods of vLLM's whose collectives need the peer."""


def watch_peers(group: dist.ProcessGroup, name: str) -> None:
    """Start a thread that ends this process when one of its peers has died. Collective.

    Args:
        group: ranks that meet in shared memory.
        name: of the group, for the message.
    """
    here = os.getpid(), _process_namespace()
    processes: list[tuple[int, str]] = [here] * group.size()
    dist.all_gather_object(processes, here, group=group)
    ranks = {}
    for rank, (pid, namespace) in enumerate(processes):
        # A container of its own has process numbers of its own.
        if rank != group.rank() and namespace == here[1] and hasattr(os, "pidfd_open"):
            try:
                ranks[os.pidfd_open(pid)] = rank, pid
            except ProcessLookupError:  # it has died since: vLLM's start fails
                continue
    if ranks:
        arguments = ranks, name, threading.main_thread().ident
        threading.Thread(target=_watch, args=arguments, name="FluxPeers", daemon=True).start()


def _process_namespace() -> str:
    path = Path("/proc/self/ns/pid")
    return os.readlink(path) if path.exists() else ""


def _watch(ranks: dict[int, tuple[int, int]], name: str, main: int) -> None:
    poller = select.poll()
    for descriptor in ranks:
        poller.register(descriptor, select.POLLIN)
    (descriptor, _), *_ = poller.poll()
    rank, pid = ranks[descriptor]
    # This process ends now in any case. CPython before 3.12 may collect garbage in _current_frames,
    # and a callback of a weak reference that gives up the GIL there locks up all threads.
    gc.disable()
    while True:
        before = _position(main)
        time.sleep(STUCK_S)
        if before is not None and before == _position(main):
            logger.error(
                "flux: rank %d of %s, process %d, has died; this rank waits for it and ends, too",
                rank,
                name,
                pid,
            )
            logging.shutdown()
            os._exit(1)


def _position(thread: int) -> tuple[FrameType, int] | None:
    """Return where a thread is in a step of the model; None outside of one."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name not in _STEPS:
        frame = frame.f_back
    return None if frame is None or innermost is None else (innermost, innermost.f_lasti)
