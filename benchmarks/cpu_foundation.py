"""The fused ops against the unfused path over gloo: 2 ranks, 1 thread each, float32.

    python benchmarks/cpu_foundation.py [--ops ag_gemm gemm_rs] [--quick]

One raw JSON per run goes to benchmarks/results/cpu/; the table goes to stdout.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import (
    RESULTS,
    bench_op,
    conditions,
    markdown,
    milliseconds,
    percent,
    ratio,
    repeats_for,
    sizes,
)

from flux.core.knobs import OPS

WORLD = 2
LARGE = [(2048, 4096, 2048), (4096, 4096, 1024), (1024, 4096, 1024)]
SMALL = [(m, 4096, 1024) for m in (1, 16, 64, 256)]


def row(document: dict[str, Any]) -> list[str]:
    methods = document["methods"]
    fused = methods["flux"]
    return [
        f"{document['op']} {sizes(document)}",
        *(milliseconds(methods[name]["overall_ms"]) for name in ("unfused", "medium", "flux")),
        milliseconds(fused["gemm_non_split_ms"]),
        milliseconds(fused["comm_ms"]),
        milliseconds(fused["ect_ms"]),
        percent(fused["overlap_efficiency"]),
        percent(fused["bounded_efficiency"]),
        f"{ratio(document, 'medium'):.3f}",
        f"**{ratio(document, 'flux'):.3f}**",
    ]


HEADER = ["op M x N x K", "unfused ms", "medium ms", "flux ms", "GEMM ms", "comm ms", "flux ECT ms"]
HEADER += ["overlap eff", "bounded eff", "medium/unfused", "flux/unfused"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="ops to measure")
    parser.add_argument("--quick", action="store_true", help="take 15 repeats for every shape")
    options, extra = parser.parse_known_args()
    documents = []
    for op in options.ops:
        for m, n, k in LARGE + SMALL:
            target = RESULTS / f"{op}_{m}x{n}x{k}_float32_w{WORLD}.json"
            repeats = 15 if options.quick else repeats_for(m)
            documents.append(
                bench_op(op, m, n, k, world=WORLD, repeats=repeats, target=target, extra=extra)
            )
    print(markdown(HEADER, map(row, documents)))
    print(f"\n{conditions(documents[0])}")


if __name__ == "__main__":
    main()
