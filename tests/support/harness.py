"""Rank processes for tests: started once, reused by every test, gone when pytest is.

``run_ranks(world, fn, *args)`` runs ``fn(rank, world, *args)`` on every rank of a gloo group. The
ranks of each world size are forked from a server that has imported torch and flux already, and they
stay for the next test; after a failure or a hang they are killed and the next test gets new ones.
The workers of a run have one server together, which the first to need it starts.
Tests that kill ranks take ``fresh_ranks(world)``, which is theirs alone.

Nothing is left behind: the server and the ranks watch pytest and end when it does, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import json
import multiprocessing
import multiprocessing.forkserver as fork_server
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import flux
from flux.launch.spawn import end_with_parent, how_ended

WORLDS = (1, 2, 3, 4, 8)
# What ranks and forked commands start with. Test modules add what takes long to import, before any
# rank starts.
PRELOAD = ["torch", "torch.distributed", "numpy", "pytest", "hypothesis", "flux.ops", "flux.layers"]
PRELOAD += ["networkx", "pydantic.main", "rich.live", "rich.progress", "typer.rich_utils"]
PRELOAD += [
    module.name
    for package in ("bench", "cli", "launch", "tune")
    for module in pkgutil.iter_modules([f"{flux.__path__[0]}/{package}"], f"flux.{package}.")
]
GRACE_S = 3.0  # how long the other ranks may take to tell their side after the first failure
COLLECTIVE_S = 60.0  # limit of every rendezvous and gloo collective

BUSY = 3.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0
"""Factor on limits of a few seconds: other tests that run beside one make it wait for a core."""

STRESS = int(os.environ.get("FLUX_TEST_STRESS", "1"))
"""How many times more calls and cases the longest tests run: `make stress` sets it."""


def more(*values: Any) -> tuple[Any, ...]:
    """Parameters that only ``make stress`` runs."""
    return values if STRESS > 1 else ()


stress_only = pytest.mark.skipif(STRESS == 1, reason="make stress runs it")

_context = multiprocessing.get_context("forkserver")
_counter = itertools.count()


MOST_THREADS = 48
"""Ranks with more threads are not used again. The process groups of a function stay: each has three
threads, one of which wakes a hundred times a second."""


class RanksFailed(AssertionError):
    """A rank raised, died or stalled; the text has the first cause and its traceback."""


@dataclass
class Outcome:
    """How a function ended on one rank.

    Attributes:
        value: what it returned.
        error: "" or the exception's last lines; ``trace`` is the whole traceback, or the stacks of
            a rank that a signal killed.
        signal: the signal that killed the rank, or 0.
        at: when it ended, by ``time.monotonic()``.
        threads: how many threads the rank had then.
    """

    value: Any = None
    error: str = ""
    trace: str = ""
    signal: int = 0
    at: float = 0.0
    threads: int = 0

    @property
    def ok(self) -> bool:
        return not self.error and not self.signal


# -- in the rank processes -------------------------------------------------------------------------

# Variables of the pytest worker that ranks get: the server may have been started by another one.
rank_environment: dict[str, str] = {}
_port = 0
_name = ""


def join_group(name: str, rank: int, world: int) -> None:
    """Make ``world`` of these ranks the default gloo group; each of their groups has a ``name``."""
    store = dist.TCPStore(
        "127.0.0.1", _port, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S)
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"{_name}/{name}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


def _rank_main(
    rank: int,
    world: int,
    port: int,
    name: str,
    folder: str,
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    global _port, _name
    _port, _name = port, name
    os.environ.update(environment)
    tempfile.tempdir = None
    # Processes that have the server's pipe open keep the server alive, which has to end with
    # pytest. Then this process ends too, even if it is stopped.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), fork_server._forkserver._forkserver_alive_fd)
    gc.freeze()  # else each collection takes 0.15 s and copies the pages of all that was imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the ranks
    stacks = open(Path(folder) / f"{rank}.txt", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(stacks)
    end_with_parent()
    os.environ["FLUX_POISON"] = "1"
    torch.set_num_threads(1)
    join_group("all", rank, world)
    pipe.send_bytes(b"ready")
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        outcome = Outcome()
        try:
            outcome.value = fn(rank, world, *args)
        except BaseException as error:
            outcome.error = "".join(traceback.format_exception_only(error)).strip()
            outcome.trace = traceback.format_exc()
        outcome.at = time.monotonic()
        outcome.threads = len(os.listdir("/proc/self/task"))
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(Outcome(error=f"cannot send the result: {error}"))
        del fn, args, outcome
        pipe.send_bytes(answer)


# -- in pytest -------------------------------------------------------------------------------------


def share_server(folder: Path) -> None:
    """Have this process fork from the server of a run, also in commands that tests call in it.

    All workers of the run see ``folder``; the first that forks starts the server. Each has the pipe
    open that keeps the server alive: it ends with the last of them.
    """
    own = fork_server._forkserver
    start = own.ensure_running

    def ensure_running() -> None:
        file = folder / "fork-server.json"
        with FileLock(f"{file}.lock", timeout=120):
            if file.exists():
                address, pid, descriptor = json.loads(file.read_text())
                with contextlib.suppress(FileNotFoundError):  # the worker that started it crashed
                    own._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY)
                    own._forkserver_address = address
                    # It is no child of this process, which could not wait for it.
                    own.ensure_running = resource_tracker.ensure_running
                    return
            own.ensure_running = start
            own.set_forkserver_preload(PRELOAD)  # commands ask for less
            start()
            pipe = (own._forkserver_address, os.getpid(), own._forkserver_alive_fd)
            file.write_text(json.dumps(pipe))

    own.ensure_running = ensure_running


def start_forked(target: Callable[..., Any], *args: Any, daemon: bool) -> Any:
    """A process of ``target(*args)``, forked from the server. ``target`` is found by its name."""
    _context.set_forkserver_preload(PRELOAD)
    with _no_main():
        process = _context.Process(target=target, args=args, daemon=daemon)
        process.start()
    return process


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Keep multiprocessing from importing pytest's main script in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_store: dist.TCPStore | None = None


def _store_port() -> int:
    global _store
    if _store is None:
        _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _store.port


class Ranks:
    """``world`` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.mkdtemp(prefix="flux-test-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._outcomes: dict[int, Outcome] = {}
        self.threads = 0  # of the rank that had most of them after the last call
        name = f"group{next(_counter)}"
        try:
            for rank in range(world):
                ours, theirs = _context.Pipe()
                arguments = (rank, world, _store_port(), name, self._folder, rank_environment)
                self._processes.append(start_forked(_rank_main, *arguments, theirs, daemon=True))
                theirs.close()
                self._pipes.append(ours)
            deadline = time.monotonic() + COLLECTIVE_S
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RanksFailed(f"rank {rank} did not start")
                pipe.recv_bytes()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Begin fn(rank, world, *args) on all ranks. ``fn`` is found by its name."""
        message = pickle.dumps((fn, args))
        self._outcomes = {}
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def collect(self, timeout: float, grace: float | None = None) -> list[Outcome | None]:
        """Outcomes by rank; None for one that is still running when the time is over.

        With ``grace`` the time is over that many seconds after the first failure.
        """
        deadline = time.monotonic() + timeout
        while len(self._outcomes) < self.world:
            pipes = {self._pipes[r]: r for r in range(self.world) if r not in self._outcomes}
            ends = {self._processes[r].sentinel: r for r in pipes.values()}
            ready = wait([*pipes, *ends], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for source in ready:  # the pipes are listed first: a rank may have answered and ended
                rank = pipes.get(source, ends.get(source))
                if rank not in self._outcomes:
                    self._outcomes[rank] = self._hear(rank)
                    if grace is not None and not self._outcomes[rank].ok:
                        deadline = min(deadline, time.monotonic() + grace)
        return [self._outcomes.get(rank) for rank in range(self.world)]

    def _hear(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode or 0
            stacks = self._stacks_of(rank) if code < 0 else ""
            return Outcome(error=how_ended(code), trace=stacks, signal=max(0, -code))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Results by rank.

        Raises:
            RanksFailed: a rank raised, died, or did not finish in time.
        """
        __tracebackhide__ = True
        self.start(fn, *args)
        outcomes = self.collect(timeout, GRACE_S)
        # A silent death (at = 0) is the cause of what the others report.
        failures = sorted(
            ((r, o) for r, o in enumerate(outcomes) if o is not None and not o.ok),
            key=lambda failure: failure[1].at,
        )
        if failures:
            rank, first = failures[0]
            others = "".join(f"\nrank {r}: {o.error}" for r, o in failures[1:])
            text = f"{first.error}\n{first.trace}" if first.signal else first.trace or first.error
            raise RanksFailed(f"rank {rank} of {self.world}: {text}{others}")
        running = [rank for rank, o in enumerate(outcomes) if o is None]
        if running:
            raise RanksFailed(f"ranks {running} hang after {timeout:g} s\n{self._stacks(running)}")
        self.threads = max(o.threads for o in outcomes if o is not None)
        return [o.value for o in outcomes if o is not None]

    def send_signal(self, number: int) -> None:
        """Send all ranks a signal."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{self._stacks_of(rank)}" for rank in ranks)

    def _stacks_of(self, rank: int) -> str:
        """What faulthandler wrote: at SIGUSR1, or when a signal such as SIGSEGV killed the rank."""
        return (Path(self._folder) / f"{rank}.txt").read_text()

    def close(self) -> None:
        """Kill remaining rank processes. Idempotent."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_pool: dict[int, Ranks] = {}


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, fresh: bool = False, timeout: float = 200.0
) -> list[Any]:
    """fn(rank, world, *args) on all ranks of a group, in processes that later tests may use again.

    Args:
        world: number of ranks.
        fn: importable; it and ``args`` are pickled.
        *args: behind rank and world.
        fresh: use processes for this call alone, in which ``fn`` may change whatever it likes.
        timeout: seconds.

    Returns:
        Results by rank, which must be picklable.

    Raises:
        RanksFailed: with the traceback of the rank that failed first.
    """
    __tracebackhide__ = True
    ranks = (None if fresh else _pool.pop(world, None)) or Ranks(world)
    ranks.send_signal(signal.SIGCONT)
    try:
        results = ranks.run(fn, *args, timeout=timeout)
    except BaseException:  # a Ctrl-C too: whoever is in the middle of something must go
        ranks.close()
        raise
    if fresh or ranks.threads > MOST_THREADS:
        ranks.close()
    else:
        ranks.send_signal(signal.SIGSTOP)  # threads of process groups take time while they wait
        _pool[world] = ranks
    return results


@contextlib.contextmanager
def fresh_ranks(world: int) -> Iterator[Ranks]:
    """Start ranks for one test only, which the test may kill."""
    ranks = Ranks(world)
    try:
        yield ranks
    finally:
        ranks.close()


_process = os.getpid()


@atexit.register
def close_pool() -> None:
    """End all ranks that wait for a next test. A forked child's pool is its parent's."""
    while _pool and os.getpid() == _process:
        _pool.popitem()[1].close()


# -- looking at what is held -----------------------------------------------------------------------


def shared_names() -> set[str]:
    """Files in /dev/shm that have a name. Ops make none at any time.

    The emulated GPU does, and so do pools of processes (flux plan search) of other tests.
    """
    others = ("ptx_machine_", "sem.mp-")
    with os.scandir("/dev/shm") as entries:
        files = {entry.name for entry in entries if not entry.is_dir()}
    return {name for name in files if not name.startswith(others)}


@contextlib.contextmanager
def nothing_left_in_shared_memory(patience_s: float = 5.0) -> Iterator[None]:
    """Fails if names remain in /dev/shm. Another program's, which come and go, are waited for."""
    before = shared_names()
    yield
    deadline = time.monotonic() + patience_s
    left = shared_names() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= shared_names()
    assert not left, f"left in /dev/shm: {sorted(left)}"


def shared_mappings() -> int:
    """Files of /dev/shm, with and without a name, that this process has mapped."""
    return sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def held() -> dict[str, int]:
    """What an op must give back: descriptors, threads, mapped segments.

    Ranks serve many tests: what an earlier one has left to the garbage collector does not count.
    """
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": _threads(),
        "segments": shared_mappings(),
    }


def _threads() -> int:
    """Threads of this process. One that was joined has told so before the system has ended it."""
    count = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        time.sleep(0.002)
        count = min(count, len(os.listdir("/proc/self/task")))
    return count


def settled(before: dict[str, int], limit_s: float = 2.0) -> dict[str, int]:
    """Return ``held()`` once it equals ``before``, or after a time limit: a joined thread
    may still exist in the system for a moment."""
    end = time.monotonic() + limit_s
    while (now := held()) != before and time.monotonic() < end:
        time.sleep(0.01)
    return now


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
