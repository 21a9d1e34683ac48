"""Kernels of the set `full`, so many that every value of every parameter is among them, in ops.

Each config of `covering.covering` is compiled to PTX, once in a checkout, and runs alone: in
AGGemm, or in GemmRS and GemmAR; on worlds of 2, 4 and 8 ranks, and on two nodes of two ranks,
between which rows or sums cross; with a single row, tiles that straddle owners, and sizes that no
tile divides; in calls and in a captured graph. Results are compared with float64. Trace builds of
some must give the same bits.

    python tests/support/emulation/every_kernel.py --out benchmarks/results/ptx/kernels.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from covering import covering  # noqa: E402
from emulated import EmulatedDevice  # noqa: E402
from flux import Knobs, Topology  # noqa: E402
from flux.core.problem import BY_SHORT  # noqa: E402
from flux.kernels import driver  # noqa: E402
from flux.kernels.build import find_tools  # noqa: E402
from flux.kernels.config import ARCHS, GemmConfig  # noqa: E402
from flux.kernels.legality import reason_not_summing  # noqa: E402
from flux.kernels.registry import BuiltKernel, Registry  # noqa: E402
from flux.kernels.sets import FUSED, config_set  # noqa: E402
from flux.trace import Kind, record_op  # noqa: E402
from flux.transport.virtual import VirtualWorld  # noqa: E402
from ptx_figures import write_figures  # noqa: E402
from ptx_target import ptx_target  # noqa: E402
from reference import Inputs, Problem  # noqa: E402
from virtual_cases import call_all, fitting, knobs_of, topology_of  # noqa: E402

KERNELS = ROOT / "build" / "emulated-kernels-full"
CAPABILITIES = {"80": (8, 0), "90a": (9, 0)}
WORLDS = ((2, 1), (4, 1), (8, 1), (4, 2))  # ranks, nodes


# -- building --------------------------------------------------------------------------------------


def build_kernels(configs: Sequence[GemmConfig], traced: bool = False) -> Registry:
    """Return a registry with these configs; what is missing is compiled, one library at a time.

    Raises:
        MissingToolError: there is no nvcc, or no CUTLASS.
        RuntimeError: a library does not compile.
    """
    KERNELS.mkdir(parents=True, exist_ok=True)
    tools = find_tools(ptx_target())
    units = driver.plan(configs, KERNELS, tools, traced).units
    for outcome in driver.build_all(units, KERNELS, tools, 1, driver.CompileObserver()):
        print(f"{outcome.unit.what}: {outcome.seconds:.0f} s {outcome.error}", flush=True)
        if outcome.error:
            raise RuntimeError(outcome.error)
    return Registry.load([KERNELS])


def minimal(arch: str) -> list[GemmConfig]:
    """The kernels of the set `minimal` that ops use."""
    return [config for config in config_set("minimal", [arch]) if config.op in FUSED]


# -- problems --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a config is asked: an op on some ranks, and the rows of its calls."""

    problem: Problem
    world: int
    knobs: Knobs
    topology: Topology
    rows: tuple[int, ...]
    seed: int
    nodes: int = 1

    def __str__(self) -> str:
        where = f"{self.world} ranks of {self.nodes} nodes"
        return f"{self.problem} on {where}, M of {self.rows}, {self.knobs}"

    @property
    def small(self) -> bool:
        """Whether it is on the smallest world."""
        return (self.world, self.nodes) == WORLDS[0]


def _sizes(config: GemmConfig, world: int, rng: random.Random) -> tuple[int, int, int]:
    """(M, N, K) of the whole op: more than a tile of each rank, and no multiple of it."""
    m, n, k = config.tile
    step = config.alignment_elements
    rest = max(step, 16 // BY_SHORT[config.output].itemsize if config.arch == "90a" else step)
    columns = n + rest * rng.randint(1, max(1, n // rest // 2))
    depth = 2 * k + step * rng.randint(1, max(1, k // step))
    tallest = min(m, 128)
    rows = world * (tallest // 2 + rng.randint(1, tallest // 4))
    if config.op == "ag_gemm":
        return rows + 1, columns * world, depth
    return rows + 1, columns, depth * world


def plans(config: GemmConfig) -> Iterator[Plan]:
    """What a config is asked; always the same."""
    rng = random.Random(config.name)
    ops = ("ag_gemm",) if config.op == "ag_gemm" else ("gemm_rs", "gemm_ar")
    for number, (world, nodes) in enumerate(WORLDS):
        if nodes > 1 and config.reduce == "in_flight":  # which needs memory that all address
            continue
        m, n, k = _sizes(config, world, rng)
        part = -(-m // world)
        # All rows; one; a multiple of the ranks, so that all have as many; owners within a tile.
        rows = (m, 1, world * (part // 2), rng.randint(2, m))[: 4 if number == 0 else 2]
        for op in ops:
            problem = Problem(
                op,
                m,
                (n,),
                k,
                BY_SHORT[config.dtype].torch,
                transpose_weight=config.weight == "kn",
                reduce="sum" if op == "ag_gemm" else rng.choice(["sum", "avg"]),
                scaling=config.scaling,
                activation=config.activation,
                fast_accum=config.fast_accum,
            )
            knobs = replace(
                knobs_of(rng, world),
                reduce=config.reduce,
                direction="push" if nodes > 1 else ("push", "pull")[number % 2],
                tile_scheduler=config.tile_scheduler,
            )
            topology = topology_of(rng, world)
            if nodes > 1:
                topology = Topology(nodes, 1, world // nodes)
            seed = rng.randrange(1 << 20)
            yield Plan(problem, world, knobs, topology, rows, seed, nodes)
            if nodes == 1 and may_be_in_kernel(config, op):
                yield in_kernel(config, problem, world, seed)
            sums = op == "gemm_rs" and config.reduce == "local" and not reason_not_summing(config)
            if nodes == 1 and sums:
                summing = replace(knobs, reduce="in_kernel", direction="push")
                yield Plan(problem, world, summing, topology, rows, seed)


def may_be_in_kernel(config: GemmConfig, op: str) -> bool:
    """Return whether path in_kernel is for an op with this kernel."""
    if config.op == "ag_gemm":
        return config.scaling != "row"  # whose scales would travel with the rows
    return op == "gemm_ar" and config.reduce == "local"


def in_kernel(config: GemmConfig, problem: Problem, world: int, seed: int) -> Plan:
    """The op on path in_kernel, of odd M up to all that it is for.

    Columns and depth are small, since the machine takes its time, and no multiple of a tile's.
    """
    rng = random.Random(seed)
    step = config.alignment_elements
    rest = max(step, 16 // BY_SHORT[config.output].itemsize if config.arch == "90a" else step)
    columns, depth = rest * rng.randint(1, 40), step * rng.randint(1, 12)
    n, k = (columns * world, depth) if problem.gathers else (columns, depth * world)
    most = rng.choice([2 * rng.randint(0, 255) + 1, 512])
    problem = replace(problem, max_m=most, n=(n,), k=k)
    knobs = Knobs(path="in_kernel", tile_scheduler=config.tile_scheduler)
    rows = (most, rng.randint(1, min(most, 70)), 1)
    return Plan(problem, world, knobs, Topology(1, 1, world), rows, seed)


# -- running ---------------------------------------------------------------------------------------


class TensorCoreInputs(Inputs):
    """Inputs of kernels, which cut sums of float8."""

    on_tensor_cores = True


@contextmanager
def only(
    device: Any, built: BuiltKernel, world: int, traced: BuiltKernel | None = None
) -> Iterator[None]:
    """Let a device have one kernel, and few multiprocessors, so that blocks have several tiles."""
    config = built.config
    blocks = config.cluster[0] * config.cluster[1]
    before = device.registry, device.capability
    builds = {"traced": {config.name: traced}} if traced is not None else {}
    device.registry = replace(device.registry, kernels={config.name: built}, **builds)
    device.capability = CAPABILITIES[config.arch]
    try:
        with device.room_for(world, blocks):
            yield
    finally:
        device.registry, device.capability = before


def worst(plan: Plan, inputs: Inputs, got: list[torch.Tensor], rank: int) -> float:
    """The largest error of a rank's results, as a part of the bound.

    Memory that adds up rounds after each addition, as a library's reduction does. Sums that cross
    between nodes are rounded once more.

    Raises:
        AssertionError: one is beyond the bound.
    """
    path = "unfused" if plan.knobs.reduce == "in_flight" else "fused"
    if plan.nodes > 1 and not plan.problem.gathers:
        path = "two_levels"
    inputs.check(got, rank, path)
    ratios = [
        float(((result.double() - right).abs() / bound).max())
        for result, (right, bound) in zip(got, inputs.expected(rank, path), strict=False)
        if result.numel()
    ]
    return max(ratios, default=0.0)


def built_ops(plan: Plan, ranks: VirtualWorld) -> list[Any]:
    """The op of a plan on every rank."""
    knobs = fitting(plan.problem, plan.world, plan.knobs)
    options = {"tuning": knobs, "topology": plan.topology, "timeout_s": 120.0}
    return [plan.problem.build(ranks.rank(r), **options) for r in range(plan.world)]


def run_plan(device: Any, plan: Plan, seed: int = 0) -> float:
    """Make the calls of a plan; return the largest error as a part of the bound."""
    p, error = plan.problem, 0.0
    device.cuda.seed = seed
    with VirtualWorld(plan.world, device, plan.nodes) as ranks:
        ops = built_ops(plan, ranks)
        for number, m in enumerate(plan.rows):
            inputs = TensorCoreInputs(p, m, plan.world, plan.seed + number, bias=number != 1)
            outs = call_all(ranks, ops, inputs, p.gathers and number == 2)
            device.finish()
            for r, op in enumerate(ops):
                op.wait()
                error = max(error, worst(plan, inputs, outs[r], r))
        for op in ops:
            op.close()
    return error


def run_graph(device: Any, plan: Plan) -> float:
    """Capture a call of all rows, and replay it twice with other inputs."""
    p, world, error = plan.problem, plan.world, 0.0
    m = plan.rows[0]
    with VirtualWorld(world, device) as ranks:
        ops = built_ops(plan, ranks)
        first = TensorCoreInputs(p, m, world, plan.seed)
        given = [first.local(r) for r in range(world)]
        scales = [first.scales(r, given[r][0].shape[0]) for r in range(world)]
        device.know(*(t for of_rank in given for t in of_rank if t is not None))
        device.know(*(t for of_rank in scales for t in of_rank.values()))

        def call(r: int) -> torch.Tensor:
            rows = {"m": m} if p.gathers else {}
            return ops[r](*given[r], **rows, **scales[r])

        with device.capture() as graph:
            outs = ranks.run(call)
        for replay in range(2):
            fresh = TensorCoreInputs(p, m, world, plan.seed + 100 + replay)
            for r in range(world):
                for old, new in zip(given[r], fresh.local(r), strict=True):
                    old.copy_(new)
                for old, new in zip(
                    scales[r].values(), fresh.scales(r, given[r][0].shape[0]).values(), strict=True
                ):
                    old.copy_(new)
                outs[r].fill_(float("nan"))
            graph.replay()
            device.finish()
            for r in range(world):
                error = max(error, worst(plan, fresh, [outs[r]], r))
        graph.close()
        for op in ops:
            op.close()
    return error


@contextmanager
def tracing() -> Iterator[None]:
    """Let ops that are built have kernels of trace builds."""
    os.environ["FLUX_TRACE"] = "1"
    try:
        yield
    finally:
        del os.environ["FLUX_TRACE"]


def run_traced(device: Any, plan: Plan) -> int:
    """Trace a call with a trace build; its bits must be those of another build.

    Returns:
        The number of events.
    """
    p = plan.problem
    inputs = TensorCoreInputs(p, plan.rows[0], plan.world, plan.seed)
    with VirtualWorld(plan.world, device) as ranks:
        calls: list[Any] = []
        plain = built_ops(plan, ranks)
        calls.append(call_all(ranks, plain, inputs))
        with tracing():
            ops = built_ops(plan, ranks)
        trace = record_op(ops, lambda: calls.append(call_all(ranks, ops, inputs)), warmup=1)
        device.finish()
        for outs in calls:
            for r in range(plan.world):
                worst(plan, inputs, outs[r], r)
                assert torch.equal(outs[r][0], calls[0][r][0]), plan
        for op in (*plain, *ops):
            op.close()
    assert trace is not None
    tiles = [event for event in trace.events if event.kind is Kind.gemm]
    assert {event.rank for event in tiles} == set(range(plan.world))
    return len(trace.events)


def check_traced(device: Any, registry: Registry, config: GemmConfig) -> dict[str, Any]:
    """Trace the ops of a config; how many events there were."""
    device.cuda.clear()
    built, traced = registry.kernels[config.name], registry.traced[config.name]
    events = {}
    for plan in plans(config):
        if plan.small:
            with only(device, built, plan.world, traced):
                how = f"{plan.problem.op} {plan.knobs.path} {plan.knobs.reduce}"
                events[how] = run_traced(device, plan)
    return {"config": traced.symbol, "worlds": [WORLDS[0]], "events": events}


def check_config(device: Any, built: BuiltKernel, seeds: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run all plans of a config; what came out."""
    device.cuda.clear()
    begin, largest, calls = time.monotonic(), 0.0, 0
    chosen = list(plans(built.config))
    ran = {(plan.world, plan.nodes) for plan in chosen}
    for plan in chosen:
        with only(device, built, plan.world):
            for seed in seeds:
                try:
                    largest = max(largest, run_plan(device, plan, seed))
                except Exception as error:
                    raise AssertionError(
                        f"{built.config.name}, seed {seed}: {plan}: {error}"
                    ) from error
                calls += len(plan.rows) * plan.world
    small = [plan for plan in chosen if plan.small]
    for plan in small:
        with only(device, built, plan.world):
            largest = max(largest, run_graph(device, plan))
            calls += 2 * plan.world
    counters = device.cuda.counters()
    return {
        "config": built.config.name,
        "ops": sorted({plan.problem.op for plan in chosen}),
        "worlds": [[world, nodes] for world, nodes in WORLDS if (world, nodes) in ran],
        "problems": [
            [plan.problem.op, plan.world, plan.problem.max_m, plan.problem.n[0], plan.problem.k]
            for plan in chosen
        ],
        "seeds": len(seeds),
        "calls of ranks": calls,
        "error / bound": round(largest, 4),
        "thread_instructions": sum(c["instructions"] for c in counters.values()),
        "seconds": round(time.monotonic() - begin, 1),
    }


@contextmanager
def device_with(registry: Registry) -> Iterator[EmulatedDevice]:
    """A device with emulated streams that runs the kernels of a registry."""
    from ptx_device import ptx_device

    with ptx_device(KERNELS, "90a") as device:
        device.registry = registry  # type: ignore[assignment]
        yield device


def main() -> None:
    """Build and run the kernels, and write what came out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", default=",".join(ARCHS))
    parser.add_argument("--only", default="", help="configs whose names contain this")
    parser.add_argument("--seeds", type=int, default=1, help="how many; the first one is 0")
    parser.add_argument("--build", action="store_true", help="only compile")
    parser.add_argument("--traced", action="store_true", help="trace builds of the minimal set")
    parser.add_argument("--out", type=Path, help="JSON; rows of other configs in it are kept")
    parser.add_argument("--missing", action="store_true", help="configs that --out lacks only")
    options = parser.parse_args()
    archs = options.arch.split(",")
    configs = [c for arch in archs for c in (minimal(arch) if options.traced else covering(arch))]
    configs = [config for config in configs if options.only in config.name]
    registry = build_kernels(configs)
    if options.traced:
        registry = build_kernels(configs, traced=True)
    if options.build:
        return
    rows = {}
    if options.out is not None and options.out.exists():
        rows = {row["config"]: row for row in json.loads(options.out.read_text())["rows"]}
    if options.missing:
        configs = [config for config in configs if config.name not in rows]
    failures = []
    seeds = [1000 * seed for seed in range(options.seeds)]
    for config in configs:
        # A fault leaves streams behind, so that each config has a device of its own.
        try:
            with device_with(registry) as device:
                if options.traced:
                    row = check_traced(device, registry, config)
                else:
                    row = check_config(device, registry.kernels[config.name], seeds)
        except Exception as error:
            failures.append(config.name)
            print(f"FAILED {error}", flush=True)
            continue
        rows[row["config"]] = row
        print(row, flush=True)
        if options.out is not None:
            command = "python tests/support/emulation/every_kernel.py"
            write_figures(options.out, command, [rows[name] for name in sorted(rows)])
    print(f"{len(configs) - len(failures)} passed, failed: {failures}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
