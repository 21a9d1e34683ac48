"""DHelix's comparison with Megatron-LM, intra-batch overlap and Wavelet+, in the simulator.

    python benchmarks/dhelix_paper.py      # a minute or two, nothing is measured

H. Wang et al., arXiv 2411.15871, section 6. The paper gives ranges for most of its bars; degrees of
parallelism that it does not name are assumed. A step's time grows by a constant amount with each
micro-batch, so two short steps are simulated, and the time of the paper's batch follows.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph, Operator
from flux.plan.model import Parallel, TrainingStep, step_of
from flux.plan.policies import planned, policy_of
from flux.plan.simulate import simulate

RESULT = ROOT / "benchmarks" / "results" / "plan" / "dhelix_paper.json"
TOKENS = 8 * 2**20
"""Of a step of Llama and GPT: "8 million tokens"."""
MOE_SEQUENCES = 1600
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "wgrad": ("serial", {"wgrad_overlap": True}),
    "intra": ("intra_batch", {}),
    "wavelet": ("wavelet", {}),
    "dhelix": ("dhelix", {}),
}

Range = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """One of the paper's configurations.

    Attributes:
        cluster: in tuning/clusters.
        model: in tuning/shapes.
        sequence: tokens of a sequence.
        degrees: of parallelism.
        layers: of the model, if not all.
        capacity: factor of an expert's capacity, to which tokens are padded for AllToAll.
        oef: of collectives beside compute, where the paper has measured it (table 7).
        kv_heads: in place of the model's.
        experts: time of experts' operators over that of data sheets.
        paper: gains over Megatron-LM in per cent, from the text: least and most.
    """

    cluster: str
    model: str
    sequence: int
    degrees: dict[str, int]
    layers: int | None = None
    capacity: int = 1
    oef: float | None = None
    kv_heads: int | None = None
    experts: float = 1.0
    paper: dict[str, Range] = field(default_factory=dict)


_LLAMA = {"intra": (5.0, 15.0), "wavelet": (6.0, 16.0), "dhelix": (27.0, 40.0)}
_GPT = {"intra": (5.0, 15.0), "wavelet": (6.0, 16.0), "dhelix": (26.0, 40.0)}
_LONG = {"dhelix": (22.0, 39.0)}
CASES = (
    Case("dhelix-a40", "llama3-8b", 8192, {"tp": 8, "dp": 8}, paper=_LLAMA),
    Case("dhelix-a40", "llama-25b", 8192, {"tp": 8, "dp": 4, "pp": 2}, paper=_LLAMA),
    Case("dhelix-a40", "llama-39b", 8192, {"tp": 8, "dp": 4, "pp": 2}, paper=_LLAMA),
    Case("dhelix-a40", "gpt-6.7b", 8192, {"tp": 8, "dp": 8}, paper=_GPT),
    Case("dhelix-a40", "gpt-18b", 8192, {"tp": 8, "dp": 4, "pp": 2}, paper=_GPT),
    Case("dhelix-a40", "gpt-30b", 8192, {"tp": 8, "dp": 4, "pp": 2}, paper=_GPT),
    Case("dhelix-a40", "llama3-8b", 16384, {"tp": 8, "cp": 2, "dp": 4}, paper=_LONG),
    Case("dhelix-a40", "llama-25b", 16384, {"tp": 8, "cp": 2, "dp": 2, "pp": 2}, paper=_LONG),
    Case("dhelix-a40", "llama-39b", 16384, {"tp": 8, "cp": 2, "dp": 2, "pp": 2}, paper=_LONG),
    Case("dhelix-a40", "gpt-6.7b", 16384, {"tp": 8, "cp": 2, "dp": 4}, paper=_LONG),
    Case("dhelix-a40", "gpt-18b", 16384, {"tp": 8, "cp": 2, "dp": 2, "pp": 2}, paper=_LONG),
    Case("dhelix-a40", "gpt-30b", 16384, {"tp": 8, "cp": 2, "dp": 2, "pp": 2}, paper=_LONG),
    Case("dhelix-a40", "phi-moe", 3072, {"dp": 32, "ep": 8, "pp": 2}, 12, 6),
    Case(
        *("dhelix-a40", "phi-moe", 3072, {"dp": 16, "ep": 8, "pp": 4}, 24, 6),
        paper={"wavelet": (4.2, 4.2), "dhelix": (25.8, 25.8)},
    ),
    Case(
        *("dhelix-a800", "llama-66b", 16384, {"tp": 8, "cp": 2, "dp": 2, "pp": 2}),
        paper={"dhelix": (7.0, 7.0)},
    ),
    Case(
        *("dhelix-a800", "llama-66b", 32768, {"tp": 8, "cp": 4, "pp": 2}),
        paper={"dhelix": (24.0, 24.0)},
    ),
    Case(
        *("dhelix-a800", "phi-moe", 3072, {"dp": 16, "ep": 8, "pp": 4}, 32, 8),
        paper={"wavelet": (4.0, 4.0), "dhelix": (15.0, 15.0)},
    ),
    *(
        Case(
            *("dhelix-a800", "llama-25b", 8192, {"tp": tp, "dp": 64 // tp}),
            paper={"dhelix": (2.0, 29.0)},
        )
        for tp in (8, 16, 32)
    ),
    *(
        Case(
            *("dhelix-h100", "llama-25b", 8192, {"tp": tp, "dp": 32 // tp}),
            oef=oef,
            paper={"dhelix": (2.0, 17.0)},
        )
        for tp, oef in ((8, 0.5787), (16, 0.6673), (32, 0.5172))
    ),
    # What deviations come from: the same with other values of what the paper leaves open.
    Case(
        *("dhelix-a40", "phi-moe", 3072, {"dp": 16, "ep": 8, "pp": 4}, 24, 6),
        experts=2.5,
        paper={"wavelet": (4.2, 4.2), "dhelix": (25.8, 25.8)},
    ),
    *(
        Case(
            *("dhelix-a800", "llama-66b", 32768, {"tp": 8, "cp": 4, "pp": 2}),
            kv_heads=heads,
            paper={"dhelix": (24.0, 24.0)},
        )
        for heads in (16, 32)
    ),
    Case(
        *("dhelix-a800", "llama-25b", 8192, {"tp": 32, "dp": 2}),
        oef=0.5172,
        paper={"dhelix": (2.0, 29.0)},
    ),
    Case(
        *("dhelix-h100", "llama-39b", 8192, {"tp": 16, "dp": 2}),
        oef=0.6673,
        paper={"dhelix": (2.0, 17.0)},
    ),
    Case(
        *("dhelix-h100", "llama-39b", 8192, {"tp": 32}),
        oef=0.5172,
        paper={"dhelix": (2.0, 17.0)},
    ),
)


class Cost:
    """Costs of data sheets, with what a case says in their place.

    Args:
        cost: of data sheets.
        case: its OEF, and how much longer experts take.
    """

    def __init__(self, cost: AnalyticCost, case: Case) -> None:
        self.cost, self.factor, self.experts = cost, case.oef, case.experts

    def solo(self, op: Operator) -> float:
        of_experts = self.experts != 1 and op.part in ("fc1", "act", "fc2")
        return self.cost.solo(op) * (self.experts if of_experts else 1.0)

    def oef(self, comp: Operator, comm: Operator) -> float:
        if self.factor is None or comp.is_collective:
            return self.cost.oef(comp, comm)
        return self.factor


def graph_of(case: Case, step: TrainingStep, fabric: Fabric) -> Graph:
    """Return the operators of a step; AllToAll moves what experts have room for."""
    graph = build_step(step, fabric)

    def padded(op: Operator) -> Operator:
        if op.kind != "all_to_all":
            return op
        return op._replace(shape=(op.shape[0] * case.capacity, op.shape[1]))

    return replace(graph, ops=tuple(padded(op) for op in graph.ops))


def times_of(case: Case) -> dict[str, dict[str, float]]:
    """Return ms and exposed communication of the paper's step by policy; intra needs tp."""
    parallel = Parallel(**case.degrees, sequence=case.degrees.get("tp", 1) > 1)
    sequences = MOE_SEQUENCES if case.model == "phi-moe" else TOKENS // case.sequence
    whole = sequences // parallel.dp
    few, more = 4 * parallel.pp, 6 * parallel.pp
    figures: dict[str, dict[str, float]] = {}
    for label, (name, options) in POLICIES.items():
        if label == "intra" and parallel.tp == 1:
            continue
        lengths, exposed, comm = [], [], []
        for count in (few, more):
            step = step_of(
                case.model,
                parallel,
                sequence=case.sequence,
                layers=case.layers,
                micro_batches=count,
                regather=False,
                head=False,  # layers alone, with inputs kept, as when these figures were made
            )
            if case.kv_heads is not None:
                step = replace(step, layer=replace(step.layer, kv_heads=case.kv_heads))
            fabric = Fabric(load_cluster(case.cluster), parallel)
            cost = Cost(AnalyticCost(fabric, step.dtype, step.itemsize), case)
            graph = graph_of(case, step, fabric)
            schedule = planned(policy_of(name, options), graph, fabric, cost)
            timeline = simulate(schedule, cost)
            lengths.append(timeline.iteration_ms)
            exposed.append(timeline.exposed_comm_ms)
            comm.append(timeline.comm_ms)

        def scaled(of: list[float]) -> float:
            return of[1] + (of[1] - of[0]) / (more - few) * (whole - more)

        figures[label] = {
            "ms": scaled(lengths),
            "exposed_ms": scaled(exposed),
            "comm_ms": scaled(comm),
            "peak_gb": timeline.peak_memory_bytes / 1e9,
        }
    return figures


def entry_of(case: Case) -> dict[str, Any]:
    """Return a case's entry of the JSON file."""
    times = times_of(case)
    serial = times["serial"]
    gains = {label: 100 * (serial["ms"] / of["ms"] - 1) for label, of in times.items()}
    return {
        **asdict(case),
        "times": times,
        "communication": serial["comm_ms"] / serial["ms"],
        "gains": {label: gain for label, gain in gains.items() if label != "serial"},
    }


def off(entry: dict[str, Any], label: str) -> float | None:
    """Return points by which a gain is outside the paper's range; negative: below."""
    if label not in entry["paper"] or label not in entry["gains"]:
        return None
    least, most = entry["paper"][label]
    gain = entry["gains"][label]
    return float(min(0.0, gain - least) + max(0.0, gain - most))


def _shown(entry: dict[str, Any], label: str) -> str:
    paper = entry["paper"].get(label)
    gain = entry["gains"].get(label)
    left = "-" if paper is None else f"{paper[0]:.0f}"
    if paper is not None and not math.isclose(*paper):
        left += f" to {paper[1]:.0f}"
    return f"{left} \\| {'-' if gain is None else f'{gain:.0f}'}"


def table(content: dict[str, Any]) -> str:
    """Return the table of benchmarks/results/runs.md: gains in per cent, paper | simulated."""
    header = ["cluster", "model", "tokens", "ranks", "communication"]
    header += ["wgrad", "intra-batch", "Wavelet+", "DHelix", "off"]
    lines = []
    for entry in content["cases"]:
        ranks = " ".join(f"{name}{size}" for name, size in entry["degrees"].items())
        notes = [f", {entry['layers']} layers"] if entry["layers"] else []
        notes += [f", {entry['kv_heads']} KV heads"] if entry["kv_heads"] else []
        notes += [f", OEF {entry['oef']:.2f}"] if entry["oef"] else []
        notes += [f", experts {entry['experts']:g}x"] if entry["experts"] != 1 else []
        far = off(entry, "dhelix")
        lines.append(
            [
                entry["cluster"].removeprefix("dhelix-"),
                entry["model"] + "".join(notes),
                str(entry["sequence"]),
                ranks,
                f"{100 * entry['communication']:.0f}%",
                *(_shown(entry, label) for label in ("wgrad", "intra", "wavelet", "dhelix")),
                "-" if far is None else f"{far:+.0f}",
            ]
        )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cases = []
    for case in CASES:
        cases.append(entry_of(case))
        print(case.cluster, case.model, case.sequence, case.degrees, cases[-1]["gains"], flush=True)
    keep({"cases": cases}, options.out)


if __name__ == "__main__":
    main()
