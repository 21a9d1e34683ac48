"""The fused ops between hosts, over links of known speed, and what hierarchical orders save.

    python benchmarks/multi_host.py [--layouts 2x1 2x2] [--rates 1gbit] [--ops ag_gemm]

Hosts are network namespaces of this machine (flux/launch/hosts.py; needs root and iproute2).
float32, one thread per rank. One raw JSON per run goes to benchmarks/results/hosts/; tables go to
stdout.

`within` is overall time over max(wire time, GEMM + CPU time of communication); wire time is
what the bytes that the algorithm needs take on one direction of the link.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import (
    LINK_NAMES,
    bench_op,
    conditions,
    efficiency,
    markdown,
    milliseconds,
    percent,
    ratio,
    sizes,
    unbroken,
)

from flux.launch.hosts import parse_rate

RESULTS = Path("benchmarks", "results", "hosts")
SHAPES = [(4096, 8192, 2048), (2048, 4096, 2048), (4096, 4096, 1024), (2048, 2048, 512)]
RATES = ["500mbit", "1gbit", "2gbit"]
OPS = ["ag_gemm", "gemm_rs"]


def wire_ms(document: dict[str, Any]) -> float:
    """Least time on the busiest direction of a link: hosts are alike, so they share the bytes."""
    each = document["link_bytes_minimum"] / document["hosts"]
    return float(each * 8 / parse_rate(document["link_rate"]) * 1e3)


def row(document: dict[str, Any]) -> list[str]:
    methods = document["methods"]
    fused = methods["flux"]
    floor = max(wire_ms(document), fused["gemm_non_split_ms"] + fused["comm_cpu_ms"])
    return [
        f"{document['op']} {sizes(document)}",
        unbroken(LINK_NAMES.get(document["link_rate"], document["link_rate"])),
        f"**{ratio(document, 'flux'):.2f}**",
        *(milliseconds(methods[name]["overall_ms"]) for name in ("unfused", "medium", "flux")),
        milliseconds(fused["gemm_non_split_ms"]),
        milliseconds(wire_ms(document)),
        milliseconds(fused["comm_cpu_ms"]),
        " / ".join(efficiency(methods[name]) for name in ("flux", "medium")),
        percent(fused["bounded_efficiency"]),
        f"{fused['overall_ms'] / floor:.2f}",
        f"{fused['link_bytes'] / document['link_bytes_minimum']:.3f}",
    ]


HEADER = ["op M x N x K", "link", "flux/unfused", "unfused ms", "medium ms", "flux ms", "GEMM ms"]
HEADER += ["wire ms", "comm CPU ms", "overlap eff, medium's", "bounded eff", "within"]
HEADER += ["bytes/least"]


def run(
    op: str,
    shape: tuple[int, ...],
    layout: str,
    rate: str,
    repeats: int,
    name: str,
    knobs: list[str],
) -> dict[str, Any]:
    hosts, ranks = map(int, layout.split("x"))
    extra = ["--hosts", str(hosts), "--link-rate", rate, "--warmup", "1", *knobs]
    return bench_op(op, shape, hosts * ranks, repeats, RESULTS / f"{name}.json", extra)


def tuned(op: str, shape: tuple[int, ...], layout: str, rate: str) -> list[str]:
    """Knobs for a shape and a link, until there is a tuner that finds them.

    AGGemm: the default splits off the last quarter of what comes from another host, for the case
    that the wire is slower than the multiply of the own rows. Otherwise everything is there by
    then, and rows that come as one message and are computed as one cost the cores least. With 2048
    columns per rank the two take equally long at 500 Mbit/s on the machine of these figures.

    GemmRS: where the wire is slower than the multiply (a depth of some 900 per rank at 1 Gbit/s),
    what counts is how early the first rows leave: small slabs.
    """
    hosts, ranks = map(int, layout.split("x"))
    m, n, k = shape
    world = hosts * ranks
    gigabits = parse_rate(rate) / 1e9
    if op == "ag_gemm" and (gigabits >= 1 or n // world >= 2048):
        return ["--tile", f"{m // world}x{n // world}", "--comm-tile-rows", str(m // world)]
    if op == "gemm_rs" and gigabits * k / world < 900:
        rows = str(min(256, m // world // 2))
        return ["--tile", f"{rows}x{n}", "--comm-tile-rows", rows]
    return []


def name_of(op: str, shape: tuple[int, ...], layout: str, rate: str, order: str = "") -> str:
    return f"{op}_{'x'.join(map(str, shape))}_{layout}_{rate}{order and '_' + order}"


def place(document: dict[str, Any]) -> tuple[Any, ...]:
    """Return where a run stands in its table: by op, large shapes first, slow links first."""
    rate = parse_rate(document["link_rate"])
    return document["op"], -document["m"], -document["n"], -document["k"], rate


def tables(documents: dict[str, dict[str, Any]]) -> str:
    """Markdown of all runs by layout, then hierarchical against flat where both are there."""
    parts = []
    for layout in sorted({name.split("_")[3] for name in documents}):
        chosen = [n for n in documents if f"_{layout}_" in n and not n.endswith("_direct")]
        hosts, ranks = layout.split("x")
        chosen.sort(key=lambda n: place(documents[n]))
        parts.append(f"**{hosts} hosts with {ranks} rank{'s' if ranks != '1' else ''} each**")
        parts.append(markdown(HEADER, [row(documents[n]) for n in chosen]))
    compared = []
    for name, flat in documents.items():
        if name.endswith("_direct"):
            both = documents[name.removesuffix("_direct")], flat
            sent = [d["methods"]["flux"]["link_bytes"] / d["link_bytes_minimum"] for d in both]
            relative = ratio(both[0], "flux") / ratio(flat, "flux")
            compared.append([*row(flat)[:2], f"{relative:.2f}", *(f"{s:.2f}" for s in sent)])
    if compared:
        parts.append(
            "**Hierarchical against flat** (time, each over unfused in its own run; bytes)"
        )
        header = ["op M x N x K", "link", "time ratio", "hierarchical bytes/least", "flat"]
        parts.append(markdown(header, compared))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="ops to measure")
    parser.add_argument(
        "--layouts", nargs="+", default=["2x1", "2x2"], help="hosts x ranks of each"
    )
    parser.add_argument("--rates", nargs="+", default=RATES, help="rates of links, such as 1gbit")
    parser.add_argument("--shapes", nargs="+", help="problems MxNxK")
    parser.add_argument("--repeats", type=int, default=10, help="timed repeats")
    parser.add_argument("--no-flat", action="store_true", help="do not measure order=direct on 2x2")
    options = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes or []] or SHAPES
    documents = {}
    for layout in options.layouts:
        orders = [""] if layout.endswith("x1") or options.no_flat else ["", "direct"]
        for op in options.ops:
            for shape in shapes:
                for rate in options.rates:
                    for order in orders:
                        name = name_of(op, shape, layout, rate, order)
                        knobs = ["--order", order] if order else tuned(op, shape, layout, rate)
                        documents[name] = run(op, shape, layout, rate, options.repeats, name, knobs)
    print(tables(documents))
    print(f"\n{conditions(next(iter(documents.values())))}")


if __name__ == "__main__":
    main()
