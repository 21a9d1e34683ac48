"""Domino's comparison with Megatron-LM on one to four DGX-H100, in the simulator.

    python benchmarks/domino_paper.py      # two minutes, nothing is measured

G. Wang et al., arXiv 2409.15241, and its authors' page in DeepSpeed (blogs/deepspeed-domino). Bars
of the figures have no numbers; the text says "up to". Tensor parallelism is over all GPUs. Sizes of
a batch are those of the authors' scripts (DeepSpeedExamples, training/DeepSpeed-Domino), 64
sequences of 512 tokens for GPT-3, 8 and 16 of 1,024 for Llama-2, and such beside them.

Heads. GPT-3 13B and Llama-2 13B have 40, which 16 and 32 ranks do not divide, and Megatron-LM
refuses that. The scripts have 32 heads for every model, so here 13B has 32 of 160: its GEMMs,
collectives and operations of attention are those of 40 heads of 128.

Kernels. The scripts pass no option for FlashAttention, and Megatron's norms, activations and casts
are kernels of PyTorch; the paper also names torch.compile and CUDA graphs. *Compiled* and *eager*
bracket that: what takes longer beside communication makes its share smaller.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, keep, markdown

from flux.bench.shapes import Layer
from flux.core.spans import covered
from flux.machine.cluster import load_cluster
from flux.plan.compare import HEADROOM
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph
from flux.plan.model import Parallel, TrainingStep
from flux.plan.policies import Policy, policy_of
from flux.plan.policies.domino import ORDERS, DominoPolicy
from flux.plan.sample import StepLayout
from flux.plan.simulate import Timeline

RESULT = ROOT / "benchmarks" / "results" / "plan" / "domino_paper.json"
CLUSTER = "domino-dgx-h100"
MODELS = {  # GPT-3: arXiv 2005.14165, table 2.1; Llama-2: 2307.09288; heads: see above
    "GPT-3 2.7B": (Layer(2560, 10240, 32, 32, 80, False), 32, 51200),
    "GPT-3 13B": (Layer(5120, 20480, 32, 32, 160, False), 40, 51200),
    "Llama-2 7B": (Layer(4096, 11008, 32, 32, 128, True), 32, 32000),
    "Llama-2 13B": (Layer(5120, 13824, 32, 32, 160, True), 40, 32000),
}
RANKS = (8, 16, 32)  # 1, 2 and 4 nodes
BATCHES = ((512, 16), (512, 32), (512, 64), (1024, 8), (1024, 16), (1024, 32))
KERNELS = {"compiled": {}, "eager": {"eager": True, "unfused_attention": True}}


class Joined(DominoPolicy):
    """The 2D split of the paper: all slices wait for each other at the end of a layer's forward."""

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return the graph, cut, in which a layer's last norms need all of its collectives."""
        graph = super().rewrite(graph, fabric, cost)
        ends: dict[int, list[int]] = {}
        for number, op in enumerate(graph.ops):
            if op.part == "ar2":
                ends.setdefault(op.layer, []).append(number)
        deps = [
            tuple(dict.fromkeys((*before, *ends[op.layer])))
            if op.part == "bda2" and op.role == "fwd"
            else before
            for op, before in zip(graph.ops, graph.deps, strict=True)
        ]
        return replace(graph, deps=tuple(deps))


POLICIES: dict[str, Policy] = {
    "serial": policy_of("serial"),
    "wgrad": policy_of("serial", {"wgrad_overlap": True}),
    **{order: DominoPolicy(2, order=order) for order in ORDERS},
    "rows": DominoPolicy(2),
    "rows of 4": DominoPolicy(4),
    "columns": DominoPolicy(1, 2),
    "2D": DominoPolicy(2, 2),
    "2D, joined": Joined(2, 2, "grouped"),
}


class Case(NamedTuple):
    """A bar of the paper's figures: a model, all GPUs, a batch; and kernels."""

    model: str
    tp: int
    sequence: int
    batch: int
    kernels: str

    def layout(self) -> StepLayout:
        """Return the graph of the step."""
        layer, layers, vocabulary = MODELS[self.model]
        step = TrainingStep(
            *(self.model, layer, layers, "float16", Parallel(tp=self.tp)),
            *(self.sequence, self.batch, 1),
            zero=0,
            vocabulary=vocabulary,
            **KERNELS[self.kernels],
        )
        return StepLayout(load_cluster(CLUSTER), step)


def cases() -> Iterator[Case]:
    """Yield all bars."""
    for model in MODELS:
        for tp in RANKS:
            for sequence, batch in BATCHES:
                for kernels in KERNELS:
                    yield Case(model, tp, sequence, batch, kernels)


WATCHED = Case("GPT-3 13B", 32, 512, 64, "eager")
"""Where orders differ most."""


def hidden_by_collective(timeline: Timeline) -> dict[str, float]:
    """Return the share of each collective of the middle layer beside which something is computed.

    By pass, part and slice: "forward ar1 0" is AllReduce after attention of slice 0. Of columns the
    mean.
    """
    graph = timeline.schedule.graph
    spans = list(zip(timeline.start, timeline.end, strict=True))
    comp = [span for span, op in zip(spans, graph.ops, strict=True) if not op.is_collective]
    middle, shares = max(op.layer for op in graph.ops) // 2, {}
    for (start, end), op in zip(spans, graph.ops, strict=True):
        if op.is_collective and op.layer == middle:
            beside = covered((max(start, s), min(end, e)) for s, e in comp if s < end and e > start)
            name = f"{'forward' if op.role == 'fwd' else 'backward'} {op.part} {op.piece}"
            shares.setdefault(name, []).append(beside / (end - start))
    return {name: sum(values) / len(values) for name, values in shares.items()}


def entry(case: Case) -> dict[str, Any]:
    """Return an entry of the JSON file."""
    layout, found = case.layout(), {}
    for name, policy in POLICIES.items():
        timeline = layout.timeline(policy)
        found[name] = {
            "ms": timeline.iteration_ms,
            "comm_ms": timeline.comm_ms,
            "hidden": 1 - timeline.exposed_comm_ms / timeline.comm_ms,
            "order": getattr(policy, "turns", ""),
        }
        if case == WATCHED and name in (*ORDERS, "2D", "2D, joined"):
            found[name]["collectives"] = hidden_by_collective(timeline)
        if name == "serial":
            peak = timeline.peak_memory_bytes / 1e9
    serial = found["serial"]
    return {
        **case._asdict(),
        "communication": serial["comm_ms"] / serial["ms"],
        "bound": serial["ms"] / (serial["ms"] - serial["comm_ms"]),
        "peak_gb": peak,
        "fits": peak < load_cluster(CLUSTER).device.memory_gb * (1 - HEADROOM),
        "policies": found,
    }


SPEEDS = (*("wgrad", "staggered", "grouped", "blocks", "rows of 4", "columns", "2D", "2D, joined"),)


def _range(values: list[float], scale: float = 1.0, digits: int = 2, unit: str = "") -> str:
    low, high = (f"{scale * value:.{digits}f}" for value in (min(values), max(values)))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def speedup(row: dict[str, Any], policy: str, over: str = "serial") -> float:
    """Return the time under ``over`` over that under a policy."""
    return float(row["policies"][over]["ms"] / row["policies"][policy]["ms"])


def speeds_table(content: dict[str, Any]) -> str:
    """Return speed-ups over serial by model, GPUs and kernels, over all batches that fit."""
    header = ["model", "GPUs", "kernels", "comm.", "bound", *SPEEDS]
    lines = []
    for model in MODELS:
        for tp in RANKS:
            for kernels in KERNELS:
                rows = chosen(content, model, tp, kernels)
                lines.append(
                    [
                        *(model, str(tp), kernels),
                        _range([row["communication"] for row in rows], 100, 0, "%"),
                        _range([row["bound"] for row in rows]),
                        *(_range([speedup(row, name) for row in rows]) for name in SPEEDS),
                    ]
                )
    return markdown(header, lines)


def chosen(
    content: dict[str, Any], model: str = "", tp: int = 0, kernels: str = ""
) -> list[dict[str, Any]]:
    """Return rows that fit into memory, of models whose name begins so."""
    return [
        row
        for row in content["rows"]
        if row["fits"]
        and row["model"].startswith(model)
        and (row["tp"] == tp or not tp)
        and (row["kernels"] == kernels or not kernels)
    ]


def claims(content: dict[str, Any]) -> Iterator[tuple[str, str, list[str], str]]:
    """Yield what the paper says, its figure, ours for compiled and for eager kernels, and why."""

    def both(text: Callable[[list[dict[str, Any]]], str], **of: Any) -> list[str]:
        return [text(chosen(content, kernels=kernels, **of)) for kernels in KERNELS]

    def hidden(policy: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda rows: _range([row["policies"][policy]["hidden"] for row in rows], 100, 0, "%")

    def shares(rows: list[dict[str, Any]]) -> str:
        by_ranks = (max(r["communication"] for r in rows if r["tp"] == tp) for tp in RANKS)
        return ", ".join(f"{share:.0%}" for share in by_ranks)

    def most(rows: list[dict[str, Any]]) -> str:
        serial, wgrad = (
            max(speedup(r, "rows", over) for r in rows) for over in ("serial", "wgrad")
        )
        return f"{serial:.2f}; {wgrad:.2f}"

    def near(rows: list[dict[str, Any]]) -> str:
        best = max(speedup(r, n) / r["bound"] for r in rows for n in ("rows", "rows of 4"))
        return f"up to {best:.0%}"

    def beyond_rows(policy: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda rows: _range(
            [r["policies"][policy]["hidden"] - r["policies"]["rows"]["hidden"] for r in rows],
            100,
            0,
        )

    for what, paper, ours, why in (
        (
            "communication, GPT-3 13B on 1, 2, 4 nodes",
            "up to 43%",
            both(shares, model="GPT-3 13B"),
            0,
        ),
        ("communication, all models", "up to 47%", both(shares), 0),
        ("GPT-3 over serial; over wgrad, up to", "1.3", both(most, model="GPT-3"), 1),
        ("Llama-2 over serial; over wgrad, up to", "1.2", both(most, model="Llama-2"), 1),
        ("2 slices hide, 1 node", "up to 100%", both(hidden("rows"), tp=8), 2),
        ("4 slices hide, 1 node", "up to 100%", both(hidden("rows of 4"), tp=8), 2),
        ("2 slices hide, 4 nodes", "up to 100%", both(hidden("rows"), tp=32), 3),
        ("columns hide, 1 node", "50 to 70%", both(hidden("columns"), tp=8), 4),
        ("columns hide, 4 nodes", "50 to 70%", both(hidden("columns"), tp=32), 4),
        ("2D hides beyond rows, points", "below 0", both(beyond_rows("2D")), 5),
        ("the same, slices joined", "below 0", both(beyond_rows("2D, joined")), 6),
        ("of the speed without communication", "near-optimal", both(near), 7),
    ):
        yield what, paper, ours, WHY[why]


WHY = (
    "kernels decide, and the published share is between the two",
    "it is not said whether Megatron-LM hid AllReduce under weight gradients; by default it does",
    "what is left are AllReduces longer than what the other slice computes, and the ends of passes",
    "AllReduce takes longer than what there is to compute",
    "in forward the last part has nothing beside it: half at most; in backward weight gradients "
    "hide what they are long enough for",
    "parts join within a slice, and slices do not depend on each other: what rows hide across "
    "layers stays hidden",
    "all slices wait for each other at the end of a layer, as in the paper: the second slice's "
    "AllReduce of the MLP is exposed",
    "on one node",
)


def orders_table(content: dict[str, Any]) -> str:
    """Return what hides beside computation of each collective of a layer, by order."""
    (row,) = (r for r in content["rows"] if all(r[k] == v for k, v in WATCHED._asdict().items()))
    found = {name: of for name, of in row["policies"].items() if "collectives" in of}
    heads = list(next(iter(found.values()))["collectives"])
    lines = [
        [name, f"{speedup(row, name):.2f}", *(f"{of['collectives'][h]:.0%}" for h in heads)]
        for name, of in found.items()
    ]
    return markdown(["order", "over serial", *heads], lines)


def table(content: dict[str, Any]) -> str:
    """Return what the paper says beside ours, and why they differ."""
    lines = [[what, paper, *ours, why] for what, paper, ours, why in claims(content)]
    return markdown(["Domino", "paper", *KERNELS, "why"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for case in cases():
        rows.append(entry(case))
        print(*case, *(f"{n} {of['ms']:.1f}" for n, of in rows[-1]["policies"].items()), flush=True)
    content = {"command": "python benchmarks/domino_paper.py", "rows": rows}
    keep(content, options.out)
    print(table(content))


if __name__ == "__main__":
    main()
