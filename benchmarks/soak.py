"""Use ops for a long time under random faults; compare results and look for leaks.

    python benchmarks/soak.py [--minutes 30] [--ranks 4] [--seed 1] [--noticed 1] [--json FILE]

Ranks build ops, call them with changing M, and close them, in episodes of a few seconds: on one
host over shared memory, and on two hosts over the network, in turn. Every episode runs twice, from
the same seed: in quiet, and disturbed. What disturbs it:

    in the plan    a forked child that ends in one of four ways; a close from another thread during
                   a call; a signal whose handler works, or raises; input that is refused on one
                   rank; a full /dev/shm while an op is built
    at any moment  SIGSTOP and SIGCONT, bursts of signals, SIGKILL of one rank, SIGKILL of all

The script checks:

    results are bitwise those of the quiet run
    file descriptors, threads and mapped segments of every rank, and the names in /dev/shm, are the
    same after every episode; after a kill, once the timeout of the ops is over
    survivors of a kill raise within a second
    memory does not grow

It ends with status 1 after any finding. With the permission to, it runs in a mount namespace with a
/dev/shm of its own, which it can fill.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import platform
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 30
SLOTS = 3
TIMEOUT_S = 30.0
EPISODE_S = 150.0
SHM_BYTES = 256 << 20
GROWTH_BYTES = 48 << 20
"""Of resident memory, which allocators do not give back at once."""
FILLER = "/dev/shm/soak-filler"
CHILD_ENDS = ("return", "exception", "exit", "os_exit")


# -- the plan of an episode ------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The next action of all ranks.

    Attributes:
        build: arguments of the op that takes the place of the slot's op, or None.
        m: global rows of the call.
        trouble: what disturbs it; "" for nothing.
        rank: which rank is disturbed.
        delay_s: how long after the begin of the step.
    """

    slot: int
    build: dict[str, Any] | None
    m: int
    trouble: str
    rank: int
    delay_s: float


def plan(seed: str, world: int, hosts: int, may_fill: bool) -> list[Step]:
    rng = random.Random(seed)
    specs: list[dict[str, Any] | None] = [None] * SLOTS
    steps = []
    for _ in range(STEPS):
        slot = rng.randrange(SLOTS)
        build = None
        if specs[slot] is None or rng.random() < 0.2:
            build = specs[slot] = _spec(rng, hosts)
        spec = specs[slot]
        assert spec is not None
        troubles = ["", "", "", "fork", "signal", "refused"]
        if spec["knobs"].get("path", "fused") == "fused":  # the others wait inside of gloo
            troubles += ["close", "interrupt"]
        if build is not None and may_fill and hosts == 1:
            troubles += ["full", "full"]
        steps.append(
            Step(
                slot,
                build,
                rng.randint(1, spec["max_m"]),
                rng.choice(troubles),
                rng.randrange(world),
                rng.choice([0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02)]),
            )
        )
    return steps


def _spec(rng: random.Random, hosts: int) -> dict[str, Any]:
    knobs = {
        "path": rng.choice(["fused", "fused", "fused", "medium", "unfused"]),
        "copy_streams": rng.choice([None, 0, 1]),
    }
    if knobs["path"] == "fused" and hosts == 1:
        knobs["direction"] = rng.choice([None, "push", "pull"])
        knobs["order"] = rng.choice([None, "direct", "ring1d"])
    dtype = rng.choice(["float32", "float64", "bfloat16"])
    return {
        "op": rng.choice(["AGGemm", "GemmRS", "GemmAR"]),
        # oneDNN caches code for 1,024 shapes of bfloat16 products, some 0.5 MB each. With many
        # shapes its cache would look like a leak.
        "max_m": 4 if dtype == "bfloat16" else rng.choice([1, 8, 64, 300, 1000]),
        "n": 96 if dtype == "bfloat16" else rng.choice([8, 96, 400]),
        "k": 100 if dtype == "bfloat16" else rng.choice([8, 100, 512]),
        "dtype": dtype,
        "knobs": knobs,
    }


# -- a rank ----------------------------------------------------------------------------------------


class _Interrupt(Exception):
    """Raised by a signal handler in the middle of a call."""


class _PeerKilled(Exception):
    """Ends a wait of this script, not of flux, for a rank that was killed."""


class _ChildEnds(Exception):
    """Ends a forked child."""


class _Rank:
    """One process. It reads jobs from stdin and writes one line of JSON for each to stdout."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.store: Any = None
        self.killed = ""  # a file that is there once a rank was killed
        self.meetings = 0
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever a library prints is no answer
        self.ops: list[Any] = [None] * SLOTS
        self.specs: list[Any] = [None] * SLOTS
        self.events: Counter[str] = Counter()
        self.raising = False
        self.rest: dict[str, int] | None = None  # held after the last episode without a failure
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGUSR1, lambda *_: gc.collect())

    def _on_alarm(self, *_: object) -> None:
        if self.raising:
            self.raising = False
            raise _Interrupt
        gc.collect()

    def serve(self) -> None:
        for line in sys.stdin:
            job = json.loads(line)
            answer = self.episode(job)
            if answer is None:  # a forked child
                return
            self.answers.write(json.dumps(answer) + "\n")

    def episode(self, job: dict[str, Any]) -> dict[str, Any] | None:
        import torch.distributed as dist

        os.environ["FLUX_HOST"] = f"soak-{self.rank * job['hosts'] // self.world}"
        self.events.clear()
        steps = plan(job["seed"], self.world, job["hosts"], job["may_fill"])
        digests: list[str] = []
        failure, failed_at, trace = "", 0.0, ""
        try:
            self.store = store = dist.FileStore(job["meeting"], self.world)
            self.meetings, self.killed = 0, job["meeting"] + ".killed"
            limit = timedelta(seconds=EPISODE_S)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.world, timeout=limit
            )
            self.answers.write("joined\n")
            for number, step in enumerate(steps):
                digest = self.step(f"{job['seed']}/{number}", step, job["disturbed"])
                if digest is None:
                    return None
                digests.append(digest)
        except _ChildEnds:
            raise
        except Exception as error:
            failed_at = time.time()
            failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.raising = False
        for slot in range(SLOTS):
            self.close(slot)
        if dist.is_initialized():
            dist.destroy_process_group()
        kept, kept_s = self.settled(bool(failure))
        return {
            "rank": self.rank,
            "digests": digests,
            "events": dict(self.events),
            "failure": failure,
            "trace": trace,
            "failed_at": failed_at,
            "held": kept,
            "settled_s": kept_s,
        }

    def settled(self, failed: bool) -> tuple[dict[str, int], float]:
        """Return what this process holds, and for how many seconds it held more.

        A rank that gives up while it connects leaves a thread in torch's rendezvous, with the
        connections that are there, until the timeout of the op.
        """
        began = time.monotonic()
        now = held()
        if not failed:
            self.rest = now
        names = ("descriptors", "threads", "segments")
        while self.rest is not None and any(now[name] > self.rest[name] for name in names):
            if time.monotonic() > began + TIMEOUT_S + 5.0:
                break
            time.sleep(0.2)
            now = held()
        return now, time.monotonic() - began

    # -- one step ----------------------------------------------------------------------------------

    def step(self, seed: str, step: Step, disturbed: bool) -> str | None:
        """Build if need be, and call; returns the digest of the result, None in a forked child."""
        trouble = step.trouble if disturbed else ""
        here = step.rank == self.rank
        if trouble:
            self.events[trouble] += 1
        if step.build is not None:
            self.close(step.slot)
            if trouble == "full":
                self.build_in_full_memory(step.build, step.rank)
            self.specs[step.slot] = step.build
            self.build(step.slot)
        if trouble == "fork" and here:
            ending = CHILD_ENDS[int(hashlib.sha256(seed.encode()).hexdigest(), 16) % 4]
            if self.fork(ending):
                return None
        if trouble == "refused":
            self.refused(step, here)
        if trouble in ("close", "interrupt"):
            self.broken(seed, step, trouble, here)
            self.close(step.slot)
            self.build(step.slot)
        if trouble == "signal" and here:
            signal.setitimer(signal.ITIMER_REAL, step.delay_s + 1e-5)
        self.events["calls"] += 1
        return self.call(seed, step)

    def build(self, slot: int) -> None:
        import torch

        import flux

        spec = self.specs[slot]
        self.events["built"] += 1
        self.ops[slot] = getattr(flux, spec["op"])(
            max_m=spec["max_m"],
            n=spec["n"],
            k=spec["k"],
            dtype=getattr(torch, spec["dtype"]),
            tuning=flux.Knobs(**spec["knobs"]),
            timeout_s=TIMEOUT_S,
        )

    def close(self, slot: int) -> None:
        if self.ops[slot] is not None:
            self.ops[slot].close()
            self.ops[slot] = None

    def call(self, seed: str, step: Step) -> str:
        import torch

        spec, op = self.specs[step.slot], self.ops[step.slot]
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(f"{seed}/{self.rank}".encode()).digest()[:7], "little")
        )
        dtype = getattr(torch, spec["dtype"])

        def part(total: int) -> int:
            chunk = -(-total // self.world)
            return max(0, min(total, (self.rank + 1) * chunk) - min(total, self.rank * chunk))

        if spec["op"] == "AGGemm":
            shapes = (part(step.m), spec["k"]), (part(spec["n"]), spec["k"])
        else:
            shapes = (step.m, part(spec["k"])), (spec["n"], part(spec["k"]))
        x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        out = op(x, weight, m=step.m) if spec["op"] == "AGGemm" else op(x, weight)
        return hashlib.blake2b(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    # -- what disturbs -----------------------------------------------------------------------------

    def fork(self, ending: str) -> bool:
        """Fork a child, which ends in that way; True in the child, which has to return."""
        import torch.distributed as dist

        child = os.fork()
        if child == 0:
            # The destructor of torch's own group waits for threads that a child does not have.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
            if ending == "os_exit":
                os._exit(0)
            if ending == "exit":
                sys.exit(0)
            if ending == "exception":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                raise _ChildEnds
            return True
        deadline = time.monotonic() + TIMEOUT_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"a forked child that ends by {ending} did not end")
            time.sleep(0.002)
        if os.WIFSIGNALED(ended[1]):
            raise AssertionError(f"a child that ends by {ending} got signal {ended[1] & 0x7F}")
        return False

    def refused(self, step: Step, here: bool) -> None:
        """Give one rank input of the wrong type: every rank has to raise, and the op stays good."""
        try:
            if here:
                self.ops[step.slot](None, None)
            else:
                self.call("refused", step)
        except (TypeError, ValueError):
            return
        raise AssertionError("refused input was taken")

    def broken(self, seed: str, step: Step, trouble: str, here: bool) -> None:
        """Break a call on one rank; the others may still have got their results.

        Between hosts a rank may not have received all of the call before when another breaks this
        one, and then fails in that: so the ranks meet first.
        """
        self.meet()
        op = self.ops[step.slot]
        thread = threading.Timer(step.delay_s, op.close)
        if here and trouble == "close":
            thread.start()
        try:
            if here and trouble == "interrupt":
                self.raising = True
                signal.setitimer(signal.ITIMER_REAL, step.delay_s + 1e-5)
            self.call(seed, step)
            while here and self.raising:
                time.sleep(0.0005)
        except (RuntimeError, _Interrupt):
            self.events[f"{trouble}: raised"] += 1
        finally:
            if here and trouble == "close":
                thread.join()

    def build_in_full_memory(self, spec: dict[str, Any], filler: int) -> None:
        """Build an op while /dev/shm is full: every rank has to raise OSError, if it needs any."""
        if self.rank == filler:
            room = os.statvfs("/dev/shm")
            with open(FILLER, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        self.meet()
        self.specs[0], kept = spec, self.specs[0]
        held_op, self.ops[0] = self.ops[0], None
        try:
            self.build(0)
        except OSError:
            self.events["full: raised"] += 1
        finally:
            self.close(0)
            self.specs[0], self.ops[0] = kept, held_op
        self.meet()
        if self.rank == filler:
            os.unlink(FILLER)
        self.meet()

    def meet(self) -> None:
        """Wait for the other ranks. torch's barrier would wait for a killed one for minutes."""
        self.meetings += 1
        name, deadline = f"meeting {self.meetings}", time.monotonic() + TIMEOUT_S
        self.store.add(name, 1)
        while self.store.add(name, 0) < self.world:
            if time.monotonic() > deadline or os.path.exists(self.killed):
                raise _PeerKilled
            time.sleep(0.005)


def held() -> dict[str, int]:
    """What this process holds, once the threads that were joined have gone."""
    gc.collect()
    deadline = time.monotonic() + 1.0
    threads = len(os.listdir("/proc/self/task"))
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last, threads = threads, len(os.listdir("/proc/self/task"))
        if last == threads:
            break
    maps = Path("/proc/self/maps").read_text().splitlines()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads,
        "segments": sum("/dev/shm/" in line for line in maps),
        "resident_bytes": int(resident.split()[1]) << 10,
    }


# -- the supervisor --------------------------------------------------------------------------------


class Soak:
    """Starts ranks, gives them episodes, disturbs them, and compares."""

    def __init__(self, world: int, seed: int, may_fill: bool, noticed_s: float) -> None:
        self.world, self.seed, self.may_fill = world, seed, may_fill
        self.limit_s = noticed_s
        self.rng = random.Random(seed)
        self.ranks: list[subprocess.Popen[str]] = []
        self.before: list[dict[str, int] | None] = [None] * world
        self.counts: Counter[str] = Counter()
        self.noticed_s: list[float] = []
        self.settled_s: list[float] = []
        self.findings: list[str] = []
        self.growth_bytes = 0
        self.episodes = 0
        self.names = set(os.listdir("/dev/shm"))
        self.folder = tempfile.TemporaryDirectory(prefix="flux-soak-")
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "FLUX_TUNE_CACHE": f"{self.folder.name}/tune",
        }

    def run(self, seconds: float, tell: Callable[[str], None]) -> None:
        end = time.monotonic() + seconds
        self.ranks = [self._start(rank) for rank in range(self.world)]
        for hosts in (1, 2):  # what processes keep from their first use of it is no leak
            self._episode(hosts, disturbed=False, seed="first")
        self.before = [None] * self.world
        while time.monotonic() < end:
            self.episodes += 1
            hosts = 1 + self.episodes % 2
            seed = f"{self.seed}/{self.episodes}"
            quiet = self._episode(hosts, disturbed=False, seed=seed)
            loud = self._episode(hosts, disturbed=True, seed=seed)
            self._compare(seed, quiet, loud)
            if self.episodes % 10 == 0:
                tell(
                    f"{self.episodes} episodes, {self.counts['calls']} calls, "
                    f"{self.counts['SIGKILL']} kills, {len(self.findings)} findings"
                )

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
        with suppress(FileNotFoundError):
            os.unlink(FILLER)
        self.folder.cleanup()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        self.before[rank] = None
        return subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--ranks", str(self.world)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            text=True,
            bufsize=1,
        )

    def _episode(self, hosts: int, *, disturbed: bool, seed: str) -> dict[int, dict[str, Any]]:
        """Run one episode; returns the answers of the ranks that were not killed."""
        meeting = f"{self.folder.name}/{time.monotonic_ns()}"
        job = {
            "seed": seed,
            "hosts": hosts,
            "disturbed": disturbed,
            "meeting": meeting,
            "may_fill": self.may_fill,
        }
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
        began = time.monotonic()
        answers: dict[int, dict[str, Any]] = {}
        killed: dict[int, float] = {}
        joined: set[int] = set()
        events = self._events(began) if disturbed else iter(())
        event = next(events, None)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.ranks):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) + len(killed) < self.world:
                pause = EPISODE_S if event is None else max(0.0, event[0] - time.monotonic())
                for key, _ in selector.select(min(pause, 1.0)):
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if line == "joined\n":
                        joined.add(key.data)
                        continue
                    selector.unregister(key.fileobj)
                    if key.data in killed:
                        continue
                    if line:
                        answers[key.data] = json.loads(line)
                    else:
                        self._find(f"{seed}: rank {key.data} ended by itself")
                        killed[key.data] = time.time()
                if event is not None and time.monotonic() >= event[0]:
                    # Before, all wait inside of torch, for as long as its timeout.
                    if not event[1].startswith("SIGKILL") or len(joined) == self.world:
                        self._disturb(event[1], answers, killed)
                    if killed:
                        Path(meeting + ".killed").touch()
                    event = next(events, None)
                if time.monotonic() > began + EPISODE_S:
                    late = sorted(set(range(self.world)) - set(answers) - set(killed))
                    self._find(f"{seed}: ranks {late} did not end within {EPISODE_S:g} s")
                    for rank in late:
                        killed[rank] = time.time()
        self._after(seed, answers, killed)
        return answers

    def _events(self, began: float) -> Iterator[tuple[float, str]]:
        """When, and what, at any moment of a disturbed episode."""
        rng, at = self.rng, began
        kill = rng.choice(["SIGKILL", "SIGKILL", "SIGKILL of all", "", "", "", ""])
        kill_at = began + rng.uniform(0, 2.0)
        while at < began + EPISODE_S:
            at += rng.expovariate(3.0)
            if kill and at > kill_at:
                yield kill_at, kill
                kill = ""
            yield at, rng.choice(["SIGSTOP", "SIGUSR1"])

    def _disturb(
        self, what: str, answers: dict[int, dict[str, Any]], killed: dict[int, float]
    ) -> None:
        there = sorted(set(range(self.world)) - set(answers) - set(killed))
        if not there:
            return
        self.counts[what] += 1
        if what.startswith("SIGKILL"):
            for rank in there if what.endswith("all") else [self.rng.choice(there)]:
                self.ranks[rank].kill()
                killed[rank] = time.time()
            return
        process = self.ranks[self.rng.choice(there)]
        if what == "SIGUSR1":
            for _ in range(self.rng.randint(1, 20)):
                process.send_signal(signal.SIGUSR1)
            return
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.choice([0.01, 0.1, 0.4]))
        process.send_signal(signal.SIGCONT)

    def _after(
        self, seed: str, answers: dict[int, dict[str, Any]], killed: dict[int, float]
    ) -> None:
        """Check what an episode has left, and replace the ranks that are gone."""
        for rank in killed:
            self.ranks[rank].kill()
            self.ranks[rank].wait()
            for pipe in (self.ranks[rank].stdin, self.ranks[rank].stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(FileNotFoundError):
            os.unlink(FILLER)  # its rank was killed
        left = set(os.listdir("/dev/shm")) - self.names
        if left:
            self._find(f"{seed}: left in /dev/shm: {sorted(left)}")
            self.names |= left
        for rank, answer in answers.items():
            self.counts.update(answer["events"])
            self.settled_s.append(round(answer["settled_s"], 1))
            self._hold(seed, rank, answer["held"])
            if not answer["failure"]:
                continue
            if not killed:
                self._find(f"{seed}: rank {rank}: {answer['failure']}", answer["trace"])
                continue
            if answer["failure"].startswith("_PeerKilled"):
                continue
            late = answer["failed_at"] - max(killed.values())
            self.noticed_s.append(round(late, 3))
            if late > self.limit_s:
                self._find(f"{seed}: rank {rank} noticed after {late:.1f} s: {answer['failure']}")
        for rank in killed:
            self.ranks[rank] = self._start(rank)

    def _hold(self, seed: str, rank: int, now: dict[str, int]) -> None:
        before = self.before[rank]
        if before is None:
            self.before[rank] = now
            return
        for what in ("descriptors", "threads", "segments"):
            if now[what] != before[what]:
                self._find(f"{seed}: rank {rank} holds {now[what]} {what}, before {before[what]}")
                before[what] = now[what]
        grown = now["resident_bytes"] - before["resident_bytes"]
        self.growth_bytes = max(self.growth_bytes, grown)
        if grown > GROWTH_BYTES:
            self._find(f"{seed}: memory of rank {rank} grew by {grown >> 20} MiB")
            before["resident_bytes"] = now["resident_bytes"]

    def _compare(
        self, seed: str, quiet: dict[int, dict[str, Any]], loud: dict[int, dict[str, Any]]
    ) -> None:
        for rank, answer in loud.items():
            if rank not in quiet:
                continue
            for number, digest in enumerate(answer["digests"]):
                self.counts["compared"] += 1
                if digest != quiet[rank]["digests"][number]:
                    self._find(f"{seed}: rank {rank}, step {number}: another result than in quiet")

    def _find(self, what: str, trace: str = "") -> None:
        self.findings.append(what)
        print(what, trace, sep="\n", file=sys.stderr, flush=True)


@contextmanager
def own_shared_memory() -> Iterator[bool]:
    """Give this process and its children a /dev/shm of their own; False where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000
    ok = libc.unshare(new_mounts) == 0
    ok = ok and libc.mount(b"none", b"/", None, recursive | private, None) == 0
    yield ok and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=%d" % SHM_BYTES) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes to run")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--seed", type=int, default=1, help="seed of calls and faults")
    parser.add_argument(
        "--noticed", type=float, default=1.0, help="seconds within which survivors must raise"
    )
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _Rank(options.rank, options.ranks).serve()
        return
    began = time.monotonic()
    with own_shared_memory() as may_fill:
        soak = Soak(options.ranks, options.seed, may_fill, options.noticed)
        try:
            soak.run(options.minutes * 60, lambda text: print(text, file=sys.stderr, flush=True))
        finally:
            soak.close()
    import torch

    import flux

    document = {
        "command": f"python benchmarks/soak.py --minutes {options.minutes:g} "
        f"--ranks {options.ranks} --seed {options.seed} --noticed {options.noticed:g}",
        "versions": {"flux": flux.__version__, "torch": torch.__version__},
        "kernel": platform.release(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "own_shared_memory": may_fill,
        "episodes": soak.episodes,
        "counts": dict(sorted(soak.counts.items())),
        "noticed_s": {
            "count": len(soak.noticed_s),
            "median": statistics.median(soak.noticed_s or [0]),
            "max": max(soak.noticed_s, default=0),
        },
        "settled_s": {
            "late": sum(one > 2.0 for one in soak.settled_s),
            "max": max(soak.settled_s, default=0),
        },
        "growth_bytes": soak.growth_bytes,
        "findings": soak.findings,
    }
    text = json.dumps(document, indent=2) + "\n"
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if soak.findings else 0)


if __name__ == "__main__":
    main()
