"""How time grows with M and with the number of ranks, and what limits it where.

    python benchmarks/cpu_growth.py [--ops gemm_rs] [--worlds 1 2] [--rows 64 1024]

One raw JSON per run goes to benchmarks/results/cpu/growth/; one table per op goes to stdout.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from common import RESULTS, bench_op, conditions, markdown, milliseconds, repeats_for

from flux.core.knobs import OPS, Op
from flux.core.problem import Problem

N, K = 4096, 1024
ROWS = [1, 8, 64, 256, 1024, 2048, 4096, 8192]
WORLDS = [1, 2, 4, 8]
FEW_BYTES = 256 << 10


def bytes_received(op: str, m: int, world: int) -> int:
    """Bytes that each rank gets from its peers in one call."""
    problem = Problem(Op[op], m, N, K, "float32", world)
    times = 2 if problem.op.all_reduces else 1
    return times * (world - 1) * problem.chunk * problem.row_bytes


def limit(document: dict[str, Any], cores: int) -> str:
    """The larger part of the time, in a word."""
    fused = document["methods"]["flux"]
    if document["world"] * document["threads"] > cores:
        return "cores"
    if fused["gemm_non_split_ms"] > 0.8 * fused["overall_ms"]:
        return "GEMM"
    if bytes_received(document["op"], document["m"], document["world"]) < FEW_BYTES:
        return "wake-ups"
    return "copies" if fused["ect_ms"] > 0.5 * fused["overall_ms"] else "GEMM, then copies"


def cell(document: dict[str, Any], cores: int) -> str:
    fused, unfused = (document["methods"][name]["overall_ms"] for name in ("flux", "unfused"))
    return f"{milliseconds(fused)} ({milliseconds(unfused)}) {limit(document, cores)}"


def file_name(op: str, m: int, world: int) -> str:
    return f"{op}_{m}x{N}x{K}_float32_w{world}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="ops to measure")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="numbers of ranks")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows M")
    parser.add_argument("--repeats", type=int, help="timed repeats (default: depends on M)")
    options, extra = parser.parse_known_args()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for op in options.ops:
        table, document = [], None
        for m in options.rows:
            line = [str(m)]
            for world in options.worlds:
                target = RESULTS / "growth" / file_name(op, m, world)
                repeats = options.repeats or (15 if m > 1024 else repeats_for(m))
                document = bench_op(
                    op, m, N, K, world=world, repeats=repeats, target=target, extra=extra
                )
                line.append(cell(document, cores))
            table.append(line)
        print(f"\n**{op}**, N = {N}, K = {K}: flux ms (unfused ms), and what limits it\n")
        header = ["M", *(f"{world} rank{'s' if world > 1 else ''}" for world in options.worlds)]
        print(markdown(header, table))
        if document is not None:
            print(f"\n{conditions(document)}")


if __name__ == "__main__":
    main()
