"""The comparisons of the Centauri paper, simulated: clusters A and B, models of its Table 4.

    python benchmarks/centauri_paper.py        # some ten seconds; nothing is run

The paper's figures are pictures; what can be compared is what its text says in numbers. Baselines:
*serial* has no overlap; *direct* reduces gradients under backward, and gathers weights in front of
the layer that needs them (figure 1a); *coarse* gathers one layer ahead, too, as FSDP2 does. With a
pipeline, these have two interleaved stages on each rank, as in figures 7a and 7b.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

from flux.bench.shapes import Layer
from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric, GroupSpan
from flux.plan.graph import Operator
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import Policy, planned
from flux.plan.policies.centauri import Centauri
from flux.plan.policies.pipelines import Interleaved1F1B
from flux.plan.policies.serial import Serial
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
        for batch in (1, 2, 4, 8):
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
        for ranks in (16, 64, 256):
            parallel = Parallel(dp=ranks)
            every.append(Case(f"FSDP on {ranks}", cluster, ranks // 8, "small", parallel, 4, 3))
    return every


def timelines(case: Case) -> dict[str, Timeline]:
    layer, layers = MODELS[case.model]
    step = TrainingStep(
        *(f"LLaMA {case.model}", layer, layers, "float16", case.parallel, SEQUENCE),
        *(case.batch, case.micro_batches, case.zero),
        shard=case.shard,
    )
    fabric = Fabric(replace(load_cluster(case.cluster), hosts=case.hosts), case.parallel)
    cost = (Hierarchical if case.hierarchical else AnalyticCost)(fabric, step.dtype, step.itemsize)
    graph = build_step(step, fabric)
    several = case.parallel.pp > 1
    stages = 2 if several else 1
    policies: dict[str, Policy] = {
        "serial": Interleaved1F1B(stages) if several else Serial(),
        "direct": Centauri(False, "t1", False, False, prefetch=0, chunks=stages),
        "coarse": Centauri(False, "t1", False, False, chunks=stages),
        "coarse, T1 or T2": Centauri(False, "auto", False, False, chunks=stages),
        "centauri": Centauri(chunks="auto"),
    }
    if several:
        policies |= {f"centauri, {count} stages": Centauri(chunks=count) for count in (1, 2, 3)}
    return {
        name: simulate(planned(policy, graph, fabric, cost), cost)
        for name, policy in policies.items()
    }


def measured(case: Case) -> dict[str, Any]:
    by_policy = timelines(case)
    limit = load_cluster(case.cluster).device.memory_gb
    serial = by_policy["serial"]
    return {
        "group": case.group,
        "cluster": case.cluster,
        "model": case.model,
        "batch": case.batch,
        "shard": case.shard,
        "degrees": {k: getattr(case.parallel, k) for k in ("tp", "pp", "dp")},
        "communication": serial.comm_ms / (serial.comm_ms + serial.compute_ms),
        "fits": by_policy["centauri"].peak_memory_bytes < 1e9 * limit,
        **{f"{name}_ms": timeline.iteration_ms for name, timeline in by_policy.items()},
        "over_serial": serial.iteration_ms / by_policy["centauri"].iteration_ms,
        "over_direct": by_policy["direct"].iteration_ms / by_policy["centauri"].iteration_ms,
        "over_coarse": by_policy["coarse"].iteration_ms / by_policy["centauri"].iteration_ms,
    }


# What the paper's text says, and the runs that it is about.
CLAIMS: list[tuple[str, str, float, dict[str, Any]]] = [
    ("FSDP, 16 GPUs of A, up to", "section 5.1", 1.45, {"group": "FSDP"}),
    ("the same, hierarchical", "section 5.1", 1.45, {"group": "FSDP, hierarchical"}),
    ("DP, 16 GPUs of A, up to", "abstract of section 1", 1.45, {"group": "DP"}),
    ("the same, hierarchical", "abstract of section 1", 1.45, {"group": "DP, hierarchical"}),
    ("FSDP+DP, 48 GPUs of A, up to", "abstract", 1.49, {"group": "FSDP+DP"}),
    ("the same, hierarchical", "abstract", 1.49, {"group": "FSDP+DP, hierarchical"}),
    ("TP+PP+DP, 48 GPUs of A, up to", "abstract", 1.49, {"group": "TP+PP+DP"}),
    ("the same, hierarchical", "abstract", 1.49, {"group": "TP+PP+DP, hierarchical"}),
    (
        *("FSDP, 256 GPUs of B", "section 5.3", 1.05),
        {"group": "FSDP on 256", "cluster": "centauri-b"},
    ),
]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/use/centauri.md."""
    header = ["speedup over", "paper", "direct", "coarse", "serial"]
    lines = []
    for name, _, paper, where in CLAIMS:
        chosen = [row for row in rows if row["fits"] and all(row[k] == v for k, v in where.items())]
        most = [
            max(row[key] for row in chosen) for key in ("over_direct", "over_coarse", "over_serial")
        ]
        lines.append([name, f"{paper:.2f}", *(f"{value:.2f}" for value in most)])
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = [measured(case) for case in cases()]
    content = {"command": "python benchmarks/centauri_paper.py", "rows": rows}
    keep(content, options.out)
    for row in rows:
        print(
            f"{row['group']:12} {row['cluster'][-1]} {row['model']:6} batch {row['batch']} "
            f"shard {row['shard']:2} communication {row['communication']:.0%} "
            f"over direct {row['over_direct']:.2f}, "
            f"over coarse {row['over_coarse']:.2f}, over serial {row['over_serial']:.2f}"
            + ("" if row["fits"] else "  (out of memory)")
        )
    print(table(rows))


if __name__ == "__main__":
    main()
