"""A transformer layer with Megatron-core's linear layers and ours, in one host and between two.

    python benchmarks/layers.py [--models gpt3-175b] [--links none 1gbit] [--repeats 15]

Links other than `none` need root and iproute2: hosts are network namespaces, one rank on each.
Needs megatron-core. float32, two ranks, one thread per rank. One raw JSON per run goes to
benchmarks/results/layers/; the table goes to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import LINK_NAMES, conditions, interval_text, markdown, measured, milliseconds, unbroken

RESULTS = Path("benchmarks", "results", "layers")
# Name of the model, what its sizes are divided by, tokens of a sequence, sequences. With all tokens
# in one sequence attention makes most of the time; with few in each, it is the linear layers.
CASES = [
    ("gpt3-175b", 24, 256, 8),
    ("gpt3-175b", 12, 512, 1),
    ("llama2-70b", 16, 2048, 1),
]
LINKS = ["none", "500mbit", "1gbit", "2gbit"]

HEADER = ["model, tokens", "link", "phase", "ratio", "Megatron ms", "flux ms", "compute ms"]
HEADER += ["host ms", "exposed, Megatron's", "exposed, flux's"]


def runs(
    models: Sequence[str] | None = None, links: Sequence[str] = LINKS
) -> Iterator[tuple[str, int, int, int, str]]:
    """What is measured: cases, and links of each."""
    for case in CASES:
        if not models or case[0] in models:
            for link in links:
                yield (*case, link)


def path_of(model: str, scale: int, sequence: int, batch: int, link: str) -> Path:
    """Return where the raw JSON of a run is."""
    return RESULTS / f"{model}_{scale}_{sequence}x{batch}_{link}.json"


def run(
    model: str, scale: int, sequence: int, batch: int, link: str, repeats: int
) -> dict[str, Any]:
    arguments = ["bench", "model", "--model", model, "--scale", str(scale)]
    arguments += ["--sequence", str(sequence), "--batch", str(batch)]
    arguments += ["--repeats", str(repeats), "--warmup", "2"]
    arguments += ["--hosts", "2", "--link-rate", link] if link != "none" else []
    return measured(arguments, path_of(model, scale, sequence, batch, link))


def rows(document: dict[str, Any]) -> Iterable[list[str]]:
    for phase, figures in document["phases"].items():
        megatron, ours = figures["layers"]["megatron"], figures["layers"]["flux"]
        yield [
            unbroken(f"{document['model']} / {document['scale']},")
            + " "
            + unbroken(f"{document['sequence']} x {document['batch']}"),
            unbroken(LINK_NAMES.get(document["link_rate"] or "none", document["link_rate"])),
            phase,
            f"**{figures['ratio']:.2f}**" + interval_text(figures["ratio_interval"]),
            *(milliseconds(form["overall_ms"]) for form in (megatron, ours)),
            milliseconds(figures["compute_ms"]),
            milliseconds(ours["host_ms"]),
            *(milliseconds(form["exposed_ms"]) for form in (megatron, ours)),
        ]


def table(documents: list[dict[str, Any]]) -> str:
    """Every phase of every run, a line each."""
    lines = [line for document in documents for line in rows(document)]
    return f"{markdown(HEADER, lines)}\n\n{conditions(documents[0])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", help="models to measure (default: all)")
    parser.add_argument("--links", nargs="*", default=LINKS, help="rates of links between hosts")
    parser.add_argument("--repeats", type=int, default=11, help="timed repeats")
    options = parser.parse_args()
    wanted = runs(options.models, options.links)
    print(table([run(*case, options.repeats) for case in wanted]))


if __name__ == "__main__":
    main()
