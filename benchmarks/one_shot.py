"""Few rows between hosts: the paths of the ops, and flux.Collectives beside gloo.

    python benchmarks/one_shot.py [--layouts 2x1 2x2 3x1] [--rates none 10gbit 1gbit]
        [--parts ops collectives] [--sizes 4 4096 ...]

Hosts are network namespaces of this machine (flux/launch/hosts.py; needs root and iproute2).
float32, one thread per rank. The ways are interleaved, behind a barrier each time; the time of a
call is that of rank 0. Raw samples go to benchmarks/results/hosts/one_shot.json, medians to stdout.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import keep, markdown
from multi_host import RESULTS

import flux
from flux import Knobs
from flux.launch.hosts import Hosts
from flux.launch.spawn import run_ranks
from flux.machine import host

ROWS = (1, 8, 64, 256, 1024)
N = K = 1024
SIZES = (4, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes
OPS: dict[str, Any] = {"gemm_ar": flux.GemmAR, "gemm_rs": flux.GemmRS, "ag_gemm": flux.AGGemm}
Ways = dict[str, Callable[[], object]]


def interleaved(ways: Ways, repeats: int) -> dict[str, list[float]]:
    """Return the times of each way in microseconds, without the first two rounds.

    Every round has an order of its own, the same on all ranks. In one order two ways of equal knobs
    differed by 15%: what ran before leaves caches and sockets warm.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(repeats)
    for round_ in range(repeats + 2):
        for name in order.sample(list(ways), len(ways)):
            dist.barrier()
            began = time.perf_counter()
            ways[name]()
            if round_ >= 2:
                times[name].append(round((time.perf_counter() - began) * 1e6, 1))
    return times


def time_ops(repeats: int, rank: int, progress: Any) -> list[dict[str, Any]]:
    world, results = dist.get_world_size(), []
    torch.set_num_threads(1)
    for name, kind in OPS.items():
        tunings = {"chosen": "cache", "fused": Knobs(), "one_shot": Knobs(path="one_shot")}
        ops = {
            way: kind(max_m=max(ROWS), n=N, k=K, tuning=tuning) for way, tuning in tunings.items()
        }
        gathers = name == "ag_gemm"
        for m in ROWS:
            rows = ops["fused"].own_rows(m) if gathers else m
            spec = ops["fused"].spec
            x = torch.randn(rows, K if gathers else spec.local_k(world, rank))
            w = torch.randn(spec.local_n(world, rank)[0] if gathers else N, x.shape[1])
            whole = torch.randn(m, x.shape[1])
            summed = torch.randn(m, N)
            options = {"m": m} if gathers else {}
            ways: Ways = {
                way: lambda op=op, x=x, w=w, options=options: op(x, w, **options)
                for way, op in ops.items()
            }
            ways["gemm"] = lambda whole=whole, w=w: torch.mm(whole, w.t())
            ways["gloo"] = lambda summed=summed: dist.all_reduce(summed)
            path = ops["chosen"].schedule(m).knobs.path
            times = interleaved(ways, repeats)
            results.append({"op": name, "m": m, "n": N, "k": K, "path": path, "us": times})
        for op in ops.values():
            op.close()
    return results


def time_collectives(
    argument: tuple[list[int], int], rank: int, progress: Any
) -> list[dict[str, Any]]:
    sizes, repeats = argument
    torch.set_num_threads(1)
    results = []
    with flux.Collectives() as ranks:
        for nbytes in sizes:
            x = torch.ones(nbytes // 4)
            ways: Ways = {
                "gloo": lambda x=x: dist.all_reduce(x),
                "flux": lambda x=x: ranks.all_reduce(x, out=x),
            }
            times = interleaved(ways, max(5, min(repeats, (64 << 20) // nbytes)))
            results.append({"collective": "all_reduce", "bytes": nbytes, "us": times})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2", "3x1"])
    parser.add_argument("--rates", nargs="+", default=["none", "10gbit", "1gbit"])
    parser.add_argument("--parts", nargs="+", default=["ops", "collectives"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    results = []
    for layout in args.layouts:
        hosts, each = map(int, layout.split("x"))
        for rate in args.rates:
            with Hosts(hosts, None if rate == "none" else rate) as made:
                places = made.placed([rank // each for rank in range(hosts * each)])
                measured = []
                if "ops" in args.parts:
                    measured += run_ranks(time_ops, args.repeats, hosts * each, places=places)
                if "collectives" in args.parts:
                    argument = (args.sizes, args.repeats)
                    measured += run_ranks(time_collectives, argument, hosts * each, places=places)
            results += [{"layout": layout, "rate": rate, **result} for result in measured]
    document = {"device": host.device(), "versions": host.versions(), "runs": results}
    keep(document, RESULTS / "one_shot.json")
    table = [
        [
            run["layout"],
            run["rate"],
            run.get("op", "all_reduce"),
            str(run.get("m", run.get("bytes"))),
            run.get("path", ""),
            *(
                f"{statistics.median(run['us'][way]) / 1e3:.3f}" if way in run["us"] else ""
                for way in ("gloo", "gemm", "fused", "one_shot", "chosen", "flux")
            ),
        ]
        for run in results
    ]
    header = ["layout", "rate", "what", "rows or bytes", "path", "gloo ms", "gemm ms"]
    print(markdown([*header, "fused ms", "one_shot ms", "chosen ms", "Collectives ms"], table))


if __name__ == "__main__":
    main()
