"""Write the tables of the pages named in PAGES from the raw JSON under results/.

    python benchmarks/tables.py

A table stands between two comments, `<!-- results:NAME -->` and `<!-- /results:NAME -->`; the text
around it is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_foundation
import cpu_growth
import cpu_overhead
import cuda_host_time
import gpu_tables
import kernel_choice
import layers
import multi_host
from common import RESULTS, ROOT, conditions, markdown, percent, ratio

import tuning

HEURISTICS = RESULTS.parent / "heuristics" / "kernel_choice.json"
LABELS = {"ag_gemm": "AGGemm", "gemm_rs": "GemmRS", "gemm_ar": "GemmAR"}


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return document


def foundation() -> str:
    """Time over the unfused path, medium's in brackets, and overlap efficiency."""
    header = ["M, N, K"]
    for label in LABELS.values():
        header += [label, "overlap"]
    rows = []
    shapes = [*cpu_foundation.LARGE, *reversed(cpu_foundation.SMALL)]
    documents: list[dict[str, Any]] = []
    for m, n, k in shapes:
        line = [f"{m}, {n}, {k}"]
        for op in LABELS:
            documents.append(load(RESULTS / f"{op}_{m}x{n}x{k}_float32_w2.json"))
            fused = documents[-1]["methods"]["flux"]
            shares = (
                f"**{ratio(documents[-1], 'flux'):.2f}** ({ratio(documents[-1], 'medium'):.2f})"
            )
            line += [shares, percent(fused["overlap_efficiency"])]
        rows.append(line)
    return f"{markdown(header, rows)}\n\n{conditions(documents[0])}"


def overhead() -> str:
    """The three tables of cpu_overhead.py."""
    document = load(RESULTS / "overhead.json")
    return cpu_overhead.tables(document)


def growth() -> str:
    """Per op, M against ranks: flux over unfused, over the whole GEMM, and what limits it."""
    parts = []
    for op in cpu_growth.OPS:
        rows, last = [], None
        for m in cpu_growth.ROWS:
            line = [str(m)]
            for world in cpu_growth.WORLDS:
                path = RESULTS / "growth" / cpu_growth.file_name(op, m, world)
                if (ROOT / path).exists():
                    last = load(path)
                    line.append(
                        cpu_growth.cell(last, int(re.findall(r"(\d+) core", last["device"])[0]))
                    )
            if len(line) == len(cpu_growth.WORLDS) + 1:
                rows.append(line)
        if last is not None:
            header = ["M", *(f"{w} rank{'s' if w > 1 else ''}" for w in cpu_growth.WORLDS)]
            parts.append(f"**{op}**\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def cuda_host() -> str:
    """The table of cuda_host_time.py."""
    found, before = (
        load(RESULTS / f"{name}.json") for name in ("cuda_host_time", "cuda_host_time_before")
    )
    return cuda_host_time.table(found, before)


def tuned() -> str:
    """The tuner beside exhaustive search."""
    document = load(RESULTS / "tuning.json")
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{tuning.table(document['search'])}\n\n{document['device']}; {versions}; float32"


def hosts() -> str:
    """Every run between hosts, then hierarchical against flat."""
    documents = {
        path.stem: load(path) for path in sorted((ROOT / multi_host.RESULTS).glob("*bit*.json"))
    }
    return multi_host.tables(documents)


def layer() -> str:
    """Every run of layers.py, in the order of its cases and links."""
    paths = [RESULTS.parent / "layers" / layers.file_name(*case) for case in layers.runs()]
    return layers.table([load(path) for path in paths])


def chosen_kernels() -> str:
    """What the heuristics choose for the paper's shapes on a GPU."""
    return kernel_choice.paper_table(load(HEURISTICS))


def rated_kernels() -> str:
    """Our choice of kernels beside NVIDIA's model."""
    return kernel_choice.comparison_table(load(HEURISTICS))


TABLES: dict[str, Callable[[], str]] = {
    "cpu": foundation,
    "overhead": overhead,
    "growth": growth,
    "hosts": hosts,
    "layers": layer,
    "cuda_host": cuda_host,
    "tuning": tuned,
    "kernel_choice": chosen_kernels,
    "kernel_rating": rated_kernels,
    **gpu_tables.tables(),
}

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", gpu_tables.FOLDER / "README.md")


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The text of a page with these tables between their marks."""
    for name, make in tables.items():
        marks = rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)"
        if re.search(marks, text, re.DOTALL):
            table = make()
            text = re.sub(marks, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text, TABLES), encoding="utf-8")


if __name__ == "__main__":
    main()
