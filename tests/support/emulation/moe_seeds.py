"""Kernels of experts under many seeds: each decides op, sizes, routing, knobs, and the order of all
warps and transfers. Results are compared with float64; every fourth seed runs twice, in another
order, and must give the same bits.

    python tests/support/emulation/moe_seeds.py --seeds 600 --out benchmarks/results/ptx/moe.json
    python tests/support/emulation/moe_seeds.py --first 4711 --seeds 1    # one of them again
    python tests/support/emulation/moe_seeds.py --only e4m3 --seeds 600   # float8, moe_float8.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from every_kernel import build_kernels, device_with, only  # noqa: E402
from flux.core.problem import BY_SHORT  # noqa: E402
from flux.kernels.config import GATED, GROUPED, GemmConfig  # noqa: E402
from flux.kernels.registry import BuiltKernel  # noqa: E402
from flux.kernels.sets import config_set  # noqa: E402
from flux.transport.virtual import VirtualWorld  # noqa: E402
from moe_cases import MOE_OPS, ROUTINGS, MoeCase, MoeInputs  # noqa: E402
from op_cases import same_bits  # noqa: E402
from ptx_figures import write_figures  # noqa: E402
from reference import ACTIVATIONS  # noqa: E402
from virtual_cases import knobs_of, least_tile_rows, topology_of  # noqa: E402


def configs() -> list[GemmConfig]:
    """The kernels of experts in the default set."""
    return [config for config in config_set("default") if config.op in GROUPED]


def case_of(seed: int, kernels: list[GemmConfig]) -> tuple[GemmConfig, MoeCase, int, str]:
    """What a seed asks for: a kernel, an op, its world and its kind of routing."""
    rng = random.Random(f"moe {seed}")
    op = list(MOE_OPS)[seed % len(MOE_OPS)]
    gathers = MOE_OPS[op].kind.gathers
    config = rng.choice([c for c in kernels if (c.op == GROUPED[0]) == gathers])
    world = rng.choice([2, 2, 3, 4, 8])
    experts = rng.choice([1, 2, 3, 5, 8, 13])
    ep = rng.choice([d for d in range(1, world + 1) if world % d == 0 and d <= experts])
    parts, step = world // ep, config.alignment_elements
    deepest = 48 if config.itemsize == 1 else 12  # more k tiles than one
    size = (step * rng.randint(1, 20) * (parts if step > 1 else 1), step * rng.randint(1, deepest))
    if step == 1:  # shares of ranks that differ, or are empty
        size = rng.randint(1, 80), rng.randint(1, 90)
    shared, other = size
    if config.arch == "90a" and seed // len(MOE_OPS) % 4 == 3:  # more k tiles than stages
        deep = 8 * config.tile[2]
        shared, other = (shared, other + deep) if gathers else (shared + deep * parts, other)
    activation = rng.choice(("none", *ACTIVATIONS)) if gathers else "none"
    fused = config.activation in GATED
    if fused:
        activation = config.activation.removeprefix("gated_")
    way: dict[str, Any] = {} if op == "gather" else {"direction": "push"}
    way |= {"order": "direct"} if op == "dispatch" else {}
    case = MoeCase(
        op,
        rng.choice([1, world, rng.randint(2, 40), rng.randint(40, 300)]),
        shared if gathers else other,
        other if gathers else shared,
        experts,
        topk=rng.randint(1, min(experts, 10)),
        ep=ep,
        dtype=BY_SHORT[config.dtype].torch,
        knobs=replace(knobs_of(rng, world), reduce="local", **way),
        transpose=config.weight == "kn",
        activation=activation,
        gated=fused or (activation != "none" and rng.random() < 0.5),
        bias=rng.random() < 0.6,
        listed=rng.random() < 0.4,
        scaling=config.scaling,
        fast=config.fast_accum,
    )
    least = case.knobs.comm_tile_rows
    if op == "gather" and least is not None:  # so large that a world of one thread runs the op
        least = max(least, least_tile_rows(world, case.max_m))
        case = replace(case, knobs=replace(case.knobs, comm_tile_rows=least))
    kind = rng.choice(ROUTINGS)
    return config, replace(case, room=rng.choice((None, None, 0, 3, 200))), world, kind


def run_case(
    device: Any,
    built: BuiltKernel,
    case: MoeCase,
    world: int,
    kinds: list[str],
    seed: int,
    make_world: Callable[..., VirtualWorld] = VirtualWorld,
) -> tuple[list[list[torch.Tensor]], float]:
    """Make a call for each kind of routing; return results by call and rank, and the worst error.

    The error is a part of the bound. ``make_world(world, device)`` places the ranks.
    """
    rng = random.Random(seed)
    device.cuda.clear()
    device.cuda.seed = 1 + 1000 * seed
    device.take_turns(device.cuda.seed)
    results, worst = [], 0.0
    with only(device, built, world), make_world(world, device) as ranks, ExitStack() as closing:
        topology = topology_of(rng, world) if ranks.nodes == 1 else None
        options = {"topology": topology, "timeout_s": 120.0}
        ops = [
            closing.enter_context(case.build(group=ranks.rank(r), **options)) for r in range(world)
        ]
        for number, kind in enumerate(kinds):
            m = case.max_m if number == 0 else rng.randint(1, case.max_m)
            inputs = MoeInputs(case, m, world, kind, number + 7)
            calls = [inputs.arguments(r) for r in range(world)]
            for r in range(world):
                device.keep(calls[r][0])
            outs = ranks.run(lambda r, calls=calls: ops[r](*calls[r][:3], **calls[r][3]))
            device.finish()
            for r, op in enumerate(ops):
                op.wait()
                worst = max(worst, inputs.compare(outs[r], r))
            results.append(outs)
    return results, worst


def run_seed(device: Any, kernels: dict[str, BuiltKernel], seed: int) -> tuple[str, float]:
    """Run a seed's case; return the op and the worst error as a part of the bound.

    Raises:
        AssertionError: a result is wrong, or differs from run to run.
        RuntimeError: the machine has found a fault.
    """
    config, case, world, kind = case_of(seed, [b.config for b in kernels.values()])
    kinds = [kind, "random"]
    results, worst = run_case(device, kernels[config.name], case, world, kinds, seed)
    if seed % 4 == 0:
        # Routings and inputs are the same; the order of warps and streams is not.
        more, _ = run_case(device, kernels[config.name], case, world, kinds, seed)
        for first, second in zip(results, more, strict=True):
            assert all(same_bits(a, b) for a, b in zip(first, second, strict=True)), case
    return f"{config.op} {case.op}", worst


def main() -> int:
    """Run seeds of the ops of experts."""
    return seeds_of(Path(__file__).name, configs(), run_seed, case_of)


def seeds_of(
    program: str, chosen: list[GemmConfig], run: Callable[..., tuple[str, float]], case: Any
) -> int:
    """Run seeds, and write how many of each op there were, and what failed.

    ``run(device, kernels, seed)`` runs the case that ``case(seed, configs)`` returns.
    """
    parser = argparse.ArgumentParser(description=seeds_of.__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    chosen = [config for config in chosen if options.only in config.name]
    registry = build_kernels(chosen)
    wanted = {c.name for c in chosen}
    kernels = {name: built for name, built in sorted(registry.kernels.items()) if name in wanted}
    begin, counts, worst = time.monotonic(), Counter[str](), dict[str, float]()
    failures = []
    todo = list(range(options.first, options.first + options.seeds))
    while todo:
        with ExitStack() as stack:
            device = stack.enter_context(device_with(registry))
            while todo:
                seed = todo.pop(0)
                try:
                    op, error = run(device, kernels, seed)
                except Exception as fault:
                    failures.append({"seed": seed, "error": str(fault)[:1000]})
                    what = case(seed, [b.config for b in kernels.values()])
                    print(f"seed {seed}: {what}: {fault}", flush=True)
                    stack.pop_all()  # whose end would complain of the same fault
                    break
                counts[op] += 1
                worst[op] = max(worst.get(op, 0.0), error)
    rows: list[dict[str, Any]] = [
        {"kernel and op": op, "seeds": counts[op], "error / bound": round(worst[op], 4)}
        for op in sorted(counts)
    ]
    rows.append({"failures": failures, "seconds": round(time.monotonic() - begin)})
    for row in rows:
        print(row)
    if options.out is not None:
        command = f"python tests/support/emulation/{program} --seeds {options.seeds}"
        command += f" --only {options.only}" if options.only else ""
        write_figures(options.out, command, rows)
    return len(failures)


if __name__ == "__main__":
    sys.exit(bool(main()))
