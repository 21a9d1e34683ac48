"""How programs end: two ranks of many kinds, each ended in many ways, and what their statuses were.

    python benchmarks/endings.py --rounds 5 --json endings.json

Every rank is an interpreter that runs to its very end, where daemon threads, static destructors
and objects that were never collected meet. An ending is good if both ranks leave with a status
that their program explains: an abort (-6), a crash (-11), a rank that must be killed (-9) or that
does not hear of its peer's end are findings. Kinds named "torch" do without flux, as a control.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

WORLD = 2
LIMIT_S = 120.0
"""A rank that takes longer is killed, after its threads' stacks were printed."""
ROWS, D, F = 4, 8, 16  # rows per rank, features outside and inside of the block
OP_TIMEOUT_S = 20.0
SPREAD_S = 0.3
"""Ctrl-C comes within this time of the first step."""

KINDS = {
    "torch": "collectives of gloo, no flux",
    "torch-compiled": "functional collectives, compiled by Inductor, no flux",
    "ops": "AGGemm and GemmRS over shared memory",
    "ops-network": "the same between hosts",
    "layers": "layers, forward and backward",
    "layers-network": "the same between hosts",
    "aot": "compiled layers, backend aot_eager",
    "inductor": "compiled layers",
    "inductor-network": "the same between hosts",
    "pass": "torch-compiled with flux.compile.enable()",
}
# By ending, the statuses that are good; "peer": rank 1 hears of the end of rank 0 by an error.
ENDINGS: dict[str, tuple[set[int], set[int]]] = {
    "return": ({0}, {0}),
    "raise": ({1}, {1}),
    "raise-one": ({1}, {1}),
    "raise-forward": ({1}, {1}),
    "raise-backward": ({1}, {1}),
    "raise-destroyed": ({1}, {1}),
    "exit": ({3}, {3}),
    "exit-one": ({3}, {1}),
    "exit-thread": ({0}, {0}),
    "interrupt-one": ({-2}, {1}),
    "interrupt": ({-2, 1}, {-2, 1}),  # each rank, at any time: the other may notice first
    "daemon": ({1}, {0, 1}),  # rank 0 ends while its daemon thread is inside of a call
}


# -- in the ranks ----------------------------------------------------------------------------------


class Trap:
    """A place in the model at which a rank raises, forward or backward, once it is armed."""

    armed = ""


def _define_trap() -> Any:
    @torch.library.custom_op("endings::trap", mutates_args=())
    def trap(x: torch.Tensor) -> torch.Tensor:
        if Trap.armed == "forward":
            raise RuntimeError("inside of the forward pass")
        return x.clone()

    @torch.library.custom_op("endings::trap_backward", mutates_args=())
    def trap_backward(x: torch.Tensor) -> torch.Tensor:
        if Trap.armed == "backward":
            raise RuntimeError("inside of the backward pass")
        return x.clone()

    trap.register_fake(torch.empty_like)
    trap_backward.register_fake(torch.empty_like)
    trap.register_autograd(lambda ctx, grad: trap_backward(grad))
    return trap


def _model(kind: str, rank: int) -> Callable[[], None]:
    """One step of a kind of program; every rank calls it equally often."""
    import torch.distributed as dist

    trap = _define_trap()
    torch.manual_seed(rank)
    x = torch.randn(ROWS, D, requires_grad=True)
    first = torch.randn(F // WORLD, D, requires_grad=True)
    second = torch.randn(D, F // WORLD, requires_grad=True)
    base = kind.removesuffix("-network")
    if base in ("torch-compiled", "pass"):
        import torch.distributed._functional_collectives as funcol

        group = dist.group.WORLD
        assert group is not None
        if base == "pass":
            import flux

            flux.compile.enable()

        def block(x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(funcol.all_gather_tensor_autograd(x, 0, group) @ first.t())
            h = trap(h)
            return funcol.reduce_scatter_tensor_autograd(h @ second.t(), "sum", 0, group)

        block = torch.compile(block)
    elif base == "torch":

        def block(x: torch.Tensor) -> torch.Tensor:
            rows = [torch.empty(ROWS, D) for _ in range(WORLD)]
            dist.all_gather(rows, x.detach())
            h = trap((torch.cat(rows) + 0 * x.sum()) @ first.t())
            z = (h @ second.t()).clone()
            dist.all_reduce(z.detach())
            return z
    elif base == "ops":
        import flux

        gather = flux.AGGemm(max_m=WORLD * ROWS, n=F, k=D, timeout_s=OP_TIMEOUT_S)
        reduce = flux.GemmRS(max_m=WORLD * ROWS, n=D, k=F, timeout_s=OP_TIMEOUT_S)

        def block(x: torch.Tensor) -> torch.Tensor:
            return reduce(trap(gather(x, first)), second)
    else:
        from torch import nn

        from flux.layers import ColumnParallelLinear, RowParallelLinear

        up = ColumnParallelLinear(D, F, sequence_parallel=True)
        down = RowParallelLinear(F, D, sequence_parallel=True)
        both = nn.ModuleList([up, down])

        def block(x: torch.Tensor) -> torch.Tensor:
            return down(trap(torch.tanh(up(x))))

        block.both = both  # type: ignore[attr-defined]
        if base != "layers":
            backend = "aot_eager" if base == "aot" else "inductor"
            block = torch.compile(block, fullgraph=True, backend=backend)

    def step() -> None:
        block(x).square().sum().backward()

    return step


def program(kind: str, how: str, rank: int, meeting: str) -> None:
    """Run one rank; the driver examines its exit status."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S - 20, exit=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if kind.endswith("-network"):
        os.environ["FLUX_HOST"] = f"host{rank}"
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store: dist.Store
    if meeting.isdigit():
        store = dist.TCPStore("127.0.0.1", int(meeting), WORLD, rank == 0, limit)
    else:
        store = dist.FileStore(meeting, WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    step = _model(kind, rank)
    step()
    step()
    first = rank == 0
    print("stepped", file=sys.stderr, flush=True)
    if how == "raise" or (how == "raise-one" and first):
        raise ValueError("as planned")
    if how == "raise-destroyed":
        try:
            raise ValueError("as planned")
        finally:
            dist.destroy_process_group()
    if how == "exit" or (how == "exit-one" and first):
        sys.exit(3)
    if how == "exit-thread":
        thread = threading.Thread(target=lambda: (step(), sys.exit(3)))
        thread.start()
        thread.join()
        return
    if how == "interrupt-one" and first:
        signal.raise_signal(signal.SIGINT)
    if how.startswith(("raise-forward", "raise-backward")) and first:
        Trap.armed = how.removeprefix("raise-")
    if how == "daemon":
        if first:
            inside = threading.Thread(target=step, daemon=True)
            inside.start()
            time.sleep(0.1)  # the peer does not come: the thread waits, wherever that is
            raise ValueError("as planned")
        time.sleep(1.5)
        return
    if how == "return":
        return
    while True:
        step()


# -- in the driver ---------------------------------------------------------------------------------


def _preload(kinds: Sequence[str]) -> None:
    """Do once what ranks need, which are forked from here: imports, and looks at the compiler."""
    import torch._dynamo

    if any(not kind.startswith("torch") for kind in kinds):
        import flux.compile
        import flux.layers  # noqa: F401
    if any(kind.startswith(("torch-compiled", "inductor", "pass")) for kind in kinds):
        torch.compile(torch.sin)(torch.ones(4, requires_grad=True)).sum().backward()
        # A fork inherits Inductor's pool of threads without the threads, and would wait for them.
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.pool().shutdown()
        AsyncCompile.pool.cache_clear()


@dataclass
class Result:
    """Statuses by rank, what is bad about them or "", and what the ranks wrote."""

    statuses: list[int]
    finding: str
    texts: list[str]


def _finding(how: str, statuses: Sequence[int], texts: Sequence[str]) -> str:
    for status, good, text in zip(statuses, ENDINGS[how], texts, strict=True):
        if status not in good:
            return f"statuses {list(statuses)}"
        if "stepped" not in text:
            return "a rank did not get to its end"
        if "did not deliver" in text and how != "daemon":
            return "a rank did not hear of its peer's end"
    return ""


def run(kind: str, how: str, seed: int, folder: Path) -> Result | tuple[str, str, int, str]:
    """The result; in the forked ranks, which start here, the arguments of ``program``."""
    planned, chance = how, random.Random(seed)
    meeting = str(folder / "store")
    if seed % 2:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            meeting = str(s.getsockname()[1])
    files = [folder / f"{rank}.txt" for rank in range(WORLD)]
    pids = []
    for rank, file in enumerate(files):
        file.touch()
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)  # for core files
            out = os.open(file, os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            return kind, how, rank, meeting
        pids.append(pid)
    statuses: dict[int, int] = {}
    due = float("inf")  # of Ctrl-C
    end = time.monotonic() + LIMIT_S
    while len(statuses) < WORLD:
        left = [rank for rank in range(WORLD) if rank not in statuses]
        for rank in left:
            done, status = os.waitpid(pids[rank], os.WNOHANG)
            if done:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if how == "interrupt" and due > end and all("stepped" in f.read_text() for f in files):
            due = now + chance.random() * SPREAD_S
        for rank in left:
            if rank not in statuses and due < now:
                os.kill(pids[rank], signal.SIGINT)
            if rank not in statuses and end < now:
                os.kill(pids[rank], signal.SIGKILL)
        if due < now:
            how, due = "interrupted", float("inf")
        time.sleep(0.005)
    texts = [file.read_text(errors="replace") for file in files]
    both = [statuses[rank] for rank in range(WORLD)]
    return Result(both, _finding(planned, both, texts), texts)


def _busy() -> list[subprocess.Popen[bytes]]:
    """Keep every core busy: races at exit show under load."""
    loop = "import os\nwhile os.getppid() != 1: pass"
    command = [sys.executable, "-c", loop]
    return [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]


def drive() -> tuple[str, str, int, str] | None:
    """Run the endings that the command line asks for; returns in ranks, with what they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--endings", nargs="+", choices=ENDINGS, default=list(ENDINGS))
    parser.add_argument("--rounds", type=int, default=1, help="of all kinds with all endings")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--load", action="store_true", help="keep all cores busy")
    parser.add_argument("--json", type=Path, help="where counts go")
    parser.add_argument("--keep", type=Path, help="folder for what ranks write, and core files")
    args = parser.parse_args()
    _preload(args.kinds)
    counts: dict[str, dict[str, Counter[str]]] = {}
    findings = number = 0
    driver, busy = os.getpid(), _busy() if args.load else []
    place = args.keep or Path(tempfile.mkdtemp(prefix="flux-endings-"))
    try:
        for seed in range(args.seed, args.seed + args.rounds):
            for kind, how in itertools.product(args.kinds, args.endings):
                number += 1
                folder = place / f"{seed}-{kind}-{how}"
                folder.mkdir(parents=True)
                result = run(kind, how, seed, folder)
                if isinstance(result, tuple):
                    return result
                counts.setdefault(kind, {}).setdefault(how, Counter())[f"{result.statuses}"] += 1
                findings += bool(result.finding)
                report = {
                    "command": "python benchmarks/endings.py " + " ".join(sys.argv[1:]),
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "endings": number,
                    "findings": findings,
                    "statuses": counts,
                }
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
                print(f"{number}: {kind} {how} {result.statuses} {result.finding}", flush=True)
                if result.finding:
                    print("\n".join(result.texts), flush=True)
    finally:
        if os.getpid() == driver:
            for process in busy:
                process.kill()
            if args.keep is None:
                shutil.rmtree(place)
    print(f"{number} endings, {findings} findings")
    return None


if __name__ == "__main__":
    work = drive()
    if work is not None:
        program(*work)
