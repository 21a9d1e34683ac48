"""Flux's minimal kernels under many seeds: each decides sizes, knobs, and the order of all warps,
transfers and products. In a third of the calls blocks claim their tiles, some on too few
multiprocessors for the grids of all ranks.

    python tests/support/emulation/seeds.py --seeds 10000 --out benchmarks/results/ptx/seeds.json
    python tests/support/emulation/seeds.py --arch 90a --first 4711 --seeds 1    # one of them again

A seed gives the same order again: of warps in each kernel, and of the streams of all ranks, which
take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from emulated import SwitchedWorld  # noqa: E402
from every_kernel import Plan, build_kernels, built_ops, device_with, minimal, only, worst  # noqa: E402
from flux.core.knobs import TILE_SCHEDULERS  # noqa: E402
from flux.core.problem import BY_SHORT  # noqa: E402
from flux.kernels.build import find_tools  # noqa: E402
from flux.kernels.config import ARCHS, GemmConfig  # noqa: E402
from flux.kernels.registry import Registry  # noqa: E402
from flux.transport.virtual import VirtualWorld  # noqa: E402
from ptx_target import ptx_target  # noqa: E402
from reference import Inputs, Problem  # noqa: E402
from virtual_cases import call_all, knobs_of, topology_of  # noqa: E402


def configs(arch: str) -> list[GemmConfig]:
    """The kernels of the minimal set, with each tile scheduler."""
    return [replace(c, tile_scheduler=s) for s in TILE_SCHEDULERS for c in minimal(arch)]


def plan_of(seed: int, arch: str) -> tuple[GemmConfig, Plan]:
    """What a seed asks for: small, so that it takes a tenth of a second."""
    rng, of_tiles = random.Random(f"{seed} {arch}"), random.Random(f"{seed} {arch} tiles")
    op = rng.choice(["ag_gemm", "gemm_rs", "gemm_ar"])
    (config,) = (c for c in minimal(arch) if c.op == ("ag_gemm" if op == "ag_gemm" else "gemm_rs"))
    world = rng.choice([2, 2, 2, 3, 4])
    if of_tiles.random() < 0.3:
        config = replace(config, tile_scheduler="dynamic")
    rows = rng.choice([1, world, rng.randint(2, 40), rng.randint(40, 150)])
    columns, depth = 8 * rng.randint(1, 20), 8 * rng.randint(1, 12)
    shared = {"ag_gemm": (columns * world, depth)}.get(op, (columns, depth * world))
    problem = Problem(
        op,
        rows,
        (shared[0],),
        shared[1],
        BY_SHORT[config.dtype].torch,
        reduce="sum" if op == "ag_gemm" else rng.choice(["sum", "avg"]),
    )
    margin = rng.choice([None, 1, 2] if op == "ag_gemm" else [None, 0, 1])
    knobs = replace(knobs_of(rng, world), reduce="local", sm_margin=margin)
    topology = topology_of(rng, world)
    if rng.random() < 0.25:  # whose chunks are those of ranks, around a ring
        knobs = replace(knobs, path="medium", comm_tile_rows=None, order=None, swizzle=None)
    elif op != "gemm_rs" and rng.random() < 0.4:
        knobs = replace(knobs, path="in_kernel", direction=None, order=None, comm_tile_rows=None)
    knobs = replace(knobs, tile_scheduler=config.tile_scheduler)
    if (op, arch, knobs.path, knobs.sends) == ("gemm_rs", "90a", "fused", None):
        knobs = replace(knobs, reduce=of_tiles.choice(["local", "in_kernel"]))
    if op == "ag_gemm" and knobs.path == "fused" and of_tiles.random() < 0.5:
        knobs = replace(knobs, direction="push", order="direct")
    if (op, arch, knobs.path) == ("gemm_ar", "90a", "in_kernel") and of_tiles.random() < 0.3:
        knobs = replace(knobs, reduce="in_flight")
    return config, Plan(problem, world, knobs, topology, (rows,), seed)


def world_of(plan: Plan, config: GemmConfig) -> type[VirtualWorld]:
    """Return the kind of ranks: half of those whose kernels send have an NVLink switch."""
    sends = plan.knobs.path == "in_kernel" and config.arch == "90a"
    by_switch = plan.knobs.reduce == "in_flight" or plan.seed % 2 == 0
    return SwitchedWorld if sends and by_switch else VirtualWorld


def has_late_blocks(plan: Plan) -> bool:
    """Return whether blocks of a call may find no room before others end.

    They claim tiles, and wait for what copies bring alone: for no kernel of a peer.
    """
    k = plan.knobs
    way = (k.tile_scheduler, k.path, k.direction, k.order)
    return plan.problem.gathers and way == ("dynamic", "fused", "push", "direct")


def kind_of(plan: Plan) -> str:
    """Name of the op, the path or who sums, and the tile scheduler of a plan."""
    k = plan.knobs
    sums = {"in_kernel": "sums_in_kernel", "in_flight": "sums_by_switch"}
    path = sums.get(k.reduce or "", k.path)
    return f"{plan.problem.op} {path} {k.tile_scheduler}"


def run_seed(device: Any, registry: Registry, seed: int, arch: str) -> str:
    """Make the call of a seed; return its kind.

    Raises:
        AssertionError: a result is wrong.
        RuntimeError: the machine has found a fault.
    """
    config, plan = plan_of(seed, arch)
    built = registry.find(config)
    assert built is not None, config.name
    device.cuda.clear()
    device.cuda.seed = 1 + 1000 * seed
    device.take_turns(device.cuda.seed)
    kind = world_of(plan, config)
    with only(device, built, plan.world), kind(plan.world, device) as ranks:
        if has_late_blocks(plan):
            cluster = config.cluster[0] * config.cluster[1]
            device.cuda.multiprocessors = cluster * (1 + seed % plan.world)
        ops = built_ops(plan, ranks)
        inputs = Inputs(plan.problem, plan.rows[0], plan.world, seed, bias=seed % 2 == 0)
        outs = call_all(ranks, ops, inputs, plan.problem.gathers and seed % 3 == 0)
        device.finish()
        for rank, op in enumerate(ops):
            op.wait()
            worst(plan, inputs, outs[rank], rank)
            op.close()
    return kind_of(plan)


def run_seeds(arch: str, seeds: range, kind: str = "") -> Iterator[tuple[int, str, str]]:
    """Run seeds whose kind contains ``kind``; yield (seed, kind, what went wrong) for each.

    After a fault a new device goes on.
    """
    registry = build_kernels(configs(arch))
    waiting = iter(seed for seed in seeds if kind in kind_of(plan_of(seed, arch)[1]))
    seed = next(waiting, None)
    while seed is not None:
        with ExitStack() as stack:
            device, problem = None, ""
            while seed is not None and not problem:
                try:
                    device = device or stack.enter_context(device_with(registry))
                    op = run_seed(device, registry, seed, arch)
                except Exception as error:
                    op, problem = kind_of(plan_of(seed, arch)[1]), f"{error}"
                    stack.pop_all()  # whose end would complain of the same fault
                yield seed, op, problem
                seed = next(waiting, None)


def main() -> int:
    """Run the seeds, and write how many, how long, and which failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", default=",".join(ARCHS), help="which take turns by the thousand")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100, help="of each architecture")
    parser.add_argument("--kind", default="", help="part of an op and its path: gemm_ar in_kernel")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    begin, rows, failures = time.monotonic(), [], []
    for arch in options.arch.split(","):
        counts: Counter[str] = Counter()
        since = time.monotonic()
        for seed, op, problem in run_seeds(
            arch, range(options.first, options.first + options.seeds), options.kind
        ):
            counts[op] += 1
            if problem:
                failures.append({"arch": arch, "seed": seed, "op": op, "error": problem[:2000]})
                print(f"sm_{arch}, seed {seed}: {plan_of(seed, arch)[1]}: {problem}", flush=True)
            if (seed + 1) % 500 == 0:
                print(f"sm_{arch}: {seed + 1}, {time.monotonic() - since:.0f} s", flush=True)
        rows.append({"arch": arch, "seeds": sum(counts.values()), "ops": dict(counts)})
        rows[-1]["seconds"] = round(time.monotonic() - since)
    tools = find_tools(ptx_target())
    figures = {
        "command": f"python tests/support/emulation/seeds.py --seeds {options.seeds}"
        + (f" --kind '{options.kind}'" if options.kind else ""),
        "first": options.first,
        "nvcc": tools.nvcc.version,
        "cutlass": tools.cutlass.version,
        "seconds": round(time.monotonic() - begin),
        "runs": rows,
        "failures": failures,
    }
    print(json.dumps(figures))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(bool(main()))
