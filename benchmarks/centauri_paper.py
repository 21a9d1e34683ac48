"""The experiments of the Centauri paper, simulated: clusters A and B, models of its Table 4.

    python benchmarks/centauri_paper.py        # fifteen minutes; nothing is run

C. Chen et al., ASPLOS 2024, section 5. Its figures are pictures; what can be compared is what its
text says in numbers. Baselines:

    serial   no overlap
    direct   gradients are reduced under backward, and weights gathered in front of the layer that
             needs them (figure 1a)
    waiting  likewise, but a layer's gather in backward also waits for all gradients of weights of
             the layer before
    coarse   gathers one layer ahead, too, as FSDP2 does
    zero1    data parallelism with ZeRO-1: gradients are reduced under backward, and weights are
             gathered after the optimizer's step
    ooo      out-of-order backpropagation: gradients of weights of the first layers come last, the
             first layer's at first; the number of layers is the one that is fastest

With a pipeline, these have two interleaved stages on each rank, as in figures 7a and 7b.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

from flux.bench.shapes import Layer
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric, GroupSpan
from flux.plan.graph import Graph, Operator
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import Policy, planned
from flux.plan.policies.centauri import Centauri
from flux.plan.policies.centauri_graph import Key, Partition
from flux.plan.policies.centauri_space import even, even_by_group, uneven_by_group
from flux.plan.policies.passes import sequences
from flux.plan.policies.pipelines import Interleaved1F1B
from flux.plan.policies.serial import Serial
from flux.plan.schedule import StepSchedule, on_lanes
from flux.plan.simulate import Timeline, simulate

RESULT = ROOT / "benchmarks" / "results" / "plan" / "centauri_paper.json"
# Table 4; the MLP of LLaMA has 8/3 of the width, rounded up to 256 (arXiv 2302.13971).
MODELS = {
    "small": (Layer(4096, 11008, 32, 32, 128, True), 18),
    "medium": (Layer(5120, 13824, 40, 40, 128, True), 15),
    "big": (Layer(6656, 17920, 52, 52, 128, True), 10),
    "large": (Layer(8192, 22016, 64, 64, 128, True), 8),
}
SEQUENCE = 2048
SCALES = (16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8)
WAYS: dict[str, Mapping[str, Partition]] = {
    "whole": {},
    "by MatMul": {
        "all_gather": Partition(by_gemm=True),
        "reduce_scatter": Partition(by_gemm=True),
    },
    "4 chunks": {"all_gather": Partition(even(4)), "reduce_scatter": Partition(even(4))},
    "groups": {
        "all_gather": Partition(even_by_group("all_gather", 1, 8)),
        "reduce_scatter": Partition(even_by_group("reduce_scatter", 1, 8)),
    },
    "groups by MatMul": {
        "all_gather": Partition(even_by_group("all_gather", 1, 8), True),
        "reduce_scatter": Partition(even_by_group("reduce_scatter", 1, 8), True),
    },
    "Algorithm 1, three parts": {
        "all_gather": Partition(uneven_by_group(3, False, 2, 8)),
        "reduce_scatter": Partition(even_by_group("reduce_scatter", 1, 8)),
    },
}
"""Partitions of section 5.4, by kind of collective: figure 12 shows some of them."""


@dataclass(frozen=True)
class Case:
    """One configuration of the paper."""

    group: str
    cluster: str
    hosts: int
    model: str
    parallel: Parallel
    batch: int
    zero: int
    micro_batches: int = 1
    shard: int = 0
    hierarchical: bool = False


class Hierarchical(AnalyticCost):
    """Costs in which the library's collectives over hosts send each byte to each other host once.

    Every link of a ring of N ranks carries (N - 1) / N of the tensor, that between two of H hosts
    too; a hierarchical collective needs no more than (H - 1) / H there.
    """

    def solo(self, op: Operator) -> float:
        span = self.fabric.span(op.group) if op.is_collective else GroupSpan(1, 1, 1)
        rings = op.kind in ("all_gather", "reduce_scatter", "all_reduce") and span.hosts > 1
        less = (1 - 1 / span.hosts) / (1 - 1 / span.size) if rings else 1.0
        return super().solo(op) * less


def cases() -> list[Case]:
    every = []
    for model in MODELS:
        for batch in BATCHES:
            every.append(Case("FSDP", "centauri-a", 2, model, Parallel(dp=16), batch, 3))
            every.append(Case("DP", "centauri-a", 2, model, Parallel(dp=16), batch, 0))
    for shard in (16, 8, 4):
        for batch in (1, 2, 4):
            every.append(
                Case("FSDP+DP", "centauri-a", 6, "big", Parallel(dp=48), batch, 3, shard=shard)
            )
    for tp, dp, batch in ((4, 4, 1), (4, 4, 2), (4, 4, 4), (8, 2, 1), (8, 2, 4)):
        parallel = Parallel(tp=tp, dp=dp, pp=3, sequence=True)
        every.append(Case("TP+PP+DP", "centauri-a", 6, "small", parallel, batch, 0, 6))
    every += [
        replace(case, group=f"{case.group}, hierarchical", hierarchical=True) for case in every
    ]
    for cluster in ("centauri-a", "centauri-b"):
        for ranks in SCALES:
            parallel, hosts = Parallel(dp=ranks), ranks // 8
            for lib, hierarchical in (("", False), (", hierarchical", True)):
                every += [
                    Case(
                        *(f"FSDP on {ranks}{lib}", cluster, hosts, "small", parallel, 4, 3),
                        hierarchical=hierarchical,
                    ),
                    Case(
                        *(f"FSDP16+DP on {ranks}{lib}", cluster, hosts, "big", parallel, 4, 3),
                        *(1, 16, hierarchical),
                    ),
                ]
    return every


class Fixed(Centauri):
    """Centauri whose collectives of weights and gradients are all partitioned in one way.

    Args:
        ways: a partition by kind of collective.
    """

    def __init__(self, ways: Mapping[str, Partition]) -> None:
        super().__init__(layer="auto", model=False)
        self.ways = ways

    def _operation_tier(self, graph: Graph, *_: Any) -> list[dict[Key, Partition]]:
        moving = [op for op in graph.ops if op.moves_weights and op.kind in self.ways]
        return [{(op.part, op.role): self.ways[op.kind] for op in moving}]

    def _crossed(self, plans: Sequence[Any], *_: Any) -> Any:
        return plans[0]


class Waiting(Centauri):
    """Direct overlap whose gathers in backward wait for the gradients of the layer before."""

    def __init__(self, chunks: int = 1) -> None:
        super().__init__(False, "t1", False, False, prefetch=0, chunks=chunks)

    def rewrite(self, graph: Graph, fabric: Fabric, cost: Any) -> Graph:
        """Return the graph with these dependencies."""
        before: dict[tuple[int, int], list[int]] = {}
        for number, op in enumerate(graph.ops):
            if op.role == "wgrad" and not op.is_collective:
                before.setdefault((op.micro, op.layer), []).append(number)
        deps = [
            (*deps, *before.get((op.micro, op.layer + 1), ()))
            if op.role == "dgrad" and op.moves_weights
            else deps
            for op, deps in zip(graph.ops, graph.deps, strict=True)
        ]
        return super().rewrite(replace(graph, deps=tuple(deps)), fabric, cost)


class OutOfOrder:
    """Out-of-order backpropagation (the paper's reference 27), of one stage."""

    name = "ooo"

    def rewrite(self, graph: Graph, fabric: Fabric, cost: Any) -> Graph:
        """Return the graph as it is."""
        return graph

    def order(self, graph: Graph, cost: Any) -> StepSchedule:
        """Return the fastest schedule of those in which the first k layers are delayed."""
        layers = max(op.layer for op in graph.ops) + 1
        schedules = (self._delayed(graph, first) for first in range(layers + 1))
        return min(schedules, key=lambda schedule: simulate(schedule, cost).iteration_ms)

    def _delayed(self, graph: Graph, first: int) -> StepSchedule:
        ops, complete = graph.ops, dict[int, int]()  # by layer, where its gradients are

        def is_late(number: int) -> bool:
            return ops[number].role == "wgrad" and ops[number].layer < first

        def within(kind: str, numbers: Sequence[int]) -> Sequence[int]:
            if kind == "S":  # gradients leave when they are complete, not in the order of layers
                return sorted(numbers, key=lambda n: complete.get(ops[n].layer, 0))
            if kind == "B":
                late = sorted(filter(is_late, numbers), key=lambda n: ops[n].layer)
                numbers = [*(n for n in numbers if not is_late(n)), *late]
                complete.update(
                    {ops[n].layer: at for at, n in enumerate(numbers) if ops[n].role == "wgrad"}
                )
            return numbers

        return on_lanes(graph, sequences(graph, within), self.name)


def depths() -> list[dict[str, Any]]:
    """Return GB of the Big model with each number of layers that Table 4 lists for it."""
    rows = []
    for layers in (8, 10, 30):
        for zero, hosts, shard in ((1, 2, 0), (3, 2, 0), (3, 6, 16), (3, 6, 8), (3, 6, 4)):
            for batch in (1, 4):
                parallel = Parallel(dp=8 * hosts)
                case = Case("", "centauri-a", hosts, "big", parallel, batch, zero, shard=shard)
                _, graph, fabric, cost = layout_of(case, layers)
                policy = policies_of(case)["direct"]
                peak = simulate(planned(policy, graph, fabric, cost), cost).peak_memory_bytes
                sizes = {"layers": layers, "zero": zero, "dp": parallel.dp, "shard": shard}
                rows.append({**sizes, "batch": batch, "memory_gb": peak / 1e9})
    return rows


def layout_of(
    case: Case, depth: int | None = None
) -> tuple[TrainingStep, Graph, Fabric, AnalyticCost]:
    """Return the step of a case, its graph, where its ranks are, and what operators cost."""
    layer, layers = MODELS[case.model]
    step = TrainingStep(
        *(f"LLaMA {case.model}", layer, depth or layers, "float16", case.parallel, SEQUENCE),
        *(case.batch, case.micro_batches, case.zero),
        shard=case.shard,
    )
    fabric = Fabric(replace(load_cluster(case.cluster), hosts=case.hosts), case.parallel)
    cost = (Hierarchical if case.hierarchical else AnalyticCost)(fabric, step.dtype, step.itemsize)
    return step, build_step(step, fabric), fabric, cost


def policies_of(case: Case) -> dict[str, Policy]:
    """Return the baselines of a case, and Centauri with one tier more each time."""
    several = case.parallel.pp > 1
    stages = 2 if several else 1
    policies: dict[str, Policy] = {
        "serial": Interleaved1F1B(stages) if several else Serial(),
        "direct": Centauri(False, "t1", False, False, prefetch=0, chunks=stages),
        "waiting": Waiting(stages),
        "coarse": Centauri(False, "t1", False, False, chunks=stages),
        "+ substitution": Centauri(False, "t1", False, chunks=stages),
        "+ operation": Centauri(True, "t1", False, chunks=stages),
        "+ layer": Centauri(True, "auto", False, chunks=stages),
        "+ model": Centauri(chunks=stages),
        "centauri": Centauri(chunks="auto"),
    }
    return policies | ({"ooo": OutOfOrder()} if case.group.startswith("DP") else {})


def measured(case: Case) -> dict[str, Any]:
    step, graph, fabric, cost = layout_of(case)
    by_policy: dict[str, Timeline] = {
        name: simulate(planned(policy, graph, fabric, cost), cost)
        for name, policy in policies_of(case).items()
    }
    limit, serial = load_cluster(case.cluster).device.memory_gb, by_policy["serial"]
    best, ddp_fits = by_policy["centauri"].iteration_ms, True
    if case.group.startswith("DP"):
        ddp_fits = by_policy["direct"].peak_memory_bytes < 1e9 * limit
        by_policy |= zero1(case)
    flops = step.operations / step.parallel.world
    return {
        "group": case.group,
        "cluster": case.cluster,
        "model": case.model,
        "batch": case.batch,
        "shard": case.shard,
        "degrees": {k: getattr(case.parallel, k) for k in ("tp", "pp", "dp")},
        "communication": serial.comm_ms / (serial.comm_ms + serial.compute_ms),
        "fits": by_policy["centauri"].peak_memory_bytes < 1e9 * limit,
        "ddp_fits": ddp_fits,
        "tflops": {n: flops / t.iteration_ms / 1e9 for n, t in by_policy.items()},
        "memory_gb": {n: t.peak_memory_bytes / 1e9 for n, t in by_policy.items()},
        **{f"{name}_ms": timeline.iteration_ms for name, timeline in by_policy.items()},
        **{f"over_{name}": by_policy[name].iteration_ms / best for name in by_policy},
    }


def zero1(case: Case) -> dict[str, Timeline]:
    """Return the timelines of ZeRO-1 without overlap, and with reductions under backward."""
    case = replace(case, zero=1)
    _, graph, fabric, cost = layout_of(case)
    policies = policies_of(case)
    return {
        name: simulate(planned(policies[policy], graph, fabric, cost), cost)
        for name, policy in (("zero1_serial", "serial"), ("zero1", "direct"))
    }


def ways(batch: int, hierarchical: bool) -> dict[str, Any]:
    """Return figure 12: FSDP of a Big layer, with every collective partitioned in one way."""
    case = Case(
        *("FSDP", "centauri-a", 2, "big", Parallel(dp=16), batch, 3), hierarchical=hierarchical
    )
    _, graph, fabric, cost = layout_of(case)
    serial = simulate(planned(Serial(), graph, fabric, cost), cost)
    policies: dict[str, Policy] = {name: Fixed(how) for name, how in WAYS.items()}
    policies["Centauri"] = Centauri()
    steps = {
        name: simulate(planned(policy, graph, fabric, cost), cost).iteration_ms
        for name, policy in policies.items()
    }
    share = serial.comm_ms / (serial.comm_ms + serial.compute_ms)
    return {
        "batch": batch,
        "hierarchical": hierarchical,
        "share": share,
        "bound": min(1 / share, 1 / (1 - share)),
        "speedup": {name: serial.iteration_ms / ms for name, ms in steps.items()},
    }


# What the paper's text says, and the runs that it is about.
CLAIMS: list[tuple[str, str, float, str, dict[str, Any]]] = [
    ("FSDP, 16 GPUs of A, up to", "section 1", 1.45, "FSDP", {}),
    ("DP, 16 GPUs of A, up to", "section 1", 1.45, "DP", {}),
    ("FSDP, large batches, over", "section 5.1", 1.40, "FSDP", {"batch": 4}),
    ("FSDP+DP, 48 GPUs of A, up to", "abstract", 1.49, "FSDP+DP", {}),
    ("TP+PP+DP, 48 GPUs of A, up to", "abstract", 1.49, "TP+PP+DP", {}),
    ("FSDP, 256 GPUs of B", "section 5.3", 1.05, "FSDP on 256", {"cluster": "centauri-b"}),
]


def rows_of(content: Mapping[str, Any], **where: Any) -> list[dict[str, Any]]:
    """Return the rows that fit into memory and have these values."""
    return [
        row
        for row in content["rows"]
        if row["fits"] and all(row[key] == value for key, value in where.items())
    ]


def over(row: Mapping[str, Any], name: str) -> float:
    """Return the speed-up over a baseline; where DDP does not fit, over ZeRO-1 in its place."""
    if not row["ddp_fits"]:
        name = "zero1_serial" if name == "serial" else "zero1"
    return float(row[f"over_{name}"])


def table(content: Mapping[str, Any]) -> str:
    """Return the largest speed-ups that the text states: by one ring; hierarchical."""
    names = ("direct", "waiting", "coarse", "serial")
    lines = []
    for what, source, paper, group, where in CLAIMS:
        cells = []
        for name in names:
            most = [
                max(over(row, name) for row in rows_of(content, group=group + lib, **where))
                for lib in ("", ", hierarchical")
            ]
            cells.append("; ".join(f"{value:.2f}" for value in most))
        lines.append([what, source, f"{paper:.2f}", *cells])
    return markdown(["speed-up over, by one ring; hierarchical", "source", "paper", *names], lines)


TIERS = ("coarse", "+ substitution", "+ operation", "+ layer", "+ model", "centauri")


def _name(row: Mapping[str, Any]) -> str:
    """Return a case as tables show it."""
    d = row["degrees"]
    degrees = {
        "TP+PP+DP": f"TP{d['tp']}+PP{d['pp']}+DP{d['dp']}",
        "FSDP+DP": f"DP{d['dp'] // max(row['shard'], 1)}+FSDP{row['shard']}",
    }
    return f"{degrees.get(row['group'], row['group'])}, {row['model']}, batch {row['batch']}"


def tiers_table(content: Mapping[str, Any]) -> str:
    """Return the speed-up over direct with one tier more each time."""
    lines = []
    for row in content["rows"]:
        group, model = row["group"], row["model"]
        if group in ("TP+PP+DP", "FSDP+DP") or (group in ("FSDP", "DP") and model == "big"):
            gains = [f"{row['direct_ms'] / row[f'{name}_ms']:.3f}" for name in TIERS]
            lines.append([_name(row), f"{row['communication']:.0%}", *gains])
    header = ["over direct", "comm.", *TIERS[:-1], "stages searched"]
    return markdown(header, lines)


def ways_table(content: Mapping[str, Any]) -> str:
    """Return figure 12: speed-up over serial of each partition, by batch."""
    lines = []
    for row in content["ways"]:
        best = max(value for name, value in row["speedup"].items() if name in WAYS)
        cells = [
            f"**{value:.2f}**" if name in WAYS and value == best else f"{value:.2f}"
            for name, value in row["speedup"].items()
        ]
        library = "hierarchical" if row["hierarchical"] else "one ring"
        lines.append(
            [f"{row['batch']}, {library}", f"{row['share']:.0%}", f"{row['bound']:.2f}", *cells]
        )
    return markdown(["batch, library", "comm.", "bound", *WAYS, "Centauri"], lines)


def scales_table(content: Mapping[str, Any], what: str) -> str:
    """Return TFLOPS of a GPU on more and more of them: figure 13 or 14."""
    lines = []
    names = ("serial", "direct", "waiting", "coarse", "centauri")
    for library in ("", ", hierarchical"):
        for ranks in SCALES:
            cells = []
            for cluster in ("centauri-a", "centauri-b"):
                (row,) = rows_of(content, group=f"{what} on {ranks}{library}", cluster=cluster)
                cells += [f"{row['tflops'][name]:.0f}" for name in names]
                cells.append(f"{row['over_direct']:.2f}")
            lines.append([f"{ranks}{library or ', one ring'}", *cells])
    header = [f"{letter}, {n}" for letter in "AB" for n in (*names, "over direct")]
    return markdown(["GPUs, library", *header], lines)


def orders_table(content: Mapping[str, Any]) -> str:
    """Return data parallelism beside DDP and out-of-order backpropagation."""
    lines = []
    for library in ("", ", hierarchical"):
        for batch in BATCHES:
            (row,) = rows_of(content, group=f"DP{library}", model="big", batch=batch)
            names = ("serial", "direct", "ooo", "zero1", "centauri")
            ms = [f"{row[f'{name}_ms']:.0f}" for name in names]
            gains = [f"{row[f'over_{name}']:.2f}" for name in ("direct", "ooo", "zero1")]
            lines.append([f"{batch}{library or ', one ring'}", *ms, *gains])
    header = [
        "batch, library",
        "serial ms",
        "DDP ms",
        "out of order ms",
        "ZeRO-1 ms",
        "Centauri ms",
    ]
    return markdown([*header, "over DDP", "over out of order", "over ZeRO-1"], lines)


FIGURES = {
    "8": ("FSDP", ("direct", "coarse", "centauri")),
    "9": ("DP", ("direct", "ooo", "zero1", "centauri")),
    "10": ("FSDP+DP", ("direct", "coarse", "centauri")),
    "11": ("TP+PP+DP", ("direct", "centauri")),
}
"""Kind of parallelism of the figures of section 5.1 and 5.2, and policies whose memory is shown."""


def memory_table(content: Mapping[str, Any]) -> str:
    """Return GB of a device in figures 8 to 11, by batch; bold where it has less."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for figure, (group, names) in FIGURES.items():
        labels = ["DDP" if group == "DP" and n == "direct" else LABELS.get(n, n) for n in names]
        for row in content["rows"]:
            if row["group"] == group:
                limit = load_cluster(row["cluster"]).device.memory_gb
                sizes = [row["memory_gb"][name] for name in names]
                cells = [f"**{gb:.0f}**" if gb > limit else f"{gb:.0f}" for gb in sizes]
                layout = _name(row).partition(", batch")[0]
                key = figure, layout, ", ".join(labels)
                lines.setdefault(key, {})[row["batch"]] = ", ".join(cells)
    header = ["figure", "layout", "GB of", *(f"batch {batch}" for batch in BATCHES)]
    rows = [[*key, *(cells.get(b, "") for b in BATCHES)] for key, cells in lines.items()]
    return markdown(header, rows)


def depths_table(content: Mapping[str, Any]) -> str:
    """Return GB of the Big model by its layers and batch; bold where a device has less."""
    lines: dict[str, list[str]] = {}
    for row in content["depths"]:
        copies = row["dp"] // (row["shard"] or row["dp"])
        layout = "DP16, ZeRO-1" if row["zero"] == 1 else f"DP{copies}+FSDP{row['dp'] // copies}"
        gb, limit = row["memory_gb"], load_cluster("centauri-a").device.memory_gb
        cell = f"**{gb:.0f}**" if gb > limit else f"{gb:.0f}"
        lines.setdefault(layout.replace("DP1+", ""), []).append(cell)
    header = [f"{layers} layers, batch {batch}" for layers in (8, 10, 30) for batch in (1, 4)]
    return markdown(["GB", *header], [[name, *cells] for name, cells in lines.items()])


LABELS = {"ooo": "out of order", "zero1": "ZeRO-1", "centauri": "Centauri"}

TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "centauri_paper": table,
    "centauri_paper_tiers": tiers_table,
    "centauri_paper_ways": ways_table,
    "centauri_paper_fsdp": lambda content: scales_table(content, "FSDP"),
    "centauri_paper_hybrid": lambda content: scales_table(content, "FSDP16+DP"),
    "centauri_paper_orders": orders_table,
    "centauri_paper_memory": memory_table,
    "centauri_paper_depths": depths_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    content = {
        "command": "python benchmarks/centauri_paper.py",
        "ways": [ways(batch, lib) for lib in (False, True) for batch in BATCHES],
        "rows": [measured(case) for case in cases()],
        "depths": depths(),
    }
    keep(content, options.out)
    print("\n\n".join(make(content) for make in TABLES.values()))


if __name__ == "__main__":
    main()
