"""What DHelix's paper shows besides bars: shares of communication, overlap, plans, parts, memory.

    python benchmarks/dhelix_parts.py      # a minute, nothing is measured

H. Wang et al., arXiv 2411.15871: table 1, figures 3, 4, 10 and 15, section 6.5. Rows beside the
paper's bars: dhelix_paper.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown
from dhelix_paper import Case, micro_batches_of, planner_of, times_of

from flux.machine.cluster import load_cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.graph import Operator
from flux.plan.model import Parallel, step_of
from flux.plan.policies import planned, policy_of
from flux.plan.policies.pairing import factor
from flux.plan.simulate import simulate
from flux.select.hardware import OVERLAP

RESULT = ROOT / "benchmarks" / "results" / "plan" / "dhelix_parts.json"
GIB = 2.0**30

# -- figure 3: shares of a step --------------------------------------------------------------------

_CP2, _CP4 = {"tp": 8, "cp": 2, "dp": 2, "pp": 2}, {"tp": 8, "cp": 4, "pp": 2}
LONG = Case("dhelix-a40", "llama-39b", 16384, _CP2)
LONGER = Case("dhelix-a40", "llama-39b", 32768, _CP4)
SHARES: tuple[tuple[Case, dict[str, float]], ...] = (
    (LONG, {"tp": 27, "cp": 28, "tp + cp": 55}),  # 27: 55 of figure 3 less 28 of section 6.4
    (LONGER, {"cp": 53}),
    (Case("dhelix-a40", "llama-25b", 16384, _CP2), {"tp": 29}),
    (Case("dhelix-a800", "llama-66b", 16384, _CP2), {"tp": 10}),
    (Case("dhelix-a40", "phi-moe", 3072, {"dp": 16, "ep": 8, "pp": 4}, 24, 6), {"ep": 34.3}),
    (Case("dhelix-a40", "llama-39b", 8192, {"tp": 8, "dp": 4, "pp": 2}), {}),
    (Case("dhelix-a40", "llama-39b", 16384, _CP2, sent_heads=8), {"tp + cp": 55, "cp": 28}),
    (Case("dhelix-a40", "llama-39b", 32768, _CP4, sent_heads=8), {"cp": 53}),
)


def shares(case: Case) -> dict[str, float]:
    """Return the parts of the first stage's time, in per cent, by group; "": computation."""
    _, _, cost, graph = planner_of(case, 1)
    sums: dict[str, float] = {}
    for op in graph.ops:
        if op.stage == 0:
            times = micro_batches_of(case) if op.micro >= 0 else 1
            base = op.group.partition(":")[0]
            sums[base] = sums.get(base, 0.0) + times * cost.solo(op)
    whole = sum(sums.values())
    return {group: 100 * time / whole for group, time in sums.items()}


def shares_table(content: dict[str, Any]) -> str:
    """Return figure 3's shares: paper | simulated."""
    columns = ("tp", "cp", "tp + cp", "ep")
    lines = []
    for entry in content["shares"]:
        of = entry["ours"] | {"tp + cp": entry["ours"].get("tp", 0) + entry["ours"].get("cp", 0)}
        paper = entry["paper"]
        cells = [
            f"{paper.get(name, '-')} \\| {of[name]:.0f}" if of.get(name) else "-"
            for name in columns
        ]
        lines.append([entry["name"], *cells])
    return markdown(["step", *columns], lines)


def name_of(case: Case) -> str:
    """Return a case as tables name it."""
    ranks = " ".join(f"{name}{size}" for name, size in case.degrees.items())
    heads = f", {case.sent_heads} KV heads sent" if case.sent_heads else ""
    return f"{case.cluster.removeprefix('dhelix-')}, {case.model}, {case.sequence}, {ranks}{heads}"


# -- table 1: volumes of Llama 3.1 405B ------------------------------------------------------------

TABLE_1 = (
    ({"dp": 64, "tp": 8, "pp": 16}, 8192, 32, (441, 0.98, 8.6, 0.17)),
    ({"dp": 128, "tp": 8, "pp": 16}, 8192, 16, (220, 0.3, 7.7, 0.15)),
    ({"dp": 8, "tp": 8, "pp": 16, "cp": 16}, 131072, 16, (3528, 7.84, 376, 7.52)),
)
"""Degrees, tokens of a sequence, micro-batches; local GB and s, GB and s between hosts."""
NVLINK_GBS, PORT_GBS = 450, 50
"""Of a GPU, one direction: "NVLINK (900GB/s)", and an eighth of "InfiniBand (3200Gbps)"."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 16384, 126, 128, 8, 128


def volumes(degrees: dict[str, int], sequence: int, micro_batches: int) -> dict[str, float]:
    """Return GB (of 2**30 bytes) that a GPU sends in a step, in bfloat16.

    A layer has 8 AllGathers and ReduceScatters of all tokens among 8 GPUs. Context parallelism
    sends keys and values forward, and these and their gradients backward; ``whole_tp``: if each of
    its ranks had the tokens of the whole sequence.
    """
    tp, cp, layers = degrees["tp"], degrees.get("cp", 1), LAYERS / degrees["pp"]
    tokens = sequence / cp
    local = layers * micro_batches * 8 * tokens * HIDDEN * 2 * (tp - 1) / tp / GIB
    passes = 3 * layers * micro_batches * sequence * (cp - 1) / cp * 2 * 2 * HEAD / tp / GIB
    return {
        "tp": local,
        "whole_tp": local * cp,
        "cp_all_heads": passes * HEADS,
        "cp_kv_heads": passes * KV_HEADS,
    }


def volumes_table(content: dict[str, Any]) -> str:
    """Return table 1 beside closed forms: paper | ours."""
    lines = []
    for entry in content["table_1"]:
        gb, seconds, far_gb, far_s = entry["paper"]
        ours = entry["ours"]
        local = ours["tp"]
        whole = f" ({ours['whole_tp']:.0f})" if ours["whole_tp"] > local else ""
        far = f"{ours['cp_all_heads']:.0f} ({ours['cp_kv_heads']:.0f})" if whole else "-"
        lines.append(
            [
                " ".join(f"{name}{size}" for name, size in entry["degrees"].items()),
                f"{gb} \\| {local:.0f}{whole}",
                f"{seconds} \\| {ours['whole_tp'] / NVLINK_GBS:.2f}",
                f"{far_gb} \\| {far}",
                f"{far_s} \\| {far_gb / PORT_GBS:.2f}",
            ]
        )
    header = ["ranks", "local GB", "local s", "GB between hosts", "s between hosts"]
    return markdown(header, lines)


# -- figure 4: overlap of two operators ------------------------------------------------------------

_GEMM = Operator("gemm", "gemm", "comp", "fwd", 0, "qkv", shape=(8192, 8192, 8192))
_FA = Operator("fa", "attention", "comp", "fwd", 0, "attention", shape=(1, 8, 8192, 8192, 128))
_C1 = Operator("c1", "all_gather", "intra", "fwd", 0, "ag1", shape=(8192, 8192), group="tp")
_C2 = Operator("c2", "all_to_all", "inter", "fwd", 0, "dispatch", shape=(8192, 8192), group="ep")
PAIRS = {"GEMM": _GEMM, "FA": _FA, "C1": _C1, "C2": _C2}


def heatmap(cluster: str) -> dict[str, dict[str, float]]:
    """Return the OEF that plans take of every two of figure 4's operators."""
    fabric = Fabric(load_cluster(cluster), Parallel(tp=8, dp=2, ep=2))
    cost = AnalyticCost(fabric, "bfloat16", 2)
    return {
        name: {other: max(factor(cost, a, b), 0.0) for other, b in PAIRS.items()}
        for name, a in PAIRS.items()
    }


def heatmap_table(content: dict[str, Any]) -> str:
    """Return figure 4 in words beside what plans take for each GPU."""
    words = {
        ("GEMM", "GEMM"): "does not overlap well",
        ("GEMM", "FA"): "does not overlap well, least beside FA's backward",
        ("FA", "FA"): "does not overlap well",
        ("GEMM", "C1"): "overlaps well, to various degrees",
        ("GEMM", "C2"): "overlaps well, to various degrees",
        ("FA", "C1"): "overlaps well, to various degrees",
        ("FA", "C2"): "overlaps well, to various degrees",
        ("C1", "C1"): "does not overlap well",
        ("C2", "C2"): "does not overlap well",
        ("C1", "C2"): "benefits: other links",
    }
    lines = [
        [f"{a} beside {b}", text, *(f"{pairs[a][b]:.2f}" for pairs in content["oef"].values())]
        for (a, b), text in words.items()
    ]
    gpus = [name.removeprefix("dhelix-").upper() for name in content["oef"]]
    return markdown(["operators", "paper", *gpus], lines)


# -- figure 10: plans of two clusters --------------------------------------------------------------

PLANS = ("dhelix-a40", "dhelix-a800")


def segments(cluster: str) -> list[list[list[str]]]:
    """Return the pairing of a layer of Llama 25B on 8 tensor-parallel ranks."""
    case = Case(cluster, "llama-25b", 8192, {"tp": 8})
    _, _, cost, graph = planner_of(case, 2)
    plan = policy_of("dhelix").pairing(graph, cost)  # type: ignore[attr-defined]
    return [[list(map(str, side)) for side in both] for both in plan.segments]


def plans_table(content: dict[str, Any]) -> str:
    """Return the segments of both clusters: forward ; backward."""
    found = [content["plans"][cluster] for cluster in PLANS]
    lines = []
    for number in range(max(map(len, found))):
        cells = []
        for of in found:
            both = of[number] if number < len(of) else []
            cells.append("; ".join(" ".join(side) or "-" for side in both))
        lines.append([str(number + 1), *cells])
    return markdown(["segment", "A40: forward; backward", "A800: forward; backward"], lines)


# -- figure 15: parts of DHelix --------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "TP": {"hides": "tp", "links": False, "wgrad": False},
    "CP": {"hides": "tp+cp", "links": False, "wgrad": False},
    "comm-comm": {"hides": "tp+cp", "wgrad": False},
    "wgrad": {"hides": "tp+cp"},
    "sends": {},
}
ABLATION = {
    "all heads": (LONG, LONGER),
    "all heads, OEF assumed": tuple(
        replace(case, overlap=OVERLAP["cuda"]) for case in (LONG, LONGER)
    ),
    "8 KV heads": tuple(replace(case, sent_heads=8) for case in (LONG, LONGER)),
}
PAPER_PARTS = {"a": (11.18, 22.5, 0.0, 5.0), "b": (5.37, 14.4, 7.0, 1.0)}
"""Gains of TP, CP, comm-comm and wgrad in per cent, test (a) and (b)."""


def parts(case: Case) -> dict[str, float]:
    """Return gains over 1F1B in per cent, each with the parts before it."""
    policies: dict[str, tuple[str, dict[str, Any]]] = {"serial": ("serial", {})}
    policies |= {part: ("dhelix", options) for part, options in PARTS.items()}
    times = times_of(case, policies)
    return {part: 100 * (times["serial"]["ms"] / times[part]["ms"] - 1) for part in PARTS}


def parts_table(content: dict[str, Any]) -> str:
    """Return figure 15: what each part adds to the gain, in points; paper | simulated."""
    lines = []
    for name, cases in content["parts"].items():
        for test, of in zip(PAPER_PARTS, cases, strict=True):
            steps = [0.0, *of.values()]
            added = [b - a for a, b in pairwise(steps)]
            paper = [f"{points:g}" for points in PAPER_PARTS[test]] + ["-"]
            cells = [f"{p} \\| {ours:.1f}" for p, ours in zip(paper, added, strict=True)]
            total = f"{sum(PAPER_PARTS[test]):.0f} \\| {steps[-1]:.0f}"
            lines.append([f"({test}), {name}", *cells, total])
    return markdown(["test", *PARTS, "all"], lines)


# -- section 6.5: memory ---------------------------------------------------------------------------

MEMORY_CASE = Parallel(tp=8, dp=4, pp=2, sequence=True)
PAPER_MEMORY = {"serial": 40, "dhelix": 39, "both ways": 32}


WAYS = {"ZeRO-1, inputs kept": (1, False), "no ZeRO, inputs gathered again": (0, True)}
"""(zero, regather)"""


def memory(zero: int, regather: bool) -> dict[str, float]:
    """Return the largest Llama, in billions of weights, whose step fits an A40.

    Layers as of Llama 25B. Of peaks at two numbers of layers, which are linear.
    ``both ways``: a pipeline each way, with weights and gradients of both; ``everything``: with
    two copies of the optimizer's states too, as section 3.3 says.
    """
    cluster = load_cluster("dhelix-a40")
    peaks: dict[str, list[float]] = {}
    counts = (28, 40)
    for layers in counts:
        step = step_of(
            *("llama-25b", MEMORY_CASE),
            sequence=8192,
            layers=layers,
            micro_batches=8,
            regather=regather,
            head=False,
            zero=zero,
        )
        fabric = Fabric(cluster, MEMORY_CASE)
        cost, graph = AnalyticCost(fabric, step.dtype, step.itemsize), build_step(step, fabric)
        for name in ("serial", "dhelix"):
            timeline = simulate(planned(policy_of(name), graph, fabric, cost), cost)
            peaks.setdefault(name, []).append(timeline.peak_memory_bytes)
        resident = step.resident(0)
        twice = resident["weights"] + resident["gradients"]
        peaks.setdefault("both ways", []).append(peaks["dhelix"][-1] + twice)
        peaks.setdefault("everything", []).append(peaks["dhelix"][-1] + sum(resident.values()))
    weights = step.weights_of(0) * MEMORY_CASE.tp / 1e9
    limit = cluster.device.memory_gb * 1e9
    found = {}
    for name, (few, more) in peaks.items():
        each = (more - few) / (counts[1] - counts[0])
        found[name] = weights * (counts[0] + (limit - few) / each)
    return found


def memory_table(content: dict[str, Any]) -> str:
    """Return section 6.5: billions of weights."""
    labels = {
        "serial": "Megatron-LM, one strand",
        "dhelix": "DHelix",
        "both ways": "pipelines both ways, two copies of weights and gradients",
        "everything": "the same, and of the optimizer's states",
    }
    lines = [
        [
            label,
            str(PAPER_MEMORY.get(name, "-")),
            *(f"{content['memory'][way][name]:.1f}" for way in WAYS),
        ]
        for name, label in labels.items()
    ]
    return markdown(["schedule", "paper", *WAYS], lines)


def content() -> dict[str, Any]:
    """Return the JSON file."""
    return {
        "shares": [
            {"name": name_of(case), "paper": paper, "ours": shares(case)} for case, paper in SHARES
        ],
        "table_1": [
            {"degrees": degrees, "paper": paper, "ours": volumes(degrees, sequence, micros)}
            for degrees, sequence, micros, paper in TABLE_1
        ],
        "oef": {f"dhelix-{name}": heatmap(f"dhelix-{name}") for name in ("a40", "a800", "h100")},
        "plans": {cluster: segments(cluster) for cluster in PLANS},
        "parts": {name: [parts(case) for case in cases] for name, cases in ABLATION.items()},
        "memory": {way: memory(*options) for way, options in WAYS.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    keep(content(), options.out)


if __name__ == "__main__":
    main()
