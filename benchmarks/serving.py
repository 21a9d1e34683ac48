"""Whole models that answer prompts, in Transformers and vLLM: stock beside flux.

    python benchmarks/serving.py [--programs transformers] [--links none 1gbit] [--repeats 9]

Links other than `none` need root and iproute2: hosts are network namespaces. Needs the program that
is measured. A Llama-3 8B divided by 8, eight layers, random weights, float32, one thread per rank.
One raw JSON per run goes to benchmarks/results/serving/; the table goes to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import (
    LINK_NAMES,
    ROOT,
    conditions,
    interval_text,
    load,
    markdown,
    measured,
    unbroken,
)

from flux.bench.serve_report import phase_title

RESULTS = Path("benchmarks", "results", "serving")
TITLES = {"transformers": "Transformers", "vllm": "vLLM"}
PROGRAMS = tuple(TITLES)
LINKS = ("none", "1gbit", "10gbit")
LAYOUTS = ("1", "2")
"""Ranks of a host."""
PHASES = (("prefill", 512), ("prefill", 2048), ("decode", 1), ("decode", 8))


def runs(
    programs: Sequence[str] = PROGRAMS, links: Sequence[str] = LINKS
) -> Iterator[tuple[str, str, str]]:
    """Yield (program, link, ranks of a host)."""
    for program in programs:
        for link in links:
            for layout in LAYOUTS[1:] if link == "none" else LAYOUTS:
                yield program, link, layout


def path_of(program: str, link: str, layout: str) -> Path:
    """Return where the raw JSON of a run is."""
    return RESULTS / f"{program}_{link}_{layout}.json"


def run(program: str, link: str, layout: str, repeats: int) -> dict[str, Any]:
    ranks = int(layout) * (1 if link == "none" else 2)
    arguments = ["bench", "serve", "--program", program, "--nproc", str(ranks)]
    arguments += ["--repeats", str(repeats), *([] if link == "none" else ["--no-alone"])]
    arguments += ["--hosts", "2", "--link-rate", link] if link != "none" else []
    return measured(arguments, path_of(program, link, layout))


def documents(programs: Sequence[str] = PROGRAMS) -> list[dict[str, Any]]:
    """Return the raw JSON of all runs that were made."""
    paths = [path_of(*case) for case in runs(programs)]
    return [load(path) for path in paths if (ROOT / path).exists()]


def place_of(document: dict[str, Any]) -> str:
    """Return hosts, ranks and link of a run."""
    if document["hosts"] == 1:
        return f"one host, {document['world']} ranks"
    ranks = document["world"] // document["hosts"]
    link = document["link_rate"]
    return f"2 x {ranks}, {LINK_NAMES.get(link, link)}"


def title_of(document: dict[str, Any]) -> str:
    """Return program and version."""
    program = document["program"]
    return f"{TITLES[program]} {document['versions'][program]}"


def ratio_of(program: str, link: str, layout: str, kind: str, size: int) -> float:
    """Return the time of flux over stock in a phase."""
    phases = load(path_of(program, link, layout))["phases"]
    (ratio,) = (p["ratio_to_stock"] for p in phases if (p["kind"], p["size"]) == (kind, size))
    return float(ratio)


def conclusion() -> str:
    """Return what two hosts with a link of 1 Gbit/s gain, in words."""
    parts = []
    for program, title in TITLES.items():
        if (ROOT / path_of(program, "1gbit", "1")).exists():
            prefill, decode = (
                [ratio_of(program, "1gbit", "1", *phase) for phase in PHASES if phase[0] == kind]
                for kind in ("prefill", "decode")
            )
            parts.append(
                f"{title} takes {prefill[0]:.2f} and {prefill[1]:.2f} of its own time to the first "
                f"token of 512 and 2048 tokens, and {decode[0]:.2f} and {decode[1]:.2f} per output "
                "token of 1 and 8 sequences"
            )
    return f"**Between two hosts at 1 Gbit/s, {'; '.join(parts)}.**"


def row(document: dict[str, Any]) -> list[str]:
    """Return a run's line: its ratios to stock, and to one rank alone in brackets."""
    cells = [unbroken(title_of(document)), unbroken(place_of(document))]
    found = {(phase["kind"], phase["size"]): phase for phase in document["phases"]}
    for kind_and_size in PHASES:
        phase = found[kind_and_size]
        interval = interval_text(phase["ratio_to_stock_interval"])
        cell, alone = f"**{phase['ratio_to_stock']:.2f}**{interval}", phase.get("ratio_to_alone")
        cells.append(cell if alone is None else f"{cell} [{alone:.2f}]")
    return cells


def table(measured_runs: list[dict[str, Any]]) -> str:
    """Return a line for each run, with all of its phases."""
    header = ["program", "hosts x ranks", *(phase_title(*phase) for phase in PHASES)]
    lines = [row(document) for document in measured_runs]
    return f"{markdown(header, lines)}\n\n{conditions(measured_runs[0])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=PROGRAMS, help="programs to measure")
    parser.add_argument("--links", nargs="*", default=LINKS, help="rates of links between hosts")
    parser.add_argument("--repeats", type=int, default=9, help="timed repeats")
    options = parser.parse_args()
    print(table([run(*case, options.repeats) for case in runs(options.programs, options.links)]))


if __name__ == "__main__":
    main()
