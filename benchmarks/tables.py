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

import centauri_hosts
import centauri_paper
import charts
import conclusions
import cpu_overhead
import cuda_host_time
import dhelix_hosts
import dhelix_paper
import dhelix_parts
import domino_hosts
import domino_paper
import drawing
import few_rows
import flux_paper
import gpu_kernels
import gpu_loopback
import gpu_schedulers
import gpu_streams
import kernel_choice
import kernel_counters
import layers
import moe_hosts
import moe_simulator
import multi_host
import one_host
import op_simulator
import plan_hosts
import published_runs
import reliability
import scale
import serving
import tile_scheduler
from common import (
    LINK_NAMES,
    RESULTS,
    ROOT,
    efficiency,
    load,
    markdown,
    ratio,
    unbroken,
    versions,
)

import tuning
from flux.core.knobs import Op

FRONT = "{op}_4096x8192x2048_2x1_{link}.json"
GPU = gpu_kernels.RESULT.parent
LATER_GPU = GPU.parent / "h200"
FOLDER = ROOT / "docs" / "contribute" / "results"


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


def hosts() -> str:
    """Return every run between hosts, then hierarchical against flat."""
    documents = {
        path.stem: load(path) for path in sorted((ROOT / multi_host.RESULTS).glob("*bit*.json"))
    }
    return multi_host.tables(documents)


def cuda_host() -> str:
    """Return what the host does for a call on GPUs, now and before."""
    documents = (load(RESULTS / f"cuda_host_time{part}.json") for part in ("", "_before"))
    return cuda_host_time.table(*documents)


def tuned() -> str:
    """Return the tuner beside exhaustive search."""
    document = load(RESULTS / "tuning.json")
    return (
        f"{tuning.table(document['search'])}\n\n{document['device']}; {versions(document)}; float32"
    )


def of(make: Callable[..., str], path: Path, *arguments: Any) -> Callable[[], str]:
    """Return a function that makes a table of one raw JSON."""
    return lambda: make(load(path), *arguments)


TABLES: dict[str, Callable[[], str]] = {
    "cpu": one_host.shapes_table,
    "front": front,
    "overhead": of(cpu_overhead.tables, RESULTS / "overhead.json"),
    "growth": one_host.growth_table,
    "hosts": hosts,
    "gpu_kernels": of(gpu_kernels.table, gpu_kernels.RESULT),
    "gpu_kernels_e4m3": of(gpu_kernels.table, GPU / "kernels_e4m3.json"),
    "gpu_loopback": of(gpu_loopback.best_table, LATER_GPU / "loopback.json"),
    "gpu_streams": of(gpu_streams.table, GPU / "streams.json"),
    "gpu_kernels_h200": of(gpu_kernels.table, LATER_GPU / "kernels.json"),
    "gpu_schedulers": of(gpu_schedulers.table, LATER_GPU / "tile_scheduler.json"),
    "layers": lambda: layers.table([load(layers.path_of(*case)) for case in layers.runs()]),
    "cuda_host": cuda_host,
    "tuning": tuned,
    "kernel_choice": of(kernel_choice.paper_table, kernel_choice.RESULT),
    "kernel_rating": of(kernel_choice.comparison_table, kernel_choice.RESULT),
    "kernel_counters": of(kernel_counters.table, kernel_counters.RESULT),
    "op_simulator": of(op_simulator.table, op_simulator.RESULT),
    "op_simulator_paper": of(op_simulator.ranges_table, op_simulator.RESULT),
    "op_simulator_sweeps": of(op_simulator.sweeps_table, op_simulator.RESULT),
    "few_rows": of(few_rows.table, few_rows.RESULT),
    "moe_simulator": of(moe_simulator.table, moe_simulator.RESULT),
    "moe_simulator_others": of(moe_simulator.other_table, moe_simulator.RESULT),
    "moe": of(moe_hosts.table, moe_hosts.RESULT),
    "tile_scheduler": of(tile_scheduler.table, tile_scheduler.RESULT),
    "plan_hosts": of(plan_hosts.table, plan_hosts.RESULT),
    "plan_hosts_says": of(plan_hosts.conclusion, plan_hosts.RESULT),
    "published_runs": of(published_runs.table, published_runs.RESULT),
    "flux_paper": of(flux_paper.table, flux_paper.RESULT),
    "dhelix_hosts": of(dhelix_hosts.table, dhelix_hosts.RESULT),
    "dhelix_gains": of(dhelix_paper.table, dhelix_paper.RESULT),
    "dhelix_variants": of(dhelix_paper.table, dhelix_paper.RESULT, True),
    "dhelix_hidden": of(dhelix_paper.hidden_table, dhelix_paper.RESULT),
    "dhelix_tflops": of(dhelix_paper.tflops_table, dhelix_paper.RESULT),
    "dhelix_shares": of(dhelix_parts.shares_table, dhelix_parts.RESULT),
    "dhelix_volumes": of(dhelix_parts.volumes_table, dhelix_parts.RESULT),
    "dhelix_oef": of(dhelix_parts.heatmap_table, dhelix_parts.RESULT),
    "dhelix_plans": of(dhelix_parts.plans_table, dhelix_parts.RESULT),
    "dhelix_parts": of(dhelix_parts.parts_table, dhelix_parts.RESULT),
    "dhelix_memory": of(dhelix_parts.memory_table, dhelix_parts.RESULT),
    **{name: of(make, centauri_paper.RESULT) for name, make in centauri_paper.TABLES.items()},
    "centauri_hybrids": of(centauri_hosts.table, centauri_hosts.RESULT, True),
    "domino_hosts": of(domino_hosts.table, domino_hosts.RESULT),
    "domino_paper": of(domino_paper.table, domino_paper.RESULT),
    "domino_orders": of(domino_paper.orders_table, domino_paper.RESULT),
    "domino_speeds": of(domino_paper.speeds_table, domino_paper.RESULT),
    "op_simulator_variants": of(op_simulator.variants_table, op_simulator.RESULT),
    "op_simulator_experts": of(op_simulator.experts_table, op_simulator.EXPERTS_RESULT),
    "op_simulator_hosts": of(op_simulator.two_hosts_table, op_simulator.RESULT),
    "serving": lambda: serving.table(serving.documents()),
    "serving_says": serving.conclusion,
    "scale_weak": of(scale.table, scale.RESULT, "weak"),
    "scale_strong": of(scale.table, scale.RESULT, "strong"),
    "scale_across": of(scale.table, scale.RESULT, "across"),
    "scale_largest": of(scale.largest_sentence, scale.RESULT),
    **conclusions.SENTENCES,
    "soak": reliability.soak,
    "endings": reliability.endings,
    "files": reliability.files,
}

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "use" / "dhelix.md",
    ROOT / "docs" / "use" / "domino.md",
    ROOT / "docs" / "kernels" / "kernels.md",
    ROOT / "docs" / "use" / "plan.md",
    ROOT / "docs" / "use" / "scale.md",
    ROOT / "docs" / "use" / "simulator.md",
    ROOT / RESULTS.parent / "centauri.md",
    ROOT / RESULTS.parent / "dhelix.md",
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
