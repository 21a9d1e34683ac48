"""The fused ops between hosts, over links of known speed, and what hierarchical orders save.

    python benchmarks/multi_host.py [--layouts 2x1 2x2] [--rates 1gbit] [--ops ag_gemm] [--quick]

Hosts are network namespaces of this machine (flux/bench/hosts.py; needs root and iproute2).
float32, one thread per rank. One raw JSON per run goes to benchmarks/results/hosts/; tables go to stdout.

`within` is overall time over max(wire time, GEMM + CPU time of communication), where wire time is
what the bytes that the algorithm needs take on one direction of the link.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import bench_op, conditions, markdown, milliseconds, percent, ratio

from flux.bench.hosts import parse_rate

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
        f"{document['op']} {document['m']} x {document['n']} x {document['k']}",
        document["link_rate"],
        *(milliseconds(methods[name]["overall_ms"]) for name in ("unfused", "medium", "flux")),
        milliseconds(fused["gemm_non_split_ms"]),
        milliseconds(wire_ms(document)),
        milliseconds(fused["comm_cpu_ms"]),
        " / ".join(percent(methods[name]["overlap_efficiency"]) for name in ("flux", "medium")),
        percent(fused["bounded_efficiency"]),
        f"{fused['overall_ms'] / floor:.2f}",
        f"{fused['link_bytes'] / document['link_bytes_minimum']:.3f}",
        f"**{ratio(document, 'flux'):.2f}**",
    ]


HEADER = ["op M x N x K", "link", "unfused ms", "medium ms", "flux ms", "GEMM ms", "wire ms"]
HEADER += ["comm CPU ms", "overlap eff, medium's", "bounded eff", "within", "bytes/least"]
HEADER += ["flux/unfused"]


def run(
    op: str, shape: tuple[int, int, int], layout: str, rate: str, repeats: int, *knobs: str
) -> dict[str, Any]:
    hosts, ranks = map(int, layout.split("x"))
    m, n, k = shape
    name = f"{op}_{m}x{n}x{k}_{layout}_{rate}{''.join(knobs[1::2])}.json"
    extra = ["--hosts", str(hosts), "--link-rate", rate, "--warmup", "1", *knobs]
    return bench_op(
        op, m, n, k, world=hosts * ranks, repeats=repeats, target=RESULTS / name, extra=extra
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2"], help="HOSTSxRANKS")
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--shapes", nargs="+", help="MxNxK")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes or []] or SHAPES
    for layout in options.layouts:
        documents = [
            run(op, shape, layout, rate, options.repeats)
            for op in options.ops
            for shape in shapes
            for rate in options.rates
        ]
        print(f"\n**{layout.replace('x', ' hosts x ')} rank(s)**\n")
        print(markdown(HEADER, map(row, documents)))
        print(f"\n{conditions(documents[0])}")
        if layout.endswith("x1"):
            continue
        print("\nhierarchical over flat (order=direct), same run conditions:\n")
        table = []
        for document in documents:
            shape = (document["m"], document["n"], document["k"])
            flat = run(
                document["op"],
                shape,
                layout,
                document["link_rate"],
                options.repeats,
                "--order",
                "direct",
            )
            hierarchical = ratio(document, "flux") / ratio(flat, "flux")
            sent = [
                d["methods"]["flux"]["link_bytes"] / d["link_bytes_minimum"]
                for d in (document, flat)
            ]
            table.append([*row(document)[:2], f"{hierarchical:.2f}", *(f"{s:.2f}" for s in sent)])
        print(markdown(["op M x N x K", "link", "time ratio", "bytes/least", "flat"], table))


if __name__ == "__main__":
    main()
