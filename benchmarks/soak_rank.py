"""The ranks of soak.py: what they do in an episode, and what they report."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 30
SLOTS = 3
TIMEOUT_S = 30.0
EPISODE_S = 150.0
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


class Rank:
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
