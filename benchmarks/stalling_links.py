"""Calls over links that stall at random: every result is compared with float64.

    python benchmarks/stalling_links.py [--calls 1000] [--layout 2x2] [--seed 1]

Hosts (network namespaces; needs root and iproute2) of `--layout`, links of 1 Gbit/s. A rank pulls
the cable of a random host for 1 to 60 ms, at random, while calls of all three ops with changing M
go on; TCP then needs 0.2 s and more to recover. Writes
benchmarks/results/hosts/stalling_links.json.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from typing import Any

import torch.distributed as dist
from common import keep
from multi_host import RESULTS

import flux
from flux.bench.reference import judge, make_inputs, make_reference
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.launch.hosts import Hosts, set_link
from flux.launch.spawn import run_ranks
from flux.machine import host

N, K, MAX_M = 512, 256, 1024
OPS: dict[str, Any] = {"ag_gemm": flux.AGGemm, "gemm_rs": flux.GemmRS, "gemm_ar": flux.GemmAR}


class Saboteur(threading.Thread):
    """Pulls cables and plugs them in again until it is told to stop."""

    def __init__(self, switch: str, hosts: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.switch, self.hosts, self.random = switch, hosts, random.Random(seed)
        self.enough = threading.Event()
        self.stalls = 0

    def run(self) -> None:
        while not self.enough.wait(self.random.uniform(0.05, 1.0)):
            victim = self.random.randrange(self.hosts)
            set_link(self.switch, victim, up=False)
            time.sleep(self.random.uniform(0.001, 0.06))
            set_link(self.switch, victim, up=True)
            self.stalls += 1


def calls(argument: dict[str, Any], rank: int, progress: Any) -> dict[str, Any]:
    """All calls of one rank; the result counts on rank 0."""
    world, wrong = dist.get_world_size(), []
    saboteur = Saboteur(argument["switch"], argument["hosts"], argument["seed"])
    draw = random.Random(argument["seed"])
    ops = {name: OPS[name](max_m=MAX_M, n=N, k=K, timeout_s=60.0) for name in OPS}
    began = time.monotonic()
    if rank == 0:
        saboteur.start()
    for index in range(argument["calls"]):
        name = draw.choice(list(OPS))
        problem = Problem(Op[name], draw.randint(1, MAX_M), N, K, "float32", world)
        inputs = make_inputs(problem, rank, seed=index)
        options = {"m": problem.m} if problem.op.gathers else {}
        result = ops[name](inputs.x, inputs.weight, **options)
        verdict = judge(problem, rank, result, make_reference(problem, rank, inputs))
        if not verdict.ok:
            wrong.append(f"call {index}, rank {rank}, {problem}: {verdict.complaint}")
        if index % 10 == 0 and rank == 0:
            progress("calls", index, argument["calls"])
    saboteur.enough.set()
    if rank == 0:
        saboteur.join()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, wrong)
    for op in ops.values():
        op.close()
    return {
        "wrong": [text for texts in everybody for text in texts],
        "stalls": saboteur.stalls,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="number of calls")
    parser.add_argument("--layout", default="2x2", help="hosts x ranks of each")
    parser.add_argument("--seed", type=int, default=1, help="seed of the stalls")
    options = vars(parser.parse_args())
    count, ranks = map(int, options["layout"].split("x"))
    places = [index // ranks for index in range(count * ranks)]
    with Hosts(count, "1gbit") as hosts:
        argument = {**options, "switch": hosts.switch, "hosts": count}
        outcome = run_ranks(calls, argument, len(places), places=hosts.placed(places))
    content = {
        "command": f"python benchmarks/stalling_links.py --calls {options['calls']} "
        f"--layout {options['layout']} --seed {options['seed']}",
        "device": host.device(),
        "versions": host.versions(),
        **options,
        **outcome,
    }
    keep(content, RESULTS / "stalling_links.json")
    print(
        f"{options['calls']} calls on {len(places)} ranks, {outcome['stalls']} stalls in "
        f"{outcome['seconds']} s: {len(outcome['wrong'])} wrong results"
    )
    raise SystemExit(1 if outcome["wrong"] else 0)


if __name__ == "__main__":
    main()
