"""Write the tables of the pages named in PAGES, and their charts, from the raw JSON under results/.

    python benchmarks/tables.py [--check]

With `--check` it writes nothing, names the files that are out of date, and exits with 1 if there
are any. A table or a sentence stands between two comments, `<!-- results:NAME -->` and
`<!-- /results:NAME -->`; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import charts
import conclusions
import cpu_foundation
import cpu_growth
import cpu_overhead
import cuda_host_time
import dhelix_paper
import domino_hosts
import drawing
import gpu_tables
import kernel_choice
import kernel_counters
import layers
import multi_host
import op_simulator
import plan_hosts
import reliability
import scale
from common import (
    LINK_NAMES,
    RESULTS,
    ROOT,
    conditions,
    efficiency,
    load,
    markdown,
    percent,
    ratio,
    unbroken,
)

import tuning
from flux.core.knobs import Op

COUNTERS = RESULTS.parent / "emulated" / "kernel_counters.json"
HEURISTICS = RESULTS.parent / "heuristics" / "kernel_choice.json"
FRONT = "{op}_4096x8192x2048_2x1_{link}.json"
FOLDER = ROOT / "docs" / "contribute" / "results"


def foundation() -> str:
    """Time over the unfused path, medium's in brackets, and overlap efficiency."""
    header = ["M, N, K"]
    for op in Op:
        header += [op.label, "overlap"]
    rows = []
    shapes = [*cpu_foundation.LARGE, *reversed(cpu_foundation.SMALL)]
    documents: list[dict[str, Any]] = []
    for m, n, k in shapes:
        line = [unbroken(f"{m}, {n}, {k}")]
        for op in Op:
            documents.append(load(RESULTS / f"{op.name}_{m}x{n}x{k}_float32_w2.json"))
            fused = documents[-1]["methods"]["flux"]
            shares = (
                f"**{ratio(documents[-1], 'flux'):.2f}** ({ratio(documents[-1], 'medium'):.2f})"
            )
            line += [shares, percent(fused["overlap_efficiency"])]
        rows.append(line)
    return f"{markdown(header, rows)}\n\n{conditions(documents[0])}"


def front() -> str:
    """Two hosts at a large shape: flux and medium over unfused, and overlap efficiency."""
    header = ["link", "op", "flux", "one chunk per rank round a ring", "overlap efficiency"]
    rows = []
    for link in multi_host.RATES:
        for op in ("ag_gemm", "gemm_rs"):
            document = load(multi_host.RESULTS / FRONT.format(op=op, link=link))
            fused, medium = (f"{ratio(document, name):.2f}" for name in ("flux", "medium"))
            overlap = efficiency(document["methods"]["flux"])
            rows.append([unbroken(LINK_NAMES[link]), Op[op].label, f"**{fused}**", medium, overlap])
    return markdown(header, rows)


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


def counted_kernels() -> str:
    """Instructions of fused kernels for a tile, beside a plain one's."""
    return kernel_counters.table(load(COUNTERS))


def simulated_times() -> str:
    """Published times of fused ops beside simulated ones."""
    return op_simulator.table(load(op_simulator.RESULT))


def simulated_efficiencies() -> str:
    """The Flux paper's overlap efficiencies beside simulated ones."""
    return op_simulator.ranges_table(load(op_simulator.RESULT))


def domino() -> str:
    """Domino between two hosts beside Megatron's layers, Flux's and DeepSpeed's Domino."""
    return domino_hosts.table(load(domino_hosts.RESULT))


def simulated_variants() -> str:
    """What explains the rows that are off."""
    return op_simulator.variants_table(load(op_simulator.RESULT))


def simulated_hosts() -> str:
    """The Flux paper's figures between two hosts beside simulated ones."""
    return op_simulator.two_hosts_table(load(op_simulator.RESULT))


TABLES: dict[str, Callable[[], str]] = {
    "cpu": foundation,
    "front": front,
    "overhead": overhead,
    "growth": growth,
    "hosts": hosts,
    "layers": layer,
    "cuda_host": cuda_host,
    "tuning": tuned,
    "kernel_choice": chosen_kernels,
    "kernel_rating": rated_kernels,
    "kernel_counters": counted_kernels,
    "op_simulator": simulated_times,
    "op_simulator_paper": simulated_efficiencies,
    "plan_hosts": lambda: plan_hosts.table(load(plan_hosts.RESULT)),
    "plan_hosts_says": lambda: plan_hosts.conclusion(load(plan_hosts.RESULT)),
    "dhelix_paper": lambda: dhelix_paper.table(load(dhelix_paper.RESULT)),
    "domino_hosts": domino,
    "op_simulator_variants": simulated_variants,
    "op_simulator_hosts": simulated_hosts,
    "scale_weak": lambda: scale.table(load(scale.RESULT), "weak"),
    "scale_strong": lambda: scale.table(load(scale.RESULT), "strong"),
    "scale_across": lambda: scale.table(load(scale.RESULT), "across"),
    "scale_largest": lambda: scale.largest_sentence(load(scale.RESULT)),
    **conclusions.SENTENCES,
    "soak": reliability.soak,
    "endings": reliability.endings,
    "files": reliability.files,
    **gpu_tables.tables(),
}

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "use" / "domino.md",
    ROOT / "docs" / "kernels" / "kernels.md",
    ROOT / "docs" / "use" / "plan.md",
    ROOT / "docs" / "use" / "scale.md",
    ROOT / "docs" / "use" / "simulator.md",
    gpu_tables.FOLDER / "README.md",
    ROOT / RESULTS.parent / "runs.md",
    *sorted(FOLDER.glob("*.md")),
)


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The text of a page with these tables between their marks."""
    for name, make in tables.items():
        marks = rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)"
        if re.search(marks, text, re.DOTALL):
            table = make()
            text = re.sub(marks, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def outdated() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Yield every file that is out of date, and a function that returns its new text.

    A chart is out of date if its description is: other versions of matplotlib draw other bytes.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text, TABLES)
        if new != text:
            yield page, lambda new=new: new  # type: ignore[misc]
    for name, make in charts.CHARTS.items():
        path, chart = FOLDER / name, make()
        drawn = path.read_text(encoding="utf-8") if path.exists() else ""
        if drawing.described(drawn) != chart.description():
            yield path, lambda chart=chart: drawing.draw(chart)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page differs"
    )
    options = parser.parse_args()
    files = list(outdated())
    for path, text in files:
        if options.check:
            print(f"out of date: {path.relative_to(ROOT)}")
        else:
            path.write_text(text(), encoding="utf-8")
    sys.exit(1 if options.check and files else 0)


if __name__ == "__main__":
    main()
