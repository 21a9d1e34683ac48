"""Start ranks as processes of this machine, and end them in every case.

Ranks meet in a directory that only their user can enter. The parent receives messages from each
rank over a pipe, and watches for ranks that die. One rank's failure ends the others after a short
grace period, in which their messages are collected. The error shows the first cause, not the broken
connections that follow from it. The kernel kills a rank whose parent has ended.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from flux.launch.hosts import Placed, wait_for_link
from flux.launch.progress import Progress, silent

_GRACE_S = 1.5
_EXIT_S = 5.0
STALL_S = 60.0
"""Limit of rank 0's silence in seconds, beyond twice the timeout; large references take time."""

_MOST_SOCKET_BYTES = 107  # of the path of a Unix socket
_SOCKET_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"

Entry = Callable[[Any, int, Progress], Any]
"""The function that a rank runs: (argument, rank, progress) -> result. Must be importable by
name."""


@dataclass(frozen=True)
class Part:
    """The ranks that this process starts, of a world whose other ranks are started elsewhere.

    Attributes:
        ranks: their numbers, ascending.
        meeting: where all ranks of the world meet. On one host: a file. Else: host and port of an
            existing store, and a prefix of their own for its keys.
        slot: (number, count) of this process among those of the host, each with as many ranks.
    """

    ranks: tuple[int, ...]
    meeting: tuple[str, int, str] | str
    slot: tuple[int, int] = (0, 1)


class RankFailedError(RuntimeError):
    """A rank raised, died or stalled. `details` is its traceback, if the rank could send it."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass
class _Failure:
    rank: int
    summary: str
    details: str
    refused: bool
    at: float


def end_with_parent() -> None:
    """Make the kernel kill this process when the process that started it ends.

    A thread that waits for the parent's end would need the GIL, which some calls into torch hold
    while they wait. Instead, the pipe that breaks then sends SIGKILL. PR_SET_PDEATHSIG would follow
    the fork server, which lives as long as any of its children.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it ended before the setup
        os._exit(1)


def begin_worker() -> None:
    """Begin a process of a pool: it ends with its parent, and leaves Ctrl-C to it.

    Ctrl-C reaches every process of the terminal. A worker that it ends while it reads the queue of
    jobs leaves the others, and the parent, waiting for its lock.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _rank_main(
    rank: int,
    world: int,
    meeting: tuple[str, int, str] | str,
    slot: tuple[int, int],
    place: Placed | None,
    threads: int,
    timeout_s: float,
    group: str,
    entry: Entry,
    argument: Any,
    pipe: Connection,
) -> None:
    end_with_parent()
    os.dup2(2, 1)  # libraries' output must not end up in the parent's JSON
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the ranks

    def progress(what: str, done: int, total: int) -> None:
        # The parent answers after drawing the bar: drawing takes CPU time that must not overlap a
        # repeat.
        pipe.send(("progress", what, done, total))
        pipe.poll(1.0) and pipe.recv()

    try:
        if place is not None:
            place.enter()
            wait_for_link()
        elif isinstance(meeting, str):
            stay_on_this_host()
        pin(*slot, threads)
        torch.set_num_threads(threads)
        limit = timedelta(seconds=timeout_s)
        store: dist.Store
        if isinstance(meeting, tuple):
            host, port, prefix = meeting
            store = dist.PrefixStore(prefix, dist.TCPStore(host, port, timeout=limit))
        else:  # in a directory of this user only; simulated hosts share it too
            store = dist.FileStore(meeting, world)
        store.set_timeout(limit)
        dist.init_process_group(group, store=store, rank=rank, world_size=world, timeout=limit)
        # gloo fails to connect to a rank that has ended already.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(world)])
        result = entry(argument, rank, progress)
        pipe.send(("done", result if rank == 0 else None))
    except BaseException as error:
        refused = isinstance(error, (ValueError, TypeError))
        summary = "".join(traceback.format_exception_only(error)).strip()
        pipe.send(("error", summary, traceback.format_exc(), refused, time.monotonic()))
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def how_ended(code: int) -> str:
    """Return an exit status in words; negative: the signal that ended the process."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay a Ctrl-C in this thread until the end of the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_on_this_host() -> None:
    """Restrict the ranks' connections to the loopback interface, unless the user has named another.

    The connections have no password.
    """
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def pin(number: int, count: int, threads: int) -> None:
    """Give every rank its own cores if there are enough, as mpirun does.

    Otherwise the scheduler moves GEMM threads away from communicating threads, and now and then
    runs two of them on one core for a while, which would distort the measurement.

    Args:
        number: of this rank among those of the host, or of a simulated host.
        count: ranks of the host, or simulated hosts.
        threads: of each of them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    if each >= threads:
        os.sched_setaffinity(0, cores[number * each : (number + 1) * each])


def use_short_socket_paths() -> None:
    """Let the fork server's socket be elsewhere if TMPDIR is too long a path for one.

    multiprocessing puts its sockets into a directory that it makes once, in ``tempfile.tempdir``,
    and then keeps. Only that directory is made elsewhere; other temporary files stay in TMPDIR.

    Raises:
        OSError: there is no other directory for temporary files.
    """
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) + len(_SOCKET_NAME) <= _MOST_SOCKET_BYTES:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                util.get_temp_dir()
            finally:
                tempfile.tempdir = chosen
            return
    raise OSError(
        f"TMPDIR is {len(os.fsencode(chosen))} bytes long, too long for sockets "
        f"({_MOST_SOCKET_BYTES - len(_SOCKET_NAME)} at most), and no /tmp can be written"
    )


def forkserver() -> ForkServerContext:
    """Return the context to fork processes from: a server that has imported torch.

    With many ranks this saves most of the time until the first repeat. The server has no threads,
    no CUDA state of this process, and ends with this process.
    """
    use_short_socket_paths()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["typer", "flux.bench.launch"])
    return context


def run_ranks(
    entry: Entry,
    argument: Any,
    world: int,
    *,
    threads: int = 1,
    timeout_s: float = 60.0,
    progress: Progress = silent,
    places: Sequence[Placed] | None = None,
    part: Part | None = None,
    stall_s: float | None = None,
    group: str = "gloo",
) -> Any:
    """Run `entry` on `world` new processes joined in a group; return rank 0's result.

    Args:
        entry: importable function, called as entry(argument, rank, progress) on every rank.
        argument: pickled to every rank.
        world: number of ranks.
        threads: intra-op threads of each rank.
        timeout_s: limit on every rendezvous and collective. If rank 0 reports nothing for twice as
            long and a minute, it is considered stuck.
        progress: receives rank 0's reports.
        places: the host of each rank (hosts.Hosts); by default this one.
        part: start only these ranks; others start the rest. The result is None without rank 0.
        stall_s: another limit on how long ranks may report nothing.
        group: backends of the group.

    Raises:
        RankFailedError: a rank raised, died or stalled; no rank is left running.
    """
    context = forkserver()
    # torch's TCP store listens on all interfaces, and every client may write to it.
    folder = None
    if part is not None:
        meeting = part.meeting
    else:
        folder = tempfile.TemporaryDirectory(prefix="flux-ranks-")
        meeting = f"{folder.name}/store"
    ranks = range(world) if part is None else part.ranks
    slot, slots = (0, 1) if part is None else part.slot
    processes: dict[int, BaseProcess] = {}
    pipes: dict[int, Connection] = {}
    try:
        for index, rank in enumerate(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(
                    rank,
                    world,
                    meeting,
                    (slot * len(ranks) + index, slots * len(ranks)),
                    places[rank] if places else None,
                    threads,
                    timeout_s,
                    group,
                    entry,
                    argument,
                    theirs,
                ),
                name=f"flux-rank-{rank}",
                daemon=True,
            )
            pipes[rank] = ours
            # A rank that is started but not in the list would not be ended.
            with interrupts_held_back():
                process.start()
                processes[rank] = process
            theirs.close()
        limit = 2 * timeout_s + STALL_S if stall_s is None else stall_s
        return _Supervisor(processes, dict(pipes), progress, limit, set(processes)).run()
    finally:
        _end(list(processes.values()))
        for pipe in pipes.values():
            pipe.close()
        if folder is not None:
            folder.cleanup()


def _brief(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else text[:157] + "..."


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _EXIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@dataclass
class _Supervisor:
    """Receives the ranks' messages until all are done or one has failed."""

    processes: dict[int, BaseProcess]
    pipes: dict[int, Connection]
    progress: Progress
    stall_s: float
    running: set[int]
    done: set[int] = field(default_factory=set)
    failures: list[_Failure] = field(default_factory=list)
    result: Any = None

    def run(self) -> Any:
        deadline = time.monotonic() + self.stall_s
        while self.running:
            ranks_of = {self.processes[rank].sentinel: rank for rank in self.running}
            pipes_of = {pipe: rank for rank, pipe in self.pipes.items()}
            ready = wait([*ranks_of, *pipes_of], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            failed_before = bool(self.failures)
            # Messages first: a rank that has sent its error has not died silently.
            for pipe, rank in pipes_of.items():
                if pipe in ready:
                    self._listen(rank, pipe)
            for sentinel, rank in ranks_of.items():
                if sentinel in ready:
                    self._bury(rank)
            if not self.failures:
                deadline = time.monotonic() + self.stall_s
            elif not failed_before:
                deadline = time.monotonic() + _GRACE_S
        if self.failures:
            raise self._first_cause()
        if self.running:
            raise RankFailedError(
                f"ranks {sorted(self.running)} reported nothing for {self.stall_s:.0f} s"
            )
        return self.result

    def _listen(self, rank: int, pipe: Connection) -> None:
        try:
            while rank in self.pipes and pipe.poll():
                kind, *content = pipe.recv()
                if kind == "progress":
                    self.progress(*content)
                    pipe.send(None)
                elif kind == "done":
                    self.done.add(rank)
                    if rank == 0:
                        self.result = content[0]
                else:
                    summary, details, refused, at = content
                    self.failures.append(_Failure(rank, summary, details, refused, at))
        except (EOFError, OSError):
            del self.pipes[rank]

    def _bury(self, rank: int) -> None:
        if rank in self.pipes:
            self._listen(rank, self.pipes[rank])
        self.running.discard(rank)
        code = self.processes[rank].exitcode or 0
        if rank in self.done and code == 0:
            return
        if any(failure.rank == rank for failure in self.failures):
            return
        # Sorted before every message: a silent death is the cause of the others' errors.
        self.failures.append(_Failure(rank, how_ended(code), "", False, float("-inf")))

    def _first_cause(self) -> RankFailedError:
        first, *others = sorted(self.failures, key=lambda failure: failure.at)
        message = f"rank {first.rank}: {first.summary}"
        summaries = {first.summary}
        for failure in others:
            if failure.summary not in summaries:
                summaries.add(failure.summary)
                message += f"\n  then rank {failure.rank}: {_brief(failure.summary)}"
        return RankFailedError(message, "" if first.refused else first.details)
