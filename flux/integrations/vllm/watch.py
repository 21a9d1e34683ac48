"""End a worker whose peer has died, where vLLM would let it wait.

vLLM's collectives in shared memory wait without a limit, in native code that no signal handler
interrupts: its executor ends such a worker with SIGKILL, after nine seconds. And nothing of vLLM's
tells a host that a worker of another host is gone: a worker that waits for its next step there
would wait for good.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from flux.transport.exchange import Exchange
from flux.transport.sockets import connect

logger = logging.getLogger("vllm.flux")

STUCK_S = 0.4
"""Seconds in one call of the main thread, after a peer has ended, that mean that it waits for it.
A worker that does not wait hears of it from vLLM's executor, and ends in order."""
IDLE_S = 1.0
"""Seconds outside of a step after which a worker ends whose peer on another host has ended. In
less, a collective of Flux's has raised, or vLLM has ended the worker in order."""
END_S = 5.0
"""Seconds that a worker has to end in order."""
_STEPS = frozenset({"execute_model", "sample_tokens", "_dummy_run"})
"""Methods of vLLM's whose collectives need the peer."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is gone closes no connection: it has 20 seconds to answer."""

_connected: set[tuple[int, ...]] = set()
"""Ranks of the groups whose members have connected to each other."""


def watch_host(group: dist.ProcessGroup, name: str) -> None:
    """Start a thread that ends this process when a peer on its host has died. Collective.

    Args:
        group: ranks that meet in shared memory.
        name: of the group, for the message.
    """
    here = os.getpid(), _process_namespace()
    processes: list[tuple[int, str]] = [here] * group.size()
    dist.all_gather_object(processes, here, group=group)
    peers = {}
    for rank, (pid, namespace) in enumerate(processes):
        # A container of its own has process numbers of its own.
        if rank != group.rank() and namespace == here[1] and hasattr(os, "pidfd_open"):
            try:
                peers[os.pidfd_open(pid)] = f"rank {rank} of {name}, process {pid},"
            except ProcessLookupError:  # it has died since: vLLM's start fails
                continue
    _start(peers, idle=False)


def watch_hosts(group: dist.ProcessGroup, name: str) -> None:
    """Start a thread that ends this process when a peer on any host has ended. Collective.

    Ranks are connected by TCP for this alone.

    Args:
        group: ranks of several hosts.
        name: of the group, for the message.

    Raises:
        OSError: on every rank, if one cannot listen for connections.
        PeerTimeoutError: a peer did not connect in time.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks in _connected:
        return
    others = [rank for rank in range(len(ranks)) if rank != group.rank()]
    peers = {}
    for rank, descriptor in connect(Exchange(group, f"flux: watch of {name}"), others).items():
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        peers[descriptor] = f"rank {rank} of {name}"
    _connected.add(ranks)
    # Only workers are vLLM's own to end: without them this is the process of the user's program.
    _start(peers, idle=multiprocessing.parent_process() is not None)


def _process_namespace() -> str:
    path = Path("/proc/self/ns/pid")
    return os.readlink(path) if path.exists() else ""


def _start(peers: dict[int, str], idle: bool) -> None:
    """Watch peers, by the descriptor that becomes readable when one ends."""
    if peers:
        arguments = peers, threading.main_thread().ident, idle
        threading.Thread(target=_watch, args=arguments, name="FluxPeers", daemon=True).start()


def _watch(peers: dict[int, str], main: int, idle: bool) -> None:
    poller = select.poll()
    for descriptor in peers:
        poller.register(descriptor, select.POLLIN)
    (descriptor, _), *_ = poller.poll()
    ended = time.monotonic()
    while True:
        before = _position(main)
        time.sleep(STUCK_S)
        after = _position(main)
        if before is not None and before == after:
            logger.error(
                "flux: %s has died; this rank waits for it and ends, too", peers[descriptor]
            )
            logging.shutdown()
            os._exit(1)
        if idle and before is None and after is None and time.monotonic() - ended > IDLE_S:
            logger.error("flux: %s has ended; this rank ends, too", peers[descriptor])
            os.kill(os.getpid(), signal.SIGTERM)  # a worker of vLLM's ends in order
            time.sleep(END_S)
            os._exit(1)


def _position(thread: int) -> tuple[FrameType, int] | None:
    """Return where a thread is in a step of the model; None outside of one."""
    # CPython before 3.12 may collect garbage in _current_frames, and a callback of a weak reference
    # that gives up the GIL there locks up all threads.
    collects = gc.isenabled()
    gc.disable()
    innermost = frame = sys._current_frames().get(thread)
    if collects:
        gc.enable()
    while frame is not None and frame.f_code.co_name not in _STEPS:
        frame = frame.f_back
    return None if frame is None or innermost is None else (innermost, innermost.f_lasti)
