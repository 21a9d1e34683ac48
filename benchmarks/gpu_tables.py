"""Tables of benchmarks/results/h200/README.md, from the raw JSON beside it.

benchmarks/tables.py writes them. Where a file is missing, the table is a line that says so and
names the command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, markdown, milliseconds, percent

FOLDER = ROOT / "benchmarks" / "results" / "h200"
COMMAND = "benchmarks/gpu_check.sh WORK_DIR"
LARGE = 1024
"""Rows from which on a shape is in the table of large ones."""

Document = dict[str, Any]


def share(ratio: Document | None) -> str:
    """A ratio of times and its interval."""
    if ratio is None:
        return "-"
    text, interval = f"{ratio['median']:.3f}", ratio.get("interval")
    return text if interval is None else f"{text} ({interval[0]:.3f} to {interval[1]:.3f})"


def kernel_name(name: str) -> str:
    """`flux_ag_gemm_sm90a_bf16_nk_128x256x64_2x1_cooperative` -> `128x256x64_2x1_cooperative`."""
    return name.split("_nk_")[-1].split("_kn_")[-1]


def _fastest(shape: Document, op: str) -> str | None:
    """The kernel of an op with the least median among those that are right."""
    names = [name for name in shape["median_ms"] if name.startswith(f"flux_{op}_sm")]
    return min(names, key=lambda name: (shape["median_ms"][name], name), default=None)


def _notes(document: Document, shapes: Sequence[Document]) -> str:
    """What is under a table: the device, the versions, and every complaint."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    text = f"{document['device']}; {versions}; medians of rounds, 90% intervals of ratios."
    wrong = [
        f"* **{s['op']} M = {s['m']}**: {complaint}"
        for s in shapes
        for complaint in s["complaints"]
    ]
    return "\n".join([text, "", *wrong]) if wrong else text


def _size(shape: Document) -> str:
    return f"{shape['m']} x {shape['n']} x {shape['k']}"


def plain_kernels(document: Document, keep: Callable[[int], bool]) -> str:
    """torch's GEMM against the best plain kernel."""
    shapes = [s for s in document["shapes"] if keep(s["m"]) and s["baseline"] in s["median_ms"]]
    rows = []
    for shape in shapes:
        base, best = shape["baseline"], _fastest(shape, "gemm")
        rows.append(
            [
                _size(shape),
                milliseconds(shape["median_ms"][base]),
                f"{shape['tflops'][base]:.0f}",
                "-" if best is None else kernel_name(best),
                "-" if best is None else share(shape["vs_torch"][best]),
            ]
        )
    base = shapes[0]["baseline"] if shapes else "torch.mm"
    header = ["M x N x K", f"{base} ms", "TFLOP/s", "best plain kernel", f"time over {base}"]
    return f"{markdown(header, rows)}\n\n{_notes(document, shapes)}"


def fused_kernels(document: Document, op: str, keep: Callable[[int], bool]) -> str:
    """The kernels of an op, with nobody to wait for, against torch's GEMM and the plain kernel."""
    rows, shapes = [], []
    for shape in document["shapes"]:
        best = _fastest(shape, op)
        if shape["op"] != op or not keep(shape["m"]) or best is None:
            continue
        shapes.append(shape)
        row = [
            _size(shape),
            kernel_name(best),
            milliseconds(shape["median_ms"][best]),
            share(shape["vs_torch"].get(best)),
            share(shape["vs_plain"].get(best)),
        ]
        if op == "gemm_rs":
            reduction = shape["median_ms"].get("reduce")
            row.append("-" if reduction is None else milliseconds(reduction))
        rows.append(row)
    header = ["M x N x K", "kernel", "ms", "over torch's GEMM", "over the same plain kernel"]
    if op == "gemm_rs":
        header.append("reduction of 8 slots, ms")
    return f"{markdown(header, rows)}\n\n{_notes(document, shapes)}"


def loopback(document: Document) -> str:
    """Overlap over PCIe: the heuristic's knobs, and the best of those that were swept."""
    header = ["op, W, M", "GEMM ms", "comm ms", "unfused ms", "flux ms", "overlap eff.",
              "bounded eff.", "best of the sweep"]  # fmt: skip
    rows, wrong = [], []
    for shape in document["shapes"]:
        title = f"{shape['op']}, {shape['world']}, {shape['m']}"
        wrong += [f"* **{title}**: {complaint}" for complaint in shape["complaints"]]
        methods = {n: m for n, m in shape["methods"].items() if m["overall_ms"] is not None}
        flux, unfused = methods.get("flux"), methods.get("unfused")
        if flux is None or unfused is None:
            continue
        swept = {name: m for name, m in methods.items() if name.startswith("flux ")}
        best = min(swept, key=lambda name: (swept[name]["overall_ms"], name), default=None)
        efficiency, interval = flux["overlap_efficiency"], flux["overlap_efficiency_interval"]
        shown = percent(efficiency)
        if interval is not None:
            shown += f" ({interval[0]:.0%} to {interval[1]:.0%})"
        rows.append(
            [
                title,
                milliseconds(flux["gemm_non_split_ms"]),
                milliseconds(flux["comm_ms"]),
                milliseconds(unfused["overall_ms"]),
                milliseconds(flux["overall_ms"]),
                shown,
                percent(flux["bounded_efficiency"]),
                "-" if best is None else f"{best}: {milliseconds(swept[best]['overall_ms'])} ms",
            ]
        )
    text = (
        "The link is PCIe, the peers' memory is in the host. Bounded efficiency is the share of "
        "what can be hidden at all: docs/use/metrics.md."
    )
    return "\n".join([markdown(header, rows), "", text, *wrong])


def virtual(documents: Sequence[Document]) -> str:
    """Results of all ranks on one GPU."""
    rows = []
    for document in documents:
        size = f"{document['m']} x {document['n']} x {document['k']}"
        for name, method in document["methods"].items():
            error = method["max_abs_err"]
            right = "wrong: " + "; ".join(method["wrong"]) if method.get("wrong") else "right"
            rows.append(
                [
                    f"{document['op']}, W = {document['world']}, {size}",
                    name,
                    "-" if error is None else f"{error:.2g}",
                    right,
                ]
            )
    return markdown(["op", "method", "largest error", "against float64"], rows)


def _load(folder: Path, name: str) -> Document | None:
    path = folder / name
    if not path.exists():
        return None
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def missing(name: str) -> str:
    """What stands where a file is missing."""
    return f"Not measured yet: `{COMMAND}` on a machine with a Hopper GPU writes `{name}`."


def tables(folder: Path = FOLDER) -> dict[str, Callable[[], str]]:
    """By the name of their marks, what makes the tables from the files of a folder."""

    def of(name: str, make: Callable[[Document], str]) -> Callable[[], str]:
        def table() -> str:
            document = _load(folder, name)
            return missing(name) if document is None else make(document)

        return table

    def all_virtual() -> str:
        names = [f"virtual_{op}.json" for op in ("ag_gemm", "gemm_rs", "gemm_ar")]
        found = [d for d in (_load(folder, name) for name in names) if d is not None]
        return virtual(found) if found else missing("virtual_*.json")

    def status() -> str:
        files = sorted(path.name for path in folder.glob("*.json"))
        if files:
            return f"Measured: {', '.join(f'`{name}`' for name in files)}."
        return "**Nothing has been measured yet.** The raw JSON of the tables below is not there."

    def large(m: int) -> bool:
        return m >= LARGE

    def small(m: int) -> bool:
        return m < LARGE

    def always(_: int) -> bool:
        return True

    def fused(keep: Callable[[int], bool]) -> Callable[[Document], str]:
        return lambda d: "\n\n".join(fused_kernels(d, op, keep) for op in ("ag_gemm", "gemm_rs"))

    kernels, fp8 = "kernels.json", "kernels_e4m3.json"
    return {
        "h200_status": status,
        "h200_plain": of(kernels, lambda d: plain_kernels(d, large)),
        "h200_ag_gemm": of(kernels, lambda d: fused_kernels(d, "ag_gemm", large)),
        "h200_gemm_rs": of(kernels, lambda d: fused_kernels(d, "gemm_rs", large)),
        "h200_loopback": of("loopback.json", loopback),
        "h200_virtual": all_virtual,
        "h200_fp8_plain": of(fp8, lambda d: plain_kernels(d, always)),
        "h200_fp8_fused": of(fp8, fused(always)),
        "h200_small_plain": of(kernels, lambda d: plain_kernels(d, small)),
        "h200_small_fused": of(kernels, fused(small)),
    }
