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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from soak_rank import EPISODE_S, FILLER, Rank

SHM_BYTES = 256 << 20
GROWTH_BYTES = 48 << 20
"""Of resident memory, which allocators do not give back at once."""


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
        Rank(options.rank, options.ranks).serve()
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
            "late": sum(seconds > 2.0 for seconds in soak.settled_s),
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
