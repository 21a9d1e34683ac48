"""DHelix's comparison with Megatron-LM, intra-batch overlap and Wavelet+, in the simulator.

    python benchmarks/dhelix_paper.py      # some minutes, nothing is measured

H. Wang et al., arXiv 2411.15871, section 6. The paper gives ranges for most of its bars; degrees of
parallelism that it does not name are assumed. A step's time grows by a constant amount with each
micro-batch, so two short steps are simulated, and the time of the paper's batch follows. Figures
other than bars: dhelix_parts.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
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
from flux.select.hardware import OVERLAP

RESULT = ROOT / "benchmarks" / "results" / "plan" / "dhelix_paper.json"
TOKENS = 8 * 2**20
"""Of a step of Llama and GPT: "8 million tokens"."""
MOE_SEQUENCES = 1600
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "wgrad": ("serial", {"wgrad_overlap": True}),
    "intra": ("intra_batch", {}),  # chunks: one of each tensor-parallel rank, as MegaScale's rings
    "wavelet": ("wavelet", {}),
    "wavelet_free": ("wavelet", {"events": False}),
    "dhelix": ("dhelix", {}),
}
NAMES = {
    "intra": "intra-batch",
    "wavelet": "Wavelet+, barriers",
    "wavelet_free": "Wavelet+, none",
    "dhelix": "DHelix",
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
        overlap: effectiveness by hosts, in place of the cluster file's.
        sent_heads: of keys and values, sent by context parallelism; None: all heads.
        experts: time of experts' operators over that of data sheets.
        variant: a row with other values of what the paper leaves open.
        paper: gains over Megatron-LM in per cent, from the text: least and most.
    """

    cluster: str
    model: str
    sequence: int
    degrees: dict[str, int]
    layers: int | None = None
    capacity: int = 1
    overlap: dict[int, float] = field(default_factory=dict)
    sent_heads: int | None = None
    experts: float = 1.0
    variant: bool = False
    paper: dict[str, Range] = field(default_factory=dict)


_BASELINES = dict.fromkeys(("wavelet", "wavelet_free"), (6.0, 16.0)) | {"intra": (5.0, 15.0)}
_LLAMA = {**_BASELINES, "dhelix": (27.0, 40.0)}
_GPT = {**_BASELINES, "dhelix": (26.0, 40.0)}
_LONG = {"dhelix": (22.0, 39.0)}
_MOE = dict.fromkeys(("wavelet", "wavelet_free"), (4.2, 4.2)) | {"dhelix": (25.8, 25.8)}
_MOE_A800 = dict.fromkeys(("wavelet", "wavelet_free"), (4.0, 4.0)) | {"dhelix": (15.0, 15.0)}
_A40, _A800, _H100 = "dhelix-a40", "dhelix-a800", "dhelix-h100"
_BIG = {"tp": 8, "dp": 4, "pp": 2}
_BIG_CP = {"tp": 8, "cp": 2, "dp": 2, "pp": 2}
_PHI = {"dp": 16, "ep": 8, "pp": 4}


def _cases() -> list[Case]:
    """Return the paper's bars, and then variants: with other values of what it leaves open."""
    small, small_cp = {"tp": 4, "dp": 16}, {"tp": 4, "cp": 2, "dp": 8}
    cases = [
        Case(_A40, model, 8192, small if model in ("llama3-8b", "gpt-6.7b") else _BIG, paper=paper)
        for paper, models in (
            (_LLAMA, ("llama3-8b", "llama-25b", "llama-39b")),
            (_GPT, ("gpt-6.7b", "gpt-18b", "gpt-30b")),
        )
        for model in models
    ]
    cases += [
        replace(
            case,
            sequence=16384,
            degrees=small_cp if case.degrees is small else _BIG_CP,
            paper=_LONG,
        )
        for case in cases
    ]
    cases += [
        Case(_A40, "phi-moe", 3072, {"dp": 32, "ep": 8, "pp": 2}, 12, 6),
        Case(_A40, "phi-moe", 3072, _PHI, 24, 6, paper=_MOE),
        Case(_A800, "llama-66b", 16384, _BIG_CP, paper={"dhelix": (7.0, 7.0)}),
        Case(
            *(_A800, "llama-66b", 32768, {"tp": 8, "cp": 4, "pp": 2}),
            paper={"dhelix": (24.0, 24.0)},
        ),
        Case(_A800, "phi-moe", 3072, _PHI, 32, 8, paper=_MOE_A800),
    ]
    for cluster, gpus, most in ((_A800, 64, 29.0), (_H100, 32, 17.0)):
        cases += [
            Case(
                *(cluster, "llama-25b", 8192, {"tp": tp, "dp": gpus // tp}),
                paper={"dhelix": (2.0, most)},
            )
            for tp in (8, 16, 32)
        ]
    by_name = {(case.cluster, case.model, case.sequence): case for case in cases[:18]}
    assumed = {"overlap": OVERLAP["cuda"]}
    others: list[tuple[Case, dict[str, Any]]] = [
        *((case, assumed) for case in cases[-6:]),
        *((by_name[_A40, model, 16384], assumed) for model in ("llama-39b", "gpt-30b")),
    ]
    for model in ("llama3-8b", "gpt-6.7b"):
        others.append((by_name[_A40, model, 8192], {"degrees": {"tp": 8, "dp": 8}}))
    for model in ("llama3-8b", "llama-25b", "llama-39b"):
        others.append((by_name[_A40, model, 16384], {"sent_heads": 8}))
    for sequence in (16384, 32768):
        others.append((by_name[_A800, "llama-66b", sequence], {"sent_heads": 8}))
    others.append((by_name[_A40, "phi-moe", 3072], {"experts": 2.0}))
    for tp in (16, 32):
        degrees = {"tp": tp, "dp": 32 // tp}
        others.append((cases[-1], {"model": "llama-39b", "degrees": degrees}))
    return cases + [replace(case, variant=True, **changes) for case, changes in others]


CASES = _cases()


class Cost:
    """Costs of data sheets, with what a case says in their place.

    Args:
        cost: of data sheets.
        case: how much longer experts take.
    """

    def __init__(self, cost: AnalyticCost, case: Case) -> None:
        self.cost, self.experts = cost, case.experts

    def solo(self, op: Operator) -> float:
        of_experts = self.experts != 1 and op.part in ("fc1", "act", "fc2")
        return self.cost.solo(op) * (self.experts if of_experts else 1.0)

    def oef(self, comp: Operator, comm: Operator) -> float:
        return self.cost.oef(comp, comm)


def graph_of(case: Case, step: TrainingStep, fabric: Fabric) -> Graph:
    """Return the operators of a step, with the paper's volumes.

    AllToAll moves what experts have room for. Context parallelism sends keys and values of all
    heads, and again in backward: table 1 and section 6.4 (see dhelix_parts.py).
    """
    graph = build_step(step, fabric)
    layer = step.layer
    sent = (case.sent_heads or layer.heads) // layer.kv_heads

    def changed(op: Operator) -> Operator:
        times = case.capacity if op.kind == "all_to_all" else 1
        if op.part == "ag_kv":
            times = sent * (2 if op.role == "dgrad" else 1)
        return op._replace(shape=(op.shape[0], op.shape[1] * times)) if times > 1 else op

    if step.parallel.cp > 1 and not any(op.part == "ag_kv" for op in graph.ops):
        raise ValueError("context parallelism has no operator ag_kv, which this script rates")
    return replace(graph, ops=tuple(map(changed, graph.ops)))


def planner_of(case: Case, micro_batches: int) -> tuple[TrainingStep, Fabric, Cost, Graph]:
    """Return a case's step of so many micro-batches, without embedding and head."""
    parallel = Parallel(**case.degrees, sequence=case.degrees.get("tp", 1) > 1)
    step = step_of(
        *(case.model, parallel),
        sequence=case.sequence,
        layers=case.layers,
        micro_batches=micro_batches,
        regather=False,  # the paper's layer has 14 operators forward and 18 backward
        cp_kind="all_gather",  # a collective by itself, which strands can hide
        head=False,
    )
    cluster = load_cluster(case.cluster)
    fabric = Fabric(replace(cluster, overlap=case.overlap or cluster.overlap), parallel)
    cost = Cost(AnalyticCost(fabric, step.dtype, step.itemsize), case)
    return step, fabric, cost, graph_of(case, step, fabric)


def micro_batches_of(case: Case) -> int:
    """Return the micro-batches of the paper's step."""
    sequences = MOE_SEQUENCES if case.model == "phi-moe" else TOKENS // case.sequence
    return int(sequences // case.degrees.get("dp", 1))


def times_of(
    case: Case, policies: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, float]]:
    """Return ms and exposed communication of the paper's step by policy.

    Intra-batch needs tensor parallelism, and the paper leaves it out over NVLink: "neglectable".
    """
    pp, whole = case.degrees.get("pp", 1), micro_batches_of(case)
    few, more = 4 * pp, 6 * pp
    planners = [planner_of(case, count) for count in (few, more)]
    figures: dict[str, dict[str, float]] = {}
    for label, (name, options) in policies.items():
        if label == "intra":
            if "tp" not in case.degrees or case.cluster != _A40:
                continue
            options = {"chunks": case.degrees["tp"]}
        lengths, exposed, comm = [], [], []
        for _, fabric, cost, graph in planners:
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


def ring_ms(case: Case) -> float:
    """Return what a ring of context parallelism can hide at most of the paper's step.

    Attention of one of ``cp`` parts of the keys runs while the next part is sent, so (cp - 1) / cp
    of it. Megatron-LM has such a ring; the graphs here gather before attention.
    """
    cp = case.degrees.get("cp", 1)
    step, _, cost, graph = planner_of(case, 1)
    found = {(op.part, op.role): cost.solo(op) for op in graph.ops if op.layer == 0}
    pairs = ((found.get((part, role), 0.0) for part in ("attention", "ag_kv")) for role in ROLES)
    layer = sum(min((cp - 1) / cp * attention, sent) for attention, sent in pairs)
    return layer * max(step.stages) * (micro_batches_of(case) + step.parallel.pp - 1)


ROLES = ("fwd", "dgrad")


def tflops(case: Case, ms: float) -> float:
    """Return TFLOPS of a GPU as Megatron-LM counts them: attention without its causal mask."""
    _, _, _, graph = planner_of(case, 1)
    count = 0.0
    for op in graph.ops:
        if op.kind == "gemm":
            count += 2.0 * math.prod(op.shape)
        elif op.kind == "attention":
            batch, heads, queries, _, width = op.shape
            passes = 1 if op.role == "fwd" else 2
            count += 4.0 * passes * batch * heads * queries * case.sequence * width
    return count * micro_batches_of(case) / case.degrees.get("pp", 1) / ms / 1e9


def entry_of(case: Case) -> dict[str, Any]:
    """Return a case's entry of the JSON file."""
    times = times_of(case, POLICIES)
    serial, wgrad = times["serial"], times["wgrad"]["ms"]
    megatron = wgrad - ring_ms(case)
    return {
        **asdict(case),
        "times": times,
        "communication": serial["comm_ms"] / serial["ms"],
        "megatron_ms": megatron,
        **{
            f"gains{name}": {
                label: 100 * (base / of["ms"] - 1)
                for label, of in times.items()
                if of is not serial
            }
            for name, base in (("", serial["ms"]), ("_wgrad", wgrad), ("_megatron", megatron))
        },
        "hidden": {
            label: (serial["ms"] - of["ms"]) / serial["comm_ms"]
            for label, of in times.items()
            if of is not serial
        },
        "covered": {
            label: 1 - of["exposed_ms"] / serial["exposed_ms"]
            for label, of in times.items()
            if of is not serial
        },
        "tflops": {
            "megatron": tflops(case, megatron),
            "dhelix": tflops(case, times["dhelix"]["ms"]),
        },
    }


def off(entry: dict[str, Any], label: str) -> float | None:
    """Return points by which a gain is outside the paper's range; negative: below."""
    if label not in entry["paper"] or label not in entry["gains"]:
        return None
    least, most = entry["paper"][label]
    gain = entry["gains"][label]
    return float(min(0.0, gain - least) + max(0.0, gain - most))


def _published(entry: dict[str, Any], label: str) -> str:
    paper = entry["paper"].get(label)
    if paper is None:
        return "-"
    return f"{paper[0]:.0f}" + ("" if math.isclose(*paper) else f" to {paper[1]:.0f}")


def _row(entry: dict[str, Any]) -> list[str]:
    """Return the cells that name a case."""
    ranks = " ".join(f"{name}{size}" for name, size in entry["degrees"].items())
    notes = [f", {entry['layers']} layers"] if entry["layers"] else []
    notes += [f", {entry['sent_heads']} KV heads"] if entry["sent_heads"] else []
    notes += [", OEF assumed"] if entry["overlap"] else []
    notes += [f", experts {entry['experts']:g}x"] if entry["experts"] != 1 else []
    cluster, model = entry["cluster"].removeprefix("dhelix-"), entry["model"] + "".join(notes)
    return [cluster, model, str(entry["sequence"]), ranks]


_HEADER = ["cluster", "model", "tokens", "ranks"]


def table(content: dict[str, Any], variants: bool = False) -> str:
    """Return gains over 1F1B in per cent: paper | simulated (points outside of the range)."""
    header = [*_HEADER, "communication", *NAMES.values()]
    header += ["DHelix over wgrad", "DHelix over wgrad and ring"]
    lines = []
    for entry in content["cases"]:
        if entry["variant"] != variants:
            continue
        cells = []
        for label in NAMES:
            gain, far = entry["gains"].get(label), off(entry, label)
            shown = "-" if gain is None else f"{gain:.0f}"
            note = f" ({far:+.0f})" if far is not None and round(far) else ""
            cells.append(f"{_published(entry, label)} \\| {shown}{note}")
        for base in ("wgrad", "megatron"):
            cells.append(f"{entry[f'gains_{base}']['dhelix']:.0f}")
        lines.append([*_row(entry), f"{100 * entry['communication']:.0f}%", *cells])
    return markdown(header, lines)


def hidden_table(content: dict[str, Any]) -> str:
    """Return hidden communication by row: time saved over communication | no longer exposed."""
    paper = {"intra": "26", "wavelet": "40", "wavelet_free": "40", "dhelix": "83"}
    lines = []
    for entry in content["cases"]:
        if entry["variant"]:
            continue
        published = paper if (entry["cluster"], entry["sequence"]) == (_A40, 8192) else {}
        cells = []
        for label in NAMES:
            both = [entry[kind].get(label) for kind in ("hidden", "covered")]
            ours = "-" if both[0] is None else " \\| ".join(f"{100 * of:.0f}" for of in both)
            cells.append(f"{published.get(label, '-')} \\| {ours}")
        lines.append([*_row(entry), *cells])
    return markdown([*_HEADER, *NAMES.values()], lines)


def tflops_table(content: dict[str, Any]) -> str:
    """Return TFLOPS of a GPU of Llama 66B, paper | simulated."""
    paper = {16384: (186.0, 199.0), 32768: (160.9, 199.7)}
    lines = []
    for entry in content["cases"]:
        if entry["model"] != "llama-66b":
            continue
        cells = [
            f"{published:.0f} \\| {entry['tflops'][label]:.0f}"
            for label, published in zip(
                ("megatron", "dhelix"), paper[entry["sequence"]], strict=True
            )
        ]
        lines.append([*_row(entry), *cells])
    return markdown([*_HEADER, "Megatron-LM", "DHelix"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cases = []
    for case in CASES:
        cases.append(entry_of(case))
        print(case.cluster, case.model, case.sequence, case.degrees, cases[-1]["gains"], flush=True)
    keep({"cases": cases}, options.out)


if __name__ == "__main__":
    main()
